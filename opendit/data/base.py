"""The interface of every data set to the rest of the program, and the count of unreadable files.

A data set holds rows; a training step asks for a row with a ``SampleKey`` that says where in the run the
sample is used. Everything random about the sample is keyed by it (see ``opendit.diffusion.random``), so the same key
gives the same numbers in any process, on any number of GPUs and after any resume.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from opendit.common.utils import DataError, hash_parts
from opendit.data.enlarging import Small
from opendit.data.files import printable
from opendit.data.medium import Medium, of_moments, of_pixels
from opendit.data.order.schedule import SourceRows
from opendit.data.verification import Verification
from opendit.diffusion.random import Stream, integers, uniform


class SampleKey(NamedTuple):
    """Asks a data set for one sample of the run."""

    sample: int  # row of the data set
    step: int  # global optimizer step
    index: int  # position in the global batch, counted across micro-batches and ranks


class Embedding(NamedTuple):
    """A caption as a frozen text encoder gave it, read from a cache: tokens (L, D) and pooled (D,) float16, and mask
    (L,) bool, False where the tokens are padding. In a batch all three have B in front."""

    tokens: Tensor
    mask: Tensor
    pooled: Tensor


class Item(NamedTuple):
    """One sample: ``x`` float32 of the data set's ``sample_shape``, its class ``y`` or its caption ``text``, and
    "path: reason" of every unreadable file that stood before it and was replaced.

    small: what is left to do where ``x`` is smaller than asked for, and then whole, the (height, width) to be."""

    x: Tensor
    y: int = 0
    text: str | None = None
    skipped: tuple[str, ...] = ()
    embedding: Embedding | None = None  # of the caption, where it is cached
    small: Small | None = None
    whole: tuple[int, ...] = ()


class BadSample(Exception):
    """One file can't be read; the run goes on with another one."""

    def __init__(self, path: str, reason: object):
        super().__init__(f"{printable(path)}: {printable(str(reason))}")


