"""``preprocess.py ucf101`` and ``folder`` list clips and pictures with captions in a CSV; ``check`` keeps the usable
rows.

Decoders crash and hang on broken files. Files are therefore decoded in separate processes, so that a broken file loses
only its row.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from opendit.data.base import DataError, name_few
from opendit.data.captioned_folder import BARE, UNREAD, CaptionedFiles, find_captions, is_text, read_captioned
from opendit.data.captions import count_texts, says_nothing
from opendit.data.clips import open_clip
from opendit.data.files import printable, problem
from opendit.data.folders import CLIPS, Ignored, files_below, folders_above, identity_of
from opendit.data.medium import Medium, count_colours, of_picture
from opendit.data.picture_file import read_picture
from opendit.data.processes import run_apart
from opendit.data.progress import Progress
from opendit.data.tables import Columns, TableRow, write_csv

# A run of capitals (TV in TVShow), a word that may begin with a capital, or a number.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")


def class_caption(name: str) -> str:
    """Convert a class name to words.

    For example, ApplyEyeMakeup becomes "apply eye makeup", TVShow "TV show", and play_piano "play piano"."""
    words = _WORDS.findall(name)
    return " ".join(word if len(word) > 1 and word.isupper() else word.lower() for word in words) or name


def find_ucf101(root: str | Path) -> CaptionedFiles:
    """Find every clip below ``root``; its caption is its folder's name. Clips directly in ``root`` are left out.

    Raises FileNotFoundError if the folder does not exist or has no clip in a class folder."""
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
    """Find every clip and picture below ``root`` with its caption. The default caption is the folder's name.

    Raises FileNotFoundError if the folder does not exist, or has no media or no captions."""
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
    """Yield the clips at any depth, sorted by folder. Each folder is visited once. Count other files in ``ignored``."""
    root = str(root)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no folder {printable(root)}")
    above = folders_above(root) - {identity_of(root)}
    yield from map(Path, files_below(root, CLIPS, ignored, above=above, visits=1))


def make(kind: str, root: str, output: str) -> None:
    """Run ``preprocess.py ucf101`` or ``preprocess.py folder``: write the CSV and print a summary."""
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


REASONS = ("missing", "undecodable", "too short", "too small", "empty caption")
TIME_LIMIT = 60.0  # seconds for decoding two frames of a file


def probe(path: str, is_picture: bool) -> Medium:
    """Decode a picture, or a clip's first and last frame, as in training. May raise any exception."""
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
    """Check rows, and return (remaining rows in order, their media, dropped rows).

    The dropped rows are a dictionary: reason -> list of "path: problem". A row counts under the first reason that
    applies: empty caption, missing, undecodable, too small (shorter side below ``min_size``), too short. A picture is
    never too short."""
    found: list[Medium | tuple[str, str] | None] = []  # for every row, its medium or (reason, "path: problem")
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
    """Return a text table with the minimum, median and maximum of durations, frames, sizes and frame rates.

    Durations, frames and rates cover only the clips."""
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
    """Run ``preprocess.py check`` with the values of its flags. how: arguments of :func:`check_rows`.

    Raises DataError and writes nothing if no row is left."""
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
