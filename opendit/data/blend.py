"""Blends: data sets mixed by weight. A YAML file or a text such as ``A:0.7,B:0.3`` lists them."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opendit.common.utils import hash_parts
from opendit.common.utils import shown as short
from opendit.common.yaml_file import positive, read_yaml, require, require_known
from opendit.config.names import inline_sources, is_address, named_sources
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
    to_pixels,
)
from opendit.data.energon import is_prepared
from opendit.data.files import Verification, expanded, printable
from opendit.data.mock import MockDataset
from opendit.data.order import SourceRows
from opendit.data.row_arrays import kept_array, stream_of
from opendit.data.sources import Recaptioned, Request, build_dataset

SAME = "kind conditioning sample_shape vae scaling_factor shift_factor text_encoder max_tokens first_frames".split()
RANDOM = "random_flip random_window random_crop random_tags".split()
WHAT_TO_DO = {
    "kind": "train on pixels or on cached latents alone: make latents of all sources by preprocess.py latents",
    "conditioning": "train on classes or on captions alone: give the sources with classes a CSV of path,text",
    "sample_shape": "make their latents at one --image_size and --num_frames",
}


class BlendedDataset(MediaDataset):
    """Several data sets as one. The rows of the first source come first, then the second source's, and so on.

    Args:
        names, parts: names and data sets of the sources.
        stages, epochs: see ``SourceRows``. Without ``epochs``, a pass has as many samples as the sources have rows.
        shown: the blend's name in messages.
        classes: for each source, a mapping from its class names to the blend's. Other names are unchanged.
        union: True if the blend has the classes of all sources; False requires equal classes in all sources.

    Raises ValueError if the sources can't be trained on together."""

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
        self._abouts = [part.describe() for part in parts]
        for field in SAME:
            values = [getattr(about, field) for about in self._abouts]
            for name, value in zip(names, values, strict=True):
                if value != values[0]:
                    do = WHAT_TO_DO.get(field, "make their latents anew with the same flags")
                    raise ValueError(
                        f"{shown}: {names[0]} and {name} differ in {field} ({values[0]} and {value}), and can't be "
                        f"blended; {do}"
                    )
        self.class_names, self._labels = _merged(names, self._abouts, classes or [{}] * len(parts), union, shown)
        self.ends = np.cumsum([len(part) for part in parts])
        exact = tuple((step, tuple(weights)) for step, weights in stages)
        self._rows = SourceRows(tuple(names), tuple(self.ends.tolist()), exact, len(self))
        if epochs is not None:
            self._rows = replace(self._rows, epochs=tuple(epochs)).of_rows(self._rows.ends)
        self._known_keys: np.ndarray | int | None = None
        self._one_type = len({type(part.whole if isinstance(part, Recaptioned) else part) for part in parts}) == 1

    def __len__(self) -> int:
        return int(self.ends[-1])

    def _find(self, row: int) -> tuple[int, int]:
        source = int(np.searchsorted(self.ends, row, side="right"))
        return source, row - (int(self.ends[source - 1]) if source else 0)

    def read(self, row: int, view: View = PLAIN) -> Item:
        source, row = self._find(row)
        about = self._abouts[source]
        # Some data sets ignore as_bytes and return float32, but a batch has one dtype.
        as_bytes = view.as_bytes and self._one_type
        view = view._replace(
            flip=view.flip and about.random_flip,
            start=view.start if about.random_window else None,
            as_bytes=as_bytes,
            enlarge=view.enlarge or not as_bytes,
        )
        item = self.parts[source].read(row, view)
        if self.class_names:
            item = item._replace(y=int(self._labels[source][item.y]))
        return item if self._one_type or item.x.dtype != torch.uint8 else item._replace(x=to_pixels(item.x))

    def source(self, row: int) -> str:
        source, row = self._find(row)
        return self.parts[source].source(row)

    def label(self, row: int) -> int:
        source, row = self._find(row)
        label = self.parts[source].label(row)
        return int(self._labels[source][label]) if self.class_names else label

    def caption(self, row: int) -> str | None:
        source, row = self._find(row)
        return self.parts[source].caption(row)

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        source, row = self._find(row)
        return self.parts[source].preview(row)

    def prefetch(self, rows: Sequence[int]) -> None:
        found = [self._find(row) for row in rows]
        for number, part in enumerate(self.parts):
            if mine := [row for source, row in found if source == number]:
                part.prefetch(mine)

    def next_row(self, row: int) -> int:
        source, place = self._find(row)
        return row - place + self.parts[source].next_row(place)

    def shapes(self) -> Shapes:
        parts = [part.shapes() for part in self.parts]
        if self._known_keys is None:
            self._known_keys = self._keys(parts)
        return Shapes(
            keys=self._known_keys,
            media=lambda: self._media_sizes(parts),
            read_as=" ".join(part.read_as for part in parts),
            latents=(lambda: self._latent_sizes(parts)) if all(part.latents for part in parts) else None,
            frame_rates=lambda: [rate for part in parts for rate in part.frame_rates()],
        )

    def _keys(self, parts: list[Shapes]) -> np.ndarray | int:
        first = parts[0].keys
        if isinstance(first, int) and all(isinstance(part.keys, int) and part.keys == first for part in parts):
            return first
        keys = [(len(rows), part.keys) for rows, part in zip(self.parts, parts, strict=True)]

        def name() -> str:
            known = (
                (f"{rows} {each}",) if isinstance(each, int) else (str(each.dtype), stream_of(each))
                for rows, each in keys
            )
            return hash_parts("keys of sources", *(value for each in known for value in each))

        def make() -> np.ndarray:
            return np.concatenate(
                [np.full(rows, each, np.uint8) if isinstance(each, int) else each for rows, each in keys]
            )

        return kept_array(len(self), name, make)

    def _media_sizes(self, parts: list[Shapes]) -> np.ndarray | None:
        sizes = [part.media() for part in parts]
        if all(each is None for each in sizes):
            return None
        own = np.array((1, *self._abouts[0].sample_shape[1:])[-3:], dtype=np.int32)
        of = zip(sizes, self.parts, strict=True)
        return np.concatenate([np.tile(own, (len(part), 1)) if each is None else each for each, part in of])

    def _latent_sizes(self, parts: list[Shapes]) -> list[tuple[int, Size]]:
        starts = (self.ends - [len(part) for part in self.parts]).tolist()
        of = zip(starts, parts, strict=True)
        return [(start + end, size) for start, part in of for end, size in (part.latents or list)()]

    def fingerprint(self) -> Fingerprint:
        known = [part.fingerprint() for part in self.parts]
        return Fingerprint(
            lambda: hash_parts("blend", *self.names, *self.class_names, *(each.identity for each in known)),
            lambda: hash_parts(*(each.contents or "" for each in known)),
            self._checksums([each.checksums for each in known if each.checksums is not None]),
        )

    def _checksums(self, found: list[Verification]) -> Verification | None:
        files = {str(each.folder.absolute() / name): sha for each in found for name, sha in each.files.items()}
        return Verification(Path(), files, self.shown) if found else None

    def describe(self) -> Description:
        abouts = self._abouts
        sources = "; ".join(f"{name}: {about.text}" for name, about in zip(self.names, abouts, strict=True))
        # Each stage's weights, relative to their sum.
        blend = "; ".join(
            (f"from step {step:,} " if step else "")
            + ", ".join(f"{name} {float(w / sum(ws)):.4g}" for name, w in zip(self.names, ws, strict=True))
            for step, ws in self._rows.stages
        )
        return replace(
            abouts[0],
            text=f"{self.shown}: {len(self):,} samples of {len(self.parts)} sources by weight ({blend}). {sources}",
            class_names=self.class_names,
            **{name: any(getattr(about, name) for about in abouts) for name in RANDOM},
            max_bad=max(about.max_bad for about in abouts),
            cut_captions=self._named("cut_captions"),
            notes=self._named("notes"),
            counted_captions=tuple(
                each
                for part, about in zip(self.parts, abouts, strict=True)
                for each in about.counted_captions or ((len(part), USUALLY_COUNTED),)
            ),
            sources=self._rows,
            blend=blend,
            files=self._files,
            largest_label=self._largest_label,
        )

    def _named(self, lines: str) -> tuple[str, ...]:
        of = zip(self.names, self._abouts, strict=True)
        return tuple(f"{name}: {line}" for name, about in of for line in getattr(about, lines))

    def _files(self) -> list[tuple[int, np.ndarray | None]]:
        of = zip(self.parts, self._abouts, strict=True)
        return [each for part, about in of for each in (about.files() if about.files else [(len(part), None)])]

    def _largest_label(self) -> tuple[int, str] | None:
        found = [(about.largest_label(), labels) for about, labels in zip(self._abouts, self._labels, strict=True)]
        return max(((int(labels[one[0]]), one[1]) for one, labels in found if one and one[0] >= 0), default=None)


