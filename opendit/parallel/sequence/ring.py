"""Ring attention (Liu et al. 2023), bidirectional and exact: every rank keeps its queries, keys and values go round.

Any number of heads will do. Keys and values, packed together, travel to the next rank under the attention to those that
are here; in the backward pass their gradients travel with them.
"""

import torch
from torch import Tensor

from opendit.models.attention import for_every_head
from opendit.parallel.sequence.collectives import Ring
from opendit.parallel.sequence.partial_attention import attend_part, attend_part_backward, merge


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring, lengths: list[int]) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the keys of all ranks, for this rank's queries.

    q (B, H, n, d) and k, v (B, kv_heads, n, d) are of this rank's tokens without padding; neighbouring heads share keys
    and values where there are fewer of these, which travel so. ``lengths`` are the n of all ranks, none more than the
    first one's; some may be 0. Returns (B, H, n, d).
    """
    return _RingAttention.apply(q, k, v, ring, lengths)


def _pack(k: Tensor, v: Tensor, rows: int) -> Tensor:
    """(2, B, rows, H, d) of k, v (B, H, n, d): one shape on all ranks; rows past n are never read."""
    B, H, n, d = k.shape
    packed = k.new_empty(2, B, rows, H, d)
    packed[0, :, :n].copy_(k.transpose(1, 2))
    packed[1, :, :n].copy_(v.transpose(1, 2))
    return packed


def _unpack(packed: Tensor, length: int) -> tuple[Tensor, Tensor]:
    k, v = packed[:, :, :length].transpose(2, 3).unbind(0)
    return k, v


def _of_shared(grad: Tensor, heads: int) -> Tensor:
    """The gradient of keys or values for every head (B, H, n, d), of those that they are copies of."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ring: Ring, lengths: list[int]):
        kv, wide = _pack(k, v, lengths[0]), torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(q.shape, dtype=wide), None
        for source, block in ring.arriving(kv):
            if not lengths[source] or not q.shape[2]:
                continue
            part, part_lse = attend_part(q, *for_every_head(q, *_unpack(block, lengths[source])))
            out, lse = (part.to(wide), part_lse) if lse is None else merge(out, lse, part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.ring, ctx.lengths = ring, lengths
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        ring, lengths = ctx.ring, ctx.lengths
        dq = q.new_zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        arriving = ring.arriving(kv)

        def next_part() -> tuple[int, Tensor]:
            """Return a rank, and this rank's part of the gradient of its keys and values."""
            source, block = next(arriving)
            if not lengths[source] or not q.shape[2]:
                return source, torch.zeros_like(block)
            k, v = _unpack(block, lengths[source])
            part, dk, dv = attend_part_backward(dout, q, *for_every_head(q, k, v), out, lse)
            torch.add(dq, part, out=dq)  # not dq.add_: on Gemini's tensors that leaves dq as it is
            return source, _pack(_of_shared(dk, k.shape[1]), _of_shared(dv, k.shape[1]), lengths[0])

        _, own = next_part()

        def piece(rank: int) -> Tensor:
            if rank == ring.group.rank:
                return own
            source, part = next_part()
            assert source == rank  # keys arrive in the order in which the ring asks for their gradients
            return part

        dk, dv = _unpack(ring.reduce_scatter(piece), lengths[ring.group.rank])
        return dq.to(q.dtype), dk, dv, None, None
