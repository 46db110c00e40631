"""Compare how many pictures per second one process reads from indexed tars, with webdataset, and from a folder.

    python benchmarks/bench_shards.py [--pictures 1000] [--rounds 20] [--save]

The files are JPEGs of 256 x 256 pixels. All sides crop, scale and convert them with the same functions. The indexed
tars and the folder are read in a shuffled order, as in training, and webdataset reads in the order of the tar. The
sides take turns in every round. The results are the median of each side's CPU time, and the median of the ratios within
a round, because other load on the machine slows all sides of a round equally. All files are in the page cache.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

from benchmarks import results
from opendit.data import MediaDataset, SampleKey, build_dataset
from opendit.data.base import SampleReader
from opendit.data.picture_file import center_crop, to_tensor
from opendit.data.shards.program import make_shards

SIDE = 256


def write_pictures(folder: Path, count: int, side: int = SIDE, processes: int = 1) -> None:
    """Write JPEGs into one folder for each of ten classes."""
    with ProcessPoolExecutor(processes) as pool:
        list(pool.map(write_picture, [folder] * count, range(count), [side] * count, chunksize=16))


def write_picture(folder: Path, number: int, side: int) -> None:
    """Write smooth colours with some noise, about as many bytes as a photograph of this size."""
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((side, side))
    noise = random.integers(0, 24, (side, side, 3), dtype=np.uint8)
    path = folder / str(number % 10) / f"{number:06d}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(coarse) // 2 + noise).save(path, quality=90)


def read_ours(dataset: MediaDataset, seed: int) -> int:
    """Read the pictures as uint8 in a shuffled order, and return their number."""
    order = np.random.default_rng(seed).permutation(len(dataset)).tolist()
    keys = [SampleKey(row, seed, index) for index, row in enumerate(order)]
    return sum(1 for _ in SampleReader(dataset, as_bytes=True).items(keys))


def read_webdataset(folder: Path, image_size: int) -> int:
    from webdataset.compat import WebDataset  # other benchmarks import only write_pictures

    tars = sorted(map(str, folder.glob("*.tar")))
    pipeline: Any = WebDataset(tars, shardshuffle=False, empty_check=False).decode("pilrgb").to_tuple("jpg", "cls")
    return sum(to_tensor(center_crop(image, image_size), False, True) is not None for image, _ in pipeline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--image_size", type=int, default=SIDE)
    parser.add_argument("--save", action="store_true", help="add the figures to benchmarks/results.csv")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pictures, tars = Path(folder, "pictures"), Path(folder, "tars")
        write_pictures(pictures, asked.pictures)
        tars.mkdir()
        make_shards(str(pictures), str(tars), shard_size=10**7, num_workers=1)
        size = sum(path.stat().st_size for path in pictures.rglob("*.jpg")) / asked.pictures
        print(f"{asked.pictures:,} JPEGs of {SIDE} px, {size / 1000:.1f} kB each; one process")
        indexed, plain = (build_dataset(str(path), asked.image_size, seed=0) for path in (tars, pictures))
        sides: dict[str, Callable[[int], int]] = {
            "shards": lambda seed: read_ours(indexed, seed),
            "webdataset": lambda seed: read_webdataset(tars, asked.image_size),
            "folder": lambda seed: read_ours(plain, seed),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in tqdm(range(asked.rounds + 1), disable=None):
            for name in np.roll(list(sides), turn).tolist():
                started = time.process_time()
                if (count := sides[name](turn)) != asked.pictures:
                    raise RuntimeError(f"{name} read {count:,} of {asked.pictures:,} pictures")
                if turn:  # the first turn opens files and imports modules
                    seconds[name].append((time.process_time() - started) / asked.pictures)
    speed = {name: 1 / median(times) for name, times in seconds.items()}
    ratios = {}
    for name in ("webdataset", "folder"):
        of_rounds = zip(seconds[name], seconds["shards"], strict=True)
        ratios[name] = median(other / ours for other, ours in of_rounds)
        print(f"shards {speed['shards']:.0f} pictures/s, {name} {speed[name]:.0f}: {ratios[name]:.3f} x")
    if asked.save:
        row = {"bench": "shards", "case": f"{SIDE} px JPEG to {asked.image_size} px, one process"}
        row |= {"metric": "pictures/s of processor time", "value": f"{speed['shards']:.0f}"}
        of_others = [
            {"baseline": name, "baseline_value": f"{speed[name]:.0f}", "ratio": f"{ratio:.3f}"}
            for name, ratio in ratios.items()
        ]
        results.append([row | other for other in of_others])


if __name__ == "__main__":
    main()
