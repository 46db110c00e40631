"""Split a data set into rows for training and rows held out for validation."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from opendit.common.utils import hash_parts
from opendit.data.base import (
    PLAIN,
    USUALLY_COUNTED,
    Description,
    Fingerprint,
    Item,
    MediaDataset,
    Medium,
    Shapes,
    Size,
    View,
)
from opendit.data.order import permuted
from opendit.data.row_arrays import Complement, chosen, kept_array, stream_of

_DRAWN = 2**17  # entries of the permutation to compute at once
SEED = 0x76616C  # seed for choosing held-out files; independent of --global_seed


def hold_out(dataset: MediaDataset, share: float) -> tuple["SomeRows", "SomeRows"]:
    """Split a data set's rows into (training set, held-out set).

    Among n files, round(share x n) are held out, at least one. Rows from the same file are never separated. The choice
    depends only on the number of files, and a larger share only adds files.

    Raises ValueError if no files are left for training."""
    files_of = dataset.describe().files
    sources: list[tuple[int, np.ndarray | None]] = [(len(dataset), None)] if files_of is None else files_of()
    counts = [rows if file_of is None else int(file_of.max()) + 1 for rows, file_of in sources]
    files = sum(counts)
    count = max(1, round(share * files))
    if count >= files:
        raise ValueError(
            f"--validate_share {share:g}: of {files:,} samples {count:,} are held out, and none is left to train on; "
            "lower it"
        )
    # Store the smaller set as an array of rows, and the larger one as its complement.
    fewer_held = 2 * count <= files
    drawn = _drawn(*((0, count) if fewer_held else (count, files)), files)
    few = _rows_of(drawn, sources, counts).astype(np.int32 if len(dataset) < 2**31 else np.int64, copy=False)
    others = Complement(len(dataset), few)
    training, held = (others, few) if fewer_held else (few, others)
    part = f"{len(training):,} of them, {len(held):,} held out"
    return SomeRows(dataset, training, part), SomeRows(dataset, held, "held out")


def _drawn(start: int, stop: int, files: int) -> np.ndarray:
    """Return entries [start, stop) of the permutation of file numbers by ``SEED``, sorted."""
    found = np.empty(stop - start, dtype=np.int32 if files < 2**31 else np.int64)
    for first in range(start, stop, _DRAWN):
        places = np.arange(first, min(stop, first + _DRAWN))
        found[first - start : first - start + len(places)] = permuted(places, files, SEED, 0, 0)
    found.sort()
    return found


def _rows_of(files: np.ndarray, sources: list[tuple[int, np.ndarray | None]], counts: list[int]) -> np.ndarray:
    """Return the rows of ``files``, ascending. files: ascending file numbers. counts: each source's number of files."""
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


class SomeRows(MediaDataset):
    """Some rows of another data set, renumbered from 0.

    rows: the chosen rows of ``whole``, ascending. part: the subset's name in the log. Raises ValueError for no rows."""

    def __init__(self, whole: MediaDataset, rows: np.ndarray | Complement, part: str):
        if len(rows) == 0:
            raise ValueError("no rows of the data set are chosen")
        self.whole, self.rows, self.part = copy.copy(whole), rows, part
        self._keys: np.ndarray | int | None = None
        self._known: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, row: int, view: View = PLAIN) -> Item:
        return self.whole.read(self._of(row), view)

    def source(self, row: int) -> str:
        return self.whole.source(self._of(row))

    def label(self, row: int) -> int:
        return self.whole.label(self._of(row))

    def caption(self, row: int) -> str | None:
        return self.whole.caption(self._of(row))

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        return self.whole.preview(self._of(row))

    def prefetch(self, rows: Sequence[int]) -> None:
        self.whole.prefetch([self._of(row) for row in rows])

    def shapes(self) -> Shapes:
        shapes = self.whole.shapes()
        if self._keys is None:
            self._keys = self._find_keys(shapes.keys)
        latents = shapes.latents
        return replace(
            shapes,
            keys=self._keys,
            media=lambda: None if (sizes := shapes.media()) is None else chosen(sizes, self.rows),
            latents=latents and (lambda: self._latent_sizes(latents())),
        )

    def _find_keys(self, keys: np.ndarray | int) -> np.ndarray | int:
        if isinstance(keys, int):
            return keys
        return kept_array(
            len(self),
            lambda: hash_parts("keys of rows", self.fingerprint().identity, str(keys.dtype), stream_of(keys)),
            lambda: chosen(keys, self.rows),
        )

    def _latent_sizes(self, whole: list[tuple[int, Size]]) -> list[tuple[int, Size]]:
        ends, sizes = zip(*whole, strict=True)
        return list(zip(self._below(ends), sizes, strict=True))

    def fingerprint(self) -> Fingerprint:
        whole = self.whole.fingerprint()
        return Fingerprint(lambda: self._identity(whole), lambda: whole.contents, whole.checksums)

    def _identity(self, whole: Fingerprint) -> str:
        if self._known is None:  # hashing many rows takes a second
            rows = stream_of(self.rows, lambda rows: rows.astype(np.int64))
            self._known = hash_parts("rows", whole.identity, rows)
        return self._known

    def describe(self) -> Description:
        about = self.whole.describe()
        counted = sum(each for _, each in about.counted_captions) if about.counted_captions else USUALLY_COUNTED
        return replace(
            about,
            text=f"{about.text}; {self.part}",
            counted_captions=((len(self), min(counted, USUALLY_COUNTED)),),
            sources=about.sources and about.sources.of_rows(self._below(about.sources.ends)),
            files=None,
        )

    def _of(self, row: int) -> int:
        return int(self.rows[row])

    def _below(self, ends: Sequence[int]) -> list[int]:
        """Return how many chosen rows are below each number in ``ends``."""
        return self.rows.searchsorted(ends).tolist()
