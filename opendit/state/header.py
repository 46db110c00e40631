"""The header of a safetensors file: its tensors by name, shape and kind, compared with a model before one is made."""

import math
import stat
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from opendit.common.mapped import open_mapped
from opendit.models.configuration import DiTConfig
from opendit.models.zoo import build_model

FLOATS = ("F64", "F32", "F16", "BF16")
MOST_HEADER_BYTES = 64 << 20
Shapes = dict[str, tuple[int, ...]]


def open_safetensors(path: Path, framework: str = "pt") -> safe_open:
    """A safetensors file, opened; the library has compared the header with the file's size by then.

    Raises ValueError that names the file: it is no regular file, its header is too large, or it is damaged.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path} is no regular file")
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > MOST_HEADER_BYTES:
            raise ValueError(f"{path} is not a readable safetensors file (a header of {length:,} bytes)")
        return open_mapped(path, framework)
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a readable safetensors file ({reason}); take another one") from error


def shapes_in(file: safe_open, path: Path, floats: bool = True) -> Shapes:
    """The shape of every tensor by its name. Raises ValueError if one holds no floating-point numbers (``floats``)."""
    shapes = {}
    for name in file.keys():  # noqa: SIM118
        part = file.get_slice(name)
        if floats and part.get_dtype() not in FLOATS:
            raise ValueError(f"{path}: {name[:100]!r} holds {part.get_dtype()}; weights are one of {', '.join(FLOATS)}")
        shapes[name] = tuple(part.get_shape())
    return shapes


def model_shapes(config: DiTConfig) -> tuple[Shapes, Shapes]:
    """The shapes of a model's parameters and of its buffers; no weight is made. Raises ValueError if there is no such
    model."""
    try:
        with torch.device("meta"):
            model = build_model(config)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, AssertionError) as error:
        raise ValueError(f"a model of this configuration can't be built ({str(error).splitlines()[0]})") from error
    return tuple({n: tuple(p.shape) for n, p in named} for named in (model.named_parameters(), model.named_buffers()))


def check_size(config: DiTConfig, shapes: Shapes, path: Path) -> None:
    """Raises ValueError if a model has more weights than the files that ``shapes`` are of: from a formula, at once."""
    described, held = config.parameters(), sum(map(math.prod, shapes.values()))
    if described > held:
        raise ValueError(
            f"{path} does not hold the model that its configuration describes: {described:,} weights there, "
            f"{held:,} in the file"
        )


def check_shapes(config: DiTConfig, shapes: Shapes, path: Path) -> None:
    """Raises ValueError unless ``shapes`` are exactly a model's parameters and buffers, naming the first difference."""
    check_size(config, shapes, path)
    try:
        parameters, buffers = model_shapes(config)
    except ValueError as error:
        raise ValueError(f"{path}: config: {error}") from error
    compare(parameters | buffers, shapes, path)


def compare(own: Shapes, theirs: Shapes, path: Path) -> None:
    """Raises ValueError unless both have the same names and shapes."""
    differences = {
        "missing": own.keys() - theirs.keys(),
        "unexpected": theirs.keys() - own.keys(),
        "of another shape": {name for name in own.keys() & theirs.keys() if own[name] != theirs[name]},
    }
    problems = [f"{len(names)} {what} (first: {min(names)[:100]})" for what, names in differences.items() if names]
    if problems:
        raise ValueError(f"{path} is a checkpoint of another model: parameters {', '.join(problems)}")
