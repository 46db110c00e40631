"""Averages of the fp32 master weights, by exponential or power functions.

Power averages follow T. Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (EDM2),
arXiv 2312.02696, sec. 3 and appendix C. Their width can be chosen after training. In such an average, the weights after
update i have the factor i^exponent; these factors are the average's profile. The width (sigma_rel) is the profile's
standard deviation divided by the number of updates."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opendit.checkpoint.pretrained import METADATA_KEY, find_weights, read_weights
from opendit.checkpoint.run_folders import AVERAGES, CHECKPOINTS, step_folder
from opendit.checkpoint.tensor_set import AVERAGE_SET, STATE, kinds_of, read_state, write_weights
from opendit.common.safe_files import make_folder
from opendit.config.names import WHOLE
from opendit.parallel.engines import Engine

# The warm-up limits the decay after n updates to 1 - rate / (n + DELAY). New runs have the rate WARMUP. Runs of an
# earlier version with --ema_warmup have FIRST_WARMUP. A rate of 0 turns the warm-up off.
DELAY = 10
WARMUP, FIRST_WARMUP = 10, 9


class EMA:
    """Moving averages of the fp32 master weights ("masters"). Ranks divide the averages, and update them without
    communication.

    Args:
        engine: the engine with the masters. The averages start as copies.
        decays: the decay of each average. Sampling uses the first average.
        warmup: the rate of the warm-up, see :meth:`decays_after`. 0 means constant decays.
        power: True if ``decays`` are widths of power averages; see the module's docstring.

    Attributes:
        snapshots: with power averages, the steps at which this run has saved checkpoints.
    """

    def __init__(self, engine: Engine, decays: float | Sequence[float], warmup: float = 0, *, power: bool = False):
        self.engine, self.warmup, self.power = engine, 0 if power else warmup, power
        self.snapshots: list[int] = []
        self.decays = tuple(decays) if isinstance(decays, Sequence) else (decays,)
        masters = engine.masters()
        device = next(iter(masters.values())).device
        self._averages = engine.new_averages(len(self.decays))
        for shards in self._averages:
            for name, shard in masters.items():
                shards[name].copy_(shard.detach())
        # number of updates since the run's first start, without skipped steps
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        numbers = [exponent_of(width) + 1 for width in self.decays] if power else self.decays
        # each average's decay, or a power average's exponent + 1
        self._numbers = torch.tensor(numbers, dtype=torch.float64).to(device)
        self._in_the_step = engine.attach_averages(self._averages, self.decays_after, self.updates)

    @property
    def averages(self) -> list[dict[str, Tensor]]:
        """Wait for the last step's update, and return this rank's shards: one dictionary by name for each average."""
        self.engine.wait_for_averages()
        return self._averages

    def decays_after(self, updates: Tensor) -> Tensor:
        """Return the averages' decays of update n + 1, (K,) float64. updates: n, 0-dim int64.

        A warm-up with rate r limits the decay to 1 - r / (n + 10). With r = 10, the first update copies the weights,
        and early averages span n / 10 updates. A power average has the decay (1 - 1 / (n + 1)) ** (exponent + 1)."""
        if self.power:
            return (1 - 1 / (updates.double() + 1)) ** self._numbers
        if not self.warmup:
            return self._numbers
        return torch.minimum(self._numbers, 1 - self.warmup / (updates.double() + DELAY))

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Update average += (1 - decay) * (master - average), unless ``finite`` is False. Call this after every step.
        With zero2 and fsdp, this method does nothing, because the optimizer's step updates the averages."""
        if self._in_the_step or not finite:
            return
        masters = list(self.engine.masters().values())
        for decay, shards in zip(self.decays_after(self.updates).tolist(), self._averages, strict=True):
            torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage] torch has no public name for it
                list(shards.values()), masters, 1.0 - decay
            )
        self.updates += 1

    def bytes_per_rank(self) -> int:
        return sum(shard.numel() * shard.element_size() for shards in self._averages for shard in shards.values())

    def gather(self, which: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full fp32 tensor) for every parameter of one average. All ranks must iterate."""
        for name, shard in self.averages[which].items():
            yield name, self.engine.layout.gather(name, shard)

    @torch.no_grad()
    def set(self, which: int, name: str, shard: Tensor) -> None:
        """Set this rank's shard of a parameter (see ``engine.layout``) in average number ``which``."""
        self.averages[which][name].copy_(shard)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Context in which the engine's masters and the first average are swapped, in place. The exit swaps them back
        exactly. All ranks must enter and leave. Don't train or save inside the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        engine, average = self.engine, self.averages[0]
        for name, shard in average.items():
            master = engine.master(name)
            own = master.clone()
            engine.set_shard(name, shard)
            shard.copy_(own)
        engine.finish_loading()

    @contextlib.contextmanager
    def applied(self, model: nn.Module | None) -> Iterator[nn.Module | None]:
        """Context in which ``model`` has the first average's weights, cast to the model's dtype.

        All ranks must call this. Ranks without a model to fill pass None. On exit, the model gets its previous weights
        back exactly, from host memory. The device needs memory for one more full parameter.

        With tensor parallelism, ``model`` is this rank's model. If every rank holds all weights (``engine.whole``),
        ``model`` may be the training module."""
        own: dict[str, Tensor] = {}
        try:
            for name, full in self.gather():
                if model is not None:
                    weight = model.get_parameter(name).data
                    own[name] = weight.to("cpu", copy=True)
                    weight.copy_(self.engine.tensor_layout.take(name, full))
            yield model
        finally:
            for name, weight in own.items():
                assert model is not None  # only filled for a model
                model.get_parameter(name).data.copy_(weight)


