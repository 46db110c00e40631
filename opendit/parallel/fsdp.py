"""Shards of a model's parameters under torch's FSDP2 (--plugin fsdp).

FSDP2 gathers the weights of a unit when the unit is called. :func:`apply_shards` divides the model into units.
:class:`Float8Shards` makes FSDP2 gather float8 weights, and :func:`move_to_host` moves shards to host memory.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opendit.kernels.fp8 import E4M3, Float8, Float8Weight
from opendit.kernels.fp8_shards import ShardQuantizer
from opendit.models.dit import DiT
from opendit.models.initialization import fits
from opendit.models.zoo import plan_of
from opendit.parallel.experts import shard_experts
from opendit.parallel.host_memory import AHEAD, ALIGNMENT, HostMemory, padded, spread_numbers
from opendit.parallel.mesh import Mesh
from opendit.parallel.rules import shard_units

PREFETCHED = 1  # number of units that are gathered ahead of the unit that runs


@dataclass(frozen=True)
class Sharding:
    """Settings by which ``fully_shard`` divides a model."""

    dtype: torch.dtype = torch.float32  # dtype of gathered weights and of frozen shards; other shards are not cast
    reduce_dtype: torch.dtype = torch.float32  # dtype in which gradients are summed over ranks
    keep_gathered: bool = True  # False to free gathered weights after the forward pass, and to gather them again
    keep_gradients: bool = True  # True to reduce gradients only in a step's last backward pass
    gather_float8: bool = False  # True to gather the weights of float8_weights() in float8, with equal results
    hosted: int = 0  # number of blocks with shards in host memory


def apply_shards(model: DiT, mesh: Mesh, sharding: Sharding) -> None:
    """Shard the parameters of ``model`` with ``fully_shard``, in place.

    The ranks of the group ``fsdp`` divide every parameter along dimension 0. A unit's weights are gathered while the
    preceding unit computes. ``opendit.parallel.experts`` gathers divided experts. Each block computes its modulation
    when called, because the block's weights exist only then.
    """
    # imported here, because the import takes 0.5 s and sampling does not need it
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = ("dp_replicate", "fsdp") if mesh.dims.dp_replicate > 1 else ("fsdp",)
    outer, inner = ("pp",) if mesh.pp_size > 1 else (), ("tp",) if mesh.tp_size > 1 else ()
    grid = mesh.device_mesh(*outer, *names, *inner)
    grid = grid[names] if outer or inner else grid
    settings: dict[str, Any] = dict(
        mesh=grid,
        mp_policy=MixedPrecisionPolicy(sharding.dtype, sharding.reduce_dtype, cast_forward_inputs=False),
        reshard_after_forward=not sharding.keep_gathered,
    )
    if experts := shard_experts(model, mesh, sharding.dtype, sharding.reduce_dtype):
        settings["ignored_params"] = experts
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(sharding.dtype)
    units = shard_units(plan_of(model.config), (name for name, _ in model.named_parameters()))
    called: list[Any] = [model.get_submodule(name) for name in units if name]
    for module in called:
        fully_shard(module, **settings)
    model.modulate_in_blocks = True
    # Both ends of a pass use the parameters outside of all units, so these parameters stay gathered.
    settings["reshard_after_forward"] = False
    fully_shard(model, **settings)
    ahead = AHEAD if sharding.hosted else PREFETCHED
    for place, module in enumerate(called):
        module.set_modules_to_forward_prefetch(called[place + 1 : place + 1 + ahead])
        module.set_modules_to_backward_prefetch(called[max(0, place - ahead) : place][::-1])


def float8_weights(model: DiT) -> list[str]:
    """Return the names of the weights that only float8 operations read.

    The list is empty if blocks are compiled: torch's compiler can't handle weights that exist in float8 only.
    """

    def in_float8(operation: str) -> bool:
        kernel = model.ops.kernel(operation)
        return kernel is not None and kernel.float8

    if any(block._compiled_call_impl is not None for block in model.blocks):
        return []
    projections = plan_of(model.config).projections(model.config)
    patterns = [pattern for pattern, operations in projections.items() if all(map(in_float8, operations))]
    names = (name for name, _ in model.named_modules())
    return [f"{name}.weight" for name in names if any(fits(pattern, name) for pattern in patterns)]


# ------------------------------------------------------------------------------------------ gathering in float8
#
# If a shard has the methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, FSDP2 calls them. Here they are
# attributes of an ordinary fp32 tensor, so all other code works unchanged.
#
# Ranks send their rows in e4m3, with half the bytes of bf16. :meth:`Float8Shards.refresh` quantises the shards once in
# a step.


class Float8Shards:
    """Float8 copies of this rank's shards, for FSDP2 to gather.

    Args:
        model: sharded model, with memory for its shards.
        names: names of the weights.
        dtype: dtype of the forward pass. Weights are rounded to it before quantisation.
        group: ranks that divide one copy of the model.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, names: Collection[str], dtype: torch.dtype, group: dist.ProcessGroup | None):
        self._group = group
        wanted = {id(parameter) for name, parameter in model.named_parameters() if name in names}
        weights = [managed for managed in managed_parameters(model) if id(managed.sharded_param) in wanted]
        shards, sent = [], []
        for weight in weights:
            # to_local() may return a view of this tensor as a new object
            shard = weight._sharded_local_tensor
            shards.append(shard)
            sent.append(shard.new_zeros(weight.padded_sharded_param_size, dtype=torch.uint8))
        self._quantizer = ShardQuantizer(shards, sent, dtype)
        for weight, *parts in zip(weights, shards, sent, self._quantizer.descales.split(1), strict=True):
            shard, rows, descale = parts
            # FSDP2 looks for the two methods on this tensor. Any, because type checkers know no such attributes.
            hooked: Any = shard
            gathered = _Gathered(rows, descale, weight.sharded_param.shape[0])
            hooked.fsdp_pre_all_gather = gathered.fsdp_pre_all_gather
            hooked.fsdp_post_all_gather = gathered.fsdp_post_all_gather
            weight._init_extensions()  # let FSDP2 search for the methods again

    def refresh(self) -> None:
        """Quantise the shards again after a change. Call on all ranks of the group."""
        amax = self._quantizer.amax()
        if self._group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._group)
        self._quantizer.quantize(amax)


