"""Time updates of optimizer moments and averages in host memory, in place and through a ring buffer.

    python benchmarks/bench_offload.py --weights 500_000_000 [--results FILE]
    TRITON_INTERPRET=1 python benchmarks/bench_offload.py --weights 20_000 --repeat 1     (a CPU, to test this program)

Averages are updated alone, and then beside matrix products that take longer. The cost beside products is the time by
which the products become slower.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.results import append
from opendit.kernels import averages as averages_kernel
from opendit.kernels.adamw_ema import BLOCK, FusedStep, constant_decays
from opendit.kernels.averages import SeparateAverages
from opendit.parallel.host_memory import HostMemory, SideStream, padded

TENSORS = 16
PROGRAMS = (8, 16, 32, 64, 132, 264)


class State:
    """Master weights on the device, and moments and averages on the device or in host memory."""

    def __init__(self, weights: int, device: torch.device, averages: int):
        self.device, size = device, weights // TENSORS
        self.masters = [torch.randn(size, device=device) for _ in range(TENSORS)]
        self.gradients = [torch.randn(size, device=device).bfloat16() for _ in range(TENSORS)]
        self.count, self.updates = (torch.zeros((), device=device) for _ in range(2))
        self.decays = constant_decays([0.999] * averages, device)

    def rows(self, count: int, host: bool) -> tuple[Tensor, list[list[Tensor]]]:
        size = sum(padded(m.numel(), BLOCK) for m in self.masters)
        if not host:
            made = [[torch.zeros_like(m) for m in self.masters] for _ in range(count)]
            return torch.empty(0), made
        memory = HostMemory(count * size, self.device)
        made = [memory.take(self.masters, row * size, BLOCK)[0] for row in range(count)]
        return memory.numbers.view(count, size), made

    def step(self, host: bool, staged: bool, **options) -> FusedStep:
        rows, (exp_avgs, exp_avg_sqs) = self.rows(2, host)
        step = FusedStep(self.masters, exp_avgs, exp_avg_sqs, count=self.count)
        step.attach([], self.decays, self.updates)
        if staged:
            step.stage(rows, **options)
        step.decide(step.square_sum(self.gradients))
        return step

    def averages(self, count: int, staged: bool, **options) -> SeparateAverages:
        rows, made = self.rows(count, True)
        moved = SeparateAverages(self.masters, made, block=BLOCK)
        if staged:
            moved.stage(rows, **options)
        return moved


def milliseconds(device: torch.device, repeat: int, work: Callable[[], object], finish: Callable[[], None]) -> float:
    """Return the median time of ``repeat`` calls of ``work``. finish: waits for the work on other streams."""
    times = []
    for number in range(repeat + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        finish()
        synchronize(device)
        times += [1e3 * (time.perf_counter() - start)] * (number > 0)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def link(device: torch.device, repeat: int, numel: int) -> dict[str, float]:
    """Return the GB/s of copies to the device, back, and in both directions at once."""
    here, there = [torch.empty(numel, device=device) for _ in range(2)], HostMemory(2 * numel, device).numbers
    first, second = there.view(2, numel)
    side = SideStream(device)

    def back() -> None:
        second.copy_(here[1], non_blocking=True)

    def both() -> None:
        side.run(back)
        here[0].copy_(first, non_blocking=True)

    found = {}
    for name, work, size in (
        ("to the device", lambda: here[0].copy_(first, non_blocking=True), 4 * numel),
        ("back", back, 4 * numel),
        ("both at once", both, 8 * numel),
    ):
        found[name] = size / 1e6 / milliseconds(device, repeat, work, side.finish)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=500_000_000, help="that this rank steps")
    parser.add_argument("--averages", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--part", type=int, nargs="+", default=[1024, 4096, 16384], help="blocks of a staged part")
    parser.add_argument("--results", help="a CSV file to append to")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    state, rows = State(asked.weights, device, asked.averages), []
    case = f"{asked.weights / 1e6:,.0f} M weights, {asked.averages} averages"

    def told(metric: str, value: float, unit: str = "ms", baseline: tuple[str, float] | None = None) -> None:
        row = dict(bench="offload", case=case, metric=f"{metric}, {unit}", value=round(value, 2))
        if baseline is not None:
            row |= dict(baseline=baseline[0], baseline_value=round(baseline[1], 2))
        rows.append(row)
        print(f"{metric:60} {value:10.2f} {unit}", flush=True)

    for name, rate in link(device, asked.repeat, max(asked.weights // 4, 1)).items():
        told(f"copies {name}", rate, "GB/s")

    def stepped(host: bool, staged: bool, **options) -> float:
        step = state.step(host, staged, **options)
        return milliseconds(device, asked.repeat, lambda: step.update(lr=1e-4), step.access.finish)

    told("update, moments on the device", none := stepped(False, False))
    told("update, moments in host memory, in place", stepped(True, False), baseline=("on the device", none))
    for part in asked.part:
        told(f"update, staged in parts of {part} blocks", stepped(True, True, part=part))

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(*factors, out=product)

    side = SideStream(device)
    size = 8192 if device.type == "cuda" else 64
    factors = [torch.randn(size, size, device=device).bfloat16() for _ in range(2)]
    product = torch.empty_like(factors[0])
    one = milliseconds(device, asked.repeat, lambda: products(10), side.finish) / 10
    scalars = state.step(False, False).scalars

    def moved(name: str, averages: SeparateAverages) -> None:
        def finish() -> None:
            side.finish()
            averages.access.finish()

        def beside() -> None:
            side.run(lambda: averages.move(scalars))
            products(enough)

        alone = milliseconds(device, asked.repeat, lambda: side.run(lambda: averages.move(scalars)), finish)
        enough = min(int(1.5 * alone / one) + 1, 1000)
        bare = milliseconds(device, asked.repeat, lambda: products(enough), side.finish)
        together = milliseconds(device, asked.repeat, beside, finish)
        told(f"averages, {name}, alone", alone)
        told(f"  products beside ({enough}), added time", together - bare, baseline=("products alone", bare))

    for programs in PROGRAMS:
        averages = state.averages(asked.averages, False)
        averages.programs = programs
        moved(f"in place by {programs} programs", averages)
    for part in asked.part:
        moved(f"staged in parts of {part} blocks", state.averages(asked.averages, True, part=part))
    print(f"(a run takes {averages_kernel.PROGRAMS} programs)")
    if asked.results:
        append(rows, asked.results)


if __name__ == "__main__":
    main()
