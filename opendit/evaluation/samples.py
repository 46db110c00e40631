"""Open an evaluation's samples, from files or a checkpoint, and the reference to compare them with."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opendit.checkpoint.run_folders import lock_folder
from opendit.common.safe_files import replacing
from opendit.common.stages import Stages
from opendit.common.utils import sha256_of
from opendit.config.evaluate import EvaluateConfig
from opendit.config.names import DIGITS
from opendit.data.digits import all_captions
from opendit.data.files import printable
from opendit.encoders.conditioner import CaptionConditioner
from opendit.encoders.video_vae import FrameCodec
from opendit.evaluation.digits import (
    AskedDigits,
    ClipShape,
    RealDigits,
    asked_of_captions,
    asked_of_labels,
    real_clips,
    real_pictures,
)
from opendit.evaluation.extract import Extractor, Features, drawn_by, extract_media, extract_run
from opendit.evaluation.media import SAMPLES, Media, MediaOptions, array_media, npz_member, npz_names, open_media
from opendit.evaluation.metrics import Gaussian, Moments
from opendit.parallel.mesh import Mesh
from opendit.sampling.conditioning_frames import note_on_missing_frames
from opendit.sampling.model_loading import SOURCE_FPS
from opendit.sampling.sample_output import pixel_shape, settings_of
from opendit.sampling.sampling_run import WRITTEN, SamplingRun, announce, choose_labels, load_run

logger = logging.getLogger(__name__)

PICTURES, CLIPS = 50_000, 2_048  # default numbers of samples to draw, as is usual for FID and FVD
FRAMES = 16  # default number of frames to read from a clip in a file
FIX = "wait for its end, or give another --output"
# Feature -> names of its mean and covariance in an .npz. ADM has the first two pairs, for Inception's features.
STATISTICS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s"), "clip": ("mu_clip", "sigma_clip")}
SETTINGS, COUNT, FEATURES = "opendit_settings", "opendit_count", "features_"


@dataclass(frozen=True)
class DescribedSamples:
    """Properties of samples that are known before samples are drawn or read.

    Attributes:
        shape: shape of one sample, (H, W, 3) or (T, H, W, 3).
        captions: one per sample, or None.
        details: fields of :class:`Measurement` that describe the samples.
        options: options for reading the reference, so that its pixels match the samples.
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
    """Samples that are ready to be read or drawn. ``extract(extractor, count, folder)`` computes the first ``count``
    samples' features, cached in the folder. announce: prints the settings for drawing."""

    extract: Callable[[Extractor, int, Path], Features]
    drawn: bool = False
    announce: Callable[[], None] = lambda: None


@contextlib.contextmanager
def open_samples(flags: EvaluateConfig, mesh: Mesh) -> Iterator[Samples]:
    """Open and check the samples to evaluate, and lock --output during the context. All ranks must call this. Raises
    ValueError or OSError with a message for the user."""
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
    # Without --image_size, the reference's pictures get the samples' size if that is square.
    side = shape[-2] if shape[-2] == shape[-3] else None
    options = replace(options, image_size=options.image_size or side, num_frames=shape[0] if len(shape) == 4 else 1)
    captions = media.captions[: media.count] if media.captions else None

    def extract(extractor: Extractor, first: int, output: Path) -> Features:
        return extract_media(replace(media, count=first), extractor, output, mesh)

    labels = None if media.labels is None else media.labels[: media.count]
    asked = asked_of_labels(labels) or asked_of_captions(captions)
    return Samples(media.count, shape, captions, details, options, asked, extract)


def _drawn(sampling: SamplingRun, flags: EvaluateConfig) -> Samples:
    """Return samples to draw from a checkpoint."""
    if sampling.mesh.is_main:
        for note in note_on_missing_frames(sampling.model.config):
            logger.info("note: %s", note)
    count = flags.num_samples or (CLIPS if sampling.model.config.is_video else PICTURES)
    sampling.flags = replace(sampling.flags, num_samples=count)
    classes = sampling.model.config.text is None
    if not classes:
        if flags.features == DIGITS and not flags.prompt:  # ask for every digit, and clips for every direction
            assert isinstance(sampling.conditioner, CaptionConditioner)
            sampling.names = all_captions(sampling.model.config.is_video)
            sampling.conditions = sampling.conditioner.encode(sampling.names)
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


def name_of(weights: Path) -> str:
    """Return RUN/STEP (000-DiT-XL-2/step_0400000) for a checkpoint, otherwise the path's last name."""
    parts = weights.parts
    if "checkpoints" in parts[1:-1]:
        place = len(parts) - 1 - parts[::-1].index("checkpoints")
        return "/".join([parts[place - 1], parts[place + 1]])
    return weights.name


@dataclass
class Reference:
    """Statistics or features of real pictures or clips, to compare samples with. gaussians: feature name -> mean and
    covariance. features: feature name -> features (N, ...), if known."""

    name: str
    sha256: str
    count: int | None
    gaussians: dict[str, Gaussian] = field(default_factory=dict)
    features: dict[str, Tensor] = field(default_factory=dict)

    def gaussian(self, name: str, device: torch.device) -> Gaussian | None:
        """Return the mean and covariance of the features ``name``, or None if unknown."""
        if name not in self.gaussians and name in self.features:
            rows = self.features[name].flatten(0, -2).to(device)
            self.gaussians[name] = Moments.of(rows).gaussian()
        found = self.gaussians.get(name)
        return found and found.to(device)


