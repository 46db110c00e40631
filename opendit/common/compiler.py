"""torch's compiler, left alone until somebody compiles: importing it takes 2 s of CPU time."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

Function = TypeVar("Function", bound=Callable)


class _Decorator(Protocol):
    def __call__(self, function: Function, /) -> Function: ...


# torch.compiler.disable, as torch's optimizers have it: imports the compiler in the first call, not to decorate.
_disable: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
not_compiled: _Decorator = _disable
