"""Distribute batches over replicas, and decode latents while the model draws the next batch.

On a GPU the VAE decodes on a side stream, and pictures reach the host through pinned memory. Threads encode and write
the files. On a CPU only these threads run concurrently."""

import contextlib
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from opendit.common.progress import Progress
from opendit.common.stages import Stages
from opendit.config.parallel_sizes import find_place
from opendit.encoders.pictures import to_bytes
from opendit.encoders.vae import Codec, FrozenVAE, Tiles
from opendit.encoders.video_vae import FrameCodec, frames_of
from opendit.parallel.collectives import Group, start_gather
from opendit.parallel.mesh import Replica, meet
from opendit.sampling.sample_cache import SampleCache, SamplingJob
from opendit.sampling.sampling_run import SamplingRun

POLL_S = 0.005  # seconds between two polls while a rank waits for its replica's first rank


class Writers:
    """Threads that run queued tasks. At most ``waiting`` tasks are in the queue.

    After a task fails, no further task is run, and the next call of :meth:`put` or :meth:`close` raises the error. On
    exit, the context manager waits for all tasks; after an exception, only for running tasks."""

    def __init__(self, threads: int, waiting: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="writer")
        self._room = threading.Semaphore(threads + waiting)
        self._error: BaseException | None = None

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._pool.shutdown(cancel_futures=True)

    def put(self, task: Callable[..., None], *args: Any) -> None:
        """Queue a task; wait while the queue is full."""
        self._room.acquire()
        try:
            self._raise()
            self._pool.submit(self._run, task, args)
        except BaseException:
            self._room.release()
            raise

    def close(self) -> None:
        """Wait for all tasks."""
        self._pool.shutdown()
        self._raise()

    def _run(self, task: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            if self._error is None:
                task(*args)
        except BaseException as error:  # put or close raises the error
            self._error = self._error or error
        finally:
            self._room.release()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass
class _Batch:
    """A batch of samples ``index`` (B,) that is being decoded.

    Attributes:
        rows: number of pictures, frames or tiles to decode.
        tiles: the division of pictures into tiles; None if ranks don't share a picture's tiles.
        pixels: the decoded rows: first this rank's, then all, and in the end all on the host.
        ready: event on the side stream after the last operation on ``pixels``; None on a CPU.
    """

    index: Tensor
    rows: int
    tiles: Tiles | None
    pixels: Tensor
    ready: torch.cuda.Event | None


class OutputPipeline:
    """Decodes batches of latents and passes the pictures to ``deliver``.

    Every rank of a replica calls :meth:`put` with equal batches and decodes a share of each batch. On exit, the context
    manager delivers the remaining batches, but none after an exception.

    Args:
        deliver: called with the samples' numbers (B,) and uint8 pixels, (B, H, W, 3) or (B, T, H, W, 3). A batch is
            delivered one or two calls of :meth:`put` later.
        ranks: the replica's ranks; None for a single rank.
        leads: True if this rank calls ``deliver``.
    """

    def __init__(
        self,
        codec: Codec,
        device: torch.device,
        deliver: Callable[[Tensor, np.ndarray], None],
        ranks: Group | None = None,
        leads: bool = True,
    ):
        self._ranks, self._leads, self._deliver = ranks, leads, deliver
        # Ranks can divide a clip's frames if a picture codec decodes them independently.
        self._frames = isinstance(codec, FrameCodec)
        self._codec = codec.codec if isinstance(codec, FrameCodec) else codec
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_flight: deque[_Batch] = deque()

    def __enter__(self) -> "OutputPipeline":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()

    def put(self, index: Tensor, latents: Tensor) -> None:
        """Start to decode latents (B, C, ...) of the samples ``index`` (B,), and deliver an earlier batch. Raises the
        errors of ``deliver``."""
        batch = self._start(index, latents)
        if self._ranks is not None and self._in_flight:
            self._gather(self._in_flight[-1])
        self._in_flight.append(batch)
        # While the host waits for an earlier batch, the GPU decodes the new batch.
        while len(self._in_flight) > (1 if self._ranks is None else 2):
            self._deliver_batch(self._in_flight.popleft())

    def finish(self) -> None:
        """Deliver all remaining batches."""
        if self._ranks is not None and self._in_flight:
            self._gather(self._in_flight[-1])
        while self._in_flight:
            self._deliver_batch(self._in_flight.popleft())

    def _start(self, index: Tensor, latents: Tensor) -> _Batch:
        latents = latents.clone()  # the next batch's CUDA graph may overwrite this memory
        rows = frames_of(latents) if self._frames else latents
        decode, form, tiles = self._codec.decode_in_slices, to_bytes, None
        if self._ranks is not None and (tiles := self._codec.tiles(rows)) is not None:
            # Blending bytes would round twice, so tiles are exchanged before rounding.
            rows, codec = tiles.cut(rows), self._codec
            assert isinstance(codec, FrozenVAE)  # no other codec has tiles
            decode, form = codec.decode_whole, lambda part: part.to(codec.dtype)
        count, mine = len(rows), rows
        if self._ranks is not None:
            share = -(-count // self._ranks.size)
            first = self._ranks.rank * share
            mine = rows[torch.arange(first, first + share, device=rows.device).clamp(max=count - 1)]
        with self._on_side(after=mine):
            pixels = torch.cat([form(part) for part in decode(mine)])
            if self._ranks is None:
                pixels = self._to_host(pixels)
            return _Batch(index, count, tiles, pixels, self._record())

    def _gather(self, batch: _Batch) -> None:
        """Gather the ranks' shares of a batch, on the main stream, so that ranks communicate in one order."""
        assert self._ranks is not None
        if self._side is not None and batch.ready is not None:
            main = torch.cuda.current_stream()
            main.wait_event(batch.ready)
            batch.pixels.record_stream(main)
        pixels = start_gather(batch.pixels, self._ranks).wait().flatten(0, 1)[: batch.rows]
        with self._on_side(after=pixels):
            if batch.tiles is not None and self._leads:
                samples = pixels.split(batch.tiles.count)
                pixels = torch.cat([to_bytes(batch.tiles.join(some, self._codec.downscale)) for some in samples])
            batch.pixels = self._to_host(pixels) if self._leads else pixels
            batch.ready = self._record()

    def _deliver_batch(self, batch: _Batch) -> None:
        if batch.ready is not None:
            batch.ready.synchronize()
        if not self._leads:
            return
        pictures = batch.pixels.numpy()
        if self._frames:
            pictures = pictures.reshape(len(batch.index), -1, *pictures.shape[1:])
        self._deliver(batch.index, pictures)

    def _on_side(self, after: Tensor):
        """Return a context for the side stream. Operations in it run after the main stream's operations so far, and may
        read ``after``."""
        if self._side is None:
            return contextlib.nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        after.record_stream(self._side)
        return torch.cuda.stream(self._side)

    def _record(self) -> torch.cuda.Event | None:
        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record(self._side)
        return event

    @staticmethod
    def _to_host(pixels: Tensor) -> Tensor:
        """Start a copy to pinned memory and return it. An event recorded afterwards tells when it is done."""
        if pixels.device.type == "cpu":
            return pixels
        host = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
        return host.copy_(pixels, non_blocking=True)


@dataclass
class ReplicaBatches:
    """Iterable over the batches (ranges of sample numbers) that this replica draws. The replica's ranks get equal
    batches. When a replica has finished a group of batches, it takes the next group from the queue."""

    groups: list[list[range]]
    queue: "SharedQueue"
    pipeline: OutputPipeline
    progress: Progress
    leads: bool
    stages: Stages

    def __iter__(self) -> Iterator[range]:
        for number in self.queue:
            yield from self.groups[number]

    def decode(self, index: Tensor, latents: Tensor) -> None:
        """Start to decode a batch's latents (B, C, ...). Later calls deliver its pictures."""
        with self.stages("decoding"):
            self.pipeline.put(index, latents)
        if self.leads:
            self.progress.update(self.queue.add_finished(len(index)) - self.progress.done)


@contextlib.contextmanager
def replica_batches(
    run: SamplingRun,
    cache: SampleCache,
    missing: Collection[int],
    deliver: Callable[[Tensor, np.ndarray], None],
    finish: Callable[[], None],
) -> Iterator[ReplicaBatches]:
    """Distribute a cache's missing files over all replicas, and show a progress bar. All ranks must call this.

    On exit, ``finish`` is called, and rank 0 waits for all replicas. deliver: see :class:`OutputPipeline`."""
    mesh, replica, stages = run.mesh, run.replica, run.stages
    groups = cache.batches_to_draw(missing, batch_size_of(cache.job, run.flags.batch_size, replica.count))
    name = mesh.broadcast_object(secrets.token_hex(8))  # random: the store keeps the keys of earlier queues
    queue = SharedQueue(meet(find_place()), name, len(groups), replica)
    total = sum(len(batch) for group in groups for batch in group)
    with (
        Progress(total, "samples", disable=not mesh.is_main) as progress,
        OutputPipeline(run.codec, mesh.device, deliver, replica.ranks, replica.leads) as pipeline,
    ):
        yield ReplicaBatches(groups, queue, pipeline, progress, replica.leads, stages)
        with stages("decoding"):
            pipeline.finish()
        finish()
        if mesh.is_main:
            with stages("other processes: waited for"):
                while (done := queue.add_finished(0)) < total:
                    progress.update(done - progress.done)
                    time.sleep(0.1)
            progress.update(total - progress.done)


def batch_size_of(job: SamplingJob, most: int, replicas: int) -> int:
    """Return a job's batch size, at most ``most``. In small jobs, replicas draw about equally many samples."""
    if job.samples_a_part > 1:
        return min(most, math.ceil(job.count / replicas))
    rounds = math.ceil(job.count / (most * replicas))
    return math.ceil(job.count / (rounds * replicas))


class SharedQueue:
    """Iterable over the numbers 0 to ``count`` - 1. Each number goes to the first replica that asks. name: unique in
    the store.

    A replica's first rank increments a counter in the store, and writes the number to a key for all other ranks. They
    poll the key, because a blocking call would delay other threads that use the connection."""

    def __init__(self, store: Store, name: str, count: int, replica: Replica):
        self._store, self._name, self.count, self._replica = store, f"queue/{name}", count, replica

    def __iter__(self) -> Iterator[int]:
        turn = 0
        while (number := self._next(turn)) < self.count:
            yield number
            turn += 1

    def _next(self, turn: int) -> int:
        key = f"{self._name}/{self._replica.number}/{turn}"
        if self._replica.leads:
            number = self._store.add(f"{self._name}/taken", 1) - 1
            if self._replica.ranks is not None:
                self._store.set(key, str(number))
            return number
        while not self._store.check([key]):
            time.sleep(POLL_S)
        return int(self._store.get(key))

    def add_finished(self, amount: int) -> int:
        """Add to the number of finished samples, and return the total. Only a replica's first rank may call this."""
        return self._store.add(f"{self._name}/finished", amount)
