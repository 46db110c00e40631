"""Turn captions into a pooled vector and tokens inside a model, by a frozen encoder or a trained one.

A text model's condition ``y`` is a :class:`TextCondition` of a frozen encoder (CLIP, T5), or, for ``bytes``, the
token ids (B, L) int64 of opendit.models.bytes_text, whose encoder is a part of the model. Classifier-free guidance
replaces a dropped caption by the encoder's own embedding of the empty string: see :func:`where`.
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
    """The part of a model's configuration that concerns captions."""

    name: str  # "bytes": an encoder inside the model; anything else: a frozen one outside of it (clip, t5)
    width: int  # of the encoder's tokens and of its pooled vector
    max_tokens: int  # every caption is padded or cut to it, so that all batches have one shape
    cross_attention: bool = False  # blocks attend to the tokens; without it only the pooled vector is used

    @property
    def inside(self) -> bool:
        """True if the encoder belongs to the model: it is trained, averaged and saved with it."""
        return self.name == "bytes"


@dataclass(frozen=True, eq=False)
class TextCondition:
    """Encoded captions: tokens (B, L, Dt), mask (B, L) bool (True: a token, False: padding), pooled (B, Dt); and for
    models to which the scale of guidance is an input, that scale (B,).

    shortest: a number of tokens that every caption has, as far as the host knows.

    Not a tuple: the training plugins rebuild tuples, and not every one can rebuild a named one; an object goes
    through them as it is.
    """

    tokens: Tensor
    mask: Tensor
    pooled: Tensor
    guidance: Tensor | None = None
    shortest: int = field(default=0, kw_only=True)

    def __len__(self) -> int:
        return len(self.pooled)

    def __getitem__(self, rows: Any) -> "TextCondition":
        """Captions by a slice, a list or a tensor of indices or booleans, as a tensor's rows."""
        return self._each(lambda field: field[rows])

    @property
    def shape(self) -> torch.Size:
        return self.tokens.shape

    def to(self, *args: Any, **kwargs: Any) -> "TextCondition":
        """``Tensor.to`` on every field; a dtype is that of tokens and pooled."""
        moved = self._each(lambda field: field.to(*args, **kwargs))
        # Times 1000 it is embedded as times are, and half precision would round that to 8 or 16.
        guidance = None if self.guidance is None else self.guidance.to(moved.tokens.device)
        return replace(moved, mask=moved.mask.bool(), guidance=guidance)

    @property
    def full(self) -> bool:
        """True if every caption has all tokens, as far as the host knows."""
        return self.shortest >= self.tokens.shape[1]

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        return [self.tokens, self.mask, self.pooled, *([] if self.guidance is None else [self.guidance])]

    def expand_as(self, other: "TextCondition") -> "TextCondition":
        """One caption for every one of ``other``, without a copy. Raises RuntimeError for another L or Dt."""
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        expanded = TextCondition(*(own.expand_as(theirs) for own, theirs in pairs))
        return replace(expanded, shortest=self.shortest)

    def padded(self, length: int) -> "TextCondition":
        """Captions with zeros after their tokens, which the mask leaves out, up to ``length``."""
        rest = length - self.tokens.shape[1]
        if rest == 0:
            return self
        return replace(self, tokens=F.pad(self.tokens, (0, 0, 0, rest)), mask=F.pad(self.mask, (0, rest)))

    @staticmethod
    def cat(conditions: Sequence["TextCondition"]) -> "TextCondition":
        """Several batches of captions as one, as torch.cat does for tensors."""
        joined = TextCondition(*map(torch.cat, zip(*(c.tensors() for c in conditions), strict=True)))
        return replace(joined, shortest=min(c.shortest for c in conditions))

    def _each(self, function) -> "TextCondition":
        return replace(TextCondition(*map(function, self.tensors())), shortest=self.shortest)


Condition = Tensor | TextCondition


def joined(conditions: Sequence[Condition]) -> Condition:
    """Several batches of conditions of one kind as one."""
    join: Any = getattr(conditions[0], "cat", torch.cat)
    return join(tuple(conditions))


def of_same_pictures(null: Condition, y: Condition) -> Condition:
    """Return the condition of guidance's other half, one row or B, with the pictures' tokens of y, if there are any:
    they have the place of the pooled vector, (B, tokens, width)."""
    if not isinstance(y, TextCondition) or not isinstance(null, TextCondition) or y.pooled.dim() != 3:
        return null
    return replace(null if len(null) == len(y) else null[[0] * len(y)], pooled=y.pooled)


def same_length(one: Condition, other: Condition) -> tuple[Condition, Condition]:
    """Return two conditions whose captions have the same number of tokens, padded with zeros; labels as they are."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one, other
    length = max(one.tokens.shape[1], other.tokens.shape[1])
    return one.padded(length), other.padded(length)


def where(dropped: Tensor, null: Condition, y: Condition) -> Condition:
    """``y`` with the rows that ``dropped`` (B,) bool marks replaced by ``null``, which expands to y.

    For labels (B,), ids (B, L) and TextConditions alike; null is of y's kind, with one row or as many as y.
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
    """Mean (B, D) over the tokens (B, L, D) that mask (B, L) bool keeps, summed in fp32, in the tokens' dtype."""
    kept = mask.unsqueeze(-1)
    total = tokens.masked_fill(~kept, 0).sum(dim=1, dtype=torch.promote_types(tokens.dtype, torch.float32))
    return (total / kept.sum(dim=1)).to(tokens.dtype)


class CaptionEmbedder(nn.Module):
    """Encoded captions to the vector (B, D) that joins the timestep's in adaLN and, with cross-attention, to the
    tokens (B, L, D) that every block attends to (projected once, here).

    Both inputs are normalised first: the outputs of text encoders differ in size by orders of magnitude, and Imagen
    (Saharia et al. 2022, app. D) found the norm "critical" for text embeddings in attention and in pooling.
    """

    def __init__(self, text: TextConfig, dim: int):
        super().__init__()
        self.mlp: nn.Sequential = nn.Sequential(nn.Linear(text.width, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.tokens: nn.Linear | None = nn.Linear(text.width, dim) if text.cross_attention else None

    def forward(self, y: TextCondition) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Returns the vector (B, D) and the context: None, or tokens (B, L, D) with their mask (B, L) bool."""
        dtype = cast(nn.Linear, self.mlp[0]).weight.dtype
        vector = self.mlp(layer_norm(y.pooled).to(dtype))
        if self.tokens is None:
            return vector, None
        return vector, (self.tokens(layer_norm(y.tokens).to(dtype)), y.mask)
