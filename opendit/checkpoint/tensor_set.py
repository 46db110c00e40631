"""Named tensors as they lie on disk, whatever the kind: one safetensors file, files that share out the tensors
(``*.safetensors.index.json``, as transformers and diffusers write them), or shards of tensors (``*.shards.json``).

Files are mapped: what is not asked for is not read.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from opendit.checkpoint.files import file_id, root_of
from opendit.checkpoint.index import INDEX_FILE, SHARD_OF, ShardIndex, index_from
from opendit.common.json_file import FILE, FileKind, read_file
from opendit.common.rules import mapping, optional, plain, record, string
from opendit.common.tensor_files import DTYPES, FLOATS, Kinds, open_safetensors, shapes_in
from opendit.config.checkpoints import PARTS, SHARDS, WHOLE
from opendit.parallel.layout import Shard
from opendit.parallel.runs import Runs, copy_overlap, runs_of

PARTS_FILE = FileKind(
    record({"weight_map": mapping(string(1024), FILE, 1 << 20)}, {"metadata": optional(record({}, others=plain(4)))}),
    64 << 20,
)
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
Opener = Callable[[Path], safe_open]


class TensorSet(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for. Build with :func:`open_set`.

    path: the file that stands for it. shapes: canonical, by name. metadata: as of a safetensors file.
    """

    def __init__(self, path: Path, open_file: Opener):
        self.path, self._open = path, open_file
        self._files: dict[str, safe_open] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.metadata: dict[str, str] = {}

    def read(self, name: str, shard: Shard | None = None) -> Tensor:
        """A tensor in its stored dtype, or a shard of it, of which alone is read; it may be a view of the file.

        Raises ValueError if a file that has some of it is not as the index says, or OSError."""
        raise NotImplementedError

    def as_stored(self, part: int = 0, parts: int = 1) -> Iterator[tuple[str, Tensor]]:
        """This share of its tensors as they lie in the files: shards by themselves, and none is copied."""
        names = sorted(self.shapes, key=lambda name: math.prod(self.shapes[name]))
        return ((name, self[name]) for name in names[part::parts])

    def check_files(self, part: int = 0, parts: int = 1) -> None:
        """Opens this share of its files and compares their headers with the index. Raises ValueError."""

    def close(self) -> None:
        self._files.clear()

    def __enter__(self) -> "TensorSet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def kinds(self) -> Kinds:
        """dtype and shape of every tensor."""
        return {name: (self.dtypes[name], shape) for name, shape in self.shapes.items()}

    def check_floats(self) -> None:
        """Raises ValueError if a tensor holds no floating-point numbers."""
        for name, dtype in self.dtypes.items():
            if dtype not in FLOATS:
                raise ValueError(f"{self.path}: {name[:100]!r} holds {dtype}; weights are one of {', '.join(FLOATS)}")

    def _file(self, name: str) -> safe_open:
        if name not in self._files:
            self._files[name] = self._open(self.path.parent / name)
        return self._files[name]


class WholeTensors(TensorSet):
    """Whole tensors, in one file or shared out among several."""

    def __init__(self, path: Path, open_file: Opener, place: dict[str, str]):
        super().__init__(path, open_file)
        self._place: dict[str, str] = {}
        for name in dict.fromkeys(place.values()) or [path.name]:
            file = self._file(name)
            self.metadata |= file.metadata() or {}
            for key in file.keys():  # noqa: SIM118 (it is no dictionary)
                found = file.get_slice(key)
                if place and place.get(key) != name:
                    raise ValueError(f"{path} does not say that {path.with_name(name)} holds {key[:100]!r}")
                self._place[key] = name
                self.shapes[key], self.dtypes[key] = tuple(found.get_shape()), found.get_dtype()
        if missing := place.keys() - self.shapes.keys():
            raise ValueError(f"{path}: {min(missing)[:100]!r} is not in the file that it names")

    def read(self, name: str, shard: Shard | None = None) -> Tensor:
        full = self._file(self._place[name]).get_tensor(name)
        return full if shard is None else shard.take(full)


