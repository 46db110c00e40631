"""Read and write the files of a checkpoint: sets of named tensors, the manifest and the state.

    step_0000100/
      model.safetensors        fp32 master weights and buffers, the configuration in the metadata
      ema.safetensors          the moving average in this form; ema_DECAY.safetensors for further averages
      optimizer_RRR.safetensors  exp_avg.NAME and exp_avg_sq.NAME, written by rank RRR
      state.json, manifest.json  counters and settings of the run; size and SHA-256 of every other file

In a sharded checkpoint each set SET (model, ema, ema_DECAY, exp_avg, exp_avg_sq) has the files

      SET-shard-RRRRR-of-NNNNN.safetensors  shards by tensor name, written by rank RRRRR of NNNNN
      SET.shards.json          the index: each tensor's full shape, dtype and cuts

A cut [dim, start, stop, start, stop, ...] selects ranges along dim; null means the flattened tensor. Each cut applies
to the previous cut's result (opendit/parallel/layout.py). Names and shapes do not depend on the plugin or the number of
ranks. Files are memory-mapped, so only requested tensors are read.
"""

import contextlib
import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from opendit.checkpoint.run_folders import MANIFEST, named_checkpoint, root_of, step_of
from opendit.common.safe_files import remove, replacing, write_whole
from opendit.common.tensor_files import (
    DTYPES,
    FLOATS,
    ITEM_BYTES,
    Kinds,
    nbytes,
    open_safetensors,
    shapes_in,
    write_file,
    write_tensors,
)
from opendit.common.utils import sha256_of
from opendit.config.names import PARTS, SHARDS, WHOLE
from opendit.models.configuration import DiTConfig
from opendit.models.zoo import Shapes, model_shapes
from opendit.parallel.layout import Shard, copy_overlap, hold_each_once, runs_of

INDEX_VERSION = 1
MOST_BYTES = 50 * 10**9  # bytes per weights file, as in transformers since version 5
SHARD_OF = "shard_of"  # metadata key in shard files
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


# ------------------------------------------------------------------------------------------ the index of shards


def shard_file(tensors: str, rank: int, ranks: int) -> str:
    return f"{tensors}-shard-{rank:05d}-of-{ranks:05d}.safetensors"


