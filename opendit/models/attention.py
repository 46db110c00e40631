"""Attention layers: self-attention to all tokens of a sample or to groups of tokens, and cross-attention to captions.

Each layer calls its attribute ``attend`` on q, k, v. To use another kernel, replace this attribute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import handle_torch_function, has_torch_function

from opendit.models.layers import (
    PLAIN,
    TORCH_OPS,
    Attend,
    BlockOps,
    LowRank,
    Options,
    Projection,
    RMSNorm,
    multiply,
    product_of,
)
from opendit.models.segments import Interleaved, PlacedSegments, Varlen, segment_attention, segment_cross_attention

# Backends with correct gradients under torch.compile (2.11). cuDNN does not write the memory layout that torch.compile
# assumes. If q, k and v are views of one tensor, cuDNN's gradients are then wrong.
RIGHT_WHEN_COMPILED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def local_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v for q, k, v (B, H, N, d). torch selects the kernel; under torch.compile, only
    from RIGHT_WHEN_COMPILED."""
    if torch.compiler.is_compiling():
        with sdpa_kernel(RIGHT_WHEN_COMPILED):
            return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of a sequence: positions, and division into ranks, segments and streams.

    Attributes:
        sizes: Number of tokens along each axis of the grid; (tokens,) for a pack.
        rotary: Rotations, fp32: ([B,] N, d / 2, 2) if all heads share them. Otherwise (N, D / 2, 2) for the tokens and
            heads that this rank projects.
        learned: Learned positions (1 or B, n, D) of this rank's tokens; None if blocks do not add positions.
        shards: Division of the sequence over ranks.
        packed: Segments of a pack, or the segments in this rank's range of tokens.
        streams: Each stream's token count. Except in packs, the sequence holds one stream after another.
        keys: Mask (B, N) bool, True for tokens to attend to; None for all tokens.
        interleaved: Order of the tokens in a pack with several streams; None otherwise.
        vectors: Index of each token's modulation vector, (B, n) int64, non-decreasing; None if a sample has one vector.
    """

    sizes: tuple[int, ...]
    rotary: Tensor | None = None
    learned: Tensor | None = None
    shards: "SequenceShards | None" = None
    packed: PlacedSegments | None = None
    streams: tuple[int, ...] = ()
    keys: Tensor | None = None
    interleaved: Interleaved | None = None
    vectors: Tensor | None = None

    def split(self, x: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """Split x into one tensor for each stream. Dimension ``dim`` counts the tokens."""
        return x.split(self.streams, dim=dim) if self.interleaved is None else self.interleaved.split(x, dim)

    def join(self, streams: Sequence[Tensor]) -> Tensor:
        """Join the tensors (B, n, ...) of the streams to one tensor (B, N, ...) with all tokens."""
        return torch.cat(list(streams), dim=1) if self.interleaved is None else self.interleaved.join(streams)

    def of_samples(self, samples: slice) -> "TokenGrid":
        """Return the grid for a slice of the batch."""
        rotary, keys = self.rotary, self.keys
        rotary = rotary[samples] if rotary is not None and rotary.dim() == 4 else rotary
        return replace(self, rotary=rotary, keys=None if keys is None else keys[samples])

    def of_tokens(self, first: int, count: int) -> "TokenGrid":
        """Return the grid with the rotations of ``count`` consecutive tokens, padded with zeros past the last token.
        first: index of the first token."""
        if self.rotary is None:
            return self
        part = self.rotary[..., first : first + count, :, :]
        missing = count - part.shape[-3]
        return replace(self, rotary=F.pad(part, (0, 0, 0, 0, 0, missing)) if missing else part)

    def rows_of_streams(self) -> list[tuple[Tensor, ...]]:
        samples = None if self.interleaved is None else self.interleaved.samples
        return [()] * len(self.streams) if samples is None else [(rows,) for rows in samples]


def of_rows(grid: TokenGrid | None) -> tuple[Tensor, ...]:
    """Return (index,) with the index of each token's modulation vector, or () if every sample has one vector. In a
    pack, a token's index is the number of its segment."""
    if grid is not None and grid.vectors is not None:
        return (grid.vectors,)
    return () if grid is None or grid.packed is None else (grid.packed.sample_of_row,)


