"""Concatenate or split a set's tensors to get another set's tensors (opendit.models.families.base.Match).

One class serves both directions: public weights under OpenDiT's names, and OpenDiT's weights under published names. A
rank reads only the ranges of stored tensors that its shards need (opendit/parallel/layout.py)."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from opendit.checkpoint.tensor_set import TORCH_DTYPES, TensorSet, kinds_of
from opendit.common.tensor_files import DTYPES, Kinds
from opendit.models.initialization import canonical_name
from opendit.models.zoo import Shapes
from opendit.parallel.engines import Values
from opendit.parallel.layout import Layout, Runs, Shard, copy_overlap, overlap, runs_of

Names = tuple[str, ...]
Pair = tuple[Names, Names, int]  # (names in one set, names in the second set, dimension of concatenation in both)


@dataclass(frozen=True)
class _Source:
    """A stored tensor and its range [start, stop) along the dimension of concatenation."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Place:
    """A tensor's range in a joined tensor."""

    joined: tuple[int, ...]  # shape of the joined tensor
    dim: int | None  # dimension of concatenation; None for a single stored tensor, perhaps reshaped
    # start, stop: range of the tensor along ``dim``
    start: int
    stop: int
    sources: tuple[_Source, ...]  # the stored tensors that overlap with the range

    def runs(self, start: int, stop: int, shard: Shard | None = None) -> Runs:
        """Return a range of the joined tensor, or this range's shard, as runs of consecutive elements."""
        first = () if self.dim is None else ((self.dim, ((start, stop),)),)
        return runs_of(self.joined, (*first, *(shard.slices if shard else ())))


class Reading:
    """A shard to read, in the stored dtype. If stored tensors have different dtypes, the dtype is promoted."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, runs: Runs, stored: list[tuple[Tensor, Runs]]):
        self.shape, self.dtype = shape, dtype
        self._runs, self._stored = runs, stored

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self) -> Tensor | None:
        """Return a view if a stored tensor has this dtype and the shard's elements consecutively; else None."""
        if not self.numel or len(self._runs.start) != 1:
            return None
        for tensor, runs in self._stored:
            _, offset, length = overlap(self._runs, runs)
            if len(length) == 1 and length[0] == self.numel and tensor.dtype == self.dtype:
                return tensor[int(offset[0]) : int(offset[0]) + self.numel].view(self.shape)
        return None

    def copy_to(self, out: Tensor, start: int = 0) -> None:
        """Fill ``out``, (n,) in host memory, with the elements ``start`` to ``start + n`` of the flattened shard."""
        if not out.numel():
            return
        part = self._runs
        if out.numel() < self.numel:
            part = part.select(np.array([start]), np.array([out.numel()]))
        left = out.numel()
        for tensor, runs in self._stored:
            left -= copy_overlap(out, part, tensor, runs)
        assert not left  # the constructor of MatchedTensors has compared the sizes


