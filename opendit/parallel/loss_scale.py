"""The loss scale of fp16 as numbers on the device: the host neither reads nor decides it."""

import torch
from torch import Tensor

# As torch's GradScaler has them.
INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """What a loss is multiplied by, so that its gradients do not vanish in fp16.

    It is halved after a step whose gradients were not finite, and doubled after INTERVAL steps in a row that were
    (Micikevicius et al., "Mixed Precision Training", ICLR 2018, sec. 3.2).

    scale: 0-dim fp32; its memory never changes, as a CUDA graph reads it. growth: 0-dim int64, finite steps in a row.
    """

    def __init__(self, device: torch.device):
        self.scale = torch.full((), INITIAL, dtype=torch.float32, device=device)
        self.growth = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """After a step; ``finite``: 0-dim bool, whether its gradients were."""
        in_a_row = (self.growth + 1) * finite
        grows = in_a_row == INTERVAL
        self.scale *= torch.where(finite, torch.where(grows, GROWTH, 1.0), BACKOFF)
        self.growth.copy_(in_a_row * ~grows)

    def state(self) -> dict[str, float]:
        """Both numbers, on the host."""
        return dict(scale=self.scale.item(), growth=self.growth.item())

    def load(self, state: dict[str, float]) -> None:
        self.scale.fill_(state["scale"])
        self.growth.fill_(int(state["growth"]))
