"""adaLN: y = LN(x) * (1 + scale) + shift. LN is over D and has no weights. The modulation is also available without LN.

x is (B, N, D), and shift and scale (B, D); for the packed form see common.py. Statistics and sums are fp32, and y has
x's dtype. The forward pass reads x once, writes y once, and saves each row's mean and rstd. The backward pass reads x
and dy once, writes dx once and recomputes the normalised x:

    xhat = (x - mean) * rstd,  g = dy * (1 + scale)
    dx = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat))
    dshift = sum_N dy,  dscale = sum_N dy * xhat

With CENTER false, the kernels compute RMSNorm instead of LN (rmsnorm_modulate.py). Then there is no mean, and dx has no
term mean_D(g).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels import common, fp8
from opendit.kernels.common import (
    SIZES,
    Launch,
    check_inputs,
    pipeline_stages,
    rows_of_samples,
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


def modulate_reference(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    return x * (1 + rows_of_samples(scale, sample_of_row)) + rows_of_samples(shift, sample_of_row)


def layernorm_modulate_reference(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, sample_of_row: Tensor | None = None
) -> Tensor:
    return modulate_reference(F.layer_norm(x, x.shape[-1:], eps=eps), shift, scale, sample_of_row)


def residual_layernorm_modulate_reference(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, sample_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return x, layernorm_modulate_reference(x, shift, scale, eps, sample_of_row)


# ------------------------------------------------------------------------------------------------------------ kernels


def forward_launch(width: int) -> Launch:
    """Return the forward kernel's launch shape. Up to 2,047 columns get one warp, because one warp needs no barrier.

    Every tile reads shift and scale from the L1 cache. At D = 1152, a thread then needs 96 registers instead of 128,
    and a multiprocessor processes a quarter more rows at once.
    """
    main = split_width(width)[0]
    return Launch(rows=max(1, 1024 // main), tiles=8, warps=max(1, main // 1024), hold=False)


def backward_launch(width: int, element_size: int, packed: bool = False) -> Launch:
    """Return the backward kernel's launch shape: two warps for 1024 + 128 columns, with two sums per column.

    More warps were slower (eight: by 3 to 4 times), because row sums then wait for all warps. In the packed form the
    compiler uses 20 more registers. A limit of 128 registers lets more programs run at once (H200, 65,536 x 1,152: 160
    us without the limit, 136 with it). The limit suits up to 18 columns per thread.
    """
    main = split_width(width)[0]
    rows = max(1, 512 // main)
    stages = pipeline_stages(rows * width, 2, element_size)
    warps = max(1, main // 512)
    registers = 128 if packed and width <= 18 * 32 * warps else None
    return Launch(rows=rows, tiles=64, warps=warps, stages=stages, registers=registers)


@triton.jit
def _forward_rows(
    x_ptr, shift_ptr, scale_ptr, y_ptr, descale_ptr, mean_ptr, rstd_ptr, first, stop, eps, factor,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HOLD: tl.constexpr, NORMALIZE: tl.constexpr, CENTER: tl.constexpr, FLOAT8: tl.constexpr, PARTIALS: tl.constexpr,
    TARGET: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    SCALED_ROWS: tl.constexpr = FLOAT8 and PARTIALS == 0
    if HOLD or SCALED_ROWS:
        shift, shift_t = load_vectors(shift_ptr, D, MAIN, TAIL)
        scale, scale_t = load_vectors(scale_ptr, D, MAIN, TAIL)
    if SCALED_ROWS:
        factor, descale = modulated_factor(shift, shift_t, scale, scale_t, D, TAIL, TARGET)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        live = start + tl.arange(0, ROWS) < stop
        row = tl.cast(start, tl.int64)
        x, xt = load_tiles(x_ptr, row, live, D, MAIN, TAIL, ROWS)
        if not HOLD:
            shift, shift_t = load_vectors(shift_ptr, D, MAIN, TAIL)
            scale, scale_t = load_vectors(scale_ptr, D, MAIN, TAIL)
        if NORMALIZE:
            x, xt = normalize_rows(x, xt, mean_ptr, rstd_ptr, row, live, eps, D, MAIN, TAIL, ROWS, CENTER)
        y = x * (1.0 + scale) + shift
        yt = xt * (1.0 + scale_t) + shift_t
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
def _layernorm_modulate_forward_kernel(
    x_ptr, shift_ptr, scale_ptr, y_ptr, partial_ptr, descale_ptr, mean_ptr, rstd_ptr, sample_ptr, rows,
    length, chunks_per_sample, shift_stride, scale_stride, eps,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PACKED: tl.constexpr, NORMALIZE: tl.constexpr, CENTER: tl.constexpr,
    FLOAT8: tl.constexpr, PARTIALS: tl.constexpr, TARGET: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    factor = 1.0
    if FLOAT8 and PARTIALS > 0:
        factor = float8_factor(partial_ptr, descale_ptr, PARTIALS, TARGET)
    sample, first, stop = chunk_of_program(tl.program_id(0), rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            _forward_rows(
                x_ptr, of_sample(shift_ptr, sample, shift_stride), of_sample(scale_ptr, sample, scale_stride), y_ptr,
                descale_ptr, mean_ptr, rstd_ptr, first, end, eps, factor, D, MAIN, TAIL, ROWS, STAGES, HOLD, NORMALIZE,
                CENTER, FLOAT8, PARTIALS, TARGET, LIMIT,
            )  # fmt: skip
            first = end
    else:
        _forward_rows(
            x_ptr, of_sample(shift_ptr, sample, shift_stride), of_sample(scale_ptr, sample, scale_stride), y_ptr,
            descale_ptr, mean_ptr, rstd_ptr, first, stop, eps, factor, D, MAIN, TAIL, ROWS, STAGES, HOLD, NORMALIZE,
            CENTER, FLOAT8, PARTIALS, TARGET, LIMIT,
        )  # fmt: skip


@triton.jit
def _backward_rows(
    dy_ptr, x_ptr, other_ptr, scale_ptr, mean_ptr, rstd_ptr, dx_ptr, dshift_ptr, dscale_ptr, first, stop,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HOLD: tl.constexpr, NORMALIZE: tl.constexpr, CENTER: tl.constexpr, HAS_OTHER: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write dx for rows of one sample. With SUMS, also write the sums for dshift and dscale."""
    if HOLD:
        scale, scale_t = load_vectors(scale_ptr, D, MAIN, TAIL)
    if SUMS:
        dshift, dshift_t = zero_vectors(MAIN, TAIL)
        dscale, dscale_t = zero_vectors(MAIN, TAIL)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        live = start + tl.arange(0, ROWS) < stop
        row = tl.cast(start, tl.int64)
        if NORMALIZE or SUMS:
            x, xt = load_tiles(x_ptr, row, live, D, MAIN, TAIL, ROWS)
        dy, dyt = load_tiles(dy_ptr, row, live, D, MAIN, TAIL, ROWS)
        if HAS_OTHER:
            other, other_t = load_tiles(other_ptr, row, live, D, MAIN, TAIL, ROWS)
        if not HOLD:
            scale, scale_t = load_vectors(scale_ptr, D, MAIN, TAIL)
        if NORMALIZE:
            x, xt, rstd = normalize_rows_again(x, xt, mean_ptr, rstd_ptr, row, live, ROWS, CENTER)
            dx, dxt = normalize_backward(dy, dyt, x, xt, 1.0 + scale, 1.0 + scale_t, rstd, D, TAIL, ROWS, CENTER)
        else:
            dx = dy * (1.0 + scale)
            dxt = dyt * (1.0 + scale_t)
        if HAS_OTHER:
            dx += other
            dxt += other_t
        store_tiles(dx_ptr, dx, dxt, row, live, D, MAIN, TAIL, ROWS)
        if SUMS:
            dshift += tl.sum(dy, axis=0)
            dscale += tl.sum(dy * x, axis=0)
            if TAIL > 0:
                dshift_t += tl.sum(dyt, axis=0)
                dscale_t += tl.sum(dyt * xt, axis=0)
    if SUMS:
        store_vectors(dshift_ptr, dshift, dshift_t, D, MAIN, TAIL)
        store_vectors(dscale_ptr, dscale, dscale_t, D, MAIN, TAIL)


