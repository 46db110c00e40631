"""Pixels <-> latents, and words -> embeddings, by frozen networks."""

from opendit.encoders.vae import ImageCodec, PixelCodec, VAECodec, codec_geometry, load_codec, sample_moments

__all__ = ["ImageCodec", "PixelCodec", "VAECodec", "codec_geometry", "load_codec", "sample_moments"]
