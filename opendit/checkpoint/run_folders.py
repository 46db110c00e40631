"""Find, create and lock run folders, OUTPUTS/NNN-MODEL, and find their checkpoints.

A run's folder ``checkpoints`` holds ``step_0000100`` and so on (for their files see opendit/checkpoint/tensor_set.py).
``latest`` and ``best`` are symbolic links to a checkpoint, or files with a checkpoint's name."""

import contextlib
import errno
import fcntl
import fnmatch
import itertools
import json
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opendit.common import safe_files
from opendit.common.json_file import read_bounded
from opendit.common.safe_files import remove
from opendit.common.utils import printable

MANIFEST, CHECKPOINTS, LATEST, BEST_LINK = "manifest.json", "checkpoints", "latest", "best"
LOW = "low"  # low-noise network of a run with --expert both
AVERAGES = "averages"  # reconstructed power averages, and deleted checkpoints' averages
ENDED = "ended.json"  # how the run ended; see opendit/training/interrupt.py
_MOST_NAME = 255  # largest size of the file ``latest``, in bytes
# Further names that a run and its loggers write in the run's folder.
WRITTEN = (
    "config.json",
    "config_damaged.json",
    "config.yaml",
    ENDED,
    "log.jsonl",
    "tensorboard",
    "samples",
    "checkpoints",
    LOW,
    AVERAGES,
    "validation.png",
    "evaluation",
    "profile",
    "wandb",
    "mlflow_run_id",
)
_NAME = re.compile(r"([0-9]{3,})-(.+)", re.DOTALL | re.ASCII)


def run_folders(outputs: str | Path, model: str = "*") -> list[Path]:
    """Return the folders of runs in ``outputs``, in the order of their numbers. model: an fnmatch pattern for MODEL."""
    with contextlib.suppress(OSError):
        found = [(path, _NAME.fullmatch(path.name)) for path in Path(outputs).iterdir()]
        runs = [(int(name[1]), path) for path, name in found if name and fnmatch.fnmatchcase(name[2], model)]
        return [path for _, path in sorted(runs)]
    return []


def new_run_folder(outputs: str | Path, model: str) -> Path:
    """Create OUTPUTS/NNN-MODEL on one rank. NNN is one more than the highest number, and unique even if several runs
    start at once. Raises OSError."""
    outputs = Path(outputs)
    outputs.mkdir(parents=True, exist_ok=True)
    number = _next_number(outputs)
    while True:
        # Only one process can create this folder, so the number is unique for runs of all models.
        claim = outputs / f".{number:03d}"
        try:
            claim.mkdir()
        except FileExistsError:
            number += 1
            continue
        free = _next_number(outputs)
        if free <= number:
            break
        claim.rmdir()  # the number is no longer free
        number = free
    folder = outputs / f"{number:03d}-{model.replace('/', '-')}"
    try:
        claim.rename(folder)
    except OSError:
        with contextlib.suppress(OSError):
            claim.rmdir()
        raise
    return folder


def _next_number(outputs: Path) -> int:
    runs = run_folders(outputs)
    newest = _NAME.fullmatch(runs[-1].name) if runs else None
    return int(newest[1]) + 1 if newest else 0


