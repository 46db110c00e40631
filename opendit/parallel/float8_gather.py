"""Let FSDP2 gather weights in float8 if only float8 operations read them. This sends half as many bytes as bf16, and
the operations need not compute a scale and cast the weights.

If the shard of a parameter has the methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, FSDP2 calls them to
get the tensors to gather, and to convert the result. FSDP2 intends them as methods of a subclass of Tensor. Here the
methods are attributes of the shard, which stays an ordinary fp32 tensor. All code for the state of parameters (masters,
moments, averages, the optimizer's kernels, DTensor) therefore works with the shard unchanged. In contrast, a subclass
would have to implement every operation that this code calls.

The tensor to gather has this rank's rows in e4m3, one byte per weight. :meth:`Float8Shards.refresh` computes it
whenever the shards have changed. A step therefore quantises only once, although several passes gather.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opendit.kernels.fp8 import E4M3, Float8, Float8Weight
from opendit.kernels.fp8_shards import ShardQuantizer
from opendit.parallel.host_shards import managed_parameters


class Float8Shards:
    """Float8 copies of this rank's shards of some weights, for FSDP2 to gather.

    Args:
        model: model after ``fully_shard``, with memory for its shards.
        names: names of the weights.
        dtype: dtype of the forward pass. Weights are rounded to this dtype before they are quantised, so that the
            values equal those of weights gathered in ``dtype``.
        group: ranks that hold the shards of one copy of the model; None for this rank alone.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, names: Collection[str], dtype: torch.dtype, group: dist.ProcessGroup | None):
        self._group = group
        wanted = {id(parameter) for name, parameter in model.named_parameters() if name in names}
        weights = [managed for managed in managed_parameters(model) if id(managed.sharded_param) in wanted]
        shards, sent = [], []
        for weight in weights:
            # not to_local(), which may return a view of this tensor as a new object
            shard = weight._sharded_local_tensor
            shards.append(shard)
            sent.append(shard.new_zeros(weight.padded_sharded_param_size, dtype=torch.uint8))
        self._quantizer = ShardQuantizer(shards, sent, dtype)
        for weight, *parts in zip(weights, shards, sent, self._quantizer.descales.split(1), strict=True):
            shard, rows, descale = parts
            # FSDP2 looks for the two methods on this tensor; Any, because type checkers know no such attributes
            hooked: Any = shard
            gathered = _Gathered(rows, descale, weight.sharded_param.shape[0])
            hooked.fsdp_pre_all_gather = gathered.fsdp_pre_all_gather
            hooked.fsdp_post_all_gather = gathered.fsdp_post_all_gather
            weight._init_extensions()  # repeat FSDP2's search for the methods, which it made when it created the shard

    def refresh(self) -> None:
        """Quantise the shards again after they have changed, with one scale for each full weight. Collective over the
        group."""
        amax = self._quantizer.amax()
        if self._group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._group)
        self._quantizer.quantize(amax)


class _Gathered:
    """The two methods that FSDP2 calls to gather a weight in float8.

    Args:
        sent: this rank's rows (rows, in) as uint8, padded to the first rank's number of rows.
        descale: (1,) fp32, factor that converts the float8 numbers to the weight's values.
        length: number of rows of the full weight.
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
        # FSDP2 gathers into the same memory every time, of which ``out`` is a view.
        assert out.float8.data.data_ptr() == data.data_ptr(), "FSDP2 has gathered a weight to another place"
