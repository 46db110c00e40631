"""Gradients of what all ranks of the group ``tp`` have are sums over the group; and a norm of all counts them once."""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.parallel.mesh import Mesh


class ReplicatedGradients:
    """For parameters ``names``, of which the ranks of ``tp`` have parts of those in ``divided`` and all of the others.

    counted: whether this rank's squares of each gradient belong into the sum over all ranks: each part once.
    """

    def __init__(self, mesh: Mesh, names: Sequence[str], divided: Collection[str]):
        self.group = mesh.group("tp")
        self.replicated = [name not in divided for name in names]
        self.counted = [not replicated or mesh.coordinate("tp") == 0 for replicated in self.replicated]

    @torch.no_grad()
    def sum(self, gradients: Sequence[Tensor | None], mark_not_finite: bool = False) -> None:
        """Sums over the group, in place and in fp32 or wider, those gradients that are parts of a sum; before anybody
        reads them. The other ranks must have None in the same places.

        mark_not_finite: where a gradient of any rank is not finite, one of every rank won't be, so that ranks which
            look at their own gradients decide alike.
        """
        parts = [g for g, replicated in zip(gradients, self.replicated, strict=True) if replicated and g is not None]
        if not parts or self.group is None:
            return
        dtype = torch.promote_types(parts[0].dtype, torch.float32)
        total = torch.cat([part.reshape(-1).to(dtype) for part in parts])
        if mark_not_finite:
            finite = torch.stack([g.isfinite().all() for g in gradients if g is not None]).all()
            total[0] += torch.where(finite, 0.0, torch.nan)
        dist.all_reduce(total, group=self.group)
        for part, whole in zip(parts, total.split([part.numel() for part in parts]), strict=True):
            part.copy_(whole.view(part.shape))

    def total(self, square_sum: Tensor) -> Tensor:
        """The sum over the group of the squares that are ``counted``, in place."""
        if self.group is not None:
            dist.all_reduce(square_sum, group=self.group)
        return square_sum

    @torch.no_grad()
    def norm(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Of all gradients of the group, 0-dim fp32."""
        pairs = zip(gradients, self.counted, strict=True)
        norms = torch._foreach_norm([g for g, counted in pairs if counted and g is not None])
        return self.total(torch.stack(norms).double().square().sum()).sqrt().float()
