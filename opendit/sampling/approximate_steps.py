"""Approximate sampling steps: skip some of the network's work and reuse earlier steps' results.

``opendit.config.sample`` describes the methods and names their papers, [T] and [F]. docs/sampling.md lists the errors.
Tensors that are stored between steps stay at fixed addresses, because recorded CUDA graphs read them. Heun's method
evaluates the network twice in a step; each evaluation has separate tensors."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opendit.config.components import TokenRoute, parse_route
from opendit.config.sample import Approximations, FirstBlockCache, TaylorCache
from opendit.diffusion.samplers import at_least_float32
from opendit.models.attention import TokenGrid
from opendit.models.auxiliary import Fusion, run_on_kept
from opendit.models.blocks import Block, Context, run_blocks
from opendit.models.dit import DiTConfig
from opendit.models.families.public_config import PublicConfig
from opendit.sampling.prepared_model import GatheredContexts, GatheredModulations

LOW, HIGH = 1e-2, 1e2  # noise levels are clamped to these bounds
ALL, FIRST, REST, REUSED = "all", "first", "rest", "reused"


class Mode(NamedTuple):
    """The computations of a step. Every mode is recorded as a separate CUDA graph.

    null: True to evaluate guidance's unconditional half. blocks: ALL, FIRST (the first block), REST (the remaining
    blocks), REUSED (earlier results instead of the remaining blocks), or a number of evaluations to extrapolate."""

    null: bool = True
    blocks: int | str = ALL


class Step(NamedTuple):
    """The plan of one step. slot: index in a stack's cache for the step's evaluation. weights: weights of all slots in
    an extrapolation, otherwise empty."""

    mode: Mode
    slot: int = 0
    weights: tuple[float, ...] = ()


def plan_steps(approximations: Approximations, starts: Sequence[bool], levels: Sequence[float]) -> list[Step]:
    """Plan every step. starts: True for steps that can't reuse earlier results. levels: the steps' noise levels."""
    first = [i for i, start in enumerate(starts) if start]
    runs = [range(i, after) for i, after in zip(first, [*first[1:], len(starts)], strict=True)]
    cache, every = approximations.cache, approximations.guidance_every
    if isinstance(cache, TaylorCache):
        return [step for run in runs for step in _plan_taylor(cache, run, [levels[i] for i in run])]
    if isinstance(cache, FirstBlockCache):
        return [Step(Mode(blocks=ALL if i == run[0] else FIRST)) for run in runs for i in run]
    return [Step(Mode(null=(i - run[0]) % every == 0)) for run in runs for i in run]


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
    """Return the indices of the steps to evaluate: one in ``every`` steps, rounded up. The first step is evaluated. The
    last step is evaluated if there are two or more.

    The steps are evenly spaced in a sum of two coordinates, each scaled to 0..1: the step's index, and the logarithm of
    the noise level. With the index alone, a shifted flow would have too few steps at low noise levels. With the
    logarithm alone, other samplers would have too few steps at high noise levels."""
    last, count = len(levels) - 1, -(-len(levels) // every)
    logs = [math.log(min(max(level, LOW), HIGH)) for level in levels]
    fall = (logs[0] - logs[last]) or 1.0
    places = [i / max(1, last) + (logs[0] - log) / fall for i, log in enumerate(logs)]
    chosen: list[int] = []
    for number in range(count):
        want = places[last] * number / max(1, count - 1)
        # steps after the previous choice; the last steps remain for later choices
        free = range(chosen[-1] + 1 if chosen else 0, last - (count - number) + 2)
        chosen.append(min(free, key=lambda i: abs(places[i] - want)))
    return chosen


def extrapolation_weights(known: Sequence[float], at: float) -> list[float]:
    """Return the weights of polynomial (Lagrange) extrapolation from the positions ``known`` to the position ``at``."""
    return [math.prod((at - other) / (own - other) for other in known if other != own) for own in known]


def make_stack(approximations: Approximations, plan: Sequence[Step], device: torch.device) -> "BlockStack":
    cache = approximations.cache
    if cache is None:
        return BlockStack()
    return TaylorStack(cache, plan, device) if isinstance(cache, TaylorCache) else FirstBlockStack(cache)


def weak_route(config: DiTConfig, by: str) -> TokenRoute | None:
    """Parse ``--guidance_by``. Return the route that weakens the second half of a guided batch, or None for "null".
    Raises ValueError if the value is invalid or the model does not support it."""
    asked, fused = f"--guidance_by {by}", config.sprint
    if by == "null":
        return None
    if by == "route":
        if fused is None:
            raise ValueError(f"{asked}: the model was not trained with --route FIRST:LAST:SHARE:sprint; give null")
        return TokenRoute(*fused, 0.0, True)
    route = parse_route(by, "guidance_by")
    if fused is not None or route.fused:
        raise ValueError(f"{asked}: is for models without a fused route; give {'null' if fused is None else 'route'}")
    if config.axial_attention or config.block.experts or config.joint_sequence or config.kind == PublicConfig.kind:
        raise ValueError(f"{asked}: {config.kind} models have blocks that need all tokens; give null")
    if route.last > config.depth or route.share == 0:
        raise ValueError(f"{asked}: out of range; end at block {config.depth} or before, with a share above 0")
    return route


class WeakHalf(NamedTuple):
    """Settings for the second half of a guided batch (``--guidance_by``).

    route: the affected blocks. kept: the tokens that these blocks process in every step, (1, n) int64 indices. For a
    fused route, mask tokens replace the blocks' output instead. samples: B, half of a guided batch."""

    route: TokenRoute
    samples: int
    kept: list[Tensor]


