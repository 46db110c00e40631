"""The exchange around attention along an axis (axial.py) without collectives: every rank reads and writes the others'
memory (peer_memory.py), as in Ulysses (direct.py).

    x by frames in the input buffer ─barrier─▶ own places of all frames read ─▶ q k v, attention along time
      ─▶ the output written to its owners' output buffers ─barrier─▶ own frames, all places

That is Ulysses' exchange with places in the part of heads, and a token's features in that of a head's. Places go in
parts: a kernel carries the first part in and the last one out, copy engines all others, beside the products and
attention of those that are here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from opendit.common.torch_utils import not_compiled
from opendit.parallel.sequence.axial import FRAMES, PARTS, AllToAll, GridShare, Tokens, padded
from opendit.parallel.sequence.direct import Collect, Depart, Layer, unread
from opendit.parallel.sequence.peer_memory import Buffer, PeerMemory
from opendit.parallel.sequence.products import in_working_dtype


@dataclass(frozen=True)
class DirectExchange:
    """See :class:`opendit.parallel.sequence.axial.AllToAll`, by whose collectives go inputs in float8 and tokens that
    lie by places."""

    memory: PeerMemory
    parts: int = PARTS

    @not_compiled  # what other ranks read and write is in no graph of a compiler
    def attend(self, grid: GridShare, x: Tokens, attend: Callable[[Tokens, slice], Tensor]) -> Tensor:
        """See :meth:`opendit.parallel.sequence.axial.AllToAll.attend`."""
        if grid.home != FRAMES or not isinstance(x, Tensor):
            return AllToAll(self.parts).attend(grid, x, attend)
        x = cast(Tensor, in_working_dtype(x)[0])
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # the backward pass of all ranks uses the same buffers, whatever is frozen
        frames, own = grid.local(FRAMES)[0], grid.share(grid.away)
        parts = next(n for n in range(self.parts, 0, -1) if own % n == 0)
        places = grid.group.size * own
        x = padded(x.unflatten(1, (frames, -1)), 2, places)
        layer = Layer(self.memory, parts, places, grid.sizes[FRAMES], x.flatten(2).shape)
        departed, out = [], layer
        for part, lines in enumerate(_Enter.apply(x.flatten(2), layer)):
            lines = _ArriveInPlaces.apply(lines, layer, part)  # (B, places of the part, T, D)
            which = slice(part * own // parts, (part + 1) * own // parts)
            output = attend(lines.transpose(1, 2).flatten(1, 2), which).unflatten(1, (grid.sizes[FRAMES], -1))
            if part == 0:
                out = replace(layer, shape=(*x.shape[:2], places * output.shape[-1]), held=[], arriving={}, doutput={})
            departed.append(Depart.apply(output.transpose(1, 2), out, part))
        y = Collect.apply(out, None, *departed).unflatten(2, (places, -1))
        return y[:, :, : grid.sizes[grid.away]].flatten(1, 2)


class _Enter(torch.autograd.Function):
    """This rank's tokens (B, a, places * D) to every part of its places of all frames, (B, places, T, D) each, which
    are still arriving."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: Layer):
        ctx.layer, ctx.dtype = layer, x.dtype
        layer.rows(Buffer.INPUT, 1, x.dtype).of[layer.memory.group.rank].view(x.shape).copy_(x)
        return tuple(lines for (lines,) in layer.pull(1, x, 0))

    @staticmethod
    def backward(ctx, *unread: Tensor):
        # Not copied: nothing before the norm that made x, whose backward pass reads it next, exchanges anything.
        return ctx.layer.gradients(ctx.dtype, 1), None


class _ArriveInPlaces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lines: Tensor, layer: Layer, part: int):
        ctx.layer, ctx.part = layer, part
        layer.arrived(part)
        return lines.view_as(lines)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.layer.push_gradients((grad,), ctx.part)
        return unread(grad), None, None
