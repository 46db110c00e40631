"""The files of a checkpoint: safetensors written with their checksum, the manifest that loading verifies, and where a
run's checkpoints are."""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from opendit.checkpoint.schema import MANIFEST_FILE
from opendit.common.json_file import read_bounded, read_file
from opendit.common.safe_files import link_to, remove, rename, write_whole
from opendit.common.tensor_files import write_file
from opendit.common.utils import printable, sha256_of

MANIFEST, CHECKPOINTS, LATEST, BEST_LINK = "manifest.json", "checkpoints", "latest", "best"
_MOST_NAME = 255  # bytes of what stands in ``latest``


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of the first of these CPU tensors that holds a NaN or an infinity; None if all are finite."""
    return next((name for name, tensor in tensors.items() if not _is_finite(tensor)), None)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # fp8 has no comparisons on a CPU
        tensor = tensor.float()
    lowest, highest = tensor.aminmax()  # a NaN is the lowest and the highest; one pass, and nothing is allocated
    return math.isfinite(lowest) and math.isfinite(highest)


def write_manifest(folder: Path, version: int, files: dict[str, dict[str, Any]], *, root: Path | None = None) -> None:
    """manifest.json with the size and checksum of every file, and a checksum of its own."""
    content = {"version": version, "files": files, "sha256": _sha256_of(files)}
    write_file(folder / MANIFEST, iter([json.dumps(content, indent=1).encode()]), root=root)


def _sha256_of(files: dict[str, dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """name: {"bytes", "sha256"} of every file: what is read of a checkpoint is what stands here, and nothing else.

    Raises ValueError if the manifest itself is missing or damaged, or names what is no file of this folder.
    """
    path = folder / MANIFEST
    try:
        file_id(path, root_of(folder))
        content = read_file(path, MANIFEST_FILE)
        if content["sha256"] != _sha256_of(content["files"]):
            raise ValueError("its own checksum is another")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({error})") from error
    return content["files"]


# ------------------------------------------------------------------------------------------ reading nothing else


class FileId(NamedTuple):
    """The identity of the file under a name, to notice later that another file has taken its place."""

    device: int
    inode: int
    size: int
    changed_ns: int


def root_of(folder: Path) -> Path:
    """The folder that a checkpoint's files must not lie outside of: its run's, or its own if it stands in no run. Where
    ``checkpoints`` is a link out of the run, which its user made to have them on another disk, that other folder."""
    folder = _in_run(folder)
    if folder.parent.name != CHECKPOINTS:
        return folder
    run, checkpoints = folder.parent.parent.resolve(), folder.parent.resolve()
    return run if checkpoints.is_relative_to(run) else checkpoints


def run_of(folder: Path) -> Path | None:
    """The folder of the run that a checkpoint is in and that may be written to. None if the checkpoint stands alone, or
    if ``checkpoints`` is a link: what it leads to is only read."""
    folder = _in_run(folder)
    own = folder.parent.name == CHECKPOINTS and not folder.parent.is_symlink()
    return folder.parent.parent.resolve() if own else None


def _in_run(folder: Path) -> Path:
    """A checkpoint's folder as it is called if that is in a folder ``checkpoints``, else without links."""
    folder = Path(os.path.abspath(folder))
    return folder if folder.parent.name == CHECKPOINTS else folder.resolve()


