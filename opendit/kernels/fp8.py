"""Tensors in float8 for ``torch._scaled_mm``: scales, casts, weights, transposed copies, and products.

Formats are from Micikevicius et al. 2022, "FP8 formats for deep learning": e4m3 for activations and weights, e5m2 for
gradients. In training, a tensor has one scale; in sampling, each row of an activation has one. Scales are powers of
two, computed from current values:

- A weight's scale follows from its largest absolute value (amax).
- The scale after LayerNorm + modulate follows from a bound: |xhat| <= sqrt(D), so |y| <= sqrt(D) (1 + max|scale|) +
  max|shift|. A bound above the amax costs no precision, only range at the lower end.
- Every other scale follows from the amax of some 4 million sampled values, times a margin: 2^3 in e4m3, 2^6 in e5m2.
  Larger values are clamped to the format's largest number.

Kernels need the scale before they write a tensor, so an exact amax would cost a pass over memory. Delayed scaling (the
amax of earlier steps) would add state to checkpoints.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _disabled_torch_function_impl

from opendit.kernels.common import block_width, next_power_of_2, or_unused, split_width
from opendit.kernels.language import tl, triton
from opendit.kernels.linear import tiles_of, transpose
from opendit.kernels.tiles import (
    column_block,
    float8_factor,
    float8_range,
    gelu_coarse,
    largest_of,
    load_tiles,
    load_vectors,
    power_of_2,
    store_tiles,
)
from opendit.models.layers import Projection, StoredWeight, dense

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
# Values of ``target``. Scaling brings the largest known absolute value to [2^target, 2^(target + 1)). EXACT: for an
# exact amax or a bound. SAMPLED, SAMPLED_GRADIENT: for an amax of sampled values in e4m3 and in e5m2.
EXACT, SAMPLED, SAMPLED_GRADIENT = 7, 5, 9
SAMPLE = 1 << 22  # minimum number of sampled values
# programs of the amax kernel; each writes one number, and every program of a cast reads all of them
PARTIALS = 256
LINES = 16  # runs of consecutive values per tile of the amax kernel


@dataclass(frozen=True)
class Float8:
    """A tensor in float8, ``data * descale``."""

    data: Tensor  # (..., D), contiguous
    descale: Tensor  # fp32: (1,), or (rows, 1) with one scale per row

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, by_row: bool = False) -> "Float8":
        """Allocate data and descale for a kernel to fill. by_row: one scale per row."""
        scales = (math.prod(shape[:-1]), 1) if by_row else (1,)
        return cls(
            torch.empty(shape, dtype=dtype, device=device), torch.empty(scales, dtype=torch.float32, device=device)
        )

    @functools.cached_property
    def descale_of_columns(self) -> Tensor:
        """The descale of a weight (N, K) as (1, N) fp32, for products with rows that have one scale each."""
        return self.descale.expand(1, len(self.data)).contiguous()


def kernel_arguments(
    y: Tensor | Float8, partial: Tensor | None = None, target: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the pointers (y, partial, descale) and options for a kernel that writes a tensor or a Float8.

    partial: result of :func:`amax`; None if the kernel computes one scale per row. target: see EXACT.
    """
    if isinstance(y, Tensor):
        return (y, y, y), {"FLOAT8": False, "PARTIALS": 1, "TARGET": 0, "LIMIT": 0.0}
    partials = 0 if partial is None else partial.numel()
    options = {"FLOAT8": True, "PARTIALS": partials, "TARGET": target, "LIMIT": LIMIT[y.data.dtype]}
    return (y.data, y.descale if partial is None else partial, y.descale), options


# ------------------------------------------------------------------------------------------------------------ reference


def float8_factor_reference(amax: Tensor, target: int) -> Tensor:
    """Return the power of two that brings amax to [2^target, 2^(target + 1))."""
    return torch.exp2(target - torch.floor(torch.log2(amax.double()))).float()


