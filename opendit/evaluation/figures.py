"""Compute the figures of an evaluation from features, and check that each metric has the features that it needs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.config.names import METRICS
from opendit.evaluation.digits import COPY_QUANTILE, AskedDigits, moved_right, named_right, share_of_copies
from opendit.evaluation.extract import Layout
from opendit.evaluation.metrics import (
    GROUPS,
    NEIGHBOURS,
    NORMAL_95,
    SPLIT,
    SUBSET,
    SUBSETS,
    Moments,
    frechet_distance,
    inception_score,
    jackknife_error,
    kernel_distance,
    precision_recall,
)
from opendit.evaluation.reference import Reference

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


@dataclass(frozen=True)
class Figure:
    """The value of a metric, with its interval.

    Attributes:
        metric: name of the figure.
        value: the value.
        network: kind of the feature network: "pictures", "clips" or "captions".
        interval: (low, high), or None.
        interval_by: name of the method that computed the interval.
        compared: True if the figure compares samples with the reference.
        truncated: number of captions that CLIP truncates.
        of_real: the same figure for real samples, or None if these are unknown.
        note: a remark for the user.
    """

    metric: str
    value: float
    network: str | None = None
    interval: tuple[float, float] | None = None
    interval_by: str | None = None
    compared: bool = True
    truncated: int | None = None
    of_real: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class RealSamples:
    """Features of real digits, for comparison with the features of the samples.

    Attributes:
        train: features of training digits: as many digits as samples, but at most REAL.
        held_out: features of the held-out digits.
        asked: the digits and directions that the held-out samples show.
        reference: True if the held-out digits are also the reference.
    """

    train: dict[str, Tensor]
    held_out: dict[str, Tensor]
    asked: AskedDigits
    reference: bool


@dataclass(frozen=True)
class MetricInputs:
    """The inputs of all figures.

    Attributes:
        features: features of the samples, name -> (N, ...).
        clips: True if the samples are clips.
        inception: True if "pool" comes from the Inception network that defines FID.
        reference: the reference, or None.
        device: device of the computation.
        intervals: True to compute jackknife intervals.
        scores: CLIP score of every sample, (N,).
        truncated: number of captions that CLIP truncates.
        asked, real: the requested digits and the real digits, for the built-in digits only.
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
        """Return features of the samples as rows (N, D), on the device of the computation."""
        return _rows(self.features[name], self.device)

    def of_reference(self, name: str) -> Tensor:
        return _rows(self.compared_with.features[name], self.device)

    @property
    def compared_with(self) -> Reference:
        """The reference; the inputs must have one."""
        assert self.reference is not None
        return self.reference

    @property
    def digits(self) -> tuple[AskedDigits, RealSamples]:
        """The requested digits and the real digits; the inputs must have both."""
        assert self.asked is not None and self.real is not None
        return self.asked, self.real


def _rows(features: Tensor, device: torch.device) -> Tensor:
    return features.flatten(0, -2).to(device)


def check_features(asked: Sequence[str], layout: Layout, captions: bool) -> None:
    """Raise ValueError if the samples lack the features for a requested metric, or have no features at all.

    This check runs before anything is computed.
    """
    for name in asked:
        if (problem := _without(name, layout, captions)) is not None:
            raise ValueError(f"--metrics {name}: {problem}; leave it out")
    if not layout:
        raise ValueError(f"there is nothing to measure: {_WITHOUT['pool']}")


def plan(
    asked: Sequence[str], layout: Layout, reference: Reference | None, captions: bool
) -> tuple[list[str], list[str]]:
    """Return the metrics to compute, and a message for each metric that is left out although its features exist.

    If ``asked`` is empty, all metrics that can be computed are returned. Raises ValueError, before any sample is drawn,
    if a requested metric can't be computed; the message names the missing input.
    """
    found, left_out = [], []
    for name in asked or METRICS:
        problem = _problem(name, layout, reference, captions)
        if problem is None:
            found.append(name)
        elif asked:
            raise ValueError(f"--metrics {name}: {problem}; leave it out")
        elif METRICS[name].features in layout:  # no message for clips' metrics of pictures, which lack the features
            left_out.append(f"{name} is left out: {problem}")
    return found, left_out


def _problem(name: str, layout: Layout, reference: Reference | None, captions: bool) -> str | None:
    features, needs, _ = METRICS[name]
    if (problem := _without(name, layout, captions)) is not None:
        return problem
    if needs is None:
        return None
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
    """Return the names of the figures that a metric consists of.

    Args:
        clips, inception: see :class:`MetricInputs`.
        digits: True if the features are those of the built-in digits.
    """
    if metric == "pr":
        return ("precision", "recall")
    if metric not in ("fid", "sfid", "fvd"):
        return (metric,)
    if digits:
        return ("frechet_distance",)
    if metric == "fvd":
        return ("fvd",)
    # The distances are called FID and sFID only if they are computed from Inception's features.
    name = metric if inception else {"fid": "frechet_distance", "sfid": "spatial_frechet_distance"}[metric]
    return (f"frame_{name}" if clips else name,)


def figures(name: str, inputs: MetricInputs) -> Iterator[Figure]:
    """Compute the figures of a metric that :func:`plan` returned.

    Raises ValueError, with the metric's name, if there are too few samples.
    """
    try:
        yield from _COMPUTE[name](inputs)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


# ------------------------------------------------------------------------------------------ each metric


