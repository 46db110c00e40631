"""Uncertainty weighting: learn a weight of the loss for each noise level, as for the tasks of multi-task learning [K].

    [K] Kendall et al., "Multi-Task Learning Using Uncertainty to Weigh Losses for Scene Geometry and Semantics", 2018
    [E] Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (EDM2), 2024, sec. 2.1

A loss L(t) becomes L(t) / exp(u(t)) + u(t) with a learned u. The expectation is smallest at u(t) = log E[L(t)]. There,
the expectation of L(t) / exp(u(t)) is 1 at every time t, so all times count equally. Sampling does not use u.
"""

from torch import Tensor, nn

from opendit.models.layers import TIME_FREQUENCIES, timestep_embedding


class Uncertainty(nn.Module):
    """The function u: maps times (B,) to u (B,) fp32 by a linear layer on the sinusoids of the time, as in [E]."""

    def __init__(self):
        super().__init__()
        self.linear: nn.Linear = nn.Linear(TIME_FREQUENCIES, 1)

    def forward(self, t: Tensor) -> Tensor:
        sinusoids = timestep_embedding(t, TIME_FREQUENCIES).float()
        return (sinusoids * self.linear.weight.float()).sum(dim=1) + self.linear.bias.float()


def weighted(losses: Tensor, u: Tensor) -> Tensor:
    """Return the weighted losses (B,) for ``losses`` (B,) and u (B,) at the samples' times."""
    return losses / u.exp() + u
