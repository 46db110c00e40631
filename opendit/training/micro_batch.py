"""Micro-batches on the device: samples of one size, or packs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from opendit.config.components import TokenRoute
from opendit.data import Batch
from opendit.data.base import to_pixels
from opendit.data.clips import enlarge
from opendit.diffusion.objectives import Objective
from opendit.diffusion.objectives.base import Prepared
from opendit.diffusion.random import Stream, draw_route, normal
from opendit.encoders.conditioner import Conditioner
from opendit.encoders.vae import ImageCodec, PerChannel, sample_moments
from opendit.encoders.video_vae import VideoCodec
from opendit.models.auxiliary import Alignment, weighted
from opendit.models.conditioning import (
    Condition,
    TextCondition,
    first_frames_alone,
    give_beside,
    times_of_frames,
    with_given,
)
from opendit.models.segments import PlacedSegments, Segments, segment_means, to_patches


class MicroBatch(NamedTuple):
    """A micro-batch on the device.

    Attributes:
        x0, noise: latents and their noise, (B, C, ...) fp32.
        t: (B,) times drawn by the objective.
        given: (B, 1 + C, T, H, W) mask and latents of the conditioning frames; see opendit/models/conditioning.py.
        in_place: True if conditioning frames replace frames of x_t. The loss excludes these frames.
        kept: (B, n) int64 indices of the routed blocks' tokens; None for all tokens.
        dropped: (B,) bool, True to drop the routed blocks' result; None without a fused route.
        alignment: features with which tokens are aligned (opendit/models/auxiliary.py).
        uncertain: True if the model learns weights for the losses.
    """

    x0: Tensor
    t: Tensor
    noise: Tensor
    condition: Condition
    given: Tensor | None = None
    in_place: bool = False
    kept: Tensor | None = None
    dropped: Tensor | None = None
    alignment: Alignment | None = None
    uncertain: bool = False

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in one order."""
        y = self.condition
        parts = [self.x0, self.t, self.noise, *([y] if isinstance(y, Tensor) else y.tensors())]
        features = None if self.alignment is None else self.alignment.features
        return [*parts, *(tensor for tensor in (self.given, self.kept, self.dropped, features) if tensor is not None)]

    @property
    def full(self) -> bool:
        """True if no caption is padded, so that blocks need no mask."""
        return isinstance(self.condition, Tensor) or self.condition.full

    @property
    def row_times(self) -> Tensor:
        """Times of the rows of x0, (B,)."""
        return self.t

    def network_inputs(self, x_t: Tensor, timestep: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Return the network's arguments for noised samples x_t at the network's times (B,)."""
        more = _only_set(
            kept=self.kept, dropped=self.dropped, aligned=self.alignment is not None, uncertain=self.uncertain
        )
        return (with_given(x_t, self.given), self.network_times(timestep)), {"y": self.condition, **more}

    def network_times(self, timestep: Tensor) -> Tensor:
        """Return the network's times: ``timestep`` (B,), or one per frame (B, T) with conditioning frames in place."""
        return times_of_frames(timestep, self.given) if self.in_place and self.given is not None else timestep

    def losses(self, objective: Objective, output: Any, prepared: Prepared) -> Tensor:
        """Return the samples' losses, (B,), from the network's output."""
        output, *more = output if isinstance(output, tuple) else (output,)
        losses = self._losses(objective, output, prepared)
        if self.uncertain:
            losses = weighted(losses, more.pop())
        return losses if self.alignment is None else losses + self.alignment.losses(more.pop())

    def _losses(self, objective: Objective, output: Tensor, prepared: Prepared) -> Tensor:
        if not self.in_place or self.given is None:
            return objective.loss(output, prepared)
        # Conditioning frames in place have a target of 0. With an output of 0, they add nothing to the mean.
        drawn = 1 - self.given[:, :1]
        return objective.loss(output * drawn, prepared) / drawn.flatten(1).mean(1)

    def mean(self, losses: Tensor) -> Tensor:
        """Return the micro-batch's loss, 0-dim: the mean of the samples' losses."""
        return losses.mean()

    def samples_of(self, marked: Tensor) -> list[int]:
        """Return the samples with True in ``marked``. Return all samples if ``marked`` has no row per sample."""
        count = len(self.x0)
        if marked.dim() == 0 or marked.shape[0] % count:
            return list(range(count))
        return _rows_of(marked.reshape(count, -1))

    @classmethod
    def of(
        cls, x0: Tensor, t: Tensor, noise: Tensor, y: Condition, given: Tensor | None, in_place: bool, **more: Any
    ) -> "MicroBatch":
        """Make a micro-batch. Conditioning frames in place get noise = x0, so that x_t = x0 at every time."""
        if in_place and given is not None:
            noise = torch.where(given[:, :1] > 0, x0, noise)
        return cls(x0, t, noise, y, given, in_place, **more)

    def clone(self) -> "MicroBatch":
        """Return a copy of all tensors. The copy's captions count as padded if any caption is padded."""
        copies: dict[str, Any] = {n: value.clone() for n, value in self._asdict().items() if isinstance(value, Tensor)}
        if isinstance(self.condition, TextCondition):
            texts = [tensor.clone() for tensor in self.condition.tensors()]
            copies["condition"] = TextCondition(*texts, shortest=texts[0].shape[1] * self.full)
        if self.alignment is not None:
            copies["alignment"] = self.alignment._replace(features=self.alignment.features.clone())
        return self._replace(**copies)


@dataclass(frozen=True)
class PackedMicroBatch:
    """Packs on the device: one sequence of N tokens with S segments, one per sample (opendit/models/segments.py).

    Attributes:
        x0, noise: (N, C, *patch) fp32 patches.
        t, condition: times (S,) and conditions of the segments.
        shares: (S,) fp32 weights of the segments in the loss; see :meth:`Packing.shares`.
        given: (N, 1 + C, *patch) patches of the mask and the conditioning frames.
        kept: (1, n) int64 indices of the routed blocks' tokens; ``segments.kept`` counts them per segment.
        dropped, uncertain: as in :class:`MicroBatch`, ``dropped`` for each segment, (S,).
    """

    x0: Tensor
    t: Tensor
    noise: Tensor
    condition: Condition
    segments: Segments
    shares: Tensor
    given: Tensor | None = None
    kept: Tensor | None = None
    dropped: Tensor | None = None
    uncertain: bool = False

    @cached_property
    def _placed(self) -> PlacedSegments:
        return self.segments.place(self.x0.device)

    @property
    def row_times(self) -> Tensor:
        """Times of the tokens, (N,). The objective treats each token as a sample."""
        return self.t[self._placed.sample_of_row]

    def network_inputs(self, x_t: Tensor, timestep: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Return the network's arguments, with one time per segment, (S,)."""
        inputs = with_given(x_t, self.given), timestep[self._placed.offsets[:-1]]
        more = _only_set(kept=self.kept, dropped=self.dropped, uncertain=self.uncertain)
        return inputs, {"y": self.condition, "segments": self.segments, **more}

    def losses(self, objective: Objective, output: Any, prepared: Prepared) -> Tensor:
        """Return the segments' losses, (S,): each is the mean over the segment's tokens."""
        output, u = output if self.uncertain else (output, None)
        losses = segment_means(objective.loss(output, prepared), self.segments)
        return losses if u is None else weighted(losses, u)

    def mean(self, losses: Tensor) -> Tensor:
        """Return the packs' contribution to the step's loss, 0-dim."""
        return (losses * self.shares).sum()

    def samples_of(self, marked: Tensor) -> list[int]:
        """Return the indices of the samples with a True value in ``marked``, which has the shape (tokens, ...) or
        (segments, ...). For other shapes, return all indices."""
        count, tokens = len(self.segments.grids), self.segments.tokens
        if marked.dim() > 1 and marked.shape[:2] == (1, tokens):
            marked = marked[0]
        if marked.dim() and len(marked) == tokens:
            owners = self.segments.place(marked.device).sample_of_row[marked.reshape(tokens, -1).any(dim=1)]
            return owners.unique().tolist()
        return _rows_of(marked.reshape(count, -1)) if marked.dim() and len(marked) == count else list(range(count))


def _only_set(**arguments: Any) -> dict[str, Any]:
    """Leave out arguments that are None or False, because not every network has them."""
    return {name: value for name, value in arguments.items() if value is not None and value is not False}


def _rows_of(marked: Tensor) -> list[int]:
    return marked.any(dim=1).nonzero().flatten().tolist()


@dataclass(frozen=True)
class Latents:
    """Converts samples to latents: encodes pixels, or samples from cached moments.

    The noise is keyed by (seed, step, index).

    Args:
        codec: the VAE, or the codec that returns pixels unchanged. Not used for cached latents.
        cached: scaling factor and shift of a data set of cached latents; None for pixels.
        sampled: True if the codec returns the moments of a distribution.
    """

    codec: ImageCodec | VideoCodec | None
    cached: tuple[PerChannel, PerChannel] | None
    sampled: bool
    seed: int

    def of(self, x: Tensor, step: int, index: Tensor) -> Tensor:
        """Return the latents of x, (B, C, h, w) or (B, C, t, h, w) fp32. All tensors are on the device. x: pixels or
        cached moments (B, ...). index: (B,) indices in the global batch."""
        if self.cached is not None:
            return sample_moments(x, self._noise(x, step, index), *self.cached)
        codec = self.codec
        assert codec is not None, "pixels have one"
        if not self.sampled:
            return codec.encode(x, None)
        moments = codec.moments(x)
        # contiguous: a VAE on a CPU may return channels_last, with which Gemini's sharded convolution crashes.
        return codec.sample(moments, self._noise(moments, step, index)).contiguous()

    def of_first_frames(self, x: Tensor) -> Tensor:
        """Return mask and latents of first frames (see :func:`give_beside`), encoded without noise. x: clips (B, 3, T,
        H, W), or cached means (B, C, t, h, w) of clips. Cached clips have grey frames after the first."""
        if self.cached is not None:
            return give_beside(
                sample_moments(torch.cat([x, torch.zeros_like(x)], dim=1), torch.zeros_like(x), *self.cached)
            )
        codec = self.codec
        assert codec is not None, "a run on pixels has one"
        moments = codec.moments(first_frames_alone(x))
        return give_beside(codec.sample(moments, torch.zeros_like(moments.chunk(2, dim=1)[0])))

    def _noise(self, moments: Tensor, step: int, index: Tensor) -> Tensor:
        shape = (moments.shape[1] // 2, *moments.shape[2:])
        return normal(self.seed, step, index, Stream.VAE, shape)


def condition_on_first_frames(
    y: Condition, batch: Batch, x: Tensor, latents: Latents, conditioner: Conditioner
) -> tuple[Condition, Tensor]:
    """Condition an image-to-video model on the first frames of clips x, (B, 3, T, H, W), or on those cached in
    ``batch``.

    Return the conditions, with tokens of the first frames if the model attends to them, and the first frames' mask and
    latents.
    """
    if batch.first is None:
        pixels = to_pixels(x)
        return conditioner.of_clips(y, pixels), latents.of_first_frames(pixels)
    means, tokens = (part.to(x.device, torch.float32, non_blocking=True) for part in batch.first)
    return conditioner.of_clips(y, None, tokens), latents.of_first_frames(means)


class SampleInputs(Protocol):
    """Interface of ``Inputs`` in train.py. The methods are documented there."""

    @property
    def objective(self) -> Objective: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def seed(self) -> int: ...
    @property
    def route(self) -> TokenRoute | None: ...
    @property
    def uncertain(self) -> bool: ...
    def of(self, batch: Batch) -> MicroBatch | PackedMicroBatch: ...
    def clean(self, x: Tensor, step: int, index: Tensor) -> Tensor: ...
    def noise(self, x0: Tensor, step: int, index: Tensor) -> Tensor: ...
    def condition(self, batch: Batch, index: Tensor) -> Condition: ...
    def given(self, x0: Tensor, step: int, index: Tensor) -> Tensor | None: ...


@dataclass(frozen=True)
class Packing:
    """Packs samples into sequences of ``tokens`` tokens. A step has ``micro_batches`` sequences over all ranks."""

    patch: tuple[int, ...]
    tokens: int
    micro_batches: int

    def micro_batch(self, inputs: SampleInputs, batch: Batch, index: Tensor) -> PackedMicroBatch:
        """Convert a batch of different shapes to one packed sequence. index: (S,) positions in the global batch."""
        samples, x0, noise, given = cast(tuple[Tensor, ...], batch.x), [], [], []
        for part in same_size(samples):
            x = torch.stack([sample.to(inputs.device, non_blocking=True) for sample in samples[part]])
            x0.append(inputs.clean(enlarge(x, batch.small and batch.small[part]), batch.step, index[part]))
            noise.append(inputs.noise(x0[-1], batch.step, index[part]))
            given.append(inputs.given(x0[-1], batch.step, index[part]))
        segments = self.segments(tuple(group.shape[2:]) for group in x0 for _ in group)
        segments, kept, dropped = self.route(segments, inputs, batch.step, index)
        shares = self.shares(len(index), batch.samples_in_step)
        return PackedMicroBatch(
            self.patches(x0),
            inputs.objective.times(inputs.seed, batch.step, index, segments.lengths),
            self.patches(noise),
            inputs.condition(batch, index),
            segments,
            shares.to(inputs.device, non_blocking=True),
            None if given[0] is None else self.patches(given),
            kept=kept,
            dropped=dropped,
            uncertain=inputs.uncertain,
        )

    def route(
        self, segments: Segments, inputs: SampleInputs, step: int, index: Tensor
    ) -> tuple[Segments, Tensor | None, Tensor | None]:
        """Choose each segment's tokens for the routed blocks, with the random numbers of a run without packs. Return
        the segments with their reduced lengths, and the micro-batch's ``kept`` and ``dropped``."""
        kept, counts, dropped = [], [], []
        for run in segments.runs:
            own = slice(run.segment, run.segment + run.count)
            found, dropped_here = draw_route(inputs.route, run.length, inputs.seed, step, index[own])
            dropped.append(dropped_here)
            if found is not None:
                firsts = torch.arange(run.count, device=found.device) * run.length + segments.offsets[run.segment]
                kept.append((found + firsts.unsqueeze(1)).flatten())
                counts += [found.shape[1]] * run.count
        every = None if dropped[0] is None else torch.cat(cast(list[Tensor], dropped))
        if not kept:
            return segments, None, every
        return replace(segments, kept=tuple(counts)), torch.cat(kept).unsqueeze(0), every

    def segments(self, sizes: Iterable[tuple[int, ...]]) -> Segments:
        return Segments.of(list(sizes), self.patch, self.tokens)

    def patches(self, latents: Sequence[Tensor]) -> Tensor:
        """Cut latents, in groups (k, C, ...) of one size, into patches (tokens, C, *patch), padded with zeros."""
        found = [to_patches(group, self.patch).flatten(0, 1) for group in latents]
        left = self.tokens - sum(map(len, found))
        return torch.cat([*found, found[0].new_zeros(left, *found[0].shape[1:])])

    def shares(self, samples: int, samples_in_step: int) -> Tensor:
        """Return each segment's weight in the micro-batch's loss, (S,) float32. With these weights, the mean over ranks
        and micro-batches is the mean over the step's samples, even if micro-batches differ in size."""
        return torch.full((samples,), self.micro_batches / samples_in_step)


def same_size(samples: Sequence[Tensor]) -> list[slice]:
    """Return slices of consecutive samples with equal shapes."""
    found, first = [], 0
    for _, group in groupby(samples, key=lambda x: x.shape):
        count = sum(1 for _ in group)
        found.append(slice(first, first + count))
        first += count
    return found
