"""The gated residual connection of a branch, fused with the next branch's LayerNorm and modulation.

    h = x + gate * (branch + bias),  y = LN(h) * (1 + scale) + shift

x and branch are (B, N, D), gate, shift and scale (B, D), and bias (D,) or None; for the packed form see common.py.
Because the LayerNorm doesn't read h back from memory, the forward pass moves four activation tensors instead of five.
The backward pass moves six instead of eight. It computes from dh and dy:

    dx = dh + LN_backward(dy),  dbranch = gate * dx
    dgate = sum_N (branch + bias) * dx,  dbias = sum_B gate * sum_N dx
    dshift = sum_N dy,  dscale = sum_N dy * hhat,  hhat = (h - mean) * rstd

With CENTER false, the kernels compute RMSNorm instead of LN, see rmsnorm_modulate.py.
"""

from typing import Any

import torch
from torch import Tensor

from opendit.kernels import common, fp8, gate_residual, layernorm_modulate
from opendit.kernels.common import (
    SIZES,
    Launch,
    check_inputs,
    next_power_of_2,
    pipeline_stages,
    split_width,
    unit_columns,
)
from opendit.kernels.fp8 import Float8
from opendit.kernels.language import tl, triton
from opendit.kernels.operators import operator
from opendit.kernels.tiles import (
    chunk_of_program,
    float8_factor,
    float8_range,
    load_rows,
    load_tiles,
    load_vectors,
    modulated_factor,
    next_segment,
    normalize_backward,
    normalize_rows,
    normalize_rows_again,
    of_sample,
    store_rows,
    store_tiles,
    store_vectors,
    zero_vectors,
)

# ---------------------------------------------------------------------------------------------------------- reference


