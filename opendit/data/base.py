"""The interface of data sets, and the reading of samples.

A data set implements ``__len__``, ``read``, ``shapes``, ``fingerprint`` and ``describe``. A blend or a held-out split
is a data set that wraps others. A training step requests a sample with a ``SampleKey``, which keys all random numbers
of the sample. The same key gives the same numbers in any process, on any number of GPUs and after any resume."""

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
from opendit.data.files import Checksums, name_few, printable
from opendit.data.order import SourceRows
from opendit.data.row_arrays import next_of_key
from opendit.diffusion.random import Stream, integers, uniform

# Seconds by which a display time may be late. Matroska rounds times to milliseconds, and files of other formats that
# were copied from a Matroska stream keep the rounded times.
ROUNDING = 1e-3 + 1e-6
COLOURS = "colours"  # key in the Image.info of a decoded picture, see ``Medium.colours``
# Quantiles of latent values that are shown as black and white, so that outliers don't reduce the contrast.
_DARKEST, _BRIGHTEST = 0.02, 0.98


@dataclass(frozen=True)
class Medium:
    """A picture or clip as stored in its file. A picture has one frame and no rate.

    duration: seconds that a clip is shown; 0 means frames / fps. colours: a name such as "HDR (PQ)" for colours that
    need conversion, else ""."""

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
        """Return the number of frames at the rate ``fps``; None means all frames."""
        return self.frames if fps is None or not self.fps else max(1, math.ceil((self.seconds - ROUNDING) * fps))


def of_picture(picture: Image.Image) -> tuple[Medium, np.ndarray]:
    """Return (medium, frames) of a decoded picture. The frames are (1, H, W) or (1, H, W, 3) uint8."""
    return Medium(1, picture.height, picture.width, colours=picture.info.get(COLOURS, "")), np.asarray(picture)[None]


