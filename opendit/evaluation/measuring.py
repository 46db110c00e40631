"""Compute figures from the features of samples, with the networks, the reference and the metrics of an evaluation."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from opendit.config.console import print_block
from opendit.config.evaluate import EvaluateConfig
from opendit.config.names import DIGITS, METRICS
from opendit.evaluation.extract import Extractor, Layout
from opendit.evaluation.figures import Figure, MetricInputs, RealSamples, check_features, figure_names, figures, plan
from opendit.evaluation.media import MediaOptions
from opendit.evaluation.metrics import clip_scores
from opendit.evaluation.networks import FeatureNetwork, caption_embeddings, digits_network, find_default, load_network
from opendit.evaluation.reference import clip_shape, open_reference, real_digits
from opendit.evaluation.results import Measurement
from opendit.evaluation.samples import DescribedSamples
from opendit.parallel.mesh import Mesh
from opendit.training.fingerprint import code

logger = logging.getLogger(__name__)
T = TypeVar("T")
REAL = 1_000  # maximum number of training digits to compare with the samples


class Measuring:
    """A checked evaluation with loaded networks and an open reference, whose metrics can all be computed.

    The construction is collective. Construct the object before any sample is drawn.

    Args:
        samples: description of the samples: shape, reading options, captions, and requested digits.
        output: folder that caches the features of the reference.

    Attributes:
        extractor: function that computes the samples' features.
        reference: the reference; None if no metric needs one.
        metrics: names of the metrics to compute.
        figure_names: names of the metrics' figures.
        why_nothing: error message for an evaluation without metrics.

    Raises:
        ValueError: a requested metric can't be computed; the message names the missing input.
        OSError: a file does not exist.
    """

    def __init__(self, flags: EvaluateConfig, samples: DescribedSamples, output: Path, mesh: Mesh):
        self._flags, self._samples, self._device = flags, samples, mesh.device
        self._of_clips = samples.options if samples.clips else None
        self._networks = load_networks(flags, self._of_clips, mesh)
        self._with_captions = samples.captions is not None and self._networks.captions is not None
        self.extractor = self._networks.extractor(flags, mesh.device, samples.clips, self._with_captions)
        layout = _usable(self.extractor.layout(samples.shape), samples)
        check_features(flags.metrics, layout, self._with_captions)
        self._real: RealSamples | None = None  # cached, because a training run measures many times
        self.reference = None
        if flags.reference is not None and _compares(flags):
            of_reference = self._networks.extractor(flags, mesh.device, samples.clips, captions=False)
            self.reference = open_reference(
                flags.reference, of_reference, samples.options, output, mesh, clips=samples.clips
            )
        self.metrics, left_out = _agreed(mesh, lambda: plan(flags.metrics, layout, self.reference, self._with_captions))
        pictures = self._networks.pictures
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
            if (network := getattr(self._networks, name)) is not None:
                rows[f"features of {name}"] = network.describe()
        rows["metrics"] = ", ".join(self.metrics) or "none"
        print_block("OpenDiT evaluation", rows)

    def compute(
        self, features: dict[str, Tensor], details: dict[str, Any], problems: list[str]
    ) -> Iterator[list[Measurement]]:
        """Yield the figures of each metric. Call on rank 0 only.

        Args:
            features: name -> features of all samples.
            details: fields that are equal in all measurements.
            problems: list of messages; one is added for each metric that can't be computed.
        """
        inputs = self._inputs(features)
        for name in self.metrics:
            try:
                yield [self._measurement(figure, details) for figure in figures(name, inputs)]
            except ValueError as error:
                problems.append(str(error))

    def _inputs(self, features: dict[str, Tensor]) -> MetricInputs:
        flags, samples, pictures = self._flags, self._samples, self._networks.pictures
        scores, truncated = None, None
        if self._with_captions and "caption" in features and flags.clip_model and samples.captions is not None:
            words, cut = caption_embeddings(Path(flags.clip_model), list(samples.captions), self._device)
            scores, truncated = clip_scores(features["caption"].to(self._device), words), sum(cut)
        inception = pictures is not None and pictures.inception
        inputs = MetricInputs(
            features, samples.clips, inception, self.reference, self._device, flags.intervals, scores, truncated
        )
        if flags.features != DIGITS:
            return inputs
        self._real = self._real or real_samples(samples, self.extractor, flags.reference == DIGITS)
        return replace(inputs, asked=samples.asked, real=self._real)

    def _measurement(self, figure: Figure, details: dict[str, Any]) -> Measurement:
        network = None if figure.network is None else getattr(self._networks, figure.network)
        details, samples, reference = dict(details), self._samples, self.reference
        if network is not None:
            details |= {
                "features": network.name,
                "features_sha256": network.sha256,
                "features_known": network.known,
                "resize": network.resize,
                "feature_precision": network.precision,
            }
        if reference is not None and figure.compared:
            details |= {
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
            **details,
        )


@dataclass(frozen=True)
class Networks:
    """Feature networks of an evaluation. A network that no metric needs is None."""

    pictures: FeatureNetwork | None
    clips: FeatureNetwork | None
    captions: FeatureNetwork | None

    def extractor(self, flags: EvaluateConfig, device: torch.device, motion: bool, captions: bool) -> Extractor:
        """Build the extractor.

        Args:
            motion: True to measure the motion of clips.
            captions: True to compute CLIP's features, for samples with captions.
        """
        shown = self.captions if captions else None
        return Extractor(device, self.pictures, self.clips, shown, motion, flags.feature_batch_size)


def load_networks(flags: EvaluateConfig, of_clips: MediaOptions | None, mesh: Mesh) -> Networks:
    """Load the networks that the metrics need.

    Args:
        of_clips: options for reading clips; None if the samples are pictures.

    Raises:
        FileNotFoundError: a requested network does not exist.
    """
    device = mesh.device
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
        return Networks(None if of_clips else network, network if of_clips else None, None)
    pictures = load(flags.features, False, "--features") if asked & {"pool", "spatial", "logits"} else None
    clips = load(flags.video_features, True, "--video_features") if of_clips and "clip" in asked else None
    captions = None
    if flags.clip_model is not None:
        captions = load_network(flags.clip_model, device, precision=flags.feature_precision)
    return Networks(pictures, clips, captions)


def real_samples(samples: DescribedSamples, extractor: Extractor, reference: bool) -> RealSamples:
    """Compute the features of real digits.

    The number of training digits equals the number of samples, but is at most REAL. All held-out digits are used.

    Args:
        reference: True if the held-out digits are also the reference.
    """
    of_clips = samples.options if samples.clips else None
    train, held_out = real_digits("train", of_clips, min(samples.count, REAL)), real_digits("test", of_clips)
    of_train, of_held_out = (extractor(torch.from_numpy(real.media.read_all())) for real in (train, held_out))
    return RealSamples(of_train, of_held_out, held_out.asked, reference)


def _usable(layout: Layout, samples: DescribedSamples) -> Layout:
    """Drop the features "digit" and "moved" if the requested digit or direction is unknown for a sample."""
    missing = set() if samples.asked else {"digit", "moved"}
    if samples.asked and samples.asked.directions is None:
        missing = {"moved"}
    return {name: shape for name, shape in layout.items() if name not in missing}


def _compares(flags: EvaluateConfig) -> bool:
    """Return True if any of the metrics needs the reference."""
    return not flags.metrics or any(METRICS[name].reference or name == "motion" for name in flags.metrics)


def _agreed(mesh: Mesh, decide: Callable[[], T]) -> T:
    """Call ``decide`` on rank 0, which alone has the reference's features. Return its result, or raise its error, on
    every rank."""
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
