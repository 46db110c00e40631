"""The index of a folder of cached latents, and the base class of all data sets of cached latents.

The index is the file ``index.json``. In version 1 (safetensors files) it describes pictures of one size. In version 2
(tars) it holds one such index for every ``--image_size``, and the tars of one size may have latents of different shapes
(``--bucket_tokens``). The index is written last, so a shard that is not in the index is unfinished.
"""

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Interval, Len, MaxLen
from pydantic import FailFast, Field
from safetensors import safe_open
from torch import Tensor

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
from opendit.common.safe_files import open_to_write, remove, replacing
from opendit.common.tensor_files import open_safetensors, write_file
from opendit.common.utils import hash_parts, shown
from opendit.config.data_sources import FOREIGN_FORMS
from opendit.data.base import CachedFeatures, Description, Embedding, MediaDataset, flip_note
from opendit.data.medium import Medium, of_moments

Rate = Annotated[float, Interval(gt=0, le=1e6)]
Side = Annotated[int, Interval(ge=1, le=1 << 20)]
LatentShape = Annotated[list[Annotated[int, Interval(ge=1, le=1 << 16)]], Len(3, 4)]
Scale = Annotated[float, Interval(gt=0, le=1e6)]
Shift = Annotated[float, Interval(ge=-1e6, le=1e6)]
Skipped = Annotated[list[Text], FailFast()]


class ClipSettings(JsonObject):
    """Settings with which clips were read from their files."""

    num_frames: Side
    frame_interval: Side
    short_clips: Word
    fps: Rate = 1


class LatentsSettings(JsonObject):
    """The settings that a cache was made with."""

    version: Count
    data: Word
    shapes: Word = absent()  # identity of the data set with its shapes, with --bucket_tokens
    bucket_tokens: Positive = absent()
    pictures: Count
    image_size: Side
    vae: Word
    latent_shape: LatentShape
    flips: bool
    shard_size: Positive
    precision: Word = ""
    video: ClipSettings = absent()
    text: Word | None = None
    features: Word = absent()


class LatentsShard(JsonObject):
    """Metadata of a file of latents."""

    settings: LatentsSettings
    skipped: Skipped


class ShardEntry(JsonObject):
    """Entry of the index for one file of latents.

    Attributes:
        shape_key: key of the samples' shape among the shapes of the media.
        latent_shape: shape of the file's latents in a cache made with --bucket_tokens. If absent, the index's
            ``latent_shape`` holds.
    """

    file: FileName
    count: Count
    bytes: Count
    shape_key: Annotated[int, Interval(ge=0, le=(1 << 15) - 1)] = 0
    latent_shape: LatentShape = absent()
    sha256: Sha256 = ""


class TextEncoding(JsonObject):
    """The encoder of the embeddings that are stored with the latents.

    Attributes:
        pooled: width of the pooled vectors, if it is not the width of the tokens.
        dtype: dtype of the embeddings, if it is not fp16.
    """

    encoder: Name
    max_tokens: int = Field(ge=1, le=1 << 16)
    pooled: Annotated[int, Interval(ge=0, le=1 << 16)] = absent()
    dtype: Literal["bf16"] = absent()


class StoredFeatures(JsonObject):
    """The vision encoder's features that are stored with the latents: one for each of grid[0] x grid[1] tokens."""

    encoder: Name
    grid: Annotated[list[Side], Len(2, 2)]
    width: Annotated[int, Interval(ge=1, le=1 << 16)]


class CaptionCounts(JsonObject):
    """Statistics of the captions that an encoder embedded.

    Attributes:
        rows: number of rows.
        counted: number of captions whose tokens were counted.
        cut: number of captions that were cut.
        longest: tokens of the longest caption.
    """

    rows: Count
    counted: Count
    cut: Count
    longest: Count


class ForeignTars(JsonObject):
    """Format of tars that another program made: the form of their arrays, and the arrays' names."""

    form: str = Field(pattern=rf"^({'|'.join(FOREIGN_FORMS)})\z")
    array: Name
    mirrored: Name = ""


