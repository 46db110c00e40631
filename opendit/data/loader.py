"""Prefetch the batches of every step in worker processes, and choose a data set's schedule.

The global batch does not depend on the number of ranks or workers. If a worker dies, runs out of memory or hangs, the
run ends with an error that names the file. The workers end with the main process."""

import ctypes
import itertools
import logging
import math
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import RawArray, util
from multiprocessing.connection import wait
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from opendit.common.utils import collection_paused
from opendit.data.base import (
    BadFileCounter,
    DataError,
    Embedding,
    FirstFrames,
    Item,
    MediaDataset,
    SampleKey,
    SampleReader,
    Small,
    to_pixels,
)
from opendit.data.files import Verification
from opendit.data.order import BatchSchedule, BlendSchedule, BucketSchedule, RowsByKey
from opendit.data.packs import PackSchedule
from opendit.data.processes import (
    end_processes,
    end_with_parent,
    leave_inherited_garbage,
    state_of,
)
from opendit.data.shaped import ShapedDataset

logger = logging.getLogger(__name__)

AHEAD = 2  # batches that each worker prefetches
POLL = 1.0  # seconds between checks of the workers while the main process waits for a batch

# Keeps loaders alive while a thread may hold their tensors. If a thread frees a tensor during interpreter exit, the
# process aborts.
not_ended: list[Any] = []


class ReadAhead:
    """Iterator over ``reader``'s results for a sequence of requests, in order, computed in worker processes.

    Use this as a context manager: the workers live until ``close()``. With 0 workers, the main process reads.

    Args:
        reader: map-style data set from requests to results. It reads rows of the MediaDataset ``reader.dataset``, and
            first calls ``reader.on_read`` with each row.
        requests: iterable of requests.
        patience: seconds that the main process waits for one file before DataError names it; 0 means no limit.
        who: prefix of the warning after half of ``patience``, such as "rank 3: ".
        on_hang: called from another thread with the error's text when a file hangs. With 0 workers, only this callback
            can end a hung read.
    """

    def __init__(
        self,
        reader: Any,
        requests: Any,
        *,
        num_workers: int,
        pin_memory: bool,
        patience: float = 0.0,
        who: str = "",
        on_hang: Callable[[str], None] | None = None,
    ):
        self.dataset, self.patience, self.who = reader.dataset, patience, who
        self.num_workers = num_workers
        self.reading = _Reading(max(1, num_workers))
        reader.on_read = self.reading.begin
        # A worker can end with its parent only if the main thread starts the worker.
        in_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD)
        with collection_paused(), warnings.catch_warnings():
            # torch warns about more workers than cores, but they help if reads wait for a disk.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(
                _Guarded(reader, self.reading) if num_workers else reader,
                batch_size=None,  # a request is one batch
                sampler=requests,
                num_workers=num_workers,
                prefetch_factor=AHEAD if num_workers else None,
                collate_fn=_itself,
                pin_memory=pin_memory,
                worker_init_fn=partial(_start_worker, with_parent=in_main),
            )
            self._results: Any = iter(loader)
        # When a worker dies, torch's SIGCHLD handler would raise anywhere in the main process. With the old handler,
        # the next ``__next__`` raises.
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
        self._workers = list(getattr(self._results, "_workers", []))
        # At exit, end the workers first. Otherwise multiprocessing would wait for workers that ignore its signal.
        self._end = util.Finalize(self, end_processes, args=(self._workers,), exitpriority=10)
        me = weakref.ref(self)
        if num_workers:
            self._results._get_data = lambda: cast(ReadAhead, me())._wait_for_result()
        self._asked: float | None = None  # time at which the main process began to wait
        self._hung = ""  # error text after a read timed out and the workers were killed
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
        """Return the next result. Raises a worker's error, or DataError if a worker died or hung."""
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
        if isinstance(result, Exception):
            raise result
        return result

    def _wait_for_result(self):
        """Poll for a result every second. DataLoader would poll every five seconds."""
        while True:
            arrived, result = self._results._try_get_data(timeout=POLL)
            if arrived:
                return result

    def _give_up(self, late: str) -> None:
        """Kill the workers after a timeout, so that the main process stops waiting. late: describes the timeout."""
        self._hung = _no_data(late, self.patience)
        for worker in self._workers:
            worker.kill()

    def _late(self, seconds: float) -> str:
        """Describe stuck workers, and reads of ``seconds`` or longer; "" if there are none."""
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
        """Raise DataError if a worker died, or was killed after a timeout. Waits up to ``patience`` seconds for an
        exit, because a read may fail before the exit is visible."""
        if self._hung:
            raise DataError(self._hung) from cause
        ending = wait([worker.sentinel for worker in self._workers], timeout=patience) if self._workers else []
        dead = []
        for number, worker in enumerate(self._workers):
            if worker.sentinel in ending:  # the exit code may be known slightly later
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
        """End the workers within seconds, even if they are stuck. May be called twice."""
        results, self._results = self._results, None
        self._closing.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(timeout=1)  # the watcher must not free tensors during exit
        if results is None or not self._workers:
            self.reading.end()
            return
        # torch's shutdown has no timeout, so run it in a thread. Then kill workers that are still alive.
        orderly = threading.Thread(target=shut_down, args=(results,), name="loader end", daemon=True)
        orderly.start()
        orderly.join(timeout=1)
        self._end()
        orderly.join(timeout=1)
        if orderly.is_alive():  # keep the batches alive, because the thread must not free them
            not_ended.append(results)


