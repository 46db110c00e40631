"""Several data sets as one, in the proportions of their weights."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.data.base import Embedding, MediaDataset, to_pixels
from opendit.data.medium import Medium
from opendit.data.order.schedule import SourceRows
from opendit.data.row_arrays import stream_of
from opendit.data.size_cache import kept_array
from opendit.data.verification import Verification

SAME = "kind conditioning sample_shape vae scaling_factor shift_factor text_encoder max_tokens".split()
WHAT_TO_DO = {
    "kind": "train on pixels or on cached latents alone: make latents of all sources by preprocess.py latents",
    "conditioning": "train on classes or on captions alone: give the sources with classes a CSV of path,text",
    "sample_shape": "make their latents at one --image_size and --num_frames",
}


class BlendedDataset(MediaDataset):
    """The rows of several data sets, one set after the other.

    names, parts: of the sources. stages, epochs: see ``SourceRows``; with epochs the first stage's weights are made of
    them, and without, a pass over the data has as many samples as there are rows. classes: of every source, its
    classes' names -> theirs in the blend, for those called otherwise. union: the blend's classes are all that any
    source has; otherwise the sources' must be the same. Samples are mirrored, and clips' windows drawn, as each source
    has it.

    Raises ValueError, saying what to do, for sources that can't be trained on together.
    """

    def __init__(
        self,
        names: Sequence[str],
        parts: Sequence[MediaDataset],
        stages: Sequence[tuple[int, Sequence[Fraction]]],
        *,
        shown: str,
        epochs: Sequence[Fraction] | None = None,
        classes: Sequence[dict[str, str]] | None = None,
        union: bool = False,
    ):
        self.names, self.parts, self.shown = list(names), list(parts), shown
        first = self.parts[0]
        for field in SAME:
            values = [getattr(part, field, None) for part in self.parts]
            for name, value in zip(names, values, strict=True):
                if value != values[0]:
                    do = WHAT_TO_DO.get(field, "make their latents anew with the same flags")
                    raise ValueError(
                        f"{shown}: {names[0]} and {name} differ in {field} ({values[0]} and {value}), and can't be "
                        f"blended; {do}"
                    )
            if values[0] is not None:
                setattr(self, field, values[0])
        if hasattr(first, "empty_caption"):
            self.empty_caption = first.empty_caption
        self.class_names, self._labels = _merged(names, parts, classes or [{}] * len(parts), union, shown)
        self.seed, self.max_bad = first.seed, max(part.max_bad for part in parts)
        self.random_flip = any(part.random_flip for part in parts)
        self.random_window = any(part.random_window for part in parts)
        self.ends = np.cumsum([len(part) for part in parts])
        exact = tuple((step, tuple(weights)) for step, weights in stages)
        self._rows = SourceRows(tuple(names), tuple(self.ends.tolist()), exact, len(self))
        if epochs is not None:
            self._rows = replace(self._rows, epochs=tuple(epochs)).of_rows(self._rows.ends)
        self._alike = len({type(part) for part in parts}) == 1

    def __len__(self) -> int:
        return int(self.ends[-1])

    def source_rows(self) -> SourceRows:
        return self._rows

    @property
    def blend(self) -> str:
        """The weights, for people and for the resume fingerprint."""
        return "; ".join(
            (f"from step {step:,} " if step else "")
            + ", ".join(f"{name} {float(w / sum(ws)):.4g}" for name, w in zip(self.names, ws, strict=True))
            for step, ws in self._rows.stages
        )

    def _find(self, row: int) -> tuple[int, int]:
        """(source, row there)."""
        source = int(np.searchsorted(self.ends, row, side="right"))
        return source, row - (int(self.ends[source - 1]) if source else 0)

    @property
    def shortened(self) -> int:
        return sum(part.shortened for part in self.parts)

    @property
    def bytes_read(self) -> int:
        return sum(part.bytes_read for part in self.parts)

    def sizes_key(self) -> str:
        return " ".join(part.sizes_key() for part in self.parts)

    def frame_rates(self) -> list[float]:
        return [rate for part in self.parts for rate in part.frame_rates()]

    def source(self, row: int) -> str:
        source, row = self._find(row)
        return self.parts[source].source(row)

    def load(self, row: int, flip: bool) -> Tensor:
        return self.load_at(row, flip, None)

    def load_at(self, row: int, flip: bool, start: float | None) -> Tensor:
        return self.load_sized(row, flip, start, None)

    def load_sized(self, row: int, flip: bool, start: float | None, shape: tuple[int, int, int] | None) -> Tensor:
        source, row = self._find(row)
        part = self.parts[source]
        part.as_bytes = self.as_bytes and self._alike  # some kinds give float32 all the same, and a batch has one dtype
        part.enlarges = self.enlarges or not part.as_bytes
        how = row, flip and part.random_flip, start if part.random_window else None
        x = part.load_at(*how) if shape is None else part.load_sized(*how, shape)
        return x if self._alike else to_pixels(x) if x.dtype == torch.uint8 else x

    def largest_label(self) -> tuple[int, str] | None:
        found = [(part.largest_label(), labels) for part, labels in zip(self.parts, self._labels, strict=True)]
        return max(((int(labels[one[0]]), one[1]) for one, labels in found if one and one[0] >= 0), default=None)

    def prefetch(self, rows: Sequence[int]) -> None:
        found = [self._find(row) for row in rows]
        for number, part in enumerate(self.parts):
            if mine := [row for source, row in found if source == number]:
                part.prefetch(mine)

    def look_at(self, row: int) -> tuple[Medium, np.ndarray]:
        source, row = self._find(row)
        return self.parts[source].look_at(row)

    def media_sizes(self) -> np.ndarray | None:
        sizes = [part.media_sizes() for part in self.parts]
        if all(each is None for each in sizes):
            return None
        own = np.array((1, *self.sample_shape[1:])[-3:], dtype=np.int32)
        of = zip(sizes, self.parts, strict=True)
        return np.concatenate([np.tile(own, (len(part), 1)) if each is None else each for each, part in of])

    def latent_sizes(self) -> list[tuple[int, tuple[int, int, int]]]:
        starts = (self.ends - [len(part) for part in self.parts]).tolist()
        of = zip(starts, self.parts, strict=True)
        return [(start + end, size) for start, part in of for end, size in part.latent_sizes()]

    def label(self, row: int) -> int:
        source, row = self._find(row)
        label = self.parts[source].label(row)
        return int(self._labels[source][label]) if self.class_names else label

    def caption(self, row: int) -> str | None:
        source, row = self._find(row)
        return self.parts[source].caption(row)

    def caption_rows(self, most: int | None = None) -> np.ndarray:
        """Those of every source."""
        starts = self.ends - [len(part) for part in self.parts]
        return np.concatenate([start + part.caption_rows(most) for start, part in zip(starts, self.parts, strict=True)])

    def cached_captions(self) -> list[str]:
        of = zip(self.names, self.parts, strict=True)
        return [f"{name}: {line}" for name, part in of for line in part.cached_captions()]

    def embedding(self, row: int) -> Embedding | None:
        source, row = self._find(row)
        return self.parts[source].embedding(row)

    def shape_keys(self) -> np.ndarray | None:
        keys = [part.shape_keys() for part in self.parts]
        alike = {part.shape_key(0) for part, each in zip(self.parts, keys, strict=True) if each is None}
        if len(alike) == 1 and all(each is None for each in keys):
            return None

        def name() -> str:
            of = zip(keys, self.parts, strict=True)
            known = (
                (f"{len(part)} {part.shape_key(0)}",) if each is None else (str(each.dtype), stream_of(each))
                for each, part in of
            )
            return hash_parts("keys of sources", *(value for each in known for value in each))

        def make() -> np.ndarray:
            of = zip(keys, self.parts, strict=True)
            return np.concatenate(
                [np.full(len(part), part.shape_key(0), np.uint8) if each is None else each for each, part in of]
            )

        return kept_array(len(self), name, make)

    def shape_key(self, row: int) -> int:
        source, row = self._find(row)
        return self.parts[source].shape_key(row)

    def files_of_sources(self) -> list[tuple[int, np.ndarray | None]]:
        return [each for part in self.parts for each in part.files_of_sources()]

    def next_row(self, row: int) -> int:
        """Return the next row of the same source."""
        source, place = self._find(row)
        return row - place + self.parts[source].next_row(place)

    def identity(self) -> str:
        return hash_parts("blend", *self.names, *self.class_names, *(part.identity() for part in self.parts))

    def contents(self) -> str | None:
        return hash_parts(*(part.contents() or "" for part in self.parts))

    def verification(self, share: int, shares: int) -> Verification | None:
        found = [each for part in self.parts if (each := part.verification(share, shares)) is not None]
        files = {str(each.folder.absolute() / name): sha for each in found for name, sha in each.files.items()}
        return Verification(Path(), files, self.shown) if found else None

    def describe(self) -> str:
        sources = "; ".join(f"{name}: {part.describe()}" for name, part in zip(self.names, self.parts, strict=True))
        return f"{self.shown}: {len(self):,} samples of {len(self.parts)} sources by weight ({self.blend}). {sources}"


def _merged(
    names: Sequence[str],
    parts: Sequence[MediaDataset],
    classes: Sequence[dict[str, str]],
    union: bool,
    shown: str,
) -> tuple[list[str], list[np.ndarray]]:
    """The blend's classes, and each source's labels -> the blend's."""
    renamed = []
    for name, part, mapped in zip(names, parts, classes, strict=True):
        if unknown := sorted(mapped.keys() - set(part.class_names)):
            raise ValueError(f"{shown}: {name} has no class {unknown[0]!r}; it has {', '.join(part.class_names[:10])}")
        renamed.append([mapped.get(each, each) for each in part.class_names])
    merged = list(dict.fromkeys(each for of_part in renamed for each in of_part))
    for name, own in zip(names, renamed, strict=True):
        has = set(own)
        if not union and (missing := [each for each in merged if each not in has]):
            raise ValueError(
                f"{shown}: {name} has no class {missing[0]!r}, which another source has; give the classes that are the "
                "same one name (classes: {its name: the other's} of a source), or write classes: union for all of them"
            )
    number = {each: index for index, each in enumerate(merged)}
    return merged, [np.array([number[each] for each in own], dtype=np.int64) for own in renamed]