def shard_metadata(tensors: str, step: int, held: Mapping[str, tuple[tuple[int, ...], Shard]]) -> dict[str, str]:
    """Return a shard file's metadata: the set's name, the step, and each tensor's full shape and cuts, as in the
    index. held: name -> (full shape, shard)."""
    cuts = {name: [[int(size) for size in shape], _cuts(shard)] for name, (shape, shard) in held.items()}
    return {"format": "pt", SHARD_OF: f"{tensors} of step {step}", "cuts": json.dumps(cuts, sort_keys=True)}


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor in an index: dtype, full shape, and the shard in each file."""

    dtype: str
    shape: tuple[int, ...]
    shards: Mapping[str, Shard]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardIndex:
    """An index of shards, with the run's step and safetensors metadata."""

    tensors_are: str  # the set's name: model, ema, exp_avg, ...
    step: int
    tensors: dict[str, ShardedTensor]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        return sorted({file for tensor in self.tensors.values() for file in tensor.shards})

    def held_by(self, file: str) -> dict[str, ShardedTensor]:
        return {name: tensor for name, tensor in self.tensors.items() if file in tensor.shards}

    def metadata_of(self, file: str) -> dict[str, str]:
        """Return the metadata that the shard file ``file`` must have."""
        held = {name: (tensor.shape, tensor.shards[file]) for name, tensor in self.held_by(file).items()}
        return shard_metadata(self.tensors_are, self.step, held)

    def bytes_in(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for tensor in self.tensors.values():
            for file, shard in tensor.shards.items():
                total[file] += ITEM_BYTES[tensor.dtype] * shard.numel
        return total

    def check_cover(self) -> None:
        """Raise ValueError unless the shards hold every element exactly once. A wrong index can make this slow, so
        compare ``bytes_in`` with the file sizes first."""
        for name, tensor in self.tensors.items():
            if not hold_each_once(tensor.numel, (runs_of(tensor.shape, s.slices) for s in tensor.shards.values())):
                raise ValueError(f"the shards of {name[:100]!r} do not hold each of its elements once")


def index_text(index: ShardIndex) -> str:
    """Return the index as JSON, with a line for each tensor."""
    lines = []
    for name, tensor in index.tensors.items():
        shards = {file: _cuts(shard) for file, shard in tensor.shards.items()}
        content = json.dumps({"dtype": tensor.dtype, "shape": list(tensor.shape), "shards": shards})
        lines.append(f"  {json.dumps(name)}: {content}")
    head = {"version": INDEX_VERSION, "set": index.tensors_are, "step": index.step, "metadata": index.metadata}
    return json.dumps(head)[:-1] + ', "tensors": {\n' + ",\n".join(lines) + "\n}}\n"


def _cuts(shard: Shard) -> list[list[int | None]]:
    # int(), because json can't serialize Gemini's numpy integers
    return [[dim, *(int(edge) for edges in ranges for edge in edges)] for dim, ranges in shard.slices]


def index_from(value: dict[str, Any]) -> ShardIndex:
    """Convert an index file's content, after opendit.checkpoint.schema's checks. Raises ValueError if inconsistent."""
    tensors = {}
    for name, entry in value["tensors"].items():
        shape = tuple(entry["shape"])
        shards = {file: _shard(shape, cuts) for file, cuts in entry["shards"].items()}
        if sum(shard.numel for shard in shards.values()) != math.prod(shape):
            raise ValueError(f"the shards of {name[:100]!r} do not hold each of its elements once")
        tensors[name] = ShardedTensor(entry["dtype"], shape, shards)
    return ShardIndex(value["set"], value["step"], tensors, value["metadata"])


def _shard(shape: tuple[int, ...], cuts: list[list[Any]]) -> Shard:
    """Return the shard that ``cuts`` select in a tensor of this shape. A cut is [dim or None, start, stop, ...]."""
    slices = []
    for dim, *edges in cuts:
        if dim is not None and dim >= len(shape):
            raise ValueError(f"a tensor of {len(shape)} dimensions is not cut along {dim}")
        size = math.prod(shape) if dim is None else shape[dim]
        ranges = tuple(zip(edges[::2], edges[1::2], strict=True))
        if any(not start <= stop <= size for start, stop in ranges):
            raise ValueError(f"a range of {ranges} lies outside of {size}")
        length = sum(stop - start for start, stop in ranges)
        shape = (length,) if dim is None else (*shape[:dim], length, *shape[dim + 1 :])
        slices.append((dim, ranges))
    return Shard(shape, tuple(slices))


# ------------------------------------------------------------------------------------------ reading


class TensorSet(Mapping[str, Tensor]):
    """A mapping from names to tensors. A tensor is read on access. Create sets with :func:`open_set`. shapes: name ->
    full shape. dtypes: name -> dtype, as safetensors spells it."""

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[str, safe_open] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.metadata: dict[str, str] = {}

    def read(self, name: str, shard: Shard | None = None) -> Tensor:
        """Return a tensor or a shard in the stored dtype, perhaps as a view of the file. Raises ValueError if a file
        contradicts the index, and OSError if a file can't be read."""
        raise NotImplementedError

    def file_of(self, name: str) -> Path:
        """Return the file to name in messages about a tensor."""
        return self.path

    def as_stored(self, part: int = 0, parts: int = 1) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor or shard) without copies, for caller number ``part`` of ``parts``."""
        names = sorted(self.shapes, key=lambda name: math.prod(self.shapes[name]))
        return ((name, self[name]) for name in names[part::parts])

    def check_files(self, part: int = 0, parts: int = 1) -> None:
        """Check the headers of this caller's shard files. Raises ValueError if one contradicts the index."""

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
        return {name: (self.dtypes[name], shape) for name, shape in self.shapes.items()}

    def check_floats(self) -> None:
        for name, dtype in self.dtypes.items():
            if dtype not in FLOATS:
                raise ValueError(f"{self.path}: {name[:100]!r} holds {dtype}; weights are one of {', '.join(FLOATS)}")

    def _file(self, name: str) -> safe_open:
        if name not in self._files:
            self._files[name] = open_safetensors(self.path.parent / name)
        return self._files[name]


