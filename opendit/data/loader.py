"""Which samples a step trains on, and the worker processes that read them.

The order of the samples is a pure function of (seed, step), so a run starts anywhere and sees what it would
have seen, and any number of GPUs and micro-batches cuts the same global batch into parts.
"""

import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from opendit.data.base import BadFileCounter, DataError, MediaDataset, Ticket


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
        self._order: tuple[int, np.ndarray] | None = None  # the current epoch and its permutation

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """Data set rows of the global batch of ``step``, in order of position."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        return self._order[1][batch * self.global_batch : (batch + 1) * self.global_batch].tolist()

    def _permutation(self, epoch: int) -> np.ndarray:
        # Sorting raw Philox words: their values are frozen by numpy's policy, unlike Generator.permutation's and
        # torch.randperm's, so a run resumes exactly on other versions too.
        key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(self.dataset_size), kind="stable")


@dataclass
class Batch:
    """The samples that one rank processes at once.

    x: (B, C, H, W) float32. y: (B,) int64 classes. index: (B,) int64 positions in the global batch, the key of
    all the samples' randomness. micro: which of the step's gradient-accumulation parts this is.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    step: int
    micro: int
    epoch: int
    skipped: tuple[str, ...] = ()

    def pin_memory(self) -> "Batch":  # what DataLoader calls on a batch of a type of one's own
        return replace(self, x=self.x.pin_memory(), y=self.y.pin_memory(), index=self.index.pin_memory())


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
        self.dataset = dataset

    def __getitem__(self, request: _Request) -> Batch:
        items = self.dataset.__getitems__(request.tickets)
        return Batch(
            x=torch.stack([item.x for item in items]),
            y=torch.tensor([item.y for item in items], dtype=torch.int64),
            index=torch.tensor([ticket.index for ticket in request.tickets], dtype=torch.int64),
            step=request.step,
            micro=request.micro,
            epoch=request.epoch,
            skipped=tuple(file for item in items for file in item.skipped),
        )


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

    def __init__(self, batches: ReadAhead, counter: BadFileCounter):
        self._batches, self._counter = batches, counter

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        """Raises DataError if too many files are unreadable or a worker process died."""
        batch = next(self._batches)
        self._counter.add(len(batch.y), batch.skipped)
        return batch

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
) -> BatchIterator:
    """The batches of one data-parallel rank, from ``start_step`` to before ``end_step`` (or for ever).

    For every step and micro-batch: positions (micro * dp_size + dp_rank) * batch_size + [0, batch_size) of the
    global batch. The worker processes live until ``close()``; 0 workers read in this process, with the same
    result. ``on_skip`` is told of every unreadable file once; a share of them past ``max_bad`` is a DataError.
    """
    if dp_size * batch_size * micro_batches != schedule.global_batch:
        raise ValueError(
            f"{dp_size} ranks x batch size {batch_size} x {micro_batches} micro-batches isn't the schedule's global "
            f"batch of {schedule.global_batch}"
        )
    if schedule.dataset_size != len(dataset):
        raise ValueError(f"the schedule is for {schedule.dataset_size} samples, the data set holds {len(dataset)}")
    requests = _Requests(schedule, dp_rank, dp_size, batch_size, micro_batches, start_step, end_step)
    pin_memory = pin_memory and torch.cuda.is_available()
    batches = ReadAhead(_BatchReader(dataset), requests, num_workers=num_workers, pin_memory=pin_memory)
    return BatchIterator(batches, BadFileCounter(max_bad, on_skip))
