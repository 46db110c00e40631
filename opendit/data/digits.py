"""The built-in data set: 1,797 handwritten digits of 8x8 pixels that ship with scikit-learn.

It needs no download, so it is the demo, the tests' data and the smallest thing that can be learned or not.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.data.base import MediaDataset, flip_note
from opendit.data.medium import Medium, of_pixels

SIZE = 8  # pixels of a side as shipped
SPLITS = ("train", "test")


@cache
def _load() -> tuple[Tensor, Tensor, Tensor]:
    """All pictures (1797, 1, 8, 8) in [-1, 1], labels (1797,), and which rows are held out (1797,) bool."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images = torch.from_numpy(data.images).float().div(8).sub(1)[:, None]  # values 0..16
    # RandomState's numbers are frozen by numpy's policy, so the split never changes.
    random, test = np.random.RandomState(0), np.zeros(len(data.target), dtype=bool)
    for digit in range(10):
        rows = random.permutation(np.flatnonzero(data.target == digit))
        test[rows[: round(len(rows) / 5)]] = True
    return images, torch.from_numpy(data.target).long(), torch.from_numpy(test)


def digits_split(split: str) -> tuple[Tensor, Tensor]:
    """The "train" (four fifths of every class) or the held-out "test" pictures.

    Returns images (N, 1, 8, 8) float32 in [-1, 1] and labels (N,) int64; the split is the same for ever.
    """
    if split not in SPLITS:
        raise ValueError(f"digits has the splits {' and '.join(SPLITS)}, not {split!r}")
    images, labels, test = _load()
    chosen = test if split == "test" else ~test
    return images[chosen], labels[chosen]


class DigitsDataset(MediaDataset):
    """The digits as (1, image_size, image_size); a mirrored digit is no digit, so they are not mirrored by default."""

    def __init__(self, image_size: int, *, seed: int = 0, random_flip: bool | None = None, split: str = "train"):
        self.images, self.labels = digits_split(split)
        self.sample_shape = (1, image_size, image_size)
        self.class_names = [str(digit) for digit in range(10)]
        self.seed, self.random_flip, self.split = seed, bool(random_flip), split

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, row: int, flip: bool) -> Tensor:
        x, size = self.images[row], self.sample_shape[1:]
        if size != (SIZE, SIZE):
            x = F.interpolate(x[None], size, mode="bicubic", antialias=True)[0].clamp_(-1, 1)
        return x.flip(-1) if flip else x.clone()

    def look_at(self, row: int) -> tuple[Medium, np.ndarray]:
        return of_pixels(self.images[row])

    def label(self, row: int) -> int:
        return int(self.labels[row])

    def identity(self) -> str:
        return hash_parts("digits", self.images.numpy().tobytes(), self.labels.numpy().tobytes())

    def describe(self) -> str:
        c, h, w = self.sample_shape
        return f"digits ({self.split}): {len(self):,} pictures of 10 classes, {c}x{h}x{w}, {flip_note(self)}"
