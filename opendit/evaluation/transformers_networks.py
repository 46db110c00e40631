"""Networks of features in transformers' folders: CLIP and DINOv2 of pictures, VideoMAE of clips, CLIP's words.

A folder is read as a text encoder's is: no code of it runs, no pickled weights are loaded, nothing is fetched.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.common.json_file import read_file
from opendit.common.utils import hash_parts, sha256_of, shown
from opendit.encoders.folder import (
    CONFIG,
    config_kind,
    one_line,
    transformers_model,
)

STEM = "model"
PREPROCESSOR = "preprocessor_config.json"
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIDE = 224  # pixels, where the folder does not say
# model_type of config.json -> (class of transformers, mean and deviation of colours, whether it takes clips)
CLASSES = {
    "clip": ("CLIPVisionModelWithProjection", CLIP, False),
    "clip_vision_model": ("CLIPVisionModelWithProjection", CLIP, False),
    "dinov2": ("Dinov2Model", IMAGENET, False),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", IMAGENET, False),
    "videomae": ("VideoMAEModel", IMAGENET, True),
}
KIND = config_kind()


@dataclass(frozen=True)
class FolderNetwork:
    """compute: uint8 (B, 3, H, W) or (B, 3, T, H, W) -> {"pool": (B, D)}."""

    sha256: str
    resize: str
    compute: Callable[[Tensor], dict[str, Tensor]]


def load_folder(folder: Path, device: torch.device, clips: bool) -> FolderNetwork:
    """The features of a folder's model: CLIP's projected embedding, DINOv2's class token, VideoMAE's mean token.

    Raises ValueError for a folder that holds none of them, or one that takes the other kind of media.
    """
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
    shape = (1, 3, 1, 1)
    mean, deviation = (torch.tensor(values, device=device).view(shape) for values in (mean, deviation))

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

    return FolderNetwork(folder_sha256(folder), f"bicubic, {side}", of_clips if clips else of_pictures)


def read_config(folder: Path) -> dict[str, Any]:
    """Raises FileNotFoundError or ValueError, naming the file."""
    path = folder / CONFIG
    try:
        return read_file(path, KIND)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path} does not exist: a folder of features is one of transformers") from error


def load_model(folder: Path, name: str) -> Any:
    """A model of transformers' class ``name``, frozen, in float32. Raises ValueError if the folder does not hold it."""
    try:
        model = transformers_model(folder, name, STEM)
    except Exception as error:
        raise ValueError(f"{folder} can't be loaded as {name}: {one_line(error)}") from error
    return model.eval().requires_grad_(False)


def preprocessing(folder: Path, colours: tuple[Any, ...]) -> tuple[int, list[float], list[float]]:
    """(pixels of a side, mean, deviation) of the folder's preprocessor, or the model's usual ones."""
    path, found = folder / PREPROCESSOR, {}
    if path.is_file():
        found = read_file(path, KIND)
    size = found.get("crop_size") or found.get("size") or SIDE
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge") or SIDE
    side, mean, deviation = int(size), found.get("image_mean") or colours[0], found.get("image_std") or colours[1]
    if not 1 <= side <= 4096 or len(mean) != 3 or len(deviation) != 3 or 0 in deviation:
        raise ValueError(f"{path}: a size of 1 to 4096 and three colours are expected")
    return side, list(mean), list(deviation)


def folder_sha256(folder: Path) -> str:
    """Over the configurations and weights of a folder, by name."""
    kinds = (".json", ".safetensors", ".txt")
    files = sorted(path for path in folder.iterdir() if path.suffix in kinds and path.is_file())
    return hash_parts(*(part for path in files for part in (path.name, sha256_of(path))))
