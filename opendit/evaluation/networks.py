"""Load a feature network from a file or folder, as a function from pictures or clips to features.

Nothing is downloaded. Pickles are read with ``weights_only=True``, and no code in a folder is run."""

import contextlib
import functools
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.common.json_models import read_file
from opendit.common.utils import hash_parts, sha256_of, shown
from opendit.config.names import DIGITS, FEATURE_PRECISIONS
from opendit.encoders.folder import CONFIG, loading, read_json_of, transformers_model
from opendit.encoders.schema import PRETRAINED
from opendit.evaluation.digits import SIZE, ClipShape, clip_features, digits_sha256, picture_features

Compute = Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class FeatureNetwork:
    """A network and its preprocessing of pixels.

    Attributes:
        sha256: hash of the network's files, or of a built-in network's constants and data.
        clips: True if the network takes clips (B, T, H, W, 3) instead of pictures (B, H, W, 3).
        inception: True for the Inception network that defines FID.
        resize: name of the filter that resizes pixels to the network's input size.
        precision: fp32 or tf32; fp64 for the built-in classifier of digits (``built_in``).
        compute: function from uint8 pixels (B, 3, H, W) or (B, 3, T, H, W) to named features (B, D).
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
        return self.built_in or any(file.sha256 == self.sha256 for file in KNOWN)

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return named features (B, D) in float32 for uint8 pixels (B, H, W, 3) or (B, T, H, W, 3)."""
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
    """Return the classifier of built-in digits or, with a ``shape``, of moving digits. Its first use trains it. The
    features are "pool", "digit" and "nearest", and for clips also "moved"."""
    if shape is None:
        sha256, compute, how = digits_sha256("pictures"), picture_features, f"bilinear, {SIZE}"
    else:
        sha256, compute = hash_parts(digits_sha256("clips"), str(shape)), functools.partial(clip_features, shape)
        how = "centred, its own"
    return FeatureNetwork(DIGITS, sha256, shape is not None, False, how, "fp64", compute, device, built_in=True)


def load_network(
    path: str | Path, device: torch.device, *, how: str = "tf", precision: str = "fp32", clips: bool = False
) -> FeatureNetwork:
    """Load the network in a file or folder.

    The path is one of:

    - the weights of FID's Inception (.pth, as in pytorch-fid and torch-fidelity);
    - a TorchScript module: StyleGAN's Inception, I3D, or any module with uint8 (B, 3, H, W) as input; for clips
      (B, 3, T, H, W). Its output is features (B, D), or a dict with "pool" and optionally "spatial" and "logits";
    - a folder of ``transformers`` with a CLIP, DINOv2 or VideoMAE model.

    how: Inception's resize filter, one of ``names.RESIZES``; other networks have a fixed filter. Raises
    FileNotFoundError if the path does not exist. Raises ValueError for anything else, and for a file with a published
    file's name but other contents."""
    path = Path(path).expanduser()
    if precision not in FEATURE_PRECISIONS:
        raise ValueError(f"precision {precision}: must be one of {', '.join(FEATURE_PRECISIONS)}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: a network of features is a file or a folder of transformers")
    if path.is_dir():
        return load_folder(path, device, precision, clips)
    sha256 = sha256_of(path)
    check_known(path, sha256)
    compute, inception, resized = _of_file(path, device, how, clips)
    return FeatureNetwork(path.resolve().name, sha256, clips, inception, resized, precision, compute, device)