@dataclass(frozen=True)
class Profile:
    """A power average's profile: its width, and the number of updates so far."""

    updates: int
    width: float


def exponent_of(width: float) -> float:
    """Return the exponent (gamma) of the power average with this ``width``, the largest root of EDM2's eq. 127. width:
    above 0 and below 0.288, where the exponent is 0."""
    inverse = width**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def correlation(one: Profile, other: Profile) -> float:
    """Return the inner product of two profiles over all updates, in the limit of many updates (EDM2, eq. 149)."""
    early, late = sorted((one, other), key=lambda profile: profile.updates)
    a, b = exponent_of(early.width), exponent_of(late.width)
    return (a + 1) * (b + 1) * (early.updates / late.updates) ** b / ((a + b + 1) * late.updates)


def coefficients(stored: Sequence[Profile], wanted: Profile) -> np.ndarray:
    """Return n float64 factors with sum 1. The n stored averages, times these factors, add up to about the wanted
    average. The factors are a least-squares fit of the profiles (EDM2, appendix C.3)."""
    matrix = np.array([[correlation(one, other) for other in stored] for one in stored])
    found = np.linalg.solve(matrix, np.array([correlation(one, wanted) for one in stored]))
    return found / found.sum()


class _Sum(Mapping[str, Tensor]):
    """A weighted sum of several mappings, computed on access. Integer tensors come from the last mapping."""

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
    """Return (profile, file or index) of every power average that a run has stored at these steps."""
    found = []
    for step in steps:
        folders = (step_folder(run / name, step) for name in (CHECKPOINTS, AVERAGES))
        folder = next((folder for folder in folders if (folder / STATE).is_file()), None)
        if folder is not None:
            state = read_state(folder)["ema"]
            found += [(Profile(state["updates"], width), folder / name) for name, width in state["files"].items()]
    return [(profile, file) for profile, file in found if profile.updates > 0]


def reconstruct(path: Path, width: float) -> Path:
    """Compute a checkpoint's power average with another width, from all averages that the run had stored by then.

    path: a run's or checkpoint's folder. Return a file in the run's folder ``averages``, or the index of several files.
    An existing file is used again. Raises ValueError if the checkpoint has no power averages, or one is damaged. Raises
    OSError if no weights are found, or the file can't be written."""
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
    # The last snapshot is the checkpoint itself. Its configuration is used.
    total = _Sum([weights.state for weights in read], factors.tolist())
    metadata = {"format": "pt", METADATA_KEY: json.dumps(read[-1].info)}
    return write_weights(output, total, metadata)[0]


def _state(stored: Path) -> dict[str, Any]:
    try:
        return read_state(stored.parent)["ema"]
    except ValueError:  # the weights belong to no checkpoint
        return {}
