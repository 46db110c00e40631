"""Checkpoints: canonical full tensors, whatever the plugin and the number of ranks.

    step_0000100/
      model.safetensors      fp32 master weights and buffers, the configuration in the metadata
      ema.safetensors        the same of the moving average
      optimizer.safetensors  exp_avg.NAME and exp_avg_sq.NAME
      state.json             counters, loss scaler, what the run was

A checkpoint is written beside its place and renamed when it is complete; ``latest`` moves last. It resumes
exactly under the same plugin and world, and under another plugin or world up to rounding: masters and
moments are stored in fp32, and everything random is keyed by (seed, step, sample).
"""

import json
import os
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from opendit.ema import EMA
from opendit.models.pretrained import METADATA_KEY, read_info
from opendit.parallel.engine import MOMENTS, Engine

FORMAT_VERSION = 1


def run_folder(outputs: str, model: str) -> Path:
    """A new OUTPUTS/NNN-MODEL, numbered after the existing ones. Call on one rank."""
    numbers = [int(p.name[:3]) for p in Path(outputs).glob("[0-9][0-9][0-9]-*")]
    folder = Path(outputs) / f"{max(numbers, default=-1) + 1:03d}-{model.replace('/', '-')}"
    folder.mkdir(parents=True)
    return folder


def newest_run(outputs: str, model: str | None = None, video: bool = False) -> Path | None:
    """The newest run folder (of ``model``, or of any clip model) that has a checkpoint, or None."""
    name = model.replace("/", "-") if model else "vDiT-*" if video else "*"
    runs = sorted(Path(outputs).glob(f"[0-9][0-9][0-9]-{name}"))
    return next((r for r in reversed(runs) if (r / "checkpoints" / "latest" / "state.json").is_file()), None)


def find_checkpoint(load: str, outputs: str, model: str) -> Path | None:
    """The checkpoint folder that ``--load`` means; None for ``latest`` when there is none yet.

    Raises:
        ValueError: a path without a checkpoint, or a checkpoint of another model.
    """
    if load == "latest":
        run = newest_run(outputs, model)
        if run is None:
            return None
        path = run
    else:
        path = Path(load)
    for folder in (path, path / "checkpoints" / "latest"):
        if (folder / "state.json").is_file():
            folder = folder.resolve()
            found = read_state(folder)["model"]
            if found != model:
                raise ValueError(f"--load {load}: {folder} is a checkpoint of {found}, not of --model {model}")
            return folder
    raise ValueError(f"--load {load}: no checkpoint there (a run folder, a step_* folder or latest)")


def read_state(folder: Path) -> dict:
    """The counters of a checkpoint. Raises ValueError if they can't be read or are of a newer version."""
    try:
        state = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}/state.json can't be read ({error}); load an earlier checkpoint") from error
    if state.get("version") != FORMAT_VERSION:
        raise ValueError(f"{folder} has checkpoint version {state.get('version')}, this program reads {FORMAT_VERSION}")
    return state


def save_checkpoint(checkpoints: Path, engine: Engine, ema: EMA, state: dict, info: dict) -> Path:
    """Writes a checkpoint of ``state["step"]``; call on every rank.

    Args:
        checkpoints: the run's checkpoints/ folder.
        state: counters; what the loop needs to go on.
        info: what the weights files say of themselves (model, config, class names, VAE, ...).

    Returns:
        the checkpoint's folder.
    """
    final = checkpoints / f"step_{state['step']:07d}"
    temporary = checkpoints / f".{final.name}.incomplete"
    main = engine.mesh.is_main
    if main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    buffers = {n: b.detach().cpu().contiguous() for n, b in engine.module.named_buffers()} if main else {}
    metadata = {"format": "pt", METADATA_KEY: json.dumps({**info, "step": state["step"], "version": FORMAT_VERSION})}

    def write(name: str, tensors) -> None:
        collected = {k: v.cpu().contiguous() for k, v in tensors if main}
        if main:
            save_file(collected, temporary / name, metadata=metadata)

    weights = ((name, engine.gather(name, engine.master(name))) for name in engine.shapes)
    write("model.safetensors", _chain(weights, buffers))
    write("ema.safetensors", _chain(ema.gather(), buffers))
    write(
        "optimizer.safetensors",
        ((f"{key}.{n}", engine.gather(n, piece)) for n in engine.shapes for key, piece in engine.moments(n).items()),
    )
    if main:
        full = {
            **state,
            "version": FORMAT_VERSION,
            "model": info["model"],
            "optimizer_steps": engine.optimizer_steps(),
            "scaler": engine.scaler_state(),
        }
        (temporary / "state.json").write_text(json.dumps(full, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        link = checkpoints / ".latest.new"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.replace(link, checkpoints / "latest")
    engine.mesh.barrier()
    return final


def _chain(weights, buffers: dict[str, Tensor]):
    yield from weights
    yield from buffers.items()


def load_checkpoint(folder: Path, engine: Engine, ema: EMA) -> dict:
    """Puts a checkpoint into the engine and the EMA; call on every rank. Returns its state.

    Raises:
        ValueError: its parameters are not the engine's (nothing has been changed then).
    """
    state = read_state(folder)
    with (
        safe_open(folder / "model.safetensors", framework="pt") as model,
        safe_open(folder / "ema.safetensors", framework="pt") as average,
        safe_open(folder / "optimizer.safetensors", framework="pt") as moments,
    ):
        for name, shape in engine.shapes.items():
            if name not in model.keys() or tuple(model.get_slice(name).get_shape()) != shape:
                raise ValueError(f"{folder} does not fit this model: parameter {name} is missing or of another shape")
        for name in engine.shapes:
            engine.load_master(name, model.get_tensor(name))
            ema.load(name, average.get_tensor(name))
            full = {key: moments.get_tensor(f"{key}.{name}") for key in MOMENTS}
            engine.load_moments(name, full, state["optimizer_steps"])
    engine.load_scaler_state(state["scaler"])
    engine.finish_loading()
    return state


def checkpoint_config(folder: Path) -> dict:
    """The model configuration inside a checkpoint, without reading weights."""
    return read_info(folder / "model.safetensors")["config"]
