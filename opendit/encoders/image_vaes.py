"""Wrap other autoencoders of diffusers, so that they have the interface of ``AutoencoderKL`` for picture codecs.

``encode`` returns the mean and the log variance (B, 2 C, h, w), and ``decode`` returns pixels (B, 3, H, W).
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle


class OneFrame(nn.Module):
    """Wrapper of a video autoencoder that encodes pictures as clips of one frame (Qwen-Image)."""

    def __init__(self, vae: Any):
        super().__init__()
        self.vae, self.config = vae, dict(vae.config) | {"_class_name": type(vae).__name__}

    def encode(self, pixels: Tensor) -> Tensor:
        return self.vae.encode(pixels.unsqueeze(2)).latent_dist.parameters.squeeze(2)

    def decode(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents.unsqueeze(2)).sample.squeeze(2)


class Packed(nn.Module):
    """Wrapper of FLUX.2's autoencoder that packs each 2 x 2 latent values into the channels of one position.

    The codec normalises packed latents with the statistics of this autoencoder's batch norm.
    """

    def __init__(self, vae: Any):
        super().__init__()
        self.vae = vae
        # remove patch_size: other code expects it in pixels, but here it counts packed latents
        about = {"_class_name": type(vae).__name__, "patch_size": None}
        numbers = of_batch_norm(vae.bn.running_mean, vae.bn.running_var, vae.config.batch_norm_eps)
        self.config = dict(vae.config) | about | numbers

    def encode(self, pixels: Tensor) -> Tensor:
        return pixel_unshuffle(self.vae.encode(pixels).latent_dist.parameters, 2)

    def decode(self, latents: Tensor) -> Tensor:
        return self.vae.decode(pixel_shuffle(latents, 2)).sample


def of_batch_norm(mean: Tensor, variance: Tensor, eps: float) -> dict[str, Any]:
    """Convert a batch norm's statistics (C,) to a codec's settings for normalising latents."""
    return {"scaling_factor": None, "latents_mean": mean.tolist(), "latents_std": (variance + eps).sqrt().tolist()}