def shut_down(results: Any) -> None:
    with suppress(Exception):  # torch's queues raise if a worker was just killed
        results._shutdown_workers()


def _watch(reads: "weakref.ref[ReadAhead]", closing: threading.Event, on_hang: Callable[[str], None] | None) -> None:
    """Warn about slow reads, and end the reading after ``patience`` seconds. Runs in a thread."""
    warned = False
    while (ahead := reads()) is not None and not closing.is_set():
        patience, asked = ahead.patience, ahead._asked
        waited = 0.0 if asked is None else time.monotonic() - asked
        if waited < patience / 2:
            warned = False
        elif not warned and (late := ahead._late(patience / 2)):
            logger.warning(f"{ahead.who}note: no data for {waited:.0f} s: {late}; the run ends at {patience:g} s")
            warned = True
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
    """Records each worker's row and the start time of its read, in shared memory. Times are from time.monotonic(), a
    clock that all processes share."""

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
        """Return (row that the worker reads, or None; seconds since the last row began or ended)."""
        row = self._rows[number]
        return None if row < 0 else row, time.monotonic() - self._since[number]

    def here(self) -> int | None:
        worker = get_worker_info()
        return self.at(0 if worker is None else worker.id)[0]


def _failure(error: Exception, where: str) -> Exception:
    """Convert a worker's error to the main process's error, without the worker's traceback. where: " at FILE" or ""."""
    text = " ".join((str(error) or type(error).__name__).split())
    if isinstance(error, DataError | OSError):
        return DataError(text)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return DataError(f"a loader process ran out of memory{where} ({text}); lower --num_workers or --batch_size")
    if "shared memory" in text or "shm" in text or "torch_" in text and "No space left" in text:
        return DataError(
            f"a loader process found too little shared memory{where} ({text}); raise the size of /dev/shm (docker "
            "run --shm-size) or lower --num_workers"
        )
    trace = traceback.format_exc()
    return RuntimeError(f"a loader process failed{where}: {type(error).__name__}: {text}\n\n{trace}")


class _Guarded(Dataset[Any]):
    """Reader that returns its exceptions as results."""

    def __init__(self, reader: Any, reading: _Reading):
        self.reader, self.reading = reader, reading

    def __getitem__(self, request):
        try:
            return self.reader[request]
        except Exception as error:
            row = self.reading.here()
            return _failure(error, "" if row is None else f" at {self.reader.dataset.source(row)}")
        finally:
            self.reading.end()


def _itself(result):  # a lambda can't be pickled for spawned workers
    return result


