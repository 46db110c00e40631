"""Gradients of parameters that ranks of the groups ``tp`` and ``pp`` have alike are sums over these groups; and a norm
of all counts them once."""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.parallel.mesh import Mesh


class ReplicatedGradients:
    """Sum the gradients of parameters that several ranks of ``tp`` or ``pp`` have, and compute the norm of all.

    names: the parameters. divided: those of which each rank of ``tp`` has a part; all ranks have the others whole.
    on_every_stage: those that every rank of ``pp`` has; each of the others is on one rank.

    counted: for each gradient, True if this rank adds its squares to the sum over all ranks, so that each counts once.
    """

    def __init__(
        self, mesh: Mesh, names: Sequence[str], divided: Collection[str], on_every_stage: Collection[str] = ()
    ):
        replicated = {"tp": [name not in divided for name in names], "pp": [name in on_every_stage for name in names]}
        self._groups = [(mesh.group(axis), alike) for axis, alike in replicated.items() if mesh.dims.size(axis) > 1]
        firsts = [alike for axis, alike in replicated.items() if mesh.coordinate(axis) > 0]
        self.counted = [not any(alike) for alike in zip(*firsts, strict=True)] if firsts else [True] * len(names)

    @torch.no_grad()
    def sum(self, gradients: Sequence[Tensor | None], mark_not_finite: bool = False) -> None:
        """Sums over the groups, in place and in fp32 or wider, those gradients that are parts of a sum; before anybody
        reads them. The other ranks must have None in the same places.

        mark_not_finite: where a gradient of any rank is not finite, one of every rank won't be, so that ranks which
            look at their own gradients decide alike.
        """
        for group, replicated in self._groups:
            parts = [g for g, alike in zip(gradients, replicated, strict=True) if alike and g is not None]
            if not parts:
                continue
            dtype = torch.promote_types(parts[0].dtype, torch.float32)
            total = torch.cat([part.reshape(-1).to(dtype) for part in parts])
            if mark_not_finite:
                finite = torch.stack([g.isfinite().all() for g in gradients if g is not None]).all()
                total[0] += torch.where(finite, 0.0, torch.nan)
            dist.all_reduce(total, group=group)
            for part, whole in zip(parts, total.split([part.numel() for part in parts]), strict=True):
                part.copy_(whole.view(part.shape))

    def total(self, square_sum: Tensor) -> Tensor:
        """The sum over the groups of the squares that are ``counted``, in place."""
        for group, _ in self._groups:
            dist.all_reduce(square_sum, group=group)
        return square_sum

    @torch.no_grad()
    def norm(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the norm of all gradients of the groups, 0-dim fp32."""
        pairs = zip(gradients, self.counted, strict=True)
        norms = torch._foreach_norm([g for g, counted in pairs if counted and g is not None])
        return self.total(torch.stack(norms).double().square().sum()).sqrt().float()
