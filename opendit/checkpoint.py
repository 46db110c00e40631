"""Checkpoints on disk: where they are, how they are found, verified and loaded. (opendit/saving.py writes them.)

    step_0000100/
      model.safetensors        fp32 master weights and buffers, the configuration in the metadata
      ema.safetensors          the same of the moving average; ema_DECAY.safetensors of further ones
      optimizer_RRR.safetensors  exp_avg.NAME and exp_avg_sq.NAME of the parameters that rank RRR wrote
      state.json               counters, loss scaler, what the run was
      manifest.json            size and SHA-256 of every other file

Tensors are full and canonical whatever the plugin and the number of ranks. So a checkpoint resumes exactly under the
same plugin and world, and under others up to rounding: masters and moments are stored in fp32, and everything random is
keyed by (seed, step, sample), so that data order, flips and noise follow from the step number alone.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

from opendit.ema import EMA
from opendit.models.pretrained import read_info
from opendit.parallel.engine import MOMENTS, Engine
from opendit.parallel.mesh import Mesh
from opendit.parallel.side_channel import SideChannel
from opendit.state_files import damage, intact_before, sync_folder

FORMAT_VERSION = 2
MODEL, AVERAGE, STATE = "model.safetensors", "ema.safetensors", "state.json"


def average_files(decays: tuple[float, ...]) -> list[str]:
    """The file of every average: the first is the default one of sampling."""
    return [AVERAGE, *(f"ema_{decay}.safetensors" for decay in decays[1:])]


# ------------------------------------------------------------------------------------------ runs and their folders


def run_folder(outputs: str, model: str) -> Path:
    """A new OUTPUTS/NNN-MODEL, numbered after the existing ones. Call on one rank."""
    numbers = [int(p.name[:3]) for p in Path(outputs).glob("[0-9][0-9][0-9]-*")]
    folder = Path(outputs) / f"{max(numbers, default=-1) + 1:03d}-{model.replace('/', '-')}"
    folder.mkdir(parents=True)
    return folder


def newest_run(outputs: str, model: str | None = None, video: bool = False) -> Path | None:
    """The newest run folder (of ``model``, or of any clip model) that has a checkpoint, or None."""
    name = model.replace("/", "-") if model else "*-[1-8][1-8][1-8]" if video else "*"
    runs = sorted(Path(outputs).glob(f"[0-9][0-9][0-9]-{name}"))
    return next((run for run in reversed(runs) if newest_checkpoint(run) is not None), None)


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint to go on from: latest, or where a kill broke it the newest one there is; None without any."""
    checkpoints = run / "checkpoints"
    steps, replaced = (sorted(checkpoints.glob(pattern), reverse=True) for pattern in ("step_*", ".step_*.replaced"))
    found = (folder for folder in (checkpoints / "latest", *steps, *replaced) if (folder / STATE).is_file())
    return next((folder.resolve() for folder in found), None)


def find_checkpoint(load: str, outputs: str, model: str) -> Path | None:
    """The checkpoint folder that ``--load`` means; None for ``latest`` when there is none yet.

    Raises:
        ValueError: a path without a checkpoint, or a checkpoint of another model.
    """
    path = newest_run(outputs, model) if load == "latest" else Path(load)
    if path is None:
        return None
    folder = path.resolve() if (path / STATE).is_file() else newest_checkpoint(path)
    if folder is None:
        raise ValueError(f"--load {load}: no checkpoint there (a run folder, a step_* folder or latest)")
    found = read_state(folder)["model"]
    if found != model:
        raise ValueError(f"--load {load}: {folder} is a checkpoint of {found}, not of --model {model}")
    return folder


def read_state(folder: Path) -> dict:
    """The counters of a checkpoint. Raises ValueError if they can't be read or are of another version."""
    try:
        state = json.loads((folder / STATE).read_text())
        version = state["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / STATE} can't be read ({error}); {_what_to_load_instead(folder)}") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has checkpoint version {version}, this program reads {FORMAT_VERSION}: resume it with "
            f"the OpenDiT that wrote it, or start a new run from its weights with --pretrained {folder / AVERAGE}"
        )
    return state


