"""Device functions for the row kernels.

A row of D columns is held as two blocks, main and tail (common.split_width). If there is no tail (TAIL = 0), arguments
and results for the tail hold the main block and are not used. Values are fp32 between load and store.
"""

from opendit.kernels.language import tl, triton

# ----------------------------------------------------------------------------------------------- loading and storing


@triton.jit
def _load_vector(ptr, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    cols = START + tl.arange(0, WIDTH)
    if START + WIDTH > D:
        value = tl.load(ptr + cols, mask=cols < D, other=0.0)
    else:
        value = tl.load(ptr + cols)
    return value.to(tl.float32)[None, :]


@triton.jit
def load_vectors(ptr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Load one row of shift, scale or gate as fp32 (1, MAIN) and (1, TAIL); columns from D on are zero."""
    main = _load_vector(ptr, 0, MAIN, D)
    tail = main
    if TAIL > 0:
        tail = _load_vector(ptr, MAIN, TAIL, D)
    return main, tail


@triton.jit
def zero_vectors(MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Return two fp32 accumulators of zeros, (MAIN,) and (TAIL,)."""
    main = tl.zeros((MAIN,), dtype=tl.float32)
    tail = main
    if TAIL > 0:
        tail = tl.zeros((TAIL,), dtype=tl.float32)
    return main, tail


@triton.jit
def store_vectors(ptr, main, tail, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Store vectors (MAIN,) and (TAIL,), rounded to the pointer's dtype."""
    cols = tl.arange(0, MAIN)
    tl.store(ptr + cols, main.to(ptr.dtype.element_ty), mask=cols < D)
    if TAIL > 0:
        cols = MAIN + tl.arange(0, TAIL)
        tl.store(ptr + cols, tail.to(ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def _tile(row, live, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Return the offsets (from ``row``, in 32 bits) and the mask of a (ROWS, WIDTH) tile at column START."""
    cols = START + tl.arange(0, WIDTH)
    mask = live[:, None]
    if START + WIDTH > D:
        mask = mask & (cols < D)[None, :]
    return tl.arange(0, ROWS)[:, None] * D + cols[None, :], mask


@triton.jit
def load_tile(ptr, row, live, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Load a tile of a contiguous (rows, D) tensor as fp32; elements outside the tensor are zero. The tile is evicted
    early from the L1 cache, because it is read only once."""
    offsets, mask = _tile(row, live, START, WIDTH, D, ROWS)
    return tl.load(ptr + row * D + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def store_tile(ptr, value, row, live, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    offsets, mask = _tile(row, live, START, WIDTH, D, ROWS)
    tl.store(ptr + row * D + offsets, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_tiles(ptr, row, live, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr):
    """Load complete rows as fp32 (ROWS, MAIN) and (ROWS, TAIL)."""
    main = load_tile(ptr, row, live, 0, MAIN, D, ROWS)
    tail = main
    if TAIL > 0:
        tail = load_tile(ptr, row, live, MAIN, TAIL, D, ROWS)
    return main, tail


@triton.jit
def store_tiles(
    ptr, main, tail, row, live, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr
):
    store_tile(ptr, main, row, live, 0, MAIN, D, ROWS)
    if TAIL > 0:
        store_tile(ptr, tail, row, live, MAIN, TAIL, D, ROWS)


# --------------------------------------------------------------------------- blocks of columns, without sums along rows


@triton.jit
def load_columns(ptr, column, D: tl.constexpr, BLOCK: tl.constexpr):
    """Load columns [column, column + BLOCK) of one row as fp32 (1, BLOCK); columns from D on are zero."""
    cols = column + tl.arange(0, BLOCK)
    return tl.load(ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_column_sums(ptr, sums, column, D: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sums of a (ROWS, BLOCK) tile's columns, rounded to the pointer's dtype."""
    cols = column + tl.arange(0, BLOCK)
    tl.store(ptr + cols, tl.sum(sums, axis=0).to(ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def column_block(column, start, stop, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return offsets and mask of a tile: rows from ``start``, before ``stop``; columns [column, column + BLOCK)."""
    cols = tl.arange(0, BLOCK)
    mask = (start + tl.arange(0, ROWS) < stop)[:, None]
    if D % BLOCK != 0:
        mask = mask & (column + cols < D)[None, :]
    first = tl.cast(start, tl.int64) * D + column
    return first + (tl.arange(0, ROWS)[:, None] * D + cols[None, :]), mask


# ----------------------------------------------------------------------------------------------- sums and statistics


@triton.jit
def row_sums(x, ROWS: tl.constexpr):
    """Return the sums of a tile's rows, (ROWS, 1). For one row, return a scalar, because adding (1,) tensors would
    convert layouts: 84 warp shuffles for a row of the forward pass instead of 20."""
    if ROWS == 1:
        total = tl.sum(tl.sum(x, axis=1), axis=0)
    else:
        total = tl.sum(x, axis=1)[:, None]
    return total


@triton.jit
def row_sums_of_two(a, b, ROWS: tl.constexpr):
    """Return the row_sums of two tiles, with the barriers of one."""
    pair = tl.sum(tl.join(a, b), axis=1)
    if ROWS == 1:
        pair = tl.sum(pair, axis=0)
        first, second = tl.split(pair)
    else:
        first, second = tl.split(pair)
        first = first[:, None]
        second = second[:, None]
    return first, second


@triton.jit
def load_rows(ptr, row, live, ROWS: tl.constexpr):
    """Load one value for each row of a tile: (ROWS, 1), or a scalar if ROWS is 1, as row_sums returns."""
    if ROWS == 1:
        value = tl.load(ptr + row)
    else:
        value = tl.load(ptr + row + tl.arange(0, ROWS), mask=live, other=0.0)[:, None]
    return value


@triton.jit
def store_rows(ptr, value, row, live, ROWS: tl.constexpr):
    if ROWS == 1:
        tl.store(ptr + row, value)
    else:
        tl.store((ptr + row + tl.arange(0, ROWS))[:, None], value, mask=live[:, None])


@triton.jit
def normalize_rows(
    x, xt, mean_ptr, rstd_ptr, row, live, eps,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    """Compute xhat = (x - mean) * rstd for each row, and store mean and rstd. Columns of x from D on must be zero.
    Without CENTER (RMSNorm) there is no mean, and rstd is 1 / rms(x)."""
    if CENTER:
        total = row_sums(x, ROWS)
        if TAIL > 0:
            total += row_sums(xt, ROWS)
        mean = total / D
        x = x - mean
        if MAIN > D:
            x = tl.where((tl.arange(0, MAIN) < D)[None, :], x, 0.0)
        if TAIL > 0:
            xt = xt - mean
            if MAIN + TAIL > D:
                xt = tl.where((MAIN + tl.arange(0, TAIL) < D)[None, :], xt, 0.0)
    square = row_sums(x * x, ROWS)
    if TAIL > 0:
        square += row_sums(xt * xt, ROWS)
    rstd = 1.0 / tl.sqrt(square / D + eps)
    if CENTER:
        store_rows(mean_ptr, mean, row, live, ROWS)
    store_rows(rstd_ptr, rstd, row, live, ROWS)
    return x * rstd, xt * rstd


@triton.jit
def normalize_rows_again(x, xt, mean_ptr, rstd_ptr, row, live, ROWS: tl.constexpr, CENTER: tl.constexpr):
    """Return xhat, the tail of xhat, and rstd, from the mean and rstd that normalize_rows stored."""
    if CENTER:
        mean = load_rows(mean_ptr, row, live, ROWS)
        x = x - mean
        xt = xt - mean
    rstd = load_rows(rstd_ptr, row, live, ROWS)
    return x * rstd, xt * rstd, rstd


@triton.jit
def normalize_backward(
    dy, dyt, xhat, xhat_t, gain, gain_t, rstd,
    D: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    """Compute dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) by row, g = dy * gain; mean(g) is 0 without CENTER."""
    g = dy * gain
    gt = g
    if TAIL > 0:
        gt = dyt * gain_t
    if CENTER:
        sum_g, sum_gx = row_sums_of_two(g, g * xhat, ROWS)
        if TAIL > 0:
            sum_gt, sum_gxt = row_sums_of_two(gt, gt * xhat_t, ROWS)
            sum_g += sum_gt
            sum_gx += sum_gxt
        mean_g = sum_g / D
        g = g - mean_g
        gt = gt - mean_g
    else:
        sum_gx = row_sums(g * xhat, ROWS)
        if TAIL > 0:
            sum_gx += row_sums(gt * xhat_t, ROWS)
    mean_gx = sum_gx / D
    dx = (g - xhat * mean_gx) * rstd
    dxt = dx
    if TAIL > 0:
        dxt = (gt - xhat_t * mean_gx) * rstd
    return dx, dxt


# ---------------------------------------------------------------------------------------------------------- functions


@triton.jit
def logistic(power, APPROXIMATE: tl.constexpr):
    """Compute 1 / (1 + 2^power), the sigmoid of -ln(2) * power.

    APPROXIMATE: use the hardware's reciprocal instead of a division. Its error is at most the last bit of fp32.
    """
    denominator = 1.0 + tl.exp2(power)
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / denominator


@triton.jit
def gelu_coarse(u, APPROXIMATE: tl.constexpr):
    """Compute GELU(u) in its tanh form, for results that are rounded to few bits.

    APPROXIMATE: use the hardware's tanh, with an error of 2^-11. Then memory bandwidth limits the kernel, not the units
    for exponentials and reciprocals.
    """
    if APPROXIMATE:
        z = u * (0.7978845608028654 + 0.035677408136300125 * (u * u))
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
        half = 0.5 * u
        return half * t + half
    return u * gelu_sigmoid(u, u * u, APPROXIMATE)


@triton.jit
def gelu_sigmoid(u, square, APPROXIMATE: tl.constexpr):
    """Compute sigmoid(2 z) = (1 + tanh(z)) / 2, z = sqrt(2 / pi) * (u + 0.044715 u^3). GELU(u) is u * sigmoid(2 z)."""
    # The constants express exp(-2 z) as a power of 2.
    return logistic(u * (-2.302208198144325 - 0.1029432395800235 * square), APPROXIMATE)


# -------------------------------------------------------------------------------------- rows and samples of programs


@triton.jit
def chunk_of_program(program, rows, length, chunks_per_sample, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return a program's sample, first row, and the row after the last. In the packed form, the sample is 0, because
    next_segment finds the samples."""
    sample = 0
    if PACKED:
        first = program * CHUNK
        stop = tl.minimum(first + CHUNK, rows)
    else:
        sample = program // chunks_per_sample
        first = sample * length + (program % chunks_per_sample) * CHUNK
        stop = tl.minimum(first + CHUNK, (sample + 1) * length)
    return sample, first, stop


@triton.jit
def next_segment(sample_ptr, row, stop, CHUNK: tl.constexpr):
    """Return the sample of ``row``, and the end (at most ``stop``) of the sample's rows. A sample's rows are
    contiguous, so the end is ``row`` plus the number of remaining rows."""
    sample = tl.load(sample_ptr + row).to(tl.int32)
    rows = row + tl.arange(0, CHUNK)
    same = tl.load(sample_ptr + rows, mask=rows < stop, other=-1).to(tl.int32) == sample
    return sample, row + tl.sum(same.to(tl.int32), axis=0)


@triton.jit
def of_sample(ptr, sample, stride):
    """Return a pointer to a sample's row. The offset has 64 bits, because rows of a (B, 6 D) tensor are far apart."""
    return ptr + tl.cast(sample, tl.int64) * stride


# ------------------------------------------------------------------------------------------------------------- float8


@triton.jit
def power_of_2(largest, TARGET: tl.constexpr):
    """Return the power of two that brings ``largest`` to [2^TARGET, 2^(TARGET + 1)), and its inverse. Multiplying by a
    power of two doesn't round. The factor comes from exponent bits, so all programs and devices get equal factors."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.maximum(exponent, TARGET + 1)  # keeps both powers normal numbers when ``largest`` is near zero
    factor = ((254 + TARGET - exponent) << 23).to(tl.float32, bitcast=True)
    return factor, ((exponent - TARGET) << 23).to(tl.float32, bitcast=True)


@triton.jit
def float8_factor(partial_ptr, descale_ptr, PARTIALS: tl.constexpr, TARGET: tl.constexpr):
    """Return the float8 factor, a power of two, for the largest of the partial maxima. The first program also stores
    the factor's inverse, for the matrix product."""
    largest = tl.max(tl.load(partial_ptr + tl.arange(0, PARTIALS)), axis=0)
    factor, inverse = power_of_2(largest, TARGET)
    if tl.program_id(0) == 0:
        tl.store(descale_ptr, inverse)
    return factor


@triton.jit
def largest_of(x, xt, TAIL: tl.constexpr):
    """Return the largest absolute value of a row that is held as main and tail block."""
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    if TAIL > 0:
        largest = tl.maximum(largest, tl.max(tl.max(tl.abs(xt), axis=1), axis=0))
    return largest


@triton.jit
def modulated_factor(shift, shift_t, scale, scale_t, D: tl.constexpr, TAIL: tl.constexpr, TARGET: tl.constexpr):
    """Return the float8 factor, and its inverse, for all rows LN(x) * (1 + scale) + shift of a sample. The factor
    follows from the bound |LN(x)| <= sqrt(D), without reading x."""
    root = tl.sqrt(D * 1.0)
    bound, bound_t = root * tl.abs(1.0 + scale) + tl.abs(shift), root * tl.abs(1.0 + scale_t) + tl.abs(shift_t)
    return power_of_2(largest_of(bound, bound_t, TAIL), TARGET)


@triton.jit
def float8_range(value, factor, LIMIT: tl.constexpr):
    """Return value * factor, clamped to the float8 range. Infinity becomes NaN, because clamping would hide the
    error."""
    value = value * factor
    return tl.where(tl.abs(value) < float("inf"), tl.clamp(value, -LIMIT, LIMIT), float("nan"))
