"""Expert parallelism: the ranks of the group ``ep`` have different experts of every block (EC-DiT), and tokens are sent
to the ranks of the experts that have chosen them (opendit/parallel/sequence/__init__.py); see docs/parallelism.md.

The group consists of data-parallel and sequence-parallel ranks, which have different tokens. The gradient that a rank
computes for its experts is therefore already the sum over the tokens of its group. The ranks that have the same experts
(the group ``ep_shard``) divide the weights of these experts among them; a block's weights are gathered when the block
is called. Copies of the model sum their gradients.
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
    """Return this rank's group of ranks that have different experts. None without expert parallelism, or if
    tensor-parallel ranks divide the experts."""
    return Group.of(mesh.group("ep")) if mesh.dims.ep > 1 and mesh.tp_size == 1 else None


def check_expert_parallel(config: DiTConfig, dims: ParallelDims) -> None:
    """Raise ValueError, which names sizes that work, unless this size of expert parallelism works with the model."""
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
    """Divide this rank's stacks of experts, as flat and even shards, among the ranks that have the same experts, in
    place. All ranks must call this together, after :func:`divide_among`. Blocks gather the stacks in ``dtype``, and
    gradients are summed in ``reduce_dtype``. Return the stacks' parameters; new ones have no values. Return an empty
    set if experts are not divided."""
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
    """Settings for the ranks that have the same experts and divide their weights. shards: those ranks; None if this
    rank has the full weights. copies: the ranks with copies of this rank's shard. averaged: number of ranks whose
    losses are averaged. dtype, reduce_dtype: dtypes of gathered weights and of summed gradients."""

    shards: Group | None
    copies: dist.ProcessGroup | None
    averaged: int
    dtype: torch.dtype
    reduce_dtype: torch.dtype


def _weights(mlp: ExpertMlp, shapes: tuple[tuple[int, ...], ...], how: Sharing) -> tuple[Tensor, ...]:
    return tuple(_Gather.apply(getattr(mlp, name), shape, how) for name, shape in zip(STACKS, shapes, strict=True))


class _Gather(torch.autograd.Function):
    """Gathers the full stack from the ranks' shards. The gradient of a stack is already the sum over the tokens of this
    rank's group. The backward pass adds the gradients of the other ranks with the same experts, and divides by
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
