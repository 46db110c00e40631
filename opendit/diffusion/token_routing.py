"""Draw the tokens that a route's blocks process, and the samples whose routed tokens are dropped (``--route``)."""

import torch
from torch import Tensor

from opendit.config.token_routing import TokenRoute
from opendit.diffusion.random import Stream, uniform


def draw_route(
    route: TokenRoute | None, tokens: int | None, seed: int, step: int, index: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return :func:`draw_kept_tokens`, with None from ``route.until`` on, and :func:`draw_dropped`."""
    sparse = route is not None and (route.until is None or step < route.until)
    kept = draw_kept_tokens(route if sparse else None, tokens, seed, step, index)
    return kept, draw_dropped(route, 0.0 if route is None else route.drop, seed, step, index)


def draw_kept_tokens(
    route: TokenRoute | None, tokens: int | None, seed: int, step: int, index: Tensor
) -> Tensor | None:
    """Draw the tokens that each sample of a training step keeps: indices (B, route.kept(tokens)) int64, ascending.

    All subsets of this size are equally likely. The draw depends on (seed, step, index) only.

    Args:
        route: the route; if None, or if its share of skipped tokens is 0, the result is None, which means all
            tokens.
        tokens: number of tokens per sample.
    """
    if route is None or tokens is None or route.share == 0:
        return None
    u = uniform(seed, step, index, Stream.ROUTE, (tokens,))
    order = torch.sort(u, dim=1, stable=True).indices  # a stable sort breaks ties in the same way on every device
    return order[:, : route.kept(tokens)].sort(dim=1).values


def draw_dropped(route: TokenRoute | None, share: float, seed: int, step: int, index: Tensor) -> Tensor | None:
    """Draw the samples whose tokens after a fused route are all replaced by mask tokens, (B,) bool. Each sample is
    drawn with probability ``share``. Return None if there is no route, or the route is not fused."""
    if route is None or not route.fused:
        return None
    return uniform(seed, step, index, Stream.ROUTE_DROP) < share