class WholeTensors(TensorSet):
    """Full tensors, in one file or distributed over several files."""

    def __init__(self, path: Path, place: dict[str, str]):
        super().__init__(path)
        self._place: dict[str, str] = {}
        for name in dict.fromkeys(place.values()) or [path.name]:
            file = self._file(name)
            self.metadata |= file.metadata() or {}
            for key in file.keys():  # noqa: SIM118 (safe_open is not iterable)
                found = file.get_slice(key)
                if place and place.get(key) != name:
                    raise ValueError(f"{path} does not say that {path.with_name(name)} holds {key[:100]!r}")
                self._place[key] = name
                self.shapes[key], self.dtypes[key] = tuple(found.get_shape()), found.get_dtype()
        if missing := place.keys() - self.shapes.keys():
            raise ValueError(f"{path}: {min(missing)[:100]!r} is not in the file that it names")

    def file_of(self, name: str) -> Path:
        return self.path.with_name(self._place[name])

    def read(self, name: str, shard: Shard | None = None) -> Tensor:
        full = self._file(self._place[name]).get_tensor(name)
        return full if shard is None else shard.take(full)


class ShardedTensors(TensorSet):
    """Tensors in shards that a run's ranks have written."""

    def __init__(self, path: Path, index: ShardIndex):
        super().__init__(path)
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
            # compare bounds before opening a file
            if len(runs.start) and wanted.start.min() < runs.stop.max() and runs.start.min() < wanted.stop.max():
                left -= copy_overlap(full.view(-1), wanted, self._file(file).get_tensor(name).reshape(-1), runs)
        return full


def is_set(path: Path) -> bool:
    return path.name.endswith((WHOLE, SHARDS, PARTS))


def files_of(path: Path) -> list[str]:
    """Return the files that an index ``path`` lists; [] for a single file. Raises as :func:`open_set`."""
    if path.name.endswith(SHARDS):
        return read_index(path).files
    return sorted(set(_places(path).values()))


def _places(path: Path) -> dict[str, str]:
    """Return tensor -> file from an index of several files; {} for a single file."""
    if not path.name.endswith(PARTS):
        return {}
    from opendit.common.json_models import read_file
    from opendit.encoders.schema import INDEX  # slow: imports pydantic

    places = read_file(path, INDEX)["weight_map"]
    if not places:
        raise ValueError(f"{path} names no weights")
    return places


def open_set(path: Path, root: Path | None = None) -> TensorSet:
    """Open a safetensors file or an index. Files outside of ``root`` are never read; ``root`` is by default the run's
    or path's folder. Raises OSError, or ValueError if a file is damaged, missing or contradicts the index."""
    if path.name.endswith(SHARDS):
        return ShardedTensors(path, read_index(path))
    place = _places(path)
    for name in sorted(set(place.values())):
        file_size(path.with_name(name), root or root_of(path.parent))
    return WholeTensors(path, place)


def read_index(path: Path) -> ShardIndex:
    """Read an index. Check, without opening the listed files, that they exist, are large enough, and hold every element
    once. Raises OSError, or ValueError that names the file at fault."""
    from opendit.checkpoint.schema import INDEX_FILE  # slow: imports pydantic
    from opendit.common.json_models import read_file

    try:
        index = index_from(read_file(path, INDEX_FILE))
        if path.name != index.tensors_are + SHARDS:
            raise ValueError(f"it is the index of {index.tensors_are}")
        root = root_of(path.parent)
        for name, size in index.bytes_in().items():
            there = file_size(path.with_name(name), root)
            if there < size:
                raise ValueError(f"{path.with_name(name)} has {there:,} bytes and should hold {size:,} of tensors")
        index.check_cover()
    except ValueError as error:
        raise ValueError(str(error) if str(path.parent) in str(error) else f"{path}: {error}") from error
    return index


# ------------------------------------------------------------------------------------------ compared with a model


def check_size(config: DiTConfig, shapes: Shapes, path: Path) -> None:
    """Raise ValueError if the configuration describes more weights than the files hold. No model is built."""
    described, held = config.parameters(), sum(map(math.prod, shapes.values()))
    if described > held:
        raise ValueError(
            f"{path} does not hold the model that its configuration describes: {described:,} weights there, "
            f"{held:,} in the file"
        )


def check_shapes(config: DiTConfig, shapes: Shapes, path: Path) -> None:
    """Raise ValueError, naming the first difference, unless ``shapes`` are exactly a model's parameters and buffers."""
    check_size(config, shapes, path)
    try:
        parameters, buffers = model_shapes(config)
    except ValueError as error:
        raise ValueError(f"{path}: config: {error}") from error
    compare(parameters | buffers, shapes, path)


