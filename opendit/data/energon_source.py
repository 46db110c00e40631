"""Open folders from megatron-energon, and metadatasets: YAML files that list such folders."""

from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np

from opendit.common.utils import shown as short
from opendit.common.yaml_file import positive, read_yaml, require, require_known
from opendit.config.names import is_address
from opendit.data.base import MediaDataset
from opendit.data.blend import BlendedDataset
from opendit.data.energon import (
    COOKER,
    CookedDataset,
    PreparedSet,
    is_prepared,
    load_cooker,
    open_indexes,
    read_prepared,
)
from opendit.data.files import expanded, printable
from opendit.data.shards.dataset import IndexedTar, ShardDataset
from opendit.data.shards.index import KeptRows, TarIndex, read_class_names
from opendit.data.sources import NoSplit, Request

# Maximum folders, and maximum files in a chain of references.
MOST_FOLDERS, MOST_FILES = 1_000, 16
LONGEST = 4096  # maximum characters in a path or name

ALONE, WEIGHTS, REPETITIONS = "alone", "weights", "repetitions"  # meanings of ``Leaf.share``; ALONE: a single folder

_REFERENCE = ("path", "split_part", "subflavors", "shuffle_over_epochs_multiplier", "dataset_config", "split_config")
_HINTS: dict[str, str] = dict.fromkeys(
    ("cooker", "joiner"), f"; samples are read by {COOKER}"
)  # unknown key -> end of the error message
_FIRST = (*_REFERENCE, "subflavor", "weight")
_SECOND = (*_REFERENCE, "subset", "aux")
_LISTS = {"blend": ("weight", WEIGHTS), "blend_epochized": ("repetitions", REPETITIONS)}


@dataclass(frozen=True)
class Subset:
    """A selection from a split: the samples [``first``, ``last``) and, among them, the fractions [``start``, ``end``).
    Sample numbers are rounded down, as in Energon."""

    start: float = 0.0
    end: float = 1.0
    first: int = 0
    last: int | None = None  # None: the end of the split

    def within(self, outer: "Subset | None") -> "Subset":
        """Return this subset restricted by ``outer``, which must select by fractions only."""
        if outer is None:
            return self
        length = self.end - self.start
        return replace(self, start=self.start + outer.start * length, end=self.start + outer.end * length)

    def of(self, samples: int) -> tuple[int, int]:
        """Return the numbers [first, last) of the selected samples among ``samples``. Raises ValueError."""
        last = samples if self.last is None else self.last
        if not self.first <= last <= samples:
            raise ValueError(f"subset: range [{self.first}, {last}] of {samples:,} samples")
        length = last - self.first
        return self.first + int(length * self.start), self.first + int(length * self.end)


@dataclass(frozen=True)
class Leaf:
    """A metadataset's reference to a split of a prepared folder."""

    folder: Path
    split: str  # "" means ``Request.split``
    share: Fraction = Fraction(1)  # the folder's weight or repetitions
    subset: Subset | None = None
    subflavors: dict[str, Any] = field(default_factory=dict)
    dataset_config: str | None = None
    split_config: str | None = None


def is_metadataset(content: Any) -> bool:
    """Return True if a YAML file's content is an Energon metadataset. OpenDiT's blends have the key "sources"."""
    if not isinstance(content, dict) or "sources" in content:
        return False
    return "splits" in content or str(content.get("__module__", "")).startswith("megatron.energon")


def read_metadataset(path: Path, splits: tuple[str, ...], shown: str) -> tuple[str, list[Leaf]]:
    """Read the first of ``splits`` that a metadataset has. Return (meaning of ``Leaf.share``, leaves). Raises OSError,
    or ValueError beginning with ``shown`` (NoSplit if no split exists)."""
    return _Reader(shown).file(path, splits)


