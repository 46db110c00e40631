"""Frozen weights in fewer bits (--base_precision, --text_precision), stored by row and dequantised for each product.

    fp8    e4m3 with one scale per weight, a power of two; the values equal --fp8's
    int8   integers from -127 to 127, scaled by the row's largest absolute value
    nf4    16 levels, scaled by the largest absolute value of 64 neighbours in a row (Dettmers et al., "QLoRA", 2023,
           app. E)

A row of a weight (out, in) is stored as bytes: codes, then fp32 scales (none in fp8), each padded to a multiple of ROW.
FSDP2 shards by rows, so it never splits a row. Other code sees a tensor (out, bytes / itemsize) of the run's precision.
Copies, gathers and casts to this precision preserve the bytes.

Values don't depend on the sharding, because fp8's scale follows from the maximum over all ranks.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from opendit.kernels.common import interpreting, kernels_available, missing, next_power_of_2
from opendit.kernels.fp8 import E4M3, EXACT, Float8, float8_factor_reference, float8_reference
from opendit.kernels.language import tl, triton
from opendit.kernels.lora import LARGEST_RANK, thin_product
from opendit.models.layers import Projection, StoredWeight, multiply

ROW = 16  # alignment of every row, in bytes
NEIGHBOURS = 64  # weights that share a scale in nf4
STACKS = ("blocks.", "media_refiner.", "text_refiner.")  # modules with linear layers to store in fewer bits
# Levels of NF4, as in bitsandbytes: quantiles of the normal distribution, with -1, 0 and 1.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _padded(size: int) -> int:
    return -(-size // ROW) * ROW


def code_bytes(kind: str, inputs: int) -> int:
    """Return the bytes of the quantised values (codes) in a row of ``inputs`` weights, with padding."""
    return _padded(-(-inputs // 2) if kind == "nf4" else inputs)


def row_bytes(kind: str, inputs: int) -> int:
    """Return the bytes of codes and scales in a row of ``inputs`` weights, with padding."""
    scales = {"fp8": 0, "int8": 1, "nf4": -(-inputs // NEIGHBOURS)}[kind]
    return code_bytes(kind, inputs) + _padded(4 * scales)


def is_stored(name: str, shape: tuple[int, ...]) -> bool:
    """Return True if --base_precision stores this parameter in fewer bits: a matrix of a block or of a refiner."""
    return name.startswith(STACKS) and name.endswith(".weight") and len(shape) == 2


# ---------------------------------------------------------------------------------------------------------- reference


@functools.cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


def _joined(codes: Tensor, scales: Tensor) -> Tensor:
    parts = codes.view(torch.uint8), scales.float().contiguous().view(torch.uint8)
    return torch.cat([nn.functional.pad(part, (0, -part.shape[1] % ROW)) for part in parts], dim=1)


def quantise(weight: Tensor, kind: str) -> Tensor:
    """Quantise a weight (out, in) to rows of bytes (out, row_bytes), in int8 or nf4."""
    weight, inputs = weight.float(), weight.shape[1]
    if kind == "int8":
        largest = weight.abs().amax(1, keepdim=True)
        # Divide by a tensor. For a plain number, a GPU would multiply by the reciprocal, and round differently.
        scales = largest / torch.full_like(largest, 127)
        return _joined((weight / _not_zero(scales)).round().to(torch.int8), scales)
    rows = nn.functional.pad(weight, (0, -inputs % NEIGHBOURS)).unflatten(1, (-1, NEIGHBOURS))
    scales, levels = rows.abs().amax(2), _levels(weight.device)
    relative = (rows / _not_zero(scales).unsqueeze(2)).flatten(1)[:, :inputs].contiguous()
    codes = torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    left, right = nn.functional.pad(codes, (0, inputs % 2)).chunk(2, dim=1)
    return _joined(left | right << 4, scales)


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)


def dense_reference(rows: Tensor, kind: str, inputs: int, dtype: torch.dtype, descale: Tensor) -> Tensor:
    codes = rows[:, : code_bytes(kind, inputs)]
    if kind == "fp8":
        return codes[:, :inputs].contiguous().view(E4M3).to(dtype).mul_(descale)
    scales = rows[:, code_bytes(kind, inputs) :].view(torch.float32)
    if kind == "int8":
        return (codes[:, :inputs].view(torch.int8).float() * scales[:, :1]).to(dtype)
    half = -(-inputs // 2)
    codes = torch.cat([codes[:, :half] & 15, codes[:, :half] >> 4], dim=1)[:, :inputs].int()
    return (_levels(rows.device)[codes] * scales.repeat_interleave(NEIGHBOURS, dim=1)[:, :inputs]).to(dtype)


# ------------------------------------------------------------------------------------------------------------- kernel


@triton.jit
def _dense_kernel(
    rows_ptr, scales_ptr, levels_ptr, y_ptr,
    BYTES: tl.constexpr, CODES: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr, NEIGHBOURS: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """scales_ptr: the rows as fp32 numbers, or fp8's scale."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    codes = tl.load(rows_ptr + row * BYTES + cols, mask=mask, other=0)
    y_ptr += row * INPUTS
    if KIND == "fp8":
        # As bits of an fp32 number, exponent and mantissa of e4m3 are those of the value times 2^-120. GPUs before Ada
        # can't convert e4m3.
        bits = ((codes & 128).to(tl.int32) << 24) | ((codes & 127).to(tl.int32) << 20)
        y = bits.to(tl.float32, bitcast=True) * 2.0**120 * tl.load(scales_ptr)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
        return
    scales_ptr += row * (BYTES // 4) + CODES // 4
    if KIND == "nf4":  # byte i of a row holds the codes of columns i and i + WIDTH
        right = cols + WIDTH
        inside = mask & (right < INPUTS)
        first = tl.load(levels_ptr + (codes & 15).to(tl.int32))
        second = tl.load(levels_ptr + (codes >> 4).to(tl.int32))
        first *= tl.load(scales_ptr + cols // NEIGHBOURS, mask=mask, other=0.0)
        second *= tl.load(scales_ptr + right // NEIGHBOURS, mask=inside, other=0.0)
        tl.store(y_ptr + cols, first.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + right, second.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        y = codes.to(tl.int8, bitcast=True).to(tl.float32) * tl.load(scales_ptr)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------------------------------------- operation


def dense(rows: Tensor, kind: str, inputs: int, dtype: torch.dtype, descale: Tensor) -> Tensor:
    """Dequantise rows of bytes (out, row_bytes) to weights (out, in) of ``dtype``. descale: (1,) fp32, fp8's scale."""
    available, _ = kernels_available(rows.device, dtype)
    if not available:
        return dense_reference(rows, kind, inputs, dtype, descale)
    y = torch.empty(len(rows), inputs, dtype=dtype, device=rows.device)
    width = -(-inputs // 2) if kind == "nf4" else inputs
    block = min(1024, next_power_of_2(width))
    _dense_kernel[(len(rows), -(-width // block))](
        rows, descale if kind == "fp8" else rows.view(torch.float32), _levels(rows.device), y,
        BYTES=rows.shape[1], CODES=code_bytes(kind, inputs), INPUTS=inputs, WIDTH=width, NEIGHBOURS=NEIGHBOURS,
        KIND=kind, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y


class BaseWeight(StoredWeight):
    """A weight (out, in) in one of the formats of --base_precision: fp8, int8 or nf4.

    Args:
        packed: (out, row_bytes / itemsize), the bytes viewed as numbers of the run's precision.
        inputs: number of columns, in.
        descale: (1,) fp32, fp8's scale.
        dtype: dtype of dequantised weights; by default ``packed.dtype``.
    """

    def __init__(self, packed: Tensor, kind: str, inputs: int, descale: Tensor, dtype: torch.dtype | None = None):
        super().__init__(torch.Size((len(packed), inputs)), dtype or packed.dtype)
        self._packed, self._kind, self._descale = packed, kind, descale

    @property
    def device(self) -> torch.device:
        return self._packed.device

    @property
    def float8(self) -> Float8 | None:
        """The weight in float8, without a copy if its rows have no padding; None in other formats."""
        if self._kind != "fp8":
            return None
        data = self._packed.detach().view(E4M3)
        return Float8(data if data.shape[1] == self.shape[1] else data[:, : self.shape[1]].contiguous(), self._descale)

    def to(self, dtype: torch.dtype) -> "BaseWeight":
        return BaseWeight(self._packed, self._kind, self.shape[1], self._descale, dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the product for few rows, such as a modulation's, from the weight in float8. A weight that is
        dequantised first is written and read again in the run's precision."""
        rows, stored = x.flatten(0, -2), self.float8
        readable = interpreting() or (x.is_cuda and missing("float8", x.device) is None)
        if stored is None or len(rows) > LARGEST_RANK or not readable:
            return super().product(x, bias)
        y = thin_product(stored.data, stored.descale, rows).t()
        y = y if bias is None else y + bias
        return y.reshape(*x.shape[:-1], -1)

    def dense(self) -> Tensor:
        return dense(self._packed.detach().view(torch.uint8), self._kind, self.shape[1], self.dtype, self._descale)


# ------------------------------------------------------------------------------------------------------------- layers


class BaseLayer(nn.Linear):
    """A linear layer with a :class:`BaseWeight`. The parameter ``weight`` holds the stored bytes."""

    kind: str
    descale: Tensor

    @property
    def matrix(self) -> BaseWeight:
        """The weight (out, in) as a :class:`BaseWeight`, for products."""
        return BaseWeight(self.weight, self.kind, self.in_features, self.descale)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @torch.no_grad()
    def store(self, part: Tensor, values: Tensor, maximum: Callable[[Tensor], Tensor]) -> None:
        """Quantise ``values`` (n, in), this rank's rows of the weight, into ``part`` (n, row_bytes / itemsize).

        maximum: function that returns a number's maximum over all ranks with rows of the weight (for fp8).
        """
        values = values.to(part.dtype)
        if self.kind == "fp8":
            amax = values.abs().amax().float() if values.numel() else torch.zeros((), device=values.device)
            amax = maximum(amax.to(self.descale.device))
            factor = float8_factor_reference(torch.where(amax > 0, amax, 1.0), EXACT)
            self.descale.copy_(1 / factor)
            codes = float8_reference(values, factor.to(values.device), E4M3).view(torch.uint8)
            rows = nn.functional.pad(codes, (0, -codes.shape[1] % ROW))
        else:
            rows = quantise(values, self.kind)
        part.view(torch.uint8).copy_(rows)


class BaseLinear(BaseLayer):
    """A frozen linear layer with its weight in fewer bits."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.matrix, self.bias)


class BaseProjection(BaseLayer, Projection):
    """A frozen projection with its weight in fewer bits. LoRA's matrices are not quantised."""


def store_base(
    model: nn.Module,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    chosen: Callable[[str, tuple[int, ...]], bool] = is_stored,
) -> None:
    """Turn frozen linear layers of ``model`` into :class:`BaseLayer`. Their weights are on the meta device at first.

    Args:
        kind: fp8, int8 or nf4.
        dtype: dtype in which the model computes.
        device: device on which the model will run.
        chosen: function of a weight's name and shape; True if the weight is replaced.
    """
    kinds: dict[type, type[BaseLayer]] = {nn.Linear: BaseLinear, Projection: BaseProjection}
    for name, module in model.named_modules():
        made, layer = kinds.get(type(module)), cast(Any, module)
        kept = getattr(layer, "weight", None)
        if made is None or kept is None or kept.requires_grad:
            continue
        if not chosen(f"{name}.weight", tuple(kept.shape)):
            continue
        layer.__class__ = made
        layer.kind, layer.descale = kind, torch.ones(1, device=device)
        width = row_bytes(kind, layer.in_features) // dtype.itemsize
        empty = torch.empty(layer.out_features, width, dtype=dtype, device="meta")
        layer.weight = nn.Parameter(empty, requires_grad=False)


def base_layers(model: nn.Module) -> Iterator[tuple[str, BaseLayer]]:
    """Yield (name of the weight parameter, layer) for each layer with a stored weight."""
    for name, layer in model.named_modules():
        if isinstance(layer, BaseLayer):
            yield f"{name}.weight", layer
