"""The index of a set of tensors that ranks have written in shards: which file holds which slices of which tensor.

    model.shards.json                         the index of the set "model"
    model-shard-00000-of-00004.safetensors    what rank 0 of 4 has written of it

Under the name of a tensor stand its canonical shape, its dtype, and for every file that has a shard of it the cuts that
lead there, outer to inner, each as [dim, start, stop, start, stop, ...]: these ranges along dim, null for the flattened
tensor, of what the cuts before have left (opendit/parallel/layout.py). In the file the shard has the tensor's name.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opendit.common.json_file import COUNT, FILE, MIB, FileKind
from opendit.common.rules import Invalid, Rule, listed, mapping, one_of, record, string, whole
from opendit.common.tensor_files import ITEM_BYTES
from opendit.parallel.layout import Shard
from opendit.parallel.runs import hold_each_once, runs_of

VERSION = 1
SHARD_OF = "shard_of"  # in the metadata of a file of shards
MOST_CUTS, MOST_RANGES, MOST_DIMENSIONS = 8, 4096, 8


def shard_file(tensors: str, rank: int, ranks: int) -> str:
    """The file of what a rank writes of a set of tensors."""
    return f"{tensors}-shard-{rank:05d}-of-{ranks:05d}.safetensors"


def shard_metadata(tensors: str, step: int, held: Mapping[str, tuple[tuple[int, ...], Shard]]) -> dict[str, str]:
    """Return the metadata of a file of shards, which its index must agree with: the set, the step, and each tensor's
    canonical shape and cuts. held: (canonical shape, shard) by name."""
    said = {name: [[int(size) for size in shape], _cuts(shard)] for name, (shape, shard) in held.items()}
    return {"format": "pt", SHARD_OF: f"{tensors} of step {step}", "cuts": json.dumps(said, sort_keys=True)}


@dataclass(frozen=True)
class ShardedTensor:
    """dtype, canonical shape, and the shard that each file holds."""

    dtype: str
    shape: tuple[int, ...]
    shards: Mapping[str, Shard]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardIndex:
    """The contents of an index of shards. step: the run's. metadata: the same as in a safetensors file."""

    tensors_are: str  # model, ema, exp_avg, ...
    step: int
    tensors: dict[str, ShardedTensor]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The files that hold the shards."""
        return sorted({file for tensor in self.tensors.values() for file in tensor.shards})

    def held_by(self, file: str) -> dict[str, ShardedTensor]:
        """The tensors that a file has a shard of."""
        return {name: tensor for name, tensor in self.tensors.items() if file in tensor.shards}

    def metadata_of(self, file: str) -> dict[str, str]:
        """Return the metadata that a file of this index must have."""
        held = {name: (tensor.shape, tensor.shards[file]) for name, tensor in self.held_by(file).items()}
        return shard_metadata(self.tensors_are, self.step, held)

    def bytes_in(self) -> Counter[str]:
        """Bytes of the shards in every file."""
        total: Counter[str] = Counter()
        for tensor in self.tensors.values():
            for file, shard in tensor.shards.items():
                total[file] += ITEM_BYTES[tensor.dtype] * shard.numel
        return total

    def check_cover(self) -> None:
        """Raises ValueError unless the shards hold every element of every tensor once.

        Its work is bounded by the number of elements: see that the files are as large as ``bytes_in`` before.
        """
        for name, tensor in self.tensors.items():
            if not hold_each_once(tensor.numel, (runs_of(tensor.shape, s.slices) for s in tensor.shards.values())):
                raise ValueError(f"the shards of {name[:100]!r} do not hold each of its elements once")


# ------------------------------------------------------------------------------------------ as JSON


def index_text(index: ShardIndex) -> str:
    """The index as JSON, a line for each tensor."""
    lines = []
    for name, tensor in index.tensors.items():
        shards = {file: _cuts(shard) for file, shard in tensor.shards.items()}
        content = json.dumps({"dtype": tensor.dtype, "shape": list(tensor.shape), "shards": shards})
        lines.append(f"  {json.dumps(name)}: {content}")
    head = {"version": VERSION, "set": index.tensors_are, "step": index.step, "metadata": index.metadata}
    return json.dumps(head)[:-1] + ', "tensors": {\n' + ",\n".join(lines) + "\n}}\n"


def _cuts(shard: Shard) -> list[list[int | None]]:
    # Gemini's edges are numpy's integers, which JSON does not know.
    return [[dim, *(int(edge) for edges in ranges for edge in edges)] for dim, ranges in shard.slices]


def index_from(value: dict[str, Any]) -> ShardIndex:
    """The index that JSON which keeps INDEX_FILE's rule describes. Raises ValueError for one that can't be."""
    tensors = {}
    for name, entry in value["tensors"].items():
        shape = tuple(entry["shape"])
        shards = {file: _shard(shape, cuts) for file, cuts in entry["shards"].items()}
        if sum(shard.numel for shard in shards.values()) != math.prod(shape):
            raise ValueError(f"the shards of {name[:100]!r} do not hold each of its elements once")
        tensors[name] = ShardedTensor(entry["dtype"], shape, shards)
    return ShardIndex(value["set"], value["step"], tensors, value["metadata"])


def _shard(shape: tuple[int, ...], cuts: list[list[Any]]) -> Shard:
    """cuts: each [dim or None, start, stop, start, stop, ...]. Raises ValueError for a cut along a dimension
    that there is not, or with a range that lies outside of it."""
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


# ------------------------------------------------------------------------------------------ its rule

_EDGE = whole(0)


def _cut(value: Any, place: str) -> None:
    """[dim, start, stop, ...]: one object less for each range than a list in a list, of which there may be many."""
    listed(lambda *_: None, 1, 1 + 2 * MOST_RANGES)(value, place)
    dim, *edges = value
    if dim is not None:
        whole(0, MOST_DIMENSIONS)(dim, f"{place}[0]")
    if len(edges) % 2:
        raise Invalid(f"{place} has a start without a stop")
    for edge in edges:
        _EDGE(edge, place)


def _shape(value: Any, place: str) -> None:
    listed(whole(1, 1 << 40), 0, MOST_DIMENSIONS)(value, place)
    if math.prod(value) > 1 << 48:
        raise Invalid(f"{place} is of more elements than any model has")


SET: Rule = string(64, r"[A-Za-z0-9_][A-Za-z0-9._]*", "the name of a set of tensors")
INDEX_FILE = FileKind(
    record(
        {
            "version": one_of(VERSION),
            "set": SET,
            "step": COUNT,
            "metadata": mapping(string(64), string(16 * MIB), 16),
            "tensors": mapping(
                string(1024),
                record(
                    {
                        "dtype": one_of(*ITEM_BYTES),
                        "shape": _shape,
                        "shards": mapping(FILE, listed(_cut, 0, MOST_CUTS), 1 << 16),
                    }
                ),
                1 << 20,
            ),
        }
    ),
    256 * MIB,
)
