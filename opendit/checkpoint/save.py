"""Save a run. Training waits only for the copy to host memory; a background thread writes the files.

With ``WholeTensorFiles``, one rank gathers and writes each file. The buffers of all ranks together hold (3 + averages)
x 4 bytes x parameters: 10.8 GB for DiT-XL/2 with one average. With ``ShardFiles``, every rank writes shards; ranks with
equal shards divide them. A checkpoint's folder gets its final name when all files are on the disk."""

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

from opendit.checkpoint import tensor_set
from opendit.checkpoint.ema import EMA
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.checkpoint.run_folders import AVERAGES, BEST_LINK, LATEST, MANIFEST, point_to, step_folder, step_of
from opendit.common.safe_files import WriteFailures, make_folder, move_into, remove, remove_tree, rename, sync_folder
from opendit.common.tensor_files import DTYPES, write_file, write_tensors
from opendit.config.names import BEST, SHARDS, WHOLE
from opendit.parallel.engines import MOMENTS, Engine
from opendit.parallel.host_memory import HostMemory
from opendit.parallel.layout import Shard
from opendit.parallel.mesh import ControlGroup
from opendit.parallel.supervisor import CLOSING

logger = logging.getLogger(__name__)

Files = dict[str, dict[str, Tensor]]  # one rank's files: file -> tensor's name -> tensor in host memory
THREADS = 4  # for copies within host memory; one thread does not use the full bandwidth
OPTIMIZER = "optimizer"


# ------------------------------------------------------------------------------------------ the copy in host memory


