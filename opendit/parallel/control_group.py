"""Small messages between ranks over gloo, on the CPU, beside training's own collectives."""

import datetime
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from opendit.parallel.mesh import Mesh

Result = TypeVar("Result")


class ControlGroup:
    """A gloo group of all ranks for the use of one thread: its messages neither wait for the GPU nor mix with the
    collectives of training. Build it on every rank, in the same order.

    Args:
        patience_minutes: how long ranks may wait for each other.
    """

    def __init__(self, mesh: Mesh, patience_minutes: float = 60.0):
        self.mesh = mesh
        timeout = datetime.timedelta(minutes=patience_minutes)
        group = dist.new_group(backend="gloo", timeout=timeout) if mesh.world_size > 1 else None
        self._group = cast("dist.ProcessGroup | None", group)  # all ranks are in it

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (any picklable object), in rank order, on every rank."""
        if self._group is None:
            return [value]
        values = [None] * self.mesh.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, work: Callable[[], Result], *errors: type[Exception]) -> Result:
        """This rank's ``work()``. Where it raises one of ``errors`` on any rank, the first one's is raised on all."""
        result = problem = None
        try:
            result = work()
        except errors as error:
            problem = error
        for found in self.gather(problem):
            if found is not None:
                raise found
        return cast(Result, result)

    def start_largest(self, number: int) -> Callable[[], int]:
        """Starts to ask for the largest ``number`` of any rank; the function returned waits and gives the answer, the
        same on every rank."""
        if self._group is None:
            return lambda: number
        box = torch.tensor([number], dtype=torch.int32)
        work: Any = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> int:
            work.wait()
            return int(box.item())

        return answer
