"""Evaluate the trained network without gradients, for objectives whose targets depend on the network's output."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from opendit.models.attention import Attention, local_attention
from opendit.models.dit import DiT
from opendit.models.layers import BlockOps
from opendit.parallel.engines import Engine


@contextmanager
def torch_operations(model: DiT) -> Iterator[None]:
    """Context in which a model uses plain torch operations instead of kernels, because these have forward-mode
    derivatives."""
    parts = (model, *model.blocks, model.final_layer)
    attentions = [module for module in model.blocks.modules() if isinstance(module, Attention)]
    before = [part.ops for part in parts], [module.attend for module in attentions]
    for part in parts:
        part.ops = BlockOps()
    for module in attentions:
        module.attend = local_attention
    try:
        with sdpa_kernel([SDPBackend.MATH]):
            yield
    finally:
        for part, ops in zip(parts, before[0], strict=True):
            part.ops = ops
        for module, attend in zip(attentions, before[1], strict=True):
            module.attend = attend


class TargetNetwork:
    """Implementation of :class:`opendit.diffusion.objectives.meanflow.Network` with the trained model.

    Args:
        engine: engine of the model. Every rank must hold the whole model.
        labels: (B,) int64 labels of the micro-batch.
    """

    dropped: Tensor

    def __init__(self, engine: Engine, labels: Tensor):
        self._engine, self._model, self._labels = engine, cast(DiT, engine.module), labels
        self.dropped = labels == self._model.config.num_classes

    @torch.no_grad()
    def __call__(self, x: Tensor, time: Tensor, rows: Tensor) -> Tensor:
        return self._output(x, time, self._labels[rows])

    @torch.no_grad()
    def unconditional(self, x: Tensor, time: Tensor) -> Tensor:
        return self._output(x, time, torch.full_like(self._labels, cast(int, self._model.config.num_classes)))

    @torch.no_grad()
    def derivative(self, x: Tensor, time: Tensor, dx: Tensor, dtime: Tensor, rows: Tensor) -> Tensor:
        with torch_operations(self._model), forward.dual_level():
            dual = forward.make_dual(x, dx.to(x.dtype)), forward.make_dual(time, dtime)
            _, tangent = forward.unpack_dual(self._output(*dual, self._labels[rows]))
            assert tangent is not None  # the output depends on both inputs, so it has a tangent
            return tangent

    def _output(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        with self._engine.autocast():
            return self._model(x, time, labels).float()
