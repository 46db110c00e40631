"""Training engines: forward, backward, step, and the layout of their state. Each plugin has its engine in one file.

All plugins store master weights, moments and EMA in one form: each rank has one fp32 shard of every parameter.
``layout`` maps the shard to slices of the canonical tensor. So a checkpoint can be loaded under another plugin and on
another number of ranks.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed import ProcessGroup

from opendit.config.names import OFFLOAD, PLUGINS, check_precision
from opendit.kernels.base_precision import base_layers
from opendit.kernels.eight_bit_moments import EightBits, first_of, set_values, to_values
from opendit.parallel.colossal import load
from opendit.parallel.fsdp import Sharding
from opendit.parallel.host_memory import StreamedBlocks
from opendit.parallel.layout import Cut, Layout, Shard, flat_cut
from opendit.parallel.mesh import Mesh
from opendit.parallel.muon import Muon, MuonSettings
from opendit.parallel.pipeline import on_every_stage
from opendit.parallel.tensor import ReplicatedGradients, divided_parameters

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MOMENTS = ("exp_avg", "exp_avg_sq")


Values = Callable[[str, Shard], Tensor]  # (parameter, shard) -> the values of this shard


@dataclass
class StepResult:
    """Results of a step, as 0-dim tensors. Under zero2 and fsdp, the device may still be computing them."""

    grad_norm: Tensor  # unscaled and before clipping
    finite: Tensor  # True if the norm was finite; otherwise the step was skipped
    loss_scale: Tensor | float = 1.0  # 1 except in fp16
    loss: Tensor | None = None  # mean loss of the step's micro-batches on this rank, only set by Runner.train_step


@dataclass(frozen=True)
class Settings:
    """Settings of an engine's optimizer. For most fields, see :func:`build_engine`."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float
    grad_accumulation: int
    sharding: Sharding = Sharding()
    offload: str = "none"
    muon: MuonSettings | None = None
    streamed: StreamedBlocks | None = None
    eight_bits: bool = False


