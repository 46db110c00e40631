"""Tables of the inputs that a sampler's steps take besides the state, a row for each step."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opendit.diffusion import Objective
from opendit.diffusion.samplers import SAMPLERS, Sampler


def evaluation_times(
    objective: Objective, name: str, steps: int, channels: tuple[int, int], device: torch.device
) -> list[Tensor]:
    """Return the network's times t when sampler ``name`` evaluates it, (evaluations,) for every step.

    Seen by walking the trajectory with a network that predicts zeros. channels: of the network's input and output.
    """
    seen: list[list[Tensor]] = []

    def network(x: Tensor, t: Tensor) -> Tensor:
        seen[-1].append(t)
        return x.new_zeros(len(x), channels[1], *x.shape[2:])

    sampler_type = SAMPLERS[name]
    x = torch.zeros(1, channels[0], 1, 1, device=device)
    trajectory = objective.trajectory(steps, sampler_type.even_in_noise)
    sampler = sampler_type(objective.network(network), trajectory, x, lambda k: x)
    state = sampler.init(x)
    for i in range(sampler.steps):
        seen.append([])
        state = sampler.step(state, i)
    return [torch.cat(times) for times in seen]


class StepInputs:
    """The ``inputs`` of a sampler's steps, for samples that may stand at different ones.

    What is a number a step, or one a sample, lies in one table of all steps for each dtype; what has x's shape (noise)
    is made for as many steps as are asked for.

    Args:
        sampler: of B samples; its ``noise_fn`` may be called for any step.
        like: x, (B, C, ...).
        capacity: steps that a table holds at most.
    """

    def __init__(self, sampler: Sampler, like: Tensor, capacity: int):
        self.sampler, self.samples, self.capacity, self._rank = sampler, len(like), capacity, like.dim()
        inputs = [sampler.inputs(i) for i in range(sampler.steps)]
        self.type: Any = type(inputs[0])
        # Of every step which inputs it has: steps that differ there are recorded apart.
        self.present = [tuple(value is not None for value in step) for step in inputs]
        self._large: dict[int, Tensor] = {}  # input's number -> (capacity * B, C, ...)
        self._place: dict[int, tuple[torch.dtype, int, bool]] = {}  # -> its table, its line there, whether it is ()
        lines: dict[torch.dtype, list[Tensor]] = {}
        for number, values in enumerate(zip(*inputs, strict=True)):
            example = next((value for value in values if value is not None), None)
            if example is None:
                continue
            if example.shape == like.shape:
                self._large[number] = example.new_empty(capacity * len(like), *like.shape[1:])
                continue
            column = lines.setdefault(example.dtype, [])
            self._place[number] = example.dtype, len(column), example.dim() == 0
            missing = torch.zeros_like(example)
            values = [(missing if value is None else value).expand(len(like)) for value in values]
            column.append(torch.stack(values).flatten())
        self._all = {dtype: torch.stack(columns) for dtype, columns in lines.items()}  # (inputs, steps * B)
        self._tables = {dtype: all[:, : capacity * len(like)].clone() for dtype, all in self._all.items()}

    def fill(self, first: int, count: int) -> None:
        """Makes the inputs of steps ``first`` to ``first + count``."""
        B = self.samples
        for dtype, table in self._tables.items():
            table[:, : count * B].copy_(self._all[dtype][:, first * B : (first + count) * B])
        for i in range(count if self._large else 0):
            inputs = self.sampler.inputs(first + i)
            for number, table in self._large.items():
                if inputs[number] is not None:
                    table[i * B : (i + 1) * B].copy_(inputs[number])

    def at(self, step: Tensor, order: Tensor, present: tuple[bool, ...]) -> NamedTuple:
        """The inputs of samples at steps ``step`` (B,) int64, counted from the first one in the tables, each of which
        has those that are ``present``. order: (B,) int64, 0 to B - 1."""
        return self._of(torch.add(order, step, alpha=self.samples), present)

    def _of(self, cells: Tensor, present: tuple[bool, ...]) -> NamedTuple:
        """The inputs in these cells of the tables, (B,) int64."""
        rows = {dtype: table.index_select(1, cells).unbind(0) for dtype, table in self._tables.items()}
        values: list[Tensor | None] = []
        for number, there in enumerate(present):
            if not there:
                values.append(None)
            elif number in self._large:
                values.append(self._large[number].index_select(0, cells))
            else:
                dtype, line, scalar = self._place[number]
                value = rows[dtype][line]
                values.append(value.view(-1, *(1,) * (self._rank - 1)) if scalar else value)
        return self.type(*values)
