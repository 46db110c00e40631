"""The loss scale of fp16 as numbers on the device: the host neither reads nor decides it."""

import torch
from torch import Tensor

# As Colossal-AI's scaler has them under zero2 and gemini, so that a run in fp16 skips the same steps there and here.
INITIAL, GROWTH, BACKOFF, INTERVAL, HYSTERESIS = 2.0**16, 2.0, 0.5, 1000, 2
LEAST, MOST = 1.0, 2.0**32


class LossScale:
    """The factor of a loss that keeps its gradients from vanishing in fp16.

    It is doubled after INTERVAL steps in a row whose gradients were finite (Micikevicius et al., "Mixed Precision
    Training", ICLR 2018, sec. 3.2), and halved after a step whose gradients were not, but for the first
    HYSTERESIS - 1 such steps since it was doubled last.

    scale: 0-dim fp32; its memory never changes, as a CUDA graph reads it. growth, hysteresis: 0-dim int64, finite steps
    in a row, and steps that were not finite since the scale was doubled.
    """

    def __init__(self, device: torch.device):
        self.scale = torch.full((), INITIAL, dtype=torch.float32, device=device)
        self.growth = torch.zeros((), dtype=torch.int64, device=device)
        self.hysteresis = torch.zeros_like(self.growth)

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """After a step; ``finite``: 0-dim bool, whether its gradients were."""
        in_a_row = (self.growth + 1) * finite
        grows = in_a_row == INTERVAL
        not_finite = (self.hysteresis + ~finite) * ~grows
        halves = ~finite & (not_finite >= HYSTERESIS)
        self.scale *= torch.where(grows, GROWTH, torch.where(halves, BACKOFF, 1.0))
        self.scale.clamp_(LEAST, MOST)
        self.growth.copy_(in_a_row * ~grows)
        self.hysteresis.copy_(not_finite)

    def state(self) -> dict[str, float]:
        """Its numbers, on the host."""
        return dict(scale=self.scale.item(), growth=self.growth.item(), hysteresis=self.hysteresis.item())

    def load(self, state: dict[str, float]) -> None:
        """Takes the numbers of :meth:`state`, or those of another plugin's scaler, which may lack the last."""
        self.scale.fill_(state["scale"])
        self.growth.fill_(int(state["growth"]))
        self.hysteresis.fill_(int(state.get("hysteresis", 0)))