class Engine(ABC):
    """Base class of engines. An engine trains a module under one plugin. Build an engine with :func:`build_engine`.

    Attributes:
        skipped: number of skipped steps, 0-dim int64.
        skipped_in_a_row: number of consecutive skipped steps, up to the last step, 0-dim int64.
        shapes: canonical shape of every trained parameter.
        tensor_layout: layout before the plugin shards parameters. It has cuts only for tensor parallelism.
        shared: names of the parameters that all stages of a pipeline have.
        stored: layers with weights in the format of --base_precision, by weight name.
        muon: Muon optimizer; None if AdamW updates all parameters.
    """

    muon: Muon | None = None
    copied = False  # True if every rank has full gradients and moments, and ``layout`` describes views of them

    def __init__(
        self, module: nn.Module, mesh: Mesh, precision: str, settings: Settings, initial: Values | None = None
    ):
        self.mesh, self.precision, self.dtype = mesh, precision, PRECISIONS[precision]
        self.divided = divided_parameters(module)
        self.stored, self.streamed = dict(base_layers(module)), settings.streamed
        if self.streamed is not None and not self.streamed.recordable:
            self.no_graph = "the backward pass ends before the first of the blocks in host memory (--lora_targets)"
        self._local_shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
        for name, layer in self.stored.items():  # the shape of the dense weight, not of its stored bytes
            self._local_shapes[name] = layer.shape
        canonical = {n: self.divided[n].shape if n in self.divided else s for n, s in self._local_shapes.items()}
        self.shapes = {n: canonical[n] for n, p in module.named_parameters() if p.requires_grad}
        self.shared, of_tensor = on_every_stage(module, canonical), {}
        for name in canonical:
            of_tensor[name] = [cut for cut in self._division(name) if cut.group == "tp"]
        self.tensor_layout = Layout(mesh, canonical, of_tensor, self.shared)
        if self.divided and initial is None:
            raise ValueError("a model whose layers ranks divide needs initial values, of which each takes its part")
        self.replicated = None
        if mesh.tp_size > 1 or mesh.pp_size > 1:
            self.replicated = ReplicatedGradients(mesh, list(self.shapes), self.divided, self.shared)
        # Copy weights and buffers before the plugin casts them to half precision. Masters need the fp32 initial values,
        # and position tables must stay fp32.
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
        if settings.muon is not None:
            self.muon = Muon(settings.muon, self.layout, list(self.shapes), self.copied)
            adam.of_muon |= {self._optimizer_keys[name] for name in self.muon.names}
            self._attach_muon(self.muon)
        for name in self.shapes:
            self.set_master(name, trained(name, self.held(name)))
        if initial is not None:
            self._fill_frozen(initial)
        self.finish_loading()

    plugin: str  # name of the plugin in --plugin
    # A tensor or None for each trained parameter. Exists only under plugins that support CUDA graphs.
    gradients: Any

    @abstractmethod
    def _wrap(self, module: nn.Module, settings: Settings) -> tuple[Any, Any, Any, str]:
        """Move the module to this rank's device and wrap it. Return (the object for ``forward``, the object for
        ``step``, the AdamW with learning rate and state, a log line about the AdamW)."""

    def _adamw(self, module: nn.Module, settings: Settings) -> tuple[Any, str]:
        from opendit.parallel.optimizer import build_optimizer  # imported here, because it imports DTensor

        return build_optimizer(
            module,
            self.plugin,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            betas=settings.betas,
            eight_bits=settings.eight_bits,
        )

    def _attach_muon(self, muon: Muon) -> None:
        raise NotImplementedError(f"{self.plugin} has no Muon")

    # ---------------------------------------------------------------- training

    # True if every rank has all working weights. Then ``module`` can be called directly, inside ``autocast()``.
    whole = True
    no_graph: str  # reason why a CUDA graph can't record the passes; empty if it can

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model(*args, **kwargs)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the forward and backward pass of one micro-batch. last: True for the last micro-batch
        before a step."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor | GradientEdge, gradient: Tensor | None = None) -> None:
        """Run a backward pass from ``loss`` and accumulate the gradients. On a pipeline stage without a loss, pass the
        stage's output and the output's scaled gradient."""
        if gradient is None:
            self.optimizer.backward(loss)
        else:
            self.optimizer.backward_from(loss, gradient)

    def step(self) -> StepResult:
        """Clip, update the masters and the working weights, and clear the gradients."""
        result = self._step()
        self.skipped += ~result.finite
        self.skipped_in_a_row.add_(1).mul_(~result.finite)
        return result

    @abstractmethod
    def _step(self) -> StepResult:
        """Compute a step. :meth:`step` counts the skipped steps."""

    def gradient_shards(self) -> dict[str, Tensor | None] | None:
        """Return this rank's gradients since the last step, read-only; None if the engine can't access gradients."""
        return None

    def new_averages(self, count: int) -> list[dict[str, Tensor]]:
        """Allocate ``count`` averages of the masters, in host or device memory. Each average has a shard of every
        parameter."""
        return [{name: torch.empty_like(part) for name, part in self.masters().items()} for _ in range(count)]

    def attach_averages(
        self, averages: list[dict[str, Tensor]], decays: Callable[[Tensor], Tensor], updates: Tensor
    ) -> bool:
        """Ask the optimizer to update ``averages`` in its pass over the masters. ``decays(updates)`` returns the
        decays. Each step increments ``updates``. Return True if the optimizer accepts."""
        return False

    def wait_for_averages(self) -> None:
        """Wait until the last step has updated the attached averages. Call before reading or setting the averages."""
        return None

    def _on_host(self, grad_norm: float, loss_scale: float) -> StepResult:
        norm = torch.tensor(grad_norm, dtype=torch.float64)
        return StepResult(norm, torch.tensor(math.isfinite(grad_norm), device=self.mesh.device), loss_scale)

    def set_lr(self, lr: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = lr

    # ---------------------------------------------------------------- state

    layout: Layout  # layout of the masters, the moments and the averages
    _optimizer_keys: dict[str, Tensor | None]  # each parameter's key in the optimizer's state

    @abstractmethod
    def _locate(self) -> None:
        """Set the attributes ``layout`` and ``_optimizer_keys``."""

    @abstractmethod
    def master(self, name: str) -> Tensor:
        """Return this rank's fp32 shard of a parameter's master. Steps change it in place."""

    def held(self, name: str) -> Shard:
        """Return the shard of a parameter's master and moments that this rank stores. :meth:`set_master` and
        :meth:`set_moments` take values for this shard. The shard in ``layout`` may be smaller."""
        return self.layout.local(name)

    @torch.no_grad()
    def set_master(self, name: str, part: Tensor) -> None:
        """Set this rank's shard (:meth:`held`) of a parameter's master. Call finish_loading afterwards."""
        self.master(name).copy_(part)

    def set_shard(self, name: str, shard: Tensor) -> None:
        """Set a parameter's master from this rank's shard in ``layout``. All ranks must call this method. Call
        finish_loading afterwards."""
        self.set_master(name, shard)

    _frozen_group: ProcessGroup | None = None  # ranks that have different slices of the frozen weights

    @torch.no_grad()
    def _fill_frozen(self, values: Values) -> None:
        for name, parameter in self.module.named_parameters():
            if name not in self.shapes:
                part, shard = self._frozen_part(name, parameter)
                if name in self.stored:
                    self.stored[name].store(part, values(name, shard), self._largest)
                else:
                    part.copy_(values(name, shard))

    def _largest(self, number: Tensor) -> Tensor:
        if self._frozen_group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._frozen_group)
        return number

    def _frozen_part(self, name: str, parameter: Tensor) -> tuple[Tensor, Shard]:
        """Return (memory of a frozen weight on this rank, shard in this memory)."""
        kept = parameter if self.streamed is None else self.streamed.host.get(name, parameter)
        return kept, self.tensor_layout.local(name)

    def load_master(self, name: str, full: Tensor) -> None:
        self.set_master(name, self.held(name).take(full))

    def finish_loading(self) -> None:
        return None

    def masters(self) -> dict[str, Tensor]:
        return {name: self.master(name) for name in self.shapes}

    def moments_of(self, name: str) -> tuple[str, ...]:
        """Return the names of a parameter's moments."""
        return MOMENTS[:1] if self.muon is not None and name in self.muon.names else MOMENTS

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return this rank's shards of one parameter's moments, read-only. Moments are zeros before the first step.
        8-bit moments are decoded to fp32 without loss."""
        shard = self.layout.local(name)
        return {moment: to_values(kept).view(shard.shape) for moment, kept in self._moments(name).items()}

    def _moments(self, name: str) -> dict[str, Tensor | EightBits]:
        """Return this rank's shards of one parameter's moments, flattened, in the optimizer's format."""
        key, numel, names = self._optimizer_keys[name], self.layout.local(name).numel, self.moments_of(name)
        if key is None:
            return {moment: torch.empty(0, device=self.mesh.device) for moment in names}
        state = self.adam.init_state(key)
        return {moment: first_of(state[moment], numel) for moment in names}

    def set_moments(self, name: str, parts: dict[str, Tensor], step: int) -> None:
        """Set this rank's shard (:meth:`held`) of one parameter's moments, and the parameter's step count."""
        for moment, kept in self._moments(name).items():
            set_values(kept, parts[moment])
        self._set_step(name, step)

    def load_moments(self, name: str, full: dict[str, Tensor], step: int) -> None:
        """Set one parameter's moments from full tensors, and the parameter's step count."""
        self.set_moments(name, {moment: self.held(name).take(tensor) for moment, tensor in full.items()}, step)

    def _set_step(self, name: str, step: int) -> None:
        key = self._optimizer_keys[name]
        if key is not None:
            state = self.adam.state[key]
            state["step"] = step if isinstance(state["step"], int) else torch.full_like(state["step"], step)

    def optimizer_steps(self) -> int:
        """Return the number of steps that the optimizer has completed. Skipped steps do not count."""
        keys = (key for key in self._optimizer_keys.values() if key is not None and key in self.adam.state)
        key = next(keys, None)
        return 0 if key is None else int(self.adam.init_state(key)["step"])

    def scaler_state(self) -> dict[str, float]:
        """Return the fp16 loss scaler's numbers; empty in other precisions."""
        return {}

    def load_scaler_state(self, state: dict[str, float]) -> None:
        return None

    def _even_layout(self) -> Layout:
        """Divide every parameter evenly, as a flat tensor, among the ranks of the group "loss"."""
        ranks = self.mesh.dims.size("loss")
        return self._layout(self.shapes, lambda shape: flat_cut("loss", math.prod(shape), ranks))

    def _layout(self, shapes: Iterable[str], cut: Callable[[tuple[int, ...]], Cut]) -> Layout:
        """Return the layout of the parameters ``shapes``. ``cut(shape)`` returns the cut of a slice with this
        shape."""
        cuts = {n: [*self._division(n), cut(self._local_shapes[n])] for n in shapes}
        return Layout(self.mesh, {n: self.tensor_layout.shapes[n] for n in shapes}, cuts, self.shared)

    def _division(self, name: str) -> list[Cut]:
        return [self.divided[name].cut] if name in self.divided else []


