"""Expert parallelism: the ranks of the group ``ep`` have different experts of every block (EC-DiT), and tokens travel
to the ranks of the experts that have chosen them (opendit/parallel/sequence/routing.py); see docs/parallelism.md.

The group is folded out of data and sequence parallel ranks, which have different tokens: the gradient that a rank
computes for its experts is the sum over its group's tokens already. Ranks with the same experts, the groups
``ep_shard``, divide their weights, which are gathered when a block is called; copies of the model add up theirs.
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
from opendit.models import DiT, DiTConfig
from opendit.models.attention import SequenceShards
from opendit.models.experts import ExpertMlp, Routing
from opendit.models.zoo import model_shapes
from opendit.parallel.collectives import Group, start_gather, start_sum
from opendit.parallel.mesh import Mesh
from opendit.parallel.rules import check_divisible
from opendit.parallel.sequence.routing import OwnTokens, RoutingByRanks
from opendit.parallel.tensor import divide_experts

STACKS = ("expert_fc1", "expert_fc2")


def expert_group(mesh: Mesh) -> Group | None:
    """Return the group of ranks that have different experts; None if there is none, or if the ranks that divide every
    layer divide the experts."""
    return Group.of(mesh.group("ep")) if mesh.dims.ep > 1 and mesh.tp_size == 1 else None


def check_expert_parallel(config: DiTConfig, dims: ParallelDims) -> None:
    """Raise ValueError, with sizes that work, unless the ranks can have different experts of a model."""
    check_divisible(config, "ep", dims.ep)
    shards = dims.size("ep_shard")
    for name, weights in _stacks(config).items() if dims.ep > 1 else ():
        if weights // dims.ep % shards:
            raise ValueError(
                f"--expert_parallel_size {dims.ep}: {shards} ranks have the same experts, and can't divide {name} of "
                f"{weights // dims.ep:,} weights evenly; use a larger size"
            )


def expert_parameters(config: DiTConfig) -> int:
    """Return the number of weights of all experts of a block."""
    return sum(_stacks(config).get(f"blocks.0.mlp.{name}", 0) for name in STACKS)


@functools.cache
def _stacks(config: DiTConfig) -> dict[str, int]:
    """Return the stacks of experts of a model, name -> number of weights."""
    return {name: math.prod(shape) for name, shape in model_shapes(config)[0].items() if name.endswith(STACKS)}


def divide_among(model: DiT, group: Group) -> None:
    """Leave this rank only its experts of every block, in place."""
    for mlp in _expert_mlps(model):
        divide_experts(mlp, group, "ep")
        mlp.start = partial(_start, mlp, group)


def _start(mlp: ExpertMlp, group: Group, y: Tensor, shards: SequenceShards | None = None) -> Routing:
    return RoutingByRanks(mlp, y, cast("OwnTokens | None", shards), group)


def _expert_mlps(model: DiT) -> list[ExpertMlp]:
    return [module for module in model.blocks.modules() if isinstance(module, ExpertMlp)]


# ------------------------------------------------------------------------------------------------------------- shards


def shard_experts(model: DiT, mesh: Mesh, dtype: torch.dtype, reduce_dtype: torch.dtype) -> set[nn.Parameter]:
    """Shard the stacks of experts that :func:`divide_among` has left among the ranks that have the same, flat and even,
    in place. Blocks gather them in ``dtype``, and their gradients are averaged in ``reduce_dtype``. Collective over all
    ranks.

    Returns:
        The new parameters, without values; empty if no experts are divided.
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
    """Ranks with the same experts.

    Attributes:
        shards: those that divide them; None if this rank has them in full.
        copies: those with another copy of the same shard.
        averaged: number of ranks over whose losses the mean is taken.
        dtype: in which blocks gather the weights.
        reduce_dtype: in which gradients are averaged.
    """

    shards: Group | None
    copies: dist.ProcessGroup | None
    averaged: int
    dtype: torch.dtype
    reduce_dtype: torch.dtype


def _weights(mlp: ExpertMlp, shapes: tuple[tuple[int, ...], ...], how: Sharing) -> tuple[Tensor, ...]:
    return tuple(_Gather.apply(getattr(mlp, name), shape, how) for name, shape in zip(STACKS, shapes, strict=True))


class _Gather(torch.autograd.Function):
    """Gather full stacks from shards. The backward pass takes the mean over the ranks of the losses; the rank of an
    expert has the sum over its group already."""

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
