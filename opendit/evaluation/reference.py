"""Open the reference that samples are compared with: samples, features, or the features' mean and covariance."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opendit.common.safe_files import replacing
from opendit.common.utils import sha256_of
from opendit.config.names import DIGITS
from opendit.data.files import printable
from opendit.evaluation.digits import ClipShape, RealDigits, real_clips, real_pictures
from opendit.evaluation.extract import Extractor, Features, extract_media
from opendit.evaluation.media import SAMPLES, Media, MediaOptions, array_media, npz_member, npz_names, open_media
from opendit.evaluation.metrics import Gaussian, Moments
from opendit.parallel.mesh import Mesh
from opendit.sampling.model_loading import SOURCE_FPS

# Name of features -> names of their mean and covariance in an .npz. The first two pairs are ADM's names for Inception's
# features.
STATISTICS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s"), "clip": ("mu_clip", "sigma_clip")}
SETTINGS, COUNT, FEATURES = "opendit_settings", "opendit_count", "features_"


@dataclass
class Reference:
    """Statistics or features of the media that samples are compared with.

    Attributes:
        gaussians: name of the features -> mean and covariance.
        features: name -> features (N, ...) of the reference's samples, if known.
        settings: settings of the networks that computed the features; None if unknown.
    """

    name: str
    sha256: str
    count: int | None
    gaussians: dict[str, Gaussian] = field(default_factory=dict)
    features: dict[str, Tensor] = field(default_factory=dict)
    settings: dict[str, str] | None = None

    def gaussian(self, name: str, device: torch.device) -> Gaussian | None:
        """Return the mean and covariance of the features with this name; None without such features."""
        if name not in self.gaussians and name in self.features:
            rows = self.features[name].flatten(0, -2).to(device)
            self.gaussians[name] = Moments.of(rows).gaussian()
        found = self.gaussians.get(name)
        return found and found.to(device)


def open_reference(
    path: str | os.PathLike[str],
    extractor: Extractor,
    options: MediaOptions,
    output: Path,
    mesh: Mesh,
    clips: bool = False,
) -> Reference:
    """Open the reference at a path. Collective.

    The path is one of:

    - samples that :func:`open_media` accepts; their features are computed;
    - "digits", the built-in held-out digits;
    - ADM's statistics, an .npz with mu and sigma; pictures in the file are used for precision, recall and KID;
    - a file that :func:`save_features` wrote.

    Raises:
        ValueError: the reference holds clips but the samples are pictures or vice versa, or it holds features of other
            networks.
    """
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
    media = open_media(path, "--reference", options) if not gaussians else _pictures_of(path)
    if media.clips != clips:
        kinds = ("pictures", "clips")
        raise ValueError(f"--reference {printable(path)}: holds {kinds[media.clips]}; {kinds[clips]} are evaluated")
    return _reference_of(media, extractor, output, mesh, gaussians)


def _reference_of(
    media: Media,
    extractor: Extractor,
    output: Path,
    mesh: Mesh,
    gaussians: dict[str, Gaussian],
) -> Reference:
    """Compute the features of samples. Return a reference with these features and the statistics ``gaussians``.
    Collective."""
    found = extract_media(media, extractor, output, mesh)
    return Reference(media.name, media.sha256, media.count, gaussians, found.arrays, extractor.settings())


def real_digits(split: str, clips: MediaOptions | None, count: int | None = None) -> RealDigits:
    """Return built-in digits of a split, or moving digits.

    Args:
        clips: options for reading clips, to get moving digits; None for pictures.
        count: number of samples; None for the default number of a reference.
    """
    if clips is None:
        return real_pictures(split, count)
    return real_clips(split, clip_shape(clips), count)


def clip_shape(options: MediaOptions) -> ClipShape:
    """Return the shape of moving digits that match these options. Raises ValueError if the clips are not square."""
    if options.image_size is None:
        raise ValueError("--features digits: moving digits are square, and these clips are not; give --reference")
    interval = options.frame_interval if options.fps is None else max(1, round(SOURCE_FPS / options.fps))
    return ClipShape(options.num_frames, interval, options.image_size)


def _pictures_of(path: Path) -> Media:
    """Open the pictures in a file of ADM that also has statistics."""
    return array_media(path.name, lambda: sha256_of(path), npz_member(path, SAMPLES))


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
    return Reference(path.name, sha256_of(path), int(npz_member(path, COUNT)), gaussians, arrays, there)


def save_features(path: Path, features: Features, settings: dict[str, str], device: torch.device) -> None:
    """Write features and their statistics to an .npz, which can be used as a reference.

    Other tools can use the statistics mu and sigma as a reference. Raises OSError.

    Args:
        settings: settings of the feature networks.
    """
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
