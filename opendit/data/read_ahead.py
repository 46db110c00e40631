"""Worker processes that read ahead: watched while they read, and ended whatever happens to the process that asks.

A worker can die, run out of memory or hang, and the process it reads for can fail or be killed. In every case the
outcome is one error that names the file, and no process is left.
"""

import ctypes
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import RawArray, util
from multiprocessing.connection import wait
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from opendit.data.base import DataError, MediaDataset
from opendit.data.processes import (
    collection_paused,
    end_processes,
    end_with_parent,
    leave_inherited_garbage,
    state_of,
)

AHEAD = 2  # batches that a worker process is asked for before the first of them is taken
POLL = 1.0  # seconds between two looks at the workers while a batch is awaited

# A thread that frees a tensor while the interpreter ends aborts the process ("terminate called without an active
# exception"): what such a thread may still have is kept for ever.
not_ended: list[Any] = []


class ReadAhead:
    """Hands every request of a sequence to ``reader`` in worker processes and yields the results in order.

    A context manager. The workers are started once, here, and live until ``close()``; 0 workers read in this process.

    Args:
        reader: turns a request into a result; its ``dataset`` is the MediaDataset that it reads.
        requests: what to read, an iterable.
        patience: seconds that a single file may take while its batch is awaited, before DataError names it; 0: any.
        log: is told, at half of them, which file it is.
        on_hang: of 0 workers, where nothing can interrupt a read: called with the error's text, by another thread.
    """

    def __init__(
        self,
        reader: Any,
        requests: Any,
        *,
        num_workers: int,
        pin_memory: bool,
        patience: float = 0.0,
        log: Callable[[str], None] | None = None,
        on_hang: Callable[[str], None] | None = None,
    ):
        self.dataset, self.patience, self.log = reader.dataset, patience, log
        self.num_workers = num_workers
        self.reading = _Reading(max(1, num_workers))
        reader.dataset.on_read = self.reading.begin
        # A process that this one's main thread starts can be told to end with it.
        in_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD)
        with collection_paused(), warnings.catch_warnings():
            # More workers than cores is right where reading waits for a disk. (torch says so when a loader is made, and
            # some versions when it starts.)
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(
                _Guarded(reader, self.reading) if num_workers else reader,
                batch_size=None,  # a request is a whole batch
                sampler=requests,
                num_workers=num_workers,
                prefetch_factor=AHEAD if num_workers else None,
                collate_fn=_unchanged,
                pin_memory=pin_memory,
                worker_init_fn=partial(_start_worker, with_parent=in_main),
            )
            self._results: Any = iter(loader)
        # torch now raises at whatever line the program is when a worker dies: in the middle of saving, or where Python
        # swallows it. Without its handler the next result asked for raises.
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
        self._workers = list(getattr(self._results, "_workers", []))
        # Before multiprocessing's own exit, which asks its processes to end, by a signal that these ignore, and waits.
        self._end = util.Finalize(self, end_processes, args=(self._workers,), exitpriority=10)
        me = weakref.ref(self)
        if num_workers:
            self._results._get_data = lambda: cast(ReadAhead, me())._wait_for_result()
        self._asked: float | None = None  # since when the main process waits for a result
        self._hung = ""  # why the workers were given up
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=_watch, args=(me, self._closing, on_hang), name="reading", daemon=True)
        if patience:
            self._watcher.start()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self) -> Any:
        """Raises DataError if a worker process died or hangs, or says what else went wrong in it."""
        if self._results is None:
            raise StopIteration
        if self._workers and wait([worker.sentinel for worker in self._workers], timeout=0):
            self._check_deaths(patience=0)
        self._asked = time.monotonic()
        try:
            result = next(self._results)
        except (RuntimeError, OSError, EOFError) as error:
            if not isinstance(error, DataError):
                self._check_deaths(patience=1, cause=error)
            raise
        finally:
            self._asked = None
            if not self._workers:
                self.reading.end()
        if isinstance(result, _Failed):
            raise result.error(self.dataset)
        return result

    def _wait_for_result(self):
        """In place of DataLoader's own wait, which looks only every five seconds whether its workers live."""
        while True:
            arrived, result = self._results._try_get_data(timeout=POLL)
            if arrived:
                return result

    def _give_up(self, late: str) -> None:
        """Ends the workers because of what is late. The main process may be in the middle of taking a result over from
        one of them, where only that worker's end wakes it."""
        self._hung = _no_data(late, self.patience)
        for worker in self._workers:
            worker.kill()

    def _late(self, seconds: float) -> str:
        """Name the files that have been read for ``seconds``, and their readers; or, if nothing moves though no file is
        read, the worker that is stopped. Empty if there is progress."""
        if not self._workers:
            row, took = self.reading.at(0)
            return "" if row is None or took < seconds else f"{self.dataset.source(row)} has been read for {took:.0f} s"
        late, idle = [], 0
        for number, worker in enumerate(self._workers):
            row, took = self.reading.at(number)
            if took < seconds:
                continue
            state = state_of(worker.pid)
            name = f"loader process {worker.pid}{f' ({state})' if state else ''}"
            if row is not None:
                late.append(f"{name} has been reading {self.dataset.source(row)} for {took:.0f} s")
            else:
                idle += 1
                late += [f"{name} does not go on"] if state else []
        if not late and idle == len(self._workers):
            late = ["the loader processes do nothing"]
        return "; ".join(late)

    def _check_deaths(self, patience: float, cause: Exception | None = None) -> None:
        """Raises DataError if a worker died. A result can outlive its worker and fail to arrive a moment before the
        death shows, so this waits up to ``patience`` seconds for one."""
        if self._hung:
            raise DataError(self._hung) from cause
        ending = wait([worker.sentinel for worker in self._workers], timeout=patience) if self._workers else []
        dead = []
        for number, worker in enumerate(self._workers):
            if worker.sentinel in ending:  # its files are closed; its exit code follows within moments
                worker.join(timeout=5)
            if worker.exitcode not in (None, 0):
                row, _ = self.reading.at(number)
                where = "" if row is None else f" while it read {self.dataset.source(row)}"
                dead.append(f"exit code {worker.exitcode}{where}")
        if dead:
            raise DataError(
                f"a process that reads the data died, {', '.join(dict.fromkeys(dead))}; usual causes: out of "
                "memory (-9: lower --num_workers), too small a /dev/shm in a container (-7: raise its size), a damaged "
                "file that crashes its decoder (-11: --num_workers 0 shows where)"
            ) from cause

    def close(self) -> None:
        """Ends the worker processes, within seconds even if they are stuck; may be called twice."""
        results, self._results = self._results, None
        self._closing.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(timeout=1)  # it must not free the batches either; it may be ending the program itself
        if results is None or not self._workers:
            self.reading.end()
            return
        # In a thread, for torch's waits are not bounded: workers that answer end at once, the others are killed.
        orderly = threading.Thread(target=shut_down, args=(results,), name="loader end", daemon=True)
        orderly.start()
        orderly.join(timeout=1)
        self._end()
        orderly.join(timeout=1)
        if orderly.is_alive():  # on a busy machine; it must not be the one that frees the batches
            not_ended.append(results)


