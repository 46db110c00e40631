"""Saves a run: training waits only for the copy off the device, files are written in the background.

The work is shared out by file: every file has one rank that writes it, so nothing is written by two machines, and a
checksum covers what was in memory. A rank that owns model.safetensors, an average, or some parameters' moments gathers
them parameter by parameter into one buffer in host memory, page-locked where there is a GPU. The buffers of all ranks
together hold (3 + averages) x 4 bytes x parameters, however many saves there are: for DiT-XL/2 10.8 GB.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from opendit.common.records import WriteFailures
from opendit.common.tensor_files import write_file, write_tensors
from opendit.parallel.control_group import ControlGroup
from opendit.parallel.engines import MOMENTS, Engine
from opendit.parallel.supervisor import CLOSING
from opendit.state.checkpoint import (
    FORMAT_VERSION,
    MODEL,
    STATE,
    average_files,
    incomplete,
    prune,
    put_in_place,
    step_folder,
    tidy,
)
from opendit.state.ema import EMA
from opendit.state.files import LATEST, not_finite, sync_folder, write_manifest
from opendit.state.pretrained import METADATA_KEY

OPTIMIZER = "optimizer"
Files = dict[str, dict[str, Tensor]]  # what one rank writes: file, name of the tensor, tensor


def share_out(sizes: dict[str, int], weight_files: list[str], ranks: int) -> dict[tuple[str, str], int]:
    """The rank that writes each (file, parameter), so that all write about as much.

    A weights file belongs to one rank; the moments (file ``OPTIMIZER``) go parameter by parameter, the biggest first,
    to the rank that has the least.
    """
    load, owner = [0] * ranks, {}

    def give(keys: list[tuple[str, str]], size: int) -> None:
        rank = load.index(min(load))
        load[rank] += size
        owner.update(dict.fromkeys(keys, rank))

    for file in weight_files:
        give([(file, name) for name in sizes], sum(sizes.values()))
    for name in sorted(sizes, key=sizes.get, reverse=True):
        give([(OPTIMIZER, name)], len(MOMENTS) * sizes[name])
    return owner


class Checkpoints:
    """Writes checkpoints of one run; build and call it on every rank. At most one is being written at a time.

    A context manager: leaving it waits for the write in flight and frees the host memory; no save after that. After an
    error it waits ``CLOSING`` seconds: a longer write is given up, and the checkpoint before stays the newest.

    Args:
        folder: the run's checkpoints/ folder.
        info: what the weights files say of themselves (model, config, class names, VAE, ...).
        keep: how many to keep, 0 for all.
        in_use: the checkpoint that this run was resumed from; it is not deleted.
        say: shows a line to people; called from another thread.
        enabled: False for a run that saves nothing, which then needs no host memory for it.
        write_failures: counts what goes wrong beside the checkpoints themselves, with ``latest``.

    Attributes:
        failures: a message for every save that failed, on every rank.
        newest: the last complete checkpoint of this run, on every rank.
        stall_s, write_s: seconds that the last save held training up, and that its writing took.
    """

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        ema: EMA,
        info: dict,
        *,
        keep: int = 0,
        in_use: Path | None = None,
        say: Callable[[str], None] = print,
        enabled: bool = True,
        write_failures: WriteFailures | None = None,
    ):
        self.folder, self.info, self.keep, self.in_use, self.say = folder, info, keep, in_use, say
        self._write_failures = write_failures or WriteFailures(say)
        self.engine, self.ema, self.mesh = engine, ema, engine.mesh
        self.failures: list[str] = []
        self.newest: Path | None = in_use
        self.stall_s = self.write_s = 0.0
        self._channel = ControlGroup(self.mesh)  # the writing threads'
        self._thread: threading.Thread | None = None
        self._averages = average_files(ema.decays)
        sizes = {name: torch.Size(shape).numel() for name, shape in engine.shapes.items()}
        self._owner = share_out(sizes, [MODEL, *self._averages], self.mesh.world_size)
        mine = [(file, name) for (file, name), rank in self._owner.items() if rank == self.mesh.rank]
        total = sum(sizes[name] * (len(MOMENTS) if file == OPTIMIZER else 1) for file, name in mine)
        self._buffer = _host_buffer(total if enabled else 0, self.mesh.device)
        if self.mesh.is_main:
            self.in_use = self.newest = tidy(folder, in_use)
        self.mesh.barrier()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:
            self.abandon(CLOSING)
            return
        self.wait()
        _page_unlock(self._buffer)

    def abandon(self, seconds: float) -> None:
        """Waits only so long for the write in flight: the run has failed."""
        if self._thread is not None:
            self._thread.join(seconds)

    @property
    def host_bytes(self) -> int:
        """Size of this rank's buffer in host memory."""
        return self._buffer.numel() * self._buffer.element_size()

    def save(self, state: dict) -> None:
        """Takes a copy of everything and starts to write it; waits before that for the last save's end.

        Args:
            state: counters; ``state["step"]`` and what the loop needs to go on.
        """
        started = time.perf_counter()
        self.wait()
        files = self._copy()
        full = {
            **state,
            "version": FORMAT_VERSION,
            "model": self.info["model"],
            "optimizer_steps": self.engine.optimizer_steps(),
            "scaler": self.engine.scaler_state(),
            "ema": {
                "files": dict(zip(self._averages, self.ema.decays, strict=True)),
                "updates": int(self.ema.updates),
            },
        }
        # A daemon: when a rank dies, the others' threads wait for it in vain and must not keep their processes alive.
        self._thread = threading.Thread(target=self._write, args=(files, full), name="checkpoint", daemon=True)
        self._thread.start()
        self.stall_s = time.perf_counter() - started

    def refuse(self, step: int, why: str) -> None:
        """Counts a save that must not be made as one that failed; call it on every rank."""
        self.wait()
        self._failed(step, why, "")

    def wait(self) -> None:
        """Until the write in flight, if any, has ended one way or the other."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ------------------------------------------------------------------ the copy, while training waits

    def _shards(self) -> Iterator[tuple[str, str, str, Tensor]]:
        """(file, parameter, name in the file, this rank's shard) of the whole state, in the same order on all ranks."""
        for name in self.engine.shapes:
            yield MODEL, name, name, self.engine.master(name)
            for file, shards in zip(self._averages, self.ema.averages, strict=True):
                yield file, name, name, shards[name]
            for moment, shard in self.engine.moments(name).items():
                yield OPTIMIZER, name, f"{moment}.{name}", shard

    def _copy(self) -> Files:
        rank, offset, files = self.mesh.rank, 0, {}
        for file, parameter, name, shard in self._shards():
            full = self.engine.layout.gather(parameter, shard)
            if self._owner[file, parameter] != rank:
                continue
            space = self._buffer[offset : offset + full.numel()].view(full.shape)
            offset += full.numel()
            space.copy_(full, non_blocking=True)
            path = f"{OPTIMIZER}_{rank:03d}.safetensors" if file == OPTIMIZER else file
            files.setdefault(path, {})[name] = space
        for path in files.keys() - {f"{OPTIMIZER}_{rank:03d}.safetensors"}:
            files[path].update({n: b.detach().to("cpu", copy=True) for n, b in self.engine.module.named_buffers()})
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        return files

    # ------------------------------------------------------------------ the writing, in a thread of its own

    def _write(self, files: Files, state: dict) -> None:
        started, step = time.perf_counter(), state["step"]
        final = step_folder(self.folder, step)
        try:
            problem = self._write_together(final, files, state)
        except Exception as error:  # of the side channel: a rank is gone, and the others can't go on either
            problem = f"the ranks lost each other ({error})"
        self.write_s = time.perf_counter() - started
        if problem is None:
            self.newest = final
            self._say(f"step {step}: saved {final} (held up {self.stall_s:.2f} s, written in {self.write_s:.1f} s)")
            return
        if self.mesh.is_main:
            shutil.rmtree(incomplete(final), ignore_errors=True)
        self._failed(step, problem)

    def _failed(self, step: int, problem: str, then: str = "training goes on, ") -> None:
        self.failures.append(f"step {step}: {problem}")
        before = f"intact is {self.newest}" if self.newest else "there is no earlier one"
        self._say(f"step {step}: NOT SAVED, {problem}; {before}; {then}the run's exit code will be 1")

    def _write_together(self, final: Path, files: Files, state: dict) -> str | None:
        """What went wrong on any rank, the same text on all of them; None if the checkpoint is in its place."""
        info = {**self.info, "step": state["step"], "version": FORMAT_VERSION}
        metadata, folder = {"format": "pt", METADATA_KEY: json.dumps(info)}, incomplete(final)
        written, problem = {}, None
        try:
            for name, tensors in files.items():
                if bad := not_finite(tensors):
                    raise ValueError(f"{bad} in {name} is not finite")
            folder.mkdir(parents=True, exist_ok=True)
            for name, tensors in files.items():
                written[name] = write_tensors(folder / name, tensors, metadata)
        except Exception as error:  # whatever it is: the other ranks must hear of it
            problem = f"rank {self.mesh.rank}: {error}"
        reports = self._channel.gather((written, problem))
        problem = next((text for _, text in reports if text), None)
        if problem is None and self.mesh.is_main:
            try:
                manifest = {name: entry for entries, _ in reports for name, entry in entries.items()}
                manifest[STATE] = write_file(folder / STATE, iter([json.dumps(state, indent=1).encode()]))
                write_manifest(folder, FORMAT_VERSION, manifest)
                sync_folder(folder)
                with self._write_failures.survive(f"checkpoints/{LATEST}", state["step"]):
                    if unlinked := put_in_place(final):
                        raise unlinked
                prune(self.folder, self.keep, final, self.in_use)
            except Exception as error:
                problem = f"rank 0: {error}"
        return self._channel.gather(problem)[0]

    def _say(self, text: str) -> None:
        if self.mesh.is_main:
            self.say(text)


def _host_buffer(numel: int, device: torch.device) -> Tensor:
    """(numel,) fp32 in host memory, page-locked for a GPU's copies; :func:`_page_unlock` undoes that."""
    buffer = torch.empty(numel, dtype=torch.float32)
    if device.type == "cuda" and numel:
        # Not pin_memory=True: torch's pinned allocator rounds up to a power of two, 16 GiB for 10.8 GB.
        size = buffer.numel() * buffer.element_size()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
    return buffer


def _page_unlock(buffer: Tensor) -> None:
    """The driver would take the pages for locked for ever: the next buffer at this address could not be."""
    if buffer.is_pinned():
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))
