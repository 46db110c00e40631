"""Run jobs in worker processes that end with the main process.

``in_processes`` runs ordinary jobs. ``run_apart`` runs jobs that may crash or hang, so that only the failing job is
lost."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from opendit.common.utils import DataError, collection_paused
from opendit.data.files import printable

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def leave_inherited_garbage() -> None:
    """Collect only new garbage from now on, in a process forked under ``collection_paused``. The parent's garbage may
    include objects that end a thread, such as process groups of torch.distributed. The thread does not exist here, so
    collecting them would hang or crash."""
    gc.freeze()
    gc.enable()


def end_with_parent() -> None:
    """Make this process end with the parent, even if the parent is killed. The parent must start this process from its
    main thread, because the Linux kernel watches only the starting thread. In processes from Python's fork server, a
    thread watches the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_follow, args=(parent,), name="parent", daemon=True).start()


def _follow(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def end_processes(processes: Sequence[BaseProcess]) -> None:
    """Kill processes that need no cleanup, and wait up to five seconds in total for their end. A process may survive
    while it waits for a dead network disk."""
    for process in processes:
        process.kill()
    until = time.monotonic() + 5
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))


def state_of(pid: int) -> str:
    """Return ``stopped`` or ``waiting for a disk`` if a process is in that state, otherwise ""."""
    with suppress(OSError, IndexError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return {"T": "stopped", "t": "stopped", "D": "waiting for a disk"}.get(letter, "")
    return ""


def _context() -> Any:
    # Forking takes no time, but a spawned process would import torch for seconds.
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("fork" if "fork" in methods else "spawn")


def _begin_process() -> None:
    leave_inherited_garbage()
    end_with_parent()


def in_processes(work: Callable[..., Any], jobs: Sequence[Any], count: int) -> Iterator[Any]:
    """Compute ``work(job)`` for all jobs in ``count`` processes (1: in this process). Yield results in order of
    completion. After a job's error, no more jobs start, and the error is raised. Raises DataError if a process was
    killed."""
    if min(count, len(jobs)) <= 1:
        yield from map(work, jobs)
        return
    with ProcessPoolExecutor(min(count, len(jobs)), _context(), _begin_process) as pool:
        try:
            with collection_paused():
                futures = [pool.submit(work, job) for job in jobs]
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise DataError("a process was killed (is there too little memory?); run the command again") from error
        finally:
            pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------ jobs that may crash or hang


def run_apart(
    function: Callable[..., Any], work: Sequence[tuple[Any, ...]], num_workers: int, time_limit: float
) -> Generator[tuple[int, Any], None, None]:
    """Yield (index, ``function(*work[index])``) for each job, in order of completion. If a job fails or its process
    dies, the result is the reason as a string, so ``function`` must not return strings. time_limit: seconds for one
    job."""
    todo = iter(range(len(work)))
    running: dict[Connection, list[Any]] = {}  # pipe -> [process, index, deadline]

    def give(pipe: Connection, process) -> None:
        """Send the next job to a free process, or end the process if no job is left."""
        index = next(todo, None)
        if index is None:
            # Processes that were forked later have open copies of the pipe, so closing it isn't enough.
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
            process.join(5)
            return
        running[pipe] = [process, index, time.monotonic() + time_limit]
        with suppress(OSError):  # if the process is dead, a later read of the pipe fails
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
    context = _context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs, os.getpid()), daemon=True)
    with collection_paused():
        process.start()
    theirs.close()  # otherwise the pipe would stay open when the worker dies
    return ours, process


def _end(pipe: Connection, process: multiprocessing.Process) -> None:
    pipe.close()
    end_processes([process])


def _serve(function: Callable[..., Any], pipe: Connection, parent: int) -> None:
    """Answer each job with the function's result or with the reason for its failure. Runs in a worker process."""
    _begin_process()
    _silence()
    while True:
        # Processes that were forked later may keep the pipe open, so poll for the parent's death.
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
        except Exception as error:  # decoders raise errors of any type
            message = str(error).removeprefix(f"{printable(str(job[0]))}: ")  # remove BadSample's prefix
            lines = [line.strip() for line in message.splitlines() if line.strip()]
            answer = (lines[0] if lines else type(error).__name__)[:200]
        pipe.send(answer)


def _silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
