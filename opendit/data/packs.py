"""Choose the samples in the packs of each step.

Samples come in the keyed order of a run without packs. The order is cut into windows, and each window fills complete
steps of packs. Samples that do not fit are placed first in the next window. So the packs depend only on the seed, the
data set and the sizes of packs and steps. A checkpoint stores the start of the current window.

A window takes samples from one pass over each source, so the steps may come in any order. At the end of a pass,
remaining samples share a step with samples from the next pass. While a sample waits, its source continues at most to
the next pass. So samples of one source are seen equally often, up to a difference of two."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, NamedTuple, cast

import numpy as np

from opendit.data.order import PARTS, BatchSchedule, BlendSchedule, Key, SourceRows, permuted
from opendit.data.shaped import Lengths, summary_of

WINDOW = 192  # packs to plan at once, rounded up to complete steps
SPARE = 0.02  # fraction of extra tokens to choose from in a window
SAMPLED = 4  # full windows to plan for estimating the mean fill
PASSES = 16  # passes to plan at most for this estimate
COUNTED = 4096  # minimum samples for this estimate
KEPT = 16  # maximum planned steps in memory, in full windows
EVERY = 64  # full windows between two stored window starts
_CHUNK = 4096  # samples to look up at once
DAMAGED = "the checkpoint's packs are damaged: take an earlier checkpoint"


def work_of(lengths: np.ndarray, attention: float) -> np.ndarray:
    """Return each sample's cost, float64, if the linear layers cost 1 per token. attention: length at which attention
    costs as much as the linear layers, such as 6 x a DiT's width."""
    return lengths * (1 + lengths / attention)


class Packer:
    """Fills ``count`` packs of ``capacity`` tokens, so that the packs are nearly full and cost nearly the same.

    Samples are placed longest first, each into the cheapest pack with enough room (LPT, Graham 1969, with a capacity).

    least: tokens in the shortest possible sample. attention: see :func:`work_of`. packs: each pack's sample numbers."""

    def __init__(self, count: int, capacity: int, least: int, attention: float):
        self.least, self.attention = least, attention
        self.packs: list[list[int]] = [[] for _ in range(count)]
        self._room = [capacity] * count
        # Heap of (cost, pack) for packs that may have room.
        self._open = [(0.0, pack) for pack in range(count)]
        # Heap of (-room, cost, pack) for packs without room for the last samples. A pack returns to ``_open`` when a
        # sample fits.
        self._shut: list[tuple[int, float, int]] = []

    def place(self, numbers: np.ndarray, lengths: np.ndarray) -> list[int]:
        """Place the samples ``numbers`` (n,) with ``lengths`` (n,) int64 tokens beside earlier samples. Return the
        samples that fit into no pack. Samples of equal length stay in order."""
        order = np.argsort(-lengths, kind="stable")
        work = work_of(lengths[order], self.attention).tolist()
        left, room, open_packs, shut = [], self._room, self._open, self._shut
        for number, tokens, cost_of in zip(numbers[order].tolist(), lengths[order].tolist(), work, strict=True):
            while shut and -shut[0][0] >= tokens:
                _, cost, pack = heappop(shut)
                heappush(open_packs, (cost, pack))
            while open_packs:
                cost, pack = heappop(open_packs)
                if room[pack] >= tokens:
                    room[pack] -= tokens
                    self.packs[pack].append(number)
                    if room[pack] >= self.least:
                        heappush(open_packs, (cost + cost_of, pack))
                    break
                heappush(shut, (-room[pack], cost, pack))
            else:
                left.append(number)
        return left


@dataclass(frozen=True)
class Beginning:
    """The state at the beginning of a window."""

    step: int  # first step of the window
    position: int  # first position after the considered samples
    carry: tuple[int, ...] = ()  # positions of waiting samples, ascending
    # positions at which a blend's weights have changed; the first is 0
    stages: tuple[int, ...] = (0,)


class _Samples(NamedTuple):
    """Samples in order; each field is (n,) int64."""

    places: np.ndarray  # positions in the order
    rows: np.ndarray  # rows of the data set
    sources: np.ndarray  # each sample's source
    passes: np.ndarray  # pass number over this source, from 0
    lengths: np.ndarray  # each sample's tokens

    def of(self, which: Any) -> "_Samples":
        return _Samples(*(field[which] for field in self))

    def levels(self) -> np.ndarray:
        """Return each sample's pass minus its source's first pass here, (n,) int64."""
        _, first, source = np.unique(self.sources, return_index=True, return_inverse=True)
        return self.passes - self.passes[first][source]


