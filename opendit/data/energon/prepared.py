"""Read a folder that ``energon prepare`` prepared: the files in its ``.nv-meta/``, and the indexes of its tars.

A tar's index lies beside the tar if ``preprocess.py index`` made it for the same fields. Otherwise it is made when the
data set is first opened, and lies in a cache folder on the local disk.
"""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from opendit.common.json_file import LARGEST, MIB
from opendit.common.progress import Progress
from opendit.common.utils import hash_parts
from opendit.common.utils import shown as short
from opendit.common.yaml_file import read_yaml
from opendit.data.files import file_locked, name_few, printable
from opendit.data.processes import in_processes
from opendit.data.shards.index import Fields, TarIndex, index_of, scan, suffix_of, write_index
from opendit.data.shards.store import FOLDER, FileCache, expand

META = ".nv-meta"
INFO = (".info.json", ".info.yaml")
MOST_BYTES = 64 * MIB  # maximum size of a list of tars
LONGEST, MOST_FOLDERS = 4096, 64  # maximum characters of a tar's name, and maximum folders in the name
MOST_OPTIONS = 64  # maximum number of alternatives for one field, and of parts in an alternative's path
COOKER = "--energon_cooker MODULE:FUNCTION"

_CRUDE = "CrudeWebdataset"
_OF_FIELDS = {"image": "medium", "video": "medium", "caption": "caption", "label": "label"}
# Energon's settings for decoding and shuffling. They are ignored, because this project does both differently.
_IGNORED = (
    "auto_decode av_decode decoder guess_content ignore_decoder_errors image_decode max_samples_per_sequence "
    "parallel_shard_iters path shuffle_over_epochs split_config split_part video_decode_audio"
).split()
_KNOWN = [*"__module__ __class__ sample_type field_map sample_loader part_filter subflavors".split(), *_IGNORED]
_NOT_TEXT = (".pyd", ".pickle", ".pkl", ".pth", ".pt", ".npy", ".npz", ".ten", ".tb")
SMALL = 64 << 20  # tars of fewer bytes in total are indexed in one process, because starting several takes longer


@dataclass(frozen=True)
class PreparedSet:
    """One split of a prepared folder.

    Attributes:
        tars: (name relative to ``folder``, number of all samples) of each tar.
        without: (tar, key) of each sample that is left out.
        fields: which members of a sample hold the picture or clip, the caption and the label.
        subflavors: values that a cooker gets with each sample.
    """

    folder: Path
    tars: tuple[tuple[str, int], ...]
    without: frozenset[tuple[str, str]]
    fields: Fields
    subflavors: dict[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> str:
        """Hash of the fields, which the index of a tar records."""
        return hash_parts("energon", repr(self.fields))


def is_prepared(folder: Path) -> bool:
    return any((folder / META / name).exists() for name in INFO)


def read_prepared(
    folder: Path,
    shown: str,
    *,
    splits: Sequence[str] | None = ("train",),
    dataset_config: str | None = None,
    split_config: str | None = None,
    cooked: bool = False,
) -> PreparedSet:
    """Read the first of ``splits`` that the folder has; None reads the tars of all splits.

    cooked: True if the user's code reads the samples. Raises ValueError or FileNotFoundError; the message begins with
    ``shown`` and names the fix."""
    meta = folder / META
    counts = _counts(meta, shown)
    tars, without = list(counts), frozenset()
    if splits is not None:
        tars, without = _split(meta, shown, splits, split_config, counts)
    fields, subflavors = _fields(meta / (dataset_config or "dataset.yaml"), shown, cooked)
    return PreparedSet(folder, tuple((tar, counts[tar]) for tar in tars), without, fields, subflavors)


def all_tars(folder: Path, cooked: bool = False) -> PreparedSet:
    """Read the tars of all splits. Raises like :func:`read_prepared`."""
    return read_prepared(folder, f"DIR {printable(folder)}", splits=None, cooked=cooked)


def _counts(meta: Path, shown: str) -> dict[str, int]:
    path = next(meta / name for name in INFO if (meta / name).exists())
    content = read_yaml(path, f"{shown}: {path}", MOST_BYTES)  # JSON is YAML
    counts = content.get("shard_counts") if isinstance(content, dict) else None
    right = isinstance(counts, dict) and all(
        isinstance(name, str) and type(count) is int and 0 <= count <= LARGEST for name, count in counts.items()
    )
    if not right or not counts:
        raise ValueError(f"{shown}: {path} has no shard_counts: {{TAR: SAMPLES}}; run energon prepare again")
    for name in counts:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(
                f"{shown}: {path} names {printable(name[:200])}, which is not in the folder; prepare it again"
            )
        if len(name) > LONGEST or name.count("/") > MOST_FOLDERS:
            raise ValueError(
                f"{shown}: {path} names {printable(name[:200])}..., which is too long for a path; prepare it again"
            )
    return counts


def _split(
    meta: Path, shown: str, splits: Sequence[str], config: str | None, counts: dict[str, int]
) -> tuple[list[str], frozenset[tuple[str, str]]]:
    """Return the tars of a split in order, and the (tar, key) of each sample that is left out."""
    path = meta / (config or "split.yaml")
    if config is None and not path.exists():
        path = meta / "split.json"
    if not path.exists():
        raise FileNotFoundError(f"{shown}: {meta / (config or 'split.yaml')} doesn't exist; run energon prepare again")
    content = read_yaml(path, f"{shown}: {path}", MOST_BYTES)
    parts = content.get("split_parts") if isinstance(content, dict) else None
    excluded = content.get("exclude") or [] if isinstance(content, dict) else []
    if not isinstance(parts, dict) or not all(map(_are_names, [*parts.values(), excluded])):
        raise ValueError(
            f"{shown}: {path} is no split; write split_parts: {{train: [TAR, ...]}}, exclude: [TAR or TAR/KEY]"
        )
    chosen = next((name for name in splits if parts.get(name)), None)
    if chosen is None:
        there = ", ".join(printable(name[:60]) for name, tars in list(parts.items())[:20] if tars) or "none"
        raise NoSuchSplit(f"{shown}: has no split {' or '.join(splits)} in {path}; it has {there}")
    try:
        left_out = set(expand(excluded))
        names = expand(parts[chosen])
    except ValueError as error:
        raise ValueError(f"{shown}: {error} in {path}; correct it") from error
    names = [name for name in names if name not in left_out]
    if unknown := [printable(name) for name in names if name not in counts]:
        raise ValueError(
            f"{shown}: {path} names {name_few(unknown)}, of which {INFO[0]} knows nothing; prepare it again"
        )
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))
        raise ValueError(f"{shown}: {path} names {printable(twice)} twice in the split {chosen}; name it once")
    if not names:
        raise ValueError(f"{shown}: every tar of the split {chosen} is excluded in {path}; leave some")
    # An excluded sample is TAR/KEY, and both parts may contain slashes.
    most = max(tar.count("/") for tar in counts)
    samples = {(tar, name[len(tar) + 1 :]) for name in left_out for tar in _prefixes(name, most) if tar in counts}
    return names, frozenset(samples)


