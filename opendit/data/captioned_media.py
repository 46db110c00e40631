"""Find pictures and clips with captions in tables and folders, write tables, and check the files.

A table is CSV, JSON lines or Parquet. Its file column is called ``path`` or ``file_name``, and its caption column
``text`` or ``caption``. A CSV without a header begins with the columns ``path,text``. Paths are absolute or relative to
the table's folder. Captions are UTF-8; file names may have any bytes.

A folder may hold metadata.jsonl, metadata.csv or metadata.parquet, like an imagefolder of Hugging Face ``datasets``.
Otherwise, the caption of name.jpg is in name.txt, in name.caption, or in name.json under "caption" or "text"."""

import csv
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from opendit.common.progress import Progress
from opendit.common.safe_files import replacing
from opendit.data.base import DataError, Medium, count_colours, count_media, of_picture
from opendit.data.captions import count_texts, says_nothing
from opendit.data.clips import open_clip
from opendit.data.files import (
    CLIPS,
    Ignored,
    expanded,
    files_below,
    first_bytes,
    folders_above,
    identity_of,
    in_threads,
    name_few,
    printable,
    problem,
    retried_disk,
    suffix_of,
)
from opendit.data.picture_file import ANIMATION_SUFFIXES, is_animation, picture_suffixes, read_picture
from opendit.data.processes import run_apart

MAX_LINE = 2**20  # maximum characters of a line
FILES, CAPTIONS = ("path", "file_name"), ("text", "caption")  # usual column names, in order of preference
_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BINARY = {  # first bytes of a file that is not UTF-8 text -> end of the error message
    b"\xff\xfe": "UTF-16, not UTF-8; save it as UTF-8",
    b"\xfe\xff": "UTF-16, not UTF-8; save it as UTF-8",
    b"PK\x03\x04": "no text but an Excel file or another archive; save it as a CSV in UTF-8",
    b"\x1f\x8b": "compressed; unpack it with gunzip",
}
# First bytes of files in picture formats.
_SIGNATURES = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|BM....\0\0\0\0|GIF8[79]a|II\*\0|MM\0\*|P[1-6]\s|....ftypavi[fs]",
    re.DOTALL,
)


@dataclass(frozen=True)
class TableRow:
    """A picture or clip with its caption."""

    path: Path  # absolute, or relative to the working directory
    text: str
    extra: dict[str, str] = field(default_factory=dict)  # other columns of a CSV: name -> text

    @property
    def is_named_picture(self) -> bool:
        """True if the suffix names a picture or animation format. For an unknown suffix, the first bytes decide."""
        suffix = self.path.suffix.lower()
        if suffix in picture_suffixes() or suffix in CLIPS:
            return suffix not in CLIPS
        return _SIGNATURES.match(first_bytes(self.path, 16)) is not None

    @property
    def is_picture(self) -> bool:
        """True if the file has a picture format and is not animated."""
        if not self.is_named_picture:
            return False
        suffix = self.path.suffix.lower()
        return (suffix in picture_suffixes() and suffix not in ANIMATION_SUFFIXES) or not is_animation(self.path)


class NoColumns(ValueError):
    """Raised if a table lacks the file column or the caption column."""


class Columns(NamedTuple):
    """Names of the columns (``--file_column``, ``--caption_column``); None means the usual names."""

    file: str | None = None
    caption: str | None = None

    def find(self, names: Collection[str]) -> tuple[str | None, str | None]:
        """Return (file column, caption column) among ``names``, with None for a missing column."""
        of_each = ((self.file,) if self.file else FILES), ((self.caption,) if self.caption else CAPTIONS)
        file, caption = (next((name for name in usual if name in names), None) for usual in of_each)
        return file, caption

    def missing(self, file: str | None, caption: str | None) -> str:
        lost = [self.file or "path"] * (file is None) + [self.caption or "text"] * (caption is None)
        return (
            f"has no column {' and '.join(map(printable, lost))}; name the columns of the files and of the captions "
            "path and text, or say which they are by --file_column and --caption_column"
        )


USUAL = Columns()


