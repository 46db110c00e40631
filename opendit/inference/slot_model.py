"""A prepared network whose samples come and go, each at a step of its own trajectory."""

import torch
from torch import Tensor

from opendit.inference.prepared_model import PreparedModel
from opendit.models import Condition, DiT
from opendit.models.conditioning import joined


class SlotModel(PreparedModel):
    """A :class:`PreparedModel` of up to ``slots`` samples, of which a step takes the first b.

    The table of modulations holds *cells*, of a few ticks for the b slots: cell (tick, slot) has what the slot's sample
    needs in that tick, at whichever step of its trajectory it is then. So all samples of a batch are at the same tick,
    and the recording of a step serves any mixture of trajectories. A cell is ``evaluations`` times two rows with
    guidance, whose null condition is a sample's own, and one without.

    Why cells of a few ticks, and not all steps of every sample: 64 samples of DiT-XL/2 with 50 steps would take 2.5 GB,
    and every pair of (number of steps, step) that clients may ask for, 20 to 50 of each, 27 GB; cells of 5 ticks are
    256 MB, and making them is 0.6 ms of GPU time in 5 ticks that take 290.

    Args:
        y, null: conditions of one sample, any; they say how large a condition is.
        evaluations: of the network in a step, at most.
        memory: bytes of the table, though it has one cell a slot at least; as much again of captions' keys and values.
        ticks: cells a slot, at most.
        Others as of :class:`PreparedModel`.
    """

    def __init__(
        self,
        model: DiT,
        slots: int,
        evaluations: int,
        y: Condition,
        null: Condition,
        *,
        guided: bool,
        size: tuple[int, ...],
        memory: int,
        ticks: int,
    ):
        self._most_ticks = ticks
        times = torch.zeros(1, evaluations, device=model.device)
        super().__init__(model, times, slots, guided=guided, size=size, memory=memory)
        self._halves = 2 if guided else 1
        first = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self.condition(y[first], null[first] if guided else None)
        self._order = torch.arange(self._halves * slots, device=model.device)
        self.cells = self.capacity * slots

    def _steps_of(self, rows: int, size: int) -> int:
        return max(1, min(self._most_ticks, self.memory // size))

    def admit(self, slots: Tensor, y: Condition, null: Condition) -> None:
        """Samples with conditions y and null, both (n, ...), take the slots (n,) int64."""
        both = joined((y, null)) if self.guided else y
        vector, context = self.model.embed_condition(both)
        rows = self._rows_of(slots)
        self._vector.index_copy_(0, rows, vector)
        if context is None:
            return
        contexts = [context] if self._parts == 2 else self.model.contexts(context) or []
        new = [*(part for block in contexts for part in block[:-1]), context[1]]
        for static, part in zip(self._static["contexts"], new, strict=True):
            static.index_copy_(0, rows, part)

    def move(self, source: Tensor, target: Tensor) -> None:
        """What the slots ``source`` (n,) have, to the slots ``target``, in which nothing is kept."""
        source, target = self._rows_of(source), self._rows_of(target)
        for tensor in (self._vector, *self._static.get("contexts", [])):
            tensor[target] = tensor[source]

    def fill_cells(self, ticks: Tensor, slots: Tensor, times: Tensor, samples: int) -> None:
        """Makes modulations of n cells for steps of ``samples`` slots: (n,) ticks and slots, (n, evaluations) times."""
        evaluations, halves = times.shape[1], self._halves
        e = torch.arange(evaluations, device=slots.device).view(1, -1, 1)
        half = torch.arange(halves, device=slots.device)
        ticks, slots = ticks.view(-1, 1, 1), slots.view(-1, 1, 1)
        rows = ((ticks * evaluations + e) * halves + half) * samples + slots
        conditions = (half * self.samples + slots).expand_as(rows)
        self._write(rows.flatten(), times.unsqueeze(2).expand_as(rows).flatten(), conditions.flatten())

    def begin(self, step: Tensor) -> None:
        """Begins a step of the first b slots, at the ticks ``step`` (b,) int64."""
        samples = len(step)
        self._conditions = self._halves * samples
        order = self._order[: self._conditions].view(self._halves, samples)
        self._rows = torch.add(order, step, alpha=self._evaluations * self._conditions).flatten()
        self._evaluation = 0

    def _rows_in(self, part: Tensor, rows: Tensor) -> Tensor:
        samples = len(rows) // self._halves
        if samples == self.samples:
            return part
        return part.unflatten(0, (self._halves, self.samples))[:, :samples].flatten(0, 1)

    def _rows_of(self, slots: Tensor) -> Tensor:
        """The rows of conditions that belong to slots (n,): (halves * n,)."""
        return torch.cat([slots + half * self.samples for half in range(self._halves)])
