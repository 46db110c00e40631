"""One training engine over three Colossal-AI plugins: forward, backward, step, and where the state lies.

Whatever the plugin, the fp32 master weights, the optimizer's moments and the EMA are seen the same way:
every rank holds one *piece* of every parameter, a flat fp32 slice ``[start, stop)`` of it. ``spans`` names
the slices of all ranks, so pieces can be gathered into canonical full tensors, and full tensors loaded,
under any plugin and any number of ranks.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opendit.parallel.colossal import plugins as colossal
from opendit.parallel.mesh import Mesh

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MOMENTS = ("exp_avg", "exp_avg_sq")

Span = tuple[int, int]


@dataclass
class StepResult:
    """What a step did, as 0-dim tensors on the device: reading one waits for the device, which a step itself need not.

    grad_norm: unscaled and before clipping. finite: whether it was, and the step was taken; if not, no weight, moment
    or average has changed. loss_scale: of fp16's scaler, else 1.
    """

    grad_norm: Tensor
    finite: Tensor
    loss_scale: Tensor | float = 1.0


class Engine(ABC):
    """Drives a module under one plugin. Build with :func:`build_engine`.

    skipped, skipped_in_a_row: steps that were not taken, 0-dim int64 tensors on the device.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, plugin: str, precision: str, settings: dict):
        self.mesh, self.precision, self.dtype = mesh, precision, PRECISIONS[precision]
        self.shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad}
        # Plugins cast weights and buffers to half before they make their fp32 copies; the masters must be
        # the fp32 initialisation itself, and position tables stay fp32.
        trained = ((n, p.detach()) for n, p in module.named_parameters() if p.requires_grad)
        initial = {n: p.to("cpu", torch.float32, copy=True) for n, p in trained}
        buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        adam, self.optimizer_name = colossal.build_optimizer(module, plugin, **settings["adam"])
        self.model, self.optimizer = colossal.boost(
            plugin,
            precision,
            module,
            adam,
            grad_clip=settings["grad_clip"],
            accumulate=settings["grad_accumulation"] > 1,
        )
        self.module, self.adam = module, adam
        self.grad_clip = settings["grad_clip"]
        self.skipped = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self.skipped_in_a_row = torch.zeros_like(self.skipped)
        for name, buffer in module.named_buffers():
            buffer.data = buffers[name].to(mesh.device)
        self._locate()
        for name, value in initial.items():
            self.load_master(name, value)
        self.finish_loading()

    # ---------------------------------------------------------------- training

    whole = True  # every rank holds all working weights: ``module`` can be called by itself, in ``autocast()``
    no_graph: str  # why forward and backward can't be recorded as a CUDA graph; empty if they can

    def autocast(self) -> contextlib.AbstractContextManager:
        """What a forward pass of ``module`` runs in."""
        return contextlib.nullcontext()

    def forward(self, *args, **kwargs) -> Tensor:
        return self.model(*args, **kwargs)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """Wraps forward and backward of one micro-batch; ``last``: the step follows."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.optimizer.backward(loss)

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
        """What this rank has of each parameter's gradient since the last step, to look at; None where that can't be
        told."""
        return None

    def attach_averages(self, averages: list[dict[str, Tensor]], decays, updates: Tensor) -> bool:
        """Asks the optimizer to update these averages of the masters in its own pass over memory, if it has one:
        ``decays(updates)`` gives the decays, and ``updates`` is counted up. Returns whether it will."""
        return False

    def _on_host(self, grad_norm: float, loss_scale: float) -> StepResult:
        """The result of a step whose norm the host has read."""
        norm = torch.tensor(grad_norm, dtype=torch.float64)
        return StepResult(norm, torch.tensor(math.isfinite(grad_norm), device=self.mesh.device), loss_scale)

    def set_lr(self, lr: float) -> None:
        """The learning rate of all parameters from the next step on."""
        for group in self.adam.param_groups:
            group["lr"] = lr

    # ---------------------------------------------------------------- state

    spans: dict[str, list[Span]]  # per parameter: the slice that each rank holds
    _holders: dict[str, Tensor | None]  # per parameter: the tensor the optimizer's state is keyed by

    @abstractmethod
    def _locate(self) -> None:
        """Fills ``spans`` and ``_holders``."""

    @abstractmethod
    def master(self, name: str) -> Tensor:
        """This rank's live fp32 piece of a parameter, flat; a view: changed by steps."""

    @abstractmethod
    def load_master(self, name: str, full: Tensor) -> None:
        """Takes this rank's piece out of the full tensor (call on every rank, then finish_loading)."""

    def finish_loading(self) -> None:
        """Makes the working weights those of the masters (nothing to do where they are the same)."""
        return None

    def span(self, name: str) -> Span:
        """The slice of a flat parameter that this rank holds."""
        return self.spans[name][self.mesh.rank]

    def masters(self) -> dict[str, Tensor]:
        """This rank's live fp32 pieces of all parameters, by name."""
        return {name: self.master(name) for name in self.shapes}

    def moments(self, name: str) -> dict[str, Tensor]:
        """This rank's pieces of the optimizer's moments of one parameter (zeros before the first step)."""
        holder = self._holders[name]
        if holder is None:
            return {key: torch.empty(0, device=self.mesh.device) for key in MOMENTS}
        state, (start, stop) = self.adam.init_state(holder), self.span(name)
        return {key: state[key].view(-1)[: stop - start] for key in MOMENTS}

    def load_moments(self, name: str, full: dict[str, Tensor], step: int) -> None:
        """Sets the moments of one parameter from full tensors, and its step count."""
        for key, piece in self.moments(name).items():
            piece.copy_(full[key].reshape(-1)[slice(*self.span(name))])
        holder = self._holders[name]
        if holder is not None:
            state = self.adam.state[holder]
            state["step"] = step if isinstance(state["step"], int) else torch.full_like(state["step"], step)

    def optimizer_steps(self) -> int:
        """Steps the optimizer has taken (skipped ones not counted)."""
        holder = next((h for h in self._holders.values() if h is not None and h in self.adam.state), None)
        return 0 if holder is None else int(self.adam.init_state(holder)["step"])

    def scaler_state(self) -> dict[str, float]:
        """The fp16 loss scaler's numbers; empty in other precisions."""
        scaler = self._scaler()
        if scaler is None:
            return {}
        return dict(scale=scaler.scale.item(), growth=scaler._growth_step, hysteresis=scaler._hysteresis_step)

    def load_scaler_state(self, state: dict[str, float]) -> None:
        scaler = self._scaler()
        if scaler is not None and state:
            scaler._scale.fill_(state["scale"])
            scaler._growth_step, scaler._hysteresis_step = int(state["growth"]), int(state.get("hysteresis", 0))

    def _scaler(self):
        return None

    @torch.no_grad()
    def gather(self, name: str, piece: Tensor) -> Tensor:
        """The full tensor of a parameter from every rank's piece of it; collective, on every rank."""
        spans = self.spans[name]
        full = torch.empty(math.prod(self.shapes[name]), dtype=piece.dtype, device=piece.device)
        if len(spans) == 1:
            full.copy_(piece[: full.numel()])
        else:
            width = max(stop - start for start, stop in spans)
            send = torch.zeros(width, dtype=piece.dtype, device=piece.device)
            start, stop = self.span(name)
            send[: stop - start] = piece[: stop - start]
            received = torch.empty(width * len(spans), dtype=piece.dtype, device=piece.device)
            dist.all_gather_into_tensor(received, send)
            for (start, stop), row in zip(spans, received.view(len(spans), width), strict=True):
                full[start:stop] = row[: stop - start]
        return full.view(self.shapes[name])