class _Reader:
    def __init__(self, shown: str):
        self.shown, self.folders = shown, 0
        self._read: dict[Path, Any] = {}  # contents by path, to read each file once

    def file(
        self,
        path: Path,
        splits: tuple[str, ...],
        above: tuple[Path, ...] = (),
        inherited: dict[str, Any] | None = None,
        subset: Subset | None = None,
    ) -> tuple[str, list[Leaf]]:
        """Return (meaning of ``Leaf.share``, leaves) of a file. above, inherited, subset: see ``_At``."""
        place = path.resolve()
        where = f"{self.shown}: {printable(path)}" if above else self.shown
        if place in above:
            raise ValueError(f"{where} leads back to itself, over {' -> '.join(map(printable, (*above, place)))}")
        require(len(above) < MOST_FILES, where, f"more than {MOST_FILES} files lead to each other; name fewer")
        if place not in self._read:
            self._read[place] = read_yaml(path, where)
        content = self._read[place]
        require(isinstance(content, dict) and isinstance(content.get("splits"), dict), where, "needs splits: {...}")
        require_known(content, ("__module__", "__class__", "path", "splits"), where, _HINTS)
        kind, module = content.get("__class__", "Metadataset"), content.get("__module__", "megatron.energon")
        if kind not in ("Metadataset", "MetadatasetV2") or not str(module).startswith("megatron.energon"):
            raise ValueError(
                f"{where}: __class__ must be Metadataset or MetadatasetV2 of megatron.energon, not {short(kind)}"
            )
        chosen = next((name for name in splits if name in content["splits"]), None)
        if chosen is None:
            there = ", ".join(printable(name[:60]) for name in list(content["splits"])[:20]) or "none"
            raise NoSplit(f"{where} has no split {' or '.join(splits)}; it has {there}")
        node = content["splits"][chosen]
        where = f"{where}, split {chosen}"
        require(isinstance(node, dict), where, "must be {path: ...}, {blend: [...]} or {datasets: [...]}")
        read = self._second if kind == "MetadatasetV2" else self._first
        return read(node, where, _At(path.parent, chosen, (*above, place), inherited or {}, subset))

    def _first(self, node: dict[str, Any], where: str, at: "_At") -> tuple[str, list[Leaf]]:
        require_known(node, ("datasets",), where, _HINTS)
        return self._mixed(node, "datasets", "weight", WEIGHTS, _FIRST, where, at)

    def _second(self, node: dict[str, Any], where: str, at: "_At") -> tuple[str, list[Leaf]]:
        if "join" in node:
            raise ValueError(
                f"{where}: join puts samples of several folders together by Python code, which is not run; pack what "
                "is joined into one set of tars"
            )
        form = next((key for key in _LISTS if key in node), None)
        if form is None:
            require_known(node, _SECOND, where, _HINTS)
            return self._reference(node, where, at)
        require_known(node, (form, "subset"), where, _HINTS)
        name, kind = _LISTS[form]
        at = replace(at, subset=self._subset(node, where, at.subset))
        self._relative(at.subset, where)
        return self._mixed(node, form, name, kind, (*_SECOND, name), where, at)

    def _mixed(
        self, node: dict[str, Any], form: str, name: str, kind: str, known: tuple[Any, ...], where: str, at: "_At"
    ) -> tuple[Any, ...]:
        entries = cast(list, node.get(form))
        require(isinstance(entries, list) and entries, where, f"{form} must be a list of {{path: ..., {name}: 1}}")
        for entry in entries:
            require(isinstance(entry, dict), where, f"an entry of {form} is like {{path: ..., {name}: 1}}")
            if "join" in entry:
                self._second(entry, where, at)
            require_known(entry, known, where, _HINTS)
        shares = [positive(entry.get(name, 1), f"{name} of {entry.get('path')}", where) for entry in entries]
        total = sum(shares) if kind == WEIGHTS else 1
        leaves = []
        for entry, share in zip(entries, shares, strict=True):
            inner, found = self._reference(entry, where, at)
            if inner not in (ALONE, kind):
                raise ValueError(f"{where}: {entry['path']} has {inner} where this has {kind}; give all of them one")
            leaves += [replace(leaf, share=leaf.share * share / total) for leaf in found]
        return kind, leaves

    def _reference(self, node: dict[str, Any], where: str, at: "_At") -> tuple[str, list[Leaf]]:
        right = isinstance(node.get("path"), str) and "\0" not in node["path"] and 0 < len(node["path"]) <= LONGEST
        require(right, where, "every data set needs a path")
        if is_address(node["path"]):
            raise ValueError(f"{where}: {node['path']} is an address; a metadataset's folders must be on this machine")
        if node.get("aux"):
            raise ValueError(f"{where}: aux of {node['path']} hands other sets to Python code; pack them into its tars")
        named = node.get("subflavors") or {}
        require(isinstance(named, dict), where, f"subflavors of {node['path']} must be names with values")
        if node.get("subflavor") is not None:
            named = {"__subflavor__": node["subflavor"], **named}
        split = node.get("split_part") or at.split
        configs = {key: node.get(key) for key in ("dataset_config", "split_config")}
        for value in (split, *configs.values()):
            right = value is None or isinstance(value, str) and len(value) <= LONGEST
            require(right, where, f"{node['path']}: {short(value)} is no name")
        for value in configs.values():  # names of files in .nv-meta
            right = value is None or Path(value).name == value
            require(right, where, f"{node['path']}: {short(value)} is no plain name of a file")
        subset = self._subset(node, where, at.subset)
        try:
            path, flavors = at.folder / expanded(node["path"]), {**named, **at.subflavors}
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if path.exists() and not path.is_dir():
            if path.suffix.lower() == ".jsonl":
                raise ValueError(f"{where}: {node['path']} holds texts alone; leave it out, or pack pictures with it")
            require(not any(configs.values()), where, f"{node['path']} is a file, which takes no {'/'.join(configs)}")
            self._relative(subset, where)
            return self.file(path, (split,), at.above, flavors, subset)
        if not is_prepared(path):
            what = "has not been prepared: run energon prepare" if path.is_dir() else "doesn't exist"
            raise ValueError(f"{where}: {printable(path)} {what}")
        self.folders += 1
        require(self.folders <= MOST_FOLDERS, where, f"leads to more than {MOST_FOLDERS:,} folders; name fewer")
        return ALONE, [Leaf(path, split, Fraction(1), subset, flavors, **configs)]

    def _subset(self, node: dict[str, Any], where: str, outer: Subset | None) -> Subset | None:
        """Return a node's subset, restricted by ``outer``. A node without a subset selects all samples."""
        content = node.get("subset")
        if content is None:
            return outer
        ends = cast(list, content.get("range") if isinstance(content, dict) else None)
        require(isinstance(ends, list) and len(ends) == 2, where, "a subset is {range: [10%, 90%]} or {range: [0, 99]}")
        first, last = ends
        if type(first) is int:
            last = None if last == "end" else last
            right = first >= 0 and (last is None or type(last) is int and first <= last)
            found = Subset(first=first, last=last)
        else:
            found = Subset(self._percent(first, where), self._percent(last, where))
            right = 0 <= found.start <= found.end <= 1
        ends = f"[{short(first)}, {short(last)}]"
        require(right, where, f"subset: range {ends} must rise, within 0% and 100% or from 0 on")
        return found.within(outer)

    def _percent(self, value: Any, where: str) -> float:
        try:
            if isinstance(value, str) and value.strip().endswith("%"):
                return float(value.strip().removesuffix("%")) / 100.0
        except ValueError:
            pass
        raise ValueError(f"{where}: a subset's range is in percent, like 25%, or in whole numbers, not {short(value)}")

    def _relative(self, subset: Subset | None, where: str) -> None:
        counts = subset is not None and (subset.first, subset.last) != (0, None)
        require(not counts, where, "a subset of numbers must be that of a prepared folder; give percentages here")


