"""Data sets, and the reading of samples from them.

A data set is five methods: ``__len__``, ``read``, ``shapes``, ``fingerprint`` and ``describe``. Whatever combines data
sets (blends, held-out shares, shapes near a sample's own) is a data set that wraps others. A training step asks for a
sample by a ``SampleKey``, which says where in the run the sample is used. Everything random about the sample is keyed
by it (see ``opendit.diffusion.random``), so the same key gives the same numbers in any process, on any number of GPUs
and after any resume.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from opendit.common.utils import DataError
from opendit.data.contents import Checksums
from opendit.data.enlarging import Small
from opendit.data.files import printable
from opendit.data.medium import Medium, of_moments, of_pixels
from opendit.data.order.schedule import SourceRows
from opendit.data.row_arrays import next_of_key
from opendit.diffusion.random import Stream, integers, uniform

USUALLY_COUNTED = 10_000  # captions that are looked up before a start
Size = tuple[int, int, int]  # frames, height and width; all 0 for a medium that can't be read


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


class View(NamedTuple):
    """The way in which a row is read.

    flip: mirror it left to right. place: where it is cropped, (down, across) in [0, 1) of the room there is; None: in
    the middle. tags: key of the order of its caption's tags, see ``recaptioned``. start: the place in [0, 1) at which a
    clip's window begins; None: its middle. shape: (frames, height, width) in pixels instead of the data set's
    ``sample_shape``; cached latents ignore it. as_bytes: give pixels as uint8, for ``to_pixels`` to turn into [-1, 1]
    where the batch is needed; a data set whose samples are not made of bytes ignores it. enlarge: False gives clips
    that are smaller than asked for as small as they are, for the device to enlarge (``opendit.data.enlarging``); it
    requires as_bytes, and only files of clips heed it.
    """

    flip: bool = False
    place: tuple[float, float] | None = None
    tags: int | None = None
    start: float | None = None
    shape: Size | None = None
    as_bytes: bool = False
    enlarge: bool = True


PLAIN = View()


class Item(NamedTuple):
    """One sample.

    Attributes:
        x: float32 of the data set's ``sample_shape``, or uint8, see :class:`View`.
        y, text: its class, or its caption.
        skipped: "path: reason" of each unreadable file that this sample replaces.
        embedding: of the caption, if it is cached.
        small, whole: if ``x`` is smaller than requested, the enlargement still to do, and the (height, width) to reach.
        shortened: True if the clip was too short, so that its frames are closer together than requested.
        bytes_read: from files and tars; 0 if samples are generated or in memory.
    """

    x: Tensor
    y: int = 0
    text: str | None = None
    skipped: tuple[str, ...] = ()
    embedding: Embedding | None = None
    small: Small | None = None
    whole: tuple[int, ...] = ()
    shortened: bool = False
    bytes_read: int = 0


class BadSample(Exception):
    """One file can't be read; another sample replaces it."""

    def __init__(self, path: str, reason: object):
        super().__init__(f"{printable(path)}: {printable(str(reason))}")


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class ClipReading:
    """The frames that are read of a clip: see ``clips.read_clip``."""

    num_frames: int
    frame_interval: int
    short_clips: str
    fps: float | None


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of a data set, for models, logs and training.

    Attributes:
        text: one line for the log.
        kind: "pixels" (x in [-1, 1]) or "latents" (x holds a VAE's means and standard deviations).
        conditioning: "label" (items have a class ``y``) or "text" (items have a caption ``text``).
        class_names: one name per class, in the order of the labels; empty for "text".
        sample_shape: (C, H, W) or (C, T, H, W) of an item.
        clips: how clips are read; None without clips.
        random_flip: training mirrors half of the samples, keyed by Stream.FLIP.
        random_window: training begins each clip at a place keyed by Stream.CROP instead of in its middle.
        random_crop: training crops at a place keyed by Stream.PLACE instead of in the middle.
        random_tags: training shuffles or drops tags of captions, keyed by Stream.TAGS.
        seed: the run's.
        max_bad: the largest share of unreadable files that training skips.
        vae, scaling_factor, shift_factor: of latents, see ``latents.LatentDataset``.
        text_encoder, max_tokens, empty_caption: of cached embeddings of captions.
        cut_captions: lines about captions that were cut when they were embedded.
        notes: lines about what was left out when it was opened.
        counted_captions: (rows, number of captions that are checked before a start) of each source: more for captions
            in memory, fewer for slow storage; empty: ``USUALLY_COUNTED``.
        sources: of a blend.
        blend: its weights, for people and for the resume fingerprint.
        files: returns (rows, file number of each or None) for each source, since several rows may show one file, such
            as a picture with several captions; None if each row shows its own.
        largest_label: returns the largest label and a sample that has it, None if that is not known.
    """

    text: str
    sample_shape: tuple[int, ...]
    kind: str = "pixels"
    conditioning: str = "label"
    class_names: list[str] = field(default_factory=list)
    clips: ClipReading | None = None
    random_flip: bool = False
    random_window: bool = False
    random_crop: bool = False
    random_tags: bool = False
    seed: int = 0
    max_bad: float = 0.05
    vae: str | None = None
    scaling_factor: float | tuple[float, ...] | None = None
    shift_factor: float | tuple[float, ...] | None = None
    text_encoder: str | None = None
    max_tokens: int = 0
    empty_caption: Embedding | None = None
    cut_captions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    counted_captions: tuple[tuple[int, int], ...] = ()
    sources: SourceRows | None = None
    blend: str | None = None
    files: Callable[[], list[tuple[int, np.ndarray | None]]] | None = None
    largest_label: Callable[[], tuple[int, str] | None] = _nothing

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The shapes of a data set's samples, and the sizes of the media that they are made of.

    Attributes:
        keys: (rows,) integers, possibly memory-mapped, or one integer for all rows. Rows with equal keys have samples
            of one shape; only those may share a micro-batch.
        media: returns (rows, 3) int32, the upright :data:`Size` of each row's file; None if all have ``sample_shape``.
        read_as: identifies everything besides the media that these sizes depend on.
        latents: returns the sizes of cached latents as runs (row after the run, size), from the first row on.
        frame_rates: returns the frames per second of some clips, spread evenly; empty if there are no clips or nothing
            is known.
    """

    keys: np.ndarray | int = 0
    media: Callable[[], np.ndarray | None] = _nothing
    read_as: str = ""
    latents: Callable[[], list[tuple[int, Size]]] | None = None
    frame_rates: Callable[[], list[float]] = list

    def key(self, row: int) -> int:
        """Return the key of one row."""
        return int(self.keys[row]) if isinstance(self.keys, np.ndarray) else self.keys

    @property
    def array(self) -> np.ndarray | None:
        """The keys where there are several; None if all rows have one shape."""
        return self.keys if isinstance(self.keys, np.ndarray) else None

    def frame_rate(self) -> float | None:
        """Return the median of the frame rates; None if there are none."""
        rates = self.frame_rates()
        return median(rates) if rates else None


class Fingerprint:
    """Identity of a data set; each hash is computed when it is first asked for.

    Attributes:
        checksums: of the files, None if none are known.
    """

    def __init__(
        self,
        identity: Callable[[], str],
        contents: Callable[[], str | None] = _nothing,
        checksums: Checksums | None = None,
    ):
        self._identity, self._contents, self.checksums = identity, contents, checksums

    @cached_property
    def identity(self) -> str:
        """A hash of what the rows are: names and labels, or contents."""
        return self._identity()

    @cached_property
    def contents(self) -> str | None:
        """A hash of what the files hold whose names :attr:`identity` knows (see ``contents.hash_files``); None if that
        knows the contents themselves."""
        return self._contents()


class MediaDataset(Dataset[Any]):
    """Base class of all data sets. A subclass writes ``__len__``, ``read``, ``fingerprint`` and ``describe``, and
    ``shapes`` if its samples have several; it overrides the other methods where it can do better."""

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, row: int, view: View = PLAIN) -> Item:
        """Read the sample of a row. Raises BadSample if it can't be read."""
        raise NotImplementedError

    def shapes(self) -> Shapes:
        """Return the shapes of the samples."""
        return Shapes()

    def fingerprint(self) -> Fingerprint:
        """Return what tells this data set from another one."""
        raise NotImplementedError

    def describe(self) -> Description:
        """Return what the data set holds. It may take milliseconds: keep the result in a loop."""
        raise NotImplementedError

    # --- parts of reading

    def source(self, row: int) -> str:
        """Name the file that a row comes from, for messages."""
        return f"row {row} of {type(self).__name__}"

    def label(self, row: int) -> int:
        """Read only a row's class; 0 if the conditioning is by caption. Raises BadSample."""
        return self.read(row).y

    def caption(self, row: int) -> str | None:
        """Read only a row's caption; None if the conditioning is by label. Raises BadSample."""
        return self.read(row).text

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        """Show a row to people: what its file holds, and its first, middle and last frame, uint8 (n, H, W) or
        (n, H, W, 3), at their own size. Raises an exception of any kind."""
        x = self.read(row).x
        return of_moments(x) if self.describe().kind == "latents" else of_pixels(x)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Begin to fetch rows that are read next, in this order, if the storage answers late."""

    def next_row(self, row: int) -> int:
        """Return the row that replaces an unreadable one: the next one of the same shape, in a circle."""
        keys = self.shapes().array
        return (row + 1) % len(self) if keys is None else next_of_key(keys, row)

    def __getitem__(self, sample_key: SampleKey) -> Item:
        """Read the key's sample as training does; see :class:`SampleReader`."""
        return next(SampleReader(self).items([sample_key]))

    def __getitems__(self, sample_keys: list[SampleKey]) -> list[Item]:
        return list(SampleReader(self).items(sample_keys))


