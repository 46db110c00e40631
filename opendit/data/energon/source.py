"""A folder that megatron-energon prepared, or a metadataset of several."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from opendit.common.json_file import read_json
from opendit.common.json_models import checked
from opendit.common.yaml_file import read_yaml
from opendit.data.base import MediaDataset
from opendit.data.blend import BlendedDataset
from opendit.data.energon.cooked import CookedDataset, load_cooker
from opendit.data.energon.metadataset import (
    ALONE,
    REPETITIONS,
    Leaf,
    NoSuchSplitThere,
    is_metadataset,
    read_metadataset,
)
from opendit.data.energon.prepared import NoSuchSplit, PreparedSet, is_prepared, open_indexes, read_prepared
from opendit.data.files import printable
from opendit.data.shards.dataset import IndexedTar, ShardDataset
from opendit.data.shards.index import CLASS_NAMES, NAMES_OF_CLASSES, KeptRows, TarIndex
from opendit.data.sources import NoSplit, Request

_SPLITS = {"train": ("train",), "test": ("val", "test")}  # Energon's names


def open_source(asked: Request) -> MediaDataset | None:
    if asked.located.is_dir():
        if not is_prepared(asked.located):
            return None
        found = [Leaf(asked.located, "")], ALONE
    elif asked.located.suffix.lower() in (".yaml", ".yml") and is_metadataset(read_yaml(asked.located, asked.shown)):
        try:
            kind, leaves = read_metadataset(asked.located, _SPLITS[asked.split], asked.shown)
        except NoSuchSplitThere as error:
            raise _no_split(asked, error) from error
        found = leaves, kind
    else:
        return None
    leaves, kind = found
    try:
        parts = [_open_leaf(replace(asked, path=leaf.folder), leaf) for leaf in leaves]
    except NoSuchSplit as error:
        raise _no_split(asked, error) from error
    if len(parts) == 1:
        return parts[0]
    shares, names = [leaf.share for leaf in leaves], _names(leaves, asked.located)
    epochs = shares if kind == REPETITIONS else None
    return BlendedDataset(names, parts, [(0, shares)], shown=asked.shown, epochs=epochs)


def _no_split(asked: Request, error: ValueError) -> ValueError:
    return ValueError(str(error)) if asked.split == "train" else NoSplit(str(error))


def _names(leaves: list[Leaf], above: Path) -> list[str]:
    """Give each leaf a unique name, for the log."""
    names: dict[str, None] = {}
    last: dict[str, int] = {}
    for leaf in leaves:
        folder = leaf.folder.resolve()
        base = above.resolve().parent
        name = str(folder.relative_to(base)) if folder.is_relative_to(base) else str(folder)
        name = f"{name} ({leaf.split})" if leaf.split != "train" else name
        own = name
        while own in names:
            last[name] = last.get(name, 1) + 1
            own = f"{name} #{last[name]}"
        names[own] = None
    return list(names)


def _open_leaf(asked: Request, leaf: Leaf) -> ShardDataset:
    """Open one prepared folder."""
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
    names, path = (), leaf.folder / CLASS_NAMES
    if path.exists():
        names = checked(read_json(path, NAMES_OF_CLASSES.most_bytes), NAMES_OF_CLASSES, path)
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
    """Return the tars with those of their samples that the leaf has. Its subset counts all samples that Energon
    counted."""
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
        path = str(prepared.folder / name)
        kept = kept_rows(index, first - before, last - before, without.get(name, set()))
        before += count
        if kept is None or len(kept):
            shards.append(IndexedTar(path, path, index, kept))
    if not shards:
        raise ValueError(f"{shown}: no sample of its {total:,} is left by subset and exclude; leave some")
    return shards


def kept_rows(index: TarIndex, first: int, last: int, keys: set[str]) -> KeptRows | None:
    """Return the rows of the tar's samples ``first`` to before ``last``, without these keys. Samples that the index
    leaves out count, too. None: all rows."""
    rows, count = index.header.rows, index.header.rows + index.header.left_out
    if first <= 0 and last >= count and not keys:
        return None
    start, end = max(0, first), min(max(0, last), count)
    if index.header.left_out:
        start, end = np.searchsorted(index.rows["number"], [start, end]).tolist()
    start = min(start, end)
    found = [row for row in range(rows) if index.key(row) in keys] if keys else []
    index.close()  # of thousands of tars, which a process may not all have open
    return KeptRows(start, end, np.array([row for row in found if start <= row < end], np.int64))