def _start_worker(worker: int, with_parent: bool) -> None:
    """Set up a worker process. torch has already limited the worker to one thread."""
    leave_inherited_garbage()
    if with_parent:
        end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # only the main process handles these signals
        signal.signal(number, signal.SIG_IGN)
    warnings.filterwarnings("ignore", module="PIL")  # warns about large or odd pictures


@dataclass
class Batch:
    """The samples that one rank processes at once."""

    # (B, C, H, W) or (B, C, T, H, W) float32, or uint8 in any memory format. For packs: B tensors without the B axis,
    # in descending order of tokens.
    x: Tensor | tuple[Tensor, ...]
    y: Tensor  # (B,) int64 classes
    index: Tensor  # (B,) int64 positions in the global batch, the keys of all randomness
    step: int
    micro: int  # number of the micro-batch in the step
    epoch: int
    samples_in_step: int = 0  # over all ranks and micro-batches
    skipped: tuple[str, ...] = ()  # "path: reason" for every replaced unreadable file
    shortened: int = 0  # clips with a smaller frame interval than requested
    bytes_read: int = 0
    text: tuple[str, ...] | None = None  # B captions; None if the conditioning is by label
    embedding: Embedding | None = None
    features: Tensor | None = None  # (B, N, width) float16 cached features of pictures
    first: FirstFrames | None = None  # cached inputs from the clips' first frames
    small: tuple[Small | None, ...] | None = None  # sizes of samples to enlarge on the device
    shared: Tensor | tuple[Tensor, ...] | None = None  # the original of a pinned ``x``

    def __getstate__(self) -> dict[str, Any]:
        """Pickle ``y`` and ``index`` as NumPy arrays, because each tensor would take another message."""
        return {**self.__dict__, "y": self.y.numpy(), "index": self.index.numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, y=torch.from_numpy(state["y"]), index=torch.from_numpy(state["index"]))

    def pin_memory(self) -> "Batch":  # called by DataLoader
        cached = ((name, getattr(self, name)) for name in ("embedding", "first"))
        parts = {name: part and type(part)(*(tensor.pin_memory() for tensor in part)) for name, part in cached}
        x = self.x.pin_memory() if isinstance(self.x, Tensor) else tuple(part.pin_memory() for part in self.x)
        features = None if self.features is None else self.features.pin_memory()
        pinned = dict(x=x, y=self.y.pin_memory(), index=self.index.pin_memory(), features=features, **parts)
        return replace(self, **pinned, shared=self.x)


@dataclass
class _Request:
    sample_keys: list[SampleKey]
    step: int
    micro: int
    epoch: int
    samples_in_step: int = 0  # over all ranks and micro-batches
    packed: bool = False  # True if the samples have various sizes and form one sequence


def requests(
    schedule: BatchSchedule,
    dp_rank: int,
    dp_size: int,
    batch_size: int,
    micro_batches: int,
    start_step: int,
    end_step: int | None,
) -> Iterator[_Request]:
    """Yield the rank's request for each micro-batch, in order of steps. end_step: None means without end."""
    for step in itertools.count(start_step) if end_step is None else range(start_step, end_step):
        rows, epoch = schedule.rows(step), schedule.epoch(step)
        for micro in range(micro_batches):
            share = schedule.share(step, micro, dp_rank, dp_size, batch_size)
            sample_keys = schedule.arranged([SampleKey(rows[i], step, i) for i in share])
            yield _Request(sample_keys, step, micro, epoch, len(rows), schedule.packed)