# ------------------------------------------------------------------------------------------ a run's checkpoints


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name; -1 if there is none."""
    found = re.search("step_([0-9]+)", folder.name)
    return int(found[1]) if found else -1


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / folder_name(step)


def folder_name(step: int) -> str:
    return f"step_{step:07d}"


def checkpoints_in(run: Path) -> list[Path]:
    """Return a run's checkpoint folders, also damaged ones, in the order in which to try them.

    First comes the checkpoint that ``latest`` names, else the highest step. Earlier steps follow, the newest first.
    Later steps come last; they were written before the run was resumed at an earlier step."""
    folder = run / CHECKPOINTS
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    steps = [folder / name for name in names if re.fullmatch("step_[0-9]+", name)]
    # a checkpoint has only this name if save.put_in_place was killed between two renames
    steps += [folder / name for name in names if re.fullmatch(r"\.step_[0-9]+\.replaced", name)]
    steps.sort(key=lambda path: (step_of(path), path.name.startswith("step")), reverse=True)
    latest = folder / LATEST
    if latest.is_dir() and not latest.is_symlink():
        return [latest, *steps]  # in a copy without symbolic links, ``latest`` is a folder
    if not os.path.lexists(latest):
        return steps
    try:
        newest = step_of(named_checkpoint(latest))
    except ValueError:
        return [latest, *steps]  # loading reports the damage
    if newest not in map(step_of, steps):
        steps.insert(0, latest)  # loading reports that the folder is missing
    return sorted(steps, key=lambda path: path is not latest and step_of(path) > newest >= 0)


def named_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that a run's ``latest`` or ``best`` names. A link is read, but never followed.

    A path with another name is returned unchanged, and so is ``latest`` or ``best`` if it is a folder or missing.
    Raises ValueError if the named checkpoint is not ``step_*``."""
    path = Path(os.path.abspath(folder))
    if path.name not in (LATEST, BEST_LINK) or path.parent.name != CHECKPOINTS:
        return folder
    try:
        if not path.is_symlink() and (path.is_dir() or not path.exists()):
            return folder  # a copy without symbolic links, or no such folder
        name = os.readlink(path) if path.is_symlink() else read_bounded(path, _MOST_NAME).decode().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{printable(folder)} can't be read ({printable(str(error))}); remove it") from error
    if not re.fullmatch("step_[0-9]+", name, re.ASCII):
        raise ValueError(
            f"{printable(folder)} names {printable(name[:_MOST_NAME])}, which is no checkpoint beside it, and is not "
            "followed; remove it"
        )
    return folder.with_name(name)


def newest_run(outputs: str, model: str | None = None, video: bool = False) -> Path | None:
    """Return the newest run folder with a checkpoint, or None. model: only this model. video: only models for clips."""
    name = model.replace("/", "-") if model else "*-[1-8][1-8][1-8]" if video else "*"
    runs = reversed(run_folders(outputs, name))
    return next((run for run in runs if checkpoints_in(run)), None)


def checkpoint_at(
    ckpt: str | os.PathLike[str], outputs: str | os.PathLike[str], model: str | None = None, video: bool = False
) -> Path:
    """Return ``ckpt`` as a path. "latest" is the newest run under ``outputs`` with a checkpoint: a run of ``model``, or
    with ``video`` of any clip model. Raises ValueError if there is no such run."""
    if str(ckpt) != "latest":
        return Path(ckpt).expanduser()
    if (found := newest_run(os.fspath(Path(outputs).expanduser()), model, video)) is None:
        raise ValueError(f"--ckpt latest: no run with a checkpoint under --outputs {outputs}; give a path")
    return found


def newest_checkpoint(run: Path) -> Path | None:
    """Return the checkpoint to resume from, perhaps damaged, or None."""
    for folder in checkpoints_in(run):
        with contextlib.suppress(ValueError):
            return named_checkpoint(folder).resolve()
    return None


def low_noise_of(path: str | Path) -> Path | None:
    """Return the low-noise checkpoint that belongs to a high-noise one, even if the folder is missing. Return None
    unless the run trains both networks (``--expert both``). path: a run, a checkpoint, or a file in it."""
    path = Path(path)
    path = path.parent if path.is_file() else path
    for run in (path, path.parent.parent):
        if (run / LOW / CHECKPOINTS).is_dir():
            step = newest_checkpoint(run) if run == path else named_checkpoint(path)
            return None if step is None else run / LOW / CHECKPOINTS / step.name
    return None


def point_to(latest: Path, final: Path) -> None:
    """Make ``latest`` a symbolic link to a checkpoint, or a file with the checkpoint's name if links are impossible.

    If ``latest`` is a folder (a run copied without links), the folder is renamed. Raises OSError if neither a link nor
    a file can be written. ``latest`` is then removed, because an outdated link must not be used."""
    new, run = latest.with_name(f".{latest.name}.new"), latest.parent.parent
    try:
        if latest.is_dir() and not latest.is_symlink():
            aside = (latest.with_name(f"{latest.name}.before{number}") for number in itertools.count())
            safe_files.rename(latest, next(path for path in aside if not os.path.lexists(path)), root=run)
        remove(new, root=run)
        try:
            safe_files.link_to(new, final.name, root=run)
        except OSError:
            safe_files.write_whole(new, final.name.encode(), root=run)
        safe_files.rename(new, latest, root=run, over_link=True)
    except OSError:
        for left in (new, latest):
            with contextlib.suppress(OSError):
                remove(left, root=run)
        raise