def float8_reference(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * factor in float8, clamped to the format's range; infinity becomes NaN."""
    scaled = x.float() * factor
    return torch.where(scaled.isfinite(), scaled.clamp(-LIMIT[dtype], LIMIT[dtype]), torch.nan).to(dtype)


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=("lines", "step"))
def _amax_kernel(
    x0_ptr, x1_ptr, x2_ptr, bias_ptr, partial_ptr, lines, step,
    D: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LINES: tl.constexpr,
    PARTIALS: tl.constexpr, TENSORS: tl.constexpr, GELU: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Compute partial maxima of up to three matrices from every ``step``-th run of BLOCK columns, in row order."""
    largest = tl.zeros((LINES, BLOCK), dtype=tl.float32)
    for line in range(tl.program_id(0) * LINES, lines, PARTIALS * LINES):
        run = (line + tl.arange(0, LINES)) * step
        cols = ((run % BLOCKS) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        mask = (line + tl.arange(0, LINES) < lines)[:, None] & (cols < D)
        offsets = ((run // BLOCKS).to(tl.int64) * STRIDE)[:, None] + cols
        x = tl.load(x0_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if GELU:
            x += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.maximum(x, 0.1702))  # |GELU(x)|: -0.1702 <= GELU(x) <= max(x, 0)
        else:
            largest = tl.maximum(largest, tl.abs(x))
        if TENSORS > 1:
            x = tl.load(x1_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        if TENSORS > 2:
            x = tl.load(x2_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
    value = tl.max(tl.max(largest, axis=1), axis=0)
    if NORMALIZED:  # the matrices are shift and scale, and the result is a bound of the modulated rows
        value = tl.sqrt(D * 1.0) * (1.0 + value) + value
    tl.store(partial_ptr + tl.program_id(0), value)


@triton.jit(do_not_specialize=("rows",))
def _cast_kernel(
    x_ptr, y_ptr, partial_ptr, descale_ptr, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, FLOAT8: tl.constexpr,
    PARTIALS: tl.constexpr, TARGET: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    start = (tl.program_id(0) // BLOCKS) * ROWS
    factor = float8_factor(partial_ptr, descale_ptr, PARTIALS, TARGET)
    offsets, mask = column_block(column, start, rows, D, BLOCK, ROWS)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, float8_range(x, factor, LIMIT).to(y_ptr.dtype.element_ty), mask=mask)


# ----------------------------------------------------------------------------------------------------------- operations

CAST = {"ROWS": 16, "num_warps": 4}


def sample_step(runs: int, blocks: int) -> int:
    """Return the step between sampled runs of :func:`_amax_kernel`, for at least SAMPLE values. The step is coprime to
    ``blocks``, the number of runs per row, so that all columns are sampled."""
    step = max(1, runs * 128 // SAMPLE)
    while math.gcd(step, blocks) > 1:
        step -= 1
    return step


def amax(*tensors: Tensor, bias: Tensor | None = None, exact: bool = False, normalized: bool = False) -> Tensor:
    """Return partial maxima of |x| for one to three tensors x (..., D) of equal shape, as ``float8_factor`` expects.

    The result is fp32, with up to PARTIALS elements. Its maximum is the amax of all values, or of a sample.

    Args:
        bias: (D,), to return upper bounds of |GELU(x + bias)| instead.
        exact: read all values instead of a sample.
        normalized: the tensors are shift and scale (B, D); return a bound of LN(x) * (1 + scale) + shift.
    """
    matrices = [t.flatten(0, -2) for t in tensors]
    if len({m.stride() for m in matrices}) > 1:
        matrices = [m.contiguous() for m in matrices]
    first = matrices[0]
    (rows, width), block = first.shape, block_width(first.shape[-1])
    blocks = -(-width // block)
    step = 1 if exact or normalized else sample_step(rows * blocks, blocks)
    lines = -(-rows * blocks // step)
    partials = min(PARTIALS, next_power_of_2(-(-lines // LINES)))
    partial = torch.empty(partials, dtype=torch.float32, device=first.device)
    _amax_kernel[(partials,)](
        *(matrices + [first, first])[:3], or_unused(bias, first), partial, lines, step,
        D=width, STRIDE=first.stride(0), BLOCK=block, BLOCKS=blocks, LINES=LINES, PARTIALS=partials,
        TENSORS=len(matrices), GELU=bias is not None, NORMALIZED=normalized, num_warps=8,
    )  # fmt: skip
    return partial


def cast(x: Tensor, dtype: torch.dtype, exact: bool = False, scaled_as: Tensor | None = None) -> Float8:
    """Cast x (..., D) bf16, fp16 or fp32 to float8.

    Args:
        exact: True to compute the scale from all values instead of a sample.
        scaled_as: tensor that determines the scale; None for x.
    """
    x, y = x.contiguous(), Float8.empty(x.shape, dtype, x.device)
    target = EXACT if exact else SAMPLED if dtype == E4M3 else SAMPLED_GRADIENT
    pointers, options = kernel_arguments(y, amax(x if scaled_as is None else scaled_as, exact=exact), target)
    grid, rows, shape = tiles_of(x, CAST)
    _cast_kernel[grid](x, *pointers, rows, **shape, **options)
    return y


def transposed(x: Tensor) -> Tensor:
    """Transpose float8 (..., D) with T rows to (D, T rounded up to a multiple of 16), padded with zeros. This separate
    pass is faster than kernels that write a tensor in both orders."""
    return transpose(x.flatten(0, -2).view(torch.uint8)).view(x.dtype)


def product(
    a: Tensor, b: Tensor, descales: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None,
    fast: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return a b^T + bias, (M, N) of ``dtype``, for a (M, K) and b (N, K) in float8; K and N are multiples of 16.

    Args:
        descales: scales of a and b, fp32: both (1,), or (M, 1) and (1, N).
        fast: True to accumulate in the tensor cores, with about 14 bits; False to accumulate partial sums in fp32.
        out: (M, N), contiguous: memory for the result.
    """
    options: dict[str, Any] = dict(zip(("scale_a", "scale_b"), descales, strict=True))
    options |= {"bias": bias, "out_dtype": dtype, "use_fast_accum": fast, **({} if out is None else {"out": out})}
    return torch._scaled_mm(a, b.t(), **options)


# ---------------------------------------------------------------------------------------------------- one scale per row


def rows_in_float8_reference(y: Tensor) -> Float8:
    """Cast y (..., D) to e4m3 with one scale per row, in torch. y must be finite."""
    rows = y.float().flatten(0, -2)
    factor = float8_factor_reference(rows.abs().amax(1, keepdim=True), EXACT)
    return Float8(float8_reference(rows, factor, E4M3).view(y.shape), 1 / factor)


@triton.jit(do_not_specialize=("rows",))
def _rows_kernel(
    x_ptr, scale_ptr, bias_ptr, y_ptr, descale_ptr, rows,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr, GELU: tl.constexpr,
    SCALED: tl.constexpr, TARGET: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, rows)):
        live = start + tl.arange(0, 1) < rows
        row = tl.cast(start, tl.int64)
        y, yt = load_tiles(x_ptr, row, live, D, MAIN, TAIL, 1)
        if SCALED:
            number = tl.load(scale_ptr + row)
            y *= number
            yt *= number
        if GELU:
            bias, bias_t = load_vectors(bias_ptr, D, MAIN, TAIL)
            y = gelu_coarse(y + bias, APPROXIMATE)
            yt = gelu_coarse(yt + bias_t, APPROXIMATE)
        largest = largest_of(y, yt, TAIL)
        factor, descale = power_of_2(largest, TARGET)
        # Finite values need no clamping, because the row's largest value determines the factor. If that value is
        # infinite, the descale is NaN and so is the row. The maximum ignores NaNs, but they stay NaN in the row.
        tl.store(descale_ptr + row, tl.where(largest < float("inf"), descale, float("nan")))
        store_tiles(y_ptr, y * factor, yt * factor, row, live, D, MAIN, TAIL, 1)


