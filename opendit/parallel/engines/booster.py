"""The code that engines over Colossal-AI's Booster share."""

from typing import Any

from opendit.parallel.colossal import load
from opendit.parallel.engines.base import Engine


def state_of_scaler(scaler: Any) -> dict[str, float]:
    """Return the state of Colossal-AI's fp16 loss scaler; see :meth:`opendit.parallel.loss_scale.LossScale.state`."""
    return dict(scale=scaler.scale.item(), growth=scaler._growth_step, hysteresis=scaler._hysteresis_step)


class BoosterEngine(Engine):
    """An engine over the plugin of Colossal-AI that has the name of this one's."""

    def _wrap(self, module, settings):
        colossal = load()
        adam, name = colossal.build_optimizer(
            module, self.plugin, lr=settings.lr, weight_decay=settings.weight_decay, betas=settings.betas
        )
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
        """Colossal-AI's fp16 loss scaler; None in other precisions."""
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
