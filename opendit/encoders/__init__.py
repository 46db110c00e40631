"""Frozen networks that convert pixels to latents and back, and captions to embeddings."""

from opendit.encoders.vae import ImageCodec, PixelCodec, VAECodec, codec_geometry, load_codec, sample_moments

__all__ = ["ImageCodec", "PixelCodec", "VAECodec", "codec_geometry", "load_codec", "sample_moments"]
