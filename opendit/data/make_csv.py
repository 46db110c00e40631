"""Finds clips and pictures with their captions: what ``preprocess.py ucf101`` and ``preprocess.py folder`` do."""

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opendit.data.base import name_few
from opendit.data.csv_table import TableRow, write_csv
from opendit.data.files import printable
from opendit.data.folders import CLIPS, Ignored, files_below, folders_above, identity_of
from opendit.data.picture_file import picture_suffixes

MAX_CAPTION = 2**20  # bytes of a file beside a clip

# A run of capitals (TV in TVShow), a word with or without its capital, a number.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")


@dataclass
class CaptionedFiles:
    """The rows of a folder, where their captions come from, and "path: reason" of every file left out."""

    rows: list[TableRow] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    ignored: Ignored = field(default_factory=Ignored)


def class_caption(name: str) -> str:
    """Turn a class's name into words: ApplyEyeMakeup is "apply eye makeup", YoYo "yo yo", TVShow "TV show", play_piano
    "play piano"."""
    words = _WORDS.findall(name)
    return " ".join(word if len(word) > 1 and word.isupper() else word.lower() for word in words) or name


def find_ucf101(root: str | Path) -> CaptionedFiles:
    """Find every clip below ``root``, captioned with its folder's name. Clips directly in ``root`` have no class.

    Raises FileNotFoundError if there is no such folder or no clip in a class folder.
    """
    found = CaptionedFiles()
    for path in _media_below(root, CLIPS, found.ignored):
        if path.parent == Path(root):
            found.left_out.append(f"{printable(path)}: not in a folder of its class")
        elif not _is_text(path.parent.name):
            found.left_out.append(f"{printable(path)}: its folder's name isn't UTF-8, so it is no caption")
        else:
            found.rows.append(TableRow(path, class_caption(path.parent.name)))
    classes = len({row.text for row in found.rows})
    if not classes:
        raise FileNotFoundError(
            f"{printable(root)} holds no clips in folders of their classes, as ROOT/ApplyEyeMakeup/clip.avi"
            f"{_note(found.ignored)}"
        )
    found.sources[f"the names of {classes:,} classes"] = len(found.rows)
    return found


def find_folder(root: str | Path) -> CaptionedFiles:
    """Find every clip and picture below ``root`` with its caption.

    The caption of clip.mp4 is the text of clip.txt, else "caption" or "text" of clip.json, else the name of the folder
    that the file is in, with spaces for _ and -. ``root``'s name is not a caption: a file directly in it without a
    side-car is left out, and so is a file whose side-car can't be read.

    Raises FileNotFoundError if there is no such folder, no medium in it or no caption at all.
    """
    found, media = CaptionedFiles(), 0
    for path in _media_below(root, CLIPS | picture_suffixes(), found.ignored):
        media += 1
        try:
            text, source = _caption(path, Path(root))
        except (ValueError, OSError) as error:
            found.left_out.append(f"{printable(path)}: {printable(str(error))}")
            continue
        if text:
            found.rows.append(TableRow(path, text))
            found.sources[source] = found.sources.get(source, 0) + 1
        else:
            found.left_out.append(f"{printable(path)}: no caption")
    for suffix in (".txt", ".json"):
        found.ignored.suffixes.pop(suffix, None)  # the captions
    if not media:
        raise FileNotFoundError(f"{printable(root)} holds no clips or pictures{_note(found.ignored)}")
    if not found.rows:
        raise FileNotFoundError(
            f"none of the {media:,} files in {printable(root)} has a caption: put clip.txt or clip.json next to "
            f"clip.mp4, or the clips into folders named by what they show ({name_few(found.left_out, 2)})"
        )
    return found


def _caption(path: Path, root: Path) -> tuple[str, str]:
    """Return a medium's caption on one line, and where it comes from. Raises ValueError or OSError for a bad
    side-car."""
    beside = path.with_suffix(".txt")
    if beside.is_file() and (text := _one_line(_read(beside))):
        return text, ".txt files"
    beside = path.with_suffix(".json")
    if beside.is_file():
        try:
            values = json.loads(_read(beside))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{beside.name} isn't JSON ({error})") from error
        for key in ("caption", "text") if isinstance(values, dict) else ():
            if isinstance(values.get(key), str) and (text := _one_line(values[key])):
                return text, ".json files"
    if path.parent == root:
        return "", ""
    if not _is_text(path.parent.name):
        raise ValueError("its folder's name isn't UTF-8, so it is no caption")
    return _one_line(re.sub("[_-]", " ", path.parent.name)), "folder names"


def _read(path: Path) -> str:
    if (size := path.stat().st_size) > MAX_CAPTION:
        raise ValueError(f"{path.name} has {size:,} bytes, too many for a caption")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} isn't UTF-8 ({error})") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _is_text(name: str) -> bool:
    return name == name.encode("utf-8", "replace").decode()


def _note(ignored: Ignored) -> str:
    return f" ({ignored})" if ignored else ""


def _media_below(root: str | Path, suffixes: frozenset[str], ignored: Ignored) -> Iterator[Path]:
    """Return the files of some kinds at any depth, sorted folder by folder, each folder once; count the rest."""
    root = str(root)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no folder {printable(root)}")
    above = folders_above(root) - {identity_of(root)}
    yield from map(Path, files_below(root, suffixes, ignored, above=above, visits=1))


def run(kind: str, root: str, output: str) -> None:
    """Run ``preprocess.py ucf101`` or ``preprocess.py folder``: write the CSV and print what is in it."""
    found = find_ucf101(root) if kind == "ucf101" else find_folder(root)
    write_csv(output, found.rows)
    if found.left_out:
        print(f"left out {len(found.left_out):,} files: {name_few(found.left_out)}")
    if found.ignored:
        print(found.ignored)
    sources = ", ".join(f"{count:,} from {source}" for source, count in found.sources.items())
    pictures = sum(row.is_picture for row in found.rows)
    kinds = f"{len(found.rows) - pictures:,} clips" + (f" and {pictures:,} pictures" if pictures else "")
    print(f"{kinds} with captions ({sources}): {output}")
    print(f"next: python preprocess.py check {shlex.quote(output)} --output checked.csv")