def _values_of(module: nn.Module) -> Values:
    trained = ((n, p.detach()) for n, p in module.named_parameters() if p.requires_grad)
    copies = {n: p.to("cpu", torch.float32, copy=True) for n, p in trained}
    return lambda name, shard: shard.take(copies[name])


class OnePassEngine(Engine):
    """Base class of engines with OnePassAdamW."""

    def _attach_muon(self, muon: Muon) -> None:
        self.optimizer.muon = muon

    @property
    def gradients(self) -> list[Tensor | None]:
        """This rank's gradients since the last step. After replaying a CUDA graph, set this to the graph's
        gradients."""
        return self.optimizer.gradients

    @gradients.setter
    def gradients(self, gradients: list[Tensor | None]) -> None:
        self.optimizer.gradients = gradients

    def gradient_shards(self) -> dict[str, Tensor | None] | None:
        return dict(zip(self.shapes, self.gradients, strict=True))

    def attach_averages(
        self, averages: list[dict[str, Tensor]], decays: Callable[[Tensor], Tensor], updates: Tensor
    ) -> bool:
        self.optimizer.attach_averages([[shards[name] for name in self.shapes] for shards in averages], decays, updates)
        return True


def state_of_scaler(scaler: Any) -> dict[str, float]:
    return dict(scale=scaler.scale.item(), growth=scaler._growth_step, hysteresis=scaler._hysteresis_step)