class SequenceShards(Protocol):
    """Division of a sequence's tokens over ranks. Implemented in opendit.parallel.sequence and
    opendit.parallel.tensor."""

    @property
    def first(self) -> int: ...

    @property
    def rows(self) -> int:
        """Number of tokens per rank, including padding."""
        ...

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens (B, n, F) from all tokens (B, N, F)."""
        ...

    def of_projections(self, table: Tensor) -> Tensor:
        """Return the slice of ``table`` for the tokens and heads that this rank projects. table: (N, F), one row per
        token, with columns for all heads."""
        ...

    @property
    def takes_projection(self) -> bool:
        """True if callers must use :meth:`project_and_attend` instead of :meth:`attention`."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: "GridAttention") -> Tensor:
        """Attend from this rank's tokens to all ranks' tokens; return (B, n, D). q (B, H, n, d) and k, v (B, kv_heads,
        n, d) hold this rank's tokens; ``attend`` normalises and rotates them.

        With tensor parallelism, q, k and v hold this rank's heads and the tokens of all tensor-parallel ranks.
        """
        ...

    def project_and_attend(
        self, x: Tensor, qkv: "AnyProjection", heads: int, attend: Attend, float8: bool = False
    ) -> Tensor:
        """Project x (B, n, D) to q, k and v with ``heads`` heads each, and return the result of :meth:`attention`. With
        ``float8`` the products are in float8, and x may be the quantised output of another operation."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Gather the tokens (B, n, F) of all ranks; return all tokens (B, N, F) on every rank."""
        ...

    @property
    def axial(self) -> bool:
        """True if callers must use :meth:`attend_along` for attention along an axis of the grid."""
        ...

    def attend_along(
        self,
        axis: int,
        x: Tensor,
        qkv: "AnyProjection",
        attend: "Callable[[Tensor, AnyProjection, TokenGrid], Tensor]",
        rotary: Tensor | None,
    ) -> Tensor:
        """Attend from this rank's tokens x (B, n, D) along one axis of the grid; return (B, n, D).

        Args:
            axis: 0 for attention along time, 1 for attention within frames.
            attend: ``attend(tokens, qkv, grid)`` computes the output for a grid with all tokens along the axis.
            rotary: rotations of all tokens.
        """
        ...

    # Methods for token routes. The tokens that a route processes may be on any rank.

    def join(self, x: Tensor) -> Tensor:
        """Gather like :meth:`gather`. The backward pass sums the gradients of all ranks, because ranks may use the
        result differently."""
        ...

    def of_length(self, length: int) -> "SequenceShards":
        """Return the division of a sequence of length ``length`` over these ranks."""
        ...

    def start_experts(self, mlp: Any, y: Tensor) -> Any:
        """Start the experts of ``mlp`` on this rank's tokens y (B, n, D); return their ``Routing``."""
        ...

    # Methods for sequences of several streams (captions and media). Ranks divide each stream separately.

    @property
    def rows_of_streams(self) -> tuple[int, ...]:
        """Each stream's number of tokens per rank."""
        ...

    def take_stream(self, number: int, x: Tensor) -> Tensor:
        """Return this rank's tokens (B, n, F) from all tokens (B, N, F) of stream ``number``."""
        ...

    def gather_stream(self, number: int, x: Tensor) -> Tensor:
        """Gather the tokens (B, n, F) of stream ``number``; return all its tokens (B, N, F) on every rank."""
        ...

    def attention_of_streams(
        self, projected: Sequence[tuple[Tensor, ...]], attend: "GridAttention"
    ) -> Sequence[Tensor]:
        """Return each stream's attention output (B, n, D) for each stream's q, k, v (B, n, H, d)."""
        ...


