"""Checkpoints of shards: every rank writes what it holds, and an index says which slices of which tensor that is.

No tensor is gathered, and no rank needs more host memory than for its own share of the state: what several ranks hold
alike (replicas of a sharded model, tensors that are whole on every rank) is divided among them evenly. The masters,
every average and each of the moments are a set of tensors with an index of its own (opendit/checkpoint/index.py), so
that the weights to sample from can be read and verified without the rest.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opendit.checkpoint.copying import MODEL_SET, Files, HostBuffer, average_sets, buffers_of, state_tensors
from opendit.checkpoint.ema import EMA
from opendit.checkpoint.index import ShardedTensor, ShardIndex, index_text, shard_file, shard_metadata
from opendit.common.tensor_files import DTYPES, write_file, write_tensors
from opendit.config.checkpoints import SHARDS
from opendit.parallel.control_group import ControlGroup
from opendit.parallel.engines import MOMENTS, Engine
from opendit.parallel.layout import Layout, Shard


def written_part(layout: Layout, name: str) -> Shard:
    """Return the part of a parameter that this rank writes: its shard, or an even part of one that others hold too."""
    holders = layout.replicas(name)
    return layout.local(name).flat_part(holders.index(layout.mesh.rank), len(holders))


def _joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All of their entries; equal keys have equal values."""
    return {key: value for part in parts for key, value in part.items()}


class ShardFiles:
    """Copy and write one rank's files of a checkpoint of shards.

    Args:
        channel: asks the other ranks, once, what they have and write.

    Attributes:
        version: of state.json. averages: the index of every average, the one to sample from first.

    Raises:
        ValueError: on every rank, if the ranks together do not hold every element of a parameter once.
    """

    version = 3

    def __init__(self, engine: Engine, ema: EMA, channel: ControlGroup, enabled: bool = True):
        self.engine, self.ema, self.mesh = engine, ema, engine.mesh
        weights = [MODEL_SET, *average_sets(ema.decays)]
        self.averages = [name + SHARDS for name in weights[1:]]
        self._weights, self._sets = weights, [*weights, *MOMENTS]
        self._parts = {name: written_part(engine.layout, name) for name in engine.shapes}
        shapes = {name: ("F32", shape) for name, shape in engine.shapes.items()}
        buffers = {name: (DTYPES[b.dtype], tuple(b.shape)) for name, b in engine.module.named_buffers()}
        # Ranks of a pipeline know of their own stages only.
        everywhere = channel.gather((shapes, buffers))
        self._trained, all_buffers = (_joined(each) for each in zip(*everywhere, strict=True))
        self._buffers = []
        for number, name in enumerate(all_buffers):
            holders = [rank for rank, (_, held) in enumerate(everywhere) if name in held]
            self._buffers += [name] if holders[number % len(holders)] == self.mesh.rank else []
        mine = {name: part for name, part in self._parts.items() if part.numel}
        mine |= {name: Shard(buffers[name][1], ()) for name in self._buffers}
        self._held = channel.gather(mine)
        self._shapes = self._trained | all_buffers
        self._mine = {name: (self._shapes[name][1], part) for name, part in mine.items()}
        self._index(MODEL_SET, 0, {}).check_cover()
        total = sum(part.numel for part in self._parts.values()) * len(self._sets)
        self.buffer = HostBuffer(total if enabled else 0, self.mesh.device)

    def copy(self) -> Files:
        """Copy what this rank writes to host memory."""
        files: Files = {}
        self.buffer.clear()
        for which, name, shard in state_tensors(self.engine, self.ema):
            local, part = self.engine.layout.local(name), self._parts[name]
            if part.numel:
                taken = shard if part is local else Shard(part.shape, part.slices[-1:]).take(shard)
                files.setdefault(self._file(which), {})[name] = self.buffer.copy(taken.view(part.shape))
        if self._buffers:
            copies = buffers_of(self.engine)
            for which in self._weights:
                files.setdefault(self._file(which), {}).update({name: copies[name] for name in self._buffers})
        self.buffer.wait()
        return files

    def write(self, folder: Path, files: Files, step: int, metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Writes this rank's files; returns their lines of the manifest. Raises OSError."""
        written = {}
        for which in self._sets:
            name = self._file(which)
            if name in files:
                said = shard_metadata(which, step, {key: self._mine[key] for key in files[name]})
                written[name] = write_tensors(folder / name, files[name], said, root=folder.parent.parent)
        return written

    def finish(self, folder: Path, step: int, metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Writes the indices on rank 0, when all ranks have written; returns as :meth:`write`."""
        written = {}
        for which in self._sets:
            text = index_text(self._index(which, step, metadata if which in self._weights else {}))
            path = folder / (which + SHARDS)
            written[path.name] = write_file(path, iter([text.encode()]), root=folder.parent.parent)
        return written

    def _file(self, which: str) -> str:
        return shard_file(which, self.mesh.rank, self.mesh.world_size)

    def _index(self, which: str, step: int, metadata: dict[str, str]) -> ShardIndex:
        """The index of a set, the same on every rank."""
        tensors = {}
        for name, (dtype, shape) in self._shapes.items():
            if name in self._trained or which in self._weights:
                holders = [(rank, held[name]) for rank, held in enumerate(self._held) if name in held]
                shards = {shard_file(which, rank, self.mesh.world_size): shard for rank, shard in holders}
                tensors[name] = ShardedTensor(dtype, shape, shards)
        return ShardIndex(which, step, tensors, metadata)
