"""Finds clips and pictures with their captions: what ``preprocess.py ucf101`` and ``preprocess.py folder`` do."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from opendit.data.captioned_folder import BARE, UNREAD, CaptionedFiles, find_captions, is_text
from opendit.data.csv_table import TableRow, write_csv
from opendit.data.files import printable
from opendit.data.folders import CLIPS, Ignored, files_below, folders_above, identity_of

# A run of capitals (TV in TVShow), a word with or without its capital, a number.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")


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
    for path in _clips_below(root, found.ignored):
        if path.parent == Path(root):
            found.leave_out("files that are not in a folder of their class", path)
        elif not is_text(path.parent.name):
            found.leave_out("files whose folder's name isn't UTF-8, so it is no caption", path)
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
    """Find every clip and picture below ``root`` with its caption; without one, it is its folder's name.

    Raises FileNotFoundError if there is no such folder, no medium in it or no caption at all.
    """
    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no folder {printable(root)}")
    found = find_captions(root, folder_names=True)
    media = len(found.rows) + sum(len(found.left_out.get(kind, ())) for kind in (BARE, UNREAD))
    if not media:
        raise FileNotFoundError(f"{printable(root)} holds no clips or pictures{_note(found.ignored)}")
    if not found.rows:
        raise FileNotFoundError(
            f"none of the {media:,} files in {printable(root)} has a caption: put clip.txt or clip.json next to "
            f"clip.mp4, or the clips into folders named by what they show ({'; '.join(found.lines())})"
        )
    return found


def _note(ignored: Ignored) -> str:
    return f" ({ignored})" if ignored else ""


def _clips_below(root: str | Path, ignored: Ignored) -> Iterator[Path]:
    """Return the clips at any depth, sorted folder by folder, each folder once; count the rest."""
    root = str(root)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no folder {printable(root)}")
    above = folders_above(root) - {identity_of(root)}
    yield from map(Path, files_below(root, CLIPS, ignored, above=above, visits=1))


def run(kind: str, root: str, output: str) -> None:
    """Run ``preprocess.py ucf101`` or ``preprocess.py folder``: write the CSV and print what is in it."""
    found = find_ucf101(root) if kind == "ucf101" else find_folder(root)
    write_csv(output, found.rows)
    for line in found.lines():
        print(line)
    if found.ignored:
        print(found.ignored)
    pictures = sum(row.is_picture for row in found.rows)
    kinds = f"{len(found.rows) - pictures:,} clips" + (f" and {pictures:,} pictures" if pictures else "")
    print(f"{kinds} with captions ({found.shown_sources()}): {output}")
    print(f"next: python preprocess.py check {shlex.quote(output)} --output checked.csv")
