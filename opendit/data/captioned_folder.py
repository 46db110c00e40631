"""Find the pictures and clips of a folder and their captions, in a table or in files beside the media.

The table is metadata.jsonl, metadata.csv or metadata.parquet, as in the imagefolder of Hugging Face datasets. Its
columns are ``file_name``, relative to the table's folder, and ``text``. The caption of name.jpg may also be in
name.txt, in name.caption, or in name.json under "caption" or "text".
"""

import json
import os
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from opendit.data.base import name_few
from opendit.data.files import in_threads, printable, problem, retried_disk
from opendit.data.folders import CLIPS, Ignored, files_below, folders_above, identity_of, suffix_of
from opendit.data.picture_file import picture_suffixes
from opendit.data.tables import USUAL, Columns, NoColumns, TableRow, read_table

MAX_CAPTION = 2**20  # maximum bytes of a caption file
TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
BESIDE = (".txt", ".caption", ".json")  # suffixes of caption files, in the order in which they are tried
FILE_NAME = "file_name"  # column of a table that holds the files' paths

# Reasons for leaving files out.
BARE, UNREAD = "files without a caption", "files whose caption can't be read"
LONELY, GONE = "captions without a picture or clip", "captions of files that are missing"
ALONE = "--caption_prefix alone"  # source of captions that consist of the prefix only


@dataclass
class CaptionedFiles:
    """The captioned files of a folder, the sources of their captions, and the files that are left out.

    Attributes:
        sources: number of captions from each kind of source.
        left_out: kind of left-out files, such as ``BARE`` -> "path" or "path: reason" of each file.
        table: path of the table that was read, if any.
        has_captions: False if no file in the folder is meant as a caption.
        ignored: files that are neither media nor captions.
    """

    rows: list[TableRow] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    table: Path | None = None
    has_captions: bool = False
    ignored: Ignored = field(default_factory=Ignored)

    def add(self, path: Path, text: str, source: str) -> None:
        self.rows.append(TableRow(path, text))
        self.sources[source] = self.sources.get(source, 0) + 1

    def leave_out(self, kind: str, name: str | Path) -> None:
        self.left_out.setdefault(kind, []).append(printable(name))

    def lines(self) -> list[str]:
        """Return one line for each kind of left-out file."""
        return [f"left out {len(names):,} {kind}: {name_few(names)}" for kind, names in self.left_out.items()]

    def shown_sources(self) -> str:
        return ", ".join(f"{count:,} from {source}" for source, count in self.sources.items())


def find_captions(
    root: str | Path, *, columns: Columns = USUAL, folder_names: bool = False, bare: bool = False
) -> CaptionedFiles:
    """Find every clip and picture below ``root`` with its caption, or return the rows of the table in ``root``.

    Args:
        folder_names: if ``root`` has no table, a file without a caption beside it gets its folder's name as caption,
            with spaces for _ and -. Files directly in ``root`` get none.
        bare: use an empty caption for files without a caption. By default such files are left out.

    A file whose caption can't be read is always left out. Raises ValueError if there are several tables, or if a table
    is damaged or lacks the requested columns."""
    root, found = Path(root), CaptionedFiles()
    media, beside = _list(root, found.ignored)
    found.table, rows = _read_tables(root, columns)
    if found.table is not None:
        found.has_captions = True
        _match(found, rows, media, bare)
        return found
    captions = in_threads(lambda path: _caption(beside.get(os.path.splitext(path)[0], {})), media)
    for path, (text, source, why) in zip(map(Path, media), captions, strict=True):
        if not (why or text) and folder_names and path.parent != root:
            text, source, why = _folder_caption(path.parent.name)
        if why:
            found.leave_out(UNREAD, f"{path}: {why}")
        elif text or bare:
            found.add(path, text, source or ALONE)
        else:
            found.leave_out(BARE, path)
    captioned = {os.path.splitext(path)[0] for path in media}
    meant = [(stem, files) for stem, files in beside.items() if files.keys() - {".json"}]
    found.has_captions = bool(found.rows) or any(stem in captioned for stem, _ in meant)
    for stem, files in meant:
        if found.has_captions and stem not in captioned:
            found.leave_out(LONELY, next(iter(files.values())))
    return found


