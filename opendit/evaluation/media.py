"""Read uint8 pictures and clips from folders, .npz and .npy files, and CSV tables, by the sample's number."""

import json
import os
import re
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opendit.common.utils import sha256_of
from opendit.data.base import BadSample
from opendit.data.captioned_media import read_table
from opendit.data.clips import read_clip
from opendit.data.files import CLIPS, Ignored, files_below, hash_files, name_few, printable, suffix_of
from opendit.data.picture_file import ANIMATION_SUFFIXES, center_crop, is_animation, picture_suffixes, read_picture
from opendit.data.pictures_and_clips import find_pictures
from opendit.sampling.output_files import INDEX

SAMPLES, LABELS = "arr_0", "arr_1"  # names of the arrays in an .npz of sample.py or ADM


@dataclass(frozen=True)
class MediaOptions:
    """Settings for reading pixels from files. Frames come from the middle of a clip.

    image_size: side in pixels to which pictures and frames are cropped and resized as in ADM; None keeps their size."""

    image_size: int | None = None
    num_frames: int = 16
    frame_interval: int = 1
    fps: float | None = None

    def __str__(self) -> str:
        """Return the settings as text to hash. A missing fps is left out, so that older hashes stay valid."""
        shown = f"image_size={self.image_size}, num_frames={self.num_frames}, frame_interval={self.frame_interval}"
        return f"MediaOptions({shown}{'' if self.fps is None else f', fps={self.fps!r}'})"


@dataclass(frozen=True)
class Media:
    """Uint8 pictures (H, W, 3) or clips (T, H, W, 3), read by number.

    Attributes:
        sha256: hash of the files or the array.
        captions, labels: one per sample, or None.
        read_range: function that reads a range of samples faster than ``read``, or None.
        how: text with further settings that affect the pixels.
    """

    name: str
    sha256: str
    count: int
    clips: bool
    read: Callable[[int], np.ndarray]
    captions: Sequence[str] | None = None
    read_range: Callable[[range], np.ndarray] | None = None
    how: str = ""
    labels: np.ndarray | None = None

    def read_all(self) -> np.ndarray:
        assert self.read_range is not None
        return self.read_range(range(self.count))

    def batch(self, numbers: range, pool: ThreadPoolExecutor) -> np.ndarray:
        """Read the samples ``numbers`` in the threads of ``pool``, as uint8 (B, H, W, 3) or (B, T, H, W, 3). Raises
        ValueError for samples of unequal size."""
        if self.read_range is not None:
            return self.read_range(numbers)
        found = list(pool.map(self.read, numbers))
        for number, pixels in zip(numbers, found, strict=True):
            if pixels.shape != found[0].shape:
                sizes = " and ".join(" x ".join(map(str, shape)) for shape in (found[0].shape, pixels.shape))
                raise ValueError(
                    f"{self.name}: samples {numbers.start:,} and {number:,} are {sizes}; --image_size crops and "
                    "resizes all to one size"
                )
        return np.stack(found)


def open_media(path: str | os.PathLike[str], flag: str, options: MediaOptions) -> Media:
    """Open a folder of pictures or clips, an .npz or .npy file, or a CSV with the columns path and text. Raises
    FileNotFoundError, or ValueError for unusable samples. The message names ``flag``."""
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{flag} {printable(path)}: does not exist; give a folder, .npz, .npy or .csv of samples"
        )
    try:
        if path.is_dir():
            return _folder(path, options)
        if path.suffix in (".npz", ".npy"):
            return array_media(path.name, lambda: sha256_of(path), *_arrays(path, flag))
        if path.suffix == ".csv":
            return _table(path, options)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(str(error).replace("--data_path", flag)) from error
    raise ValueError(f"{flag} {printable(path)}: not known as samples; give a folder, .npz, .npy or .csv")


def array_media(name: str, sha256: Callable[[], str], pixels: np.ndarray, labels: np.ndarray | None = None) -> Media:
    """Create :class:`Media` from uint8 pictures (N, H, W, 3) or clips (N, T, H, W, 3). labels: N captions or classes.
    Raises ValueError for another shape or dtype."""
    if pixels.dtype != np.uint8:
        hint = ""
        if pixels.dtype.kind == "f":
            hint = "; pictures are rounded once, by who draws them: round(255 x) of what lies in 0..1"
        raise ValueError(f"{name}: pixels are uint8, not {pixels.dtype}{hint}")
    if pixels.ndim not in (4, 5) or pixels.shape[-1] != 3 or 0 in pixels.shape:
        raise ValueError(f"{name}: pixels are (N, H, W, 3), or (N, T, H, W, 3) of clips, not {pixels.shape}")
    return Media(
        name,
        sha256(),
        len(pixels),
        pixels.ndim == 5,
        lambda number: np.asarray(pixels[number]),
        labels.tolist() if labels is not None and labels.dtype.kind == "U" else None,
        read_range=lambda numbers: np.array(pixels[numbers.start : numbers.stop]),
        labels=labels if labels is not None and labels.dtype.kind in "iu" else None,
    )


