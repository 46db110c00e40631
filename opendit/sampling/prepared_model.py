"""A network whose share of a sampling step that does not depend on x_t is made beforehand, into tables."""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels.common import kernels_available
from opendit.kernels.step_rows import gather_rows
from opendit.models import Condition, DiT
from opendit.models.conditioning import joined
from opendit.models.given_frames import with_given
from opendit.sampling.block_stacks import BlockStack
from opendit.sampling.gathered import GatheredContexts, GatheredModulations, select_rows

PRODUCT_ROWS = 256  # of the products that make modulations


class PreparedModel:
    """``model(x, t, rows)`` for the steps of one batch of B samples: no time or caption is embedded in a step.

    Modulations of all blocks and of the final layer, which for DiT-XL/2 are a third of all weights, are one product a
    block for many steps. They fill a table whose rows are those of (step, evaluation, condition); a step takes the rows
    of its samples, each of which may stand at a step of its own. The conditions are those of the B samples, then
    guidance's null condition, one for all or one a sample. Keys and values of captions are made once, as are positions.

    Everything lies in memory that stays where it is, so that a CUDA graph that was recorded with one batch, or at one
    step, serves others.

    Args:
        times: (steps, evaluations) what the network gets as t at every step's every evaluation.
        samples: B.
        guided: whether there is a null condition.
        size: of the latents, without channels.
        memory: bytes that a table may take. That of modulations holds as many steps as fit, one at least; where keys
            and values of captions don't fit, every step makes them again.
        shared: whether ``rows`` may be any, as ranks choose theirs of a batch; or else the first ones of all.

    Attributes:
        table: modulations, (rows, of all blocks and the final layer); empty until the first condition.
        capacity: steps in the table; known when the first condition is.
    """

    stack: BlockStack
    guided: bool
    model: DiT
    samples: int
    times: Tensor
    memory: int
    shared: bool
    grid: tuple[int, ...]
    capacity: int
    table: Tensor

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
        self.stack = BlockStack()  # which runs the blocks
        self.model, self.times, self.samples, self.guided = model, times, samples, guided
        self.memory, self.shared = memory, shared
        self.grid = model.config.grid_of(size)
        self._static: dict[str, list[Tensor]] = {}
        self.table = torch.empty(0)
        self._evaluation = 0
        self.capacity = len(times)

    # ------------------------------------------------------------------------------------------------ before the steps

    def condition(self, y: Condition, null: Condition | None) -> None:
        """Takes the conditions of a batch: y, B rows; null, one row or B, None without guidance."""
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

    def give(self, given: Tensor | None) -> None:
        """Takes mask ++ given (B, 1 + C, T, H, W) of the batch's clips; None: no frames are given."""
        self._keep("given", [] if given is None else [given])

    def _keep_context(self, context) -> None:
        """Keep the contexts of cross-attention for every row of the batch: keys and values by block, if they fit."""
        if context is None:
            self._parts = 0
            return
        tokens, mask = context
        every = self._static["rows"][0].flatten()
        needed = 2 * tokens[0].nbytes * len(every) * len(self.model.blocks)
        contexts = [context] if needed > self.memory else self.model.contexts(context) or []
        self._parts = len(contexts[0])
        self._keep("contexts", [part[every] for block in contexts for part in block[:-1]] + [mask[every]])

    def _make_table(self, conditions: int) -> None:
        c = self.model.t_embedder(self.times[0, :1]) + self._vector[:1]
        self._widths, dtypes = zip(*((m.shape[1], m.dtype) for m in self._modulations(c)), strict=True)
        steps, self._evaluations = self.times.shape
        self._conditions, width = conditions, sum(self._widths)
        rows = self._evaluations * conditions
        self.capacity = self._steps_of(rows, rows * width * dtypes[0].itemsize)
        shape = self.capacity * rows, width
        if self.table.shape != shape or self.table.dtype != dtypes[0]:
            self.table = torch.zeros(shape, dtype=dtypes[0], device=c.device)

    def _modulations(self, c: Tensor) -> Iterator[Tensor]:
        """One tensor a block: other models are not prepared."""
        return cast(Iterator[Tensor], self.model.modulations(c))

    def _steps_of(self, rows: int, size: int) -> int:
        """Return the number of steps that the table holds. rows: of a step. size: bytes of these rows."""
        return max(1, min(len(self.times), self.memory // size))

    def _keep(self, name: str, tensors: list[Tensor]) -> None:
        """Copies tensors to where those of this name lie, or takes their places."""
        kept = self._static.setdefault(name, [])
        if [(a.shape, a.dtype) for a in kept] == [(b.shape, b.dtype) for b in tensors]:
            for old, new in zip(kept, tensors, strict=True):
                old.copy_(new)
        else:
            self._static[name] = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of all tensors; a recording is valid as long as they stay the same."""
        tensors = [self.table, *(tensor for tensors in self._static.values() for tensor in tensors)]
        return tuple(tensor.data_ptr() for tensor in tensors)

    def fill(self, first: int) -> int:
        """Makes the modulations of step ``first`` and as many after it as there is room for; returns how many."""
        times = self.times[first : first + self.capacity]
        conditions = torch.arange(self._conditions, device=self.table.device).repeat(times.numel())
        self._write(None, times.flatten().repeat_interleave(self._conditions), conditions)
        return len(times)

    def _write(self, rows: Tensor | None, t: Tensor, conditions: Tensor) -> None:
        """Modulations at times t of these conditions, into these rows of the table (None: the first ones); all (n,).
        The products are of as many rows in every call: a modulation doesn't depend on how many others are made."""
        for part in range(0, len(t), PRODUCT_ROWS):
            some = slice(part, min(part + PRODUCT_ROWS, len(t)))
            count = some.stop - part
            given = [F.pad(values[some], (0, PRODUCT_ROWS - count)) for values in (t, conditions)]
            c, column = self.model.t_embedder(given[0]) + self._vector[given[1]], 0
            for m, width in zip(self._modulations(c), self._widths, strict=True):
                table = self.table[:, column : column + width]
                if rows is None:
                    table[some] = m[:count]
                else:
                    table.index_copy_(0, rows[some], m[:count])
                column += width

    # ----------------------------------------------------------------------------------------------------- in the steps

    @property
    def rows(self) -> Tensor:
        """(halves, B) int64: every sample's rows of the table at step 0."""
        return self._static["rows"][0]

    @property
    def conditions(self) -> int:
        """Rows of the table from one evaluation of a step to the next."""
        return self._conditions

    @property
    def rows_of_a_step(self) -> int:
        return self._evaluations * self._conditions

    @property
    def positions(self) -> Tensor | None:
        """(1, N, D) of the model's grid."""
        return next(iter(self._static["positions"]), None)

    @property
    def contexts(self) -> list[Tensor]:
        """Return the contexts of cross-attention, each (2 B, tokens, ...): keys and values of every block, or tokens
        for all blocks, and the mask last. Empty for a model of classes."""
        return self._static["contexts"]

    def of_tokens(self, start: list[Tensor], table_rows: Tensor) -> Tensor:
        """The last layer's values of tokens [(n, N, D)], which is emptied, for these rows of the table, (n,) int64; the
        samples are the first n of 2 B."""
        usable, _ = kernels_available(self.table.device, self.table.dtype)
        modulations = GatheredModulations(self.table, table_rows, self._widths, gather_rows if usable else select_rows)
        grid = self.model.token_grid(self.grid, self.positions)
        return self.model.of_tokens(start, grid, modulations, self._context(table_rows), self.stack)

    def begin(self, step: Tensor) -> None:
        """Begins a step: ``step`` (B,) int64 is every sample's own, counted from the first one in the table."""
        self._rows = torch.add(self.rows, step, alpha=self.rows_of_a_step).flatten()
        self._evaluation = 0

    def __call__(self, x: Tensor, t: Tensor, rows: Tensor) -> Tensor:
        """The network's output for x (n, C, ...); called once for every evaluation of the step, in their order.

        t: not looked at. rows: (n,) int64, which of the 2 B rows of a guided batch these are: sample b's is b in the
        conditional half and B + b in the other.
        """
        table_rows = self._rows[rows] if self.shared else self._rows[: len(x)]
        if self._evaluation:
            table_rows = table_rows + self._evaluation * self._conditions
        self._evaluation += 1
        modulations = GatheredModulations(self.table, table_rows, self._widths)
        positions = self._static["positions"]
        position = positions[0] if positions else None
        for given in self._static.get("given", []):  # both halves of guidance have the same
            x = with_given(x, given[rows % self.samples])
        return self.model.predict(x, modulations, self._context(rows), position, self.stack)

    def _context(self, rows: Tensor) -> Any:  # GatheredContexts is indexed as the list of contexts that models take
        if not self._parts:
            return None
        return GatheredContexts(self.contexts, self._parts > 2, lambda part: self._rows_in(part, rows))

    def _rows_in(self, part: Tensor, rows: Tensor) -> Tensor:
        """These rows of what is kept for all 2 B."""
        return part[rows] if self.shared else part[: len(rows)]
