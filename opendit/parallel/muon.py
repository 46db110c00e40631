"""Muon optimizer: every matrix is updated with its orthogonalised momentum.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Updates are scaled for AdamW's
learning rates, as in J. Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982.

The step of a matrix W (n, m) with gradient G, momentum b and learning rate lr:

    M = b * M + (1 - b) * G
    O = newton_schulz((1 - b) * G + b * M)             # all singular values become about 1
    W = (1 - lr * weight_decay) * W - lr * 0.2 * sqrt(max(n, m)) * O

Parameters and M are sharded as for AdamW. One rank, the owner, orthogonalises a parameter. An all-to-all sends shards
to their owners, and a second all-to-all returns the results. If all ranks have full gradients (ddp), an all-reduce
distributes the results.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.kernels.adamw_ema import FusedStep, momentum_reference
from opendit.parallel.layout import Layout

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # coefficients of the quintic polynomial, as in torch.optim.Muon
STEPS, EPSILON = 5, 1e-7
AS_ADAMW = 0.2  # root mean square of an update, as with AdamW (arXiv 2502.16982)
# maximum number of matrix elements in one batch, to limit memory
ELEMENTS = 2**27


@dataclass(frozen=True)
class MuonSettings:
    """Settings of Muon, and the parameters that Muon updates."""

    # for each parameter, the row counts of its matrices; for example, q, k and v are one parameter
    rows: Mapping[str, tuple[int, ...]]
    momentum: float = 0.95  # b in the equations above
    dtype: torch.dtype = torch.bfloat16  # precision of the iteration


def newton_schulz(x: Tensor) -> Tensor:
    """Return matrices with the singular vectors of ``x``, and singular values between 0.7 and 1.2. x: matrices (B, n,
    m) with n <= m, in the dtype of the computation. The input is overwritten."""
    a, b, c = COEFFICIENTS
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32).clamp(min=EPSILON).to(x.dtype)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@torch.no_grad()
def orthogonalise(matrices: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Orthogonalise matrices (n, m) in place, and multiply them by 0.2 * sqrt(max(n, m)). Matrices with equal sides
    are processed in batches."""
    alike: dict[tuple[int, ...], list[Tensor]] = {}
    for matrix in matrices:
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
        alike.setdefault(tuple(wide.shape), []).append(wide)
    for (short, long), group in alike.items():
        count = max(1, ELEMENTS // (short * long))
        for start in range(0, len(group), count):
            some = group[start : start + count]
            x = torch.empty(len(some), short, long, dtype=dtype, device=some[0].device)
            for place, matrix in zip(x, some, strict=True):
                place.copy_(matrix)
            for result, matrix in zip(newton_schulz(x), some, strict=True):
                matrix.copy_(result).mul_(AS_ADAMW * math.sqrt(long))


def owners(work: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign each parameter to a rank, so that all ranks compute about equally many FLOPs. work: FLOPs of each
    parameter."""
    load, owner = [0] * ranks, {}
    for name in sorted(work, key=work.__getitem__, reverse=True):
        owner[name] = load.index(min(load))
        load[owner[name]] += work[name]
    return owner


def flops(shape: Sequence[int], rows: Sequence[int]) -> int:
    sides = (sorted((count, math.prod(shape) // sum(rows))) for count in rows)
    return sum(STEPS * (4 * short**2 * long + 2 * short**3) for short, long in sides)


class Muon:
    """Computes Muon's update directions from this rank's gradient shards.

    Args:
        layout: Muon's parameters must have exactly one cut, along the flattened tensor or along rows.
        names: all trained parameters in the optimizer's order. The attribute ``names`` has only Muon's parameters.
        copied: True if every rank has full gradients.
    """

    def __init__(self, settings: MuonSettings, layout: Layout, names: Sequence[str], copied: bool = False):
        self._settings, self._layout, self._copied = settings, layout, copied
        self._index = {name: i for i, name in enumerate(names) if name in settings.rows}
        self.names = frozenset(self._index)
        first = next(iter(self._index), None)
        (cut,) = layout.cuts[first] if first else (None,)
        mesh = layout.mesh
        self._group = cut and mesh.group(cut.group)
        self._rank, self._ranks = (mesh.coordinate(cut.group), mesh.dims.size(cut.group)) if cut else (0, 1)
        work = {name: flops(layout.shapes[name], settings.rows[name]) for name in self._index}
        self._owner = owners(work, self._ranks)
        # for each parameter, the number of elements on every rank
        self._held = {}
        for name in self._index:
            (cut,), shape = layout.cuts[name], layout.shapes[name]
            width = 1 if cut.dim is None else math.prod(shape[1:])
            self._held[name] = [length * width for length in cut.lengths()]

    def direct(self, step: FusedStep) -> None:
        """Replace the gradients of Muon's parameters in ``step`` by update directions. Call after ``step.decide``."""
        gradients = step.momentum(self._settings.momentum)
        self.orthogonalise({name: g for name, i in self._index.items() if (g := gradients[i]) is not None})

    @torch.no_grad()
    def step_copies(
        self, parameters: Mapping[str, Tensor], exp_avgs: Mapping[str, Tensor], lr: float, weight_decay: float
    ) -> None:
        """Update parameters that are replicated on every rank. Their gradients (``grad``) are overwritten."""
        gradients = {name: cast(Tensor, parameter.grad) for name, parameter in parameters.items()}
        for name, gradient in gradients.items():
            momentum_reference(gradient, exp_avgs[name], self._settings.momentum, 1.0)
        self.orthogonalise(gradients)
        for name, gradient in gradients.items():
            parameters[name].mul_(1.0 - lr * weight_decay).add_(gradient, alpha=-lr)

    @torch.no_grad()
    def orthogonalise(self, shards: Mapping[str, Tensor]) -> None:
        """Orthogonalise sharded gradients, in place. Call on all ranks, with the same names."""
        settings = self._settings
        if self._ranks == 1:
            orthogonalise([m for name, shard in shards.items() for m in self._matrices(name, shard)], settings.dtype)
        elif self._copied:
            self._sum_of_owners(shards)
        else:
            self._at_owners(shards)

    def _sum_of_owners(self, copies: Mapping[str, Tensor]) -> None:
        own = {name: copy for name, copy in copies.items() if self._owner[name] == self._rank}
        orthogonalise([m for name, copy in own.items() for m in self._matrices(name, copy)], self._settings.dtype)
        flat = torch.cat([(c if name in own else torch.zeros_like(c)).reshape(-1) for name, c in copies.items()])
        dist.all_reduce(flat, group=self._group)
        parts = flat.split([copy.numel() for copy in copies.values()])
        for part, copy in zip(parts, copies.values(), strict=True):
            copy.copy_(part.view(copy.shape))

    def _at_owners(self, shards: Mapping[str, Tensor]) -> None:
        by_owner = [[name for name in shards if self._owner[name] == rank] for rank in range(self._ranks)]
        own, dtype = by_owner[self._rank], self._settings.dtype
        device = next(iter(shards.values())).device
        sent = [sum(self._held[name][self._rank] for name in names) for names in by_owner]
        received = [sum(self._held[name][rank] for name in own) for rank in range(self._ranks)]
        mine = torch.cat([shards[name].reshape(-1).to(dtype) for names in by_owner for name in names])
        theirs = torch.empty(sum(received), dtype=dtype, device=device)
        dist.all_to_all_single(theirs, mine, received, sent, group=self._group)
        pieces = [
            part.split([self._held[name][rank] for name in own]) for rank, part in enumerate(theirs.split(received))
        ]
        full = {name: torch.cat([of_rank[i] for of_rank in pieces]) for i, name in enumerate(own)}
        orthogonalise([m for name in own for m in self._matrices(name, full[name])], dtype)
        results = [full[name].split(self._held[name]) for name in own]
        torch.cat([theirs[:0], *(parts[rank] for rank in range(self._ranks) for parts in results)], out=theirs)
        dist.all_to_all_single(mine, theirs, sent, received, group=self._group)
        places = [shards[name] for names in by_owner for name in names]
        for part, place in zip(mine.split([place.numel() for place in places]), places, strict=True):
            place.copy_(part.view(place.shape))

    def _matrices(self, name: str, full: Tensor) -> list[Tensor]:
        rows = self._settings.rows[name]
        return list(full.view(sum(rows), -1).split(list(rows)))
