"""Finds clips and pictures with their captions: what ``preprocess.py ucf101`` and ``preprocess.py folder`` do."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opendit.data.base import name_few
from opendit.data.csv_table import CLIPS, PICTURES, Row, write_csv

# A run of capitals (TV in TVShow), a word with or without its capital, a number.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")


@dataclass
class Found:
    """The rows of a folder, where their captions come from, and "path: reason" of every file left out."""

    rows: list[Row] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def class_caption(name: str) -> str:
    """ApplyEyeMakeup -> "apply eye makeup"; YoYo -> "yo yo"; TVShow -> "TV show"; play_piano -> "play piano"."""
    words = _WORDS.findall(name)
    return " ".join(word if len(word) > 1 and word.isupper() else word.lower() for word in words) or name


def find_ucf101(root: str | Path) -> Found:
    """Every clip below ``root``, captioned with its folder's name; clips in ``root`` itself have no class.

    Raises FileNotFoundError if there is no such folder or no clip in a folder of its class.
    """
    found = Found()
    for path in _media_below(root, CLIPS):
        if path.parent == Path(root):
            found.left_out.append(f"{path}: not in a folder of its class")
        else:
            found.rows.append(Row(path, class_caption(path.parent.name)))
    classes = len({row.text for row in found.rows})
    if not classes:
        raise FileNotFoundError(f"{root} holds no clips in folders of their classes, as ROOT/ApplyEyeMakeup/clip.avi")
    found.sources[f"the names of {classes:,} classes"] = len(found.rows)
    return found


def find_folder(root: str | Path) -> Found:
    """Every clip and picture below ``root`` with its caption.

    The caption of clip.mp4 is the text of clip.txt, else "caption" or "text" of clip.json, else the name of the
    folder that the file is in, with spaces for _ and -. ``root``'s own name is no caption: a file right in it
    without one of the others is left out, and so is one whose side-car can't be read.

    Raises FileNotFoundError if there is no such folder, no medium in it or no caption at all.
    """
    found, media = Found(), 0
    for path in _media_below(root, CLIPS | PICTURES):
        media += 1
        try:
            text, source = _caption(path, Path(root))
        except (ValueError, OSError) as error:
            found.left_out.append(f"{path}: {error}")
            continue
        if text:
            found.rows.append(Row(path, text))
            found.sources[source] = found.sources.get(source, 0) + 1
        else:
            found.left_out.append(f"{path}: no caption")
    if not media:
        raise FileNotFoundError(f"{root} holds no clips or pictures ({', '.join(sorted(CLIPS | PICTURES))})")
    if not found.rows:
        raise FileNotFoundError(
            f"none of the {media:,} files in {root} has a caption: put clip.txt or clip.json next to clip.mp4, or the "
            f"clips into folders named by what they show ({name_few(found.left_out, 2)})"
        )
    return found


def _caption(path: Path, root: Path) -> tuple[str, str]:
    """A medium's caption on one line and where it comes from; raises ValueError or OSError for a bad side-car."""
    beside = path.with_suffix(".txt")
    if beside.is_file() and (text := _one_line(_read(beside))):
        return text, ".txt files"
    beside = path.with_suffix(".json")
    if beside.is_file():
        try:
            values = json.loads(_read(beside))
        except json.JSONDecodeError as error:
            raise ValueError(f"{beside.name} isn't JSON ({error})") from error
        for key in ("caption", "text") if isinstance(values, dict) else ():
            if isinstance(values.get(key), str) and (text := _one_line(values[key])):
                return text, ".json files"
    if path.parent == root:
        return "", ""
    return _one_line(re.sub("[_-]", " ", path.parent.name)), "folder names"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} isn't UTF-8 ({error})") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _media_below(root: str | Path, suffixes: frozenset[str]) -> Iterator[Path]:
    """The files of some kinds at any depth, sorted folder by folder; hidden ones are passed over."""
    if not Path(root).is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    seen = set()  # a link to a folder above would be followed for ever
    for folder, folders, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if os.path.splitext(name)[1].lower() in suffixes and not name.startswith("."):
                yield Path(folder, name)


def run(kind: str, root: str, output: str) -> None:
    """``preprocess.py ucf101`` and ``preprocess.py folder``: writes the CSV and says what is in it."""
    found = find_ucf101(root) if kind == "ucf101" else find_folder(root)
    write_csv(output, found.rows)
    if found.left_out:
        print(f"left out {len(found.left_out):,} files: {name_few(found.left_out)}")
    sources = ", ".join(f"{count:,} from {source}" for source, count in found.sources.items())
    pictures = sum(row.is_picture for row in found.rows)
    kinds = f"{len(found.rows) - pictures:,} clips" + (f" and {pictures:,} pictures" if pictures else "")
    print(f"{kinds} with captions ({sources}): {output}\nnext: python preprocess.py check {output} --output CSV")
