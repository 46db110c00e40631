"""Modules without memory, and functions that torch.compile leaves alone, both without importing torch's compiler: that
takes 2 s of CPU time."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode

Function = TypeVar("Function", bound=Callable)


class _Decorator(Protocol):
    def __call__(self, function: Function, /) -> Function: ...


# torch.compiler.disable as torch's own optimizers use it: the first call imports the compiler, decorating does not.
_disable: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
not_compiled: _Decorator = _disable


class _SkipInitialization(TorchFunctionMode):
    """``torch.nn.init`` does nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build modules and tensors on torch's meta device, where they have shapes and types but no values.

    Initialisation is skipped: to draw random numbers on that device, which has none, torch imports its compiler."""
    with torch.device("meta"), _SkipInitialization():
        yield
