"""Compare the speed of reading clips on one core with bare decord, and test long runs for leaks and hangs.

    python benchmarks/bench_reading.py [--rounds 30] [--only 320x240] [--save]
    python benchmarks/bench_reading.py --soak 20000

The comparison needs ``pip install decord2``. All variants open the same files and read the same frames with one
decoding thread.

decord alone returns full-size RGB frames. With "resized" it resizes frames during decoding, without a crop. With
"cropped" its frames get only the loader's crop and resize. The loader makes cropped, resized batches, in this process
and through a worker process, as uint8 (``as_bytes``) and as float32. With "small" it leaves enlarging to the GPU, as in
a run on a GPU.

Times are CPU seconds of all threads and processes involved. Memory traffic from other programs still affects them.
Therefore the variants take turns in every round, and the medians of the rounds' speeds and ratios are reported."""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import psutil
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

from benchmarks import results
from benchmarks.bench_decoders import CODECS, write
from opendit.data import BatchSchedule, build_dataset, build_loader
from opendit.data.captioned_media import TableRow, write_csv
from opendit.data.clips import clip_window, resize_and_crop
from opendit.data.digits import make_demo
from opendit.data.pictures_and_clips import MediaFiles
from opendit.diffusion.random import Stream, uniform

SEED, CLIP_FRAMES = 0, 120
BASELINES = {"decord": "bare decord", "resized": "decord resizing", "cropped": "decord + crop and resize"}
LOADERS = ("uint8", "float32", "worker", "small", "small worker")  # worker: uint8 from a worker process
SIDES = (*BASELINES, *LOADERS)


@dataclass(frozen=True)
class Case:
    """Clips of one kind, and how a run reads them. codec: a key of ``bench_decoders.CODECS``."""

    width: int
    height: int
    codec: str
    num_frames: int
    frame_interval: int
    image_size: int
    clips: int = 8

    @property
    def name(self) -> str:
        frames = f"{self.num_frames} x {self.frame_interval} frames"
        return f"{self.width}x{self.height} {self.codec}, {frames} to {self.image_size} px"


CASES = (
    *(Case(64, 64, codec, 8, 6, 16, clips=32) for codec in CODECS),
    Case(320, 240, "mpeg4", 16, 1, 256),  # like UCF101
    *(Case(320, 240, codec, 16, 3, 256) for codec in CODECS),
    *(Case(640, 360, codec, 16, 3, 256) for codec in CODECS),
    *(Case(1280, 720, codec, 16, 3, 256, clips=4) for codec in CODECS),
)


def write_clips(case: Case, folder: Path) -> Path:
    rows = []
    for number in range(case.clips):
        path = folder / f"{number}.{'avi' if case.codec == 'mpeg4' else 'mp4'}"
        write(str(path), case.width, case.height, case.codec, CLIP_FRAMES, number)
        rows.append(TableRow(path, f"clip {number}"))
    write_csv(folder / "clips.csv", rows)
    return folder / "clips.csv"


def bare_decord(paths: list[str], windows: list[list[int]], **size: int) -> None:
    import decord  # pyright: ignore[reportMissingImports]  # an optional package

    for path, indices in zip(paths, windows, strict=True):
        decord.VideoReader(path, num_threads=1, **size).get_batch(indices).asnumpy()