def compare(own: Shapes, theirs: Shapes, path: Path) -> None:
    differences = {
        "missing": own.keys() - theirs.keys(),
        "unexpected": theirs.keys() - own.keys(),
        "of another shape": {name for name in own.keys() & theirs.keys() if own[name] != theirs[name]},
    }
    problems = [f"{len(names)} {what} (first: {min(names)[:100]})" for what, names in differences.items() if names]
    if problems:
        raise ValueError(f"{path} is a checkpoint of another model: parameters {', '.join(problems)}")


# ------------------------------------------------------------------------------------------ writing weights


def write_weights(
    output: Path, state: Mapping[str, Tensor], metadata: dict[str, str], most_bytes: int = MOST_BYTES
) -> list[Path]:
    """Write weights as one .safetensors file. Above ``most_bytes``, write several files with an index, as transformers
    does: STEM-00001-of-000NN.safetensors and so on, and STEM.safetensors.index.json.

    Tensors are read one at a time. Each file has the metadata. Old files of STEM are removed. Return the written files;
    the single file or the index comes first. Raises OSError."""
    kinds = kinds_of(state)
    groups = shared_out(kinds, most_bytes)
    stem = output.name.removesuffix(WHOLE)
    number = "[0-9]" * 5
    index, old = output.with_name(stem + PARTS), sorted(output.parent.glob(f"{stem}-{number}-of-{number}{WHOLE}"))
    if len(groups) == 1:
        with replacing(output) as new:
            write_tensors(new, state, metadata, kinds)
        _remove([index, *old])
        return [output]
    names = [f"{stem}-{i:05d}-of-{len(groups):05d}{WHOLE}" for i in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        with replacing(output.with_name(name)) as new:
            write_tensors(new, state, metadata, {key: kinds[key] for key in group})
    total = sum(nbytes(*kind) for kind in kinds.values())
    places = {key: name for name, group in zip(names, groups, strict=True) for key in group}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"
    write_whole(index, text.encode())
    written = [output.with_name(name) for name in names]
    _remove([output, *(path for path in old if path not in written)])
    return [index, *written]


def shared_out(kinds: Kinds, most_bytes: int) -> list[list[str]]:
    """Divide the tensors, in their order, into groups of at most ``most_bytes``. A larger tensor is a group alone.
    huggingface_hub would need all tensors in memory."""
    groups, group, size = [], [], 0
    for name, kind in kinds.items():
        if nbytes(*kind) > most_bytes:
            groups.append([name])
            continue
        if group and size + nbytes(*kind) > most_bytes:
            groups.append(group)
            group, size = [], 0
        group.append(name)
        size += nbytes(*kind)
    return [*groups, group] if group else groups


def kinds_of(state: Mapping[str, Tensor]) -> Kinds:
    """Return name -> (dtype, shape) of every tensor. Tensors in a file are not read."""
    known: Kinds | None = getattr(state, "kinds", None)
    return (
        known
        if known is not None
        else {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()}
    )


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            remove(path)


STATE = "state.json"
MODEL_SET, AVERAGE_SET = "model", "ema"
VERSIONS = {2: WHOLE, 3: SHARDS}  # version in state.json -> suffix of a set's file or index


def average_sets(decays: tuple[float, ...]) -> list[str]:
    """Return the name of each average's set. Sampling uses the first average."""
    return [AVERAGE_SET, *(f"ema_{decay}" for decay in decays[1:])]


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """Return the name of the first CPU tensor with a NaN or an infinity; None if all are finite."""
    return next((name for name, tensor in tensors.items() if not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # PyTorch can't compare fp8 numbers on a CPU
        tensor = tensor.float()
    lowest, highest = tensor.aminmax()  # one pass without allocations; a NaN in the tensor makes both NaN
    return math.isfinite(lowest) and math.isfinite(highest)


def write_manifest(folder: Path, version: int, files: dict[str, dict[str, Any]], *, root: Path | None = None) -> None:
    """Write manifest.json: every file's size and checksum, and a checksum of this list."""
    content = {"version": version, "files": files, "sha256": _sha256_of(files)}
    write_file(folder / MANIFEST, iter([json.dumps(content, indent=1).encode()]), root=root)


def _sha256_of(files: dict[str, dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> {"bytes", "sha256"} for every file of a checkpoint. Files that are not listed are never read.
    Raises ValueError if the manifest is missing or damaged."""
    from opendit.checkpoint.schema import MANIFEST_FILE  # slow: imports pydantic
    from opendit.common.json_models import read_file

    path = folder / MANIFEST
    try:
        file_size(path, root_of(folder))
        content = read_file(path, MANIFEST_FILE)
        if content["sha256"] != _sha256_of(content["files"]):
            raise ValueError("its own checksum is another")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({error})") from error
    return content["files"]


class AnotherVersion(ValueError):
    """Error for a checkpoint that another version of the program wrote and this version can't read."""


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json. Raises AnotherVersion if this version of the program can't read
    the checkpoint, and ValueError if the file is missing or damaged."""
    from opendit.checkpoint.schema import ANY_STATE, STATE_FILE  # slow: imports pydantic
    from opendit.common.json_models import read_file

    path = named_checkpoint(folder) / STATE
    try:
        file_size(path, root_of(folder))
        version = read_file(path, ANY_STATE)["version"]
        if version in VERSIONS:
            return read_file(path, STATE_FILE)
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror})") from error
    raise AnotherVersion(
        f"{folder} has checkpoint version {version}, this program reads {' and '.join(map(str, VERSIONS))}; resume it "
        f"with the OpenDiT that wrote it, or start a new run from its weights with --pretrained "
        f"{folder / (AVERAGE_SET + WHOLE)}"
    )


# ------------------------------------------------------------------------------------------ verifying


def file_size(path: Path, root: Path) -> int:
    """Return the size in bytes of a regular file inside ``root``. Raises ValueError with the path if the file is
    missing, links out of ``root``, or could block (a FIFO or device)."""
    try:
        real = path.resolve(strict=True)
        found = os.stat(real)
    except FileNotFoundError:
        broken = path.is_symlink()
        raise ValueError(f"{path} is " + ("a symbolic link to nothing" if broken else "missing")) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise ValueError(f"{path} can't be read ({getattr(error, 'strerror', None) or error})") from error
    if not real.is_relative_to(root):
        raise ValueError(f"{path} is a symbolic link out of {root}: what it leads to is not read; copy the file there")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return found.st_size


def damage(folder: Path, part: int = 0, parts: int = 1, only: Collection[str] | None = None) -> str | None:
    """Describe the first damaged file of a checkpoint, see :func:`verified_files`; None if all files are intact."""
    try:
        verified_files(folder, part, parts, only)
    except ValueError as error:
        return str(error)
    return None


def verified_files(folder: Path, part: int = 0, parts: int = 1, only: Collection[str] | None = None) -> list[str]:
    """Compare a checkpoint's files with the manifest, and return their names. only: names to compare; all by default.
    Raises ValueError for the first wrong file. Caller number ``part`` of ``parts`` computes its share of the
    checksums."""
    named_checkpoint(folder)
    root, named = root_of(folder), str(folder)
    if folder.is_symlink():
        named += f" (a symbolic link to {os.readlink(folder)})"
    if not folder.resolve().is_relative_to(root):
        raise ValueError(f"{named} leads out of the run's folder {root} and is not read; move the files back into it")
    if not folder.is_dir():
        raise ValueError(f"{named} is " + ("not a folder" if folder.exists() else "missing"))
    entries = read_manifest(folder)
    names = sorted(entries if only is None else only)
    for name in names:
        path = folder / name
        if name not in entries:
            raise ValueError(f"{path} is not in {MANIFEST}, which lists all that was written: it is missing or strange")
        if (size := file_size(path, root)) != entries[name]["bytes"]:
            raise ValueError(f"{path} is damaged: {size:,} bytes, {entries[name]['bytes']:,} were written")
    mine = names[part::parts]
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing releases the GIL
        try:
            digests = list(pool.map(sha256_of, [folder / name for name in mine]))
        except OSError as error:
            raise ValueError(f"{error.filename} can't be read ({error.strerror})") from error
    for name, digest in zip(mine, digests, strict=True):
        if digest != entries[name]["sha256"]:
            raise ValueError(f"{folder / name} is damaged: its checksum is not the manifest's")
    return names


def intact_before(folder: Path, problem: Callable[[Path], str | None] = damage) -> Path | None:
    """Return the newest checkpoint before ``folder`` for which ``problem`` returns None, or None."""
    try:
        folder = named_checkpoint(folder).resolve()
    except ValueError:
        return None
    earlier = [other for other in folder.parent.glob("step_*") if step_of(other) < step_of(folder)]
    return next((other for other in sorted(earlier, key=step_of, reverse=True) if problem(other) is None), None)