class LatentsOfOneSize(JsonObject):
    """The index of the latents of one size."""

    count: Count
    class_names: Texts
    image_size: Side
    vae: Name
    # Each is one number, or one number per channel.
    scaling_factor: Scale | Annotated[list[Scale], Len(1, 4096)]
    shift_factor: Shift | Annotated[list[Shift], Len(1, 4096)]
    latent_shape: LatentShape
    flips: bool
    shards: Annotated[list[ShardEntry], FailFast()]
    settings: LatentsSettings = absent()
    skipped: Skipped = []
    video: ClipSettings = absent()
    data_fps: Rate = 1  # frames a second of the files that the clips were read from
    conditioning: Literal["label", "text"] = "label"
    text: TextEncoding = absent()
    features: StoredFeatures = absent()
    captions: CaptionCounts = absent()
    checksums: Annotated[dict[FileName, Sha256], FailFast(), MaxLen(1000)] = {}  # of other files than the shards
    foreign: ForeignTars = absent()


class LatentsIndex(LatentsOfOneSize):
    """The index of safetensors files, version 1. It covers one picture size."""

    format: Word
    version: Count


class LatentsSizes(JsonObject):
    """The index of tars, version 2. ``sizes`` has one entry per picture size."""

    format: Word
    version: Count
    sizes: Annotated[list[LatentsOfOneSize], FailFast(), Len(1, 1000)]


SHARD = FileKind(LatentsShard, 16 * MIB)
LATENTS_INDEX, LATENTS_SIZES = FileKind(LatentsIndex, 32 * MIB), FileKind(LatentsSizes, 256 * MIB)

_SMALL = ("labels", "captions", "caption_ends", "token_ends")  # read completely: a few bytes a sample
REPAIR = "copy it again or run the preprocess.py command that made it"


class ShardLayout(NamedTuple):
    """The contents that every shard of an index must have.

    Attributes:
        shape: (2C, [t,] h, w), the shape of a latent.
        views: number of latents of each picture; 2 if mirrored pictures are included.
        classes: number of classes, above every label. 0 if the samples have captions instead.
        max_tokens: most tokens of an embedding; 0 if there are no embeddings.
        pooled: width of the pooled vectors; None if it equals the width of the tokens.
        dtype: dtype of the embeddings, as safetensors names it.
        features: (tokens, width) of the stored features; None if there are none.
    """

    shape: tuple[int, ...]
    views: int
    classes: int
    max_tokens: int
    pooled: int | None = None
    dtype: str = "F16"
    features: tuple[int, int] | None = None


def check_index(index: dict[str, Any], path: Path) -> None:
    """Raise ValueError if the fields of an index contradict each other. Each field alone must be valid already."""

    def require(right: bool, problem: str) -> None:
        if not right:
            raise ValueError(f"{path}: {problem}; {REPAIR}")

    shards, shape = index["shards"], index["latent_shape"]
    counted = sum(shard["count"] for shard in shards)
    require(index["count"] == counted, f"count is {index['count']:,}, its shards' counts are {counted:,} in all")
    require(counted > 0, "count is 0: it holds no samples")
    require(len({shard["file"] for shard in shards}) == len(shards), "shards name a file twice")
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


def layout_of(index: dict[str, Any]) -> ShardLayout:
    channels, *sides = index["latent_shape"]
    text = index.get("conditioning", "label") == "text"
    classes = 0 if text else len(index["class_names"])
    encoded = index.get("text", {"max_tokens": 0})
    embeddings = encoded["max_tokens"], encoded.get("pooled"), encoded.get("dtype", "fp16").upper().replace("P", "")
    stored = index.get("features")
    features = None if stored is None else (math.prod(stored["grid"]), stored["width"])
    return ShardLayout((2 * channels, *sides), 2 if index["flips"] else 1, classes, *embeddings, features)


def read_shard(folder: Path, shard: dict[str, Any], layout: ShardLayout) -> dict[str, np.ndarray]:
    """Read the small tensors of a shard, and check its file, size, tensors and shapes against the index.

    Raises ValueError, which names the file and the problem.
    """
    path = folder / shard["file"]
    if not path.is_file():
        raise ValueError(f"{path} is missing, or no regular file; {REPAIR}")
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link to a file outside of its folder; put the file itself there")
    size = path.stat().st_size
    if size != shard["bytes"]:
        raise ValueError(f"{path} has {size:,} bytes instead of {shard['bytes']:,}; {REPAIR}")
    with open_safetensors(path, "np") as file:
        try:
            _check_header(file, shard["count"], layout)
            small = {name: file.get_tensor(name) for name in file.keys() if name in _SMALL}  # noqa: SIM118
            _check_values(small, file, layout)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; {REPAIR}") from error
    return small