class _BatchReader(Dataset[Any]):
    def __init__(self, dataset: MediaDataset, enlarge: bool, augment: bool = True):
        self.dataset = dataset
        self.on_read: Callable[[int], None] | None = None
        # uint8 takes a quarter of float32's memory. For a small clip, this saves half of the time.
        self.samples = SampleReader(dataset, as_bytes=True, enlarge=enlarge, augment=augment)
        self.has_text = self.samples.about.conditioning == "text"
        self.buffer = _RingBuffer()

    def __getitem__(self, request: _Request) -> Batch:
        if request.packed:
            return self._packed(request)
        x, items = None, []
        # Each sample is copied to the batch before the next read, so that all clips reuse one buffer. New memory costs
        # 1 ms per clip.
        for i, item in enumerate(self.samples.items(request.sample_keys, self.on_read)):
            x = self.buffer.batch(len(request.sample_keys), _whole_shape(item), item.x) if x is None else x
            _place(item, x[i])
            items.append(item._replace(x=None))
        return self._batch(request, cast(Tensor, x), items)

    def _packed(self, request: _Request) -> Batch:
        items = list(self.samples.items(request.sample_keys, self.on_read))
        shapes = [_whole_shape(item) for item in items]
        ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
        flat = self.buffer.batch(ends[-1], (), items[0].x.new_empty(()))
        parts = []
        for item, shape, start, end in zip(items, shapes, [0, *ends], ends, strict=False):
            parts.append(flat[start:end].view(shape))
            _place(item, parts[-1])
        items = [item._replace(x=None) for item in items]
        return self._batch(request, tuple(parts), items)

    def _batch(self, request: _Request, x: Tensor | tuple[Tensor, ...], items: list[Item]) -> Batch:
        return Batch(
            x=x,
            y=torch.tensor([item.y for item in items], dtype=torch.int64),
            index=torch.tensor([sample_key.index for sample_key in request.sample_keys], dtype=torch.int64),
            step=request.step,
            micro=request.micro,
            epoch=request.epoch,
            samples_in_step=request.samples_in_step,
            skipped=tuple(file for item in items for file in item.skipped),
            shortened=sum(item.shortened for item in items),
            bytes_read=sum(item.bytes_read for item in items),
            text=tuple(item.text or "" for item in items) if self.has_text else None,
            embedding=_stack([item.embedding for item in items]),
            features=None if items[0].features is None else torch.stack([cast(Tensor, i.features) for i in items]),
            first=_stack([item.first for item in items]),
            small=tuple(item.small for item in items) if any(item.small for item in items) else None,
        )


def _whole_shape(item: Item) -> tuple[int, ...]:
    return tuple(item.x.shape) if item.small is None else (*item.x.shape[:-2], *item.whole)


def _place(item: Item, target: Tensor) -> None:
    if item.small is not None:
        target = target[..., : item.small.height, : item.small.width]
    target.copy_(item.x)


