"""Read and write the manifest and the state of a checkpoint, and verify the files of a checkpoint.

    step_0000100/
      model.safetensors        fp32 master weights and buffers, the configuration in the metadata
      ema.safetensors          the same for the moving average; ema_DECAY.safetensors for further averages
      optimizer_RRR.safetensors  exp_avg.NAME and exp_avg_sq.NAME of the parameters that rank RRR wrote
      state.json               counters, loss scaler, settings of the run
      manifest.json            size and SHA-256 of every other file

A sharded checkpoint (``--checkpoint_format sharded``) has other safetensors files. For each set SET of tensors (model,
ema, ema_DECAY, exp_avg, exp_avg_sq) the folder has:

      SET.shards.json          the index: which file holds which slices of which tensor (tensor_set.py)
      SET-shard-RRRRR-of-NNNNN.safetensors  the shards that rank RRRRR of NNNNN wrote

When a checkpoint of a run with ``--average power:...`` is deleted, its averages, state.json and manifest.json are moved
to the run's folder averages/step_0000100.

Names and shapes do not depend on the plugin or the number of ranks. Masters and moments are stored in fp32. All random
numbers are keyed by (seed, step, sample), so the step number determines data order, flips and noise. Therefore a
resumed run continues exactly under the same plugin and world size, and up to rounding under others.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from opendit.checkpoint.run_folders import (
    MANIFEST,
    named_checkpoint,
    root_of,
    step_of,
)
from opendit.common.tensor_files import write_file
from opendit.common.utils import sha256_of
from opendit.config.names import SHARDS, WHOLE

STATE = "state.json"
MODEL_SET, AVERAGE_SET = "model", "ema"
VERSIONS = {2: WHOLE, 3: SHARDS}  # version in state.json -> suffix of the file or index of a set of tensors


def average_sets(decays: tuple[float, ...]) -> list[str]:
    """Return the name of each average's set of tensors. Sampling uses the first average."""
    return [AVERAGE_SET, *(f"ema_{decay}" for decay in decays[1:])]


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """Return the name of the first of these CPU tensors that holds a NaN or an infinity; None if all are finite."""
    return next((name for name, tensor in tensors.items() if not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # PyTorch can't compare fp8 numbers on a CPU
        tensor = tensor.float()
    lowest, highest = tensor.aminmax()  # one pass without allocations; a NaN in the tensor makes both NaN
    return math.isfinite(lowest) and math.isfinite(highest)


def write_manifest(folder: Path, version: int, files: dict[str, dict[str, Any]], *, root: Path | None = None) -> None:
    """Write manifest.json: the size and checksum of every file, and a checksum of that list itself."""
    content = {"version": version, "files": files, "sha256": _sha256_of(files)}
    write_file(folder / MANIFEST, iter([json.dumps(content, indent=1).encode()]), root=root)


def _sha256_of(files: dict[str, dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> {"bytes", "sha256"} for every file of a checkpoint. Files that are not listed are never read.

    Raises ValueError if the manifest itself is missing or damaged.
    """
    from opendit.checkpoint.schema import MANIFEST_FILE  # imports pydantic, so only when a checkpoint is read
    from opendit.common.json_models import read_file

    path = folder / MANIFEST
    try:
        file_id(path, root_of(folder))
        content = read_file(path, MANIFEST_FILE)
        if content["sha256"] != _sha256_of(content["files"]):
            raise ValueError("its own checksum is another")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({error})") from error
    return content["files"]


class AnotherVersion(ValueError):
    """Raised for a checkpoint of another version of the program that this version can't read."""


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json.

    Raises:
        AnotherVersion: another version of the program wrote the checkpoint.
        ValueError: the file is missing or damaged.
    """
    from opendit.checkpoint.schema import ANY_STATE, STATE_FILE  # imports pydantic, so only when a checkpoint is read
    from opendit.common.json_models import read_file

    path = named_checkpoint(folder) / STATE
    try:
        file_id(path, root_of(folder))
        version = read_file(path, ANY_STATE)["version"]
        if version in VERSIONS:
            return read_file(path, STATE_FILE)
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror})") from error
    raise AnotherVersion(
        f"{folder} has checkpoint version {version}, this program reads {' and '.join(map(str, VERSIONS))}; resume it "
        f"with the OpenDiT that wrote it, or start a new run from its weights with --pretrained "
        f"{folder / (AVERAGE_SET + WHOLE)}"
    )


# ------------------------------------------------------------------------------------------ verifying


class FileId(NamedTuple):
    """Identity of a file, to detect that a file was changed or replaced."""

    device: int
    inode: int
    size: int
    changed_ns: int


def file_id(path: Path, root: Path) -> FileId:
    """Return the identity of a regular file inside ``root``.

    Raises ValueError, naming the file, for anything else: a symbolic link that leads out of ``root``, or a FIFO or a
    device, because opening one could block the program.
    """
    try:
        real = path.resolve(strict=True)
        found = os.stat(real)
    except FileNotFoundError:
        broken = path.is_symlink()
        raise ValueError(f"{path} is " + ("a symbolic link to nothing" if broken else "missing")) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise ValueError(f"{path} can't be read ({getattr(error, 'strerror', None) or error})") from error
    if not real.is_relative_to(root):
        raise ValueError(f"{path} is a symbolic link out of {root}: what it leads to is not read; copy the file there")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return FileId(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def damage(folder: Path, part: int = 0, parts: int = 1, only: Collection[str] | None = None) -> str | None:
    """Describe the first damaged file of a checkpoint; return None if all files agree with the manifest.

    The arguments are those of :func:`verified_files`.
    """
    try:
        verified_files(folder, part, parts, only)
    except ValueError as error:
        return str(error)
    return None


def verified_files(
    folder: Path, part: int = 0, parts: int = 1, only: Collection[str] | None = None
) -> dict[str, FileId]:
    """Compare a checkpoint's files with its manifest, and return their identities by name.

    Args:
        part, parts: divide the files into ``parts`` parts and compute only the checksums of part ``part``, so that
            ranks can divide the reading. The sizes of all files are compared.
        only: the names of the files to verify; all by default.

    Raises:
        ValueError: a file is wrong; the message names the first one and describes the error.
    """
    named_checkpoint(folder)
    root, named = root_of(folder), str(folder)
    if folder.is_symlink():
        named += f" (a symbolic link to {os.readlink(folder)})"
    if not folder.resolve().is_relative_to(root):
        raise ValueError(f"{named} leads out of the run's folder {root} and is not read; move the files back into it")
    if not folder.is_dir():
        raise ValueError(f"{named} is " + ("not a folder" if folder.exists() else "missing"))
    entries, ids = read_manifest(folder), {}
    for name in entries if only is None else only:
        path = folder / name
        if name not in entries:
            raise ValueError(f"{path} is not in {MANIFEST}, which lists all that was written: it is missing or strange")
        ids[name] = file_id(path, root)
        if ids[name].size != entries[name]["bytes"]:
            raise ValueError(f"{path} is damaged: {ids[name].size:,} bytes, {entries[name]['bytes']:,} were written")
    mine = sorted(ids)[part::parts]
    with ThreadPoolExecutor(max_workers=4) as pool:  # threads help, because hashing releases the GIL
        try:
            digests = list(pool.map(sha256_of, [folder / name for name in mine]))
        except OSError as error:
            raise ValueError(f"{error.filename} can't be read ({error.strerror})") from error
    for name, digest in zip(mine, digests, strict=True):
        if digest != entries[name]["sha256"]:
            raise ValueError(f"{folder / name} is damaged: its checksum is not the manifest's")
    return ids


def intact_before(folder: Path, problem: Callable[[Path], str | None] = damage) -> Path | None:
    """Return the newest earlier checkpoint of the same run for which ``problem`` returns None; None if none exists."""
    try:
        folder = named_checkpoint(folder).resolve()
    except ValueError:
        return None
    earlier = [other for other in folder.parent.glob("step_*") if step_of(other) < step_of(folder)]
    return next((other for other in sorted(earlier, key=step_of, reverse=True) if problem(other) is None), None)