@triton.jit(do_not_specialize=SIZES)
def _layernorm_modulate_backward_kernel(
    dy_ptr, x_ptr, other_ptr, scale_ptr, mean_ptr, rstd_ptr, dx_ptr, dshift_ptr, dscale_ptr, sample_ptr, rows, length,
    chunks_per_sample, scale_stride,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, PACKED: tl.constexpr, NORMALIZE: tl.constexpr, CENTER: tl.constexpr,
    HAS_OTHER: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample, first, stop = chunk_of_program(program, rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            _backward_rows(
                dy_ptr, x_ptr, other_ptr, of_sample(scale_ptr, sample, scale_stride), mean_ptr, rstd_ptr, dx_ptr,
                of_sample(dshift_ptr, program + sample, D), of_sample(dscale_ptr, program + sample, D), first, end,
                D, MAIN, TAIL, ROWS, STAGES, HOLD, NORMALIZE, CENTER, HAS_OTHER, SUMS,
            )  # fmt: skip
            first = end
    else:
        _backward_rows(
            dy_ptr, x_ptr, other_ptr, of_sample(scale_ptr, sample, scale_stride), mean_ptr, rstd_ptr, dx_ptr,
            of_sample(dshift_ptr, program, D), of_sample(dscale_ptr, program, D), first, stop,
            D, MAIN, TAIL, ROWS, STAGES, HOLD, NORMALIZE, CENTER, HAS_OTHER, SUMS,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- operator


def _launch_forward(
    x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None, eps: float,
    y: Tensor | Float8, mean: Tensor, rstd: Tensor, partial: Tensor | None = None,
) -> None:  # fmt: skip
    """Run the forward kernel. The sizes of mean and rstd choose LN, RMSNorm (empty mean), or no norm (both empty)."""
    shift, scale = unit_columns(shift, scale)
    cut = common.cut_rows("layernorm_modulate_forward", forward_launch(x.shape[-1]), x, shift.shape[0], sample_of_row)
    main, tail = split_width(x.shape[-1])
    pointers, format_options = fp8.kernel_arguments(y, partial, fp8.EXACT)
    _layernorm_modulate_forward_kernel[(cut.programs,)](
        cut.x, shift, scale, *pointers, mean, rstd, *cut.shape_arguments, shift.stride(0), scale.stride(0), eps,
        D=x.shape[-1], MAIN=main, TAIL=tail, PACKED=cut.packed, NORMALIZE=rstd.numel() > 0, CENTER=mean.numel() > 0,
        **cut.launch.options(), **format_options,
    )  # fmt: skip


def _forward(
    x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None, eps: float, normalize: bool, center: bool
):
    outputs = _forward_fake(x, shift, scale, sample_of_row, eps, normalize, center)
    _launch_forward(x, shift, scale, sample_of_row, eps, *outputs)
    return outputs


def layernorm_modulate_float8(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, by_row: bool = False,
    sample_of_row: Tensor | None = None, center: bool = True,
) -> tuple[Float8, Tensor, Tensor]:  # fmt: skip
    """Return LN(x) * (1 + scale) + shift of x (B, N, D) in e4m3, and mean and rstd (B * N,) fp32.

    by_row: True to give the result one scale per row. center: False for RMSNorm, with an empty mean.
    """
    mean, rstd = common.new_statistics(x, center=center)
    y = Float8.empty(x.shape, fp8.E4M3, x.device, by_row)
    partial = None if by_row else fp8.amax(*unit_columns(shift, scale), normalized=True)
    _launch_forward(x, shift, scale, sample_of_row, eps, y, mean, rstd, partial)
    return y, mean, rstd


def _forward_fake(
    x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None, eps: float, normalize: bool, center: bool
):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, *common.new_statistics(x, normalize, center)


def _backward(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, sample_of_row: Tensor | None, normalize: bool,
    other: Tensor | None, sums: bool,
):  # fmt: skip
    (scale,) = unit_columns(scale)
    launch = backward_launch(x.shape[-1], x.element_size(), sample_of_row is not None)
    cut = common.cut_rows("layernorm_modulate_backward", launch, x, scale.shape[0], sample_of_row)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    outputs, slots = cut.new_sums((scale, scale) if sums else ())
    main, tail = split_width(x.shape[-1])
    _layernorm_modulate_backward_kernel[(cut.programs,)](
        dy.contiguous(), cut.x, dy if other is None else other.contiguous(), scale, mean, rstd, dx,
        *(slots if sums else (dx, dx)), *cut.shape_arguments, scale.stride(0),
        D=x.shape[-1], MAIN=main, TAIL=tail, PACKED=cut.packed, NORMALIZE=normalize, CENTER=mean.numel() > 0,
        HAS_OTHER=other is not None, SUMS=sums, **cut.launch.options(),
    )  # fmt: skip
    cut.finish_sums(outputs, slots)
    return dx, *(outputs if sums else common.no_sums(dx, 2))


def _backward_fake(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, sample_of_row: Tensor | None, normalize: bool,
    other: Tensor | None, sums: bool,
):  # fmt: skip
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, *([torch.empty_like(scale) for _ in range(2)] if sums else common.no_sums(dx, 2))


def gradients(
    ctx: Any, dy: Tensor, saved: Sequence[Tensor | None], normalize: bool = True, other: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, shift and scale, the first three inputs of an autograd function.

    The gradients of shift and scale are None if neither is needed. saved: x, scale, mean, rstd and sample_of_row.
    other: a gradient of x to add.
    """
    x, scale, *of_norm = saved
    sums = any(ctx.needs_input_grad[1:3])
    dx, *grads = layernorm_modulate_backward(dy, dy if x is None else x, scale, *of_norm, normalize, other, sums)
    return (dx, *grads) if sums else (dx, None, None)


def _setup_context(ctx, inputs, output) -> None:
    x, _, scale, sample_of_row, _, ctx.normalize, _ = inputs
    _, mean, rstd = output
    ctx.set_materialize_grads(False)  # pass None, not a tensor of zeros, for a missing gradient
    # without a norm, only the scale's gradient needs x
    kept = x if ctx.normalize or any(ctx.needs_input_grad[1:3]) else None
    ctx.save_for_backward(kept, scale, mean, rstd, sample_of_row)


def _autograd_backward(ctx, dy, dmean, drstd):
    if dy is None:
        return (None,) * 7
    return *gradients(ctx, dy, ctx.saved_tensors, ctx.normalize), None, None, None, None


layernorm_modulate_backward = operator(
    "layernorm_modulate_backward(Tensor dy, Tensor x, Tensor scale, Tensor mean, Tensor rstd, Tensor? sample_of_row, "
    "bool normalize, Tensor? other, bool sums) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
layernorm_modulate_forward = operator(
    "layernorm_modulate(Tensor x, Tensor shift, Tensor scale, Tensor? sample_of_row, float eps, bool normalize, "
    "bool center) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _autograd_backward,
    _setup_context,
)


def layernorm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, sample_of_row: Tensor | None = None
) -> Tensor:
    """Compute LN(x) * (1 + scale) + shift with Triton kernels, differentiable in x, shift and scale.

    Args:
        x: (B, N, D) bf16, fp16 or fp32; or (rows, D) with ``sample_of_row``.
        shift, scale: (B, D) of one dtype, not necessarily x's; rows may be strided (chunks of a (B, 6 D) tensor).
        sample_of_row: (rows,) int32 or int64, non-decreasing: the sample of each row.

    Returns x's shape and dtype. Raises ValueError if shapes, dtypes or devices don't fit.
    """
    check_inputs(x, sample_of_row, {}, shift=shift, scale=scale)
    return layernorm_modulate_forward(x, shift, scale, sample_of_row, eps, True, True)[0]


class ResidualNormModulate(torch.autograd.Function):
    """Autograd function that returns (x, normalised and modulated x). It is no registered operator, because operators
    must not return their inputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, eps: float, sample_of_row: Tensor | None, center: bool
    ) -> tuple[Tensor, Tensor]:
        y, mean, rstd = layernorm_modulate_forward(x, shift, scale, sample_of_row, eps, True, center)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, scale, mean, rstd, sample_of_row)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, other: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return other, None, None, None, None, None
        return *gradients(ctx, dy, ctx.saved_tensors, other=other), None, None, None


def residual_layernorm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, sample_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (x, LN(x) * (1 + scale) + shift), for a caller that also uses x. The backward kernel adds the gradients of
    x from both uses in one pass. For the arguments, see :func:`layernorm_modulate`."""
    check_inputs(x, sample_of_row, {}, shift=shift, scale=scale)
    return ResidualNormModulate.apply(x, shift, scale, eps, sample_of_row, True)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    """Compute x * (1 + scale) + shift. For the arguments, see :func:`layernorm_modulate`."""
    check_inputs(x, sample_of_row, {}, shift=shift, scale=scale)
    return layernorm_modulate_forward(x, shift, scale, sample_of_row, 0.0, False, False)[0]
