"""Attention for short sequences, without gradients, also for head sizes that are not powers of two.

Training kernels pad a head of size 72 to 128, and spend time on the padding. This kernel divides the head into two
blocks, 64 + 16. The cost is as for size 80. Scores, sums and the softmax are fp32. Probabilities are rounded to the
inputs' dtype, as in every tiled kernel (Dao 2023, "FlashAttention-2", algorithm 1).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.kernels.common import kernels_available, missing, next_power_of_2
from opendit.kernels.language import tl, triton
from opendit.models.layers import Attend

# maximum number of tokens; for longer sequences, other kernels are faster
LONGEST = 1024


@dataclass(frozen=True)
class AttentionTiles:
    """Queries per program, keys per tile, tiles in flight, and warps per program."""

    rows: int
    keys: int
    stages: int
    warps: int


# All tiles have 64 keys, so that a sample's bits don't depend on the batch size. One stage instead of three
# causes an illegal memory access on the GPU (Triton 3.6).
FEW, MANY = AttentionTiles(64, 64, 3, 4), AttentionTiles(128, 64, 3, 4)
# Maximum number of heads, over all samples, for FEW and for this kernel. For more heads, cuDNN is faster. Times in us
# on an H200, DiT-XL/2 at 256 px (benchmarks/bench_short_attention.py):
#    32 heads (one guided picture)   FEW 6.1, MANY 7.9, cuDNN 9.1
#    256 heads                       FEW 26.1, MANY 24.4, cuDNN 25.2 plus kernels that clear memory
#    2,048 heads                     MANY 177, cuDNN 148
HEADS_OF_FEW, HEADS = 96, 320


def short_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v of (B, H, N, d) in torch, in fp32 or fp64."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


def split_head(size: int) -> tuple[int, int]:
    """Return the widths of the two blocks that cover a head: (64, 16) for size 72, (64, 0) for size 64. A width is 0,
    or a power of two from 16 on."""
    main = max(16, next_power_of_2(size + 1) // 2)
    rest = size - main
    return main, 0 if rest <= 0 else max(16, next_power_of_2(rest))


def takes(q: Tensor, k: Tensor) -> bool:
    """Return True if the kernel supports dtype, shape and device of q and k (B, H, N, d), and is the faster choice."""
    if q.dtype not in (torch.bfloat16, torch.float16) or not kernels_available(q.device, q.dtype)[0]:
        return False
    batch, heads, tokens, size = q.shape
    tiles = -(-tokens // 256)
    few = q.shape == k.shape and tokens <= LONGEST and batch * heads * tiles <= HEADS
    return few and size % 8 == 0 and sum(split_head(size)) <= 128


def short_is_faster(device: torch.device) -> bool:
    """Return True for GPUs on which short attention is faster than torch's attention. Only Hopper was measured."""
    return device.type == "cuda" and missing("short_attention", device) is None


