"""Tries every medium of a CSV and keeps the rows that can be trained on: what ``preprocess.py check`` does.

Decoders crash and hang on broken files. Each runs in a process of its own, so such a file costs its row, no more.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from statistics import median

from opendit.data.base import DataError, name_few
from opendit.data.clips import decode_frames, name_for_ffmpeg
from opendit.data.csv_table import TableRow, read_csv, write_csv
from opendit.data.files import printable, problem
from opendit.data.picture_file import read_picture
from opendit.data.processes import collection_paused, end_processes, end_with_parent, leave_inherited_garbage
from opendit.data.progress import Progress

REASONS = ("missing", "undecodable", "too short", "too small", "empty caption")
TIME_LIMIT = 60.0  # seconds for the two frames of one file


@dataclass(frozen=True)
class Medium:
    """What a file holds. A picture has one frame and no rate."""

    frames: int
    height: int
    width: int
    fps: float = 0.0

    @property
    def seconds(self) -> float:
        return self.frames / self.fps if self.fps else 0.0


def probe(path: str, is_picture: bool) -> Medium:
    """Decodes a picture, or a clip's first and last frame, as training does; raises an exception of any kind."""
    if is_picture:
        image = read_picture(path)
        return Medium(1, image.height, image.width)
    lengths: list[int] = []

    def first_and_last(length: int) -> list[int]:
        if not length:
            raise ValueError("no frames")
        lengths.append(length)
        return [0, length - 1]

    _, height, width, _ = decode_frames(path, first_and_last, threading.Event()).shape
    import av

    with name_for_ffmpeg(path) as name, av.open(name) as file:
        return Medium(lengths[0], height, width, float(file.streams.video[0].average_rate or 0))


def check_rows(
    rows: list[TableRow],
    *,
    num_frames: int = 16,
    frame_interval: int = 1,
    image_size: int = 0,
    num_workers: int = 2,
    time_limit: float = TIME_LIMIT,
) -> tuple[list[TableRow], list[Medium], dict[str, list[str]]]:
    """The rows that can be trained on, in their order, what each one's file holds, and for every reason the
    "path: what is wrong" of the rows dropped for it, each under the first that applies: empty caption, missing,
    undecodable, too small (a shorter side below ``image_size``), too short. A picture is never too short.
    """
    dropped: dict[str, list[str]] = {reason: [] for reason in REASONS}
    faults: list[tuple[str, str] | None] = [None] * len(rows)
    media: list[Medium | None] = [None] * len(rows)
    jobs = []
    for i, row in enumerate(rows):
        if not row.text.strip():
            faults[i] = ("empty caption", printable(row.path))
        elif (why := problem(row.path)) is not None:
            faults[i] = ("missing", f"{printable(row.path)}: {why}")
        else:
            jobs.append(i)
    pictures = [row.is_picture for row in rows]
    work = [(str(rows[i].path), pictures[i]) for i in jobs]
    span = (num_frames - 1) * frame_interval + 1
    with (
        closing(_run_apart(work, num_workers, time_limit)) as results,
        Progress(len(rows), "files", initial=len(rows) - len(jobs), title="checking") as bar,
    ):
        for done, result in results:
            i = jobs[done]
            bar.update()
            if isinstance(result, str):
                faults[i] = ("undecodable", f"{printable(rows[i].path)}: {result}")
            elif min(result.height, result.width) < image_size:
                faults[i] = (
                    "too small",
                    f"{printable(rows[i].path)}: {result.width}x{result.height}, needs {image_size}",
                )
            elif result.frames < span and not pictures[i]:
                faults[i] = ("too short", f"{printable(rows[i].path)}: {result.frames} frames, needs {span}")
            else:
                media[i] = result
    for fault in faults:
        if fault is not None:
            dropped[fault[0]].append(fault[1])
    kept = [i for i, medium in enumerate(media) if medium is not None]
    return [rows[i] for i in kept], [media[i] for i in kept], dropped