def shut_down(results: Any) -> None:
    with suppress(Exception):  # of queues whose other end was just killed
        results._shutdown_workers()


def _watch(reads: "weakref.ref[ReadAhead]", closing: threading.Event, on_hang: Callable[[str], None] | None) -> None:
    """The thread that loses patience."""
    told = False
    while (ahead := reads()) is not None and not closing.is_set():
        patience, asked = ahead.patience, ahead._asked
        waited = 0.0 if asked is None else time.monotonic() - asked
        if waited < patience / 2:
            told = False
        elif not told and ahead.log and (late := ahead._late(patience / 2)):
            ahead.log(f"note: no data for {waited:.0f} s: {late}; the run ends at {patience:g} s")
            told = True
        if waited >= patience and (late := ahead._late(patience)):
            if ahead._workers:
                ahead._give_up(late)
                closing.wait(5)
            if on_hang is not None and ahead._asked is not None and ahead._asked == asked:
                on_hang(_no_data(late, patience))
            return
        pause = min(POLL, patience / 4)
        del ahead
        closing.wait(pause)


def _no_data(late: str, patience: float) -> str:
    return (
        f"no data came for {patience:g} s (--data_timeout): {late}. Is its disk or network alive? A larger "
        "--data_timeout waits longer, 0 for ever"
    )


