"""Run ``preprocess.py look``: open a share of a data set's rows, and show what is in them."""

from contextlib import closing, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opendit.common.safe_files import make_folder, refuse_links, write_whole
from opendit.common.utils import DataError
from opendit.config.data_sources import inline_sources, is_address
from opendit.data.base import MediaDataset, name_few
from opendit.data.blend import BlendedDataset
from opendit.data.files import printable
from opendit.data.fill import MediumTokens
from opendit.data.latents_index import read_indexes
from opendit.data.look_page import THUMBNAIL, Findings, Look, draw_histograms, draw_sheet, make_page
from opendit.data.medium import count_colours
from opendit.data.pictures_and_clips import PICTURE, PicturesAndClips
from opendit.data.processes import run_apart
from opendit.data.progress import Progress
from opendit.data.resolve import build_dataset
from opendit.data.shards.latents import fetch_latents_indexes
from opendit.data.shards.remote import Remote

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
    fps: float | None = None,
    split: str = "train",
    energon_cooker: str | None = None,
    token_pixels: int = 16,
    token_frames: int = 1,
    num_workers: int = 2,
) -> None:
    """``preprocess.py look`` with its flags' values. Raises DataError, and writes nothing, if no row can be read."""
    refuse_links(Path(output), [SHEET, HISTOGRAMS, PAGE], "--output")
    dataset, video = open_any(data_path, image_size, num_frames, frame_interval, split, energon_cooker, fps)
    found = look(dataset, samples, pictures, num_workers, MediumTokens(*video, token_pixels, token_frames, fps))
    if not found.looks:
        raise DataError(f"no row of {data_path} can be read: {name_few(found.bad)}")
    folder = Path(output)
    make_folder(folder)
    content = {SHEET: draw_sheet(found), HISTOGRAMS: draw_histograms(found)}
    content[PAGE] = make_page(found, content[SHEET], content[HISTOGRAMS]).encode("utf-8", "replace")
    for name, written in content.items():
        write_whole(folder / name, written)
    print(dataset.describe())
    colours = count_colours(each.medium for each in found.looks)
    print("\n".join([f"looked into {found.looked}", *colours, *found.of_captions]))
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
    fps: float | None = None,
) -> tuple[MediaDataset, tuple[int, int, int]]:
    """The data set of ``--data_path``, with its clips if it has any, and (image_size, num_frames, frame_interval): what
    was given, else what cached latents were made at, else 256, 16, 1.

    Raises ValueError or FileNotFoundError, which name the flag."""
    made: dict[str, Any] = {}
    if (indexes := _indexes(data_path)) is not None:
        index = next((each for each in indexes if each["image_size"] == image_size), indexes[-1])
        made = {"image_size": index["image_size"], **(index.get("video") or {})}
    size = image_size or made.get("image_size", 256)
    frames, interval = num_frames or made.get("num_frames", 16), frame_interval or made.get("frame_interval", 1)
    rate = fps if fps is not None or frame_interval is not None else made.get("fps")
    # A bad file is to be found, not to end the search. One that has clips is asked for as such; one that has none says
    # so, or opens all the same, and what it says then of pictures is what is wrong, or what it is.
    options: dict[str, Any] = dict(
        seed=0, split=split, max_bad=1.0, num_frames=frames, frame_interval=interval, fps=rate
    )
    options |= dict(short_clips="interval", energon_cooker=energon_cooker)
    try:
        dataset = build_dataset(data_path, size, use_video=True, **options)
    except ValueError:
        dataset = build_dataset(data_path, size, use_video=False, **options)
    if not _has_clips(dataset):
        with suppress(ValueError):  # of a cooker, whose clips no index tells
            dataset = build_dataset(data_path, size, use_video=False, **options)
    return dataset, (size, frames, interval)


def _indexes(data_path: str) -> list[dict[str, Any]] | None:
    """Read the indexes of cached latents, in a folder or behind an address, also if they are the first source of a
    blend; None for anything else."""
    if inline := inline_sources(data_path):
        return _indexes(inline[0][0])
    if not is_address(data_path):
        return read_indexes(Path(data_path)) if Path(data_path).is_dir() else None
    try:
        return fetch_latents_indexes(data_path, Remote(data_path))
    except (DataError, ValueError, OSError) as error:
        shown = f"--data_path {printable(data_path)}"
        raise ValueError(f"{shown}: {str(error).removeprefix(f'{shown}: ')}") from error


def _has_clips(dataset: MediaDataset) -> bool:
    """Return True if a data set that was opened with its clips has any, as far as it knows. Nothing needs to be looked
    up in one that was opened as pictures, or that opens with clips only if it has some."""
    if isinstance(dataset, BlendedDataset):
        return any(map(_has_clips, dataset.parts))
    if not isinstance(dataset, PicturesAndClips) or dataset.kind == "latents" or not dataset.use_video:
        return True
    keys = dataset.shape_keys()
    return dataset.shape_key(0) != PICTURE if keys is None else bool((keys != PICTURE).any())


def draw_rows(dataset: MediaDataset, samples: int) -> np.ndarray:
    """So many rows, or as many as there are, rising. They are spread evenly; of several sources each has as many as its
    weight at the beginning makes it, one at least, and a small source's are repeated."""
    sources = dataset.source_rows()
    if sources is None:
        return _spread(len(dataset), min(samples, len(dataset)))
    weights = sources.stages[0][1]
    due = [weight * samples / Fraction(sum(weights)) for weight in weights]
    counts = [max(1, round(each)) for each in due]
    starts = [0, *sources.ends[:-1]]
    of_each = zip(starts, sources.sizes, counts, strict=True)
    return np.concatenate([start + _spread(size, count) for start, size, count in of_each])


def _spread(size: int, count: int) -> np.ndarray:
    """``count`` of the rows 0 to ``size`` - 1, rising; more than there are: each as often, or once more than others."""
    some = np.linspace(0, size - 1, count % size).round().astype(np.int64)
    return np.sort(np.concatenate([np.tile(np.arange(size), count // size), some]))


def look(dataset: MediaDataset, samples: int, pictures: int, num_workers: int, tokens: MediumTokens) -> Findings:
    """Opens ``samples`` rows (0: all), see :func:`draw_rows`, and keeps thumbnails of up to ``pictures`` of them."""
    samples = min(samples or len(dataset), len(dataset))
    drawn = draw_rows(dataset, samples)
    rows = (np.unique(drawn) if samples < len(dataset) else np.arange(len(dataset))).tolist()
    shown = set(drawn[_spread(len(drawn), min(pictures, len(drawn)))].tolist())
    work = [(row, row in shown) for row in rows]

    found: dict[int, Look | str] = {}
    with closing(run_apart(_Opener(dataset), work, num_workers, TIME_LIMIT)) as results:
        with Progress(len(rows), "rows", title="looking") as bar:
            for place, result in results:
                found[place] = result
                bar.update()
    looks, bad = {}, []
    for place, row in enumerate(rows):
        if isinstance(result := found[place], str):
            name = printable(dataset.source(row))
            bad.append(f"{name}: {printable(result).removeprefix(f'{name}: ').removeprefix(': ')}")
        else:
            looks[row] = result
    samples_seen = [looks[row] for row in drawn.tolist() if row in looks]
    return Findings(dataset, list(looks.values()), bad, tokens, samples_seen or list(looks.values()))


@dataclass(frozen=True)
class _Opener:
    """Open a row in a process that looks. It is an object, so that it can be sent to processes that are not forked."""

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