def _merged(
    names: Sequence[str], abouts: Sequence[Description], classes: Sequence[dict[str, str]], union: bool, shown: str
) -> tuple[list[str], list[np.ndarray]]:
    """Return (the blend's class names, each source's array from its labels to the blend's labels)."""
    renamed = []
    for name, about, mapped in zip(names, abouts, classes, strict=True):
        if unknown := sorted(mapped.keys() - set(about.class_names)):
            raise ValueError(f"{shown}: {name} has no class {unknown[0]!r}; it has {', '.join(about.class_names[:10])}")
        renamed.append([mapped.get(each, each) for each in about.class_names])
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


MOST = 1_000  # maximum number of sources, and of weight changes
LONGEST = 4096  # maximum characters in a path, name or flag value
OF_CAPTIONS = ("caption_prefix", "file_column", "caption_column")  # flags that a source may set
EXAMPLE = "sources: [{path: pictures, weight: 0.7}, {path: more.csv, weight: 0.3}]"


def open_source(asked: Request) -> BlendedDataset | None:
    """Open the blend that ``asked.data_path`` names, as a YAML file or as text; None if it names no blend."""
    if inline := inline_sources(asked.data_path):
        sources = [{"path": path, "weight": weight} for path, weight in inline]
        return _open({"sources": sources}, asked, Path())
    if asked.located.is_dir() or asked.located.suffix.lower() not in (".yaml", ".yml"):
        return None
    return _open(read_yaml(asked.located, asked.shown), asked, asked.located.parent)