def read_table(path: str | Path, name: str | None = None, columns: Columns = USUAL) -> list[TableRow]:
    """Read a table's rows, in order. A null caption becomes an empty one. name: the table's name in messages. Raises
    FileNotFoundError, ValueError, or NoColumns for missing columns."""
    path = Path(path)
    name = name or f"--data_path {printable(path)}"
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{name}: doesn't exist; give a CSV of path,text")
    if (why := problem(path)) is not None:
        raise ValueError(f"{name}: can't be read ({why}); give another table")
    read = {".jsonl": _jsonl, ".parquet": _parquet}.get(path.suffix.lower(), _csv)
    try:
        rows = list(read(path, name, columns))
    except OSError as error:
        raise ValueError(f"{name}: can't be read ({error.strerror or error}); give another table") from error
    if not rows:
        raise ValueError(f"{name}: has no rows; add some")
    return rows


def _csv(path: Path, name: str, columns: Columns) -> Iterator[TableRow]:
    lines = list(_split(path, name))
    if not lines:
        raise ValueError(f"{name}: is empty; it needs lines of path,text")
    names, lines = _header(path.parent, name, lines, columns)
    if not lines:
        raise ValueError(f"{name}: has a header and no rows; add some")
    for number, cells in lines:
        yield _csv_row(path.parent, f"{name}, line {number}", names, cells)


def _split(path: Path, name: str) -> Iterator[tuple[int, list[str]]]:
    check_text_file(path, name)
    # File names may have any bytes, so keep invalid ones as surrogates. Captions are checked row by row.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(_lines(file, name), strict=True)
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{name}, line {number}: not a CSV ({_explain(error)}); correct the line") from error
            if cells is None:
                return
            if any(cell.strip() for cell in cells):
                yield number, cells


def check_text_file(path: Path, name: str) -> None:
    """Raise ValueError if a file's first bytes show that it is not UTF-8 text."""
    with open(path, "rb") as file:
        start = file.read(4)
    for begin, what in _BINARY.items():
        if start.startswith(begin):
            raise ValueError(f"{name}: is {what}")


def _lines(file, name: str) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if "\0" in line:
            raise ValueError(f"{name}, line {number}: holds a NUL character, and is no text in UTF-8; save it as UTF-8")
        if len(line) == MAX_LINE:
            raise ValueError(f"{name}, line {number} has more than {MAX_LINE:,} characters; it is no CSV of path,text")
        yield line


def _explain(error: csv.Error) -> str:
    text = str(error)
    if "unexpected end of data" in text:
        return "a quote that opens in this row is never closed; write a quote that is text twice"
    if "field limit" in text:
        return f"a column of more than {csv.field_size_limit():,} characters; is a quote that opens in it never closed?"
    return f"{text}; a quote inside of quotes is written twice"


def _is_medium(folder: Path, cell: str) -> bool:
    cell = cell.strip()
    return suffix_of(cell) in picture_suffixes() | CLIPS or bool(cell) and os.path.isfile(folder / cell)


def _header(folder: Path, name: str, lines: list[Any], columns: Columns) -> tuple[list[str], list[Any]]:
    """Return (column names, lines without the header). The file and caption columns are renamed to path and text.
    lines: (line number, cells) of each row. Raises ValueError, or NoColumns if one of the two columns is missing."""
    number, cells = lines[0]
    names = [cell.strip().lower() for cell in cells]
    shown = printable(",".join(cell.strip() for cell in cells))[:200]
    columns = Columns(*(each and each.strip().lower() for each in columns))
    file, caption = columns.find(names)
    if file and caption:
        twice = sorted({column for column in names if column and names.count(column) > 1})
        if twice:
            raise ValueError(f"{name}, line {number}: the header {shown} names {' and '.join(twice)} twice; rename one")
        called = {file: "path", caption: "text"}
        others = {"path": "path2", "text": "text2"}  # new names for other columns called path or text
        found = [called.get(column) or others.get(column, column) for column in names]
        return [column or f"column{i}" for i, column in enumerate(found, 1)], lines[1:]
    if any(columns):
        raise NoColumns(f"{name}, line {number}: the header {shown} {columns.missing(file, caption)}")
    # A first line without a medium is a header if it names a column, or if the second line has a medium.
    if not any(_is_medium(folder, cell) for cell in cells):
        _check_delimiter(folder, f"{name}, line {number}", cells)
        following = lines[1][1] if len(lines) > 1 else []
        if file or caption or any(_is_medium(folder, cell) for cell in following):
            raise NoColumns(f"{name}, line {number}: the header {shown} {columns.missing(file, caption)}")
    return ["path", "text", *(f"column{i}" for i in range(3, 1 + max(len(cells) for _, cells in lines)))], lines