def _check_header(file: safe_open, rows: int, layout: ShardLayout) -> None:
    """Raise ValueError if a shard's tensors, dtypes or shapes are not those of ``rows`` samples of this layout."""
    moments = (rows, layout.views, *layout.shape)
    wanted = {"moments": ("F16", moments), "labels": ("I64", (rows,)), "rows": ("I64", (rows,))}
    if not layout.classes:
        wanted |= {"captions": ("U8", (None,)), "caption_ends": ("I64", (rows,))}
    if layout.max_tokens:
        wanted |= {"tokens": (layout.dtype, (None, None)), "token_ends": ("I64", (rows,))}
        wanted |= {"pooled": (layout.dtype, (rows, layout.pooled))}
    if layout.features is not None:
        wanted["features"] = "F16", (rows, layout.views, *layout.features)
    names = set(file.keys())
    for name in sorted(names ^ wanted.keys()):
        raise ValueError(f"tensor {name[:100]!r} is {'not expected' if name in names else 'missing'}")
    for name, (dtype, shape) in wanted.items():
        part = file.get_slice(name)
        found = part.get_shape()
        if name == "moments" and len(shape) == len(found) == 6 and found[3] == 1:
            shape = (*shape[:3], 1, *shape[4:])  # in a data set of clips, a picture has one frame
        fits = len(found) == len(shape) and all(b in (None, a) for a, b in zip(found, shape, strict=True))
        if part.get_dtype() != dtype or not fits:
            expected = ["any" if side is None else side for side in shape]
            raise ValueError(f"{name} is {part.get_dtype()} {found}, not {dtype} {expected}")


def _check_values(small: dict[str, np.ndarray], file: safe_open, layout: ShardLayout) -> None:
    """Raise ValueError if labels are out of range, captions are not UTF-8, or offsets are invalid."""
    labels = small["labels"]
    wrong = (labels < 0) | (labels >= layout.classes)
    if layout.classes and wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"labels are {labels.min()} to {labels.max()}, of {layout.classes:,} classes (sample {first:,} has "
            f"{labels[first]})"
        )
    if not layout.classes:
        _check_ends("caption_ends", small["caption_ends"], len(small["captions"]))
        text, starts = small["captions"], small["caption_ends"][:-1]
        inside = starts[starts < len(text)]
        try:
            text.tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise ValueError(f"captions are not UTF-8 at byte {error.start}") from error
        if ((text[inside] & 0xC0) == 0x80).any():
            raise ValueError("caption_ends cut a character in two")
    if layout.max_tokens:
        ends = small["token_ends"]
        rows, width = file.get_slice("tokens").get_shape()
        _check_ends("token_ends", ends, rows)
        if len(ends) and np.diff(ends, prepend=0).max() > layout.max_tokens:
            raise ValueError(f"token_ends give a caption more than {layout.max_tokens} tokens")
        if layout.pooled is None and file.get_slice("pooled").get_shape()[1] != width:
            raise ValueError("tokens and pooled are not of one width")


def _check_ends(name: str, ends: np.ndarray, total: int) -> None:
    last = ends[-1] if len(ends) else 0
    if last != total or (ends < 0).any() or (np.diff(ends) < 0).any():
        raise ValueError(f"{name} do not rise to {total:,}")


INDEX = "index.json"
FORMAT, FILES_VERSION, TARS_VERSION = "opendit-latents", 1, 2


@dataclass(frozen=True)
class ShardForm:
    """The format of a cache's shards.

    Attributes:
        pattern: glob pattern of the file names.
        name: function (shard, number of shards) -> file name.
        header: function path -> (number of samples, settings, skipped files), or None for an incomplete shard.
        write: function (path, tensors, settings, skipped files) -> SHA-256. An existing shard is always complete.
        version: version of the index.
    """

    pattern: str
    name: Callable[[int, int], str]
    header: Callable[[Path], tuple[int, dict[str, Any], list[str]] | None]
    write: Callable[[Path, dict[str, Any], dict[str, Any], list[str]], str]
    version: int = FILES_VERSION


