"""Read a rank's shards of weights from memory-mapped files into the memory of a device."""

import torch
from torch import Tensor, nn

from opendit.checkpoint.matched import MatchedTensors, check_matched
from opendit.models.parameter_names import canonical_name
from opendit.parallel.engines import Values
from opendit.parallel.layout import Layout, Shard

BUFFER_BYTES, BUFFERS = 32 << 20, 4  # size and number of the page-locked buffers


class DeviceReader:
    """Reader that copies shards to a device's memory in their stored dtype, so that the device can cast them.

    Shards are read in pieces. All threads of torch copy a piece from the mapped file into a page-locked buffer. The
    buffer is then copied to the device while the next piece is read. A rank therefore needs only BUFFERS * BUFFER_BYTES
    of host memory.

    A reader is a ``Values`` callable, from which an engine can set its masters.

    Args:
        tensors: the tensors to read.
        device: device of the results. On the CPU, a result may be a view of the file.
        otherwise: returns the values of parameters that ``tensors`` does not have, such as LoRA parameters.
        buffer_bytes: size of each buffer.
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
        self._copied: list[torch.cuda.Event] = []  # recorded after the copy from each buffer to the device

    def __call__(self, name: str, shard: Shard) -> Tensor:
        """Return a shard of the parameter with this name, (shard.shape). Raises ValueError, OSError."""
        name = canonical_name(name)
        if name not in self._tensors.shapes and self._otherwise is not None:
            return self._otherwise(name, shard)
        if self._device.type == "cpu":
            return self._tensors.read(name, shard)
        return self.copied(name, shard)

    def copied(self, name: str, shard: Shard) -> Tensor:
        """Read a shard through the buffers, piece by piece, and return it in new memory of the device."""
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
        """Return the next buffer and its number, after waiting for the copy of its previous content to the device."""
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
    """Set a model's parameters, or this rank's part of each parameter.

    A parameter on the meta device gets memory on ``device`` in ``dtype``, by default the dtype in the file. Other
    parameters keep their memory and dtype. Buffers do not change.

    Args:
        layout: for a model that holds parts of its parameters, the layout of these parts. Only the parts are read.

    Raises:
        ValueError: names or shapes differ; the message is one line with the first difference.
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
        # On the CPU, always copy: ``values`` may be a view of the file, which another program could change.
        made = values.to(dtype or values.dtype, copy=values.device.type == "cpu")
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(made, tensor.requires_grad))
