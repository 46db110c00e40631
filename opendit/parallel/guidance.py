"""Sampling on several ranks: data parallel x the halves of guidance x sequence parallel x tensor parallel.

Ranks are numbered in this order. Those that share a sample's tokens or divide its layers are next to each other; with
``--cfg_parallel`` two such groups, one for the conditional half and one for the other, make a replica; replicas draw
different samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.config.parallel_sizes import check_cfg_parallel
from opendit.models import Condition
from opendit.parallel.mesh import Mesh
from opendit.parallel.sequence.collectives import Group, start_gather


@dataclass(frozen=True)
class Replica:
    """The ranks that draw the same samples: replica ``number`` of ``count``.

    All of its ranks get the same latents and decode a share of them each; the one that ``leads`` writes the files.
    halves: this rank and the one that has the same tokens and parts of layers in the other half of guidance; None if no
    rank has.
    ranks: all of the replica; None for one alone.
    """

    number: int
    count: int
    leads: bool
    halves: Group | None
    ranks: Group | None = None


def make_replicas(mesh: Mesh, cfg_parallel: bool) -> Replica:
    """This rank's replica. Collective over all ranks. Raises ValueError as :func:`check_cfg_parallel`."""
    ranks, halves = mesh.sharing, None
    same = {mesh.sp_size: "sp", mesh.tp_size: "tp"}.get(ranks)  # the group that all of them are in already
    group = Group.of(mesh.group(same)) if same and ranks > 1 else None
    if cfg_parallel:
        check_cfg_parallel(mesh.sp_size, mesh.tp_size, mesh.world_size)
        pairs = [[i, i + ranks] for i in range(mesh.world_size) if i // ranks % 2 == 0]
        halves = Group.of(cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(pairs)[0]))  # every rank is in one
        group = halves if ranks == 1 else None
        ranks *= 2
    if ranks > 1 and group is None:
        replicas = [list(range(first, first + ranks)) for first in range(0, mesh.world_size, ranks)]
        group = Group.of(cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(replicas)[0]))
    return Replica(mesh.rank // ranks, mesh.world_size // ranks, mesh.rank % ranks == 0, halves, group)


@dataclass(frozen=True)
class SharedBatch:
    """``model(x, t, y)`` with its batch shared out over the ranks of ``group``; every rank gets the whole result.

    Guidance calls the model on one batch, the conditional half and then the unconditional one. Of two ranks each
    computes a half, and guidance knows nothing of it: the exchange is one all-gather of the predictions a call.
    Any other batch works too; where it does not divide, the last sample is computed more than once.
    """

    model: Callable[[Tensor, Tensor, Condition], Tensor]
    group: Group

    def __call__(self, x: Tensor, t: Tensor, y: Condition) -> Tensor:
        """x: (B, C, ...), t: (B,), y: B rows, the same on all ranks; returns (B, C or 2C, ...)."""
        rows = -(-len(x) // self.group.size)
        first = self.group.rank * rows
        mine = torch.arange(first, first + rows, device=x.device).clamp(max=len(x) - 1)
        return start_gather(self.model(x[mine], t[mine], y[mine]), self.group).wait().flatten(0, 1)[: len(x)]
