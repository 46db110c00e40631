"""Features of the built-in digits: a small classifier that is trained where it is needed, in seconds.

It is to the digits what Inception is to photographs: its last hidden layer gives the features of a Fréchet distance,
its logits say which digit a sample shows. It is trained in float64 with numbers of its own seed, so that machines and
numbers of threads differ by rounding alone; no weights are shipped.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.common.utils import hash_parts
from opendit.data.digits import SIZE, SPLITS, digits_split
from opendit.data.moving_digits import DIGIT_NAMES, DIRECTIONS, parse_caption
from opendit.evaluation.media import Media, array_media

VERSION = "1"  # of what decides the features and is no constant below; goes up with every change of them
WIDTH = 16  # of the features: there are 359 held-out digits, and a covariance needs many more samples than numbers
HIDDEN, EPOCHS, BATCH, RATE = 256, 60, 128, 1e-2
SHIFT, NOISE, SMOOTHING = 0.1, 0.3, 0.05  # augmentations: of half the width, of pixels' range -1..1, of labels
COPY_QUANTILE = 0.01  # a sample is a copy if it is nearer to a training digit than all but so many held-out ones


# ------------------------------------------------------------------------------------------ the classifier


@dataclass(frozen=True)
class DigitClassifier:
    """hidden: pixels (B, 1, 8, 8) in -1..1 -> features (B, WIDTH). head: features -> logits (B, 10). images: the
    training digits (N, 64). All float64."""

    hidden: nn.Module
    head: nn.Module
    images: Tensor

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
        """Float64 (B, 1, 8, 8) in -1..1 -> "pool" (B, WIDTH), "digit" (B, 10) logits, and "nearest" (B, 1), the
        Euclidean distance to the nearest training digit."""
        hidden, head = self.hidden.to(pixels.device), self.head.to(pixels.device)
        images = self.images.to(pixels.device)
        pool = hidden(pixels)
        nearest = torch.cdist(pixels.flatten(1), images, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
        return {"pool": pool, "digit": head(pool), "nearest": nearest[:, None]}


def train_classifier(images: Tensor, labels: Tensor) -> DigitClassifier:
    """Train a classifier on digits (N, 1, 8, 8) in -1..1 and their labels (N,), with small shifts and noise. It takes
    seconds, and the same digits give the same classifier up to float64's rounding."""
    x, y, generator = images.double(), labels, torch.Generator().manual_seed(0)

    def linear(inputs: int, outputs: int) -> nn.Linear:
        layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float64))
        with torch.no_grad():
            layer.weight.normal_(generator=generator).mul_((2 / inputs) ** 0.5)
            layer.bias.zero_()
        return layer

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1

    hidden = nn.Sequential(nn.Flatten(), linear(SIZE * SIZE, HIDDEN), nn.GELU(), linear(HIDDEN, WIDTH), nn.GELU())
    head = linear(WIDTH, 10)
    parameters, batch = [*hidden.parameters(), *head.parameters()], min(BATCH, len(x))
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.05)
    steps = len(x) // batch * EPOCHS
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    upright = torch.eye(2, dtype=torch.float64).expand(batch, 2, 2)
    with torch.enable_grad(), _one_thread():
        for _ in range(EPOCHS):
            order = torch.randperm(len(x), generator=generator)
            for rows in order[: len(x) // batch * batch].view(-1, batch):
                moved = F.affine_grid(
                    torch.cat([upright, SHIFT * uniform(batch, 2, 1)], dim=2),
                    [batch, 1, SIZE, SIZE],
                    align_corners=False,
                )
                # The background, -1, is what grid_sample finds outside: 0.
                pixels = F.grid_sample(x[rows] + 1, moved, align_corners=False) - 1
                pixels = pixels + NOISE * torch.randn(pixels.shape, generator=generator, dtype=torch.float64)
                loss = F.cross_entropy(head(hidden(pixels)), y[rows], label_smoothing=SMOOTHING)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    for part in (hidden, head):
        part.requires_grad_(False)
    return DigitClassifier(hidden, head, x.flatten(1))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices as small as these lose by being divided among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
@torch.inference_mode(False)  # of whoever asks first
def picture_classifier() -> DigitClassifier:
    """Return the classifier of the built-in training digits, trained at the first call."""
    return train_classifier(*digits_split("train"))


def picture_features(pixels: Tensor) -> dict[str, Tensor]:
    """Apply :class:`DigitClassifier` to uint8 pictures (B, 3, H, W), made grey and resized to its size."""
    grey = pixels.double().mean(dim=1, keepdim=True) / 127.5 - 1
    if grey.shape[2:] != (SIZE, SIZE):
        grey = F.interpolate(grey, (SIZE, SIZE), mode="bilinear", antialias=True)
    return picture_classifier()(grey)


@functools.cache
def digits_sha256(kind: str) -> str:
    """A hash of what decides the features of "pictures" or "clips": the classifier's version and the digits."""
    data = [part.numpy().tobytes() for split in SPLITS for part in digits_split(split)]
    constants = WIDTH, HIDDEN, EPOCHS, BATCH, RATE, SHIFT, NOISE, SMOOTHING
    return hash_parts("digits", kind, VERSION, str(constants), *data)


# ------------------------------------------------------------------------------------------ real digits


@dataclass(frozen=True)
class RealDigits:
    """Real samples: their media, and what they show."""

    media: Media
    asked: "AskedDigits"


def real_pictures(split: str, count: int | None = None) -> RealDigits:
    """The digits of a split as uint8 pictures (8, 8, 3): all of them, or so many that are drawn, always the same."""
    images, labels = digits_split(split)
    if count is not None and count < len(images):
        rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count]
        images, labels = images[rows], labels[rows]
    pixels = ((images + 1) * 127.5).round().to(torch.uint8).expand(-1, 3, -1, -1).movedim(1, -1).numpy()
    sha256 = hash_parts("digits", split, pixels.tobytes())
    return RealDigits(array_media(f"digits ({SPLIT_NAMES[split]})", lambda: sha256, pixels, None), AskedDigits(labels))


