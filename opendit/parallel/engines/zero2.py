"""Engine of --plugin zero2: Colossal-AI's plugin with the optimizer of opendit/parallel/colossal/plugins.py."""

from typing import cast

from torch import Tensor

from opendit.parallel.engines import BoosterEngine, OnePassEngine, StepResult


class Zero2Engine(OnePassEngine, BoosterEngine):
    """Engine with ZeRO stage 2. Gradients, masters and moments are flat, even shards; every rank has all working
    weights."""

    plugin = "zero2"
    no_graph = ""

    def _step(self) -> StepResult:
        scaler = self._scaler()
        scale = 1.0 if scaler is None else scaler.scale.clone()
        self.optimizer.step()
        return StepResult(self.optimizer.grad_norm, self.optimizer.finite, scale)

    def _locate(self):
        self.optimizer.replicated = self.replicated
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.layout = self._even_layout()
        self._optimizer_keys = {n: self.optimizer.working_to_master_param[id(p)] for n, p in named.items()}

    def master(self, name: str) -> Tensor:
        return cast(Tensor, self._optimizer_keys[name])[
            : self.layout.local(name).numel
        ]  # excludes the padding of the last shards

    def finish_loading(self) -> None:
        self.optimizer.gather_working_params()

    def _scaler(self):
        return self.optimizer.scaler


ENGINE = Zero2Engine
