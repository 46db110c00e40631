"""AdamW for a model whose parameters are cut by ``fully_shard``, or whole on the only rank."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opendit.parallel.adamw import FusedAdamW, OnePassAdamW
from opendit.parallel.loss_scale import LossScale


class ShardedOptimizer:
    """Steps the shards that this rank holds, for which no rank waits but for the norm of the gradients of all.

    Args:
        adam: has the settings; its parameters become the masters.
        parameters: those that are trained, by name: fp32 DTensors, or plain tensors of any precision.
        group: ranks that hold the shards of one copy of the model; None: this one alone does.
        grad_clip: bound of the norm of all gradients, 0 for none.
        loss_scale: of fp16.

    Attributes:
        masters: the fp32 shards by name; the parameters' own memory where those are fp32.
        grad_norm, finite: of the last step, see :meth:`opendit.kernels.adamw_ema.FusedStep.decide`.
    """

    grad_norm: Tensor
    finite: Tensor

    def __init__(
        self,
        adam: FusedAdamW,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        grad_clip: float,
        loss_scale: LossScale | None = None,
    ):
        self._parameters, self._group = list(parameters.values()), group
        self._clip, self.loss_scale = grad_clip, loss_scale
        own = [local_part(parameter.detach()) for parameter in self._parameters]
        self.masters = {name: part.float() for name, part in zip(parameters, own, strict=True)}
        (settings,) = adam.param_groups
        settings["params"] = list(self.masters.values())
        self._working = None if own[0].dtype == torch.float32 else own
        self._adamw = OnePassAdamW(adam, settings["params"], working=self._working)

    @property
    def gradients(self) -> list[Tensor | None]:
        """What the backward passes since the last step have left on this rank, in the order of the parameters."""
        return [None if p.grad is None else local_part(p.grad) for p in self._parameters]

    @gradients.setter
    def gradients(self, gradients: list[Tensor | None]) -> None:
        """Of whole parameters alone."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def attach_averages(self, averages: list[list[Tensor]], decays, updates: Tensor) -> None:
        """The steps also update these averages; see :meth:`opendit.kernels.adamw_ema.FusedStep.attach`."""
        self._adamw.attach_averages(averages, decays, updates)

    def backward(self, loss: Tensor) -> None:
        """Adds to the gradients, those of fp16 times the loss scale."""
        (loss if self.loss_scale is None else loss * self.loss_scale.scale).backward()

    def step(self) -> None:
        """Clips, updates masters, moments, averages and working weights, and clears the gradients.

        If a gradient of any rank is not finite, nothing is changed.
        """
        fused, adam = self._adamw.fused(), self._adamw.adam.param_groups[0]
        total = fused.square_sum(self.gradients)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        self.grad_norm, self.finite = fused.decide(total, scale=scale, clip=self._clip)
        fused.update(lr=adam["lr"], weight_decay=adam["weight_decay"])
        for parameter in self._parameters:
            parameter.grad = None
        if self.loss_scale is not None:
            self.loss_scale.update(self.finite)

    @torch.no_grad()
    def masters_to_working(self) -> None:
        """Rounds the masters to the precision of the forward pass, where weights in it are kept."""
        if self._working is not None:
            torch._foreach_copy_(self._working, list(self.masters.values()))


@torch.no_grad()  # so that it is no operation of autograd's, of which every step would have one a parameter
def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's shard on this rank, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