def _run_apart(work: list[tuple[str, bool]], num_workers: int, time_limit: float) -> Iterator[tuple[int, Medium | str]]:
    """Yields (index, what ``probe`` found or why it failed) for all of the work, in the order of completion.

    A multiprocessing pool gives up, or waits for ever, when one of its processes dies; here only that file is lost.
    """
    todo = iter(range(len(work)))
    running: dict[Connection, list] = {}  # pipe -> [process, index, deadline]

    def give(pipe: Connection, process) -> None:
        """The next file to a process that is free, or its end."""
        index = next(todo, None)
        if index is None:
            # To close the pipe isn't enough: processes forked later hold copies of it, which keep it open.
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
            process.join(5)
            return
        running[pipe] = [process, index, time.monotonic() + time_limit]
        with suppress(OSError):  # if it died while it was idle, the pipe reads as closed and the file is named
            pipe.send(work[index])

    try:
        for _ in range(min(num_workers, len(work))):
            give(*_start_worker())
        while running:
            left = min(deadline for _, _, deadline in running.values()) - time.monotonic()
            ready = wait(list(running), timeout=max(0.0, left))
            late = [p for p, (_, _, deadline) in running.items() if p not in ready and deadline <= time.monotonic()]
            for pipe in [*ready, *late]:
                process, index, _ = running.pop(pipe)
                try:
                    result = f"no answer in {time_limit:g} s" if pipe in late else pipe.recv()
                    lost = pipe in late
                except (EOFError, OSError):
                    process.join()
                    result, lost = f"the decoder crashed ({process.exitcode})", True
                yield index, result
                if lost:
                    _end(pipe, process)
                    pipe, process = _start_worker()
                give(pipe, process)
    finally:
        for pipe, (process, _, _) in running.items():
            _end(pipe, process)


def _start_worker() -> tuple[Connection, multiprocessing.Process]:
    # A forked process is there at once; others import torch for seconds, and again after every crash.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
    with collection_paused():
        process.start()
    theirs.close()  # so that its death closes the pipe
    return ours, process


def _end(pipe: Connection, process: multiprocessing.Process) -> None:
    pipe.close()
    end_processes([process])


def _serve(pipe: Connection, parent: int) -> None:
    """A worker process: answers a path with a Medium or the reason why there is none."""
    leave_inherited_garbage()
    end_with_parent()
    _silence()
    while True:
        # A parent that was killed sends no word, and the pipe stays open in the processes forked later.
        while not pipe.poll(1.0):
            if os.getppid() != parent:
                return
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        if job is None:
            return
        try:
            answer = probe(*job)
        except Exception as error:  # decoders raise what they like
            message = str(error).removeprefix(f"{printable(job[0])}: ")  # a BadSample's
            lines = [line.strip() for line in message.splitlines() if line.strip()]
            answer = (lines[0] if lines else type(error).__name__)[:200]
        pipe.send(answer)


def _silence() -> None:
    """FFmpeg's complaints about broken files would tear the progress bar; each file is named at the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def table(media: list[Medium]) -> str:
    """Minimum, median and maximum of the durations, frames, sizes and frame rates; the first, second and fourth of
    the clips alone."""
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


def run(
    csv: str, output: str, *, num_frames: int = 16, frame_interval: int = 1, image_size: int = 0, num_workers: int = 2
) -> None:
    """``preprocess.py check`` with its flags' values. Raises DataError, and writes nothing, if no row is left."""
    rows = read_csv(csv, name=printable(csv))
    kept, media, dropped = check_rows(
        rows, num_frames=num_frames, frame_interval=frame_interval, image_size=image_size, num_workers=num_workers
    )
    print(f"kept {len(kept):,} of {len(rows):,} rows, dropped {len(rows) - len(kept):,}")
    for reason, files in dropped.items():
        if files:
            print(f"  {reason}: {len(files):,} ({name_few(files)})")
    if not kept:
        raise DataError(f"no row of {csv} is left; see the reasons above")
    print(table(media))
    write_csv(output, kept)
    print(f"wrote {output}: train with --data_path {output}")
