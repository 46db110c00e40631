"""The interface of training engines: forward, backward, step, and the layout of their state.

Whatever the plugin, the fp32 master weights, the optimizer's moments and the EMA are seen the same way: every rank
holds one fp32 shard of every parameter, and ``layout`` says which slices of the canonical tensor it is, so shards can
be gathered into canonical full tensors, and full tensors loaded, under any plugin and any number of ranks.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from opendit.parallel.apply import Sharding
from opendit.parallel.layout import Cut, Layout, Shard, flat_cut
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline.stages import on_every_stage
from opendit.parallel.tensor import divided_parameters
from opendit.parallel.tensor.gradients import ReplicatedGradients

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MOMENTS = ("exp_avg", "exp_avg_sq")


Values = Callable[[str, Shard], Tensor]  # of a parameter's shard


@dataclass
class StepResult:
    """The results of a step, as 0-dim tensors on the device. Reading one waits for the device; a step does not.

    grad_norm: unscaled and before clipping. finite: whether it was, and the step was taken; if not, no weight, moment
    or average has changed. loss_scale: of fp16's scaler, else 1. loss: the mean of the step's micro-batches on this
    rank, which the runner fills in.
    """

    grad_norm: Tensor
    finite: Tensor
    loss_scale: Tensor | float = 1.0
    loss: Tensor | None = None


@dataclass(frozen=True)
class Settings:
    """The settings of an engine's optimizer.

    lr, weight_decay, betas: of AdamW. grad_clip: bound of the global gradient norm, 0 for none. grad_accumulation:
    micro-batches in a step. sharding, offload: only for fsdp; offload names the state that lies in host memory.
    """

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float
    grad_accumulation: int
    sharding: Sharding = Sharding()
    offload: str = "none"


class Engine(ABC):
    """Drives a module under one plugin. Build with :func:`build_engine`.

    skipped, skipped_in_a_row: steps that were not taken, 0-dim int64 tensors on the device.
    shapes: the canonical shape of every trained parameter. parts: where of every canonical parameter that of a module
    is whose layers the ranks of ``tp`` divide: that of ``module.get_parameter(name)`` while it is whole here. shared:
    the parameters that all ranks of a pipeline have.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, precision: str, settings: Settings, initial: Values | None = None
    ):
        self.mesh, self.precision, self.dtype = mesh, precision, PRECISIONS[precision]
        self.divided = divided_parameters(module)
        self._local_shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
        canonical = {n: self.divided[n].shape if n in self.divided else s for n, s in self._local_shapes.items()}
        self.shapes = {n: canonical[n] for n, p in module.named_parameters() if p.requires_grad}
        self.shared, of_tensor = on_every_stage(module, canonical), {}
        for name in canonical:
            of_tensor[name] = [cut for cut in self._division(name) if cut.group == "tp"]
        self.parts = Layout(mesh, canonical, of_tensor, self.shared)
        if self.divided and initial is None:
            raise ValueError("a model whose layers ranks divide needs initial values, of which each takes its part")
        self.replicated = None
        if mesh.tp_size > 1 or mesh.pp_size > 1:
            self.replicated = ReplicatedGradients(mesh, list(self.shapes), self.divided, self.shared)
        # Plugins cast weights and buffers to half before they make their fp32 copies; the masters must be
        # the fp32 initialisation itself, and position tables stay fp32.
        trained = _values_of(module) if initial is None else initial
        buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        self.model, self.optimizer, adam, self.optimizer_name = self._wrap(module, settings)
        self.module, self.adam = module, adam
        self.grad_clip = settings.grad_clip
        self.skipped = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self.skipped_in_a_row = torch.zeros_like(self.skipped)
        for name, buffer in module.named_buffers():
            buffer.data = buffers[name].to(mesh.device)
        self._locate()
        for name in self.shapes:
            self.set_master(name, trained(name, self.held(name)))
        if initial is not None:
            self._fill_frozen(initial)
        self.finish_loading()

    plugin: str  # its name in --plugin
    gradients: Any  # a tensor for each trained parameter, or None; of plugins whose passes can be recorded

    @abstractmethod
    def _wrap(self, module: nn.Module, settings: Settings) -> tuple[Any, Any, Any, str]:
        """Puts the module on this rank's device and under the plugin: (what forward calls, what steps, the AdamW that
        has the learning rate and the state, one line that says which AdamW it is and why)."""

    # ---------------------------------------------------------------- training

    whole = True  # every rank holds all working weights: ``module`` can be called by itself, in ``autocast()``
    no_graph: str  # why forward and backward can't be recorded as a CUDA graph; empty if they can

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context that a forward pass of ``module`` runs in."""
        return contextlib.nullcontext()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model(*args, **kwargs)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Wraps forward and backward of one micro-batch; ``last``: the step follows."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor | GradientEdge, gradient: Tensor | None = None) -> None:
        """Adds the gradients of a loss; or of a pipeline's stage whose output ``loss`` stands for and is not the loss:
        ``gradient`` is that of the output, scaled as the loss was."""
        if gradient is None:
            self.optimizer.backward(loss)
        else:
            self.optimizer.backward_from(loss, gradient)

    def step(self) -> StepResult:
        """Clips, updates the masters and the working weights, and clears the gradients."""
        result = self._step()
        self.skipped += ~result.finite
        self.skipped_in_a_row.add_(1).mul_(~result.finite)
        return result

    @abstractmethod
    def _step(self) -> StepResult:
        """``step`` without the counting."""

    def gradient_shards(self) -> dict[str, Tensor | None] | None:
        """Return this rank's part of each parameter's gradient since the last step, for reading; None if the engine
        can't tell."""
        return None

    def new_averages(self, count: int) -> list[dict[str, Tensor]]:
        """Memory for averages of the masters, each a shard of every parameter, where this engine keeps them."""
        return [{name: torch.empty_like(part) for name, part in self.masters().items()} for _ in range(count)]

    def attach_averages(
        self, averages: list[dict[str, Tensor]], decays: Callable[[Tensor], Tensor], updates: Tensor
    ) -> bool:
        """Asks the optimizer to update these averages of the masters in its own pass over memory, if it has one:
        ``decays(updates)`` gives the decays, and ``updates`` is counted up. Returns whether it will."""
        return False

    def wait_for_averages(self) -> None:
        """Until the averages that were attached are those of the last step, for the host, too, if they lie there: call
        it before they are read or set."""
        return None

    def _on_host(self, grad_norm: float, loss_scale: float) -> StepResult:
        """The result of a step whose norm the host has read."""
        norm = torch.tensor(grad_norm, dtype=torch.float64)
        return StepResult(norm, torch.tensor(math.isfinite(grad_norm), device=self.mesh.device), loss_scale)

    def set_lr(self, lr: float) -> None:
        """The learning rate of all parameters from the next step on."""
        for group in self.adam.param_groups:
            group["lr"] = lr

    # ---------------------------------------------------------------- state

    layout: Layout  # of the masters, the moments and whatever else is kept by parameter
    _optimizer_keys: dict[str, Tensor | None]  # per parameter: the tensor the optimizer's state is keyed by

    @abstractmethod
    def _locate(self) -> None:
        """Fills ``layout`` and ``_optimizer_keys``."""

    @abstractmethod
    def master(self, name: str) -> Tensor:
        """This rank's live fp32 shard of a parameter; a view: changed by steps."""

    def held(self, name: str) -> Shard:
        """Return the shard of a parameter's master and moments that this rank has in memory, and must get when they are
        set. It is larger than in ``layout`` if that is a view of whole tensors."""
        return self.layout.local(name)

    @torch.no_grad()
    def set_master(self, name: str, part: Tensor) -> None:
        """Sets what this rank holds (:meth:`held`) of a parameter's master; finish_loading follows."""
        self.master(name).copy_(part)

    def set_shard(self, name: str, shard: Tensor) -> None:
        """:meth:`set_master` of this rank's shard as ``layout`` has it; collective, and finish_loading follows."""
        self.set_master(name, shard)

    @torch.no_grad()
    def _fill_frozen(self, values: Values) -> None:
        """Gives the weights that are not trained their values."""
        for name, parameter in self.module.named_parameters():
            if name not in self.shapes:
                part, shard = self._frozen_part(name, parameter)
                part.copy_(values(name, shard))

    def _frozen_part(self, name: str, parameter: Tensor) -> tuple[Tensor, Shard]:
        """This rank's memory of a weight that is not trained, and which shard of it that is."""
        return parameter, self.parts.local(name)

    def load_master(self, name: str, full: Tensor) -> None:
        """:meth:`set_master` of the full tensor's part (call on every rank, then finish_loading)."""
        self.set_master(name, self.held(name).take(full))

    def finish_loading(self) -> None:
        """Makes the working weights those of the masters (nothing to do where they are the same)."""
        return None

    def masters(self) -> dict[str, Tensor]:
        """This rank's live fp32 shards of all parameters, by name."""
        return {name: self.master(name) for name in self.shapes}

    def moments(self, name: str) -> dict[str, Tensor]:
        """This rank's shards of the optimizer's moments of one parameter (zeros before the first step)."""
        key, shard = self._optimizer_keys[name], self.layout.local(name)
        if key is None:
            return {moment: torch.empty(0, device=self.mesh.device) for moment in MOMENTS}
        state = self.adam.init_state(key)
        return {moment: state[moment].view(-1)[: shard.numel].view(shard.shape) for moment in MOMENTS}

    def set_moments(self, name: str, parts: dict[str, Tensor], step: int) -> None:
        """Sets what this rank holds (:meth:`held`) of the moments of one parameter, and its step count."""
        for moment, shard in self.moments(name).items():
            shard.copy_(parts[moment])
        self._set_step(name, step)

    def load_moments(self, name: str, full: dict[str, Tensor], step: int) -> None:
        """:meth:`set_moments` of the full tensors' parts."""
        self.set_moments(name, {moment: self.held(name).take(tensor) for moment, tensor in full.items()}, step)

    def _set_step(self, name: str, step: int) -> None:
        key = self._optimizer_keys[name]
        if key is not None:
            state = self.adam.state[key]
            state["step"] = step if isinstance(state["step"], int) else torch.full_like(state["step"], step)

    def optimizer_steps(self) -> int:
        """Steps the optimizer has taken (skipped ones not counted)."""
        keys = (key for key in self._optimizer_keys.values() if key is not None and key in self.adam.state)
        key = next(keys, None)
        return 0 if key is None else int(self.adam.init_state(key)["step"])

    def scaler_state(self) -> dict[str, float]:
        """The fp16 loss scaler's numbers; empty in other precisions."""
        return {}

    def load_scaler_state(self, state: dict[str, float]) -> None:
        """Sets the fp16 loss scaler's numbers, if this engine has one."""
        return None

    def _even_layout(self) -> Layout:
        """Every parameter, or this rank's part of it, flat and even over all ranks that have the same."""
        ranks = self.mesh.dims.size("loss")
        return self._layout(self.shapes, lambda shape: flat_cut("loss", math.prod(shape), ranks))

    def _layout(self, shapes: Iterable[str], cut: Callable[[tuple[int, ...]], Cut]) -> Layout:
        """Make the layout of these parameters; ``cut`` divides the part of a given shape."""
        cuts = {n: [*self._division(n), cut(self._local_shapes[n])] for n in shapes}
        return Layout(self.mesh, {n: self.parts.shapes[n] for n in shapes}, cuts, self.shared)

    def _division(self, name: str) -> list[Cut]:
        """Return the cuts by which ranks divide the layer of a parameter."""
        return [self.divided[name].cut] if name in self.divided else []


def _values_of(module: nn.Module) -> Values:
    """The present values of a module's trained parameters, copied into host memory."""
    trained = ((n, p.detach()) for n, p in module.named_parameters() if p.requires_grad)
    copies = {n: p.to("cpu", torch.float32, copy=True) for n, p in trained}
    return lambda name, shard: shard.take(copies[name])
