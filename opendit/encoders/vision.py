"""Compute the features of pictures with which a model's tokens are aligned (``--repa``).

The features are those of a frozen vision transformer of transformers (DINOv2, DINOv3, ViT, ...) from a folder.
"""

import inspect
import json
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.common.json_file import MIB, read_bounded
from opendit.encoders.folder import loading, transformers_model
from opendit.encoders.vae import module_fingerprint
from opendit.models.alignment import Alignment, without_mean

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # colour statistics of ImageNet, used if the folder has none
NEEDS = "give the folder of a vision transformer of transformers, such as DINOv2's"


def vision_config(folder: str) -> Any:
    """Return the configuration of the vision encoder in ``folder``, as an object of transformers. Raises ValueError if
    there is none."""
    import transformers

    with loading(f"--repa {folder}: the vision encoder", f"; {NEEDS}"):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not all(isinstance(getattr(config, name, None), int) for name in ("hidden_size", "patch_size")):
        raise ValueError(f"--repa {folder}: a {config.model_type} has no patches of a width; {NEEDS}")
    return config


class VisionTeacher:
    """Computes features of clean pictures, one feature for each token of a model.

    Args:
        folder: folder of the encoder.
        grid: grid of the model's tokens, (H, W). Pictures are resized so that the encoder has one patch per token.
        weight: weight of the alignment term in the loss.
        spatial: apply iREPA's normalisation to the features.
        device: device of the encoder.
        dtype: dtype of the encoder.

    Attributes:
        name: the folder.
        grid: see above.
    """

    name: str
    grid: tuple[int, ...]

    def __init__(
        self,
        folder: str,
        grid: tuple[int, ...],
        weight: float,
        spatial: bool,
        device: torch.device,
        dtype: torch.dtype,
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
        """Width of the features."""
        return self._model.config.hidden_size

    def fingerprint(self) -> str:
        """Hash everything that decides the features."""
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
        """Return the features of pictures (B, 1 or 3, H, W) in [-1, 1], as the target of an alignment term."""
        return alignment_with(self.features(pixels), self._weight, self._spatial)


class CachedTeacher:
    """Used instead of :class:`VisionTeacher` if the features are cached with the latents. Arguments: see there."""

    def __init__(self, weight: float, spatial: bool):
        self._weight, self._spatial = weight, spatial

    def alignment(self, features: Tensor) -> Alignment:
        """Return features (B, N, width) of any floating dtype as the target of an alignment term."""
        return alignment_with(features.float(), self._weight, self._spatial)


def alignment_with(features: Tensor, weight: float, spatial: bool) -> Alignment:
    """Return features (B, N, width) fp32 as the target of an alignment term. Arguments: see :class:`VisionTeacher`."""
    return Alignment(without_mean(features) if spatial else features, weight)
