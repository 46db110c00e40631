"""Loads a checkpoint of either kind into an engine and its averages: each rank reads the slices that it holds."""

import contextlib
import re

from opendit.checkpoint.checkpoint import Checkpoint, Unloadable
from opendit.checkpoint.ema import EMA
from opendit.checkpoint.files import not_finite
from opendit.checkpoint.tensor_set import TensorSet
from opendit.config.checkpoints import SHARDS
from opendit.parallel.control_group import ControlGroup
from opendit.parallel.engines import MOMENTS, Engine

OPTIMIZER_FILE = r"optimizer_[0-9]{3,}\.safetensors"
Places = dict[str, tuple[TensorSet, str]]  # where a tensor is: its set, and its name there


def load_checkpoint(checkpoint: Checkpoint, engine: Engine, ema: EMA) -> None:
    """Puts a checkpoint into the engine and the averages; call on every rank. Only its verified files are read, and of
    these, whatever layout they were written from, what this rank holds of every tensor.

    A decay that the checkpoint has no average of goes on from its first one.

    Raises:
        Unloadable: what it holds is not what the engine needs (nothing has been changed then); on every rank.
        FloatingPointError: it is not finite; on every rank.
    """
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
        moment_shapes = {f"{key}.{name}": shape for name, shape in engine.shapes.items() for key in MOMENTS}
        moments = _places(checkpoint, moment_files, moment_shapes)

        def load() -> None:
            try:
                for name in engine.shapes:
                    _load(checkpoint, engine, ema, name, model, averages, moments)
            except Unloadable:
                raise
            except ValueError as error:
                raise Unloadable(f"--load: {error}; load another checkpoint") from error

        # Together, for the others would go on without a rank that can't.
        ControlGroup(engine.mesh).together(load, Unloadable, FloatingPointError, OSError)
    ema.updates.fill_(state["ema"]["updates"])
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
    for key in MOMENTS:
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
    """Map the name of every tensor, with the prefix of its file, to the file and the name in it.

    Raises Unloadable unless each tensor of ``shapes`` is found exactly once and has its shape."""
    folder, found = checkpoint.folder, {}
    for prefix, file in files:
        for name in file:
            if prefix + name in found:
                raise Unloadable(f"--load: {folder} is damaged: two of its files hold {name}; load another checkpoint")
            found[prefix + name] = file, name
    for name, shape in shapes.items():
        if name not in found:
            raise Unloadable(f"--load: {folder} does not fit this model, it has no {name}; load another checkpoint")
        file, stored = found[name]
        if file.shapes[stored] != shape:
            raise Unloadable(
                f"--load: {folder} does not fit this model, {name} is {file.shapes[stored]} there and {shape} here; "
                "load another checkpoint"
            )
    return found