class _RingBuffer:
    """Ring of shared memory buffers in which a worker collates its batches.

    New shared memory for every batch would take longer than the copy. A buffer is reused after ``AHEAD`` + 1 batches,
    when the main process has copied the old batch."""

    def __init__(self):
        self.storages: list[torch.UntypedStorage] = []
        self.made = 0
        self.own = OwnMemory()  # used with 0 workers

    def batch(self, count: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialized (count, *shape) tensor with the dtype and memory format of ``like``. ``shape`` and
        ``like`` have equally many axes."""
        order = sorted(range(like.dim()), key=lambda axis: -like.stride(axis))
        out = like.new_empty(0)
        size = count * math.prod(shape) * like.element_size()
        out.set_(self.own.storage(size) if get_worker_info() is None else self._next(size))
        out.resize_(count, *(shape[axis] for axis in order))
        return out.permute(0, *(1 + order.index(axis) for axis in range(like.dim())))

    def _next(self, size: int) -> torch.UntypedStorage:
        place, self.made = self.made % (AHEAD + 1), self.made + 1
        if place == len(self.storages) or self.storages[place].nbytes() < size:
            # Small samples leave gaps in a buffer, and reading unwritten pages is slow. So fill the buffer with zeros.
            storage = torch.UntypedStorage._new_shared(size, device="cpu")
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
            self.storages[place : place + 1] = [storage]
        return self.storages[place]


class OwnMemory:
    """Pool of memory for batches. New memory from the system would cost as much as copying a batch."""

    def __init__(self):
        # (buffer, weak reference to its latest view). A buffer is free if the view is gone.
        self._pieces: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def storage(self, size: int) -> torch.UntypedStorage:
        """Return ``size`` uninitialized bytes that no live storage uses."""
        pieces = self._pieces
        piece = next((piece for piece, view in pieces if view() is None and len(piece) == size), None)
        if piece is None:
            piece = np.empty(size, dtype=np.uint8)
            pieces = [each for each in pieces if each[1]() is not None]  # drop free buffers of other sizes
        view = piece[:]
        self._pieces = [*(each for each in pieces if each[0] is not piece), (piece, weakref.ref(view))]
        return torch.from_numpy(view).untyped_storage()

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy of the dense tensor ``x``."""
        out = x.new_empty(0).set_(self.storage(x.numel() * x.element_size()), 0, x.shape, x.stride())
        return out.copy_(x)


def _stack(parts: Sequence[Any]) -> Any:
    return None if parts[0] is None else type(parts[0])(*map(torch.stack, zip(*parts, strict=True)))


class BatchIterator:
    """Iterator over batches, and a context manager that ends the worker processes.

    Attributes:
        read: number of files tried so far.
        skipped: number of unreadable files among them.
        shortened, bytes_read: sums over the batches.
    """

    def __init__(
        self,
        batches: ReadAhead,
        counter: BadFileCounter,
        as_bytes: bool = False,
        verification: Verification | None = None,
    ):
        self._batches, self._counter, self._as_bytes = batches, counter, as_bytes
        self._own_memory = OwnMemory()
        # Keep the last shared batches mapped, because mapping a batch again costs as much as copying it.
        self._mapped: deque[Tensor] = deque(maxlen=(AHEAD + 1) * max(1, batches.num_workers))
        self.verification = verification
        self.shortened = self.bytes_read = 0

    def __enter__(self) -> "BatchIterator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        """Return the next batch. Raises DataError if too many files fail, a file is damaged, or a worker died or
        hangs."""
        batch = next(self._batches)
        if self.verification is not None:
            self.verification.check()  # starts a thread, so this must follow the forking of workers
        self._counter.add(len(batch.y), batch.skipped)
        self.shortened += batch.shortened
        self.bytes_read += batch.bytes_read
        came = batch.x if batch.shared is None else batch.shared
        came = came if isinstance(came, Tensor) else came[0]
        if came.is_shared():
            self._mapped.append(came)
        if isinstance(batch.x, Tensor):
            return replace(batch, x=self._own(batch.x, self._own_memory.copy), shared=None)
        # Samples in packs have many sizes, so pooled memory would rarely be reused.
        return replace(batch, x=tuple(self._own(part, Tensor.clone) for part in batch.x), shared=None)

    def _own(self, x: Tensor, copied: Callable[[Tensor], Tensor]) -> Tensor:
        x = x if self._as_bytes else to_pixels(x)
        return copied(x) if x.is_shared() else x  # the worker reuses shared memory, see _RingBuffer

    @property
    def read(self) -> int:
        return self._counter.read

    @property
    def skipped(self) -> int:
        return self._counter.skipped

    def close(self) -> None:
        if self.verification is not None:
            self.verification.close()
        self._batches.close()
        self._mapped.clear()


def build_loader(
    dataset: MediaDataset,
    schedule: BatchSchedule,
    *,
    dp_rank: int,
    dp_size: int,
    batch_size: int,
    micro_batches: int = 1,
    start_step: int = 0,
    end_step: int | None = None,
    num_workers: int = 4,
    pin_memory: bool = False,
    max_bad: float = 0.05,
    on_skip: Callable[[str], None] | None = None,
    as_bytes: bool = False,
    enlarge: bool = True,
    patience: float = 0.0,
    who: str = "",
    on_hang: Callable[[str], None] | None = None,
) -> BatchIterator:
    """Return an iterator over one data-parallel rank's batches for the steps [start_step, end_step). An ``end_step`` of
    None means without end.

    In each micro-batch, the rank reads entries (micro * dp_size + dp_rank) * batch_size + [0, batch_size) of the global
    batch. An entry is a sample, a pack, or with ``bucket_tokens`` several samples of one shape.

    Args:
        max_bad: largest tolerated fraction of unreadable files.
        on_skip: called once for every unreadable file, with "path: reason".
        as_bytes: keep clips as uint8 to save memory and time. ``to_pixels`` converts a batch on the device.
        enlarge: if False, the caller must enlarge small clips with ``clips.enlarge``. Needs ``as_bytes``.
        patience, who, on_hang: see ``ReadAhead``.

    Raises ValueError if the schedule doesn't fit the data set, the ranks or the batch size."""
    if dp_size * batch_size * micro_batches != schedule.global_batch:
        raise ValueError(
            f"{dp_size} ranks x batch size {batch_size} x {micro_batches} micro-batches isn't the schedule's global "
            f"batch of {schedule.global_batch}"
        )
    if schedule.micro_batches is not None and schedule.global_batch // schedule.micro_batches % batch_size:
        raise ValueError(
            f"micro-batches of {batch_size} a rank don't lie within the {schedule.micro_batches} parts of one shape "
            f"that the schedule cuts {schedule.global_batch} into"
        )
    if schedule.dataset_size != len(dataset):
        raise ValueError(f"the schedule is for {schedule.dataset_size} samples, the data set holds {len(dataset)}")
    asked = requests(schedule, dp_rank, dp_size, batch_size, micro_batches, start_step, end_step)
    how: dict[str, Any] = dict(num_workers=num_workers, pin_memory=pin_memory and torch.cuda.is_available())
    batches = ReadAhead(
        _BatchReader(dataset, enlarge or not as_bytes), asked, **how, patience=patience, who=who, on_hang=on_hang
    )
    checksums = dataset.fingerprint().checksums
    verification = checksums and checksums.share(dp_rank, dp_size)
    return BatchIterator(batches, BadFileCounter(max_bad, on_skip), as_bytes, verification)


def read_batches(
    dataset: MediaDataset,
    batches: Sequence[Sequence[SampleKey]],
    *,
    max_bad: float = 0.05,
    on_skip: Callable[[str], None] | None = None,
    **how: Any,
) -> BatchIterator:
    """Return an iterator over the samples with these keys, in batches, without augmentation. Pixels stay uint8.

    All samples in a batch must have one step and one shape. how: arguments of ``ReadAhead``."""
    asked = [_Request(list(keys), keys[0].step, 0, 0) for keys in batches]
    read = ReadAhead(_BatchReader(dataset, enlarge=True, augment=False), asked, pin_memory=False, **how)
    return BatchIterator(read, BadFileCounter(max_bad, on_skip), as_bytes=True)


def build_schedule(
    dataset: MediaDataset,
    global_batch: int,
    micro_batches: int,
    seed: int,
    *,
    bucket_tokens: int | None = None,
    pack_tokens: int | None = None,
    caption_tokens: int = 0,
    attention: float = float("inf"),
) -> BatchSchedule:
    """Return a data set's schedule.

    The schedule is a ``PackSchedule`` with ``pack_tokens``, a ``BlendSchedule`` for weighted sources, a
    ``BucketSchedule`` for several shapes or with ``bucket_tokens``, or else a ``BatchSchedule``.

    Args:
        bucket_tokens: maximum tokens in an entry with samples of one shape. Needs a ``ShapedDataset``.
        pack_tokens: maximum tokens in a pack with samples of any shapes. Needs a ``ShapedDataset``.
        caption_tokens: tokens that each sample's caption adds to a pack.
        attention: see ``PackSchedule``.

    Raises ValueError if there are too few samples."""
    shaped, sources = cast(ShapedDataset, dataset), dataset.describe().sources
    if pack_tokens is not None:
        tokens = shaped.token_counts(caption_tokens)
        return PackSchedule(tokens, pack_tokens, global_batch, seed, sources=sources, attention=attention)
    keys, samples = dataset.shapes().array, None
    shapes = None if keys is None or (sources and bucket_tokens is None) else RowsByKey(keys)
    if shapes is not None and bucket_tokens is not None:
        samples = [bucket_tokens // int(shaped.tokens[key]) for key in shapes.values]
    if sources is not None:
        return BlendSchedule(sources, global_batch, micro_batches, seed, keys, samples)
    if shapes is None or (samples is None and len(shapes.values) < 2):
        return BatchSchedule(len(dataset), global_batch, seed)
    return BucketSchedule(shapes, global_batch, micro_batches, seed, samples)
