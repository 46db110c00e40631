"""Saving a run: training waits only for the copy off the device, and the files are written in the background.

One of two classes decides what each rank copies and writes. With ``WholeTensorFiles`` each file is written by one rank,
which gathers its tensors, parameter by parameter, into a buffer in host memory. The buffers of all ranks hold
(3 + averages) x 4 bytes x parameters, 10.8 GB for DiT-XL/2 with one average. With ``ShardFiles`` every rank writes what
it holds, no tensor is gathered, and an index says which slices of which tensor are in which file. What several ranks
hold (replicas of a sharded model, tensors that every rank has in full) is divided among them evenly.

A checkpoint's folder gets its name when all of its files are on the disk. At every moment there is one to load.
"""

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.files import (
    AVERAGE_SET,
    MODEL_SET,
    STATE,
    average_sets,
    not_finite,
    read_state,
    write_manifest,
)
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.checkpoint.run_folders import (
    AVERAGES,
    BEST_LINK,
    LATEST,
    MANIFEST,
    point_to,
    step_folder,
    step_of,
)
from opendit.checkpoint.tensor_set import (
    ShardedTensor,
    ShardIndex,
    index_text,
    shard_file,
    shard_metadata,
)
from opendit.common.records import WriteFailures
from opendit.common.safe_files import make_folder, move_into, remove, remove_tree, rename, sync_folder
from opendit.common.tensor_files import DTYPES, write_file, write_tensors
from opendit.config.names import BEST, SHARDS, WHOLE
from opendit.parallel.engines import MOMENTS, Engine
from opendit.parallel.host_memory import HostMemory
from opendit.parallel.layout import Layout, Shard
from opendit.parallel.mesh import ControlGroup
from opendit.parallel.supervisor import CLOSING

logger = logging.getLogger(__name__)

Files = dict[str, dict[str, Tensor]]  # what one rank writes: file, name of the tensor, tensor in host memory
THREADS = 4  # that copy from host to host: one alone does not fill the memory's bandwidth
OPTIMIZER = "optimizer"


# ------------------------------------------------------------------------------------------ the copy in host memory


def state_tensors(engine: Engine, ema: EMA) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (set, parameter, this rank's shard) of masters, averages and moments, in the same order on all ranks."""
    averages = average_sets(ema.decays)
    for name in engine.shapes:
        yield MODEL_SET, name, engine.master(name)
        for which, shards in zip(averages, ema.averages, strict=True):
            yield which, name, shards[name]
        for moment, shard in engine.moments(name).items():
            yield moment, name, shard


def buffers_of(engine: Engine) -> dict[str, Tensor]:
    """Return copies of the model's buffers in host memory."""
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in engine.module.named_buffers()}


class HostBuffer:
    """A buffer of fp32 numbers in host memory, page-locked for copies from a GPU until :meth:`free`."""

    def __init__(self, numel: int, device: torch.device):
        self.device, self._used = device, 0
        self._threads: ThreadPoolExecutor | None = None
        self._copies: deque[Future[Any]] = deque()
        self._memory = HostMemory(numel, device)
        self._numbers = self._memory.numbers

    @property
    def bytes(self) -> int:
        return self._numbers.nbytes

    def clear(self) -> None:
        """Empty the buffer: the next copy overwrites the first one."""
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor into the buffer. Return the copy, complete when :meth:`wait` has returned."""
        space = self._numbers[self._used : self._used + tensor.numel()].view(tensor.shape)
        self._used += tensor.numel()
        if tensor.device.type != "cpu" or self.device.type == "cpu":
            return space.copy_(tensor, non_blocking=True)
        self._threads = self._threads or ThreadPoolExecutor(THREADS, "save")
        self._copies.append(self._threads.submit(space.copy_, tensor))
        while len(self._copies) > THREADS:  # bounds the memory of tensors that only live until they are copied
            self._copies.popleft().result()
        return space

    def wait(self) -> None:
        """Wait until all copies are made."""
        while self._copies:
            self._copies.popleft().result()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Unlock the pages, even if tensors still use them."""
        self._memory.unlock()


# ------------------------------------------------------------------------------------------ files of whole tensors