@dataclass(frozen=True)
class _At:
    """Context for the entries of a file."""

    folder: Path
    split: str
    above: tuple[Path, ...]  # the chain of files from the top file to this one
    subflavors: dict[str, Any]  # set by the files above
    subset: Subset | None  # selected by the files above


_SPLITS = {"train": ("train",), "test": ("val", "test")}  # ``Request.split`` -> Energon's names, best first


def open_source(asked: Request) -> MediaDataset | None:
    if asked.located.is_dir():
        if not is_prepared(asked.located):
            return None
        kind, leaves = ALONE, [Leaf(asked.located, "")]
    elif asked.located.suffix.lower() in (".yaml", ".yml") and is_metadataset(read_yaml(asked.located, asked.shown)):
        kind, leaves = read_metadataset(asked.located, _SPLITS[asked.split], asked.shown)
    else:
        return None
    parts = [_open_leaf(replace(asked, path=leaf.folder), leaf) for leaf in leaves]
    if len(parts) == 1:
        return parts[0]
    shares, names = [leaf.share for leaf in leaves], _names(leaves, asked.located)
    epochs = shares if kind == REPETITIONS else None
    return BlendedDataset(names, parts, [(0, shares)], shown=asked.shown, epochs=epochs)


def _names(leaves: list[Leaf], above: Path) -> list[str]:
    """Return a unique name for each leaf, for the log. above: path of the metadataset."""
    base, names, counts = above.resolve().parent, [], Counter[str]()
    for leaf in leaves:
        folder = leaf.folder.resolve()
        name = str(folder.relative_to(base)) if folder.is_relative_to(base) else str(folder)
        name = f"{name} ({leaf.split})" if leaf.split != "train" else name
        counts[name] += 1
        names.append(f"{name} #{counts[name]}" if counts[name] > 1 else name)
    return names