# ------------------------------------------------------------------------------------------ allowed locations


def root_of(folder: Path) -> Path:
    """Return the folder that must contain a checkpoint's files: the run's folder, or the checkpoint's folder if there
    is no run. If ``checkpoints`` is a link to another disk, return the link's target."""
    folder = _in_run(folder)
    if folder.parent.name != CHECKPOINTS:
        return folder
    run, checkpoints = folder.parent.parent.resolve(), folder.parent.resolve()
    return run if checkpoints.is_relative_to(run) else checkpoints


def run_of(folder: Path) -> Path | None:
    """Return the run's folder for writing. None without a run, or if ``checkpoints`` is a link."""
    folder = _in_run(folder)
    own = folder.parent.name == CHECKPOINTS and not folder.parent.is_symlink()
    return folder.parent.parent.resolve() if own else None


def _in_run(folder: Path) -> Path:
    """Return a checkpoint's absolute path. Resolve links unless the parent folder is called ``checkpoints``."""
    folder = Path(os.path.abspath(folder))
    return folder if folder.parent.name == CHECKPOINTS else folder.resolve()


if TYPE_CHECKING:
    from opendit.parallel.mesh import Mesh  # for type checkers only, because it imports torch

logger = logging.getLogger(__name__)

LOCK = ".lock"
# Seconds between updates of the lock's time stamp. Updates show other machines that the owner is alive.
HEARTBEAT_S = 10.0
PATIENCE_S = 45.0  # seconds without an update after which another machine's lock can be replaced
EMPTY_S = 2.0  # seconds to wait for an owner's name in a new lock

_held: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


class Locked(ValueError):
    """Error if another process writes to the folder. The message names the process ID and the machine."""


class FolderLock:
    """A lock on a folder until :meth:`release` or the end of this process. Usable as a context manager.

    The file ``.lock`` names the owner. On the owner's machine, flock shows whether the owner is alive. For other
    machines, and on file systems without flock, the owner touches the file regularly. A lock without recent touches can
    be replaced. If no lock file can be written, nothing is locked. ``note`` is a message for the user about a replaced
    or missing lock, else None.

    flag, fix: for messages, the flag that named the folder, and advice. Raises Locked if another process holds the
    lock, and LinkRefused if the lock file is a symbolic link."""

    def __init__(self, folder: Path, flag: str, fix: str):
        self.folder, self.path, self.flag, self.fix = folder, folder / LOCK, flag, fix
        self.note: str | None = None
        self._file: int | None = None
        self._released = threading.Event()
        try:
            while not self._take():
                pass
        except safe_files.LinkRefused:
            raise
        except OSError as error:  # a full or read-only disk must not end the run
            self.note = f"{self.path} can't be made ({error.strerror}): nothing keeps another process out of {folder}"
            return
        _held.add(self)
        threading.Thread(target=_touch, args=(self.path, self._released), name="lock", daemon=True).start()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock. A second call has no effect."""
        file, self._file = self._file, None
        self._released.set()
        if file is None:
            return
        with contextlib.suppress(OSError):
            if _is(file, self.path):
                remove(self.path)
        os.close(file)

    def _take(self) -> bool:
        """Try to take the lock. Return False if the lock file has changed meanwhile: the caller must try again."""
        try:
            file, made = safe_files.open_to_write(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o644), True
        except FileExistsError:
            try:
                file, made = safe_files.open_to_write(self.path, os.O_RDWR), False
            except FileNotFoundError:
                return False
        try:
            flocked = self._flock(file)
            if not _is(file, self.path):  # another process released or replaced the lock after the open
                return False
            if not made:
                self.note = self._gone(_owner(file, wait=not flocked), file, flocked)
                if not flocked or os.fstat(file).st_nlink > 1:  # never write to a hard-linked file
                    if _is(file, self.path):
                        remove(self.path)
                    return False
            os.ftruncate(file, 0)
            # on a full disk, the lock stays empty, but flock holds it
            with contextlib.suppress(*[OSError] * flocked):
                owner = {"host": socket.gethostname(), "boot": boot(), "pid": os.getpid()}
                os.pwrite(file, json.dumps({**owner, "inode": os.fstat(file).st_ino}).encode(), 0)
            self._file, file = file, None
            return True
        finally:
            if file is not None:
                os.close(file)

    def _flock(self, file: int) -> bool:
        """Lock the file; return False if the file system has no locks. Raises Locked if another process holds it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._locked(_owner(file, wait=True)) from None
            return False
        return True

    def _gone(self, owner: dict[str, Any], file: int, flocked: bool) -> str | None:
        """Return a message if the owner has ended without releasing the lock. Raises Locked if the owner is alive."""
        if not owner:
            return None  # the owner was killed before writing a name
        who = _name(owner)
        if flocked and owner.get("boot") == boot():
            return f"{self.folder} was locked by {who}, which is gone: taken over"
        touched = os.fstat(file).st_mtime_ns
        logger.info(
            "%s is locked by %s; waiting up to %.0f s to see whether it is still there", self.folder, who, PATIENCE_S
        )
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            time.sleep(min(1.0, PATIENCE_S / 10))
            # opening a file makes NFS refresh the file's attributes
            with contextlib.suppress(FileNotFoundError), open(self.path) as again:
                if os.fstat(again.fileno()).st_mtime_ns != touched:
                    raise self._locked(owner)
        return f"{self.folder} was locked by {who}, which has not been seen for {PATIENCE_S:.0f} s: taken over"

    def _locked(self, owner: dict[str, Any]) -> Locked:
        remove = "" if owner.get("boot") == boot() else f"; if that process is gone, delete {self.path}"
        return Locked(f"{self.flag}: {self.folder} is in use: {_name(owner)} writes to it; {self.fix}{remove}")


