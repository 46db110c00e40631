"""Attention: to all tokens of a sample, to groups of them, to a caption. How to attend is injected."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import handle_torch_function, has_torch_function

from opendit.models.interleaved import Interleaved
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
from opendit.models.segments import PlacedSegments, Varlen, segment_attention, segment_cross_attention

# torch.compile (2.11) plans cuDNN's gradients in another memory layout than cuDNN writes for q, k, v that are views of
# one qkv tensor: they come out wrong (relative error 1.4, measured). The others' are right.
RIGHT_WHEN_COMPILED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def local_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for q, k, v (B, H, N, d), by torch's own choice of kernel."""
    if torch.compiler.is_compiling():
        with sdpa_kernel(RIGHT_WHEN_COMPILED):
            return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


@dataclass(frozen=True)
class TokenGrid:
    """The places of a sequence's tokens, for blocks.

    sizes: tokens along each axis of the grid; (tokens,) for a pack. rotary: rotations (N, d / 2, 2) fp32 of rotary
    positions; or (N, D / 2, 2) of all heads' channels, of the tokens and heads that this rank projects. learned:
    positions of this rank's tokens (1, n, D), if every block adds them. shards: the division of the sequence over
    ranks. packed: this rank's part of a pack's segments. streams: tokens of each stream, which follow each other; of a
    pack they are ``interleaved``. keys: (B, N) bool, the tokens that are attended to; None: all.
    vectors: (B, n) int64, not falling: which of the modulation vectors each token has, where a sample has several.
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
        """Return the tokens of every stream of x, which has all tokens in its dimension ``dim``."""
        return x.split(self.streams, dim=dim) if self.interleaved is None else self.interleaved.split(x, dim)

    def join(self, streams: Sequence[Tensor]) -> Tensor:
        """Return all tokens (B, N, ...) of those of every stream (B, n, ...)."""
        return torch.cat(list(streams), dim=1) if self.interleaved is None else self.interleaved.join(streams)

    def rows_of_streams(self) -> list[tuple[Tensor, ...]]:
        """Return :func:`of_rows` of every stream."""
        samples = None if self.interleaved is None else self.interleaved.samples
        return [()] * len(self.streams) if samples is None else [(rows,) for rows in samples]


def of_rows(grid: TokenGrid | None) -> tuple[Tensor, ...]:
    """Return the last arguments of operations with shift, scale or gate: (sample_of_row,) for packs and for samples of
    several modulation vectors, else none."""
    if grid is not None and grid.vectors is not None:
        return (grid.vectors,)
    return () if grid is None or grid.packed is None else (grid.packed.sample_of_row,)


class SequenceShards(Protocol):
    """The tokens of a sequence that several ranks share, as a model sees them (opendit.parallel.sequence)."""

    @property
    def first(self) -> int:
        """The place of this rank's first token."""
        ...

    @property
    def rows(self) -> int:
        """Tokens of a rank, padding among them."""
        ...

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens (B, n, F) of all (B, N, F)."""
        ...

    def of_projections(self, table: Tensor) -> Tensor:
        """The rows (n, F / P) of a table (N, F) of tokens, whose columns belong to heads, for the tokens and heads
        whose queries this rank projects."""
        ...

    @property
    def takes_projection(self) -> bool:
        """True to have :meth:`project_and_attend` called, so that inputs can travel beside their products."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: "GridAttention") -> Tensor:
        """The attention output (B, n, D) of this rank's tokens over those of all ranks; q (B, H, n, d) and k, v (B,
        kv_heads, n, d) are of this rank's, before they are normalised and rotated, which ``attend`` does.

        Where ranks divide a layer's heads as well, H are this rank's heads and D is their width, and projections give
        and take the tokens of all of these ranks."""
        ...

    def project_and_attend(
        self, x: Tensor, qkv: "AnyProjection", heads: int, attend: Attend, float8: bool = False
    ) -> Tensor:
        """Project x (B, n, D) by ``qkv`` to q, k and v of ``heads`` heads each, and return :meth:`attention` of them.
        float8: the products are in float8, and x may be the quantised output of another operation."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """All tokens (B, N, F), on every rank, from this rank's (B, n, F)."""
        ...

    @property
    def axial(self) -> bool:
        """True to have :meth:`attend_along` called for attention along an axis of the grid."""
        ...

    def attend_along(
        self,
        axis: int,
        x: Tensor,
        qkv: "AnyProjection",
        attend: "Callable[[Tensor, AnyProjection, TokenGrid], Tensor]",
        rotary: Tensor | None,
    ) -> Tensor:
        """Return the attention output (B, n, D) of this rank's tokens x (B, n, D), each of which attends to the tokens
        that differ from it in one axis alone (0: the frame, 1: the place in the frame). ``attend(tokens, qkv, grid)``
        computes it for grids that are complete along that axis. rotary: the rotations of all tokens."""
        ...