class BoosterEngine(Engine):
    """Engine that uses the Colossal-AI plugin of this name."""

    def _wrap(self, module, settings):
        colossal = load()
        adam, name = self._adamw(module, settings)
        model, optimizer = colossal.boost(
            self.plugin,
            self.precision,
            module,
            adam,
            grad_clip=settings.grad_clip,
            accumulate=settings.grad_accumulation > 1,
            group=None if self.replicated is None else self.mesh.own_group("loss"),
        )
        return model, optimizer, adam, name

    def _scaler(self):
        return None

    def scaler_state(self) -> dict[str, float]:
        scaler = self._scaler()
        if scaler is None:
            return {}
        return state_of_scaler(scaler)

    def load_scaler_state(self, state: dict[str, float]) -> None:
        scaler = self._scaler()
        if scaler is not None and state:
            scaler._scale.fill_(state["scale"])
            scaler._growth_step, scaler._hysteresis_step = int(state["growth"]), int(state.get("hysteresis", 0))


def engine_of(plugin: str) -> type[Engine]:
    return import_module(f"{__name__}.{plugin}").ENGINE


def build_engine(
    module: nn.Module,
    mesh: Mesh,
    *,
    plugin: str = "zero2",
    precision: str = "bf16",
    lr: float = 1e-4,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    grad_clip: float = 1.0,
    grad_accumulation: int = 1,
    sharding: Sharding | None = None,
    offload: str = "none",
    streamed: StreamedBlocks | None = None,
    initial: Values | None = None,
    muon: MuonSettings | None = None,
    eight_bits: bool = False,
) -> Engine:
    """Wrap a module for training. All ranks must pass the same module, with fp32 weights.

    Args:
        grad_clip: bound of the global gradient norm; 0 means none.
        grad_accumulation: number of micro-batches in a step, for gemini and fsdp.
        sharding: settings of fsdp. The dtype of ``precision`` replaces its dtype.
        offload: state that fsdp stores in host memory. ``average``: the averages; ``state``: averages and moments.
        streamed: blocks with frozen weights in host memory; not with fsdp.
        initial: function that returns initial fp32 values for a shard of any parameter. None: use the module's values,
            with a temporary copy in host memory.
        muon: settings of Muon (zero2, ddp, fsdp; without tensor or expert parallelism, and without offload of the
            state).
        eight_bits: True to store AdamW's moments in 8 bits (zero2, ddp, fsdp; without offload of the state).

    Raises ValueError if a plugin, precision or offload is unknown, or does not work with the plugin.
    """
    if plugin not in PLUGINS or precision not in PRECISIONS:
        raise ValueError(f"plugin {plugin} with precision {precision}: plugins are {', '.join(PLUGINS)}")
    check_precision(plugin, precision)
    if offload not in OFFLOAD or (offload != "none" and plugin != "fsdp"):
        raise ValueError(f"offload {offload} with plugin {plugin}: with fsdp it is one of {', '.join(OFFLOAD)}")
    settings = Settings(
        lr=lr,
        weight_decay=weight_decay,
        betas=betas,
        grad_clip=grad_clip,
        grad_accumulation=grad_accumulation,
        sharding=sharding or Sharding(),
        offload=offload,
        muon=muon,
        streamed=streamed,
        eight_bits=eight_bits,
    )
    return engine_of(plugin)(module, mesh, precision, settings, initial)
