"""Gather a batch's rows of the blocks' inputs, only for those blocks that are evaluated."""

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from opendit.models.blocks import Context

GatherRows = Callable[[Tensor, Tensor], Tensor]


def select_rows(table: Tensor, rows: Tensor) -> Tensor:
    return table.index_select(0, rows)


class GatheredModulations:
    """The modulations of every block, and then of the last layer, one after the other, as ``DiT.of_tokens`` takes them.

    Args:
        table: (R, sum of ``widths``): the modulations of all blocks and of the last layer side by side.
        rows: (n,) int64 of the table.
        gather_rows: takes rows of a table: :func:`select_rows`, or a kernel that does the same.
    """

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
        """Gathers the next ``count`` at once, to be taken one after the other."""
        if self._number == len(self._widths):
            raise StopIteration
        widths = self._widths[self._number : self._number + count]
        part = self._table[:, self._column : self._column + sum(widths)]
        self._ready.extend(self._gather_rows(part, self._rows).split(widths, dim=1))
        self.skip(count)

    def skip(self, count: int) -> None:
        """Passes ``count`` over that nobody needs."""
        self._column += sum(self._widths[self._number : self._number + count])
        self._number += count


class GatheredContexts:
    """The contexts of cross-attention.

    Args:
        kept: for all rows of a batch: a context, or every block's keys and values, and the mask.
        every: True if ``kept`` has every block's keys and values.
        rows_in: picks this call's rows of a tensor for all rows.
    """

    def __init__(self, kept: Sequence[Tensor], every: bool, rows_in: Callable[[Tensor], Tensor]):
        (*self._parts, self._mask), self._every, self._rows_in = kept, every, rows_in

    def of(self, blocks: slice) -> Context | list[Context]:
        """That of these blocks, as ``run_blocks`` takes it."""
        mask = self._rows_in(self._mask)
        if not self._every:
            return self._rows_in(self._parts[0]), mask
        parts = [self._rows_in(part) for part in self._parts[2 * blocks.start : 2 * blocks.stop]]
        return [(*pair, mask) for pair in zip(parts[::2], parts[1::2], strict=True)]