def _check_delimiter(folder: Path, here: str, cells: list[str]) -> None:
    """Raise ValueError if the first cell holds several values, separated by semicolons, tabs or bars."""
    for delimiter, plural in _OTHER_DELIMITERS.items():
        first, found, _ = cells[0].partition(delimiter)
        names = {part.strip().lower() for part in cells[0].split(delimiter)}
        if found and (_is_medium(folder, first) or len(cells) == 1 or {"path", "text"} <= names):
            raise ValueError(
                f"{here}: the columns are separated by {plural}; write commas, and quotes around captions that hold one"
            )


def _csv_row(folder: Path, here: str, columns: list[str], cells: list[str]) -> TableRow:
    values = dict(zip(columns, cells, strict=False))
    if len(cells) < 2 or len(cells) > len(columns) or "path" not in values or "text" not in values:
        _check_delimiter(folder, here, cells)
        raise ValueError(
            f"{here}: {len(cells)} columns where {printable(','.join(columns))} are expected; a caption with commas "
            "needs quotes around it"
        )
    path = values.pop("path").strip()
    if not path:
        raise ValueError(f"{here}: the path is empty; name a file or remove the line")
    for column, cell in ("text", values["text"]), *values.items():
        check_utf8(here, column, cell)
    text = values.pop("text").strip()
    if suffix_of(path) not in picture_suffixes() | CLIPS and not os.path.isfile(folder / path):
        if (path.lstrip("\ufeff").lower(), text.lower()) == ("path", "text"):
            raise ValueError(f"{here}: a header in the middle of the file; remove the line")
        _check_delimiter(folder, here, [path, *cells[1:]])
        if suffix_of(text) in picture_suffixes() | CLIPS and os.path.isfile(folder / text):
            raise ValueError(
                f"{here}: the column text holds the path {printable(text)}; swap the columns, or their names in the "
                "header"
            )
    return TableRow(locate(folder, here, path), text, values)


def check_utf8(here: str, column: str, cell: str) -> None:
    """Raise ValueError, beginning with ``here``, if a cell contains bytes that are not UTF-8."""
    if not cell.isascii() and cell != cell.encode("utf-8", "replace").decode():
        raise ValueError(f"{here}: isn't UTF-8 ({column}: {printable(cell)[:60]}); save it as UTF-8")


def locate(folder: Path, here: str, path: str) -> Path:
    """Return the path of a file named in a table in ``folder``. Raises ValueError, beginning with ``here``."""
    if "://" in path and _ADDRESS.match(path):
        raise ValueError(f"{here}: {printable(path)} is an address; download the file and write its path")
    try:
        return folder / expanded(path)
    except ValueError as error:
        raise ValueError(f"{here}: {error}") from error


def write_csv(path: str | Path, rows: list[TableRow]) -> None:
    """Write a CSV with a header, atomically. Paths below the CSV's folder are written as relative paths."""
    path = Path(path)
    extra = list(dict.fromkeys(name for row in rows for name in row.extra))
    folder = path.parent.resolve()
    with replacing(path, make=True, temporary=path.name + ".partial") as new:
        file = io.TextIOWrapper(new, encoding="utf-8", errors="surrogateescape", newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["path", "text", *extra])
        for row in rows:
            medium = row.path.resolve()
            shown = str(medium.relative_to(folder) if medium.is_relative_to(folder) else medium)
            # Add ./ because readers would expand a leading ~ to a home folder and strip a leading blank.
            shown = f"./{shown}" if shown[0] == "~" or shown[0].isspace() else shown
            writer.writerow([shown, row.text, *(row.extra.get(name, "") for name in extra)])
        file.detach()


SUFFIXES = (".csv", ".jsonl", ".parquet")


