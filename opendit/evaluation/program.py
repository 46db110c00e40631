# pyright: standard
"""An evaluation from its flags to its figures: ``opendit evaluate``, and ``opendit.evaluate`` in Python."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from opendit.config.parallel_sizes import find_place
from opendit.evaluation.dry_run import dry_run
from opendit.evaluation.measuring import Measuring
from opendit.evaluation.reference import save_features
from opendit.evaluation.results import Measurement, append_results, digits_line, read_results, table, without_time
from opendit.evaluation.samples import open_samples
from opendit.evaluation.sweep import sweep_table, write_sweep
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.supervisor import Supervisor

if TYPE_CHECKING:
    from opendit.config.evaluate import EvaluateConfig

EARLIER = 12  # results of before that are shown beside new ones


def run(flags: "EvaluateConfig") -> None:
    """Evaluates as the flags say, and prints a table. Ends the program, as ``Supervisor`` says, if it can't be done."""
    with Supervisor((ValueError, OSError)) as supervisor:
        mesh = init_mesh(sequence_parallel=flags.sequence_parallel_size, group_of_one=False)
        measure(flags, mesh, lambda: supervisor.started(()))


def evaluate(config: "EvaluateConfig") -> list[Measurement]:
    """Evaluates as ``opendit evaluate`` does with the flags of ``config``, in this process; returns the figures.

        opendit.evaluate(opendit.EvaluateConfig(samples="samples.npz", reference="reference.npz", metrics=["fid"]))

    They are also added to ``results.jsonl`` in the configuration's ``output``. Of several processes, in a script that
    torchrun starts, the first one gets them.

    Raises:
        ValueError: what can't work; the message names the flag and the fix.
        OSError: a file that is not there, or a disk that is full.
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


def measure(flags: "EvaluateConfig", mesh: Mesh, started: Callable[[], None] = lambda: None) -> list[Measurement]:
    """The figures of an evaluation, or of each of a sweep, on rank 0; on other ranks none. Collective.

    ``started`` is called when all that the flags ask for has been checked, before the long work.
    """
    points = flags.points()
    if len(points) == 1 or flags.samples is not None:
        return _measure(points[0] if flags.samples is None else flags, mesh, started)
    flags.resolve(mesh.world_size, mesh.device.type == "cuda")  # all of them, before the first
    found: list[Measurement] = []
    for number, point in enumerate(points, 1):
        if mesh.is_main:
            print(
                f"{number} of {len(points)}: guidance {point.cfg_scale:g}, {point.num_sampling_steps} steps", flush=True
            )
        found += _measure(point, mesh, started if number == 1 else lambda: None)
    if mesh.is_main and flags.dry_run is None:
        print(f"\n{sweep_table(found)}\nas CSV: {write_sweep(Path(flags.output), found)}", flush=True)
    return found


def _measure(flags: "EvaluateConfig", mesh: Mesh, started: Callable[[], None]) -> list[Measurement]:
    flags, notes = flags.resolve(mesh.world_size, mesh.device.type == "cuda")

    def say(text: str) -> None:
        if mesh.is_main:
            print(f"note: {text}", flush=True)

    for note in notes:
        say(note)
    output = Path(flags.output)
    with open_samples(flags, mesh, say) as samples:
        measuring = Measuring(flags, samples, output, mesh, say)
        if not measuring.metrics and flags.save_features is None:
            raise ValueError(measuring.nothing)
        if mesh.is_main:
            measuring.announce()
        started()
        samples.announce()
        if flags.dry_run is not None:
            batch = flags.batch_size if samples.drawn else flags.feature_batch_size
            dry_run(samples, measuring.extractor, batch, flags.dry_run, mesh)
            return []
        features = samples.extract(measuring.extractor, samples.count, output)
        found: list[Measurement] = []
        problems: list[str] = []
        if mesh.is_main:
            if features.computed:
                rate = features.computed / max(features.seconds, 1e-9)
                print(f"features of {features.computed:,} samples in {features.seconds:,.1f} s, {rate:,.1f} a second")
            if flags.save_features is not None:
                save_features(Path(flags.save_features), features, measuring.extractor.settings(), mesh.device)
                say(f"features in {flags.save_features}")
            for of_metric in measuring.of(features.arrays, samples.told, problems):
                append_results(output, of_metric)
                found += of_metric
            _show(output, found)
            for problem in problems:
                say(problem)
            if line := digits_line(found):
                print(line, flush=True)
        mesh.barrier()
        problems = mesh.broadcast_object(problems)
        if problems and (flags.metrics or not found) and measuring.metrics:
            raise ValueError(problems[0])
    return found


def _show(output: Path, found: list[Measurement]) -> None:
    """The new figures, and below earlier ones of the same metrics."""
    kinds = {row.metric for row in found}
    rows = [row for row in read_results(output / "results.jsonl") if row.metric in kinds]
    new = [without_time(row) for row in found]
    earlier = [row for row in rows if without_time(row) not in new][-EARLIER:]
    print(table([*earlier, *found]))
    sys.stdout.flush()
