"""Device functions for kernels that write float8: the factor of a tensor or a row, and the range of a format."""

from opendit.kernels.language import tl, triton


@triton.jit
def power_of_2(largest, TARGET: tl.constexpr):
    """(factor, its inverse): the power of two that brings ``largest`` to [2^TARGET, 2^(TARGET + 1)).

    A power of two rounds nothing away. It is made from the exponent's bits, so it is the same everywhere.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.maximum(exponent, TARGET + 1)  # zero and what is next to it; both powers stay normal numbers
    factor = ((254 + TARGET - exponent) << 23).to(tl.float32, bitcast=True)
    return factor, ((exponent - TARGET) << 23).to(tl.float32, bitcast=True)


@triton.jit
def float8_factor(partial_ptr, descale_ptr, PARTIALS: tl.constexpr, TARGET: tl.constexpr):
    """The power of two of the largest of the partial maxima; the first program stores its inverse, by which the matrix
    product multiplies."""
    largest = tl.max(tl.load(partial_ptr + tl.arange(0, PARTIALS)), axis=0)
    factor, inverse = power_of_2(largest, TARGET)
    if tl.program_id(0) == 0:
        tl.store(descale_ptr, inverse)
    return factor


@triton.jit
def largest_of(x, xt, TAIL: tl.constexpr):
    """The largest absolute value of a row that is held as main and tail block."""
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    if TAIL > 0:
        largest = tl.maximum(largest, tl.max(tl.max(tl.abs(xt), axis=1), axis=0))
    return largest


@triton.jit
def modulated_factor(shift, shift_t, scale, scale_t, D: tl.constexpr, TAIL: tl.constexpr, TARGET: tl.constexpr):
    """(factor, its inverse) of all rows LN(x) * (1 + scale) + shift of a sample, by |LN(x)| <= sqrt(D)."""
    root = tl.sqrt(D * 1.0)
    bound, bound_t = root * tl.abs(1.0 + scale) + tl.abs(shift), root * tl.abs(1.0 + scale_t) + tl.abs(shift_t)
    return power_of_2(largest_of(bound, bound_t, TAIL), TARGET)


@triton.jit
def float8_range(value, factor, LIMIT: tl.constexpr):
    """value * factor, cut to the format's range; what is not finite becomes NaN, so that no cast hides it."""
    value = value * factor
    return tl.where(tl.abs(value) < float("inf"), tl.clamp(value, -LIMIT, LIMIT), float("nan"))
