"""Assign shapes to media of any size, and build the data set with samples cropped to these shapes.

A shape table lists aspect ratios and durations up to a maximum number of tokens. Every medium gets the shape that best
preserves its aspect ratio and length."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from opendit.common.utils import hash_parts
from opendit.data.base import PLAIN, Fingerprint, Item, MediaDataset, Size, View
from opendit.data.files import name_few
from opendit.data.held_out import SomeRows
from opendit.data.row_arrays import Complement, KeptArrays, kept, stream_of

LONGEST = 4  # maximum ratio of a shape's sides
STEP = 1.1  # factor between neighbouring aspect ratios
LEVELS = 7  # number of areas: --image_size squared, a half, and so on down to a 64th
_ROWS = 65536  # media to assign at once
_CHUNK = 2**20  # rows to summarise at once


@dataclass(frozen=True)
class TokenSize:
    """A token's size."""

    frames: int  # latent frames per token of a clip; a picture has one token along time
    temporal: int  # clip frames per latent frame; the first latent frame holds one clip frame
    side: tuple[int, int]  # (height, width) in pixels

    def length(self, frames: int) -> int:
        """Return a clip's number of tokens along time. frames: the clip's frames, a length that the VAE can encode."""
        return 1 if frames == 1 else ((frames - 1) // self.temporal + 1) // self.frames

    def clip_frames(self, tokens: int) -> int:
        return (tokens * self.frames - 1) * self.temporal + 1


def token_size(patch: tuple[int, ...], downscale: int = 1, temporal: int = 1) -> TokenSize:
    """Return a token's size. patch: the model's patch in latents, ([frames,] rows, columns). downscale: pixels per
    latent along a side. temporal: frames per latent."""
    *frames, height, width = patch
    return TokenSize(frames[0] if frames else 1, temporal, (height * downscale, width * downscale))


@dataclass(frozen=True)
class ShapeTable:
    """Table of n possible shapes."""

    shapes: np.ndarray  # (n, 3) int32, frames, height and width in pixels
    tokens: np.ndarray  # (n,) int64, number of tokens
    level: np.ndarray  # (n,) int8, 0 for the largest area


def shape_table(image_size: int, num_frames: int, token: TokenSize, most: int, fine: bool = False) -> ShapeTable:
    """Return all shapes of at most ``most`` tokens. For each area (see ``LEVELS``), the table has aspect ratios up to
    ``LONGEST`` in steps of ``STEP`` or, with ``fine``, of whole tokens. Each aspect ratio occurs as a picture and as
    clips of ``num_frames`` frames (1: pictures only), half as many, and so on.

    Raises ValueError if the square of ``image_size`` has more than ``most`` tokens."""
    if (least := image_size**2 // (token.side[0] * token.side[1])) > most:
        raise ValueError(
            f"{most}: a picture of --image_size {image_size} has {least:,} tokens; raise it to that at least"
        )
    lengths, length = {1: 1}, token.length(num_frames)
    while length >= 1 and num_frames > 1:
        if (frames := token.clip_frames(length)) > 1:
            lengths[frames] = length
        length //= 2
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    for level in range(LEVELS):
        for rows, columns in _grids(int(image_size / 2 ** (level / 2)), token.side, fine):
            for frames, along in lengths.items():
                if (tokens := rows * columns * along) <= most:
                    shape = frames, rows * token.side[0], columns * token.side[1]
                    found.setdefault(shape, (tokens, level))
    order = sorted(found, key=lambda shape: (found[shape][1], shape))
    return ShapeTable(
        np.array(order, dtype=np.int32),
        np.array([found[shape][0] for shape in order], dtype=np.int64),
        np.array([found[shape][1] for shape in order], dtype=np.int8),
    )


def _grids(side: int, token: tuple[int, int], fine: bool) -> list[tuple[int, int]]:
    """Return (rows, columns) in tokens for shapes with ``side`` squared pixels or slightly fewer."""
    height, width = token
    all_rows = range(1, LONGEST * side // height + 1)
    found = [(rows, side * side // (rows * height * width)) for rows in all_rows]
    kept = []
    for tall in (True, False):  # tall shapes, then wide ones, starting with the square
        ratios = {
            (rows, columns): rows * height / (columns * width) if tall else columns * width / (rows * height)
            for rows, columns in found
            if columns > 0 and (rows * height >= columns * width) == tall
        }
        last = 1.0 if kept and kept[0][0] * height == kept[0][1] * width else 0.0
        for grid, ratio in sorted(ratios.items(), key=lambda item: item[1]):
            if ratio <= LONGEST and (ratio > last if fine else ratio >= last * STEP):
                kept.append(grid)
                last = ratio
    return kept


def assign(sizes: np.ndarray, interval: int, table: ShapeTable, upscale: float) -> np.ndarray:
    """Return each medium's index in ``table``, (n,) int16; -1 if no shape is possible. A shape is possible if the
    medium has enough frames and is not enlarged by more than ``upscale``. The best shape has the largest area, then the
    most frames, then the least cropping. sizes: (n, 3) frames, height and width. interval: read every ``interval``-th
    frame."""
    out = np.full(len(sizes), -1, dtype=np.int16)
    frames, height, width = (column[None].astype(np.float64) for column in table.shapes.T)
    for first in range(0, len(sizes), _ROWS):
        part = sizes[first : first + _ROWS].astype(np.float64)
        unique, inverse = np.unique(part, axis=0, return_inverse=True)
        long, high, wide = (column[:, None] for column in unique.T)
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.maximum(height / high, width / wide)
            kept = height * width / (scale**2 * high * wide)
        possible = (np.minimum(high, wide) > 0) & (scale <= upscale * (1 + 1e-9))
        possible &= (frames == 1) | (1 + (frames - 1) * interval <= long)
        # Compare by area, then by frames, then by the uncropped fraction.
        order = -1e9 * table.level[None] + frames * 1e3 + kept * 10
        best = np.where(possible, order, -np.inf).argmax(axis=1)
        best[~possible.any(axis=1)] = -1
        out[first : first + _ROWS] = best[inverse.reshape(-1)]
    return out


def kept_shares(sizes: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return the fraction (n,) of each medium's pixels that remains after cropping to its shape. shapes: (n, 3)."""
    sizes, shapes = sizes.astype(np.float64), shapes.astype(np.float64)
    scale = np.maximum(shapes[:, 1] / sizes[:, 1], shapes[:, 2] / sizes[:, 2])
    return shapes[:, 1] * shapes[:, 2] / (scale**2 * sizes[:, 1] * sizes[:, 2])


# ------------------------------------------------------------------------------------------ tokens of every row


class Lengths:
    """Each row's number of tokens, indexed like an array. keys: (rows,) each row's shape index. tokens: (shapes,) each
    shape's number of tokens."""

    def __init__(self, keys: np.ndarray, tokens: np.ndarray):
        self.keys, self.tokens = keys, tokens

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, rows: Any) -> Any:
        return self.tokens[self.keys[rows]]


class Summary(NamedTuple):
    """Number of rows in a range, and their minimum, maximum and total tokens."""

    rows: int
    least: int
    most: int
    total: int

    @property
    def mean(self) -> float:
        return self.total / self.rows


def summary_of(lengths: np.ndarray | Lengths, start: int, stop: int) -> Summary:
    """Summarise the lengths of rows [start, stop), at least one row, with constant memory."""
    parts = (lengths[first : min(stop, first + _CHUNK)] for first in range(start, stop, _CHUNK))
    found = [(int(part.min()), int(part.max()), int(part.sum(dtype=np.int64))) for part in parts]
    least, most, total = zip(*found, strict=True)
    return Summary(stop - start, min(least), max(most), sum(total))


_LOOKED_AT = 10_000  # media for estimating the mean cropping
_LAST = 2**62  # larger than any key


class ShapedDataset(SomeRows):
    """The rows of ``whole`` that have a shape. Each sample is read at its shape.

    found: arrays ``keys`` (n,) int16, each row's shape index, and ``rows`` (n,) int64, the ascending rows of ``whole``.
    ``rows`` is absent if all rows have a shape. ``found.about["note"]`` is text for the log. sizes: (m, 3) int32, each
    shape's frames, height and width. tokens: (m,) each shape's tokens. Raises ValueError if no row has a shape."""

    def __init__(self, whole: MediaDataset, found: KeptArrays, sizes: np.ndarray, tokens: np.ndarray):
        rows = found.arrays["rows"] if "rows" in found.arrays else Complement(len(whole), np.zeros(0, np.int64))
        super().__init__(whole, rows, found.about["note"])
        self.keys, self.sizes, self.tokens = found.arrays["keys"], sizes, tokens
        self._shaped: str | None = found.about.get("identity")

    def read(self, row: int, view: View = PLAIN) -> Item:
        frames, height, width = self.sizes[self.keys[row]].tolist()
        return super().read(row, view._replace(shape=(frames, height, width)))

    def _find_keys(self, keys: np.ndarray | int) -> np.ndarray | int:
        return self.keys

    def token_counts(self, beside: int = 0) -> Lengths:
        """Return each row's number of tokens, int32. beside: tokens to add to every row."""
        return Lengths(self.keys, self.tokens.astype(np.int32) + np.int32(beside))

    def _identity(self, whole: Fingerprint) -> str:
        if self._shaped is None:
            of_rows = stream_of(self.keys, lambda keys: self.sizes[keys].astype(np.int32))
            self._shaped = hash_parts("shaped", super()._identity(whole), of_rows)
        return self._shaped


def crop_media(
    dataset: MediaDataset,
    token: TokenSize,
    most: int,
    flag: str,
    *,
    image_size: int,
    num_frames: int,
    frame_interval: int,
    short_clips: str,
    fps: float | None,
    max_upscale: float,
    fine: bool = False,
) -> ShapedDataset:
    """Return a data set of pixels, cropped to similar shapes of at most ``most`` tokens. num_frames: maximum frames of
    a clip; 1 if there are only pictures. Raises ValueError, naming ``flag`` and the fix."""
    try:
        table = shape_table(image_size, num_frames, token, most, fine=fine)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from error
    interval = 1 if short_clips == "interval" or fps is not None else frame_interval
    return shape_media(dataset, table, interval, max_upscale, flag)


def shape_media(dataset: MediaDataset, table: ShapeTable, interval: int, upscale: float, flag: str) -> ShapedDataset:
    """Return a data set of pixels at the shapes of ``table``. Unreadable media and media that are too small are left
    out and counted in the log. interval: see :func:`assign`. Raises ValueError, naming ``flag`` and the fix, if no
    medium is left, or if a larger fraction than the data set's ``max_bad`` is unreadable."""

    def find() -> KeptArrays:
        chosen, note = _shapes_of_media(dataset, table, interval, upscale, flag)
        rows = np.flatnonzero(chosen >= 0)
        return KeptArrays({"rows": rows, "keys": chosen[rows].astype(np.int16)}, {"note": note})

    def name() -> str:
        # the stored note contains file names, so the key includes the first one
        how = f"{interval} {upscale} {dataset.describe().max_bad} {dataset.shapes().read_as} {dataset.source(0)}"
        arrays = (array.tobytes() for array in (table.shapes, table.tokens, table.level))
        known = dataset.fingerprint()
        return hash_parts("shapes as shown", known.identity, known.contents or "", *arrays, how)

    return _shaped(dataset, find, table.shapes, table.tokens, name)


def _shaped(
    dataset: MediaDataset,
    find: Callable[[], KeptArrays],
    sizes: np.ndarray,
    tokens: np.ndarray,
    name: Callable[[], str],
) -> ShapedDataset:
    """Build a ShapedDataset. For many rows, the shapes are stored in a file under the key ``name()``."""

    def find_with_identity() -> KeptArrays:  # the identity takes seconds for many rows
        found = find()
        identity = ShapedDataset(dataset, found, sizes, tokens).fingerprint().identity
        return found._replace(about={**found.about, "identity": identity})

    return ShapedDataset(dataset, kept(len(dataset), name, find_with_identity), sizes, tokens)


def _shapes_of_media(
    dataset: MediaDataset, table: ShapeTable, interval: int, upscale: float, flag: str
) -> tuple[np.ndarray, str]:
    """Return (index of every row's shape, -1 for none; note for the log)."""
    sizes, about = dataset.shapes().media(), dataset.describe()
    if sizes is None:
        own = about.sample_shape[1:] if len(about.sample_shape) == 4 else (1, *about.sample_shape[1:])
        sizes = np.broadcast_to(np.array(own, dtype=np.int32), (len(dataset), 3))
    chosen = assign(sizes, interval, table, upscale)
    broken = np.flatnonzero((sizes == 0).any(axis=1))
    if len(broken) > about.max_bad * len(dataset):
        named = name_few([dataset.source(row) for row in broken[:5].tolist()])
        raise ValueError(
            f"{flag}: the size of {len(broken):,} of {len(dataset):,} files can't be read, more than --max_bad "
            f"{about.max_bad:g}: {named}; remove or repair them"
        )
    small = np.flatnonzero((chosen < 0) & (sizes > 0).all(axis=1))
    if not (chosen >= 0).any():
        raise ValueError(
            f"{flag}: all samples are smaller than its smallest shape, "
            f"{_shown(table.shapes[table.tokens.argmin()])}; raise --max_upscale, or lower --image_size"
        )
    used, counts = np.unique(chosen[chosen >= 0], return_counts=True)
    looked = np.flatnonzero(chosen >= 0)
    looked = looked[:: max(1, len(looked) // _LOOKED_AT)]
    shown = kept_shares(sizes[looked], table.shapes[chosen[looked]]).mean()
    common = used[counts.argmax()]
    notes = [
        f"{len(used)} shape{'s' * (len(used) > 1)} of {table.tokens[used].min():,} to {table.tokens[used].max():,} "
        f"tokens, most often {_shown(table.shapes[common])}, {1 - shown:.1%} cropped off"
    ]
    for rows, why in (
        (small, f"smaller than every shape by more than --max_upscale {upscale:g}"),
        (broken, "unreadable"),
    ):
        if len(rows):
            named = name_few([dataset.source(row) for row in rows[:3].tolist()])
            notes.append(f"{len(rows):,} left out, {why} ({named}{', ...' if len(rows) > 3 else ''})")
    return chosen, "; ".join(notes)


def shape_latents(dataset: MediaDataset, token: TokenSize, most: int, flag: str, *, beside: int = 0) -> ShapedDataset:
    """Return a ShapedDataset of cached latents at their stored shapes. token: a token's size, with sides in latents
    instead of pixels. beside: caption tokens, included in ``most``. Raises ValueError, naming ``flag``, for too many
    tokens, or for latents that the model's patch does not divide."""
    order = dataset.shapes()
    known = order.latents() if order.latents else [(len(dataset), (1, *dataset.describe().sample_shape[1:])[-3:])]
    ends, sizes = zip(*known, strict=True)
    counts = np.diff(ends, prepend=0)
    # Number the shapes in order of their keys, as for media, so that batches of latents and media match.
    first: dict[Size, int] = {}
    for end, size, count in zip(ends, sizes, counts.tolist(), strict=True):
        if count:
            first[size] = min(first.get(size, _LAST), order.key(end - 1))
    numbers = {size: number for number, size in enumerate(sorted(first, key=lambda size: (first[size], size)))}
    keys = np.array([numbers[size] for size, count in zip(sizes, counts, strict=True) if count], dtype=np.int16)
    shapes, counts = np.array(list(numbers), np.int32), counts[counts > 0]
    frames, height, width = shapes.T
    along, (high, wide) = np.where(frames == 1, token.frames, frames), token.side
    bad = (along % token.frames != 0) | (height % high != 0) | (width % wide != 0)
    tokens = along // token.frames * (height // high) * (width // wide)
    if bad.any():
        raise ValueError(
            f"{flag}: latents of {_shown(shapes[bad.argmax()])} do not divide by the model's patch; take another"
        )
    if (largest := int(tokens.max()) + beside) > most:
        what = " with its caption" if beside else ""
        raise ValueError(f"{flag} {most}: a sample{what} has {largest:,} tokens; raise it to that at least")
    note = f"{len(shapes)} shape{'s' * (len(shapes) > 1)} of {tokens.min():,} to {tokens.max():,} tokens"

    def find() -> KeptArrays:
        return KeptArrays({"keys": np.repeat(keys, counts)}, {"note": note})

    def name() -> str:
        fingerprint = dataset.fingerprint()
        known = (fingerprint.contents or "", shapes.tobytes(), keys.tobytes(), counts.astype(np.int64).tobytes(), note)
        return hash_parts("shapes of latents", fingerprint.identity, *known)

    return _shaped(dataset, find, shapes, tokens, name)


def _shown(shape: np.ndarray) -> str:
    frames, height, width = shape.tolist()
    return f"{height} x {width}" + (f" x {frames} frames" if frames > 1 else "")
