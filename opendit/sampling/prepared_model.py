"""Prepare a model for sampling: precompute and store all tensors that do not depend on x_t."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels.common import kernels_available
from opendit.kernels.sampling_step import gather_rows
from opendit.models.blocks import Context, ResidualStream
from opendit.models.conditioning import Condition, joined, with_given
from opendit.models.dit import DiT

PRODUCT_ROWS = 256  # rows of every matrix product that computes modulations
CAPTIONS_SHARE = 1 / 16  # of the blocks' weights: memory that the captions' keys and values may take in any case

GatherRows = Callable[[Tensor, Tensor], Tensor]


class PreparedModel:
    """A model for the sampling steps of a batch of B samples, called as ``model(x, t, rows)``.

    Times and captions are embedded in advance. Modulations are computed for many steps at once, because their layers
    have a third of DiT-XL/2's weights. A table of modulations has one row per (step, evaluation, condition), and a step
    gathers its samples' rows. The conditions are the B samples' conditions, then 1 or B null conditions. The captions'
    keys and values, and the positions, are computed once.

    All tensors stay at fixed addresses, so a CUDA graph can be replayed with other batches and at other steps.

    Args:
        times: times t of all evaluations: (steps, evaluations), or (steps, evaluations, K) for K times.
        guided: True if there is a null condition.
        size: size of the latents, without channels.
        memory: maximum bytes of a table. The table of modulations holds at least one step. If the captions' keys and
            values take more than this and than ``CAPTIONS_SHARE`` of the blocks' weights, every step recomputes them.
        shared: True if ranks share a batch. Then a call may be for any rows of the batch, not only the first.

    Attributes:
        stack: callable that runs the blocks, see :class:`~opendit.sampling.approximate_steps.BlockStack`. Set it before
            the first call.
        table: modulations of all blocks and the final layer, (rows, sum of their widths); at first empty.
        capacity: number of steps in the table; final after the first :meth:`condition`.
    """

    stack: Callable[..., Tensor]

    def __init__(
        self,
        model: DiT,
        times: Tensor,
        samples: int,
        *,
        guided: bool,
        size: tuple[int, ...],
        memory: int,
        shared: bool = False,
    ):
        self.model, self.times, self.samples, self.guided = model, times, samples, guided
        self.memory, self.shared = memory, shared
        self.grid = model.config.grid_of(size)
        self._static: dict[str, list[Tensor]] = {}
        self.table = torch.empty(0)
        self._evaluation = 0
        self.capacity = len(times)
        self.conditions = 0  # number of conditions, and of table rows per evaluation

    def condition(self, y: Condition, null: Condition | None, frames: Tensor | None = None) -> None:
        """Prepare for the conditions y of B samples. null: a batch of 1 or B; None without guidance. frames:
        conditioning frames, mask and latents (B, 1 + C, T, H, W), or None."""
        both = y if null is None else joined((y, null))
        self._vector, context = self.model.embed_condition(both)
        rows = torch.arange(self.samples, device=self.model.device)
        if self.guided:
            rows = torch.stack([rows, self.samples + (rows if len(both) == 2 * self.samples else 0 * rows)])
        self._keep("rows", [rows.view(-1, self.samples)])
        positions = self.model.positions(self.grid)
        self._keep("positions", [] if positions is None else [positions])
        self._keep_context(context)
        self._make_table(len(both))
        self._keep("conditioning frames", [] if frames is None else [frames])

    def _keep_context(self, context) -> None:
        """Store every block's keys and values for all rows, or only the captions' tokens if they would take too much
        memory."""
        if context is None:
            self._parts = 0
            return
        tokens, mask = context
        every = self._static["rows"][0].flatten()
        needed = 2 * tokens[0].nbytes * len(every) * len(self.model.blocks)
        weights = sum(parameter.nbytes for parameter in self.model.blocks.parameters())
        kept = needed <= max(self.memory, CAPTIONS_SHARE * weights)
        contexts = (self.model.contexts(context) or []) if kept else [context]
        self._parts = len(contexts[0])
        self._keep("contexts", [part[every] for block in contexts for part in block[:-1]] + [mask[every]])

    def _make_table(self, conditions: int) -> None:
        c = self.model.embed_time(self.times[0, :1]) + self._vector[:1]
        self._widths, dtypes = zip(*((m.shape[1], m.dtype) for m in self._modulations(c)), strict=True)
        self._evaluations = self.times.shape[1]
        self.conditions, width = conditions, sum(self._widths)
        rows = self._evaluations * conditions
        self.capacity = max(1, min(len(self.times), self.memory // (rows * width * dtypes[0].itemsize)))
        self._at_zero = torch.arange(conditions if self.model.config.given_in_place else 0, device=c.device)
        shape = self.capacity * rows + len(self._at_zero), width
        if self.table.shape != shape or self.table.dtype != dtypes[0]:
            self.table = torch.zeros(shape, dtype=dtypes[0], device=c.device)
        if len(self._at_zero):  # conditioning frames' modulations don't change between steps
            self._write(self._at_zero + self.capacity * rows, self.times.new_zeros(len(self._at_zero)), self._at_zero)

    def _modulations(self, c: Tensor) -> Iterator[Tensor]:
        return cast(Iterator[Tensor], self.model.modulations(c))

    def _keep(self, name: str, tensors: list[Tensor]) -> None:
        """Copy tensors into those stored under ``name``. If shapes or dtypes have changed, store clones."""
        kept = self._static.setdefault(name, [])
        if [(a.shape, a.dtype) for a in kept] == [(b.shape, b.dtype) for b in tensors]:
            for old, new in zip(kept, tensors, strict=True):
                old.copy_(new)
        else:
            self._static[name] = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of all tensors. A CUDA graph stays valid while they do not change."""
        tensors = [self.table, *(tensor for tensors in self._static.values() for tensor in tensors)]
        return tuple(tensor.data_ptr() for tensor in tensors)

    def fill(self, first: int) -> int:
        """Fill the table with the modulations of the steps from ``first`` on. Return how many steps fit."""
        times = self.times[first : first + self.capacity]
        evaluations = times.flatten(0, 1)
        conditions = torch.arange(self.conditions, device=self.table.device).repeat(len(evaluations))
        self._write(None, evaluations.repeat_interleave(self.conditions, dim=0), conditions)
        return len(times)

    def _write(self, rows: Tensor | None, t: Tensor, conditions: Tensor) -> None:
        """Write n modulations into the table's ``rows`` (n,); None for the first n rows. t: (n,) or (n, K). conditions:
        indices (n,). Every product has PRODUCT_ROWS rows, so that a modulation does not depend on n."""
        for part in range(0, len(t), PRODUCT_ROWS):
            some = slice(part, min(part + PRODUCT_ROWS, len(t)))
            count = some.stop - part
            padded = [F.pad(v[some], (0, 0) * (v.dim() - 1) + (0, PRODUCT_ROWS - count)) for v in (t, conditions)]
            c, column = self.model.embed_time(padded[0]) + self._vector[padded[1]], 0
            for m, width in zip(self._modulations(c), self._widths, strict=True):
                table = self.table[:, column : column + width]
                if rows is None:
                    table[some] = m[:count]
                else:
                    table.index_copy_(0, rows[some], m[:count])
                column += width

    @property
    def rows(self) -> Tensor:
        """The samples' table rows at step 0, int64: (2, B) with guidance, (1, B) without."""
        return self._static["rows"][0]

    @property
    def rows_of_a_step(self) -> int:
        return self._evaluations * self.conditions

    @property
    def positions(self) -> Tensor | None:
        """Position embeddings of the model's grid, (1, N, D), or None."""
        return next(iter(self._static["positions"]), None)

    @property
    def contexts(self) -> list[Tensor]:
        """Contexts of cross-attention: every block's keys and values, or the tokens for all blocks. The mask is last.
        Shapes: (2 B, tokens, ...), without guidance (B, tokens, ...). Exists only for models with captions."""
        return self._static["contexts"]

    def of_tokens(self, residual: ResidualStream, table_rows: Tensor) -> Tensor:
        """Return the final layer's output for the tokens (n, N, D) in ``residual``. To free memory, ``residual`` is
        emptied. table_rows: (n,) int64, one table row per batch row."""
        usable, _ = kernels_available(self.table.device, self.table.dtype)
        modulations = GatheredModulations(self.table, table_rows, self._widths, gather_rows if usable else select_rows)
        grid = self.model.token_grid(self.grid, self.positions)
        return self.model.of_tokens(residual, grid, modulations, self._context(table_rows), self.stack)

    def begin(self, step: Tensor) -> None:
        """Begin a step. step: (B,) int64, every sample's step, counted from the table's first step."""
        self._rows = torch.add(self.rows, step, alpha=self.rows_of_a_step).flatten()
        self._evaluation = 0

    def __call__(self, x: Tensor, t: Tensor, rows: Tensor) -> Tensor:
        """Return the network's output for x (n, C, ...). Call this once for every evaluation of a step, in order.

        t is ignored, because the table was computed with the steps' times. rows: (n,) int64, the rows of x in the
        guided batch. Sample b has row b in the conditional half and row B + b in the unconditional half."""
        table_rows = self._rows[rows] if self.shared else self._rows[: len(x)]
        if self._evaluation:
            table_rows = table_rows + self._evaluation * self.conditions
        self._evaluation += 1
        for frames in self._static.get("conditioning frames", []):  # both halves of guidance use equal frames
            given = frames[rows % self.samples]
            x = with_given(x, given)
            if len(self._at_zero):
                at_zero = self._rows_in(self.rows.flatten(), rows) + len(self.table) - len(self._at_zero)
                table_rows = torch.where(given[:, 0, :, 0, 0] > 0, at_zero[:, None], table_rows[:, None]).flatten()
        modulations = GatheredModulations(self.table, table_rows, self._widths)
        return self.model.predict(x, modulations, self._context(rows), self.positions, self.stack)

    # The result's type is Any, because only ``self.stack`` accepts a GatheredContexts.
    def _context(self, rows: Tensor) -> Any:
        if not self._parts:
            return None
        return GatheredContexts(self.contexts, self._parts > 2, lambda part: self._rows_in(part, rows))

    def _rows_in(self, part: Tensor, rows: Tensor) -> Tensor:
        return part[rows] if self.shared else part[: len(rows)]


