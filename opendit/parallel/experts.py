"""Expert parallelism (EC-DiT): ranks have different experts of every block. See docs/parallelism.md.

The ranks of the group ``ep`` divide the experts. Each token is sent to the experts that have chosen it. The ranks of
the group ``ep_shard`` have equal experts and divide the weights. The weights are gathered when a block is called.
"""

import functools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opendit.config.parallel_sizes import ParallelDims
from opendit.models.attention import SequenceShards
from opendit.models.dit import DiT, DiTConfig
from opendit.models.experts import ExpertMlp, Routing
from opendit.models.zoo import model_shapes
from opendit.parallel.collectives import Group, start_gather, start_sum
from opendit.parallel.mesh import Mesh
from opendit.parallel.rules import check_divisible
from opendit.parallel.sequence import RoutingByRanks, SharedSequence
from opendit.parallel.tensor import divide_experts

STACKS = ("expert_fc1", "expert_fc2")


def expert_group(mesh: Mesh) -> Group | None:
    """Return this rank's ``ep`` group. Return None if no ranks, or tensor-parallel ranks, divide the experts."""
    return Group.of(mesh.group("ep")) if mesh.dims.ep > 1 and mesh.tp_size == 1 else None


def check_expert_parallel(config: DiTConfig, dims: ParallelDims) -> None:
    """Raise ValueError unless the experts and their weights can be divided evenly. The message suggests other sizes."""
    check_divisible(config, "ep", dims.ep)
    shards = dims.size("ep_shard")
    for name, weights in _stacks(config).items() if dims.ep > 1 else ():
        if weights // dims.ep % shards:
            raise ValueError(
                f"--expert_parallel_size {dims.ep}: {shards} ranks have the same experts, and can't divide {name} of "
                f"{weights // dims.ep:,} weights evenly; use a larger size"
            )


def expert_parameters(config: DiTConfig) -> int:
    return sum(_stacks(config).get(f"blocks.0.mlp.{name}", 0) for name in STACKS)


@functools.cache
def _stacks(config: DiTConfig) -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in model_shapes(config)[0].items() if name.endswith(STACKS)}


def divide_among(model: DiT, group: Group) -> None:
    """Remove all experts except this rank's from every block, in place."""
    for mlp in _expert_mlps(model):
        divide_experts(mlp, group, "ep")
        mlp.start = partial(_start, mlp, group)


def _start(mlp: ExpertMlp, group: Group, y: Tensor, shards: SequenceShards | None = None) -> Routing:
    return RoutingByRanks(mlp, y, cast("SharedSequence | None", shards), group)


def _expert_mlps(model: DiT) -> list[ExpertMlp]:
    return [module for module in model.blocks.modules() if isinstance(module, ExpertMlp)]


# ------------------------------------------------------------------------------------------------------------- shards


def shard_experts(model: DiT, mesh: Mesh, dtype: torch.dtype, reduce_dtype: torch.dtype) -> set[nn.Parameter]:
    """Divide this rank's stacks of experts among the ranks of ``ep_shard``, as flat and even shards, in place.

    Call this function on all ranks, after :func:`divide_among`. Stacks are gathered in ``dtype``. Gradients are summed
    in ``reduce_dtype``. Return the stacks' parameters, or an empty set if experts are not divided. New parameters are
    uninitialised.
    """
    if expert_group(mesh) is None:
        return set()
    shards, copies = mesh.group("ep_shard"), mesh.group("dp_replicate")
    ranks = None if shards is None else Group.of(shards)
    how = Sharing(ranks, copies, mesh.dims.size("loss"), dtype, reduce_dtype)
    found = set()
    for mlp in _expert_mlps(model):
        shapes = {name: tuple(getattr(mlp, name).shape) for name in STACKS}
        if ranks is not None:
            for name, shape in shapes.items():
                stack = getattr(mlp, name)
                shard = stack.new_empty(math.prod(shape) // ranks.size)
                setattr(mlp, name, nn.Parameter(shard, stack.requires_grad))
        gathering: Any = mlp
        gathering.weights = partial(_weights, mlp, tuple(shapes.values()), how)
        found |= {getattr(mlp, name) for name in STACKS}
    return found


@dataclass(frozen=True)
class Sharing:
    """Settings of :func:`shard_experts`."""

    shards: Group | None  # the ranks that divide the weights; None if this rank has full weights
    copies: dist.ProcessGroup | None  # the ranks with equal shards
    averaged: int  # number of ranks that average their losses
    dtype: torch.dtype  # dtype of gathered weights
    reduce_dtype: torch.dtype  # dtype of summed gradients


def _weights(mlp: ExpertMlp, shapes: tuple[tuple[int, ...], ...], how: Sharing) -> tuple[Tensor, ...]:
    return tuple(_Gather.apply(getattr(mlp, name), shape, how) for name, shape in zip(STACKS, shapes, strict=True))


class _Gather(torch.autograd.Function):
    """Gathers a stack of experts. The backward pass sums the gradient over the ranks with these experts, and divides by
    ``averaged``."""

    @staticmethod
    def forward(ctx, shard: Tensor, shape: tuple[int, ...], how: Sharing) -> Tensor:
        ctx.how, ctx.shape, ctx.dtype = how, shard.shape, shard.dtype
        own = shard.to(how.dtype)
        return own if how.shards is None else start_gather(own, how.shards).wait().view(shape)

    @staticmethod
    def backward(ctx, grad: Tensor):
        how, grad = ctx.how, grad.to(ctx.how.reduce_dtype)
        if how.shards is not None:
            grad = start_sum(grad.flatten(), 0, how.shards).wait()
        if how.copies is not None:
            grad = grad.clone()
            dist.all_reduce(grad, group=how.copies)
        return grad.to(ctx.dtype).div(how.averaged).view(ctx.shape), None, None
