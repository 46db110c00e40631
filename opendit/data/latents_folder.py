"""The folder that latents are written to: what it holds already, and its index, which several commands may change at a
time, each for its own size of the pictures."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from opendit.common.safe_files import open_to_write, remove
from opendit.data.latents_index import INDEX, TARS_VERSION, ShardForm, read_indexes, write_index

LOCK = ".index.lock"


@contextmanager
def index_locked(folder: Path, form: ShardForm) -> Iterator[None]:
    """Nobody else changes the folder's index meanwhile; for moments, not for as long as encoding takes. Of latents in
    files, which are of one size alone, nothing is locked."""
    if form.version != TARS_VERSION:
        yield
        return
    with open(open_to_write(folder / LOCK, os.O_WRONLY | os.O_CREAT), "w") as lock:
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with the process, however that ends
        yield


def take_index(folder: Path, settings: dict[str, Any], form: ShardForm) -> dict[str, str]:
    """Takes what is to be made out of the index, so that nobody reads it while it changes; returns the checksums that
    the index had of it.

    Raises ValueError if the folder holds something else, or latents of other data."""
    with index_locked(folder, form):
        indexes, others = _indexes(folder, settings, form)
        if others:
            write_index(folder, form.version, others)
        else:
            remove(folder / INDEX)
    mine = [index for index in indexes if index not in others]
    return {shard["file"]: shard["sha256"] for index in mine for shard in index["shards"] if "sha256" in shard}


def put_index(folder: Path, settings: dict[str, Any], form: ShardForm, index: dict[str, Any]) -> None:
    """Writes what was made into the folder's index, beside what others have put there by now. To be called under
    ``index_locked``.

    Raises ValueError as :func:`take_index`."""
    write_index(folder, form.version, [*_indexes(folder, settings, form)[1], index])


def _indexes(
    folder: Path, settings: dict[str, Any], form: ShardForm
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All indexes of a folder, and those of other sizes."""
    tars = form.version == TARS_VERSION
    if any(folder.glob("latents-*.safetensors" if tars else "latents-*.tar")):
        fix = "give --shard_size as a number of pictures to go on with them" if tars else "give --shard_size as 1GB"
        raise ValueError(f"--output {folder}: holds latents in {'files' if tars else 'tars'}; {fix}, or another folder")
    if not (folder / INDEX).exists():
        return [], []
    try:
        indexes = read_indexes(folder)
    except ValueError:  # damaged, or another version's: it is written anew
        indexes = []
    if indexes is None:
        raise ValueError(f"--output {folder}: holds an {INDEX} of something else; pass another folder")
    others = [index for index in indexes if tars and index["image_size"] != settings["image_size"]]
    for name in ("data", "vae", "video", "text"):
        for index in others:
            if index.get("settings", {}).get(name) != settings.get(name):
                raise ValueError(
                    f"--output {folder}: holds latents of {index['image_size']} px of other {name}; pass another folder"
                )
    return indexes, others


def complete_shards(folder: Path, settings: dict[str, Any], form: ShardForm) -> set[str]:
    """Names of the whole shards in a folder; raises ValueError if one was made with other settings."""
    kept = set()
    for path in sorted(folder.glob(form.pattern)):
        header = form.header(path)
        if header is None:
            continue  # a damaged one is remade
        other = sorted(key for key in settings if settings.get(key) != header[1].get(key))
        if other:
            changes = (f"{key} {str(header[1].get(key))[:12]} there, {str(settings[key])[:12]} now" for key in other)
            raise ValueError(
                f"--output {folder}: holds latents of other settings ({'; '.join(changes)}); pass another folder or "
                "empty this one"
            )
        kept.add(path.name)
    return kept