def checkpoint_config(folder: Path) -> dict:
    """The model configuration inside a checkpoint, without reading weights."""
    return read_info(folder / MODEL)["config"]


# ------------------------------------------------------------------------------------------ verifying and loading


def verify(folder: Path, mesh: Mesh) -> None:
    """Compares all files with the manifest; the ranks share the reading. Call on every rank.

    Raises:
        ValueError: on every rank, naming the damaged or missing file and the newest checkpoint before that is intact.
    """
    found = SideChannel(mesh).gather(damage(folder, mesh.rank, mesh.world_size))
    problem = next((text for text in found if text), None)
    if problem:
        raise ValueError(f"--load: {problem}; {_what_to_load_instead(folder)}")


def _what_to_load_instead(folder: Path) -> str:
    intact = intact_before(folder)
    return f"intact is --load {intact}" if intact else "there is no intact checkpoint before it"


def load_checkpoint(folder: Path, engine: Engine, ema: EMA) -> dict:
    """Puts a verified checkpoint into the engine and the averages; call on every rank. Returns its state.

    A decay that the checkpoint has no average of goes on from its first one.

    Raises:
        ValueError: its parameters are not the engine's (nothing has been changed then).
    """
    state = read_state(folder)
    files = {decay: name for name, decay in state["ema"]["files"].items()}
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(safe_open(folder / MODEL, framework="pt"))
        averages = [
            stack.enter_context(safe_open(folder / files.get(decay, AVERAGE), framework="pt")) for decay in ema.decays
        ]
        parts = [
            stack.enter_context(safe_open(path, framework="pt"))
            for path in sorted(folder.glob("optimizer_*.safetensors"))
        ]
        moments = {tensor: part for part in parts for tensor in part.keys()}
        present = set(model.keys())
        for name, shape in engine.shapes.items():
            if name not in present or tuple(model.get_slice(name).get_shape()) != shape:
                raise ValueError(f"{folder} does not fit this model: parameter {name} is missing or of another shape")
        for name in engine.shapes:
            engine.load_master(name, model.get_tensor(name))
            for which, average in enumerate(averages):
                ema.load(which, name, average.get_tensor(name))
            full = {key: moments[f"{key}.{name}"].get_tensor(f"{key}.{name}") for key in MOMENTS}
            engine.load_moments(name, full, state["optimizer_steps"])
    ema.updates.fill_(state["ema"]["updates"])
    engine.load_scaler_state(state["scaler"])
    engine.finish_loading()
    return state


# ------------------------------------------------------------------------------------------ the folder of checkpoints


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:07d}"


def incomplete(final: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return final.with_name(f".{final.name}.incomplete")


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def put_in_place(final: Path) -> None:
    """Renames a complete checkpoint to its name, then moves ``latest``; at every moment there is one to load."""
    if final.exists():  # of an earlier attempt that went on from before this step
        final.rename(_replaced(final))
    incomplete(final).rename(final)
    link = final.with_name(".latest.new")
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, final.with_name("latest"))
    sync_folder(final.parent)
    shutil.rmtree(_replaced(final), ignore_errors=True)


def tidy(checkpoints: Path) -> None:
    """Removes what a killed save left behind. Call on one rank, when nothing is being saved."""
    for left in checkpoints.glob(".step_*.incomplete"):
        shutil.rmtree(left, ignore_errors=True)
    for left in checkpoints.glob(".step_*.replaced"):
        final = left.with_name(left.name.removeprefix(".").removesuffix(".replaced"))
        if final.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.rename(final)


def prune(checkpoints: Path, keep: int, newest: Path, in_use: Path | None) -> None:
    """Deletes all but the ``keep`` newest checkpoints up to ``newest`` (0: none), never the one in use.

    Later steps, of an attempt that this run went back from, are left alone until they are written anew.
    """
    for old in list(_up_to(checkpoints, newest))[keep:] if keep else ():
        if old != in_use:
            shutil.rmtree(old, ignore_errors=True)


def _up_to(checkpoints: Path, newest: Path) -> Iterator[Path]:
    return (path for path in sorted(checkpoints.glob("step_*"), reverse=True) if path.name <= newest.name)
