"""Measure the schedule that orders samples of a large data set: start-up time, memory, and time to begin an epoch.

    python benchmarks/bench_order.py [--rows 100000000] [--global_batch 256] [--save]

Only schedules are measured; no sample is read. Every case runs in a separate process. The rows' shape keys are mapped
from a file that is already in the page cache, as on a node with other ranks.

Cases "data set" also find the shapes of the rows (``shape_media``), from sizes that are mapped from a file. Cases
"tars" open indexed tars of 10,000 samples each, until the data set's identity, which checkpoints store, is known. In
"mixed" tars every tenth sample is a clip. "held out" applies --validate_share 0.01. If the first start of a case writes
a cache, it is measured separately from later starts.

The figures are:

    start        until the rows of the first step and the number of steps in an epoch are known
    private      private memory according to smaps, without what imports take
    new epoch    computing the rows of an epoch's first step; the slowest of three epochs. For packs, which are planned
                 window by window, the slowest of 16 windows
"""

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

from benchmarks import results
from opendit.data import build_dataset
from opendit.data.base import Description, Fingerprint, MediaDataset, Shapes
from opendit.data.held_out import hold_out
from opendit.data.loader import build_schedule
from opendit.data.order import WINDOW, BatchSchedule, BlendSchedule, BucketSchedule, RowsByKey, SourceRows
from opendit.data.packs import SAMPLED, PackSchedule
from opendit.data.row_arrays import FOLDER
from opendit.data.shaped import Lengths, ShapedDataset, TokenSize, shape_media, shape_table
from opendit.data.shards.index import ROW, empty_header, index_of, write_index
from opendit.data.video_files import choose_reader

SHAPES = 12
TOKENS = 256 * np.arange(1, SHAPES + 1, dtype=np.int32)  # tokens of a sample of each shape
PACK_TOKENS, PACKS = 65536, 8  # tokens per pack; packs per step
PARTS = 8  # micro-batches per step, each of one shape
SIZES = "sizes.npy"
PLAIN, MIXED = "plain", "mixed"  # folders of tars
TAR_ROWS = 10_000
_CHUNK = 2**22


