"""Look up each sample's rows of a sampler's tables by the sample's own step, and increment the step.

Another kernel gathers a few wide rows, such as DiT-XL/2's modulations with 195,840 values. For 16 rows on an H200,
torch's kernel took 17 us, four times the time of the memory traffic.
"""

import torch
from torch import Tensor

from opendit.kernels.common import next_power_of_2
from opendit.kernels.language import tl, triton

# ---------------------------------------------------------------------------------------------------------- reference


def take_step_reference(step: Tensor, rows: Tensor, stride: int, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`take_step` in torch."""
    order = torch.arange(len(step), device=step.device)
    found = (rows + step * stride).flatten(), numbers[step], order + step * len(step)
    step += 1
    return found


# ------------------------------------------------------------------------------------------------------------- kernel


@triton.jit(do_not_specialize=("samples", "stride"))
def _take_step_kernel(
    step_ptr, rows_ptr, numbers_ptr, rows_out_ptr, numbers_out_ptr, cells_ptr, samples, stride,
    HALVES: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    step = tl.load(step_ptr + sample)
    for half in range(HALVES):
        place = half * samples + sample
        tl.store(rows_out_ptr + place, tl.load(rows_ptr + place) + step * stride)
    cols = tl.arange(0, BLOCK)
    row = tl.load(numbers_ptr + step * NUMBERS + cols, mask=cols < NUMBERS)
    tl.store(numbers_out_ptr + sample * NUMBERS + cols, row, mask=cols < NUMBERS)
    tl.store(cells_ptr + sample, step * samples + sample)
    tl.store(step_ptr + sample, step + 1)


WIDTH = 2048  # columns per program


@triton.jit
def _gather_rows_kernel(table_ptr, rows_ptr, out_ptr, columns, stride, WIDTH: tl.constexpr):
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(rows_ptr + tl.program_id(1)).to(tl.int64)
    value = tl.load(table_ptr + row * stride + cols, mask=cols < columns)
    tl.store(out_ptr + tl.cast(tl.program_id(1), tl.int64) * columns + cols, value, mask=cols < columns)


# --------------------------------------------------------------------------------------------------------- operations


def take_step(step: Tensor, rows: Tensor, stride: int, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of tables for samples that may be at different steps, and add 1 to ``step``.

    Args:
        step: (B,) int64.
        rows: (halves, B) int64, contiguous: each sample's row number at step 0 in a table. The number grows by
            ``stride`` in each step.
        numbers: (steps, K) fp32, K values for each step.

    Returns:
        (halves * B,) int64: each sample's row number in the table at its step.
        (B, K) fp32: each sample's row of ``numbers``.
        (B,) int64: step * B + b, the row of sample b in a table of all steps and samples.
    """
    B, count = len(step), numbers.shape[1]
    rows_out, cells = torch.empty(rows.numel(), dtype=rows.dtype, device=rows.device), torch.empty_like(step)
    numbers_out = torch.empty(B, count, dtype=numbers.dtype, device=numbers.device)
    _take_step_kernel[(B,)](
        step, rows, numbers, rows_out, numbers_out, cells, B, stride,
        HALVES=len(rows), NUMBERS=count, BLOCK=next_power_of_2(count), num_warps=1,
    )  # fmt: skip
    return rows_out, numbers_out, cells


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return ``table.index_select(0, rows)``. table: (R, W), may be a slice of columns; rows: (n,) int64."""
    out = torch.empty(len(rows), table.shape[1], dtype=table.dtype, device=table.device)
    _gather_rows_kernel[(-(-table.shape[1] // WIDTH), len(rows))](
        table, rows, out, table.shape[1], table.stride(0), WIDTH=WIDTH, num_warps=8
    )
    return out
