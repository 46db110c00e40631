"""Which samples a step trains on, and the worker processes that read them.

The order of the samples is a pure function of (seed, step), so a run starts anywhere and sees what it would
have seen, and any number of GPUs and micro-batches cuts the same global batch into parts.
"""

import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from opendit.data.base import BadFileCounter, DataError, Embedding, MediaDataset, Ticket, to_pixels


class BatchSchedule:
    """The rows of every global batch: a fresh seeded permutation each epoch, its remainder left out.

    global_batch: samples of one optimizer step = batch_size x data-parallel ranks x grad_accumulation.
    Raises ValueError if the data set is smaller than that.
    """

    def __init__(self, dataset_size: int, global_batch: int, seed: int):
        if global_batch < 1:
            raise ValueError(f"a global batch needs at least one sample, not {global_batch}")
        if dataset_size < global_batch:
            raise ValueError(
                f"the data set of {dataset_size:,} samples is smaller than one global batch of {global_batch:,} "
                "= batch_size x ranks x grad_accumulation; lower --batch_size or --grad_accumulation"
            )
        self.dataset_size, self.global_batch, self.seed = dataset_size, global_batch, seed
        self.steps_per_epoch = dataset_size // global_batch
        self._order: tuple[int, np.ndarray] | None = None  # the current epoch and its rows in order

    @property
    def micro_batches(self) -> int | None:
        """How many parts a global batch must be cut into; None: any number."""
        return None

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """Data set rows of the global batch of ``step``, in order of position."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._epoch_rows(epoch))
        return self._order[1][batch * self.global_batch : (batch + 1) * self.global_batch].tolist()

    def _epoch_rows(self, epoch: int) -> np.ndarray:
        return np.argsort(self._words(epoch, self.dataset_size), kind="stable")

    def _words(self, epoch: int, count: int) -> np.ndarray:
        # Sorting raw Philox words: their values are frozen by numpy's policy, unlike Generator.permutation's and
        # torch.randperm's, so a run resumes exactly on other versions too.
        key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
        return np.random.Philox(key=key).random_raw(count)


class BucketSchedule(BatchSchedule):
    """A schedule for rows of several shapes: the rows of a micro-batch, over all ranks, are of one shape.

    keys: the shape key of every row. micro_batches: parts of a global batch; position p belongs to part
    p // (global_batch / micro_batches). An epoch deals every shape's rows, freshly shuffled, out to parts, leaves each
    shape's remainder out, and shuffles the parts. Raises ValueError if there are too few rows.
    """

    def __init__(self, keys: Sequence[int] | np.ndarray, global_batch: int, micro_batches: int, seed: int):
        super().__init__(len(keys), global_batch, seed)
        if micro_batches < 1 or global_batch % micro_batches:
            raise ValueError(f"a global batch of {global_batch} can't be cut into {micro_batches} equal micro-batches")
        self._micro_batches, self._part = micro_batches, global_batch // micro_batches
        keys = np.asarray(keys)
        self._buckets = [np.flatnonzero(keys == key) for key in np.unique(keys)]
        self._parts = sum(len(bucket) // self._part for bucket in self._buckets)
        self.steps_per_epoch = self._parts // micro_batches
        if self.steps_per_epoch == 0:
            sizes = ", ".join(f"{len(bucket):,}" for bucket in self._buckets)
            raise ValueError(
                f"a micro-batch of {self._part:,} samples = batch_size x ranks holds one shape; the data set's shapes "
                f"have {sizes} samples, which fill {self._parts} of the {micro_batches} micro-batches of a step; lower "
                "--batch_size or --grad_accumulation"
            )

    @property
    def micro_batches(self) -> int:
        return self._micro_batches

    def _epoch_rows(self, epoch: int) -> np.ndarray:
        words = self._words(epoch, self.dataset_size + self._parts)
        parts = []
        for bucket in self._buckets:
            order = bucket[np.argsort(words[bucket], kind="stable")]
            parts.append(order[: len(order) // self._part * self._part].reshape(-1, self._part))
        order = np.argsort(words[self.dataset_size :], kind="stable")
        return np.concatenate(parts)[order].reshape(-1)


def build_schedule(dataset: MediaDataset, global_batch: int, micro_batches: int, seed: int) -> BatchSchedule:
    """The data set's schedule: in buckets if its samples have several shapes."""
    keys = np.array([dataset.shape_key(row) for row in range(len(dataset))])
    if len(keys) == 0 or (keys == keys[0]).all():
        return BatchSchedule(len(dataset), global_batch, seed)
    return BucketSchedule(keys, global_batch, micro_batches, seed)


