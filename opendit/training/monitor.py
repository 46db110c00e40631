"""Log a run: progress bar, log.jsonl, TensorBoard and other loggers, throughput, MFU and memory."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from opendit.common.records import RecordFile, WriteFailures
from opendit.common.safe_files import open_to_append, refuse_links, write_whole
from opendit.data.progress import Progress
from opendit.parallel.mesh import Mesh
from opendit.training.loggers import Board, RunLogger


def allocation_retries() -> int:
    """Return how often torch's allocator ran out of memory, freed its cached blocks and tried again; 0 without a GPU.

    In each such case, the host has to wait for the device.
    """
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0


class MemoryPressure:
    """Detector of steps that wait for GPU memory. ``note`` returns a note once, after allocations were retried before
    each of ``LINES`` consecutive calls.

    Args:
        retries: function that returns how often this process has retried an allocation so far.
    """

    LINES = 2  # A single retry is normal in the first steps, or when a sample grid is drawn.

    def __init__(self, retries: Callable[[], int] = allocation_retries):
        self._retries, self._before, self._lines, self._said = retries, None, 0, False

    def note(self, steps: int) -> str | None:
        """Return a note if memory is nearly full, else None. Call after every ``steps`` steps."""
        now, before = self._retries(), self._before
        self._before = now
        if self._said or before is None:
            return None
        self._lines = self._lines + 1 if now > before else 0
        if self._lines < self.LINES:
            return None
        self._said = True
        return (
            f"note: the GPU's memory is nearly full: in the last {steps} steps torch had to free memory kept for "
            f"reuse {now - before} times, and training waited for it; a smaller --batch_size, --recompute cheap or, "
            "with --plugin fsdp, --offload average is likely to be faster"
        )


logger = logging.getLogger(__name__)

# Peak FLOP/s of the tensor cores for dense bf16/fp16 products, from the vendors' data sheets. For other GPUs, no MFU is
# logged.
PEAK_FLOPS = {
    "H200": 989.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.5e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
    "B200": 2250e12,
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak of one device in FLOP/s; None if the peak is unknown (CPUs, fp32, other GPUs)."""
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if all(word in name for word in key.split())), None)


