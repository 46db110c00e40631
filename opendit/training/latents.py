"""Turn a data set's items into the latents that the model learns."""

from dataclasses import dataclass

from torch import Tensor

from opendit.diffusion.random import Stream, normal
from opendit.encoders.vae import ImageCodec, PerChannel, sample_moments
from opendit.encoders.video_vae import VideoCodec


@dataclass(frozen=True)
class Latents:
    """Encodes pixels, or samples cached moments; the VAE's noise is keyed by (seed, step, sample).

    Args:
        codec: the VAE, or the one that passes pixels through; not used on cached latents.
        cached: scaling factor and shift of a data set of cached latents; None for pixels.
        sampled: True if the codec returns the moments of a distribution.
    """

    codec: ImageCodec | VideoCodec | None
    cached: tuple[PerChannel, PerChannel] | None
    sampled: bool
    seed: int

    def of(self, x: Tensor, step: int, index: Tensor) -> Tensor:
        """Return latents (B, C, h, w) or (B, C, t, h, w) fp32 on the device.

        Args:
            x: (B, ...) items of the data set on the device.
            index: (B,) positions in the global batch.
        """
        if self.cached is not None:
            return sample_moments(x, self._noise(x, step, index), *self.cached)
        codec = self.codec
        assert codec is not None, "pixels have one"
        if not self.sampled:
            return codec.encode(x, None)
        moments = codec.moments(x)
        # A VAE on a CPU may answer in channels_last; the backward pass of Gemini's sharded convolution crashes on that.
        return codec.sample(moments, self._noise(moments, step, index)).contiguous()

    def _noise(self, moments: Tensor, step: int, index: Tensor) -> Tensor:
        shape = (moments.shape[1] // 2, *moments.shape[2:])
        return normal(self.seed, step, index, Stream.VAE, shape)