def _of_file(path: Path, device: torch.device, how: str, clips: bool) -> tuple[Compute, bool, str]:
    """Return (function that computes features, True for FID's Inception, name of the resize filter)."""
    if not _is_script(path):
        if clips:
            raise ValueError(f"{path} is no TorchScript module, as features of clips need one")
        network = _inception(path).to(device).eval()
        if device.type == "cuda":
            network = network.to(memory_format=torch.channels_last)  # the fastest layout for TF32 convolutions
        return (lambda x: network(resize(x.float(), how))), True, how
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, but the published files use it
            script = torch.jit.load(str(path), map_location=device).eval()
    except RuntimeError as error:
        raise ValueError(f"{path} can't be loaded as TorchScript: {str(error).splitlines()[0]}") from error
    if ScriptedInception.fits(script):
        if clips:
            raise ValueError(f"{path} is a network of pictures; features of clips need another, such as I3D")
        network = ScriptedInception(script)
        return (lambda x: network(resize(x.float(), how))), True, how
    arguments = {argument.name for argument in script.forward.schema.arguments}
    if {"rescale", "resize", "return_features"} <= arguments:  # the arguments of StyleGAN-V's I3D
        if not clips:
            raise ValueError(f"{path} is a network of clips; features of pictures need another, such as Inception")
        return (
            lambda x: {"pool": script(x.float(), rescale=True, resize=True, return_features=True)},
            False,
            "its own (bilinear, 224)",
        )
    return lambda x: _named(script(x.contiguous())), False, "its own"


def _named(found: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(found, dict):
        if "pool" not in found:
            raise ValueError('a TorchScript module of features returns a Tensor, or a dict with "pool"')
        return {name: found[name].flatten(1) for name in ("pool", "spatial", "logits") if name in found}
    return {"pool": found.flatten(1)}


def _is_script(path: Path) -> bool:
    """Return True if a file is an archive with TorchScript code."""
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
    except Exception as error:  # pickle, zip and torch raise different errors
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} holds neither TorchScript nor the weights of FID's Inception: {why}") from error
    return network.requires_grad_(False)


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    """Compute matrix products and convolutions in full float32 or in TF32."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


# ------------------------------------------------------------------------------------------ published files

_INCEPTION = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


@dataclass(frozen=True)
class KnownFile:
    """A published weights file. sha256: None if any contents are accepted. address: its URL."""

    name: str
    sha256: str | None
    address: str
    clips: bool = False


KNOWN = (
    KnownFile(
        "pt_inception-2015-12-05-6726825d.pth",
        _INCEPTION,
        "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
    ),
    KnownFile(
        "weights-inception-2015-12-05-6726825d.pth",
        _INCEPTION,
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    ),
    KnownFile(
        "inception-2015-12-05.pt",
        None,
        "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
    ),
    KnownFile(
        "i3d_torchscript.pt",
        "bec6519f66ea534e953026b4ae2c65553c17bf105611c746d904657e5860a5e2",
        "https://www.dropbox.com/s/ge9e5ujwgetktms/i3d_torchscript.pt?dl=1",
        clips=True,
    ),
)


def default_folder() -> Path:
    """Return torch.hub's folder of checkpoints, as used by torch-fidelity and pytorch-fid."""
    return Path(torch.hub.get_dir()) / "checkpoints"


def find_default(clips: bool, flag: str) -> Path:
    """Return the path of the published network for pictures or clips. Raises FileNotFoundError with the file's URL."""
    files = [file for file in KNOWN if file.clips == clips]
    for file in files:
        if (path := default_folder() / file.name).is_file():
            return path
    raise FileNotFoundError(
        f"{flag}: no network of features is there; fetch {files[0].address} and put it into {default_folder()}, or "
        f"give {flag} PATH"
    )


def check_known(path: Path, sha256: str) -> None:
    """Raise ValueError if a file has the name of a published file but other contents."""
    for file in KNOWN:
        if path.name == file.name and file.sha256 not in (None, sha256):
            raise ValueError(
                f"{path} has the SHA-256 {sha256}, and the file of this name that figures rest on has {file.sha256}: "
                f"it is damaged, or another. Fetch it again ({file.address}), or rename it to use it as it is"
            )


# ------------------------------------------------------------------------------------------ FID's Inception

INCEPTION_SIDE = 299  # height and width of the input in pixels


