"""Continuous batching: samples take the rows of a batch when they are free, each at a step of its own."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendit.diffusion import Objective
from opendit.diffusion.guidance import cfg_model
from opendit.diffusion.random import initial_noise
from opendit.diffusion.trajectory import Model
from opendit.inference.sampling_loop import NotRecordedError
from opendit.inference.slot_inputs import Fill, SlotInputs, StepTable
from opendit.inference.slot_model import SlotModel
from opendit.kernels.fp8_weight import keep_weights
from opendit.kernels.recording import GraphRecorder
from opendit.models import Condition, DiT
from opendit.models.conditioning import joined as joined_conditions

TICKS = 64  # that are prepared at once for every slot, at most
PATIENCE = 2  # ticks for which a smaller batch must have been enough


@dataclass(frozen=True)
class SampleKind:
    """What samples must have in common to be drawn in one batch.

    channels: that are guided. size: of the latents. together: where they must take their steps together, all else that
    decides what a step is."""

    sampler: str
    guided: bool
    channels: int | None
    size: tuple[int, ...]
    together: tuple[Any, ...] | None = None


@dataclass(eq=False)
class SlotSample:
    """One sample on its way. y, null: its conditions, one row each. scales: (steps,) of guidance. owner: whose it is.
    step: how many are done."""

    owner: Any
    number: int
    table: StepTable
    y: Condition
    null: Condition
    scales: np.ndarray
    seed: int
    step: int = 0

    @property
    def ended(self) -> bool:
        return self.step == self.table.steps


def batch_sizes(slots: int) -> tuple[int, ...]:
    """Those that steps are recorded for: 1, 2, 4, and then a multiple of 4 each, so that few rows are computed in vain;
    the last one is ``slots``."""
    return tuple(size for size in (1, 2, *range(4, slots, 4)) if size < slots) + (slots,)


class SlotLoop:
    """Draws samples of one kind in up to ``slots`` rows: ``admit`` gives a sample a free row at its step 0, whatever
    the others are at; ``advance`` takes one step of all.

    The rows in use are the first ones. A step computes the smallest of the sizes that holds them, for each of which it
    is recorded once; the batch grows at once, and shrinks when a smaller one has been enough for two ticks: its last
    samples then move to free rows. A free row that is still in the batch computes what nobody looks at.

    Args:
        sample: any of this kind.
        sizes: of the batch, rising; the last one is the number of slots.
        memory: bytes of tables, see :class:`SlotModel`.
    """

    def __init__(
        self,
        model: DiT,
        objective: Objective,
        kind: SampleKind,
        sample: SlotSample,
        sizes: Sequence[int],
        memory: int,
    ):
        if model.ops.float8:
            keep_weights(model.blocks)
        self.kind, self.sizes, self._objective, self._device = kind, tuple(sizes), objective, model.device
        self.shape, slots = (model.config.in_channels, *kind.size), sizes[-1]
        like = torch.zeros(slots, *self.shape, device=self._device)
        ticks = TICKS
        if sample.table.noise.size:
            ticks = max(1, min(TICKS, memory // (len(sample.table.noise) * like.nbytes)))
        self.network = SlotModel(
            model,
            slots,
            sample.table.times.shape[1],
            sample.y,
            sample.null,
            guided=kind.guided,
            size=kind.size,
            memory=memory,
            ticks=ticks,
        )
        self._inputs = SlotInputs(sample.table, like, self.network.cells)
        self._sampler = sample.table.sampler
        state = sample.table.start(like)
        self._state_type: Any = type(state)  # a NamedTuple
        self.state = tuple(part.clone() for part in state)
        self._tick = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._order = torch.arange(slots, device=self._device)
        self._scale = torch.ones(slots, *(1,) * len(self.shape), device=self._device)
        self._models: dict[int, Model] = {}
        self.recordings: dict[int, Callable[[], None]] = {}
        self._warm: set[int] = set()
        self.rows: list[SlotSample | None] = [None] * slots
        self._fresh: list[int] = []
        self._size, self._at, self._end, self._enough = sizes[0], 0, 0, 0
        self.computed = 0  # steps of rows, also of free ones

    @property
    def live(self) -> list[SlotSample]:
        return [sample for sample in self.rows if sample is not None]

    @property
    def free(self) -> int:
        return self.rows.count(None)

    # ------------------------------------------------------------------------------------------------ who has a row

    def admit(self, samples: list[SlotSample]) -> None:
        """They take free rows, of which there must be enough; if that fails, none does."""
        if not samples:
            return
        free = [row for row, taken in enumerate(self.rows) if taken is None][: len(samples)]
        rows = self._put(np.array(free))
        y, null = (joined([getattr(sample, name) for sample in samples]) for name in ("y", "null"))
        self.network.admit(rows, y, null)
        seeds, numbers = (
            self._put(np.array([getattr(sample, name) for sample in samples])) for name in ("seed", "number")
        )
        noise = initial_noise(seeds, numbers, self.shape)
        tables = [sample.table for sample in samples]
        for table in dict.fromkeys(tables):
            some = [number for number, other in enumerate(tables) if other is table]
            if len(some) == len(samples):
                where, given = rows, noise
            else:
                chosen = self._put(np.array(some))
                where, given = rows[chosen], noise[chosen]
            for static, part in zip(self.state, table.start(given), strict=True):
                static.index_copy_(0, where, part)
        for row, sample in zip(free, samples, strict=True):
            self.rows[row] = sample
        self._fresh += free

    def drop(self, samples: Iterable[SlotSample]) -> None:
        """Their rows are free."""
        gone = set(map(id, samples))
        self.rows = [None if id(sample) in gone else sample for sample in self.rows]

    # --------------------------------------------------------------------------------------------------- the steps

    def advance(
        self, recorder: GraphRecorder | None = None, recording: AbstractContextManager[Any] | None = None
    ) -> list[SlotSample]:
        """Takes one step of every sample that has a row; returns those that have come to their end.

        recorder: of steps' recordings; None: kernel by kernel. recording: a context manager around what records.
        Raises NotRecordedError if a step can't be recorded; it is still to be taken then.
        """
        self._arrange()
        size = self._size
        if recorder is None or size not in self._warm:
            self._advance(size)
            self._warm.add(size)
        else:
            self._record(size, recorder, recording)
            self.recordings[size]()
        self._at += 1
        self.computed += size
        for sample in self.live:
            sample.step += 1
        return [sample for sample in self.live if sample.ended]

    def record_all(self, recorder: GraphRecorder, recording: AbstractContextManager[Any]) -> None:
        """Records the steps of all batch sizes; samples in rows stay what they are. As :meth:`advance`."""
        static = (*self.state, self._tick)
        kept = [part.clone() for part in static]
        for size in self.sizes:
            if size not in self._warm:
                self._tick.zero_()
                self._advance(size)
                self._warm.add(size)
            self._record(size, recorder, recording)
        for part, before in zip(static, kept, strict=True):
            part.copy_(before)

    def forget_recordings(self) -> None:
        self.recordings.clear()

    def _record(self, size: int, recorder: GraphRecorder, recording) -> None:
        if size in self.recordings:
            return
        try:
            with recording:
                _, self.recordings[size] = recorder.record(lambda: self._advance(size))
        except RuntimeError as error:
            raise NotRecordedError(str(error)) from error

    def latents(self, samples: list[SlotSample]) -> Tensor:
        """x of samples that have a row, (n, C, ...) float32."""
        rows = {id(sample): row for row, sample in enumerate(self.rows) if sample is not None}
        x = self._state_type(*self.state).x
        return x.index_select(0, self._put(np.array([rows[id(sample)] for sample in samples], dtype=np.int64)))

    def _advance(self, size: int) -> None:
        tick, order = self._tick[:size], self._order[:size]
        self.network.begin(tick)
        inputs = self._inputs.in_cells(torch.add(order, tick, alpha=size), self._scale[:size])
        state = [part[:size] for part in self.state]
        after = self._sampler.advance(self._model(size), self._state_type(*state), inputs)
        parts = [part.clone() if any(part is old for old in state) else part for part in after]
        for static, part in zip(state, parts, strict=True):
            static.copy_(part)
        self._tick.add_(1)

    def _model(self, size: int) -> Model:
        """The model of (x, t) that the sampler calls with so many rows."""
        if size not in self._models:
            rows = torch.arange(2 * size, device=self._device)
            scale = self._scale[:size] if self.kind.guided else 1.0
            y, null = rows.chunk(2)
            guided = cfg_model(self.network, y, null, scale, self.kind.channels)
            self._models[size] = self._objective.network(guided)
        return self._models[size]

    # -------------------------------------------------------------------------------------------- rows and their cells

    def _arrange(self) -> None:
        """Before a step: the batch's size, and the cells of the ticks that come."""
        count = len(self.live)
        needed = next(size for size in self.sizes if size >= count)
        self._enough = self._enough + 1 if needed < self._size else 0
        size = needed if needed > self._size or self._enough >= PATIENCE else self._size
        if size != self._size or any(sample is not None for sample in self.rows[size:]):
            self._compact(size)
            self._size, self._enough, self._end = size, 0, self._at
        taken = [row for row, sample in enumerate(self.rows) if sample is not None]
        if self._at == self._end:
            longest = max(sample.table.steps - sample.step for sample in self.live)
            self._at, self._end = 0, min(self.network.cells // self._size, longest)
            self._tick.zero_()
            self._fill(taken, [row for row in range(self._size) if self.rows[row] is None])
        elif self._fresh:
            self._fill([row for row in taken if row in self._fresh])
        self._fresh.clear()

    def _compact(self, size: int) -> None:
        """Moves what stands behind the first ``size`` rows to free ones there."""
        free = [row for row in range(size) if self.rows[row] is None]
        moved = [row for row in range(size, len(self.rows)) if self.rows[row] is not None]
        if not moved:
            return
        free = free[: len(moved)]
        source, target = self._put(np.array(moved)), self._put(np.array(free))
        for part in self.state:
            part[target] = part[source]
        self.network.move(source, target)
        for old, new in zip(moved, free, strict=True):
            self.rows[new], self.rows[old] = self.rows[old], None

    def _fill(self, rows: list[int], free: Sequence[int] = ()) -> None:
        """Makes these rows' cells from the next tick to the last one that is prepared. What ``free`` rows compute stays
        finite: a trajectory's last step, again and again."""
        samples = [sample for row in rows if (sample := self.rows[row]) is not None]
        fills = [Fill(row, s.table, s.step, s.scales, s.seed, s.number) for row, s in zip(rows, samples, strict=True)]
        fills += [fills[0]._replace(slot=row, step=fills[0].table.steps) for row in free]
        self._inputs.fill_cells(fills, self._at, self._end, self._size, self._put)
        counts = [min(self._end - self._at, s.table.steps - s.step) for s in samples]
        ticks = np.concatenate([np.arange(self._at, self._at + count) for count in counts])
        times = [s.table.times[s.step : s.step + count] for s, count in zip(samples, counts, strict=True)]
        slots = np.repeat(np.array(rows), counts)
        ticks, slots, times = map(self._put, (ticks, slots, torch.cat(times).numpy()))
        self.network.fill_cells(ticks, slots, times, self._size)

    def _put(self, values: np.ndarray) -> Tensor:
        """An array of the host on the device. From pinned memory: the host need not wait for what the device does."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


def joined(conditions: list[Condition]) -> Condition:
    first = conditions[0]
    return first if len(conditions) == 1 else joined_conditions(conditions)
