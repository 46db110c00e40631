"""Keep facts about a data set's media on this machine: one process computes them, the others map them."""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from opendit.common.safe_files import creating, open_to_write, remove_tree, rename, write_whole

FOLDER = "OPENDIT_SIZE_CACHE"  # of the environment
DEFAULT_FOLDER = "~/.cache/opendit/sizes"
LARGE = 2**20  # rows from which on what is known of each is kept in a file
_ABOUT = "about.json"


@contextmanager
def locked(name: str) -> Iterator[Path | None]:
    """Hold the lock ``name`` among the processes of this machine, and return the cache's folder; None if it can't be
    written. A lock ends with its process, however that ends."""
    folder, lock = Path(os.environ.get(FOLDER) or DEFAULT_FOLDER).expanduser(), None
    try:
        path = folder / f"{name}.lock"
        lock = open(open_to_write(path, os.O_WRONLY | os.O_CREAT, make=True), "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        folder = None
    try:
        yield folder
    finally:
        if lock is not None:
            lock.close()


class KeptArrays(NamedTuple):
    """Arrays by name, mapped from files where they were kept; about: what JSON can hold."""

    arrays: dict[str, np.ndarray]
    about: dict[str, Any]


def kept(name: str, make: Callable[[], KeptArrays]) -> KeptArrays:
    """Return ``make()``, which one process of this machine calls once, and whose result all map.

    name: a hash of everything that decides the result. If nothing can be written, or what was written is damaged, it is
    made anew.
    """
    with locked(name) as cache:
        folder = None if cache is None else cache / f"{name}.arrays"
        if folder is not None and (found := _read(folder)) is not None:
            return found
        made = make()
        if folder is None:
            return made
        try:
            _write(folder, made)
        except OSError:
            return made
        again = _read(folder)
        return made if again is None else again


def kept_array(rows: int, name: Callable[[], str], make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return ``make()``, (rows,); with ``LARGE`` rows or more :func:`kept` under ``name()``."""
    if rows < LARGE:
        return make()
    return kept(name(), lambda: KeptArrays({"array": make()}, {})).arrays["array"]


def _write(folder: Path, made: KeptArrays) -> None:
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, array in made.arrays.items():
            with creating(work / f"{name}.npy") as file:
                np.save(file, array)
        shapes = {name: [str(array.dtype), len(array)] for name, array in made.arrays.items()}
        write_whole(work / _ABOUT, json.dumps({"arrays": shapes, "about": made.about}).encode())
        remove_tree(folder)  # one that is damaged
        rename(work, folder)
    finally:
        remove_tree(work)


def _read(folder: Path) -> KeptArrays | None:
    try:
        about = json.loads((folder / _ABOUT).read_text())
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in about["arrays"]}
        fits = all([str(a.dtype), len(a)] == about["arrays"][name] for name, a in arrays.items())
        return KeptArrays(arrays, about["about"]) if fits else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
