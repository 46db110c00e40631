"""Where FSDP2 puts the gradients that it has reduced."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class ReduceScatter:
    """``FSDPModule.set_custom_reduce_scatter``'s: as FSDP2 does by itself, in memory of the stream that computes.

    FSDP2 makes the result of a reduction, which becomes the shard's gradient, on its side stream. torch's allocator
    keeps memory apart by stream: in the backward pass activations are freed and gradients made, and yet the memory of
    both would be taken from the device. Where a step nearly fills it, every step would free and take memory anew, for
    which the device stands still.

    One object serves all units of a model. The first memory it is asked for is a reduction's input, which is made on
    the stream that computes; all training has to be on that one.
    """

    def __init__(self):
        self._stream: torch.cuda.Stream | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return torch.empty(*size, dtype=dtype, device=device)
        asking = torch.cuda.current_stream(device)
        self._stream = self._stream or asking
        with torch.cuda.stream(self._stream):
            # The side stream has waited for this one since whatever had this memory before was enqueued.
            memory = torch.empty(*size, dtype=dtype, device=device)
        if asking != self._stream:
            memory.record_stream(asking)  # of a micro-batch's reduction it may be freed while the sum still reads it
        return memory

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op, async_op: bool = False
    ) -> dist.Work | None:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
