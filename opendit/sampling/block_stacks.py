"""Run the network's blocks in a sampling step: all of them, or fewer with the results of earlier steps ([T], [F] of
``opendit.sampling.approximations``).

A stack is called instead of :func:`opendit.models.blocks.run_blocks`. What it keeps between steps lies in memory
that stays where it is, so that recorded steps find it; the memory is of one batch size, and of each evaluation of the
network in a step (Heun's method has two).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from opendit.config.approximations import Approximations, FirstBlockCache, TaylorCache
from opendit.models.attention import TokenGrid
from opendit.models.blocks import Block, run_blocks
from opendit.sampling.approximations import ALL, FIRST, REST, REUSED, Step
from opendit.sampling.gathered import GatheredContexts, GatheredModulations


def make_stack(approximations: Approximations, plan: Sequence[Step], device: torch.device) -> "BlockStack":
    """The stack of a cache, or the exact one, for the steps of a plan."""
    cache = approximations.cache
    if cache is None:
        return BlockStack()
    return TaylorStack(cache, plan, device) if isinstance(cache, TaylorCache) else FirstBlockStack(cache)


class BlockStack:
    """All blocks, and base of those that leave some out. ``evaluated`` counts blocks times rows of the batch as they
    are called (a replay of a recording calls nothing)."""

    def __init__(self):
        self.evaluated = 0
        self.blocks: int | str = ALL
        self._evaluation = 0

    def begin(self, blocks: int | str) -> None:
        """Begins a step; blocks: as of ``Mode``."""
        self.blocks, self._evaluation = blocks, 0

    def prepare(self, i: int) -> None:
        """Puts what differs between steps of one mode where step i reads it; before it runs, or is replayed."""

    def __call__(
        self,
        blocks: Sequence[Block],
        x: Tensor,
        modulations: GatheredModulations,
        context: GatheredContexts | None = None,
        grid: TokenGrid | None = None,
        *,
        checkpointed: bool = False,
    ) -> Tensor:
        """Run the blocks; see ``run_blocks``. Modulations and contexts are gathered only for evaluated blocks."""
        number, self._evaluation = self._evaluation, self._evaluation + 1
        return self.run(number, _Blocks(self, blocks, modulations, context, grid), x)

    def run(self, number: int, blocks: "_Blocks", x: Tensor) -> Tensor:
        """Return the output of the blocks for x (B, N, D), in evaluation ``number`` of the step."""
        return blocks.take(x)


class _Blocks:
    """The blocks of one call, to be taken or passed over from the first to the last."""

    def __init__(
        self,
        stack: BlockStack,
        blocks: Sequence[Block],
        modulations: GatheredModulations,
        context: GatheredContexts | None,
        grid: TokenGrid | None,
    ):
        self._stack, self._blocks, self._modulations = stack, blocks, modulations
        self._context, self._grid, self._done = context, grid, 0

    def _next(self, count: int | None) -> slice:
        first, self._done = self._done, len(self._blocks) if count is None else self._done + count
        return slice(first, self._done)

    def take(self, x: Tensor, count: int | None = None) -> Tensor:
        """x through the next ``count`` blocks, or through all that are left."""
        which = self._next(count)
        blocks = self._blocks[which]
        context = None if self._context is None else self._context.of(which)
        # What the last layer takes is gathered with the last blocks': one kernel.
        self._modulations.gather(len(blocks) + (self._done == len(self._blocks)))
        self._stack.evaluated += len(blocks) * len(x)
        return run_blocks(blocks, x, self._modulations, context, self._grid)

    def skip(self, count: int | None = None) -> None:
        """Passes the next ``count`` blocks over, or all that are left."""
        which = self._next(count)
        self._modulations.skip(which.stop - which.start)


class TaylorStack(BlockStack):
    """Extrapolate the blocks' contribution to the residual stream, F = x_L - x_0, between the steps that evaluate it,
    as TaylorSeer [T] does with the output of every attention and MLP.

    [T] eq. 4 has a Taylor series whose derivatives are finite differences. Here it is Newton's series of the same
    differences, which is exact where F is a polynomial of the step's number of a degree up to ``order``; [T]'s is not
    beyond degree 1, and was less exact on the digits from order 2 on. Both are sums w_0 F_0 + w_1 F_1 + ... of the last
    evaluations with weights that depend on the steps' numbers only: so one sum for all blocks is, up to rounding, the
    sum of all blocks' own, at 1 / L of the memory. (Gates, which [T] applies to what it has extrapolated, are part of
    F.) Order 0 reuses the last F.

    The schedule is fixed: a sample is what its seed says in any batch.

    kept: F of the last evaluations, (evaluation, rows) -> (slots, rows, N, D).
    """

    def __init__(self, cache: TaylorCache, plan: Sequence[Step], device: torch.device):
        super().__init__()
        self.kept: dict[tuple[int, int], Tensor] = {}
        self._slots = torch.tensor([[step.slot] for step in plan], device=device)
        weights = [[*step.weights, *[0.0] * (cache.order + 1 - len(step.weights))] for step in plan]
        self._weights = torch.tensor(weights, dtype=torch.float64).to(device)
        self._slot, self._now = self._slots[0].clone(), self._weights[0].clone()

    def prepare(self, i: int) -> None:
        self._slot.copy_(self._slots[i])
        self._now.copy_(self._weights[i])

    def run(self, number: int, blocks: _Blocks, x: Tensor) -> Tensor:
        key = number, len(x)
        if self.blocks == ALL:
            out = blocks.take(x)
            if key not in self.kept:
                self.kept[key] = x.new_zeros(len(self._now), *x.shape)
            self.kept[key].index_copy_(0, self._slot, (out - x).unsqueeze(0))
            return out
        blocks.skip()
        return weighted_sum(x, self._now, self.kept[key][: self.blocks])


def weighted_sum(x: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
    """x + sum_i weights[i] kept[i], summed in float32 at least, in x's dtype. kept: (n, *x.shape); weights: n of them,
    or more, float64."""
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    weights = weights.to(total.dtype)
    for weight, part in zip(weights, kept, strict=False):
        total = torch.addcmul(total, weight, part)
    return total.to(x.dtype)


class FirstBlockDone(Exception):
    """Ends the part of a step that is taken before it is decided whether it needs all blocks."""


class FirstBlockStack(BlockStack):
    """First-block cache [F].

    With x_1 the first block's output for x_0, the other blocks are left out where

        mean |r - r'| < threshold mean |r'|,  r = x_1 - x_0,  r' = r when all blocks were evaluated last

    with means over the whole batch, both halves of guidance among it. Then x_L = x_1 + (x_L' - x_1').

    The host reads one number a step, after the first block. It decides for all evaluations of a step by its first one.
    As it decides for a batch, a sample depends on those that it is drawn with.

    kept: x_L' - x_1', (evaluation, rows) -> (rows, N, D).
    """

    def __init__(self, cache: FirstBlockCache):
        super().__init__()
        self._threshold = cache.threshold
        self.kept: dict[tuple[int, int], Tensor] = {}
        self._first: dict[int, tuple[Tensor, ...]] = {}  # rows -> x_1, r, r'
        self._change: Tensor | None = None

    def reuses(self) -> bool:
        """Return True if the step whose first block was evaluated last can reuse the other blocks' results."""
        assert self._change is not None  # of the first step, which is evaluated whole
        return self._change.item() < self._threshold

    def run(self, number: int, blocks: _Blocks, x: Tensor) -> Tensor:
        key = number, len(x)
        if number == 0 and self.blocks in (REST, REUSED):
            blocks.skip(1)
            start = self._first[len(x)][0]
        else:
            start = blocks.take(x, 1)
            if number == 0:
                self._keep_first(start, x)
        if self.blocks == REUSED:
            blocks.skip()
            return start + self.kept[key]
        out = blocks.take(start)
        _keep(self.kept, key, out - start)
        if number == 0:
            _, now, before = self._first[len(x)]
            before.copy_(now)
        return out

    def _keep_first(self, start: Tensor, x: Tensor) -> None:
        if len(x) not in self._first:
            self._first[len(x)] = tuple(torch.zeros_like(x) for _ in range(3))
        kept, now, before = self._first[len(x)]
        kept.copy_(start)
        now.copy_(start - x)
        if self.blocks == FIRST:
            change = (now - before).abs().mean(dtype=torch.float32) / before.abs().mean(dtype=torch.float32)
            if self._change is None:
                self._change = torch.zeros_like(change)
            self._change.copy_(change)
            raise FirstBlockDone


def _keep(kept: dict[tuple[int, int], Tensor], key: tuple[int, int], tensor: Tensor) -> None:
    """Copies a tensor to where the last one of this key lies, or takes a place for it."""
    if key in kept:
        kept[key].copy_(tensor)
    else:
        kept[key] = tensor.clone()
