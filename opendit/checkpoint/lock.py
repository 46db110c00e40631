"""Lock a folder, so that only one process writes to it.

The lock file names the owner. The lock ends when the owner's process ends.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opendit.common.safe_files import LinkRefused, open_to_write, refuse_links, remove, touch

if TYPE_CHECKING:
    from opendit.parallel.mesh import Mesh  # only for type checkers, because it imports torch

logger = logging.getLogger(__name__)

LOCK = ".lock"
# seconds between two updates of the lock file's time stamp, which show other machines that the owner is alive
HEARTBEAT_S = 10.0
PATIENCE_S = 45.0  # seconds without a new time stamp after which another machine's lock is taken over
EMPTY_S = 2.0  # maximum wait in seconds for an owner to write its name into a new lock

_held: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


class Locked(ValueError):
    """Raised if another process writes to the folder. The message names the process ID and the machine."""


class FolderLock:
    """A lock on a folder until :meth:`release` or the end of this process. Usable as a context manager.

    The file ``.lock`` in the folder names the owner. On the owner's machine, flock shows whether the owner is alive. If
    the file system has no flock, the owner's process ID and start time are compared instead. For other machines, the
    owner touches the file regularly; a lock that is no longer touched is taken over.

    Args:
        folder: an existing folder.
        flag: the flag that named the folder, for messages.
        fix: advice for the user, for messages.

    Attributes:
        note: a message for the user about taking the lock; usually None.

    Raises:
        Locked: another process holds the lock.
        LinkRefused: the lock file is a symbolic link.
    """

    def __init__(self, folder: Path, flag: str, fix: str):
        self.folder, self.path, self.flag, self.fix = folder, folder / LOCK, flag, fix
        self.note: str | None = None
        self._file: int | None = None
        self._released = threading.Event()
        try:
            while not self._take():
                pass
        except LinkRefused:
            raise
        except OSError as error:  # a full or read-only disk is reported, and does not end a run
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
        """Try to take the lock. Return False if the lock file changed meanwhile and the caller must try again."""
        try:
            file, made = open_to_write(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o644), True
        except FileExistsError:
            try:
                file, made = open_to_write(self.path, os.O_RDWR), False
            except FileNotFoundError:
                return False
        try:
            flocked = self._flock(file)
            if not _is(file, self.path):  # another process released or replaced the lock after the open
                return False
            if not made:
                owner = _owner(file, wait=not flocked)
                self.note = self._gone(owner, file, flocked)
                if not flocked or os.fstat(file).st_nlink > 1:  # never write to a hard-linked file
                    self._remove(file)
                    return False
            os.ftruncate(file, 0)
            # an error of a full disk is ignored: the lock stays empty, but flock holds it
            with contextlib.suppress(*[OSError] * flocked):
                os.pwrite(file, json.dumps({**_this_process(), "inode": os.fstat(file).st_ino}).encode(), 0)
            self._file, file = file, None
            return True
        finally:
            if file is not None:
                os.close(file)

    def _remove(self, file: int) -> None:
        """Delete an abandoned lock, unless another process has already replaced it."""
        busy = self.path.with_name(f"{LOCK}.removal")
        try:
            os.close(open_to_write(busy, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:  # another process is also removing the lock, or was killed while removing it
            time.sleep(0.05)
            with contextlib.suppress(FileNotFoundError):
                if abs(time.time() - busy.lstat().st_mtime) > PATIENCE_S:
                    remove(busy)
            return
        if _is(file, self.path):
            remove(self.path)
        remove(busy)

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
        """Return a message about an owner that has ended and left its lock. Raises Locked if the owner is alive."""
        if not owner:
            return None  # the owner was killed before it wrote its name
        here, who = _this_process(), _name(owner)
        if owner.get("boot") == here["boot"] and (flocked or owner.get("namespace") == here["namespace"]):
            if not flocked and start_time(owner["pid"]) in (owner.get("started"), None):
                raise self._locked(owner)
            return f"{self.folder} was locked by {who}, which is gone: taken over"
        touched = os.fstat(file).st_mtime_ns
        logger.info(
            "%s is locked by %s; waiting up to %.0f s to see whether it is still there", self.folder, who, PATIENCE_S
        )
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            time.sleep(min(1.0, PATIENCE_S / 10))
            with (
                contextlib.suppress(FileNotFoundError),
                open(self.path) as again,
            ):  # opening a file makes NFS refresh the file's attributes
                if os.fstat(again.fileno()).st_mtime_ns != touched:
                    raise self._locked(owner)
        return f"{self.folder} was locked by {who}, which has not been seen for {PATIENCE_S:.0f} s: taken over"

    def _locked(self, owner: dict[str, Any]) -> Locked:
        remove = "" if owner.get("boot") == boot() else f"; if that process is gone, delete {self.path}"
        return Locked(f"{self.flag}: {self.folder} is in use: {_name(owner)} writes to it; {self.fix}{remove}")


def lock_folder(
    folder: Path, mesh: "Mesh", flag: str, fix: str, written: Collection[str] = ()
) -> tuple[contextlib.AbstractContextManager[Any], list[str]]:
    """Take a :class:`FolderLock` for all ranks of a job. Rank 0 holds the lock. Call on every rank.

    Args:
        written: names that the job will write in the folder. None of these may be a symbolic link.

    Returns:
        A context manager that releases the lock, and messages for the user.

    Raises:
        Locked, LinkRefused: on every rank.
    """
    lock, problem = None, None
    if mesh.is_main:
        try:
            refuse_links(folder, [LOCK, *written], flag)
            lock = FolderLock(folder, flag, fix)
        except (Locked, LinkRefused) as error:
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
            touch(path)


def _is(file: int, path: Path) -> bool:
    """Return True if ``path`` still names the open file."""
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
                # A lock that was copied along with its folder does not lock the copy.
                return owner if owner.get("inode") == os.fstat(file).st_ino else {}
        if time.monotonic() >= end:
            return {}
        time.sleep(0.05)


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner.get('host')}" if owner else "another process"


def _this_process() -> dict[str, Any]:
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    pid = os.getpid()
    here = {"host": socket.gethostname(), "boot": boot(), "namespace": namespace}
    return {**here, "pid": pid, "started": start_time(pid)}


def boot() -> str:
    """Return an identifier of this machine's current boot, equal in all containers on the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def start_time(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot; 0 if it has ended or is a zombie, None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0 if Path("/proc/self/stat").exists() else None
    except (OSError, IndexError, ValueError):
        return None


def _leave_to_parent() -> None:
    """Close the lock files in a forked child, such as a data loader's worker. Only the owner process may keep a lock
    alive."""
    for lock in list(_held):
        file, lock._file = lock._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


os.register_at_fork(after_in_child=_leave_to_parent)
