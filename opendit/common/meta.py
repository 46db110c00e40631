"""Modules without memory, made at once."""

import contextlib
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode


class _SkipInitialization(TorchFunctionMode):
    """``torch.nn.init`` does nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build modules and tensors on torch's meta device: they have shapes and types but no values.

    Initialisation is left out: for random numbers on that device, which has none, torch imports its compiler (a second
    of CPU time)."""
    with torch.device("meta"), _SkipInitialization():
        yield
