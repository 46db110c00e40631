"""Write safetensors files with a checksum, open them under any file name, and read tensor shapes."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from opendit.common.safe_files import creating

FLOATS = ("F64", "F32", "F16", "BF16")
MOST_HEADER_BYTES = 64 << 20
Shapes = dict[str, tuple[int, ...]]
Kinds = dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype as safetensors names it, shape)
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
_BLOCK = 16 << 20


def write_file(
    to: Path | BinaryIO, blocks: Iterator[bytes | memoryview], *, root: Path | None = None
) -> dict[str, Any]:
    """Write ``blocks`` to a file and sync it. Return its entry in a manifest: bytes, and SHA-256.

    to: an open, empty file, or the path of a new file below ``root``. Raises OSError with the file's name.
    """
    if isinstance(to, Path):
        with creating(to, root=root) as file:
            return write_file(file, blocks)
    digest, size, handle = hashlib.sha256(), 0, to.fileno()
    try:
        for block in blocks:
            digest.update(block)
            size += len(block)
            while len(block):  # os.write may write less than asked
                block = memoryview(block)[os.write(handle, block) :]
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(to.name)) from error
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_tensors(
    to: Path | BinaryIO,
    tensors: Mapping[str, Tensor],
    metadata: dict[str, str],
    kinds: Kinds | None = None,
    *,
    root: Path | None = None,
) -> dict[str, Any]:
    """Write CPU tensors to a safetensors file, as :func:`write_file` does. kinds: each tensor's dtype and shape,
    required if ``tensors`` loads values lazily."""
    if kinds is None:
        kinds = {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_file(to, _safetensors(tensors, metadata, kinds), root=root)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return ITEM_BYTES[dtype] * math.prod(shape)


def _safetensors(tensors: Mapping[str, Tensor], metadata: dict[str, str], kinds: Kinds) -> Iterator[bytes | memoryview]:
    header: dict[str, dict[str, Any]] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in kinds.items():
        end = offset + nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format requires aligned data
    yield len(text).to_bytes(8, "little") + text
    for name in kinds:
        data = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _BLOCK):
            yield data[start : start + _BLOCK]


def open_mapped(path: Path) -> safe_open:
    """Call ``safe_open`` for any path, even one that is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return safe_open(f"/proc/self/fd/{file}", framework="pt")  # mapped, so the descriptor can be closed
        finally:
            os.close(file)
    return safe_open(path, framework="pt")


def open_safetensors(path: Path) -> safe_open:
    """Open a safetensors file. Raises ValueError with the path if the file is missing, damaged or not regular."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path} is no regular file")
        with open(path, "rb") as file:
            start = file.read(8)
        if start == b"version ":  # the start of a Git LFS pointer
            raise ValueError(f"{path} is a pointer of Git LFS, not the file itself; fetch it by git lfs pull")
        if start.lstrip().startswith(b"<"):
            raise ValueError(f"{path} is a web page, saved instead of the file; download the file again")
        if (length := int.from_bytes(start, "little")) > MOST_HEADER_BYTES:
            raise ValueError(f"{path} is not a readable safetensors file (a header of {length:,} bytes)")
        return open_mapped(path)
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: the file can't be mapped
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a readable safetensors file ({reason}); take another one") from error


def shapes_in(file: safe_open, path: Path, floats: bool = True) -> Shapes:
    """Return name -> shape of all tensors. With ``floats``, raise ValueError for a dtype that is not in ``FLOATS``."""
    shapes = {}
    for name in file.keys():  # noqa: SIM118
        part = file.get_slice(name)
        if floats and part.get_dtype() not in FLOATS:
            raise ValueError(f"{path}: {name[:100]!r} holds {part.get_dtype()}; weights are one of {', '.join(FLOATS)}")
        shapes[name] = tuple(part.get_shape())
    return shapes