@dataclass
class Batch:
    """The samples that one rank processes at once.

    x: (B, C, H, W) or (B, C, T, H, W) float32. y: (B,) int64 classes. text: B captions, or None where the data set's
    conditioning is by label. index: (B,) int64 positions in the global batch, the key of
    all the samples' randomness. micro: which of the step's gradient-accumulation parts this is.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    step: int
    micro: int
    epoch: int
    skipped: tuple[str, ...] = ()
    text: tuple[str, ...] | None = None
    embedding: Embedding | None = None  # of the captions, where it is cached

    def pin_memory(self) -> "Batch":  # what DataLoader calls on a batch of a type of one's own
        embedding = self.embedding and Embedding(*(part.pin_memory() for part in self.embedding))
        x, y, index = (part.pin_memory() for part in (self.x, self.y, self.index))
        return replace(self, x=x, y=y, index=index, embedding=embedding)


@dataclass
class _Request:
    tickets: list[Ticket]
    step: int
    micro: int
    epoch: int


class _Requests:
    """The sampler: what to read, step after step, micro-batch after micro-batch."""

    def __init__(self, schedule, dp_rank, dp_size, batch_size, micro_batches, start_step, end_step):
        self.schedule, self.dp_rank, self.dp_size = schedule, dp_rank, dp_size
        self.batch_size, self.micro_batches = batch_size, micro_batches
        self.start_step, self.end_step = start_step, end_step

    def __iter__(self) -> Iterator[_Request]:
        step = self.start_step
        while self.end_step is None or step < self.end_step:
            rows, epoch = self.schedule.rows(step), self.schedule.epoch(step)
            for micro in range(self.micro_batches):
                first = (micro * self.dp_size + self.dp_rank) * self.batch_size
                tickets = [Ticket(rows[i], step, i) for i in range(first, first + self.batch_size)]
                yield _Request(tickets, step, micro, epoch)
            step += 1


class _BatchReader(Dataset):
    """Turns a request into a batch; runs in the worker processes."""

    def __init__(self, dataset: MediaDataset):
        self.dataset = copy(dataset)
        # A quarter of the memory to fill, stack and hand to the main process: half of the time a small clip takes.
        self.dataset.as_bytes = True

    def __getitem__(self, request: _Request) -> Batch:
        items = self.dataset.__getitems__(request.tickets)
        return Batch(
            x=_stack([item.x for item in items]),
            y=torch.tensor([item.y for item in items], dtype=torch.int64),
            index=torch.tensor([ticket.index for ticket in request.tickets], dtype=torch.int64),
            step=request.step,
            micro=request.micro,
            epoch=request.epoch,
            skipped=tuple(file for item in items for file in item.skipped),
            text=tuple(item.text or "" for item in items) if self.dataset.conditioning == "text" else None,
            embedding=_stack_embeddings([item.embedding for item in items]),
        )


def _stack(parts: list[Tensor]) -> Tensor:
    """``torch.stack`` to contiguous memory, in a worker process into what the main process sees: no copy on the way."""
    first, shape = parts[0], (len(parts), *parts[0].shape)
    out = first.new_empty(0)
    if get_worker_info() is not None:  # as torch's own collate does it
        out.set_(torch.UntypedStorage._new_shared(len(parts) * first.numel() * first.element_size(), device="cpu"))
    return torch.stack(parts, out=out.resize_(shape))


def _stack_embeddings(parts: list[Embedding | None]) -> Embedding | None:
    return None if parts[0] is None else Embedding(*(torch.stack(fields) for fields in zip(*parts, strict=True)))


class ReadAhead:
    """Hands every request of a sequence to ``reader`` in worker processes and yields the results in order.

    The workers are started once, here, and live until the requests or ``close()`` end; 0 workers read in this process.
    """

    def __init__(self, reader: Dataset, requests, *, num_workers: int, pin_memory: bool):
        with warnings.catch_warnings():
            # More workers than cores is right where reading waits for a disk.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(
                reader,
                batch_size=None,  # a request is a whole batch
                sampler=requests,
                num_workers=num_workers,
                collate_fn=_unchanged,
                pin_memory=pin_memory,
                worker_init_fn=_start_worker,
            )
        handler = signal.getsignal(signal.SIGCHLD)
        self._results = iter(loader)
        # torch now raises at whatever line the program is when a worker dies: in the middle of saving, or where Python
        # swallows it. Without its handler the next result asked for raises, within five seconds.
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self):
        """Raises DataError if a worker process died."""
        if self._results is None:
            raise StopIteration
        try:
            return next(self._results)
        except (RuntimeError, OSError, EOFError) as error:
            exits = self._exit_codes()
            if not exits:
                raise
            raise DataError(
                f"a process that reads the data died, exit code {', '.join(map(str, exits))}. Usual causes: out of "
                "memory (-9: lower --num_workers), too small a /dev/shm in a container (-7: raise its size), a damaged "
                "file that crashes its decoder (-11: --num_workers 0 shows where)."
            ) from error

    def _exit_codes(self) -> list[int]:
        """Of the workers that died. A result can outlive its worker and fail to arrive a moment before the death
        shows, so this waits a second for one."""
        workers = getattr(self._results, "_workers", [])
        ending = wait([worker.sentinel for worker in workers], timeout=1)
        for worker in workers:
            if worker.sentinel in ending:  # its files are closed; its exit code follows within moments
                worker.join(timeout=5)
        return sorted({worker.exitcode for worker in workers} - {None, 0})

    def close(self) -> None:
        """Ends the worker processes; may be called twice."""
        results, self._results = self._results, None
        if hasattr(results, "_shutdown_workers"):  # else its last reference, dropped here, does it
            results._shutdown_workers()


def _start_worker(worker: int) -> None:
    """First act of a worker process; torch itself has set it to one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle: it may save first
    warnings.filterwarnings("ignore", module="PIL")  # of large or odd pictures; unusable ones are named anyway


