"""The folders of runs, OUTPUTS/NNN-MODEL (000 to 999, then 1000 and on), and of the checkpoints in them.

outputs/000-DiT-XL-2/checkpoints/
  step_0000100/   a checkpoint (opendit/checkpoint/files.py)
  latest          a symbolic link to the newest, or a file with its name
  best            the same for the best one by a figure
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
_MOST_NAME = 255  # bytes of what stands in ``latest``
# What a run, and what it is logged to, write in its folder beside the lock.
WRITTEN = (
    "config.json",
    "config_damaged.json",
    "config.yaml",
    "log.jsonl",
    "tensorboard",
    "samples",
    "checkpoints",
    "validation.png",
)


WRITTEN += ("evaluation", "profile", "wandb", "mlflow_run_id")


_NAME = re.compile(r"([0-9]{3,})-(.+)", re.DOTALL | re.ASCII)


def run_folders(outputs: str | Path, model: str = "*") -> list[Path]:
    """The runs under a folder whose model's part of the name matches a pattern, by number, the newest last."""
    with contextlib.suppress(OSError):
        found = [(path, _NAME.fullmatch(path.name)) for path in Path(outputs).iterdir()]
        runs = [(int(name[1]), path) for path, name in found if name and fnmatch.fnmatchcase(name[2], model)]
        return [path for _, path in sorted(runs)]
    return []


def new_run_folder(outputs: str | Path, model: str) -> Path:
    """Makes OUTPUTS/NNN-MODEL with the number after the highest there is; one that starts at the same moment, of any
    model, gets another number. Call on one rank. Raises OSError if it can't be made."""
    outputs = Path(outputs)
    outputs.mkdir(parents=True, exist_ok=True)
    number = _next_number(outputs)
    while True:
        # One process alone makes the folder of this name, and so has the number, whatever its model is called.
        claim = outputs / f".{number:03d}"
        try:
            claim.mkdir()
        except FileExistsError:
            number += 1
            continue
        free = _next_number(outputs)
        if free <= number:
            break
        claim.rmdir()  # its number was taken between the look and the claim
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
    """The step in a checkpoint folder's name; -1 if it has none."""
    found = re.search("step_([0-9]+)", folder.name)
    return int(found[1]) if found else -1


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / folder_name(step)


def folder_name(step: int) -> str:
    return f"step_{step:07d}"


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


def newest_run(outputs: str, model: str | None = None, video: bool = False) -> Path | None:
    """The newest run folder (of ``model``, or of any clip model) that has a checkpoint, or None."""
    name = model.replace("/", "-") if model else "*-[1-8][1-8][1-8]" if video else "*"
    runs = reversed(run_folders(outputs, name))
    return next((run for run in runs if checkpoints_in(run)), None)


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint to go on from (it may be damaged): latest, or where a kill broke it the newest one there is; None
    without any."""
    for folder in checkpoints_in(run):
        with contextlib.suppress(ValueError):
            return named_checkpoint(folder).resolve()
    return None


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


# ------------------------------------------------------------------------------------------ where its files may be


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