class Monitor:
    """Context manager that logs a run. Ranks other than 0 write nothing; they only take part in sums over ranks.

    Args:
        folder: the run's folder.
        failures: counts failed writes and errors of a logger's library.
        loggers: constructors of further loggers, by name. Each logger gets the same values as TensorBoard.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        first_step: int,
        last_step: int,
        precision: str,
        failures: WriteFailures,
        loggers: Mapping[str, Callable[[], RunLogger]] = MappingProxyType({}),
    ):
        self.mesh = mesh
        self.peak = peak_flops(mesh.device, precision)
        self.data_wait = 0.0
        # sum and number of losses since the last line
        self._sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        self._steps, self._since = 0, time.perf_counter()
        self._samples, self._bytes, self._flops = 0, 0, 0.0
        self._peak_gib = 0.0  # peak memory before the last drawing, in GiB
        self._pressure = MemoryPressure()
        self._lines, self._last_step = 0, last_step
        self.last: dict[str, Any] = {}
        self.failures = failures
        if mesh.is_main:
            with failures.survive("log.jsonl"):
                keep_up_to(folder / "log.jsonl", first_step)
            self.log_file = RecordFile(folder / "log.jsonl")
            self.board = Board(folder / "tensorboard", first_step + 1, root=folder)
            self.boards: dict[str, Board | RunLogger] = {"TensorBoard": self.board}
            for name, logger in loggers.items():
                with self._survive(name):
                    self.boards[name] = logger()
            self._bar = Progress(last_step, "steps", initial=first_step)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def loader_wait(self, seconds: float) -> None:
        """Add the seconds that a step waited for its batch."""
        self.data_wait += seconds

    def count(self, samples: int, flops: float) -> None:
        """Add the number of samples of all ranks, and the FLOPs of this rank's samples.

        Ranks that share samples count the same FLOPs; the log divides by the number of such ranks.
        """
        self._samples += samples
        self._flops += flops

    def count_bytes(self, count: int) -> None:
        """Add the number of bytes that all ranks read from files and tars for their samples."""
        self._bytes += count

    def add(self, loss: torch.Tensor, finite: torch.Tensor) -> None:
        """Add one step's mean loss on this rank, unless the step was skipped. The host does not wait for the device.

        Args:
            loss: 0-dim, on the device.
            finite: 0-dim bool on the device; False if the step was skipped.
        """
        self._sums += torch.stack([torch.where(finite, loss, 0).double(), finite.double()])
        self._steps += 1
        if self.mesh.is_main:
            self._bar.update()

    def forget_drawing(self, trained: float) -> None:
        """Reset the peak memory after drawing samples, so that the run's peak excludes the drawing.

        The peak before the drawing is kept, because a CUDA graph allocates its memory only once, when it is recorded.

        Args:
            trained: ``allocated_gib()`` before the drawing.
        """
        self._peak_gib = max(self._peak_gib, trained)
        if self.mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    @contextlib.contextmanager
    def paused(self, really: bool = True) -> Iterator[None]:
        """Exclude the time of the block from the training time, after waiting for the device. If ``really`` is False,
        do nothing."""
        if not really:
            yield
            return
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def log(self, step: int, epoch: int, lr: float, grad_norm: float | None, **more: Any) -> dict[str, Any]:
        """Write one line of the log, and return its fields. Collective.

        The loss is the mean over all ranks and over all steps since the last line that were not skipped. It is None if
        all these steps were skipped.
        """
        total, count = self.mesh.sum(self._sums).tolist()
        loss = total / count if count else None
        now = time.perf_counter()
        rate = self._samples / (now - self._since)
        flops = self._flops / self.mesh.sharing / (now - self._since)
        cuda = self.mesh.device.type == "cuda"
        self.last = {
            "step": step,
            "epoch": epoch,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "samples_per_s": rate,
            "read_mb_per_s": self._bytes / 1e6 / (now - self._since),
            "tflops": flops / 1e12,
            "mfu": flops / self.peak if self.peak else None,
            "memory_gib": max(self._peak_gib, allocated_gib()) if cuda else resident_gib(),
            "data_wait_s": self.data_wait,
            **more,
            "failed_writes": self.failures.count,
        }
        self._lines += 1
        if self.mesh.is_main:
            # the second line is the first whose time excludes compilation and warm-up
            if self._lines == 2 and step < self._last_step:
                left, pace = self._last_step - step, (now - self._since) / self._steps
                self.say(f"step {step}: {left:,} steps left, {describe_hours(left * pace)} at {pace:.3g} s a step")
            with self.failures.survive("log.jsonl", step):
                self.log_file.append(json.dumps(self.last).encode() + b"\n")
            numbers = {k: v for k, v in self.last.items() if isinstance(v, int | float) and k not in ("step", "epoch")}
            self.scalars(dict[str, float](numbers), step)
            shown = {
                "loss": "-" if loss is None else f"{loss:.4f}",
                "img/s": f"{rate:.1f}",
            }
            if flops >= 5e10:  # smaller values would be shown as 0.0
                shown["TFLOP/s"] = f"{flops / 1e12:.1f}"
            if self.peak:
                shown["MFU"] = f"{self.last['mfu']:.1%}"
            self._bar.figures(shown)
            if note := self._pressure.note(self._steps):
                self.say(note)
        self._sums.zero_()
        self._steps, self._since, self.data_wait = 0, now, 0.0
        self._samples, self._bytes, self._flops = 0, 0, 0.0
        return self.last

    def say(self, text: str) -> None:
        """Log a line on rank 0."""
        if self.mesh.is_main:
            logger.info(text)

    def picture(self, path: Path, step: int, tag: str = "samples") -> None:
        """Show a PNG file in TensorBoard and the other loggers. Call on rank 0."""
        for name, board in self.boards.items():
            with self._survive(name, step):
                board.picture(tag, path.read_bytes(), step)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Add one point to each named curve in TensorBoard and the other loggers. Call on rank 0."""
        for name, board in self.boards.items():
            with self._survive(name, step):
                board.scalars(values, step)

    def close(self) -> None:
        if self.mesh.is_main:
            self._bar.close()
            with self.failures.survive("log.jsonl"):
                self.log_file.close()
            for name, board in self.boards.items():
                with self._survive(name):
                    board.close()

    @contextlib.contextmanager
    def _survive(self, name: str, step: int | None = None) -> Iterator[None]:
        """Count and suppress any exception, like ``failures.survive``, which handles only OSError. Other loggers may
        raise any error."""
        with self.failures.survive(name, step):
            try:
                yield
            except OSError:
                raise
            except Exception as error:
                raise OSError(f"{type(error).__name__}: {error}") from error


def describe_hours(seconds: float) -> str:
    """Format a duration: 9000 -> "about 2.5 hours"; durations below an hour are in minutes."""
    return f"about {seconds / 3600:,.1f} hours" if seconds >= 3600 else f"about {max(1, round(seconds / 60))} min"


def keep_up_to(log: Path, step: int) -> None:
    """Remove an incomplete last line of the log, and all lines after ``step``. Raises OSError.

    A killed run may have logged steps after its last checkpoint. The resumed run logs these steps again.
    """
    refuse_links(log.parent, [log.name])
    if not log.is_file():
        return
    lines = log.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _is_up_to(line, step)]
    if kept == lines[: len(kept)]:
        with open(open_to_append(log), "a+b") as file:
            file.truncate(sum(map(len, kept)))  # unlike rewriting, truncating works on a full disk
        return
    write_whole(log, b"".join(kept))


def _is_up_to(line: bytes, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError, RecursionError):  # the line was cut off when the run was killed
        return False


def allocated_gib() -> float:
    """Return the peak memory of tensors on this GPU in GiB; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def resident_gib() -> float:
    """Return the peak resident memory of this process in GiB (CPU runs)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
