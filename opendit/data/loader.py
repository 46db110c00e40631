"""Read the samples of a step: any number of ranks, micro-batches and worker processes divides the same global
batch."""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from opendit.data.base import BadFileCounter, Embedding, Item, MediaDataset, SampleKey, to_pixels
from opendit.data.enlarging import Small
from opendit.data.order.schedule import BatchSchedule
from opendit.data.read_ahead import AHEAD, ReadAhead
from opendit.data.verification import Verification


@dataclass
class Batch:
    """The samples that one rank processes at once.

    x: (B, C, H, W) or (B, C, T, H, W) float32, or uint8 in any order of memory; of packs a tuple of B such tensors
    without the B, each of its own size, the ones with the most tokens first. segments_in_step: samples of the step, of
    all ranks and micro-batches. weights: (B,) float32 of the samples' losses, None for 1. y: (B,) int64 classes. text:
    B captions, or None where the data set's conditioning is by label. index: (B,) int64 positions in the global batch,
    the key of all the samples' randomness. micro: which of the step's gradient-accumulation parts this is. skipped:
    "path: reason" of the unreadable files met. shortened: clips read at a smaller interval than asked for. bytes_read:
    what the samples take of files and tars. small: what ``enlarge`` still has to do with ``x`` where the loader leaves
    it to the device; None where nothing is left.
    """

    x: Tensor | tuple[Tensor, ...]
    y: Tensor
    index: Tensor
    step: int
    micro: int
    epoch: int
    segments_in_step: int = 0
    weights: Tensor | None = None
    skipped: tuple[str, ...] = ()
    shortened: int = 0
    bytes_read: int = 0
    text: tuple[str, ...] | None = None
    embedding: Embedding | None = None  # of the captions, where it is cached
    small: tuple[Small | None, ...] | None = None
    shared: Tensor | tuple[Tensor, ...] | None = None  # of a pinned batch: ``x`` as the worker shares it

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a worker's batch: samples stay in shared memory, and small parts become arrays in the message, because
        each tensor would cost another message."""
        return {**self.__dict__, "y": self.y.numpy(), "index": self.index.numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, y=torch.from_numpy(state["y"]), index=torch.from_numpy(state["index"]))

    def pin_memory(self) -> "Batch":  # what DataLoader calls on a batch of a type of one's own
        embedding = self.embedding and Embedding(*(part.pin_memory() for part in self.embedding))
        x = self.x.pin_memory() if isinstance(self.x, Tensor) else tuple(part.pin_memory() for part in self.x)
        pinned = dict(x=x, y=self.y.pin_memory(), index=self.index.pin_memory(), embedding=embedding)
        return replace(self, **pinned, shared=self.x)


@dataclass
class _Request:
    sample_keys: list[SampleKey]
    step: int
    micro: int
    epoch: int
    samples: int = 0  # of the step
    packed: bool = False  # samples of any sizes, in one sequence


class Requests:
    """The sampler: what to read, step after step, micro-batch after micro-batch."""

    def __init__(
        self,
        schedule: Any,
        dp_rank: int,
        dp_size: int,
        batch_size: int,
        micro_batches: int,
        start_step: int,
        end_step: int | None,
    ):
        self.schedule, self.dp_rank, self.dp_size = schedule, dp_rank, dp_size
        self.batch_size, self.micro_batches = batch_size, micro_batches
        self.start_step, self.end_step = start_step, end_step

    def __iter__(self) -> Iterator[_Request]:
        step = self.start_step
        while self.end_step is None or step < self.end_step:
            schedule, rows, epoch = self.schedule, self.schedule.rows(step), self.schedule.epoch(step)
            for micro in range(self.micro_batches):
                share = schedule.share(step, micro, self.dp_rank, self.dp_size, self.batch_size)
                sample_keys = schedule.arranged([SampleKey(rows[i], step, i) for i in share])
                yield _Request(sample_keys, step, micro, epoch, len(rows), schedule.packed)
            step += 1


class _BatchReader(Dataset[Any]):
    """Turns a request into a batch; runs in the worker processes."""

    def __init__(self, dataset: MediaDataset, enlarge: bool):
        self.dataset = copy(dataset)
        # A quarter of the memory to fill, stack and hand to the main process: half of the time a small clip takes.
        self.dataset.as_bytes = True
        self.dataset.enlarges = enlarge
        self.buffer = _RingBuffer()

    def __getitem__(self, request: _Request) -> Batch:
        if request.packed:
            return self._packed(request)
        before, x, items = self._counts(), None, []
        # Each sample moves to the batch before the next is read: memory of one clip is used over and over, that of all
        # of them would go back to the kernel and be asked for again, 1 ms a clip.
        for i, item in enumerate(self.dataset.items(request.sample_keys)):
            x = self.buffer.batch(len(request.sample_keys), _whole_shape(item), item.x) if x is None else x
            _place(item, x[i])
            items.append(item._replace(x=None))
        return self._batch(request, cast(Tensor, x), items, before)

    def _packed(self, request: _Request) -> Batch:
        """Samples of any sizes: one after the other in one piece of memory, of which the batch has views."""
        before, items = self._counts(), list(self.dataset.items(request.sample_keys))
        shapes = [_whole_shape(item) for item in items]
        ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
        flat = self.buffer.batch(ends[-1], (), items[0].x.new_empty(()))
        parts = []
        for item, shape, start, end in zip(items, shapes, [0, *ends], ends, strict=False):
            parts.append(flat[start:end].view(shape))
            _place(item, parts[-1])
        items = [item._replace(x=None) for item in items]
        return self._batch(request, tuple(parts), items, before)

    def _counts(self) -> tuple[int, int]:
        return self.dataset.shortened, self.dataset.bytes_read

    def _batch(
        self, request: _Request, x: Tensor | tuple[Tensor, ...], items: list[Item], before: tuple[int, int]
    ) -> Batch:
        shortened, bytes_read = (now - then for now, then in zip(self._counts(), before, strict=True))
        return Batch(
            x=x,
            y=torch.tensor([item.y for item in items], dtype=torch.int64),
            index=torch.tensor([sample_key.index for sample_key in request.sample_keys], dtype=torch.int64),
            step=request.step,
            micro=request.micro,
            epoch=request.epoch,
            segments_in_step=request.samples,
            skipped=tuple(file for item in items for file in item.skipped),
            shortened=shortened,
            bytes_read=bytes_read,
            text=tuple(item.text or "" for item in items) if self.dataset.conditioning == "text" else None,
            embedding=_stack_embeddings([item.embedding for item in items]),
            small=tuple(item.small for item in items) if any(item.small for item in items) else None,
        )


def _whole_shape(item: Item) -> tuple[int, ...]:
    return tuple(item.x.shape) if item.small is None else (*item.x.shape[:-2], *item.whole)


def _place(item: Item, target: Tensor) -> None:
    """Copies a sample to its place in a batch, a small one to the upper left corner of it."""
    if item.small is not None:
        target = target[..., : item.small.height, : item.small.width]
    target.copy_(item.x)


class _RingBuffer:
    """The memory that batches are collated in: a worker's ring buffer, which it shares with the main process.

    New shared memory for every batch costs the kernel more than the copy: 2.3 ms of the 7 that a clip of 16 x 256 x 256
    takes. A worker makes a batch when it is asked to, and it is asked for batch n + ``AHEAD`` only once the main
    process has batch n, which it copies before it asks for more (``BatchIterator``): so batch n + ``AHEAD`` + 1 may
    take n's place.
    """

    def __init__(self):
        self.storages: list[torch.UntypedStorage] = []
        self.made = 0
        self.own = OwnMemory()  # of a process that reads for itself

    def batch(self, count: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """(count, *shape), not filled, in the type and the order of memory of ``like``, which has as many axes: clips
        have their colours next to each other, and to sort them takes longer than to copy them."""
        order = sorted(range(like.dim()), key=lambda axis: -like.stride(axis))
        out = like.new_empty(0)
        size = count * math.prod(shape) * like.element_size()
        out.set_(self.own.storage(size) if get_worker_info() is None else self._next(size))
        out.resize_(count, *(shape[axis] for axis in order))
        return out.permute(0, *(1 + order.index(axis) for axis in range(like.dim())))

    def _next(self, size: int) -> torch.UntypedStorage:
        place, self.made = self.made % (AHEAD + 1), self.made + 1
        if place == len(self.storages) or self.storages[place].nbytes() < size:
            # Filled once, for small samples leave gaps: what was never written is slow to read.
            storage = torch.UntypedStorage._new_shared(size, device="cpu")
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
            self.storages[place : place + 1] = [storage]
        return self.storages[place]


class OwnMemory:
    """Memory that is used over and over: what is freed between two batches goes back to the system, and to be given it
    again costs as much as to copy a batch."""

    def __init__(self):
        # Each piece, and the view of it that the storage which was made last holds for as long as it is used itself.
        self._pieces: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def storage(self, size: int) -> torch.UntypedStorage:
        """``size`` bytes, not filled, that no other storage shares."""
        pieces = self._pieces
        piece = next((piece for piece, view in pieces if view() is None and len(piece) == size), None)
        if piece is None:
            piece = np.empty(size, dtype=np.uint8)
            pieces = [each for each in pieces if each[1]() is not None]  # what is free is of another size
        view = piece[:]
        self._pieces = [*(each for each in pieces if each[0] is not piece), (piece, weakref.ref(view))]
        return torch.from_numpy(view).untyped_storage()

    def copy(self, x: Tensor) -> Tensor:
        """``x``, which has no gaps, in memory of its own."""
        out = x.new_empty(0).set_(self.storage(x.numel() * x.element_size()), 0, x.shape, x.stride())
        return out.copy_(x)


def _stack_embeddings(parts: list[Embedding | None]) -> Embedding | None:
    return None if parts[0] is None else Embedding(*(torch.stack(fields) for fields in zip(*parts, strict=True)))


class BatchIterator:
    """Yields ``Batch`` after ``Batch``; a context manager, which ends its worker processes.

    read: files tried so far. skipped: how many were unreadable. shortened: how many clips were read at a smaller
    interval than asked for. bytes_read: what the samples took of files and tars."""

    def __init__(
        self,
        batches: ReadAhead,
        counter: BadFileCounter,
        as_bytes: bool = False,
        verification: Verification | None = None,
    ):
        self._batches, self._counter, self._as_bytes = batches, counter, as_bytes
        self._own_memory = OwnMemory()
        # The last batches as the workers share them: to map their memory anew for every batch costs as much as to copy.
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
        """Raises DataError if too many files are unreadable, a worker process died or hangs, or a file of the data set
        was found to be damaged."""
        batch = next(self._batches)
        if self.verification is not None:
            self.verification.check()  # only now: its thread starts after the worker processes
        self._counter.add(len(batch.y), batch.skipped)
        self.shortened += batch.shortened
        self.bytes_read += batch.bytes_read
        came = batch.x if batch.shared is None else batch.shared
        came = came if isinstance(came, Tensor) else came[0]
        if came.is_shared():
            self._mapped.append(came)
        if isinstance(batch.x, Tensor):
            return replace(batch, x=self._own(batch.x, self._own_memory.copy), shared=None)
        # Of a pack no two samples may have one size, nor any of the next: their memory could hardly be used again.
        return replace(batch, x=tuple(self._own(part, Tensor.clone) for part in batch.x), shared=None)

    def _own(self, x: Tensor, copied: Callable[[Tensor], Tensor]) -> Tensor:
        x = x if self._as_bytes else to_pixels(x)
        return copied(x) if x.is_shared() else x  # the worker writes there again, see _RingBuffer

    @property
    def read(self) -> int:
        return self._counter.read

    @property
    def skipped(self) -> int:
        return self._counter.skipped

    def close(self) -> None:
        """Ends the worker processes and the verification; may be called twice."""
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
    log: Callable[[str], None] | None = None,
    on_hang: Callable[[str], None] | None = None,
) -> BatchIterator:
    """The batches of one data-parallel rank, from ``start_step`` to before ``end_step`` (or for ever).

    For every step and micro-batch: units (micro * dp_size + dp_rank) * batch_size + [0, batch_size) of the global
    batch. The worker processes live until ``close()``; 0 workers read in this process, with the same
    result. ``on_skip`` is told of every unreadable file once; a share of them past ``max_bad`` is a DataError.
    as_bytes: clips stay uint8, a quarter of the bytes to pin and send; ``to_pixels`` makes them float32 on the device.
    enlarge: False leaves clips that are smaller than asked for to ``enlarging.enlarge``; it goes with as_bytes.
    patience, log, on_hang: of a file that takes for ever, see ``ReadAhead``.
    """
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
    if not (enlarge or as_bytes):
        raise ValueError("clips can be left to be enlarged as bytes only")
    if schedule.dataset_size != len(dataset):
        raise ValueError(f"the schedule is for {schedule.dataset_size} samples, the data set holds {len(dataset)}")
    requests = Requests(schedule, dp_rank, dp_size, batch_size, micro_batches, start_step, end_step)
    how: dict[str, Any] = dict(num_workers=num_workers, pin_memory=pin_memory and torch.cuda.is_available())
    batches = ReadAhead(_BatchReader(dataset, enlarge), requests, **how, patience=patience, log=log, on_hang=on_hang)
    return BatchIterator(batches, BadFileCounter(max_bad, on_skip), as_bytes, dataset.verification(dp_rank, dp_size))


def read_batches(
    dataset: MediaDataset,
    batches: Sequence[Sequence[SampleKey]],
    *,
    max_bad: float = 0.05,
    on_skip: Callable[[str], None] | None = None,
    **how: Any,
) -> BatchIterator:
    """The batches of these samples in order, pixels of 8 bits as bytes; those of one batch are of one step and shape.

    how: of ``ReadAhead``: num_workers, patience, log, on_hang. max_bad, on_skip: as of :func:`build_loader`.
    """
    requests = [_Request(list(keys), keys[0].step, 0, 0) for keys in batches]
    read = ReadAhead(_BatchReader(dataset, enlarge=True), requests, pin_memory=False, **how)
    return BatchIterator(read, BadFileCounter(max_bad, on_skip), as_bytes=True)