class Attention(nn.Module):
    """Multi-head self-attention with one qkv projection. Parameter names are timm's: qkv, proj.

    If ``kv_heads`` is set, neighbouring query heads share keys and values (grouped-query attention, Ainslie et al.
    2023). With ``options.qk_norm``, queries and keys get RMSNorms. Kernels may replace two attributes: ``attend`` maps
    q, k, v (B, H, N, d) to (B, H, N, d), and ``varlen`` is for packs with short segments.
    """

    def __init__(self, dim: int, num_heads: int, options: Options = PLAIN, kv_heads: int | None = None):
        super().__init__()
        self.num_heads: int = num_heads
        self.kv_heads: int = kv_heads or num_heads
        self.head_dim: int = dim // num_heads
        self.qkv: Projection = Projection(dim, (num_heads + 2 * self.kv_heads) * self.head_dim, bias=options.bias)
        self.proj: Projection = Projection(dim, dim, bias=options.bias)
        self.across: bool = options.qk_across
        self.halves: bool = options.halves
        width = dim if self.across else self.head_dim
        self.q_norm: RMSNorm | None = RMSNorm(width, options.qk_eps) if options.qk_norm else None
        self.k_norm: RMSNorm | None = RMSNorm(width, options.qk_eps) if options.qk_norm else None
        self.attend: Attend = local_attention
        self.varlen: Varlen | None = None

    def output(self, x: Tensor, ops: BlockOps = TORCH_OPS, grid: TokenGrid | None = None) -> Tensor:
        """Return the attention output (B, N, D) before the output projection. With ``grid.shards``, x holds only this
        rank's tokens."""
        attend, shards = GridAttention(self, grid, ops), None if grid is None else grid.shards
        if shards is not None and shards.takes_projection:
            # The float8 operation does not support query heads that share keys, so torch computes this projection.
            float8 = self.kv_heads == self.num_heads and ops.in_float8("linear_heads")
            return shards.project_and_attend(x, self._qkv_of_every_head(), self.num_heads, attend, float8)
        q, k, v = self.project(x, ops)
        if shards is not None:
            return shards.attention(q, k, v, attend)
        return attend(q, k, v).transpose(1, 2).flatten(2)

    def project(self, x: Tensor, ops: BlockOps, qkv: "AnyProjection | None" = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, N, d) and k, v (B, kv_heads, N, d) for tokens x. qkv: projection to use; None for this
        layer's projection."""
        qkv = self.qkv if qkv is None else qkv
        if self.kv_heads == self.num_heads:
            return ops.linear_heads(x, qkv, self.num_heads)
        heads = qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v

    def _qkv_of_every_head(self) -> "AnyProjection":
        """Return a projection with separate keys and values for every query head, for strategies that divide heads.
        Shared heads are copied."""
        if self.kv_heads == self.num_heads:
            return self.qkv
        weight, bias, low_rank = self.qkv.weight, self.qkv.bias, self.qkv.low_rank
        heads = self.num_heads, self.kv_heads
        if low_rank is not None:
            low_rank = low_rank._replace(b=_of_every_head(low_rank.b, *heads))
        bias = None if bias is None else _of_every_head(bias, *heads)
        return MadeProjection(_of_every_head(weight, *heads), bias, low_rank)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid | None = None,
        ops: BlockOps = TORCH_OPS,
        normalised: bool = False,
    ) -> Tensor:
        """Return the attention output (B, H, N, d) for q, k, v (B, H, N, d) of all tokens. normalised: True if q and k
        are already normalised."""
        q, k, v = self.prepare(q, k, v, grid, ops, normalised)
        k, v = for_every_head(q, k, v)
        if grid is not None and grid.packed is not None:
            return segment_attention(q, k, v, grid.packed, self.attend, self.varlen)
        if grid is not None and grid.keys is not None:
            return masked_attention(q, k, v, grid.keys)
        return self.attend(q, k, v)

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid | None,
        ops: BlockOps = TORCH_OPS,
        normalised: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise and rotate queries and keys; return q, k and the unchanged v."""
        norms = (None, None) if normalised else (self.q_norm, self.k_norm)
        rotary = grid and grid.rotary
        if rotary is None and norms[0] is None:
            return q, k, v
        # The transposes change only strides: the memory order stays (B, N, H, d), and attention preserves it.
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if self.halves and rotary is not None:
            # The table is for channels i and i + d / 2, but the operation rotates neighbouring channels. Reordering the
            # channels of both q and k does not change their products.
            q, k = ops.normalise_rotate(q, k, *norms, None, self.across)
            q, k, norms = _as_neighbours(q), _as_neighbours(k), (None, None)
        if self.turns_all_channels(grid):  # The table covers the channels of all heads, so treat them as one head.
            whole = (x.flatten(2).unsqueeze(2) for x in (q, k))
            turned = ops.normalise_rotate(*whole, *norms, rotary, False)
            q, k = (x.unflatten(3, (-1, self.head_dim)).squeeze(2) for x in turned)
        else:
            q, k = ops.normalise_rotate(q, k, *norms, rotary, self.across)
        return q.transpose(1, 2), k.transpose(1, 2), v

    def turns_all_channels(self, grid: TokenGrid | None) -> bool:
        return grid is not None and grid.rotary is not None and 2 * grid.rotary.shape[-2] != self.head_dim

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.output(x))


@dataclass(frozen=True, eq=False)  # torch.compile hashes a callable before its fields are set
class GridAttention:
    """A layer's attention between a grid's tokens, for sequence-parallel strategies. A call maps q, k, v (B, H, N, d)
    of all tokens to (B, H, N, d).

    A strategy can normalise and rotate a rank's tokens with :meth:`prepare` or :meth:`pack`, before ranks exchange
    heads. ``prepared`` then skips these steps.
    """

    layer: Attention
    grid: TokenGrid | None
    ops: BlockOps = TORCH_OPS
    normalised: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layer.attention(q, k, v, self.grid, self.ops, self.normalised)

    def of_samples(self, samples: slice) -> "GridAttention":
        """Return the attention for a slice of the batch."""
        return replace(self, grid=None if self.grid is None else self.grid.of_samples(samples))

    @property
    def prepared(self) -> "GridAttention":
        """The attention for queries and keys that are already normalised and rotated."""
        return replace(self, grid=None if self.grid is None else replace(self.grid, rotary=None), normalised=True)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise and rotate the queries and keys of consecutive tokens. first: index of the first token."""
        return self.layer.prepare(q, k, v, self._of_tokens(first, q.shape[2]), self.ops, self.normalised)

    def pack(self, q: Tensor, k: Tensor, v: Tensor, first: int, parts: int) -> Tensor:
        """Run :meth:`prepare`, then divide the heads into ``parts`` groups of consecutive heads. Return (parts, B, n,
        3, H / parts, d), contiguous. Keys and values that query heads share are copied."""
        layer, packs, grid = self.layer, self.ops.pack_heads, self._of_tokens(first, q.shape[2])
        norms, table = (layer.q_norm, layer.k_norm), grid and grid.rotary
        plain = table is None or not (layer.halves or layer.turns_all_channels(grid))
        if packs is None or self.normalised or not plain or k.shape[1] < q.shape[1]:
            q, k, v = layer.prepare(q, k, v, grid, self.ops, self.normalised)
            (k, v), norms, table = for_every_head(q, k, v), (None, None), None
        if packs is None:
            return torch.stack([x.unflatten(1, (parts, -1)).permute(1, 0, 3, 2, 4) for x in (q, k, v)], dim=3)
        return packs(*(x.transpose(1, 2) for x in (q, k, v)), *norms, table, layer.across, parts)

    def _of_tokens(self, first: int, count: int) -> TokenGrid | None:
        if self.grid is None:
            return None
        # A table for the channels of all heads covers only the tokens of this rank.
        return self.grid.of_tokens(0 if self.layer.turns_all_channels(self.grid) else first, count)


