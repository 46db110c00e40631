"""Read and write tables of captioned media: CSV, JSON lines and Parquet, with a column of files and one of captions.

A CSV has the columns ``path,text`` with or without a header, and may have more. With a header, the columns may also be
called ``file_name`` and ``caption``, or as ``--file_column`` and ``--caption_column`` specify. Paths are absolute, or
relative to the table's folder. The text is UTF-8, with or without a byte-order mark. Captions may contain commas,
quotes and newlines with the usual CSV quoting. File names may contain bytes that are not UTF-8.
"""

import csv
import io
import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from opendit.common.safe_files import replacing
from opendit.data.animations import SUFFIXES as ANIMATIONS
from opendit.data.animations import is_animation
from opendit.data.files import first_bytes, printable, problem
from opendit.data.folders import CLIPS, suffix_of
from opendit.data.picture_file import picture_suffixes

MAX_LINE = 2**20  # maximum characters of a line
FILES, CAPTIONS = ("path", "file_name"), ("text", "caption")  # usual column names; the first one present is used
_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BINARY = {  # first bytes of formats that are often used by mistake
    b"\xff\xfe": "UTF-16, not UTF-8; save it as UTF-8",
    b"\xfe\xff": "UTF-16, not UTF-8; save it as UTF-8",
    b"PK\x03\x04": "no text but an Excel file or another archive; save it as a CSV in UTF-8",
    b"\x1f\x8b": "compressed; unpack it with gunzip",
}

# First bytes of picture files.
_SIGNATURES = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|BM....\0\0\0\0|GIF8[79]a|II\*\0|MM\0\*|P[1-6]\s|....ftypavi[fs]",
    re.DOTALL,
)


@dataclass(frozen=True)
class TableRow:
    """A medium with its caption. ``path`` is absolute or relative to the working directory, not to the table."""

    path: Path
    text: str
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def is_named_picture(self) -> bool:
        """True for a picture by the file's suffix or, if the suffix is unknown, by its first bytes."""
        suffix = self.path.suffix.lower()
        if suffix in picture_suffixes() or suffix in CLIPS:
            return suffix not in CLIPS
        return _SIGNATURES.match(first_bytes(self.path, 16)) is not None

    @property
    def is_picture(self) -> bool:
        """True for a picture that is not an animation. Everything else is read as a clip.

        Files that may be animations are opened to decide."""
        if not self.is_named_picture:
            return False
        suffix = self.path.suffix.lower()
        return (suffix in picture_suffixes() and suffix not in ANIMATIONS) or not is_animation(self.path)


class NoColumns(ValueError):
    """Raised if a table lacks the column of files or of captions."""


class Columns(NamedTuple):
    """Names of the columns of files and captions (``--file_column``, ``--caption_column``); None: the usual names."""

    file: str | None = None
    caption: str | None = None

    def find(self, names: Collection[str]) -> tuple[str | None, str | None]:
        """Return the names of the file and caption columns among ``names``, or None for a missing column."""
        of_each = ((self.file,) if self.file else FILES), ((self.caption,) if self.caption else CAPTIONS)
        file, caption = (next((name for name in usual if name in names), None) for usual in of_each)
        return file, caption

    def missing(self, file: str | None, caption: str | None) -> str:
        """Return a message that names the missing columns and the fix."""
        lost = [self.file or "path"] * (file is None) + [self.caption or "text"] * (caption is None)
        return (
            f"has no column {' and '.join(map(printable, lost))}; name the columns of the files and of the captions "
            "path and text, or say which they are by --file_column and --caption_column"
        )


USUAL = Columns()


def read_csv(path: str | Path, name: str | None = None, columns: Columns = USUAL) -> list[TableRow]:
    """Read the rows of a CSV, in order, without blank lines.

    Without a header the columns are path and text. The first line is a header if it names both columns (``FILES`` and
    ``CAPTIONS``, or ``columns``). name: the table's name in messages, by default ``--data_path`` and its path.

    Raises:
        FileNotFoundError, ValueError: the message names the file, the line and the fix.
    """
    path = Path(path)
    name = name or f"--data_path {printable(path)}"
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{name}: doesn't exist; give a CSV of path,text")
    if (why := problem(path)) is not None:
        raise ValueError(f"{name}: can't be read ({why}); give another CSV")
    try:
        lines = list(_split(path, name))
    except OSError as error:
        raise ValueError(f"{name}: can't be read ({error.strerror or error}); give another CSV") from error
    if not lines:
        raise ValueError(f"{name}: is empty; it needs lines of path,text")
    names, lines = _header(path.parent, name, lines, columns)
    if not lines:
        raise ValueError(f"{name}: has a header and no rows; add some")
    return [_csv_row(path.parent, f"{name}, line {number}", names, cells) for number, cells in lines]


