"""adaLN: y = LN(x) * (1 + scale) + shift, LN over D without affine part; and the modulation alone, without LN.

x (B, N, D) with shift, scale (B, D); or packed, x (rows, D) with sample_of_row (rows,), see kernels/common.py.
Statistics and sums in fp32, I/O in bf16, fp16 or fp32; y has x's dtype. Forward reads x once and writes y once,
keeping mean and rstd (fp32, one a row); backward reads x and dy once, writes dx once and recomputes the normalised x:

    xhat = (x - mean) * rstd,  g = dy * (1 + scale)
    dx = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat))
    dshift = sum_N dy,  dscale = sum_N dy * xhat
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels import common
from opendit.kernels.common import (
    Launch,
    chunk_of_program,
    load_tile,
    load_vector,
    next_segment,
    register,
    rows_of_samples,
    split_width,
    store_tile,
    store_vector,
    tl,
    triton,
    unit_columns,
)

# ---------------------------------------------------------------------------------------------------------- reference


def modulate_reference(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    """x * (1 + scale) + shift in torch, in the inputs' precision."""
    return x * (1 + rows_of_samples(scale, sample_of_row)) + rows_of_samples(shift, sample_of_row)


def layernorm_modulate_reference(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, sample_of_row: Tensor | None = None
) -> Tensor:
    """LN(x) * (1 + scale) + shift in torch, in the inputs' precision."""
    return modulate_reference(F.layer_norm(x, x.shape[-1:], eps=eps), shift, scale, sample_of_row)


# ------------------------------------------------------------------------------------------------------------ kernels


