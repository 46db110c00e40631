"""Fixed tables of positions in files of weights: compared with the computed ones, which every path uses."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from opendit.models.configuration import DiTConfig
from opendit.models.positions import sincos_position_table

ROUNDING = 1e-6  # of fp32: Meta's files hold the same tables, made by other libraries


def other_tables(config: DiTConfig, state: Mapping[str, Tensor]) -> dict[str, float]:
    """The names of the tables in ``state``, of a model ``config``, that are not the computed ones, and by how much a
    number of them differs at most. What is missing or of another size is not compared."""
    found = {}
    for name, (dim, sizes) in config.tables.items():
        made = sincos_position_table(dim, *sizes).unsqueeze(0)
        if name in state and (stored := state[name]).shape == made.shape:
            off = (stored.to(made) - made).abs().max().item()
            if not off <= ROUNDING:
                found[name] = off
    return found


def table_notes(config: DiTConfig, state: Mapping[str, Tensor], path: Path) -> list[str]:
    """A line for each of :func:`other_tables` of the file at ``path``."""
    return [
        f"{path}: its table {name} is not the computed one (numbers differ by up to {off:.2g}), which is used in its "
        "place"
        for name, off in other_tables(config, state).items()
    ]
