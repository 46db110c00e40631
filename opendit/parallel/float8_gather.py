"""Gather weights that only float8 operations read by FSDP2 in float8: half the bytes of bf16, and no operation has to
compute a scale and cast.

FSDP2 asks the shard of a parameter what to gather, and what to make of the result, if the shard has
``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``. They are meant to be methods of a subclass of Tensor. Here they
are attributes of the shard itself, which stays an ordinary fp32 tensor: all code that keeps state by parameter
(masters, moments, averages, the optimizer's kernels, DTensor) works on it as on any other, whereas a subclass would
have to implement every operation that any of them calls.

The gathered data lies beside the shard: this rank's rows in e4m3, one byte per weight, computed again whenever the
shards have changed (:meth:`Float8Shards.refresh`). So a step quantises once, however often its passes gather.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from opendit.kernels.fp8 import E4M3, Float8
from opendit.kernels.fp8_shards import ShardQuantizer
from opendit.kernels.fp8_weight import Float8Weight


class Float8Shards:
    """This rank's shards of weights in float8.

    Args:
        model: cut by ``fully_shard``, its shards in memory.
        names: of the weights.
        dtype: of the forward pass. Weights are rounded to it before they are quantised, as if it had been gathered.
        group: ranks that hold the shards of one copy of the model; None if this rank alone does.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, names: Collection[str], dtype: torch.dtype, group: dist.ProcessGroup | None):
        self._group = group
        wanted = {id(parameter) for name, parameter in model.named_parameters() if name in names}
        weights = [managed for managed in _managed(model) if id(managed.sharded_param) in wanted]
        shards, sent = [], []
        for weight in weights:
            shard = weight._sharded_local_tensor  # the object itself: to_local() may give a view of it
            shards.append(shard)
            sent.append(shard.new_zeros(weight.padded_sharded_param_size, dtype=torch.uint8))
        self._quantizer = ShardQuantizer(shards, sent, dtype)
        for weight, *parts in zip(weights, shards, sent, self._quantizer.descales.split(1), strict=True):
            shard, rows, descale = parts
            hooked: Any = shard  # FSDP2 looks for these on the tensor
            gathered = _Gathered(rows, descale, weight.sharded_param.shape[0])
            hooked.fsdp_pre_all_gather = gathered.fsdp_pre_all_gather
            hooked.fsdp_post_all_gather = gathered.fsdp_post_all_gather
            weight._init_extensions()  # which it did when it made the shard, and found none

    def refresh(self) -> None:
        """Quantise the shards, which have changed, with one scale for each full weight; collective over the group."""
        amax = self._quantizer.amax()
        if self._group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._group)
        self._quantizer.quantize(amax)


class _Gathered:
    """The form in which FSDP2 gathers a weight, and the conversion back to a weight.

    Attributes:
        sent: (rows, in) uint8, this rank's rows, padded to the first rank's number.
        descale: (1,) fp32.
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
        # FSDP2 gathers into the same memory every time, which the first call's weight is a view of.
        assert out.float8.data.data_ptr() == data.data_ptr(), "FSDP2 has gathered a weight to another place"


def _managed(model: nn.Module) -> list[Any]:
    """Return FSDP2's own objects for the parameters of the model, one for each."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    return [managed for group in groups if group is not None for managed in group.fsdp_params]
