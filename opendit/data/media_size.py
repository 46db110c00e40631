"""Find the sizes of a data set's media by their headers, once for each machine, which keeps them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from opendit.common.safe_files import replacing
from opendit.common.utils import hash_parts
from opendit.data.base import BadSample, MediaDataset, Size
from opendit.data.clips import as_file, clip_size
from opendit.data.container_header import table_parts
from opendit.data.medium import Timeline
from opendit.data.picture_file import picture_size, picture_suffixes
from opendit.data.progress import Progress
from opendit.data.row_arrays import kept_file

SIZES = "sizes as shown, of animations as clips"  # goes into the names of what is kept: other words for other sizes
HEAD = 1 << 16  # bytes of a picture within which its header nearly always ends
_WHOLE = 4 * HEAD  # bytes up to which a clip is read at once
_ROWS = 4096  # looked at between two steps of the progress bar


def sizes_of(dataset: MediaDataset, look: Callable[[int], Size]) -> np.ndarray:
    """Return (rows, 3) int32, the size of every row's medium. look: finds the size of a row's, or raises BadSample; it
    is called from several threads."""
    known = dataset.fingerprint()
    name = hash_parts(SIZES, known.identity, known.contents or "", dataset.shapes().read_as)
    return known_sizes(name, len(dataset), look)


def known_sizes(identity: str, rows: int, look: Callable[[int], Size], threads: int = 8) -> np.ndarray:
    """Return (rows, 3) int32, the size of every row's medium, found once on this machine; see ``kept_file``.

    identity: of the data set and its files. look: finds the size of a row's medium, or raises BadSample; it is called
    from ``threads`` threads.
    """
    read, make = partial(_read, rows=rows), partial(_look_at_all, rows, look, threads)
    return kept_file(identity, f"{identity}.npy", read, _write, make)


def _write(path: Path, found: np.ndarray) -> None:
    with replacing(path) as file:
        np.save(file, found)


def _read(path: Path, rows: int) -> np.ndarray | None:
    """Map kept sizes from their file: the processes of a machine share its memory. None if it isn't there or is
    damaged."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return found if found.shape == (rows, 3) and found.dtype == np.int32 else None


def _look_at_all(rows: int, look: Callable[[int], Size], threads: int) -> np.ndarray:
    picture_suffixes()  # Pillow's formats are not left to the threads, which would race to register them
    found = np.zeros((rows, 3), dtype=np.int32)

    def one(row: int) -> None:
        try:
            found[row] = look(row)
        except BadSample:
            pass

    few = rows <= _ROWS
    with ThreadPoolExecutor(threads) as pool, Progress(rows, "files", title="sizes", disable=few) as shown:
        for first in range(0, rows, _ROWS):
            part = range(first, min(rows, first + _ROWS))
            list(pool.map(one, part))
            shown.update(len(part))
    return found


def file_size(path: str, is_picture: bool, count: Callable[[Timeline], int] | None = None) -> Size:
    """Return the size of the picture or clip in a file. count: see ``clip_size``. Raises BadSample."""
    return (1, *picture_size(path)) if is_picture else clip_size(path, count=count)


def stored_picture_size(name: str, size: int, read: Callable[[int, int], bytes]) -> Size:
    """Return the size of a picture of ``size`` bytes inside another file, of which ``read(at, count)`` gives bytes."""
    if size > HEAD:
        try:
            return (1, *picture_size(name, content=read(0, HEAD)))
        except BadSample:
            pass  # a header that is longer, or a format that is read as a whole
    return (1, *picture_size(name, content=read(0, size)))


def stored_clip_size(
    name: str, size: int, read: Callable[[int, int], bytes], count: Callable[[Timeline], int] | None = None
) -> Size:
    """Return the size of a clip from parts of its file, if they suffice: an MP4's tables and the beginning of its first
    frame. count: see ``clip_size``."""
    if size > _WHOLE and (parts := table_parts(read, size, HEAD)) is not None:
        try:
            with as_file(parts, size) as path:
                return clip_size(path, whole=False, count=count)
        except BadSample:
            pass  # a decoder that wants all of the first frame, or a file whose frames only decoding counts
    with as_file([(0, read(0, size))], size) as path:
        return clip_size(path, count=count)


def column_size(extra: dict[str, str], is_picture: bool) -> Size | None:
    """Read a size from the columns height, width and, for a clip, num_frames of a CSV's row; None if they have none."""
    try:
        frames = 1 if is_picture else int(extra["num_frames"])
        found = frames, int(extra["height"]), int(extra["width"])
    except (KeyError, ValueError):
        return None
    return found if min(found) > 0 and max(found) < 2**31 else None