def _joined(parts: list[_Samples]) -> _Samples:
    return _Samples(*(np.concatenate(fields) for fields in zip(*parts, strict=True)))


class _Window(NamedTuple):
    rows: list[list[int]]  # each step's rows, pack after pack
    ends: list[list[int]]  # each step's pack ends in ``rows``
    places: list[np.ndarray]  # each step's positions in the order
    filled: int  # tokens in all packs
    begin: Beginning
    after: Beginning
    waiting: _Samples  # samples at ``after.carry``


class PackSchedule(BatchSchedule):
    """A schedule with packs as units. A step's packs have nearly equal costs and are sorted by cost, so that a
    micro-batch has similar packs. A pack's samples are in descending order of length; equal lengths stay in order.

    Args:
        tokens: (rows,) each row's number of tokens.
        capacity: tokens in a pack.
        global_batch: packs in an optimizer step = batch_size x data-parallel ranks x grad_accumulation.
        sources: the sources, if the data set has several.
        attention: see ``work_of``.

    Raises ValueError if a sample is longer than a pack or has no tokens."""

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
        summary = summary_of(self.tokens, 0, len(self.tokens)) if len(self.tokens) else None
        if summary is None or summary.least < 1:
            raise ValueError("every sample needs a token at least")
        if summary.most > capacity:
            most = f"a sample has {summary.most:,} tokens"
            raise ValueError(f"--pack_tokens {capacity}: {most}; raise it to that at least")
        if sources is not None:
            sources.check()
        self.dataset_size, self.global_batch, self.seed, self.sources = len(self.tokens), global_batch, seed, sources
        self.steps_per_window = -(-WINDOW // global_batch)
        self._base: tuple[tuple[int, ...], BatchSchedule] | None = None
        self._first_steps: tuple[np.ndarray, float] | None = None
        self._summary = summary
        self.begin_at(0)

    packed = True
    passes = "every sample once, but for the packs in flight at its end, which come first in the next"

    # ------------------------------------------------------------------------------------- the samples of a step

    def rows(self, step: int) -> list[int]:
        """Return the data set's rows in ``step``, pack after pack."""
        window, place = self._of_step(step)
        return window.rows[place]

    def ends(self, step: int) -> list[int]:
        window, place = self._of_step(step)
        return window.ends[place]

    def arranged(self, keys: list[Key]) -> list[Key]:
        """Return the keys by descending sample length, because a rank joins its packs into one sequence."""
        return sorted(keys, key=lambda key: -self.tokens[key[0]])

    def epoch(self, step: int) -> int:
        """Return the number of complete passes over the data before ``step``."""
        return self.drawn(step) // self.samples_of_a_pass

    def drawn(self, step: int) -> int:
        order, waiting = self._after(step)
        return order.position - len(waiting)

    def steps(self, epochs: int) -> int:
        """Return the number of complete steps in ``epochs`` passes, at least one. The first windows are planned, and
        later steps are estimated from them."""
        drawn, fill = self._counted()
        samples, counted = float(epochs * self.samples_of_a_pass), len(drawn) - 1
        if samples < drawn[-1]:
            return max(1, int(np.searchsorted(drawn, samples, side="right")) - 1)
        samples -= float(drawn[-1])
        tokens, stages = self.global_batch * self.capacity * fill, self._mean_lengths()
        for (first, mean), (end, _) in zip(stages, [*stages[1:], (float("inf"), 0.0)], strict=True):
            start = max(first, counted)
            if start + samples * mean / tokens <= end:
                return int(start + samples * mean / tokens)
            samples -= max(0.0, end - start) * tokens / mean
        raise AssertionError("the last stage has no end")

    def log(self, step: int) -> dict[str, Any]:
        """Return {"fill": fraction of the last step's tokens that are not padding}, and "sources" for a blend."""
        tokens = int(self.tokens[self.rows(max(min(self._beginnings), step - 1))].sum(dtype=np.int64))
        found = {"fill": tokens / (self.global_batch * self.capacity)}
        if self.sources is not None:
            order, waiting = self._after(step)
            counts = cast(BlendSchedule, self._order(order.stages)).consumed(order.position)
            counts -= self.sources.count(self._samples_at(waiting, order.stages).rows)
            found |= self.sources.log(counts)
        return found

    def seen(self, step: int) -> dict[int, int] | None:
        """Implement ``BatchSchedule.seen`` for a single source. A window's samples count as drawn, except waiting
        samples and samples in later steps."""
        if self.sources is not None:
            return None
        begin, waiting = self._after(step)
        passes, rest = divmod(begin.position, self.dataset_size)
        counts = Counter({passes: self.dataset_size - rest, passes + 1: rest})
        rows, missed = np.unique(self._samples_at(waiting, begin.stages).rows, return_counts=True)
        first = passes * self.dataset_size
        here = np.ones(len(rows), dtype=bool)  # True for rows that come before the current position in this pass
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
        """Fraction of the first windows' tokens that are not padding."""
        return self._counted()[1]

    def _counted(self) -> tuple[np.ndarray, float]:
        """Return (cumulative number of samples in the first steps, (steps + 1,) int64; their :attr:`fill`)."""
        if self._first_steps is None:
            fresh, drawn, filled = copy(self), [np.zeros(1, dtype=np.int64)], 0
            fresh.begin_at(0)
            begin = fresh._beginnings[0]
            windows, passes = SAMPLED * self.steps_per_window, PASSES * self.samples_of_a_pass
            while drawn[-1][-1] < COUNTED or (begin.step < windows and drawn[-1][-1] < passes):
                window = fresh._window(begin)
                drawn.append(drawn[-1][-1] + np.cumsum([len(rows) for rows in window.rows]))
                filled, begin = filled + window.filled, window.after
            self._first_steps = np.concatenate(drawn), filled / (begin.step * self.global_batch * self.capacity)
        return self._first_steps

    def _mean_lengths(self) -> list[tuple[float, float]]:
        """Return (first step, mean tokens per sample) for each stage of the blend."""
        if self.sources is None:
            return [(0.0, self._summary.mean)]
        starts, ends = [0, *self.sources.ends[:-1]], self.sources.ends
        means = [summary_of(self.tokens, a, b).mean for a, b in zip(starts, ends, strict=True)]
        return [
            (float(step), sum(float(w / sum(weights)) * mean for w, mean in zip(weights, means, strict=True)))
            for step, weights in self.sources.stages
        ]

    # ------------------------------------------------------------------------------------- state of a checkpoint

    def state(self, step: int) -> dict[str, Any]:
        """Return the state for a checkpoint after ``step`` steps, for JSON: the start of the next step's window."""
        begin = self._beginning(step)
        return {
            "step": begin.step,
            "position": begin.position,
            "carry": list(begin.carry),
            "stages": list(begin.stages),
            "global_batch": self.global_batch,
            "capacity": self.capacity,
        }

    def restore(self, state: dict[str, Any], step: int) -> bool:
        """Continue from the ``state`` that :meth:`state` returned after ``step`` steps. If the size of packs or steps
        has changed, the remaining samples are packed differently. Checkpoints from old releases lack the window's first
        step; the run then repeats the samples from the window's start.

        Return True if the next packs are as in an uninterrupted run. Raises ValueError if the state is damaged, or if
        the blend lists fewer changes of weights than have already happened."""
        carry, stages, begins = tuple(state["carry"]), tuple(state["stages"]), state.get("step", step)
        changes = 1 if self.sources is None else len(self.sources.stages)
        if self.sources is not None and len(stages) > changes:
            raise ValueError(
                f"--data_path: the blend's weights had changed {len(stages) - 1} times before the checkpoint, and it "
                f"lists {changes - 1} changes now; give it those that have been"
            )
        begin = Beginning(begins, state["position"], carry, stages)
        risen = all(a < b for a, b in zip((-1, *carry), (*carry, begin.position), strict=True))
        if not (risen and begins <= step and 0 < len(stages) <= changes):
            raise ValueError(DAMAGED)
        packs, capacity = state["global_batch"], state["capacity"]
        if (packs, capacity) == (self.global_batch, self.capacity):
            self._continue_from(begin)
            if begins < step and self._window(begin).after.step <= step:
                raise ValueError(DAMAGED)
            return "step" in state
        if begins < step:
            how: dict[str, Any] = {"sources": self.sources, "attention": self.attention}
            before = PackSchedule(self.tokens, max(capacity, self._summary.most), packs, self.seed, **how)
            before.restore({**state, "capacity": before.capacity}, step)
            order, waiting = before._after(step)
            begin = replace(order, step=step, carry=tuple(waiting.tolist()))
        self._continue_from(begin)
        return False

    def begin_at(self, step: int) -> None:
        """Start the order of samples at ``step``, after steps without packs."""
        self._continue_from(Beginning(step, 0))

    def _continue_from(self, begin: Beginning) -> None:
        self._beginnings = {begin.step: begin}
        self._windows: OrderedDict[int, _Window] = OrderedDict()
        self._planned = 0  # steps of all windows in memory

    # ------------------------------------------------------------------------------------------------- windows

    def _of_step(self, step: int) -> tuple[_Window, int]:
        window = self._window(self._beginning(step))
        return window, step - window.begin.step

    def _after(self, step: int) -> tuple[Beginning, np.ndarray]:
        """Return (start of the first window from ``step`` on, earlier positions not drawn yet, (n,) int64)."""
        begin = self._beginning(step)
        if begin.step == step:
            return begin, np.array(begin.carry, dtype=np.int64)
        window = self._window(begin)
        carry = np.array(window.after.carry, dtype=np.int64)
        return window.after, np.sort(np.concatenate([carry, *window.places[step - begin.step :]]))

    def _beginning(self, step: int) -> Beginning:
        for window in reversed(self._windows.values()):
            if window.begin.step <= step < window.after.step:
                return window.begin
        kept = (window.after for window in self._windows.values())
        begin = max((each for each in (*self._beginnings.values(), *kept) if each.step <= step), key=lambda b: b.step)
        while begin.step < step and (window := self._window(begin)).after.step <= step:
            begin = window.after
        return begin

    def _window(self, begin: Beginning) -> _Window:
        if begin.step not in self._windows:
            made = self._plan(begin)
            self._windows[begin.step] = made
            self._planned += len(made.rows)
            while len(self._windows) > 1 and self._planned > KEPT * self.steps_per_window:
                self._planned -= len(self._windows.popitem(last=False)[1].rows)
            if made.after.step // self._far > begin.step // self._far:
                self._beginnings[made.after.step] = made.after
        self._windows.move_to_end(begin.step)
        return self._windows[begin.step]

    @property
    def _far(self) -> int:
        return EVERY * self.steps_per_window

    def _plan(self, begin: Beginning) -> _Window:
        stages, waited, step_tokens = self._stages(begin), len(begin.carry), self._step_tokens
        found = self._coming(begin, stages)
        levels, ends = found.levels(), np.cumsum(found.lengths)
        same = int(np.argmax(levels > 0)) or len(levels)  # number of samples before any source begins another pass
        steps = min(self.steps_per_window, int(ends[same - 1]) // step_tokens)
        wanted = steps * step_tokens if steps else self._turn_tokens
        steps, count = max(1, steps), min(len(levels), int(np.searchsorted(ends, wanted)) + 1)
        packs = steps * self.global_batch
        packer = Packer(packs, self.capacity, self._summary.least, self.attention)
        left = self._fill(packer, found.of(slice(count)), levels[:count], waited)
        lengths, waits = found.lengths[:count], np.sort(np.array([*left, *range(count, waited)], dtype=int))
        position = begin.position + max(0, count - waited)
        place_of = np.empty(count, dtype=np.int64)  # each sample's rank by descending length
        place_of[np.argsort(-lengths, kind="stable")] = np.arange(count)
        by_length = place_of.tolist().__getitem__
        ordered = [sorted(pack, key=by_length) for pack in packer.packs]
        work = work_of(lengths, self.attention)
        cost = np.array([work[pack].sum() for pack in ordered])
        by_cost = np.argsort(-cost, kind="stable").reshape(steps, self.global_batch)
        shuffled = permuted(np.arange(steps), steps, self.seed, PARTS, begin.step)
        of_steps = [[ordered[pack] for pack in by_cost[place]] for place in shuffled.tolist()]
        numbers = [np.concatenate(step).astype(np.int64) for step in of_steps]
        waiting = found.of(waits)
        return _Window(
            rows=[found.rows[each].tolist() for each in numbers],
            ends=[np.cumsum([len(pack) for pack in step]).tolist() for step in of_steps],
            places=[found.places[each] for each in numbers],
            filled=int(sum(lengths[each].sum() for each in numbers)),
            begin=begin,
            after=Beginning(begin.step + steps, position, tuple(waiting.places.tolist()), stages),
            waiting=waiting,
        )

    @property
    def _step_tokens(self) -> int:
        """Tokens to consider for one step of a window."""
        return int(self.capacity * self.global_batch * (1 + SPARE))

    @property
    def _turn_tokens(self) -> int:
        """Tokens to consider for a step at the end of a pass, where the choice is smaller."""
        packs = self.global_batch
        return int(self.capacity * (packs + max(SPARE * packs, min(packs / 4, SPARE * WINDOW))))

    def _coming(self, begin: Beginning, stages: tuple[int, ...]) -> _Samples:
        """Return the waiting samples and the next samples, enough for a window. If a source begins another pass in the
        window, they are enough for one step only."""
        waiting = next((w.waiting for w in self._windows.values() if w.after == begin), None)
        if waiting is None:
            waiting = self._samples_at(np.array(begin.carry, dtype=np.int64), stages)
        parts = [waiting]
        tokens, position = int(waiting.lengths.sum()), begin.position
        for wanted in (self._turn_tokens, self.steps_per_window * self._step_tokens):
            while tokens < wanted:
                some = self._read(stages, position, 1 + min(_CHUNK, int((wanted - tokens) / self._summary.mean)))
                position += len(some.rows)
                parts.append(some)
                tokens += int(some.lengths.sum())
                if tokens >= self._turn_tokens and _joined(parts).levels().any():
                    return _joined(parts)
        return _joined(parts)

    def _fill(self, packer: Packer, samples: _Samples, levels: np.ndarray, waited: int) -> list[int]:
        """Place the samples, and return those that do not fit. waited: the first ``waited`` samples have waited."""
        stretch = np.stack([np.maximum.accumulate(levels), np.arange(len(levels)) >= waited])
        cuts = [0, *(1 + np.flatnonzero(np.diff(stretch).any(axis=0))).tolist(), len(levels)]
        # behind: each source's lowest level (see ``_Samples.levels``) among samples that did not fit
        left, behind = [], np.full(int(samples.sources.max()) + 1, 2**62)
        for first, end in zip(cuts[:-1], cuts[1:], strict=True):
            numbers = np.arange(first, end)
            early = levels[numbers] >= behind[samples.sources[numbers]] + 2
            here = packer.place(numbers[~early], samples.lengths[numbers[~early]])
            np.minimum.at(behind, samples.sources[here], levels[here])
            left += [*here, *numbers[early].tolist()]
        return left

    def _stages(self, begin: Beginning) -> tuple[int, ...]:
        """Return the positions at which the weights have changed. New weights apply from the first window at or after
        their step."""
        if self.sources is None:
            return begin.stages
        due = sum(step <= begin.step for step, _ in self.sources.stages)
        # If a window is due for two changes, only the later one is used.
        return begin.stages + (begin.position,) * (due - len(begin.stages))

    def _order(self, stages: tuple[int, ...]) -> BatchSchedule:
        """Return the order of samples, as a schedule with one sample per step."""
        if self._base is None or self._base[0] != stages:
            if self.sources is None:
                made = BatchSchedule(self.dataset_size, 1, self.seed)
            else:
                known = zip(stages, self.sources.stages, strict=False)
                changed = tuple((place, weights) for place, (_, weights) in known)
                made = BlendSchedule(replace(self.sources, stages=changed), 1, 1, self.seed)
            self._base = stages, made
        return self._base[1]

    def _read(self, stages: tuple[int, ...], start: int, count: int) -> _Samples:
        rows, sources, passes = self._order(stages).passes_between(start, start + count)
        return _Samples(np.arange(start, start + count), rows, sources, passes, self.tokens[rows].astype(np.int64))

    def _samples_at(self, places: np.ndarray, stages: tuple[int, ...]) -> _Samples:
        """Return the samples at the ascending positions ``places`` (n,) int64."""
        chunks = places // _CHUNK
        parts = [self._read(stages, 0, 0)]
        for chunk in np.unique(chunks).tolist():
            start = chunk * _CHUNK
            parts.append(self._read(stages, start, _CHUNK).of(places[chunks == chunk] - start))
        return _joined(parts)
