"""Conditions of models: labels, captions encoded as tokens and a pooled vector, and conditioning frames.

With a frozen text encoder (CLIP, T5), a model's condition ``y`` is a :class:`TextCondition`. The text encoder "bytes"
is a part of the model; its ``y`` is token ids (B, L) int64 from :func:`encode_bytes`. To train classifier-free
guidance, :func:`where` replaces dropped captions by the empty caption.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.models.attention import CrossAttention
from opendit.models.layers import Mlp, layer_norm
from opendit.models.positions import sincos_position_table


@dataclass(frozen=True)
class TextConfig:
    """The caption settings of a model's configuration."""

    # name of the encoder: "bytes" is inside the model; clip and t5 are frozen and outside
    name: str
    width: int  # width of the encoder's tokens and pooled vector
    max_tokens: int  # every caption is padded or cut to this number of tokens
    cross_attention: bool = False  # True if blocks attend to the tokens; False if only the pooled vector is used

    @property
    def inside(self) -> bool:
        return self.name == "bytes"


@dataclass(frozen=True, eq=False)
class TextCondition:
    """Encoded captions. Not a named tuple, because some training plugins can't rebuild one."""

    tokens: Tensor  # (B, L, Dt)
    mask: Tensor  # (B, L) bool, True for tokens
    pooled: Tensor  # pooled vector (B, Dt), or a picture's tokens (B, tokens, width)
    guidance: Tensor | None = None  # guidance scale (B,), for models with the scale as an input
    # lower bound of the captions' token counts, known on the host
    shortest: int = field(default=0, kw_only=True)

    def __len__(self) -> int:
        return len(self.pooled)

    def __getitem__(self, rows: Any) -> "TextCondition":
        return self._each(lambda field: field[rows])

    @property
    def shape(self) -> torch.Size:
        return self.tokens.shape

    def to(self, *args: Any, **kwargs: Any) -> "TextCondition":
        """Apply ``Tensor.to`` to every field. A dtype only affects ``tokens`` and ``pooled``."""
        moved = self._each(lambda field: field.to(*args, **kwargs))
        # The guidance scale keeps its dtype: 1000 times the scale is embedded, and bf16 would round that to multiples
        # of 8 or 16.
        guidance = None if self.guidance is None else self.guidance.to(moved.tokens.device)
        return replace(moved, mask=moved.mask.bool(), guidance=guidance)

    @property
    def full(self) -> bool:
        """True if no caption has padding, as far as the host knows."""
        return self.shortest >= self.tokens.shape[1]

    def tensors(self) -> list[Tensor]:
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
        joined = TextCondition(*map(torch.cat, zip(*(c.tensors() for c in conditions), strict=True)))
        return replace(joined, shortest=min(c.shortest for c in conditions))

    def _each(self, function) -> "TextCondition":
        return replace(TextCondition(*map(function, self.tensors())), shortest=self.shortest)


Condition = Tensor | TextCondition


def joined(conditions: Sequence[Condition]) -> Condition:
    join: Any = getattr(conditions[0], "cat", torch.cat)
    return join(tuple(conditions))


def of_same_pictures(null: Condition, y: Condition) -> Condition:
    """Return ``null`` with y's picture tokens, or unchanged if y has none. null: guidance's null condition, with batch
    size 1 or B."""
    if not isinstance(y, TextCondition) or not isinstance(null, TextCondition) or y.pooled.dim() != 3:
        return null
    return replace(null if len(null) == len(y) else null[[0] * len(y)], pooled=y.pooled)