def check_indexes(index: Any, source: str) -> list[dict[str, Any]] | None:
    """Return the checked indexes in the content of an index.json, one for each picture size.

    Return None if the content is no index of latents. Raises ValueError for an invalid index and for an unknown
    version."""
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        return None
    version = index.get("version")
    if version not in (FILES_VERSION, TARS_VERSION):
        raise ValueError(
            f"--data_path {Path(source).parent}: its latents have format version {shown(version)}, this program reads "
            f"{FILES_VERSION} and {TARS_VERSION}; make them again with preprocess.py latents"
        )
    kind = LATENTS_INDEX if version == FILES_VERSION else LATENTS_SIZES
    index = checked(index, kind, Path(source))
    found = [index] if version == FILES_VERSION else index["sizes"]
    for each in found:
        check_index(each, Path(source))
    return [{**each, "version": version} for each in found]


def read_indexes(folder: Path) -> list[dict[str, Any]] | None:
    """Read and check the indexes of a folder, see :func:`check_indexes`.

    Return None if the folder has none. Raises ValueError for a damaged index."""
    path = folder / INDEX
    try:
        content = read_json(path, LATENTS_SIZES.most_bytes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if any(folder.glob("latents-*.safetensors")) or any(folder.glob("latents-*.tar")):
            raise ValueError(f"{path} can't be read ({error}); {REPAIR}") from error
        return None
    return check_indexes(content, str(path))


def choose_index(indexes: list[dict[str, Any]], name: str, image_size: int) -> dict[str, Any]:
    """Return the index of pictures of this size. Raises ValueError, which begins with ``name``, if there is none."""
    found = next((index for index in indexes if index["image_size"] == image_size), None)
    if found is None:
        sizes = [str(index["image_size"]) for index in indexes]
        raise ValueError(
            f"{name}: holds latents made at --image_size {' and '.join(sizes)}, but this run has --image_size "
            f"{image_size}; pass --image_size {' or '.join(sizes)} or make latents for {image_size}"
        )
    return found


def write_index(folder: Path, version: int, indexes: list[dict[str, Any]]) -> None:
    """Write index.json: the only element of ``indexes`` in version 1, all of them by picture size in version 2."""
    plain = [{key: value for key, value in index.items() if key not in ("format", "version")} for index in indexes]
    content: dict[str, Any] = {"sizes": sorted(plain, key=lambda index: index["image_size"])}
    content = plain[0] if version == FILES_VERSION else content
    text = json.dumps({"format": FORMAT, "version": version, **content}, indent=1) + "\n"
    with replacing(folder / INDEX, temporary=INDEX + ".partial") as new:
        write_file(new, iter([text.encode()]))  # synced: a power cut can't leave the name without content


class CachedLatents(MediaDataset):
    """Base class of data sets of cached latents, for any format of shards.

    It holds everything that follows from the index."""

    note = ""  # end of the data set's line in the log
    seed: int = 0
    max_bad: float = 0.05
    features: CachedFeatures | None = None

    def _take(
        self,
        index: dict[str, Any],
        name: str,
        *,
        random_flip: bool | None = None,
        use_video: bool = False,
        num_frames: int = 16,
        frame_interval: int = 1,
        fps: float | None = None,
    ) -> None:
        """Set this object's fields from an index, after comparing the index with the settings of the run.

        Raises ValueError, which begins with ``name``, if the latents don't fit the run's settings."""
        made = index.get("video")
        if use_video != (made is not None):
            what = (
                "clips; add --use_video"
                if made
                else ("pictures; make them again with preprocess.py latents --use_video, or leave --use_video out")
            )
            raise ValueError(f"{name}: holds latents of {what}")
        for flag, value in (("num_frames", num_frames), ("frame_interval", frame_interval), ("fps", fps)):
            if not made or (of_made := made.get(flag)) == value:
                continue
            if of_made is None or value is None:  # only the index or only the run has the flag
                there, here, fix = (
                    ("without", f"has --{flag} {value:g}", "leave it out")
                    if of_made is None
                    else (f"at --{flag} {of_made:g}", "does not have it", f"pass --{flag} {of_made:g}")
                )
                raise ValueError(
                    f"{name}: holds latents made {there}, but this run {here}; {fix} or make latents for it"
                )
            raise ValueError(
                f"{name}: holds latents made at --{flag} {of_made:g}, but this run has --{flag} {value:g}; pass "
                f"--{flag} {of_made:g} or make latents for {value:g}"
            )
        if random_flip and not index["flips"]:
            raise ValueError(f"{name}: holds no mirrored latents; make them again with --flip")
        self.index, self.vae = index, index["vae"]
        self.random_flip = index["flips"] if random_flip is None else random_flip
        self.class_names = index["class_names"]
        # Each is one number, or one number per channel, which JSON stores as a list.
        scale, shift = index["scaling_factor"], index["shift_factor"]
        self.scaling_factor: float | tuple[float, ...] = tuple(scale) if isinstance(scale, list) else scale
        self.shift_factor: float | tuple[float, ...] = tuple(shift) if isinstance(shift, list) else shift
        channels, *sides = index["latent_shape"]
        self.sample_shape = (2 * channels, *sides)
        self.conditioning = index.get("conditioning", "label")
        text = index.get("text")
        self.text_encoder, self.max_tokens = (text["encoder"], text["max_tokens"]) if text else (None, 0)
        stored = index.get("features")
        self.features = stored and CachedFeatures(
            stored["encoder"], (stored["grid"][0], stored["grid"][1]), stored["width"]
        )

    def _recorded_rates(self) -> list[float]:
        return [self.index["data_fps"]] if "data_fps" in self.index else []

    @property
    def checksums(self) -> dict[str, str]:
        """SHA-256 by file name, for every file whose checksum is in the index."""
        of_shards = {shard["file"]: shard["sha256"] for shard in self.index["shards"] if "sha256" in shard}
        return of_shards | self.index.get("checksums", {})

    def _identity(self) -> str:
        # Checksums and counts are left out, so that adding them to a cache of an earlier version keeps its identity.
        shards = [{key: value for key, value in shard.items() if key != "sha256"} for shard in self.index["shards"]]
        index = {key: value for key, value in self.index.items() if key not in ("checksums", "captions")}
        return hash_parts(json.dumps({**index, "shards": shards}, sort_keys=True))

    def _cut_captions(self) -> tuple[str, ...]:
        if self.text_encoder is None:
            return ()
        most = f"the {self.max_tokens:,} tokens of --text_encoder {self.text_encoder}"
        if (found := self.index.get("captions")) is None:
            return (f"captions: an earlier version embedded them, and did not count those that it cut to {most}",)
        if not found["cut"]:
            return ()
        among = f"of the {found['counted']:,} looked at among {found['rows']:,}"
        return (
            f"captions: {found['cut']:,} {among} were cut to {most} when they were embedded; the longest had "
            f"{found['longest']:,}",
        )

    def _shown(self, moments: Tensor) -> tuple[Medium, np.ndarray]:
        """Return the picture or clip that the latents were made from, as a Medium, and the latents in false colours."""
        video, size, along = self.index.get("video"), self.index["image_size"], 1
        if video and (latent_frames := self.sample_shape[1]) > 1:  # the first frame has its own latent
            along = 1 + (moments.shape[1] - 1) * (video["num_frames"] - 1) // (latent_frames - 1)
        height, width = (side * size // self.sample_shape[-1] for side in moments.shape[-2:])
        return Medium(along, height, width), of_moments(moments)[1]

    def _description(self, name: str, clips: int, empty_caption: Embedding | None) -> Description:
        return Description(
            text=self._text(name, clips),
            kind="latents",
            conditioning=self.conditioning,
            class_names=self.class_names,
            sample_shape=self.sample_shape,
            random_flip=self.random_flip,
            seed=self.seed,
            max_bad=self.max_bad,
            vae=self.vae,
            scaling_factor=self.scaling_factor,
            shift_factor=self.shift_factor,
            text_encoder=self.text_encoder,
            max_tokens=self.max_tokens,
            empty_caption=empty_caption,
            features=self.features,
            cut_captions=self._cut_captions(),
        )

    def _text(self, name: str, clips: int) -> str:
        shape, size = "x".join(map(str, self.index["latent_shape"])), self.index["image_size"]
        what = f"{len(self):,} pictures"
        if self.index.get("video"):
            what = f"{clips:,} clips" + (f" and {len(self) - clips:,} pictures" if clips < len(self) else "")
        text = f"with captions ({f'encoded by {self.text_encoder}' if self.text_encoder else 'not encoded'})"
        words = text if self.conditioning == "text" else f"of {len(self.class_names):,} classes"
        tokens = self.index.get("settings", {}).get("bucket_tokens")
        size = f"{size}x{size}" if tokens is None else f"of shapes near {size}x{size}, --bucket_tokens {tokens}"
        features = f", features by {self.features.encoder}" if self.features else ""
        unchecked = "" if self.checksums else ", without checksums (made by an earlier version)"
        return (
            f"{name}: cached latents ({shape}, --vae {self.vae}) of {what} {words}, {size}, "
            f"{flip_note(self.random_flip)}{features}{unchecked}{self.note}"
        )


LOCK = ".index.lock"


@contextmanager
def index_locked(folder: Path, form: ShardForm) -> Iterator[None]:
    """Lock the folder's index against changes by other processes.

    Hold the lock briefly, not during encoding. Latents in safetensors files have only one size, so for them nothing is
    locked."""
    if form.version != TARS_VERSION:
        yield
        return
    with open(open_to_write(folder / LOCK, os.O_WRONLY | os.O_CREAT), "w") as lock:
        with suppress(OSError):  # on a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, however it ends
        yield


def take_index(folder: Path, settings: dict[str, Any], form: ShardForm) -> dict[str, str]:
    """Remove the latents that are about to be made from the index, so that nobody reads them while they change.

    Return the checksums of the removed shards by file name. Raises ValueError if the folder holds an index of something
    else, or latents of other data.
    """
    with index_locked(folder, form):
        indexes, others = _indexes(folder, settings, form)
        if others:
            write_index(folder, form.version, others)
        else:
            remove(folder / INDEX)
    mine = [index for index in indexes if index not in others]
    return {shard["file"]: shard["sha256"] for index in mine for shard in index["shards"] if "sha256" in shard}


def put_index(folder: Path, settings: dict[str, Any], form: ShardForm, index: dict[str, Any]) -> None:
    """Add ``index`` to the folder's index file, and keep what other processes have added meanwhile.

    Call this function under :func:`index_locked`. Raises ValueError as :func:`take_index` does.
    """
    write_index(folder, form.version, [*_indexes(folder, settings, form)[1], index])


def _indexes(
    folder: Path, settings: dict[str, Any], form: ShardForm
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (all indexes of a folder, its indexes of other picture sizes)."""
    tars = form.version == TARS_VERSION
    if any(folder.glob("latents-*.safetensors" if tars else "latents-*.tar")):
        fix = "give --shard_size as a number of pictures to go on with them" if tars else "give --shard_size as 1GB"
        raise ValueError(f"--output {folder}: holds latents in {'files' if tars else 'tars'}; {fix}, or another folder")
    if not (folder / INDEX).exists():
        return [], []
    try:
        indexes = read_indexes(folder)
    except ValueError:  # damaged, or of another version: the index is written again
        indexes = []
    if indexes is None:
        raise ValueError(f"--output {folder}: holds an {INDEX} of something else; pass another folder")
    others = [index for index in indexes if tars and index["image_size"] != settings["image_size"]]
    for name in ("data", "vae", "video", "text"):
        for index in others:
            if index.get("settings", {}).get(name) != settings.get(name):
                raise ValueError(
                    f"--output {folder}: holds latents of {index['image_size']} px of other {name}; pass another folder"
                )
    return indexes, others


def complete_shards(folder: Path, settings: dict[str, Any], form: ShardForm) -> set[str]:
    """Return the names of the complete shards in a folder. Raises ValueError if one was made with other settings."""
    kept = set()
    for path in sorted(folder.glob(form.pattern)):
        header = form.header(path)
        if header is None:
            continue  # a damaged shard is recomputed
        other = sorted(key for key in settings if settings.get(key) != header[1].get(key))
        if other:
            changes = (f"{key} {str(header[1].get(key))[:12]} there, {str(settings[key])[:12]} now" for key in other)
            raise ValueError(
                f"--output {folder}: holds latents of other settings ({'; '.join(changes)}); pass another folder or "
                "empty this one"
            )
        kept.add(path.name)
    return kept
