"""Ulysses (Jacobs et al., "DeepSpeed Ulysses", 2023), and in two dimensions with ring attention.

An all-to-all turns this rank's tokens with all heads into all tokens with this rank's heads, attention is local, and
another one turns the result back. Here q, k and v go in one packed exchange. (direct.py does it without collectives.)

With a ring, the ranks of a sequence are a grid: an exchange among the ``heads.size`` ranks next to each other leaves
each with some of the heads for their tokens together, and ring attention goes on across.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from opendit.models.attention import GridAttention, for_every_head
from opendit.models.layers import Attend
from opendit.parallel.sequence.collectives import Exchange, Group, Ring
from opendit.parallel.sequence.layout import pack, side_by_side, tokens_by_rank, unpack
from opendit.parallel.sequence.ring import ring_attention


@dataclass(frozen=True)
class UlyssesRing:
    """Heads are shared out over the group ``heads``, tokens over the group ``ring``; a group of one does nothing."""

    heads: Group
    ring: Group

    takes_projection: ClassVar[bool] = False

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention, length: int) -> Tensor:
        """See :class:`opendit.models.attention.SequenceShards`."""
        rows, block = q.shape[2], q.shape[2] * self.heads.size
        lengths = [min(max(length - i * block, 0), block) for i in range(self.ring.size)]
        mine, first = lengths[self.ring.rank], self.ring.rank * block
        around = self._around(attend, first, lengths) if self.ring.size > 1 else attend
        if self.heads.size == 1:
            output = around(*(part[:, :, :mine] for part in (q, k, v))).transpose(1, 2).flatten(2)
            return F.pad(output, (0, 0, 0, rows - mine)) if mine < rows else output
        ranks = self.heads.size
        arrived = Exchange(self.heads).start(pack(q, *for_every_head(q, k, v), ranks)).finish()
        output = around(*unpack(arrived, mine))
        return side_by_side(Exchange(self.heads).start(tokens_by_rank(output, rows, ranks)).finish())

    def _around(self, attend: GridAttention, first: int, lengths: list[int]) -> Attend:
        """Attention to the keys of all ranks of the ring, for tokens from ``first`` on: every rank prepares its own."""

        def attend_around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring_attention(*attend.prepare(q, k, v, first), ring=Ring(self.ring), lengths=lengths)

        return attend_around
