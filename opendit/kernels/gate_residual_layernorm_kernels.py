"""The kernels of gate_residual_layernorm_modulate.py, which says what they compute, and how they are launched."""

from opendit.kernels.common import SIZES, Launch, next_power_of_2, pipeline_stages, split_width
from opendit.kernels.fp8_tiles import float8_factor, float8_range, modulated_factor
from opendit.kernels.language import tl, triton
from opendit.kernels.tiles import (
    chunk_of_program,
    load_rows,
    load_tiles,
    load_vectors,
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


def forward_launch(width: int, element_size: int, row_scales: bool = False) -> Launch:
    """Two warps for 1024 + 128 columns: gate, shift and scale stay in registers beside two rows.

    row_scales: y is float8 with a scale a row, for which a program looks at all of shift and scale before its first
    row. So it takes more rows, and one warp, which waits for no other when it sums a row, has room for 1,024 + 128
    columns as long as it makes no sums by sample. (With two warps and 8 rows 55 such calls were 14 % of a step of 64
    pictures by DiT-XL/2: H200, benchmarks/bench_sampling.py --profile.)
    """
    main = split_width(width)[0]
    rows = max(1, 512 // main)
    stages = pipeline_stages(rows * width, 2, element_size)
    if row_scales and main <= 1024:
        return Launch(rows=rows, tiles=32, warps=1, stages=stages)
    return Launch(rows=rows, tiles=8, warps=max(1, main // 512), stages=stages)


def backward_launch(width: int, element_size: int) -> Launch:
    """At most 20 columns a thread, which hold four sums of fp32 each: two warps for 1,152 columns, 253 us where four
    take 279 (65,536 rows, H200)."""
    main = split_width(width)[0]
    rows = max(1, 512 // main)
    stages = pipeline_stages(rows * width, 4, element_size)
    return Launch(rows=rows, tiles=64, warps=min(next_power_of_2(-(-width // 640)), 16), stages=stages)


@triton.jit
def _load_branch(
    branch_ptr, branch_scale_ptr, bias_ptr, row, live, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rows of branch, times a number each if SCALED, + bias. The bias comes from the L1 cache for each tile: no
    registers are left to hold it."""
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
    """Rows first .. stop, all of one sample."""
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
        )  # fmt: skip
        if not HOLD:
            gate, gate_t = load_vectors(gate_ptr, D, MAIN, TAIL)
            shift, shift_t = load_vectors(shift_ptr, D, MAIN, TAIL)
            scale, scale_t = load_vectors(scale_ptr, D, MAIN, TAIL)
        # The LayerNorm sees h as it is stored, so that backward recomputes the same hhat from it.
        h = (x + gate * branch).to(h_ptr.dtype.element_ty).to(tl.float32)
        ht = (xt + gate_t * branch_t).to(h_ptr.dtype.element_ty).to(tl.float32)
        store_tiles(h_ptr, h, ht, row, live, D, MAIN, TAIL, ROWS)
        h, ht = normalize_rows(h, ht, mean_ptr, rstd_ptr, row, live, eps, D, MAIN, TAIL, ROWS, CENTER)
        y = h * (1.0 + scale) + shift
        yt = ht * (1.0 + scale_t) + shift_t
        if SCALED_ROWS:  # within the range by its bound; what is not finite is NaN already
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
    HOLD: tl.constexpr, CENTER: tl.constexpr, HAS_DH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Rows first .. stop, all of one sample: their dx and dbranch and, to one slot each, their sums."""
    if HOLD:
        gate, gate_t = load_vectors(gate_ptr, D, MAIN, TAIL)
        scale, scale_t = load_vectors(scale_ptr, D, MAIN, TAIL)
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
        branch, branch_t = _load_branch(
            branch_ptr, branch_ptr, bias_ptr, row, live, D, MAIN, TAIL, ROWS, HAS_BIAS, False
        )  # fmt: skip
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
        dgate += tl.sum(branch * dx, axis=0)
        if HAS_BIAS:
            total += tl.sum(dx, axis=0)
            if TAIL > 0:
                total_t += tl.sum(dxt, axis=0)
        dshift += tl.sum(dy, axis=0)
        dscale += tl.sum(dy * h, axis=0)
        if TAIL > 0:
            dgate_t += tl.sum(branch_t * dxt, axis=0)
            dshift_t += tl.sum(dyt, axis=0)
            dscale_t += tl.sum(dyt * ht, axis=0)
    store_vectors(dgate_ptr, dgate, dgate_t, D, MAIN, TAIL)
    store_vectors(dshift_ptr, dshift, dshift_t, D, MAIN, TAIL)
    store_vectors(dscale_ptr, dscale, dscale_t, D, MAIN, TAIL)
    if HAS_BIAS:
        gate, gate_t = load_vectors(gate_ptr, D, MAIN, TAIL)
        total = tl.sum(gate, axis=0) * total  # gate as (MAIN,): a sum over its one row
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
    HAS_BIAS: tl.constexpr,
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
            )  # fmt: skip
            first = end
    else:
        _backward_rows(
            dh_ptr, dy_ptr, h_ptr, of_sample(gate_ptr, sample, gate_stride), branch_ptr, bias_ptr,
            of_sample(scale_ptr, sample, scale_stride), mean_ptr, rstd_ptr, dx_ptr, dbranch_ptr,
            of_sample(dgate_ptr, program, D), of_sample(dshift_ptr, program, D), of_sample(dscale_ptr, program, D),
            of_sample(dbias_ptr, program, D), first, stop, D, MAIN, TAIL, ROWS, STAGES, HOLD, CENTER, HAS_DH, HAS_BIAS,
        )  # fmt: skip