class MediaDataset(Dataset[Any]):
    """Base of all data sets. A subclass sets the attributes below and writes the methods that raise
    NotImplementedError; keys, flips and replacements of unreadable rows are done here, for all alike.

    kind: "pixels" (x in [-1, 1]) or "latents" (x holds a VAE's means and standard deviations).
    conditioning: "label" (items have a class ``y``) or "text" (items have a caption ``text``).
    class_names: one name a class, in the order of the labels; empty for "text".
    sample_shape: (C, H, W) or (C, T, H, W) of what one item holds.
    random_flip: mirror half of the samples, keyed by Stream.FLIP.
    random_window: read clips from a place drawn for each sample, keyed by Stream.CROP, rather than their middle.
    vae, scaling_factor, shift_factor: of latents; text_encoder, max_tokens, empty_caption: of captions; see
    ``LatentDataset``. Others have no such attributes.
    as_bytes: give pixels as uint8, for ``to_pixels`` to turn into [-1, 1] where the batch is needed; a data set whose
    samples are not made of bytes ignores it.
    enlarges: False gives clips that are smaller than asked for as small as they are, for the device to enlarge
    (``opendit.data.enlarging``); it goes with ``as_bytes``. Only a data set of files of clips heeds it.
    shortened: reads so far that took a clip's frames closer together than asked for, because it is too short.
    bytes_read: of files and tars, by reads so far; 0 where samples are made or lie in memory.
    on_read: called with a row right before it is read.
    counted_captions: how many captions are looked up before a start; a data set that has them in memory raises it, and
    one whose storage answers late lowers it.
    note: what else the log's line says. seed: the run's seed. max_bad: largest share of unreadable files that is
    skipped rather than an error.
    """

    kind: str = "pixels"
    conditioning: str = "label"
    class_names: list[str]
    sample_shape: tuple[int, ...]
    random_flip: bool = False
    random_window: bool = False
    as_bytes: bool = False
    enlarges: bool = True
    counted_captions: int = 10_000
    shortened: int = 0
    bytes_read: int = 0
    on_read: Callable[[int], None] | None = None
    vae: str
    scaling_factor: float | Sequence[float]
    shift_factor: float | Sequence[float]
    text_encoder: str | None
    max_tokens: int
    empty_caption: Embedding | None
    note: str = ""
    seed: int = 0
    max_bad: float = 0.05

    def __len__(self) -> int:
        raise NotImplementedError

    def load(self, row: int, flip: bool) -> Tensor:
        """The sample of a row, mirrored left to right if ``flip``; raises BadSample if it can't be read."""
        raise NotImplementedError

    def load_at(self, row: int, flip: bool, start: float | None) -> Tensor:
        """``load`` with the place in [0, 1) at which a clip's window begins, None for its middle. A data set of clips
        overrides it; pictures have no window."""
        return self.load(row, flip)

    def load_sized(self, row: int, flip: bool, start: float | None, shape: tuple[int, int, int]) -> Tensor:
        """``load_at`` with so many frames of (frames, height, width) pixels rather than ``sample_shape``'s. A data set
        whose media have sizes of their own overrides it."""
        return self.load_at(row, flip, start)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Told of the rows that are read next, in this order. A data set whose storage answers late begins to fetch
        them."""

    def side_lengths(self, row: int) -> tuple[int, ...]:
        """(height, width) of the row's sample."""
        return self.sample_shape[-2:]

    def media_size(self, row: int) -> tuple[int, int, int]:
        """(frames, height, width) of the row's medium as it lies on the disk, upright. Raises BadSample."""
        raise NotImplementedError

    def media_sizes(self) -> np.ndarray | None:
        """(rows, 3) int32, :meth:`media_size` of every row, 0 where it can't be read; None: all media have
        ``sample_shape``."""
        if type(self).media_size is MediaDataset.media_size:
            return None
        from opendit.data.media_size import SIZES, known_sizes  # which reads files as this module's data sets do

        identity = hash_parts(SIZES, self.identity(), self.contents() or "", self.sizes_key())
        return known_sizes(identity, len(self), self.media_size)

    def sizes_key(self) -> str:
        """Return a key of all that the sizes of the media depend on, apart from the media."""
        return ""

    def frame_rates(self) -> list[float]:
        """Frames a second of some clips' files, spread evenly; none where there are no clips, or nothing is known."""
        return []

    def frame_rate(self) -> float | None:
        """The median of :meth:`frame_rates`; None if there are none."""
        rates = self.frame_rates()
        return median(rates) if rates else None

    def latent_sizes(self) -> list[tuple[int, tuple[int, int, int]]]:
        """Return the sizes of cached latents, from the first row on: (end of the rows of one size, (frames, height,
        width))."""
        frames, height, width = (1, *self.sample_shape[1:])[-3:]
        return [(len(self), (frames, height, width))]

    def source(self, row: int) -> str:
        """Name the file that a row comes from, for messages."""
        return f"row {row} of {type(self).__name__}"

    def look_at(self, row: int) -> tuple[Medium, np.ndarray]:
        """A row for people (``preprocess.py look``): what its file holds, and its first, middle and last frame, uint8
        (n, H, W) or (n, H, W, 3), at their own size. Raises an exception of any kind."""
        x = self.load(row, False)
        return of_moments(x) if self.kind == "latents" else of_pixels(x)

    def label(self, row: int) -> int:
        raise NotImplementedError

    def largest_label(self) -> tuple[int, str] | None:
        """Return the largest label and a sample that has it, for messages; None where that is not known."""
        return None

    def caption(self, row: int) -> str | None:
        """The row's text; None where the conditioning is by label."""
        return None

    def caption_rows(self, most: int | None = None) -> np.ndarray:
        """The rows whose captions are counted before a start (``opendit.data.captions``), rising int64: all, or
        ``counted_captions`` of many, and ``most`` at most, in lots of neighbours, which lie in one file, spread
        evenly."""
        count = self.counted_captions if most is None else min(most, self.counted_captions)
        if len(self) <= count:
            return np.arange(len(self))
        lot = math.isqrt(count)
        starts = np.linspace(0, len(self) - lot, count // lot).astype(np.int64)
        return np.unique(starts[:, None] + np.arange(lot))

    def cached_captions(self) -> list[str]:
        """Lines on captions whose embeddings are cached, and which were cut when they were made."""
        return []

    def embedding(self, row: int) -> Embedding | None:
        """The caption's embedding; None where none is cached."""
        return None

    def source_rows(self) -> SourceRows | None:
        """Return the sources of the rows, for a data set with several sources; None for any other."""
        return None

    def shape_keys(self) -> np.ndarray | None:
        """(rows,) integers: rows of one key have samples of one shape, and only those may share a micro-batch. None:
        all have ``sample_shape``. It may be mapped from a file."""
        if type(self).shape_key is MediaDataset.shape_key:
            return None
        return np.array([self.shape_key(row) for row in range(len(self))])  # of a data set that knows one at a time

    def shape_key(self, row: int) -> int:
        """The key of one row; 0 where all rows are alike."""
        keys = self.shape_keys()
        return 0 if keys is None else int(keys[row])

    def file_numbers(self) -> np.ndarray | None:
        """(rows,) the number of the file that each row shows, from 0 on, where several rows may show the same one (a
        picture with several captions); None: each row shows its own. Of a data set of one source; of another see
        :meth:`files_of_sources`."""
        return None

    def files_of_sources(self) -> list[tuple[int, np.ndarray | None]]:
        """(rows, their :meth:`file_numbers`) of each source of the data set."""
        return [(len(self), self.file_numbers())]

    def next_row(self, row: int) -> int:
        """The row that replaces ``row`` if that is unreadable: of the same shape, and over all calls in a circle."""
        return (row + 1) % len(self)

    def identity(self) -> str:
        """A hash of what the rows are (names and labels, or contents), to tell two data sets apart."""
        raise NotImplementedError

    def contents(self) -> str | None:
        """A hash of what the files hold whose names :meth:`identity` knows (see ``contents.hash_files``); None where
        that knows the contents themselves."""
        return None

    def verification(self, share: int, shares: int) -> Verification | None:
        """Return the background verifier of this data set's checksums for process ``share`` of ``shares``; None if it
        has no checksums."""
        return None

    def describe(self) -> str:
        """One line for the log."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def __getitem__(self, sample_key: SampleKey) -> Item:
        """The key's sample, or the next readable row's. Raises DataError when so many rows in turn are
        unreadable that more than ``max_bad`` of the data set must be."""
        return next(self.items([sample_key]))

    def __getitems__(self, sample_keys: list[SampleKey]) -> list[Item]:
        return list(self.items(sample_keys))

    def items(self, sample_keys: list[SampleKey]) -> Iterator[Item]:
        """Samples of one step, one after the other: the same ones, but their random numbers are drawn at once, 0.3 ms
        in all."""
        key = self.seed, sample_keys[0].step, torch.tensor([each.index for each in sample_keys])
        flips, windows = [False] * len(sample_keys), [None] * len(sample_keys)
        if self.random_flip:
            flips = integers(*key, Stream.FLIP, 2).bool().tolist()
        if self.random_window:
            windows = uniform(*key, Stream.CROP).tolist()
        self.prefetch([sample_key.sample for sample_key in sample_keys])
        for sample_key, flip, start in zip(sample_keys, flips, windows, strict=True):
            yield self._item(sample_key.sample, flip, start)

    def _item(self, first: int, flip: bool, start: float | None) -> Item:
        skipped: list[str] = []
        row = first
        # A gap of up to max_bad of the rows may lie in one place (one broken class folder): only a longer one is fatal.
        for _ in range(max(100, int(self.max_bad * len(self))) + 1):
            if self.on_read is not None:
                self.on_read(row)
            try:
                x = self.load_at(row, flip, start)
                item = Item(x, self.label(row), self.caption(row), tuple(skipped), self.embedding(row))
                if self.enlarges or x.dtype != torch.uint8 or x.shape[-2:] == (whole := self.side_lengths(row)):
                    return item
                return item._replace(small=Small(x.shape[-2], x.shape[-1], flip), whole=whole)
            except BadSample as bad:
                skipped.append(str(bad))
            row = self.next_row(row)
            if row == first:
                break  # all the rows of this shape
        raise DataError(f"{len(skipped)} files in turn can't be read: {name_few(skipped)}")


def to_pixels(x: Tensor) -> Tensor:
    """Pixels of 8 bits, in any order of memory, to contiguous float32 in [-1, 1]; anything else as it is."""
    if x.dtype != torch.uint8:
        return x
    return x.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


class BadFileCounter:
    """Counts the files read and the unreadable ones, reports each of these once, and stops at too many.

    max_bad: largest share of unreadable files, judged once ``minimum`` files were read.
    on_skip: called with "path: reason", once a file.
    """

    def __init__(self, max_bad: float, on_skip: Callable[[str], None] | None = None, minimum: int = 100):
        self.max_bad, self.on_skip, self.minimum = max_bad, on_skip, minimum
        self.read = 0  # files tried, the unreadable ones included
        self.skipped = 0
        self.files: dict[str, None] = {}  # the distinct ones, in order

    def add(self, good: int, skipped: tuple[str, ...] | list[str]) -> None:
        """Counts ``good`` readable files and the ``skipped`` ones; raises DataError past ``max_bad``."""
        self.read += good + len(skipped)
        self.skipped += len(skipped)
        for file in skipped:
            if file not in self.files:
                self.files[file] = None
                if self.on_skip is not None:
                    self.on_skip(file)
        if self.read >= self.minimum and self.skipped > self.max_bad * self.read:
            raise DataError(
                f"{self.skipped} of the {self.read} files read so far can't be read, more than {self.max_bad:.0%}: "
                f"{name_few(list(self.files))}. Remove or repair them."
            )


def name_few(messages: list[str], count: int = 5) -> str:
    """The first few of many messages, in one line."""
    more = f"; and {len(messages) - count:,} more" if len(messages) > count else ""
    return "; ".join(messages[:count]) + more


def flip_note(dataset: MediaDataset) -> str:
    return "randomly mirrored" if dataset.random_flip else "not mirrored"
