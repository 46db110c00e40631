"""ZeRO stage 2, by Colossal-AI's plugin and the optimizer of opendit/parallel/colossal/zero.py."""

from collections.abc import Callable
from typing import cast

from torch import Tensor

from opendit.parallel.engines.base import BoosterEngine, StepResult


class Zero2Engine(BoosterEngine):
    """ZeRO stage 2: gradients, masters and moments sharded flat and even, working weights in full on every rank."""

    plugin = "zero2"
    no_graph = ""

    @property
    def gradients(self) -> list[Tensor | None]:
        """This rank's part of the gradients since the last step. Those of a replayed graph are set explicitly."""
        return self.optimizer.gradients

    @gradients.setter
    def gradients(self, gradients: list[Tensor | None]) -> None:
        self.optimizer.gradients = gradients

    def gradient_shards(self) -> dict[str, Tensor | None] | None:
        return dict(zip(self.shapes, self.gradients, strict=True))

    def _step(self) -> StepResult:
        scaler = self._scaler()
        scale = 1.0 if scaler is None else scaler.scale.clone()
        self.optimizer.step()
        return StepResult(self.optimizer.grad_norm, self.optimizer.finite, scale)

    def attach_averages(
        self, averages: list[dict[str, Tensor]], decays: Callable[[Tensor], Tensor], updates: Tensor
    ) -> bool:
        self.optimizer.attach_averages([[shards[name] for name in self.shapes] for shards in averages], decays, updates)
        return True

    def _locate(self):
        self.optimizer.replicated = self.replicated
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.layout = self._even_layout()
        self._optimizer_keys = {n: self.optimizer.working_to_master_param[id(p)] for n, p in named.items()}

    def master(self, name: str) -> Tensor:
        return cast(Tensor, self._optimizer_keys[name])[
            : self.layout.local(name).numel
        ]  # without the padding of the last shards

    def finish_loading(self) -> None:
        self.optimizer.gather_working_params()

    def _scaler(self):
        return self.optimizer.scaler


ENGINE = Zero2Engine
