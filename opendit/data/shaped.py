"""A data set whose samples keep their aspect ratio and length, as far as whole tokens allow."""

import numpy as np
from torch import Tensor

from opendit.common.hashing import hash_parts
from opendit.data.base import MediaDataset, name_few
from opendit.data.held_out import SomeRows
from opendit.data.order.buckets import ShapeTable, TokenSize, assign, kept_shares
from opendit.data.order.lengths import Lengths

_LOOKED_AT = 10_000  # media whose crop is told of


class ShapedDataset(SomeRows):
    """The rows of ``whole`` that a shape was found for, each read at its own.

    chosen: (rows of ``whole``,) the number of each one's shape, -1 for none. shapes: (n, 3) int32, frames, height and
    width of each; tokens: (n,) of each. note: what else is said of it.

    Raises ValueError if no row has a shape.
    """

    def __init__(self, whole: MediaDataset, chosen: np.ndarray, shapes: np.ndarray, tokens: np.ndarray, note: str):
        super().__init__(whole, np.flatnonzero(chosen >= 0), note)
        self.keys, self.shapes, self.tokens = chosen[self.rows], shapes, tokens

    def load_at(self, row: int, flip: bool, start: float | None) -> Tensor:
        frames, height, width = self.shapes[self.keys[row]].tolist()
        return self.whole.load_sized(self._of(row), flip, start, (frames, height, width))

    def load(self, row: int, flip: bool) -> Tensor:
        return self.load_at(row, flip, None)

    def shape_keys(self) -> np.ndarray:
        return self.keys

    def shape_key(self, row: int) -> int:
        return int(self.keys[row])

    def next_row(self, row: int) -> int:
        """The next one of this shape."""
        later = np.flatnonzero(self.keys[row + 1 :] == self.keys[row])
        return row + 1 + int(later[0]) if len(later) else int((self.keys == self.keys[row]).argmax())

    def token_counts(self) -> Lengths:
        """The tokens of every row's sample, int32."""
        return Lengths(self.keys, self.tokens.astype(np.int32))

    def identity(self) -> str:
        of_rows = self.shapes[self.keys].astype(np.int32).tobytes()
        return hash_parts("shaped", super().identity(), of_rows)


def shape_media(dataset: MediaDataset, table: ShapeTable, interval: int, upscale: float, flag: str) -> ShapedDataset:
    """The pixels of a data set at the shapes of ``table``. interval: of a clip's frames.

    Media that can't be read, and those that are smaller than every shape, are left out, counted and named. Raises
    ValueError, naming ``flag`` and what to do, if none is left, or more than the data set's ``max_bad`` can't be read.
    """
    sizes = dataset.media_sizes()
    if sizes is None:
        own = dataset.sample_shape[1:] if len(dataset.sample_shape) == 4 else (1, *dataset.sample_shape[1:])
        sizes = np.broadcast_to(np.array(own, dtype=np.int32), (len(dataset), 3))
    chosen = assign(sizes, interval, table, upscale)
    broken = np.flatnonzero((sizes == 0).any(axis=1))
    if len(broken) > dataset.max_bad * len(dataset):
        named = name_few([dataset.source(row) for row in broken[:5].tolist()])
        raise ValueError(
            f"{flag}: the size of {len(broken):,} of {len(dataset):,} files can't be read, more than --max_bad "
            f"{dataset.max_bad:g}: {named}; remove or repair them"
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
    kept = kept_shares(sizes[looked], table.shapes[chosen[looked]]).mean()
    common = used[counts.argmax()]
    notes = [
        f"{len(used)} shape{'s' * (len(used) > 1)} of {table.tokens[used].min():,} to {table.tokens[used].max():,} "
        f"tokens, most often {_shown(table.shapes[common])}, {1 - kept:.1%} cropped off"
    ]
    for rows, why in (
        (small, f"smaller than every shape by more than --max_upscale {upscale:g}"),
        (broken, "unreadable"),
    ):
        if len(rows):
            named = name_few([dataset.source(row) for row in rows[:3].tolist()])
            notes.append(f"{len(rows):,} left out, {why} ({named}{', ...' if len(rows) > 3 else ''})")
    return ShapedDataset(dataset, chosen, table.shapes, table.tokens, "; ".join(notes))


def shape_latents(dataset: MediaDataset, token: TokenSize, most: int, flag: str) -> ShapedDataset:
    """Cached latents, whose shapes are what they are. Raises ValueError, naming ``flag``, for one of more than ``most``
    tokens or one that the model's patch does not divide. token: with sides in latents."""
    shapes, chosen = np.unique(dataset.latent_sizes(), axis=0, return_inverse=True)
    frames, height, width = shapes.T
    along, (high, wide) = np.where(frames == 1, token.frames, frames), token.side
    bad = (along % token.frames != 0) | (height % high != 0) | (width % wide != 0)
    tokens = along // token.frames * (height // high) * (width // wide)
    if bad.any():
        raise ValueError(
            f"{flag}: latents of {_shown(shapes[bad.argmax()])} do not divide by the model's patch; take another"
        )
    if (largest := int(tokens.max())) > most:
        raise ValueError(f"{flag} {most}: a sample has {largest:,} tokens; raise it to that at least")
    note = f"{len(shapes)} shape{'s' * (len(shapes) > 1)} of {tokens.min():,} to {tokens.max():,} tokens"
    return ShapedDataset(dataset, chosen.reshape(-1).astype(np.int16), shapes.astype(np.int32), tokens, note)


def _shown(shape: np.ndarray) -> str:
    frames, height, width = shape.tolist()
    return f"{height} x {width}" + (f" x {frames} frames" if frames > 1 else "")
