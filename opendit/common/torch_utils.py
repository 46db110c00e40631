"""Build modules on the meta device, and exclude functions from torch.compile.

Importing this module does not import torch's compiler, because that import takes 2 s of CPU time.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode

Function = TypeVar("Function", bound=Callable)


class _Decorator(Protocol):
    def __call__(self, function: Function, /) -> Function: ...


# torch's optimizers use this form of torch.compiler.disable. It imports the compiler at the first call of a decorated
# function, not at the decoration.
_disable: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
not_compiled: _Decorator = _disable


class _SkipInitialization(TorchFunctionMode):
    """Mode in which the functions of ``torch.nn.init`` do nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build modules and tensors on torch's meta device, with shapes and dtypes but without values.

    Initialisation is skipped, because random numbers on the meta device would import torch's compiler.
    """
    with torch.device("meta"), _SkipInitialization():
        yield