class NoSuchSplit(ValueError):
    """Raised if the folder has no tars of the requested split."""


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _prefixes(name: str, most: int) -> Iterator[str]:
    """Yield the parent folders of ``name``, the shortest first, up to the one with ``most`` slashes."""
    end = name.find("/")
    for _ in range(most + 1):
        if end < 0:
            return
        yield name[:end]
        end = name.find("/", end + 1)


def _fields(path: Path, shown: str, cooked: bool) -> tuple[Fields, dict[str, Any]]:
    """Read the fields and the subflavors of samples from a dataset.yaml."""
    if not path.exists():
        if cooked:
            return Fields(exact=True, whole=True), {}
        raise FileNotFoundError(
            f"{shown}: {path} doesn't exist; write it (sample_type and field_map: {{image: jpg, caption: txt}}), or "
            f"give {COOKER}"
        )
    content = read_yaml(path, f"{shown}: {path}")
    if not isinstance(content, dict):
        raise ValueError(
            f"{shown}: {path} is of another form; write sample_type: ..., field_map: {{image: jpg, caption: txt}}"
        )
    if unknown := [key for key in content if key not in _KNOWN]:
        raise ValueError(f"{shown}: {path} has the unknown key {short(unknown[0])}; known here: {', '.join(_KNOWN)}")
    subflavors = content.get("subflavors") or {}
    parts = content.get("part_filter")
    if not isinstance(subflavors, dict) or not (parts is None or isinstance(parts, str) or _are_names(parts)):
        raise ValueError(
            f"{shown}: {path} is of another form; subflavors are names with values, part_filter a list of endings"
        )
    listed = tuple(parts) if isinstance(parts, list) else None
    if cooked:
        return Fields(exact=True, whole=True, parts=listed), subflavors
    if code := next((key for key in ("sample_loader", "part_filter") if isinstance(content.get(key), str)), None):
        raise ValueError(
            f"{shown}: {path} names Python code, {code}: {content[code]}, which is not run from a data folder; give a "
            f"function of your own, {COOKER}, or a field_map in its place"
        )
    mapping = content.get("field_map")
    if mapping is None and content.get("__class__") == _CRUDE:
        return Fields(exact=True, parts=listed), subflavors
    if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
        raise ValueError(
            f"{shown}: {path} has no field_map; write one like {{image: jpg, caption: txt}}, or give {COOKER}"
        )
    return _mapped(mapping, f"{shown}: {path}"), subflavors


