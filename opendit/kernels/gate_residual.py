"""adaLN-Zero's residual connection: out = x + gate * branch.

x, branch (B, N, D) with gate (B, D); or packed, x, branch (rows, D) with sample_of_row (rows,), see kernels/common.py.
Products and sums in fp32, I/O in bf16, fp16 or fp32; out has x's dtype. Backward reads branch and dout once and
writes dbranch once; dx is dout itself:

    dbranch = gate * dout,  dgate = sum_N branch * dout
"""

import torch
from torch import Tensor

from opendit.kernels import common
from opendit.kernels.common import SIZES, Launch, next_power_of_2, register, rows_of_samples, tl, triton, unit_columns
from opendit.kernels.tiles import chunk_of_program, next_segment, of_sample

# ---------------------------------------------------------------------------------------------------------- reference


def gate_residual_reference(x: Tensor, gate: Tensor, branch: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    """x + gate * branch in torch, in the inputs' precision."""
    return x + rows_of_samples(gate, sample_of_row) * branch


# ------------------------------------------------------------------------------------------------------------ kernels

# Nothing is summed along a row here, so a program takes a block of columns only: 128, which divides every DiT's width
# and leaves 16 bytes in half precision for each of 16 lanes.


def block_width(width: int) -> int:
    return min(128, next_power_of_2(width))


FORWARD = Launch(rows=32, tiles=1, warps=4)
BACKWARD = Launch(rows=32, tiles=4, warps=4)


@triton.jit
def _gate(gate_ptr, column, D: tl.constexpr, BLOCK: tl.constexpr):
    """The gate of columns column .. column + BLOCK, fp32 (1, BLOCK)."""
    cols = column + tl.arange(0, BLOCK)
    return tl.load(gate_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _block(column, start, stop, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(offsets, mask) of a tile of rows from ``start``, before ``stop``, of those columns."""
    cols = tl.arange(0, BLOCK)
    mask = (start + tl.arange(0, ROWS) < stop)[:, None]
    if D % BLOCK != 0:
        mask = mask & (column + cols < D)[None, :]
    first = tl.cast(start, tl.int64) * D + column
    return first + (tl.arange(0, ROWS)[:, None] * D + cols[None, :]), mask


@triton.jit
def _forward_rows(
    x_ptr, gate_ptr, branch_ptr, out_ptr, column, first, stop,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows first .. stop, all of one sample."""
    gate = _gate(gate_ptr, column, D, BLOCK)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        offsets, mask = _block(column, start, stop, D, BLOCK, ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, (x + gate * branch).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    x_ptr, gate_ptr, branch_ptr, out_ptr, sample_ptr, rows, length, chunks_per_sample, gate_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    column = (tl.program_id(0) % BLOCKS) * BLOCK  # neighbours share rows, so that whole lines of DRAM are in use
    program = tl.program_id(0) // BLOCKS
    sample, first, stop = chunk_of_program(program, rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            gate = of_sample(gate_ptr, sample, gate_stride)
            _forward_rows(x_ptr, gate, branch_ptr, out_ptr, column, first, end, D, BLOCK, ROWS, STAGES)
            first = end
    else:
        gate = of_sample(gate_ptr, sample, gate_stride)
        _forward_rows(x_ptr, gate, branch_ptr, out_ptr, column, first, stop, D, BLOCK, ROWS, STAGES)


@triton.jit
def _backward_rows(
    dout_ptr, gate_ptr, branch_ptr, dbranch_ptr, dgate_ptr, column, first, stop,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows first .. stop, all of one sample: their dbranch and, to one slot, their sum for the gate."""
    gate = _gate(gate_ptr, column, D, BLOCK)
    dgate = tl.zeros((ROWS, BLOCK), dtype=tl.float32)  # rows meet once, at the end: warps hold different rows
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        offsets, mask = _block(column, start, stop, D, BLOCK, ROWS)
        dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dbranch_ptr + offsets, (gate * dout).to(dbranch_ptr.dtype.element_ty), mask=mask)
        dgate += branch * dout
    cols = column + tl.arange(0, BLOCK)
    tl.store(dgate_ptr + cols, tl.sum(dgate, axis=0).to(dgate_ptr.dtype.element_ty), mask=cols < D)


@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    dout_ptr, gate_ptr, branch_ptr, dbranch_ptr, dgate_ptr, sample_ptr, rows, length, chunks_per_sample, gate_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    program = tl.program_id(0) // BLOCKS
    sample, first, stop = chunk_of_program(program, rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            gate = of_sample(gate_ptr, sample, gate_stride)
            dgate = of_sample(dgate_ptr, program + sample, D)
            _backward_rows(dout_ptr, gate, branch_ptr, dbranch_ptr, dgate, column, first, end, D, BLOCK, ROWS, STAGES)
            first = end
    else:
        gate = of_sample(gate_ptr, sample, gate_stride)
        dgate = of_sample(dgate_ptr, program, D)
        _backward_rows(dout_ptr, gate, branch_ptr, dbranch_ptr, dgate, column, first, stop, D, BLOCK, ROWS, STAGES)


# ----------------------------------------------------------------------------------------------------------- operator


def _forward(x: Tensor, gate: Tensor, branch: Tensor, sample_of_row: Tensor | None) -> Tensor:
    (gate,) = unit_columns(gate)
    width = x.shape[-1]
    block = block_width(width)
    blocks = -(-width // block)
    cut = common.cut_rows("gate_residual_forward", FORWARD, x, gate.shape[0], sample_of_row, blocks)
    out = _forward_fake(x, gate, branch, sample_of_row)
    _forward_kernel[(cut.programs * blocks,)](
        cut.x, gate, branch.contiguous(), out, *cut.shape_arguments, gate.stride(0),
        D=width, BLOCK=block, BLOCKS=blocks, PACKED=cut.packed, **cut.launch.options(),
    )  # fmt: skip
    return out


def _forward_fake(x: Tensor, gate: Tensor, branch: Tensor, sample_of_row: Tensor | None) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _backward(dout: Tensor, gate: Tensor, branch: Tensor, sample_of_row: Tensor | None) -> tuple[Tensor, Tensor]:
    (gate,) = unit_columns(gate)
    width = branch.shape[-1]
    block = block_width(width)
    blocks = -(-width // block)
    cut = common.cut_rows("gate_residual_backward", BACKWARD, branch, gate.shape[0], sample_of_row, blocks)
    dbranch = torch.empty(branch.shape, dtype=branch.dtype, device=branch.device)
    outputs, sums = cut.new_sums((gate,))
    _backward_kernel[(cut.programs * blocks,)](
        dout.contiguous(), gate, cut.x, dbranch, *sums, *cut.shape_arguments, gate.stride(0),
        D=width, BLOCK=block, BLOCKS=blocks, PACKED=cut.packed, **cut.launch.options(),
    )  # fmt: skip
    cut.finish_sums(outputs, sums)
    return dbranch, outputs[0]


def _backward_fake(dout: Tensor, gate: Tensor, branch: Tensor, sample_of_row: Tensor | None) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (branch, gate))


def _setup_context(ctx, inputs, output) -> None:
    _, gate, branch, sample_of_row = inputs
    ctx.save_for_backward(gate, branch, sample_of_row)


def _autograd_backward(ctx, dout):
    gate, branch, sample_of_row = ctx.saved_tensors
    dbranch, dgate = torch.ops.opendit.gate_residual_backward(dout, gate, branch, sample_of_row)
    return dout, dgate, dbranch, None


register(
    "gate_residual_backward(Tensor dout, Tensor gate, Tensor branch, Tensor? sample_of_row) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register(
    "gate_residual(Tensor x, Tensor gate, Tensor branch, Tensor? sample_of_row) -> Tensor",
    _forward,
    _forward_fake,
    _autograd_backward,
    _setup_context,
)


def gate_residual(x: Tensor, gate: Tensor, branch: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    """x + gate * branch by Triton kernels, differentiable in x, gate and branch.

    Args:
        x, branch: (B, N, D) bf16, fp16 or fp32, not necessarily one dtype; or (rows, D) with ``sample_of_row``.
        gate: (B, D), any of these dtypes; rows may be strided (a chunk of a (B, 6 D) tensor).
        sample_of_row: (rows,) int32 or int64, non-decreasing, the sample each row belongs to.

    Returns:
        x's shape and dtype.
    """
    common.check_inputs(x, sample_of_row, {"branch": branch}, gate=gate)
    return torch.ops.opendit.gate_residual(x, gate, branch, sample_of_row)
