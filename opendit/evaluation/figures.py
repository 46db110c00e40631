"""Load an evaluation's networks and reference, and compute its metrics from the samples' features."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from opendit.config.console import print_block
from opendit.config.evaluate import EvaluateConfig
from opendit.config.names import DIGITS, METRICS
from opendit.evaluation import metrics
from opendit.evaluation.digits import COPY_QUANTILE, AskedDigits, moved_right, named_right, share_of_copies
from opendit.evaluation.extract import Extractor, Layout
from opendit.evaluation.media import MediaOptions
from opendit.evaluation.networks import FeatureNetwork, caption_embeddings, digits_network, find_default, load_network
from opendit.evaluation.results import Measurement
from opendit.evaluation.samples import DescribedSamples, Reference, clip_shape, open_reference, real_digits
from opendit.parallel.mesh import Mesh
from opendit.training.fingerprint import code

logger = logging.getLogger(__name__)
T = TypeVar("T")
REAL = 1_000  # maximum number of training digits to compare samples with
_WITHOUT = {
    "pool": "there is no network of pictures (--features)",
    "spatial": "there are no spatial features: this network has none, or these are clips",
    "logits": "there are no logits of a classifier: this network has none, or these are clips",
    "clip": "there are no features of clips: these are pictures, or there is no --video_features",
    "motion": "these are no clips",
    "caption": "there are no captions, or no --clip_model",
    "digit": "it needs --features digits, and samples whose digits are known: by their labels or captions",
    "moved": "it needs --features digits, and clips whose directions are known by their captions",
    "nearest": "it needs --features digits",
}
# Feature -> the extractor's network. Other features, such as "digit", come from either network.
_NETWORKS = {"pool": "pictures", "spatial": "pictures", "logits": "pictures"}
_NETWORKS |= {"clip": "clips", "caption": "captions", "motion": None}


@dataclass(frozen=True)
class Figure:
    """A metric's value. The fields are as in :class:`Measurement`."""

    metric: str
    value: float
    interval: tuple[float, float] | None = None
    interval_by: str | None = None
    truncated: int | None = None
    of_real: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class RealSamples:
    """Features of real digits, to compare the samples with.

    Attributes:
        train: features of min(REAL, number of samples) training digits.
        asked: the held-out samples' digits, and for clips their directions.
        reference: True if the held-out digits are also the reference.
    """

    train: dict[str, Tensor]
    held_out: dict[str, Tensor]
    asked: AskedDigits
    reference: bool


@dataclass(frozen=True)
class MetricInputs:
    """The inputs of all metrics.

    Attributes:
        features: name -> the samples' features (N, ...).
        inception: True if "pool" comes from the Inception network that defines FID.
        intervals: True to compute jackknife intervals.
        scores: each sample's CLIP score, (N,).
        truncated: number of captions that CLIP truncates.
        asked, real: requested digits, and real digits; only with --features digits.
    """

    features: dict[str, Tensor]
    clips: bool
    inception: bool
    reference: Reference | None
    device: torch.device
    intervals: bool = True
    scores: Tensor | None = None
    truncated: int | None = None
    asked: AskedDigits | None = None
    real: RealSamples | None = None

    def of(self, name: str) -> Tensor:
        """Return the samples' features on ``device``, as rows (N, D) or, for clips' frames, (N * T, D)."""
        return _rows(self.features[name], self.device)

    def of_reference(self, name: str) -> Tensor:
        assert self.reference is not None  # plan() has checked this
        return _rows(self.reference.features[name], self.device)


def _rows(features: Tensor, device: torch.device) -> Tensor:
    return features.flatten(0, -2).to(device)


def check_features(asked: Sequence[str], layout: Layout, captions: bool) -> None:
    """Raise ValueError if the samples have no features, or lack the features for a requested metric."""
    for name in asked:
        if (problem := _without(name, layout, captions)) is not None:
            raise ValueError(f"--metrics {name}: {problem}; leave it out")
    if not layout:
        raise ValueError(f"there is nothing to measure: {_WITHOUT['pool']}")


