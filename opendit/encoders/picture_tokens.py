"""Encode pictures with CLIP to tokens, the outputs of its second to last layer, for image-to-video networks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from opendit.common.json_file import MIB
from opendit.common.json_models import FileKind
from opendit.common.utils import shown
from opendit.encoders.folder import CONFIG, PretrainedConfig, lazy_module, loading, transformers_model
from opendit.encoders.published_folder import read_json_of
from opendit.encoders.text import STEM
from opendit.encoders.vae import module_fingerprint

ENCODER, PROCESSOR, CLASS = "image_encoder", "image_processor", "CLIPVisionModel"
ENCODER_CONFIG = FileKind(PretrainedConfig, MIB)


class PictureTokens:
    """The image encoder of a pipeline's folder, in fp32.

    Args:
        folder: folder of the pipeline.
        width: width of the tokens that the network takes.
        device: device of the encoder.

    Raises:
        FileNotFoundError, ValueError: a file is missing, or the encoder's class or width is wrong. The message is one
            line.
    """

    def __init__(self, folder: Path, width: int, device: torch.device | str):
        path = folder / ENCODER
        config = read_json_of(path / CONFIG, ENCODER_CONFIG, f"it describes a {CLASS} of transformers")
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