class MatchedTensors(TensorSet):
    """A view of stored tensors under other names and shapes. Each element occurs exactly once on both sides.

    Args:
        source: the stored tensors, mapped or in memory.
        pairs: (names in this view, names in ``source``, dimension of concatenation).
        shapes, dtypes: of this view's tensors. The source's dtypes are the default.
        constants: a tuple of source names that this view omits, or a mapping with tensors that this view adds.

    Raises ValueError if a tensor is missing, is not in exactly one pair, or does not fit.
    """

    def __init__(
        self,
        source: Mapping[str, Tensor],
        pairs: Iterable[Pair],
        shapes: Mapping[str, Sequence[int]],
        path: Path,
        dtypes: Mapping[str, str] | None = None,
        constants: Mapping[str, Tensor] | tuple[str, ...] = (),
    ):
        super().__init__(path)
        self._source = source
        self._kinds: Kinds = {name: kind for name, kind in kinds_of(source).items() if name not in constants}
        self._added: Mapping[str, Tensor] = constants if isinstance(constants, Mapping) else {}
        self._kinds |= kinds_of(self._added)
        self.metadata = dict(source.metadata) if isinstance(source, TensorSet) else {}
        self._places: dict[str, _Place] = {}
        self._last: tuple[str, Tensor] = ("", torch.empty(0))
        pairs = [*pairs, *(((name,), (name,), 0) for name in self._added)]
        check_matched([name for here, _, _ in pairs for name in here], shapes, f"{path}: of our weights")
        check_matched([name for _, there, _ in pairs for name in there], self._kinds, f"{path}: of the weights")
        wanted = {name: tuple(shape) for name, shape in shapes.items()}
        for here, there, dim in pairs:
            self._match(here, there, dim, wanted)
        if dtypes is not None:
            self.dtypes = {name: dtypes[name] for name in self.shapes}

    def _match(self, here: Names, there: Names, dim: int, wanted: Shapes) -> None:
        stored: Shapes = {name: self._kinds[name][1] for name in there}
        dtype = DTYPES[reduce(torch.promote_types, (TORCH_DTYPES[self._kinds[name][0]] for name in there))]
        if len(here) == len(there) == 1:
            ours, theirs = wanted[here[0]], stored[there[0]]
            if not _same_order(ours, theirs):
                raise ValueError(
                    f"{self._file_of(there[0])}: {there[0][:100]!r} has the shape {theirs}, and {here[0]} has {ours}"
                )
            self.shapes[here[0]], self.dtypes[here[0]] = ours, dtype
            self._places[here[0]] = _Place(ours, None, 0, 0, (_Source(there[0], 0, 0),))
            return
        one, other = (_join(names, shapes, dim) for names, shapes in ((here, wanted), (there, stored)))
        if one is None or one != other:
            raise ValueError(
                f"{self._file_of(there[0])}: {', '.join(f'{name[:100]!r} {stored[name]}' for name in there)} joined "
                f"along {dim} do not fit {', '.join(f'{name} {wanted[name]}' for name in here)}"
            )
        ranges = {names: list(pairwise(accumulate((s[name][dim] for name in names), initial=0)))
                  for names, s in ((here, wanted), (there, stored))}  # fmt: skip
        sources = [_Source(name, *ends) for name, ends in zip(there, ranges[there], strict=True)]
        for name, (start, stop) in zip(here, ranges[here], strict=True):
            overlapping = tuple(s for s in sources if s.start < stop and start < s.stop)
            self.shapes[name], self.dtypes[name] = wanted[name], dtype
            self._places[name] = _Place(one, dim, start, stop, overlapping)

    def _file_of(self, name: str) -> Path:
        return self._source.file_of(name) if isinstance(self._source, TensorSet) else self.path

    def reading(self, name: str, shard: Shard | None = None) -> Reading:
        """Return the :class:`Reading` of a tensor or shard. Mapped files are not read yet."""
        place = self._places[name]
        stored = [(self._stored(s.name), place.runs(s.start, s.stop)) for s in place.sources]
        shape = self.shapes[name] if shard is None else shard.shape
        return Reading(shape, TORCH_DTYPES[self.dtypes[name]], place.runs(place.start, place.stop, shard), stored)

    def _stored(self, name: str) -> Tensor:
        """Return a flattened source tensor. The last one is cached, because consecutive names often share it."""
        if self._last[0] != name:
            self._last = (name, (self._added if name in self._added else self._source)[name].reshape(-1))
        return self._last[1]

    def read(self, name: str, shard: Shard | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor or a shard, in the stored dtype or in ``dtype``. The result may be a view of the file."""
        reading = self.reading(name, shard)
        full = reading.view()
        if full is None:
            full = torch.empty(reading.shape, dtype=reading.dtype, device="cpu")
            reading.copy_to(full.view(-1))
        return full if dtype is None else full.to(dtype)

    def as_stored(self, part: int = 0, parts: int = 1) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self._source, TensorSet):
            return self._source.as_stored(part, parts)
        return super().as_stored(part, parts)

    def check_files(self, part: int = 0, parts: int = 1) -> None:
        if isinstance(self._source, TensorSet):
            self._source.check_files(part, parts)

    def close(self) -> None:
        super().close()
        self._last = ("", torch.empty(0))
        if isinstance(self._source, TensorSet):
            self._source.close()


def check_matched(names: Sequence[str], there: Iterable[str], where: str) -> None:
    """Raise ValueError unless ``names`` has every name of ``there`` exactly once. The message begins with ``where``."""
    counts = Counter(names)
    wanted, found = set(counts), set(there)
    problems = {
        "are matched twice": {name for name, count in counts.items() if count > 1},
        "are missing": wanted - found,
        "are unexpected": found - wanted,
    }
    lines = [f"{len(some)} {what} (first: {min(some)[:100]!r})" for what, some in problems.items() if some]
    if lines:
        raise ValueError(f"{where}, {', '.join(lines)}")


def _same_order(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True if the shapes differ only in how a row is shaped, or in dimensions of size 1."""
    if math.prod(one) != math.prod(other):
        return False
    return one[:1] == other[:1] or [side for side in one if side != 1] == [side for side in other if side != 1]


def _join(names: Names, shapes: Shapes, dim: int) -> tuple[int, ...] | None:
    """Return the shape of tensors joined along ``dim``; None if they can't be joined."""
    first = shapes[names[0]]
    if not 0 <= dim < len(first):
        return None
    rest = {(*shapes[name][:dim], -1, *shapes[name][dim + 1 :]) for name in names}
    if len(rest) > 1 or any(len(shapes[name]) != len(first) for name in names):
        return None
    return (*first[:dim], sum(shapes[name][dim] for name in names), *first[dim + 1 :])


BUFFER_BYTES, BUFFERS = 32 << 20, 4  # size and number of the page-locked buffers


class DeviceReader:
    """A ``Values`` callable that copies shards to a device in the stored dtype. The device can then cast them.

    CPU threads copy a shard from the mapped file into page-locked buffers. The device copies one buffer while the next
    is filled. A rank needs only BUFFERS * BUFFER_BYTES of host memory. On the CPU, a result may be a view of the file.
    otherwise: called for parameters that ``tensors`` lacks."""

    def __init__(
        self,
        tensors: MatchedTensors,
        device: torch.device | str,
        otherwise: Values | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ):
        self._tensors, self._device, self._otherwise = tensors, torch.device(device), otherwise
        self._bytes, self._turn = buffer_bytes, 0
        self._buffers: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []  # recorded after the copy from each buffer to the device

    def __call__(self, name: str, shard: Shard) -> Tensor:
        """Return a shard of the parameter with this name, (shard.shape). Raises ValueError, OSError."""
        name = canonical_name(name)
        if name not in self._tensors.shapes and self._otherwise is not None:
            return self._otherwise(name, shard)
        if self._device.type == "cpu":
            return self._tensors.read(name, shard)
        return self.copied(name, shard)

    def copied(self, name: str, shard: Shard) -> Tensor:
        """Read a shard through the buffers, and return it in new device memory."""
        reading = self._tensors.reading(name, shard)
        values = torch.empty(reading.shape, dtype=reading.dtype, device=self._device)
        flat, most = values.view(-1), max(1, self._bytes // reading.dtype.itemsize)
        for start in range(0, reading.numel, most):
            piece = flat[start : start + most]
            i, buffer = self._next()
            buffer = buffer[: piece.numel() * reading.dtype.itemsize].view(reading.dtype)
            reading.copy_to(buffer, start)
            piece.copy_(buffer, non_blocking=True)
            if self._copied:
                self._copied[i].record(torch.cuda.current_stream(self._device))
        return values

    def _next(self) -> tuple[int, Tensor]:
        """Return (number, buffer) of the next buffer, after the device has copied its content."""
        gpu = self._device.type == "cuda"
        if not self._buffers:
            size = max(self._bytes, 16)
            self._buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=gpu) for _ in range(BUFFERS)]
            self._copied = [torch.cuda.Event() for _ in range(BUFFERS)] if gpu else []
        i = self._turn = (self._turn + 1) % BUFFERS
        if self._copied:
            self._copied[i].synchronize()
        return i, self._buffers[i]


@torch.no_grad()
def fill(
    model: nn.Module,
    tensors: MatchedTensors,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
) -> None:
    """Set a model's parameters to the values of ``tensors``. Raises ValueError if names or shapes differ.

    A parameter on the meta device gets memory on ``device`` in ``dtype``, by default the stored dtype. Other parameters
    keep memory and dtype. layout: for a model with slices of its parameters."""
    parameters = {canonical_name(name): (name, tensor) for name, tensor in model.named_parameters()}
    if layout is None:
        check_matched(list(parameters), tensors.shapes, f"{tensors.path}: of the model's weights")
    reader = DeviceReader(tensors, device)
    for key, (name, tensor) in parameters.items():
        shard = Shard(tensors.shapes[key], ()) if layout is None else layout.local(key)
        if shard.shape != tuple(tensor.shape):
            raise ValueError(f"{tensors.path}: {key} has the shape {shard.shape}, the model's {tuple(tensor.shape)}")
        values = reader(key, shard)
        if not tensor.is_meta:
            tensor.copy_(values)
            continue
        # On the CPU, always copy: ``values`` may be a view of a file that another program changes.
        made = values.to(dtype or values.dtype, copy=values.device.type == "cpu")
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(made, tensor.requires_grad))
