"""Update averages separately from the optimizer's step: average += (1 - decay) * (master - average).

Averages in host memory are updated during the next forward and backward passes. A few programs saturate the link to the
host, and leave most multiprocessors free. Results equal :class:`~opendit.kernels.adamw_ema.FusedStep` bit for bit.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opendit.kernels.common import kernels_available
from opendit.kernels.language import tl, triton
from opendit.kernels.tensor_table import AddressTable, BlockTable, InPlace, Staged, at, check_tensors_fit, device_of

# elements that a program processes at a time, warps per program, and number of programs
BLOCK, WARPS, PROGRAMS = 2048, 4, 32

# ------------------------------------------------------------------------------------------ reference


def averages_reference(masters: list[Tensor], averages: list[list[Tensor]], decays: list[float]) -> None:
    for shards, decay in zip(averages, decays, strict=True):
        torch._foreach_lerp_(shards, masters, 1.0 - decay)


# ------------------------------------------------------------------------------------------ kernel


@triton.jit
def _averages_block(row, tensors, offsets, mask, scalars, shift, stride, AVERAGES: tl.constexpr, ALIGNED: tl.constexpr):
    master = tl.load(at(tl.load(row + tensors), offsets, tl.float32, ALIGNED), mask=mask, other=0.0)
    for k in tl.static_range(AVERAGES):
        averages = at(tl.load(row + (2 + k) * tensors) + shift + k * stride.to(tl.int64), offsets, tl.float32, ALIGNED)
        average = tl.load(averages, mask=mask, other=0.0)
        average += tl.load(scalars + 4 + k) * (master - average)
        tl.store(averages, average, mask=mask)


@triton.jit(do_not_specialize=("tensors", "first", "last", "shift", "stride"))
def _averages_kernel(
    table, blocks, scalars, tensors, first, last, shift, stride, BLOCK: tl.constexpr, AVERAGES: tl.constexpr
):
    """Update the averages of blocks ``first`` to ``last`` - 1, unless scalars[0] is 0. The table's rows are size,
    master, and the averages. Average k is ``shift`` + k * ``stride`` bytes after its address."""
    if tl.load(scalars) != 0.0:
        for block in range(first + tl.program_id(0), last, tl.num_programs(0)):
            row = table + tl.load(blocks + 2 * block)
            start = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
            offsets = start + tl.arange(0, BLOCK)
            size = tl.load(row)
            low_bits = tl.load(row + tensors)
            for k in tl.static_range(AVERAGES):
                low_bits |= tl.load(row + (2 + k) * tensors)
            # most blocks are complete and aligned, and need no mask
            if (start + BLOCK <= size) & (low_bits % 16 == 0):
                everything = tl.full((BLOCK,), 1, tl.int1)
                _averages_block(row, tensors, offsets, everything, scalars, shift, stride, AVERAGES, True)
            else:
                _averages_block(row, tensors, offsets, offsets < size, scalars, shift, stride, AVERAGES, False)


# ------------------------------------------------------------------------------------------ the averages


class SeparateAverages:
    """Averages of ``masters``, updated separately from the optimizer's step.

    Masters are fp32 and contiguous. If one is on a GPU, others may be in pinned host memory. ``averages`` holds each
    average's fp32 tensors, with the masters' sizes and order, on their device or in pinned host memory. Raises
    ValueError if sizes, dtypes, layouts or devices don't fit.
    """

    def __init__(self, masters: Sequence[Tensor], averages: Sequence[Sequence[Tensor]], *, block: int = BLOCK):
        self.masters = check_tensors_fit(masters, "masters", masters)
        self.averages = [check_tensors_fit(shards, "averages", masters) for shards in averages]
        self.device, self.block = device_of(masters), block
        self.kernels, self.why = kernels_available(self.device, torch.float32)
        sizes = [master.numel() for master in masters]
        self._blocks, self._addresses = BlockTable(sizes, block, self.device), AddressTable(sizes, self.device)
        self._addresses.refresh([self.masters, *self.averages])
        self.access: InPlace | Staged = InPlace()
        self.programs = PROGRAMS

    @torch.no_grad()
    def move(self, scalars: Tensor) -> None:
        """Update all averages on the current stream, unless the step was skipped.

        scalars: see :attr:`opendit.kernels.adamw_ema.FusedStep.scalars`. Scalars and masters must not change meanwhile.
        """
        if not self.kernels:
            finite, _, _, _, *weights = scalars.tolist()
            if finite:
                averages_reference(self.masters, self.averages, [1.0 - weight for weight in weights])
            return
        count = len(self._blocks.blocks)
        if count and self.averages:
            self.access.run(partial(self._launch, scalars), 0, count)

    def _launch(self, scalars: Tensor, first: int, last: int, shift: int, stride: int) -> None:
        _averages_kernel[(min(self.programs, last - first),)](
            self._addresses.table, self._blocks.blocks, scalars, len(self.masters), first, last, shift, stride,
            BLOCK=self.block, AVERAGES=len(self.averages), num_warps=WARPS,
        )  # fmt: skip

    def stage(self, rows: Tensor, **options: Any) -> None:
        """Access the averages through the ring buffer of :class:`Staged`. The averages must be views of ``rows``."""
        self.access, self.programs = Staged(rows, self.averages, self._blocks, self.device, **options), 2**31 - 1
