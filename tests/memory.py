"""Measure the memory that a computation uses on the CPU."""

import ctypes
import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


def kept_bytes(work: Callable) -> int:
    """Return the bytes that ``work()`` leaves in use on the CPU, including its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = work()
    events = record.events()
    del result
    return sum(event.self_cpu_memory_usage for event in events)


class _Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]


class _Watch(TorchDispatchMode):
    """Records the most bytes that malloc has given to all threads, checked after every torch operation."""

    def __init__(self):
        super().__init__()
        self._ask = ctypes.CDLL(None).mallinfo2
        self._ask.restype = _Mallinfo
        self.most = self.in_use()

    def in_use(self) -> int:
        info = self._ask()
        return info.uordblks + info.hblkhd

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.most = max(self.most, self.in_use())
        return result


def peak_bytes(work: Callable) -> int:
    """Return the most bytes in use at once on the CPU during ``work()``, above those in use before."""
    gc.collect()
    watch = _Watch()
    before = watch.most
    with watch:
        work()
    return watch.most - before
