"""AdamW for a model whose parameters are cut by ``fully_shard``, or whole on the only rank."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from opendit.kernels.adamw_ema import BLOCK
from opendit.kernels.averages import SeparateAverages
from opendit.kernels.common import kernels_available
from opendit.parallel.adamw import FusedAdamW, OnePassAdamW
from opendit.parallel.float8_gather import Float8Shards
from opendit.parallel.host_memory import HostMemory, SideStream, padded
from opendit.parallel.loss_scale import LossScale
from opendit.parallel.tensor.gradients import ReplicatedGradients


class ShardedOptimizer:
    """Steps the shards that this rank holds, for which no rank waits but for the norm of the gradients of all.

    With ``offload`` the averages, or averages and moments, lie in host memory, page-locked where there is a GPU. The
    step itself needs the moments, which travel by copies through a ring buffer of device memory: on an H200 the step of
    300 M weights takes 49 ms so, and 57 by the kernel's own loads and stores (benchmarks/bench_offload.py). The
    averages it leaves to a side stream, on which a kernel moves them in place while the next step's forward and
    backward passes run, and which meets the next step before it changes the masters. The numbers are the same bits.
    Whoever reads or sets such state on the host calls :meth:`wait` before.

    Args:
        adam: has the settings; its parameters become the masters.
        parameters: those that are trained, by name: fp32 DTensors, or plain tensors of any precision.
        group: ranks that hold the shards of one copy of the model; None: this one alone does.
        grad_clip: bound of the norm of all gradients, 0 for none.
        loss_scale: of fp16.
        float8: what is gathered in float8 of these parameters, made anew when they change; None: nothing is.
        offload: one of ``opendit.config.plugins.OFFLOAD``.
        replicated: which gradients are parts of a sum over ranks that divide the layers; None: none are.

    Raises:
        ValueError: ``offload`` on a GPU that can't run the kernels.

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
        offload: str = "none",
        float8: Float8Shards | None = None,
        replicated: ReplicatedGradients | None = None,
    ):
        self._parameters, self._group, self._float8 = list(parameters.values()), group, float8
        self._replicated = replicated
        self._clip, self.loss_scale = grad_clip, loss_scale
        own = [local_part(parameter.detach()) for parameter in self._parameters]
        self.masters = {name: part.float() for name, part in zip(parameters, own, strict=True)}
        (settings,) = adam.param_groups
        settings["params"] = list(self.masters.values())
        self._working = None if own[0].dtype == torch.float32 else own
        self._adamw = OnePassAdamW(adam, settings["params"], working=self._working)
        self._adamw.counted = replicated and replicated.counted
        self._device, self._offload = own[0].device, offload
        self._averages: SeparateAverages | None = None
        self._side = None if offload == "none" else SideStream(self._device)
        self._updated: torch.cuda.Event | None = None
        available, why = kernels_available(self._device, torch.float32)
        if offload != "none" and self._device.type == "cuda" and not available:
            raise ValueError(f"--offload {offload}: only the kernels reach host memory, and {why}; use --offload none")
        if offload == "state":
            rows, both = self._in_host_memory(2)
            self._adamw.staged = rows
            moments = zip(*both, strict=True)
            for key, (exp_avg, exp_avg_sq) in zip(settings["params"], moments, strict=True):
                step = torch.zeros((), dtype=torch.float32, device=self._device)
                adam.state[key] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def _in_host_memory(self, count: int) -> tuple[Tensor, list[list[Tensor]]]:
        """``count`` tensors of zeros for each master, and the rows that they are views of, one for each of ``count``:
        in which every tensor begins where a block of the kernels does."""
        masters = list(self.masters.values())
        size = sum(padded(master.numel(), BLOCK) for master in masters)
        memory = HostMemory(count * size, self._device)
        made = [memory.take(masters, row * size, BLOCK)[0] for row in range(count)]
        return memory.numbers.view(count, size), made

    @property
    def gradients(self) -> list[Tensor | None]:
        """This rank's gradients of the backward passes since the last step, in the order of the parameters."""
        return [None if p.grad is None else local_part(p.grad) for p in self._parameters]

    @gradients.setter
    def gradients(self, gradients: list[Tensor | None]) -> None:
        """Set the gradients; only for parameters that are not sharded."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def new_averages(self, count: int) -> list[list[Tensor]]:
        """Memory for averages, where ``offload`` has them: for each its tensors, in the order of the masters."""
        if self._offload == "none":
            return [[torch.empty_like(master) for master in self.masters.values()] for _ in range(count)]
        return self._in_host_memory(count)[1]

    def attach_averages(
        self, averages: list[list[Tensor]], decays: Callable[[Tensor], Tensor], updates: Tensor
    ) -> None:
        """The steps also update these averages, which lie where :meth:`new_averages` has made them; see
        :meth:`opendit.kernels.adamw_ema.FusedStep.attach`."""
        if self._side is not None:
            self._averages = SeparateAverages(list(self.masters.values()), averages, block=BLOCK)
            averages = []
        self._adamw.attach_averages(averages, decays, updates)

    def wait(self) -> None:
        """The host waits until state in host memory is that of the last step; for nothing where none lies there."""
        if self._side is not None:
            self._side.finish()
        if self._updated is not None:
            self._updated.synchronize()
        if self._averages is not None:
            self._averages.access.finish()
        self._adamw.finish()

    def backward(self, loss: Tensor) -> None:
        """Adds to the gradients, those of fp16 times the loss scale."""
        (loss if self.loss_scale is None else loss * self.loss_scale.scale).backward()

    def backward_from(self, output: Tensor | GradientEdge, gradient: Tensor) -> None:
        """The same of an output whose gradient, scaled already, is known."""
        torch.autograd.backward(output, gradient)

    def step(self) -> None:
        """Clips, updates masters, moments, averages and working weights, and clears the gradients.

        If a gradient of any rank is not finite, nothing is changed.
        """
        if self._side is not None:
            self._side.join()  # what it still does is the last step's, and needs that step's masters and scalars
        fused, adam = self._adamw.fused(), self._adamw.adam.param_groups[0]
        gradients = self.gradients
        if self._replicated is not None:
            self._replicated.sum(gradients)
        total = fused.square_sum(gradients)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        if self._replicated is not None:
            self._replicated.total(total)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        self.grad_norm, self.finite = fused.decide(total, scale=scale, clip=self._clip)
        fused.update(lr=adam["lr"], weight_decay=adam["weight_decay"])
        self._refresh_float8()
        if self._averages is not None and self._side is not None:
            self._side.run(partial(self._averages.move, fused.scalars))
        if self._offload == "state" and self._device.type == "cuda":
            self._updated = torch.cuda.Event()
            self._updated.record(torch.cuda.current_stream(self._device))
        for parameter in self._parameters:
            parameter.grad = None
        if self.loss_scale is not None:
            self.loss_scale.update(self.finite)

    @torch.no_grad()
    def masters_to_working(self) -> None:
        """Rounds the masters to the precisions of the forward pass, where weights in them are kept."""
        if self._working is not None:
            torch._foreach_copy_(self._working, list(self.masters.values()))
        self._refresh_float8()

    def _refresh_float8(self) -> None:
        if self._float8 is not None:
            self._float8.refresh()


@torch.no_grad()  # so that it is no operation of autograd's, of which every step would have one a parameter
def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's shard on this rank, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
