"""Tables of captioned media: CSV, JSON lines and Parquet, all with a column of files and one of captions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opendit.data.csv_table import (
    MAX_LINE,
    USUAL,
    Columns,
    NoColumns,
    TableRow,
    check_text_file,
    check_utf8,
    locate,
    read_csv,
)
from opendit.data.files import printable, problem

SUFFIXES = (".csv", ".jsonl", ".parquet")


def read_table(path: str | Path, name: str | None = None, columns: Columns = USUAL) -> list[TableRow]:
    """Read the rows of a table of media, in order. A missing caption (null) is an empty one.

    name: the file's name in messages, by default ``--data_path`` and its path.

    Raises:
        FileNotFoundError, ValueError: with a message that names the file, the line and the fix; NoColumns if the
            columns are missing.
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
    """Make a row of two cells. Raises ValueError, beginning with ``here``."""
    caption = "" if caption is None else str(caption) if type(caption) in (int, float) else caption
    if not isinstance(file, str) or not file:
        raise ValueError(f"{here}: the path is {printable(repr(file))[:60]}; name a file or remove the row")
    if not isinstance(caption, str):
        raise ValueError(f"{here}: the caption is {printable(repr(caption))[:60]} and no text; correct the row")
    check_utf8(here, "text", caption)
    return TableRow(locate(folder, here, file), caption.strip())


def _jsonl(path: Path, name: str, columns: Columns) -> Iterator[tuple[str, Any, Any]]:
    """Yield where each row is, its file and its caption. A line without a caption has None."""
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
    """Yield where each row is, its file and its caption."""
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
