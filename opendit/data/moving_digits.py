"""The video demo: the built-in digits, moving in one of four directions, as real H.264 clips with captions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.common.safe_files import make_folder, refuse_links, write_whole
from opendit.data.csv_table import TableRow, write_csv
from opendit.data.digits import digits_split
from opendit.data.progress import Progress
from opendit.data.video_file import write_mp4

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # x to the right, y down
SETTINGS, TABLE, CLIPS = "demo.json", "demo.csv", "clips"


def caption(digit: int, direction: str) -> str:
    """caption(7, "left") -> "a seven moving left"; raises ValueError for anything else than a digit and direction."""
    if digit not in range(10) or direction not in DIRECTIONS:
        raise ValueError(f"there is no clip of {digit!r} moving {direction!r}")
    return f"{name_digit(digit)} moving {direction}"


def name_digit(digit: int) -> str:
    """name_digit(7) -> "a seven"."""
    return f"a{'n' * (digit == 8)} {DIGIT_NAMES[digit]}"


def all_captions(moving: bool) -> list[str]:
    """List the captions of every digit; moving: in every direction."""
    if not moving:
        return [name_digit(digit) for digit in range(10)]
    return [caption(digit, direction) for direction in DIRECTIONS for digit in range(10)]


def parse_caption(text: str) -> tuple[int, str]:
    """The inverse of ``caption``, whatever the case and spacing; raises ValueError if it is another sentence."""
    words = text.lower().split()
    if len(words) == 4 and words[0] in ("a", "an") and words[1] in DIGIT_NAMES and words[2] == "moving":
        if words[3] in DIRECTIONS:
            return DIGIT_NAMES.index(words[1]), words[3]
    raise ValueError(f'{text!r} isn\'t like "a seven moving left"')


def render(image: Tensor, direction: str, frames: int, size: int, *, jitter_seed: int) -> np.ndarray:
    """A digit that crosses a black frame at constant speed, from one side to the other and always in view.

    image: (8, 8) in [-1, 1]. It is drawn 5/8 as wide as the frame, ``size`` pixels a side, at positions that are
    no whole numbers of pixels. jitter_seed: draws the offset across the motion, up to an eighth of the frame.
    Returns uint8 (frames, size, size, 3). Raises ValueError for another shape, direction or too small a frame.
    """
    if image.shape != (8, 8) or direction not in DIRECTIONS or frames < 1 or size < 8:
        raise ValueError(
            f"can't draw {tuple(image.shape)} moving {direction!r} in {frames} frames of {size} pixels: it takes an "
            f"(8, 8) digit, one of {', '.join(DIRECTIONS)}, one frame or more and 8 pixels or more"
        )
    side = size * 5 // 8
    digit = F.interpolate(image[None, None].float(), (side, side), mode="bicubic", antialias=True).clamp(-1, 1)
    digit = (digit + 1) / 2  # black is 0, what grid_sample finds outside of the digit
    middle = (size - side) / 2
    offset = np.random.default_rng(jitter_seed).uniform(-1, 1) * size / 8
    way = torch.linspace(-1, 1, frames) if frames > 1 else torch.zeros(1)
    corner = torch.stack(  # (T, 2): where the digit's left upper corner is, x and y, in pixels
        [middle + (way * middle * step if step else torch.full_like(way, offset)) for step in DIRECTIONS[direction]],
        dim=1,
    )
    # The frame's pixels in the digit's coordinates, where -1 and 1 are its outer edges.
    x, y = (((torch.arange(size) + 0.5 - corner[:, i, None]) * 2 / side - 1) for i in (0, 1))  # (T, size) each
    grid = torch.stack([x[:, None].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], dim=-1)
    drawn = F.grid_sample(digit.expand(frames, -1, -1, -1), grid, align_corners=False)[:, 0]
    return drawn.mul(255).round().to(torch.uint8)[..., None].expand(-1, -1, -1, 3).numpy()


def make_demo(
    folder: str | Path,
    clips: int = 600,
    size: int = 64,
    frames: int = 48,
    fps: int = 24,
    seed: int = 0,
    split: str = "train",
) -> Path:
    """Writes folder/clips/*.mp4 and folder/demo.csv, and returns the CSV's path.

    Clip i shows the i-th of the 40 pairs of digit and direction, over and over, with a digit of the split and an
    offset keyed by (seed, i): the clips are the same whenever they are made. Those there are kept.

    Raises:
        ValueError: the folder holds a demo of other settings.
    """
    folder = Path(folder)
    settings = {"version": 2, "size": size, "frames": frames, "fps": fps, "seed": seed, "split": split}
    known = folder / SETTINGS
    refuse_links(folder, [SETTINGS, TABLE, CLIPS], "--output")
    if known.exists() and (found := _read_settings(known)) != settings:
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
                write_mp4(path, render(image, direction, frames, size, jitter_seed=jitter), fps, root=folder)
            bar.update()
    write_csv(folder / TABLE, rows)
    return folder / TABLE


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