def plan(
    asked: Sequence[str], layout: Layout, reference: Reference | None, captions: bool
) -> tuple[list[str], list[str]]:
    """Return (metrics to compute, messages about metrics that are left out). If ``asked`` is empty, all possible
    metrics are computed. Otherwise, raises ValueError if a requested metric is impossible."""
    found, left_out = [], []
    for name in asked or METRICS:
        problem = _problem(name, layout, reference, captions)
        if problem is None:
            found.append(name)
        elif asked:
            raise ValueError(f"--metrics {name}: {problem}; leave it out")
        elif METRICS[name].features in layout:  # missing features, such as logits of clips, need no message
            left_out.append(f"{name} is left out: {problem}")
    return found, left_out


def _problem(name: str, layout: Layout, reference: Reference | None, captions: bool) -> str | None:
    features, needs, _ = METRICS[name]
    if (problem := _without(name, layout, captions)) is not None or needs is None:
        return problem
    if reference is None:
        return "there is no --reference"
    if features in reference.features:
        width = reference.features[features].shape[-1]
    elif needs == "features":
        return f"--reference {reference.name} holds statistics alone, and it needs features of samples"
    elif features in reference.gaussians:
        width = reference.gaussians[features].width
    else:
        return f"--reference {reference.name} has nothing of {features} features"
    if width != layout[features][-1]:
        return (
            f"--reference {reference.name} is of features of {width:,} numbers, these are {layout[features][-1]:,}: of "
            "another network"
        )
    return None


def _without(name: str, layout: Layout, captions: bool) -> str | None:
    features = METRICS[name].features
    return None if features in layout and (captions or features != "caption") else _WITHOUT[features]


def figure_names(metric: str, clips: bool, inception: bool, digits: bool) -> tuple[str, ...]:
    """Return the names of a metric's values, such as "precision" and "recall" for "pr". digits: --features digits."""
    if metric == "pr":
        return ("precision", "recall")
    if metric not in ("fid", "sfid", "fvd"):
        return (metric,)
    if digits:
        return ("frechet_distance",)
    if metric == "fvd":
        return ("fvd",)
    # Only Inception's features give FID and sFID.
    name = metric if inception else {"fid": "frechet_distance", "sfid": "spatial_frechet_distance"}[metric]
    return (f"frame_{name}" if clips else name,)


def figures(name: str, inputs: MetricInputs) -> Iterator[Figure]:
    """Yield a metric's values. Raises ValueError that begins with the metric's name."""
    try:
        yield from _COMPUTE[name](inputs)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _frechet(metric: str, features: str) -> Callable[[MetricInputs], Iterator[Figure]]:
    def compute(inputs: MetricInputs) -> Iterator[Figure]:
        rows, reference = inputs.of(features), inputs.reference and inputs.reference.gaussian(features, inputs.device)
        assert reference is not None  # plan() has checked this
        value = metrics.frechet_distance(metrics.Moments.of(rows).gaussian(), reference)
        interval, by, note = None, None, None
        samples = inputs.features[features]
        if inputs.intervals and len(samples) >= 2 * metrics.GROUPS:
            error = metrics.NORMAL_95 * metrics.jackknife_error(samples.to(inputs.device), reference)
            interval, by = (value - error, value + error), f"jackknife of {metrics.GROUPS} groups, 95 %"
        if len(rows) <= rows.shape[1]:
            note = (
                f"{metric}: {len(rows):,} samples are not more than the {rows.shape[1]:,} numbers of their features: "
                "the distance is much larger than that of many samples; kid does not depend on their number"
            )
        (name,) = figure_names(metric, inputs.clips, inputs.inception, inputs.real is not None)
        floor = None
        if inputs.real is not None and inputs.real.reference:
            train = _rows(inputs.real.train[features], inputs.device)
            floor = metrics.frechet_distance(metrics.Moments.of(train).gaussian(), reference)
        yield Figure(name, value, interval, by, of_real=floor, note=note)

    return compute


