"""The end of one branch joined with the start of the next.

    h = x + gate * (branch + bias),  y = LN(h) * (1 + scale) + shift

Returns (h, y). x, branch (B, N, D) with gate, shift, scale (B, D); or packed, x, branch (rows, D) with sample_of_row
(rows,), see kernels/common.py; bias (D,) or None, see gate_residual.py. h is not read back from memory for its
LayerNorm: four tensors of activations move instead of five in the forward pass, and six instead of eight in the
backward pass, which, given dh and dy, is

    dx = dh + LN_backward(dy),  dbranch = gate * dx
    dgate = sum_N (branch + bias) * dx,  dbias = sum_B gate * sum_N dx
    dshift = sum_N dy,  dscale = sum_N dy * hhat,  hhat = (h - mean) * rstd

The same kernels without the centring (CENTER) are RMSNorm's, see rmsnorm_modulate.py.
"""

import torch
from torch import Tensor

from opendit.kernels import common, fp8, gate_residual, layernorm_modulate
from opendit.kernels.checks import check_inputs
from opendit.kernels.common import split_width, unit_columns
from opendit.kernels.fp8 import Float8
from opendit.kernels.gate_residual_layernorm_kernels import (
    backward_launch,
    forward_launch,
    gate_residual_layernorm_modulate_backward_kernel,
    gate_residual_layernorm_modulate_forward_kernel,
)
from opendit.kernels.operators import operator

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
    """(x + gate * (branch + bias), LN of it * (1 + scale) + shift) in torch, in the inputs' precision."""
    h = gate_residual.gate_residual_reference(x, gate, branch, bias, sample_of_row)
    return h, layernorm_modulate.layernorm_modulate_reference(h, shift, scale, eps, sample_of_row)


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
    by_row: bool = False, branch_scale: Tensor | None = None, sample_of_row: Tensor | None = None,
) -> tuple[Tensor, Float8, Tensor, Tensor]:  # fmt: skip
    """(h (B, N, D), y in e4m3, and the LayerNorm's mean and rstd (B * N,) fp32). by_row: y with a scale a row.
    branch_scale: (B * N, 1) fp32 that the branch's rows are multiplied by first."""
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = common.new_statistics(x)
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
    dy: Tensor, dh: Tensor | None, h: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, bias: Tensor | None,
    mean: Tensor, rstd: Tensor, sample_of_row: Tensor | None,
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
    dbranch = torch.empty(branch.shape, dtype=branch.dtype, device=branch.device)
    outputs, sums = cut.new_sums((gate, scale, scale))
    total = None if bias is None else cut.new_total()
    dy = dy.contiguous()
    main, tail = split_width(width)
    gate_residual_layernorm_modulate_backward_kernel[(cut.programs,)](
        dy if dh is None else dh.contiguous(), dy, cut.x, gate, branch.contiguous(), common.or_unused(bias, h), scale,
        mean, rstd, dx, dbranch, *sums, common.or_unused(total, h), *cut.shape_arguments,
        gate.stride(0), scale.stride(0),
        D=width, MAIN=main, TAIL=tail, PACKED=cut.packed, CENTER=mean.numel() > 0, HAS_DH=dh is not None,
        HAS_BIAS=bias is not None, **cut.launch.options(),
    )  # fmt: skip
    cut.finish_sums(outputs, sums)
    return dx, dbranch, *outputs, common.finish_bias(total, bias, h)


def _backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, bias: Tensor | None,
    mean: Tensor, rstd: Tensor, sample_of_row: Tensor | None,
):  # fmt: skip
    grads = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (h, branch, gate, scale, scale))
    return *grads, common.like_bias(bias, h)


def _setup_context(ctx, inputs, output) -> None:
    _, gate, branch, _, scale, bias, sample_of_row, _, _ = inputs
    h, _, mean, rstd = output
    ctx.set_materialize_grads(False)  # an output that the loss does not see costs no zeros and no reading of them
    ctx.save_for_backward(h, gate, branch, scale, bias, mean, rstd, sample_of_row)


def _autograd_backward(ctx, dh, dy, dmean, drstd):
    h, gate, branch, scale, bias, mean, rstd, sample_of_row = ctx.saved_tensors
    if dy is None and dh is None:
        return (None,) * 9
    dshift = dscale = None
    if dy is None:
        dx = dh
        dbranch, dgate, dbias = gate_residual.gate_residual_backward(dh, gate, branch, bias, sample_of_row)
    else:
        dx, dbranch, dgate, dshift, dscale, dbias = gate_residual_layernorm_modulate_backward(
            dy, dh, h, gate, branch, scale, bias, mean, rstd, sample_of_row
        )
    return dx, dgate, dbranch, dshift, dscale, None if bias is None else dbias, None, None, None


gate_residual_layernorm_modulate_backward = operator(
    "gate_residual_layernorm_modulate_backward(Tensor dy, Tensor? dh, Tensor h, Tensor gate, Tensor branch, "
    "Tensor scale, Tensor? bias, Tensor mean, Tensor rstd, Tensor? sample_of_row) "
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
    """h = x + gate * (branch + bias) and y = LN(h) * (1 + scale) + shift by Triton kernels, differentiable in all six.

    Args:
        x, branch: (B, N, D) bf16, fp16 or fp32, not necessarily one dtype; or (rows, D) with ``sample_of_row``.
        gate, shift, scale: (B, D), shift and scale of one dtype; rows may be strided (chunks of a (B, 6 D) tensor).
        bias: (D,) bf16, fp16 or fp32, or None.
        sample_of_row: (rows,) int32 or int64, non-decreasing, the sample each row belongs to.

    Returns:
        (h, y), both of x's shape and dtype; y is normalised from h as rounded to that dtype.

    Raises:
        ValueError: shapes, dtypes or devices don't fit.
    """
    check_inputs(x, sample_of_row, {"branch": branch}, bias, gate=gate, shift=shift, scale=scale)
    return gate_residual_layernorm_modulate_forward(x, gate, branch, shift, scale, bias, sample_of_row, eps, True)[:2]