def _frechet(metric: str, features: str, network: str) -> Callable[[MetricInputs], Iterator[Figure]]:
    def compute(inputs: MetricInputs) -> Iterator[Figure]:
        rows, reference = inputs.of(features), inputs.compared_with.gaussian(features, inputs.device)
        assert reference is not None  # plan() has checked this
        value = frechet_distance(Moments.of(rows).gaussian(), reference)
        interval, by, note = None, None, None
        samples = inputs.features[features]
        if inputs.intervals and len(samples) >= 2 * GROUPS:
            error = NORMAL_95 * jackknife_error(samples.to(inputs.device), reference)
            interval, by = (value - error, value + error), f"jackknife of {GROUPS} groups, 95 %"
        if len(rows) <= rows.shape[1]:
            note = (
                f"{metric}: {len(rows):,} samples are not more than the {rows.shape[1]:,} numbers of their features: "
                "the distance is much larger than that of many samples; kid does not depend on their number"
            )
        (name,) = figure_names(metric, inputs.clips, inputs.inception, inputs.real is not None)
        floor = None
        if inputs.real is not None and inputs.real.reference:
            train = _rows(inputs.real.train[features], inputs.device)
            floor = frechet_distance(Moments.of(train).gaussian(), reference)
        yield Figure(name, value, network, interval, by, of_real=floor, note=note)

    return compute


def _inception(inputs: MetricInputs) -> Iterator[Figure]:
    value, spread = inception_score(inputs.of("logits"))
    interval = None if spread is None else (value - spread, value + spread)
    by = None if spread is None else f"standard deviation of splits of {SPLIT:,}"
    yield Figure("is", value, "pictures", interval, by, compared=False)


def _precision_recall(inputs: MetricInputs) -> Iterator[Figure]:
    values = precision_recall(inputs.of("pool"), inputs.of_reference("pool"))
    note = f"precision and recall: {NEIGHBOURS} neighbours, float32 distances (ADM's are float16)"
    for name, value in zip(("precision", "recall"), values, strict=True):
        yield Figure(name, value, "pictures", note=note)


def _kernel(inputs: MetricInputs) -> Iterator[Figure]:
    samples, reference = inputs.of("pool"), inputs.of_reference("pool")
    value, spread = kernel_distance(samples, reference)
    size = min(SUBSET, len(samples), len(reference))
    by = f"standard deviation of {SUBSETS} subsets of {size:,}"
    yield Figure("kid", value, "pictures", (value - spread, value + spread), by)


def _motion(inputs: MetricInputs) -> Iterator[Figure]:
    note = None
    if inputs.reference is not None and "motion" in inputs.reference.features:
        note = f"motion of the reference: {float(inputs.of_reference('motion').double().mean()):.6g} of 255"
    yield Figure("motion", *_mean(inputs.of("motion").double().flatten()), compared=False, note=note)


def _accuracy(inputs: MetricInputs) -> Iterator[Figure]:
    asked, real = inputs.digits
    right = named_right(inputs.of("digit"), asked)
    real = named_right(real.held_out["digit"], real.asked)
    yield _share("accuracy", inputs, right, real)


def _direction(inputs: MetricInputs) -> Iterator[Figure]:
    asked, real = inputs.digits
    right = moved_right(inputs.of("moved"), asked)
    yield _share("direction", inputs, right, moved_right(real.held_out["moved"], real.asked))


def _share(metric: str, inputs: MetricInputs, right: Tensor, real: Tensor) -> Figure:
    value = float(right.double().mean())
    interval, by = share_interval(value, len(right)), "Wilson's score, 95 %"
    return Figure(metric, value, _network(inputs), interval, by, compared=False, of_real=float(real.double().mean()))


def _copies(inputs: MetricInputs) -> Iterator[Figure]:
    assert inputs.real is not None
    value = share_of_copies(inputs.of("nearest").cpu(), inputs.real.held_out["nearest"])
    note = f"copies: nearer to a training digit than all but {COPY_QUANTILE:.0%} of the held-out ones are"
    yield Figure("copies", value, _network(inputs), compared=False, of_real=COPY_QUANTILE, note=note)


def _network(inputs: MetricInputs) -> str:
    return "clips" if inputs.clips else "pictures"


def _clip_score(inputs: MetricInputs) -> Iterator[Figure]:
    assert inputs.scores is not None
    value, _, interval, by = _mean(inputs.scores.double())
    yield Figure("clip_score", value, "captions", interval, by, compared=False, truncated=inputs.truncated)


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval (1927) for a share in [0, 1] of ``count`` samples.

    The interval stays within [0, 1]. Unlike a standard error, it has a width above 0 at shares of 0 and 1.
    """
    square = NORMAL_95**2 / count
    middle = (share + square / 2) / (1 + square)
    error = NORMAL_95 / (1 + square) * (share * (1 - share) / count + square / (4 * count)) ** 0.5
    return max(0.0, middle - error), min(1.0, middle + error)


def _mean(values: Tensor) -> tuple[float, None, tuple[float, float] | None, str | None]:
    """Return (mean, None, interval, name of the interval's method): the fields of :class:`Figure` after ``metric``."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, None, None, None
    error = NORMAL_95 * float(values.std()) / len(values) ** 0.5
    return mean, None, (mean - error, mean + error), "standard error, 95 %"


_COMPUTE: dict[str, Callable[[MetricInputs], Iterator[Figure]]] = {
    "fid": _frechet("fid", "pool", "pictures"),
    "sfid": _frechet("sfid", "spatial", "pictures"),
    "is": _inception,
    "pr": _precision_recall,
    "kid": _kernel,
    "fvd": _frechet("fvd", "clip", "clips"),
    "motion": _motion,
    "accuracy": _accuracy,
    "direction": _direction,
    "copies": _copies,
    "clip_score": _clip_score,
}
