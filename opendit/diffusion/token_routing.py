"""Draw the tokens that routed blocks see (``--route``)."""

import torch
from torch import Tensor

from opendit.config.token_routing import TokenRoute
from opendit.diffusion.random import Stream, uniform


def draw_kept_tokens(
    route: TokenRoute | None, tokens: int | None, seed: int, step: int, index: Tensor
) -> Tensor | None:
    """Draw the places of the tokens that a training step's samples keep, (B, route.kept(tokens)) int64, rising.

    Every set of that many of a sample's tokens is equally likely; it depends on (seed, step, index) only.

    Args:
        route: None: all tokens are kept, and None is returned.
        tokens: their number in each sample.
    """
    if route is None or tokens is None:
        return None
    u = uniform(seed, step, index, Stream.ROUTE, (tokens,))
    order = torch.sort(u, dim=1, stable=True).indices  # stable, so that every device breaks ties in the same way
    return order[:, : route.kept(tokens)].sort(dim=1).values
