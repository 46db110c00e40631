"""Find, verify and load the checkpoint that ``--load`` names. A rank reads only the slices that it holds."""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.run_folders import (
    MANIFEST,
    checkpoints_in,
    named_checkpoint,
    newest_run,
    run_of,
    step_of,
)
from opendit.checkpoint.tensor_set import (
    AVERAGE_SET,
    MODEL_SET,
    STATE,
    VERSIONS,
    AnotherVersion,
    ShardedTensors,
    TensorSet,
    intact_before,
    not_finite,
    open_set,
    read_state,
    verified_files,
)
from opendit.config.names import SHARDS, WHOLE
from opendit.data.base import DataError
from opendit.parallel.engines import MOMENTS, Engine
from opendit.parallel.mesh import ControlGroup, Mesh

OPTIMIZER_FILE = r"optimizer_[0-9]{3,}\.safetensors"
Places = dict[str, tuple[TensorSet, str]]  # key -> (set that holds the tensor, name of the tensor in the set)


class Unloadable(DataError, ValueError):
    """Error for a checkpoint that can't be loaded although its files match the manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with intact files."""

    folder: Path  # the checkpoint's folder, without symbolic links
    state: dict[str, Any]  # the content of state.json
    files: list[str]  # all files in the manifest, verified
    damaged: tuple[str, ...] = ()  # a message for each newer, damaged checkpoint
    run: Path | None = None  # the run's folder, if writing is allowed (see ``run_of``)

    @property
    def model(self) -> Path:
        """The file or index of the master weights."""
        return self.folder / (MODEL_SET + VERSIONS[self.state["version"]])

    @property
    def averages(self) -> dict[float, str]:
        """Average's decay or width -> name of the average's file or index."""
        return {decay: name for name, decay in self.state["ema"]["files"].items()}

    @property
    def average(self) -> Path:
        """The file or index of the average to sample from."""
        return self.folder / (AVERAGE_SET + VERSIONS[self.state["version"]])

    def open(self, name: str) -> TensorSet:
        return open_set(self.folder / name)


def find_checkpoint(load: str, outputs: str, model: str, mesh: Mesh) -> Checkpoint | None:
    """Find and verify the checkpoint that ``--load`` names. All ranks must call this.

    ``latest`` or a run's folder means the run's newest intact checkpoint. A checkpoint's folder means this checkpoint
    only. Return None for ``latest`` if no run has a checkpoint yet. Raises ValueError on every rank if this model has
    no intact checkpoint there."""
    folders, one, problem = mesh.broadcast_object(_candidates(load, outputs, model) if mesh.is_main else None)
    if problem:
        raise ValueError(problem)
    if not folders:
        return None
    channel, damaged = ControlGroup(mesh), []
    for folder in folders:
        try:
            files, state = channel.together(lambda folder=folder: _verified(folder, mesh), ValueError, OSError)
        except AnotherVersion:  # the run's earlier checkpoints can't be loaded either
            raise
        except (ValueError, OSError) as error:
            damaged.append(str(error))
            continue
        if state["model"] != model:
            raise ValueError(
                f"--load {load}: {folder} is a checkpoint of {state['model']}, not of {model}; give its --model"
            )
        return Checkpoint(folder.resolve(), state, files, tuple(damaged), run_of(folder))
    if one:
        earlier = mesh.broadcast_object(intact_before(folders[0]) if mesh.is_main else None)
        instead = f"intact is --load {earlier}" if earlier else "there is no intact checkpoint before it"
        raise ValueError(f"--load: {damaged[0]}; {instead}")
    raise ValueError(
        f"--load {load}: {folders[0].parent.parent} has no intact checkpoint ({', '.join(damaged)}); load another run"
    )


def _candidates(load: str, outputs: str, model: str) -> tuple[list[Path], bool, str | None]:
    """Return (checkpoint folders in the order to try, True if only the first may be used, error message or None)."""
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


def _verified(folder: Path, mesh: Mesh) -> tuple[list[str], dict[str, Any]]:
    """Verify this rank's share of a checkpoint. Return (files, state). Raises AnotherVersion, OSError or ValueError."""
    try:
        read_state(folder)
    except AnotherVersion:  # reported first: another version may have another manifest
        raise
    except (ValueError, OSError):
        pass  # the checksums below report the damage
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
    return files, state