class _Gathered:
    """The two methods that FSDP2 calls to gather a weight in float8.

    Args:
        sent: this rank's rows (rows, in) as uint8, padded to the first rank's number of rows.
        descale: factor (1,) fp32 for the float8 numbers.
        length: rows of the full weight.
    """

    def __init__(self, sent: Tensor, descale: Tensor, length: int):
        self._sent, self._descale, self._length = sent, descale, length

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self._sent,), None

    def fsdp_post_all_gather(
        self, gathered: Sequence[Tensor], metadata, dtype: torch.dtype, *, out: Float8Weight | None = None
    ):
        data = gathered[0].view(E4M3)[: self._length]
        if out is None:
            return Float8Weight(Float8(data, self._descale), dtype), ()
        # ``out`` is a view of the memory into which FSDP2 gathers every time
        assert out.float8.data.data_ptr() == data.data_ptr(), "FSDP2 has gathered a weight to another place"


# ------------------------------------------------------------------------------------------ shards in host memory
#
# --offload blocks[:N] stores the shards of N blocks in page-locked host memory. FSDP2 copies a block's shards to the
# device before gathering. The copy starts up to AHEAD blocks early, on a side stream. Reduced gradients are
# copied to the host, and the optimizer's kernels update the masters there.
#
# FSDP2's CPUOffloadPolicy would move all parameters of a unit, and update them on the CPU. This module sets the
# policy's attributes for single parameters. So LoRA's weights stay on the device, and a GPU computes the update.


def hosted_parameters(model: Any, count: int) -> list[str]:
    """Return the names of the parameters in ``count`` evenly spaced blocks, for :func:`move_to_host`. If the model has
    frozen parameters (--lora), return only frozen ones."""
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    prefixes = tuple(f"blocks.{number}." for number in spread_numbers(len(model.blocks), count))
    named = ((n, p) for n, p in model.named_parameters() if n.startswith(prefixes))
    return [name for name, parameter in named if not (frozen and parameter.requires_grad)]


@torch.no_grad()
def move_to_host(model: nn.Module, names: list[str], device: torch.device) -> None:
    """Move the shards of these parameters to host memory, page-locked if ``device`` is a GPU. ``model`` must be
    sharded. The parameters become new DTensors. Values are copied, except from the meta device."""
    parameters = dict(model.named_parameters())
    wanted = {id(parameters[name]) for name in names}
    moved = [managed for managed in managed_parameters(model) if id(managed.sharded_param) in wanted]
    sizes = [managed.padded_sharded_param_size.numel() * managed.sharded_param.dtype.itemsize for managed in moved]
    places = list(accumulate((padded(size, ALIGNMENT) for size in sizes), initial=0))
    memory = HostMemory(places[-1] // 4, device).numbers.view(torch.uint8)
    for managed, start, size in zip(moved, places, sizes, strict=False):
        before, shape = managed.sharded_param, managed.padded_sharded_param_size
        shard = memory[start : start + size].view(before.dtype).view(shape)
        if not before._local_tensor.is_meta:
            shard.copy_(managed._sharded_param_data.view(shape))
        managed.offload_to_cpu, managed.pin_memory = True, device.type == "cuda"
        managed._sharded_param_data = shard.view(-1)
        own = managed.to_sharded_dtensor(shard[: len(before._local_tensor)])
        managed.sharded_param = nn.Parameter(own, requires_grad=before.requires_grad)
        managed._setattr_on_modules(managed.sharded_param)


def managed_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's internal object (FSDPParam) for each parameter of the model."""
    from torch.distributed.fsdp import FSDPModule  # imported here, because the import takes 0.5 s

    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            group = unit._get_fsdp_state()._fsdp_param_group
            yield from group.fsdp_params if group is not None else ()
