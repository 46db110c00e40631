"""Work that replicas take from one queue: whichever is free gets the next piece."""

import time
from collections.abc import Iterator

from torch.distributed.distributed_c10d import Store

from opendit.parallel.guidance import Replica

LOOK_S = 0.005  # between two looks of a rank that waits to be told


class SharedQueue:
    """The numbers from 0 to ``count`` - 1, each given to one replica, the next one to whichever asks first. All ranks
    of a replica get the same ones.

    The store counts: its first rank adds one for the replica, and tells the others by a key of their own. (Nobody waits
    inside the store, whose connection serves other threads, too.)

    Args:
        store: of all ranks.
        name: of this queue alone in the store.
        count: of the pieces of work.
        replica: this rank's.
    """

    def __init__(self, store: Store, name: str, count: int, replica: Replica):
        self._store, self._name, self.count, self._replica = store, f"queue/{name}", count, replica

    def __iter__(self) -> Iterator[int]:
        turn = 0
        while (number := self._take(turn)) < self.count:
            yield number
            turn += 1

    def _take(self, turn: int) -> int:
        key = f"{self._name}/{self._replica.number}/{turn}"
        if self._replica.leads:
            number = self._store.add(f"{self._name}/taken", 1) - 1
            if self._replica.ranks is not None:
                self._store.set(key, str(number))
            return number
        while not self._store.check([key]):
            time.sleep(LOOK_S)
        return int(self._store.get(key))

    def finished(self, amount: int) -> int:
        """Adds to what has been done, for a replica; its first rank calls this. Returns what all have done."""
        return self._store.add(f"{self._name}/finished", amount)
