"""Write samples: the names of their files, the files that an earlier run left in the folder, and the .npz."""

import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from opendit.common.safe_files import remove, replacing, write_whole
from opendit.data.video_file import write_mp4
from opendit.sampling.parts import npy_header

INDEX = ".samples.json"  # the files in a folder that sample.py wrote, and will take away when it draws there again
LONGEST = 100  # bytes of a label in a file name; a name may have 255 (143 on an encrypted disk)


def file_name(number: int, label: str) -> str:
    """file_name(7, "a cat, asleep") -> "000007-a_cat__asleep": any label as a name that every file system takes."""
    name = ""
    for character in label[:40]:
        name += character if (character.isalnum() or character in "-_") and _encodes(character) else "_"
    while len(os.fsencode(name)) > LONGEST:
        name = name[:-1]
    return f"{number:06d}-{name}" if name.strip("_") else f"{number:06d}"


def _encodes(character: str) -> bool:
    try:
        return bool(os.fsencode(character))
    except UnicodeEncodeError:  # the file system's names are in another encoding
        return False


class OutputFolder:
    """The files of one run in its folder; rank 0 alone calls :meth:`begin`.

    Args:
        names: of the files that the run will write.
    """

    def __init__(self, folder: Path, names: Iterable[str]):
        self.folder, self.names = folder, list(names)

    def go_on(self) -> None:
        """Takes away what an earlier start of the same run was about to write when it was killed. Raises OSError."""
        names = set(self.names)
        for name in os.listdir(self.folder):
            if _unfinished(name) in names and not (self.folder / name).is_symlink():
                remove(self.folder / name)

    def begin(self) -> list[str]:
        """Takes away what an earlier run wrote here, and nothing else; returns notes for the user. Raises OSError."""
        earlier = self._earlier()
        self._write_index({*earlier, *self.names})  # before the first file: a run that is killed is known, too
        for name in os.listdir(self.folder):
            path = self.folder / name
            if (name in earlier or _unfinished(name) in earlier) and path.is_file() and not path.is_symlink():
                remove(path)
        self._write_index(self.names)
        strange = sum(bool(re.fullmatch(r"\d{6,}(-.*)?\.(png|mp4)", name)) for name in os.listdir(self.folder))
        if strange:
            return [f"{self.folder} holds {strange:,} other files that look like samples; they are left alone"]
        return []

    def there(self) -> int:
        """Return the number of samples that have a file."""
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
    """The file that a killed process was about to put in its place."""
    found = re.fullmatch(r"\.(.+)\.\d+(\.\w+)", name) or re.fullmatch(r"(.+\.mp4)()\.\d+\.partial", name)
    return found and found[1] + found[2]


def write_npz(
    path: Path, arrays: dict[str, tuple[str, tuple[int, ...], Iterable[np.ndarray]]], mark: str | None = None
) -> None:
    """An .npz, as np.savez writes it, of arrays that come in blocks and need not fit in memory.

    Args:
        arrays: name -> type as numpy writes it ("|u1"), shape, and the numbers in C order, some at a time.
        mark: as of :func:`replacing`.
    """
    with replacing(path, mark) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, (descr, shape, blocks) in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(npy_header(shape, descr))
                for block in blocks:
                    # As bytes: a memoryview knows no unicode, and a copy of a large block would be held beside it.
                    file.write(np.ascontiguousarray(block, dtype=descr).reshape(-1).view(np.uint8).data)


def texts(captions: list[str]) -> tuple[str, tuple[int, ...], Iterator[np.ndarray]]:
    """Captions as an array of :func:`write_npz`."""
    descr = f"<U{max([1, *map(len, captions)])}"
    blocks = (np.array(captions[first : first + 256], dtype=descr) for first in range(0, len(captions), 256))
    return descr, (len(captions),), blocks


def save_one(stem: Path, picture: np.ndarray, fps: float) -> None:
    """STEM.png of a picture (H, W, 3), STEM.mp4 of a clip (T, H, W, 3); whole, or not there."""
    if picture.ndim == 4:
        write_mp4(stem.with_name(stem.name + ".mp4"), picture, fps)
    else:
        with replacing(stem.with_name(stem.name + ".png")) as new:
            Image.fromarray(picture).save(new, "PNG")
