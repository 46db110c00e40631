"""Choose the samples of each training step, as a pure function of (seed, step).

So a resumed run continues with the samples of an uninterrupted run. Global batches do not depend on the number of ranks
or workers. A schedule uses three kinds of random sequences: keyed permutations, pools of rows, and mixtures."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from opendit.diffusion.random import philox4x32

SORTED = 2**16  # larger permutations are Feistel networks
ROUNDS = 8  # rounds of the Feistel network
FEW = 32  # with more keys, sorting is faster than comparing
CHUNK = 1024 * 1024  # keys per comparison
_BLOCK = 1024  # keys per block


# ------------------------------------------------------------------------------------------ permutations


def permuted(positions: np.ndarray, size: int, seed: int, domain: int, epoch: int) -> np.ndarray:
    """Return entries of the permutation of [0, ``size``) for (seed, domain, epoch), as (n,) int64.

    Up to ``SORTED`` numbers are sorted by random Philox words. Larger permutations are Feistel networks with cycle
    walking and Philox as round function, see methods 2 and 3 in Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", CT-RSA 2002. Feistel networks would be poor on small domains.

    positions: (n,) int64 below ``size``. size: at most 2^61. domain: below 2^32."""
    if size <= SORTED:
        return _sorted(size, seed % 2**64, domain, epoch)[positions].astype(np.int64)
    sizes, domains, epochs = (np.full(len(positions), of) for of in (size, domain, epoch))
    return _walk(positions, sizes, domains, epochs, seed)


def permuted_each(
    positions: np.ndarray, sizes: np.ndarray, seed: int, domains: np.ndarray, epochs: np.ndarray
) -> np.ndarray:
    """Like :func:`permuted`, with a separate size, domain and epoch for every position."""
    out, large = np.zeros_like(positions), sizes > SORTED
    out[large] = _walk(positions[large], sizes[large], domains[large], epochs[large], seed)
    if not large.all():
        which = np.stack([sizes, domains, epochs], axis=1)
        for size, domain, epoch in np.unique(which[~large], axis=0).tolist():
            here = (sizes == size) & (domains == domain) & (epochs == epoch)
            out[here] = permuted(positions[here], size, seed, domain, epoch)
    return out


@lru_cache(maxsize=64)
def _sorted(size: int, seed: int, domain: int, epoch: int) -> np.ndarray:
    # numpy guarantees that raw Philox words never change, but not for Generator.permutation.
    key, counter = np.array([seed, epoch], dtype=np.uint64), np.array([0, 0, domain, 1], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.uint16)


def _walk(positions: np.ndarray, sizes: np.ndarray, domains: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """Apply the Feistel network to each number until the result is below the number's size."""
    out, outside = positions.copy(), np.arange(len(positions))
    while len(outside):
        out[outside] = _feistel(out[outside], sizes[outside], domains[outside], epochs[outside], seed)
        outside = outside[out[outside] >= sizes[outside]]
    return out


