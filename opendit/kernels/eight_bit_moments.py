"""AdamW's moments in 8 bits: a code per number and a scale per unit of 256 numbers, as in torchao's AdamW8bit.

The format is from T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022. A step decodes one
group of tensors at a time into fp32 memory, updates the group, and encodes it again. Between steps, a moment takes 1 +
4 / 256 bytes per number. Levels, scales and codes equal torchao 0.18's bit for bit, on CPUs and GPUs.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from opendit.kernels.common import kernels_available
from opendit.kernels.language import TRITON, tl, triton
from opendit.kernels.tensor_table import AddressTable, BlockTable

UNIT = 256  # numbers that share a scale
LEAST = 4096  # smaller tensors have moments in fp32, as in torchao
LEAST_SCALE = 1e-12
ELEMENTS = 2**24  # minimum number of elements in a group of tensors


@functools.cache
def levels(signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """Return the levels of the codes, (256,) fp32 in ascending order. Without ``signed``, no level is negative.

    The levels are 0, 1, and the midpoints of equal intervals in seven decades. With ``signed``, the negative midpoints
    are included. Each decade has twice as many levels as the decade below.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1 if signed else 2 ** (decade + 1) + 1)
        middles = (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        found += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(found)).to(device)


@dataclass(frozen=True)
class EightBits:
    """A moment of a tensor, stored in 8 bits."""

    codes: Tensor  # (numel,) uint8
    scales: Tensor  # (units,) fp32, the largest magnitude in each unit of 256 numbers
    signed: bool  # True for the first moment; the second moment has no negative numbers

    @classmethod
    def zeros(cls, numel: int, signed: bool, device: torch.device) -> "EightBits":
        codes = torch.full((numel,), int(torch.searchsorted(levels(signed), 0.0)), dtype=torch.uint8, device=device)
        return cls(codes, torch.full((-(-numel // UNIT),), LEAST_SCALE, device=device), signed)

    def decode(self, numbers: Tensor | None = None) -> Tensor:
        """Return the moment, (numel,) fp32. ``numbers``: (256,) values of the codes; by default the levels."""
        numbers = levels(self.signed, self.codes.device) if numbers is None else numbers
        found = _units(numbers[self.codes.int()])
        return (found * self.scales[:, None]).view(-1)[: self.codes.numel()]

    def encode(self, values: Tensor) -> None:
        values = values.to(self.codes.device)  # values from a checkpoint are on the host
        numbers, units = levels(self.signed, values.device), _units(values.reshape(-1))
        self.scales.copy_(units.abs().amax(1).clip(LEAST_SCALE))
        shares = (units / self.scales[:, None]).view(-1)[: self.codes.numel()]
        below = (torch.searchsorted(numbers, shares, right=True, out_int32=True) - 1).clamp(min=0)
        above = (below + 1).clamp(max=255)
        rises = shares - numbers[below] >= (numbers[above] - numbers[below]) * 0.5
        self.codes.copy_(torch.where(rises, above, below))

    def saved(self) -> Tensor:
        """Return fp32 values (numel,) for a checkpoint. :meth:`encode` restores codes and scales from these values.

        The values equal :meth:`decode`, except that a signed moment's lowest code gives -scale instead of -0.993 *
        scale. Otherwise the scale would be lost.
        """
        numbers = levels(self.signed, self.codes.device)
        return self.decode(torch.cat([-numbers[-1:], numbers[1:]])) if self.signed else self.decode()


def _units(values: Tensor) -> Tensor:
    return functional.pad(values, (0, -values.numel() % UNIT)).view(-1, UNIT)


def new_moment(like: Tensor, signed: bool) -> Tensor | EightBits:
    """Return a moment of zeros for a tensor: in 8 bits, or in fp32 if the tensor is small."""
    return EightBits.zeros(like.numel(), signed, like.device) if like.numel() >= LEAST else torch.zeros_like(like)


def first_of(moment: Tensor | EightBits, numel: int) -> Tensor | EightBits:
    """Return a view of the first ``numel`` numbers of a moment."""
    if isinstance(moment, EightBits):
        return EightBits(moment.codes[:numel], moment.scales[: -(-numel // UNIT)], moment.signed)
    return moment.view(-1)[:numel]


def to_values(moment: Tensor | EightBits) -> Tensor:
    """Return a moment's values for a checkpoint, (numel,) fp32; a view if the moment is in fp32."""
    return moment.saved() if isinstance(moment, EightBits) else moment.view(-1)


def set_values(moment: Tensor | EightBits, values: Tensor) -> None:
    """Set a moment to fp32 values, of any shape."""
    if isinstance(moment, EightBits):
        moment.encode(values)
    else:
        # values from a checkpoint of other ranks may be a non-contiguous view
        moment.copy_(values.reshape(moment.shape))


def by_size(sizes: Sequence[int], elements: int) -> list[tuple[int, int]]:
    """Divide tensors of these sizes into ranges [start, stop). All but the last have at least ``elements`` elements."""
    edges, size = [0], 0
    for i, numel in enumerate(sizes, start=1):
        size += numel
        if size >= elements or i == len(sizes):
            edges.append(i)
            size = 0
    return list(pairwise(edges))


# ------------------------------------------------------------------------------------------ kernels

_constant = tl.constexpr if TRITON else int
# Rows of the address table. Codes, scales and values have two rows each, one for each moment.
SIZE, CODES, SCALES, VALUES = map(_constant, (0, 1, 3, 5))


@triton.jit
def _moments_kernel(
    table, blocks, numbers, scalars, tensors, first, ENCODE: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """Decode or encode one block of a tensor's two moments. Do nothing if the step is skipped (scalars[0] is 0),
    because encoding decoded values could change the codes."""
    block = tl.program_id(0) + first
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
    table += tl.load(blocks + 2 * block)
    size = tl.load(table + SIZE * tensors)
    units = start // UNIT + tl.arange(0, BLOCK // UNIT)
    offsets = units[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    for moment in tl.static_range(2):
        address = tl.load(table + (CODES + moment) * tensors)
        if (address != 0) & (tl.load(scalars) != 0.0):
            codes = address.to(tl.pointer_type(tl.uint8)) + offsets
            scales = tl.load(table + (SCALES + moment) * tensors).to(tl.pointer_type(tl.float32)) + units
            values = tl.load(table + (VALUES + moment) * tensors).to(tl.pointer_type(tl.float32)) + offsets
            levels = numbers + 256 * moment
            if ENCODE:
                value = tl.load(values, mask=offsets < size, other=0.0)
                scale = tl.maximum(tl.max(tl.abs(value), axis=1), LEAST_SCALE)
                share = tl.div_rn(value, tl.broadcast_to(scale[:, None], (BLOCK // UNIT, UNIT)))
                below = tl.zeros((BLOCK // UNIT, UNIT), tl.int32)
                for power in tl.static_range(8):
                    half = 128 >> power
                    below += tl.where(share >= tl.load(levels + below + half), half, 0)
                above = tl.minimum(below + 1, 255)
                low = tl.load(levels + below)
                rises = share - low >= (tl.load(levels + above) - low) * 0.5
                tl.store(scales, scale, mask=units * UNIT < size)
                tl.store(codes, tl.where(rises, above, below).to(tl.uint8), mask=offsets < size)
            else:
                code = tl.load(codes, mask=offsets < size, other=0).to(tl.int32)
                scale = tl.load(scales, mask=units * UNIT < size, other=0.0)
                tl.store(values, tl.load(levels + code) * scale[:, None], mask=offsets < size)


class DecodedMoments:
    """fp32 memory for the decoded moments of one group at a time. A group is a range of tensors.

    Triton kernels decode and encode if they are available. Elsewhere torch computes the same bits.

    Args:
        moments: first and second moment of each tensor. Moments in fp32 are not copied.
        block: elements per program.
        kernels: True to use kernels; None: where available.

    Attributes:
        views: both moments of each tensor in fp32. Groups share memory, so only the last decoded group is valid.
    """

    def __init__(self, moments: Sequence[Sequence[Tensor | EightBits]], block: int, kernels: bool | None = None):
        self._moments = moments
        stored = [first.codes.numel() if isinstance(first, EightBits) else 0 for first, _ in moments]
        self._groups = by_size(stored, ELEMENTS)
        device = next((m.codes.device for pair in moments for m in pair if isinstance(m, EightBits)), None)
        largest = max((sum(_whole(stored[start:stop])) for start, stop in self._groups), default=0)
        memory = torch.empty(2, largest, device=device)
        self.views: list[tuple[Tensor, ...]] = []
        for start, stop in self._groups:
            place = 0
            for pair, numel, room in zip(
                moments[start:stop], stored[start:stop], _whole(stored[start:stop]), strict=True
            ):
                own = [row[place : place + numel] for row in memory]
                self.views.append(tuple(v if isinstance(m, EightBits) else m for m, v in zip(pair, own, strict=True)))
                place += room
        if kernels is None:
            kernels = device is not None and kernels_available(device, torch.float32)[0]
        self.kernels = kernels
        if device is None or not kernels:
            return
        self._blocks, self._addresses = BlockTable(stored, block, device), AddressTable(stored, device)
        self._numbers = torch.cat([levels(signed, device) for signed in (True, False)])
        both: list[list[EightBits | None]] = [
            [moment if isinstance(moment, EightBits) else None for moment in each]
            for each in zip(*moments, strict=True)
        ]
        codes = [[None if moment is None else moment.codes for moment in each] for each in both]
        scales = [[None if moment is None else moment.scales for moment in each] for each in both]
        self._addresses.refresh([*codes, *scales, *([pair[i] for pair in self.views] for i in range(2))])

    def groups(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Divide tensors ``start`` to ``stop`` at the groups' borders, and yield (start, stop) of each range."""
        for first, last in self._groups:
            if max(first, start) < min(last, stop):
                yield max(first, start), min(last, stop)

    def decode(self, start: int, stop: int, scalars: Tensor) -> None:
        """Decode the moments of tensors ``start`` to ``stop``, all of one group, unless scalars[0] is 0."""
        self._run(start, stop, scalars, False)

    def encode(self, start: int, stop: int, scalars: Tensor) -> None:
        self._run(start, stop, scalars, True)

    def _run(self, start: int, stop: int, scalars: Tensor, encode: bool) -> None:
        if self.kernels:
            first, last = self._blocks.first[start], self._blocks.first[stop]
            if last > first:
                _moments_kernel[(last - first,)](
                    self._addresses.table, self._blocks.blocks, self._numbers, scalars, len(self._moments), first,
                    ENCODE=encode, BLOCK=self._blocks.block, UNIT=UNIT, LEAST_SCALE=LEAST_SCALE,
                )  # fmt: skip
        elif scalars[0]:
            pairs = zip(self._moments[start:stop], self.views[start:stop], strict=True)
            for moment, view in ((m, v) for ms, vs in pairs for m, v in zip(ms, vs, strict=True)):
                if isinstance(moment, EightBits):
                    moment.encode(view) if encode else view.copy_(moment.decode())


def _whole(sizes: Sequence[int]) -> list[int]:
    """Return the sizes rounded up to multiples of UNIT, so that every tensor is aligned."""
    return [UNIT * math.ceil(size / UNIT) for size in sizes]