def state_tensors(engine: Engine, ema: EMA) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (set, parameter, this rank's shard) for masters, averages and moments. The order is equal on all ranks."""
    averages = tensor_set.average_sets(ema.decays)
    for name in engine.shapes:
        yield tensor_set.MODEL_SET, name, engine.master(name)
        for which, shards in zip(averages, ema.averages, strict=True):
            yield which, name, shards[name]
        for moment, shard in engine.moments(name).items():
            yield moment, name, shard


def buffers_of(engine: Engine) -> dict[str, Tensor]:
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
        """Start to copy a tensor into the buffer. Return the copy. It is complete after :meth:`wait`."""
        space = self._numbers[self._used : self._used + tensor.numel()].view(tensor.shape)
        self._used += tensor.numel()
        if tensor.device.type != "cpu" or self.device.type == "cpu":
            return space.copy_(tensor, non_blocking=True)
        self._threads = self._threads or ThreadPoolExecutor(THREADS, "save")
        self._copies.append(self._threads.submit(space.copy_, tensor))
        while len(self._copies) > THREADS:  # limits the memory of tensors that wait to be copied
            self._copies.popleft().result()
        return space

    def wait(self) -> None:
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
    """Map each (set, parameter) to the rank that writes the tensor. Ranks write about equal amounts.

    sizes: each parameter's number of elements. A set of weights is one file, so one rank writes it. Moments (set
    ``OPTIMIZER``) are assigned one by one, the largest first, to the rank with the least to write."""
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
    """Return the largest sum of save buffers on one host, in bytes. sizes: each parameter's number of elements."""
    weight_sets = [str(number) for number in range(1 + averages)]
    found = [0] * -(-ranks // ranks_of_a_host)
    for (which, name), rank in share_out(sizes, weight_sets, ranks).items():
        found[rank // ranks_of_a_host] += 4 * sizes[name] * (len(MOMENTS) if which == OPTIMIZER else 1)
    return max(found)


class WholeTensorFiles:
    """Copies and writes one rank's files for a checkpoint of full tensors. version: the version in state.json.
    averages: each average's file."""

    version = 2

    def __init__(self, engine: Engine, ema: EMA, enabled: bool):
        self.engine, self.ema, self.mesh = engine, ema, engine.mesh
        weights = [tensor_set.MODEL_SET, *tensor_set.average_sets(ema.decays)]
        self.averages = [name + WHOLE for name in weights[1:]]
        sizes = {name: math.prod(engine.shapes[name]) for name in engine.shapes}
        self._owner = share_out(sizes, weights, self.mesh.world_size)
        mine = [(which, name) for (which, name), rank in self._owner.items() if rank == self.mesh.rank]
        total = sum(sizes[name] * (len(engine.moments_of(name)) if which == OPTIMIZER else 1) for which, name in mine)
        self.buffer = HostBuffer(total if enabled else 0, self.mesh.device)

    def copy(self) -> Files:
        """Copy the tensors that this rank writes to host memory. All ranks must call this."""
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
        """Write this rank's files. Return their entries in the manifest. Raises OSError."""
        run = folder.parent.parent
        return {name: write_tensors(folder / name, tensors, metadata, root=run) for name, tensors in files.items()}


# ------------------------------------------------------------------------------------------ files of shards


def _joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


class ShardFiles:
    """Copies and writes one rank's files for a sharded checkpoint. version: the version in state.json.

    averages: each average's index file. channel: connects the ranks during the constructor. Raises ValueError, on every
    rank, unless each element of each parameter is written exactly once."""

    version = 3

    def __init__(self, engine: Engine, ema: EMA, enabled: bool, channel: ControlGroup):
        self.engine, self.ema, self.mesh = engine, ema, engine.mesh
        weights = [tensor_set.MODEL_SET, *tensor_set.average_sets(ema.decays)]
        self.averages = [name + SHARDS for name in weights[1:]]
        self._weights, self._sets = weights, [*weights, *MOMENTS]
        # the slices that this rank writes: ranks with equal shards divide the shard evenly
        holders = {name: engine.layout.replicas(name) for name in engine.shapes}
        places = {name: (ranks.index(self.mesh.rank), len(ranks)) for name, ranks in holders.items()}
        self._parts = {name: engine.layout.local(name).flat_part(*place) for name, place in places.items()}
        shapes = {name: ("F32", shape) for name, shape in engine.shapes.items()}
        buffers = {name: (DTYPES[b.dtype], tuple(b.shape)) for name, b in engine.module.named_buffers()}
        moments = {name: engine.moments_of(name) for name in engine.shapes}
        # with a pipeline, a rank knows only its stages' parameters
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
        self._index(tensor_set.MODEL_SET, 0, {}).check_cover()
        total = sum(part.numel * (len(weights) + len(moments[name])) for name, part in self._parts.items())
        self.buffer = HostBuffer(total if enabled else 0, self.mesh.device)

    def copy(self) -> Files:
        """Copy the tensors that this rank writes to host memory."""
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
        """Write this rank's files, and on rank 0 the indices. Return their entries in the manifest. Raises OSError."""
        written, run = {}, folder.parent.parent
        for which in self._sets:
            if (name := self._file(which)) in files:
                about = tensor_set.shard_metadata(which, step, {key: self._mine[key] for key in files[name]})
                written[name] = write_tensors(folder / name, files[name], about, root=run)
            if self.mesh.is_main:
                text = tensor_set.index_text(self._index(which, step, metadata if which in self._weights else {}))
                written[which + SHARDS] = write_file(folder / (which + SHARDS), iter([text.encode()]), root=run)
        return written

    def _file(self, which: str) -> str:
        return tensor_set.shard_file(which, self.mesh.rank, self.mesh.world_size)

    def _index(self, which: str, step: int, metadata: dict[str, str]) -> tensor_set.ShardIndex:
        tensors = {}
        for name, (dtype, shape) in self._shapes.items():
            if which in (self._weights if name not in self._trained else [*self._weights, *self._moments[name]]):
                holders = [(rank, held[name]) for rank, held in enumerate(self._held) if name in held]
                shards = {tensor_set.shard_file(which, rank, self.mesh.world_size): shard for rank, shard in holders}
                tensors[name] = tensor_set.ShardedTensor(dtype, shape, shards)
        return tensor_set.ShardIndex(which, step, tensors, metadata)


# ------------------------------------------------------------------------------------------ folders


def incomplete(final: Path) -> Path:
    return final.with_name(f".{final.name}.incomplete")


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def put_in_place(final: Path) -> OSError | None:
    """Rename a complete checkpoint to its final name, then set ``latest``. A complete checkpoint exists at every
    moment. Return the error if ``latest`` can't be set, else None. Raises OSError if the renaming fails."""
    run = final.parent.parent
    if os.path.lexists(final):  # written before the run was resumed at an earlier step
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
    """Remove folders that a killed save or deletion left. Call on one rank, while no save is in progress.

    If a save was killed while replacing a checkpoint, the old checkpoint gets its name back. in_use: the checkpoint
    that the run resumed from. Return its present path."""
    run = checkpoints.parent
    for left in (*checkpoints.glob(".step_*.incomplete"), *checkpoints.glob(".step_*.deleted")):
        remove_tree(left, root=run)
    for left in checkpoints.glob(".step_*.replaced"):
        final = step_folder(checkpoints, step_of(left))
        if left == in_use:  # the run resumed from the replaced folder, because the new one is damaged
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
    """Delete checkpoints up to ``newest``, except the ``keep`` newest (0: all) and those in ``kept``.

    Later checkpoints remain. They were written before the run was resumed at an earlier step. keep_averages: move a
    deleted checkpoint's averages to the run's folder ``averages``."""
    found = (path for path in checkpoints.glob("step_*") if 0 <= step_of(path) <= step_of(newest))
    for old in sorted(found, key=step_of, reverse=True)[keep:] if keep else ():
        if old not in kept:
            gone = old.with_name(f".{old.name}.deleted")  # a half-deleted folder would look like a damaged checkpoint
            with contextlib.suppress(OSError):
                rename(old, gone, root=checkpoints.parent)
                if keep_averages:
                    _move_averages(gone, checkpoints.parent, old.name)
                remove_tree(gone, root=checkpoints.parent)


def _move_averages(checkpoint: Path, run: Path, name: str) -> None:
    """Move a checkpoint's averages to the folder ``name`` in the run's ``averages``. Raises OSError."""
    for path in checkpoint.iterdir():
        if not path.name.startswith(tensor_set.AVERAGE_SET) and path.name not in (tensor_set.STATE, MANIFEST):
            remove(path, root=run)
    remove_tree(run / AVERAGES / name, root=run)  # written before the run was resumed at an earlier step
    move_into(checkpoint, run / AVERAGES / name, root=run)


class BestCheckpoint:
    """Points the link ``checkpoints/best`` to the checkpoint with the best value of one metric. Use on one rank only.

    Values that were measured differently, or on other samples, are ignored.

    Args:
        name: a key of ``BEST``.
        of: identifier of the measurement, as checkpoints store it: ``fingerprint["validation"]`` for the held-out loss,
            ``evaluation["of"]`` for other metrics.
        last: the step at which the run resumes. Later checkpoints will be saved again, and are ignored.
    """

    def __init__(self, checkpoints: Path, name: str, of: str, last: int):
        self._of, self._less, self._of_samples = of, BEST[name], name != "val_loss"
        self._name = name
        self.folder, self.figure = None, math.inf if self._less else -math.inf
        for folder in sorted(checkpoints.glob("step_*"), key=step_of):
            if 0 <= step_of(folder) <= last:
                try:
                    self.take(folder, tensor_set.read_state(folder))
                except ValueError:  # --load would report the damage
                    continue

    def saved(self, checkpoints: Path, state: dict[str, Any]) -> None:
        """Compare a new checkpoint with the best one, and set the link. Raises OSError if the link can't be set."""
        self.take(step_folder(checkpoints, state["step"]), state)
        # set the link in any case, because a resumed run may find an outdated one
        if self.folder is not None:
            point_to(checkpoints / BEST_LINK, self.folder)

    def take(self, folder: Path, state: dict[str, Any]) -> None:
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
    """Saves a run's checkpoints, one at a time. All ranks must construct and call the object.

    On exit, the context manager waits for the write in progress and frees the host memory. After an error, it waits at
    most ``CLOSING`` seconds. An unfinished checkpoint is then lost, and the previous one remains the newest.

    Args:
        info: the metadata of the weights files (model, config, class names, VAE, ...).
        keep: number of checkpoints to keep; 0 keeps all.
        in_use: the checkpoint that this run resumed from. It is never deleted.
        sharded: True if every rank writes shards, False for full tensors.
        enabled: False for a run that saves nothing. No host memory is then allocated.
        write_failures: counts failures to set ``latest`` and ``best``. Checkpoints are intact despite such failures.
        before: the ``Checkpoints`` of the run's second network. This object then saves both networks. At every step,
            the second network's checkpoint is written first and deleted last.

    Attributes:
        failures: a message for every failed save, on every rank.
        newest: the run's last complete checkpoint, on every rank.
        stall_s, write_s: the last save's seconds: how long training stopped, and how long the files took.
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
        before: "Checkpoints | None" = None,
    ):
        self.folder, self.info, self.keep, self.in_use = folder, info, keep, in_use
        self.enabled = enabled
        self._best, self._before = best, before
        self._after: Path | None = None  # folder that gets its checkpoint after this one
        if before is not None:
            before._after = folder
        self._write_failures = write_failures or WriteFailures()
        self.engine, self.ema, self.mesh = engine, ema, engine.mesh
        self.failures: list[str] = []
        self.newest: Path | None = in_use
        self.stall_s = self.write_s = 0.0
        self._channel = ControlGroup(self.mesh)  # used by the writing threads
        self._thread: threading.Thread | None = None
        how = engine, ema, enabled
        self._kind = ShardFiles(*how, self._channel) if sharded else WholeTensorFiles(*how)
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
        if self._before is not None:
            self._before._kind.buffer.free()

    def abandon(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the write in progress. Call this after the run has failed."""
        if self._thread is not None:
            self._thread.join(seconds)

    @property
    def host_bytes(self) -> int:
        return self._kind.buffer.bytes + (0 if self._before is None else self._before.host_bytes)

    def save(self, state: dict[str, Any]) -> None:
        """Wait for the previous save, copy the run's tensors, and start to write the checkpoint. state: all values
        besides tensors that the training loop needs to resume, among them ``state["step"]``."""
        started = time.perf_counter()
        self.wait()
        if self._before is not None:
            self._before.save(state)
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
        # If a rank dies, all other ranks' threads wait forever. A daemon thread does not keep this process alive.
        self._thread = threading.Thread(target=self._write, args=(files, full), name="checkpoint", daemon=True)
        self._thread.start()
        self.stall_s = time.perf_counter() - started

    def refuse(self, step: int, why: str) -> None:
        """Record a failed save without writing anything. Call on every rank, if the present state must not be saved."""
        self.wait()
        self._failed(step, why, "")

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, files: Files, state: dict[str, Any]) -> None:
        started, step = time.perf_counter(), state["step"]
        final = step_folder(self.folder, step)
        try:
            problem = self._write_together(final, files, state)
        except Exception as error:  # the control group raises if a rank has died
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
        """Write a checkpoint on all ranks. Every rank returns None, or the lowest failed rank's error."""
        info = {**self.info, "step": state["step"], "version": self._kind.version}
        metadata, folder = {"format": "pt", METADATA_KEY: json.dumps(info)}, incomplete(final)
        step, written, problem, run = state["step"], {}, None, self.folder.parent
        try:
            if self._before is not None:
                self._before.wait()
                if self._before.newest != step_folder(self._before.folder, step):
                    raise ValueError("the other network was not saved")
            for name, tensors in files.items():
                if bad := tensor_set.not_finite(tensors):
                    raise ValueError(f"{bad} in {name} is not finite")
            make_folder(folder, root=run)
            written = self._kind.write(folder, files, step, metadata)
        except Exception as error:  # all ranks must know about any error
            problem = f"rank {self.mesh.rank}: {error}"
        reports = self._channel.gather((written, problem))
        problem = next((text for _, text in reports if text), None)
        if problem is None and self.mesh.is_main:
            try:
                manifest = {name: entry for entries, _ in reports for name, entry in entries.items()}
                text = json.dumps(state, indent=1)
                manifest[tensor_set.STATE] = write_file(folder / tensor_set.STATE, iter([text.encode()]), root=run)
                tensor_set.write_manifest(folder, self._kind.version, manifest, root=run)
                sync_folder(folder, root=run)
                with self._write_failures.survive(f"checkpoints/{LATEST}", step):
                    if unlinked := put_in_place(final):
                        raise unlinked
                kept = {self.in_use}
                if self._best is not None:
                    with self._write_failures.survive(f"checkpoints/{BEST_LINK}", step):
                        self._best.saved(self.folder, state)
                    kept.add(self._best.folder)
                if self._after is not None:
                    kept |= {self.folder / path.name for path in self._after.glob("step_*")}
                prune(self.folder, self.keep, final, kept, self.ema.power)
            except Exception as error:
                problem = f"rank 0: {error}"
        return self._channel.gather(problem)[0]