def _feistel(numbers: np.ndarray, sizes: np.ndarray, domains: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """Apply the network to ``numbers``. The product of the two bases is the size, or slightly larger."""
    different, of = np.unique(sizes, return_inverse=True)
    roots = np.array([math.isqrt(size - 1) + 1 for size in different.tolist()], dtype=np.int64)
    bases = tuple(torch.from_numpy(base[of]) for base in (roots, -(-different // roots)))
    left, right = (torch.from_numpy(digit) for digit in np.divmod(numbers, bases[1].numpy()))
    constants = torch.from_numpy(epochs % 2**32), torch.from_numpy(domains)
    for number in range(ROUNDS):
        base = bases[number % 2]
        word = philox4x32((right, torch.tensor(number), *constants), seed)[0]
        left, right = right, (left + word * base // 2**32) % base
    return (left * bases[1] + right).numpy()


# ------------------------------------------------------------------------------------------ pools of rows


class Pool(NamedTuple):
    """An endless sequence of rows, with a new permutation of all rows in every epoch."""

    size: int
    domain: int  # see :func:`permuted`
    select: Callable[[np.ndarray], np.ndarray]  # numbers (n,) below ``size`` -> rows (n,)


def rows_of(pools: Sequence[Pool], of: np.ndarray, positions: np.ndarray, seed: int) -> np.ndarray:
    """Return the row at ``positions[i]`` in ``pools[of[i]]`` for each i. All arrays are (n,) int64."""
    rows = np.empty(len(positions), dtype=np.int64)
    used, number = np.unique(of, return_inverse=True)
    chosen = [pools[each] for each in used.tolist()]
    sizes, domains = np.array([(pool.size, pool.domain) for pool in chosen], dtype=np.int64).reshape(-1, 2)[number].T
    epochs, places = np.divmod(positions, sizes)
    places = permuted_each(places, sizes, seed, domains, epochs)
    for each, pool in enumerate(chosen):
        here = number == each
        rows[here] = pool.select(places[here])
    return rows


class RowsByKey:
    """Index that finds the n-th row with a key, without a list of all rows.

    keys: (rows,) each row's key, perhaps memory-mapped. values: sorted distinct keys. totals: number of rows for each
    distinct key."""

    def __init__(self, keys: np.ndarray):
        self.keys = keys = np.asarray(keys)  # a plain array view, because slicing np.memmap is slow
        chunks = [slice(start, start + CHUNK) for start in range(0, len(keys), CHUNK)]
        self.values = keys[:0]
        for chunk in chunks:
            self.values = np.union1d(self.values, _others(keys[chunk], self.values))
        counts = [
            np.add.reduceat(keys[chunk] == value, range(0, len(keys[chunk]), _BLOCK), dtype=np.int64)
            for value in self.values
            for chunk in chunks
        ]
        blocks = -(-len(keys) // _BLOCK)
        table = np.concatenate(counts).reshape(len(self.values), blocks) if counts else np.zeros((0, 0), np.int64)
        self._ends = np.cumsum(table, axis=1)  # (values, blocks): number of rows with each key up to each block's end
        self.totals = [int(ends[-1]) for ends in self._ends]

    def select(self, value: int, numbers: np.ndarray) -> np.ndarray:
        """Return rows with the key ``values[value]``. numbers: (n,) each row's number among the rows with this key."""
        ends, rows = self._ends[value], np.empty(len(numbers), dtype=np.int64)
        blocks = np.searchsorted(ends, numbers, side="right")
        for block in np.unique(blocks).tolist():
            start, here = block * _BLOCK, blocks == block
            found = np.flatnonzero(self.keys[start : start + _BLOCK] == self.values[value])
            rows[here] = start + found[numbers[here] - (int(ends[block - 1]) if block else 0)]
        return rows


def _others(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return keys that are not in ``values``, with repetitions. For more than ``FEW`` values, return all keys."""
    if len(values) > FEW:
        return keys
    other = np.ones(len(keys), dtype=bool)
    for value in values:  # a comparison takes a hundredth of the time of sorting
        other &= keys != value
    return keys[other]


# ------------------------------------------------------------------------------------------ mixtures


class Mixture:
    """An endless random sequence of components, such as sources or shapes, in fixed proportions.

    The sequence consists of blocks. The first b blocks contain component c floor(b * rate_c) times. The order within a
    block is a keyed permutation.

    stages: (first position, rates), ascending; the first stage begins at position 0. domain: see :func:`permuted`;
    stage i uses ``domain + i``. in_order: True numbers a component's elements in order. False allows any order within a
    block, so that blocks may be very long."""

    def __init__(self, stages: Sequence[tuple[int, Sequence[Fraction]]], seed: int, domain: int, in_order: bool = True):
        self._starts = [start for start, _ in stages]
        self._stages = [_Stage(rates, seed, domain + number, in_order) for number, (_, rates) in enumerate(stages)]
        self._counts = [np.zeros(len(stages[0][1]), dtype=np.int64)]  # elements of each component before each stage
        for number, start in enumerate(self._starts[1:]):
            self._counts.append(self._counts[-1] + self._stages[number].counts(start - self._starts[number]))

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (component, index among the component's elements) for each position in [start, stop), int64."""
        components, ranks = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for stage, first, end, counts in zip(
            self._stages, self._starts, [*self._starts[1:], stop], self._counts, strict=True
        ):
            begin, until = max(start, first), min(stop, end)
            if begin < until:
                component, rank = stage.locate(begin - first, until - first)
                components.append(component)
                ranks.append(rank + counts[component])
        return np.concatenate(components), np.concatenate(ranks)

    def counts(self, position: int) -> np.ndarray:
        """Return how often each component occurs before ``position``, (components,) int64."""
        number = self._stage(position)
        return self._counts[number] + self._stages[number].counts(position - self._starts[number])

    def block(self, position: int) -> int:
        """Return the index of a position's block in its stage."""
        number = self._stage(position)
        return self._stages[number].block(position - self._starts[number])

    def length(self, blocks: int) -> int:
        """Return the number of positions in the first ``blocks`` blocks of the first stage."""
        return sum(self._stages[0].before(blocks))

    def _stage(self, position: int) -> int:
        return max(number for number, start in enumerate(self._starts) if start <= position)


class _Stage:
    """A mixture with constant rates."""

    def __init__(self, rates: Sequence[Fraction], seed: int, domain: int, in_order: bool):
        self.denominator = math.lcm(*(rate.denominator for rate in rates))
        self.rates = [rate.numerator * (self.denominator // rate.denominator) for rate in rates]
        self.seed, self.domain, self.in_order = seed, domain, in_order

    def before(self, block: int) -> list[int]:
        return [block * rate // self.denominator for rate in self.rates]

    def block(self, position: int) -> int:
        # Block b begins at b * total, or earlier by less than one position per component.
        total = sum(self.rates)
        low = position * self.denominator // total
        high = low + len(self.rates) * self.denominator // total + 1
        while low < high:
            middle = (low + high) // 2
            if sum(self.before(middle + 1)) > position:
                high = middle
            else:
                low = middle + 1
        return low

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        components, ranks = [], []
        block = self.block(start)
        while start < stop:
            before, after = np.array(self.before(block)), np.array(self.before(block + 1))
            first, end = int(before.sum()), min(stop, int(after.sum()))
            if start < end:
                ends = np.cumsum(after - before)
                begin = 0 if self.in_order else start - first
                places = np.arange(begin, end - first)
                slots = permuted(places, int(ends[-1]), self.seed, self.domain, block)
                component = np.searchsorted(ends, slots, side="right")
                rank = after[component] - (ends[component] - slots)
                if self.in_order:
                    for each in np.unique(component).tolist():
                        here = np.flatnonzero(component == each)
                        rank[here] = before[each] + np.arange(len(here))
                components.append(component[start - first - begin :])
                ranks.append(rank[start - first - begin :])
                start = end
            block += 1
        return np.concatenate(components), np.concatenate(ranks)

    def counts(self, position: int) -> np.ndarray:
        if position == 0:
            return np.zeros(len(self.rates), dtype=np.int64)
        before = np.array(self.before(self.block(position - 1)))
        component, _ = self.locate(int(before.sum()), position)
        return before + np.bincount(component, minlength=len(self.rates))


KEYED = "keyed"  # the order's name in checkpoints; old checkpoints have "sorted" or no name
POOLS, PARTS, SOURCES = (number << 24 for number in (1, 2, 3))  # domains of permutations; ``random.Stream`` has others
MANY_EPOCHS = 10_000  # number of epochs to average the steps over
WINDOW = 1024  # rows to compute at once; one step if it has more
_SAMPLES, _PARTS = 128, 16  # mean block lengths: in samples for sources, in micro-batches for shapes
_MOST, _MOST_SHAPES = 256, 4096  # maximum sources and shapes in a blend, so that domains do not overlap


Key = TypeVar("Key", bound=tuple)


class StepRows(NamedTuple):
    """The samples of a step."""

    rows: list[int]  # in order of position
    # For each unit (see ``BatchSchedule``), the index after its last sample in ``rows``.
    ends: Sequence[int]


class BatchSchedule:
    """A schedule that draws every row once per epoch, in a new random order. A global batch may contain the end of one
    epoch and the beginning of the next.

    global_batch: units in an optimizer step = batch_size x data-parallel ranks x grad_accumulation. A unit is one
    sample; in subclasses, a unit may have several samples. Raises ValueError if the data set has fewer than
    ``global_batch`` samples."""

    packed = False  # True if a micro-batch may have samples of different sizes
    passes: str | None = None  # describes an epoch in the run's first log lines

    def __init__(self, dataset_size: int, global_batch: int, seed: int):
        if global_batch < 1:
            raise ValueError(f"a global batch needs at least one sample, not {global_batch}")
        if dataset_size < global_batch:
            raise ValueError(
                f"the data set of {dataset_size:,} samples is smaller than one global batch of {global_batch:,} "
                f"= batch_size x ranks x grad_accumulation; give --global_batch_size {dataset_size} or less"
            )
        self.dataset_size, self.global_batch, self.seed = dataset_size, global_batch, seed
        self._computed: tuple[range, list[StepRows]] = range(0), []

    @property
    def micro_batches(self) -> int | None:
        """Number of micro-batches in a global batch, if each must have one shape on all ranks; else None."""
        return None

    @property
    def rows_of_step(self) -> int:
        """Maximum rows in a step."""
        return self.global_batch

    @property
    def steps_per_epoch(self) -> int:
        """Number of complete steps in the first pass over the data."""
        return self.steps(1)

    @property
    def mean_steps_per_epoch(self) -> float:
        """Mean number of steps per pass over the data, a fraction."""
        return self.steps(MANY_EPOCHS) / MANY_EPOCHS

    def steps(self, epochs: int) -> int:
        """Return the number of complete steps in ``epochs`` passes over the data."""
        return epochs * self.dataset_size // self.global_batch

    @property
    def samples_of_a_pass(self) -> int:
        return self.dataset_size

    def drawn(self, step: int) -> int:
        """Return the number of samples in all steps before ``step``."""
        return step * self.global_batch

    def epoch(self, step: int) -> int:
        """Return the epoch in which a step begins."""
        return step * self.global_batch // self.dataset_size

    def rows(self, step: int) -> list[int]:
        """Return the data set's rows for ``step``, in order of position."""
        return self._of_step(step).rows

    def ends(self, step: int) -> Sequence[int]:
        """Return :attr:`StepRows.ends` for the ``global_batch`` units of ``step``."""
        return self._of_step(step).ends

    def share(self, step: int, micro: int, rank: int, ranks: int, units: int) -> range:
        """Return the positions in :meth:`rows` that ``rank`` reads for micro-batch ``micro``. ranks: number of
        data-parallel ranks. units: units in one rank's micro-batch."""
        first, ends = (micro * ranks + rank) * units, self.ends(step)
        return range(ends[first - 1] if first else 0, ends[first + units - 1])

    def arranged(self, keys: list[Key]) -> list[Key]:
        """Return a micro-batch's keys in reading order. A key's first field is the row."""
        return keys

    def log(self, step: int) -> dict[str, Any]:
        """Return fields about the samples for the log line after ``step`` steps; {} for a single source."""
        return {}

    def seen(self, step: int) -> dict[int, int] | None:
        """Return {n: number of samples drawn n times before ``step``}; None if unknown."""
        return None

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the state that is needed to resume after ``step`` steps, or None."""
        return None

    def rows_between(self, start: int, stop: int) -> np.ndarray:
        """Return the rows of the samples [start, stop), counted from the start of the run, int64. Only for schedules
        with one sample per unit."""
        return self.passes_between(start, stop)[0]

    def passes_between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (:meth:`rows_between`, each row's source, pass number over this source, from 0), int64."""
        places, sources = np.arange(start, stop), np.zeros(stop - start, dtype=np.int64)
        rows = rows_of([Pool(self.dataset_size, POOLS, np.asarray)], sources, places, self.seed)
        return rows, sources, places // self.dataset_size

    def _of_step(self, step: int) -> StepRows:
        if step not in self._computed[0]:
            count = max(1, WINDOW // self.rows_of_step)
            steps = range(step // count * count, (step // count + 1) * count)
            self._computed = steps, self._steps(steps)
        steps, found = self._computed
        return found[step - steps.start]

    def _steps(self, steps: range) -> list[StepRows]:
        rows = self.rows_between(steps.start * self.global_batch, steps.stop * self.global_batch)
        ends = range(1, self.global_batch + 1)
        return [StepRows(of_step, ends) for of_step in rows.reshape(-1, self.global_batch).tolist()]


# ------------------------------------------------------------------------------------------ several shapes


class BucketSchedule(BatchSchedule):
    """A schedule for rows of several shapes. A micro-batch has rows of one shape on all ranks.

    A part is a micro-batch over all ranks. Each shape's rows come in consecutive permutations, cut into parts. At the
    end of an epoch, rows that do not fill a part move to the shape's first part in the next epoch. An epoch has all
    complete parts, in keyed order. A step's samples depend only on (seed, global batch, micro_batches).

    keys: each row's shape key. samples: samples per unit for each shape, in order of key; None means one. Raises
    ValueError if an epoch has too few rows for a step."""

    def __init__(
        self,
        keys: Sequence[int] | np.ndarray | RowsByKey,
        global_batch: int,
        micro_batches: int,
        seed: int,
        samples: Sequence[int] | None = None,
    ):
        shapes = keys if isinstance(keys, RowsByKey) else RowsByKey(np.asarray(keys))
        super().__init__(len(shapes.keys), global_batch, seed)
        self._micro_batches, units = micro_batches, units_of_part(global_batch, micro_batches)
        self._samples = [1] * len(shapes.totals) if samples is None else list(samples)
        self._part = [units * count for count in self._samples]  # samples in a micro-batch, over all ranks
        self._pools = [Pool(total, POOLS + i, partial(shapes.select, i)) for i, total in enumerate(shapes.totals)]
        rates = [Fraction(total, part) for total, part in zip(shapes.totals, self._part, strict=True)]
        self._parts = Mixture([(0, rates)], seed, PARTS, in_order=False)
        if (parts := self._parts.length(1)) < micro_batches:
            sizes = ", ".join(f"{total:,}" for total in shapes.totals[:20])
            few = sorted({min(self._part), max(self._part)})
            raise ValueError(
                f"a micro-batch of {' to '.join(f'{size:,}' for size in few)} samples = batch_size x ranks holds one "
                f"shape; the data set's shapes have {sizes} samples, which fill {parts} of the {micro_batches} "
                "micro-batches of a step; lower --batch_size or --grad_accumulation"
            )

    @property
    def micro_batches(self) -> int:
        return self._micro_batches

    @property
    def rows_of_step(self) -> int:
        return self._micro_batches * max(self._part)

    def steps(self, epochs: int) -> int:
        return self._parts.length(epochs) // self._micro_batches

    def drawn(self, step: int) -> int:
        return int((self._parts.counts(step * self._micro_batches) * self._part).sum())

    def epoch(self, step: int) -> int:
        return self._parts.block(step * self._micro_batches)

    def passes_between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        raise TypeError("a bucket's samples come by its parts")

    def _steps(self, steps: range) -> list[StepRows]:
        shapes, ranks = self._parts.locate(steps.start * self._micro_batches, steps.stop * self._micro_batches)
        sizes = np.array(self._part)[shapes]
        ends = np.cumsum(sizes)
        places = np.repeat(ranks * sizes - (ends - sizes), sizes) + np.arange(ends[-1])
        rows = rows_of(self._pools, np.repeat(shapes, sizes), places, self.seed).tolist()
        parts = [rows[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]
        return steps_of_parts(parts, [self._samples[shape] for shape in shapes.tolist()], self._micro_batches)


def steps_of_parts(parts: list[list[int]], samples: list[int], micro_batches: int) -> list[StepRows]:
    """Join every ``micro_batches`` parts to a step. parts: each part's rows. samples: each part's samples per unit."""
    found = []
    for first in range(0, len(parts), micro_batches):
        rows: list[int] = []
        ends: list[int] = []
        here = slice(first, first + micro_batches)
        for part, count in zip(parts[here], samples[here], strict=True):
            ends += range(len(rows) + count, len(rows) + len(part) + 1, count)
            rows += part
        found.append(StepRows(rows, ends))
    return found


def units_of_part(global_batch: int, micro_batches: int) -> int:
    """Return the number of units in a micro-batch over all ranks. Raises ValueError for unequal micro-batches."""
    if micro_batches < 1 or global_batch % micro_batches:
        raise ValueError(f"a global batch of {global_batch} can't be cut into {micro_batches} equal micro-batches")
    return global_batch // micro_batches


# ------------------------------------------------------------------------------------------ several sources


@dataclass(frozen=True)
class SourceRows:
    """The sources of a data set's rows, and their proportions in training."""

    names: tuple[str, ...]
    # (sources,) end of each source's rows. A source begins at the end of the source before it.
    ends: tuple[int, ...]
    # (first step, each source's weight), ascending; the first stage begins at step 0. Weights may have any sum. Sources
    # with weight 0 are not drawn.
    stages: tuple[tuple[int, tuple[Fraction, ...]], ...]
    epoch: int  # number of samples in a pass over the data
    # Each source's repetitions in a pass, if the user gave repetitions. The first stage's weights are then epochs x
    # sizes.
    epochs: tuple[Fraction, ...] | None = None

    def of_rows(self, ends: Sequence[int]) -> "SourceRows":
        """Return these sources for a subset of the rows, renumbered from 0. ends: the new ``ends``."""
        left = replace(self, ends=tuple(ends))
        if self.epochs is None:
            return replace(left, epoch=round(self.epoch * ends[-1] / self.ends[-1]))
        weights = tuple(epochs * size for epochs, size in zip(self.epochs, left.sizes, strict=True))
        return replace(left, stages=((0, weights), *self.stages[1:]), epoch=max(1, int(sum(weights))))

    @property
    def sizes(self) -> list[int]:
        return np.diff([0, *self.ends]).tolist()

    def check(self) -> None:
        """Raise ValueError for a source without samples."""
        for name, size in zip(self.names, self.sizes, strict=True):
            if size == 0:
                raise ValueError(f"the source {name} has no samples")

    def count(self, rows: np.ndarray) -> np.ndarray:
        """Count each source's rows in ``rows``; (sources,) int64."""
        return np.bincount(np.searchsorted(self.ends, rows, side="right"), minlength=len(self.ends))

    def log(self, counts: np.ndarray) -> dict[str, Any]:
        """Return {"sources": {name: {"share": fraction of all samples so far, "epoch": passes over the source}}}.
        counts: each source's number of samples so far."""
        seen, found = int(counts.sum()), {}
        for name, count, size in zip(self.names, counts.tolist(), self.sizes, strict=True):
            found[name] = {"share": count / seen if seen else None, "epoch": count / size}
        return {"sources": found}


class BlendSchedule(BatchSchedule):
    """A schedule that mixes several sources by weight. Each source's rows come in consecutive permutations.

    If rows have several shapes, a micro-batch has samples of one shape, from all sources. Rows are then permuted
    separately for each shape and source.

    keys: each row's shape key; None if all rows have one shape. samples: samples per unit for each shape, in order of
    key; None means one. Raises ValueError if there are fewer rows than a global batch, or a source has no rows."""

    def __init__(
        self,
        sources: SourceRows,
        global_batch: int,
        micro_batches: int,
        seed: int,
        keys: np.ndarray | None = None,
        samples: Sequence[int] | None = None,
    ):
        super().__init__(sources.ends[-1], global_batch, seed)
        self.sources, starts = sources, [0, *sources.ends[:-1]]
        sources.check()
        of_source = [None if keys is None else RowsByKey(keys[a:b]) for a, b in zip(starts, sources.ends, strict=True)]
        values = (
            [0]
            if keys is None
            else sorted({value for each in of_source if each is not None for value in each.values.tolist()})
        )
        self._samples = [1] * len(values) if samples is None else list(samples)
        self._shaped = len(values) > 1 or self._samples != [1]
        if len(starts) > _MOST or len(values) > _MOST_SHAPES:
            raise ValueError(
                f"{len(starts)} sources of {len(values)} shapes: at most {_MOST} of {_MOST_SHAPES} can be blended"
            )
        self._cut = micro_batches if self._shaped else 1
        units = units_of_part(global_batch, self._cut)
        self._part = [units * count for count in self._samples]  # samples in a micro-batch, over all ranks
        # _shares: the fraction of a source's rows with each shape. _pools: one ``Pool`` per shape and source.
        self._shares, self._pools = [], []
        self._place: dict[tuple[int, int], int] = {}  # (shape, source) -> index of the pool
        for number, (start, size, shapes) in enumerate(zip(starts, sources.sizes, of_source, strict=True)):
            found = {0: size} if shapes is None else dict(zip(shapes.values.tolist(), shapes.totals, strict=True))
            self._shares.append([Fraction(found.get(value, 0), size) for value in values])
            for place, value in enumerate(found):
                select = partial(_select, start, None if shapes is None else partial(shapes.select, place))
                shape = values.index(value)
                self._place[shape, number] = len(self._pools)
                self._pools.append(Pool(found[value], POOLS + shape * _MOST + number, select))
        cells = [(step, self._of_cells(weights)) for step, weights in sources.stages]
        rates = [(step * self._cut, _rates(self._of_parts(table), Fraction(_PARTS))) for step, table in cells]
        self._parts = Mixture(rates, seed, PARTS)
        begins = [self._parts.counts(start) * self._part for start, _ in rates]
        # A pass is a number of complete blocks, so that each pass has the sources in exact proportion.
        block = Fraction(sources.epoch, max(1, round(sources.epoch / _SAMPLES)))
        self._mixtures = []
        for shape in range(len(values)):
            of_shape = [[row[shape] for row in table] for _, table in cells]
            stages = [(int(at[shape]), _rates(each, block)) for at, each in zip(begins, of_shape, strict=True)]
            self._mixtures.append(Mixture(stages, seed, SOURCES + shape * _MOST))

    def _of_cells(self, weights: tuple[Fraction, ...]) -> list[list[Fraction]]:
        """Return a table (sources, shapes) of weights."""
        return [[weight * share for share in shares] for weight, shares in zip(weights, self._shares, strict=True)]

    def _of_parts(self, table: list[list[Fraction]]) -> list[Fraction]:
        """Return the relative number of micro-batches for each shape."""
        of_shapes = [sum(column, Fraction(0)) for column in zip(*table, strict=True)]
        return [weight / count for weight, count in zip(of_shapes, self._samples, strict=True)]

    @property
    def micro_batches(self) -> int | None:
        return self._cut if self._shaped else None

    @property
    def rows_of_step(self) -> int:
        return self._cut * max(self._part)

    def steps(self, epochs: int) -> int:
        samples, low, high = epochs * self.sources.epoch, 0, epochs * self.sources.epoch // min(self._part) + 1
        while low < high:  # bisect for the largest number of steps with at most ``samples`` samples
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.drawn(middle) <= samples else (low, middle - 1)
        return low

    @property
    def samples_of_a_pass(self) -> int:
        return self.sources.epoch

    def epoch(self, step: int) -> int:
        return self.drawn(step) // self.sources.epoch

    def drawn(self, step: int) -> int:
        return int((self._parts.counts(step * self._cut) * self._part).sum())

    def log(self, step: int) -> dict[str, Any]:
        """Return :meth:`SourceRows.log` for the samples before ``step``."""
        return self.sources.log(self.consumed(step))

    def consumed(self, step: int) -> np.ndarray:
        """Count each source's samples before ``step``; (sources,) int64."""
        parts = self._parts.counts(step * self._cut)
        of_shapes = zip(self._mixtures, parts.tolist(), self._part, strict=True)
        return cast(np.ndarray, sum(mixture.counts(count * part) for mixture, count, part in of_shapes))

    def passes_between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Implement ``BatchSchedule.passes_between`` for samples of one shape."""
        sources, numbers = self._of_shape(0, start, stop)
        sizes = np.array(self.sources.sizes, dtype=np.int64)
        return rows_of(self._pools, sources, numbers, self.seed), sources, numbers // sizes[sources]

    def _steps(self, steps: range) -> list[StepRows]:
        if not self._shaped:
            return super()._steps(steps)
        shapes, ranks = self._parts.locate(steps.start * self._cut, steps.stop * self._cut)
        found, begins, total = [], np.empty(len(shapes), dtype=np.int64), 0  # begins: each part's start in ``rows``
        sizes = np.array(self._part)[shapes]
        for shape in np.unique(shapes).tolist():
            here, part = shapes == shape, self._part[shape]
            first, last = int(ranks[here].min()), int(ranks[here].max())  # nearly all rows in between are needed
            found.append(self._of_shape(shape, first * part, (last + 1) * part))
            begins[here] = total + (ranks[here] - first) * part
            total += (last + 1 - first) * part
        pools, numbers = (np.concatenate(each) for each in zip(*found, strict=True))
        rows = rows_of(self._pools, pools, numbers, self.seed).tolist()
        parts = [rows[begin : begin + size] for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]
        return steps_of_parts(parts, [self._samples[shape] for shape in shapes.tolist()], self._cut)

    def _of_shape(self, shape: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (indices of pools, positions in these pools) for a shape's samples [start, stop)."""
        sources, numbers = self._mixtures[shape].locate(start, stop)
        places = [self._place.get((shape, source), -1) for source in range(len(self.sources.names))]
        return np.array(places, dtype=np.int64)[sources], numbers


def _select(start: int, select, numbers: np.ndarray) -> np.ndarray:
    return start + (numbers if select is None else select(numbers))


def _rates(weights: list[Fraction], block: Fraction) -> list[Fraction]:
    """Scale the weights to the sum ``block``. If all are 0, return them unchanged."""
    total = sum(weights)
    return [weight / total * block for weight in weights] if total else weights
