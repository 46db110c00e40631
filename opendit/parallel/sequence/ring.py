"""Ring attention (Liu et al. 2023), bidirectional and exact: every rank keeps its queries, while keys and values travel
around the ring of ranks.

Any number of heads works. While a rank attends to the keys and values that have arrived, it also sends these, packed
together, to the next rank. In the backward pass the gradients of keys and values travel around the ring, too. Attention
to a part of the keys also returns the log-sum-exp of its scores, with which the results of all parts are merged.
"""

import math

import torch
from torch import Tensor

from opendit.models.attention import for_every_head
from opendit.parallel.collectives import Ring


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring, lengths: list[int]) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over the keys of all ranks, for this rank's queries: (B, H, n, d).

    Args:
        q: queries (B, H, n, d) of this rank's tokens without padding.
        k, v: keys and values (B, kv_heads, n, d). If kv_heads < H, neighbouring query heads share a key-value head, and
            only kv_heads heads are sent.
        ring: ring of the ranks that share the sequence.
        lengths: n of every rank. The first rank's n is the largest; n may be 0.
    """
    return _RingAttention.apply(q, k, v, ring, lengths)


def _pack(k: Tensor, v: Tensor, rows: int) -> Tensor:
    """Pack k, v (B, H, n, d) as (2, B, rows, H, d), which has the same shape on all ranks. Rows after the n-th are
    uninitialised and never read."""
    B, H, n, d = k.shape
    packed = k.new_empty(2, B, rows, H, d)
    packed[0, :, :n].copy_(k.transpose(1, 2))
    packed[1, :, :n].copy_(v.transpose(1, 2))
    return packed


def _unpack(packed: Tensor, length: int) -> tuple[Tensor, Tensor]:
    k, v = packed[:, :, :length].transpose(2, 3).unbind(0)
    return k, v


def _of_shared(grad: Tensor, heads: int) -> Tensor:
    """Add up the gradients of keys or values (B, H, n, d), one for each query head, over the query heads that share a
    key-value head."""
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
            """Return (the rank whose keys have arrived, the gradients of these keys and values from this rank's
            queries)."""
            source, block = next(arriving)
            if not lengths[source] or not q.shape[2]:
                return source, torch.zeros_like(block)
            k, v = _unpack(block, lengths[source])
            part, dk, dv = attend_part_backward(dout, q, *for_every_head(q, k, v), out, lse)
            torch.add(dq, part, out=dq)  # dq.add_ would leave dq unchanged on Gemini's tensors
            return source, _pack(_of_shared(dk, k.shape[1]), _of_shared(dv, k.shape[1]), lengths[0])

        _, own = next_part()

        def piece(rank: int) -> Tensor:
            if rank == ring.group.rank:
                return own
            source, part = next_part()
            assert source == rank  # keys arrive in the order in which the ring requests their gradients
            return part

        dk, dv = _unpack(ring.reduce_scatter(piece), lengths[ring.group.rank])
        return dq.to(q.dtype), dk, dv, None, None


HALF = (torch.bfloat16, torch.float16)


def reference_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`attend_part` with plain operations in the input's dtype. This allocates the scores (B, H, N,
    M)."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`attend_part_backward` with plain operations."""
    scale = 1 / math.sqrt(q.shape[-1])
    p = (q @ k.transpose(-1, -2) * scale - lse.unsqueeze(-1)).exp()
    ds = p * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def _flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in HALF and q.shape[-1] % 8 == 0


def attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, H, N, d) of q (B, H, N, d) over k, v (B, H, M, d), and the log-sum-exp of the
    scores (B, H, N), which is fp32 for inputs of half precision."""
    if _flash(q):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
        return out, lse
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    out, lse = reference_forward(q.float(), k.float(), v.float())
    return out.to(q.dtype), lse


def attend_part_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of attention to these keys. dq is only the term of q's gradient that comes from these keys.
    ``out`` (B, H, N, d) and ``lse`` (B, H, N) must be the results over all keys."""
    if _flash(q):
        # These are the forward pass's seed and offset for dropout. Without dropout, they are not read.
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False, seed, offset
        )
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, False)
    grads = reference_backward(*(t.float() for t in (dout, q, k, v, out, lse)))
    dq, dk, dv = (grad.to(q.dtype) for grad in grads)
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of attention to two parts of the keys. ``out`` (B, H, N, d), which is changed in place, and
    ``lse`` (B, H, N) are fp32 or wider. Return the merged out and lse.

    out' = (e^lse out + e^part_lse part) / (e^lse + e^part_lse), computed as an interpolation between out and part.
    """
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    return out.lerp_(part.to(out.dtype), weight), torch.logaddexp(lse, part_lse)
