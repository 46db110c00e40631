"""What ``preprocess.py look`` does: opens a share of a data set's rows, and shows what is in them."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opendit.common.replace import replacing
from opendit.data.apart import run_apart
from opendit.data.base import DataError, MediaDataset, name_few
from opendit.data.files import printable
from opendit.data.fill import MediumTokens
from opendit.data.latents_index import read_indexes
from opendit.data.look_page import THUMBNAIL, Findings, Look, draw_histograms, draw_sheet, make_page
from opendit.data.progress import Progress
from opendit.data.resolve import build_dataset

TIME_LIMIT = 60.0  # seconds for one row
SHEET, HISTOGRAMS, PAGE = "contact_sheet.png", "histograms.png", "look.html"


def run(
    data_path: str,
    output: str,
    *,
    samples: int = 1000,
    pictures: int = 48,
    image_size: int | None = None,
    num_frames: int | None = None,
    frame_interval: int | None = None,
    split: str = "train",
    energon_cooker: str | None = None,
    token_pixels: int = 16,
    token_frames: int = 1,
    num_workers: int = 2,
) -> None:
    """``preprocess.py look`` with its flags' values. Raises DataError, and writes nothing, if no row can be read."""
    dataset, video = open_any(data_path, image_size, num_frames, frame_interval, split, energon_cooker)
    found = look(dataset, samples, pictures, num_workers, MediumTokens(*video, token_pixels, token_frames))
    if not found.looks:
        raise DataError(f"no row of {data_path} can be read: {name_few(found.bad)}")
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    content = {SHEET: draw_sheet(found), HISTOGRAMS: draw_histograms(found)}
    content[PAGE] = make_page(found, content[SHEET], content[HISTOGRAMS]).encode("utf-8", "replace")
    for name, written in content.items():
        with replacing(folder / name) as new:
            new.write_bytes(written)
    print(dataset.describe())
    print(f"looked into {len(found.looks) + len(found.bad):,} of {len(dataset):,} rows, bad: {len(found.bad):,}")
    for bad in found.bad[:10]:
        print(f"  {bad}")
    if len(found.bad) > 10:
        print(f"  and {len(found.bad) - 10:,} more, in {folder / PAGE}")
    print(f"wrote {', '.join(str(folder / name) for name in content)}")


def open_any(
    data_path: str,
    image_size: int | None,
    num_frames: int | None,
    frame_interval: int | None,
    split: str,
    energon_cooker: str | None = None,
) -> tuple[MediaDataset, tuple[int, int, int]]:
    """The data set of ``--data_path``, with its clips if it has any, and (image_size, num_frames, frame_interval): what
    was given, else what cached latents were made at, else 256, 16, 1.

    Raises ValueError or FileNotFoundError, which name the flag."""
    made: dict[str, Any] = {}
    path = Path(data_path)
    if path.is_dir() and (indexes := read_indexes(path)) is not None:
        index = next((each for each in indexes if each["image_size"] == image_size), indexes[-1])
        made = {"image_size": index["image_size"], **(index.get("video") or {})}
    size = image_size or made.get("image_size", 256)
    frames, interval = num_frames or made.get("num_frames", 16), frame_interval or made.get("frame_interval", 1)
    # A bad file is to be found, not to end the search. One that has clips is asked for as such; one that has none says
    # so, and what it says then of pictures is what is wrong.
    options = dict(seed=0, split=split, max_bad=1.0, num_frames=frames, frame_interval=interval, short_clips="interval")
    options["energon_cooker"] = energon_cooker
    try:
        dataset = build_dataset(data_path, size, use_video=True, **options)
    except ValueError:
        dataset = build_dataset(data_path, size, use_video=False, **options)
    return dataset, (size, frames, interval)


def look(dataset: MediaDataset, samples: int, pictures: int, num_workers: int, tokens: MediumTokens) -> Findings:
    """Opens ``samples`` rows (0: all), spread evenly, and keeps thumbnails of ``pictures`` of them."""
    count = min(samples or len(dataset), len(dataset))
    rows = np.unique(np.linspace(0, len(dataset) - 1, count).round().astype(np.int64)).tolist()
    shown = set(np.linspace(0, len(rows) - 1, min(pictures, len(rows))).round().astype(int).tolist())
    work = [(row, place in shown) for place, row in enumerate(rows)]

    found: dict[int, Look | str] = {}
    with closing(run_apart(_Opener(dataset), work, num_workers, TIME_LIMIT)) as results:
        with Progress(len(rows), "rows", title="looking") as bar:
            for place, result in results:
                found[place] = result
                bar.update()
    looks, bad = [], []
    for place, row in enumerate(rows):
        if isinstance(result := found[place], str):
            name = printable(dataset.source(row))
            bad.append(f"{name}: {printable(result).removeprefix(f'{name}: ').removeprefix(': ')}")
        else:
            looks.append(result)
    return Findings(dataset, looks, bad, tokens)


@dataclass(frozen=True)
class _Opener:
    """What a process that looks does with a row; an object, which processes that are not forked can be sent."""

    dataset: MediaDataset

    def __call__(self, row: int, keep: bool) -> Look:
        medium, frames = self.dataset.look_at(row)
        words = self.dataset.caption(row)
        if words is None:
            words = self.dataset.class_names[self.dataset.label(row)] if self.dataset.class_names else ""
        kept = tuple(thumbnail(frame) for frame in frames) if keep else ()
        return Look(row, printable(self.dataset.source(row)), medium, words, kept)


def thumbnail(frame: np.ndarray) -> np.ndarray:
    """(H, W) or (H, W, 3) uint8 -> (h, w, 3) of at most ``THUMBNAIL`` pixels a side; small ones are magnified by a
    whole number, so that their pixels show."""
    image = Image.fromarray(np.ascontiguousarray(frame)).convert("RGB")
    longest = max(image.size)
    if longest > THUMBNAIL:
        size = [max(1, round(side * THUMBNAIL / longest)) for side in image.size]
        return np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    times = THUMBNAIL // longest
    return np.asarray(image.resize([side * times for side in image.size], Image.Resampling.NEAREST))
