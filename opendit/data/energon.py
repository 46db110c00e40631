"""Read folders from ``energon prepare``, without the package megatron-energon.

``.nv-meta/`` names the tars, the splits and the samples' fields. Every tar needs an index for these fields, written
next to the tar by ``preprocess.py index``. Otherwise, the index is written once to a cache folder on the local disk. In
a cooked data set, the user's code makes each sample from a tar's members."""

import importlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from opendit.common.json_file import LARGEST, MIB
from opendit.common.progress import Progress
from opendit.common.utils import hash_parts
from opendit.common.utils import shown as short
from opendit.common.yaml_file import read_yaml
from opendit.data.base import BadSample, Description, Shapes, Size
from opendit.data.files import file_locked, name_few, printable
from opendit.data.picture_file import as_rgb, reason
from opendit.data.pictures_and_clips import stored_size
from opendit.data.processes import in_processes
from opendit.data.shards.dataset import IndexedTar, ShardDataset
from opendit.data.shards.index import (
    BLOCK,
    Fields,
    TarIndex,
    index_of,
    members,
    scan,
    split_name,
    suffix_of,
    write_index,
)
from opendit.data.shards.store import FOLDER, FileCache, expand
from opendit.data.sources import NoSplit

META = ".nv-meta"
INFO = (".info.json", ".info.yaml")
MOST_BYTES = 64 * MIB  # maximum bytes of a file that lists tars or splits
MOST_OPTIONS = 64  # maximum alternatives for a field, and maximum steps in a path such as json[a][0]
COOKER = "--energon_cooker MODULE:FUNCTION"

_CRUDE = "CrudeWebdataset"
_OF_FIELDS = {"image": "medium", "video": "medium", "caption": "caption", "label": "label"}
# Ignored keys of dataset.yaml: OpenDiT decodes and shuffles differently.
_IGNORED = (
    "auto_decode av_decode decoder guess_content ignore_decoder_errors image_decode max_samples_per_sequence "
    "parallel_shard_iters path shuffle_over_epochs split_config split_part video_decode_audio"
).split()
_KNOWN = [*"__module__ __class__ sample_type field_map sample_loader part_filter subflavors".split(), *_IGNORED]
_NOT_TEXT = (".pyd", ".pickle", ".pkl", ".pth", ".pt", ".npy", ".npz", ".ten", ".tb")
SMALL = 64 << 20  # total bytes below which one process indexes all tars, because starting more takes longer


@dataclass(frozen=True)
class PreparedSet:
    """One split of a prepared folder."""

    folder: Path
    tars: tuple[tuple[str, int], ...]  # (name relative to ``folder``, number of samples)
    without: frozenset[tuple[str, str]]  # (tar, key) of each excluded sample
    fields: Fields  # places of medium, caption and label
    subflavors: dict[str, Any] = field(default_factory=dict)  # for a cooker

    @property
    def plan(self) -> str:
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
    """Read the first of ``splits`` that the folder has; None means all tars. dataset_config, split_config: names of
    files in ``.nv-meta``. cooked: True if the user's code reads the samples. Raises ValueError or FileNotFoundError,
    beginning with ``shown``."""
    meta = folder / META
    counts = _counts(meta, shown)
    tars, without = list(counts), frozenset()
    if splits is not None:
        tars, without = _split(meta, shown, splits, split_config, counts)
    fields, subflavors = _fields(meta / (dataset_config or "dataset.yaml"), shown, cooked)
    return PreparedSet(folder, tuple((tar, counts[tar]) for tar in tars), without, fields, subflavors)


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
    return counts