SPLIT_NAMES = {"train": "train", "test": "held out"}


# ------------------------------------------------------------------------------------------ what was asked for


@dataclass(frozen=True)
class AskedDigits:
    """digits: of each sample, (N,) int64. directions: in which each was to move, (N, 2) of x and y, or None."""

    digits: Tensor
    directions: Tensor | None = None


def asked_of_labels(labels: Sequence[int] | np.ndarray | None) -> AskedDigits | None:
    """Read the digits that class labels ask for; None for labels that are no digits."""
    found = torch.as_tensor(np.asarray([] if labels is None else labels))
    if not len(found) or found.is_floating_point() or found.ndim != 1 or found.min() < 0 or found.max() > 9:
        return None
    return AskedDigits(found.long())


def asked_of_captions(captions: Sequence[str] | None) -> AskedDigits | None:
    """Read the digits that captions ask for ("a seven", "a seven moving left"); None for other captions."""
    try:
        found = [parse_caption(text) for text in captions or ()]
        directions = torch.tensor([DIRECTIONS[direction] for _, direction in found], dtype=torch.float64)
        return AskedDigits(torch.tensor([digit for digit, _ in found]), directions) if found else None
    except ValueError:
        words = [text.lower().split() for text in captions or ()]
    if not all(len(two) == 2 and two[0] in ("a", "an") and two[1] in DIGIT_NAMES for two in words):
        return None
    return AskedDigits(torch.tensor([DIGIT_NAMES.index(two[1]) for two in words]))


# ------------------------------------------------------------------------------------------ what was drawn


def named_right(logits: Tensor, asked: AskedDigits) -> Tensor:
    """(N,) bool: whether the digit with the largest of logits (N, 10) is the one that was asked for."""
    return logits.argmax(dim=1).cpu() == asked.digits


def share_of_copies(nearest: Tensor, held_out: Tensor) -> float:
    """The share of samples that are nearer to a training digit, ``nearest`` (N, 1), than all but COPY_QUANTILE of the
    held-out digits are, ``held_out`` (M, 1). Of samples like held-out ones it is about COPY_QUANTILE, of copies 1."""
    border = held_out.double().flatten().quantile(COPY_QUANTILE)
    return float((nearest.double().flatten() < border).double().mean())
