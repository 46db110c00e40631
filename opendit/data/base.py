"""The interface of data sets, and the reading of samples.

Every data set is a ``MediaDataset``. Blends and held-out splits wrap other data sets.

Training requests each sample by a ``SampleKey``. The key and the run's seed determine all random changes of a sample.
So samples do not depend on the process, the number of GPUs, or interruptions."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from opendit.common.utils import DataError
from opendit.data.files import Verification, name_few, printable
from opendit.data.order import SourceRows
from opendit.data.row_arrays import next_of_key
from opendit.diffusion.random import Stream, integers, uniform

# Tolerance of display times in seconds, because Matroska rounds times to milliseconds.
ROUNDING = 1e-3 + 1e-6
COLOURS = "colours"  # key of ``Medium.colours`` in ``Image.info``
# Previews show these quantiles of the latents as black and white.
_DARKEST, _BRIGHTEST = 0.02, 0.98


@dataclass(frozen=True)
class Medium:
    """Properties of a picture or clip."""

    frames: int  # 1 for a picture
    height: int
    width: int
    fps: float = 0.0  # 0 for a picture
    duration: float = 0.0  # display time of a clip in seconds; 0 means frames / fps
    colours: str = ""  # a name such as "HDR (PQ)" if the file's colours are converted when it is read

    @property
    def seconds(self) -> float:
        return self.duration or (self.frames / self.fps if self.fps else 0.0)

    def frames_at(self, fps: float | None) -> int:
        """Return the number of frames at ``fps`` frames per second, or all frames if either rate is None or 0."""
        return self.frames if fps is None or not self.fps else max(1, math.ceil((self.seconds - ROUNDING) * fps))


def of_picture(picture: Image.Image) -> tuple[Medium, np.ndarray]:
    """Return (medium, frames) of a decoded picture. The frames are (1, H, W) or (1, H, W, 3) uint8."""
    return Medium(1, picture.height, picture.width, colours=picture.info.get(COLOURS, "")), np.asarray(picture)[None]


def of_pixels(x: Tensor) -> tuple[Medium, np.ndarray]:
    """Return (medium, frames) of a sample (1 or 3, [T,] H, W) in [-1, 1], see ``MediaDataset.preview``."""
    x = x[:, None] if x.ndim == 3 else x
    length = x.shape[1]
    shown = x[:, sorted({0, length // 2, length - 1})].add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    frames = shown[0] if len(shown) == 1 else shown.permute(1, 2, 3, 0)
    height, width = x.shape[2:]
    return Medium(length, height, width), frames.numpy()


def of_moments(moments: Tensor) -> tuple[Medium, np.ndarray]:
    """Return (medium, frames) of a VAE's C means and C standard deviations (2C, [T,] h, w). The first three means are
    shown as red, green and blue; if C < 3, the first mean is shown as grey."""
    channels = len(moments) // 2
    means = moments[: 3 if channels >= 3 else 1].float()
    low, high = torch.quantile(means.flatten()[: 2**20], torch.tensor([_DARKEST, _BRIGHTEST])).tolist()
    return of_pixels((means - low) / max(high - low, 1e-6) * 2 - 1)


def count_colours(media: Iterable[Medium]) -> list[str]:
    """Return lines such as "2 clips are HDR (PQ), tone-mapped to SDR", one for each kind of converted colours."""
    counts = Counter((medium.colours, medium.frames > 1) for medium in media if medium.colours)
    lines = []
    for (colours, clips), count in sorted(counts.items()):
        what = ("clip" if clips else "picture") + ("s are" if count > 1 else " is")
        done = "tone-mapped to SDR" if colours.startswith("HDR") else "converted to BT.709"
        lines.append(f"{count:,} {what} {colours}, {done}")
    return lines


class Small(NamedTuple):
    """Size of a sample that is smaller than its batch entry. ``clips.enlarge`` enlarges the sample."""

    height: int
    width: int
    mirrored: bool


USUALLY_COUNTED = 10_000  # number of captions that are checked before training starts
Size = tuple[int, int, int]  # frames, height and width; all 0 for a medium that can't be read


class SampleKey(NamedTuple):
    """Names one sample of a training run: the row to read, and the step and position that use it."""

    sample: int  # row in the data set
    step: int  # global optimizer step
    index: int  # position in the global batch, counted across micro-batches and ranks


class Embedding(NamedTuple):
    """Cached output of a frozen text encoder for a caption. A batch adds a leading dimension B."""

    tokens: Tensor  # (L, D) float16, one vector per token
    mask: Tensor  # (L,) bool, False for padding
    pooled: Tensor  # (D,) float16, one vector for the caption


class FirstFrames(NamedTuple):
    """Cached inputs of an image-to-video model, from a clip's first frame. A batch adds a leading dimension B."""

    latents: Tensor  # (C, t, h, w) float16, unscaled VAE means of the clip, where frames after the first are grey
    # (L, D) float16, an image encoder's tokens for the first frame; (0, 0) if the model has no such encoder
    tokens: Tensor