def _split(
    meta: Path, shown: str, splits: Sequence[str], config: str | None, counts: dict[str, int]
) -> tuple[list[str], frozenset[tuple[str, str]]]:
    """Return (tars of the first split that exists, in order; (tar, key) of each excluded sample)."""
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
        raise NoSplit(f"{shown}: has no split {' or '.join(splits)} in {path}; it has {there}")
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
    samples = set()  # TAR/KEY, where both may contain slashes
    for name in left_out:
        for slash in re.finditer("/", name[:4096]):
            if (tar := name[: slash.start()]) in counts:
                samples.add((tar, name[slash.end() :]))
    return names, frozenset(samples)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _fields(path: Path, shown: str, cooked: bool) -> tuple[Fields, dict[str, Any]]:
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
    """Open every tar's index, in order. If indexes are missing, one rank per machine writes them.

    Raises ValueError, beginning with ``shown``, for a missing or damaged tar, a sample count other than Energon's, or a
    read-only cache folder."""
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
            with file_locked(folder / "lock", root=folder.parent, make=True):  # one rank per machine at a time
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
    """Raise ValueError unless a tar has ``count`` samples, the number that Energon counted."""
    if (found := index.header.rows + index.header.left_out) != count:
        raise ValueError(
            f"{shown}: {printable(tar)} has {found:,} samples, and {count:,} when Energon prepared it; prepare it again"
        )


def _place(tar: Path, plan: str, folder: Path) -> Path:
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


# ------------------------------------------------------------------------------------------ the user's code

FLAG = "--energon_cooker"
RETURNS = "a mapping or an object with image or video, and caption or label"
TRIED = 100  # samples to try for a readable one when the data set is opened

Cooker = Callable[[dict[str, Any]], Any]


def load_cooker(name: str) -> Cooker:
    """Import and return ``module:function`` from Python's path or the working directory. Raises ValueError."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{FLAG} {name}: must be MODULE:FUNCTION, such as my_data:cook for cook() of my_data.py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's module may raise any error
        raise ValueError(f"{FLAG} {name}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{FLAG} {name}: {function} is no function")
    return found


def members_of(content: bytes, fields: Fields) -> tuple[str, dict[str, bytes]]:
    """Return (key, members by extension) of a sample. content: the sample's bytes in the tar."""
    key, parts = "", {}
    for member in members(io.BytesIO(content + bytes(2 * BLOCK))):
        if member.isreg() and (split := split_name(member.name, fields.exact)) is not None:
            key, ending = split
            if fields.takes(ending):
                parts[ending] = content[member.offset_data : member.offset_data + member.size]
    return key, parts


def decoded(ending: str, content: bytes) -> Any:
    """Decode JSON, texts, and integers for classes, indices and ids. Other members stay bytes."""
    suffix = suffix_of(ending)
    if suffix in (".json", ".jsn"):
        return json.loads(content)
    if suffix in (".txt", ".text", ".transcript"):
        return content.decode()
    return int(content) if suffix in (".cls", ".cls2", ".index", ".inx", ".id") else content


