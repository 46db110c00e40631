"""Messages between neighbours of a pipeline.

Every kind of message (activations, gradients) has a process group of its own between each two ranks, which is used in
one direction only and in the order of the schedule. So a group's messages meet in order, and none waits for one of
another kind: on GPUs, where the operations of a group run one after the other on a stream, a send and a receive that
share one could wait for each other for ever.
"""

from collections import deque
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline.schedule import Message

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of what is sent, as numbers
IN_FLIGHT = 2  # messages of a channel that may not have arrived when its next one is sent


class Links:
    """The channels of this rank. Collective over all ranks.

    around: whether the last rank sends to the first one, too: where ranks have several chunks.
    """

    def __init__(self, mesh: Mesh, around: bool):
        self.device, self.rank, self.ranks = mesh.device, mesh.pp_rank, mesh.pp_size
        self._members = next(members for members in mesh.dims.groups("pp") if mesh.rank in members)
        self._groups = mesh.links(around)
        self._shapes: dict[tuple[Any, ...], tuple[torch.dtype, tuple[int, ...]]] = {}
        self._sends: dict[tuple[int, int, bool], deque[Any]] = {}
        self._connect()

    def _connect(self) -> None:
        """A number through every channel, one after the other. NCCL connects two ranks at their first message, for
        which both hosts wait: in the middle of a schedule one of them might never come, because its own device waits
        for a message and so can't load a kernel."""
        number = torch.zeros(1, device=self.device)
        for first, forward in sorted(self._groups):
            ends = self._members[first], self._members[(first + 1) % self.ranks]
            source, target = ends if forward else reversed(ends)
            group, rank = self._groups[first, forward], self._members[self.rank]
            if rank == source:
                dist.send(number, dst=target, group=group)
            elif rank == target:
                dist.recv(number, src=source, group=group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _channel(self, message: Message) -> tuple[dist.ProcessGroup, int, int]:
        """The group of a message, and the ranks that send and receive it."""
        first = message.source if message.forward else message.target
        ends = self._members[message.source], self._members[message.target]
        return self._groups[first, message.forward], *ends

    # What activations are is sent once, before the first of them; their gradients are of the same kind. ``key`` stands
    # for all messages that are alike.

    def known(self, message: Message, key: tuple[Any, ...]) -> bool:
        """Return True if a receive can be posted without waiting for the sender."""
        return (message.forward, message.chunk, key) in self._shapes

    def post(self, message: Message, key: tuple[Any, ...]) -> tuple[Tensor, dist.Work]:
        """Starts to receive a message."""
        group, source, _ = self._channel(message)
        if not self.known(message, key):
            header = torch.empty(4, dtype=torch.int64, device=self.device)
            dist.recv(header, src=source, group=group)
            number, *shape = header.tolist()
            self._shapes[True, message.chunk, key] = DTYPES[number], tuple(shape)
        dtype, shape = self._shapes[message.forward, message.chunk, key]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor, cast(dist.Work, dist.irecv(tensor, src=source, group=group))

    def send(self, message: Message, tensor: Tensor, chunk: int, key: tuple[Any, ...]) -> None:
        """Starts to send a message; ``chunk``: of this rank, that made it."""
        group, source, target = self._channel(message)
        if message.forward and (False, chunk, key) not in self._shapes:
            header = torch.tensor([DTYPES.index(tensor.dtype), *tensor.shape], device=self.device)
            dist.send(header, dst=target, group=group)
            self._shapes[False, chunk, key] = tensor.dtype, tuple(tensor.shape)
        tensor = tensor.detach().contiguous()
        sends = self._sends.setdefault((source, target, message.forward), deque())
        sends.append((dist.isend(tensor, dst=target, group=group), tensor))
        while len(sends) > IN_FLIGHT:  # they hold their tensors
            sends.popleft()[0].wait()

    def finish(self) -> None:
        """Until all messages have been sent; a GPU's host does not wait."""
        for sends in self._sends.values():
            while sends:
                sends.popleft()[0].wait()
