"""Convert cached latents in safetensors files, which early versions wrote, to tars. Nothing is encoded.

A folder of such files holds ``latents-00000-of-00012.safetensors``, ... and an ``index.json`` of version 1, which
describes one picture size. A file of n samples has the tensors

    moments  (n, F, 2C, [t,] h, w) float16   mean and standard deviation of every picture and, if F = 2, of its mirror
                                             image
    labels   (n,) int64
    rows     (n,) int64                      the picture's row in the original data set

and, with captions,

    captions     (bytes,) uint8              the captions in UTF-8, concatenated
    caption_ends (n,) int64                  the end of each caption in ``captions``

and, with a text encoder, ``tokens`` (sum of the captions' lengths, D) with ``token_ends`` (n,), and ``pooled`` (n, P).
The file's metadata has the settings and the names of the source files that couldn't be read. Caches of the earliest
versions have no checksums.
"""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from opendit.common.json_file import MIB, read_json
from opendit.common.json_models import Count, FileKind, Word, checked, parse_text
from opendit.common.progress import Progress
from opendit.common.safe_files import make_folder, replacing
from opendit.common.tensor_files import open_safetensors
from opendit.common.utils import DataError, sha256_of
from opendit.data.files import printable
from opendit.data.latents import EMPTY, CachedSample, read_header, tar_name, write_shard
from opendit.data.latents_index import (
    FILES_VERSION,
    FORMAT,
    INDEX,
    REPAIR,
    SHARD,
    VERSION,
    LatentsOfOneSize,
    check_index,
    write_index,
)
from opendit.data.processes import in_processes
from opendit.data.shards.index import claim_output

_KEY = "opendit"  # the only metadata key of a file


class LatentsIndex(LatentsOfOneSize):
    """The index.json of version 1."""

    format: Word
    version: Count


LATENTS_INDEX = FileKind(LatentsIndex, 32 * MIB)


@dataclass(frozen=True)
class LatentsTar:
    """A tar to write. files: index entries of the safetensors files to pack, all of one shape. settings, skipped:
    contents of the tar's first member."""

    path: Path
    files: tuple[dict[str, Any], ...]
    settings: dict[str, Any]
    skipped: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(file["count"] for file in self.files)


def holds_old_latents(folder: Path) -> bool:
    """Return True if a folder has an index of version 1."""
    try:
        index = read_json(folder / INDEX, LATENTS_INDEX.most_bytes)
    except (OSError, ValueError):
        return False
    return isinstance(index, dict) and (index.get("format"), index.get("version")) == (FORMAT, FILES_VERSION)


def convert_latents(folder: Path, output: Path, *, shard_size: int, num_workers: int) -> None:
    """Pack the latents of a folder into tars in ``output``. Each tar takes whole files, up to ``shard_size`` bytes in
    total. Existing tars are kept, so the same command continues an interrupted conversion. Raises ValueError for an
    invalid index and for an ``output`` with other tars; DataError for files that differ from the index."""
    index = checked(read_json(folder / INDEX, LATENTS_INDEX.most_bytes), LATENTS_INDEX, folder / INDEX)
    check_index(index, folder / INDEX)
    del index["format"], index["version"]
    plans = _plan(folder, index, output, shard_size)
    make_folder(output)
    claim_output(output, [plan.path.name for plan in plans], [INDEX, EMPTY])
    done = [plan for plan in plans if (found := read_header(plan.path)) is not None and found[1] == plan.settings]
    todo = [plan for plan in plans if plan not in done]
    with Progress(index["count"], "samples", initial=sum(plan.count for plan in done), title="packing") as bar:
        for count in in_processes(partial(_write, folder=folder), todo, num_workers):
            bar.update(count)
    if "text" in index:
        with replacing(output / EMPTY) as new, open(folder / EMPTY, "rb") as old:
            shutil.copyfileobj(old, new)
        index["checksums"] = {EMPTY: sha256_of(output / EMPTY)}
    shards = [_entry(plan) for plan in plans]
    write_index(output, [{**index, "settings": plans[0].settings, "shards": shards}])
    print(f"{index['count']:,} latents in {len(plans):,} tars: train with --data_path {printable(output)}")


