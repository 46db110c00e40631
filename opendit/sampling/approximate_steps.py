"""Steps that leave out a part of the network's work and reuse what earlier steps computed.

:func:`plan_steps` decides beforehand what every step evaluates. A :class:`BlockStack` runs the network's blocks in a
step, all of them or fewer, and :class:`ReusedGuidance` skips guidance's unconditional half.
``opendit.config.approximations`` describes the methods and names their papers, [T] and [F]; docs/sampling.md has their
errors.

What is kept between steps lies in memory that does not move, so that recorded steps find it. It belongs to one batch
size, and there is one set of it for each evaluation of the network in a step (Heun's method has two).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opendit.config.approximations import Approximations, FirstBlockCache, TaylorCache
from opendit.diffusion.trajectory import at_least_float32
from opendit.models.attention import TokenGrid
from opendit.models.blocks import Block, run_blocks
from opendit.sampling.prepared_model import GatheredContexts, GatheredModulations

LOW, HIGH = 1e-2, 1e2  # noise levels below or above count as clean, or as pure noise
ALL, FIRST, REST, REUSED = "all", "first", "rest", "reused"


# ------------------------------------------------------------------------------------------------ the plan of the steps


class Mode(NamedTuple):
    """The work that a step does. Steps with different modes are recorded as different graphs.

    null: evaluate guidance's unconditional half, if the step has one. blocks: ALL, FIRST, then REST or REUSED after it;
    or the number n >= 1 of evaluations to extrapolate from.
    """

    null: bool = True
    blocks: int | str = ALL


class Step(NamedTuple):
    """A step of the plan. slot: where it stores its evaluation of the blocks. weights: of the slots, for its
    extrapolation."""

    mode: Mode
    slot: int = 0
    weights: tuple[float, ...] = ()


def plan_steps(approximations: Approximations, starts: Sequence[bool], levels: Sequence[float]) -> list[Step]:
    """Return how every step is run.

    starts: True where a step calls another model than the one before (guided or not), so that nothing of earlier steps
    can be used; True for the first step. levels: the noise level where each step begins.
    """
    first = [i for i, start in enumerate(starts) if start]
    runs = [range(i, after) for i, after in zip(first, [*first[1:], len(starts)], strict=True)]
    return [step for run in runs for step in _plan_run(approximations, run, levels)]


def _plan_run(approximations: Approximations, run: range, levels: Sequence[float]) -> list[Step]:
    """Plan consecutive steps that may use each other's evaluations."""
    if isinstance(approximations.cache, TaylorCache):
        return _plan_taylor(approximations.cache, run, [levels[i] for i in run])
    if isinstance(approximations.cache, FirstBlockCache):
        return [Step(Mode(blocks=ALL if i == run[0] else FIRST)) for i in run]
    return [Step(Mode(null=(i - run[0]) % approximations.guidance_every == 0)) for i in run]


def _plan_taylor(cache: TaylorCache, run: range, levels: Sequence[float]) -> list[Step]:
    steps, known, slots = [], [], cache.order + 1
    chosen = {run[k] for k in evaluated_steps(levels, cache.every)}
    for i in run:
        if i in chosen:
            known.append(i)
            steps.append(Step(Mode(), slot=(len(known) - 1) % slots))
            continue
        used = known[-slots:]
        weights = [0.0] * len(used)
        for number, weight in enumerate(extrapolation_weights(used, i), start=len(known) - len(used)):
            weights[number % slots] = weight
        steps.append(Step(Mode(blocks=len(used)), weights=tuple(weights)))
    return steps


