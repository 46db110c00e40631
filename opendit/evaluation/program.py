# pyright: standard
"""Run an evaluation, for the command ``opendit evaluate`` and the Python function ``opendit.evaluate``."""

import logging
import math
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from opendit.config.console import print_block
from opendit.config.evaluate import EvaluateConfig
from opendit.config.parallel_sizes import find_place
from opendit.evaluation import results
from opendit.evaluation.extract import Extractor
from opendit.evaluation.figures import Measuring
from opendit.evaluation.samples import Samples, open_samples, save_features
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.supervisor import Supervisor

logger = logging.getLogger(__name__)

EARLIER_ROWS = 12  # maximum number of earlier results above the new ones
DRY_RUN_BATCHES = 4  # timed batches per process, after one untimed batch that compiles kernels


def run(flags: EvaluateConfig) -> None:
    """Run an evaluation and print its results. ``Supervisor`` reports errors and ends the program."""
    with Supervisor((ValueError, OSError)) as supervisor:
        mesh = init_mesh(sequence_parallel=flags.sequence_parallel_size, group_of_one=False)
        measure(flags, mesh, lambda: supervisor.started(()))


def evaluate(config: EvaluateConfig) -> list[results.Measurement]:
    """Run ``opendit evaluate`` with the flags of ``config`` in this process. Return the metric values.

        opendit.evaluate(opendit.EvaluateConfig(samples="samples.npz", reference="reference.npz", metrics=["fid"]))

    The values are also appended to ``results.jsonl`` in the folder ``config.output``. With torchrun, only rank 0 gets
    the values; other ranks get an empty list.

    Raises:
        ValueError: the configuration can't work; the message names the flag and the fix.
        OSError: a file does not exist, or a disk is full.
    """
    if not config.given:
        plain = type(config)()
        changed = {name for name in vars(plain) if name != "given" and getattr(plain, name) != getattr(config, name)}
        config = type(config)(**{name: getattr(config, name) for name in changed}, given=frozenset(changed))
    place = find_place()
    if place.world_size > 1:
        return measure(config, init_mesh(sequence_parallel=config.sequence_parallel_size))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return measure(config, Mesh(0, 1, 0, device))


def measure(flags: EvaluateConfig, mesh: Mesh, started: Callable[[], None] = lambda: None) -> list[results.Measurement]:
    """Evaluate every point of a sweep, or the only point. All ranks must call this. Return the metric values on rank 0,
    and [] on other ranks or with --dry_run. started: called once, before samples are drawn or read."""
    points = flags.points()
    if len(points) == 1 or flags.samples is not None:
        return _measure(points[0] if flags.samples is None else flags, mesh, started)
    flags.resolve(mesh.world_size, mesh.device.type == "cuda")  # check every point before the first is drawn
    found: list[results.Measurement] = []
    for number, point in enumerate(points, 1):
        if mesh.is_main:
            where = f"guidance {point.cfg_scale:g}, {point.num_sampling_steps} steps"
            logger.info("%d of %d: %s", number, len(points), where)
        found += _measure(point, mesh, started if number == 1 else lambda: None)
    if mesh.is_main and flags.dry_run is None:
        print(f"\n{results.sweep_table(found)}\nas CSV: {results.write_sweep(Path(flags.output), found)}", flush=True)
    return found


def _measure(flags: EvaluateConfig, mesh: Mesh, started: Callable[[], None]) -> list[results.Measurement]:
    flags, notes = flags.resolve(mesh.world_size, mesh.device.type == "cuda")
    if mesh.is_main:
        for note in notes:
            logger.info("note: %s", note)
    output = Path(flags.output)
    with open_samples(flags, mesh) as samples:
        measuring = Measuring(flags, samples, output, mesh)
        if not measuring.metrics and flags.save_features is None:
            raise ValueError(measuring.why_nothing)
        if mesh.is_main:
            measuring.announce()
        started()
        samples.announce()
        if flags.dry_run is not None:
            batch = flags.batch_size if samples.drawn else flags.feature_batch_size
            dry_run(samples, measuring.extractor, batch, flags.dry_run, mesh)
            return []
        features = samples.extract(measuring.extractor, samples.count, output)
        found: list[results.Measurement] = []
        problems: list[str] = []
        if mesh.is_main:
            if features.computed:
                rate = features.computed / max(features.seconds, 1e-9)
                print(f"features of {features.computed:,} samples in {features.seconds:,.1f} s, {rate:,.1f} a second")
            if flags.save_features is not None:
                save_features(Path(flags.save_features), features, measuring.extractor.settings(), mesh.device)
                logger.info("note: features in %s", flags.save_features)
            for of_metric in measuring.compute(features.arrays, samples.details, problems):
                results.append_results(output, of_metric)
                found += of_metric
            _show(output, found)
            for problem in problems:
                logger.warning("note: %s", problem)
            if line := results.digits_line(found):
                print(line, flush=True)
        mesh.barrier()
        problems = mesh.broadcast_object(problems)
        if problems and (flags.metrics or not found) and measuring.metrics:
            raise ValueError(problems[0])
    return found


def _show(output: Path, found: list[results.Measurement]) -> None:
    """Print a table of earlier and new values of these metrics."""
    kinds = {row.metric for row in found}
    rows = [row for row in results.read_results(output / "results.jsonl") if row.metric in kinds]
    new = [results.without_time(row) for row in found]
    earlier = [row for row in rows if results.without_time(row) not in new][-EARLIER_ROWS:]
    print(results.table([*earlier, *found]))
    sys.stdout.flush()


class NoNetwork(Extractor):
    """Extractor with zeros as features, to time only the drawing."""

    def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
        return {"pool": torch.zeros(len(pixels), 1, device=self.device)}


def dry_run(samples: Samples, extractor: Extractor, batch_size: int, gpus: int, mesh: Mesh) -> None:
    """Draw or read a few batches, compute their features, and print the predicted time for all samples. All ranks must
    call this. batch_size: samples per process. gpus: number of GPUs for the prediction; 0 means this run's. Raises
    ValueError if ``gpus`` is not a multiple of the GPUs per sample."""
    here = mesh.dp_size
    group = mesh.world_size // here
    if gpus % group:
        raise ValueError(f"--dry_run {gpus}: {group} GPUs draw together; take a multiple of {group}")
    groups = gpus // group or here
    first, few = (min(samples.count, count * batch_size * here) for count in (1, DRY_RUN_BATCHES))
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