class View(NamedTuple):
    """Options for reading one row."""

    flip: bool = False  # mirror the sample left to right
    # Crop offset (down, across), as fractions in [0, 1) of the largest offset; None centres the crop.
    place: tuple[float, float] | None = None
    tags: int | None = None  # random key that changes the caption's tags (``Recaptioned``); None changes none
    start: float | None = None  # number in [0, 1) that selects a window of a clip; None selects the middle window
    # (frames, height, width) in pixels; None means ``sample_shape``. Cached latents and ``digits`` ignore it.
    shape: Size | None = None
    as_bytes: bool = False  # return stored uint8 pixels as uint8, see ``to_pixels``
    enlarge: bool = True  # False, only with as_bytes: return small clips as they are, for ``clips.enlarge``


PLAIN = View()


class Item(NamedTuple):
    """One sample."""

    x: Tensor  # pixels or latents, float32 or uint8; :class:`View` determines shape and dtype
    y: int = 0  # class, if the conditioning is by label
    text: str | None = None  # caption, if the conditioning is by text
    skipped: tuple[str, ...] = ()  # "path: reason" of unreadable rows that this sample replaces
    embedding: Embedding | None = None
    features: Tensor | None = None  # (N, width) float16 cached features of the picture's tokens
    first: FirstFrames | None = None
    small: Small | None = None  # size of ``x`` before enlarging; None if ``x`` has full size
    whole: tuple[int, ...] = ()  # (height, width) after enlarging; () if ``small`` is None
    shortened: bool = False  # True if the clip was read at a smaller frame interval than requested
    bytes_read: int = 0


class CachedFeatures(NamedTuple):
    """Format of the features that ``preprocess.py latents --repa`` caches for each picture."""

    encoder: str  # folder of the encoder
    grid: tuple[int, int]  # rows and columns of tokens
    width: int  # channels per token


class BadSample(Exception):
    """Raised for a row that can't be used, such as a damaged file. ``SampleReader`` then reads another row."""

    def __init__(self, path: str, reason: object):
        super().__init__(f"{printable(path)}: {printable(str(reason))}")


@dataclass(frozen=True, kw_only=True)
class ClipReading:
    """Settings for choosing a clip's frames, see ``clips.read_clip``."""

    num_frames: int
    frame_interval: int
    short_clips: str
    fps: float | None