@dataclass(frozen=True)
class MadeProjection:
    """A linear layer with computed tensors: weight (out, in), and optionally bias (out,) and LoRA matrices."""

    weight: Tensor
    bias: Tensor | None
    low_rank: LowRank | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        return product_of(x, self.weight, bias, self.low_rank, multiply)


AnyProjection = Projection | MadeProjection  # projection to q, k, v


def _as_neighbours(x: Tensor) -> Tensor:
    """Reorder the channels of x (..., d) so that channels i and i + d / 2 become neighbours."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def for_every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of k and v, dimension 1, so that each query head has its own. Some of torch's attention kernels
    don't support shared heads."""
    copies = q.shape[1] // k.shape[1]
    return (k, v) if copies == 1 else (k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1))


def _of_every_head(rows: Tensor, num_heads: int, kv_heads: int) -> Tensor:
    """Expand a parameter of ``Attention.qkv`` from ((H + 2 K) d, ...) to (3 H d, ...), by copying the K shared
    heads."""
    if has_torch_function((rows,)):
        # Gemini keeps parameters in memory only during a call, and views must not outlive it. So dispatch this function
        # as one call.
        return handle_torch_function(_of_every_head, (rows,), rows, num_heads, kv_heads)
    q, *shared = rows.unflatten(0, (num_heads + 2 * kv_heads, -1)).split((num_heads, kv_heads, kv_heads))
    return torch.cat([q, *(part.repeat_interleave(num_heads // kv_heads, dim=0) for part in shared)]).flatten(0, 1)


class AxialAttention(Attention):
    """Attention along one axis of a grid (frames, spatial positions): along time or within frames."""

    axis: ClassVar[int]  # 0 for attention along frames (time), 1 for attention within a frame

    def output(self, x: Tensor, ops: BlockOps = TORCH_OPS, grid: TokenGrid | None = None) -> Tensor:
        if grid is None or grid.shards is None or not grid.shards.axial:
            return super().output(x, ops, grid)

        def attend(x: Tensor, qkv: "AnyProjection", part: TokenGrid) -> Tensor:
            return self.attention(*self.project(x, ops, qkv), part, ops).transpose(1, 2).flatten(2)

        return grid.shards.attend_along(self.axis, x, self.qkv, attend, grid.rotary)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid,
        ops: BlockOps = TORCH_OPS,
        normalised: bool = False,
    ) -> Tensor:
        frames = grid.sizes[0]
        # the dimension of (B, H, T, S, d) that is moved into the batch, and its size
        dim, count = (2, frames) if self.axis else (3, q.shape[2] // frames)
        parts = self.prepare(q, k, v, grid, ops, normalised)
        lines = (x.unflatten(2, (frames, -1)).movedim(dim, 1).flatten(0, 1) for x in parts)
        return _attend_in_groups(self.attend, *lines).unflatten(0, (-1, count)).movedim(1, dim).flatten(2, 3)


class FrameAttention(AxialAttention):
    """Attention within frames: T attentions of S tokens each, (B T, H, S, d).

    A frame's tokens have equal rotations along time, so these rotations cancel in q k^T.
    """

    axis = 1


class TemporalAttention(AxialAttention):
    """Attention along time, at each spatial position: S attentions of T tokens each, (B S, H, T, d)."""

    axis = 0


def _attend_in_groups(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # A picture has one token along time, and the selected kernel may not support that.
    return (local_attention if q.shape[2] == 1 else attend)(q, k, v)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over the keys with a True ``mask`` (B, M), at least one per sample. q is (B, H,
    N, d); k and v are (B, H, M, d).

    The kernel broadcasts the mask (B, 1, 1, M). On a GPU, the memory-efficient kernel is preferred: flash attention
    does not support masks, and plain operations would keep N x M scores for the backward pass.
    """
    mask = mask[:, None, None, :]
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class CrossAttention(nn.Module):
    """Multi-head attention from x (B, N, D) to tokens (B, M, context) with a mask (B, M) bool, False for padding.
    ``context``: width of the tokens; None for D."""

    def __init__(self, dim: int, num_heads: int, options: Options = PLAIN, context: int | None = None):
        super().__init__()
        self.num_heads = num_heads
        self.in_operations = options.operations_across
        self.q = (Projection if self.in_operations else nn.Linear)(dim, dim, bias=options.bias)
        self.kv = nn.Linear(context or dim, 2 * dim, bias=options.bias)
        self.proj: Projection = Projection(dim, dim, bias=options.bias)
        self.across, self.attends_padding = options.qk_across, options.attends_padding
        width = dim if self.across else dim // num_heads
        self.q_norm = RMSNorm(width, options.qk_eps) if options.qk_norm else None
        self.k_norm = RMSNorm(width, options.qk_eps) if options.qk_norm else None
        self.attend: Attend = local_attention  # used only with ``attends_padding``
        self.picture_kv: nn.Linear | None = nn.Linear(dim, 2 * dim, bias=options.bias) if options.pictures else None
        self.picture_norm = RMSNorm(width, options.qk_eps) if options.pictures else None

    def keys_values(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, M, H, d) of tokens (B, M, D). Sampling can compute them once for all steps. mask:
        mask of the caption's tokens. A picture's tokens, if any, come first and have no mask."""
        if self.picture_kv is None or mask is None:
            return self._keys_values(tokens, self.kv, self.k_norm)
        count = tokens.shape[1] - mask.shape[1]
        pairs = (
            self._keys_values(tokens[:, :count], self.picture_kv, self.picture_norm),
            self._keys_values(tokens[:, count:], self.kv, self.k_norm),
        )
        k, v = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
        return k, v

    def _keys_values(self, tokens: Tensor, kv: nn.Linear, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        k, v = kv(tokens).unflatten(-1, (2, self.num_heads, -1)).unbind(2)
        return self._normalised(norm, k), v

    def _normalised(self, norm: RMSNorm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        return norm(x.flatten(2)).unflatten(2, (x.shape[2], -1)) if self.across else norm(x)

    def output(self, x: Tensor, *context: Tensor, grid: TokenGrid | None = None, ops: BlockOps = TORCH_OPS) -> Tensor:
        """Return the attention output (B, N, D) of tokens x (B, N, D) before the output projection. context: (tokens,
        mask), or (keys, values, mask) with the result of :meth:`keys_values`. For a pack, the context's first dimension
        counts segments."""
        *source, mask = context
        k, v = self.keys_values(source[0], mask) if len(source) == 1 else source
        q = ops.linear(x, cast(Projection, self.q)) if self.in_operations else self.q(x)
        q = q.unflatten(-1, (self.num_heads, -1))
        q = self._normalised(self.q_norm, q)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.attends_padding and (grid is None or grid.packed is None):
            count = 0 if self.picture_kv is None else k.shape[2] - mask.shape[1]
            output = self.attend(q, k[:, :, count:], v[:, :, count:])
            # Attention to the picture and attention to the caption are computed separately (Wan Team 2025, sec. 5.1).
            if count:
                output = output + self.attend(q, k[:, :, :count], v[:, :, :count])
            return output.transpose(1, 2).flatten(2)
        if grid is not None and grid.packed is not None:
            attend = self._attend_to_all if self.attends_padding else masked_attention
            output = segment_cross_attention(q, k, v, mask, grid.packed, attend)
        else:
            output = masked_attention(q, k, v, mask)
        return output.transpose(1, 2).flatten(2)

    def _attend_to_all(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend to all keys and ignore the mask. Same signature as :func:`masked_attention`."""
        return self.attend(q, k, v)

    def forward(self, x: Tensor, *context: Tensor, grid: TokenGrid | None = None, ops: BlockOps = TORCH_OPS) -> Tensor:
        z = self.output(x, *context, grid=grid, ops=ops)
        return ops.linear(z, self.proj) if self.in_operations else self.proj(z)