def _row(folder: Path, here: str, file: Any, caption: Any) -> TableRow:
    """Make a row from two cells. The caption is a string, a number or None (empty)."""
    caption = "" if caption is None else str(caption) if type(caption) in (int, float) else caption
    if not isinstance(file, str) or not file:
        raise ValueError(f"{here}: the path is {printable(repr(file))[:60]}; name a file or remove the row")
    if not isinstance(caption, str):
        raise ValueError(f"{here}: the caption is {printable(repr(caption))[:60]} and no text; correct the row")
    check_utf8(here, "text", caption)
    return TableRow(locate(folder, here, file), caption.strip())


def _jsonl(path: Path, name: str, columns: Columns) -> Iterator[TableRow]:
    check_text_file(path, name)
    lines: list[tuple[str, dict[str, Any]]] = []
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(4 * MAX_LINE), b""), 1):
            here = f"{name}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                values = json.loads(text) if text else {}
            except UnicodeDecodeError as error:
                raise ValueError(f"{here}: isn't UTF-8 ({error.reason}); save it as UTF-8") from error
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{here}: not JSON ({error}); correct the line") from error
            if not isinstance(values, dict):
                raise ValueError(f'{here}: not an object like {{"file_name": ..., "text": ...}}; correct the line')
            if text:
                lines.append((here, values))
    if not lines:
        return
    file_column, caption_column = columns.find({key for _, values in lines for key in values})
    if file_column is None or caption_column is None:
        raise NoColumns(f"{name}: {columns.missing(file_column, caption_column)}")
    for here, values in lines:
        yield _row(path.parent, here, values.get(file_column), values.get(caption_column))


def _parquet(path: Path, name: str, columns: Columns) -> Iterator[TableRow]:
    try:
        from pyarrow import ArrowException  # pyright: ignore[reportMissingImports]
        from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"{name}: needs the package pyarrow to be read; pip install pyarrow, or save it as .jsonl"
        ) from error
    try:
        with ParquetFile(path) as table:
            found = columns.find(table.schema_arrow.names)
            if None in found:
                raise NoColumns(f"{name}: {columns.missing(*found)}")
            cells = table.read(columns=list(found)).to_pydict()
    except ArrowException as error:
        raise ValueError(f"{name}: can't be read ({printable(str(error))[:200]}); save it again") from error
    for number, (file, caption) in enumerate(zip(*(cells[each] for each in found), strict=True), 1):
        yield _row(path.parent, f"{name}, row {number}", file, caption)


MAX_CAPTION = 2**20  # maximum bytes of a caption file
TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
BESIDE = (".txt", ".caption", ".json")  # suffixes of caption files, tried in this order
FILE_NAME = "file_name"  # usual file column of ``TABLES``
# Keys in ``CaptionedFiles.left_out``: reasons why files are left out.
BARE, UNREAD = "files without a caption", "files whose caption can't be read"
LONELY, GONE = "captions without a picture or clip", "captions of files that are missing"
ALONE = "--caption_prefix alone"  # source of captions that consist of the prefix only


@dataclass
class CaptionedFiles:
    """A folder's captioned files, and the files that are left out."""

    rows: list[TableRow] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)  # source, such as ".txt files" -> number of captions
    # reason, such as ``BARE`` -> list of "path" or "path: details"
    left_out: dict[str, list[str]] = field(default_factory=dict)
    table: Path | None = None
    has_captions: bool = False  # True if there is a table, a row, or a .txt or .caption file of a medium
    ignored: Ignored = field(default_factory=Ignored)  # files that are neither media nor captions

    def add(self, path: Path, text: str, source: str) -> None:
        self.rows.append(TableRow(path, text))
        self.sources[source] = self.sources.get(source, 0) + 1

    def leave_out(self, kind: str, name: str | Path) -> None:
        self.left_out.setdefault(kind, []).append(printable(name))

    def lines(self) -> list[str]:
        return [f"left out {len(names):,} {kind}: {name_few(names)}" for kind, names in self.left_out.items()]

    def shown_sources(self) -> str:
        return ", ".join(f"{count:,} from {source}" for source, count in self.sources.items())