def open_reference(
    path: str | os.PathLike[str], extractor: Extractor, options: MediaOptions, output: Path, mesh: Mesh, clips: bool
) -> Reference:
    """Open a reference. All ranks must call this.

    The path is one of:

    - samples for :func:`open_media`; their features are computed;
    - "digits", the built-in held-out digits;
    - ADM's statistics, an .npz with mu and sigma. The file's pictures, if any, are used for precision, recall and KID;
    - a file from :func:`save_features`.

    Raises ValueError if the reference holds other media than the samples, or features from other networks."""
    if path == DIGITS:
        return _reference_of(real_digits("test", options if clips else None).media, extractor, output, mesh, {})
    path = Path(path).expanduser()
    gaussians, names = {}, set()
    if path.suffix == ".npz" and path.is_file():
        names = npz_names(path, "--reference")
        gaussians = _statistics(path, names)
        if SETTINGS in names:
            return _features_file(path, names, gaussians, extractor)
        if gaussians and SAMPLES not in names:
            return Reference(path.name, sha256_of(path), None, gaussians)
    if gaussians:  # a file of ADM that also has pictures
        media = array_media(path.name, lambda: sha256_of(path), npz_member(path, SAMPLES))
    else:
        media = open_media(path, "--reference", options)
    if media.clips != clips:
        kinds = ("pictures", "clips")
        raise ValueError(f"--reference {printable(path)}: holds {kinds[media.clips]}; {kinds[clips]} are evaluated")
    return _reference_of(media, extractor, output, mesh, gaussians)


def _reference_of(
    media: Media, extractor: Extractor, output: Path, mesh: Mesh, gaussians: dict[str, Gaussian]
) -> Reference:
    """Return a reference with ``gaussians`` and the features of ``media``. All ranks must call this."""
    found = extract_media(media, extractor, output, mesh)
    return Reference(media.name, media.sha256, media.count, gaussians, found.arrays)


def real_digits(split: str, clips: MediaOptions | None, count: int | None = None) -> RealDigits:
    """Return a split's built-in digits as pictures or, with options ``clips``, as clips of moving digits. count: see
    :func:`real_pictures` and :func:`real_clips`."""
    if clips is None:
        return real_pictures(split, count)
    return real_clips(split, clip_shape(clips), count)


def clip_shape(options: MediaOptions) -> ClipShape:
    """Return the shape of moving digits that matches the options. Raises ValueError if the clips are not square."""
    if options.image_size is None:
        raise ValueError("--features digits: moving digits are square, and these clips are not; give --reference")
    interval = options.frame_interval if options.fps is None else max(1, round(SOURCE_FPS / options.fps))
    return ClipShape(options.num_frames, interval, options.image_size)


def _statistics(path: Path, names: set[str]) -> dict[str, Gaussian]:
    found = {}
    count = int(npz_member(path, COUNT)) if COUNT in names else None
    for name, (mean, covariance) in STATISTICS.items():
        if not {mean, covariance} <= names:
            continue
        mu, sigma = (torch.from_numpy(np.array(npz_member(path, key), dtype=np.float64)) for key in (mean, covariance))
        if mu.ndim != 1 or sigma.shape != (len(mu), len(mu)):
            raise ValueError(
                f"--reference {printable(path)}: {mean} {tuple(mu.shape)} and {covariance} {tuple(sigma.shape)} are no "
                "mean and covariance; write them again"
            )
        found[name] = Gaussian(mu, sigma, count)
    return found


def _features_file(path: Path, names: set[str], gaussians: dict[str, Gaussian], extractor: Extractor) -> Reference:
    there, here = json.loads(str(npz_member(path, SETTINGS))), extractor.settings()
    different = [name for name in there if name in here and there[name] != here[name]]
    if different:
        listed = "; ".join(f"{name} {there[name]} there, {here[name]} here" for name in different)
        raise ValueError(
            f"--reference {printable(path)}: holds features of other networks ({listed}); evaluate with the same"
        )
    arrays = {
        name.removeprefix(FEATURES): torch.from_numpy(np.array(npz_member(path, name)))
        for name in sorted(names)
        if name.startswith(FEATURES)
    }
    return Reference(path.name, sha256_of(path), int(npz_member(path, COUNT)), gaussians, arrays)


def save_features(path: Path, features: Features, settings: dict[str, str], device: torch.device) -> None:
    """Write features, their statistics and the networks' settings to an .npz for use as a reference. Other tools can
    read mu and sigma. Raises OSError."""
    arrays = {SETTINGS: np.array(json.dumps(settings)), COUNT: np.array(features.count)}
    for name, keys in STATISTICS.items():
        if name in features.arrays:
            found = Moments.of(features.arrays[name].flatten(0, -2).to(device)).gaussian()
            arrays |= dict(zip(keys, (found.mean.cpu().numpy(), found.covariance.cpu().numpy()), strict=True))
    for name, rows in features.arrays.items():
        if name != "spatial":  # sFID needs only the statistics of spatial features
            arrays[FEATURES + name] = rows.contiguous().numpy()
    with replacing(path) as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] no name is one of its parameters
