"""Autoencoders of diffusers other than ``AutoencoderKL`` in the form that codecs of pictures take: ``encode`` gives the
mean and the logarithm of the variance (B, 2 C, h, w), ``decode`` pixels (B, 3, H, W)."""

from typing import Any

from torch import Tensor, nn


class OneFrame(nn.Module):
    """A video autoencoder that encodes pictures as clips of one frame (Qwen-Image)."""

    def __init__(self, vae: Any):
        super().__init__()
        self.vae, self.config = vae, dict(vae.config)

    def encode(self, pixels: Tensor) -> Tensor:
        return self.vae.encode(pixels.unsqueeze(2)).latent_dist.parameters.squeeze(2)

    def decode(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents.unsqueeze(2)).sample.squeeze(2)