def _open_leaf(asked: Request, leaf: Leaf) -> ShardDataset:
    shown = asked.shown if not leaf.split else f"{asked.shown}: {printable(leaf.folder)}"
    cooker = load_cooker(asked.energon_cooker) if asked.energon_cooker else None
    prepared = read_prepared(
        leaf.folder,
        shown,
        splits=(leaf.split,) if leaf.split else _SPLITS[asked.split],
        dataset_config=leaf.dataset_config,
        split_config=leaf.split_config,
        cooked=cooker is not None,
    )
    indexes = open_indexes(prepared, shown)
    shards = _shards(prepared, indexes, leaf, shown)
    names = read_class_names(leaf.folder)
    if cooker is None:
        return ShardDataset(shown, shards, asked.image_size, class_names=names, **asked.of_clips())
    return CookedDataset(
        shown,
        shards,
        asked.image_size,
        cooker=cooker,
        name=cast(str, asked.energon_cooker),
        fields=prepared.fields,
        subflavors={**prepared.subflavors, **leaf.subflavors},
        class_names=names,
        **asked.of_clips(),
    )


def _shards(prepared: PreparedSet, indexes: list[TarIndex], leaf: Leaf, shown: str) -> list[IndexedTar]:
    """Return the leaf's tars with their selected rows. Tars without selected rows are left out. The leaf's subset also
    counts excluded samples and samples without an index row."""
    total = sum(count for _, count in prepared.tars)
    first, last = 0, total
    if leaf.subset is not None:
        try:
            first, last = leaf.subset.of(total)
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from error
    without: dict[str, set[str]] = {}
    for tar, key in prepared.without:
        without.setdefault(tar, set()).add(key)
    shards, before = [], 0
    for (name, count), index in zip(prepared.tars, indexes, strict=True):
        kept = kept_rows(index, first - before, last - before, without.get(name, set()))
        before += count
        if kept is None or len(kept.rows):
            shards.append(IndexedTar(str(prepared.folder / name), index, kept))
    if not shards:
        raise ValueError(f"{shown}: no sample of its {total:,} is left by subset and exclude; leave some")
    return shards


def kept_rows(index: TarIndex, first: int, last: int, keys: set[str]) -> KeptRows | None:
    """Return the index rows of the samples [first, last), without samples with a key in ``keys``. None means all rows.
    first, last: sample numbers in the tar, including samples that the index leaves out."""
    count = index.header.rows + index.header.left_out
    if first <= 0 and last >= count and not keys:
        return None
    start, end = max(0, first), min(max(0, last), count)
    if index.header.left_out:
        start, end = np.searchsorted(index.rows["number"], [start, end]).tolist()
    start = min(start, end)
    without = [row for row in range(start, end) if index.key(row) in keys] if keys else []
    return KeptRows(np.setdiff1d(np.arange(start, end), without), f"{start}-{end} without {without}")