def same_length(one: Condition, other: Condition) -> tuple[Condition, Condition]:
    """Pad the captions of two conditions with zeros to equal length. Return labels and ids unchanged."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one, other
    length = max(one.tokens.shape[1], other.tokens.shape[1])
    return one.padded(length), other.padded(length)


def where(dropped: Tensor, null: Condition, y: Condition) -> Condition:
    """Replace the condition ``y`` by ``null`` for the samples where ``dropped`` (B,) bool is True. Conditions are
    labels (B,), ids (B, L) or TextConditions. ``null`` has the type of y and a batch size of 1 or B."""
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
    """Return the mean (B, D) over the tokens (B, L, D) for which mask (B, L) is True. The sum is computed in fp32 or
    wider; the result has the tokens' dtype."""
    kept = mask.unsqueeze(-1)
    total = tokens.masked_fill(~kept, 0).sum(dim=1, dtype=torch.promote_types(tokens.dtype, torch.float32))
    return (total / kept.sum(dim=1)).to(tokens.dtype)


class CaptionEmbedder(nn.Module):
    """Embedding of encoded captions. The vector (B, D) is added to the timestep's embedding. With cross-attention, all
    blocks attend to the tokens (B, L, D). The encoder's outputs are normalised first, because text encoders differ in
    scale by orders of magnitude (Imagen, Saharia et al. 2022, app. D)."""

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


# ------------------------------------------------------------------------------------------ conditioning frames
#
# With --given_frames, the network's input is x_t ++ mask ++ given, concatenated along the channels:
#   x_t (C channels): noisy latents
#   mask (1 channel): 1 in conditioning frames, 0 elsewhere
#   given (C channels): clean latents in conditioning frames, 0 elsewhere
#
# Models with conditioning frames *in place* (Wan 2.2 TI2V) embed only C channels: the clean latents replace the noisy
# ones in conditioning frames, and the time of these tokens is 0. The loss excludes conditioning frames.
#
# Image-to-video models (Wan 2.1 and 2.2 I2V) always embed x_t, the repeated mask, and a clip's latents. The clip is
# grey after its first frame. The loss includes all frames.


def given_channels(in_channels: int) -> int:
    return 1 + in_channels


def give(latents: Tensor, lengths: Tensor) -> Tensor:
    """Return mask ++ given (B, 1 + C, T, H, W) for latents (B, C, T, H, W). The first ``lengths[i]`` frames of clip i
    are conditioning frames."""
    frames = torch.arange(latents.shape[2], device=latents.device)
    mask = (frames < lengths.to(latents.device).unsqueeze(1)).to(latents.dtype)[:, None, :, None, None]
    return torch.cat([mask.expand(-1, 1, -1, *latents.shape[3:]), latents * mask], dim=1)


def with_given(x: Tensor, given: Tensor | None) -> Tensor:
    """Return the network's input: x (B, C, T, H, W) ++ ``given``, or x if ``given`` is None. given: the result of
    :func:`give`."""
    return x if given is None else torch.cat([x, given.to(x.dtype)], dim=1)


def in_place(x: Tensor, channels: int) -> Tensor:
    """Replace the latents of conditioning frames by clean ones: x ++ mask ++ given (B, 1 + 2 C, T, H, W) becomes (B, C,
    T, H, W). channels: C."""
    x, mask, given = x.split([channels, 1, channels], dim=1)
    return torch.where(mask > 0, given, x)


def first_frames_alone(pixels: Tensor) -> Tensor:
    """Return clips (B, 3, T, H, W) in [-1, 1] with grey frames after the first one."""
    grey = torch.zeros_like(pixels)
    grey[:, :, 0] = pixels[:, :, 0]
    return grey


def give_beside(latents: Tensor) -> Tensor:
    """Return mask ++ given (B, 1 + C, T, H, W) for an image-to-video model. latents: (B, C, T, H, W), encoded from the
    result of :func:`first_frames_alone`."""
    mask = torch.zeros_like(latents[:, :1])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], dim=1)


def beside(x: Tensor, channels: int, given: int) -> Tensor:
    """Repeat the mask in x ++ mask ++ latents (B, 1 + 2 C, T, H, W), so that the result has C + ``given`` channels.
    channels: C. Raises ValueError if x has only C channels."""
    if x.shape[1] == channels:
        raise ValueError("a model of image to video is given the first frame of every clip")
    x, mask, latents = x.split([channels, 1, channels], dim=1)
    return torch.cat([x, mask.expand(-1, given - channels, -1, -1, -1), latents], dim=1)


