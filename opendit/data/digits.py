"""The built-in data: 1,797 handwritten digits of 8x8 pixels from scikit-learn, without a download.

``make_demo`` writes captioned H.264 clips in which a digit moves in one of four directions."""

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.common.progress import Progress
from opendit.common.safe_files import make_folder, refuse_links, write_whole
from opendit.common.utils import hash_parts
from opendit.data.base import PLAIN, Fingerprint, Item, Medium, View, of_pixels
from opendit.data.captioned_media import TableRow, write_csv
from opendit.data.sources import Request
from opendit.data.torchvision_sets import ArrayDataset
from opendit.data.video_files import write_mp4

SIZE = 8  # side in pixels of scikit-learn's pictures
SPLITS = ("train", "test")


@cache
def _load() -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures (1797, 1, 8, 8) in [-1, 1], labels (1797,), and a mask (1797,) of the split "test"."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images = torch.from_numpy(data.images).float().div(8).sub(1)[:, None]  # data.images has values 0 to 16
    # RandomState's numbers never change between numpy versions.
    random, test = np.random.RandomState(0), np.zeros(len(data.target), dtype=bool)
    for digit in range(10):
        rows = random.permutation(np.flatnonzero(data.target == digit))
        test[rows[: round(len(rows) / 5)]] = True
    return images, torch.from_numpy(data.target).long(), torch.from_numpy(test)


def digits_split(split: str) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 8, 8) float32 in [-1, 1] and labels (N,) int64 of "train" or "test".

    Four fifths of every class are in "train". The splits never change. Raises ValueError for another split."""
    if split not in SPLITS:
        raise ValueError(f"digits has the splits {' and '.join(SPLITS)}, not {split!r}")
    images, labels, test = _load()
    chosen = test if split == "test" else ~test
    return images[chosen], labels[chosen]


class DigitsDataset(ArrayDataset):
    """The digits as (1, image_size, image_size). By default none is mirrored, as most mirrored digits aren't digits."""

    def __init__(self, image_size: int, *, seed: int = 0, random_flip: bool | None = None, split: str = "train"):
        images, labels = digits_split(split)
        names, options = [str(digit) for digit in range(10)], {"seed": seed, "random_flip": bool(random_flip)}
        super().__init__(f"digits ({split})", images[:, 0], labels.numpy(), names, image_size, **options)

    def read(self, row: int, view: View = PLAIN) -> Item:
        x, size = self.images[row, None], self.sample_shape[1:]
        if size != (SIZE, SIZE):
            x = F.interpolate(x[None], size, mode="bicubic", antialias=True)[0].clamp_(-1, 1)
        return Item(x.flip(-1) if view.flip else x.clone(), int(self.labels[row]))

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        return of_pixels(self.images[row, None])

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(lambda: hash_parts("digits", self.images.numpy().tobytes(), self.labels.tobytes()))


DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # (x to the right, y down)
SETTINGS, TABLE, CLIPS = "demo.json", "demo.csv", "clips"
FPS = 24  # of the demo's clips


def caption(digit: int, direction: str) -> str:
    """Return a clip's caption, such as "a seven moving left". Raises ValueError for an unknown digit or direction."""
    if digit not in range(10) or direction not in DIRECTIONS:
        raise ValueError(f"there is no clip of {digit!r} moving {direction!r}")
    return f"{name_digit(digit)} moving {direction}"


def name_digit(digit: int) -> str:
    """Return a digit's caption, such as "a seven"."""
    return f"a{'n' * (digit == 8)} {DIGIT_NAMES[digit]}"


def all_captions(moving: bool) -> list[str]:
    """Return the ten digits' captions or, if ``moving``, the captions of all clips."""
    if not moving:
        return [name_digit(digit) for digit in range(10)]
    return [caption(digit, direction) for direction in DIRECTIONS for digit in range(10)]


def parse_caption(text: str) -> tuple[int, str]:
    """Return the (digit, direction) of a caption, ignoring case and spacing. Raises ValueError for another text."""
    words = text.lower().split()
    if len(words) == 4 and words[0] in ("a", "an") and words[1] in DIGIT_NAMES and words[2] == "moving":
        if words[3] in DIRECTIONS:
            return DIGIT_NAMES.index(words[1]), words[3]
    raise ValueError(f'{text!r} isn\'t like "a seven moving left"')


