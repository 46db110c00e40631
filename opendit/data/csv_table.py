"""The CSV of captioned media: ``path,text`` with or without a header, more columns welcome.

Paths are relative to the CSV's folder unless absolute. UTF-8, with or without a byte-order mark; captions may
hold commas, quotes and newlines, quoted the usual way.
"""

import csv
import os
from dataclasses import dataclass, field
from pathlib import Path

PICTURES = frozenset(".jpg .jpeg .png .webp .bmp .gif .tif .tiff .ppm .pgm .jfif".split())
CLIPS = frozenset(".mp4 .avi .mov .mkv .webm .m4v .mpg .mpeg .wmv .flv .ts .3gp .ogv".split())


@dataclass(frozen=True)
class Row:
    """One medium with its caption. ``path`` is absolute or relative to the working directory, not to the CSV."""

    path: Path
    text: str
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def is_picture(self) -> bool:
        """By the file's name; what is not known as a picture is read as a clip."""
        return self.path.suffix.lower() in PICTURES


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
