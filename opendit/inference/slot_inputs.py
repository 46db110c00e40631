"""What steps take besides the state, for samples of which each goes along a trajectory of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opendit.diffusion import Objective
from opendit.diffusion.random import Stream, normal
from opendit.diffusion.samplers import SAMPLERS, Sampler
from opendit.diffusion.trajectory import Trajectory
from opendit.inference.step_inputs import StepInputs, evaluation_times

NOISE_NUMBERS = 1 << 24  # that are drawn at once: 128 MiB in float64


class InputPlace(NamedTuple):
    """Where an input of a sampler lies. line: of the table of its dtype, None of what has x's shape; scalar: whether
    it is () in a step of its own."""

    dtype: torch.dtype
    line: int | None
    scalar: bool


def _no_model(x: Tensor, t: Tensor) -> Tensor:
    raise AssertionError("of a table that no model is called for")


class StepTable:
    """All steps of one sampler along one trajectory, as columns of tables on the host.

    Args:
        tables, longest: as of ``Trajectory.joint``.
        shape: of a sample's x.

    Attributes:
        lines: of every dtype (lines, steps): the inputs that are numbers.
        noise: (inputs of x's shape, steps) int64: the k of ``noise_fn(k)`` that an input is, -1 where it is 0.
        times: (steps, evaluations) what the network gets as t.
        levels: the noise level that each step starts from.

    Raises ValueError for a sampler whose steps don't all have the same inputs, and for an objective whose trajectories
    can't be in one batch.
    """

    def __init__(
        self,
        objective: Objective,
        name: str,
        steps: int,
        channels: tuple[int, int],
        shape: tuple[int, ...],
        tables: dict[str, Tensor],
        longest: int,
        device: torch.device,
    ):
        self.steps = steps
        trajectory = objective.trajectory(steps, SAMPLERS[name].even_in_noise)
        self.levels = trajectory.levels[:-1]
        try:
            self.trajectory: Trajectory = trajectory.joint(tables, longest, device)
        except NotImplementedError:
            raise ValueError(f"objective {objective.name}: the server can't mix its trajectories") from None
        like = torch.zeros(1, *shape, device=device)
        noises: dict[int, Tensor] = {}
        self.sampler: Sampler = SAMPLERS[name](
            _no_model, self.trajectory, like, lambda k: noises.setdefault(k, torch.zeros_like(like))
        )
        inputs = [self.sampler.mixed_inputs(i) for i in range(steps)]
        if len({tuple(value is None for value in step) for step in inputs}) > 1:
            raise ValueError(f"sampler {name}: its steps differ in what they take, so the server can't mix them")
        # In a batch of mixed steps, all have as many evaluations; one that a step lacks is at the time of its first.
        evaluations = self._evaluations(objective, channels[1], like, inputs[0])
        times = evaluation_times(objective, name, steps, channels, device)
        self.times = torch.stack([torch.cat([t, t[:1].expand(evaluations - len(t))]) for t in times]).cpu()
        self.type: Any = type(inputs[0])
        self.places: list[InputPlace | None] = []
        columns: dict[torch.dtype, list[Tensor]] = {}
        drawn = {id(noise): k for k, noise in noises.items()}
        numbers: list[list[int]] = []
        for values in zip(*inputs, strict=True):
            example = values[0]
            if example is None:
                self.places.append(None)
            elif example.shape == like.shape:
                self.places.append(InputPlace(example.dtype, None, False))
                numbers.append([drawn.get(id(value), -1) for value in values])
            else:
                lines = columns.setdefault(example.dtype, [])
                self.places.append(InputPlace(example.dtype, len(lines), example.dim() == 0))
                lines.append(torch.stack([value.reshape(()) for value in values]))
        self.lines = {dtype: torch.stack(lines).cpu().numpy() for dtype, lines in columns.items()}
        self.noise = np.array(numbers, dtype=np.int64).reshape(len(numbers), steps)

    def _evaluations(self, objective: Objective, channels: int, like: Tensor, inputs: NamedTuple) -> int:
        seen = []

        def network(x: Tensor, t: Tensor) -> Tensor:
            seen.append(t)
            return x.new_zeros(len(x), channels, *x.shape[2:])

        self.sampler.advance(objective.network(network), self.sampler.init(like), inputs)
        return len(seen)

    def start(self, noise: Tensor) -> NamedTuple:
        """The sampler's state of new samples, from standard normal noise (n, C, ...)."""
        return self.sampler.init(self.trajectory.start(noise))


class Fill(NamedTuple):
    """What a slot gets in the cells of some ticks."""

    slot: int
    table: StepTable
    step: int  # where its sample stands in the first of the ticks
    scales: np.ndarray  # (steps,) float32, of guidance
    seed: int
    index: int


class SlotInputs(StepInputs):
    """The tables of :class:`StepInputs` as *cells* of (tick, slot), see :class:`SlotModel`; and guidance's scale.

    table: of any trajectory; cells: in the tables. like: x of all slots, (B, C, ...).
    """

    def __init__(self, table: StepTable, like: Tensor, cells: int):
        self._rank, self._shape, self.type = like.dim(), like.shape[1:], table.type
        self._places, device = table.places, like.device
        self.present = tuple(place is not None for place in table.places)
        self._tables = {
            dtype: torch.from_numpy(np.repeat(lines[:, :1], cells, axis=1)).to(device)
            for dtype, lines in table.lines.items()
        }
        self._place, self._large = {}, {}
        for number, place in enumerate(table.places):
            if place is not None and place.line is not None:
                self._place[number] = place.dtype, place.line, place.scalar
            elif place is not None:
                self._large[number] = torch.zeros(cells, *self._shape, dtype=place.dtype, device=device)
        self._scales = torch.ones(cells, device=device)

    def fill_cells(self, fills: list[Fill], first: int, end: int, samples: int, put: Callable[..., Any]) -> None:
        """Makes the cells of ticks ``first`` to ``end`` for these slots. After its last step a sample's inputs are that
        step's again: what comes of them is not looked at. put: brings an array of the host to the device."""
        steps = [np.minimum(np.arange(fill.step, fill.step + end - first), fill.table.steps - 1) for fill in fills]
        cells = np.stack([np.arange(first, end) * samples + fill.slot for fill in fills])
        place = put(cells.reshape(-1))
        for dtype, table in self._tables.items():
            columns = [fill.table.lines[dtype][:, i] for fill, i in zip(fills, steps, strict=True)]
            table.index_copy_(1, place, put(np.concatenate(columns, axis=1)))
        scales = [fill.scales[i] for fill, i in zip(fills, steps, strict=True)]
        self._scales.index_copy_(0, place, put(np.concatenate(scales)))
        if not self._large:
            return
        seeds, index = (
            put(np.repeat(np.array([getattr(fill, name) for fill in fills], dtype=np.int64), end - first))
            for name in ("seed", "index")
        )
        at_once = max(1, NOISE_NUMBERS // int(np.prod(self._shape)))
        for line, large in enumerate(self._large.values()):
            numbers = put(np.concatenate([fill.table.noise[line, i] for fill, i in zip(fills, steps, strict=True)]))
            for part in zip(*(v.split(at_once) for v in (place, seeds, numbers, index)), strict=True):
                where, seed, number, sample = part
                noise = normal(seed, number.clamp(min=0), sample, Stream.SAMPLE_STEP, tuple(self._shape))
                there = (number >= 0).view(-1, *(1,) * (self._rank - 1))
                large.index_copy_(0, where, torch.where(there, noise, 0.0).to(large.dtype))

    def in_cells(self, cells: Tensor, scale: Tensor) -> NamedTuple:
        """The inputs of samples in cells (b,) int64; guidance's scales go to ``scale`` (b, 1, ..., 1)."""
        torch.index_select(self._scales, 0, cells, out=scale.view(-1))
        return self._of(cells, self.present)
