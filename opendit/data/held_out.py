"""A share of a data set that is held out of training, and the rest: together all rows, none in both."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from opendit.common.hashing import HashedStream, hash_parts
from opendit.data.base import Embedding, MediaDataset
from opendit.data.order.blend import SourceRows
from opendit.data.order.permutation import permuted
from opendit.data.size_cache import KeptArrays, kept_if_large
from opendit.data.verification import Verification

_ROWS = 2**20  # hashed at once
SEED = 0x76616C  # of everything random about held-out samples: runs of any --global_seed have the same ones


def hold_out(dataset: MediaDataset, share: float) -> tuple["SomeRows", "SomeRows"]:
    """(what is left to train on, what is held out): of n files round(share x n), but one at least. All rows of a file,
    as a picture with several captions has, are on the same side.

    Which files is drawn by their numbers alone, so that every run on this data set holds out the same ones, whatever
    its seed, its number of ranks or where it is resumed; a larger share holds out those of a smaller one, too.

    Raises ValueError if nothing is left to train on.
    """
    found = kept_if_large(
        len(dataset), lambda: ("held out", dataset.identity(), repr(share)), lambda: _choose(dataset, share)
    ).arrays
    part = f"{len(found['rest']):,} of them, {len(found['held']):,} held out"
    return SomeRows(dataset, found["rest"], part), SomeRows(dataset, found["held"], "held out")


def _choose(dataset: MediaDataset, share: float) -> KeptArrays:
    """The rows that are held out, and the rest, rising. Raises as :func:`hold_out`."""
    file_of = dataset.file_numbers()
    files = len(dataset) if file_of is None else int(file_of.max()) + 1
    count = max(1, round(share * files))
    if count >= files:
        raise ValueError(
            f"--validate_share {share:g}: of {files:,} samples {count:,} are held out, and none is left to train on; "
            "lower it"
        )
    chosen = np.zeros(files, dtype=bool)
    chosen[permuted(np.arange(count), files, SEED, 0, 0)] = True
    held = chosen if file_of is None else chosen[file_of]
    return KeptArrays({"rest": np.flatnonzero(~held), "held": np.flatnonzero(held)}, {})


def stream_of(array: np.ndarray, as_hashed: Callable[[np.ndarray], np.ndarray]) -> HashedStream:
    """The bytes of ``as_hashed(array)``, which works on parts of it as well; the array may be mapped from a file."""
    parts = (as_hashed(array[first : first + _ROWS]).tobytes() for first in range(0, len(array), _ROWS))
    return HashedStream(len(array) * as_hashed(array[:1]).nbytes, parts)


def _of_whole(name: str) -> Any:
    """A setting of :class:`SomeRows` that is ``whole``'s."""

    def store(rows: "SomeRows", value: Any) -> None:
        rows.whole = copy.copy(rows.whole)  # which a copy of these rows shares
        setattr(rows.whole, name, value)

    return property(lambda rows: getattr(rows.whole, name), store)


class SomeRows(MediaDataset):
    """Some rows of another data set, numbered anew; everything else is as it is there.

    rows: those of ``whole``, rising. part: says which they are, for people. Raises ValueError without any.
    """

    as_bytes, enlarges = _of_whole("as_bytes"), _of_whole("enlarges")

    def __init__(self, whole: MediaDataset, rows: np.ndarray, part: str):
        if len(rows) == 0:
            raise ValueError("no rows of the data set are chosen")
        self.whole, self.rows, self.part = copy.copy(whole), rows, part
        for name in ("kind", "conditioning", "class_names", "sample_shape", "random_flip", "random_window", "note"):
            setattr(self, name, getattr(whole, name))
        self.seed, self.max_bad = whole.seed, whole.max_bad

    def __getattr__(self, name: str) -> Any:
        """What only some kinds of data sets have, as cached latents their scaling factor."""
        if name.startswith("_") or name == "whole":  # while a copy is being made there is no ``whole`` yet
            raise AttributeError(name)
        return getattr(self.whole, name)

    @property
    def shortened(self) -> int:
        return self.whole.shortened

    @property
    def bytes_read(self) -> int:
        return self.whole.bytes_read

    def __len__(self) -> int:
        return len(self.rows)

    def load(self, row: int, flip: bool) -> Tensor:
        return self.whole.load(self._of(row), flip)

    def load_at(self, row: int, flip: bool, start: float | None) -> Tensor:
        return self.whole.load_at(self._of(row), flip, start)

    def load_sized(self, row: int, flip: bool, start: float | None, shape: tuple[int, int, int]) -> Tensor:
        return self.whole.load_sized(self._of(row), flip, start, shape)

    def prefetch(self, rows: Sequence[int]) -> None:
        self.whole.prefetch([self._of(row) for row in rows])

    def media_sizes(self) -> np.ndarray | None:
        sizes = self.whole.media_sizes()
        return None if sizes is None else sizes[self.rows]

    def latent_sizes(self) -> np.ndarray:
        return self.whole.latent_sizes()[self.rows]

    def source(self, row: int) -> str:
        return self.whole.source(self._of(row))

    def label(self, row: int) -> int:
        return self.whole.label(self._of(row))

    def caption(self, row: int) -> str | None:
        return self.whole.caption(self._of(row))

    def embedding(self, row: int) -> Embedding | None:
        return self.whole.embedding(self._of(row))

    def source_rows(self) -> SourceRows | None:
        found = self.whole.source_rows()
        return None if found is None else found.of_rows(self.rows)

    def shape_keys(self) -> np.ndarray | None:
        keys = self.whole.shape_keys()
        return None if keys is None else keys[self.rows]

    def shape_key(self, row: int) -> int:
        return self.whole.shape_key(self._of(row))

    def next_row(self, row: int) -> int:
        """The next of these rows that has the same shape: an unreadable sample is replaced by none of the others."""
        key = self.shape_key(row)
        later = ((row + step) % len(self) for step in range(1, len(self)))
        return next((other for other in later if self.shape_key(other) == key), row)

    def identity(self) -> str:
        return hash_parts("rows", self.whole.identity(), stream_of(self.rows, lambda rows: rows.astype(np.int64)))

    def contents(self) -> str | None:
        return self.whole.contents()

    def verification(self, share: int, shares: int) -> Verification | None:
        return self.whole.verification(share, shares)

    def describe(self) -> str:
        return f"{self.whole.describe()}; {self.part}"

    def _of(self, row: int) -> int:
        return int(self.rows[row])
