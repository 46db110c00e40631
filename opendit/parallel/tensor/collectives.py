"""Collectives of ranks that divide a layer: gather shares of tokens or features, and sum and scatter whole tensors.
Each is the other's adjoint."""

import torch
import torch.distributed as dist
from torch import Tensor

from opendit.parallel.sequence.collectives import Flight, Group, start_gather, take_tokens


def start_sum(x: Tensor, dim: int, group: Group) -> Flight:
    """This rank's share along ``dim`` of the sum of all ranks' x, on its way. Ranks must be able to share it evenly."""
    parts = x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    share = parts.new_empty(parts.shape[1:])
    work = dist.reduce_scatter_tensor(share, parts.flatten(0, 1), group=group.handle, async_op=True)
    return Flight([work], share, parts)


def side_by_side(shares: Tensor, dim: int) -> Tensor:
    """Shares (P, ...) of all ranks, put together along ``dim`` of one of them."""
    return shares.movedim(0, dim).flatten(dim, dim + 1)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return side_by_side(start_gather(share, group).wait(), dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return start_sum(grad, ctx.dim, ctx.group).wait(), None, None


class _SumShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_sum(x, dim, group).wait()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return side_by_side(start_gather(grad, ctx.group).wait(), ctx.dim), None, None


class _JoinResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, length: int, group: Group) -> Tensor:
        ctx.rows, ctx.group = x.shape[1], group
        return side_by_side(start_gather(x, group).wait(), 1)[:, :length]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return take_tokens(grad, ctx.rows, ctx.group), None, None


def join(share: Tensor, dim: int, group: Group) -> Tensor:
    """All ranks' shares along ``dim``. What is done with the result differs between ranks: gradients are summed."""
    return _Join.apply(share, dim, group)


def sum_shares(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's share along ``dim`` of the sum of all ranks' x."""
    return _SumShares.apply(x, dim, group)


def join_result(x: Tensor, length: int, group: Group) -> Tensor:
    """The first ``length`` tokens (B, N, F) of all ranks' (B, n, F), for what every rank does alike with them, up to
    the loss: a rank's gradient is its own tokens' part of the one that all have."""
    return _JoinResult.apply(x, length, group)


class _ColumnProduct(torch.autograd.Function):
    """The weight's gradient needs all tokens: they are gathered once more for it, while the input's is computed, and
    not kept in between."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(side_by_side(start_gather(x, group).wait(), 1), weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x, weight), rows = ctx.saved_tensors, grad.flatten(0, 1)
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        gathered = start_gather(x, ctx.group) if of_weight else None
        summed = start_sum(grad @ weight, 1, ctx.group) if of_x else None
        dweight, dbias = None, rows.sum(0) if of_bias else None
        if gathered is not None:
            whole = side_by_side(gathered.wait(), 1)
            del gathered
            dweight = rows.t() @ whole.flatten(0, 1)
        return None if summed is None else summed.wait(), dweight, dbias, None


def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """x W^T + bias (B, P n, out / P) of all ranks' tokens (B, n, in), for weight (out / P, in) of this rank."""
    return _ColumnProduct.apply(x, weight, bias, group)