def default_warps(width: int, rows: int) -> int:
    """Return the number of warps per program, 1 to 16: one for each 2,048 columns of the main block.

    Up to 1,024 rows get four times as many warps, because they leave the GPU half empty. GELU's 4,608 columns on an
    H200: 512 rows took 4.7 us with 4 warps and 3.9 us with 8. 32,768 rows took 118 us with 4 warps and 112 us with 2.
    """
    return min(16, max(1, split_width(width)[0] // (512 if rows <= 1024 else 2048)))


def rows_in_float8(
    x: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, warps: int | None = None, chunk: int = 1
) -> Float8:
    """Cast x (..., D) bf16, fp16 or fp32 to e4m3 with one scale per row. A program reads a complete row once, for scale
    and codes. A token's result does not depend on other tokens or samples.

    Args:
        bias: (D,); cast GELU(x + bias) instead of x.
        scale: (rows, 1) fp32, factors for the rows of x.
        warps: warps per program.
        chunk: rows per program.
    """
    x, y = x.contiguous(), Float8.empty(x.shape, E4M3, x.device, by_row=True)
    rows, width = y.descale.shape[0], x.shape[-1]
    main, tail = split_width(width)
    approximate = x.is_cuda and torch.version.hip is None  # the inline assembly of tiles.logistic is for NVIDIA GPUs
    _rows_kernel[(-(-rows // chunk),)](
        x, or_unused(scale, x), or_unused(bias, x), y.data, y.descale, rows,
        D=width, MAIN=main, TAIL=tail, CHUNK=chunk, GELU=bias is not None, SCALED=scale is not None, TARGET=EXACT,
        APPROXIMATE=approximate, num_warps=warps or default_warps(width, rows),
    )  # fmt: skip
    return y


# -------------------------------------------------------------------------------------------------------------- weights


class Float8Weight(Tensor):
    """A weight (out, in) that is in memory only as ``float8``.

    For autograd, and for code that reads shape, device or dtype, it is a tensor of ``dtype``. Operations that support
    the class (:func:`weight_in_float8`) read ``float8``; others raise RuntimeError.
    """

    float8: Float8
    # PyTorch's way to disable this hook. Otherwise has_torch_function would be true.
    __torch_function__ = _disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  # as torch documents it

    @staticmethod
    def __new__(cls, float8: Float8, dtype: torch.dtype) -> "Float8Weight":
        data = float8.data
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, float8: Float8, dtype: torch.dtype):
        self.float8 = float8

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight, kwargs = args[0], dict(kwargs or {})
        aten = torch.ops.aten
        if function == aten.detach.default or (
            function == aten.as_strided.default
            and (tuple(args[1]), tuple(args[2])) == (tuple(weight.shape), weight.stride())
        ):  # nn.Parameter calls these two functions
            return cls(weight.float8, weight.dtype)
        if function == aten.zeros_like.default:  # autograd calls this function for a missing gradient
            return torch.zeros(weight.shape, dtype=kwargs.get("dtype") or weight.dtype, device=weight.device)
        raise RuntimeError(f"{function} got a weight of shape {tuple(weight.shape)} that is there in float8 only")

    def __repr__(self, **_: Any) -> str:
        return f"Float8Weight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


@dataclass(frozen=True)
class KeptWeight:
    """A cached cast of a weight to float8. Address and version identify the weight's values at the cast."""

    float8: Float8
    address: int
    version: int


def keep_weights(model: nn.Module) -> int:
    """Cast and cache the weights of all projections that can run in float8. Return the cache's size in bytes.

    Sampling calls a model a hundred times with constant weights. If a weight is changed or moved, its cached cast
    becomes invalid, and every product casts the weight again.
    """
    taken = 0
    for layer in model.modules():
        weight: Any = layer.matrix if isinstance(layer, Projection) else None
        if isinstance(weight, Tensor) and not weight.is_inference() and not any(n % 16 for n in weight.shape):
            stored = cast(weight.detach(), E4M3, exact=True)
            # cache now, because a CUDA graph would compute this value at each replay
            _ = stored.descale_of_columns
            owner: Any = weight
            owner.kept_float8 = KeptWeight(stored, weight.data_ptr(), weight._version)
            taken += stored.data.nbytes
    return taken


def weight_in_float8(weight: Tensor | StoredWeight, take: Callable[[Tensor], Tensor] | None = None) -> Float8:
    """Return a weight (out, in) in e4m3. Stored or cached float8 values are used if present. Otherwise the weight is
    cast with the scale of its amax.

    take: function that selects rows of a tensor and returns a contiguous tensor. The scale is computed from all rows.
    """
    whole = _there(weight)
    if whole is None:
        weight = dense(weight)
        return cast(weight if take is None else take(weight), E4M3, exact=True, scaled_as=weight)
    # View the rows as bytes, because not every ``take`` supports float8.
    return whole if take is None else Float8(take(whole.data.view(torch.uint8)).view(E4M3), whole.descale)


def _there(weight: Tensor | StoredWeight) -> Float8 | None:
    """Return the stored or cached float8 values of a weight; None if the weight must be cast."""
    if isinstance(weight, Float8Weight | StoredWeight):
        return getattr(weight, "float8", None)
    kept = getattr(weight, "kept_float8", None)
    if kept is not None and (kept.address, kept.version) == (weight.data_ptr(), weight._version):
        return kept.float8
    return None
