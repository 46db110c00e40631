"""``opendit evaluate --dry_run [GPUS]``: how long an evaluation would take, by a few batches of it."""

import math
import tempfile
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from opendit.config.console import print_block
from opendit.evaluation.extract import Extractor
from opendit.evaluation.samples import Samples
from opendit.parallel.mesh import Mesh

BATCHES = 4  # of every process, after a first one, whose time counts for nothing: kernels are compiled and recorded


class NoNetwork(Extractor):
    """Takes pixels as the networks of an evaluation do, and computes nothing of them."""

    def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
        return {"pool": torch.zeros(len(pixels), 1, device=self.device)}


def dry_run(samples: Samples, extractor: Extractor, batch_size: int, gpus: int, mesh: Mesh) -> None:
    """Draws and measures a few batches, and prints what all samples would take. Collective; nothing of it is kept.

    batch_size: samples a process draws at a time. gpus: that the plan is for; 0: those there are.

    Raises:
        ValueError: so many GPUs can't be shared by groups of this run's size.
    """
    here = mesh.dp_size
    group = mesh.world_size // here
    if gpus % group:
        raise ValueError(f"--dry_run {gpus}: {group} GPUs draw together; take a multiple of {group}")
    groups = gpus // group or here
    first, few = (min(samples.count, count * batch_size * here) for count in (1, BATCHES))
    with tempfile.TemporaryDirectory() if mesh.is_main else nullcontext() as made:
        folder = Path(mesh.broadcast_object(made))
        samples.extract(extractor, first, folder / "first")
        measured = samples.extract(extractor, few, folder / "measured").seconds
        drawn = None
        if samples.drawn:
            drawn = samples.extract(NoNetwork(mesh.device), few, folder / "drawn").seconds
        mesh.barrier()
    if mesh.is_main:
        print_block("Dry run", _rows(samples, extractor, few, measured, drawn, here, groups, groups * group))


def _rows(
    samples: Samples, extractor: Extractor, few: int, measured: float, drawn: float | None, here: int, groups: int,
    gpus: int,
) -> dict[str, str]:  # fmt: skip
    rounds = samples.count / few * here / groups
    width = sum(math.prod(shape) for shape in extractor.layout(samples.shape).values())
    if drawn is None:
        tried, share = f"features in {measured:.2f} s", ""
    else:
        tried = f"drawn in {drawn:.2f} s; drawn and measured in {measured:.2f} s, {measured / drawn:.3f} times as long"
        share = f", {_duration(drawn * rounds)} without features"
    kind = "GPU" if extractor.device.type == "cuda" else "process"
    return {
        "tried": f"{few:,} samples: {tried}",
        "all": f"{samples.count:,} samples on {_count(gpus, kind)}: {_duration(measured * rounds)}{share}",
        "on disk": f"features of {4 * width * samples.count / 2**20:,.0f} MiB",
        "not counted": "loading and compiling before the first sample, and the metrics after the last",
    }


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _count(number: int, kind: str) -> str:
    plural = "" if number == 1 else "es" if kind.endswith("s") else "s"
    return f"{number:,} {kind}{plural}"