class BlockStack:
    """Runs all blocks, as :func:`opendit.models.blocks.run_blocks` does. Subclasses skip blocks in some steps.

    ``evaluated`` counts block evaluations: one for each block and batch row. Replayed CUDA graphs are not counted.
    """

    def __init__(self):
        self.evaluated = 0
        self.blocks: int | str = ALL
        self.fusion: Fusion | None = None
        self.weak: WeakHalf | None = None
        self.route: tuple[int, int] = (0, 0)
        self.weak_tokens: Tensor | None = None  # the weak half's tokens in the current step, (1, n) int64
        self._evaluation = 0

    def use_routes(self, fusion: Fusion | None, route: tuple[int, int] | None, weak: WeakHalf | None) -> None:
        """Set the model's fused route (first, last) and its fusion, and the settings for the second half of guided
        batches. None turns a setting off."""
        self.fusion, self.weak = fusion, weak
        self.route = route or ((0, 0) if weak is None else (weak.route.first, weak.route.last))
        self.weak_tokens = weak.kept[0].clone() if weak is not None and weak.kept else None

    def begin(self, blocks: int | str) -> None:
        self.blocks, self._evaluation = blocks, 0

    def prepare(self, i: int) -> None:
        """Update the inputs that differ between steps of one mode. Call this before step i is run or replayed."""
        if self.weak_tokens is not None and self.weak is not None:
            self.weak_tokens.copy_(self.weak.kept[i])

    def clear(self) -> None:
        """Drop the tensors stored between steps. Call this if the next batch may have another number of tokens."""

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
        """Return the blocks' output, see ``run_blocks``. Modulations and contexts of skipped blocks are not read."""
        number, self._evaluation = self._evaluation, self._evaluation + 1
        return self.run(number, _Blocks(self, blocks, modulations, context, grid), x)

    def run(self, number: int, blocks: "_Blocks", x: Tensor) -> Tensor:
        """Return the blocks' output for x (rows, N, D). number: index of the evaluation in its step."""
        return blocks.run(x)


class _Blocks:
    """The blocks in one call of a stack, to run or skip in order."""

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
        self._shallow: Any = None  # input of the fused route's first block

    def _next(self, count: int | None) -> slice:
        first, self._done = self._done, len(self._blocks) if count is None else self._done + count
        return slice(first, self._done)

    def run(self, x: Tensor, count: int | None = None) -> Tensor:
        """Run the next ``count`` blocks on x and return the result; None runs all remaining blocks."""
        which = self._next(count)
        number, (first, last), fusion = which.stop - which.start, self._stack.route, self._stack.fusion
        # also gather the final layer's modulations with the last blocks'
        self._modulations.gather(number + (self._done == len(self._blocks)))
        self._stack.evaluated += number * len(x)
        weak = self._stack.weak if self._stack.weak and len(x) == 2 * self._stack.weak.samples else None
        cuts = [cut for cut in (first, last) if (fusion or weak) and which.start < cut < which.stop]
        for start, stop in pairwise((which.start, *cuts, which.stop)):
            if fusion is not None and start == first:
                self._shallow = x
            context = None if self._context is None else self._context.of(slice(start, stop))
            if weak is not None and first <= start < last:
                x = self._in_halves(self._blocks[start:stop], x, context, weak.samples)
            else:
                x = run_blocks(self._blocks[start:stop], x, self._modulations, context, self._grid)
            if fusion is not None and stop == last:
                x = fusion(x, self._shallow)
        return x

    def _in_halves(
        self, blocks: Sequence[Block], x: Tensor, context: Context | list[Context] | None, samples: int
    ) -> Tensor:
        """Run a route's blocks on both halves of a guided batch x (2 B, N, D), see :class:`WeakHalf`."""
        modulations = [next(self._modulations) for _ in blocks]

        def run(x: Tensor, rows: slice, grid: TokenGrid | None) -> Tensor:
            return run_blocks(blocks, x, (m[rows] for m in modulations), _rows_of(context, rows), grid)

        strong, weak = x.split(samples)
        strong, after = run(strong, slice(samples), self._grid), partial(run, rows=slice(samples, None))
        if self._stack.fusion is None:
            tokens = self._stack.weak_tokens
            assert tokens is not None, "a route that is not fused has kept tokens"
            weak = run_on_kept(after, weak, self._grid, tokens.expand(samples, -1))
        else:
            weak = self._stack.fusion.masks(weak, weak.shape[1])
            self._stack.evaluated -= len(blocks) * samples
        return torch.cat((strong, weak))

    def skip(self, count: int | None = None) -> None:
        """Skip the next ``count`` blocks; None skips all remaining blocks."""
        which = self._next(count)
        self._modulations.skip(which.stop - which.start)


