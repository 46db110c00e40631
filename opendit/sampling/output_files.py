"""Name and write the files of samples (pictures, clips, .npz archives), and delete earlier runs' files."""

import base64
import io
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from opendit.common.safe_files import remove, replacing, write_whole
from opendit.data.video_files import write_mp4

# File with the list of what sample.py wrote in a folder. The next run deletes the listed files.
INDEX = ".samples.json"
LONGEST = 100  # bytes of a label in a file name, at most; file systems allow 255 (143 if encrypted)


def file_name(number: int, label: str) -> str:
    """Return a file name without suffix for every file system: (7, "a cat, asleep") -> "000007-a_cat__asleep"."""
    name = ""
    for character in label[:40]:
        name += character if (character.isalnum() or character in "-_") and _encodes(character) else "_"
    while len(os.fsencode(name)) > LONGEST:
        name = name[:-1]
    return f"{number:06d}-{name}" if name.strip("_") else f"{number:06d}"


def _encodes(character: str) -> bool:
    try:
        return bool(os.fsencode(character))
    except UnicodeEncodeError:  # the file system's encoding lacks the character
        return False


class OutputFolder:
    """The output folder of a run. names: the files that the run will write in it."""

    def __init__(self, folder: Path, names: Iterable[str]):
        self.folder, self.names = folder, list(names)

    def resume(self) -> None:
        """Delete temporary files of an earlier, killed start of this run. Raises OSError."""
        names = set(self.names)
        for name in os.listdir(self.folder):
            if _unfinished(name) in names and not (self.folder / name).is_symlink():
                remove(self.folder / name)

    def begin(self) -> list[str]:
        """Delete the files that an earlier run wrote in this folder. Return [note] if other files look like samples,
        else []. Raises OSError."""
        earlier = self._earlier()
        self._write_index({*earlier, *self.names})  # written before the first file, in case this run is killed
        for name in os.listdir(self.folder):
            path = self.folder / name
            if (name in earlier or _unfinished(name) in earlier) and path.is_file() and not path.is_symlink():
                remove(path)
        self._write_index(self.names)
        strange = sum(bool(re.fullmatch(r"\d{6,}(-.*)?\.(png|mp4)", name)) for name in os.listdir(self.folder))
        if strange:
            return [f"{self.folder} holds {strange:,} other files that look like samples; they are left alone"]
        return []

    def count_samples(self) -> int:
        """Return the number of samples with a file."""
        return sum((self.folder / name).is_file() for name in self.names if re.match(r"\d{6}", name))

    def _write_index(self, names: Iterable[str]) -> None:
        write_whole(self.folder / INDEX, json.dumps({"files": sorted(names)}).encode())

    def _earlier(self) -> set[str]:
        try:
            names = json.loads((self.folder / INDEX).read_text())["files"]
            return {name for name in names if isinstance(name, str) and Path(name).name == name != ".."}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return set()


def _unfinished(name: str) -> str | None:
    found = re.fullmatch(r"\.(.+)\.\d+(\.\w+)", name) or re.fullmatch(r"(.+\.mp4)()\.\d+\.partial", name)
    return found and found[1] + found[2]


def write_npz(
    path: Path, arrays: dict[str, tuple[str, tuple[int, ...], Iterable[np.ndarray]]], mark: str | None = None
) -> None:
    """Write an .npz as np.savez does, but in blocks, for arrays larger than memory. mark: see :func:`replacing`.
    arrays: name -> (dtype such as "|u1", shape, blocks of the values in C order)."""
    with replacing(path, mark) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, (descr, shape, blocks) in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(npy_header(shape, descr))
                for block in blocks:
                    # view the block as bytes, because a memoryview can't hold unicode, and tobytes() would copy
                    file.write(np.ascontiguousarray(block, dtype=descr).reshape(-1).view(np.uint8).data)


def npy_header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    """Return the header of a .npy file in C order."""
    file = io.BytesIO()
    np.lib.format.write_array_header_2_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def texts(captions: list[str]) -> tuple[str, tuple[int, ...], Iterator[np.ndarray]]:
    """Return captions in the form that :func:`write_npz` takes: (dtype, shape, iterator over blocks)."""
    descr = f"<U{max([1, *map(len, captions)])}"
    blocks = (np.array(captions[first : first + 256], dtype=descr) for first in range(0, len(captions), 256))
    return descr, (len(captions),), blocks


def save_one(path: Path, picture: np.ndarray, fps: float) -> None:
    """Write a PNG of a picture (H, W, 3) or an MP4 of a clip (T, H, W, 3), atomically."""
    if picture.ndim == 4:
        write_mp4(path, picture, fps)
    else:
        with replacing(path) as new:
            Image.fromarray(picture).save(new, "PNG")


@dataclass(frozen=True, eq=False)
class VideoClip:
    """A generated clip. frames: uint8 (T, H, W, 3), RGB. fps: frames per second."""

    frames: np.ndarray
    fps: float

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an .mp4 (H.264) or a looping .gif atomically, and return its path. Raises ValueError for another
        suffix."""
        path = Path(path)
        if path.suffix.lower() == ".mp4":
            write_mp4(path, self.frames, self.fps)
        elif path.suffix.lower() == ".gif":
            first, *others = map(Image.fromarray, self.frames)
            with replacing(path, make=True) as new:
                milliseconds = max(20, round(1000 / self.fps))  # viewers slow down GIFs with shorter frames
                first.save(new, "GIF", save_all=True, append_images=others, duration=milliseconds, loop=0)
        else:
            raise ValueError(f"{path}: a clip is saved as .mp4 or .gif")
        return path

    def __repr__(self) -> str:
        frames, height, width, _ = self.frames.shape
        return f"VideoClip({frames} frames of {height} x {width}, {self.fps:g} a second)"

    def _repr_html_(self) -> str:
        """Return the HTML player that a notebook shows for the clip."""
        with tempfile.TemporaryDirectory() as folder:
            content = self.save(Path(folder) / "clip.mp4").read_bytes()
        source = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
        return f'<video controls loop autoplay muted src="{source}"></video>'
