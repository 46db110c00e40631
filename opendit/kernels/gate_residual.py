"""adaLN-Zero's residual connection: out = x + gate * (branch + bias).

x and branch are (B, N, D), and gate (B, D); for the packed form see common.py. bias (D,), if any, is the bias of the
branch's last linear layer. Adding the bias here costs no time, and the bias's gradient needs no separate pass. The
computation is fp32. The backward pass reads branch and dout once and writes dbranch once; dx is dout:

    dbranch = gate * dout,  dgate = sum_N (branch + bias) * dout,  dbias = sum_B gate * sum_N dout
"""

import torch
from torch import Tensor

from opendit.kernels import common
from opendit.kernels.common import SIZES, Launch, block_width, check_inputs, rows_of_samples, unit_columns
from opendit.kernels.language import tl, triton
from opendit.kernels.operators import operator
from opendit.kernels.tiles import (
    chunk_of_program,
    column_block,
    load_columns,
    next_segment,
    of_sample,
    store_column_sums,
)

# ---------------------------------------------------------------------------------------------------------- reference


def gate_residual_reference(
    x: Tensor, gate: Tensor, branch: Tensor, bias: Tensor | None = None, sample_of_row: Tensor | None = None
) -> Tensor:
    return x + rows_of_samples(gate, sample_of_row) * (branch if bias is None else branch + bias)


# ------------------------------------------------------------------------------------------------------------ kernels

FORWARD = Launch(rows=32, tiles=1, warps=4)
BACKWARD = Launch(rows=8, tiles=32, warps=2)