def nothing() -> None:
    """Return None. Unlike a lambda, this function can be pickled."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Properties of a data set."""

    text: str  # one line for the log
    sample_shape: tuple[int, ...]  # (C, H, W) or (C, T, H, W) of ``Item.x``; a :class:`View` may override it
    kind: str = "pixels"  # "latents" if samples are a VAE's means and standard deviations
    conditioning: str = "label"  # "label": items have a class ``y``; "text": items have a caption ``text``
    class_names: list[str] = field(default_factory=list)  # in the order of the labels; empty for "text"
    clips: ClipReading | None = None  # None without clips
    random_flip: bool = False  # mirror half of the training samples
    random_window: bool = False  # training chooses random windows of clips
    random_crop: bool = False  # training chooses random crops
    random_tags: bool = False  # training shuffles or drops tags
    seed: int = 0
    max_bad: float = 0.05  # largest fraction of unreadable files that training tolerates
    # Only for latents: see ``latents.LatentDataset``.
    vae: str | None = None
    scaling_factor: float | tuple[float, ...] | None = None
    shift_factor: float | tuple[float, ...] | None = None
    # Settings of cached caption embeddings.
    text_encoder: str | None = None
    max_tokens: int = 0
    empty_caption: Embedding | None = None
    features: CachedFeatures | None = None
    first_frames: int | None = None  # channels of cached first-frame tokens; 0 for latents only
    cut_captions: tuple[str, ...] = ()  # log lines about truncated captions
    notes: tuple[str, ...] = ()  # log lines about files left out
    # (rows, number of captions to check before training) for each source; empty means ``USUALLY_COUNTED``.
    counted_captions: tuple[tuple[int, int], ...] = ()
    sources: SourceRows | None = None  # only for a blend
    blend: str | None = None  # a blend's weights as text, for the log and resume
    # Returns (rows, file number of each row) for each source. None instead of file numbers means one file per row.
    files: Callable[[], list[tuple[int, np.ndarray | None]]] | None = None
    # Returns (largest label, name of a sample with this label); None if unknown.
    largest_label: Callable[[], tuple[int, str] | None] = nothing

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of a data set's samples, and sizes of its files."""

    # (rows,) integers, possibly memory-mapped, or one integer for all rows. Rows with equal keys have samples of equal
    # shape, and a micro-batch has rows of one key.
    keys: np.ndarray | int = 0
    # Returns (rows, 3) int32, each row's upright :data:`Size`; None if all files have ``sample_shape``.
    media: Callable[[], np.ndarray | None] = nothing
    read_as: str = ""  # names the settings that change the result of ``media``
    # Returns (end row, :data:`Size` in latents) for consecutive ranges of rows; None without cached latents.
    latents: Callable[[], list[tuple[int, Size]]] | None = None
    frame_rates: Callable[[], list[float]] = list  # returns some clips' frames per second

    def key(self, row: int) -> int:
        return int(self.keys[row]) if isinstance(self.keys, np.ndarray) else self.keys

    @property
    def array(self) -> np.ndarray | None:
        """The keys as an array; None if all rows have one shape."""
        return self.keys if isinstance(self.keys, np.ndarray) else None

    def frame_rate(self) -> float | None:
        rates = self.frame_rates()
        return median(rates) if rates else None


class Fingerprint:
    """Hashes that identify a data set, computed at first use. checksums: the files' SHA-256, or None."""

    def __init__(
        self,
        identity: Callable[[], str],
        contents: Callable[[], str | None] = nothing,
        checksums: Verification | None = None,
    ):
        self._identity, self._contents, self.checksums = identity, contents, checksums

    @cached_property
    def identity(self) -> str:
        """Hash of all files' names and labels, or of their contents."""
        return self._identity()

    @cached_property
    def contents(self) -> str | None:
        """Hash of the files' contents (see ``hash_files``); None if :attr:`identity` covers the contents."""
        return self._contents()


