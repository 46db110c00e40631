"""Read and write ``index.json``, the description of cached latents in a folder.

The file holds one index for every ``--image_size``. An index is written after its shards, so shards without an index
are unfinished."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len, MaxLen
from pydantic import FailFast, Field

from opendit.common.json_file import MIB, read_json
from opendit.common.json_models import (
    Count,
    FileKind,
    FileName,
    JsonObject,
    Name,
    Positive,
    Sha256,
    Text,
    Texts,
    Word,
    absent,
    checked,
)
from opendit.common.safe_files import remove, replacing
from opendit.common.tensor_files import write_file
from opendit.common.utils import shown
from opendit.config.names import FOREIGN_FORMS
from opendit.data.files import file_locked

Rate = Annotated[float, Interval(gt=0, le=1e6)]
Side = Annotated[int, Interval(ge=1, le=1 << 20)]
LatentShape = Annotated[list[Annotated[int, Interval(ge=1, le=1 << 16)]], Len(3, 4)]
Scale = Annotated[float, Interval(gt=0, le=1e6)]
Shift = Annotated[float, Interval(ge=-1e6, le=1e6)]
Skipped = Annotated[list[Text], FailFast()]


class ClipSettings(JsonObject):
    """Settings for reading clips from their files."""

    num_frames: Side
    frame_interval: Side
    short_clips: Word
    fps: Rate = 1


class LatentsSettings(JsonObject):
    """The settings of a cache."""

    version: Count
    data: Word
    shapes: Word = absent()  # with --bucket_tokens: identity of the cropped data set
    bucket_tokens: Positive = absent()
    pictures: Count
    image_size: Side
    vae: Word
    latent_shape: LatentShape
    flips: bool
    shard_size: Positive
    precision: Word = ""
    video: ClipSettings = absent()
    first_frames: Word = absent()  # identity of the encoder of first frames, or "latents" without one
    text: Word | None = None
    features: Word = absent()


class LatentsShard(JsonObject):
    """Content of the tar member ``latents.ABOUT``. skipped: "path: reason" of unreadable files."""

    settings: LatentsSettings
    skipped: Skipped


class ShardEntry(JsonObject):
    """Entry in the index for one file of latents."""

    file: FileName
    count: Count
    bytes: Count
    shape_key: Annotated[int, Interval(ge=0, le=(1 << 15) - 1)] = 0  # see ``Shapes.keys``; all samples have this key
    latent_shape: LatentShape = absent()  # only with --bucket_tokens; otherwise the index's shape applies
    sha256: Sha256 = ""


class TextEncoding(JsonObject):
    """The text encoder for the stored embeddings."""

    encoder: Name
    max_tokens: int = Field(ge=1, le=1 << 16)
    pooled: Annotated[int, Interval(ge=0, le=1 << 16)] = absent()  # pooled width; absent: the tokens' width
    dtype: Literal["bf16"] = absent()  # absent for fp16


class StoredFeatures(JsonObject):
    """A vision encoder's stored features: ``width`` values for each token of a ``grid`` (rows, columns)."""

    encoder: Name
    grid: Annotated[list[Side], Len(2, 2)]
    width: Annotated[int, Interval(ge=1, le=1 << 16)]


class CaptionCounts(JsonObject):
    """Statistics of the captions that were embedded."""

    rows: Count  # rows of the data set
    counted: Count  # captions with counted tokens
    cut: Count  # counted captions that were truncated to ``max_tokens``
    longest: Count  # tokens in the longest counted caption


class ForeignTars(JsonObject):
    """Another program's tars. form: one of ``FOREIGN_FORMS``. array, mirrored: names of arrays in a sample."""

    form: str = Field(pattern=rf"^({'|'.join(FOREIGN_FORMS)})\z")
    array: Name
    mirrored: Name = ""


class LatentsOfOneSize(JsonObject):
    """The index for one picture size."""

    count: Count
    class_names: Texts
    image_size: Side
    vae: Name
    # A scale or shift is a number, or a list with one number per channel.
    scaling_factor: Scale | Annotated[list[Scale], Len(1, 4096)]
    shift_factor: Shift | Annotated[list[Shift], Len(1, 4096)]
    latent_shape: LatentShape
    flips: bool
    shards: Annotated[list[ShardEntry], FailFast()]
    settings: LatentsSettings = absent()
    skipped: Skipped = []
    video: ClipSettings = absent()
    data_fps: Rate = 1  # median frame rate of the original files
    first_frames: Annotated[int, Interval(ge=0, le=1 << 16)] = absent()  # width of first-frame tokens; 0: none
    conditioning: Literal["label", "text"] = "label"
    text: TextEncoding = absent()
    features: StoredFeatures = absent()
    captions: CaptionCounts = absent()
    checksums: Annotated[dict[FileName, Sha256], FailFast(), MaxLen(1000)] = {}  # SHA-256 of files other than shards
    foreign: ForeignTars = absent()


class LatentsSizes(JsonObject):
    """The content of index.json. ``sizes`` has one index per picture size."""

    format: Word
    version: Count
    sizes: Annotated[list[LatentsOfOneSize], FailFast(), Len(1, 1000)]


SHARD, LATENTS_SIZES = FileKind(LatentsShard, 16 * MIB), FileKind(LatentsSizes, 256 * MIB)
REPAIR = "copy it again or run the preprocess.py command that made it"