@triton.jit
def _forward_rows(
    x_ptr, gate_ptr, branch_ptr, bias_ptr, out_ptr, column, first, stop,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    gate = load_columns(gate_ptr, column, D, BLOCK)
    if HAS_BIAS:
        bias = load_columns(bias_ptr, column, D, BLOCK)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        offsets, mask = column_block(column, start, stop, D, BLOCK, ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            branch += bias
        tl.store(out_ptr + offsets, (x + gate * branch).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _gate_residual_forward_kernel(
    x_ptr, gate_ptr, branch_ptr, bias_ptr, out_ptr, sample_ptr, rows, length, chunks_per_sample, gate_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PACKED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # Programs with neighbouring numbers read the same rows, so that DRAM is read in complete lines.
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    program = tl.program_id(0) // BLOCKS
    sample, first, stop = chunk_of_program(program, rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            gate = of_sample(gate_ptr, sample, gate_stride)
            _forward_rows(
                x_ptr, gate, branch_ptr, bias_ptr, out_ptr, column, first, end, D, BLOCK, ROWS, STAGES, HAS_BIAS
            )
            first = end
    else:
        gate = of_sample(gate_ptr, sample, gate_stride)
        _forward_rows(x_ptr, gate, branch_ptr, bias_ptr, out_ptr, column, first, stop, D, BLOCK, ROWS, STAGES, HAS_BIAS)


@triton.jit
def _backward_rows(
    dout_ptr, gate_ptr, branch_ptr, bias_ptr, dbranch_ptr, dgate_ptr, dbias_ptr, column, first, stop,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Write dbranch for rows of one sample. With SUMS, also sum dgate; with HAS_BIAS, dbias."""
    gate = load_columns(gate_ptr, column, D, BLOCK)
    if SUMS:
        # one sum per row of the tile, added up at the end, because warps hold different rows
        dgate = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if HAS_BIAS:
        bias = load_columns(bias_ptr, column, D, BLOCK)
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        offsets, mask = column_block(column, start, stop, D, BLOCK, ROWS)
        dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if SUMS:
            branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                branch += bias
        tl.store(dbranch_ptr + offsets, (gate * dout).to(dbranch_ptr.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            total += dout
        if SUMS:
            dgate += branch * dout
    if SUMS:
        store_column_sums(dgate_ptr, dgate, column, D, BLOCK)
    if HAS_BIAS:
        store_column_sums(dbias_ptr, gate * total, column, D, BLOCK)


@triton.jit(do_not_specialize=SIZES)
def _gate_residual_backward_kernel(
    dout_ptr, gate_ptr, branch_ptr, bias_ptr, dbranch_ptr, dgate_ptr, dbias_ptr, sample_ptr, rows, length,
    chunks_per_sample, gate_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PACKED: tl.constexpr, HAS_BIAS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    program = tl.program_id(0) // BLOCKS
    sample, first, stop = chunk_of_program(program, rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            slot = program + sample
            _backward_rows(
                dout_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, bias_ptr, dbranch_ptr,
                of_sample(dgate_ptr, slot, D), of_sample(dbias_ptr, slot, D), column, first, end,
                D, BLOCK, ROWS, STAGES, HAS_BIAS, SUMS,
            )  # fmt: skip
            first = end
    else:
        _backward_rows(
            dout_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, bias_ptr, dbranch_ptr,
            of_sample(dgate_ptr, program, D), of_sample(dbias_ptr, program, D), column, first, stop,
            D, BLOCK, ROWS, STAGES, HAS_BIAS, SUMS,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- operator


def _forward(x: Tensor, gate: Tensor, branch: Tensor, bias: Tensor | None, sample_of_row: Tensor | None) -> Tensor:
    (gate,) = unit_columns(gate)
    width = x.shape[-1]
    block = block_width(width)
    blocks = -(-width // block)
    cut = common.cut_rows("gate_residual_forward", FORWARD, x, gate.shape[0], sample_of_row, blocks)
    out = _forward_fake(x, gate, branch, bias, sample_of_row)
    _gate_residual_forward_kernel[(cut.programs * blocks,)](
        cut.x, gate, branch.contiguous(), common.or_unused(bias, x), out, *cut.shape_arguments, gate.stride(0),
        D=width, BLOCK=block, BLOCKS=blocks, PACKED=cut.packed, HAS_BIAS=bias is not None, **cut.launch.options(),
    )  # fmt: skip
    return out


def _forward_fake(x: Tensor, gate: Tensor, branch: Tensor, bias: Tensor | None, sample_of_row: Tensor | None) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _backward(
    dout: Tensor, gate: Tensor, branch: Tensor | None, bias: Tensor | None, sample_of_row: Tensor | None,
    dtype: torch.dtype,
):  # fmt: skip
    (gate,) = unit_columns(gate)
    width = dout.shape[-1]
    block = block_width(width)
    blocks = -(-width // block)
    cut = common.cut_rows("gate_residual_backward", BACKWARD, dout, gate.shape[0], sample_of_row, blocks)
    dbranch = torch.empty(dout.shape, dtype=dtype, device=dout.device)
    outputs, sums = cut.new_sums(() if branch is None else (gate,))
    total = None if bias is None else cut.new_total()
    _gate_residual_backward_kernel[(cut.programs * blocks,)](
        cut.x, gate, dbranch if branch is None else branch.contiguous(), common.or_unused(bias, dbranch), dbranch,
        *(sums or [dbranch]), common.or_unused(total, dbranch), *cut.shape_arguments, gate.stride(0),
        D=width, BLOCK=block, BLOCKS=blocks, PACKED=cut.packed, HAS_BIAS=bias is not None, SUMS=branch is not None,
        **cut.launch.options(),
    )  # fmt: skip
    cut.finish_sums(outputs, sums)
    return dbranch, *(outputs or common.no_sums(dbranch, 1)), common.finish_bias(total, bias, dbranch)


def _backward_fake(
    dout: Tensor, gate: Tensor, branch: Tensor | None, bias: Tensor | None, sample_of_row: Tensor | None,
    dtype: torch.dtype,
):  # fmt: skip
    dbranch = torch.empty(dout.shape, dtype=dtype, device=dout.device)
    dgate = torch.empty(0 if branch is None else gate.shape, dtype=gate.dtype, device=gate.device)
    return dbranch, dgate, common.like_bias(bias, dbranch)


def kept_branch(branch: Tensor, bias: Tensor | None, sums: bool, of_bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the branch and the bias to save for the backward pass; None if not needed.

    Only the gate's gradient needs the branch. With LoRA, gates and biases are frozen. sums: True if the gate needs a
    gradient. of_bias: True if the bias needs a gradient.
    """
    return branch if sums else None, bias if sums or of_bias else None


def _setup_context(ctx, inputs, output) -> None:
    _, gate, branch, bias, sample_of_row = inputs
    _, of_gate, _, of_bias, _ = ctx.needs_input_grad[:5]
    ctx.dtype = branch.dtype
    ctx.save_for_backward(gate, *kept_branch(branch, bias, of_gate, of_bias), sample_of_row)


def _autograd_backward(ctx, dout):
    gate, branch, bias, sample_of_row = ctx.saved_tensors
    dbranch, dgate, dbias = gate_residual_backward(dout, gate, branch, bias, sample_of_row, ctx.dtype)
    return dout, None if branch is None else dgate, dbranch, None if bias is None else dbias, None


# Without ``branch``, the operator computes no gradient of the gate. ``dtype``: dtype of the branch.
gate_residual_backward = operator(
    "gate_residual_backward(Tensor dout, Tensor gate, Tensor? branch, Tensor? bias, Tensor? sample_of_row, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_forward_op = operator(
    "gate_residual(Tensor x, Tensor gate, Tensor branch, Tensor? bias, Tensor? sample_of_row) -> Tensor",
    _forward,
    _forward_fake,
    _autograd_backward,
    _setup_context,
)


def gate_residual(
    x: Tensor, gate: Tensor, branch: Tensor, bias: Tensor | None = None, sample_of_row: Tensor | None = None
) -> Tensor:
    """Compute x + gate * (branch + bias) with Triton kernels, differentiable in x, gate, branch and bias.

    Args:
        x, branch: (B, N, D) bf16, fp16 or fp32, not necessarily one dtype; or (rows, D) with ``sample_of_row``.
        gate: (B, D), any of these dtypes; rows may be strided (a chunk of a (B, 6 D) tensor).
        bias: (D,), any of these dtypes, or None.
        sample_of_row: (rows,) int32 or int64, non-decreasing: the sample of each row.

    Returns x's shape and dtype. Raises ValueError if shapes, dtypes or devices don't fit.
    """
    check_inputs(x, sample_of_row, {"branch": branch}, bias, gate=gate)
    return _forward_op(x, gate, branch, bias, sample_of_row)
