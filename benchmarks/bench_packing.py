"""Measure how full packs are, how evenly they load the ranks, and how long planning takes. Runs on a CPU.

    python benchmarks/bench_packing.py [--pack_tokens 65536] [--packs 8] [--ranks 8] [--steps 200] [--save]

Training's planner and two simple ones pack three mixes of lengths, from the same samples in the same order. Next-fit
closes a pack when the next sample does not fit. First-fit-decreasing packs the same windows as training, but does not
order the packs. Balance is the ranks' mean work divided by the busiest rank's, over all micro-batches. Work includes
the quadratic cost of attention.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

from benchmarks import results
from opendit.data.order import BatchSchedule
from opendit.data.packs import PackSchedule, work_of

WIDTH = 1152  # DiT-XL's; attention takes as long as the linear layers at 6 x WIDTH tokens
SAMPLES = 100_000


def _clips(random: np.random.Generator, count: int, low: int, high: int) -> np.ndarray:
    return 16 * random.integers(low // 16, high // 16 + 1, count)


def pictures_and_clips(random: np.random.Generator, count: int) -> np.ndarray:
    """Return lengths: 90 % pictures of 256 tokens, the rest clips of 2k to 32k."""
    return np.where(random.random(count) < 0.9, 256, _clips(random, count, 2048, 32768))


def uniform(random: np.random.Generator, count: int) -> np.ndarray:
    """Return uniform lengths of 256 to 32k tokens."""
    return _clips(random, count, 256, 32768)


def lognormal(random: np.random.Generator, count: int) -> np.ndarray:
    """Return lognormal lengths with a median of 2k tokens and a sigma of 1, clipped to 64 to 32k."""
    return np.clip(16 * np.round(random.lognormal(np.log(2048 / 16), 1, count)).astype(np.int64), 64, 32768)


MIXES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "pictures and clips": pictures_and_clips,
    "uniform": uniform,
    "lognormal": lognormal,
}


def balance(schedule: PackSchedule, lengths: np.ndarray, steps: range, ranks: int, attention: float) -> float:
    """Return the balance of micro-batches with one pack per rank."""
    work = work_of(lengths, attention)
    packs = []
    for step in steps:
        ends = schedule.ends(step)
        packs += np.add.reduceat(work[schedule.rows(step)], [0, *ends[:-1]]).tolist()
    return balance_of(np.array(packs), ranks)


def balance_of(work: np.ndarray, ranks: int) -> float:
    """Return the balance. work: (n,) each pack's work; ``ranks`` consecutive packs form a micro-batch."""
    together = work[: len(work) // ranks * ranks].reshape(-1, ranks)
    return float(together.mean(axis=1).sum() / together.max(axis=1).sum())


def next_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    packs, room = [[]], capacity
    for number, tokens in enumerate(lengths.tolist()):
        if tokens > room:
            packs.append([])
            room = capacity
        packs[-1].append(number)
        room -= tokens
    return packs[:-1]  # leave out the last pack, which is not full yet


def first_fit_decreasing(lengths: np.ndarray, capacity: int, window: int) -> list[list[int]]:
    """Pack ``window`` samples at a time, the longest first, each into the first pack with room."""
    packs = []
    for first in range(0, len(lengths) - window + 1, window):
        part = lengths[first : first + window]
        room, filled = np.empty(0, dtype=np.int64), []
        for number in np.argsort(-part, kind="stable").tolist():
            fits = np.flatnonzero(room >= part[number])
            if len(fits) == 0:
                room, fits = np.append(room, capacity), [len(room)]
                filled.append([])
            filled[fits[0]].append(first + number)
            room[fits[0]] -= part[number]
        packs += filled
    return packs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack_tokens", type=int, default=65536)
    parser.add_argument("--packs", type=int, default=8, help="of a step")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", action="store_true", help="add the figures to benchmarks/results.csv")
    asked = parser.parse_args()
    capacity, attention, rows = asked.pack_tokens, 6.0 * WIDTH, []
    for mix, make in MIXES.items():
        lengths = make(np.random.default_rng(0), SAMPLES)
        schedule = PackSchedule(lengths, capacity, asked.packs, 0, attention=attention)
        began = time.process_time()
        drawn = [schedule.rows(step) for step in range(asked.steps)]
        seconds = time.process_time() - began
        count = sum(map(len, drawn))
        fill = sum(lengths[step].sum() for step in drawn) / (asked.steps * asked.packs * capacity)
        even = balance(schedule, lengths, range(asked.steps), asked.ranks, attention)
        order = BatchSchedule(SAMPLES, 1, 0).rows_between(0, count)
        window = round(count / (asked.steps / schedule.steps_per_window))
        print(f"{mix}: {count:,} samples in {asked.steps * asked.packs:,} packs of {capacity:,} tokens")
        print(f"  planned   fill {fill:.4f}  balance {even:.4f}  {seconds / count * 1e6:.1f} us a sample")
        found = {"fill": fill, "balance": even}
        for name, packs in (
            ("next-fit", next_fit(lengths[order], capacity)),
            ("first-fit-decreasing", first_fit_decreasing(lengths[order], capacity, window)),
        ):
            ours = lengths[order]
            others = {
                "fill": sum(ours[pack].sum() for pack in packs) / (len(packs) * capacity),
                "balance": balance_of(np.array([work_of(ours[pack], attention).sum() for pack in packs]), asked.ranks),
            }
            print(f"  {name:22} fill {others['fill']:.4f}  balance {others['balance']:.4f}")
            case = f"{mix}, packs of {capacity}, {asked.packs} a step, {asked.ranks} ranks"
            for metric, value in found.items():
                row = {"bench": "packing", "case": case, "metric": metric, "value": f"{value:.4f}"}
                rows.append(row | {"baseline": name, "baseline_value": f"{others[metric]:.4f}"})
        row = {"bench": "packing", "case": case, "metric": "planning, us of processor time a sample"}
        rows.append(row | {"value": f"{seconds / count * 1e6:.1f}"})
    if asked.save:
        results.append(rows)


if __name__ == "__main__":
    main()
