"""Cast the shards of many weights to float8, with one scale for each complete weight, in two passes.

    quantizer = ShardQuantizer(shards, bytes_, torch.bfloat16)
    amax = quantizer.amax()          # with several ranks, take the maximum over the ranks
    quantizer.quantize(amax)

Weights are first rounded to the forward pass's precision. The result has the same bits as
:func:`opendit.kernels.fp8.cast` of the complete, rounded weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from opendit.kernels.fp8 import E4M3, EXACT, LIMIT, float8_factor_reference, float8_reference
from opendit.kernels.language import TRITON, tl, triton
from opendit.kernels.tensor_table import addresses_of, at, block_table, send, triton_dtype
from opendit.kernels.tiles import float8_range

BLOCK, WARPS = 4096, 4  # elements and warps per program; not tuned, because the kernels run only once per step

# ---------------------------------------------------------------------------------------------------------- reference


def amax_reference(shards: Sequence[Tensor], rounded: torch.dtype) -> Tensor:
    """Return each shard's amax after rounding to ``rounded``, (shards,) fp32, ignoring NaNs; 0 for an empty shard."""
    numbers = (shard.to(rounded).float().abs().flatten() for shard in shards)
    return torch.stack([torch.cat([n.new_zeros(1), n[~n.isnan()]]).amax() for n in numbers])


def quantize_reference(shards: Sequence[Tensor], amax: Tensor, rounded: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return each shard in e4m3, and the descales (shards,). ``amax`` (shards,) must be above 0."""
    factors = float8_factor_reference(amax, EXACT)
    return [float8_reference(s.to(rounded), f, E4M3) for s, f in zip(shards, factors, strict=True)], 1 / factors


# ------------------------------------------------------------------------------------------------------------ kernels

_constant = tl.constexpr if TRITON else int
SIZE, SHARD, BYTES = map(_constant, range(3))  # rows of the address table


@triton.jit
def _rounded(address, offsets, mask, ROUNDED: tl.constexpr, ALIGNED: tl.constexpr):
    return tl.load(at(address, offsets, tl.float32, ALIGNED), mask=mask, other=0.0).to(ROUNDED).to(tl.float32)


@triton.jit
def _amax_block(address, offsets, mask, largest, ROUNDED: tl.constexpr, ALIGNED: tl.constexpr):
    value = tl.max(tl.abs(_rounded(address, offsets, mask, ROUNDED, ALIGNED)), axis=0)
    # Read as integers, the bits of non-negative floats have the floats' order.
    tl.atomic_max(largest, value.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=("tensors",))
def _shard_amax_kernel(table, blocks, amax, tensors, BLOCK: tl.constexpr, ROUNDED: tl.constexpr):
    """Update amax[tensor], the bits of an fp32 number, to at least the block's amax."""
    block = tl.program_id(0)
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    size = tl.load(table + SIZE * tensors + tensor)
    address = tl.load(table + SHARD * tensors + tensor)
    if (start + BLOCK <= size) & (address % 16 == 0):
        everything = tl.full((BLOCK,), 1, tl.int1)
        _amax_block(address, offsets, everything, amax + tensor, ROUNDED, True)
    else:
        _amax_block(address, offsets, offsets < size, amax + tensor, ROUNDED, False)


@triton.jit
def _quantize_block(
    address, target, offsets, mask, factor, ROUNDED: tl.constexpr, LIMIT: tl.constexpr, ALIGNED: tl.constexpr
):
    value = float8_range(_rounded(address, offsets, mask, ROUNDED, ALIGNED), factor, LIMIT)
    tl.store(at(target, offsets, tl.float8e4nv, ALIGNED), value.to(tl.float8e4nv), mask=mask)


@triton.jit(do_not_specialize=("tensors",))
def _shard_quantize_kernel(
    table, blocks, factors, tensors, BLOCK: tl.constexpr, ROUNDED: tl.constexpr, LIMIT: tl.constexpr
):
    block = tl.program_id(0)
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    size = tl.load(table + SIZE * tensors + tensor)
    address = tl.load(table + SHARD * tensors + tensor)
    target = tl.load(table + BYTES * tensors + tensor)
    factor = tl.load(factors + tensor)
    if (start + BLOCK <= size) & ((address | target) % 16 == 0):
        everything = tl.full((BLOCK,), 1, tl.int1)
        _quantize_block(address, target, offsets, everything, factor, ROUNDED, LIMIT, True)
    else:
        _quantize_block(address, target, offsets, offsets < size, factor, ROUNDED, LIMIT, False)


# ---------------------------------------------------------------------------------------------------------- operation


class ShardQuantizer:
    """Casts a rank's shards to float8.

    Args:
        shards: this rank's shards, including empty ones; fp32, contiguous. All ranks pass the weights in one order.
        targets: memory for each shard's result, uint8, contiguous, at least as large as the shard.
        rounded: precision of the forward pass. Values are first rounded to this precision.

    Attributes:
        descales: (shards,) fp32, the descale of each weight, written by :meth:`quantize`. The stride is 16 bytes,
            because cuBLAS requires aligned addresses.
    """

    def __init__(self, shards: Sequence[Tensor], targets: Sequence[Tensor], rounded: torch.dtype):
        # The kernels read the tensors by address, so keep them alive.
        self._tensors, self._rounded, device = (list(shards), list(targets)), rounded, shards[0].device
        sizes = torch.tensor([shard.numel() for shard in shards])
        table = [*sizes.tolist(), *addresses_of(shards), *addresses_of(targets)]
        self._table = send(torch.tensor(table), device)
        self._blocks = send(block_table(-(-sizes // BLOCK)), device)
        self.descales = torch.ones(len(shards), 4, dtype=torch.float32, device=device)[:, 0]

    @torch.no_grad()
    def amax(self) -> Tensor:
        """Return the largest absolute value of each shard, (shards,) fp32; 0 for an empty shard."""
        amax = torch.zeros(len(self.descales), dtype=torch.float32, device=self.descales.device)
        self._launch(_shard_amax_kernel, amax.view(torch.int32))
        return amax

    @torch.no_grad()
    def quantize(self, amax: Tensor) -> None:
        """Write the shards in e4m3 to ``targets``. amax: amax of each complete weight, (shards,) fp32."""
        exponent = (amax.view(torch.int32) >> 23).bitwise_and_(0xFF).clamp_(min=EXACT + 1)
        self.descales.view(torch.int32).copy_((exponent - EXACT) << 23)
        self._launch(_shard_quantize_kernel, ((254 + EXACT - exponent) << 23).view(torch.float32), LIMIT=LIMIT[E4M3])

    def _launch(self, kernel, values: Tensor, **options) -> None:
        if len(self._blocks):
            options |= {"BLOCK": BLOCK, "ROUNDED": triton_dtype(self._rounded), "num_warps": WARPS}
            kernel[(len(self._blocks),)](self._table, self._blocks, values, len(self.descales), **options)
