"""Baselines for opendit.parallel.sequence with blocking collectives, to replace ``SequenceParallel.strategy``."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.parallel.collectives import Group


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group):
        ctx.group = group
        gathered = x.new_empty(group.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group.handle)
        return gathered

    @staticmethod
    def backward(ctx, grad: Tensor):
        own = grad.new_empty(len(grad) // ctx.group.size, *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group.handle)
        return own, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group):
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group.handle)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _AllToAll.apply(grad, ctx.group), None


def _to_heads(x: Tensor, group: Group, length: int) -> Tensor:
    """Convert (B, n, H, d), this rank's tokens, to (B, h, length, d), this rank's heads."""
    B, n, H, d = x.shape
    received = _AllToAll.apply(x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4), group)
    return received.transpose(0, 1).flatten(1, 2)[:, :length].transpose(1, 2)


def _to_tokens(heads: Tensor, group: Group, rows: int) -> Tensor:
    """Convert (B, h, N, d), this rank's heads, to (B, n, D), this rank's tokens."""
    by_token = F.pad(heads.transpose(1, 2), (0, 0, 0, 0, 0, group.size * rows - heads.shape[2]))
    received = _AllToAll.apply(by_token.unflatten(1, (group.size, rows)).transpose(0, 1), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2)


@dataclass(frozen=True)
class BlockingFastSeq:
    """FastSeq as in OpenDiT 1: an all-gather of the input, then the projection, attention, and an all-to-all."""

    group: Group
    takes_projection: ClassVar[bool] = True

    def project_and_attend(
        self, x: Tensor, qkv: nn.Linear, num_heads: int, attend, length: int, float8: bool = False
    ) -> Tensor:
        assert not float8
        (B, n, D), P, own = x.shape, self.group.size, self.group.rank
        everyone = _AllGather.apply(x, self.group).view(P, B, n, D).transpose(0, 1).flatten(1, 2)[:, :length]
        weight, bias = (p.unflatten(0, (3, P, -1))[:, own].flatten(0, 1) for p in (qkv.weight, qkv.bias))
        q, k, v = F.linear(everyone, weight, bias).view(B, length, 3, num_heads // P, -1).permute(2, 0, 3, 1, 4)
        return _to_tokens(attend(q, k, v), self.group, n)


@dataclass(frozen=True)
class BlockingUlysses:
    """Ulysses as in DeepSpeed: one all-to-all each for q, k and v, and one for the result."""

    group: Group
    takes_projection: ClassVar[bool] = False

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend, length: int) -> Tensor:
        output = attend(*(_to_heads(part.transpose(1, 2), self.group, length) for part in (q, k, v)))
        return _to_tokens(output, self.group, q.shape[2])
