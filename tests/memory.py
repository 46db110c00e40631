"""Memory that a computation leaves in use, by torch's own account of every allocation."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def kept_bytes(work: Callable) -> int:
    """Bytes on the CPU that are in use after ``work()``, with its result alive, and were not before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = work()
    events = record.events()
    del result
    return sum(event.self_cpu_memory_usage for event in events)
