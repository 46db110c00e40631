"""Engine of --plugin fsdp: weights, gradients and state are sharded parameter by parameter by torch's FSDP2."""

import contextlib
import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from opendit.kernels.eight_bit_moments import EightBits
from opendit.parallel.engines import OnePassEngine, Settings, StepResult
from opendit.parallel.fsdp import Float8Shards, apply_shards, float8_weights, hosted_parameters, move_to_host
from opendit.parallel.layout import Layout, dim_cut, flat_cut
from opendit.parallel.optimizer import LossScale, ShardedOptimizer, local_part


class FSDPEngine(OnePassEngine):
    """Engine with FSDP2 (``fully_shard``). Each rank stores some rows of every trained parameter, gradient, moment and
    average, in fp32. FSDP2 gathers weights in the precision of the forward pass. There are ``dp_replicate`` full
    copies. A single rank stores full weights, as under zero2."""

    plugin = "fsdp"
    optimizer: ShardedOptimizer

    def _wrap(self, module: Any, settings: Settings) -> tuple[Any, Any, Any, str]:
        mesh = self.mesh
        self.whole = mesh.dims.size("loss") == 1
        self.no_graph = "" if self.whole else "FSDP2 gathers and frees weights from the host (--plugin fsdp)"
        self._sharding = replace(settings.sharding, dtype=self.dtype)
        self._frozen_group = mesh.group("fsdp")
        self._accumulates = settings.grad_accumulation > 1 and not self.whole
        adam, name = self._adamw(module, settings)
        float8 = None
        if self.whole:  # fully_shard would copy every weight and gradient in every step
            module.to(mesh.device)
            for parameter in module.parameters():
                parameter.data = parameter.data.to(self.dtype)
        else:
            apply_shards(module, mesh, self._sharding)
            if self._sharding.hosted:
                move_to_host(module, hosted_parameters(module, self._sharding.hosted), mesh.device)
            # Allocate all other shards; ``set_master`` and ``_fill_frozen`` set the values.
            module._apply(lambda each: torch.empty_like(each, device=mesh.device) if each.is_meta else each)
            if self._sharding.gather_float8 and (names := float8_weights(module)):
                float8 = Float8Shards(module, names, self.dtype, mesh.group("fsdp"))
        optimizer = ShardedOptimizer(
            adam,
            {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad},
            mesh.group("fsdp"),
            grad_clip=settings.grad_clip,
            loss_scale=LossScale(mesh.device) if self.precision == "fp16" else None,
            device=mesh.device,
            offload=settings.offload,
            float8=float8,
            replicated=self.replicated,
        )
        # Hide FSDP2's warning about outputs that are views. No code here changes outputs in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        return module, optimizer, adam, name

    def _locate(self):
        self.layout = self._rows(self.shapes)
        self._optimizer_keys = dict(self.optimizer.masters)

    def _rows(self, names) -> Layout:
        dims, cuts = self.mesh.dims, {}
        for name in names:
            shape, division = self._local_shapes[name], self._division(name)
            # opendit.parallel.experts, not fully_shard, shards these parameters
            if any(cut.group == "ep" for cut in division):
                ranks = dims.size("ep_shard")
                cuts[name] = [*division, *([flat_cut("ep_shard", math.prod(shape), ranks)] if ranks > 1 else [])]
            else:
                cuts[name] = [*division, dim_cut("fsdp", 0, shape[0], dims.size("fsdp"))]
        return Layout(self.mesh, {name: self.tensor_layout.shapes[name] for name in cuts}, cuts, self.shared)

    def _frozen_part(self, name, parameter):
        return local_part(parameter), self._rows([name]).local(name)

    def master(self, name: str) -> Tensor:
        return self.optimizer.masters[name]

    def set_master(self, name: str, part: Tensor) -> None:
        self.optimizer.wait()  # a pending update of the averages still reads the old master
        super().set_master(name, part)

    def _moments(self, name: str) -> dict[str, Tensor | EightBits]:
        self.optimizer.wait()
        return super()._moments(name)

    def new_averages(self, count: int) -> list[dict[str, Tensor]]:
        return [dict(zip(self.shapes, shards, strict=True)) for shards in self.optimizer.new_averages(count)]

    def wait_for_averages(self) -> None:
        self.optimizer.wait()

    def finish_loading(self) -> None:
        self._free_gathered()
        self.optimizer.masters_to_working()

    def _free_gathered(self) -> None:
        """Free gathered weights. A forward pass without a backward pass leaves stale weights in memory."""
        if not self.whole:
            for module in self._units:
                module.reshard()

    # ---------------------------------------------------------------- training

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if self._accumulates:
            # reduce gradients over copies of the model only in the last micro-batch
            self.model.set_requires_all_reduce(last)
            if self._sharding.keep_gradients:
                self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def _step(self) -> StepResult:
        self._free_gathered()
        scale = self.optimizer.loss_scale
        scale = 1.0 if scale is None else scale.scale.clone()
        self.optimizer.step()
        return StepResult(self.optimizer.grad_norm, self.optimizer.finite, scale)

    # ---------------------------------------------------------------- fp16

    def scaler_state(self) -> dict[str, float]:
        return {} if self.optimizer.loss_scale is None else self.optimizer.loss_scale.state()

    def load_scaler_state(self, state: dict[str, float]) -> None:
        if self.optimizer.loss_scale is not None and state:
            self.optimizer.loss_scale.load(state)


ENGINE = FSDPEngine
