"""Work on files that may crash or hang their decoder: in processes of their own, so that such a file costs itself."""

import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from opendit.data.files import printable
from opendit.data.processes import collection_paused, end_processes, end_with_parent, leave_inherited_garbage


def run_apart(
    function: Callable[..., Any], work: Sequence[tuple[Any, ...]], num_workers: int, time_limit: float
) -> Generator[tuple[int, Any], None, None]:
    """Yields (index, ``function(*work[index])`` or, as text, why it failed) for all of the work, in the order of
    completion; ``time_limit``: seconds for one. The function returns no text itself.

    A multiprocessing pool gives up, or waits for ever, when one of its processes dies; here only that file is lost.
    """
    todo = iter(range(len(work)))
    running: dict[Connection, list[Any]] = {}  # pipe -> [process, index, deadline]

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
            give(*_start_worker(function))
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
                    pipe, process = _start_worker(function)
                give(pipe, process)
    finally:
        for pipe, (process, _, _) in running.items():
            _end(pipe, process)


def _start_worker(function: Callable[..., Any]) -> tuple[Connection, multiprocessing.Process]:
    # A forked process is there at once; others import torch for seconds, and again after every crash.
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs, os.getpid()), daemon=True)
    with collection_paused():
        process.start()
    theirs.close()  # so that its death closes the pipe
    return ours, process


def _end(pipe: Connection, process: multiprocessing.Process) -> None:
    pipe.close()
    end_processes([process])


def _serve(function: Callable[..., Any], pipe: Connection, parent: int) -> None:
    """A worker process: answers arguments with the function's result, or the reason why there is none."""
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
            answer = function(*job)
        except Exception as error:  # decoders raise what they like
            message = str(error).removeprefix(f"{printable(str(job[0]))}: ")  # a BadSample's
            lines = [line.strip() for line in message.splitlines() if line.strip()]
            answer = (lines[0] if lines else type(error).__name__)[:200]
        pipe.send(answer)


def _silence() -> None:
    """FFmpeg's complaints about broken files would tear the progress bar; each file is named at the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
