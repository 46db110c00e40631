"""Checkpoints on disk: where they are, how they are found and verified. (opendit/checkpoint/saving.py writes them,
opendit/checkpoint/loading.py loads them.)

    step_0000100/
      model.safetensors        fp32 master weights and buffers, the configuration in the metadata
      ema.safetensors          the same of the moving average; ema_DECAY.safetensors of further ones
      optimizer_RRR.safetensors  exp_avg.NAME and exp_avg_sq.NAME of the parameters that rank RRR wrote
      state.json               counters, loss scaler, what the run was
      manifest.json            size and SHA-256 of every other file

One of shards (``--checkpoint_format sharded``) has in the place of the safetensors files, for each of the sets SET =
model, ema, ema_DECAY, exp_avg, exp_avg_sq:

      SET.shards.json          the index: which file holds which slices of which tensor (opendit/checkpoint/index.py)
      SET-shard-RRRRR-of-NNNNN.safetensors  what rank RRRRR of NNNNN wrote

Names and shapes are canonical whatever the plugin and the number of ranks. So a checkpoint resumes exactly under the
same plugin and world, and under others up to rounding: masters and moments are stored in fp32, and everything random is
keyed by (seed, step, sample), so that data order, flips and noise follow from the step number alone.
"""

import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from opendit.checkpoint.copying import AVERAGE_SET, MODEL_SET
from opendit.checkpoint.files import (
    LATEST,
    MANIFEST,
    FileId,
    checkpoints_in,
    file_id,
    intact_before,
    named_checkpoint,
    point_to,
    root_of,
    run_of,
    step_of,
    verified_files,
)
from opendit.checkpoint.run_folders import run_folders
from opendit.checkpoint.schema import ANY_STATE, STATE_FILE
from opendit.checkpoint.shards import ShardFiles
from opendit.checkpoint.tensor_set import ShardedTensors, TensorSet, open_set
from opendit.checkpoint.whole import WholeTensorFiles
from opendit.common.json_file import read_file
from opendit.common.safe_files import remove_tree, rename, sync_folder
from opendit.common.tensor_files import open_safetensors
from opendit.config.checkpoints import SHARDS, WHOLE
from opendit.data.base import DataError
from opendit.parallel.control_group import ControlGroup
from opendit.parallel.engines import MOMENTS
from opendit.parallel.mesh import Mesh

STATE = "state.json"
VERSIONS = {WholeTensorFiles.version: WHOLE, ShardFiles.version: SHARDS}  # of state.json: what names of files end with


# ------------------------------------------------------------------------------------------ runs and their folders


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


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are intact.

    folder: with no symbolic link in it. state: its counters. files: which files were verified, by name: those of the
    manifest. damaged: why others, newer ones of the run, were not taken. run: as of ``run_of``.
    """

    folder: Path
    state: dict[str, Any]
    files: dict[str, FileId]
    damaged: tuple[str, ...] = ()
    run: Path | None = None

    @property
    def model(self) -> Path:
        """The file that stands for the master weights."""
        return self.folder / (MODEL_SET + VERSIONS[self.state["version"]])

    @property
    def averages(self) -> dict[float, str]:
        """The name of the file that stands for the average of a decay."""
        return {decay: name for name, decay in self.state["ema"]["files"].items()}

    @property
    def average(self) -> Path:
        """The file that stands for the average to sample from."""
        return self.folder / (AVERAGE_SET + VERSIONS[self.state["version"]])

    def open(self, name: str) -> TensorSet:
        """The tensors of one of its files or indices. Raises Unloadable, now or when they are read, if that is not as
        it was verified."""
        self._same(self.folder / name)
        return open_set(self.folder / name, self._open_file)

    def _same(self, path: Path) -> None:
        if path.name not in self.files or file_id(path, root_of(self.folder)) != self.files[path.name]:
            raise Unloadable(f"--load: {path} was changed after it had been verified; start the run again")

    def _open_file(self, path: Path) -> safe_open:
        self._same(path)
        return open_safetensors(path)


def find_checkpoint(load: str, outputs: str, model: str, mesh: Mesh) -> Checkpoint | None:
    """The checkpoint that ``--load`` means, verified; None for ``latest`` when there is none yet. Call on every rank.

    ``latest``, and a run's folder, mean the newest intact checkpoint of that run; a checkpoint's folder means that one.

    Raises:
        ValueError: on every rank. A path without a checkpoint, a damaged checkpoint, no intact one, or another model's.
    """
    folders, one, problem = mesh.broadcast_object(_candidates(load, outputs, model) if mesh.is_main else None)
    if problem:
        raise ValueError(problem)
    if not folders:
        return None
    channel, damaged = ControlGroup(mesh), []
    for folder in folders:
        files, state, problem, final = _verified(folder, mesh)
        found = channel.gather((problem, final))
        problem, final = next((rank for rank in found if rank[0]), (None, False))
        if final:
            raise ValueError(problem)
        if problem is None:
            if state["model"] != model:
                raise ValueError(
                    f"--load {load}: {folder} is a checkpoint of {state['model']}, not of {model}; give its --model"
                )
            return Checkpoint(folder.resolve(), state, files, tuple(damaged), run_of(folder))
        damaged.append(problem)
    if one:
        earlier = mesh.broadcast_object(intact_before(folders[0]) if mesh.is_main else None)
        instead = f"intact is --load {earlier}" if earlier else "there is no intact checkpoint before it"
        raise ValueError(f"--load: {damaged[0]}; {instead}")
    raise ValueError(
        f"--load {load}: {folders[0].parent.parent} has no intact checkpoint ({', '.join(damaged)}); load another run"
    )


def _candidates(load: str, outputs: str, model: str) -> tuple[list[Path], bool, str | None]:
    """(the folders that --load may mean, the first choice first; whether it names this one and no other; what is wrong
    with it)."""
    looked_for = "a run folder, a step_* folder or latest"
    try:
        path = newest_run(outputs, model) if load == "latest" else Path(os.path.abspath(load))
        if path is None:
            return [], False, None
        if folders := checkpoints_in(path):
            return folders, False, None
        path = named_checkpoint(path)
        if path.is_dir() and (
            step_of(path.resolve()) >= 0
            or any((path / n).exists() for n in (MANIFEST, STATE, MODEL_SET + WHOLE, AVERAGE_SET + WHOLE))
        ):
            real = path.resolve()
            return [real if real.parent == path.parent.resolve() else path], True, None
        if path.is_file() and (path.parent / MANIFEST).exists():
            looked_for = f"give the checkpoint's folder, {path.parent}"
    except OSError as error:
        looked_for = f"{error.filename}: {error.strerror}"
    except ValueError as error:
        return [], True, f"--load: {error}"
    return [], True, f"--load {load}: no checkpoint there ({looked_for})"


def _verified(folder: Path, mesh: Mesh) -> tuple[dict[str, FileId], dict[str, Any], str | None, bool]:
    """This rank's share of verifying a checkpoint: its files, its state, what is wrong with it, and whether an earlier
    checkpoint is no answer to that."""
    try:
        files = verified_files(folder, mesh.rank, mesh.world_size)
        state = read_state(folder)
        ending = VERSIONS[state["version"]]
        sets = [MODEL_SET + ending, AVERAGE_SET + ending, *state["ema"]["files"]]
        if ending == SHARDS:
            sets += [moment + ending for moment in MOMENTS]
        _check_listed(folder, (STATE, *sets), files)
        for name in sets if ending == SHARDS else ():
            with open_set(folder / name) as tensors:
                if not isinstance(tensors, ShardedTensors) or tensors.index.step != state["step"]:
                    raise ValueError(f"{folder / name} is not the index of step {state['step']}")
                _check_listed(folder, tensors.index.files, files)
                tensors.check_files(mesh.rank, mesh.world_size)
    except (ValueError, OSError) as error:
        other = _another_version(folder)  # which may have another kind of manifest
        return {}, {}, other or str(error), other is not None
    return files, state, None, False


def _check_listed(folder: Path, names: Iterable[str], files: dict[str, FileId]) -> None:
    for name in names:
        if name not in files:
            raise ValueError(f"{folder} is damaged: {MANIFEST} does not list {name!r:.80}, which is needed")


def _another_version(folder: Path) -> str | None:
    try:
        read_state(folder)
    except AnotherVersion as error:
        return str(error)
    except (ValueError, OSError):
        pass
    return None


class Unloadable(DataError, ValueError):
    """A checkpoint that is as it was written and can't be loaded; the message tells the user why."""