def file_id(path: Path, root: Path) -> FileId:
    """Raises ValueError, naming the file, unless it is a regular one inside ``root``: a symbolic link may not lead out
    of there, and a FIFO or a device would block whoever opens it."""
    try:
        real = path.resolve(strict=True)
        found = os.stat(real)
    except FileNotFoundError:
        broken = path.is_symlink()
        raise ValueError(f"{path} is " + ("a symbolic link to nothing" if broken else "missing")) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"{path} can't be read ({getattr(error, 'strerror', None) or error})") from error
    if not real.is_relative_to(root):
        raise ValueError(f"{path} is a symbolic link out of {root}: what it leads to is not read; copy the file there")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return FileId(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


# ------------------------------------------------------------------------------------------ verifying


def damage(folder: Path, part: int = 0, parts: int = 1, only: Collection[str] | None = None) -> str | None:
    """Verify a checkpoint's files, and describe the first damaged one; return None if all are as they were written.

    Arguments as those of :func:`verified_files`.
    """
    try:
        verified_files(folder, part, parts, only)
    except ValueError as error:
        return str(error)
    return None


def verified_files(
    folder: Path, part: int = 0, parts: int = 1, only: Collection[str] | None = None
) -> dict[str, FileId]:
    """Compares a checkpoint's files with its manifest; returns which files they are, by name.

    With ``parts`` above 1 only this share of the bytes' checksums is looked at (sizes always are), so that ranks can
    share the reading. ``only``: the names of the files to look at.

    Raises:
        ValueError: says what is wrong, naming the file.
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
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing releases the GIL
        try:
            digests = list(pool.map(sha256_of, [folder / name for name in mine]))
        except OSError as error:
            raise ValueError(f"{error.filename} can't be read ({error.strerror})") from error
    for name, digest in zip(mine, digests, strict=True):
        if digest != entries[name]["sha256"]:
            raise ValueError(f"{folder / name} is damaged: its checksum is not the manifest's")
    return ids


# ------------------------------------------------------------------------------------------ a run's checkpoints


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name; -1 if it has none."""
    found = re.search("step_([0-9]+)", folder.name)
    return int(found[1]) if found else -1


def checkpoints_in(run: Path) -> list[Path]:
    """The checkpoint folders of a run, damaged ones too, the one to go on from first.

    That is the one that ``latest`` names; after it come the earlier ones, the newest first, and at last those of an
    attempt that the run went back from. Without ``latest`` the highest step is the newest.
    """
    folder = run / CHECKPOINTS
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    steps = [folder / name for name in names if re.fullmatch("step_[0-9]+", name)]
    # A kill between two renames leaves a checkpoint under this name only.
    steps += [folder / name for name in names if re.fullmatch(r"\.step_[0-9]+\.replaced", name)]
    steps.sort(key=lambda path: (step_of(path), path.name.startswith("step")), reverse=True)
    latest = folder / LATEST
    if latest.is_dir() and not latest.is_symlink():
        return [latest, *steps]  # a copy that knew no links
    if not os.path.lexists(latest):
        return steps
    try:
        newest = step_of(named_checkpoint(latest))
    except ValueError:
        return [latest, *steps]  # damage to be told
    if newest not in map(step_of, steps):
        steps.insert(0, latest)  # it names nothing that is there: likewise
    return sorted(steps, key=lambda path: path is not latest and step_of(path) > newest >= 0)


def named_checkpoint(folder: Path) -> Path:
    """The checkpoint that a run's ``latest`` or ``best`` names; any other folder as it is.

    These two, symbolic links or files with a name in them, are read as names and not followed. Raises ValueError, in
    one line, for one that holds anything else than the name ``step_*`` of a folder beside it.
    """
    path = Path(os.path.abspath(folder))
    if path.name not in (LATEST, BEST_LINK) or path.parent.name != CHECKPOINTS:
        return folder
    try:
        if not path.is_symlink() and (path.is_dir() or not path.exists()):
            return folder  # a copy of the run that knew no links; or none at all
        name = os.readlink(path) if path.is_symlink() else read_bounded(path, _MOST_NAME).decode().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{printable(folder)} can't be read ({printable(str(error))}); remove it") from error
    if not re.fullmatch("step_[0-9]+", name, re.ASCII):
        raise ValueError(
            f"{printable(folder)} names {printable(name[:_MOST_NAME])}, which is no checkpoint beside it, and is not "
            "followed; remove it"
        )
    return folder.with_name(name)


def point_to(latest: Path, final: Path) -> None:
    """Makes ``latest`` lead to a checkpoint: a symbolic link, or a file with its name where there are no links.

    A folder in its place, as a copy has that knew no links, is set aside. Raises OSError if nothing can be made;
    ``latest`` is gone then, for a stale one would be followed.
    """
    new, run = latest.with_name(f".{latest.name}.new"), latest.parent.parent
    try:
        if latest.is_dir() and not latest.is_symlink():
            aside = (latest.with_name(f"{latest.name}.before{number}") for number in itertools.count())
            rename(latest, next(path for path in aside if not os.path.lexists(path)), root=run)
        remove(new, root=run)
        try:
            link_to(new, final.name, root=run)
        except OSError:
            write_whole(new, final.name.encode(), root=run)
        rename(new, latest, root=run, over_link=True)
    except OSError:
        for left in (new, latest):
            with contextlib.suppress(OSError):
                remove(left, root=run)
        raise


def intact_before(folder: Path, problem: Callable[[Path], str | None] = damage) -> Path | None:
    """The newest of a run's checkpoints before this one in which there is no ``problem``."""
    try:
        folder = named_checkpoint(folder).resolve()
    except ValueError:
        return None
    earlier = [other for other in folder.parent.glob("step_*") if step_of(other) < step_of(folder)]
    return next((other for other in sorted(earlier, key=step_of, reverse=True) if problem(other) is None), None)
