"""Imitates CUDA graphs without a GPU: a replay reads and writes the same memory as the recording."""

from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_of(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Tape(TorchDispatchMode):
    """Records operations with their arguments and results, and copies the arguments that they change."""

    def __init__(self):
        super().__init__()
        self.operations: list[tuple] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(tensor, tensor.clone()) for tensor in tensors_of(value)]
        results = function(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_of((args, kwargs))}
        fresh = [r for r in tensors_of(results) if r.untyped_storage().data_ptr() not in known]
        self.operations.append((function, args, kwargs, results))
        self.made += fresh
        return results


class TapeRecorder:
    """A replacement for ``GraphRecorder``. Recording restores all changed tensors, and a replay depends only on
    memory.

    The results of recorded operations are overwritten before every replay.
    """

    def __init__(self):
        self.recorded = self.replayed = 0

    def record(self, work: Callable) -> tuple[object, Callable[[], None]]:
        self.recorded += 1
        with _Tape() as tape:
            result = work()
        for tensor, old in reversed(tape.before):
            tensor.copy_(old)
        tape.before.clear()

        def replay():
            self.replayed += 1
            for tensor in tape.made:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
            for function, args, kwargs, results in tape.operations:
                for static, new in zip(tensors_of(results), tensors_of(function(*args, **kwargs)), strict=True):
                    if static.data_ptr() != new.data_ptr():
                        static.copy_(new)

        return result, replay