class StreamShards(SequenceShards, Protocol):
    """The tokens of a sequence of several streams, captions and media, each of which ranks share out by itself."""

    @property
    def rows_of_streams(self) -> tuple[int, ...]:
        """Numbers of tokens of every stream that a rank has."""
        ...

    def take_stream(self, number: int, x: Tensor) -> Tensor:
        """This rank's tokens (B, n, F) of all of a stream (B, N, F)."""
        ...

    def gather_stream(self, number: int, x: Tensor) -> Tensor:
        """All tokens (B, N, F) of a stream, on every rank, from this rank's (B, n, F)."""
        ...

    def attention_of_streams(
        self, projected: Sequence[tuple[Tensor, ...]], attend: "GridAttention"
    ) -> Sequence[Tensor]:
        """The attention output (B, n, D) of every stream, of its q, k, v (B, n, H, d)."""
        ...


class Attention(nn.Module):
    """Multi-head self-attention with one qkv projection (parameter names of timm: qkv, proj).

    ``attend`` maps q, k, v (B, H, N, d) to (B, H, N, d); a parallel strategy or a kernel replaces it.
    ``kv_heads``: number of heads of keys and values, each shared by equally many neighbouring heads of queries
    (grouped-query attention, Ainslie et al. 2023). ``options.qk_norm``: RMSNorm of every query and key (Dehghani et al.
    2023, who take LayerNorm; RMS as in Stable Diffusion 3). ``varlen``: a kernel for packs' short runs, see
    segments.py.
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
        """The attention output (B, N, D) before the output projection, for which see BlockOps.

        With ``grid.shards`` x holds this rank's tokens only, and these know how to attend to those of the other ranks.
        """
        attend, shards = GridAttention(self, grid, ops), None if grid is None else grid.shards
        if shards is not None and shards.takes_projection:
            # Heads that share keys are projected by torch, in one process as well.
            float8 = self.kv_heads == self.num_heads and ops.in_float8("linear_heads")
            return shards.project_and_attend(x, self._qkv_of_every_head(), self.num_heads, attend, float8)
        q, k, v = self.project(x, ops)
        if shards is not None:
            if self.across:  # now, while a rank has all heads of its tokens
                turns = grid if self._turns_all_channels(grid) else None
                q, k, v = self.prepare(q, k, v, turns, ops)
                attend = replace(attend, normalised=True, grid=grid if turns is None else replace(turns, rotary=None))
            return shards.attention(q, k, v, attend)
        return attend(q, k, v).transpose(1, 2).flatten(2)

    def project(self, x: Tensor, ops: BlockOps, qkv: "AnyProjection | None" = None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, N, d), k and v (B, kv_heads, N, d), by the layer's projection or by one in its place."""
        qkv = self.qkv if qkv is None else qkv
        if self.kv_heads == self.num_heads:
            return ops.linear_heads(x, qkv, self.num_heads)
        heads = qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v

    def _qkv_of_every_head(self) -> "AnyProjection":
        """The projection to q, k, v of all heads, as the ranks that share them out expect it: where heads share keys
        and values, with copies of those rows."""
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
        """(B, H, N, d) of q, k, v (B, H, N, d) of all tokens. normalised: q and k are already."""
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
        """Queries and keys normalised and rotated."""
        norms = (None, None) if normalised else (self.q_norm, self.k_norm)
        rotary = grid and grid.rotary
        if rotary is None and norms[0] is None:
            return q, k, v
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # as they lie in memory: attention's result will lie so too
        if self.halves and rotary is not None:
            # Operations turn neighbours. Queries and keys stay in that order of channels: their products are the same.
            q, k = ops.normalise_rotate(q, k, *norms, None, self.across)
            q, k, norms = _as_neighbours(q), _as_neighbours(k), (None, None)
        if self._turns_all_channels(grid):  # as one head, whose norm is that across heads
            whole = (x.flatten(2).unsqueeze(2) for x in (q, k))
            turned = ops.normalise_rotate(*whole, *norms, rotary, False)
            q, k = (x.unflatten(3, (-1, self.head_dim)).squeeze(2) for x in turned)
        else:
            q, k = ops.normalise_rotate(q, k, *norms, rotary, self.across)
        return q.transpose(1, 2), k.transpose(1, 2), v

    def _turns_all_channels(self, grid: TokenGrid | None) -> bool:
        """Return True if rotations are of all heads' channels, and not the same for every head."""
        return grid is not None and grid.rotary is not None and 2 * grid.rotary.shape[-2] != self.head_dim

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.output(x))