def gate_residual_layernorm_modulate_reference(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    shift: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    sample_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h = gate_residual.gate_residual_reference(x, gate, branch, bias, sample_of_row)
    return h, layernorm_modulate.layernorm_modulate_reference(h, shift, scale, eps, sample_of_row)


# ------------------------------------------------------------------------------------------------------------ kernels


def forward_launch(width: int, element_size: int, row_scales: bool = False) -> Launch:
    """Return the forward kernel's launch shape. Two warps hold gate, shift, scale and two rows of 1,024 + 128 columns
    in registers.

    row_scales: y is float8 with one scale per row. A program then reads all of shift and scale before the first row, so
    it processes more rows. One warp needs no barrier to sum a row.
    """
    main = split_width(width)[0]
    rows = max(1, 512 // main)
    stages = pipeline_stages(rows * width, 2, element_size)
    if row_scales and main <= 1024:
        return Launch(rows=rows, tiles=32, warps=1, stages=stages)
    return Launch(rows=rows, tiles=8, warps=max(1, main // 512), stages=stages)


def backward_launch(width: int, element_size: int) -> Launch:
    """Return the backward kernel's launch shape, with at most 20 columns per thread, because each column needs four
    fp32 sums in registers. 1,152 columns took 253 us with two warps and 279 us with four (65,536 rows, H200)."""
    main = split_width(width)[0]
    rows = max(1, 512 // main)
    stages = pipeline_stages(rows * width, 4, element_size)
    return Launch(rows=rows, tiles=64, warps=min(next_power_of_2(-(-width // 640)), 16), stages=stages)


@triton.jit
def _load_branch(
    branch_ptr, branch_scale_ptr, bias_ptr, row, live, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Load rows of branch, multiply each row by its scale if SCALED, and add the bias. Every tile reads the bias from
    the L1 cache, because no registers are left."""
    branch, branch_t = load_tiles(branch_ptr, row, live, D, MAIN, TAIL, ROWS)
    if SCALED:
        number = load_rows(branch_scale_ptr, row, live, ROWS)
        branch *= number
        branch_t *= number
    if HAS_BIAS:
        bias, bias_t = load_vectors(bias_ptr, D, MAIN, TAIL)
        branch += bias
        branch_t += bias_t
    return branch, branch_t


@triton.jit
def _forward_rows(
    x_ptr, gate_ptr, branch_ptr, branch_scale_ptr, bias_ptr, shift_ptr, scale_ptr, h_ptr, y_ptr, descale_ptr, mean_ptr,
    rstd_ptr, first, stop, eps, factor,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HOLD: tl.constexpr, CENTER: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED_BRANCH: tl.constexpr, FLOAT8: tl.constexpr,
    PARTIALS: tl.constexpr, TARGET: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    SCALED_ROWS: tl.constexpr = FLOAT8 and PARTIALS == 0
    if HOLD:
        gate, gate_t = load_vectors(gate_ptr, D, MAIN, TAIL)
    if HOLD or SCALED_ROWS:
        shift, shift_t = load_vectors(shift_ptr, D, MAIN, TAIL)
        scale, scale_t = load_vectors(scale_ptr, D, MAIN, TAIL)
    if SCALED_ROWS:
        factor, descale = modulated_factor(shift, shift_t, scale, scale_t, D, TAIL, TARGET)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        live = start + tl.arange(0, ROWS) < stop
        row = tl.cast(start, tl.int64)
        x, xt = load_tiles(x_ptr, row, live, D, MAIN, TAIL, ROWS)
        branch, branch_t = _load_branch(
            branch_ptr, branch_scale_ptr, bias_ptr, row, live, D, MAIN, TAIL, ROWS, HAS_BIAS, SCALED_BRANCH
        )
        if not HOLD:
            gate, gate_t = load_vectors(gate_ptr, D, MAIN, TAIL)
            shift, shift_t = load_vectors(shift_ptr, D, MAIN, TAIL)
            scale, scale_t = load_vectors(scale_ptr, D, MAIN, TAIL)
        # Round h to its stored dtype before the LayerNorm, because backward recomputes hhat from the stored h.
        h = (x + gate * branch).to(h_ptr.dtype.element_ty).to(tl.float32)
        ht = (xt + gate_t * branch_t).to(h_ptr.dtype.element_ty).to(tl.float32)
        store_tiles(h_ptr, h, ht, row, live, D, MAIN, TAIL, ROWS)
        h, ht = normalize_rows(h, ht, mean_ptr, rstd_ptr, row, live, eps, D, MAIN, TAIL, ROWS, CENTER)
        y = h * (1.0 + scale) + shift
        yt = ht * (1.0 + scale_t) + shift_t
        # The scale follows from a bound, so no clamping is needed. Rows that are not finite are already NaN.
        if SCALED_ROWS:
            y *= factor
            yt *= factor
            store_rows(descale_ptr, descale, row, live, ROWS)
        elif FLOAT8:
            y = float8_range(y, factor, LIMIT)
            yt = float8_range(yt, factor, LIMIT)
        store_tiles(y_ptr, y, yt, row, live, D, MAIN, TAIL, ROWS)


@triton.jit(do_not_specialize=SIZES)
def gate_residual_layernorm_modulate_forward_kernel(
    x_ptr, gate_ptr, branch_ptr, branch_scale_ptr, bias_ptr, shift_ptr, scale_ptr, h_ptr, y_ptr, partial_ptr,
    descale_ptr, mean_ptr, rstd_ptr, sample_ptr, rows, length, chunks_per_sample, gate_stride, shift_stride,
    scale_stride, eps,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PACKED: tl.constexpr, CENTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCALED_BRANCH: tl.constexpr, FLOAT8: tl.constexpr, PARTIALS: tl.constexpr, TARGET: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    factor = 1.0
    if FLOAT8 and PARTIALS > 0:
        factor = float8_factor(partial_ptr, descale_ptr, PARTIALS, TARGET)
    sample, first, stop = chunk_of_program(tl.program_id(0), rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            _forward_rows(
                x_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, branch_scale_ptr, bias_ptr,
                of_sample(shift_ptr, sample, shift_stride), of_sample(scale_ptr, sample, scale_stride),
                h_ptr, y_ptr, descale_ptr, mean_ptr, rstd_ptr, first, end, eps, factor, D, MAIN, TAIL, ROWS, STAGES,
                HOLD, CENTER, HAS_BIAS, SCALED_BRANCH, FLOAT8, PARTIALS, TARGET, LIMIT,
            )  # fmt: skip
            first = end
    else:
        _forward_rows(
            x_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, branch_scale_ptr, bias_ptr,
            of_sample(shift_ptr, sample, shift_stride), of_sample(scale_ptr, sample, scale_stride),
            h_ptr, y_ptr, descale_ptr, mean_ptr, rstd_ptr, first, stop, eps, factor, D, MAIN, TAIL, ROWS, STAGES, HOLD,
            CENTER, HAS_BIAS, SCALED_BRANCH, FLOAT8, PARTIALS, TARGET, LIMIT,
        )  # fmt: skip


@triton.jit
def _backward_rows(
    dh_ptr, dy_ptr, h_ptr, gate_ptr, branch_ptr, bias_ptr, scale_ptr, mean_ptr, rstd_ptr, dx_ptr, dbranch_ptr,
    dgate_ptr, dshift_ptr, dscale_ptr, dbias_ptr, first, stop,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HOLD: tl.constexpr, CENTER: tl.constexpr, HAS_DH: tl.constexpr, HAS_BIAS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write dx and dbranch for rows of one sample. With SUMS, also write the sums for dgate, dshift and dscale; with
    HAS_BIAS, the sum for dbias."""
    if HOLD:
        gate, gate_t = load_vectors(gate_ptr, D, MAIN, TAIL)
        scale, scale_t = load_vectors(scale_ptr, D, MAIN, TAIL)
    if SUMS:
        dgate, dgate_t = zero_vectors(MAIN, TAIL)
        dshift, dshift_t = zero_vectors(MAIN, TAIL)
        dscale, dscale_t = zero_vectors(MAIN, TAIL)
    if HAS_BIAS:
        total, total_t = zero_vectors(MAIN, TAIL)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        live = start + tl.arange(0, ROWS) < stop
        row = tl.cast(start, tl.int64)
        h, ht = load_tiles(h_ptr, row, live, D, MAIN, TAIL, ROWS)
        dy, dyt = load_tiles(dy_ptr, row, live, D, MAIN, TAIL, ROWS)
        if SUMS:
            branch, branch_t = _load_branch(
                branch_ptr, branch_ptr, bias_ptr, row, live, D, MAIN, TAIL, ROWS, HAS_BIAS, False
            )
        if HAS_DH:
            dh, dht = load_tiles(dh_ptr, row, live, D, MAIN, TAIL, ROWS)
        if not HOLD:
            gate, gate_t = load_vectors(gate_ptr, D, MAIN, TAIL)
            scale, scale_t = load_vectors(scale_ptr, D, MAIN, TAIL)
        h, ht, rstd = normalize_rows_again(h, ht, mean_ptr, rstd_ptr, row, live, ROWS, CENTER)
        dx, dxt = normalize_backward(dy, dyt, h, ht, 1.0 + scale, 1.0 + scale_t, rstd, D, TAIL, ROWS, CENTER)
        if HAS_DH:
            dx += dh
            dxt += dht
        store_tiles(dx_ptr, dx, dxt, row, live, D, MAIN, TAIL, ROWS)
        store_tiles(dbranch_ptr, gate * dx, gate_t * dxt, row, live, D, MAIN, TAIL, ROWS)
        if SUMS:
            dgate += tl.sum(branch * dx, axis=0)
        if HAS_BIAS:
            total += tl.sum(dx, axis=0)
            if TAIL > 0:
                total_t += tl.sum(dxt, axis=0)
        if SUMS:
            dshift += tl.sum(dy, axis=0)
            dscale += tl.sum(dy * h, axis=0)
            if TAIL > 0:
                dgate_t += tl.sum(branch_t * dxt, axis=0)
                dshift_t += tl.sum(dyt, axis=0)
                dscale_t += tl.sum(dyt * ht, axis=0)
    if SUMS:
        store_vectors(dgate_ptr, dgate, dgate_t, D, MAIN, TAIL)
        store_vectors(dshift_ptr, dshift, dshift_t, D, MAIN, TAIL)
        store_vectors(dscale_ptr, dscale, dscale_t, D, MAIN, TAIL)
    if HAS_BIAS:
        gate, gate_t = load_vectors(gate_ptr, D, MAIN, TAIL)
        total = tl.sum(gate, axis=0) * total  # turns gate from a tile of one row into (MAIN,)
        if TAIL > 0:
            total_t = tl.sum(gate_t, axis=0) * total_t
        store_vectors(dbias_ptr, total, total_t, D, MAIN, TAIL)


@triton.jit(do_not_specialize=SIZES)
def gate_residual_layernorm_modulate_backward_kernel(
    dh_ptr, dy_ptr, h_ptr, gate_ptr, branch_ptr, bias_ptr, scale_ptr, mean_ptr, rstd_ptr, dx_ptr, dbranch_ptr,
    dgate_ptr, dshift_ptr, dscale_ptr, dbias_ptr, sample_ptr, rows, length, chunks_per_sample, gate_stride,
    scale_stride,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PACKED: tl.constexpr, CENTER: tl.constexpr, HAS_DH: tl.constexpr,
    HAS_BIAS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample, first, stop = chunk_of_program(program, rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            slot = program + sample
            _backward_rows(
                dh_ptr, dy_ptr, h_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, bias_ptr,
                of_sample(scale_ptr, sample, scale_stride), mean_ptr, rstd_ptr, dx_ptr, dbranch_ptr,
                of_sample(dgate_ptr, slot, D), of_sample(dshift_ptr, slot, D), of_sample(dscale_ptr, slot, D),
                of_sample(dbias_ptr, slot, D), first, end, D, MAIN, TAIL, ROWS, STAGES, HOLD, CENTER, HAS_DH, HAS_BIAS,
                SUMS,
            )  # fmt: skip
            first = end
    else:
        _backward_rows(
            dh_ptr, dy_ptr, h_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, bias_ptr,
            of_sample(scale_ptr, sample, scale_stride), mean_ptr, rstd_ptr, dx_ptr, dbranch_ptr,
            of_sample(dgate_ptr, program, D), of_sample(dshift_ptr, program, D), of_sample(dscale_ptr, program, D),
            of_sample(dbias_ptr, program, D), first, stop, D, MAIN, TAIL, ROWS, STAGES, HOLD, CENTER, HAS_DH, HAS_BIAS,
            SUMS,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- operator


def _launch_forward(
    x: Tensor, gate: Tensor, branch: Tensor, shift: Tensor, scale: Tensor, bias: Tensor | None,
    sample_of_row: Tensor | None, eps: float, h: Tensor, y: Tensor | Float8, mean: Tensor, rstd: Tensor,
    partial: Tensor | None = None, branch_scale: Tensor | None = None,
) -> None:  # fmt: skip
    gate, shift, scale = unit_columns(gate, shift, scale)
    width = x.shape[-1]
    cut = common.cut_rows(
        "gate_residual_layernorm_modulate_forward",
        forward_launch(width, x.element_size(), isinstance(y, Float8) and partial is None),
        x,
        gate.shape[0],
        sample_of_row,
    )
    main, tail = split_width(width)
    pointers, format_options = fp8.kernel_arguments(y, partial, fp8.EXACT)
    gate_residual_layernorm_modulate_forward_kernel[(cut.programs,)](
        cut.x, gate, branch.contiguous(), common.or_unused(branch_scale, x), common.or_unused(bias, x), shift, scale, h,
        *pointers, mean, rstd, *cut.shape_arguments, gate.stride(0), shift.stride(0), scale.stride(0), eps,
        D=width, MAIN=main, TAIL=tail, PACKED=cut.packed, CENTER=mean.numel() > 0, HAS_BIAS=bias is not None,
        SCALED_BRANCH=branch_scale is not None, **cut.launch.options(), **format_options,
    )  # fmt: skip


def _forward(
    x: Tensor, gate: Tensor, branch: Tensor, shift: Tensor, scale: Tensor, bias: Tensor | None,
    sample_of_row: Tensor | None, eps: float, center: bool,
):  # fmt: skip
    outputs = _forward_fake(x, gate, branch, shift, scale, bias, sample_of_row, eps, center)
    _launch_forward(x, gate, branch, shift, scale, bias, sample_of_row, eps, *outputs)
    return outputs


def gate_residual_layernorm_modulate_float8(
    x: Tensor, gate: Tensor, branch: Tensor, shift: Tensor, scale: Tensor, bias: Tensor | None, eps: float = 1e-6,
    by_row: bool = False, branch_scale: Tensor | None = None, sample_of_row: Tensor | None = None, center: bool = True,
) -> tuple[Tensor, Float8, Tensor, Tensor]:  # fmt: skip
    """Return h (B, N, D), y in e4m3, and the LayerNorm's mean and rstd (B * N,) fp32.

    Args:
        by_row: True to give y one scale per row.
        branch_scale: (B * N, 1) fp32, a factor for each row of the branch.
        center: False for RMSNorm, with an empty mean.
    """
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = common.new_statistics(x, center=center)
    y = Float8.empty(x.shape, fp8.E4M3, x.device, by_row)
    partial = None if by_row else fp8.amax(*unit_columns(shift, scale), normalized=True)
    outputs = h, y, mean, rstd, partial, branch_scale
    _launch_forward(x, gate, branch, shift, scale, bias, sample_of_row, eps, *outputs)
    return h, y, mean, rstd


def _forward_fake(
    x: Tensor, gate: Tensor, branch: Tensor, shift: Tensor, scale: Tensor, bias: Tensor | None,
    sample_of_row: Tensor | None, eps: float, center: bool,
):  # fmt: skip
    h, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return h, y, *common.new_statistics(x, center=center)


def _backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, gate: Tensor, branch: Tensor | None, scale: Tensor, bias: Tensor | None,
    mean: Tensor, rstd: Tensor, sample_of_row: Tensor | None, dtype: torch.dtype,
):  # fmt: skip
    gate, scale = unit_columns(gate, scale)
    width = h.shape[-1]
    cut = common.cut_rows(
        "gate_residual_layernorm_modulate_backward",
        backward_launch(width, h.element_size()),
        h,
        gate.shape[0],
        sample_of_row,
    )
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    dbranch = torch.empty(h.shape, dtype=dtype, device=h.device)
    outputs, sums = cut.new_sums(() if branch is None else (gate, scale, scale))
    total = None if bias is None else cut.new_total()
    dy = dy.contiguous()
    main, tail = split_width(width)
    gate_residual_layernorm_modulate_backward_kernel[(cut.programs,)](
        dy if dh is None else dh.contiguous(), dy, cut.x, gate, h if branch is None else branch.contiguous(),
        common.or_unused(bias, h), scale, mean, rstd, dx, dbranch, *(sums or (h, h, h)), common.or_unused(total, h),
        *cut.shape_arguments, gate.stride(0), scale.stride(0),
        D=width, MAIN=main, TAIL=tail, PACKED=cut.packed, CENTER=mean.numel() > 0, HAS_DH=dh is not None,
        HAS_BIAS=bias is not None, SUMS=branch is not None, **cut.launch.options(),
    )  # fmt: skip
    cut.finish_sums(outputs, sums)
    return dx, dbranch, *(outputs or common.no_sums(dx, 3)), common.finish_bias(total, bias, h)


def _backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, gate: Tensor, branch: Tensor | None, scale: Tensor, bias: Tensor | None,
    mean: Tensor, rstd: Tensor, sample_of_row: Tensor | None, dtype: torch.dtype,
):  # fmt: skip
    dx, dbranch = (torch.empty(h.shape, dtype=kind, device=h.device) for kind in (h.dtype, dtype))
    sums = common.no_sums(dx, 3) if branch is None else [torch.empty_like(t) for t in (gate, scale, scale)]
    return dx, dbranch, *sums, common.like_bias(bias, h)


def save(
    ctx: Any, h: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor,
    sample_of_row: Tensor | None,
) -> None:  # fmt: skip
    """Save the tensors that :func:`gradients` needs."""
    _, of_gate, _, of_shift, of_scale, of_bias = ctx.needs_input_grad[:6]
    ctx.set_materialize_grads(False)  # pass None, not a tensor of zeros, for a missing gradient
    ctx.dtype = branch.dtype
    kept, bias = gate_residual.kept_branch(branch, bias, of_gate or of_shift or of_scale, of_bias)
    ctx.save_for_backward(h, gate, kept, scale, bias, mean, rstd, sample_of_row)


def gradients(ctx: Any, dh: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, gate, branch, shift, scale and bias, the first six inputs of an autograd function."""
    h, gate, branch, scale, bias, mean, rstd, sample_of_row = ctx.saved_tensors
    if dy is None and dh is None:
        return (None,) * 6
    dshift = dscale = None
    if dy is None:
        dx = dh
        dbranch, dgate, dbias = gate_residual.gate_residual_backward(dh, gate, branch, bias, sample_of_row, ctx.dtype)
    else:
        dx, dbranch, dgate, dshift, dscale, dbias = gate_residual_layernorm_modulate_backward(
            dy, dh, h, gate, branch, scale, bias, mean, rstd, sample_of_row, ctx.dtype
        )
    if branch is None:
        dgate = dshift = dscale = None
    return dx, dgate, dbranch, dshift, dscale, None if bias is None else dbias


def _setup_context(ctx, inputs, output) -> None:
    _, gate, branch, _, scale, bias, sample_of_row, _, _ = inputs
    h, _, mean, rstd = output
    save(ctx, h, gate, branch, scale, bias, mean, rstd, sample_of_row)


def _autograd_backward(ctx, dh, dy, dmean, drstd):
    return *gradients(ctx, dh, dy), None, None, None


# Without ``branch``, the operator computes no gradients of gate, shift and scale. ``dtype``: dtype of the branch.
gate_residual_layernorm_modulate_backward = operator(
    "gate_residual_layernorm_modulate_backward(Tensor dy, Tensor? dh, Tensor h, Tensor gate, Tensor? branch, "
    "Tensor scale, Tensor? bias, Tensor mean, Tensor rstd, Tensor? sample_of_row, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
gate_residual_layernorm_modulate_forward = operator(
    "gate_residual_layernorm_modulate(Tensor x, Tensor gate, Tensor branch, Tensor shift, Tensor scale, "
    "Tensor? bias, Tensor? sample_of_row, float eps, bool center) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _autograd_backward,
    _setup_context,
)


def gate_residual_layernorm_modulate(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    shift: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    sample_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute h = x + gate * (branch + bias) and y = LN(h) * (1 + scale) + shift with Triton kernels.

    The operation is differentiable in x, gate, branch, shift, scale and bias. For the arguments and errors, see
    :func:`opendit.kernels.gate_residual.gate_residual`; shift and scale are (B, D) of one dtype. Returns (h, y), both
    of x's shape and dtype. y is computed from the rounded h.
    """
    check_inputs(x, sample_of_row, {"branch": branch}, bias, gate=gate, shift=shift, scale=scale)
    return gate_residual_layernorm_modulate_forward(x, gate, branch, shift, scale, bias, sample_of_row, eps, True)[:2]
