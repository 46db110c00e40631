"""Uncertainty weighting: every noise level counts as one task among many, with a learned weight.

    [K] Kendall et al., "Multi-Task Learning Using Uncertainty to Weigh Losses for Scene Geometry and Semantics", 2018
    [E] Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (EDM2), 2024, sec. 2.1

A loss L(t) becomes L(t) / exp(u(t)) + u(t), which is smallest at u(t) = log E[L(t)], where all times have equal weight.
Sampling does not use u.
"""

from torch import Tensor, nn

from opendit.models.layers import TIME_FREQUENCIES, timestep_embedding


class Uncertainty(nn.Module):
    """u(t), linear in the sinusoids of the time, as in [E]: times (B,) to (B,) fp32."""

    def __init__(self):
        super().__init__()
        self.linear: nn.Linear = nn.Linear(TIME_FREQUENCIES, 1)

    def forward(self, t: Tensor) -> Tensor:
        sinusoids = timestep_embedding(t, TIME_FREQUENCIES).float()
        return (sinusoids * self.linear.weight.float()).sum(dim=1) + self.linear.bias.float()


def weighted(losses: Tensor, u: Tensor) -> Tensor:
    """Return losses (B,) with the weights that follow from u (B,) of their times."""
    return losses / u.exp() + u