def render(image: Tensor, direction: str, frames: int, size: int, *, jitter_seed: int) -> np.ndarray:
    """Return a clip (frames, size, size, 3) uint8 of a digit that crosses a black frame at constant speed.

    image: (8, 8) in [-1, 1]. The digit is 5/8 as wide as the frame, always in view, and at fractional positions.
    jitter_seed: seed for the digit's random offset across the motion, at most an eighth of the frame. Raises ValueError
    for another image shape, an unknown direction, no frames or too small a frame."""
    if image.shape != (8, 8) or direction not in DIRECTIONS or frames < 1 or size < 8:
        raise ValueError(
            f"can't draw {tuple(image.shape)} moving {direction!r} in {frames} frames of {size} pixels: it takes an "
            f"(8, 8) digit, one of {', '.join(DIRECTIONS)}, one frame or more and 8 pixels or more"
        )
    side = size * 5 // 8
    digit = F.interpolate(image[None, None].float(), (side, side), mode="bicubic", antialias=True).clamp(-1, 1)
    digit = (digit + 1) / 2  # 0 is black, because grid_sample pads with 0
    middle = (size - side) / 2
    offset = np.random.default_rng(jitter_seed).uniform(-1, 1) * size / 8
    way = torch.linspace(-1, 1, frames) if frames > 1 else torch.zeros(1)
    corner = torch.stack(  # (T, 2): position of the digit's upper left corner, x and y, in pixels
        [middle + (way * middle * step if step else torch.full_like(way, offset)) for step in DIRECTIONS[direction]],
        dim=1,
    )
    # The frame's pixels in the digit's coordinates, where -1 and 1 are the digit's outer edges.
    x, y = (((torch.arange(size) + 0.5 - corner[:, i, None]) * 2 / side - 1) for i in (0, 1))  # (T, size) each
    grid = torch.stack([x[:, None].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], dim=-1)
    drawn = F.grid_sample(digit.expand(frames, -1, -1, -1), grid, align_corners=False)[:, 0]
    return drawn.mul(255).round().to(torch.uint8)[..., None].expand(-1, -1, -1, 3).numpy()


def make_demo(
    folder: str | Path,
    clips: int = 600,
    size: int = 64,
    frames: int = 48,
    seed: int = 0,
    split: str = "train",
) -> Path:
    """Write folder/clips/*.mp4 and folder/demo.csv, and return the CSV's path. Existing clips are not written again.

    clips, frames: number of clips, and of frames per clip. size: height and width. The clips cycle through the 40 pairs
    of digit and direction. (seed, i) determines the picture and offset in clip i. Raises ValueError if the folder has a
    demo with other settings."""
    folder = Path(folder)
    settings = {"version": 2, "size": size, "frames": frames, "fps": FPS, "seed": seed, "split": split}
    known = folder / SETTINGS
    refuse_links(folder, [SETTINGS, TABLE, CLIPS], "--output")
    found = None
    if known.exists():
        with suppress(ValueError):
            found = json.loads(known.read_text())
        found = found if isinstance(found, dict) else {}
    if found not in (None, settings):
        changes = ", ".join(f"{k} {found.get(k)} there, {v} now" for k, v in settings.items() if found.get(k) != v)
        raise ValueError(
            f"--output {folder}: holds a demo of other settings ({changes}); pass another folder or delete {known} "
            "and the clips"
        )
    images, labels = digits_split(split)
    of_digit = [images[labels == digit, 0] for digit in range(10)]
    make_folder(folder / CLIPS, root=folder)
    write_whole(known, (json.dumps(settings) + "\n").encode())
    pairs = [(digit, direction) for digit in range(10) for direction in DIRECTIONS]
    rows = []
    with Progress(clips, "clips", title="making") as bar:
        for i in range(clips):
            digit, direction = pairs[i % len(pairs)]
            path = folder / CLIPS / f"{i:05d}-{DIGIT_NAMES[digit]}-{direction}.mp4"
            rows.append(TableRow(path, caption(digit, direction)))
            if not path.exists():
                choice, jitter = np.random.default_rng([seed, i]).integers(2**31, size=2).tolist()
                image = of_digit[digit][choice % len(of_digit[digit])]
                write_mp4(path, render(image, direction, frames, size, jitter_seed=jitter), FPS, root=folder)
            bar.update()
    write_csv(folder / TABLE, rows)
    return folder / TABLE


def open_source(asked: Request) -> DigitsDataset:
    if asked.use_video:
        raise ValueError(
            "--data_path digits: holds pictures; --use_video needs a CSV of clips. For clips of moving digits "
            "run: python preprocess.py demo"
        )
    return DigitsDataset(asked.image_size, seed=asked.seed, random_flip=asked.random_flip, split=asked.split)
