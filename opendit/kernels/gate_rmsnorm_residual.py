"""The gated residual connection of a branch with an RMSNorm after it (Z-Image), alone or fused with the next RMSNorm.

    h = x + gate * RMSNorm(branch),  y = RMSNorm(h) * (1 + scale) + shift,  RMSNorm(z) = z / rms(z) * weight

x and branch are (B, N, D), and gate, shift and scale (B, D); for the packed form see common.py. The two norms have
separate weights (D,). Statistics and sums are fp32. The forward pass reads x and branch once, writes h and y once, and
saves each row's 1 / rms of both norms. The backward pass computes from dh and dy, with bhat = branch / rms(branch) and
hhat = h / rms(h):

    g = dy * next_weight * (1 + scale),  dx = dh + (g - hhat * mean_D(g * hhat)) / rms(h)
    f = dx * gate * weight,              dbranch = (f - bhat * mean_D(f * bhat)) / rms(branch)
    dshift = S(dy),  dscale = next_weight * S(dy * hhat),  dnext_weight = sum_B (1 + scale) * S(dy * hhat)
    dgate = weight * S(dx * bhat),  dweight = sum_B gate * S(dx * bhat)

S sums over a sample's tokens. The kernels compute S. torch computes the products with S, because they have few rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels import common
from opendit.kernels.common import SIZES, check_inputs, split_width, unit_columns
from opendit.kernels.gate_residual import gate_residual_reference
from opendit.kernels.gate_residual_layernorm_modulate import backward_launch, forward_launch
from opendit.kernels.language import tl, triton
from opendit.kernels.operators import operator
from opendit.kernels.rmsnorm_modulate import rmsnorm_modulate_reference
from opendit.kernels.tiles import (
    chunk_of_program,
    load_tiles,
    load_vectors,
    next_segment,
    normalize_backward,
    normalize_rows,
    normalize_rows_again,
    of_sample,
    store_tiles,
    store_vectors,
    zero_vectors,
)

# ---------------------------------------------------------------------------------------------------------- reference


def gate_rmsnorm_residual_reference(
    x: Tensor, gate: Tensor, branch: Tensor, weight: Tensor, eps: float = 1e-6, sample_of_row: Tensor | None = None
) -> Tensor:
    return gate_residual_reference(x, gate, F.rms_norm(branch, branch.shape[-1:], weight, eps), None, sample_of_row)


def gate_rmsnorm_residual_rmsnorm_modulate_reference(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    weight: Tensor,
    next_weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-6,
    next_eps: float = 1e-6,
    sample_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h = gate_rmsnorm_residual_reference(x, gate, branch, weight, eps, sample_of_row)
    return h, rmsnorm_modulate_reference(h, next_weight, shift, scale, next_eps, sample_of_row)


# ------------------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _product(ptr, weight_ptr, ADD: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Load a vector and a weight, both (D,), and return (vector + ADD) * weight as main and tail block."""
    vector, vector_t = load_vectors(ptr, D, MAIN, TAIL)
    weight, weight_t = load_vectors(weight_ptr, D, MAIN, TAIL)
    return (vector + ADD) * weight, (vector_t + ADD) * weight_t