def forward_launch(width: int) -> Launch:
    """One warp for up to 2,047 columns: 36 numbers a lane at D = 1152, and the row's sums need no barrier."""
    main = split_width(width)[0]
    return Launch(rows=max(1, 1024 // main), tiles=8, warps=max(1, main // 1024))


def backward_launch(width: int) -> Launch:
    """Two warps for 1024 + 128 columns: the sums add 2 fp32 a column to what stays in registers.

    More warps were slower (measured: eight, by 3 to 4 times), the row's own sums then wait for them all.
    """
    main = split_width(width)[0]
    return Launch(rows=max(1, 1024 // main), tiles=64, warps=max(1, main // 512))


@triton.jit
def row_statistics(x, xt, live, eps, MAIN: tl.constexpr, TAIL: tl.constexpr, D: tl.constexpr):
    """(x - mean, tail - mean, mean, rstd) of fp32 tiles (rows, MAIN), (rows, TAIL); two passes over registers."""
    total = tl.sum(x, axis=1)
    if TAIL > 0:
        total += tl.sum(xt, axis=1)
    mean = total / D
    x = x - mean[:, None]
    if MAIN > D:
        x = tl.where((tl.arange(0, MAIN) < D)[None, :], x, 0.0)
    square = tl.sum(x * x, axis=1)
    if TAIL > 0:
        xt = xt - mean[:, None]
        if MAIN + TAIL > D:
            xt = tl.where((MAIN + tl.arange(0, TAIL) < D)[None, :], xt, 0.0)
        square += tl.sum(xt * xt, axis=1)
    return x, xt, mean, 1.0 / tl.sqrt(square / D + eps)


@triton.jit
def _forward_segment(
    x_ptr, shift_ptr, scale_ptr, y_ptr, mean_ptr, rstd_ptr, first, stop, eps,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Rows first .. stop of one sample, whose shift and 1 + scale stay in registers."""
    shift = load_vector(shift_ptr, 0, MAIN, D)[None, :]
    gain = 1.0 + load_vector(scale_ptr, 0, MAIN, D)[None, :]
    if TAIL > 0:
        shift_t = load_vector(shift_ptr, MAIN, TAIL, D)[None, :]
        gain_t = 1.0 + load_vector(scale_ptr, MAIN, TAIL, D)[None, :]
    for row in tl.range(first, stop, ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        live = rows < stop
        row = tl.cast(row, tl.int64)
        x = load_tile(x_ptr, row, live, 0, MAIN, D, ROWS)
        xt = x
        if TAIL > 0:
            xt = load_tile(x_ptr, row, live, MAIN, TAIL, D, ROWS)
        if NORMALIZE:
            x, xt, mean, rstd = row_statistics(x, xt, live, eps, MAIN, TAIL, D)
            tl.store(mean_ptr + rows, mean, mask=live)
            tl.store(rstd_ptr + rows, rstd, mask=live)
            x = x * rstd[:, None]
            if TAIL > 0:
                xt = xt * rstd[:, None]
        store_tile(y_ptr, x * gain + shift, row, live, 0, MAIN, D, ROWS)
        if TAIL > 0:
            store_tile(y_ptr, xt * gain_t + shift_t, row, live, MAIN, TAIL, D, ROWS)


@triton.jit
def _forward_kernel(
    x_ptr, shift_ptr, scale_ptr, y_ptr, mean_ptr, rstd_ptr, sample_ptr, rows, length, chunks_per_sample,
    shift_stride, scale_stride, eps,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, PACKED: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    sample, first, stop = chunk_of_program(rows, length, chunks_per_sample, CHUNK, PACKED)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            _forward_segment(
                x_ptr, shift_ptr + sample.to(tl.int64) * shift_stride, scale_ptr + sample.to(tl.int64) * scale_stride,
                y_ptr, mean_ptr, rstd_ptr, first, end, eps, D, MAIN, TAIL, ROWS, STAGES, NORMALIZE,
            )  # fmt: skip
            first = end
    else:
        _forward_segment(
            x_ptr, shift_ptr + sample.to(tl.int64) * shift_stride, scale_ptr + sample.to(tl.int64) * scale_stride,
            y_ptr, mean_ptr, rstd_ptr, first, stop, eps, D, MAIN, TAIL, ROWS, STAGES, NORMALIZE,
        )  # fmt: skip


@triton.jit
def layernorm_backward_tile(
    dy, dyt, xhat, xhat_t, gain, gain_t, rstd, TAIL: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * gain, for tiles of main and tail columns."""
    g = dy * gain
    sum_g = tl.sum(g, axis=1)
    sum_gx = tl.sum(g * xhat, axis=1)
    gt = g
    if TAIL > 0:
        gt = dyt * gain_t
        sum_g += tl.sum(gt, axis=1)
        sum_gx += tl.sum(gt * xhat_t, axis=1)
    a = (sum_gx / D)[:, None]
    b = (sum_g / D)[:, None]
    r = rstd[:, None]
    dx = (g - b - xhat * a) * r
    dxt = dx
    if TAIL > 0:
        dxt = (gt - b - xhat_t * a) * r
    return dx, dxt


@triton.jit
def _backward_segment(
    dy_ptr, x_ptr, scale_ptr, mean_ptr, rstd_ptr, dx_ptr, dshift_ptr, dscale_ptr, first, stop,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Rows first .. stop of one sample: writes their dx and, to one slot, their sums for shift and scale."""
    gain = 1.0 + load_vector(scale_ptr, 0, MAIN, D)[None, :]
    dshift = tl.zeros((MAIN,), dtype=tl.float32)
    dscale = tl.zeros((MAIN,), dtype=tl.float32)
    gain_t = gain
    if TAIL > 0:
        gain_t = 1.0 + load_vector(scale_ptr, MAIN, TAIL, D)[None, :]
        dshift_t = tl.zeros((TAIL,), dtype=tl.float32)
        dscale_t = tl.zeros((TAIL,), dtype=tl.float32)
    for row in tl.range(first, stop, ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        live = rows < stop
        row = tl.cast(row, tl.int64)
        x = load_tile(x_ptr, row, live, 0, MAIN, D, ROWS)
        dy = load_tile(dy_ptr, row, live, 0, MAIN, D, ROWS)
        xt = x
        dyt = dy
        if TAIL > 0:
            xt = load_tile(x_ptr, row, live, MAIN, TAIL, D, ROWS)
            dyt = load_tile(dy_ptr, row, live, MAIN, TAIL, D, ROWS)
        if NORMALIZE:
            mean = tl.load(mean_ptr + rows, mask=live, other=0.0)
            rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
            x = (x - mean[:, None]) * rstd[:, None]
            if TAIL > 0:
                xt = (xt - mean[:, None]) * rstd[:, None]
            dx, dxt = layernorm_backward_tile(dy, dyt, x, xt, gain, gain_t, rstd, TAIL, D)
        else:
            dx = dy * gain
            dxt = dyt * gain_t
        store_tile(dx_ptr, dx, row, live, 0, MAIN, D, ROWS)
        dshift += tl.sum(dy, axis=0)
        dscale += tl.sum(dy * x, axis=0)
        if TAIL > 0:
            store_tile(dx_ptr, dxt, row, live, MAIN, TAIL, D, ROWS)
            dshift_t += tl.sum(dyt, axis=0)
            dscale_t += tl.sum(dyt * xt, axis=0)
    store_vector(dshift_ptr, dshift, 0, MAIN, D)
    store_vector(dscale_ptr, dscale, 0, MAIN, D)
    if TAIL > 0:
        store_vector(dshift_ptr, dshift_t, MAIN, TAIL, D)
        store_vector(dscale_ptr, dscale_t, MAIN, TAIL, D)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, scale_ptr, mean_ptr, rstd_ptr, dx_ptr, dshift_ptr, dscale_ptr, sample_ptr, rows, length,
    chunks_per_sample, scale_stride,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, PACKED: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    sample, first, stop = chunk_of_program(rows, length, chunks_per_sample, CHUNK, PACKED)
    slot = tl.program_id(0).to(tl.int64)
    if PACKED:
        while first < stop:
            sample, end = next_segment(sample_ptr, first, stop, CHUNK)
            _backward_segment(
                dy_ptr, x_ptr, scale_ptr + sample.to(tl.int64) * scale_stride, mean_ptr, rstd_ptr, dx_ptr,
                dshift_ptr + (slot + sample) * D, dscale_ptr + (slot + sample) * D, first, end,
                D, MAIN, TAIL, ROWS, STAGES, NORMALIZE,
            )  # fmt: skip
            first = end
    else:
        _backward_segment(
            dy_ptr, x_ptr, scale_ptr + sample.to(tl.int64) * scale_stride, mean_ptr, rstd_ptr, dx_ptr,
            dshift_ptr + slot * D, dscale_ptr + slot * D, first, stop, D, MAIN, TAIL, ROWS, STAGES, NORMALIZE,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- operator


def _forward(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None, eps: float, normalize: bool):
    shift, scale = unit_columns(shift, scale)
    cut = common.cut_rows(
        "layernorm_modulate_forward", forward_launch(x.shape[-1]), x, shift.shape[0], sample_of_row
    )
    y, mean, rstd = _forward_fake(x, shift, scale, sample_of_row, eps, normalize)
    main, tail = split_width(x.shape[-1])
    _forward_kernel[(cut.programs,)](
        cut.x, shift, scale, y, mean, rstd, *cut.shape_arguments, shift.stride(0), scale.stride(0), eps,
        D=x.shape[-1], MAIN=main, TAIL=tail, ROWS=cut.launch.rows, CHUNK=cut.launch.chunk, STAGES=cut.launch.stages,
        PACKED=cut.packed, NORMALIZE=normalize, num_warps=cut.launch.warps,
    )  # fmt: skip
    return y, mean, rstd


def _forward_fake(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None, eps: float, normalize: bool):
    rows = x.numel() // x.shape[-1] if normalize else 0  # modulation alone has no statistics
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), mean, rstd


def _backward(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, sample_of_row: Tensor | None, normalize: bool
):
    (scale,) = unit_columns(scale)
    cut = common.cut_rows(
        "layernorm_modulate_backward", backward_launch(x.shape[-1]), x, scale.shape[0], sample_of_row
    )
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    outputs, sums = cut.new_sums((scale, scale))
    main, tail = split_width(x.shape[-1])
    _backward_kernel[(cut.programs,)](
        dy.contiguous(), cut.x, scale, mean, rstd, dx, *sums, *cut.shape_arguments, scale.stride(0),
        D=x.shape[-1], MAIN=main, TAIL=tail, ROWS=cut.launch.rows, CHUNK=cut.launch.chunk, STAGES=cut.launch.stages,
        PACKED=cut.packed, NORMALIZE=normalize, num_warps=cut.launch.warps,
    )  # fmt: skip
    cut.finish_sums(outputs, sums)
    return dx, *outputs


def _backward_fake(
    dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, sample_of_row: Tensor | None, normalize: bool
):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, *(torch.empty(scale.shape, dtype=scale.dtype, device=scale.device) for _ in range(2))


def _setup_context(ctx, inputs, output) -> None:
    x, _, scale, sample_of_row, _, ctx.normalize = inputs
    _, mean, rstd = output
    ctx.set_materialize_grads(False)  # mean and rstd have no gradient: no zeros for them
    ctx.save_for_backward(x, scale, mean, rstd, sample_of_row)


def _autograd_backward(ctx, dy, dmean, drstd):
    if dy is None:
        return None, None, None, None, None, None
    x, scale, mean, rstd, sample_of_row = ctx.saved_tensors
    grads = torch.ops.opendit.layernorm_modulate_backward(dy, x, scale, mean, rstd, sample_of_row, ctx.normalize)
    return *grads, None, None, None


register(
    "layernorm_modulate_backward(Tensor dy, Tensor x, Tensor scale, Tensor mean, Tensor rstd, Tensor? sample_of_row, "
    "bool normalize) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register(
    "layernorm_modulate(Tensor x, Tensor shift, Tensor scale, Tensor? sample_of_row, float eps, bool normalize) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _autograd_backward,
    _setup_context,
)


def layernorm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, sample_of_row: Tensor | None = None
) -> Tensor:
    """LN(x) * (1 + scale) + shift by Triton kernels, differentiable in x, shift and scale.

    Args:
        x: (B, N, D) bf16, fp16 or fp32; or (rows, D) with ``sample_of_row``.
        shift, scale: (B, D), one dtype, which need not be x's; rows may be strided (chunks of a (B, 6 D) tensor).
        sample_of_row: (rows,) int32 or int64, non-decreasing, the sample each row belongs to.

    Returns:
        x's shape and dtype.
    """
    common.check_inputs(x, sample_of_row, {}, shift=shift, scale=scale)
    return torch.ops.opendit.layernorm_modulate(x, shift, scale, sample_of_row, eps, True)[0]


def modulate(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    """x * (1 + scale) + shift by the same kernels without the normalisation; arguments as above."""
    common.check_inputs(x, sample_of_row, {}, shift=shift, scale=scale)
    return torch.ops.opendit.layernorm_modulate(x, shift, scale, sample_of_row, 0.0, False)[0]