def _mapped(mapping: dict[str, str], where: str) -> Fields:
    """Return the fields for a map like ``{image: "jpg,png", caption: "json[texts][0],txt"}``."""
    found: dict[str, tuple[Any, ...]] = {"medium": (), "caption": (), "label": ()}
    for name in ("video", "image", "caption", "label"):
        if name in mapping:
            options = mapping[name].split(",")
            found[_OF_FIELDS[name]] += tuple(_access(option) for option in options)
            if len(options) > MOST_OPTIONS or any(len(path) > MOST_OPTIONS for path in found[_OF_FIELDS[name]]):
                raise ValueError(
                    f"{where}: its field_map has too many places of {name}; at most {MOST_OPTIONS} are read"
                )
    media = found["medium"]
    if not media:
        raise ValueError(f"{where}: its field_map has neither image nor video ({', '.join(mapping)}); give {COOKER}")
    if nested := next((path for path in media if len(path) > 1), None):
        raise ValueError(f"{where}: a picture inside of another member, {nested[0]}[{nested[1]}]; give {COOKER}")
    for path in (*found["caption"], *found["label"]):
        if suffix_of(path[0]) in _NOT_TEXT:
            raise ValueError(f"{where}: .{path[0]} holds no text that is read without running it; give {COOKER}")
    others = [name for name in mapping if name not in (*_OF_FIELDS, "label_name")]
    if others and not found["caption"] and not found["label"]:
        raise ValueError(
            f"{where}: its field_map has neither caption nor label (it has {', '.join(mapping)}); map one, or give "
            f"{COOKER}"
        )
    fields = Fields(tuple(path[0] for path in media), found["caption"], found["label"])
    return replace(fields, exact=True)


def _access(option: str) -> tuple[str, ...]:
    """Parse ``json[a][0]`` as (json, a, 0)."""
    found = re.fullmatch(r"([^\[\]]+)((?:\[[^\[\]]+\])*)", option)
    return (option,) if found is None else (found[1], *re.findall(r"\[([^\[\]]+)\]", found[2]))


# ------------------------------------------------------------------------------------------ indexes of the tars


def open_indexes(prepared: PreparedSet, shown: str) -> list[TarIndex]:
    """Open the index of every tar, in order. One process per machine makes missing indexes, with a progress bar.

    Raises ValueError, which begins with ``shown``, if a tar is missing, damaged or has another number of samples than
    Energon counted, or if the cache folder can't be written to. Raises DataError if a process was killed."""
    folder = FileCache.of_environment().folder / "energon"
    places = {}
    for name, _ in prepared.tars:
        path = prepared.folder / name
        try:
            places[path] = _place(path, prepared.plan, folder)
        except OSError as error:
            raise ValueError(f"{shown}: {printable(path)} can't be read ({error.strerror}); allow it") from error
    if any(not place.exists() for place in places.values()):
        try:
            with file_locked(folder / "lock", root=folder.parent, make=True):  # one rank per machine makes the indexes
                _make({tar: place for tar, place in places.items() if not place.exists()}, prepared)
        except OSError as error:
            what = f"the indexes can't be written to {printable(folder)} ({error.strerror or error})"
            path = shlex.quote(printable(prepared.folder))
            fix = f"set {FOLDER} to another folder, or run: python preprocess.py index {path}"
            raise ValueError(f"{shown}: {what}; {fix}") from error
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from error
    indexes = []
    for (name, count), place in zip(prepared.tars, places.values(), strict=True):
        try:
            index = TarIndex(place)
        except (ValueError, OSError) as error:
            raise ValueError(f"{shown}: {error}") from error
        check_count(prepared.folder / name, index, count, shown)
        indexes.append(index)
    return indexes


def check_count(tar: Path, index: TarIndex, count: int, shown: str) -> None:
    """Raise ValueError if the tar has changed since Energon prepared it."""
    if (found := index.header.rows + index.header.left_out) != count:
        raise ValueError(
            f"{shown}: {printable(tar)} has {found:,} samples, and {count:,} when Energon prepared it; prepare it again"
        )


def _place(tar: Path, plan: str, folder: Path) -> Path:
    """Return the path of a tar's index, whether or not it exists yet."""
    beside, state = index_of(tar), os.stat(tar)
    if beside.exists():
        try:
            header = TarIndex(beside).header
            if (header.plan, header.tar_bytes) == (plan, state.st_size):
                return beside
        except ValueError:
            pass
    return folder / f"{hash_parts(plan, str(tar.absolute()), f'{state.st_size} {state.st_mtime_ns}')[:40]}.index"


def _make(todo: dict[Path, Path], prepared: PreparedSet) -> None:
    size = sum(tar.stat().st_size for tar in todo)
    count = 1 if size < SMALL else min(8, os.cpu_count() or 1)
    work = partial(_make_one, fields=prepared.fields, plan=prepared.plan)
    with Progress(len(todo), "tars", title="indexing, once") as bar:
        for _ in in_processes(work, list(todo.items()), count):
            bar.update()


def _make_one(job: tuple[Path, Path], *, fields: Fields, plan: str) -> None:
    tar, place = job
    write_index(place, *scan(tar, fields, checksums=False, plan=plan))