class MediaDataset(Dataset[Any]):
    """Base class of data sets. A subclass implements ``__len__``, ``read``, ``fingerprint`` and ``describe``. If
    samples have several shapes, the subclass also implements ``shapes``."""

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, row: int, view: View = PLAIN) -> Item:
        """Read a row. Raises BadSample if the row can't be read."""
        raise NotImplementedError

    def shapes(self) -> Shapes:
        return Shapes()

    def fingerprint(self) -> Fingerprint:
        raise NotImplementedError

    def describe(self) -> Description:
        """Return the description. A call may take milliseconds, so don't call this in a loop."""
        raise NotImplementedError

    def source(self, row: int) -> str:
        """Return a row's name for messages, such as its path."""
        return f"row {row} of {type(self).__name__}"

    def label(self, row: int) -> int:
        """Return the class of a row; 0 if the conditioning is by caption. Raises BadSample."""
        return self.read(row).y

    def caption(self, row: int) -> str | None:
        """Return the caption of a row; None if the conditioning is by label. Raises BadSample."""
        return self.read(row).text

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        """Return (medium, up to three frames) for display: (n, H, W) or (n, H, W, 3) uint8. May raise any exception."""
        x = self.read(row).x
        return of_moments(x) if self.describe().kind == "latents" else of_pixels(x)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Start to fetch the rows that will be read next, in this order. The base class does nothing."""

    def next_row(self, row: int) -> int:
        """Return the row that replaces an unreadable ``row``: the next row with the same shape, cyclically."""
        keys = self.shapes().array
        return (row + 1) % len(self) if keys is None else next_of_key(keys, row)

    def __getitem__(self, sample_key: SampleKey) -> Item:
        return next(SampleReader(self).items([sample_key]))

    def __getitems__(self, sample_keys: list[SampleKey]) -> list[Item]:
        return list(SampleReader(self).items(sample_keys))


class SampleReader:
    """Reads samples by key, with random changes, and replaces unreadable rows. augment: False disables all random
    changes. as_bytes, enlarge: see :class:`View`."""

    def __init__(self, dataset: MediaDataset, *, as_bytes: bool = False, enlarge: bool = True, augment: bool = True):
        self.dataset, self.about = dataset, dataset.describe()
        self.view, self.augment = View(as_bytes=as_bytes, enlarge=enlarge or not as_bytes), augment

    def items(self, sample_keys: Sequence[SampleKey], on_read: Callable[[int], None] | None = None) -> Iterator[Item]:
        """Yield the samples of one step.

        sample_keys: keys with equal ``step``. on_read: called with each row before the row is read.

        Raises DataError after more than max(100, ``max_bad`` * rows) unreadable rows in succession, or if all rows of a
        shape are unreadable."""
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
        # Tolerate some unreadable rows in succession, for example a broken class folder.
        for _ in range(max(100, int(self.about.max_bad * len(self.dataset))) + 1):
            if on_read is not None:
                on_read(row)
            try:
                return self.dataset.read(row, view)._replace(skipped=tuple(skipped))
            except BadSample as bad:
                skipped.append(str(bad))
            row = self.dataset.next_row(row)
            if row == first:
                break  # all rows of this shape are unreadable
        raise DataError(f"{len(skipped)} files in turn can't be read: {name_few(skipped)}")


def to_pixels(x: Tensor) -> Tensor:
    """Convert uint8 pixels, in any memory order, to contiguous float32 in [-1, 1]. Return other dtypes unchanged."""
    if x.dtype != torch.uint8:
        return x
    return x.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


class BadFileCounter:
    """Counts readable and unreadable files, and reports each unreadable file once.

    max_bad: largest tolerated fraction of unreadable files. It is checked after ``minimum`` files; 0 tolerates none
    from the first file on. on_skip: called with "path: reason" for each unreadable file."""

    def __init__(self, max_bad: float, on_skip: Callable[[str], None] | None = None, minimum: int = 100):
        self.max_bad, self.on_skip, self.minimum = max_bad, on_skip, minimum if max_bad else 1
        self.read = 0  # number of files tried, including unreadable ones
        self.skipped = 0
        self.files: dict[str, None] = {}  # distinct unreadable files, in order of their first failure

    def add(self, good: int, skipped: tuple[str, ...] | list[str]) -> None:
        """Count ``good`` readable files and the unreadable files ``skipped``. Raises DataError if too many failed."""
        self.read += good + len(skipped)
        self.skipped += len(skipped)
        for file in skipped:
            if file not in self.files:
                self.files[file] = None
                if self.on_skip is not None:
                    self.on_skip(file)
        if self.read >= self.minimum and self.skipped > self.max_bad * self.read:
            raise DataError(
                f"{self.skipped} of the {self.read} files read so far can't be read, more than --max_bad "
                f"{self.max_bad:g}: {name_few(list(self.files))}; remove or repair them, or raise it"
            )


def count_media(clips: int, pictures: int) -> str:
    """Return text such as "2 clips and 3 pictures". A count of zero is omitted."""
    return " and ".join(f"{count:,} {name}" for count, name in ((clips, "clips"), (pictures, "pictures")) if count)


def flip_note(random_flip: bool) -> str:
    return "randomly mirrored" if random_flip else "not mirrored"
