"""Frozen image encoders: features for ``--repa``, and CLIP's tokens of first frames for image-to-video models.

The features come from a vision transformer (DINOv2, DINOv3, ViT, ...) in a folder of ``transformers``.
"""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from opendit.common.json_file import MIB, read_bounded
from opendit.common.utils import shown
from opendit.encoders.folder import CONFIG, lazy_module, loading, read_json_of, transformers_model
from opendit.encoders.text import STEM
from opendit.encoders.vae import module_fingerprint
from opendit.models.auxiliary import Alignment, without_mean

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's colour statistics, if the folder has none
NEEDS = "give the folder of a vision transformer of transformers, such as DINOv2's"


def vision_config(folder: str) -> Any:
    """Return the vision encoder's configuration, as an object of ``transformers``. Raises ValueError if there is none,
    or if it lacks hidden_size or patch_size."""
    import transformers

    with loading(f"--repa {folder}: the vision encoder", f"; {NEEDS}"):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not all(isinstance(getattr(config, name, None), int) for name in ("hidden_size", "patch_size")):
        raise ValueError(f"--repa {folder}: a {config.model_type} has no patches of a width; {NEEDS}")
    return config


class VisionTeacher:
    """Computes features of clean pictures, one vector per token of the model, with the encoder in ``folder``.

    grid: the model's token rows and columns. Pictures are resized so that the encoder has one patch per token. weight:
    weight of the alignment term in the loss. spatial: apply iREPA's normalisation to the features."""

    name: str
    grid: tuple[int, ...]

    def __init__(
        self, folder: str, grid: tuple[int, ...], weight: float, spatial: bool, device: torch.device, dtype: torch.dtype
    ):
        import transformers

        config = vision_config(folder)
        with loading(f"--repa {folder}: the vision encoder", f"; {NEEDS}"):
            name = cast(Any, transformers.MODEL_MAPPING)[type(config)].__name__
            self._model = transformers_model(Path(folder), name, "model", dtype)
        self._model.eval().requires_grad_(False).to(device)
        self.name, self.grid = folder, grid
        self._weight, self._spatial, self._dtype = weight, spatial, dtype
        self._size = tuple(side * config.patch_size for side in grid)
        takes = inspect.signature(type(self._model).forward).parameters
        self._how = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in takes else {}
        stored = Path(folder) / "preprocessor_config.json"
        found = json.loads(read_bounded(stored, MIB)) if stored.is_file() else {}
        colours = [found.get("image_mean") or MEAN, found.get("image_std") or STD]
        self._mean, self._std = (torch.tensor(each, device=device).view(1, 3, 1, 1) for each in colours)

    @property
    def width(self) -> int:
        return self._model.config.hidden_size

    def fingerprint(self) -> str:
        """Hash everything that determines the features."""
        how = [*self.grid, *self._mean.flatten().tolist(), *self._std.flatten().tolist(), self._dtype]
        return module_fingerprint(self._model, str(how))

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        """Return the features (B, N, width) fp32 of pictures (B, 1 or 3, H, W) in [-1, 1]."""
        x = F.interpolate(pixels.float(), self._size, mode="bicubic", antialias=True).clamp(-1, 1)
        x = ((x.expand(-1, 3, -1, -1) + 1) / 2 - self._mean) / self._std
        tokens = self._model(pixel_values=x.to(self._dtype), **self._how).last_hidden_state
        count = self.grid[0] * self.grid[1]
        return tokens[:, tokens.shape[1] - count :].float()  # class and register tokens come first

    def alignment(self, pixels: Tensor) -> Alignment:
        """Return an alignment term's target for pictures (B, 1 or 3, H, W) in [-1, 1]."""
        return alignment_with(self.features(pixels), self._weight, self._spatial)


class CachedTeacher:
    """Replaces :class:`VisionTeacher` if the features are cached with the latents."""

    def __init__(self, weight: float, spatial: bool):
        self._weight, self._spatial = weight, spatial

    def alignment(self, features: Tensor) -> Alignment:
        """Return an alignment term's target for features (B, N, width) of any floating dtype."""
        return alignment_with(features.float(), self._weight, self._spatial)


def alignment_with(features: Tensor, weight: float, spatial: bool) -> Alignment:
    """Return an alignment term's target for features (B, N, width) fp32. weight, spatial: see VisionTeacher."""
    return Alignment(without_mean(features) if spatial else features, weight)


ENCODER, PROCESSOR, CLASS = "image_encoder", "image_processor", "CLIPVisionModel"


class PictureTokens:
    """Encodes pictures to CLIP's tokens in fp32, with the image encoder in a pipeline's folder. width: width of the
    tokens that the network takes.

    Raises FileNotFoundError or ValueError if a file is missing, or the encoder's class or width is wrong."""

    def __init__(self, folder: Path, width: int, device: torch.device | str):
        from opendit.encoders.schema import PRETRAINED

        path = folder / ENCODER
        config = read_json_of(path / CONFIG, PRETRAINED, f"it describes a {CLASS} of transformers")
        if config.get("model_type") not in ("clip_vision_model", "clip"):
            raise ValueError(f"{path / CONFIG}: model_type is {shown(config.get('model_type'))}, which is no {CLASS}")
        if config.get("hidden_size") != width:
            found = shown(config.get("hidden_size"))
            raise ValueError(f"{path / CONFIG}: hidden_size is {found}, and the network takes {width}")
        with loading(str(path)):
            self._encoder: Any = transformers_model(path, CLASS, STEM).eval().requires_grad_(False).to(device)
        with loading(str(folder / PROCESSOR)):
            how: dict[str, Any] = dict(local_files_only=True, trust_remote_code=False)
            kind = lazy_module("transformers").CLIPImageProcessor
            self._processor: Any = kind.from_pretrained(folder / PROCESSOR, **how)
        self.device = torch.device(device)

    def fingerprint(self) -> str:
        """Hash the encoder's weights and how pictures are prepared for it."""
        return module_fingerprint(self._encoder, str(self._processor))

    @torch.no_grad()
    def encode(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Encode B pictures to tokens (B, tokens, width), fp32 on ``device``."""
        pixels = self._processor(images=list(pictures), return_tensors="pt")["pixel_values"].to(self.device)
        return self._encoder(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]

    def of_clips(self, pixels: Tensor) -> Tensor:
        """Encode the first frames of clips (B, 3, T, H, W) in [-1, 1] to tokens."""
        frames = ((pixels[:, :, 0] + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
        return self.encode([Image.fromarray(frame) for frame in frames])