def _even_spans(numel: int, parts: int) -> list[Span]:
    width = -(-numel // parts)
    return [(min(i * width, numel), min((i + 1) * width, numel)) for i in range(parts)]


class Zero2Engine(Engine):
    """ZeRO stage 2: gradients, masters and moments sharded flat and even, working weights whole."""

    no_graph = ""

    @property
    def gradients(self) -> list[Tensor | None]:
        """What this rank has of the gradients since the last step; a replayed graph's are put back by hand."""
        return self.optimizer.gradients

    @gradients.setter
    def gradients(self, gradients: list[Tensor | None]) -> None:
        self.optimizer.gradients = gradients

    def gradient_shards(self):
        return dict(zip(self.shapes, self.gradients, strict=True))

    def _step(self) -> StepResult:
        scaler = self._scaler()
        scale = 1.0 if scaler is None else scaler.scale.clone()
        self.optimizer.step()
        return StepResult(self.optimizer.grad_norm, self.optimizer.finite, scale)

    def attach_averages(self, averages, decays, updates):
        self.optimizer.attach_averages([[pieces[name] for name in self.shapes] for pieces in averages], decays, updates)
        return True

    def _locate(self):
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.spans = {n: _even_spans(p.numel(), self.mesh.world_size) for n, p in named.items()}
        self._holders = {n: self.optimizer.working_to_master_param[id(p)] for n, p in named.items()}

    def master(self, name):
        start, stop = self.span(name)
        return self._holders[name][: stop - start]  # without the padding of the last shards

    @torch.no_grad()
    def load_master(self, name, full):
        self.master(name).copy_(full.reshape(-1)[slice(*self.span(name))])

    def finish_loading(self):
        self.optimizer.gather_working_params()

    def _scaler(self):
        return getattr(self.optimizer.mixed_precision_mixin, "grad_scaler", None)


class DDPEngine(Engine):
    """Whole fp32 weights on every rank, autocast in the forward pass; state is *viewed* as even pieces."""

    no_graph = "torch's DDP steers its reductions from the host (--plugin ddp)"

    def _locate(self):
        self._params = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.spans = {n: _even_spans(p.numel(), self.mesh.world_size) for n, p in self._params.items()}
        self._holders = dict(self._params)
        self._torch_scaler = torch.amp.GradScaler(
            self.mesh.device.type, init_scale=2.0**16, enabled=self.precision == "fp16"
        )

    def autocast(self):
        return torch.autocast(self.mesh.device.type, self.dtype, enabled=self.precision != "fp32")

    def forward(self, *args, **kwargs):
        with self.autocast():
            return self.model(*args, **kwargs)

    def micro_batch(self, last):
        return contextlib.nullcontext() if last else self.model.module.no_sync()

    def backward(self, loss):
        self._torch_scaler.scale(loss).backward()

    def gradient_shards(self):
        return {name: param.grad for name, param in self._params.items()}

    def _step(self) -> StepResult:
        scale = self._torch_scaler.get_scale()
        self._torch_scaler.unscale_(self.adam)
        params = list(self._params.values())
        bound = self.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(params, bound).item()
        if math.isfinite(norm):
            self.adam.step()
        if self._torch_scaler.is_enabled():
            self._torch_scaler.update()
        self.adam.zero_grad(set_to_none=True)
        return self._on_host(norm, scale)

    def master(self, name):
        return self._params[name].detach().view(-1)[slice(*self.span(name))]

    @torch.no_grad()
    def load_master(self, name, full):
        self._params[name].copy_(full)

    def moments(self, name):
        state = self.adam.init_state(self._params[name])
        return {key: state[key].view(-1)[slice(*self.span(name))] for key in MOMENTS}

    def load_moments(self, name, full, step):
        super().load_moments(name, full, step)
        for key in MOMENTS:  # whole on every rank
            self.adam.state[self._params[name]][key].copy_(full[key].view(self.shapes[name]))

    def scaler_state(self):
        state = self._torch_scaler.state_dict()
        return dict(scale=state["scale"], growth=state["_growth_tracker"]) if state else {}

    def load_scaler_state(self, state):
        if state and self._torch_scaler.is_enabled():
            now = self._torch_scaler.state_dict()
            self._torch_scaler.load_state_dict({**now, "scale": state["scale"], "_growth_tracker": state["growth"]})


class GeminiEngine(Engine):
    """ZeRO stage 3 by chunks: a parameter's piece is where it overlaps this rank's shard of its chunk."""

    whole = False
    no_graph = "Gemini fetches and frees weights from the host (--plugin gemini)"

    def _locate(self):
        manager = self.optimizer.chunk_manager
        self._skipped = False
        self._watch_skips()
        self.spans, self._slices, self._holders = {}, {}, dict.fromkeys(self.shapes)
        by_name = dict(self.model.named_parameters())
        for name in self.shapes:
            chunk = manager.get_chunk(by_name[name])
            info = chunk.tensors_info[by_name[name]]
            ranks = range(self.mesh.world_size)
            begin = [0 if chunk.keep_gathered else r * chunk.shard_size for r in ranks]
            size = chunk.chunk_size if chunk.keep_gathered else chunk.shard_size
            low = [max(info.offset, b) for b in begin]
            high = [max(lo, min(info.end, b + size)) for lo, b in zip(low, begin, strict=True)]
            self.spans[name] = [
                (min(lo - info.offset, info.end - info.offset), hi - info.offset) if hi > lo else (0, 0)
                for lo, hi in zip(low, high, strict=True)
            ]
            mine, origin = self.mesh.rank, begin[self.mesh.rank]
            self._slices[name] = (chunk, slice(low[mine] - origin, high[mine] - origin))
        real_to_name = {id(p): n for n, p in by_name.items()}
        for number, fake in self.optimizer.id_to_fake_params.items():
            self._holders[real_to_name[id(self.optimizer.id_to_real_params[number])]] = fake

    def _watch_skips(self) -> None:
        mixin = self.optimizer.mix_precision_mixin
        decide = mixin.should_skip_step

        def decide_and_note() -> bool:
            self._skipped = decide()
            return self._skipped

        mixin.should_skip_step = decide_and_note

    def _step(self) -> StepResult:
        scale = self.scaler_state().get("scale", 1.0)
        self.optimizer.step()
        if self._skipped:
            # Without this the next micro-batch would be added to the bad gradients.
            self.optimizer.chunk_manager.accumulating_grads = False
            return self._on_host(math.inf, scale)
        return self._on_host(self.optimizer._current_grad_norm / scale, scale)

    def master(self, name):
        # Read the fp32 chunk, never its half-precision pair: that one's memory is reused for gradients.
        chunk, where = self._slices[name]
        return chunk.paired_chunk.payload[where]

    def moments(self, name):
        holder = self._holders[name]
        if holder is not None and holder not in self.adam.state:
            holder.data = self.master(name)  # the optimizer leaves it empty between steps
            self.adam.init_state(holder)
        return super().moments(name)

    @torch.no_grad()
    def load_master(self, name, full):
        self.master(name).copy_(full.reshape(-1)[slice(*self.span(name))])

    @torch.no_grad()
    def finish_loading(self):
        for chunk in self.optimizer.chunk16_set:
            chunk.payload.copy_(chunk.paired_chunk.payload)

    def _scaler(self):
        return getattr(self.optimizer.mix_precision_mixin, "grad_scaler", None)


_ENGINES = {"zero2": Zero2Engine, "ddp": DDPEngine, "gemini": GeminiEngine}


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
) -> Engine:
    """Wraps a module, the same on every rank, for training.

    Args:
        module: a plain module with fp32 weights.
        plugin: zero2, ddp or gemini (gemini: bf16 and fp16 only).
        betas: of AdamW, both at least 0 and below 1.
        grad_clip: bound of the global gradient norm; 0 means none.
        grad_accumulation: micro-batches a step (gemini has to know).

    Raises:
        ValueError: unknown plugin or precision, or gemini with fp32.
    """
    if plugin not in _ENGINES or precision not in PRECISIONS:
        raise ValueError(f"plugin {plugin} with precision {precision}: plugins are {', '.join(_ENGINES)}")
    if plugin == "gemini" and precision == "fp32":
        raise ValueError("--plugin gemini works in bf16 and fp16 only; use --mixed_precision bf16 or --plugin zero2")
    adam = dict(lr=lr, weight_decay=weight_decay, betas=betas)
    settings = dict(adam=adam, grad_clip=grad_clip, grad_accumulation=grad_accumulation)
    return _ENGINES[plugin](module, mesh, plugin, precision, settings)
