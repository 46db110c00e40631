"""Features of clips of moving digits: the digit, whatever its path, by a classifier of the digits; and the path."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.data.digits import SIZE, digits_split
from opendit.data.moving_digits import DIRECTIONS, render
from opendit.evaluation.digits import (
    SPLIT_NAMES,
    AskedDigits,
    DigitClassifier,
    RealDigits,
    digits_sha256,
    train_classifier,
)
from opendit.evaluation.media import array_media

FILE_FRAMES, FILE_SIZE = 48, 64  # of the demo's clips
HELD_OUT = 400  # clips, of 359 digits
PLACES, PATH_SCALE = 4, 10.0  # of the path in the features; a tenth of the frame counts as one
SEEDS = {"train": 1, "test": 2}


@dataclass(frozen=True)
class ClipShape:
    """The shape of clips as a loader reads them from the demo's files."""

    frames: int
    interval: int
    size: int


@functools.cache
def real_clips(split: str, shape: ClipShape, count: int | None = None) -> RealDigits:
    """Clips uint8 (T, H, W, 3) of the digits of a split, each of the four directions as often: so many, or 400 of the
    held-out digits and one of every training digit.

    Raises ValueError for clips that are longer than the demo's.
    """
    span = (shape.frames - 1) * shape.interval + 1
    if span > FILE_FRAMES:
        raise ValueError(
            f"--features digits: moving digits have {FILE_FRAMES} frames, fewer than {span}; lower --num_frames "
            "or --frame_interval"
        )
    images, labels = digits_split(split)
    first, names = (FILE_FRAMES - span) // 2, list(DIRECTIONS)
    random, clips, asked = np.random.default_rng(SEEDS[split]), [], []
    order = random.permutation(len(images))
    for number in range(count or (HELD_OUT if split == "test" else len(images))):
        row, name = int(order[number % len(order)]), names[number % len(names)]
        clip = render(images[row, 0], name, FILE_FRAMES, FILE_SIZE, jitter_seed=int(random.integers(2**31)))
        used = torch.from_numpy(clip[first : first + span : shape.interval, ..., 0].copy()).float()[:, None]
        clips.append(F.interpolate(used, (shape.size, shape.size), mode="area")[:, 0].round().to(torch.uint8))
        asked.append((int(labels[row]), DIRECTIONS[name]))
    pixels = torch.stack(clips)[..., None].expand(-1, -1, -1, -1, 3).numpy()
    sha256 = hash_parts("moving digits", split, pixels.tobytes())
    media = array_media(f"moving digits ({SPLIT_NAMES[split]})", lambda: sha256, pixels, None)
    digits, directions = zip(*asked, strict=True)
    return RealDigits(media, AskedDigits(torch.tensor(digits), torch.tensor(directions, dtype=torch.float64)))


@functools.cache
@torch.inference_mode(False)  # of whoever asks first
def clip_classifier(shape: ClipShape) -> DigitClassifier:
    """Return the classifier of digits as training clips show them, trained at the first call."""
    real = real_clips("train", shape)
    grey = _grey(torch.from_numpy(np.array(real.media.every_one())).movedim(-1, 1))
    return train_classifier(centred_digits(grey, centres(grey)), real.asked.digits)


def clip_features(shape: ClipShape, pixels: Tensor) -> dict[str, Tensor]:
    """Compute features of uint8 clips (B, 3, T, H, W): "pool", the classifier's features and the digit's centre at four
    times; "digit" and "nearest" of :class:`DigitClassifier`; "moved" (B, 2), the digit's way in widths of the frame."""
    grey = _grey(pixels)
    path = centres(grey)
    found = clip_classifier(shape)(centred_digits(grey, path))
    times = torch.linspace(0, grey.shape[1] - 1, PLACES).round().long()
    places = PATH_SCALE * (path[:, times] / grey.shape[-1]).flatten(1)
    quarter = max(1, grey.shape[1] // 4)
    moved = (path[:, -quarter:].mean(dim=1) - path[:, :quarter].mean(dim=1)) / grey.shape[-1]
    return {**found, "pool": torch.cat([found["pool"], places], dim=1), "moved": moved}


def clips_sha256(shape: ClipShape) -> str:
    """Return the hash of clips of a shape; see :func:`digits_sha256`."""
    return hash_parts(digits_sha256("clips"), str(shape))


def _grey(pixels: Tensor) -> Tensor:
    """uint8 (B, 3, T, H, W) -> float64 (B, T, H, W) in 0..1."""
    return pixels.double().mean(dim=1) / 255


def centres(clips: Tensor) -> Tensor:
    """The centre of mass (x, y) of every frame of clips (B, T, H, W): (B, T, 2), in pixels."""
    mass = clips.sum(dim=(2, 3)) + 1e-6
    x, y = (torch.arange(size, dtype=clips.dtype, device=clips.device) for size in (clips.shape[3], clips.shape[2]))
    return torch.stack([(clips.sum(dim=2) * x).sum(-1) / mass, (clips.sum(dim=3) * y).sum(-1) / mass], dim=-1)


def centred_digits(clips: Tensor, path: Tensor) -> Tensor:
    """The digit that clips (B, T, H, W) in 0..1 show, (B, 1, 8, 8) in -1..1: the mean of all frames after each was
    moved to have its centre of mass, ``path`` (B, T, 2), in the middle."""
    height, width = clips.shape[2:]
    half = max(1, int(width * 0.4))
    padded = F.pad(clips, (half, half, half, half))
    corner = path.round().long()
    rows = (corner[..., 1].clamp(0, height - 1)[..., None] + torch.arange(2 * half, device=clips.device))[..., :, None]
    columns = (corner[..., 0].clamp(0, width - 1)[..., None] + torch.arange(2 * half, device=clips.device))[
        ..., None, :
    ]
    sample = torch.arange(len(clips), device=clips.device)[:, None, None, None]
    frame = torch.arange(clips.shape[1], device=clips.device)[None, :, None, None]
    digit = padded[sample, frame, rows, columns].mean(dim=1, keepdim=True)
    if half != SIZE // 2:
        digit = F.interpolate(digit, (SIZE, SIZE), mode="area")
    return 2 * digit - 1


def moved_right(moved: Tensor, asked: AskedDigits) -> Tensor:
    """(N,) bool: whether digits that came (N, 2) widths of the frame moved more along their direction than across it,
    and at least a twentieth of the frame."""
    moved, wanted = moved.double().cpu(), asked.directions
    assert wanted is not None
    along, across = (moved * wanted).sum(dim=1), (moved * wanted.flip(1)).sum(dim=1).abs()
    return along > across.clamp_min(0.05)
