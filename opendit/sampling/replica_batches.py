"""Distribute the batches of a job over replicas, through one shared queue."""

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator

import numpy as np
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from opendit.common.progress import Progress
from opendit.common.stages import Stages
from opendit.config.parallel_sizes import find_place
from opendit.parallel.guidance import Replica
from opendit.parallel.rendezvous import meet
from opendit.sampling.output_pipeline import OutputPipeline
from opendit.sampling.sample_cache import SampleCache, SamplingJob
from opendit.sampling.sampling_run import SamplingRun

POLL_S = 0.005  # seconds between two polls while a rank waits for its replica's first rank


class ReplicaBatches:
    """Iterable over the batches of sample numbers that this replica draws.

    The caller passes the latents of every batch to :meth:`decode`. All ranks of a replica get the same batches.
    Whenever a replica is free, it takes the next group of batches from the queue, so that a slow replica gets fewer
    groups.
    """

    def __init__(
        self,
        groups: list[list[range]],
        queue: "SharedQueue",
        pipeline: OutputPipeline,
        progress: Progress,
        leads: bool,
        stages: Stages,
    ):
        self._groups, self._queue, self._pipeline = groups, queue, pipeline
        self._progress, self._leads, self._stages = progress, leads, stages

    def __iter__(self) -> Iterator[range]:
        for number in self._queue:
            yield from self._groups[number]

    def decode(self, index: Tensor, latents: Tensor) -> None:
        """Decode the latents (B, C, ...) of a batch while the next batch is drawn, and deliver the pictures later."""
        with self._stages("decoding"):
            self._pipeline.put(index, latents)
        if self._leads:
            self._progress.update(self._queue.add_finished(len(index)) - self._progress.done)


@contextlib.contextmanager
def replica_batches(
    run: SamplingRun,
    cache: SampleCache,
    missing: Collection[int],
    deliver: Callable[[Tensor, np.ndarray], None],
    finish: Callable[[], None],
) -> Iterator[ReplicaBatches]:
    """Distribute the missing parts of a cache over all replicas, and show a progress bar.

    On exit, rank 0 waits until all samples are drawn. This call is collective.

    Args:
        run: the run.
        cache: the cache of samples.
        missing: numbers of the parts to draw.
        deliver: see :class:`OutputPipeline`.
        finish: called after this rank's last batch has been delivered.
    """
    mesh, replica, stages = run.mesh, run.replica, run.stages
    groups = cache.batches_to_draw(missing, batch_size_of(cache.job, run.flags.batch_size, replica.count))
    name = mesh.broadcast_object(secrets.token_hex(8))  # a random name that no earlier queue in the store has
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
    """Return the batch size of a job, at most ``most``.

    In a small job, every part is one sample, and the batch size is reduced so that all replicas draw the same number of
    batches and finish at about the same time. In a large job, parts are multiples of a batch, and the batch size is
    ``most``.
    """
    if job.samples_a_part > 1:
        return min(most, math.ceil(job.count / replicas))
    rounds = math.ceil(job.count / (most * replicas))
    return math.ceil(job.count / (rounds * replicas))


class SharedQueue:
    """Iterable that hands out the numbers 0 to ``count`` - 1, each to the replica that asks first.

    All ranks of a replica get the same numbers. A counter in the store holds the next number. The first rank of a
    replica increments the counter, and passes the number to the replica's other ranks through a key in the store. The
    other ranks poll the key instead of waiting inside the store, because other threads use the same connection.

    Args:
        store: store that all ranks share.
        name: name of the queue, unique in the store.
        count: how many numbers the queue hands out.
        replica: the replica of this rank.
    """

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
        """Add to the number of finished samples, and return the total of all replicas. Only the first rank of a replica
        calls this."""
        return self._store.add(f"{self._name}/finished", amount)
