"""A run's state, and a copy of it in host memory: what of a save training waits for."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from opendit.checkpoint.ema import EMA
from opendit.parallel.engines import Engine
from opendit.parallel.host_memory import HostMemory

MODEL_SET, AVERAGE_SET = "model", "ema"
Files = dict[str, dict[str, Tensor]]  # what one rank writes: file, name of the tensor, tensor in host memory


def average_sets(decays: tuple[float, ...]) -> list[str]:
    """The name of every average among the sets of tensors: the first is the one to sample from."""
    return [AVERAGE_SET, *(f"ema_{decay}" for decay in decays[1:])]


def state_tensors(engine: Engine, ema: EMA) -> Iterator[tuple[str, str, Tensor]]:
    """(set, parameter, this rank's shard) of the masters, averages and moments, in the same order on all ranks."""
    averages = average_sets(ema.decays)
    for name in engine.shapes:
        yield MODEL_SET, name, engine.master(name)
        for which, shards in zip(averages, ema.averages, strict=True):
            yield which, name, shards[name]
        for moment, shard in engine.moments(name).items():
            yield moment, name, shard


def buffers_of(engine: Engine) -> dict[str, Tensor]:
    """Copies of the model's buffers in host memory."""
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in engine.module.named_buffers()}


THREADS = 4  # that copy from host to host: one alone does not fill the memory's bandwidth


class HostBuffer:
    """fp32 numbers in host memory, page-locked for a GPU's copies until :meth:`free`."""

    def __init__(self, numel: int, device: torch.device):
        self.device, self._used = device, 0
        self._threads: ThreadPoolExecutor | None = None
        self._copies: deque[Future[Any]] = deque()
        self._memory = HostMemory(numel, device)
        self._numbers = self._memory.numbers

    @property
    def bytes(self) -> int:
        return self._numbers.nbytes

    def clear(self) -> None:
        """The next copy overwrites the first one."""
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in the buffer; there when :meth:`wait` has returned."""
        space = self._numbers[self._used : self._used + tensor.numel()].view(tensor.shape)
        self._used += tensor.numel()
        if tensor.device.type != "cpu" or self.device.type == "cpu":
            return space.copy_(tensor, non_blocking=True)
        self._threads = self._threads or ThreadPoolExecutor(THREADS, "save")
        self._copies.append(self._threads.submit(space.copy_, tensor))
        while len(self._copies) > THREADS:  # tensors that are kept for their copies alone must not add up
            self._copies.popleft().result()
        return space

    def wait(self) -> None:
        """Until the copies are made."""
        while self._copies:
            self._copies.popleft().result()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Unlocks the pages, though tensors may still lie in them."""
        self._memory.unlock()
