"""Shards of blocks in host memory under FSDP2 (--plugin fsdp --offload blocks[:N]).

A rank's shards of the blocks' parameters lie in its page-locked host memory. To gather a block's weights, FSDP2 first
copies each rank's shard to its device on a side stream. It begins up to AHEAD blocks before the block is needed, in the
forward and the backward pass. So the link between a rank's host and device carries only that rank's shards. Shards of
frozen weights are never copied back. For trained weights, the reduced gradients are copied to the host, and the
optimizer's kernels update the masters there.

FSDP2's CPUOffloadPolicy also does this, but only for all parameters of a unit, and with the optimizer on the CPU. This
module sets the policy's attributes for single parameters. LoRA's weights can therefore stay on the device while frozen
weights of the same unit are on the host, and a GPU computes the update.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from opendit.parallel.host_memory import HostMemory, padded
from opendit.parallel.streamed_blocks import ALIGNMENT, spread_numbers


def hosted_parameters(model: Any, count: int) -> list[str]:
    """Return the names of the parameters whose shards belong in host memory: those of ``count`` evenly spaced blocks.

    If the model has frozen parameters (--lora), only frozen ones are named.
    """
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    prefixes = tuple(f"blocks.{number}." for number in spread_numbers(len(model.blocks), count))
    named = ((n, p) for n, p in model.named_parameters() if n.startswith(prefixes))
    return [name for name, parameter in named if not (frozen and parameter.requires_grad)]


@torch.no_grad()
def move_to_host(model: nn.Module, names: list[str], device: torch.device) -> None:
    """Move the shards of these parameters to host memory, page-locked if the device is a GPU.

    The parameters become new DTensors. They keep their values, unless they are on the meta device and have none.

    Args:
        model: model after ``fully_shard``; its parameters may be on the meta device.
        names: names of parameters that ``fully_shard`` manages; others stay where they are.
        device: device that computes.
    """
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
    """Yield FSDP2's internal object (FSDPParam) of each parameter of the model."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            group = unit._get_fsdp_state()._fsdp_param_group
            yield from group.fsdp_params if group is not None else ()