def _blend(rows: int) -> SourceRows:
    ends = (rows // 10, rows // 2, rows)
    return SourceRows(("a", "b", "c"), ends, ((0, (Fraction(1), Fraction(2), Fraction(3))),), rows)


class _Sized(MediaDataset):
    """Media with many sizes, mapped from a file."""

    def __init__(self, sizes: np.ndarray):
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def shapes(self) -> Shapes:
        return Shapes(media=lambda: self.sizes)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(lambda: f"{len(self)} rows")

    def describe(self) -> Description:
        return Description(text="media", class_names=["one"], sample_shape=(3, 256, 256), max_bad=0.0)

    def source(self, row: int) -> str:
        return str(row)


def _shaped(keys: np.ndarray) -> ShapedDataset:
    table = shape_table(256, 1, TokenSize(1, 1, (16, 16)), PACK_TOKENS)
    sizes = np.load(Path(str(cast(np.memmap, keys).filename)).with_name(SIZES), mmap_mode="r")
    return shape_media(_Sized(sizes), table, 1, 1.25, "--bucket_tokens")


def _tars(keys: np.ndarray, name: str, use_video: bool = False, share: float | None = None) -> MediaDataset:
    """Open tars and compute their identities. share: hold out this share of the samples."""
    folder = Path(str(cast(np.memmap, keys).filename)).with_name(name)
    dataset = build_dataset(str(folder), 256, seed=0, use_video=use_video)
    if share is not None:
        dataset, held = hold_out(dataset, share)
        held.fingerprint().identity  # noqa: B018
    dataset.fingerprint().identity  # noqa: B018
    return dataset


CASES: dict[str, Callable[[np.ndarray, int], BatchSchedule]] = {
    "plain": lambda keys, batch: BatchSchedule(len(keys), batch, 0),
    "blend": lambda keys, batch: BlendSchedule(_blend(len(keys)), batch, 1, 0),
    f"{SHAPES} shapes": lambda keys, batch: BucketSchedule(RowsByKey(keys), batch, PARTS, 0),
    f"{SHAPES} shapes, blend": lambda keys, batch: BlendSchedule(_blend(len(keys)), batch, PARTS, 0, keys),
    "packs": lambda keys, batch: PackSchedule(Lengths(keys, TOKENS), PACK_TOKENS, PACKS, 0, attention=6912.0),
    "data set in buckets": lambda keys, batch: build_schedule(_shaped(keys), 8, PARTS, 0, bucket_tokens=4096),
    "data set in packs": lambda keys, batch: build_schedule(
        _shaped(keys), PACKS, PARTS, 0, pack_tokens=PACK_TOKENS // 8, attention=6912.0
    ),
    "tars": lambda keys, batch: build_schedule(_tars(keys, PLAIN), batch, PARTS, 0),
    "tars, held out": lambda keys, batch: build_schedule(_tars(keys, PLAIN, share=0.01), batch, PARTS, 0),
    "mixed tars": lambda keys, batch: build_schedule(_tars(keys, MIXED, True), batch, PARTS, 0),
    "mixed tars, held out": lambda keys, batch: build_schedule(_tars(keys, MIXED, True, 0.01), batch, PARTS, 0),
    "pictures of mixed tars": lambda keys, batch: build_schedule(_tars(keys, MIXED), batch, PARTS, 0),
    "pictures of mixed tars, held out": lambda keys, batch: build_schedule(
        _tars(keys, MIXED, share=0.01), batch, PARTS, 0
    ),
}
FIRST = ("data set in buckets", "mixed tars", "mixed tars, held out")  # cases that write a cache at the first start


def private_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6


def measure(case: str, path: str, batch: int) -> tuple[float, float, float]:
    """Return (seconds of a start, private MB, milliseconds of a new epoch's first batch)."""
    choose_reader("auto")  # imports decoders
    before, began = private_mb(), time.perf_counter()
    schedule = CASES[case](np.load(path, mmap_mode="r"), batch)
    schedule.rows(0)
    schedule.steps(1)
    start, slowest = time.perf_counter() - began, 0.0
    for first in _first_steps(schedule):
        if not schedule.packed:
            schedule.rows(first - 2 * WINDOW)  # evicts this step, because rows of several steps are computed together
        again = time.perf_counter()
        schedule.rows(first)
        slowest = max(slowest, time.perf_counter() - again)
    return start, private_mb() - before, slowest * 1e3


def _first_steps(schedule: BatchSchedule) -> list[int]:
    if isinstance(schedule, PackSchedule):
        return [number * schedule.steps_per_window for number in range(SAMPLED, SAMPLED + 16)]
    return [schedule.steps(epoch) for epoch in (1, 2, 3)]


def write_keys(path: Path, rows: int) -> None:
    """Write each row's shape key and, in a second file, each row's size."""
    keys = np.lib.format.open_memmap(path, "w+", np.int16, (rows,))
    sizes = np.lib.format.open_memmap(path.with_name(SIZES), "w+", np.int32, (rows, 3))
    random = np.random.default_rng(0)
    table = np.array([(1, 240 + 40 * number, 640 - 20 * number) for number in range(SHAPES)], dtype=np.int32)
    for first in range(0, rows, _CHUNK):
        part = random.integers(0, SHAPES, len(keys[first : first + _CHUNK]), dtype=np.int16)
        keys[first : first + _CHUNK], sizes[first : first + _CHUNK] = part, table[part]
    keys.flush()
    sizes.flush()


def write_tars(folder: Path, rows: int, mixed: bool) -> None:
    """Write empty tars and their indexes. Tars, and the records of pictures, are sparse files of the right size."""
    folder.mkdir()
    records = np.zeros(TAR_ROWS, ROW)
    records["medium_at"], records["medium_bytes"] = 512 + 1536 * np.arange(TAR_ROWS), 400
    records["label"], records["number"] = np.arange(TAR_ROWS) % 1000, np.arange(TAR_ROWS)
    records["suffix"] = np.arange(TAR_ROWS) % 10 == 9
    for number, first in enumerate(range(0, rows, TAR_ROWS)):
        count, tar = min(TAR_ROWS, rows - first), folder / f"{number:05d}.tar"
        pictures = count - int(records["suffix"][:count].sum()) if mixed else count
        size = 1536 * count + 1024
        header = empty_header(size, f"{number:064x}", "").model_copy(
            update=dict(
                rows=count, pictures=pictures, conditioning="label", num_classes=1000, suffixes=[".jpg", ".mp4"]
            )
        )
        write_index(index_of(tar), header, records[:count] if mixed else records[:0], b"")
        if not mixed:
            os.truncate(index_of(tar), index_of(tar).stat().st_size + count * ROW.itemsize)
        with open(tar, "wb") as file:
            file.truncate(size)


def share(path: Path, held: ExitStack) -> None:
    """Read a complete file and keep it mapped, like another rank on the machine."""
    file = held.enter_context(open(path, "rb"))
    mapped = held.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    sum(mapped[place] for place in range(0, len(mapped), mmap.PAGESIZE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--global_batch", type=int, default=256)
    parser.add_argument("--save", action="store_true", help="add the figures to benchmarks/results.csv")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="these cases alone")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        print(*measure(asked.case, asked.keys, asked.global_batch))
        return
    cases = [case for case in CASES if case in (asked.only or CASES)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path, environment = Path(folder, "keys.npy"), {**os.environ, FOLDER: folder}
        write_keys(path, asked.rows)
        for name in (PLAIN, MIXED):
            if any("tars" in case for case in cases):
                write_tars(Path(folder, name), asked.rows, name == MIXED)
        mapped: set[Path] = set()
        with ExitStack() as shared:
            share(path, shared)
            starts = [(case, f"{case}, first start") for case in FIRST if case in cases]
            for case, title in (*starts, *((case, case) for case in cases)):
                command = [sys.executable, __file__, "--case", case, "--keys", str(path)]
                command += ["--global_batch", str(asked.global_batch)]
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
                start, private, batch = map(float, printed.split())
                print(f"{title}: start {start:.2f} s, private {private:.0f} MB, new epoch {batch:.1f} ms", flush=True)
                step = f"{PACKS} packs a step" if "packs" in case else f"global batch {asked.global_batch}"
                step = f"global batch {PACKS} of 4,096 tokens" if case == FIRST[0] else step
                row = {"bench": "order", "case": f"{title}, {asked.rows:,} rows, {step}"}
                found += [row | {"metric": "start s", "value": f"{start:.2f}"}]
                found += [row | {"metric": "private MB a rank", "value": f"{private:.0f}"}]
                found += [row | {"metric": "new epoch's first batch ms", "value": f"{batch:.1f}"}]
                if title != case:
                    for kept in sorted(set(Path(folder).glob("*.arrays/*.npy")) - mapped):
                        share(kept, shared)
                        mapped.add(kept)
    if asked.save:
        results.append(found)


if __name__ == "__main__":
    main()