@triton.jit
def _load(ptr, rows, stride, live, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr):
    """Load columns [START, START + WIDTH) of a head's rows, zero from D on. ``stride``: in units of UNIT values."""
    cols = START + tl.arange(0, WIDTH)
    mask = live[:, None] & (cols < D)[None, :]
    return tl.load(ptr + (rows * stride * UNIT)[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=("tokens", "q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token",
                               "v_batch", "v_head", "v_token"))  # fmt: skip
def _short_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, tokens, heads, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head,
    v_token, scale,
    D: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    EVEN: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute attention for one tile of queries of one head. Strides are in units of UNIT values, so that the compiler
    knows the alignment to 16 bytes. EVEN: True if all tiles of keys are full."""
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    q_ptr += (tl.cast(sample, tl.int64) * q_batch + head * q_head) * UNIT
    k_ptr += (tl.cast(sample, tl.int64) * k_batch + head * k_head) * UNIT
    v_ptr += (tl.cast(sample, tl.int64) * v_batch + head * v_head) * UNIT
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < tokens
    q = _load(q_ptr, rows, q_token, live, 0, MAIN, D, UNIT)
    total = tl.zeros((ROWS, MAIN), dtype=tl.float32)
    if REST > 0:
        q_rest = _load(q_ptr, rows, q_token, live, MAIN, REST, D, UNIT)
        total_rest = tl.zeros((ROWS, REST), dtype=tl.float32)
    largest = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    weight = tl.zeros((ROWS,), dtype=tl.float32)
    for first in tl.range(0, tokens, KEYS, num_stages=STAGES):
        keys = first + tl.arange(0, KEYS)
        there = keys < tokens
        k = _load(k_ptr, keys, k_token, there, 0, MAIN, D, UNIT)
        scores = tl.dot(q, tl.trans(k), out_dtype=tl.float32)
        if REST > 0:
            k_rest = _load(k_ptr, keys, k_token, there, MAIN, REST, D, UNIT)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, out_dtype=tl.float32)
        if not EVEN:
            scores = tl.where(there[None, :], scores, -float("inf"))
        bound = tl.maximum(largest, tl.max(scores, axis=1) * scale)  # scale includes log2(e), because exp2 is used
        shrink = tl.exp2(largest - bound)
        p = tl.exp2(scores * scale - bound[:, None])
        weight = weight * shrink + tl.sum(p, axis=1)
        largest = bound
        p = p.to(v_ptr.dtype.element_ty)
        v = _load(v_ptr, keys, v_token, there, 0, MAIN, D, UNIT)
        total = tl.dot(p, v, total * shrink[:, None], out_dtype=tl.float32)
        if REST > 0:
            v_rest = _load(v_ptr, keys, v_token, there, MAIN, REST, D, UNIT)
            total_rest = tl.dot(p, v_rest, total_rest * shrink[:, None], out_dtype=tl.float32)
    # The result is stored as (B, N, H, D).
    place = (tl.cast(sample, tl.int64) * tokens + rows) * (heads * D) + head * D
    cols = tl.arange(0, MAIN)
    out = (total / weight[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] + cols[None, :], out, mask=live[:, None] & (cols < D)[None, :])
    if REST > 0:
        cols = MAIN + tl.arange(0, REST)
        out = (total_rest / weight[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place[:, None] + cols[None, :], out, mask=live[:, None] & (cols < D)[None, :])


class ShortAttention:
    """Attention without gradients. Calls :func:`short_attention` for the inputs that it supports, and the function
    ``otherwise`` for all others, such as cross-attention."""

    def __init__(self, otherwise: Attend):
        self.otherwise = otherwise

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return short_attention(q, k, v) if takes(q, k) else self.otherwise(q, k, v)


def short_attention(q: Tensor, k: Tensor, v: Tensor, tiles: AttentionTiles | None = None) -> Tensor:
    """Compute attention of q, k, v (B, H, N, d), bf16 or fp16, where d is a multiple of 8. Returns (B, H, N, d), a
    transposed view of a contiguous (B, N, H, d)."""
    B, H, N, d = q.shape
    parts = [x if x.stride(3) == 1 and not any(s % 8 for s in x.stride()[:3]) else x.contiguous() for x in (q, k, v)]
    out = torch.empty(B, N, H, d, dtype=q.dtype, device=q.device)
    main, rest = split_head(d)
    if tiles is None:  # for heads wider than 80, only FEW has enough registers
        tiles = MANY if B * H * -(-N // 256) > HEADS_OF_FEW and main + rest <= 80 else FEW
    strides = [stride // 8 for x in parts for stride in x.stride()[:3]]
    keys = min(tiles.keys, max(16, next_power_of_2(N)))
    _short_attention_kernel[(-(-N // tiles.rows), B * H)](
        *parts, out, N, H, *strides, math.log2(math.e) / math.sqrt(d),
        D=d, MAIN=main, REST=rest, ROWS=tiles.rows, KEYS=keys, EVEN=N % keys == 0, UNIT=8,
        STAGES=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return out.transpose(1, 2)