def share_out(sizes: dict[str, int], weight_sets: list[str], ranks: int) -> dict[tuple[str, str], int]:
    """Return the rank that writes each (set, parameter), so that all ranks write about the same amount.

    A set of weights is one file, so one rank's. The moments (set ``OPTIMIZER``) are assigned parameter by parameter,
    the largest first, to the rank with the least to write.
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
    """Return the bytes of the buffers of a host's ranks, on the host with the most of them.

    Args:
        sizes: numbers of each parameter.
        averages: how many averages are saved.
    """
    weight_sets = [str(number) for number in range(1 + averages)]
    found = [0] * -(-ranks // ranks_of_a_host)
    for (which, name), rank in share_out(sizes, weight_sets, ranks).items():
        found[rank // ranks_of_a_host] += 4 * sizes[name] * (len(MOMENTS) if which == OPTIMIZER else 1)
    return max(found)


class WholeTensorFiles:
    """Copy and write one rank's files of a checkpoint of whole tensors.

    Attributes:
        version: the version in state.json.
        averages: the file of each average, the one to sample from first.
    """

    version = 2

    def __init__(self, engine: Engine, ema: EMA, channel: ControlGroup, enabled: bool = True):
        self.engine, self.ema, self.mesh = engine, ema, engine.mesh
        weights = [MODEL_SET, *average_sets(ema.decays)]
        self.averages = [name + WHOLE for name in weights[1:]]
        sizes = {name: math.prod(engine.shapes[name]) for name in engine.shapes}
        self._owner = share_out(sizes, weights, self.mesh.world_size)
        mine = [(which, name) for (which, name), rank in self._owner.items() if rank == self.mesh.rank]
        total = sum(sizes[name] * (len(engine.moments_of(name)) if which == OPTIMIZER else 1) for which, name in mine)
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
        """Write this rank's files. Return their entries of the manifest. Raises OSError."""
        run = folder.parent.parent
        return {name: write_tensors(folder / name, tensors, metadata, root=run) for name, tensors in files.items()}

    def finish(self, folder: Path, step: int, metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Write the remaining files on rank 0, after all ranks have written. Return as :meth:`write`."""
        return {}


# ------------------------------------------------------------------------------------------ files of shards


def written_part(layout: Layout, name: str) -> Shard:
    """Return the part of a parameter that this rank writes: its shard, or an even part of one that others hold too."""
    holders = layout.replicas(name)
    return layout.local(name).flat_part(holders.index(layout.mesh.rank), len(holders))


def _joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the union of dictionaries in which equal keys have equal values."""
    return {key: value for part in parts for key, value in part.items()}


class ShardFiles:
    """Copy and write one rank's files of a checkpoint of shards.

    Args:
        channel: tells the ranks, once, what each of them holds and writes.

    Attributes:
        version: the version in state.json.
        averages: the index of each average, the one to sample from first.

    Raises:
        ValueError: on every rank, unless the ranks together hold every element of each parameter once.
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
        moments = {name: engine.moments_of(name) for name in engine.shapes}
        # Ranks of a pipeline know only the parameters of their own stages.
        everywhere = channel.gather((shapes, moments, buffers))
        self._trained, self._moments, all_buffers = (_joined(each) for each in zip(*everywhere, strict=True))
        self._buffers = []
        for number, name in enumerate(all_buffers):
            holders = [rank for rank, (*_, held) in enumerate(everywhere) if name in held]
            self._buffers += [name] if holders[number % len(holders)] == self.mesh.rank else []
        mine = {name: part for name, part in self._parts.items() if part.numel}
        mine |= {name: Shard(buffers[name][1], ()) for name in self._buffers}
        self._held = channel.gather(mine)
        self._shapes = self._trained | all_buffers
        self._mine = {name: (self._shapes[name][1], part) for name, part in mine.items()}
        self._index(MODEL_SET, 0, {}).check_cover()
        total = sum(part.numel * (len(weights) + len(moments[name])) for name, part in self._parts.items())
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
        """Write this rank's files. Return their entries of the manifest. Raises OSError."""
        written = {}
        for which in self._sets:
            name = self._file(which)
            if name in files:
                said = shard_metadata(which, step, {key: self._mine[key] for key in files[name]})
                written[name] = write_tensors(folder / name, files[name], said, root=folder.parent.parent)
        return written

    def finish(self, folder: Path, step: int, metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Write the indices on rank 0, after all ranks have written. Return as :meth:`write`."""
        written = {}
        for which in self._sets:
            text = index_text(self._index(which, step, metadata if which in self._weights else {}))
            path = folder / (which + SHARDS)
            written[path.name] = write_file(path, iter([text.encode()]), root=folder.parent.parent)
        return written

    def _file(self, which: str) -> str:
        return shard_file(which, self.mesh.rank, self.mesh.world_size)

    def _index(self, which: str, step: int, metadata: dict[str, str]) -> ShardIndex:
        """Return the index of a set, the same on every rank."""
        tensors = {}
        for name, (dtype, shape) in self._shapes.items():
            if which in (self._weights if name not in self._trained else [*self._weights, *self._moments[name]]):
                holders = [(rank, held[name]) for rank, held in enumerate(self._held) if name in held]
                shards = {shard_file(which, rank, self.mesh.world_size): shard for rank, shard in holders}
                tensors[name] = ShardedTensor(dtype, shape, shards)
        return ShardIndex(which, step, tensors, metadata)


# ------------------------------------------------------------------------------------------ folders


def incomplete(final: Path) -> Path:
    """Return the folder that a checkpoint is written to until it is complete."""
    return final.with_name(f".{final.name}.incomplete")


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def put_in_place(final: Path) -> OSError | None:
    """Rename a complete checkpoint to its final name, then move ``latest``. At every moment there is one to load.

    Returns the error if ``latest`` could not be moved, which does not harm the checkpoint, else None. Raises OSError
    if the checkpoint could not be renamed.
    """
    run = final.parent.parent
    if os.path.lexists(final):  # of an abandoned attempt: the run was resumed from before this step; may be damaged
        remove_tree(_replaced(final), root=run)
        rename(final, _replaced(final), root=run)
    rename(incomplete(final), final, root=run)
    try:
        point_to(final.with_name(LATEST), final)
        problem = None
    except OSError as error:
        problem = error
    sync_folder(final.parent, root=run)
    remove_tree(_replaced(final), root=run)
    return problem


def tidy(checkpoints: Path, in_use: Path | None = None) -> Path | None:
    """Remove what a killed save or deletion left behind. Return where the checkpoint ``in_use`` is now.

    Call on one rank, while nothing is being saved.
    """
    run = checkpoints.parent
    for left in (*checkpoints.glob(".step_*.incomplete"), *checkpoints.glob(".step_*.deleted")):
        remove_tree(left, root=run)
    for left in checkpoints.glob(".step_*.replaced"):
        final = step_folder(checkpoints, step_of(left))
        if left == in_use:  # what replaced it is damaged, or was never complete
            remove_tree(final, root=run)
        if os.path.lexists(final):
            remove_tree(left, root=run)
        else:
            rename(left, final, root=run)
            in_use = final if left == in_use else in_use
    return in_use


def prune(
    checkpoints: Path, keep: int, newest: Path, kept: Collection[Path | None], keep_averages: bool = False
) -> None:
    """Delete all but the ``keep`` newest checkpoints up to ``newest``, never one of ``kept``. With 0 none is deleted.

    Checkpoints of later steps, from an attempt that was abandoned by resuming before them, stay until these steps are
    saved again.

    keep_averages: their averages stay, in the run's folder ``averages``.
    """
    found = (path for path in checkpoints.glob("step_*") if 0 <= step_of(path) <= step_of(newest))
    for old in sorted(found, key=step_of, reverse=True)[keep:] if keep else ():
        if old not in kept:
            gone = old.with_name(f".{old.name}.deleted")  # renamed first: half a folder would be a damaged checkpoint
            with contextlib.suppress(OSError):
                rename(old, gone, root=checkpoints.parent)
                if keep_averages:
                    _move_averages(gone, checkpoints.parent, old.name)
                remove_tree(gone, root=checkpoints.parent)


def _move_averages(checkpoint: Path, run: Path, name: str) -> None:
    """Move the averages of a checkpoint to a run's folder of averages, under its name. Raises OSError."""
    for path in checkpoint.iterdir():
        if not path.name.startswith(AVERAGE_SET) and path.name not in (STATE, MANIFEST):
            remove(path, root=run)
    remove_tree(run / AVERAGES / name, root=run)  # of an abandoned attempt
    move_into(checkpoint, run / AVERAGES / name, root=run)


class BestCheckpoint:
    """Keep ``checkpoints/best`` at the checkpoint with the best value of one figure. Use it on one rank.

    Figures are compared only if they were measured in the same way on the same samples. After a resume, checkpoints of
    later steps are ignored, because these steps will be saved again.

    Args:
        checkpoints: the folder of the run's checkpoints, which may not be there yet.
        name: a figure of ``BEST``.
        of: identifies what the figure was measured on: ``fingerprint["validation"]`` of a checkpoint for the held-out
            loss, ``evaluation["of"]`` for all others.
        last: the step that the run is resumed from.

    Attributes:
        folder: the best checkpoint; None while none has such a figure.
        figure: its value.
    """

    def __init__(self, checkpoints: Path, name: str, of: str, last: int):
        self._of, self._less, self._of_samples = of, BEST[name], name != "val_loss"
        self._name = name
        self.folder, self.figure = None, math.inf if self._less else -math.inf
        for folder in sorted(checkpoints.glob("step_*"), key=step_of):
            if 0 <= step_of(folder) <= last:
                try:
                    self.take(folder, read_state(folder))
                except ValueError:  # damaged; --load would report it
                    continue

    def saved(self, checkpoints: Path, state: dict[str, Any]) -> None:
        """Compare a checkpoint that has just been saved with this state. Raises OSError if the link can't be moved."""
        self.take(step_folder(checkpoints, state["step"]), state)
        if self.folder is not None:  # even if it is an old one: before a resume the link may have been at another
            point_to(checkpoints / BEST_LINK, self.folder)

    def take(self, folder: Path, state: dict[str, Any]) -> None:
        """Make a checkpoint the best one if its figure is better. folder, state: of the checkpoint."""
        if self._of_samples:
            evaluation = state.get("evaluation", {"of": None, "figures": {}})
            figure, of = evaluation["figures"].get(self._name), evaluation["of"]
        else:
            figure, of = state.get(self._name), state.get("fingerprint", {}).get("validation")
        if figure is None or of != self._of:
            return
        if figure < self.figure if self._less else figure > self.figure:
            self.folder, self.figure = folder, figure


# ------------------------------------------------------------------------------------------ the saves of a run


class Checkpoints:
    """Save checkpoints of one run, at most one at a time. Build and call it on every rank.

    A context manager: on exit it waits for the write in progress and frees the host memory. After an error it waits
    ``CLOSING`` seconds at most; then the write is abandoned, and the checkpoint before it stays the newest.

    Args:
        folder: the run's checkpoints/ folder.
        info: the metadata of the weights files (model, config, class names, VAE, ...).
        keep: how many to keep, 0 for all.
        in_use: the checkpoint that this run was resumed from; it is not deleted.
        sharded: True if every rank writes its own shards, False for whole tensors.
        enabled: False for a run that saves nothing, which then needs no host memory for it.
        write_failures: counts failures with ``latest`` and ``best``, which do not harm the checkpoints themselves.
        best: keeps the best checkpoint beside the newest ones; None to keep only these.

    Attributes:
        failures: a message for every save that failed, on every rank.
        newest: the last complete checkpoint of this run, on every rank.
        stall_s: seconds for which the last save stopped training.
        write_s: seconds that its writing took.
    """

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        ema: EMA,
        info: dict[str, Any],
        *,
        keep: int = 0,
        in_use: Path | None = None,
        sharded: bool = False,
        enabled: bool = True,
        write_failures: WriteFailures | None = None,
        best: BestCheckpoint | None = None,
    ):
        self.folder, self.info, self.keep, self.in_use = folder, info, keep, in_use
        self.enabled = enabled
        self._best = best
        self._write_failures = write_failures or WriteFailures()
        self.engine, self.ema, self.mesh = engine, ema, engine.mesh
        self.failures: list[str] = []
        self.newest: Path | None = in_use
        self.stall_s = self.write_s = 0.0
        self._channel = ControlGroup(self.mesh)  # the writing threads'
        self._thread: threading.Thread | None = None
        kind = ShardFiles if sharded else WholeTensorFiles
        self._kind = kind(engine, ema, self._channel, enabled)
        if self.mesh.is_main:
            self.in_use = self.newest = tidy(folder, in_use)
        self.mesh.barrier()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon(CLOSING)
            return
        self.wait()
        self._kind.buffer.free()

    def abandon(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the write in progress, because the run has failed."""
        if self._thread is not None:
            self._thread.join(seconds)

    @property
    def host_bytes(self) -> int:
        """Size of this rank's buffer in host memory."""
        return self._kind.buffer.bytes

    def save(self, state: dict[str, Any]) -> None:
        """Copy the run's state and start to write it, after the save before has ended.

        Args:
            state: ``state["step"]`` and whatever else the loop needs to resume.
        """
        started = time.perf_counter()
        self.wait()
        files = self._kind.copy()
        full = {
            **state,
            "version": self._kind.version,
            "model": self.info["model"],
            "optimizer_steps": self.engine.optimizer_steps(),
            "scaler": self.engine.scaler_state(),
            "ema": {
                "files": dict(zip(self._kind.averages, self.ema.decays, strict=True)),
                "updates": int(self.ema.updates),
            },
        }
        if self.ema.power:
            self.ema.snapshots.append(state["step"])
            full["ema"]["snapshots"] = list(self.ema.snapshots)
        # A daemon: when a rank dies, the other ranks' threads wait for it forever and must not keep processes alive.
        self._thread = threading.Thread(target=self._write, args=(files, full), name="checkpoint", daemon=True)
        self._thread.start()
        self.stall_s = time.perf_counter() - started

    def refuse(self, step: int, why: str) -> None:
        """Count a save that must not be made as one that failed. Call it on every rank."""
        self.wait()
        self._failed(step, why, "")

    def wait(self) -> None:
        """Wait until the write in progress, if there is one, has succeeded or failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ------------------------------------------------------------------ the writing, in a thread of its own

    def _write(self, files: Files, state: dict[str, Any]) -> None:
        started, step = time.perf_counter(), state["step"]
        final = step_folder(self.folder, step)
        try:
            problem = self._write_together(final, files, state)
        except Exception as error:  # of the control group: a rank is gone, so the others can't continue
            problem = f"the ranks lost each other ({error})"
        self.write_s = time.perf_counter() - started
        if problem is None:
            self.newest = final
            if self.mesh.is_main:
                times = self.stall_s, self.write_s
                logger.info("step %d: saved %s (held up %.2f s, written in %.1f s)", step, final, *times)
            return
        if self.mesh.is_main:
            remove_tree(incomplete(final), root=self.folder.parent)
        self._failed(step, problem)

    def _failed(self, step: int, problem: str, then: str = "training goes on, ") -> None:
        self.failures.append(f"step {step}: {problem}")
        if self.mesh.is_main:
            before = f"intact is {self.newest}" if self.newest else "there is no earlier one"
            message = "step %d: NOT SAVED, %s; %s; %sthe run's exit code will be 1"
            logger.warning(message, step, problem, before, then)

    def _write_together(self, final: Path, files: Files, state: dict[str, Any]) -> str | None:
        """Write a checkpoint on all ranks. Return None, or the first rank's error, the same text on every rank."""
        info = {**self.info, "step": state["step"], "version": self._kind.version}
        metadata, folder = {"format": "pt", METADATA_KEY: json.dumps(info)}, incomplete(final)
        step, written, problem, run = state["step"], {}, None, self.folder.parent
        try:
            for name, tensors in files.items():
                if bad := not_finite(tensors):
                    raise ValueError(f"{bad} in {name} is not finite")
            make_folder(folder, root=run)
            written = self._kind.write(folder, files, step, metadata)
        except Exception as error:  # of any kind: the other ranks must be told
            problem = f"rank {self.mesh.rank}: {error}"
        reports = self._channel.gather((written, problem))
        problem = next((text for _, text in reports if text), None)
        if problem is None and self.mesh.is_main:
            try:
                manifest = {name: entry for entries, _ in reports for name, entry in entries.items()}
                manifest |= self._kind.finish(folder, step, metadata)
                manifest[STATE] = write_file(folder / STATE, iter([json.dumps(state, indent=1).encode()]), root=run)
                write_manifest(folder, self._kind.version, manifest, root=run)
                sync_folder(folder, root=run)
                with self._write_failures.survive(f"checkpoints/{LATEST}", step):
                    if unlinked := put_in_place(final):
                        raise unlinked
                kept = {self.in_use}
                if self._best is not None:
                    with self._write_failures.survive(f"checkpoints/{BEST_LINK}", step):
                        self._best.saved(self.folder, state)
                    kept.add(self._best.folder)
                prune(self.folder, self.keep, final, kept, self.ema.power)
            except Exception as error:
                problem = f"rank 0: {error}"
        return self._channel.gather(problem)[0]