@triton.jit
def _forward_rows(
    x_ptr, gate_ptr, branch_ptr, weight_ptr, next_weight_ptr, shift_ptr, scale_ptr, h_ptr, y_ptr, branch_rstd_ptr,
    rstd_ptr, first, stop, eps, next_eps,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HOLD: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    if HOLD:
        gate, gate_t = _product(gate_ptr, weight_ptr, 0.0, D, MAIN, TAIL)
        if NEXT:
            gain, gain_t = _product(scale_ptr, next_weight_ptr, 1.0, D, MAIN, TAIL)
            shift, shift_t = load_vectors(shift_ptr, D, MAIN, TAIL)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        live = start + tl.arange(0, ROWS) < stop
        row = tl.cast(start, tl.int64)
        x, xt = load_tiles(x_ptr, row, live, D, MAIN, TAIL, ROWS)
        branch, branch_t = load_tiles(branch_ptr, row, live, D, MAIN, TAIL, ROWS)
        if not HOLD:
            gate, gate_t = _product(gate_ptr, weight_ptr, 0.0, D, MAIN, TAIL)
            if NEXT:
                gain, gain_t = _product(scale_ptr, next_weight_ptr, 1.0, D, MAIN, TAIL)
                shift, shift_t = load_vectors(shift_ptr, D, MAIN, TAIL)
        branch, branch_t = normalize_rows(
            branch, branch_t, branch_rstd_ptr, branch_rstd_ptr, row, live, eps, D, MAIN, TAIL, ROWS, False
        )
        # Round h to its stored dtype before the next norm, because backward recomputes hhat from the stored h.
        h = (x + gate * branch).to(h_ptr.dtype.element_ty).to(tl.float32)
        ht = (xt + gate_t * branch_t).to(h_ptr.dtype.element_ty).to(tl.float32)
        store_tiles(h_ptr, h, ht, row, live, D, MAIN, TAIL, ROWS)
        if NEXT:
            h, ht = normalize_rows(h, ht, rstd_ptr, rstd_ptr, row, live, next_eps, D, MAIN, TAIL, ROWS, False)
            store_tiles(y_ptr, h * gain + shift, ht * gain_t + shift_t, row, live, D, MAIN, TAIL, ROWS)


@triton.jit(do_not_specialize=SIZES)
def _gate_rmsnorm_residual_forward_kernel(
    x_ptr, gate_ptr, branch_ptr, weight_ptr, next_weight_ptr, shift_ptr, scale_ptr, h_ptr, y_ptr, branch_rstd_ptr,
    rstd_ptr, sample_ptr, rows, length, chunks_per_sample, gate_stride, shift_stride, scale_stride, eps, next_eps,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PACKED: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    sample, first, stop = chunk_of_program(tl.program_id(0), rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            _forward_rows(
                x_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, weight_ptr, next_weight_ptr,
                of_sample(shift_ptr, sample, shift_stride), of_sample(scale_ptr, sample, scale_stride), h_ptr, y_ptr,
                branch_rstd_ptr, rstd_ptr, first, end, eps, next_eps, D, MAIN, TAIL, ROWS, STAGES, HOLD, NEXT,
            )  # fmt: skip
            first = end
    else:
        _forward_rows(
            x_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, weight_ptr, next_weight_ptr,
            of_sample(shift_ptr, sample, shift_stride), of_sample(scale_ptr, sample, scale_stride), h_ptr, y_ptr,
            branch_rstd_ptr, rstd_ptr, first, stop, eps, next_eps, D, MAIN, TAIL, ROWS, STAGES, HOLD, NEXT,
        )  # fmt: skip


@triton.jit
def _backward_rows(
    dh_ptr, dy_ptr, h_ptr, gate_ptr, branch_ptr, weight_ptr, next_weight_ptr, scale_ptr, branch_rstd_ptr, rstd_ptr,
    dx_ptr, dbranch_ptr, gate_sum_ptr, shift_sum_ptr, scale_sum_ptr, first, stop,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HOLD: tl.constexpr, HAS_DH: tl.constexpr, NEXT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write dbranch for rows of one sample. With NEXT, also write dx; without NEXT, dx is dh. With SUMS, also write the
    sums."""
    if HOLD:
        gate, gate_t = _product(gate_ptr, weight_ptr, 0.0, D, MAIN, TAIL)
        if NEXT:
            gain, gain_t = _product(scale_ptr, next_weight_ptr, 1.0, D, MAIN, TAIL)
    if SUMS:
        gate_sum, gate_sum_t = zero_vectors(MAIN, TAIL)
        if NEXT:
            shift_sum, shift_sum_t = zero_vectors(MAIN, TAIL)
            scale_sum, scale_sum_t = zero_vectors(MAIN, TAIL)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        live = start + tl.arange(0, ROWS) < stop
        row = tl.cast(start, tl.int64)
        branch, branch_t = load_tiles(branch_ptr, row, live, D, MAIN, TAIL, ROWS)
        if HAS_DH:
            dh, dht = load_tiles(dh_ptr, row, live, D, MAIN, TAIL, ROWS)
        if not HOLD:
            gate, gate_t = _product(gate_ptr, weight_ptr, 0.0, D, MAIN, TAIL)
            if NEXT:
                gain, gain_t = _product(scale_ptr, next_weight_ptr, 1.0, D, MAIN, TAIL)
        if NEXT:
            h, ht = load_tiles(h_ptr, row, live, D, MAIN, TAIL, ROWS)
            dy, dyt = load_tiles(dy_ptr, row, live, D, MAIN, TAIL, ROWS)
            h, ht, rstd = normalize_rows_again(h, ht, rstd_ptr, rstd_ptr, row, live, ROWS, False)
            dx, dxt = normalize_backward(dy, dyt, h, ht, gain, gain_t, rstd, D, TAIL, ROWS, False)
            if HAS_DH:
                dx += dh
                dxt += dht
            store_tiles(dx_ptr, dx, dxt, row, live, D, MAIN, TAIL, ROWS)
            if SUMS:
                shift_sum += tl.sum(dy, axis=0)
                scale_sum += tl.sum(dy * h, axis=0)
                if TAIL > 0:
                    shift_sum_t += tl.sum(dyt, axis=0)
                    scale_sum_t += tl.sum(dyt * ht, axis=0)
        else:
            dx, dxt = dh, dht
        branch, branch_t, branch_rstd = normalize_rows_again(
            branch, branch_t, branch_rstd_ptr, branch_rstd_ptr, row, live, ROWS, False
        )
        dbranch, dbranch_t = normalize_backward(
            dx, dxt, branch, branch_t, gate, gate_t, branch_rstd, D, TAIL, ROWS, False
        )
        store_tiles(dbranch_ptr, dbranch, dbranch_t, row, live, D, MAIN, TAIL, ROWS)
        if SUMS:
            gate_sum += tl.sum(branch * dx, axis=0)
            if TAIL > 0:
                gate_sum_t += tl.sum(branch_t * dxt, axis=0)
    if SUMS:
        store_vectors(gate_sum_ptr, gate_sum, gate_sum_t, D, MAIN, TAIL)
        if NEXT:
            store_vectors(shift_sum_ptr, shift_sum, shift_sum_t, D, MAIN, TAIL)
            store_vectors(scale_sum_ptr, scale_sum, scale_sum_t, D, MAIN, TAIL)


@triton.jit(do_not_specialize=SIZES)
def _gate_rmsnorm_residual_backward_kernel(
    dh_ptr, dy_ptr, h_ptr, gate_ptr, branch_ptr, weight_ptr, next_weight_ptr, scale_ptr, branch_rstd_ptr, rstd_ptr,
    dx_ptr, dbranch_ptr, gate_sum_ptr, shift_sum_ptr, scale_sum_ptr, sample_ptr, rows, length, chunks_per_sample,
    gate_stride, scale_stride,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PACKED: tl.constexpr, HAS_DH: tl.constexpr, NEXT: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample, first, stop = chunk_of_program(program, rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            slot = program + sample
            _backward_rows(
                dh_ptr, dy_ptr, h_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, weight_ptr,
                next_weight_ptr, of_sample(scale_ptr, sample, scale_stride), branch_rstd_ptr, rstd_ptr, dx_ptr,
                dbranch_ptr, of_sample(gate_sum_ptr, slot, D), of_sample(shift_sum_ptr, slot, D),
                of_sample(scale_sum_ptr, slot, D), first, end, D, MAIN, TAIL, ROWS, STAGES, HOLD, HAS_DH, NEXT, SUMS,
            )  # fmt: skip
            first = end
    else:
        _backward_rows(
            dh_ptr, dy_ptr, h_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, weight_ptr,
            next_weight_ptr, of_sample(scale_ptr, sample, scale_stride), branch_rstd_ptr, rstd_ptr, dx_ptr,
            dbranch_ptr, of_sample(gate_sum_ptr, program, D), of_sample(shift_sum_ptr, program, D),
            of_sample(scale_sum_ptr, program, D), first, stop, D, MAIN, TAIL, ROWS, STAGES, HOLD, HAS_DH, NEXT, SUMS,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- operator


def _forward(
    x: Tensor, gate: Tensor, branch: Tensor, weight: Tensor, next_weight: Tensor | None, shift: Tensor | None,
    scale: Tensor | None, sample_of_row: Tensor | None, eps: float, next_eps: float,
):  # fmt: skip
    outputs = _forward_fake(x, gate, branch, weight, next_weight, shift, scale, sample_of_row, eps, next_eps)
    gate, shift, scale = unit_columns(gate, common.or_unused(shift, gate), common.or_unused(scale, gate))
    width = x.shape[-1]
    launch = forward_launch(width, x.element_size())
    cut = common.cut_rows("gate_rmsnorm_residual_forward", launch, x, gate.shape[0], sample_of_row)
    main, tail = split_width(width)
    _gate_rmsnorm_residual_forward_kernel[(cut.programs,)](
        cut.x, gate, branch.contiguous(), weight, common.or_unused(next_weight, weight), shift, scale, *outputs,
        *cut.shape_arguments, gate.stride(0), shift.stride(0), scale.stride(0), eps, next_eps,
        D=width, MAIN=main, TAIL=tail, PACKED=cut.packed, NEXT=next_weight is not None, **cut.launch.options(),
    )  # fmt: skip
    return outputs


def _forward_fake(
    x: Tensor, gate: Tensor, branch: Tensor, weight: Tensor, next_weight: Tensor | None, shift: Tensor | None,
    scale: Tensor | None, sample_of_row: Tensor | None, eps: float, next_eps: float,
):  # fmt: skip
    follows = next_weight is not None
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape if follows else 0, dtype=x.dtype, device=x.device)
    return h, y, *(common.new_statistics(x, normalize, center=False)[1] for normalize in (True, follows))


def _backward(
    h: Tensor, dh: Tensor | None, dy: Tensor | None, gate: Tensor, branch: Tensor, weight: Tensor,
    next_weight: Tensor | None, scale: Tensor | None, branch_rstd: Tensor, rstd: Tensor, sample_of_row: Tensor | None,
    needs_sums: bool,
):  # fmt: skip
    dx, dbranch, *_ = _backward_fake(
        h, dh, dy, gate, branch, weight, next_weight, scale, branch_rstd, rstd, sample_of_row, needs_sums
    )
    follows, width = dy is not None, h.shape[-1]
    gate, scale = unit_columns(gate, common.or_unused(scale, gate))
    launch = backward_launch(width, h.element_size())
    cut = common.cut_rows("gate_rmsnorm_residual_backward", launch, h, gate.shape[0], sample_of_row)
    outputs, sums = cut.new_sums(
        (branch_rstd,) * (3 if follows else 1) if needs_sums else ()
    )  # sums are fp32, as branch_rstd is
    main, tail = split_width(width)
    _gate_rmsnorm_residual_backward_kernel[(cut.programs,)](
        *(cut.x if grad is None else grad.contiguous() for grad in (dh, dy)), cut.x, gate, branch.contiguous(), weight,
        common.or_unused(next_weight, weight), scale, branch_rstd, rstd, dx, dbranch, *((sums or [h]) * 3)[:3],
        *cut.shape_arguments, gate.stride(0), scale.stride(0),
        D=width, MAIN=main, TAIL=tail, PACKED=cut.packed, HAS_DH=dh is not None, NEXT=follows, SUMS=needs_sums,
        **cut.launch.options(),
    )  # fmt: skip
    cut.finish_sums(outputs, sums)
    return dx, dbranch, *outputs, *common.no_sums(branch_rstd, 3 - len(outputs))


def _backward_fake(
    h: Tensor, dh: Tensor | None, dy: Tensor | None, gate: Tensor, branch: Tensor, weight: Tensor,
    next_weight: Tensor | None, scale: Tensor | None, branch_rstd: Tensor, rstd: Tensor, sample_of_row: Tensor | None,
    needs_sums: bool,
):  # fmt: skip
    dx = torch.empty(0 if dy is None else h.shape, dtype=h.dtype, device=h.device)
    dbranch = torch.empty(branch.shape, dtype=branch.dtype, device=branch.device)
    shapes = (gate.shape if needs_sums else (0,), *((gate.shape if needs_sums and dy is not None else (0,),) * 2))
    return dx, dbranch, *(torch.empty(shape, dtype=torch.float32, device=h.device) for shape in shapes)


def _setup_context(ctx, inputs, output) -> None:
    _, gate, branch, weight, next_weight, ctx.shift, scale, sample_of_row, _, _ = inputs
    ctx.shift = None if ctx.shift is None else ctx.shift.dtype
    h, _, branch_rstd, rstd = output
    ctx.set_materialize_grads(False)  # pass None, not a tensor of zeros, for a missing gradient
    ctx.save_for_backward(h, gate, branch, weight, next_weight, scale, branch_rstd, rstd, sample_of_row)


def _autograd_backward(ctx, dh, dy, *_):
    if dh is None and dy is None:
        return (None,) * 10
    h, gate, branch, weight, next_weight, scale, *rest = ctx.saved_tensors
    dy = None if next_weight is None else dy
    # LoRA freezes norms and gates: then nothing needs the sums over a sample's tokens.
    sums = any(needed for place, needed in enumerate(ctx.needs_input_grad[:7]) if place not in (0, 2))
    dx, dbranch, gate_sum, shift_sum, scale_sum = _backward_op(
        h, dh, dy, gate, branch, weight, next_weight, scale, *rest, sums
    )
    if not sums:
        return dh if dy is None else dx, None, dbranch, *(None,) * 7
    dgate, dweight = (gate_sum * weight).to(gate.dtype), (gate_sum * gate).sum(0).to(weight.dtype)
    if dy is None:
        return dh, dgate, dbranch, dweight, None, None, None, None, None, None
    assert scale is not None and next_weight is not None  # true because y was computed
    dscale, dnext = (scale_sum * next_weight).to(scale.dtype), (scale_sum * (1 + scale.float())).sum(0)
    return dx, dgate, dbranch, dweight, dnext.to(next_weight.dtype), shift_sum.to(ctx.shift), dscale, None, None, None


_backward_op = operator(
    "gate_rmsnorm_residual_backward(Tensor h, Tensor? dh, Tensor? dy, Tensor gate, Tensor branch, Tensor weight, "
    "Tensor? next_weight, Tensor? scale, Tensor branch_rstd, Tensor rstd, Tensor? sample_of_row, bool needs_sums) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_forward_op = operator(
    "gate_rmsnorm_residual(Tensor x, Tensor gate, Tensor branch, Tensor weight, Tensor? next_weight, Tensor? shift, "
    "Tensor? scale, Tensor? sample_of_row, float eps, float next_eps) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _autograd_backward,
    _setup_context,
)


def gate_rmsnorm_residual(
    x: Tensor, gate: Tensor, branch: Tensor, weight: Tensor, eps: float = 1e-6, sample_of_row: Tensor | None = None
) -> Tensor:
    """Compute x + gate * RMSNorm(branch) with Triton kernels, differentiable in x, gate, branch and weight.

    For the arguments and errors, see :func:`opendit.kernels.gate_residual.gate_residual`. weight: (D,), RMSNorm's
    weight, bf16, fp16 or fp32. Returns x's shape and dtype.
    """
    _check_weights(x, weight=weight)
    check_inputs(x, sample_of_row, {"branch": branch}, weight, gate=gate)
    return _forward_op(x, gate, branch, weight, None, None, None, sample_of_row, eps, eps)[0]


def gate_rmsnorm_residual_rmsnorm_modulate(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    weight: Tensor,
    next_weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-6,
    next_eps: float = 1e-6,
    sample_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute h = x + gate * RMSNorm(branch) and y = RMSNorm(h) * (1 + scale) + shift with Triton kernels.

    The operation is differentiable in all seven tensors. weight and eps belong to the branch's norm, next_weight and
    next_eps to h's norm. shift and scale are (B, D) of one dtype. For all other arguments and errors, see
    :func:`gate_rmsnorm_residual`. Returns (h, y), both of x's shape and dtype. y is computed from the rounded h.
    """
    _check_weights(x, weight=weight, next_weight=next_weight)
    check_inputs(x, sample_of_row, {"branch": branch}, weight, gate=gate, shift=shift, scale=scale)
    return _forward_op(x, gate, branch, weight, next_weight, shift, scale, sample_of_row, eps, next_eps)[:2]


def _check_weights(x: Tensor, **weights: Tensor) -> None:
    for name, weight in weights.items():
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"{name} must be (D,) = {tuple(x.shape[-1:])}, not {tuple(weight.shape)}")
    common.check_tensors(x=x, **weights)