def _arrays(path: Path, flag: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (a file's pixels, its captions or classes or None)."""
    if path.suffix == ".npy":
        return _loaded(path, lambda: np.load(path, mmap_mode="r", allow_pickle=False), flag), None
    names = npz_names(path, flag)
    key = SAMPLES if SAMPLES in names else next(iter(names), "")
    if key == "" or (SAMPLES not in names and len(names) > 1):
        raise ValueError(
            f"{flag} {printable(path)}: has no {SAMPLES}, only {', '.join(sorted(names)) or 'nothing'}; "
            f"name the pixels {SAMPLES}"
        )
    labels = None
    if LABELS in names:
        labels = _loaded(path, lambda: np.load(path, allow_pickle=False)[LABELS], flag)
    return _loaded(path, lambda: npz_member(path, key), flag), labels


def npz_names(path: Path, flag: str) -> set[str]:
    """Return the names of the arrays in an .npz. Raises ValueError if the file is not an .npz."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise ValueError(f"{flag} {printable(path)}: no .npz ({error}); write it again") from error


def npz_member(path: Path, name: str) -> np.ndarray:
    """Return an array from an .npz, memory-mapped if the array is uncompressed and in C order."""
    with zipfile.ZipFile(path) as archive:
        found = archive.getinfo(f"{name}.npy")
        if found.compress_type == zipfile.ZIP_STORED:
            with archive.open(found) as file:
                version = np.lib.format.read_magic(file)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                if version in read:
                    shape, fortran, dtype = read[version](file)
                    if not fortran and not dtype.hasobject:
                        start = _start_of(path, found.header_offset) + file.tell()
                        return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=shape)
    with np.load(path, allow_pickle=False) as file:
        return file[name]


def _start_of(path: Path, header: int) -> int:
    """Return the file offset of a zip member's content. header: offset of the member's local header."""
    with open(path, "rb") as file:
        file.seek(header + 26)
        name, extra = np.frombuffer(file.read(4), "<u2").tolist()
    return header + 30 + name + extra


def _loaded(path: Path, load: Callable[[], np.ndarray], flag: str) -> np.ndarray:
    try:
        return load()
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{flag} {printable(path)}: can't be read ({error}); write it again") from error


def _folder(path: Path, options: MediaOptions) -> Media:
    """Open a folder of pictures or, if there are none, of clips. Files with several samples are skipped."""
    drawn = _drawn(path)
    if drawn:
        files = drawn
    else:
        try:
            files = find_pictures(str(path)).paths
        except FileNotFoundError:
            files = list(files_below(str(path), CLIPS, Ignored()))
            if not files:
                raise
    clips = [
        suffix_of(file) in CLIPS or (suffix_of(file) in ANIMATION_SUFFIXES and is_animation(file)) for file in files
    ]
    return _files(path.name or str(path), files, clips, None, options)


def _drawn(path: Path) -> list[str]:
    """Return the single-sample files that sample.py wrote to the folder; [] if there are none."""
    try:
        names = json.loads((path / INDEX).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    names = sorted(name for name in names if isinstance(name, str) and re.match(r"\d{6}", name))
    return [str(path / name) for name in names if (path / name).is_file()]


def _table(path: Path, options: MediaOptions) -> Media:
    rows = read_table(path)
    files, clips = [str(row.path) for row in rows], [not row.is_picture for row in rows]
    return _files(path.name, files, clips, [row.text for row in rows], options)


def _files(name: str, files: list[str], clips: list[bool], captions: list[str] | None, options: MediaOptions) -> Media:
    if any(clips) != all(clips):
        raise ValueError(f"{name} holds pictures and clips; evaluate them apart")
    missing = [printable(file) for file in files if not os.path.isfile(file)]
    if missing:
        raise FileNotFoundError(f"{name}: {len(missing):,} of {len(files):,} files are missing: {name_few(missing)}")
    if clips[0] and options.image_size is None:
        raise ValueError(f"{name} holds clips; give --image_size, the pixels to which they are cropped and resized")
    picture_suffixes()  # register Pillow's formats now, because threads would race
    read = _read_clip if clips[0] else _read_picture

    def load(number: int) -> np.ndarray:
        try:
            return read(files[number], options)
        except BadSample as error:
            raise ValueError(f"{error}; a figure of the others would be another: repair or remove it") from error

    return Media(name, hash_files(files), len(files), clips[0], load, captions, how=str(options))


def _read_picture(file: str, options: MediaOptions) -> np.ndarray:
    picture = read_picture(file)
    if options.image_size is not None and picture.size != (options.image_size,) * 2:
        picture = center_crop(picture, options.image_size)
    return np.asarray(picture)


def _read_clip(file: str, options: MediaOptions) -> np.ndarray:
    assert options.image_size is not None  # _files() has checked this
    frames = (options.num_frames, options.frame_interval, options.image_size)
    clip = read_clip(file, *frames, start=None, fps=options.fps, as_bytes=True)
    return clip.pixels.permute(1, 2, 3, 0).contiguous().numpy()