def read_captioned(path: str, name: str, columns: Columns = USUAL) -> tuple[list[TableRow], list[str]]:
    """Return the rows of a table or of a captioned folder, and lines about files of the folder that were left out.

    name: the path's name in messages. Raises FileNotFoundError or ValueError, also for a folder without captions."""
    if not os.path.isdir(path):
        return read_table(path, name, columns), []
    found = find_captions(path, columns=columns)
    if not found.rows:
        raise ValueError("; ".join([f"{name}: holds no picture or clip with a caption", *found.lines()]))
    return found.rows, found.lines()


def _list(root: Path, ignored: Ignored) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Return (media, caption files) below a folder. Each folder is visited once.

    The caption files are a nested dictionary: path without suffix -> suffix -> path."""
    media, beside = [], {}
    above = folders_above(str(root)) - {identity_of(str(root))}
    suffixes = CLIPS | picture_suffixes() | frozenset(BESIDE)
    for path in files_below(str(root), suffixes, ignored, above=above, visits=1):
        if (suffix := suffix_of(path)) in BESIDE:
            beside.setdefault(os.path.splitext(path)[0], {})[suffix] = path
        else:
            media.append(path)
    return media, beside


def _read_tables(root: Path, columns: Columns) -> tuple[Path | None, list[TableRow]]:
    """Return the path and the rows of a folder's table. A table without the usual columns is ignored, unless the flags
    name other columns."""
    read = {}
    for path in (root / name for name in TABLES):
        if os.path.lexists(path):
            try:
                read[path] = read_table(path, columns=columns._replace(file=columns.file or FILE_NAME))
            except NoColumns:
                if any(columns):
                    raise
    if len(read) > 1:
        names = " and ".join(path.name for path in read)
        raise ValueError(f"--data_path {printable(root)}: holds {names}; move all but one away")
    return next(iter(read.items()), (None, []))


def _match(found: CaptionedFiles, rows: list[TableRow], media: list[str], bare: bool) -> None:
    """Add the rows of a table whose files exist. Record all other rows and files as left out."""
    assert found.table is not None
    listed = set(map(os.path.normpath, media))
    for row in rows:
        name = os.path.normpath(row.path)
        if name not in listed and (why := problem(row.path)) is not None:
            found.leave_out(GONE, f"{row.path} ({why})")
        elif row.text or bare:
            found.add(row.path, row.text, found.table.name)
        else:
            found.leave_out(BARE, row.path)
    named = {os.path.normpath(row.path) for row in rows}
    for path in media:
        if os.path.normpath(path) not in named:
            if bare:
                found.add(Path(path), "", ALONE)
            else:
                found.leave_out(BARE, path)


def _caption(files: dict[str, str]) -> tuple[str, str, str]:
    """Return (the caption on one line, its source, the reason if it can't be read).

    files: suffix -> path of the caption files beside a medium."""
    for suffix in BESIDE:
        if suffix in files:
            path = Path(files[suffix])
            try:
                if text := _one_line(retried_disk(path, partial(_json_caption if suffix == ".json" else _read, path))):
                    return text, f"{suffix} files", ""
            except (ValueError, OSError) as error:
                return "", "", str(error)
    return "", "", ""


def _json_caption(path: Path) -> str:
    """Return "caption" of a JSON object, or else "text", or "" if it has neither. Raises ValueError or OSError."""
    try:
        values = json.loads(_read(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name} isn't JSON ({error})") from error
    texts = [values.get(key) for key in ("caption", "text")] if isinstance(values, dict) else []
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def _folder_caption(name: str) -> tuple[str, str, str]:
    if not is_text(name):
        return "", "", "its folder's name isn't UTF-8, so it is no caption"
    return _one_line(re.sub("[_-]", " ", name)), "folder names", ""


def _read(path: Path) -> str:
    if (why := problem(path)) is not None:
        raise ValueError(f"{path.name} is {why}")
    if (size := path.stat().st_size) > MAX_CAPTION:
        raise ValueError(f"{path.name} has {size:,} bytes, too many for a caption")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} isn't UTF-8 ({error})") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())


def is_text(name: str) -> bool:
    """Return True if a file name is valid UTF-8."""
    return name == name.encode("utf-8", "replace").decode()