def check_index(index: dict[str, Any], path: Path) -> None:
    """Raise ValueError if fields of a ``checked`` index contradict each other."""

    def require(right: bool, problem: str) -> None:
        if not right:
            raise ValueError(f"{path}: {problem}; {REPAIR}")

    shards, shape = index["shards"], index["latent_shape"]
    counted = sum(shard["count"] for shard in shards)
    require(index["count"] == counted, f"count is {index['count']:,}, its shards' counts are {counted:,} in all")
    require(counted > 0, "count is 0: it holds no samples")
    require(len({shard["file"] for shard in shards}) == len(shards), "shards name a file twice")
    require("first_frames" not in index or "video" in index, "first_frames is there, but no video")
    require((len(shape) == 4) == ("video" in index), f"latent_shape is {shape}, which is not that of its video field")
    for shard in shards:
        own = shard.get("latent_shape", shape)
        fits = own[0] == shape[0] and len(own) == len(shape)
        require(fits, f"latent_shape of {shard['file']} is {own}, and that of the index {shape}")
    for key in ("scaling_factor", "shift_factor"):
        values = index[key]
        fits = not isinstance(values, list) or len(values) == shape[0]
        require(fits, f"{key} is not one number, nor one for each of {shape[0]} channels")
    text = index.get("conditioning", "label") == "text"
    require(text or "text" not in index, "text is there, but conditioning is not text")
    require(text or bool(index["class_names"]), "class_names is empty")


INDEX = "index.json"
FORMAT, FILES_VERSION, VERSION = "opendit-latents", 1, 2
OLD_FILES = "latents-*.safetensors"  # latents of version 1


def convert_advice(folder: str) -> str:
    """Return an error message's part about a folder of version 1: the cause and the fix."""
    return (
        "holds latents in safetensors files, as earlier versions made them; convert them: python preprocess.py shards "
        f"--data_path {shlex.quote(folder)} --output TARS"
    )


def check_indexes(index: Any, source: str) -> list[dict[str, Any]] | None:
    """Return the indexes in an index.json, one per picture size; None if ``index`` does not describe latents. Raises
    ValueError for an invalid index or another version. source: the file's path."""
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        return None
    version, folder = index.get("version"), source.rpartition("/")[0]
    if version == FILES_VERSION:
        raise ValueError(f"--data_path {folder}: {convert_advice(folder)}")
    if version != VERSION:
        raise ValueError(
            f"--data_path {folder}: its latents have format version {shown(version)}, this program reads {VERSION}; "
            "make them again with preprocess.py latents"
        )
    found = checked(index, LATENTS_SIZES, Path(source))["sizes"]
    for each in found:
        check_index(each, Path(source))
    return found


def read_indexes(folder: Path) -> list[dict[str, Any]] | None:
    """Return the indexes in a folder's index.json. Return None without this file, or if it is no JSON and the folder
    has no latents. Raises ValueError for a damaged index."""
    path = folder / INDEX
    try:
        content = read_json(path, LATENTS_SIZES.most_bytes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if any(folder.glob(OLD_FILES)) or any(folder.glob("latents-*.tar")):
            raise ValueError(f"{path} can't be read ({error}); {REPAIR}") from error
        return None
    return check_indexes(content, str(path))


def choose_index(indexes: list[dict[str, Any]], name: str, image_size: int) -> dict[str, Any]:
    """Return the index for this picture size. Raises ValueError, beginning with ``name``, if there is none."""
    found = next((index for index in indexes if index["image_size"] == image_size), None)
    if found is None:
        sizes = [str(index["image_size"]) for index in indexes]
        raise ValueError(
            f"{name}: holds latents made at --image_size {' and '.join(sizes)}, but this run has --image_size "
            f"{image_size}; pass --image_size {' or '.join(sizes)} or make latents for {image_size}"
        )
    return found


def write_index(folder: Path, indexes: list[dict[str, Any]]) -> None:
    content = {"format": FORMAT, "version": VERSION, "sizes": sorted(indexes, key=lambda index: index["image_size"])}
    with replacing(folder / INDEX, temporary=INDEX + ".partial") as new:
        # write_file syncs the content, so that a power cut leaves no empty file.
        write_file(new, iter([(json.dumps(content, indent=1) + "\n").encode()]))


LOCK = ".index.lock"  # hold this lock only to change index.json


def take_index(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Remove the index for the picture size in ``settings``, because its shards will be rewritten. Return the removed
    shards' checksums by file name. Raises ValueError if the folder is no folder of latents, or if its latents have
    version 1 or other settings."""
    with file_locked(folder / LOCK):
        indexes, others = _indexes(folder, settings)
        if others:
            write_index(folder, others)
        else:
            remove(folder / INDEX)
    mine = [index for index in indexes if index not in others]
    return {shard["file"]: shard["sha256"] for index in mine for shard in index["shards"] if "sha256" in shard}


def put_index(folder: Path, settings: dict[str, Any], index: dict[str, Any]) -> None:
    """Store ``index`` in index.json, and keep the indexes for other picture sizes. The caller must hold ``LOCK``.
    Raises as :func:`take_index`."""
    write_index(folder, [*_indexes(folder, settings)[1], index])


def _indexes(folder: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (all indexes in a folder, indexes for other picture sizes). Raises as :func:`take_index`."""
    if any(folder.glob(OLD_FILES)):
        raise ValueError(f"--output {folder}: {convert_advice(str(folder))}; or name another folder")
    if not (folder / INDEX).exists():
        return [], []
    try:
        indexes = read_indexes(folder)
    except ValueError:  # an index that is damaged or of another version is overwritten
        indexes = []
    if indexes is None:
        raise ValueError(f"--output {folder}: holds an {INDEX} of something else; pass another folder")
    others = [index for index in indexes if index["image_size"] != settings["image_size"]]
    for name in ("data", "vae", "video", "text"):
        for index in others:
            if index.get("settings", {}).get(name) != settings.get(name):
                raise ValueError(
                    f"--output {folder}: holds latents of {index['image_size']} px of other {name}; pass another folder"
                )
    return indexes, others