def of_pixels(x: Tensor) -> tuple[Medium, np.ndarray]:
    """Return (medium, frames) of a sample (1 or 3, [T,] H, W) in [-1, 1]. The frames are its first, middle and last
    one, (n, H, W) or (n, H, W, 3) uint8."""
    x = x[:, None] if x.ndim == 3 else x
    length = x.shape[1]
    shown = x[:, sorted({0, length // 2, length - 1})].add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    frames = shown[0] if len(shown) == 1 else shown.permute(1, 2, 3, 0)
    height, width = x.shape[2:]
    return Medium(length, height, width), frames.numpy()


def of_moments(moments: Tensor) -> tuple[Medium, np.ndarray]:
    """Return (medium, frames) of a VAE's means and standard deviations (2C, [T,] h, w), like :func:`of_pixels`.

    The first three channels of the means are shown as red, green and blue, or the first as grey."""
    channels = len(moments) // 2
    means = moments[: 3 if channels >= 3 else 1].float()
    low, high = torch.quantile(means.flatten()[: 2**20], torch.tensor([_DARKEST, _BRIGHTEST])).tolist()
    return of_pixels((means - low) / max(high - low, 1e-6) * 2 - 1)


def count_colours(media: Iterable[Medium]) -> list[str]:
    """Return a line such as "2 clips are HDR (PQ), tone-mapped to SDR" for each kind of converted colours."""
    counts = Counter((medium.colours, medium.frames > 1) for medium in media if medium.colours)
    lines = []
    for (colours, clips), count in sorted(counts.items()):
        what = ("clip" if clips else "picture") + ("s are" if count > 1 else " is")
        done = "tone-mapped to SDR" if colours.startswith("HDR") else "converted to BT.709"
        lines.append(f"{count:,} {what} {colours}, {done}")
    return lines


class Small(NamedTuple):
    """Marks a sample in the upper left ``height`` x ``width`` pixels of its place in a batch, which must still be
    enlarged and, if ``mirrored``, then mirrored."""

    height: int
    width: int
    mirrored: bool


USUALLY_COUNTED = 10_000  # number of captions that are checked before training starts
Size = tuple[int, int, int]  # frames, height and width; all 0 for a medium that can't be read


class SampleKey(NamedTuple):
    """Request to a data set for one sample of the run."""

    sample: int  # row of the data set
    step: int  # global optimizer step
    index: int  # position in the global batch, counted across micro-batches and ranks


class Embedding(NamedTuple):
    """A caption's cached embedding by a frozen text encoder. A batch adds a leading dimension B.

    Attributes:
        tokens: (L, D) float16.
        mask: (L,) bool, False for padding.
        pooled: (D,) float16.
    """

    tokens: Tensor
    mask: Tensor
    pooled: Tensor


class FirstFrames(NamedTuple):
    """Cached inputs that an image-to-video model gets from a clip's first frame. A batch adds a leading dimension B.

    Attributes:
        latents: (C, t, h, w) float16, the VAE's means of the clip with all frames but the first made grey, not yet
            scaled.
        tokens: (L, D) float16 tokens of the frame by an image encoder; (0, 0) for models without one.
    """

    latents: Tensor
    tokens: Tensor


class View(NamedTuple):
    """Options for reading one row.

    Attributes:
        flip: mirror the sample left to right.
        place: position of the crop, (down, across), each in [0, 1) as a fraction of the possible range; None: the
            centre.
        tags: random key for the order of the caption's tags, see ``Recaptioned``.
        start: position in [0, 1) at which a clip's window begins; None: the middle window.
        shape: (frames, height, width) in pixels that replaces the data set's ``sample_shape``, except for cached
            latents.
        as_bytes: return pixels as uint8; ``to_pixels`` converts the batch to [-1, 1]. Data sets that do not consist of
            bytes ignore it.
        enlarge: False returns a clip that is smaller than requested at its stored size, so that the device enlarges it
            (``clips.enlarge``). Requires ``as_bytes``.
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
        y: class, if the conditioning is by label.
        text: caption, if the conditioning is by text.
        skipped: "path: reason" of each unreadable file that this sample replaces.
        embedding, first: cached embedding of the caption, and cached inputs from the first frame.
        features: (N, width) float16 cached features of the picture's tokens.
        small: enlargement that is still to be done if ``x`` is smaller than requested.
        whole: (height, width) after that enlargement.
        shortened: True if the frames of a short clip are closer together than requested.
        bytes_read: bytes read from files and tars; 0 if samples are generated or in memory.
    """

    x: Tensor
    y: int = 0
    text: str | None = None
    skipped: tuple[str, ...] = ()
    embedding: Embedding | None = None
    features: Tensor | None = None
    first: FirstFrames | None = None
    small: Small | None = None
    whole: tuple[int, ...] = ()
    shortened: bool = False
    bytes_read: int = 0


class CachedFeatures(NamedTuple):
    """Features of pictures cached with their latents (``preprocess.py latents --repa``): the folder of the ``encoder``,
    the (rows, columns) of the ``grid`` of tokens, and the ``width`` of a token's feature."""

    encoder: str
    grid: tuple[int, int]
    width: int


class BadSample(Exception):
    """Raised for a file that can't be read. The caller replaces the sample with another one."""

    def __init__(self, path: str, reason: object):
        super().__init__(f"{printable(path)}: {printable(str(reason))}")


@dataclass(frozen=True, kw_only=True)
class ClipReading:
    """Settings that choose the frames of a clip, see ``clips.read_clip``."""

    num_frames: int
    frame_interval: int
    short_clips: str
    fps: float | None


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of a data set for models, logs and training.

    Attributes:
        text: one line for the log.
        kind: "pixels" (x in [-1, 1]) or "latents" (x holds a VAE's means and standard deviations).
        conditioning: "label" (items have a class ``y``) or "text" (items have a caption ``text``).
        class_names: one name per class, in the order of the labels; empty for "text".
        sample_shape: (C, H, W) or (C, T, H, W) of an item.
        clips: settings for reading clips; None if the data set has no clips.
        random_flip, random_window, random_crop, random_tags: what training changes at random: it mirrors half of the
            samples, moves windows of clips and crops, and shuffles or drops tags.
        seed: seed of the run.
        max_bad: largest fraction of unreadable files that training tolerates.
        vae, scaling_factor, shift_factor: see ``latents.LatentDataset``; only for latents.
        text_encoder, max_tokens, empty_caption: settings of cached caption embeddings.
        features: cached features of pictures.
        first_frames: width of the tokens of cached first frames (0: without tokens); None if none are cached.
        cut_captions, notes: lines for the log about captions truncated before they were embedded, and about files left
            out.
        counted_captions: (rows, captions checked before training starts) for each source; empty means
            ``USUALLY_COUNTED``.
        sources: the sources of a blend.
        blend: the weights of a blend as text, for people and for the resume fingerprint.
        files: returns (rows, file number of each row) for each source. Rows may share a file, such as a picture with
            several captions; None instead of numbers means one file per row.
        largest_label: returns the largest label and the name of a sample with that label; None if they are not known.
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
    features: CachedFeatures | None = None
    first_frames: int | None = None
    cut_captions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    counted_captions: tuple[tuple[int, int], ...] = ()
    sources: SourceRows | None = None
    blend: str | None = None
    files: Callable[[], list[tuple[int, np.ndarray | None]]] | None = None
    largest_label: Callable[[], tuple[int, str] | None] = lambda: None

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of a data set's samples, and sizes of the media files.

    Attributes:
        keys: (rows,) integers, possibly memory-mapped, or one integer for all rows. Rows with equal keys have samples
            of one shape; only these may share a micro-batch.
        media: returns (rows, 3) int32, the :data:`Size` of each row's file after rotation to upright; None if all files
            have ``sample_shape``.
        read_as: text with all settings, besides the files, that determine the sizes.
        latents: returns the sizes of cached latents, as (end, size) for each run of rows of equal size.
        frame_rates: returns the frames per second of some evenly spaced clips; empty if none are known.
    """

    keys: np.ndarray | int = 0
    media: Callable[[], np.ndarray | None] = lambda: None
    read_as: str = ""
    latents: Callable[[], list[tuple[int, Size]]] | None = None
    frame_rates: Callable[[], list[float]] = list

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
    """Identity of a data set. Each hash is computed at its first use.

    checksums: checksums of the files; None if none are known."""

    def __init__(
        self,
        identity: Callable[[], str],
        contents: Callable[[], str | None] = lambda: None,
        checksums: Checksums | None = None,
    ):
        self._identity, self._contents, self.checksums = identity, contents, checksums

    @cached_property
    def identity(self) -> str:
        """Hash of the rows, from their file names and labels or from their contents."""
        return self._identity()

    @cached_property
    def contents(self) -> str | None:
        """Hash of the files' contents (see ``hash_files``) if :attr:`identity` covers only their names, else None."""
        return self._contents()


class MediaDataset(Dataset[Any]):
    """Base class of data sets. A subclass implements ``__len__``, ``read``, ``fingerprint``, ``describe`` and, for
    samples of several shapes, ``shapes``. It overrides other methods where a faster way exists."""

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
        """Return the description. A call may take milliseconds: call it before a loop, not in it."""
        raise NotImplementedError

    def source(self, row: int) -> str:
        """Return the name of a row's file, for messages."""
        return f"row {row} of {type(self).__name__}"

    def label(self, row: int) -> int:
        """Read only the class of a row; 0 if the conditioning is by caption. Raises BadSample."""
        return self.read(row).y

    def caption(self, row: int) -> str | None:
        """Read only the caption of a row; None if the conditioning is by label. Raises BadSample."""
        return self.read(row).text

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        """Return facts about a row's file, and its first, middle and last frame at original size, (n, H, W) or (n, H,
        W, 3) uint8. May raise any exception."""
        x = self.read(row).x
        return of_moments(x) if self.describe().kind == "latents" else of_pixels(x)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Start to fetch ``rows``, which will be read next in this order, if the storage is slow."""

    def next_row(self, row: int) -> int:
        """Return the row that replaces an unreadable row: the next row of the same shape, in a cycle."""
        keys = self.shapes().array
        return (row + 1) % len(self) if keys is None else next_of_key(keys, row)

    def __getitem__(self, sample_key: SampleKey) -> Item:
        return next(SampleReader(self).items([sample_key]))

    def __getitems__(self, sample_keys: list[SampleKey]) -> list[Item]:
        return list(SampleReader(self).items(sample_keys))


class SampleReader:
    """Reads samples by their keys, draws their random numbers, and replaces unreadable rows.

    as_bytes, enlarge: see :class:`View`. augment: False disables all random changes."""

    def __init__(self, dataset: MediaDataset, *, as_bytes: bool = False, enlarge: bool = True, augment: bool = True):
        self.dataset, self.about = dataset, dataset.describe()
        self.view, self.augment = View(as_bytes=as_bytes, enlarge=enlarge or not as_bytes), augment

    def items(self, sample_keys: Sequence[SampleKey], on_read: Callable[[int], None] | None = None) -> Iterator[Item]:
        """Yield the samples of one step. Their random numbers are drawn in one call, which takes 0.3 ms.

        on_read: called with each row before it is read.

        Raises DataError if too many consecutive rows are unreadable: more than 100 and more than a fraction
        ``max_bad``."""
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
        # All of the unreadable rows that max_bad tolerates may be consecutive, for example in a broken class folder.
        # Only a longer run of unreadable rows is fatal.
        for _ in range(max(100, int(self.about.max_bad * len(self.dataset))) + 1):
            if on_read is not None:
                on_read(row)
            try:
                return self.dataset.read(row, view)._replace(skipped=tuple(skipped))
            except BadSample as bad:
                skipped.append(str(bad))
            row = self.dataset.next_row(row)
            if row == first:
                break  # all rows of this shape were tried
        raise DataError(f"{len(skipped)} files in turn can't be read: {name_few(skipped)}")


def to_pixels(x: Tensor) -> Tensor:
    """Convert uint8 pixels, in any memory order, to contiguous float32 in [-1, 1]. Return other dtypes unchanged."""
    if x.dtype != torch.uint8:
        return x
    return x.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


class BadFileCounter:
    """Counts readable and unreadable files, and reports each unreadable file once.

    max_bad: largest fraction of unreadable files, checked after ``minimum`` files. on_skip: called with "path: reason".
    """

    def __init__(self, max_bad: float, on_skip: Callable[[str], None] | None = None, minimum: int = 100):
        self.max_bad, self.on_skip, self.minimum = max_bad, on_skip, minimum
        self.read = 0  # number of files tried, including unreadable ones
        self.skipped = 0
        self.files: dict[str, None] = {}  # distinct unreadable files, in order of their first failure

    def add(self, good: int, skipped: tuple[str, ...] | list[str]) -> None:
        """Count ``good`` readable files and the ``skipped`` ones. Raises DataError if too many were skipped."""
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


def flip_note(random_flip: bool) -> str:
    return "randomly mirrored" if random_flip else "not mirrored"
