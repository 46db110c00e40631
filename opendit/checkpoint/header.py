"""The header of a safetensors file: its tensors by name, shape and kind, compared with a model before one is made."""

import math
from pathlib import Path

from opendit.models.configuration import DiTConfig
from opendit.models.shapes import Shapes, model_shapes


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
