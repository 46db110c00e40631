"""Saves a run: training waits only for the copy off the device, files are written in the background.

What each rank copies and writes is decided by one of two kinds: whole tensors (opendit/checkpoint/whole.py), or the
shards that it holds (opendit/checkpoint/shards.py). Either way a checksum covers what was in memory.
"""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opendit.checkpoint.best import BestCheckpoint
from opendit.checkpoint.checkpoint import STATE, incomplete, prune, put_in_place, step_folder, tidy
from opendit.checkpoint.copying import Files
from opendit.checkpoint.ema import EMA
from opendit.checkpoint.files import BEST_LINK, LATEST, not_finite, write_manifest
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.checkpoint.shards import ShardFiles
from opendit.checkpoint.whole import WholeTensorFiles
from opendit.common.records import WriteFailures
from opendit.common.safe_files import make_folder, remove_tree, sync_folder
from opendit.common.tensor_files import write_file
from opendit.parallel.control_group import ControlGroup
from opendit.parallel.engines import Engine
from opendit.parallel.supervisor import CLOSING


class Checkpoints:
    """Writes checkpoints of one run; build and call it on every rank. At most one is being written at a time.

    A context manager: leaving it waits for the write in flight and frees the host memory; no save after that. After an
    error it waits ``CLOSING`` seconds: a longer write is given up, and the checkpoint before stays the newest.

    Args:
        folder: the run's checkpoints/ folder.
        info: what the weights files say of themselves (model, config, class names, VAE, ...).
        keep: how many to keep, 0 for all.
        in_use: the checkpoint that this run was resumed from; it is not deleted.
        sharded: every rank writes its own shards, rather than whole tensors.
        say: shows a line to people; called from another thread.
        enabled: False for a run that saves nothing, which then needs no host memory for it.
        write_failures: counts what goes wrong beside the checkpoints themselves, with ``latest`` and ``best``.
        best: keeps the best checkpoint beside the newest ones; None: they alone are kept.

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
        info: dict[str, Any],
        *,
        keep: int = 0,
        in_use: Path | None = None,
        sharded: bool = False,
        say: Callable[[str], None] = print,
        enabled: bool = True,
        write_failures: WriteFailures | None = None,
        best: BestCheckpoint | None = None,
    ):
        self.folder, self.info, self.keep, self.in_use, self.say = folder, info, keep, in_use, say
        self.enabled = enabled
        self._best = best
        self._write_failures = write_failures or WriteFailures(say)
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
        """Waits only so long for the write in flight: the run has failed."""
        if self._thread is not None:
            self._thread.join(seconds)

    @property
    def host_bytes(self) -> int:
        """Size of this rank's buffer in host memory."""
        return self._kind.buffer.bytes

    def save(self, state: dict[str, Any]) -> None:
        """Takes a copy of everything and starts to write it; waits before that for the last save's end.

        Args:
            state: counters; ``state["step"]`` and what the loop needs to go on.
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

    # ------------------------------------------------------------------ the writing, in a thread of its own

    def _write(self, files: Files, state: dict[str, Any]) -> None:
        started, step = time.perf_counter(), state["step"]
        final = step_folder(self.folder, step)
        try:
            problem = self._write_together(final, files, state)
        except Exception as error:  # of the control group: a rank is gone, and the others can't go on either
            problem = f"the ranks lost each other ({error})"
        self.write_s = time.perf_counter() - started
        if problem is None:
            self.newest = final
            self._say(f"step {step}: saved {final} (held up {self.stall_s:.2f} s, written in {self.write_s:.1f} s)")
            return
        if self.mesh.is_main:
            remove_tree(incomplete(final), root=self.folder.parent)
        self._failed(step, problem)

    def _failed(self, step: int, problem: str, then: str = "training goes on, ") -> None:
        self.failures.append(f"step {step}: {problem}")
        before = f"intact is {self.newest}" if self.newest else "there is no earlier one"
        self._say(f"step {step}: NOT SAVED, {problem}; {before}; {then}the run's exit code will be 1")

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
        except Exception as error:  # whatever it is: the other ranks must hear of it
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
                prune(self.folder, self.keep, final, kept)
            except Exception as error:
                problem = f"rank 0: {error}"
        return self._channel.gather(problem)[0]

    def _say(self, text: str) -> None:
        if self.mesh.is_main:
            self.say(text)