class AnotherVersion(ValueError):
    """A checkpoint that is intact and can't be read by this version of the program."""


def read_state(folder: Path) -> dict[str, Any]:
    """The counters of a checkpoint. Raises ValueError if they can't be read, AnotherVersion if they are of one."""
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


# ------------------------------------------------------------------------------------------ the folder of checkpoints


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / folder_name(step)


def folder_name(step: int) -> str:
    return f"step_{step:07d}"


def incomplete(final: Path) -> Path:
    """Return the folder that a checkpoint is written to until it is complete."""
    return final.with_name(f".{final.name}.incomplete")


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def put_in_place(final: Path) -> OSError | None:
    """Renames a complete checkpoint to its name, then moves ``latest``; at every moment there is one to load.

    Returns what kept ``latest`` from being moved, which takes nothing from the checkpoint; None if it was. Raises
    OSError if the checkpoint could not be put in its place.
    """
    run = final.parent.parent
    if os.path.lexists(final):  # of an earlier attempt that went on from before this step; it may be damaged
        remove_tree(_replaced(final), root=run)
        rename(final, _replaced(final), root=run)
    rename(incomplete(final), final, root=run)
    try:
        point_to(final.with_name(LATEST), final)
        problem = None
    except OSError as error:
        problem = error
    sync_folder(final.parent, root=run)
    remove_tree(_replaced(final), root=run)
    return problem


def tidy(checkpoints: Path, in_use: Path | None = None) -> Path | None:
    """Removes what a killed save or deletion left behind; returns where the checkpoint in use is now. Call on one rank,
    when nothing is being saved."""
    run = checkpoints.parent
    for left in (*checkpoints.glob(".step_*.incomplete"), *checkpoints.glob(".step_*.deleted")):
        remove_tree(left, root=run)
    for left in checkpoints.glob(".step_*.replaced"):
        final = step_folder(checkpoints, step_of(left))
        if left == in_use:  # what took its place is damaged, or was never complete
            remove_tree(final, root=run)
        if os.path.lexists(final):
            remove_tree(left, root=run)
        else:
            rename(left, final, root=run)
            in_use = final if left == in_use else in_use
    return in_use


def prune(checkpoints: Path, keep: int, newest: Path, kept: Collection[Path | None]) -> None:
    """Deletes all but the ``keep`` newest checkpoints up to ``newest`` (0: none), never one that is ``kept``.

    Later steps, of an attempt that this run went back from, are left alone until they are written anew.
    """
    found = (path for path in checkpoints.glob("step_*") if 0 <= step_of(path) <= step_of(newest))
    for old in sorted(found, key=step_of, reverse=True)[keep:] if keep else ():
        if old not in kept:
            gone = old.with_name(f".{old.name}.deleted")  # at once: half a folder would be a damaged checkpoint
            with contextlib.suppress(OSError):
                rename(old, gone, root=checkpoints.parent)
                remove_tree(gone, root=checkpoints.parent)
