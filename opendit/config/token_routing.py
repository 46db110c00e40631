"""Token routing, ``--route FIRST:LAST:SHARE[:sprint]``: in training, some blocks see only part of the tokens. This
module does not import torch.
"""

import math
from dataclasses import dataclass

TAKES = "FIRST:LAST:SHARE or FIRST:LAST:SHARE:sprint, as in 2:8:0.5: blocks from 0, two numbers and a share below 1"


@dataclass(frozen=True)
class TokenRoute:
    """A route: blocks ``first`` to ``last`` - 1, counted from 0, skip a ``share`` of each sample's tokens.

    fused: True for SPRINT, which fuses the tokens before and after these blocks; False for TREAD.
    until: step from which on these blocks see all tokens; None for never.
    drop: share of the samples of a training step that do without the result of these blocks, if the route is fused.
    """

    first: int
    last: int
    share: float
    fused: bool = False
    until: int | None = None
    drop: float = 0.0

    def kept(self, tokens: int) -> int:
        """Return how many of a sample's ``tokens`` the routed blocks see; at least one."""
        return max(1, round(tokens * (1 - self.share)))


def parse_route(text: str, flag: str = "route") -> TokenRoute:
    """Parse a value of ``--route`` or another ``flag``. Raises ValueError for an invalid value."""
    try:
        first, last, share, *fused = text.split(":")
        route = TokenRoute(int(first), int(last), float(share), bool(fused))
        if fused not in ([], ["sprint"]):
            raise ValueError
    except ValueError:
        raise ValueError(f"--{flag} {text}: is no route; give {TAKES}") from None
    if not (0 <= route.first < route.last and 0 <= route.share < 1) or math.isnan(route.share):
        raise ValueError(f"--{flag} {text}: out of range; give {TAKES}")
    if route.fused and route.first == 0:
        raise ValueError(f"--{flag} {text}: SPRINT fuses with a block before the route; begin at 1 or later")
    return route