class SampleReader:
    """Reads the samples that keys ask for: draws what is random about them, and replaces unreadable rows.

    as_bytes, enlarge: see :class:`View`. augment: False reads samples unmirrored, their middle, with whole captions.
    """

    def __init__(self, dataset: MediaDataset, *, as_bytes: bool = False, enlarge: bool = True, augment: bool = True):
        self.dataset, self.about = dataset, dataset.describe()
        self.view, self.augment = View(as_bytes=as_bytes, enlarge=enlarge or not as_bytes), augment

    def items(self, sample_keys: Sequence[SampleKey], on_read: Callable[[int], None] | None = None) -> Iterator[Item]:
        """Yield the samples of one step. Their random numbers are drawn at once, in 0.3 ms for all of them. on_read:
        called with each row right before it is read.

        Raises DataError when so many rows in turn are unreadable that more than ``max_bad`` of the data set must be.
        """
        key = self.about.seed, sample_keys[0].step, torch.tensor([each.index for each in sample_keys])
        drawn: dict[str, list[Any]] = {}
        if self.augment and self.about.random_flip:
            drawn["flip"] = integers(*key, Stream.FLIP, 2).bool().tolist()
        if self.augment and self.about.random_window:
            drawn["start"] = uniform(*key, Stream.CROP).tolist()
        if self.augment and self.about.random_crop:
            drawn["place"] = uniform(*key, Stream.PLACE, (2,)).tolist()
        if self.augment and self.about.random_tags:
            drawn["tags"] = integers(*key, Stream.TAGS, 2**31 - 1).tolist()
        self.dataset.prefetch([sample_key.sample for sample_key in sample_keys])
        for at, sample_key in enumerate(sample_keys):
            view = self.view._replace(**{name: values[at] for name, values in drawn.items()})
            yield self._item(sample_key.sample, view, on_read)

    def _item(self, first: int, view: View, on_read: Callable[[int], None] | None) -> Item:
        skipped: list[str] = []
        row = first
        # A gap of up to max_bad of the rows may lie in one place (one broken class folder): only a longer one is fatal.
        for _ in range(max(100, int(self.about.max_bad * len(self.dataset))) + 1):
            if on_read is not None:
                on_read(row)
            try:
                return self.dataset.read(row, view)._replace(skipped=tuple(skipped))
            except BadSample as bad:
                skipped.append(str(bad))
            row = self.dataset.next_row(row)
            if row == first:
                break  # all the rows of this shape
        raise DataError(f"{len(skipped)} files in turn can't be read: {name_few(skipped)}")


