"""Profile a few training steps (--profile): write a trace, and a table of times by kind of work."""

import gzip
import logging
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from opendit.common.safe_files import WriteFailures, replacing, write_whole

WARMUP, STEPS = 8, 3  # steps before the recording (the last two warm up the profiler), and recorded steps

logger = logging.getLogger(__name__)

# Kind of work -> patterns of kernel names (GPU) or operator names (CPU). The first matching kind counts.
KINDS = (
    ("communication", r"nccl|c10d::|gloo|symm_mem"),
    ("attention", r"attention|flash|fmha|sdpa|cudnn_generated"),
    (
        "matrix products",
        r"gemm|nvjet|cutlass|cublas|xmma|splitk|addmm|::mm$|::bmm|matmul|convolution|conv2d|conv3d|wgrad",
    ),
    ("optimizer and EMA", r"^_update_kernel|^_square_sum_kernel|multi_tensor|adam|_foreach"),
    ("fused kernels", r"^_\w+_kernel$|opendit::"),
    ("compiled", r"^triton_"),
    ("copies", r"memcpy|memset|copy|::to$|::cat$|clone|fill|zero_"),
    ("other", r""),
)


class Work(NamedTuple):
    """A kernel or operator: microseconds and number of calls in the recorded steps."""

    name: str
    time: float
    count: int


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def table(works: Iterable[Work], steps: int, longest: int = 12) -> str:
    """Return a table of mean times per step, by kind of work and for the ``longest`` kernels or operators. steps:
    number of recorded steps."""
    works = list(works)
    total = sum(work.time for work in works) or 1.0

    def line(name: str, some: list[Work]) -> str:
        time = sum(work.time for work in some)
        return f"{time / steps / 1e3:10.3f} {time / total:7.1%} {sum(work.count for work in some) / steps:9.0f}  {name}"

    lines = [f"{'ms a step':>10} {'share':>7} {'launches':>9}  kind of work"]
    by_kind = [(kind, [work for work in works if kind_of(work.name) == kind]) for kind, _ in KINDS]
    by_kind.sort(key=lambda pair: -sum(work.time for work in pair[1]))
    lines += [line(kind, some) for kind, some in by_kind if some]
    lines += [line("all", works), "", f"{'ms a step':>10} {'share':>7} {'launches':>9}  the longest"]
    lines += [line(work.name[:100], [work]) for work in sorted(works, key=lambda work: -work.time)[:longest]]
    return "\n".join(lines)


class StepProfiler:
    """Context manager that profiles a few steps, if ``wanted``, and writes trace.json.gz and table.txt into ``folder``.
    Call :meth:`step` after every step. A run with too few ``steps``, or that ends too early, warns and writes
    nothing."""

    def __init__(
        self, wanted: bool, folder: Path, device: torch.device, steps: int, failures: WriteFailures | None = None
    ):
        self.folder, self.cuda = folder, device.type == "cuda"
        self._failures = failures or WriteFailures()
        self._profile, self._steps = None, 0
        if wanted and steps < WARMUP + STEPS:
            self._say_too_short(steps)
        elif wanted:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
            when = schedule(wait=WARMUP - 2, warmup=2, active=STEPS, repeat=1)
            self._profile = profile(activities=activities, schedule=when, on_trace_ready=self._write)
            self._profile.start()

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._profile = None  # the last recorded step is incomplete

    def step(self) -> None:
        if self._profile is None:
            return
        self._steps += 1
        # only kernels of recorded steps may count
        if self.cuda and self._steps in (WARMUP, WARMUP + STEPS):
            torch.cuda.synchronize()
        self._profile.step()

    def close(self) -> None:
        running, self._profile = self._profile, None
        if running is None:
            return
        running.stop()
        if self._steps < WARMUP + STEPS:
            self._say_too_short(self._steps)

    def _say_too_short(self, steps: int) -> None:
        logger.warning(
            f"note: --profile writes nothing: it records {STEPS} steps after a run's first {WARMUP}, and this one "
            f"takes {max(0, steps)}; let it take {WARMUP + STEPS} or more (--max_steps, --epochs)"
        )

    def _write(self, recorded: profile) -> None:
        if self._profile is None:  # close() ended the recording early
            return
        text, trace = table(works_of(recorded, self.cuda), STEPS), "(no trace)"
        with self._failures.survive("profile"):
            run = self.folder.parent
            write_whole(self.folder / "table.txt", (text + "\n").encode(), root=run, make=True)
            # the profiler also writes other files next to the trace
            with tempfile.TemporaryDirectory() as private:
                plain = Path(private, "trace.json")
                recorded.export_chrome_trace(str(plain))
                with replacing(self.folder / "trace.json.gz", root=run) as new, gzip.open(new, "wb") as packed:
                    with open(plain, "rb") as file:
                        shutil.copyfileobj(file, packed)
            trace = f"(trace: {self.folder / 'trace.json.gz'})"
        where = "the device" if self.cuda else "the host"
        logger.info(f"profile of {STEPS} steps, time on {where} {trace}:\n{text}")


def works_of(recorded: profile, cuda: bool) -> list[Work]:
    """Return a profile's kernels if ``cuda``, else the operators (self time)."""
    events = [event for event in recorded.key_averages() if not event.key.startswith("ProfilerStep")]
    if cuda:
        events = [event for event in events if event.device_type == DeviceType.CUDA]
        return [Work(event.key, event.self_device_time_total, event.count) for event in events]
    return [Work(event.key, event.self_cpu_time_total, event.count) for event in events if event.self_cpu_time_total]
