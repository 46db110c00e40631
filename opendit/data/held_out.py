"""A share of a data set that is held out of training, and the rest: together all rows, none in both."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.data.all_but import AllBut
from opendit.data.base import Embedding, MediaDataset
from opendit.data.order.schedule import SourceRows
from opendit.data.order.sequences import permuted
from opendit.data.row_arrays import chosen, next_of_key, stream_of
from opendit.data.size_cache import kept_array
from opendit.data.verification import Verification

_DRAWN = 2**17  # places of a permutation that are computed at once
SEED = 0x76616C  # of everything random about held-out samples: runs of any --global_seed have the same ones


def hold_out(dataset: MediaDataset, share: float) -> tuple["SomeRows", "SomeRows"]:
    """(what is left to train on, what is held out): of n files round(share x n), but one at least. All rows of a file,
    as a picture with several captions has, are on the same side.

    Which files is drawn by their numbers alone, so that every run on this data set holds out the same ones, whatever
    its seed, its number of ranks or where it is resumed; a larger share holds out those of a smaller one, too.

    Raises ValueError if nothing is left to train on.
    """
    sources = dataset.files_of_sources()
    counts = [rows if file_of is None else int(file_of.max()) + 1 for rows, file_of in sources]
    files = sum(counts)
    count = max(1, round(share * files))
    if count >= files:
        raise ValueError(
            f"--validate_share {share:g}: of {files:,} samples {count:,} are held out, and none is left to train on; "
            "lower it"
        )
    # The smaller side is drawn and listed; the other one is all but that.
    fewer_held = 2 * count <= files
    drawn = _drawn(*((0, count) if fewer_held else (count, files)), files)
    few = _rows_of(drawn, sources, counts).astype(np.int32 if len(dataset) < 2**31 else np.int64, copy=False)
    others = AllBut(len(dataset), few)
    training, held = (others, few) if fewer_held else (few, others)
    part = f"{len(training):,} of them, {len(held):,} held out"
    return SomeRows(dataset, training, part), SomeRows(dataset, held, "held out")


def _drawn(start: int, stop: int, files: int) -> np.ndarray:
    """The files at these places of the permutation that says which are held out, rising."""
    found = np.empty(stop - start, dtype=np.int32 if files < 2**31 else np.int64)
    for first in range(start, stop, _DRAWN):
        places = np.arange(first, min(stop, first + _DRAWN))
        found[first - start : first - start + len(places)] = permuted(places, files, SEED, 0, 0)
    found.sort()
    return found


def _rows_of(files: np.ndarray, sources: list[tuple[int, np.ndarray | None]], counts: list[int]) -> np.ndarray:
    """The rows that show these files, both rising. sources: see ``files_of_sources``; counts: the files of each."""
    ends = np.cumsum(counts)
    rows, parts = 0, []
    for (size, file_of), count, end in zip(sources, counts, ends.tolist(), strict=True):
        low, high = np.searchsorted(files, [end - count, end])
        mine = files[low:high] - (end - count)
        if file_of is not None:
            of_files = np.zeros(count, dtype=bool)
            of_files[mine] = True
            mine = np.flatnonzero(of_files[file_of])
        parts.append(mine if len(sources) == 1 else mine.astype(np.int64) + rows)
        rows += size
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _of_whole(name: str) -> Any:
    """A setting of :class:`SomeRows` that is ``whole``'s."""

    def store(rows: "SomeRows", value: Any) -> None:
        rows.whole = copy.copy(rows.whole)  # which a copy of these rows shares
        setattr(rows.whole, name, value)

    return property(lambda rows: getattr(rows.whole, name), store)


class SomeRows(MediaDataset):
    """Some rows of another data set, numbered anew; everything else is as it is there.

    rows: those of ``whole``, rising, listed or all but a few. part: says which they are, for people. Raises ValueError
    without any.
    """

    as_bytes, enlarges = _of_whole("as_bytes"), _of_whole("enlarges")

    def __init__(self, whole: MediaDataset, rows: np.ndarray | AllBut, part: str):
        if len(rows) == 0:
            raise ValueError("no rows of the data set are chosen")
        self.whole, self.rows, self.part = copy.copy(whole), rows, part
        for name in ("kind", "conditioning", "class_names", "sample_shape", "random_flip", "random_window", "note"):
            setattr(self, name, getattr(whole, name))
        self.seed, self.max_bad = whole.seed, whole.max_bad
        self._shape_keys: np.ndarray | None = None
        self._rows_identity: str | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only some kinds of data sets have, such as cached latents' scaling factor."""
        if name.startswith("_") or name == "whole":  # while a copy is being made there is no ``whole`` yet
            raise AttributeError(name)
        return getattr(self.whole, name)

    @property
    def shortened(self) -> int:
        return self.whole.shortened

    @property
    def bytes_read(self) -> int:
        return self.whole.bytes_read

    def sizes_key(self) -> str:
        return self.whole.sizes_key()

    def frame_rates(self) -> list[float]:
        return self.whole.frame_rates()

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
        return None if sizes is None else chosen(sizes, self.rows)

    def latent_sizes(self) -> list[tuple[int, tuple[int, int, int]]]:
        ends, sizes = zip(*self.whole.latent_sizes(), strict=True)
        return list(zip(self._below(ends), sizes, strict=True))

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
        return None if found is None else found.of_rows(self._below(found.ends))

    def shape_keys(self) -> np.ndarray | None:
        keys = self.whole.shape_keys() if self._shape_keys is None else None
        if keys is not None:
            self._shape_keys = kept_array(
                len(self),
                lambda: hash_parts("keys of rows", self.identity(), str(keys.dtype), stream_of(keys)),
                lambda: chosen(keys, self.rows),
            )
        return self._shape_keys

    def shape_key(self, row: int) -> int:
        return self.whole.shape_key(self._of(row))

    def next_row(self, row: int) -> int:
        """The next of these rows that has the same shape: an unreadable sample is replaced by none of the others."""
        keys = self.shape_keys()
        return (row + 1) % len(self) if keys is None else next_of_key(keys, row)

    def identity(self) -> str:
        if self._rows_identity is None:  # a run asks for it several times, and many rows take a second
            rows = stream_of(self.rows, lambda rows: rows.astype(np.int64))
            self._rows_identity = hash_parts("rows", self.whole.identity(), rows)
        return self._rows_identity

    def contents(self) -> str | None:
        return self.whole.contents()

    def verification(self, share: int, shares: int) -> Verification | None:
        return self.whole.verification(share, shares)

    def describe(self) -> str:
        return f"{self.whole.describe()}; {self.part}"

    def _of(self, row: int) -> int:
        return int(self.rows[row])

    def _below(self, ends: Sequence[int]) -> list[int]:
        """Count the rows that lie before each of these rows of ``whole``."""
        return self.rows.searchsorted(ends).tolist()
