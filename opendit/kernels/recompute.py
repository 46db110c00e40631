"""Rematerialization policies (``--recompute``): activations of a block that the backward pass recomputes.

With the fused kernels, a block saves 18 tensors of tokens x D:

    attention   input (1), LayerNorm's output (1), q, k, v (3), attention's output (1), projected output (1)
    MLP         input (1), LayerNorm's output (1), fc1's output (4), GELU's output (4), fc2's output (1)

The policies reduce this number:

    norms   recompute the LayerNorms' outputs, in one pass over memory each; 16 tensors are left.
    cheap   also recompute GELU's output, in one pass; 12 are left.
    mlp     also recompute fc1's output, a ninth of a block's matrix products; 8 are left.
    half    mlp in every other block, cheap in the rest; 10 are left on average.

RMSNorm is treated like LayerNorm, and SwiGLU like GELU. Its fc1 has two matrices, so mlp recomputes more products.

If only attention and MLPs have LoRA, the projected output and fc2's output are not saved (16 tensors). Without the
fused LayerNorm + modulate, both normalised inputs are saved, too (20 tensors), and recomputed by all policies.

To recompute complete blocks, with or without attention, see ``opendit.models.blocks.run_blocks``.

Recomputed values have the same bits, with one exception. After gate_residual_layernorm_modulate, another kernel
recomputes the LayerNorm's output. It may sum a row in another order, so some values round differently.
"""

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from opendit.kernels.linear import linear as unbiased
from opendit.models.dit import DiT
from opendit.models.layers import BlockOps, Projection, RMSNorm, SwiGlu


class Recomputed:
    """A tensor that ``make(*inputs)`` recomputes, without gradients, under the autocast state at construction.

    An input is a Recomputed object, or a tensor that stays in memory. ``share`` registers a use, and ``take`` returns
    the tensor for one use. The first ``take`` computes the tensor, and the last frees it. A second backward pass
    through the graph computes the tensor again.

    result: the tensor between the first and the last use, else None.
    """

    def __init__(self, device: torch.device, make: Callable[..., Tensor], *inputs: "Tensor | Recomputed"):
        self._make, self._device = make, device.type
        self._inputs = [i.share() if isinstance(i, Recomputed) else i.detach() for i in inputs]
        self._autocast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        self._uses = self._left = 0
        self.result: Tensor | None = None

    def share(self) -> "Recomputed":
        """Register one more use of the tensor; return self."""
        self._uses += 1
        return self

    def take(self) -> Tensor:
        """Return the tensor. The first registered use computes the tensor, and the last use frees it."""
        if self.result is None:
            inputs = [i.take() if isinstance(i, Recomputed) else i for i in self._inputs]
            enabled, dtype = self._autocast
            with torch.no_grad(), torch.autocast(self._device, dtype, enabled=enabled, cache_enabled=False):
                self.result = self._make(*inputs)
            self._left = self._uses
        self._left -= 1
        result = self.result
        if not self._left:
            self.result = None
        return result