class _Reading:
    """The row that each worker reads, in memory that the main process sees: two numbers a worker, written at every
    file. Times are time.monotonic(), one clock for all processes of a machine."""

    def __init__(self, workers: int):
        self._rows, self._since = RawArray(ctypes.c_int64, workers), RawArray(ctypes.c_double, workers)
        for number in range(workers):
            self._rows[number], self._since[number] = -1, time.monotonic()

    def begin(self, row: int) -> None:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        self._rows[number], self._since[number] = row, time.monotonic()

    def end(self) -> None:
        self.begin(-1)

    def at(self, number: int) -> tuple[int | None, float]:
        """(the row that a worker reads or None, seconds since it began or ended to read)."""
        row = self._rows[number]
        return None if row < 0 else row, time.monotonic() - self._since[number]

    def here(self) -> int | None:
        """The row that this process reads."""
        worker = get_worker_info()
        return self.at(0 if worker is None else worker.id)[0]


@dataclass
class _Failed:
    """An exception of a worker process: DataLoader would raise it with the worker's traceback as its text."""

    kind: str  # "data", "memory", "shm", or "bug"
    text: str
    row: int | None
    trace: str

    @staticmethod
    def of(error: Exception, row: int | None) -> "_Failed":
        text = str(error) or type(error).__name__
        if isinstance(error, DataError | OSError):
            return _Failed("data", text, row, "")
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
            return _Failed("memory", text, row, "")
        if "shared memory" in text or "shm" in text or "torch_" in text and "No space left" in text:
            return _Failed("shm", text, row, "")
        return _Failed("bug", f"{type(error).__name__}: {text}", row, traceback.format_exc())

    def error(self, dataset: MediaDataset) -> Exception:
        """Return the error that the main process raises."""
        where = "" if self.row is None else f" at {dataset.source(self.row)}"
        text = " ".join(self.text.split())
        if self.kind == "data":
            return DataError(text)
        if self.kind == "memory":
            return DataError(f"a loader process ran out of memory{where} ({text}); lower --num_workers or --batch_size")
        if self.kind == "shm":
            return DataError(
                f"a loader process found too little shared memory{where} ({text}); raise the size of /dev/shm (docker "
                "run --shm-size) or lower --num_workers"
            )
        error = RuntimeError(f"a loader process failed{where}: {text}")
        error.__cause__ = _WorkerTraceback(self.trace)
        return error


class _WorkerTraceback(Exception):
    """Stands as the cause of an error of another process, whose traceback is its text."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


class _Guarded(Dataset[Any]):
    """A reader whose exceptions come back as results."""

    def __init__(self, reader: Dataset[Any], reading: _Reading):
        self.reader, self.reading = reader, reading

    def __getitem__(self, request):
        try:
            return self.reader[request]
        except Exception as error:
            return _Failed.of(error, self.reading.here())
        finally:
            self.reading.end()


def _start_worker(worker: int, with_parent: bool) -> None:
    """First act of a worker process; torch itself has set it to one thread."""
    leave_inherited_garbage()
    if with_parent:
        end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the main process's to handle: it may save first
        signal.signal(number, signal.SIG_IGN)
    warnings.filterwarnings("ignore", module="PIL")  # of large or odd pictures; unusable ones are named anyway


def _unchanged(result):
    return result