def _check_listed(folder: Path, names: Iterable[str], files: list[str]) -> None:
    for name in names:
        if name not in files:
            raise ValueError(f"{folder} is damaged: {MANIFEST} does not list {name!r:.80}, which is needed")


def load_checkpoint(checkpoint: Checkpoint, engine: Engine, ema: EMA) -> None:
    """Load a checkpoint into the engine and the averages. All ranks must call this. Each rank reads only its slices.

    The saved run may have had another plugin and number of ranks. An average with a new decay starts from the
    checkpoint's first average.

    Raises on every rank: Unloadable for missing tensors, FloatingPointError for tensors that are not finite, and
    OSError for unreadable files."""
    state = checkpoint.state
    with contextlib.ExitStack() as stack:

        def read(name: str) -> TensorSet:
            return stack.enter_context(checkpoint.open(name))

        model, average = read(checkpoint.model.name), checkpoint.average.name
        averages = [read(checkpoint.averages.get(decay, average)) for decay in ema.decays]
        if average.endswith(SHARDS):
            moment_files = [(f"{key}.", read(key + SHARDS)) for key in MOMENTS]
        else:
            names = sorted(name for name in checkpoint.files if re.fullmatch(OPTIMIZER_FILE, name))
            moment_files = [("", read(name)) for name in names]
        for file in (model, *averages):
            _places(checkpoint, [("", file)], engine.shapes)
        shapes = engine.shapes.items()
        moment_shapes = {f"{key}.{name}": shape for name, shape in shapes for key in engine.moments_of(name)}
        moments = _places(checkpoint, moment_files, moment_shapes)

        def load() -> None:
            try:
                for name in engine.shapes:
                    _load(checkpoint, engine, ema, name, model, averages, moments)
            except Unloadable:
                raise
            except ValueError as error:
                raise Unloadable(f"--load: {error}; load another checkpoint") from error

        # raises one rank's error on all ranks
        ControlGroup(engine.mesh).together(load, Unloadable, FloatingPointError, OSError)
    ema.updates.fill_(state["ema"]["updates"])
    ema.snapshots = list(state["ema"].get("snapshots", []))
    engine.load_scaler_state(state["scaler"])
    engine.finish_loading()


def _load(
    checkpoint: Checkpoint,
    engine: Engine,
    ema: EMA,
    name: str,
    model: TensorSet,
    averages: list[TensorSet],
    moments: Places,
) -> None:
    held, local = engine.held(name), engine.layout.local(name)
    master, means = model.read(name, held), [average.read(name, local) for average in averages]
    parts = {}
    for key in engine.moments_of(name):
        tensors, stored = moments[f"{key}.{name}"]
        parts[key] = tensors.read(stored, held)
    if not_finite({"weights": master, **parts, **{str(number): mean for number, mean in enumerate(means)}}):
        raise FloatingPointError(
            f"--load: in {checkpoint.folder} what is stored of {name} is not finite (NaN or infinity); --load an "
            "earlier checkpoint"
        )
    engine.set_master(name, master)
    for which, mean in enumerate(means):
        ema.set(which, name, mean)
    engine.set_moments(name, parts, checkpoint.state["optimizer_steps"])


def _places(checkpoint: Checkpoint, files: list[tuple[str, TensorSet]], shapes: dict[str, tuple[int, ...]]) -> Places:
    """Return prefix + name -> (set, name) for every tensor in ``files``, a list of (prefix, set). Raises Unloadable if
    a key occurs twice, or a key of ``shapes`` is missing or has another shape."""
    folder, found = checkpoint.folder, {}
    for prefix, file in files:
        for name in file:
            if prefix + name in found:
                raise Unloadable(f"--load: {folder} is damaged: two of its files hold {name}; load another checkpoint")
            found[prefix + name] = file, name
    for name, shape in shapes.items():
        if name not in found and name.startswith(MOMENTS[1]):
            raise Unloadable(
                f"--load: {folder} has no second moments of {name.partition('.')[2]}, which Muon has stepped; give "
                "--optimizer muon, or start from its weights with --pretrained"
            )
        if name not in found:
            raise Unloadable(f"--load: {folder} does not fit this model, it has no {name}; load another checkpoint")
        file, stored = found[name]
        if file.shapes[stored] != shape:
            raise Unloadable(
                f"--load: {folder} does not fit this model, {name} is {file.shapes[stored]} there and {shape} here; "
                "load another checkpoint"
            )
    return found
