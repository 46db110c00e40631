"""Device functions for kernels that write float8: the factor of a tensor and the range of a format."""

from opendit.kernels.common import tl, triton


@triton.jit
def float8_factor(partial_ptr, descale_ptr, PARTIALS: tl.constexpr, TARGET: tl.constexpr):
    """The power of two that brings the largest of the partial maxima to [2^TARGET, 2^(TARGET + 1)).

    A power of two rounds nothing away. It is made from the exponent's bits, so it is the same everywhere. The first
    program stores its inverse, by which the matrix product multiplies.
    """
    largest = tl.max(tl.load(partial_ptr + tl.arange(0, PARTIALS)), axis=0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.maximum(exponent, TARGET + 1)  # zero and what is next to it; both powers stay normal numbers
    if tl.program_id(0) == 0:
        tl.store(descale_ptr, ((exponent - TARGET) << 23).to(tl.float32, bitcast=True))
    return ((254 + TARGET - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def float8_range(value, factor, LIMIT: tl.constexpr):
    """value * factor, cut to the format's range; what is not finite becomes NaN, so that no cast hides it."""
    value = value * factor
    return tl.where(tl.abs(value) < float("inf"), tl.clamp(value, -LIMIT, LIMIT), float("nan"))
