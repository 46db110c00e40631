"""Open the samples of an evaluation: files, or pictures and clips that are drawn from a checkpoint."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opendit.checkpoint.lock import lock_folder
from opendit.common.stages import Stages
from opendit.config.evaluate import EvaluateConfig
from opendit.config.names import DIGITS
from opendit.data.digits import all_captions
from opendit.encoders.conditioner import CaptionConditioner
from opendit.encoders.video_vae import FrameCodec
from opendit.evaluation.digits import AskedDigits, asked_of_captions, asked_of_labels
from opendit.evaluation.extract import Extractor, Features, drawn_by, extract_media, extract_run
from opendit.evaluation.media import MediaOptions, open_media
from opendit.parallel.mesh import Mesh
from opendit.sampling.conditioning_frames import note_on_missing_frames
from opendit.sampling.job_settings import pixel_shape, settings_of
from opendit.sampling.sampling_run import WRITTEN, SamplingRun, announce, choose_labels, load_run

logger = logging.getLogger(__name__)

PICTURES, CLIPS = 50_000, 2_048  # the usual numbers of samples for FID and for FVD
FRAMES = 16  # default number of frames that are read from a clip in a file
FIX = "wait for its end, or give another --output"


@dataclass(frozen=True)
class DescribedSamples:
    """Properties of samples that are known before the samples are drawn or read.

    Attributes:
        count: number of samples.
        shape: shape of one sample, (H, W, 3) or (T, H, W, 3).
        captions: one per sample, or None.
        details: fields of a Measurement.
        options: options for reading the files of a reference, so that its pixels match the samples.
        asked: the digits that the samples should show, or None if unknown.
    """

    count: int
    shape: tuple[int, ...]
    captions: Sequence[str] | None
    details: dict[str, Any]
    options: MediaOptions
    asked: AskedDigits | None

    @property
    def clips(self) -> bool:
        return len(self.shape) == 4


@dataclass(frozen=True)
class Samples(DescribedSamples):
    """Samples that are ready to be read or drawn.

    Attributes:
        extract: ``extract(extractor, count, folder)`` computes the features of the first ``count`` samples and caches
            the features in the folder.
        drawn: True if the samples are drawn, False if they are read from files.
        announce: function that prints the settings of the drawing.
    """

    extract: Callable[[Extractor, int, Path], Features]
    drawn: bool = False
    announce: Callable[[], None] = lambda: None


@contextlib.contextmanager
def open_samples(flags: EvaluateConfig, mesh: Mesh) -> Iterator[Samples]:
    """Open and check the samples to evaluate. Inside the context, --output is locked for other evaluations. Collective.

    Raises ValueError or OSError with a message for the user.
    """
    if flags.samples is None:
        sampling = load_run(flags.sampling(), mesh, Stages("before"))
        with sampling.lock:
            yield _drawn(sampling, flags)
        return
    lock, notes = lock_folder(Path(flags.output), mesh, "--output", FIX, written=WRITTEN)
    with lock:
        if mesh.is_main:
            for note in notes:
                logger.info("note: %s", note)
        yield _files(flags, mesh)


def _files(flags: EvaluateConfig, mesh: Mesh) -> Samples:
    options = MediaOptions(flags.image_size, flags.num_frames or FRAMES, flags.frame_interval, flags.fps)
    assert flags.samples is not None  # open_samples() has checked this
    media = open_media(flags.samples, "--samples", options)
    if flags.num_samples is not None:
        if flags.num_samples > media.count:
            raise ValueError(f"--num_samples {flags.num_samples:,}: {media.name} holds {media.count:,}; lower it")
        media = replace(media, count=flags.num_samples)
    with ThreadPoolExecutor(1) as pool:
        shape = media.batch(range(0, 1), pool).shape[1:]
    details = {"samples": media.name, "samples_sha256": media.sha256}
    # If the samples are square, crop and resize the reference's pictures to the same size.
    side = shape[-2] if shape[-2] == shape[-3] else None
    options = replace(options, image_size=options.image_size or side, num_frames=shape[0] if len(shape) == 4 else 1)
    captions = media.captions[: media.count] if media.captions else None

    def extract(extractor: Extractor, first: int, output: Path) -> Features:
        return extract_media(replace(media, count=first), extractor, output, mesh)

    labels = None if media.labels is None else media.labels[: media.count]
    asked = asked_of_labels(labels) or asked_of_captions(captions)
    return Samples(media.count, shape, captions, details, options, asked, extract)


def _drawn(sampling: SamplingRun, flags: EvaluateConfig) -> Samples:
    """Return samples that will be drawn from a checkpoint. Only their features are kept."""
    if sampling.mesh.is_main:
        for note in note_on_missing_frames(sampling.model.config):
            logger.info("note: %s", note)
    count = flags.num_samples or (CLIPS if sampling.model.config.is_video else PICTURES)
    sampling.flags = replace(sampling.flags, num_samples=count)
    classes = sampling.model.config.text is None
    if not classes:
        if flags.features == DIGITS and not flags.prompt:
            _ask_for_all_digits(sampling)
        sampling.choices, labels = torch.arange(count) % len(sampling.names), "prompts"
    elif flags.class_labels or flags.label_sampling == "balanced":
        sampling.choices = choose_labels(sampling.flags, sampling.names)
        labels = "given" if flags.class_labels else "balanced"
    else:
        generator = torch.Generator().manual_seed(flags.seed)
        sampling.choices, labels = torch.randint(len(sampling.names), (count,), generator=generator), "drawn"
    shape, settings = pixel_shape(sampling), settings_of(sampling)
    codec = sampling.codec.codec if isinstance(sampling.codec, FrameCodec) else sampling.codec
    guided = flags.cfg_scale != 1
    details = {
        "samples": name_of(sampling.source),
        "samples_sha256": settings["weights"],
        "sampler": settings["--sampler"],
        "steps": flags.num_sampling_steps,
        "guidance": flags.cfg_scale,
        "guidance_interval": tuple(flags.cfg_interval) if guided and flags.cfg_interval else None,
        "guidance_channels": flags.cfg_channels if guided else None,
        "seed": flags.seed,
        "labels": labels,
        "precision": sampling.flags.mixed_precision,
        "vae": codec.name,
        "rounding": "round to nearest, clamped",
        "drawn": drawn_by(settings),
    }
    side = shape[-2] if shape[-2] == shape[-3] else None
    interval, rate = sampling.frame_interval, sampling.trained_fps
    if {"frame_interval", "fps"} & flags.given:
        interval, rate = flags.frame_interval, flags.fps
    options = MediaOptions(side, shape[0] if len(shape) == 4 else 1, interval, rate)

    def extract(extractor: Extractor, first: int, output: Path) -> Features:
        every = sampling.flags, sampling.choices
        sampling.flags, sampling.choices = replace(sampling.flags, num_samples=first), sampling.choices[:first]
        try:
            return extract_run(sampling, extractor, output)
        finally:
            sampling.flags, sampling.choices = every

    captions = None if classes else sampling.captions
    digits = classes and len(sampling.names) == 10
    asked = asked_of_labels(sampling.choices.numpy()) if digits else asked_of_captions(captions)
    announced = partial(announce, sampling)
    return Samples(count, shape, captions, details, options, asked, extract, drawn=True, announce=announced)


def _ask_for_all_digits(sampling: SamplingRun) -> None:
    """Replace the checkpoint's example captions by captions that ask for every digit. If the model makes clips, they
    also ask for every direction."""
    digits = all_captions(sampling.model.config.is_video)
    assert isinstance(sampling.conditioner, CaptionConditioner)
    sampling.names, sampling.conditions = digits, sampling.conditioner.encode(digits)


def name_of(weights: Path) -> str:
    """Return a name for weights: RUN/STEP (000-DiT-XL-2/step_0400000) for a checkpoint, otherwise the last part of the
    path."""
    parts = weights.parts
    if "checkpoints" in parts[1:-1]:
        place = len(parts) - 1 - parts[::-1].index("checkpoints")
        return "/".join([parts[place - 1], parts[place + 1]])
    return weights.name