def lock_folder(
    folder: Path, mesh: "Mesh", flag: str, fix: str, written: Collection[str] = ()
) -> tuple[contextlib.AbstractContextManager[Any], list[str]]:
    """Take a :class:`FolderLock` on rank 0 for all ranks of a job. Call on every rank.

    written: names that the job will write in the folder; none may be a link. Return a context manager that releases the
    lock, and messages for the user. Raises Locked or LinkRefused on every rank."""
    lock, problem = None, None
    if mesh.is_main:
        try:
            safe_files.refuse_links(folder, [LOCK, *written], flag)
            lock = FolderLock(folder, flag, fix)
        except (Locked, safe_files.LinkRefused) as error:
            problem = error
    problem = mesh.broadcast_object(problem)
    if problem:
        raise problem
    if lock is None:
        return contextlib.nullcontext(), []
    return lock, [lock.note] if lock.note else []


def _touch(path: Path, released: threading.Event) -> None:
    while not released.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):
            safe_files.touch(path)


def _is(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _owner(file: int, wait: bool) -> dict[str, Any]:
    """Read the owner from a lock file; {} without an owner. ``wait`` gives a new owner time to write its name."""
    end = time.monotonic() + (EMPTY_S if wait else 0)
    while True:
        with contextlib.suppress(ValueError, RecursionError):  # the file may hold anything
            owner = json.loads(os.pread(file, 4096, 0))
            if isinstance(owner, dict) and isinstance(owner.get("pid"), int):
                # A lock that was copied with its folder does not lock the copy.
                return owner if owner.get("inode") == os.fstat(file).st_ino else {}
        if time.monotonic() >= end:
            return {}
        time.sleep(0.05)


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner.get('host')}" if owner else "another process"


def boot() -> str:
    """Return an identifier of this machine's current boot, equal in all containers on the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def start_time(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; 0 if it has ended or is a zombie, None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0 if Path("/proc/self/stat").exists() else None
    except (OSError, IndexError, ValueError):
        return None


def _leave_to_parent() -> None:
    """Close the lock files in a forked child, such as a loader's worker, so that it doesn't keep the locks."""
    for lock in list(_held):
        file, lock._file = lock._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


os.register_at_fork(after_in_child=_leave_to_parent)
