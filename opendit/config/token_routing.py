"""Token routing, ``--route FIRST:LAST:SHARE``: in training, some blocks see only part of the tokens. Does not import
torch.
"""

import math
from dataclasses import dataclass

TAKES = "FIRST:LAST:SHARE, as in 2:8:0.5: blocks from 0, two numbers and a share from 0 to below 1"


@dataclass(frozen=True)
class TokenRoute:
    """A route: blocks ``first`` to ``last`` - 1, counted from 0, skip a ``share`` of each sample's tokens."""

    first: int
    last: int
    share: float

    def kept(self, tokens: int) -> int:
        """Return how many of a sample's ``tokens`` the routed blocks see; at least one."""
        return max(1, round(tokens * (1 - self.share)))


def parse_route(text: str) -> TokenRoute:
    """Parse a value of ``--route``. Raises ValueError for an invalid value."""
    try:
        first, last, share = text.split(":")
        route = TokenRoute(int(first), int(last), float(share))
    except ValueError:
        raise ValueError(f"--route {text}: is no route; give {TAKES}") from None
    if not (0 <= route.first < route.last and 0 <= route.share < 1) or math.isnan(route.share):
        raise ValueError(f"--route {text}: out of range; give {TAKES}")
    return route
