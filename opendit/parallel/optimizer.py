"""AdamW for a rank's shards in few passes over memory, and the loss scale of fp16.

:class:`OnePassAdamW` computes the step of zero2 and fsdp. :class:`ShardedOptimizer` is the optimizer of fsdp.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from opendit.kernels.adamw_ema import BLOCK, FusedStep
from opendit.kernels.averages import SeparateAverages
from opendit.kernels.common import kernels_available
from opendit.kernels.eight_bit_moments import ELEMENTS, EightBits, by_size, first_of, new_moment
from opendit.kernels.tensor_table import device_of
from opendit.parallel.fsdp import Float8Shards
from opendit.parallel.host_memory import HostMemory, SideStream, padded
from opendit.parallel.muon import Muon
from opendit.parallel.tensor import ReplicatedGradients

# Colossal-AI's values, so that fp16 runs skip the same steps under all plugins.
INITIAL, GROWTH, BACKOFF, INTERVAL, HYSTERESIS = 2.0**16, 2.0, 0.5, 1000, 2
LEAST, MOST = 1.0, 2.0**32


class LossScale:
    """Factor of the loss that prevents gradients from vanishing in fp16. The scale stays on the device, at a fixed
    address for CUDA graphs.

    The scale doubles after INTERVAL consecutive steps with finite gradients (Micikevicius et al., "Mixed Precision
    Training", ICLR 2018, sec. 3.2). After each doubling, the first HYSTERESIS - 1 steps with non-finite gradients do
    not change the scale. Each further such step halves the scale.
    """

    def __init__(self, device: torch.device):
        self.scale = torch.full((), INITIAL, dtype=torch.float32, device=device)
        self.growth = torch.zeros((), dtype=torch.int64, device=device)
        self.hysteresis = torch.zeros_like(self.growth)

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Update the scale after a step. finite: 0-dim bool, True if the step's gradients were finite."""
        in_a_row = (self.growth + 1) * finite
        grows = in_a_row == INTERVAL
        not_finite = (self.hysteresis + ~finite) * ~grows
        halves = ~finite & (not_finite >= HYSTERESIS)
        self.scale *= torch.where(grows, GROWTH, torch.where(halves, BACKOFF, 1.0))
        self.scale.clamp_(LEAST, MOST)
        self.growth.copy_(in_a_row * ~grows)
        self.hysteresis.copy_(not_finite)

    def state(self) -> dict[str, float]:
        return dict(scale=self.scale.item(), growth=self.growth.item(), hysteresis=self.hysteresis.item())

    def load(self, state: dict[str, float]) -> None:
        """Load the numbers of :meth:`state`, or of another plugin's scaler (without hysteresis)."""
        self.scale.fill_(state["scale"])
        self.growth.fill_(int(state["growth"]))
        self.hysteresis.fill_(int(state.get("hysteresis", 0)))


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW on fp32 weights. Gradients may be bf16 or fp16. Gemini's optimizer passes ``div_scale``, the
    divisor of the gradients.

    Colossal-AI's CPU Adam ignores ``div_scale`` for bf16 gradients, so clipping would silently fail. Colossal-AI's
    HybridAdam compiles two extensions for minutes.
    """

    # maximum number of elements in one update, because an update copies gradients to fp32
    elements = 2**26
    # undecorated, because torch's decorator would import torch's compiler (1 s)
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)

    def __init__(self, params: Any, eight_bits: bool = False, **kwargs: Any):
        super().__init__(params, fused=True, **kwargs)
        self._eight_bits = eight_bits  # True to store moments in 8 bits
        if eight_bits:
            self.elements = ELEMENTS
        self.of_muon: set[Tensor] = set()  # Muon's parameters, without second moments

    def init_state(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                if signed or p not in self.of_muon:
                    state[name] = new_moment(p, signed) if self._eight_bits else torch.zeros_like(p)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None, div_scale: float = -1) -> None:
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for start, stop in by_size([p.numel() for p in trained], self.elements):
                params = trained[start:stop]
                grads = [p.grad.to(p.dtype) for p in params if p.grad is not None]
                if div_scale > 0:
                    grads = [g if g is not p.grad else g.clone() for g, p in zip(grads, params, strict=True)]
                    torch._foreach_mul_(grads, 1.0 / div_scale)
                states = [self.init_state(p) for p in params]
                kept = [[s[name] for s in states] for name in ("exp_avg", "exp_avg_sq")]
                pairs = [list(zip(moments, params, strict=True)) for moments in kept]
                moments = [[m.decode().view(p.shape) if isinstance(m, EightBits) else m for m, p in ps] for ps in pairs]
                adamw(
                    [p.data for p in params],
                    grads,
                    moments[0],
                    moments[1],
                    [],
                    [s["step"] for s in states],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                for moment, values in zip(sum(kept, []), sum(moments, []), strict=True):
                    if isinstance(moment, EightBits):
                        moment.encode(values)


class OnePassAdamW:
    """Computes the step of a :class:`FusedAdamW` with :class:`FusedStep`, in two passes over memory. The first pass
    computes the gradients' norm. The second pass updates moments, masters, averages and working weights. The host does
    not wait.

    Args:
        adam: optimizer with the settings, in one parameter group, and the moments.
        keys: the masters (fp32, 1-d or contiguous). They are the keys of ``adam.state``.
        sizes: number of leading elements of each master to update; None for all.
        working: copies of the masters in the precision of the forward pass.

    Attributes:
        counted: see :class:`FusedStep`. Set it before the first step.
        staged: host memory with the moments, to copy through the device. Set it before the first step.
    """

    staged: Tensor | None = None
    counted: Sequence[bool] | None = None

    def __init__(
        self,
        adam: FusedAdamW,
        keys: Sequence[Tensor],
        sizes: Sequence[int] | None = None,
        working: Sequence[Tensor] | None = None,
    ):
        self.adam, self._keys, self._working = adam, list(keys), working
        self._sizes = [key.numel() for key in keys] if sizes is None else sizes
        self._averages: tuple[Any, ...] | None = None
        self._fused: FusedStep | None = None

    def attach_averages(
        self, averages: Sequence[Sequence[Tensor]], decays: Callable[..., Any], updates: Tensor
    ) -> None:
        self._averages = averages, decays, updates
        if self._fused is not None:
            self._fused.attach(*self._averages)

    def fused(self) -> FusedStep:
        """Return the fused step. Load the moments before the first call. All parameters share one step count."""
        (settings,) = self.adam.param_groups
        states = [self.adam.init_state(key) for key in self._keys]
        if self._fused is None:
            self._fused = FusedStep(
                self._own(self._keys),
                self._own([state["exp_avg"] for state in states]),
                self._own([state.get("exp_avg_sq") for state in states]),
                None if self._working is None else self._own(self._working),
                count=torch.zeros((), dtype=torch.float32, device=device_of(self._keys)),
                betas=settings["betas"],
                eps=settings["eps"],
                counted=self.counted,
            )
            if self._averages is not None:
                self._fused.attach(*self._averages)
            if self.staged is not None and self._fused.kernels:
                self._fused.stage(self.staged)
        if any(state["step"] is not self._fused.count for state in states):  # new or loaded: share one count
            self._fused.count.fill_(states[0]["step"])
            for state in states:
                state["step"] = self._fused.count
        return self._fused

    def finish(self) -> None:
        """Make the host wait for moments that are being copied back to host memory."""
        if self._fused is not None:
            self._fused.access.finish()

    def _own(self, tensors: Sequence[Any]) -> list[Any]:
        pairs = zip(tensors, self._sizes, strict=True)
        return [
            t if t is None or isinstance(t, Tensor) and t.numel() == size else first_of(t, size) for t, size in pairs
        ]


class ShardedOptimizer:
    """Optimizer of this rank's shards.

    ``offload`` stores the averages, or averages and moments, in host memory, page-locked if there is a GPU. Results
    have the same bits as without offload. The step copies moments through a ring buffer of device memory: 49 ms for
    300 M weights, compared with 57 ms for direct access (H200, benchmarks/bench_offload.py).

    A kernel on a side stream updates averages in host memory during the next forward and backward pass. Kernels access
    masters in host memory in place. Call :meth:`wait` before reading or setting state in host memory.

    Args:
        adam: optimizer with the settings. The masters become its parameters.
        parameters: the trained parameters by name: fp32 DTensors, or plain tensors of any precision.
        group: ranks that divide one copy of the model; None for a single rank.
        grad_clip: bound of the norm of all gradients; 0 for none.
        device: device that computes the step. Masters and gradients may also be in page-locked host memory.
        float8: parameters that are gathered in float8. They are quantised after each step.
        replicated: sums the gradients of replicated parameters.

    Raises ValueError for ``offload`` on a GPU that can't run the kernels.
    """

    grad_norm: Tensor
    finite: Tensor
    muon: Muon | None = None

    def __init__(
        self,
        adam: FusedAdamW,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        grad_clip: float,
        loss_scale: LossScale | None = None,
        device: torch.device,
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
        self._device, self._offload = device, offload
        self._averages: SeparateAverages | None = None
        self._side = None if offload == "none" else SideStream(self._device)
        self._updated: torch.cuda.Event | None = None
        self._hosted = any(master.device != device for master in self.masters.values())
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
        """Allocate ``count`` tensors of zeros for each master. Return (rows (count, size), each row's views with the
        masters' shapes). Every view is aligned to a block of the kernels."""
        masters = list(self.masters.values())
        size = sum(padded(master.numel(), BLOCK) for master in masters)
        memory = HostMemory(count * size, self._device)
        made = [memory.take(masters, row * size, BLOCK)[0] for row in range(count)]
        return memory.numbers.view(count, size), made

    @property
    def gradients(self) -> list[Tensor | None]:
        """Gradients that this rank has accumulated since the last step, in the order of the parameters."""
        return [None if p.grad is None else local_part(p.grad) for p in self._parameters]

    @gradients.setter
    def gradients(self, gradients: list[Tensor | None]) -> None:
        """Set the gradients. Works only for parameters that are not sharded."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def new_averages(self, count: int) -> list[list[Tensor]]:
        """Allocate ``count`` averages in host or device memory, depending on ``offload``. Each average is a list of
        tensors in the order of the masters."""
        if self._offload == "none":
            return [[torch.empty_like(master) for master in self.masters.values()] for _ in range(count)]
        return self._in_host_memory(count)[1]

    def attach_averages(
        self, averages: list[list[Tensor]], decays: Callable[[Tensor], Tensor], updates: Tensor
    ) -> None:
        """Let later steps also update these averages from :meth:`new_averages`. See
        :meth:`opendit.kernels.adamw_ema.FusedStep.attach`."""
        if self._side is not None:
            self._averages = SeparateAverages(list(self.masters.values()), averages, block=BLOCK)
            averages = []
        self._adamw.attach_averages(averages, decays, updates)

    def wait(self) -> None:
        """Make the host wait until the last step's updates of host memory are complete."""
        if self._side is not None:
            self._side.finish()
        if self._updated is not None:
            self._updated.synchronize()
        if self._averages is not None:
            self._averages.access.finish()
        self._adamw.finish()

    def backward(self, loss: Tensor) -> None:
        (loss if self.loss_scale is None else loss * self.loss_scale.scale).backward()

    def backward_from(self, output: Tensor | GradientEdge, gradient: Tensor) -> None:
        torch.autograd.backward(output, gradient)

    def step(self) -> None:
        """Clip, update masters, moments, averages and working weights, and clear the gradients. No rank updates if any
        rank has a gradient that is not finite."""
        if self._side is not None:
            self._side.join()  # the side stream may still read the last step's masters and scalars
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
        if self.muon is not None:
            self.muon.direct(fused)
        fused.update(lr=adam["lr"], weight_decay=adam["weight_decay"])
        self._refresh_float8()
        if self._averages is not None and self._side is not None:
            self._side.run(partial(self._averages.move, fused.scalars))
        if self._offload == "state" and self._device.type == "cuda":
            self._updated = torch.cuda.Event()
            self._updated.record(torch.cuda.current_stream(self._device))
            # Wait, because torch's allocator would reuse the gradients' host memory while kernels still read it.
            if self._hosted:
                self._updated.synchronize()
        for parameter in self._parameters:
            parameter.grad = None
        if self.loss_scale is not None:
            self.loss_scale.update(self.finite)

    @torch.no_grad()
    def masters_to_working(self) -> None:
        if self._working is not None:
            torch._foreach_copy_(self._working, list(self.masters.values()))
        self._refresh_float8()

    def _refresh_float8(self) -> None:
        if self._float8 is not None:
            self._float8.refresh()


@torch.no_grad()  # avoids one autograd operation per parameter and step
def local_part(tensor: Tensor) -> Tensor:
    """Return a DTensor's shard on this rank. Other tensors are returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build_optimizer(
    module: nn.Module,
    plugin: str,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eight_bits: bool = False,
) -> tuple[FusedAdamW, str]:
    """Return (the optimizer for ``plugin``, a line with its name and the reason). Under zero2 and fsdp,
    :class:`OnePassAdamW` computes the steps, and uses only this optimizer's settings and state."""
    trained = [p for p in module.parameters() if p.requires_grad]
    settings = dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=1e-8)
    optimizer = FusedAdamW(trained, eight_bits, **settings)
    moments = ", moments in 8 bits between steps" if eight_bits else ""
    if plugin not in ("zero2", "fsdp"):
        return optimizer, f"torch's fused AdamW{moments}"
    available, why = kernels_available("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    kind = "AdamW, averages and working weights in one kernel" if available else "AdamW by torch"
    return optimizer, f"{kind}{moments} ({why})"
