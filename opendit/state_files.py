"""The files of a checkpoint: safetensors written with their checksum, and the manifest that loading verifies."""

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

MANIFEST = "manifest.json"
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
_BLOCK = 16 << 20


def write_file(path: Path, blocks: Iterator[bytes | memoryview]) -> dict:
    """Writes and syncs a file; returns its line of the manifest, made from memory and not read back from the disk.

    Raises OSError (a full disk, no permission), naming the file.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "wb", buffering=0) as file:
            for block in blocks:
                digest.update(block)
                size += len(block)
                while len(block):  # an unbuffered write may take a part
                    block = memoryview(block)[file.write(block) :]
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict:
    """Writes CPU tensors as a safetensors file; returns and raises as :func:`write_file`.

    (safetensors' own save_file neither hashes nor syncs, and tells no full disk from a bug.)
    """
    return write_file(path, _safetensors(tensors, metadata))


def _safetensors(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    header, offset = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for start in range(0, len(data), _BLOCK):
            yield data[start : start + _BLOCK]


def sync_folder(path: Path) -> None:
    """Makes a folder's entries (files made, renamed) survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, version: int, files: dict[str, dict]) -> None:
    """manifest.json with the size and checksum of every file, and a checksum of its own."""
    content = {"version": version, "files": files, "sha256": _sha256_of(files)}
    write_file(folder / MANIFEST, iter([json.dumps(content, indent=1).encode()]))


def _sha256_of(files: dict[str, dict]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, dict]:
    """name: {"bytes", "sha256"} of every file. Raises ValueError if the manifest itself is missing or damaged."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
        files = content["files"]
        if content["sha256"] != _sha256_of(files):
            raise ValueError("its own checksum is another")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} is missing or damaged ({error})") from error
    return files


def damage(folder: Path, part: int = 0, parts: int = 1, only: Collection[str] | None = None) -> str | None:
    """What is wrong with a checkpoint's files, the damaged one named first; None if all are as they were written.

    With ``parts`` above 1 only this share of the bytes' checksums is looked at (sizes always are), so that ranks can
    share the reading. ``only``: the names of the files to look at.
    """
    try:
        files = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if only is not None:
        files = {name: entry for name, entry in files.items() if name in only}
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{path} is damaged: {path.stat().st_size:,} bytes, {entry['bytes']:,} were written"
    mine = sorted(files)[part::parts]
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing releases the GIL
        try:
            digests = list(pool.map(_sha256, [folder / name for name in mine]))
        except OSError as error:
            return f"{error.filename} can't be read ({error.strerror})"
    for name, digest in zip(mine, digests, strict=True):
        if digest != files[name]["sha256"]:
            return f"{folder / name} is damaged: its checksum is not the manifest's"
    return None


def intact_before(folder: Path, only: Collection[str] | None = None) -> Path | None:
    """The newest of a run's checkpoints before this one that is not damaged (in the files named by ``only``)."""
    folder = folder.resolve()
    earlier = [other for other in sorted(folder.parent.glob("step_*"), reverse=True) if other.name < folder.name]
    return next((other for other in earlier if damage(other, only=only) is None), None)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
