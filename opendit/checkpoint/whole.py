"""Checkpoints of whole tensors: every file has one rank that writes it, so nothing is written by two machines.

A rank that owns model.safetensors, an average, or some parameters' moments gathers them parameter by parameter into one
buffer in host memory. The buffers of all ranks together hold (3 + averages) x 4 bytes x parameters, however many saves
there are: for DiT-XL/2 10.8 GB.
"""

import math
from pathlib import Path
from typing import Any

from opendit.checkpoint.copying import MODEL_SET, Files, HostBuffer, average_sets, buffers_of, state_tensors
from opendit.checkpoint.ema import EMA
from opendit.common.tensor_files import write_tensors
from opendit.config.checkpoints import WHOLE
from opendit.parallel.control_group import ControlGroup
from opendit.parallel.engines import MOMENTS, Engine

OPTIMIZER = "optimizer"


def share_out(sizes: dict[str, int], weight_sets: list[str], ranks: int) -> dict[tuple[str, str], int]:
    """The rank that writes each (set, parameter), so that all write about as much.

    A weights file belongs to one rank; the moments (set ``OPTIMIZER``) go parameter by parameter, the biggest first,
    to the rank that has the least.
    """
    load, owner = [0] * ranks, {}

    def give(keys: list[tuple[str, str]], size: int) -> None:
        rank = load.index(min(load))
        load[rank] += size
        owner.update(dict.fromkeys(keys, rank))

    for weights in weight_sets:
        give([(weights, name) for name in sizes], sum(sizes.values()))
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        give([(OPTIMIZER, name)], len(MOMENTS) * sizes[name])
    return owner


def most_bytes_of_a_host(sizes: dict[str, int], averages: int, ranks: int, ranks_of_a_host: int) -> int:
    """The largest sum of the buffers of the ranks of one host, for parameters of these sizes and so many averages."""
    weight_sets = [str(number) for number in range(1 + averages)]
    found = [0] * -(-ranks // ranks_of_a_host)
    for (which, name), rank in share_out(sizes, weight_sets, ranks).items():
        found[rank // ranks_of_a_host] += 4 * sizes[name] * (len(MOMENTS) if which == OPTIMIZER else 1)
    return max(found)


class WholeTensorFiles:
    """Copy and write one rank's files of a checkpoint of whole tensors.

    version: of state.json. averages: the file of every average, the one to sample from first.
    """

    version = 2

    def __init__(self, engine: Engine, ema: EMA, channel: ControlGroup, enabled: bool = True):
        self.engine, self.ema, self.mesh = engine, ema, engine.mesh
        weights = [MODEL_SET, *average_sets(ema.decays)]
        self.averages = [name + WHOLE for name in weights[1:]]
        sizes = {name: math.prod(engine.shapes[name]) for name in engine.shapes}
        self._owner = share_out(sizes, weights, self.mesh.world_size)
        mine = [(which, name) for (which, name), rank in self._owner.items() if rank == self.mesh.rank]
        total = sum(sizes[name] * (len(MOMENTS) if which == OPTIMIZER else 1) for which, name in mine)
        self.buffer = HostBuffer(total if enabled else 0, self.mesh.device)

    def copy(self) -> Files:
        """Copy what this rank writes to host memory. Collective."""
        files: Files = {}
        moments = f"{OPTIMIZER}_{self.mesh.rank:03d}{WHOLE}"
        self.buffer.clear()
        for which, name, shard in state_tensors(self.engine, self.ema):
            full = self.engine.layout.gather(name, shard)
            of_moments = which in MOMENTS
            if self._owner[OPTIMIZER if of_moments else which, name] == self.mesh.rank:
                file, key = (moments, f"{which}.{name}") if of_moments else (which + WHOLE, name)
                files.setdefault(file, {})[key] = self.buffer.copy(full)
        for file in files.keys() - {moments}:
            files[file].update(buffers_of(self.engine))
        self.buffer.wait()
        return files

    def write(self, folder: Path, files: Files, step: int, metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Writes this rank's files; returns their lines of the manifest. Raises OSError."""
        run = folder.parent.parent
        return {name: write_tensors(folder / name, tensors, metadata, root=run) for name, tensors in files.items()}

    def finish(self, folder: Path, step: int, metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Writes on rank 0, when all ranks have written, what is left to be; returns as :meth:`write`."""
        return {}
