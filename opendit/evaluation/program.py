"""An evaluation from its flags to its figures: ``opendit evaluate``, and ``opendit.evaluate`` in Python."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from opendit.evaluation.clip_score import caption_embeddings, clip_scores
from opendit.evaluation.extract import Extractor, Features, Layout
from opendit.evaluation.figures import Figure, MetricInputs, RealSamples, check_features, figures, plan
from opendit.evaluation.known_files import find_default
from opendit.evaluation.names import DIGITS, METRICS
from opendit.evaluation.networks import FeatureNetwork, digits_network, load_network
from opendit.evaluation.reference import Reference, clip_shape, open_reference, real_digits, save_features
from opendit.evaluation.results import Measurement, append_results, digits_line, read_results, table, without_time
from opendit.evaluation.samples import Samples, open_samples
from opendit.evaluation.sweep import sweep_table, write_sweep
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.sizes import find_place
from opendit.parallel.supervisor import Supervisor
from opendit.training.fingerprint import code
from opendit.training.monitor import print_block

if TYPE_CHECKING:
    from opendit.cli.evaluate_flags import EvaluateConfig

T = TypeVar("T")
REAL = 1_000  # training digits, at most, beside which samples are judged: as many as there are samples
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


@dataclass(frozen=True)
class _Networks:
    pictures: FeatureNetwork | None
    clips: FeatureNetwork | None
    captions: FeatureNetwork | None

    def extractor(self, flags: "EvaluateConfig", device: torch.device, motion: bool, captions: bool) -> Extractor:
        shown = self.captions if captions else None
        return Extractor(device, self.pictures, self.clips, shown, motion, flags.feature_batch_size)


def measure(flags: "EvaluateConfig", mesh: Mesh, started: Callable[[], None] = lambda: None) -> list[Measurement]:
    """The figures of an evaluation, or of each of a sweep, on rank 0; on other ranks none. Collective.

    ``started`` is called when all that the flags ask for has been checked, before the long work.
    """
    points = flags.points()
    if len(points) == 1 or flags.samples is not None:
        return _measure(points[0] if flags.samples is None else flags, mesh, started)
    flags.settled(mesh.world_size, mesh.device.type == "cuda")  # all of them, before the first
    found: list[Measurement] = []
    for number, point in enumerate(points, 1):
        if mesh.is_main:
            print(
                f"{number} of {len(points)}: guidance {point.cfg_scale:g}, {point.num_sampling_steps} steps", flush=True
            )
        found += _measure(point, mesh, started if number == 1 else lambda: None)
    if mesh.is_main:
        print(f"\n{sweep_table(found)}\nas CSV: {write_sweep(Path(flags.output), found)}", flush=True)
    return found


def _measure(flags: "EvaluateConfig", mesh: Mesh, started: Callable[[], None]) -> list[Measurement]:
    flags, notes = flags.settled(mesh.world_size, mesh.device.type == "cuda")

    def say(text: str) -> None:
        if mesh.is_main:
            print(f"note: {text}", flush=True)

    for note in notes:
        say(note)
    output = Path(flags.output)
    with open_samples(flags, mesh, say) as samples:
        networks = _load_networks(flags, samples, mesh.device, say)
        with_captions = samples.captions is not None and networks.captions is not None
        extractor = networks.extractor(flags, mesh.device, samples.clips, with_captions)
        layout = _usable(extractor.layout(samples.shape), samples)
        check_features(flags.metrics, layout, with_captions)
        reference = None
        if flags.reference is not None and _compares(flags):
            of_reference = networks.extractor(flags, mesh.device, samples.clips, captions=False)
            reference = open_reference(
                flags.reference, of_reference, samples.options, output, mesh, say, clips=samples.clips
            )
        metrics, left_out = _agreed(mesh, lambda: plan(flags.metrics, layout, reference, with_captions))
        if not metrics and flags.save_features is None:
            raise ValueError(f"there is nothing to measure: {'; '.join(left_out) or 'no network, and no reference'}")
        for line in left_out:
            say(line)
        if mesh.is_main:
            _announce(samples, networks, reference, metrics)
        started()
        features = samples.extract(extractor)
        found: list[Measurement] = []
        problems: list[str] = []
        if mesh.is_main:
            if features.computed:
                rate = features.computed / max(features.seconds, 1e-9)
                print(f"features of {features.computed:,} samples in {features.seconds:,.1f} s, {rate:,.1f} a second")
            if flags.save_features is not None:
                save_features(Path(flags.save_features), features, extractor.settings(), mesh.device)
                say(f"features in {flags.save_features}")
            inputs = _inputs(flags, samples, features, networks, reference, mesh.device, with_captions)
            if flags.features == DIGITS:
                inputs = _beside_real(inputs, samples, extractor, flags.reference == DIGITS)
            for name in metrics:
                try:
                    of_metric = [_measurement(f, flags, samples, networks, reference) for f in figures(name, inputs)]
                except ValueError as error:
                    problems.append(str(error))
                    continue
                append_results(output, of_metric)
                found += of_metric
            _show(output, found)
            for problem in problems:
                say(problem)
            if line := digits_line(found):
                print(line, flush=True)
        mesh.barrier()
        problems = mesh.broadcast_object(problems)
        if problems and (flags.metrics or not found) and metrics:
            raise ValueError(problems[0])
    return found


def _usable(layout: Layout, samples: Samples) -> Layout:
    """The features that figures can be computed of: without knowing what was asked for, not whether it is seen."""
    missing = set() if samples.asked else {"digit", "moved"}
    if samples.asked and samples.asked.directions is None:
        missing = {"moved"}
    return {name: shape for name, shape in layout.items() if name not in missing}


def _beside_real(inputs: MetricInputs, samples: Samples, extractor: Extractor, reference: bool) -> MetricInputs:
    """With the features of real digits."""
    clips = samples.options if samples.clips else None
    train, held_out = real_digits("train", clips, min(samples.count, REAL)), real_digits("test", clips)
    found = [extractor(torch.from_numpy(real.media.whole(range(real.media.count)))) for real in (train, held_out)]
    return replace(inputs, asked=samples.asked, real=RealSamples(*found, held_out.asked, reference))


def _compares(flags: "EvaluateConfig") -> bool:
    """Whether any of the metrics looks at the reference."""
    return not flags.metrics or any(METRICS[name].reference or name == "motion" for name in flags.metrics)


def _agreed(mesh: Mesh, decide: Callable[[], T]) -> T:
    """What rank 0 decides, which alone has the features of the reference, on every rank; or its ValueError there."""
    value, problem = None, None
    if mesh.is_main:
        try:
            value = decide()
        except ValueError as error:
            problem = str(error)
    value, problem = mesh.broadcast_object((value, problem))
    if problem is not None:
        raise ValueError(problem)
    return cast(T, value)


def _load_networks(
    flags: "EvaluateConfig", samples: Samples, device: torch.device, say: Callable[[str], None]
) -> _Networks:
    """Those that the metrics need. Raises FileNotFoundError if one is asked for and not there."""
    asked = {METRICS[name].features for name in flags.metrics or METRICS}
    how = {"how": flags.resize, "precision": flags.feature_precision}

    def load(path: str | None, clips: bool, flag: str) -> FeatureNetwork | None:
        try:
            return load_network(path or find_default(clips, flag), device, clips=clips, **how)
        except FileNotFoundError as error:
            if path is not None or flags.metrics or not samples.clips:
                raise
            say(f"{error}")
            return None

    if flags.features == DIGITS:
        network = digits_network(device, clip_shape(samples.options) if samples.clips else None)
        return _Networks(None if samples.clips else network, network if samples.clips else None, None)
    pictures = load(flags.features, False, "--features") if asked & {"pool", "spatial", "logits"} else None
    clips = load(flags.video_features, True, "--video_features") if samples.clips and "clip" in asked else None
    captions = None
    if flags.clip_model is not None:
        captions = load_network(flags.clip_model, device, precision=flags.feature_precision)
    return _Networks(pictures, clips, captions)


def _inputs(
    flags: "EvaluateConfig",
    samples: Samples,
    features: Features,
    networks: _Networks,
    reference: Reference | None,
    device: torch.device,
    with_captions: bool,
) -> MetricInputs:
    scores, truncated = None, None
    if with_captions and "caption" in features.arrays and flags.clip_model and samples.captions is not None:
        words, cut = caption_embeddings(Path(flags.clip_model), list(samples.captions), device)
        scores, truncated = clip_scores(features.arrays["caption"].to(device), words), sum(cut)
    inception = networks.pictures is not None and networks.pictures.inception
    return MetricInputs(
        features.arrays, samples.clips, inception, reference, device, flags.intervals, scores, truncated
    )


def _measurement(
    figure: Figure, flags: "EvaluateConfig", samples: Samples, networks: _Networks, reference: Reference | None
) -> Measurement:
    network = None if figure.network is None else getattr(networks, figure.network)
    told = dict(samples.told)
    if network is not None:
        told |= {
            "features": network.name,
            "features_sha256": network.sha256,
            "features_known": network.known,
            "resize": network.resize,
            "feature_precision": network.precision,
        }
    if reference is not None and figure.compared:
        told |= {
            "reference": reference.name,
            "reference_sha256": reference.sha256,
            "reference_count": reference.count,
        }
    versions = code()
    return Measurement(
        metric=figure.metric,
        value=figure.value,
        count=samples.count,
        size=" x ".join(map(str, samples.shape[:-1])),
        interval=figure.interval,
        interval_by=figure.interval_by,
        truncated=figure.truncated,
        of_real=figure.of_real,
        note=figure.note,
        commit=versions["commit"],
        torch=versions["torch"],
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **told,
    )


def _announce(samples: Samples, networks: _Networks, reference: Reference | None, metrics: list[str]) -> None:
    rows = {"samples": f"{samples.count:,} of {' x '.join(map(str, samples.shape[:-1]))}, {samples.told['samples']}"}
    if reference is not None:
        count = "" if reference.count is None else f", {reference.count:,} samples"
        rows["reference"] = f"{reference.name}{count}, SHA-256 {reference.sha256}"
    for name in ("pictures", "clips", "captions"):
        if (network := getattr(networks, name)) is not None:
            rows[f"features of {name}"] = network.describe()
    rows["metrics"] = ", ".join(metrics) or "none"
    print_block("OpenDiT evaluation", rows)


def _show(output: Path, found: list[Measurement]) -> None:
    """The new figures, and below earlier ones of the same metrics."""
    kinds = {row.metric for row in found}
    rows = [row for row in read_results(output / "results.jsonl") if row.metric in kinds]
    new = [without_time(row) for row in found]
    earlier = [row for row in rows if without_time(row) not in new][-EARLIER:]
    print(table([*earlier, *found]))
    sys.stdout.flush()
