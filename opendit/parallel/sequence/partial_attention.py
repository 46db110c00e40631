"""Attention to a part of the keys, which can be merged with attention to the others (FlashAttention's log-sum-exp).

    lse_i = log sum_j exp(q_i . k_j / sqrt(d)),   out_i = sum_j exp(q_i . k_j / sqrt(d) - lse_i) v_j

The backward pass of a part, given the *whole* output and log-sum-exp, gives that part's exact gradients (Dao et al.
2022, app. B.2; Liu et al., "Ring Attention with Blockwise Transformers", 2023).
"""

import math

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def reference_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The expression in the input's dtype; builds the scores (B, H, N, M)."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`attend_part_backward` by the formula."""
    scale = 1 / math.sqrt(q.shape[-1])
    p = (q @ k.transpose(-1, -2) * scale - lse.unsqueeze(-1)).exp()
    ds = p * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def _flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in HALF and q.shape[-1] % 8 == 0


def attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out (B, H, N, d), lse (B, H, N)) of q (B, H, N, d) over k, v (B, H, M, d); lse is fp32 for half precision."""
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
    """(dq, dk, dv) that come from these keys; out (B, H, N, d) and lse (B, H, N) are those over all keys."""
    if _flash(q):
        # What the forward pass returns for these two without dropout; they are not read then.
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
    """Attention to both of two parts of the keys; out (B, H, N, d) and lse (B, H, N) fp32 or wider. ``out`` is reused.

    out' = (e^lse out + e^part_lse part) / (e^lse + e^part_lse), which is an interpolation.
    """
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    return out.lerp_(part.to(out.dtype), weight), torch.logaddexp(lse, part_lse)
