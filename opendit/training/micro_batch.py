"""Micro-batches: samples of one size, or packs of samples of unequal size, behind the same methods."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from opendit.models import Condition, TextCondition
from opendit.models.given_frames import with_given
from opendit.models.segments import PlacedSegments, Segments, segment_means


class MicroBatch(NamedTuple):
    """A micro-batch on the device: latents x0 and noise (B, C, ...) fp32, times t (B,) as of the objective's ``times``,
    and the conditions of its samples. given: mask ++ given (B, 1 + C, T, H, W) of a model with given frames."""

    x0: Tensor
    t: Tensor
    noise: Tensor
    condition: Condition
    given: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the same order for every micro-batch of a run."""
        y = self.condition
        parts = [self.x0, self.t, self.noise, *([y] if isinstance(y, Tensor) else [y.tokens, y.mask, y.pooled])]
        return parts if self.given is None else [*parts, self.given]

    @property
    def row_times(self) -> Tensor:
        """The time of each row of x0, (B,)."""
        return self.t

    def network_inputs(self, x_t: Tensor, timestep: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Return the arguments of the network for noised rows x_t and the times (B,) that it is told of them."""
        return (with_given(x_t, self.given), timestep), {"y": self.condition}

    def sample_losses(self, losses: Tensor) -> Tensor:
        """Return the losses of the samples, (B,), of those of x0's rows."""
        return losses

    def mean(self, losses: Tensor) -> Tensor:
        """Return the micro-batch's loss, 0-dim, of the losses of its samples."""
        return losses.mean()

    def samples_of(self, marked: Tensor) -> list[int]:
        """Return the samples in whose part of the bool tensor ``marked`` an element is True; all samples if the tensor
        is not laid out by samples."""
        count = len(self.x0)
        if marked.dim() == 0 or marked.shape[0] % count:
            return list(range(count))
        return _rows_of(marked.reshape(count, -1))

    def clone(self) -> "MicroBatch":
        x0, t, noise, *y = (tensor.clone() for tensor in self.tensors())
        given = None if self.given is None else y.pop()
        return MicroBatch(x0, t, noise, y[0] if isinstance(self.condition, Tensor) else TextCondition(*y), given)


@dataclass(frozen=True)
class PackedMicroBatch:
    """Packs on the device, as a single sequence of tokens (opendit.models.segments).

    x0, noise: patches (N, C, *patch) fp32. t: (S,), of its S segments. shares: (S,) fp32, which share of the loss each
    segment's is: over all micro-batches and ranks of a step the mean is then that of the step's samples. given: patches
    (N, 1 + C, *patch) of mask ++ given, of a model with given frames.
    """

    x0: Tensor
    t: Tensor
    noise: Tensor
    condition: Condition
    segments: Segments
    shares: Tensor
    given: Tensor | None = None

    @cached_property
    def _placed(self) -> PlacedSegments:
        return self.segments.place(self.x0.device)

    @property
    def row_times(self) -> Tensor:
        """The time of each token, (N,): to the objective a token is a sample at its segment's time."""
        return self.t[self._placed.sample_of_row]

    def network_inputs(self, x_t: Tensor, timestep: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Return the arguments of the network, which is told one time for each segment, (S,)."""
        inputs = with_given(x_t, self.given), timestep[self._placed.offsets[:-1]]
        return inputs, {"y": self.condition, "segments": self.segments}

    def sample_losses(self, losses: Tensor) -> Tensor:
        """Return the loss of each segment, (S,): a sample's loss is the mean over its tokens."""
        return segment_means(losses, self.segments)

    def mean(self, losses: Tensor) -> Tensor:
        """Return the packs' share of the step's loss, 0-dim."""
        return (losses * self.shares).sum()

    def samples_of(self, marked: Tensor) -> list[int]:
        """Return the marked samples of tensors by token or by segment; see :class:`MicroBatch`."""
        count, tokens = len(self.segments.grids), self.segments.tokens
        if marked.dim() > 1 and marked.shape[:2] == (1, tokens):
            marked = marked[0]
        if marked.dim() and len(marked) == tokens:
            owners = self.segments.place(marked.device).sample_of_row[marked.reshape(tokens, -1).any(dim=1)]
            return owners.unique().tolist()
        return _rows_of(marked.reshape(count, -1)) if marked.dim() and len(marked) == count else list(range(count))


def _rows_of(marked: Tensor) -> list[int]:
    return marked.any(dim=1).nonzero().flatten().tolist()
