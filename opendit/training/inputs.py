"""Turn the loader's batches into the inputs of a step: latents, times, noise and conditions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.data import Batch
from opendit.data.base import to_pixels
from opendit.data.enlarging import enlarge
from opendit.diffusion import Objective
from opendit.diffusion.given_frames import draw_given
from opendit.diffusion.random import Stream, normal, uniform
from opendit.encoders.conditioner import Conditioner
from opendit.encoders.vae import ImageCodec, PerChannel, sample_moments
from opendit.encoders.video_vae import VideoCodec
from opendit.models import Condition
from opendit.training.packing import Packing, same_size
from opendit.training.runners import MicroBatch, PackedMicroBatch


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


@dataclass(frozen=True)
class Inputs:
    """Makes a loader's batch a runner's micro-batch; all its randomness is keyed by (seed, step, sample).

    Args:
        label_drop: share of the conditions that are replaced by the null condition.
        packing: of a run of packs.
        tokens_of: how many tokens a sample of latents (C, ...) of a size has; None: the objective does not ask.
        given_frames: the model's: which frames of a clip it is given.
    """

    latents: Latents
    objective: Objective
    conditioner: Conditioner
    device: torch.device
    seed: int
    label_drop: float
    packing: Packing | None = None
    tokens_of: Callable[[tuple[int, ...]], int] | None = None
    given_frames: str | None = None

    def of(self, batch: Batch) -> MicroBatch | PackedMicroBatch:
        """On the device. Nothing waits for it."""
        index = batch.index.to(self.device, non_blocking=True)
        if not isinstance(batch.x, Tensor):
            return self._packed(batch, index)
        x = enlarge(batch.x.to(self.device, non_blocking=True), batch.small)
        x0, noise = self._noised(x, batch.step, index)
        tokens = None if self.tokens_of is None else [self.tokens_of(tuple(x0.shape[2:]))] * len(x0)
        t = self.objective.times(self.seed, batch.step, index, tokens)
        return MicroBatch(x0, t, noise, self._condition(batch, index), self._given(x0, batch.step, index))

    def _noised(self, x: Tensor, step: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and their noise, (B, C, ...) fp32 both, of samples x of one shape."""
        latents = self.latents.of(to_pixels(x), step, index)
        return latents, normal(self.seed, step, index, Stream.NOISE, tuple(latents.shape[1:]))

    def _given(self, latents: Tensor, step: int, index: Tensor) -> Tensor | None:
        return draw_given(self.given_frames, latents, self.seed, step, index)

    def _condition(self, batch: Batch, index: Tensor) -> Condition:
        dropped = uniform(self.seed, batch.step, index, Stream.CONDITION_DROP) < self.label_drop
        return self.conditioner.drop(self.conditioner.of_batch(batch), dropped)

    def _packed(self, batch: Batch, index: Tensor) -> PackedMicroBatch:
        """The samples of a batch (a tuple of tensors, each of its own shape) as packs."""
        packing, samples = self.packing, batch.x
        assert packing is not None and isinstance(samples, tuple), "samples of unequal sizes are a run of packs'"
        x0, noise, given = [], [], []
        for part in same_size(samples):
            x = torch.stack([sample.to(self.device, non_blocking=True) for sample in samples[part]])
            x = enlarge(x, batch.small and batch.small[part])
            for found, made in zip((x0, noise), self._noised(x, batch.step, index[part]), strict=True):
                found.append(made)
            given.append(self._given(x0[-1], batch.step, index[part]))
        segments = packing.segments(tuple(group.shape[2:]) for group in x0 for _ in group)
        shares = packing.shares(batch.weights, len(index), batch.segments_in_step)
        return PackedMicroBatch(
            packing.patches(x0),
            self.objective.times(self.seed, batch.step, index, segments.lengths),
            packing.patches(noise),
            self._condition(batch, index),
            segments,
            shares.to(self.device, non_blocking=True),
            None if self.given_frames is None else packing.patches(given),
        )