def to_pixels(x: Tensor) -> Tensor:
    """Convert pixels of 8 bits, in any memory order, to contiguous float32 in [-1, 1]; return anything else as is."""
    if x.dtype != torch.uint8:
        return x
    return x.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


class BadFileCounter:
    """Counts the files read and the unreadable ones, reports each of these once, and stops at too many.

    max_bad: largest share of unreadable files, judged once ``minimum`` files were read.
    on_skip: called with "path: reason", once per file.
    """

    def __init__(self, max_bad: float, on_skip: Callable[[str], None] | None = None, minimum: int = 100):
        self.max_bad, self.on_skip, self.minimum = max_bad, on_skip, minimum
        self.read = 0  # files tried, the unreadable ones included
        self.skipped = 0
        self.files: dict[str, None] = {}  # the distinct ones, in order

    def add(self, good: int, skipped: tuple[str, ...] | list[str]) -> None:
        """Count ``good`` readable files and the ``skipped`` ones. Raises DataError past ``max_bad``."""
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
    """Join the first few of many messages in one line."""
    more = f"; and {len(messages) - count:,} more" if len(messages) > count else ""
    return "; ".join(messages[:count]) + more


def flip_note(random_flip: bool) -> str:
    return "randomly mirrored" if random_flip else "not mirrored"
