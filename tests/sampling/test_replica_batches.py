"""Replicas take work from one queue: each piece is taken once, and all ranks of a replica take the same pieces."""

import random
import threading
import time

import pytest
import torch.distributed as dist

from opendit.parallel.collectives import Group
from opendit.parallel.mesh import Replica
from opendit.sampling.output_pipeline import SharedQueue


def take(queue: SharedQueue, taken: list[int], seed: int) -> None:
    chance = random.Random(seed)
    for number in queue:
        taken.append(number)
        time.sleep(chance.random() * 2e-3)


@pytest.mark.parametrize(("replicas", "ranks", "count"), [(1, 1, 5), (3, 1, 40), (2, 3, 30), (4, 1, 2), (2, 2, 0)])
def test_every_piece_is_taken_once(replicas, ranks, count):
    store, taken, threads = dist.HashStore(), {}, []
    for number in range(replicas):
        for rank in range(ranks):
            group = Group(None, rank, ranks) if ranks > 1 else None
            replica = Replica(number, replicas, rank == 0, None, group)
            taken[number, rank] = []
            args = SharedQueue(store, "a", count, replica), taken[number, rank], 10 * number + rank
            threads.append(threading.Thread(target=take, args=args))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(replicas):
        assert all(taken[number, rank] == taken[number, 0] == sorted(taken[number, 0]) for rank in range(ranks))
    assert sorted(sum((taken[number, 0] for number in range(replicas)), [])) == list(range(count))
    if replicas > 1 and count >= 30:
        assert all(taken[number, 0] for number in range(replicas))


def test_queues_of_one_store_do_not_meet():
    store, alone = dist.HashStore(), Replica(0, 1, True, None)
    first, second = SharedQueue(store, "a", 2, alone), SharedQueue(store, "b", 3, alone)
    assert [*first] == [0, 1] and [*second] == [0, 1, 2]
    assert first.add_finished(2) == 2 and first.add_finished(0) == 2 and second.add_finished(0) == 0
