"""An example plugin: torch's AdamW on the complete module in one process, without Colossal-AI."""

import torch
from torch import Tensor

from opendit.parallel.engines import Engine, StepResult


class PlainAdamW(torch.optim.AdamW):
    def init_state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state |= dict(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        return state


class ExampleEngine(Engine):
    plugin = "example"
    no_graph = "the example does not say where its gradients are"

    def _wrap(self, module, settings):
        module.to(self.mesh.device)
        adam = PlainAdamW(module.parameters(), settings.lr, settings.betas, weight_decay=settings.weight_decay)
        return module, adam, adam, "AdamW by torch"

    def _locate(self):
        self._params = dict(self.module.named_parameters())
        self.layout = self._even_layout()
        self._optimizer_keys = self._params

    def backward(self, loss):
        loss.backward()

    def _step(self) -> StepResult:
        norm = torch.nn.utils.clip_grad_norm_(self._params.values(), self.grad_clip or float("inf"))
        self.adam.step()
        self.adam.zero_grad()
        return self._on_host(norm.item(), 1.0)

    def master(self, name):
        return self._params[name].detach().view(-1)


ENGINE = ExampleEngine