def find_captions(
    root: str | Path, *, columns: Columns = USUAL, folder_names: bool = False, bare: bool = False
) -> CaptionedFiles:
    """Find the clips and pictures below ``root``, and their captions in a table or in caption files.

    Args:
        columns: names of the table's columns.
        folder_names: without a table, use a subfolder's name, with spaces for _ and -, as its files' missing captions.
        bare: use an empty caption for a file without one. By default such a file is left out.

    Files with an unreadable caption are left out. Raises ValueError for several tables or a damaged one."""
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
    """Return (a table's or folder's rows, lines about files left out). name: the path's name in messages. Raises
    FileNotFoundError or ValueError."""
    if not os.path.isdir(path):
        return read_table(path, name, columns), []
    found = find_captions(path, columns=columns)
    if not found.rows:
        raise ValueError("; ".join([f"{name}: holds no picture or clip with a caption", *found.lines()]))
    return found.rows, found.lines()


def _list(root: Path, ignored: Ignored) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Return (paths of media, captions) below a folder. captions: path without suffix -> suffix -> caption file."""
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
    """Return (path, rows) of a folder's table, or (None, []). A table without the needed columns is ignored. If a flag
    names a column, raises NoColumns instead."""
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
    """Return (caption on one line, source, ""), or ("", "", reason) for an unreadable caption. Without a caption, all
    three are "". files: suffix -> path of the caption file."""
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
    return name == name.encode("utf-8", "replace").decode()


# A run of capitals (TV in TVShow), a word that may begin with a capital, or a number.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")


def class_caption(name: str) -> str:
    """Convert a class name to words: ApplyEyeMakeup becomes "apply eye makeup", TVShow "TV show"."""
    words = _WORDS.findall(name)
    return " ".join(word if len(word) > 1 and word.isupper() else word.lower() for word in words) or name


def find_ucf101(root: str | Path) -> CaptionedFiles:
    """Find the clips in the class folders below ``root``. A clip's caption is its folder's name. Raises
    FileNotFoundError if there is no folder or no clip."""
    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no folder {printable(root)}")
    found, above = CaptionedFiles(), folders_above(str(root)) - {identity_of(str(root))}
    for path in map(Path, files_below(str(root), CLIPS, found.ignored, above=above, visits=1)):
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
    """Find the clips and pictures below ``root``. Without a caption, a file gets its subfolder's name. Raises
    FileNotFoundError if there is no folder, no picture or clip, or no caption."""
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


def make(kind: str, root: str, output: str) -> None:
    """Run ``preprocess.py ucf101`` or ``preprocess.py folder``: write a CSV and print a summary."""
    found = find_ucf101(root) if kind == "ucf101" else find_folder(root)
    write_csv(output, found.rows)
    for line in found.lines():
        print(line)
    if found.ignored:
        print(found.ignored)
    pictures = sum(row.is_picture for row in found.rows)
    print(f"{count_media(len(found.rows) - pictures, pictures)} with captions ({found.shown_sources()}): {output}")
    print(f"next: python preprocess.py check {shlex.quote(output)} --output checked.csv")


REASONS = ("missing", "undecodable", "too short", "too small", "empty caption")
TIME_LIMIT = 60.0  # seconds for decoding two frames of a file


def probe(path: str, is_picture: bool) -> Medium:
    """Decode a picture, or a clip's first and last frame, and return its Medium."""
    return (of_picture(read_picture(path)) if is_picture else open_clip(path, middle=False))[0]