def _inception(inputs: MetricInputs) -> Iterator[Figure]:
    value, spread = metrics.inception_score(inputs.of("logits"))
    interval = None if spread is None else (value - spread, value + spread)
    by = None if spread is None else f"standard deviation of splits of {metrics.SPLIT:,}"
    yield Figure("is", value, interval, by)


def _precision_recall(inputs: MetricInputs) -> Iterator[Figure]:
    values = metrics.precision_recall(inputs.of("pool"), inputs.of_reference("pool"))
    note = f"precision and recall: {metrics.NEIGHBOURS} neighbours, float32 distances (ADM's are float16)"
    for name, value in zip(("precision", "recall"), values, strict=True):
        yield Figure(name, value, note=note)


def _kernel(inputs: MetricInputs) -> Iterator[Figure]:
    samples, reference = inputs.of("pool"), inputs.of_reference("pool")
    value, spread = metrics.kernel_distance(samples, reference)
    size = min(metrics.SUBSET, len(samples), len(reference))
    by = f"standard deviation of {metrics.SUBSETS} subsets of {size:,}"
    yield Figure("kid", value, (value - spread, value + spread), by)


def _motion(inputs: MetricInputs) -> Iterator[Figure]:
    note = None
    if inputs.reference is not None and "motion" in inputs.reference.features:
        note = f"motion of the reference: {float(inputs.of_reference('motion').double().mean()):.6g} of 255"
    value, interval, by = _mean(inputs.of("motion").double().flatten())
    yield Figure("motion", value, interval, by, note=note)


def _share_right(
    metric: str, features: str, is_right: Callable[[Tensor, AskedDigits], Tensor]
) -> Callable[[MetricInputs], Iterator[Figure]]:
    def compute(inputs: MetricInputs) -> Iterator[Figure]:
        assert inputs.asked is not None and inputs.real is not None  # true with features of digits
        right = is_right(inputs.of(features), inputs.asked)
        value, of_real = (
            float(found.double().mean())
            for found in (right, is_right(inputs.real.held_out[features], inputs.real.asked))
        )
        interval, by = share_interval(value, len(right)), "Wilson's score, 95 %"
        yield Figure(metric, value, interval, by, of_real=of_real)

    return compute


def _copies(inputs: MetricInputs) -> Iterator[Figure]:
    assert inputs.real is not None
    value = share_of_copies(inputs.of("nearest").cpu(), inputs.real.held_out["nearest"])
    note = f"copies: nearer to a training digit than all but {COPY_QUANTILE:.0%} of the held-out ones are"
    yield Figure("copies", value, of_real=COPY_QUANTILE, note=note)