def select_rows(table: Tensor, rows: Tensor) -> Tensor:
    return table.index_select(0, rows)


class GatheredModulations:
    """Iterator over every block's modulations, and then the final layer's, gathered from a table.

    table: (R, sum of ``widths``), all modulations side by side. rows: (n,) int64, table rows. gather_rows:
    :func:`select_rows`, or an equivalent kernel."""

    def __init__(self, table: Tensor, rows: Tensor, widths: Sequence[int], gather_rows: GatherRows = select_rows):
        self._table, self._rows, self._widths, self._gather_rows = table, rows, widths, gather_rows
        self._number = self._column = 0
        self._ready: deque[Tensor] = deque()

    def __iter__(self) -> "GatheredModulations":
        return self

    def __next__(self) -> Tensor:
        if not self._ready:
            self.gather(1)
        return self._ready.popleft()

    def gather(self, count: int) -> None:
        """Gather the next ``count`` modulations with one kernel; ``next`` then returns them one by one."""
        if self._number == len(self._widths):
            raise StopIteration
        widths = self._widths[self._number : self._number + count]
        part = self._table[:, self._column : self._column + sum(widths)]
        self._ready.extend(self._gather_rows(part, self._rows).split(widths, dim=1))
        self.skip(count)

    def skip(self, count: int) -> None:
        """Skip the next ``count`` modulations."""
        self._column += sum(self._widths[self._number : self._number + count])
        self._number += count


class GatheredContexts:
    """The contexts of cross-attention, gathered only for blocks that run. kept: see ``PreparedModel.contexts``. every:
    True for every block's keys and values. rows_in: selects a call's rows."""

    def __init__(self, kept: Sequence[Tensor], every: bool, rows_in: Callable[[Tensor], Tensor]):
        (*self._parts, self._mask), self._every, self._rows_in = kept, every, rows_in

    def of(self, blocks: slice) -> Context | list[Context]:
        """Return these blocks' context in the form that ``run_blocks`` takes."""
        mask = self._rows_in(self._mask)
        if not self._every:
            return self._rows_in(self._parts[0]), mask
        parts = [self._rows_in(part) for part in self._parts[2 * blocks.start : 2 * blocks.stop]]
        return [(*pair, mask) for pair in zip(parts[::2], parts[1::2], strict=True)]
