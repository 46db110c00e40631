"""Engine of --plugin ddp: full weights on every rank. torch's DDP averages gradients, or in a pipeline the engine."""

import contextlib
import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from opendit.kernels.eight_bit_moments import set_values, to_values
from opendit.parallel.engines import BoosterEngine, StepResult
from opendit.parallel.layout import Layout, Shard, flat_cut
from opendit.parallel.muon import Muon


class DDPEngine(BoosterEngine):
    """Engine with full fp32 weights and state on every rank, and autocast in the forward pass. The shards in ``layout``
    are views of the full tensors."""

    plugin = "ddp"
    copied = True
    no_graph = "torch's DDP steers its reductions from the host (--plugin ddp)"

    def _locate(self):
        self._params = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.layout = self._even_layout()
        # this rank stores complete slices, and ``layout`` divides each slice evenly
        shares, ranks = {n: tuple(p.shape) for n, p in self._params.items()}, self.mesh.dims.size("loss")
        self._shares = Layout(
            self.mesh, shares, {n: [flat_cut("loss", math.prod(s), ranks)] for n, s in shares.items()}
        )
        self._optimizer_keys = dict(self._params)
        self._torch_scaler = torch.amp.GradScaler(
            self.mesh.device.type, init_scale=2.0**16, enabled=self.precision == "fp16"
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.mesh.device.type, self.dtype, enabled=self.precision != "fp32")

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.autocast():
            return self.model(*args, **kwargs)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        # DDP's forward pass decides whether the next backward pass reduces gradients. In a pipeline, that pass may
        # belong to another micro-batch, so _step reduces gradients.
        in_the_pass = last and self.mesh.pp_size == 1
        return contextlib.nullcontext() if in_the_pass else self.model.module.no_sync()

    def _average(self, gradients: list[torch.Tensor]) -> None:
        """Average gradients over the ranks with different samples or tokens, in place."""
        group = self.mesh.group("loss")
        if group is not None:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=group)
            flat /= self.mesh.dims.size("loss")
            parts = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [p.view(g.shape) for p, g in zip(parts, gradients, strict=True)])

    def backward(self, loss: Tensor | GradientEdge, gradient: Tensor | None = None) -> None:
        if gradient is None:
            self._torch_scaler.scale(cast(torch.Tensor, loss)).backward()
        else:
            # create the scaler's tensors on a rank without a loss
            self._torch_scaler.scale(gradient.new_zeros(()))
            torch.autograd.backward(loss, gradient)

    def gradient_shards(self) -> dict[str, Tensor | None] | None:
        return {name: param.grad for name, param in self._params.items()}

    def _step(self) -> StepResult:
        scale = self._torch_scaler.get_scale()
        params = list(self._params.values())
        if self.mesh.pp_size > 1:
            self._average([p.grad for p in params if p.grad is not None])
        if self.replicated is not None:
            self.replicated.sum([p.grad for p in params], mark_not_finite=self._torch_scaler.is_enabled())
        self._torch_scaler.unscale_(self.adam)
        bound = self.grad_clip or math.inf
        if self.replicated is None:
            norm = torch.nn.utils.clip_grad_norm_(params, bound).item()
        else:
            norm = self.replicated.norm([p.grad for p in params])
            torch.nn.utils.clip_grads_with_norm_(params, bound, norm)
            norm = norm.item()
        if math.isfinite(norm):
            if self.muon is not None:
                self._step_muon(self.muon)
            self.adam.step()
        if self._torch_scaler.is_enabled():
            self._torch_scaler.update()
        self.adam.zero_grad(set_to_none=True)
        return self._on_host(norm, scale)

    def _attach_muon(self, muon: Muon) -> None:
        pass  # _step reads self.muon

    def _step_muon(self, muon: Muon) -> None:
        stepped = {name: p for name, p in self._params.items() if name in muon.names and p.grad is not None}
        states = {name: self.adam.init_state(p) for name, p in stepped.items()}
        (settings,) = self.adam.param_groups
        averages = {name: state["exp_avg"] for name, state in states.items()}
        muon.step_copies(stepped, averages, settings["lr"], settings["weight_decay"])
        for name, p in stepped.items():
            states[name]["step"] += 1
            p.grad = None

    def master(self, name: str) -> Tensor:
        return self._shares.take(name, self._params[name].detach())

    def held(self, name: str) -> Shard:
        return self.tensor_layout.local(name)

    @torch.no_grad()
    def set_master(self, name: str, part: Tensor) -> None:
        self._params[name].copy_(part)

    def set_shard(self, name: str, shard: Tensor) -> None:
        self.load_master(name, self.layout.gather(name, shard))

    def moments(self, name: str) -> dict[str, Tensor]:
        state = self.adam.init_state(self._params[name])
        like = self._params[name]
        whole = {moment: to_values(state[moment]).view(like.shape) for moment in self.moments_of(name)}
        return {moment: self._shares.take(name, values) for moment, values in whole.items()}

    def set_moments(self, name: str, parts: dict[str, Tensor], step: int) -> None:
        state = self.adam.init_state(self._params[name])
        for moment in self.moments_of(name):
            set_values(state[moment], parts[moment])
        self._set_step(name, step)

    def scaler_state(self) -> dict[str, float]:
        state = self._torch_scaler.state_dict()
        return dict(scale=state["scale"], growth=state["_growth_tracker"]) if state else {}

    def load_scaler_state(self, state: dict[str, float]) -> None:
        if state and self._torch_scaler.is_enabled():
            now = self._torch_scaler.state_dict()
            self._torch_scaler.load_state_dict({**now, "scale": state["scale"], "_growth_tracker": state["growth"]})


ENGINE = DDPEngine