def _clip_score(inputs: MetricInputs) -> Iterator[Figure]:
    assert inputs.scores is not None
    value, interval, by = _mean(inputs.scores.double())
    yield Figure("clip_score", value, interval, by, truncated=inputs.truncated)


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval (1927) for a share in [0, 1] of ``count`` samples. Even for shares of 0 and
    1, the interval has a width above 0."""
    square = metrics.NORMAL_95**2 / count
    middle = (share + square / 2) / (1 + square)
    error = metrics.NORMAL_95 / (1 + square) * (share * (1 - share) / count + square / (4 * count)) ** 0.5
    return max(0.0, middle - error), min(1.0, middle + error)


def _mean(values: Tensor) -> tuple[float, tuple[float, float] | None, str | None]:
    mean = float(values.mean())
    if len(values) < 2:
        return mean, None, None
    error = metrics.NORMAL_95 * float(values.std()) / len(values) ** 0.5
    return mean, (mean - error, mean + error), "standard error, 95 %"


_COMPUTE: dict[str, Callable[[MetricInputs], Iterator[Figure]]] = {
    "fid": _frechet("fid", "pool"),
    "sfid": _frechet("sfid", "spatial"),
    "is": _inception,
    "pr": _precision_recall,
    "kid": _kernel,
    "fvd": _frechet("fvd", "clip"),
    "motion": _motion,
    "accuracy": _share_right("accuracy", "digit", named_right),
    "direction": _share_right("direction", "moved", moved_right),
    "copies": _copies,
    "clip_score": _clip_score,
}


class Measuring:
    """An evaluation with checked flags, loaded networks and an opened reference. Construct this object on all ranks,
    before samples are drawn.

    Args:
        output: folder that caches the reference's features.

    Attributes:
        extractor: function that computes the samples' features.
        reference: None if no metric needs one.
        metrics: names of the metrics to compute.
        figure_names: names of all values, see :func:`figure_names`.
        why_nothing: error message for an evaluation without metrics.

    Raises:
        ValueError: a requested metric is impossible; the message names the missing input.
        OSError: a file is missing.
    """

    def __init__(self, flags: EvaluateConfig, samples: DescribedSamples, output: Path, mesh: Mesh):
        self._flags, self._samples, self._device = flags, samples, mesh.device
        self._of_clips = samples.options if samples.clips else None
        self.extractor = load_networks(flags, self._of_clips, mesh)
        if samples.captions is None:
            self.extractor = replace(self.extractor, captions=None)
        captions = self.extractor.captions is not None
        layout = _usable(self.extractor.layout(samples.shape), samples)
        check_features(flags.metrics, layout, captions)
        self._real: RealSamples | None = None  # kept, because a training run measures many times
        self.reference = None
        if flags.reference is not None and _compares(flags):
            of_reference = replace(self.extractor, captions=None)
            self.reference = open_reference(
                flags.reference, of_reference, samples.options, output, mesh, clips=samples.clips
            )
        self.metrics, left_out = _agreed(mesh, lambda: plan(flags.metrics, layout, self.reference, captions))
        pictures = self.extractor.pictures
        kind = samples.clips, pictures is not None and pictures.inception, flags.features == DIGITS
        self.figure_names = [name for metric in self.metrics for name in figure_names(metric, *kind)]
        self.why_nothing = f"there is nothing to measure: {'; '.join(left_out) or 'no network, and no reference'}"
        if mesh.is_main and (self.metrics or flags.save_features is not None):
            for line in left_out:
                logger.info("note: %s", line)

    def announce(self) -> None:
        """Print the samples, the reference, the feature networks and the metrics."""
        samples, reference = self._samples, self.reference
        rows = {
            "samples": f"{samples.count:,} of {' x '.join(map(str, samples.shape[:-1]))}, {samples.details['samples']}"
        }
        if reference is not None:
            count = "" if reference.count is None else f", {reference.count:,} samples"
            rows["reference"] = f"{reference.name}{count}, SHA-256 {reference.sha256}"
        for name in ("pictures", "clips", "captions"):
            if (network := getattr(self.extractor, name)) is not None:
                rows[f"features of {name}"] = network.describe()
        rows["metrics"] = ", ".join(self.metrics) or "none"
        print_block("OpenDiT evaluation", rows)

    def compute(
        self, features: dict[str, Tensor], details: dict[str, Any], problems: list[str]
    ) -> Iterator[list[Measurement]]:
        """Yield each metric's measurements. Call this on rank 0 only. details: fields for all measurements. problems: a
        list that gets a message for each metric that can't be computed."""
        inputs = self._inputs(features)
        for name in self.metrics:
            try:
                yield [self._measurement(name, figure, details) for figure in figures(name, inputs)]
            except ValueError as error:
                problems.append(str(error))

    def _inputs(self, features: dict[str, Tensor]) -> MetricInputs:
        flags, samples, pictures = self._flags, self._samples, self.extractor.pictures
        scores, truncated = None, None
        if self.extractor.captions is not None:
            assert flags.clip_model is not None and samples.captions is not None  # required for this network
            words, cut = caption_embeddings(Path(flags.clip_model), list(samples.captions), self._device)
            scores, truncated = metrics.clip_scores(features["caption"].to(self._device), words), sum(cut)
        inception = pictures is not None and pictures.inception
        inputs = MetricInputs(
            features, samples.clips, inception, self.reference, self._device, flags.intervals, scores, truncated
        )
        if flags.features != DIGITS:
            return inputs
        self._real = self._real or real_samples(samples, self.extractor, flags.reference == DIGITS)
        return replace(inputs, asked=samples.asked, real=self._real)

    def _measurement(self, metric: str, figure: Figure, details: dict[str, Any]) -> Measurement:
        details, samples, reference = dict(details), self._samples, self.reference
        kind = _NETWORKS.get(METRICS[metric].features, "clips" if samples.clips else "pictures")
        network: FeatureNetwork | None = getattr(self.extractor, kind) if kind else None
        if network is not None:
            details |= {
                "features": network.name,
                "features_sha256": network.sha256,
                "features_known": network.known,
                "resize": network.resize,
                "feature_precision": network.precision,
            }
        if reference is not None and METRICS[metric].reference is not None:
            details |= {
                "reference": reference.name,
                "reference_sha256": reference.sha256,
                "reference_count": reference.count,
            }
        versions = code()
        return Measurement(
            **vars(figure),
            count=samples.count,
            size=" x ".join(map(str, samples.shape[:-1])),
            commit=versions["commit"],
            torch=versions["torch"],
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **details,
        )