@dataclass(frozen=True)
class GridAttention:
    """A layer's attention between the tokens of a grid, as sequence strategies use it.

    Calling it with q, k, v (B, H, N, d) of all tokens returns (B, H, N, d). A strategy that attends to some of the keys
    at a time calls :meth:`prepare` for the tokens that it has."""

    layer: Attention
    grid: TokenGrid | None
    ops: BlockOps = TORCH_OPS
    normalised: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layer.attention(q, k, v, self.grid, self.ops, self.normalised)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys normalised and rotated of the tokens from ``first`` on; heads may share keys and values."""
        grid = self.grid
        if grid is not None and grid.rotary is not None:
            grid = replace(grid, rotary=grid.rotary[..., first : first + q.shape[2], :, :])
        return self.layer.prepare(q, k, v, grid, self.ops, self.normalised)


@dataclass(frozen=True)
class MadeProjection:
    """A linear layer of weights that were made of others: weight (out, in), bias (out,) or none, LoRA's or none."""

    weight: Tensor
    bias: Tensor | None
    low_rank: LowRank | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        """Multiply x by the weight; see :meth:`opendit.models.layers.Projection.product`."""
        return product_of(x, self.weight, bias, self.low_rank, multiply)


AnyProjection = Projection | MadeProjection  # what makes q, k, v


def _as_neighbours(x: Tensor) -> Tensor:
    """Return x (..., d) with channels i and i + d / 2 next to each other."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def for_every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k, v for every head of queries (dimension 1): copies where heads share them, because not every kernel of torch
    shares them by itself, and because ranks can't share out fewer heads than they are."""
    copies = q.shape[1] // k.shape[1]
    return (k, v) if copies == 1 else (k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1))


