"""The folders of runs, OUTPUTS/NNN-MODEL (000 to 999, then 1000 and on), and of the checkpoints in them.

A run's folder ``checkpoints`` holds ``step_0000100`` and so on (opendit/checkpoint/files.py says what is in one),
``latest``, a symbolic link to the newest or a file with its name, and ``best``, the same for the best by some figure.
"""

import contextlib
import fnmatch
import itertools
import os
import re
from pathlib import Path

from opendit.common.json_file import read_bounded
from opendit.common.safe_files import link_to, remove, rename, write_whole
from opendit.common.utils import printable

MANIFEST, CHECKPOINTS, LATEST, BEST_LINK = "manifest.json", "checkpoints", "latest", "best"
AVERAGES = "averages"  # what stays of deleted checkpoints of a run with --average power:...
ENDED = "ended.json"  # how the run ended; see opendit/training/run_end.py
_MOST_NAME = 255  # bytes in ``latest``
# What a run and its loggers write in its folder, beside the lock.
WRITTEN = (
    "config.json",
    "config_damaged.json",
    "config.yaml",
    ENDED,
    "log.jsonl",
    "tensorboard",
    "samples",
    "checkpoints",
    AVERAGES,
    "validation.png",
    "evaluation",
    "profile",
    "wandb",
    "mlflow_run_id",
)
_NAME = re.compile(r"([0-9]{3,})-(.+)", re.DOTALL | re.ASCII)


def run_folders(outputs: str | Path, model: str = "*") -> list[Path]:
    """Return the folders of runs below ``outputs``, in the order of their numbers.

    model: a pattern for the model's part of their names.
    """
    with contextlib.suppress(OSError):
        found = [(path, _NAME.fullmatch(path.name)) for path in Path(outputs).iterdir()]
        runs = [(int(name[1]), path) for path, name in found if name and fnmatch.fnmatchcase(name[2], model)]
        return [path for _, path in sorted(runs)]
    return []


def new_run_folder(outputs: str | Path, model: str) -> Path:
    """Make OUTPUTS/NNN-MODEL, with the number after the highest there is.

    Runs that start at the same moment get different numbers, whatever their models. Call on one rank. Raises OSError.
    """
    outputs = Path(outputs)
    outputs.mkdir(parents=True, exist_ok=True)
    number = _next_number(outputs)
    while True:
        # Only one process can make this folder, so the number is its own whatever its model is called.
        claim = outputs / f".{number:03d}"
        try:
            claim.mkdir()
        except FileExistsError:
            number += 1
            continue
        free = _next_number(outputs)
        if free <= number:
            break
        claim.rmdir()  # another run took the number before it was claimed
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
    """Return the checkpoint folders of a run, damaged ones included, in the order in which to try loading them.

    First comes the one that ``latest`` names, then the earlier ones, the newest first, and last those of later steps,
    which belong to an attempt that was abandoned by resuming from before it. Without ``latest`` the highest step is
    the newest.
    """
    folder = run / CHECKPOINTS
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    steps = [folder / name for name in names if re.fullmatch("step_[0-9]+", name)]
    # A kill between the two renames of save.put_in_place leaves a checkpoint under this name only.
    steps += [folder / name for name in names if re.fullmatch(r"\.step_[0-9]+\.replaced", name)]
    steps.sort(key=lambda path: (step_of(path), path.name.startswith("step")), reverse=True)
    latest = folder / LATEST
    if latest.is_dir() and not latest.is_symlink():
        return [latest, *steps]  # a copy of the run without links
    if not os.path.lexists(latest):
        return steps
    try:
        newest = step_of(named_checkpoint(latest))
    except ValueError:
        return [latest, *steps]  # damage, to be reported by whoever loads it
    if newest not in map(step_of, steps):
        steps.insert(0, latest)  # it names a folder that is gone: likewise
    return sorted(steps, key=lambda path: path is not latest and step_of(path) > newest >= 0)


def named_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that a run's ``latest`` or ``best`` names, and any other folder as it is.

    Both are symbolic links, or files with a name in them. They are read as names, never followed. Raises ValueError, in
    one line, for one that holds anything but the name ``step_*`` of a folder beside it.
    """
    path = Path(os.path.abspath(folder))
    if path.name not in (LATEST, BEST_LINK) or path.parent.name != CHECKPOINTS:
        return folder
    try:
        if not path.is_symlink() and (path.is_dir() or not path.exists()):
            return folder  # a copy of the run without links; or there is none
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
    """Return the newest run folder that has a checkpoint, or None.

    model: whose runs to look at. video: without a model, look at those of any model for clips.
    """
    name = model.replace("/", "-") if model else "*-[1-8][1-8][1-8]" if video else "*"
    runs = reversed(run_folders(outputs, name))
    return next((run for run in runs if checkpoints_in(run)), None)


def newest_checkpoint(run: Path) -> Path | None:
    """Return the checkpoint to resume from, which may be damaged; None if there is none."""
    for folder in checkpoints_in(run):
        with contextlib.suppress(ValueError):
            return named_checkpoint(folder).resolve()
    return None


def point_to(latest: Path, final: Path) -> None:
    """Make ``latest`` a symbolic link to a checkpoint, or a file with its name where links can't be made.

    A folder called ``latest``, which a copy without links has, is renamed. Raises OSError if neither can be made; then
    ``latest`` is gone, for an outdated one would be followed.
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


# ------------------------------------------------------------------------------------------ where its files may be


def root_of(folder: Path) -> Path:
    """Return the folder that the files of a checkpoint must lie in: its run's, or its own if it is in no run.

    Where ``checkpoints`` is a link out of the run, which its user made to keep them on another disk, it is that folder.
    """
    folder = _in_run(folder)
    if folder.parent.name != CHECKPOINTS:
        return folder
    run, checkpoints = folder.parent.parent.resolve(), folder.parent.resolve()
    return run if checkpoints.is_relative_to(run) else checkpoints


def run_of(folder: Path) -> Path | None:
    """Return the folder of the run that a checkpoint is in, if it may be written to.

    None if the checkpoint is in no run, or if ``checkpoints`` is a link: what it leads to is only read.
    """
    folder = _in_run(folder)
    own = folder.parent.name == CHECKPOINTS and not folder.parent.is_symlink()
    return folder.parent.parent.resolve() if own else None


def _in_run(folder: Path) -> Path:
    """Return a checkpoint's folder by its own name if that is below ``checkpoints``, else with links resolved."""
    folder = Path(os.path.abspath(folder))
    return folder if folder.parent.name == CHECKPOINTS else folder.resolve()