def _rows_of(context: Context | list[Context] | None, rows: slice) -> Any:
    if context is None:
        return None
    if isinstance(context, list):
        return [_rows_of(each, rows) for each in context]
    return tuple(part[rows] for part in context)


class TaylorStack(BlockStack):
    """Block stack that runs the blocks only in some steps. Other steps extrapolate F = x_L - x_0, the blocks' residual.

    TaylorSeer [T] extrapolates the output of every attention and MLP by a Taylor series, with finite differences as
    derivatives (eq. 4). Such a series is exact for polynomials up to degree 1. This class uses Newton's series. It is
    exact up to degree ``order``. Order 0 reuses the last F.

    An extrapolation is a weighted sum of earlier evaluations, with equal weights for all blocks. So extrapolating F
    equals extrapolating every block, up to rounding, and takes 1 / L of the memory for L blocks. Unlike in [T], the
    extrapolated values include the gates.

    ``kept`` maps (index of the evaluation in its step, batch rows) to the last steps' F, (slots, rows, N, D)."""

    def __init__(self, cache: TaylorCache, plan: Sequence[Step], device: torch.device):
        super().__init__()
        self.kept: dict[tuple[int, int], Tensor] = {}
        self._slots = torch.tensor([[step.slot] for step in plan], device=device)
        weights = [[*step.weights, *[0.0] * (cache.order + 1 - len(step.weights))] for step in plan]
        self._weights = torch.tensor(weights, dtype=torch.float64).to(device)
        self._slot, self._now = self._slots[0].clone(), self._weights[0].clone()

    def prepare(self, i: int) -> None:
        super().prepare(i)
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
    """Return x + sum_i weights[i] kept[i] in x's dtype, summed in float32 or wider. kept: (n, *x.shape). weights: at
    least n float64 numbers, of which the first n are used."""
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    weights = weights.to(total.dtype)
    for weight, part in zip(weights, kept, strict=False):
        total = torch.addcmul(total, weight, part)
    return total.to(x.dtype)


class FirstBlockDone(Exception):
    """Ends a step after its first block. The caller then decides whether to run the remaining blocks."""


class FirstBlockStack(BlockStack):
    """First-block cache [F].

    The first block maps x_0 to x_1, the last block's output is x_L, and r = x_1 - x_0. Primes mark values from the last
    complete step. A step runs only its first block, and uses x_L = x_1 + (x_L' - x_1'), if

        mean |r - r'| < threshold mean |r'|.

    The means are over the batch, so a sample depends on its batch. If a step has several evaluations, the first one
    decides for all.

    ``kept`` maps (index of the evaluation in its step, batch rows) to x_L' - x_1', (rows, N, D)."""

    def __init__(self, cache: FirstBlockCache):
        super().__init__()
        self._threshold = cache.threshold
        self.kept: dict[tuple[int, int], Tensor] = {}
        self._first: dict[int, tuple[Tensor, ...]] = {}  # number of rows -> x_1, r, r'
        self._change: Tensor | None = None

    def clear(self) -> None:
        self.kept.clear()
        self._first.clear()

    def reuses(self) -> bool:
        """Return True if the current step can skip its remaining blocks. The first block must have run."""
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
        if key in self.kept:
            self.kept[key].copy_(tensor)
        else:
            self.kept[key] = tensor.clone()


class ReusedGuidance:
    """Wraps ``model(x, t, y)`` so that some steps skip the unconditional half of a guided batch.

    A guided batch has 2 B rows: the conditional half, then the unconditional half. A full step stores the outputs'
    difference. Other steps evaluate only the conditional half, and subtract the stored difference to get the
    unconditional half (Lv et al., "FasterCache", 2024, sec. 3.3, but without weighting frequencies).

    samples: B. A batch of B rows has no unconditional half and goes to ``model`` unchanged."""

    def __init__(self, model: Callable[[Tensor, Tensor, Tensor], Tensor], samples: int):
        self._model, self._samples = model, samples
        self._differences: list[Tensor] = []
        self._fresh, self._evaluation = True, 0
        self.rows = 0  # batch rows that guidance has requested, including skipped ones

    def begin(self, fresh: bool) -> None:
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