def _unchanged(result):
    return result


class BatchIterator:
    """Yields ``Batch`` after ``Batch``. ``read``: files tried so far; ``skipped``: how many were unreadable."""

    def __init__(self, batches: ReadAhead, counter: BadFileCounter, as_bytes: bool = False):
        self._batches, self._counter, self._as_bytes = batches, counter, as_bytes

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        """Raises DataError if too many files are unreadable or a worker process died."""
        batch = next(self._batches)
        self._counter.add(len(batch.y), batch.skipped)
        return batch if self._as_bytes else replace(batch, x=to_pixels(batch.x))

    @property
    def read(self) -> int:
        return self._counter.read

    @property
    def skipped(self) -> int:
        return self._counter.skipped

    def close(self) -> None:
        """Ends the worker processes; may be called twice."""
        self._batches.close()


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
) -> BatchIterator:
    """The batches of one data-parallel rank, from ``start_step`` to before ``end_step`` (or for ever).

    For every step and micro-batch: positions (micro * dp_size + dp_rank) * batch_size + [0, batch_size) of the
    global batch. The worker processes live until ``close()``; 0 workers read in this process, with the same
    result. ``on_skip`` is told of every unreadable file once; a share of them past ``max_bad`` is a DataError.
    as_bytes: clips stay uint8, a quarter of the bytes to pin and send; ``to_pixels`` makes them float32 on the device.
    """
    if dp_size * batch_size * micro_batches != schedule.global_batch:
        raise ValueError(
            f"{dp_size} ranks x batch size {batch_size} x {micro_batches} micro-batches isn't the schedule's global "
            f"batch of {schedule.global_batch}"
        )
    if schedule.micro_batches not in (None, micro_batches):
        raise ValueError(f"{micro_batches} micro-batches, but the schedule is for {schedule.micro_batches}")
    if schedule.dataset_size != len(dataset):
        raise ValueError(f"the schedule is for {schedule.dataset_size} samples, the data set holds {len(dataset)}")
    requests = _Requests(schedule, dp_rank, dp_size, batch_size, micro_batches, start_step, end_step)
    pin_memory = pin_memory and torch.cuda.is_available()
    batches = ReadAhead(_BatchReader(dataset), requests, num_workers=num_workers, pin_memory=pin_memory)
    return BatchIterator(batches, BadFileCounter(max_bad, on_skip), as_bytes)