def cropped_decord(paths: list[str], windows: list[list[int]], size: int) -> None:
    import decord  # pyright: ignore[reportMissingImports]  # an optional package

    for path, indices in zip(paths, windows, strict=True):
        frames = decord.VideoReader(path, num_threads=1).get_batch(indices).asnumpy()
        resize_and_crop(torch.from_numpy(frames), size, as_bytes=True)


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds of processes with all their threads, with a resolution of 1 ns (psutil's is 10 ms)."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # clock ids of clock_getcpuclockid(3)


def measure(case: Case, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the frames per CPU second of every side in each round; an empty list if a side can't run."""
    data = build_dataset(
        str(write_clips(case, folder)),
        case.image_size,
        seed=SEED,
        use_video=True,
        num_frames=case.num_frames,
        frame_interval=case.frame_interval,
    )
    schedule = BatchSchedule(len(data), len(data), SEED)
    paths = list(cast(MediaFiles, data).paths)
    options: dict[str, Any] = dict(dp_rank=0, dp_size=1, batch_size=len(data))
    this = psutil.Process()
    workers, pids = {}, {}
    for name, enlarge in (("worker", True), ("small worker", False)):
        before = {child.pid for child in this.children()}
        workers[name] = build_loader(data, schedule, num_workers=1, as_bytes=True, enlarge=enlarge, **options)
        pids[name] = [child.pid for child in this.children() if child.pid not in before]
    inside = {
        "uint8": build_loader(data, schedule, num_workers=0, as_bytes=True, **options),
        "float32": build_loader(data, schedule, num_workers=0, **options),
        "small": build_loader(data, schedule, num_workers=0, as_bytes=True, enlarge=False, **options),
    }
    scale = case.image_size / min(case.width, case.height)
    size = {"width": round(case.width * scale), "height": round(case.height * scale)}

    def windows(step: int) -> list[list[int]]:
        starts = uniform(SEED, step, torch.arange(len(data)), Stream.CROP).tolist()
        found = [clip_window(CLIP_FRAMES, case.num_frames, case.frame_interval, start) for start in starts]
        return cast(list[list[int]], found)  # every clip is long enough

    frames, speeds = len(data) * case.num_frames, {name: [] for name in SIDES}
    # A worker must not read ahead while others are timed. After several requests its queue is full, and it idles.
    for worker in workers.values():
        for _ in range(4):
            next(worker)
    for step in range(rounds):
        rows, chosen = schedule.rows(step), windows(step)
        jobs = {
            "decord": lambda rows=rows, chosen=chosen: bare_decord([paths[row] for row in rows], chosen),
            "cropped": lambda rows=rows, chosen=chosen: cropped_decord(
                [paths[r] for r in rows], chosen, case.image_size
            ),
            "resized": lambda rows=rows, chosen=chosen: bare_decord([paths[row] for row in rows], chosen, **size),
        } | {name: loader.__next__ for name, loader in inside.items()}
        if case.image_size < 64:
            del jobs["resized"]  # decord 3.4 fails at 16 pixels
        for name in jobs if step % 2 else reversed(jobs):
            start = time.process_time()
            jobs[name]()
            speeds[name].append(frames / (time.process_time() - start))
        for name, worker in workers.items():
            _rest(pids[name])
            start = cpu_seconds([this.pid, *pids[name]])
            next(worker)
            taken = cpu_seconds([this.pid])
            _rest(pids[name])  # the worker reads one new batch; waiting takes no CPU time
            speeds[name].append(frames / (cpu_seconds(pids[name]) + taken - start))
    for loader in (*workers.values(), *inside.values()):
        loader.close()
    return speeds


def _rest(workers: list[int]) -> None:
    """Wait until the workers have nothing left to read."""
    idle = 0
    while idle < 3:
        before = cpu_seconds(workers)
        time.sleep(0.02)
        idle = idle + 1 if cpu_seconds(workers) - before < 0.001 else 0


def compare(rounds: int, save: bool, only: str = "") -> None:
    print(f"{'frames a processor second':50}" + "".join(f"{name:>13}" for name in SIDES))
    rows = []
    for case in (case for case in CASES if only in case.name):
        with tempfile.TemporaryDirectory() as folder:
            speeds = measure(case, Path(folder), rounds)
        print(f"{case.name:50}" + "".join(f"{_median(speeds[name]):13.0f}" for name in SIDES), flush=True)
        for baseline in BASELINES:
            ratios = (ratio(speeds[name], speeds[baseline]) for name in SIDES)
            print(f"    ratio to {baseline:37}" + "".join(f"{each:13.2f}" for each in ratios))
            if speeds[baseline]:
                rows += [_row(case, name, speeds, baseline) for name in LOADERS]
    if save:
        results.append(rows)


def _median(values: list[float]) -> float:
    return median(values) if values else float("nan")


def ratio(side: list[float], other: list[float]) -> float:
    """Return the median of the rounds' ratios. Within a round, other load on the machine slows both sides equally."""
    return _median([a / b for a, b in zip(side, other, strict=False)])


def _row(case: Case, name: str, speeds: dict[str, list[float]], baseline: str) -> dict:
    return {
        "bench": "reading",
        "case": f"{case.name} ({name})",
        "metric": "frames/s per core",
        "value": f"{_median(speeds[name]):.1f}",
        "baseline": BASELINES[baseline],
        "baseline_value": f"{_median(speeds[baseline]):.1f}",
        "ratio": f"{ratio(speeds[name], speeds[baseline]):.3f}",
    }


def broken_clips(folder: Path, good: Path) -> list[TableRow]:
    """Write a few files of every kind that can't be read, and return their rows."""
    data = good.read_bytes()
    contents = {
        "empty": b"",
        "text": b"no clip\n" * 100,
        "cut": data[: len(data) // 2],
        "zeros": data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    }
    rows = [TableRow(folder / "missing.mp4", "missing")]
    for name, content in contents.items():
        (folder / f"{name}.mp4").write_bytes(content)
        rows.append(TableRow(folder / f"{name}.mp4", name))
    return rows


def anonymous_mib(pid: int) -> float:
    """Return the MiB of heap and stacks.

    Private memory would be misleading. It also grows when pages shared since the fork are written, and when another
    process that maps torch's libraries ends."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def soak(reads: int, workers: int, sound_only: bool) -> None:
    """Read clips, some of them broken, for a long time, and watch the worker processes."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        demo = make_demo(folder, clips=200)
        rows = [TableRow(path, path.stem) for path in sorted((demo.parent / "clips").iterdir())]
        if not sound_only:  # decord leaks about 1 KB per file that it fails to open
            rows += broken_clips(folder, rows[0].path)
        write_csv(folder / "soak.csv", rows)
        data = build_dataset(str(folder / "soak.csv"), 64, seed=SEED, use_video=True, num_frames=16, frame_interval=3)
        batch = 8
        steps = -(-reads // batch)
        this, before = psutil.Process(), {child.pid for child in psutil.Process().children()}
        loader = build_loader(
            data,
            BatchSchedule(len(data), batch, SEED),
            dp_rank=0,
            dp_size=1,
            batch_size=batch,
            end_step=steps,
            num_workers=workers,
            max_bad=0.5,  # some clips are broken on purpose
        )
        children = [child for child in this.children() if child.pid not in before]
        begin, longest, seen = time.monotonic(), 0.0, []
        for step in tqdm(range(steps), desc="reading", unit=" batches", mininterval=5):
            asked = time.monotonic()
            next(loader)
            longest = max(longest, time.monotonic() - asked)
            if step in [steps * tenth // 10 for tenth in (1, 3, 5, 7)] or step == steps - 2 * workers - 2:
                memory = [anonymous_mib(child.pid) for child in children]
                seen.append(
                    (step * batch, memory, [c.num_threads() for c in children], [c.num_fds() for c in children])
                )
        seconds = time.monotonic() - begin
        print(f"{loader.read:,} reads, {loader.skipped:,} of them of broken files, in {seconds:.0f} s; ", end="")
        print(f"{steps:,} of {steps:,} batches came, the longest wait was {longest:.1f} s")
        for count, memory, threads, files in seen:
            shown = ", ".join(f"{m:.1f}" for m in memory)
            print(f"after {count:>7,}: MiB of each worker {shown}; threads {threads}; open files {files}")
        loader.close()
        left = [child.pid for child in children if child.is_running()]
        print(f"growth over the last nine tenths: {max(np.subtract(seen[-1][1], seen[0][1])):.1f} MiB; left: {left}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose names hold this text")
    parser.add_argument("--save", action="store_true", help="append the figures to benchmarks/results.csv")
    parser.add_argument("--soak", type=int, metavar="READS", help="read this many clips in worker processes instead")
    parser.add_argument("--workers", type=int, default=2, help="of --soak (default: 2)")
    parser.add_argument("--sound_only", action="store_true", help="no broken files among those of --soak")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if args.soak:
        soak(args.soak, args.workers, args.sound_only)
    else:
        compare(args.rounds, args.save, args.only)


if __name__ == "__main__":
    main()