def times_of_frames(t: Tensor, given: Tensor) -> Tensor:
    """Return each frame's time, (B, T): 0 for conditioning frames, otherwise the sample's time t (B,). given: the
    result of :func:`give`."""
    return t[:, None] * (1 - given[:, 0, :, 0, 0])


# ------------------------------------------------------------------------------------------ a text encoder of bytes
#
# A small text encoder that is trained with the model and needs no download. A caption is encoded as ids (L,) int64:
# BEGIN, then b + 2 for each UTF-8 byte b, then PADDING. Thanks to BEGIN, even the empty caption has a token to attend
# to. The empty caption is guidance's null condition.

PADDING, BEGIN, FIRST_BYTE = 0, 1, 2
VOCABULARY = FIRST_BYTE + 256
LAYERS, HEAD_SIZE, MLP_RATIO = 2, 32, 2


def encode_bytes(captions: list[str], max_tokens: int) -> Tensor:
    """Encode captions as ids (B, max_tokens) int64. A caption that is too long is cut between two characters. Lone
    surrogates become "?", because UTF-8 can't encode them. Raises ValueError if max_tokens is less than 1."""
    if max_tokens < 1:
        raise ValueError(f"--max_text_tokens {max_tokens}: not even the begin token fits; give 1 or more")
    ids = torch.full((len(captions), max_tokens), PADDING)
    for row, caption in zip(ids, captions, strict=True):
        cut = caption.encode("utf-8", errors="replace")[: max_tokens - 1]
        whole = cut.decode("utf-8", errors="ignore").encode("utf-8")  # drops an incomplete character at the end
        row[0] = BEGIN
        row[1 : 1 + len(whole)] = torch.tensor(list(whole), dtype=torch.int64) + FIRST_BYTE
    return ids


def byte_tokens(captions: list[str]) -> list[int]:
    """Return each uncut caption's token count: one for the begin token, and one per UTF-8 byte."""
    return [1 + len(caption.encode("utf-8", errors="replace")) for caption in captions]


class BytesBlock(nn.Module):
    """A pre-norm Transformer block. Tokens attend only to tokens with a True mask."""

    def __init__(self, width: int):
        super().__init__()
        self.attn = CrossAttention(width, width // HEAD_SIZE if width % HEAD_SIZE == 0 else 1)
        self.mlp = Mlp(width, MLP_RATIO * width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = layer_norm(x)
        x = x + self.attn(normed, normed, mask)
        return x + self.mlp(layer_norm(x))


class BytesEncoder(nn.Module):
    """Text encoder that maps ids (B, L) int64, L <= max_tokens, to a :class:`TextCondition`. The pooled vector is the
    mean over the tokens."""

    positions: Tensor  # (1, max_tokens, width), a table in DiTConfig.tables

    def __init__(self, text: TextConfig):
        super().__init__()
        self.embedding: nn.Embedding = nn.Embedding(VOCABULARY, text.width)
        table = sincos_position_table(text.width, text.max_tokens, device=torch.get_default_device())
        self.register_buffer("positions", table.unsqueeze(0))
        self.blocks: nn.ModuleList = nn.ModuleList(BytesBlock(text.width) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> TextCondition:
        mask = ids != PADDING
        x = self.embedding(ids)
        x = (x + self.positions[:, : ids.shape[1]]).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return TextCondition(x, mask, masked_mean(x, mask))


def bytes_parameters(text: TextConfig) -> int:
    w = text.width
    block = 4 * w * w + 4 * w + 2 * w * MLP_RATIO * w + MLP_RATIO * w + w
    return VOCABULARY * w + LAYERS * block


def bytes_flops(text: TextConfig) -> int:
    """Return the FLOPs of the matrix products for one caption (2 per multiply-add)."""
    w, n = text.width, text.max_tokens
    block = 2 * n * 4 * w * w + 4 * n * n * w + 4 * n * w * MLP_RATIO * w
    return LAYERS * block
