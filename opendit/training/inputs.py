"""What a step works on: the loader's batches as latents, with times, noise and conditions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.data import Batch
from opendit.data.base import to_pixels
from opendit.diffusion import Objective
from opendit.diffusion.random import Stream, normal, uniform
from opendit.encoders.conditioner import Conditioner
from opendit.encoders.vae import ImageCodec, PerChannel, sample_moments
from opendit.encoders.video_vae import VideoCodec
from opendit.training.runners import MicroBatch


@dataclass(frozen=True)
class Latents:
    """Makes the data set's items what the model learns from; the VAE's noise is keyed by (seed, step, sample).

    Args:
        codec: the VAE, or pixels as they are; not used on cached latents.
        cached: (scaling factor, shift) of a data set of cached latents; None: it holds pixels.
        sampled: whether the codec makes the moments of a distribution.
    """

    codec: ImageCodec | VideoCodec | None
    cached: tuple[PerChannel, PerChannel] | None
    sampled: bool
    seed: int

    def of(self, x: Tensor, step: int, index: Tensor) -> Tensor:
        """(B, C, h, w) or (B, C, t, h, w) fp32 on the device.

        Args:
            x: (B, ...) the data set's items on the device.
            index: (B,) positions in the global batch.
        """
        if self.cached is not None:
            return sample_moments(x, self._noise(x, step, index), *self.cached)
        if not self.sampled:
            return self.codec.encode(x, None)
        moments = self.codec.moments(x)
        # A VAE on a CPU may answer in channels_last; the backward pass of Gemini's sharded convolution crashes on that.
        return self.codec.sample(moments, self._noise(moments, step, index)).contiguous()

    def _noise(self, moments: Tensor, step: int, index: Tensor) -> Tensor:
        shape = (moments.shape[1] // 2, *moments.shape[2:])
        return normal(self.seed, step, index, Stream.VAE, shape)


@dataclass(frozen=True)
class Inputs:
    """Makes a loader's batch a runner's micro-batch; all its randomness is keyed by (seed, step, sample).

    Args:
        label_drop: share of the conditions that are replaced by the null condition.
    """

    latents: Latents
    objective: Objective
    conditioner: Conditioner
    device: torch.device
    seed: int
    label_drop: float

    def of(self, batch: Batch) -> MicroBatch:
        """On the device. Nothing waits for it."""
        device, seed, step = self.device, self.seed, batch.step
        index = batch.index.to(device, non_blocking=True)
        latents = self.latents.of(to_pixels(batch.x.to(device, non_blocking=True)), step, index)
        t = self.objective.times(seed, step, index)
        noise = normal(seed, step, index, Stream.NOISE, tuple(latents.shape[1:]))
        dropped = uniform(seed, step, index, Stream.CONDITION_DROP) < self.label_drop
        return MicroBatch(latents, t, noise, self.conditioner.drop(self.conditioner.of_batch(batch), dropped))