def _split(path: Path, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the row's first line, cells) for each row."""
    check_text_file(path, name)
    # File names may contain any bytes, so keep invalid ones as surrogates; captions are checked row by row.
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
    """Return True if a cell names a clip or picture: its suffix is known, or the file exists."""
    cell = cell.strip()
    return suffix_of(cell) in picture_suffixes() | CLIPS or bool(cell) and os.path.isfile(folder / cell)


def _header(folder: Path, name: str, lines: list[Any], columns: Columns) -> tuple[list[str], list[Any]]:
    """Return (names of the columns, lines without the header).

    The columns of files and captions are renamed to path and text."""
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
        others = {"path": "path2", "text": "text2"}  # new names of other columns called path or text
        found = [called.get(column) or others.get(column, column) for column in names]
        return [column or f"column{i}" for i, column in enumerate(found, 1)], lines[1:]
    if any(columns):
        raise NoColumns(f"{name}, line {number}: the header {shown} {columns.missing(file, caption)}")
    # If the first line names no medium and the second does, the first line is a header with other names.
    if not any(_is_medium(folder, cell) for cell in cells):
        _check_delimiter(folder, f"{name}, line {number}", cells)
        following = lines[1][1] if len(lines) > 1 else []
        if file or caption or any(_is_medium(folder, cell) for cell in following):
            raise NoColumns(f"{name}, line {number}: the header {shown} {columns.missing(file, caption)}")
    return ["path", "text", *(f"column{i}" for i in range(3, 1 + max(len(cells) for _, cells in lines)))], lines


def _check_delimiter(folder: Path, here: str, cells: list[str]) -> None:
    """Raise ValueError if the first cell contains several values, separated by something other than a comma."""
    for delimiter, plural in _OTHER_DELIMITERS.items():
        first, found, _ = cells[0].partition(delimiter)
        names = {part.strip().lower() for part in cells[0].split(delimiter)}
        if found and (_is_medium(folder, first) or len(cells) == 1 or {"path", "text"} <= names):
            raise ValueError(
                f"{here}: the columns are separated by {plural}; write commas, and quotes around captions that hold one"
            )


def _csv_row(folder: Path, here: str, columns: list[str], cells: list[str]) -> TableRow:
    """Parse one row of a CSV. Raises ValueError, beginning with ``here``, if the row is malformed."""
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
    """Return the file that a path in a table names.

    The path is relative to the table's folder unless it is absolute or begins with ~. Raises ValueError, beginning with
    ``here``, for a URL and for the home folder of an unknown user."""
    if "://" in path and _ADDRESS.match(path):
        raise ValueError(f"{here}: {printable(path)} is an address; download the file and write its path")
    try:
        medium = Path(path).expanduser() if path[0] == "~" else Path(path)
    except RuntimeError as error:
        user = path.split("/")[0]
        raise ValueError(
            f"{here}: the home folder of {printable(user)} is not known; write the path out, or ./ before it if it is "
            "a file's name"
        ) from error
    return medium if medium.is_absolute() else folder / medium


def write_csv(path: str | Path, rows: list[TableRow]) -> None:
    """Write a CSV with a header. Paths below the CSV's folder are written relative to that folder.

    The CSV replaces an existing file only when it is complete."""
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
            # Without ./, readers would expand a leading ~ to a home folder and strip a leading blank.
            shown = f"./{shown}" if shown[0] == "~" or shown[0].isspace() else shown
            writer.writerow([shown, row.text, *(row.extra.get(name, "") for name in extra)])
        file.detach()


SUFFIXES = (".csv", ".jsonl", ".parquet")


def read_table(path: str | Path, name: str | None = None, columns: Columns = USUAL) -> list[TableRow]:
    """Read the rows of a table of media, in order. A missing caption (null) becomes an empty one.

    name: the table's name in messages, by default ``--data_path`` and its path.

    Raises:
        FileNotFoundError, ValueError: the message names the file, the line and the fix.
        NoColumns: the columns are missing.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES[1:]:
        return read_csv(path, name, columns)
    name = name or f"--data_path {printable(path)}"
    if (why := problem(path)) is not None:
        raise ValueError(f"{name}: can't be read ({why}); give another table")
    read = _jsonl if path.suffix.lower() == ".jsonl" else _parquet
    try:
        rows = [_row(path.parent, here, *cells) for here, *cells in read(path, name, columns)]
    except OSError as error:
        raise ValueError(f"{name}: can't be read ({error.strerror or error}); give another table") from error
    if not rows:
        raise ValueError(f"{name}: has no rows; add some")
    return rows


def _row(folder: Path, here: str, file: Any, caption: Any) -> TableRow:
    """Make a row from two cells. Raises ValueError, beginning with ``here``, for a cell of another type."""
    caption = "" if caption is None else str(caption) if type(caption) in (int, float) else caption
    if not isinstance(file, str) or not file:
        raise ValueError(f"{here}: the path is {printable(repr(file))[:60]}; name a file or remove the row")
    if not isinstance(caption, str):
        raise ValueError(f"{here}: the caption is {printable(repr(caption))[:60]} and no text; correct the row")
    check_utf8(here, "text", caption)
    return TableRow(locate(folder, here, file), caption.strip())


def _jsonl(path: Path, name: str, columns: Columns) -> Iterator[tuple[str, Any, Any]]:
    """Yield (location of the row for messages, file, caption). The caption is None if the line has none."""
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
        yield here, values.get(file_column), values.get(caption_column)


def _parquet(path: Path, name: str, columns: Columns) -> Iterator[tuple[str, Any, Any]]:
    """Yield (location of the row for messages, file, caption)."""
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
        yield f"{name}, row {number}", file, caption
