"""Rematerialization policies: activations of a block that are recomputed in the backward pass instead of being saved
for it (``--recompute``).

With the fused kernels a block saves, in tensors of tokens x D: its input 1, the first LayerNorm's output 1 (for qkv's
weight gradient), q, k, v 3, the attention's output 1, its projection 1 (for the gate's gradient), the residual stream
between the branches 1, the second LayerNorm's output 1 (fc1), fc1's output 4 (GELU), GELU's output 4 (fc2), fc2's
output 1: 18 in all.

    norms   without the LayerNorms' outputs: 16. One pass over memory each recomputes them.
    cheap   also without GELU's output, likewise: 12.
    mlp     also without fc1's output, which repeats its product, a ninth of a block's products: 8.
    half    mlp in every other block, cheap in the others: 10 on average.

Whole blocks, with or without their attention, are recomputed by ``opendit.models.blocks.run_blocks``.

Without the fused LayerNorm + modulate, the modulation's normalised input is one more tensor at each of the two (20 in
all), which is not saved either.

Instead of such a tensor, autograd saves a :class:`Recomputed`. The same functions of the same inputs give the same
bits, with one exception: a LayerNorm's output that the forward pass computes together with the residual stream
(gate_residual_layernorm_modulate) is recomputed from that stream by the LayerNorm's own kernel. Both compute the same,
but a GPU may sum a row in another order, so that now and then a value in half precision rounds to its neighbour.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from opendit.models import DiT
from opendit.models.layers import BlockOps, Projection


class Recomputed:
    """A tensor that is recomputed by ``make(*inputs)``, without gradients, under the autocast that is on now.

    Inputs are tensors, which are saved, or Recomputed themselves. Every use is announced by ``share`` and ended by
    ``take``: the tensor is computed for the first use and freed with the last, so that several uses cost one ``make``.
    Another backward pass through the same graph computes it once more.

    result: the tensor between its first and its last use; else None.
    """

    def __init__(self, device: torch.device, make: Callable[..., Tensor], *inputs: "Tensor | Recomputed"):
        self._make, self._device = make, device.type
        self._inputs = [i.share() if isinstance(i, Recomputed) else i.detach() for i in inputs]
        self._autocast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        self._uses = self._left = 0
        self.result: Tensor | None = None

    def share(self) -> "Recomputed":
        """Announce one more use; return self."""
        self._uses += 1
        return self

    def take(self) -> Tensor:
        """Return the tensor: computed for the first of the announced uses, freed with the last."""
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
    """Record on ``tensor``, which make(*inputs) has computed, how to recompute it; inputs are recomputed, too, if they
    can be."""
    if torch.is_grad_enabled():
        made: Any = tensor  # for the type checker: Tensor has no such attribute
        made.recomputed = Recomputed(tensor.device, make, *(getattr(i, "recomputed", i) for i in inputs))
    return tensor


def _not_keeping(tensor: Tensor) -> AbstractContextManager[Any]:
    """Inside, make autograd save how to recompute ``tensor``, if that is known, wherever it would save ``tensor``.

    The tensor and its views are recognised by their memory address, because autograd hands a new tensor object to these
    hooks each time. That costs the host one comparison.
    """
    recomputed = getattr(tensor, "recomputed", None)
    if recomputed is None:
        return nullcontext()
    place = tensor.data_ptr(), tensor.numel()

    def pack(kept: Tensor):
        # (A matrix product saves a view of its input, (tokens, D).)
        return (recomputed.share(), kept.shape) if (kept.data_ptr(), kept.numel()) == place else kept

    def unpack(packed) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].take().view(packed[1])

    return saved_tensors_hooks(pack, unpack)


def _as_a_linear_sees(x: Tensor) -> Tensor:
    """Convert ``x`` to autocast's dtype. A linear layer would make and save this copy itself, and it could not be
    recomputed."""
    if not torch.is_autocast_enabled(x.device.type):
        return x
    dtype = torch.get_autocast_dtype(x.device.type)
    return x if x.dtype == dtype else _remember(x.to(dtype), lambda x: x.to(dtype), x)


def recomputing(ops: BlockOps, level: str) -> BlockOps:
    """Wrap ``ops`` (torch's or the kernels' of opendit.kernels.select, not FP8's) so that they save less for the
    backward pass.

    Gradients are the same but for the LayerNorm's rounding, see above. Weights must not change or be freed between
    forward and backward. Not for torch.compile, which has no such hooks.

    Args:
        level: none, norms, cheap or mlp.
    """
    if level == "none":
        return ops
    norm, forked = ops.layernorm_modulate, ops.residual_layernorm_modulate
    joined = ops.linear_gate_residual_layernorm_modulate
    kernel, gelu_kernel = ops.kernel("layernorm_modulate"), ops.kernel("linear_gelu")
    fused = kernel is not None and kernel.keeps == ("x",)
    # The fused kernel saves only its input; torch's expressions also save what lies between norm and modulation.
    thrifty = norm if fused else functools.partial(checkpoint, norm, use_reentrant=False, preserve_rng_state=False)
    activation = gelu_kernel and gelu_kernel.after_product  # adds the bias, too

    # of_rows: nothing, or a pack's sample_of_row.
    def layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor, *of_rows: Tensor) -> Tensor:
        return _remember(thrifty(x, shift, scale, *of_rows), norm, x, shift, scale, *of_rows)

    def residual_layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor, *of_rows: Tensor) -> tuple[Tensor, Tensor]:
        assert forked is not None, "where there is none, nor is there this"
        same, y = forked(x, shift, scale, *of_rows)
        return same, _remember(y, norm, x, shift, scale, *of_rows)

    def linear_heads(x: Tensor, layer: Projection, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        x = _as_a_linear_sees(x)
        with _not_keeping(x):
            return ops.linear_heads(x, layer, num_heads)

    def linear_gelu(x: Tensor, layer: Projection) -> Tensor:
        x = _as_a_linear_sees(x)
        after = None if layer.bias is None else activation  # without a bias, kernels leave GELU to torch
        product = layer if after is None else layer.product

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
        assert joined is not None, "where there is none, nor is there this"
        z = _as_a_linear_sees(z)
        with _not_keeping(z):
            h, y = joined(x, gate, z, layer, shift, scale, *of_rows)
        return h, _remember(y, norm, h, shift, scale, *of_rows)

    return replace(
        ops,
        layernorm_modulate=layernorm_modulate,
        linear_heads=linear_heads,
        linear_gelu=linear_gelu,
        linear_gate_residual=linear_gate_residual,
        linear_gate_residual_layernorm_modulate=joined and linear_gate_residual_layernorm_modulate,
        residual_layernorm_modulate=forked and residual_layernorm_modulate,
    )


def recompute_in(model: DiT, level: str) -> None:
    """Make the blocks and the final layer of ``model`` (any model with BlockOps) recompute what ``level`` says: none,
    norms, cheap, half or mlp. Call it after ``model.use``, which sets the operations that this wraps."""
    for number, block in enumerate(model.blocks):
        alternating = "mlp" if number % 2 else "cheap"
        block.ops = recomputing(block.ops, alternating if level == "half" else level)
    model.final_layer.ops = recomputing(model.final_layer.ops, "none" if level == "none" else "cheap")
