"""The CSV of captioned media: ``path,text`` with or without a header, more columns welcome.

Paths are relative to the CSV's folder unless absolute. UTF-8, with or without a byte-order mark; captions may
hold commas, quotes and newlines, quoted the usual way.
"""

import csv
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

PICTURES = frozenset(".jpg .jpeg .png .webp .bmp .gif .tif .tiff .ppm .pgm .jfif".split())
CLIPS = frozenset(".mp4 .avi .mov .mkv .webm .m4v .mpg .mpeg .wmv .flv .ts .3gp .ogv".split())

# How pictures' files begin.
_SIGNATURES = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|BM....\0\0\0\0|GIF8[79]a|II\*\0|MM\0\*|P[1-6]\s|....ftypavi[fs]",
    re.DOTALL,
)


@dataclass(frozen=True)
class Row:
    """One medium with its caption. ``path`` is absolute or relative to the working directory, not to the CSV."""

    path: Path
    text: str
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def is_picture(self) -> bool:
        """By the file's suffix and, only where that says nothing, by its first bytes. Else it is read as a clip."""
        suffix = self.path.suffix.lower()
        if suffix in PICTURES or suffix in CLIPS:
            return suffix in PICTURES
        return _SIGNATURES.match(first_bytes(self.path, 16)) is not None


def first_bytes(path: str | Path, count: int) -> bytes:
    """The start of a file; nothing of what can't be read or is no ordinary file (opening a pipe may take for ever)."""
    try:
        if not os.path.isfile(path):
            return b""
        with open(path, "rb") as file:
            return file.read(count)
    except OSError:
        return b""


def read_csv(path: str | Path) -> list[Row]:
    """The rows of a CSV, in order; blank lines are passed over.

    Without a header the columns are path and text. A header is a first line with the names path and text.

    Raises:
        FileNotFoundError, ValueError: with a message that names --data_path, the line and the fix.
    """
    path = Path(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--data_path {path} doesn't exist") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--data_path {path} isn't UTF-8 ({error}); save it as UTF-8") from error
    except csv.Error as error:
        raise ValueError(f"--data_path {path}, line {reader.line_num}: not a CSV ({error})") from error
    if not lines:
        raise ValueError(f"--data_path {path} is empty; it needs lines of path,text")
    names = [cell.strip().lower() for cell in lines[0][1]]
    if {"path", "text"} <= set(names):
        lines = lines[1:]
    else:
        names = ["path", "text", *(f"column{i}" for i in range(3, 1 + max(len(cells) for _, cells in lines)))]
    if not lines:
        raise ValueError(f"--data_path {path} has a header and no rows")
    rows = []
    for number, cells in lines:
        values = dict(zip(names, cells, strict=False))
        if len(cells) < 2 or len(cells) > len(names) or not values.get("path", "").strip() or "text" not in values:
            raise ValueError(
                f"--data_path {path}, line {number}: {len(cells)} columns where {','.join(names)} are expected; "
                "a caption with commas needs quotes around it"
            )
        medium = Path(values.pop("path").strip()).expanduser()
        rows.append(Row(medium if medium.is_absolute() else path.parent / medium, values.pop("text").strip(), values))
    return rows


def write_csv(path: str | Path, rows: list[Row]) -> None:
    """Writes a CSV with a header, paths relative to its folder where they lie below it; replaced when complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    extra = list(dict.fromkeys(name for row in rows for name in row.extra))
    folder = path.parent.resolve()
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["path", "text", *extra])
        for row in rows:
            medium = row.path.resolve()
            shown = medium.relative_to(folder) if medium.is_relative_to(folder) else medium
            writer.writerow([shown, row.text, *(row.extra.get(name, "") for name in extra)])
    os.replace(partial, path)
