"""Convert classes or captions to a model's condition ``y``.

A conditioner also provides the null condition for guidance: the null class, or the embedding of the empty caption.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from opendit.common.utils import DataError
from opendit.config.flags import nearest
from opendit.encoders.text import TextEncoder
from opendit.encoders.vision import PictureTokens
from opendit.models.conditioning import (
    Condition,
    TextCondition,
    TextConfig,
    byte_tokens,
    encode_bytes,
    same_length,
    where,
)


class Conditioner(ABC):
    """Base class of objects that convert one kind of input to conditions, on one device."""

    encoder: Any = None  # a TextEncoder or PublishedText, if captions are encoded here
    pictures: Any = None  # PictureTokens, if the model attends to tokens of first frames

    def __init__(self, device: torch.device):
        self.device = device

    @abstractmethod
    def of_batch(self, batch: Any) -> Condition:
        """Return the condition of every sample in a ``Batch``."""

    @abstractmethod
    def null(self) -> Condition:
        """Return the null condition, as a batch of one."""

    def drop(self, y: Condition, dropped: Tensor) -> Condition:
        """Return ``y`` with the null condition for the samples where ``dropped`` (B,) bool is True."""
        return where(dropped, self.null(), y)

    def of_clips(self, y: Condition, pixels: Tensor | None, tokens: Tensor | None = None) -> Condition:
        """Add the tokens of first frames to ``y``, if the model attends to such tokens.

        pixels: clips (B, 3, T, H, W) in [-1, 1]. tokens: cached tokens (B, L, D), used instead of ``pixels``."""
        return y


class LabelConditioner(Conditioner):
    """Makes conditions from class numbers. The null class has the number ``num_classes``."""

    def __init__(self, num_classes: int, device: torch.device):
        super().__init__(device)
        self.num_classes = num_classes

    def of_batch(self, batch: Any) -> Tensor:
        return batch.y.to(self.device, non_blocking=True)

    def null(self) -> Tensor:
        return torch.full((1,), self.num_classes, device=self.device)


class CaptionConditioner(Conditioner):
    """Makes conditions from captions: embeddings of a frozen encoder, or token ids for the model's encoder ``bytes``.

    encoder: None for ``bytes``, or if all embeddings are cached. empty: cached tokens, mask and pooled vector of the
    empty caption, as a batch of one."""

    def __init__(
        self,
        text: TextConfig,
        device: torch.device,
        encoder: TextEncoder | None = None,
        empty: Sequence[Tensor] | None = None,
    ):
        super().__init__(device)
        self.text, self.encoder = text, encoder
        self._null: Condition | None = None if empty is None else TextCondition(*empty).to(device)

    def encode(self, captions: list[str], away: bool = False) -> Condition:
        """Return each caption's condition. away: True for negative prompts; some models encode them differently."""
        if self.text.inside:
            return encode_bytes(captions, self.text.max_tokens).to(self.device)
        assert self.encoder is not None  # runs with cached embeddings encode no captions
        return self.encoder.encode(captions).to(self.device)

    def cut(self, captions: list[str], name: str) -> list[str]:
        """Return [warning] if captions are too long for the encoder, else []. name: the warning's first word."""
        most = self.text.max_tokens
        count = byte_tokens if self.encoder is None else self.encoder.count_tokens
        if not (over := [tokens for tokens in count(captions) if tokens > most]):
            return []
        return [
            f"{name}: {len(over):,} of {len(captions):,} are longer than the {most:,} tokens that the model takes, and "
            f"are cut; the longest has {max(over):,}"
        ]

    def of_batch(self, batch: Any) -> Condition:
        if batch.embedding is not None and not self.text.inside:
            return TextCondition(*(part.to(self.device, non_blocking=True) for part in batch.embedding))
        if batch.text is None:
            raise DataError("the data set has no captions; put name.txt beside name.jpg, or leave --text_encoder out")
        return self.encode(list(batch.text))

    def null(self) -> Condition:
        if self._null is None:
            self._null = self.encode([""], away=True)
        return self._null


class PublishedConditioner(CaptionConditioner):
    """Makes conditions from captions with a public model's text encoders (opendit.encoders.published_text).

    encoder: a PublishedText; None if all embeddings are cached. guidance: guidance scale, for a network that embeds it.
    trim: cut a batch of cached embeddings to its longest caption."""

    def __init__(
        self,
        text: TextConfig,
        device: torch.device,
        encoder: Any,
        guidance: float | None = None,
        empty: Sequence[Tensor] | None = None,
        trim: bool = False,
        pictures: PictureTokens | None = None,
    ):
        super().__init__(text, device, encoder)
        self.guidance, self.trim, self.pictures = guidance, trim, pictures
        self._null = None if empty is None else self.of_embeddings(empty)

    def encode(self, captions: list[str], away: bool = False) -> TextCondition:
        assert self.encoder is not None, "the data set has embeddings, and the text encoders are not loaded"
        return self._with_guidance(cast(Any, self.encoder).encode(captions, away=away).to(self.device))

    def of_batch(self, batch: Any) -> Condition:
        return super().of_batch(batch) if batch.embedding is None else self.of_embeddings(batch.embedding)

    def of_embeddings(self, embedding: Sequence[Tensor]) -> TextCondition:
        """Convert cached embeddings on the CPU to a condition: tokens (B, L, D), mask (B, L) and pooled (B, P)."""
        tokens, mask, pooled = embedding
        lengths = mask.sum(1)
        if self.trim:
            longest = max(1, int(lengths.max()))
            tokens, mask = tokens[:, :longest], mask[:, :longest]
        y = TextCondition(*(part.to(self.device, non_blocking=True) for part in (tokens, mask, pooled)))
        return self._with_guidance(replace(y, shortest=int(lengths.min())))

    def drop(self, y: Condition, dropped: Tensor) -> Condition:
        return where(dropped, *same_length(self.null(), y))

    def of_clips(self, y: Condition, pixels: Tensor | None, tokens: Tensor | None = None) -> Condition:
        if tokens is not None and tokens.numel():
            return replace(cast(TextCondition, y), pooled=tokens.to(self.device, torch.float32))
        if self.pictures is None:
            return y
        assert pixels is not None, "a model that attends to tokens of first frames has clips, or their cached tokens"
        return replace(cast(TextCondition, y), pooled=self.pictures.of_clips(pixels))

    def _with_guidance(self, y: TextCondition) -> TextCondition:
        """Add the guidance scale to the condition if the network embeds it."""
        if self.guidance is None:
            return y
        return replace(y, guidance=torch.full((len(y),), self.guidance, device=y.tokens.device))


def preview_labels(num_classes: int, count: int) -> Tensor:
    """Return labels (count,) int64: all classes in turn, or evenly spaced classes if ``count`` is smaller."""
    return torch.arange(count) * num_classes // count if count < num_classes else torch.arange(count) % num_classes


def class_number(name: str, names: Sequence[str]) -> int:
    """Return the number of the class with this name, ignoring case. A class may have several names, separated by
    commas. Raises ValueError, with the name first, unless exactly one class matches."""
    wanted = name.strip().casefold()
    found = [number for number, each in enumerate(names) if each.strip().casefold() == wanted]
    found = found or [n for n, each in enumerate(names) if wanted in map(str.strip, each.casefold().split(","))]
    if not found:
        raise ValueError(f"{name[:80]!r}: no such class; did you mean {nearest(name, names)!r}?")
    if len(found) > 1:
        raise ValueError(f"{name[:80]!r}: numbers {', '.join(map(str, found))} are called so; give one of these")
    return found[0]