class CookedDataset(ShardDataset):
    """Data set with samples from the user's function ``cooker``.

    The function gets a dictionary with the sample's members by extension (see ``decoded``), ``__key__`` and
    ``__subflavors__``. It returns a mapping or an object with

    - ``image``: the bytes of a picture's file, or a PIL image; or ``video``: the bytes of a clip's file;
    - ``caption``: a string; or ``label``: a class number, if the folder has a class_names.json. Without both, all
      samples have the class "0".

    All samples must have the fields of the first readable sample. A sample is unreadable if the function raises an
    error, or returns None or an invalid result. name: the function's name, for messages and the data set's identity."""

    size_threads = 1  # the user's function may not be thread-safe
    counted_captions = 100  # few, because a caption requires reading the complete sample

    def __init__(
        self,
        shown: str,
        shards: Sequence[IndexedTar],
        image_size: int,
        *,
        cooker: Cooker,
        name: str,
        fields: Fields,
        subflavors: dict[str, Any],
        class_names: Sequence[str] = (),
        random_flip: bool | None = None,
        **options: Any,
    ):
        super().__init__(shown, shards, image_size, random_flip=random_flip, **options)
        self.cooker, self.name, self.fields, self.subflavors = cooker, name, fields, subflavors
        self._cooked: tuple[Any, ...] = (None, None)
        self.class_names = list(class_names)
        first = self._first()
        self._video = "video" in first
        if self._video and not self.use_video:
            raise ValueError(f"{shown}: {FLAG} {name} gives clips; add --use_video")
        self.conditioning = "text" if "caption" in first else "label"
        if "label" in first and not class_names:
            raise ValueError(f"{shown}: {FLAG} {name} gives labels; name the classes in class_names.json in the folder")
        self.class_names = list(class_names) if "label" in first else [] if "caption" in first else ["0"]
        self.random_flip = self.conditioning == "label" if random_flip is None else random_flip

    def _first(self) -> dict[str, Any]:
        """Return the first readable sample's result. Raises ValueError if ``TRIED`` samples are unreadable."""
        reason: BadSample | None = None
        for row in range(min(TRIED, len(self))):
            try:
                return self._cook(row)
            except BadSample as bad:
                reason = reason or bad
        raise ValueError(f"{self.shown}: {FLAG} {self.name} reads none of the first samples ({reason}); correct it")

    def _cook(self, row: int) -> dict[str, Any]:
        """Return the cooker's result. Raises BadSample."""
        if self._cooked[0] == row:  # a picture and its caption are read separately
            return self._cooked[1]
        content = self.read_medium(row)
        try:
            key, parts = members_of(content, self.fields)
            raw = {ending: decoded(ending, part) for ending, part in parts.items()}
            made = self.cooker({"__key__": key, "__subflavors__": dict(self.subflavors), **raw})
        except Exception as error:  # the user's code may raise any error
            raise BadSample(self.source(row), f"{self.name}: {type(error).__name__}: {error}") from error
        found = {}
        for name in ("image", "video", "caption", "label"):
            value = made.get(name) if isinstance(made, Mapping) else getattr(made, name, None)
            if value is not None:
                found[name] = value
        if why := _problem(found, len(self.class_names)):
            raise BadSample(self.source(row), f"{self.name} gave {why}; it returns {RETURNS}")
        self._cooked = row, found
        return found

    def _medium(self, row: int) -> tuple[bool, Any]:
        """Return (True for a picture, the bytes of its file or a PIL image). Raises BadSample."""
        made = self._cook(row)
        wanted = "video" if self._video else "image"
        if wanted not in made or ("caption" in made) != (self.conditioning == "text"):
            raise BadSample(self.source(row), f"{self.name} gave other parts than of the first sample")
        return not self._video, made[wanted]

    def media_size(self, row: int) -> Size:
        content = self._medium(row)[1]
        if isinstance(content, Image.Image):
            return 1, content.height, content.width
        return stored_size("", len(content), lambda at, size: content[at : at + size], not self._video, self.frames_of)

    def _decoded(self, row: int, content: bytes | Image.Image) -> Image.Image:
        if isinstance(content, bytes):
            return super()._decoded(row, content)
        try:
            return as_rgb(content)
        except Exception as error:  # Pillow's decoders raise errors of nearly any type
            raise BadSample(self.source(row), reason(error)) from error

    def caption(self, row: int) -> str | None:
        return self._cook(row)["caption"].strip() if self.conditioning == "text" else None

    def label(self, row: int) -> int:
        return self._cook(row).get("label", 0)

    def shapes(self) -> Shapes:
        shapes = super().shapes()
        return shapes if shapes.array is not None else replace(shapes, keys=0)

    def _identity(self) -> str:
        return hash_parts(super()._identity(), "cooked", self.name, json.dumps(self.subflavors, sort_keys=True))

    def describe(self) -> Description:
        about = super().describe()
        return replace(about, text=f"{about.text}; read by {self.name}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cooked": (None, None)}


def _problem(found: dict[str, Any], classes: int) -> str:
    """Return the error in a cooker's result; "" if the result is valid. classes: number of classes; 0: any label."""
    image, video, caption, label = (found.get(name) for name in ("image", "video", "caption", "label"))
    if (image is None) == (video is None):
        return "no picture and no clip" if image is None else "a picture and a clip"
    if image is not None and not isinstance(image, (bytes, Image.Image)):
        return f"an image that is a {type(image).__name__}, not bytes or a PIL image"
    if video is not None and not isinstance(video, bytes):
        return f"a video that is a {type(video).__name__}, not bytes"
    if caption is not None and (not isinstance(caption, str) or not caption.strip()):
        return f"a caption that is {'empty' if isinstance(caption, str) else type(caption).__name__}"
    if caption is not None and label is not None:
        return "a caption and a label"
    if label is not None and (type(label) is not int or label < 0 or classes and label >= classes):
        return f"the label {label!r}"
    return ""