def _of_every_head(rows: Tensor, num_heads: int, kv_heads: int) -> Tensor:
    """A parameter of ``Attention.qkv``, ((H + 2 K) d, ...), with a copy of the K heads of keys and of values for each
    of the H heads of queries: (3 H d, ...)."""
    if has_torch_function((rows,)):
        # Gemini's parameters: they are in memory for the length of one call; a view alone would outlive that.
        return handle_torch_function(_of_every_head, (rows,), rows, num_heads, kv_heads)
    q, *shared = rows.unflatten(0, (num_heads + 2 * kv_heads, -1)).split((num_heads, kv_heads, kv_heads))
    return torch.cat([q, *(part.repeat_interleave(num_heads // kv_heads, dim=0) for part in shared)]).flatten(0, 1)


class AxialAttention(Attention):
    """Attention of every token of a grid of frames x places to those that differ from it along one axis alone."""

    axis: ClassVar[int]  # 0: the frame, 1: the place

    def output(self, x: Tensor, ops: BlockOps = TORCH_OPS, grid: TokenGrid | None = None) -> Tensor:
        if grid is None or grid.shards is None or not grid.shards.axial:
            return super().output(x, ops, grid)

        def attend(x: Tensor, qkv: "AnyProjection", part: TokenGrid) -> Tensor:
            return self.attention(*self.project(x, ops, qkv), part, ops).transpose(1, 2).flatten(2)

        return grid.shards.attend_along(self.axis, x, self.qkv, attend, grid.rotary)


class FrameAttention(AxialAttention):
    """Attention of every token to those of its frame: (B T, H, S, d) of tokens in a grid of T frames."""

    axis = 1

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
        # (A rotation by the frame's number is the same for all of a frame.)
        parts = self.prepare(q, k, v, grid, ops, normalised)
        frame = (x.unflatten(2, (frames, -1)).transpose(1, 2).flatten(0, 1) for x in parts)
        return _attend_in_groups(self.attend, *frame).unflatten(0, (-1, frames)).transpose(1, 2).flatten(2, 3)


class TemporalAttention(AxialAttention):
    """Attention of every token to those at its own place in all frames: (B S, H, T, d)."""

    axis = 0

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: TokenGrid,
        ops: BlockOps = TORCH_OPS,
        normalised: bool = False,
    ) -> Tensor:
        frames, places = grid.sizes[0], q.shape[2] // grid.sizes[0]
        parts = self.prepare(q, k, v, grid, ops, normalised)
        place = (x.unflatten(2, (frames, places)).permute(0, 3, 1, 2, 4).flatten(0, 1) for x in parts)
        return _attend_in_groups(self.attend, *place).unflatten(0, (-1, places)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _attend_in_groups(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # A kernel that was chosen for whole samples may refuse a sequence of one token, which every picture has in time.
    return (local_attention if q.shape[2] == 1 else attend)(q, k, v)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the keys that ``mask`` keeps.

    q: (B, H, N, d); k, v: (B, H, M, d); mask: (B, M) bool, True where there is a token, at least one in each row.
    The mask stays (B, 1, 1, M) and is broadcast inside the kernel. On a GPU that is the memory-efficient one: flash
    attention takes no mask, and the one in plain operations would keep the N x M scores for the backward pass.
    """
    mask = mask[:, None, None, :]
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class CrossAttention(nn.Module):
    """Multi-head attention from x (B, N, D) to tokens (B, M, context) under a padding mask (B, M) bool. context: width
    of the tokens (None: D)."""

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
        self.attend: Attend = local_attention  # to captions whose padding is attended to as well
        self.picture_kv: nn.Linear | None = nn.Linear(dim, 2 * dim, bias=options.bias) if options.pictures else None
        self.picture_norm = RMSNorm(width, options.qk_eps) if options.pictures else None

    def keys_values(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (B, M, H, d) of tokens (B, M, D), which depend on nothing else: a caption's can be made once
        for all steps of sampling. mask: of the caption's tokens, before which a picture's may lie."""
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
        """Normalise x (B, N, H, d) by head or across heads."""
        if norm is None:
            return x
        return norm(x.flatten(2)).unflatten(2, (x.shape[2], -1)) if self.across else norm(x)

    def output(self, x: Tensor, *context: Tensor, grid: TokenGrid | None = None, ops: BlockOps = TORCH_OPS) -> Tensor:
        """The attention output (B, N, D) before the output projection.

        context: tokens and their mask; or keys and values that :meth:`keys_values` made of them, and the mask. Of a
        pack x (1, N, D), which ``grid`` knows, they are of its S segments, (S, M, ...).
        """
        *source, mask = context
        k, v = self.keys_values(source[0], mask) if len(source) == 1 else source
        q = ops.linear(x, cast(Projection, self.q)) if self.in_operations else self.q(x)
        q = q.unflatten(-1, (self.num_heads, -1))
        q = self._normalised(self.q_norm, q)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.attends_padding and (grid is None or grid.packed is None):
            count = 0 if self.picture_kv is None else k.shape[2] - mask.shape[1]
            output = self.attend(q, k[:, :, count:], v[:, :, count:])
            if count:  # both are attended to by themselves (Wan Team 2025, sec. 5.1)
                output = output + self.attend(q, k[:, :, :count], v[:, :, :count])
            return output.transpose(1, 2).flatten(2)
        if grid is not None and grid.packed is not None:
            attend = self._attend_to_all if self.attends_padding else masked_attention
            output = segment_cross_attention(q, k, v, mask, grid.packed, attend)
        else:
            output = masked_attention(q, k, v, mask)
        return output.transpose(1, 2).flatten(2)

    def _attend_to_all(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend to all keys, as :func:`masked_attention` does to those that ``mask`` keeps."""
        return self.attend(q, k, v)

    def forward(self, x: Tensor, *context: Tensor, grid: TokenGrid | None = None, ops: BlockOps = TORCH_OPS) -> Tensor:
        z = self.output(x, *context, grid=grid, ops=ops)
        return ops.linear(z, self.proj) if self.in_operations else self.proj(z)
