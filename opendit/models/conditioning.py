"""Conditions of models: labels, or captions encoded as tokens and a pooled vector.

The condition ``y`` of a text model is a :class:`TextCondition` from a frozen encoder (CLIP, T5). For the text encoder
"bytes", which is part of the model, it is token ids (B, L) int64 from opendit.models.bytes_text. To train
classifier-free guidance, a dropped caption is replaced by the encoder's embedding of the empty string; see
:func:`where`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.models.layers import layer_norm


@dataclass(frozen=True)
class TextConfig:
    """The caption settings of a model's configuration."""

    # name of the encoder: "bytes" is part of the model; others (clip, t5) are frozen and outside of the model
    name: str
    width: int  # width of the encoder's tokens and of its pooled vector
    max_tokens: int  # number of tokens that every caption is padded or cut to, so that all batches have the same shape
    cross_attention: bool = False  # True if blocks attend to the tokens; False if only the pooled vector is used

    @property
    def inside(self) -> bool:
        """True if the encoder is part of the model, so that it is trained, averaged and saved with the model."""
        return self.name == "bytes"


@dataclass(frozen=True, eq=False)
class TextCondition:
    """Encoded captions.

    This is not a named tuple, because training plugins rebuild tuples, and some can't rebuild named ones. Plugins pass
    other objects through unchanged.

    Attributes:
        tokens: (B, L, Dt).
        mask: (B, L) bool, True for tokens and False for padding.
        pooled: (B, Dt).
        guidance: Guidance scale (B,), for models with the scale as an input.
        shortest: Number of tokens that every caption has at least, known without waiting for the device.
    """

    tokens: Tensor
    mask: Tensor
    pooled: Tensor
    guidance: Tensor | None = None
    shortest: int = field(default=0, kw_only=True)

    def __len__(self) -> int:
        return len(self.pooled)

    def __getitem__(self, rows: Any) -> "TextCondition":
        """Select captions by a slice, or by a list or tensor of indices or booleans, like rows of a tensor."""
        return self._each(lambda field: field[rows])

    @property
    def shape(self) -> torch.Size:
        return self.tokens.shape

    def to(self, *args: Any, **kwargs: Any) -> "TextCondition":
        """Apply ``Tensor.to`` to every field. A dtype only affects ``tokens`` and ``pooled``."""
        moved = self._each(lambda field: field.to(*args, **kwargs))
        # The guidance scale keeps its dtype, because 1000 times the scale is embedded like a time, and half precision
        # would round this number to a multiple of 8 or 16.
        guidance = None if self.guidance is None else self.guidance.to(moved.tokens.device)
        return replace(moved, mask=moved.mask.bool(), guidance=guidance)

    @property
    def full(self) -> bool:
        """True if no caption has padding, as far as the host knows."""
        return self.shortest >= self.tokens.shape[1]

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        return [self.tokens, self.mask, self.pooled, *([] if self.guidance is None else [self.guidance])]

    def expand_as(self, other: "TextCondition") -> "TextCondition":
        """Expand one caption to the batch size of ``other``, without a copy. Raises RuntimeError if L or Dt differ."""
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        expanded = TextCondition(*(own.expand_as(theirs) for own, theirs in pairs))
        return replace(expanded, shortest=self.shortest)

    def padded(self, length: int) -> "TextCondition":
        """Return the captions padded to ``length`` tokens with zeros. The mask is False for the padding."""
        rest = length - self.tokens.shape[1]
        if rest == 0:
            return self
        return replace(self, tokens=F.pad(self.tokens, (0, 0, 0, rest)), mask=F.pad(self.mask, (0, rest)))

    @staticmethod
    def cat(conditions: Sequence["TextCondition"]) -> "TextCondition":
        """Concatenate batches of captions, like torch.cat."""
        joined = TextCondition(*map(torch.cat, zip(*(c.tensors() for c in conditions), strict=True)))
        return replace(joined, shortest=min(c.shortest for c in conditions))

    def _each(self, function) -> "TextCondition":
        return replace(TextCondition(*map(function, self.tensors())), shortest=self.shortest)


Condition = Tensor | TextCondition


def joined(conditions: Sequence[Condition]) -> Condition:
    """Concatenate batches of conditions of the same type."""
    join: Any = getattr(conditions[0], "cat", torch.cat)
    return join(tuple(conditions))


def of_same_pictures(null: Condition, y: Condition) -> Condition:
    """Return the null condition of guidance with the picture tokens of ``y``. Without picture tokens, return ``null``
    unchanged.

    null: condition with batch size 1 or B. Picture tokens are in the field ``pooled``, (B, tokens, width)."""
    if not isinstance(y, TextCondition) or not isinstance(null, TextCondition) or y.pooled.dim() != 3:
        return null
    return replace(null if len(null) == len(y) else null[[0] * len(y)], pooled=y.pooled)


def same_length(one: Condition, other: Condition) -> tuple[Condition, Condition]:
    """Pad the captions of two conditions with zeros to the same number of tokens. Return labels and ids unchanged."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one, other
    length = max(one.tokens.shape[1], other.tokens.shape[1])
    return one.padded(length), other.padded(length)


def where(dropped: Tensor, null: Condition, y: Condition) -> Condition:
    """Replace the condition ``y`` by ``null`` for the samples where ``dropped`` (B,) bool is True.

    Conditions are labels (B,), ids (B, L) or TextConditions. ``null`` has the type of y and a batch size of 1 or B.
    """
    if isinstance(y, TextCondition):
        assert isinstance(null, TextCondition), "null is of y's kind"
        fields = zip(null.tensors(), y.tensors(), strict=True)
        chosen = TextCondition(*(_where(dropped, n, field) for n, field in fields))
        return replace(chosen, shortest=min(null.shortest, y.shortest))
    assert isinstance(null, Tensor), "null is of y's kind"
    return _where(dropped, null, y)


def _where(dropped: Tensor, null: Tensor, y: Tensor) -> Tensor:
    return torch.where(dropped.view(-1, *(1,) * (y.dim() - 1)), null.to(y.dtype), y)


def masked_mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the mean (B, D) over the tokens (B, L, D) for which mask (B, L) is True. The sum is computed in fp32; the
    result has the dtype of the tokens."""
    kept = mask.unsqueeze(-1)
    total = tokens.masked_fill(~kept, 0).sum(dim=1, dtype=torch.promote_types(tokens.dtype, torch.float32))
    return (total / kept.sum(dim=1)).to(tokens.dtype)


class CaptionEmbedder(nn.Module):
    """Embedding of encoded captions: a vector (B, D), which is added to the timestep's embedding for adaLN, and, with
    cross-attention, the tokens (B, L, D) that all blocks attend to.

    Tokens and pooled vector are normalised first, because the outputs of text encoders differ in scale by orders of
    magnitude. Imagen (Saharia et al. 2022, app. D) found the norm "critical" for text embeddings in attention and in
    pooling.
    """

    def __init__(self, text: TextConfig, dim: int):
        super().__init__()
        self.mlp: nn.Sequential = nn.Sequential(nn.Linear(text.width, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.tokens: nn.Linear | None = nn.Linear(text.width, dim) if text.cross_attention else None

    def forward(self, y: TextCondition) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the vector (B, D) and the context: tokens (B, L, D) with their mask (B, L) bool, or None without
        cross-attention."""
        dtype = cast(nn.Linear, self.mlp[0]).weight.dtype
        vector = self.mlp(layer_norm(y.pooled).to(dtype))
        if self.tokens is None:
            return vector, None
        return vector, (self.tokens(layer_norm(y.tokens).to(dtype)), y.mask)
