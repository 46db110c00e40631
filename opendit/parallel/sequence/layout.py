"""From tokens by rank to heads by rank and back, without more passes over memory than the exchange needs.

The *packed* layout of q, k, v is (P, B, n, 3, h, d): the n tokens of each of P ranks, with the h = H / P heads of one
of them. It is what an all-to-all delivers and what FastSeq's projections write; with one sample q, k and v are views
of it that attention takes as they are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.parallel.sequence.collectives import Group


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """``F.linear`` of x (..., in), written to ``out``, contiguous and with as many rows of weight's length."""
    out, x = out.view(-1, len(weight)), x.reshape(-1, x.shape[-1])
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def column_sums(x: Tensor) -> Tensor:
    """x.sum(0) of x (rows, columns), as a product with ones: torch's sum takes twice as long."""
    return torch.mv(x.t(), x.new_ones(len(x)))


def own_rows(parameter: Tensor, group: Group) -> Tensor:
    """The rows of this rank's heads in q, k and v: (3 h d, ...) of (3 D, ...)."""
    # Joined, not flattened: torch copies contiguous blocks three times as fast as a view with gaps between them.
    return torch.cat(parameter.unflatten(0, (3, group.size, -1))[:, group.rank].unbind())


def whole_rows(rows: Tensor, group: Group) -> Tensor:
    """The inverse of :func:`own_rows`, with zeros for the other heads."""
    whole = rows.new_zeros(3, group.size, len(rows) // 3, *rows.shape[1:])
    whole[:, group.rank] = rows.unflatten(0, (3, -1))
    return whole.flatten(0, 2)


def zeros_but_own(own_weight: Tensor, dtype: torch.dtype, group: Group) -> Tensor:
    """(3, P, h d, D) of ``dtype`` for the gradient of the weight whose local rows are (3 h d, D): zeros for the other
    heads, and those of the own ones are anything."""
    whole = own_weight.new_empty(3, group.size, len(own_weight) // 3, own_weight.shape[1], dtype=dtype)
    others = [part for rows in whole for part in (rows[: group.rank], rows[group.rank + 1 :]) if part.numel()]
    if others:
        torch._foreach_zero_(others)  # contiguous each, and one kernel for all
    return whole


def weight_gradient(grad: Tensor, x: Tensor, group: Group, whole: Tensor) -> Tensor:
    """``whole_rows(grad.T @ x, group)``, the gradient (3 D, D) of a weight whose local rows took x (tokens, D) to the
    columns of grad (tokens, 3 h d), in one pass: a batched product writes the rows of q, k and v where they belong, in
    ``whole`` of :func:`zeros_but_own`."""
    torch.bmm(grad.unflatten(1, (3, -1)).permute(1, 2, 0), x.expand(3, *x.shape), out=whole[:, group.rank])
    return whole.flatten(0, 2)


class _Unpack(torch.autograd.Function):
    """torch's own backward would stack dq, dk, dv, pad the stack and copy it into the packed order: three passes for
    the one that is made here."""

    @staticmethod
    def forward(ctx, packed: Tensor, length: int):
        ctx.shape = packed.shape
        rows = packed.transpose(0, 1).flatten(1, 2)[:, :length]
        return rows.permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        n, length = ctx.shape[2], grads[0].shape[2]
        packed = grads[0].new_empty(ctx.shape)
        whole, rest = divmod(length, n)  # ranks with n tokens; tokens of the rank after them
        by_head = packed.permute(3, 1, 4, 0, 2, 5)  # (3, B, h, P, n, d)
        by_head[:, :, :, whole:].zero_()
        for target, grad in zip(by_head, grads, strict=True):
            target[:, :, :whole].copy_(grad[:, :, : whole * n].unflatten(2, (whole, n)))
            if rest:
                target[:, :, whole, :rest].copy_(grad[:, :, whole * n :])
        return packed, None


def unpack(packed: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, h, length, d) of packed (P, B, n, 3, h, d); tokens past ``length`` are padding and are left out."""
    return _Unpack.apply(packed, length)


def pack(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> Tensor:
    """q, k, v (B, H, n, d) of this rank's tokens as (P, B, n, 3, h, d) to send: row p holds the heads p h to (p + 1) h
    of rank p."""
    return torch.stack([part.unflatten(1, (ranks, -1)).permute(1, 0, 3, 2, 4) for part in (q, k, v)], dim=3)


def tokens_by_rank(heads: Tensor, rows: int, ranks: int) -> Tensor:
    """The attention output (B, h, N, d) as (P, B, n, h, d) to send: row p holds the n = ``rows`` tokens of rank p,
    with zeros for padding."""
    by_token, missing = heads.transpose(1, 2), ranks * rows - heads.shape[2]
    if missing:
        by_token = F.pad(by_token, (0, 0, 0, 0, 0, missing))
    return by_token.unflatten(1, (ranks, rows)).transpose(0, 1).contiguous()


def side_by_side(received: Tensor) -> Tensor:
    """(B, n, D) of all heads from (P, B, n, h, d), those of every rank, that came back."""
    return received.permute(1, 2, 0, 3, 4).flatten(2)