def check_rows(
    rows: list[TableRow],
    *,
    num_frames: int = 16,
    frame_interval: int = 1,
    fps: float | None = None,
    min_size: int = 0,
    num_workers: int = 2,
    time_limit: float = TIME_LIMIT,
) -> tuple[list[TableRow], list[Medium], dict[str, list[str]]]:
    """Return (good rows in order, their media, dropped rows). Dropped rows: reason in ``REASONS`` -> list of "path:
    problem". Files are decoded in separate processes, because broken files can crash or hang decoders."""
    found: list[Medium | tuple[str, str] | None] = []  # each row's medium, or (reason, "path: problem")
    for row in rows:
        why = problem(row.path) if not says_nothing(row.text) else None
        missing = None if why is None else ("missing", f"{printable(row.path)}: {why}")
        found.append(("empty caption", printable(row.path)) if says_nothing(row.text) else missing)
    jobs = [i for i, fault in enumerate(found) if fault is None]
    pictures = [row.is_picture for row in rows]
    work = [(str(rows[i].path), pictures[i]) for i in jobs]
    span = (num_frames - 1) * frame_interval + 1
    with (
        closing(run_apart(probe, work, num_workers, time_limit)) as results,
        Progress(len(rows), "files", initial=len(rows) - len(jobs), title="checking") as bar,
    ):
        for done, result in results:
            i = jobs[done]
            bar.update()
            found[i] = result
            if isinstance(result, str):
                found[i] = "undecodable", f"{printable(rows[i].path)}: {result}"
            elif min(result.height, result.width) < min_size:
                found[i] = "too small", f"{_size(rows[i], result)}, needs {min_size}"
            elif result.frames_at(fps) < span and not pictures[i]:
                length = f"{result.frames} frames" if fps is None else f"{result.seconds:.2f} s"
                needs = f"{span}" if fps is None else f"{span} frames at {fps:g} a second"
                found[i] = "too short", f"{printable(rows[i].path)}: {length}, needs {needs}"
    kept = [(row, result) for row, result in zip(rows, found, strict=True) if isinstance(result, Medium)]
    faults = [result for result in found if isinstance(result, tuple)]
    dropped = {reason: [what for kind, what in faults if kind == reason] for reason in REASONS}
    return [row for row, _ in kept], [medium for _, medium in kept], dropped


def _size(row: TableRow, medium: Medium) -> str:
    return f"{printable(row.path)}: {medium.width}x{medium.height}"


def table(media: list[Medium]) -> str:
    """Return a text table of minimum, median and maximum. Durations, frame counts and rates are for clips only."""
    clips = [medium for medium in media if medium.fps]
    columns: list[tuple[str, list[float], Callable[[float], str]]] = [
        ("duration (s)", [m.seconds for m in clips], "{:.2f}".format),
        ("frames", [m.frames for m in clips], "{:.0f}".format),
        ("width", [m.width for m in media], "{:.0f}".format),
        ("height", [m.height for m in media], "{:.0f}".format),
        ("frame rate", [m.fps for m in clips], "{:.2f}".format),
    ]
    lines = [f"{'':14}{'min':>10}{'median':>10}{'max':>10}"]
    for name, values, show in columns:
        if values:
            lines.append(f"{name:14}" + "".join(f"{show(pick(values)):>10}" for pick in (min, median, max)))
    return "\n".join(lines)


def check(
    csv: str,
    output: str,
    *,
    file_column: str | None = None,
    caption_column: str | None = None,
    image_size: int = 0,
    **how: Any,
) -> None:
    """Run ``preprocess.py check``, with its flags as arguments. how: arguments of :func:`check_rows`. Raises DataError
    and writes nothing if all rows are dropped."""
    rows, lines = read_captioned(csv, printable(csv), Columns(file_column, caption_column))
    print("\n".join(lines), end="\n" * bool(lines))
    kept, media, dropped = check_rows(rows, **how)
    print(f"kept {len(kept):,} of {len(rows):,} rows, dropped {len(rows) - len(kept):,}")
    for reason, files in dropped.items():
        if files:
            print(f"  {reason}: {len(files):,} ({name_few(files)})")
    pairs = zip(kept, media, strict=True)
    small = [_size(row, medium) for row, medium in pairs if min(medium.height, medium.width) < image_size]
    if small:
        few = name_few(small)
        print(f"  kept, and enlarged by training at {image_size}: {len(small):,} ({few}); --min_size drops them")
    if not kept:
        raise DataError(f"no row of {csv} is left; see the reasons above")
    found = count_texts(range(len(kept)), lambda i: kept[i].text, lambda i: str(kept[i].path), len(kept))
    lines = [table(media), *count_colours(media), *found.without_words(), *found.for_any_encoder()]
    print("\n".join(lines))
    write_csv(output, kept)
    print(f"wrote {output}: train with --data_path {output}")