def load_networks(flags: EvaluateConfig, of_clips: MediaOptions | None, mesh: Mesh) -> Extractor:
    """Load the networks that the metrics need. of_clips: options for reading clips; None for pictures. Raises
    FileNotFoundError if a network is missing. For clips without --metrics, a missing default network only gives a
    message."""
    device = mesh.device
    extractor = partial(Extractor, device, motion=of_clips is not None, batch_size=flags.feature_batch_size)
    asked = {METRICS[name].features for name in flags.metrics or METRICS}
    how = {"how": flags.resize, "precision": flags.feature_precision}

    def load(path: str | None, clips: bool, flag: str) -> FeatureNetwork | None:
        try:
            return load_network(path or find_default(clips, flag), device, clips=clips, **how)
        except FileNotFoundError as error:
            if path is not None or flags.metrics or of_clips is None:
                raise
            if mesh.is_main:
                logger.info("note: %s", error)
            return None

    if flags.features == DIGITS:
        network = digits_network(device, clip_shape(of_clips) if of_clips else None)
        return extractor(clips=network) if of_clips else extractor(pictures=network)
    pictures = load(flags.features, False, "--features") if asked & {"pool", "spatial", "logits"} else None
    clips = load(flags.video_features, True, "--video_features") if of_clips and "clip" in asked else None
    captions = None
    if flags.clip_model is not None:
        captions = load_network(flags.clip_model, device, precision=flags.feature_precision)
    return extractor(pictures=pictures, clips=clips, captions=captions)


def real_samples(samples: DescribedSamples, extractor: Extractor, reference: bool) -> RealSamples:
    """Compute features of real digits, to compare ``samples`` with. reference: see :class:`RealSamples`."""
    of_clips = samples.options if samples.clips else None
    train, held_out = real_digits("train", of_clips, min(samples.count, REAL)), real_digits("test", of_clips)
    of_train, of_held_out = (extractor(torch.from_numpy(real.media.read_all())) for real in (train, held_out))
    return RealSamples(of_train, of_held_out, held_out.asked, reference)


def _usable(layout: Layout, samples: DescribedSamples) -> Layout:
    """Drop "digit" if the requested digits are unknown, and "moved" if the directions are unknown."""
    missing = set() if samples.asked else {"digit", "moved"}
    if samples.asked and samples.asked.directions is None:
        missing = {"moved"}
    return {name: shape for name, shape in layout.items() if name not in missing}


def _compares(flags: EvaluateConfig) -> bool:
    return not flags.metrics or any(METRICS[name].reference or name == "motion" for name in flags.metrics)


def _agreed(mesh: Mesh, decide: Callable[[], T]) -> T:
    """Call ``decide`` on rank 0, which has the reference's features. All ranks get the result or the ValueError."""
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
