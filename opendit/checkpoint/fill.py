"""Weights of mapped files into the memory of a device, a rank's shards only."""

import torch
from torch import Tensor, nn

from opendit.checkpoint.matched import MatchedTensors, check_matched
from opendit.models.parameter_names import canonical_name
from opendit.parallel.engines import Values
from opendit.parallel.layout import Layout, Shard

BUFFER_BYTES, BUFFERS = 32 << 20, 4  # of page-locked memory


class DeviceReader:
    """Reads shards into a device's memory in their stored dtype, so that a cast is the device's work.

    Pieces go from the mapped files into page-locked buffers (all threads of torch copy them) and from there to the
    device, while the next piece is read. So a rank needs BUFFERS * BUFFER_BYTES of host memory, whatever it reads.

    It is one of the ``Values`` that an engine takes its masters from.

    Args:
        tensors: of which shards are read.
        device: of the results. For the CPU they may be views of the file.
        otherwise: gives the values of parameters that ``tensors`` does not have, as those of LoRA.
        buffer_bytes: of each buffer.
    """

    def __init__(
        self,
        tensors: MatchedTensors,
        device: torch.device | str,
        otherwise: Values | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ):
        self._tensors, self._device, self._otherwise = tensors, torch.device(device), otherwise
        self._bytes, self._turn = buffer_bytes, 0
        self._buffers: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []  # when a buffer may be filled again

    def __call__(self, name: str, shard: Shard) -> Tensor:
        """Return a shard of the parameter with this name, (shard.shape). Raises ValueError, OSError."""
        name = canonical_name(name)
        if name not in self._tensors.shapes and self._otherwise is not None:
            return self._otherwise(name, shard)
        if self._device.type == "cpu":
            return self._tensors.read(name, shard)
        return self.copied(name, shard)

    def copied(self, name: str, shard: Shard) -> Tensor:
        """Return a shard in new memory of the device, read piece by piece through the buffers."""
        reading = self._tensors.reading(name, shard)
        values = torch.empty(reading.shape, dtype=reading.dtype, device=self._device)
        flat, most = values.view(-1), max(1, self._bytes // reading.dtype.itemsize)
        for start in range(0, reading.numel, most):
            piece = flat[start : start + most]
            i, buffer = self._next()
            buffer = buffer[: piece.numel() * reading.dtype.itemsize].view(reading.dtype)
            reading.copy_to(buffer, start)
            piece.copy_(buffer, non_blocking=True)
            if self._copied:
                self._copied[i].record(torch.cuda.current_stream(self._device))
        return values

    def _next(self) -> tuple[int, Tensor]:
        """Return the next buffer, and its number, once the device has what was in it before."""
        gpu = self._device.type == "cuda"
        if not self._buffers:
            size = max(self._bytes, 16)
            self._buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=gpu) for _ in range(BUFFERS)]
            self._copied = [torch.cuda.Event() for _ in range(BUFFERS)] if gpu else []
        i = self._turn = (self._turn + 1) % BUFFERS
        if self._copied:
            self._copied[i].synchronize()
        return i, self._buffers[i]


@torch.no_grad()
def fill(
    model: nn.Module,
    tensors: MatchedTensors,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
) -> None:
    """Set a model's parameters, all of them, or this rank's part of each.

    A parameter on the meta device gets memory on ``device`` in ``dtype``, by default the one in the file. Others keep
    their memory and dtype. Buffers stay as they are.

    Args:
        layout: of a model that has parts of its parameters; only these are read.

    Raises:
        ValueError: in one line, the first names or shapes that differ.
    """
    parameters = {canonical_name(name): (name, tensor) for name, tensor in model.named_parameters()}
    if layout is None:
        check_matched(list(parameters), tensors.shapes, f"{tensors.path}: of the model's weights")
    reader = DeviceReader(tensors, device)
    for key, (name, tensor) in parameters.items():
        shard = Shard(tensors.shapes[key], ()) if layout is None else layout.local(key)
        if shard.shape != tuple(tensor.shape):
            raise ValueError(f"{tensors.path}: {key} has the shape {shard.shape}, the model's {tuple(tensor.shape)}")
        values = reader(key, shard)
        if not tensor.is_meta:
            tensor.copy_(values)
            continue
        # A view of the file is copied in any case: others could change the file's own memory.
        made = values.to(dtype or values.dtype, copy=values.device.type == "cpu")
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(made, tensor.requires_grad))