class ScriptedInception(nn.Module):
    """FID's Inception from NVIDIA's TorchScript file (StyleGAN's metrics). Its layers have TensorFlow's names."""

    def __init__(self, script: torch.jit.ScriptModule):
        super().__init__()
        self.script = script

    @staticmethod
    def fits(script: torch.jit.ScriptModule) -> bool:
        layers = getattr(script, "layers", None)
        return layers is not None and hasattr(layers, "mixed_6") and hasattr(script, "output")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, spatial = (x - 128) / 128, None
        for name, layer in self.script.layers.named_children():
            if name == "mixed_6":
                spatial = spatial_features(layer.conv(x))
            x = layer(x)
        assert spatial is not None  # ``fits`` has checked that mixed_6 exists
        pool = x.flatten(1)
        return {"pool": pool, "spatial": spatial, "logits": F.linear(pool, self.script.output.weight)}


def spatial_features(x: Tensor) -> Tensor:
    """Return ADM's spatial features: the first 7 channels of Mixed_6d's first branch, channels last."""
    return x[:, :7].permute(0, 2, 3, 1).flatten(1)


def resize(x: Tensor, how: str, side: int = INCEPTION_SIDE) -> Tensor:
    """Resize pictures (B, 3, H, W) float32 to side x side pixels.

    how: "tf" is TensorFlow 1's bilinear filter without antialiasing, with samples at i * H / side. FID is defined with
    "tf". "torch" is a bilinear filter at pixel centres (pytorch-fid). "clean" is Pillow's bicubic filter with
    antialiasing, clipped to 0..255 (clean-fid, Parmar et al. 2022)."""
    if how == "clean":
        return F.interpolate(x, (side, side), mode="bicubic", antialias=True).clamp(0, 255)
    if how == "torch":
        return F.interpolate(x, (side, side), mode="bilinear")
    for dim in (3, 2):
        at = torch.arange(side, dtype=torch.float32, device=x.device) * (x.shape[dim] / side)
        low = at.long()
        share = (at - low).view(-1, *[1] * (3 - dim))
        first, second = (x.index_select(dim, rows.clamp_max(x.shape[dim] - 1)) for rows in (low, low + 1))
        x = first + (second - first) * share
    return x


# ------------------------------------------------------------------------------------------ transformers' folders

FOLDER_WEIGHTS = "model"
PREPROCESSOR = "preprocessor_config.json"
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
USUAL_SIDE = 224  # input size in pixels if the folder does not specify it
CAPTIONS_AT_ONCE = 256
# model_type in config.json -> (class of ``transformers``, (mean, standard deviation) of colours, True for clips).
CLASSES = {
    "clip": ("CLIPVisionModelWithProjection", CLIP, False),
    "clip_vision_model": ("CLIPVisionModelWithProjection", CLIP, False),
    "dinov2": ("Dinov2Model", IMAGENET, False),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", IMAGENET, False),
    "videomae": ("VideoMAEModel", IMAGENET, True),
}