def _remember(tensor: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Attach a :class:`Recomputed` to ``tensor``, the result of make(*inputs), and return ``tensor``. Inputs with an
    attached Recomputed are recomputed, too."""
    if torch.is_grad_enabled():
        made: Any = tensor  # Any, because type checkers know no such attribute of Tensor
        made.recomputed = Recomputed(tensor.device, make, *(getattr(i, "recomputed", i) for i in inputs))
    return tensor


def _not_keeping(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autograd saves the :class:`Recomputed` of ``tensor``, if any, instead of ``tensor`` or
    a view of it. Autograd passes a new tensor object each time, so the hooks compare memory addresses."""
    recomputed = getattr(tensor, "recomputed", None)
    memory = tensor.untyped_storage()
    if recomputed is None or not tensor.is_contiguous() or memory.nbytes() != tensor.nbytes:
        return nullcontext()
    address = memory.data_ptr()

    def pack(kept: Tensor):
        if kept.untyped_storage().data_ptr() != address:
            return kept
        return recomputed.share(), kept.size(), kept.stride(), kept.storage_offset()

    def unpack(packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shared, size, stride, offset = packed
        whole = shared.take()
        return whole.as_strided(size, stride, whole.storage_offset() + offset)

    return saved_tensors_hooks(pack, unpack)


def _as_a_linear_sees(x: Tensor) -> Tensor:
    """Convert ``x`` to autocast's dtype, as a recomputable tensor. Otherwise the linear layer would convert ``x`` and
    save the copy."""
    if not torch.is_autocast_enabled(x.device.type):
        return x
    dtype = torch.get_autocast_dtype(x.device.type)
    return x if x.dtype == dtype else _remember(x.to(dtype), lambda x: x.to(dtype), x)


def recomputing(ops: BlockOps, level: str, gated: Collection[Projection] = ()) -> BlockOps:
    """Wrap a block's operations so that they save less for the backward pass. ``level``: none, norms, cheap or mlp.
    ``gated``: layers whose outputs ``ops.swiglu`` gets.

    ``ops`` are torch's references or the kernels of opendit.kernels.select, except FP8. Weights must not change or be
    freed between forward and backward pass. torch.compile is not supported: it ignores saved-tensor hooks.
    """
    if level == "none":
        return ops
    norm = ops.layernorm_modulate
    # None without such an operation. The wrapper of a missing operation is not used.
    forked: Any = ops.residual_layernorm_modulate
    joined: Any = ops.linear_gate_residual_layernorm_modulate
    joined_rms: Any = ops.linear_gate_residual_rmsnorm_modulate
    gelu_kernel = ops.kernel("linear_gelu")

    def saves_only_x(operation: str) -> bool:
        kernel = ops.kernel(operation)
        return kernel is not None and kernel.keeps == ("x",)

    # for norms that are not fused: torch's expressions would also save the normalised tensor
    checkpointed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    activation = gelu_kernel and gelu_kernel.after_product  # this activation also adds the bias

    # of_rows: the argument sample_of_row for a pack, else empty
    def layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor, *of_rows: Tensor) -> Tensor:
        inputs = x, shift, scale, *of_rows
        y = norm(*inputs) if saves_only_x("layernorm_modulate") else checkpointed(norm, *inputs)
        return _remember(y, norm, x, shift, scale, *of_rows)

    def residual_layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor, *of_rows: Tensor) -> tuple[Tensor, Tensor]:
        same, y = forked(x, shift, scale, *of_rows)
        return same, _remember(y, norm, x, shift, scale, *of_rows)

    def rmsnorm_modulate(rms: RMSNorm) -> Callable[..., Tensor]:
        return lambda x, shift, scale, *of_rows: ops.residual_rmsnorm_modulate(x, rms, shift, scale, *of_rows)[1]

    def residual_rmsnorm_modulate(x, rms, shift, scale, *of_rows) -> tuple[Tensor, Tensor]:
        make = rmsnorm_modulate(rms)
        if saves_only_x("residual_rmsnorm_modulate"):
            x, y = ops.residual_rmsnorm_modulate(x, rms, shift, scale, *of_rows)
        else:
            y = checkpointed(make, x, shift, scale, *of_rows)
        return x, _remember(y, make, x, shift, scale, *of_rows)

    def linear(x: Tensor, layer: Projection) -> Tensor:
        x = _as_a_linear_sees(x)
        with _not_keeping(x):
            u = ops.linear(x, layer)
        return _remember(u, layer, x) if level == "mlp" and layer in gated else u

    def swiglu(u: Tensor) -> Tensor:
        with _not_keeping(u):
            z = ops.swiglu(u)
        return z if level == "norms" else _remember(z, ops.swiglu, u)

    def linear_heads(x: Tensor, layer: Projection, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        x = _as_a_linear_sees(x)
        with _not_keeping(x):
            return ops.linear_heads(x, layer, num_heads)

    def linear_gelu(x: Tensor, layer: Projection) -> Tensor:
        x = _as_a_linear_sees(x)
        after = None if layer.bias is None else activation  # layers without a bias use torch's GELU
        product = layer if after is None else functools.partial(layer.product, multiply=unbiased)

        def gelu(u: Tensor) -> Tensor:
            return F.gelu(u, approximate="tanh") if after is None else after(u, layer.bias)

        with _not_keeping(x):
            u = product(x)
        if level == "mlp":
            _remember(u, product, x)
        with _not_keeping(u):
            z = gelu(u)
        return z if level == "norms" else _remember(z, gelu, u)

    def linear_gate_residual(x: Tensor, gate: Tensor, z: Tensor, layer: Projection, *of_rows: Tensor) -> Tensor:
        z = _as_a_linear_sees(z)
        with _not_keeping(z):
            return ops.linear_gate_residual(x, gate, z, layer, *of_rows)

    def linear_gate_residual_layernorm_modulate(x, gate, z, layer, shift, scale, *of_rows) -> tuple[Tensor, Tensor]:
        z = _as_a_linear_sees(z)
        with _not_keeping(z):
            h, y = joined(x, gate, z, layer, shift, scale, *of_rows)
        return h, _remember(y, norm, h, shift, scale, *of_rows)

    def linear_gate_residual_rmsnorm_modulate(x, gate, z, layer, rms, shift, scale, *of_rows) -> tuple[Tensor, Tensor]:
        z = _as_a_linear_sees(z)
        with _not_keeping(z):
            h, y = joined_rms(x, gate, z, layer, rms, shift, scale, *of_rows)
        return h, _remember(y, rmsnorm_modulate(rms), h, shift, scale, *of_rows)

    return replace(
        ops,
        layernorm_modulate=layernorm_modulate,
        residual_rmsnorm_modulate=residual_rmsnorm_modulate,
        linear_gate_residual_rmsnorm_modulate=joined_rms and linear_gate_residual_rmsnorm_modulate,
        linear=linear,
        swiglu=swiglu,
        linear_heads=linear_heads,
        linear_gelu=linear_gelu,
        linear_gate_residual=linear_gate_residual,
        linear_gate_residual_layernorm_modulate=joined and linear_gate_residual_layernorm_modulate,
        residual_layernorm_modulate=forked and residual_layernorm_modulate,
    )


def recompute_in(model: DiT, level: str) -> None:
    """Apply policy ``level`` (none, norms, cheap, half or mlp) to the blocks and the final layer of ``model``. Call
    this after ``model.use``, because it wraps the operations that ``model.use`` sets."""
    for number, block in enumerate(model.blocks):
        alternating = "mlp" if number % 2 else "cheap"
        gated = {layer.fc1 for layer in block.modules() if isinstance(layer, SwiGlu)}
        block.ops = recomputing(block.ops, alternating if level == "half" else level, gated)
    model.final_layer.ops = recomputing(model.final_layer.ops, "none" if level == "none" else "cheap")
