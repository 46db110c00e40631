"""Power-function averages of weights, and reconstruction of other averages from stored ones after training.

Reference: T. Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (EDM2), arXiv
2312.02696, sec. 3 and appendix C. The average after t updates is a weighted mean of the weights after each update i <=
t, with factors proportional to i^exponent. The factors as a function of i are the average's profile. The standard
deviation of this distribution over i is a constant fraction of t; this fraction is the ``width`` (sigma_rel).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendit.checkpoint.files import AVERAGE_SET, STATE, read_state
from opendit.checkpoint.pretrained import METADATA_KEY, find_weights, read_weights
from opendit.checkpoint.run_folders import AVERAGES, CHECKPOINTS, step_folder
from opendit.checkpoint.tensor_set import kinds_of, write_weights
from opendit.common.safe_files import make_folder
from opendit.config.names import WHOLE

MOST_BYTES = 50 * 10**9  # maximum size of one weights file in bytes


@dataclass(frozen=True)
class Profile:
    """The profile of a power average: its width, and the number of updates so far."""

    updates: int
    width: float


def exponent_of(width: float) -> float:
    """Return the exponent (gamma) of the power function whose profile has the given ``width``.

    The exponent is the largest root of EDM2's eq. 127.

    Args:
        width: above 0 and below 0.288, where the exponent is 0.
    """
    inverse = width**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def correlation(one: Profile, other: Profile) -> float:
    """Return the inner product of two profiles, a sum over all updates, in the limit of many updates (EDM2, eq.
    149)."""
    early, late = sorted((one, other), key=lambda profile: profile.updates)
    a, b = exponent_of(early.width), exponent_of(late.width)
    return (a + 1) * (b + 1) * (early.updates / late.updates) ** b / ((a + b + 1) * late.updates)


def coefficients(stored: Sequence[Profile], wanted: Profile) -> np.ndarray:
    """Compute factors of stored averages whose weighted sum approximates the wanted average.

    The factors are the least-squares solution for the wanted profile (EDM2, appendix C.3), scaled to the sum 1.

    Returns:
        (n,) float64.
    """
    matrix = np.array([[correlation(one, other) for other in stored] for one in stored])
    found = np.linalg.solve(matrix, np.array([correlation(one, wanted) for one in stored]))
    return found / found.sum()


class _Sum(Mapping[str, Tensor]):
    """A mapping whose tensors are weighted sums of other mappings' tensors, computed on access."""

    def __init__(self, parts: Sequence[Mapping[str, Tensor]], factors: Sequence[float]):
        self._parts, self._factors = parts, factors
        self.kinds = kinds_of(parts[-1])

    def __getitem__(self, name: str) -> Tensor:
        last = self._parts[-1][name]
        if not last.is_floating_point():
            return last
        terms = [factor * part[name].double() for part, factor in zip(self._parts, self._factors, strict=True)]
        return torch.stack(terms).sum(0).to(last.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[-1])

    def __len__(self) -> int:
        return len(self._parts[-1])


def snapshots_of(run: Path, steps: Sequence[int]) -> list[tuple[Profile, Path]]:
    """Return (profile, file or index) of every power average that a run has stored at the given steps."""
    found = []
    for step in steps:
        folders = (step_folder(run / name, step) for name in (CHECKPOINTS, AVERAGES))
        folder = next((folder for folder in folders if (folder / STATE).is_file()), None)
        if folder is not None:
            state = read_state(folder)["ema"]
            found += [(Profile(state["updates"], width), folder / name) for name, width in state["files"].items()]
    return [(profile, file) for profile, file in found if profile.updates > 0]


def reconstruct(path: Path, width: float) -> Path:
    """Reconstruct the power average with this width at a checkpoint, from all averages stored until then.

    The result is written to the run's folder ``averages``. An existing file that is at least as new as the checkpoint
    is used instead.

    Args:
        path: a run's or checkpoint's folder that ``find_weights`` accepts.

    Returns:
        The weights file, or the index of several files.

    Raises:
        ValueError: the checkpoint has no power averages, or a stored average is damaged.
        OSError: the file can't be written.
    """
    stored = find_weights(path, AVERAGE_SET)
    folder, state = stored.parent, _state(stored)
    if (steps := state.get("snapshots")) is None:
        raise ValueError(
            f"--ema {width:g}: {folder} has no power averages; train with --average power:0.05,0.10, or leave it out"
        )
    for name, own in state["files"].items():
        if own == width:
            return folder / name
    run = folder.parent.parent
    output = run / AVERAGES / f"{AVERAGE_SET}_{width:g}_{folder.name}{WHOLE}"
    if output.is_file() and output.stat().st_mtime >= (folder / STATE).stat().st_mtime:
        return output
    found = snapshots_of(run, steps)
    factors = coefficients([profile for profile, _ in found], Profile(state["updates"], width))
    read = [read_weights(file) for _, file in found]
    make_folder(run / AVERAGES, root=run)
    # The last snapshot is that of the checkpoint itself and has its configuration.
    total = _Sum([weights.state for weights in read], factors.tolist())
    metadata = {"format": "pt", METADATA_KEY: json.dumps(read[-1].info)}
    return write_weights(output, total, metadata, MOST_BYTES)[0]


def _state(stored: Path) -> dict[str, Any]:
    try:
        return read_state(stored.parent)["ema"]
    except ValueError:  # the weights belong to no checkpoint
        return {}
