"""Micro-batches for runners: samples of one size, or packs of samples of unequal size."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from opendit.diffusion import Objective
from opendit.models import Condition, TextCondition
from opendit.models.given_frames import with_given
from opendit.models.segments import Segments, segment_means


class MicroBatch(NamedTuple):
    """A micro-batch on the device: latents x0 and noise (B, C, ...) fp32, times t (B,) as of the objective's ``times``,
    and the conditions of its samples. given: mask ++ given (B, 1 + C, T, H, W) of a model with given frames."""

    x0: Tensor
    t: Tensor
    noise: Tensor
    condition: Condition
    given: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All of them, in the same order for every micro-batch of a run."""
        y = self.condition
        parts = [self.x0, self.t, self.noise, *([y] if isinstance(y, Tensor) else [y.tokens, y.mask, y.pooled])]
        return parts if self.given is None else [*parts, self.given]

    def losses(self, objective: Objective, forward: Callable[..., Tensor]) -> Tensor:
        """The loss of each sample, (B,); ``forward``: the model's, or an engine's."""
        prepared = objective.prepare(self.x0, self.t, self.noise)
        x = with_given(prepared.x_t, self.given)
        return objective.loss(forward(x, prepared.timestep, y=self.condition), prepared)

    def mean(self, losses: Tensor) -> Tensor:
        """The micro-batch's loss, 0-dim."""
        return losses.mean()

    def samples_of(self, marked: Tensor) -> list[int]:
        """The samples in whose part of a tensor something is ``marked``, bool and not empty; all of them where it is
        not laid out by samples."""
        count = len(self.x0)
        if marked.dim() == 0 or marked.shape[0] % count:
            return list(range(count))
        return _rows_of(marked.reshape(count, -1))

    def clone(self) -> "MicroBatch":
        x0, t, noise, *y = (tensor.clone() for tensor in self.tensors())
        given = None if self.given is None else y.pop()
        return MicroBatch(x0, t, noise, y[0] if isinstance(self.condition, Tensor) else TextCondition(*y), given)


class PackedMicroBatch(NamedTuple):
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

    def losses(self, objective: Objective, forward: Callable[..., Tensor]) -> Tensor:
        """The loss of each segment, (S,): that of its sample alone.

        To the objective a token is a sample, at its segment's time: all that it does to x0 and to what the network
        predicts is done number by number, and its loss is a mean, of which a segment's is the mean over its tokens.
        """
        rows = self.segments.place(self.x0.device)
        prepared = objective.prepare(self.x0, self.t[rows.sample_of_row], self.noise)
        timestep = prepared.timestep[rows.offsets[:-1]]
        output = forward(with_given(prepared.x_t, self.given), timestep, y=self.condition, segments=self.segments)
        return segment_means(objective.loss(output, prepared), self.segments)

    def mean(self, losses: Tensor) -> Tensor:
        """The packs' share of the step's loss, 0-dim."""
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
