"""Which samples make the packs of a step: a deterministic fold over the order of samples.

Samples come in the keyed order of every data set. A window of it fills a fixed number of packs, which make whole steps;
what finds no room waits, and is placed before all others in the next window. So the packs of a step depend on the seed,
the lengths and the packs of a step alone, and any number of ranks that divides these reads the same ones. Where a
window begins in the order, and what waits then, is saved with every checkpoint: a run goes on from there without going
through the windows before, to the same packs.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from opendit.data.order.blend import BlendSchedule, SourceRows
from opendit.data.order.lengths import Lengths, summary_of
from opendit.data.order.packing import fill_packs, work_of
from opendit.data.order.permutation import permuted
from opendit.data.order.schedule import KEYED, PARTS, BatchSchedule, Key

WINDOW = 192  # packs that are planned together, or a step's if it has more
SPARE = 0.02  # tokens of a window beyond what fills its packs, to choose from
SAMPLED = 4  # windows whose fill is taken for that of all
KEPT = 16  # windows in memory
EVERY = 64  # windows whose beginning is remembered as well
_CHUNK = 4096  # samples looked up at once


@dataclass(frozen=True)
class Beginning:
    """Where a window begins. position: in the order of samples. carry: the positions that wait, rising. stages: where
    in the order the weights of a blend have changed so far, 0 the first."""

    window: int
    position: int
    carry: tuple[int, ...]
    stages: tuple[int, ...] = (0,)


class _Window(NamedTuple):
    rows: list[list[int]]  # of every step
    ends: list[list[int]]  # of every step's packs
    places: list[np.ndarray]  # of every step: where its rows stand in the order of samples
    filled: int  # tokens of all packs
    after: Beginning
    carried: np.ndarray  # the rows that wait then


class PackSchedule(BatchSchedule):
    """A schedule whose units are packs: of each pack's samples the longest come first, equal ones in their order.

    tokens: (rows,) the length of every row's sample. capacity: tokens of a pack. global_batch: packs of one optimizer
    step = batch_size x data-parallel ranks x grad_accumulation. sources: of a data set of several. attention: see
    ``work_of``.

    A step's packs cost alike, and are sorted by cost, so that ranks get neighbours. Raises ValueError for a sample that
    is longer than a pack.
    """

    def __init__(
        self,
        tokens: Sequence[int] | np.ndarray | Lengths,
        capacity: int,
        global_batch: int,
        seed: int,
        *,
        sources: SourceRows | None = None,
        attention: float = float("inf"),
    ):
        self.tokens = tokens if isinstance(tokens, Lengths) else np.asarray(tokens)
        self.capacity, self.attention = capacity, attention
        if global_batch < 1:
            raise ValueError(f"a step needs at least one pack, not {global_batch}")
        whole = summary_of(self.tokens, 0, len(self.tokens)) if len(self.tokens) else None
        if whole is None or whole.least < 1:
            raise ValueError("every sample needs a token at least")
        if whole.most > capacity:
            raise ValueError(f"--pack_tokens {capacity}: a sample has {whole.most:,} tokens; raise it to that at least")
        if sources is not None:
            sources.check()
        self.dataset_size, self.global_batch, self.seed, self.sources = len(self.tokens), global_batch, seed, sources
        self.steps_per_window = -(-WINDOW // global_batch)
        self._origin = 0  # the step that the first window begins with
        self._beginnings = {0: Beginning(0, 0, ())}
        self._windows: OrderedDict[int, _Window] = OrderedDict()
        self._base: tuple[tuple[int, ...], BatchSchedule] | None = None
        self._fill: float | None = None
        self._whole = whole

    order = KEYED
    packed = True

    # ------------------------------------------------------------------------------------------------- of a step

    def rows(self, step: int) -> list[int]:
        """Data set rows of all packs of ``step``, pack after pack."""
        window, place = self._of_step(step)
        return window.rows[place]

    def ends(self, step: int) -> list[int]:
        window, place = self._of_step(step)
        return window.ends[place]

    def arranged(self, keys: list[Key]) -> list[Key]:
        """Those of several packs lie in one sequence: together by falling length."""
        return sorted(keys, key=lambda key: -self.tokens[key[0]])

    def epoch(self, step: int) -> int:
        """How many passes over the data have as many samples as the steps before ``step`` have taken."""
        return self.drawn(step) // self.samples_of_a_pass

    def drawn(self, step: int) -> int:
        order, waiting = self._after(step)
        return order.position - len(waiting)

    def steps(self, epochs: int) -> int:
        """The steps of so many passes, at the fill of the first windows and the mean lengths of the blend's stages."""
        samples, tokens = epochs * self.samples_of_a_pass, self.global_batch * self.capacity * self.fill
        stages = self._mean_lengths()
        for (start, mean), (end, _) in zip(stages, [*stages[1:], (float("inf"), 0.0)], strict=True):
            if start + samples * mean / tokens <= end:
                return int(start + samples * mean / tokens)
            samples -= (end - start) * tokens / mean
        raise AssertionError("the last stage has no end")

    def log(self, step: int) -> dict[str, Any]:
        """{"fill": share of the last step's packs that is no padding}, and of several sources "sources" as of
        ``BlendSchedule``."""
        tokens = int(self.tokens[self.rows(max(self._origin, step - 1))].sum(dtype=np.int64))
        found = {"fill": tokens / (self.global_batch * self.capacity)}
        if self.sources is not None:
            order, waiting = self._after(step)
            counts = cast(BlendSchedule, self._order(order.stages)).consumed(order.position)
            counts -= self.sources.count(self._rows_at(waiting, order.stages))
            found |= self.sources.log(counts)
        return found

    def seen(self, step: int) -> dict[int, int] | None:
        """As ``BatchSchedule.seen``; None of several sources, whose epochs :meth:`log` has.

        All samples before a place of the order are taken, but for those that wait there and those of the window's
        steps that are still to come.
        """
        if self.sources is not None:
            return None
        begin, waiting = self._after(step)
        passes, rest = divmod(begin.position, self.dataset_size)
        counts = Counter({passes: self.dataset_size - rest, passes + 1: rest})
        rows, missed = np.unique(self._rows_at(waiting, begin.stages), return_counts=True)
        first = passes * self.dataset_size
        here = np.ones(len(rows), dtype=bool)  # which of them the pass under way has had: all, if they wait since
        if len(waiting) and waiting[0] < first:
            here = np.isin(rows, self._order(begin.stages).rows_between(first, begin.position))
        for due, less in zip((passes + here).tolist(), missed.tolist(), strict=True):
            counts[due] -= 1
            counts[due - less] += 1
        return {times: count for times, count in sorted(counts.items()) if count}

    @property
    def samples_of_a_pass(self) -> int:
        return self.dataset_size if self.sources is None else self.sources.epoch

    @property
    def fill(self) -> float:
        """Of the first windows: which share of their packs is no padding."""
        if self._fill is None:
            filled = sum(self._window(number).filled for number in range(SAMPLED))
            self._fill = filled / (SAMPLED * self.steps_per_window * self.global_batch * self.capacity)
        return self._fill

    def _mean_lengths(self) -> list[tuple[float, float]]:
        """(first step, mean tokens of a sample) of every stage of the blend."""
        if self.sources is None:
            return [(0.0, self._whole.mean)]
        starts, ends = [0, *self.sources.ends[:-1]], self.sources.ends
        means = [summary_of(self.tokens, a, b).mean for a, b in zip(starts, ends, strict=True)]
        return [
            (float(step), sum(float(w / sum(weights)) * mean for w, mean in zip(weights, means, strict=True)))
            for step, weights in self.sources.stages
        ]

    # ------------------------------------------------------------------------------------------- of a checkpoint

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after ``step`` steps keeps, as JSON: where the window of the next one begins."""
        begin = self._beginning((step - self._origin) // self.steps_per_window)
        return {
            "origin": self._origin,
            "window": begin.window,
            "position": begin.position,
            "carry": list(begin.carry),
            "stages": list(begin.stages),
            "global_batch": self.global_batch,
            "capacity": self.capacity,
        }

    def restore(self, state: dict[str, Any], step: int) -> bool:
        """Goes on from what :meth:`state` gave after ``step`` steps. False: that was with packs of another size, or
        another number of them a step, so that the samples which were not taken yet come in another order. Raises
        ValueError for what can't have been given."""
        packs, capacity = state["global_batch"], state["capacity"]
        if (packs, capacity) != (self.global_batch, self.capacity):
            how: dict[str, Any] = {"sources": self.sources, "attention": self.attention}
            before = PackSchedule(self.tokens, max(capacity, self._whole.most), packs, self.seed, **how)
            before.restore({**state, "capacity": before.capacity}, step)
            order, waiting = before._after(step)
            self.begin_at(step, replace(order, carry=tuple(waiting.tolist())))
            return False
        carry, stages, origin = tuple(state["carry"]), tuple(state["stages"]), state.get("origin", 0)
        changes = 1 if self.sources is None else len(self.sources.stages)
        if self.sources is not None and len(stages) > changes:
            raise ValueError(
                f"--data_path: the blend's weights had changed {len(stages) - 1} times before the checkpoint, and it "
                f"lists {changes - 1} changes now; give it those that have been"
            )
        begin = Beginning(state["window"], state["position"], carry, stages)
        risen = all(a < b for a, b in zip((-1, *carry), (*carry, begin.position), strict=True))
        here = 0 <= origin <= step and begin.window == (step - origin) // self.steps_per_window
        if not (here and risen and 0 < len(stages) <= changes):
            raise ValueError("the checkpoint's packs are damaged: take an earlier checkpoint")
        self._origin, self._beginnings = origin, {begin.window: begin}
        return True

    def begin_at(self, step: int, order: Beginning = Beginning(0, 0, ())) -> None:
        """Takes ``step`` for the first one, from a place of the order on: of a run that had no such packs before."""
        self._origin, self._beginnings = step, {0: replace(order, window=0)}
        self._windows.clear()

    # ------------------------------------------------------------------------------------------------- the fold

    def _of_step(self, step: int) -> tuple[_Window, int]:
        number, place = divmod(step - self._origin, self.steps_per_window)
        return self._window(number), place

    def _after(self, step: int) -> tuple[Beginning, np.ndarray]:
        """Where the steps before ``step`` end in the order, and the places before it that none of them has taken."""
        number, place = divmod(step - self._origin, self.steps_per_window)
        order, coming = self._beginning(number), []
        if place:
            window = self._window(number)
            order, coming = window.after, window.places[place:]
        return order, np.sort(np.concatenate([np.array(order.carry, dtype=np.int64), *coming]))

    def _beginning(self, number: int) -> Beginning:
        if number in self._beginnings:
            return self._beginnings[number]
        known = max(each for each in (*self._beginnings, *(each + 1 for each in self._windows)) if each <= number)
        if known == number:
            return self._windows[number - 1].after
        for each in range(known, number):
            begin = self._window(each).after
        return begin

    def _window(self, number: int) -> _Window:
        if number not in self._windows:
            made = self._plan(self._beginning(number))
            self._windows[number] = made
            while len(self._windows) > KEPT:
                self._windows.popitem(last=False)
            if number % EVERY == EVERY - 1:
                self._beginnings[number + 1] = made.after
        self._windows.move_to_end(number)
        return self._windows[number]

    def _plan(self, begin: Beginning) -> _Window:
        stages = self._stages(begin)
        carry, packs = np.array(begin.carry, dtype=np.int64), self.steps_per_window * self.global_batch
        before = self._windows.get(begin.window - 1)
        rows = [self._rows_at(carry, stages) if before is None else before.carried]
        missing = packs * self.capacity * (1 + SPARE) - self.tokens[rows[0]].sum(dtype=np.int64)
        position = begin.position
        while missing > 0:
            some = self._order(stages).rows_between(
                position, position + min(_CHUNK, 1 + int(missing / self._whole.mean))
            )
            ends = np.cumsum(self.tokens[some], dtype=np.int64)
            count = min(len(some), int(np.searchsorted(ends, missing)) + 1)
            rows.append(some[:count])
            missing -= int(ends[count - 1])
            position += count
        rows, places = np.concatenate(rows), np.concatenate([carry, np.arange(begin.position, position)])
        lengths = self.tokens[rows].astype(np.int64)
        found = fill_packs(lengths, len(carry), packs, self.capacity, self.attention)
        place_of = np.empty(len(rows), dtype=np.int64)  # by falling length
        place_of[np.lexsort((np.arange(len(rows)), -lengths))] = np.arange(len(rows))
        by_length = place_of.tolist().__getitem__
        ordered = [sorted(pack, key=by_length) for pack in found.packs]
        work = work_of(lengths, self.attention)
        cost = np.array([work[pack].sum() for pack in ordered])
        by_cost = np.lexsort((np.arange(packs), -cost)).reshape(self.steps_per_window, self.global_batch)
        shuffled = permuted(np.arange(self.steps_per_window), self.steps_per_window, self.seed, PARTS, begin.window)
        steps = [[ordered[pack] for pack in by_cost[place]] for place in shuffled.tolist()]
        return _Window(
            rows=[rows[np.concatenate(step)].tolist() for step in steps],
            ends=[np.cumsum([len(pack) for pack in step]).tolist() for step in steps],
            places=[places[np.concatenate(step)] for step in steps],
            filled=int(lengths.sum() - lengths[found.left].sum()),
            after=Beginning(begin.window + 1, position, tuple(places[found.left].tolist()), stages),
            carried=rows[found.left],
        )

    def _stages(self, begin: Beginning) -> tuple[int, ...]:
        """Where the weights have changed, with those that change with this window: at the first one that begins at
        their step or after it."""
        if self.sources is None:
            return begin.stages
        first = self._origin + begin.window * self.steps_per_window
        due = sum(step <= first for step, _ in self.sources.stages)
        # Two changes in one window: the later one counts, and the one before it is of no sample.
        return begin.stages + (begin.position,) * (due - len(begin.stages))

    def _order(self, stages: tuple[int, ...]) -> BatchSchedule:
        """The order of samples, one by one."""
        if self._base is None or self._base[0] != stages:
            if self.sources is None:
                made = BatchSchedule(self.dataset_size, 1, self.seed)
            else:
                known = zip(stages, self.sources.stages, strict=False)
                changed = tuple((place, weights) for place, (_, weights) in known)
                made = BlendSchedule(replace(self.sources, stages=changed), 1, 1, self.seed)
            self._base = stages, made
        return self._base[1]

    def _rows_at(self, positions: np.ndarray, stages: tuple[int, ...]) -> np.ndarray:
        """The rows at single positions, which lie in few stretches."""
        if len(positions) == 0:
            return np.empty(0, dtype=np.int64)
        order, chunks = self._order(stages), positions // _CHUNK
        parts = []
        for chunk in np.unique(chunks).tolist():
            start = chunk * _CHUNK
            parts.append(order.rows_between(start, start + _CHUNK)[positions[chunks == chunk] - start])
        return np.concatenate(parts)
