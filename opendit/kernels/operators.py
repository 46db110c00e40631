"""Register Python functions that run kernels as torch operators, for eager mode, torch.compile and autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_library = torch.library.Library("opendit", "FRAGMENT")


def operator(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a function that runs ``implementation`` in eager mode, under torch.compile, and with autograd.

    The operator is registered as ``torch.ops.opendit.NAME`` for every device. torch.compile does not look into the
    operator; ``fake`` gives the shapes of its outputs. Compilers, dispatch modes, and tensors that intercept torch's
    calls (Gemini's) use the registered operator. Plain calls skip torch's dispatcher, because with a small batch it
    would take longer than the kernel.
    """
    name = schema.partition("(")[0]

    def on_device(x: Tensor, *args):
        if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
            return implementation(x, *args)
        with torch.cuda.device_of(x):  # Triton launches on the current device, so make it x's device
            return implementation(x, *args)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, on_device, "CompositeExplicitAutograd")
    torch.library.register_fake(f"opendit::{name}", fake, lib=_library)
    direct = on_device
    if backward is not None:
        assert setup_context is not None, "it keeps what backward gets"
        torch.library.register_autograd(f"opendit::{name}", backward, setup_context=setup_context, lib=_library)
        direct = _differentiable(on_device, backward, setup_context)
    registered = getattr(torch.ops.opendit, name).default

    def call(*args):
        traced = torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or has_torch_function(args)
        return registered(*args) if traced else direct(*args)

    return call


def _differentiable(
    implementation: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> Callable[..., Any]:
    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):  # with a separate setup_context, apply would inspect the signature in every call
            output = implementation(*args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return backward(ctx, *grads)

    return Operator.apply