def load_folder(folder: Path, device: torch.device, precision: str, clips: bool) -> FeatureNetwork:
    """Load a folder's model. The features are CLIP's projected embedding, DINOv2's class token, or the mean of
    VideoMAE's tokens. Raises FileNotFoundError without a configuration, and ValueError for an unsupported model or
    medium."""
    config = read_config(folder)
    kind = config.get("model_type")
    if kind not in CLASSES:
        raise ValueError(f"{folder} holds a model of type {shown(kind)}, not {', '.join(CLASSES)}")
    name, colours, takes_clips = CLASSES[kind]
    if takes_clips != clips:
        media = ("pictures", "clips")
        raise ValueError(f"{folder} holds a network of {media[takes_clips]}; features of {media[clips]} need another")
    model = load_model(folder, name).to(device)
    side, mean, deviation = preprocessing(folder, colours)
    mean, deviation = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, deviation))

    def normalised(x: Tensor) -> Tensor:
        x = F.interpolate(x.float() / 255, (side, side), mode="bicubic", antialias=True).clamp(0, 1)
        return (x - mean) / deviation

    def of_pictures(x: Tensor) -> dict[str, Tensor]:
        output = model(pixel_values=normalised(x))
        return {"pool": output.image_embeds if "clip" in kind else output.pooler_output}

    def of_clips(x: Tensor) -> dict[str, Tensor]:
        frames = model.config.num_frames
        if x.shape[2] != frames:
            raise ValueError(f"{folder} takes clips of {frames} frames, not {x.shape[2]}")
        pixels = normalised(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (len(x), frames))
        return {"pool": model(pixel_values=pixels).last_hidden_state.mean(dim=1)}

    name, compute = folder.resolve().name, of_clips if clips else of_pictures
    resized = f"bicubic, {side}"
    return FeatureNetwork(name, folder_sha256(folder), clips, False, resized, precision, compute, device)


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json. Raises FileNotFoundError or ValueError, naming the file."""
    return read_json_of(folder / CONFIG, PRETRAINED, "a folder of features is one of transformers")


def load_model(folder: Path, name: str) -> Any:
    """Load a folder's model in float32 as ``transformers``' class ``name``, frozen. Raises ValueError."""
    with loading(f"{folder}, as {name},"):
        return transformers_model(folder, name, FOLDER_WEIGHTS).eval().requires_grad_(False)


def preprocessing(folder: Path, colours: tuple[Any, ...]) -> tuple[int, list[float], list[float]]:
    """Return (side in pixels, mean, standard deviation) from preprocessor_config.json. The defaults are USUAL_SIDE and
    ``colours``. Raises ValueError for invalid values."""
    path, found = folder / PREPROCESSOR, {}
    if path.is_file():
        found = read_file(path, PRETRAINED)
    size = found.get("crop_size") or found.get("size") or USUAL_SIDE
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge") or USUAL_SIDE
    side, mean, deviation = int(size), found.get("image_mean") or colours[0], found.get("image_std") or colours[1]
    if not 1 <= side <= 4096 or len(mean) != 3 or len(deviation) != 3 or 0 in deviation:
        raise ValueError(f"{path}: a size of 1 to 4096 and three colours are expected")
    return side, list(mean), list(deviation)


def folder_sha256(folder: Path) -> str:
    """Hash the names and contents of a folder's .json, .safetensors and .txt files."""
    kinds = (".json", ".safetensors", ".txt")
    files = sorted(path for path in folder.iterdir() if path.suffix in kinds and path.is_file())
    return hash_parts(*(part for path in files for part in (path.name, sha256_of(path))))


def caption_embeddings(folder: Path, captions: list[str], device: torch.device) -> tuple[Tensor, list[bool]]:
    """Return (CLIP's projected embeddings (N, D), list with True for each caption that CLIP truncates). Raises
    ValueError for a folder without CLIP's text model and tokenizer."""
    folder = Path(folder).expanduser()
    config = read_config(folder)
    if config.get("model_type") != "clip":
        raise ValueError(f"{folder} holds no CLIP of pictures and words, which a CLIP score needs")
    model = load_model(folder, "CLIPTextModelWithProjection").to(device)
    with loading(f"the tokenizer in {folder}"):
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    longest = model.config.max_position_embeddings
    different = list(dict.fromkeys(captions))
    embeddings, cut = [], {}
    for first in range(0, len(different), CAPTIONS_AT_ONCE):
        part = different[first : first + CAPTIONS_AT_ONCE]
        lengths = [len(ids) for ids in tokenizer(part)["input_ids"]]
        cut |= {caption: length > longest for caption, length in zip(part, lengths, strict=True)}
        words = tokenizer(part, padding="max_length", truncation=True, max_length=longest, return_tensors="pt")
        with torch.inference_mode():
            output = model(**{name: words[name].to(device) for name in ("input_ids", "attention_mask")})
        embeddings.append(output.text_embeds)
    rows = {caption: number for number, caption in enumerate(different)}
    index = torch.tensor([rows[caption] for caption in captions], device=device)
    return torch.cat(embeddings)[index], [cut[caption] for caption in captions]
