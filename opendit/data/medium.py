"""Describe a picture or clip before it is cropped or resized: its size, its length, and frames to look at."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opendit.data.frame_times import ROUNDING

COLOURS = "colours"  # in Image.info of a decoded picture: what it was, see Medium
# Of latents: what is shown black and white, in shares of all values below, so that a few wild ones hide nothing.
_DARKEST, _BRIGHTEST = 0.02, 0.98


@dataclass(frozen=True)
class Medium:
    """A picture or clip as its file has it. A picture has one frame and no rate. duration: seconds that a clip is shown
    for; 0: as long as its frames take at its rate. colours: "HDR (PQ)" and the like if it is not SDR, else ""."""

    frames: int
    height: int
    width: int
    fps: float = 0.0
    duration: float = 0.0
    colours: str = ""

    @property
    def seconds(self) -> float:
        return self.duration or (self.frames / self.fps if self.fps else 0.0)

    def frames_at(self, fps: float | None) -> int:
        """Return the number of frames at a rate; None: all of them."""
        return self.frames if fps is None or not self.fps else max(1, math.ceil((self.seconds - ROUNDING) * fps))


def of_picture(picture: Image.Image) -> tuple[Medium, np.ndarray]:
    """Return a decoded picture as a medium and as (1, H, W) or (1, H, W, 3) uint8."""
    return Medium(1, picture.height, picture.width, colours=picture.info.get(COLOURS, "")), np.asarray(picture)[None]


def of_pixels(x: Tensor) -> tuple[Medium, np.ndarray]:
    """Return a sample (1 or 3, H, W) or (1 or 3, T, H, W) in [-1, 1] as a medium and as uint8: its first, middle and
    last frame, (n, H, W) or (n, H, W, 3)."""
    x = x[:, None] if x.ndim == 3 else x
    length = x.shape[1]
    shown = x[:, sorted({0, length // 2, length - 1})].add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    frames = shown[0] if len(shown) == 1 else shown.permute(1, 2, 3, 0)
    height, width = x.shape[2:]
    return Medium(length, height, width), frames.numpy()


def of_moments(moments: Tensor) -> tuple[Medium, np.ndarray]:
    """Return a VAE's means and deviations (2C, [T,] h, w) as :func:`of_pixels` returns pixels: the first three channels
    of the means are shown as red, green and blue, or one as grey."""
    channels = len(moments) // 2
    means = moments[: 3 if channels >= 3 else 1].float()
    low, high = torch.quantile(means.flatten()[: 2**20], torch.tensor([_DARKEST, _BRIGHTEST])).tolist()
    return of_pixels((means - low) / max(high - low, 1e-6) * 2 - 1)


def count_colours(media: Iterable[Medium]) -> list[str]:
    """Return "2 clips are HDR (PQ), tone-mapped to SDR" for each kind of colours that is converted."""
    counts = Counter((medium.colours, medium.frames > 1) for medium in media if medium.colours)
    lines = []
    for (colours, clips), count in sorted(counts.items()):
        what = ("clip" if clips else "picture") + ("s are" if count > 1 else " is")
        done = "tone-mapped to SDR" if colours.startswith("HDR") else "converted to BT.709"
        lines.append(f"{count:,} {what} {colours}, {done}")
    return lines