def _plan(folder: Path, index: dict[str, Any], output: Path, shard_size: int) -> list[LatentsTar]:
    """Divide the files, by shape and in order, into tars of up to ``shard_size`` bytes, with at least one file each."""
    headers = [_header(folder / file["file"]) for file in index["shards"]]
    settings = {**headers[0]["settings"], "version": VERSION, "shard_size": shard_size}
    skipped = tuple(file for header in headers for file in header["skipped"])
    groups: list[list[dict[str, Any]]] = []
    for file in sorted(index["shards"], key=lambda file: file.get("shape_key", 0)):
        before = groups[-1] if groups else []
        together = sum(each["bytes"] for each in before) + file["bytes"] <= shard_size
        if before and together and before[0].get("shape_key", 0) == file.get("shape_key", 0):
            before.append(file)
        else:
            groups.append([file])
    names = [tar_name(index["image_size"], number, len(groups)) for number in range(len(groups))]
    return [
        LatentsTar(output / name, tuple(group), settings, () if number else skipped)
        for number, (name, group) in enumerate(zip(names, groups, strict=True))
    ]


def _header(path: Path) -> dict[str, Any]:
    """Return the settings and the skipped files of a safetensors file. Raises DataError if the file is missing or
    damaged."""
    try:
        with open_safetensors(path) as file:
            return parse_text((file.metadata() or {}).get(_KEY, ""), SHARD, path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is missing or damaged; {REPAIR}") from error


def _write(plan: LatentsTar, folder: Path) -> int:
    """Write a tar of latents and return the number of its samples."""
    samples: list[CachedSample] = []
    for entry in plan.files:
        path = folder / entry["file"]
        if "sha256" in entry and sha256_of(path) != entry["sha256"]:
            raise DataError(f"{path} is damaged: its checksum is not the index's; {REPAIR}")
        try:
            with open_safetensors(path) as file:
                found = list(_samples({name: file.get_tensor(name) for name in file.keys()}))  # noqa: SIM118
            if len(found) != entry["count"]:
                raise ValueError(f"{len(found):,} samples, {INDEX} says {entry['count']:,}")
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise DataError(f"{path} is damaged: {type(error).__name__}: {error}; {REPAIR}") from error
        samples += found
    write_shard(plan.path, samples, plan.settings, list(plan.skipped))
    return plan.count


def _samples(tensors: dict[str, Tensor]) -> Iterator[CachedSample]:
    """Yield the samples of a file. Raises KeyError, ValueError or RuntimeError if tensors are missing or their lengths
    differ."""
    rows, labels = tensors["rows"].tolist(), tensors["labels"].tolist()
    captions: Iterable[str | None] = repeat(None, len(rows))
    if "captions" in tensors:
        captions = (
            text.numpy().tobytes().decode("utf-8", "surrogatepass")
            for text in _cut(tensors["captions"], tensors["caption_ends"])
        )
    parts = {"moments": tensors["moments"]}
    if "tokens" in tensors:
        parts |= {"tokens": _cut(tensors["tokens"], tensors["token_ends"]), "pooled": tensors["pooled"]}
    for row, label, caption, *own in zip(rows, labels, captions, *parts.values(), strict=True):
        yield CachedSample(row, dict(zip(parts, own, strict=True)), label, caption)


def _cut(joined: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor into consecutive pieces that end at ``ends``. Raises RuntimeError if the ends do not ascend to the
    tensor's length."""
    return joined.split(ends.diff(prepend=ends.new_zeros(1)).tolist())


def _entry(plan: LatentsTar) -> dict[str, Any]:
    entry = {"file": plan.path.name, "count": plan.count, "bytes": plan.path.stat().st_size}
    entry["sha256"] = sha256_of(plan.path)
    return entry | ({"shape_key": plan.files[0]["shape_key"]} if "shape_key" in plan.files[0] else {})
