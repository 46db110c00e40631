"""Networks of features: from a file or a folder to a function from pictures or clips to rows of numbers."""

import contextlib
import functools
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from opendit.common.utils import sha256_of
from opendit.config.names import DIGITS, FEATURE_PRECISIONS
from opendit.evaluation.digits import SIZE, digits_sha256, picture_features
from opendit.evaluation.inception_pixels import SIDE, ScriptedInception, resize
from opendit.evaluation.known_files import check_known, is_known, shown
from opendit.evaluation.moving_digits import ClipShape, clip_features, clips_sha256
from opendit.evaluation.transformers_networks import load_folder

Compute = Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class FeatureNetwork:
    """A network with what it does to pixels before.

    name: for people. sha256: of its file or files. clips: whether it takes (B, T, H, W, 3) rather than (B, H, W, 3).
    inception: whether it is the Inception that FID is defined by. known: whether its SHA-256 is a published one.
    resize: the filter to its size, by name. precision: fp32 or tf32. compute: uint8 pixels with channels second ->
    named features (B, D). built_in: whether it is shipped as code, so that its SHA-256 is of that.
    """

    name: str
    sha256: str
    clips: bool
    inception: bool
    resize: str
    precision: str
    compute: Compute
    device: torch.device
    built_in: bool = False

    @property
    def known(self) -> bool:
        return self.built_in or is_known(self.sha256)

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
        """pixels: uint8 (B, H, W, 3) or (B, T, H, W, 3). Returns named features (B, D) in float32."""
        pixels = pixels.to(self.device).movedim(-1, 1)
        with _precision(self.precision):
            found = {name: features.float() for name, features in self.compute(pixels).items()}
        for features in found.values():
            if features.ndim != 2 or len(features) != len(pixels):
                raise ValueError(f"{self.name} gives {tuple(features.shape)} for {len(pixels)} samples, not a row each")
        return found

    def describe(self) -> str:
        known = "" if self.known else ", of no published file"
        return f"{self.name}, SHA-256 {self.sha256}{known}, {self.precision}, resized by {self.resize}"


def digits_network(device: torch.device, shape: ClipShape | None = None) -> FeatureNetwork:
    """The classifier of the built-in digits; with a ``shape``, of clips of moving digits. It is trained when it is
    first used. Features: "pool", "digit", "nearest", of clips "moved" too."""
    if shape is None:
        sha256, compute, how = digits_sha256("pictures"), picture_features, f"bilinear, {SIZE}"
    else:
        sha256, compute, how = clips_sha256(shape), functools.partial(clip_features, shape), "centred, its own"
    return FeatureNetwork(DIGITS, sha256, shape is not None, False, how, "fp64", compute, device, built_in=True)


def load_network(
    path: str | Path, device: torch.device, *, how: str = "tf", precision: str = "fp32", clips: bool = False
) -> FeatureNetwork:
    """The network of a file or folder.

    Args:
        path: the weights of FID's Inception (.pth, as pytorch-fid and torch-fidelity have them); a TorchScript module:
            that Inception or I3D as StyleGAN's metrics have them, or any that takes uint8 (B, 3, H, W), for clips
            (B, 3, T, H, W), and returns features (B, D), or a dict of "pool" and, if it has them, "spatial" and
            "logits"; a folder of transformers with a CLIP, DINOv2 or VideoMAE.
        device: where it computes.
        how: Inception's filter, one of ``names.RESIZES``; the others' is their own.
        precision: fp32, or tf32 on GPUs that have it.
        clips: whether features of clips are asked for.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: it is no such network, or a known file with other contents.
    """
    path = Path(path).expanduser()
    if precision not in FEATURE_PRECISIONS:
        raise ValueError(f"precision {precision}: must be one of {', '.join(FEATURE_PRECISIONS)}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: a network of features is a file or a folder of transformers")
    if path.is_dir():
        folder = load_folder(path, device, clips)
        return FeatureNetwork(
            shown(path), folder.sha256, clips, False, folder.resize, precision, folder.compute, device
        )
    sha256 = sha256_of(path)
    check_known(path, sha256)
    compute, inception, resized = _of_file(path, device, how, clips)
    return FeatureNetwork(shown(path), sha256, clips, inception, resized, precision, compute, device)


def _of_file(path: Path, device: torch.device, how: str, clips: bool) -> tuple[Compute, bool, str]:
    """(what computes, whether it is FID's Inception, the name of its filter)."""
    if not _is_script(path):
        if clips:
            raise ValueError(f"{path} is no TorchScript module, as features of clips need one")
        network = _inception(path).to(device).eval()
        if device.type == "cuda":
            network = network.to(memory_format=torch.channels_last)  # the layout of TF32's convolutions
        return _with_resize(network, how), True, how
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its deprecation: the field's files are of this format
            script = torch.jit.load(str(path), map_location=device).eval()
    except RuntimeError as error:
        raise ValueError(f"{path} can't be loaded as TorchScript: {str(error).splitlines()[0]}") from error
    if ScriptedInception.fits(script):
        if clips:
            raise ValueError(f"{path} is a network of pictures; features of clips need another, such as I3D")
        return _with_resize(ScriptedInception(script), how), True, how
    arguments = {argument.name for argument in script.forward.schema.arguments}
    if {"rescale", "resize", "return_features"} <= arguments:  # I3D as StyleGAN-V has it
        if not clips:
            raise ValueError(f"{path} is a network of clips; features of pictures need another, such as Inception")
        return (
            lambda x: {"pool": script(x.float(), rescale=True, resize=True, return_features=True)},
            False,
            "its own (bilinear, 224)",
        )
    return lambda x: _named(script(x.contiguous())), False, "its own"


def _with_resize(network: torch.nn.Module, how: str) -> Compute:
    return lambda x: network(resize(x.float(), how, SIDE))


def _named(found: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(found, dict):
        if "pool" not in found:
            raise ValueError('a TorchScript module of features returns a Tensor, or a dict with "pool"')
        return {name: found[name].flatten(1) for name in ("pool", "spatial", "logits") if name in found}
    return {"pool": found.flatten(1)}


def _is_script(path: Path) -> bool:
    """Return True if a file is an archive that holds TorchScript code."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name for name in archive.namelist())


def _inception(path: Path) -> torch.nn.Module:
    from opendit.evaluation.inception import FIDInception  # torchvision takes seconds to import

    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        network = FIDInception()
        network.load_state_dict(weights)
    except Exception as error:  # pickle's, zip's and torch's own
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} holds neither TorchScript nor the weights of FID's Inception: {why}") from error
    return network.requires_grad_(False)


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    """Matrix products and convolutions in full float32, or in TF32."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
