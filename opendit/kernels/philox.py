"""Compute the random bits of opendit/diffusion/random.py with one kernel. In torch, this takes about 120 operations.

The Philox counter is (block, index, step, stream), and the key is ``seed``. Word k of the output is the sample's random
number 4 * block + k. The reference is ``opendit.diffusion.random.random_bits`` on a device without kernels. All devices
give equal bits, because the arithmetic is on integers.
"""

import torch
from torch import Tensor

from opendit.kernels.language import tl, triton

BLOCK = 256  # counters per program


@triton.jit(do_not_specialize=("seed", "step", "stream", "count"))
def _philox_kernel(index_ptr, bits_ptr, seed, step, stream, count, BLOCK: tl.constexpr):
    sample = tl.program_id(0)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    unused = tl.zeros((BLOCK,), dtype=tl.uint32)
    index = unused + tl.load(index_ptr + sample).to(tl.uint32)
    words = tl.philox(seed, block.to(tl.uint32), index, unused + step.to(tl.uint32), unused + stream.to(tl.uint32))
    row = bits_ptr + tl.cast(sample, tl.int64) * count
    for k in tl.static_range(4):
        tl.store(row + 4 * block + k, words[k].to(tl.int64), mask=4 * block + k < count)


def philox_bits(seed: int, step: int, index: Tensor, stream: int, count: int) -> Tensor:
    """Return uniform 32-bit integers, (B, count) int64. index: (B,) int64, the samples' indices."""
    bits = torch.empty(len(index), count, dtype=torch.int64, device=index.device)
    grid = (len(index), -(-count // (4 * BLOCK)))
    with torch.cuda.device_of(index):  # Triton launches on the current device, so make it the index's device
        _philox_kernel[grid](index.contiguous(), bits, seed, step & 0xFFFFFFFF, stream, count, BLOCK=BLOCK)
    return bits
