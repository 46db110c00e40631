"""Sampling on several ranks: data parallel x the halves of guidance x sequence parallel x tensor parallel.

Ranks are numbered in this order, the last axis fastest: ranks that share a sample's tokens or divide the layers are
neighbours. With ``--cfg_parallel``, two such groups of neighbours form a replica. One computes the conditional half of
guidance, the other the unconditional half. Different replicas draw different samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.config.parallel_sizes import check_cfg_parallel
from opendit.models.conditioning import Condition
from opendit.parallel.collectives import Group, start_gather
from opendit.parallel.mesh import Mesh


@dataclass(frozen=True)
class Replica:
    """The ranks that draw the same samples. This is replica ``number`` of ``count``.

    All ranks of a replica get the same latents, and each rank decodes some of them.

    Attributes:
        leads: True on the rank that writes the files.
        halves: this rank and the rank that has the same tokens and slices of layers in the other half of guidance; None
            without cfg_parallel.
        ranks: all ranks of the replica; None for a single rank.
    """

    number: int
    count: int
    leads: bool
    halves: Group | None
    ranks: Group | None = None


def make_replicas(mesh: Mesh, cfg_parallel: bool) -> Replica:
    """Return this rank's replica. Collective over all ranks. Raises the same errors as :func:`check_cfg_parallel`."""
    ranks, halves = mesh.sharing, None
    same = {mesh.sp_size: "sp", mesh.tp_size: "tp"}.get(ranks)  # name of an existing group with the same ranks
    group = Group.of(mesh.group(same)) if same and ranks > 1 else None
    if cfg_parallel:
        check_cfg_parallel(mesh.sp_size, mesh.tp_size, mesh.world_size)
        pairs = [[i, i + ranks] for i in range(mesh.world_size) if i // ranks % 2 == 0]
        # Every rank is in exactly one pair, so new_subgroups_by_enumeration returns this rank's pair.
        halves = Group.of(cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(pairs)[0]))
        group = halves if ranks == 1 else None
        ranks *= 2
    if ranks > 1 and group is None:
        replicas = [list(range(first, first + ranks)) for first in range(0, mesh.world_size, ranks)]
        group = Group.of(cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(replicas)[0]))
    return Replica(mesh.rank // ranks, mesh.world_size // ranks, mesh.rank % ranks == 0, halves, group)


@dataclass(frozen=True)
class SharedBatch:
    """``model(x, t, y)`` whose batch is divided among the ranks of ``group``. Every rank gets the full result.

    Guidance calls the model on one batch, which has the conditional half followed by the unconditional half. With two
    ranks each computes one half, and one all-gather per call exchanges the predictions, so guidance itself needs no
    change. Any other batch works, too. If the batch size is not divisible by the number of ranks, the last sample is
    computed several times.
    """

    model: Callable[[Tensor, Tensor, Condition], Tensor]
    group: Group

    def __call__(self, x: Tensor, t: Tensor, y: Condition) -> Tensor:
        """Compute the predictions for this rank's part of the batch, and gather the predictions of all ranks.

        Args:
            x: latents (B, C, ...), the same on all ranks.
            t: timesteps (B,).
            y: conditions of the B samples.

        Returns:
            Predictions (B, C or 2C, ...).
        """
        rows = -(-len(x) // self.group.size)
        first = self.group.rank * rows
        mine = torch.arange(first, first + rows, device=x.device).clamp(max=len(x) - 1)
        return start_gather(self.model(x[mine], t[mine], y[mine]), self.group).wait().flatten(0, 1)[: len(x)]