class ShardedTensors(TensorSet):
    """Tensors that ranks have written in shards."""

    def __init__(self, path: Path, open_file: Opener, index: ShardIndex):
        super().__init__(path, open_file)
        self.index, self.metadata = index, index.metadata
        for name, tensor in index.tensors.items():
            self.shapes[name], self.dtypes[name] = tensor.shape, tensor.dtype

    def as_stored(self, part: int = 0, parts: int = 1) -> Iterator[tuple[str, Tensor]]:
        for file in self.index.files[part::parts]:
            for name in self.index.held_by(file):
                yield name, self._file(file).get_tensor(name)

    def check_files(self, part: int = 0, parts: int = 1) -> None:
        for name in self.index.files[part::parts]:
            self._file(name)

    def _file(self, name):
        if name in self._files:
            return self._files[name]
        path, file = self.path.with_name(name), super()._file(name)
        says, should = file.metadata() or {}, self.index.metadata_of(name)
        if says.get(SHARD_OF) != should[SHARD_OF]:
            other = str(says.get(SHARD_OF))[:100]
            raise ValueError(f"{path} is a shard of {other}, not of {should[SHARD_OF]} as its index says")
        if says != should:
            raise ValueError(f"{path} does not say that it holds the slices that {self.path.name} says")
        held = self.index.held_by(name)
        found = shapes_in(file, path, floats=False)
        for key, tensor in held.items():
            if found.get(key) != tensor.shards[name].shape or file.get_slice(key).get_dtype() != tensor.dtype:
                raise ValueError(f"{path} does not hold of {key[:100]!r} what {self.path.name} says")
        return file

    def read(self, name: str, shard: Shard | None = None) -> Tensor:
        tensor = self.index.tensors[name]
        wanted = runs_of(tensor.shape, shard.slices if shard else ())
        full = torch.empty(shard.shape if shard else tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        left = full.numel()
        for file, stored in tensor.shards.items():
            if not left:
                break
            runs = runs_of(tensor.shape, stored.slices)
            if _may_overlap(wanted, runs):
                left -= copy_overlap(full.view(-1), wanted, self._file(file).get_tensor(name).reshape(-1), runs)
        return full


def _may_overlap(one: Runs, other: Runs) -> bool:
    """Return True if two sets of runs may share elements: most files hold nothing that a rank needs."""
    if not len(one.start) or not len(other.start):
        return False
    return one.start.min() < other.stop.max() and other.start.min() < one.stop.max()


def is_set(path: Path) -> bool:
    """Return True if :func:`open_set` accepts a file with this name."""
    return path.name.endswith((WHOLE, SHARDS, PARTS))


def files_of(path: Path) -> list[str]:
    """The other files that hold the tensors of the set that a file stands for. Raises as :func:`open_set`."""
    if path.name.endswith(SHARDS):
        return read_index(path).files
    return sorted(set(_places(path).values()))


def _places(path: Path) -> dict[str, str]:
    """The file of every tensor by an index of whole ones; {} if the path is of a single file."""
    if not path.name.endswith(PARTS):
        return {}
    places = read_file(path, PARTS_FILE)["weight_map"]
    if not places:
        raise ValueError(f"{path} names no weights")
    return places


def open_set(path: Path, open_file: Opener | None = None) -> TensorSet:
    """The tensors that a file stands for. No file outside of the folder that it is in, or of its run, is read.

    open_file: opens a safetensors file, with checks of its own.

    Raises:
        ValueError: in one line, what is damaged, missing or not to be believed. OSError: it can't be opened.
    """
    open_file = open_file or open_safetensors
    if path.name.endswith(SHARDS):
        return ShardedTensors(path, open_file, read_index(path))
    place = _places(path)
    for name in sorted(set(place.values())):
        file_id(path.with_name(name), root_of(path.parent))
    return WholeTensors(path, open_file, place)


def read_index(path: Path) -> ShardIndex:
    """An index whose files are there, large enough, and hold every element once by what it says; none is opened.

    Raises:
        ValueError: in one line that names the file at fault. OSError: the index can't be opened.
    """
    try:
        index = index_from(read_file(path, INDEX_FILE))
        if path.name != index.tensors_are + SHARDS:
            raise ValueError(f"it is the index of {index.tensors_are}")
        root = root_of(path.parent)
        for name, size in index.bytes_in().items():
            there = file_id(path.with_name(name), root).size
            if there < size:
                raise ValueError(f"{path.with_name(name)} has {there:,} bytes and should hold {size:,} of tensors")
        index.check_cover()
    except ValueError as error:
        raise ValueError(str(error) if str(path.parent) in str(error) else f"{path}: {error}") from error
    return index
