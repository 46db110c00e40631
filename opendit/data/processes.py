"""Processes that read for another one: none outlives it, and none holds its end up."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from opendit.common.utils import DataError

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Around the start of processes that may be forked: they begin without collection of garbage, and
    ``leave_inherited_garbage`` begins it.

    A forked process inherits this one's garbage but not its threads. To collect an object that ends a thread, such as a
    process group or a store of torch.distributed, waits there for ever or crashes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def leave_inherited_garbage() -> None:
    """First act of a process started under ``collection_paused``: only what it makes itself is ever collected."""
    gc.freeze()
    gc.enable()


def end_with_parent() -> None:
    """First act of such a process: from now on it ends when its parent does, also if that is killed.

    The kernel sees to it (on Linux), also while this process is stopped or stuck in a read. Where it was not forked by
    its parent itself but by Python's fork server, a thread does. Call this only in a process that its parent's main
    thread started: the kernel means the thread, not the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_follow, args=(parent,), name="parent", daemon=True).start()


def _follow(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def end_processes(processes: Sequence[BaseProcess], patience: float = 5.0) -> None:
    """Kills processes that hold nothing that must be put away, and waits for their end, ``patience`` seconds in all:
    one that the kernel can't end yet, because it waits for a dead network disk, is left behind."""
    for process in processes:
        process.kill()
    until = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))


def state_of(pid: int) -> str:
    """Return a process's state if it matters: ``stopped`` or ``waiting for a disk``; otherwise an empty string."""
    with contextlib.suppress(OSError, IndexError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return {"T": "stopped", "t": "stopped", "D": "waiting for a disk"}.get(letter, "")
    return ""


def _begin_process() -> None:
    leave_inherited_garbage()
    end_with_parent()


def in_processes(work: Callable[..., Any], jobs: Sequence[Any], count: int) -> Iterator[Any]:
    """``work(job)`` of every job as they are done; the first error ends all.

    Raises it, and DataError of a process that was killed."""
    if min(count, len(jobs)) <= 1:
        yield from map(work, jobs)
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    with ProcessPoolExecutor(min(count, len(jobs)), context, _begin_process) as pool:
        try:
            with collection_paused():
                futures = [pool.submit(work, job) for job in jobs]
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise DataError("a process was killed (is there too little memory?); run the command again") from error
        finally:
            pool.shutdown(cancel_futures=True)