def evaluated_steps(levels: Sequence[float], every: int) -> list[int]:
    """Choose one in ``every`` of the steps that begin at these noise ``levels``: the first, the last, and others spaced
    about evenly in the mean of the step's number and the logarithm of its level.

    Even spacing in the number alone leaves samplers with long steps at the end (a shifted flow) few evaluations there,
    where the log level changes most; even spacing in the log level alone leaves few to the noisy half of all others.
    """
    last, count = len(levels) - 1, -(-len(levels) // every)
    logs = [math.log(min(max(level, LOW), HIGH)) for level in levels]
    fall = (logs[0] - logs[last]) or 1.0
    places = [i / max(1, last) + (logs[0] - log) / fall for i, log in enumerate(logs)]
    chosen: list[int] = []
    for number in range(count):
        want = places[last] * number / max(1, count - 1)
        # After the previous one, and early enough to leave room for those that follow.
        free = range(chosen[-1] + 1 if chosen else 0, last - (count - number) + 2)
        chosen.append(min(free, key=lambda i: abs(places[i] - want)))
    return chosen


def extrapolation_weights(known: Sequence[float], at: float) -> list[float]:
    """Return the weights w of values at ``known`` positions for which sum(w f) is f(``at``) for all polynomials f of a
    degree below the number of positions: Newton's series of divided differences in Lagrange's form."""
    return [math.prod((at - other) / (own - other) for other in known if other != own) for own in known]


# ----------------------------------------------------------------------------------------------------------- the blocks


def make_stack(approximations: Approximations, plan: Sequence[Step], device: torch.device) -> "BlockStack":
    """Return the stack of a cache for the steps of a plan; without a cache, the exact one."""
    cache = approximations.cache
    if cache is None:
        return BlockStack()
    return TaylorStack(cache, plan, device) if isinstance(cache, TaylorCache) else FirstBlockStack(cache)


class BlockStack:
    """Runs all blocks; called instead of :func:`opendit.models.blocks.run_blocks`. The base class of stacks that leave
    blocks out.

    ``evaluated`` counts blocks times rows of the batch as they are called; replaying a recording calls nothing.
    """

    def __init__(self):
        self.evaluated = 0
        self.blocks: int | str = ALL
        self._evaluation = 0

    def begin(self, blocks: int | str) -> None:
        """Begin a step; blocks: see :class:`Mode`."""
        self.blocks, self._evaluation = blocks, 0

    def prepare(self, i: int) -> None:
        """Write what differs between steps of one mode where step i reads it, before the step runs or is replayed."""

    def clear(self) -> None:
        """Forget what is kept between steps: the tokens of the next batch may be of another number."""

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
        return blocks.run(x)


class _Blocks:
    """The blocks of one call, to be run or skipped from the first to the last."""

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

    def run(self, x: Tensor, count: int | None = None) -> Tensor:
        """Return x after the next ``count`` blocks; after all that are left by default."""
        which = self._next(count)
        blocks = self._blocks[which]
        context = None if self._context is None else self._context.of(which)
        # The last layer's modulation is gathered with the last blocks': one kernel.
        self._modulations.gather(len(blocks) + (self._done == len(self._blocks)))
        self._stack.evaluated += len(blocks) * len(x)
        return run_blocks(blocks, x, self._modulations, context, self._grid)

    def skip(self, count: int | None = None) -> None:
        """Skip the next ``count`` blocks; all that are left by default."""
        which = self._next(count)
        self._modulations.skip(which.stop - which.start)


class TaylorStack(BlockStack):
    """Extrapolates the blocks' contribution to the residual stream, F = x_L - x_0, between the steps that evaluate it,
    as TaylorSeer [T] does with the output of every attention and MLP.

    [T] eq. 4 has a Taylor series whose derivatives are finite differences. Here it is Newton's series of the same
    differences, which is exact where F is a polynomial of the step's number of a degree up to ``order``; [T]'s is not
    beyond degree 1, and was less exact on the digits from order 2 on. Both are sums w_0 F_0 + w_1 F_1 + ... of the last
    evaluations, with weights that depend on the steps' numbers only. So one sum for all blocks equals, up to rounding,
    the sum over blocks of each block's extrapolation, at 1 / L of the memory. The gates, which [T] applies after
    extrapolating, are part of F. Order 0 reuses the last F.

    The schedule is fixed, so a sample depends on its seed only and not on its batch.

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

    def clear(self) -> None:
        self.kept.clear()

    def run(self, number: int, blocks: _Blocks, x: Tensor) -> Tensor:
        key = number, len(x)
        if self.blocks == ALL:
            out = blocks.run(x)
            if key not in self.kept:
                self.kept[key] = x.new_zeros(len(self._now), *x.shape)
            self.kept[key].index_copy_(0, self._slot, (out - x).unsqueeze(0))
            return out
        blocks.skip()
        return weighted_sum(x, self._now, self.kept[key][: self.blocks])


def weighted_sum(x: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
    """Return x + sum_i weights[i] kept[i] in x's dtype, summed in float32 or wider.

    kept: (n, *x.shape). weights: float64, n or more.
    """
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    weights = weights.to(total.dtype)
    for weight, part in zip(weights, kept, strict=False):
        total = torch.addcmul(total, weight, part)
    return total.to(x.dtype)


class FirstBlockDone(Exception):
    """Ends a step after its first block, before it is decided whether the step needs the others."""


class FirstBlockStack(BlockStack):
    """First-block cache [F].

    With x_1 the first block's output for x_0, the other blocks are left out where

        mean |r - r'| < threshold mean |r'|,  r = x_1 - x_0,  r' = r of the last step that evaluated all blocks

    with means over the whole batch, including both halves of guidance. Then x_L = x_1 + (x_L' - x_1').

    The host reads one number a step, after the first block. The first evaluation decides for all evaluations of a step.
    As it decides for a whole batch, a sample depends on the others in its batch.

    kept: x_L' - x_1', (evaluation, rows) -> (rows, N, D).
    """

    def __init__(self, cache: FirstBlockCache):
        super().__init__()
        self._threshold = cache.threshold
        self.kept: dict[tuple[int, int], Tensor] = {}
        self._first: dict[int, tuple[Tensor, ...]] = {}  # rows -> x_1, r, r'
        self._change: Tensor | None = None

    def clear(self) -> None:
        self.kept.clear()
        self._first.clear()

    def reuses(self) -> bool:
        """Return True if the step whose first block was evaluated last can reuse the other blocks' results."""
        assert self._change is not None  # the first step evaluates all blocks
        return self._change.item() < self._threshold

    def run(self, number: int, blocks: _Blocks, x: Tensor) -> Tensor:
        key = number, len(x)
        if number == 0 and self.blocks in (REST, REUSED):
            blocks.skip(1)
            start = self._first[len(x)][0]
        else:
            start = blocks.run(x, 1)
            if number == 0:
                self._keep_first(start, x)
        if self.blocks == REUSED:
            blocks.skip()
            return start + self.kept[key]
        out = blocks.run(start)
        self._keep(key, out - start)
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

    def _keep(self, key: tuple[int, int], tensor: Tensor) -> None:
        """Copy a tensor over the kept one of this key, or keep a clone if there is none."""
        if key in self.kept:
            self.kept[key].copy_(tensor)
        else:
            self.kept[key] = tensor.clone()


# ------------------------------------------------------------------------------------------------------------- guidance


class ReusedGuidance:
    """``model(x, t, y)`` as guidance calls it, on a batch of the conditional half and then the unconditional one.

    Steps that skip the unconditional half replace its output by the conditional one minus the last difference between
    the two that was computed; guidance, which adds a multiple of that difference, needs no change. This reuses
    guidance's direction between neighbouring steps: Lv et al., "FasterCache", 2024, sec. 3.3, without its weights in
    frequency. The differences lie in memory that does not move, one for each evaluation of a step.

    Args:
        model: of (x, t, y); called with the first half of the rows in steps that skip the second.
        samples: B. A batch of B rows has no unconditional half and is passed on.
    """

    def __init__(self, model: Callable[[Tensor, Tensor, Tensor], Tensor], samples: int):
        self._model, self._samples = model, samples
        self._differences: list[Tensor] = []
        self._fresh, self._evaluation = True, 0
        self.rows = 0  # that guidance has asked for

    def begin(self, fresh: bool) -> None:
        """Begin a step; fresh: it evaluates the unconditional half."""
        self._fresh, self._evaluation = fresh, 0

    def __call__(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        out = self._model(x, t, y) if len(x) == self._samples else self._both(x, t, y)
        self.rows += len(x)
        return out

    def _both(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        number, self._evaluation = self._evaluation, self._evaluation + 1
        if self._fresh:
            both = at_least_float32(self._model(x, t, y))
            cond, uncond = both.chunk(2)
            if number == len(self._differences):
                self._differences.append(torch.empty_like(cond))
            torch.sub(cond, uncond, out=self._differences[number])
            return both
        rows = slice(self._samples)
        cond = at_least_float32(self._model(x[rows], t[rows], y[rows]))
        return torch.cat((cond, cond - self._differences[number]))