def _open(content: Any, asked: Request, folder: Path) -> BlendedDataset:
    shown = asked.shown
    require(isinstance(content, dict), shown, f"must be like {EXAMPLE}")
    require_known(content, ("sources", "changes", "classes"), shown)
    sources, changes = content.get("sources"), content.get("changes", [])
    require(isinstance(sources, list) and sources, shown, f"needs a list of sources, like {EXAMPLE}")
    require(isinstance(changes, list), shown, "changes must be a list of {step: ..., weights: {...}}")
    union = content.get("classes")
    require(len(sources) <= MOST and len(changes) <= MOST, shown, f"has more than {MOST:,} sources or changes")
    require(union in (None, "union"), shown, "classes can only be union here; a source has its own classes: {...}")
    names, paths = [], []
    for source in sources:
        right = isinstance(source, dict) and isinstance(source.get("path"), str) and 0 < len(source["path"]) <= LONGEST
        right = right and "\0" not in source["path"]
        require(right, shown, f"a source is like {EXAMPLE}")
        require_known(source, ("path", "name", "weight", "epochs", "classes", *OF_CAPTIONS), shown)
        mapped = source.get("classes", {})
        right = isinstance(mapped, dict) and all(isinstance(name, str) for name in mapped.values())
        require(right, shown, f"classes of {printable(source['path'])} must be its names: the blend's, all texts")
        for key in OF_CAPTIONS:
            right = isinstance(source.get(key, ""), str) and len(source.get(key, "")) <= LONGEST
            require(right, shown, f"{key} of {printable(source['path'])} must be a text")
        name = source.get("name", source["path"])
        right = isinstance(name, str) and 0 < len(name) <= LONGEST or type(name) is int
        require(right, shown, f"name must be a text, not {short(name)}; put quotes around it")
        names.append(str(name))
        named = source["path"] in named_sources() or is_address(source["path"])
        try:
            paths.append(source["path"] if named else str(folder / expanded(source["path"])))
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from error
    for values, what in ((names, "name"), ([os.path.realpath(path) for path in paths], "path")):
        counts = Counter(values)
        twice = next((name for name, value in zip(names, values, strict=True) if counts[value] > 1), "")
        again = f"names the source {printable(twice)} twice (by {what}); give it once, with a larger weight"
        require(len(counts) == len(values), shown, again)
    given = [key for key in ("weight", "epochs") if any(key in source for source in sources)]
    require(len(given) == 1, shown, "give every source a weight, or every source epochs")
    pairs = zip(sources, names, strict=True)
    amounts = [positive(source.get(given[0]), f"{given[0]} of {name}", shown) for source, name in pairs]
    parts = []
    for path, source in zip(paths, sources, strict=True):
        suffix = Path(path).suffix.lower()
        blend = suffix in (".yaml", ".yml") or inline_sources(path) is not None
        require(not blend, shown, f"can't hold another blend, {printable(path)}: list its sources here")
        cooker = asked.energon_cooker if is_prepared(Path(path)) else None
        own = {key: source[key] for key in OF_CAPTIONS if key in source}
        options = vars(replace(asked, data_path=path, energon_cooker=cooker, **own))
        parts.append(build_dataset(**{name: value for name, value in options.items() if name != "path"}))
        require(not isinstance(parts[-1], MockDataset), shown, "can't hold mock, whose latents are random")
    if asked.energon_cooker and not any(is_prepared(Path(path)) for path in paths):
        raise ValueError(
            f"--energon_cooker {asked.energon_cooker}: no source of {shown} was prepared by Energon; leave it out"
        )
    return BlendedDataset(
        names,
        parts,
        [(0, amounts), *_changes(changes, names, shown)],
        shown=shown,
        epochs=amounts if given == ["epochs"] else None,
        classes=[source.get("classes", {}) for source in sources],
        union=union == "union",
    )


def _changes(changes: list[Any], names: list[str], shown: str) -> list[tuple[int, list[Fraction]]]:
    stages, last, nothing = [], 0, Fraction(0)
    for change in changes:
        require(isinstance(change, dict), shown, "a change is {step: 10000, weights: {NAME: 0.2, ...}}")
        require_known(change, ("step", "weights"), shown)
        step, weights = change.get("step"), change.get("weights")
        require(type(step) is int and step > last, shown, f"changes need rising steps above 0, not {short(step)}")
        require(isinstance(weights, dict) and weights, shown, f"the change at step {step} needs weights: {{NAME: 0.2}}")
        require_known(weights, names, shown)
        stages.append(
            (step, [positive(weights[n], f"weight of {n}", shown) if n in weights else nothing for n in names])
        )
        last = step
    return stages
