"""Run sampling steps in few kernels, for samplers that update by a weighted sum.

    take_step        select each sample's rows in the tables of weights and noise
    embed_patches    convert the sampler's x to tokens, for both halves of guidance
    ...              the network's blocks and final layer
    guided_update    apply guidance and the sampler's update to the network's output

These kernels replace ``guidance.cfg_model`` and the sampler's ``advance``, with the weights of ``Sampler.weights``.
Samples differ only by fp32 rounding. All inputs of a step are in static memory."""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from opendit.diffusion.objectives import Objective
from opendit.diffusion.samplers import Sampler, StepWeights
from opendit.kernels import sampling_step
from opendit.kernels.common import kernels_available
from opendit.models.blocks import ResidualStream
from opendit.models.dit import DiT
from opendit.sampling.prepared_model import PreparedModel


class StepKind(NamedTuple):
    """A step without its weights and noise. All steps of a kind share one CUDA graph."""

    guided: bool
    evaluations: int
    noise: bool
    variance: bool


def can_fuse(model: DiT, size: tuple[int, ...]) -> bool:
    """Return True if the model uses kernels, runs without autocast, and satisfies :func:`fits_kernels`."""
    available, _ = kernels_available(model.device, model.x_embedder.proj.weight.dtype)
    autocast = torch.is_autocast_enabled(model.device.type)
    return available and bool(model.ops.replaced) and not autocast and fits_kernels(model, size)


def fits_kernels(model: DiT, size: tuple[int, ...]) -> bool:
    """Return True if the kernels support a model that draws latents of this size.

    Not supported: conditioning frames, captions in the token sequence, samples divided over ranks, and frames that are
    repeated to fill a patch. The patch embedding must be one matrix product with a bias."""
    patch = model.config.patch
    repeated = size[:-2] == (1,) and patch[0] > 1  # True if a clip model draws a picture, see DiT.forward
    config = model.config
    plain = config.given_frames is None and config.patch_bottleneck is None and not config.joint_sequence
    return model.sequence is None and not repeated and plain and model.x_embedder.proj.bias is not None


class FusedSteps:
    """The fused steps of one batch size.

    Args:
        linear: every step's weights, see :func:`weights_of_steps`. guided: True for every step with guidance.
        state: the sampler's static state, with x as its first tensor. Every tensor is (B, C, ...) fp32, contiguous.
        step: (B,) int64, static: each sample's step, counted from the tables' first step.
    """

    def __init__(
        self,
        network: PreparedModel,
        linear: list[StepWeights],
        guided: list[bool],
        state: tuple[Tensor, ...],
        step: Tensor,
        cfg_scale: float,
        cfg_channels: int | None,
    ):
        self.network, self.state, self.step, self.channels = network, state, step, cfg_channels
        x, device = state[0], step.device
        self.kinds = [
            StepKind(on, len(one.inputs), one.noise, one.variance is not None)
            for on, one in zip(guided, linear, strict=True)
        ]
        rows = [numbers_of(one) for one in linear]
        width = max(map(len, rows))
        table = [[*row, *[0.0] * (width - len(row))] for row in rows]
        self._all = torch.tensor(table, dtype=torch.float64).to(device, torch.float32)
        self._noisy = any(kind.noise for kind in self.kinds)
        self._guidance = torch.full((len(step),), cfg_scale, dtype=torch.float32, device=device)
        # for each evaluation: the network's next input, and the prediction
        self._between = [
            (torch.empty_like(x), torch.empty_like(x)) for _ in range(max(k.evaluations for k in self.kinds))
        ]
        self.capacity = 0
        self._kernels = kernels_available(device, torch.float32)[0]

    def reserve(self, capacity: int) -> None:
        """Allocate the tables of weights and noise for ``capacity`` steps."""
        x, self.capacity = self.state[0], capacity
        self._numbers = self._all[:capacity].clone()
        self._noise = x.new_empty(capacity * len(x), *x.shape[1:]) if self._noisy else None

    def fill(self, first: int, count: int, noise_of: Callable[[int], Tensor]) -> None:
        """Write ``count`` steps' weights and noise into the tables, beginning with step ``first``."""
        self._numbers[:count].copy_(self._all[first : first + count])
        for i in range(count):
            if self._noise is not None and self.kinds[first + i].noise:
                rows = slice(i * len(self.step), (i + 1) * len(self.step))
                self._noise[rows].copy_(noise_of(first + i))

    def advance(self, kind: StepKind) -> int:
        """Run a step of this kind. Return the number of batch rows in all evaluations of the network."""
        model, network, halves = self.network.model, self.network, 1 + kind.guided
        take_step = sampling_step.take_step if self._kernels else sampling_step.take_step_reference
        embed = sampling_step.embed_patches if self._kernels else sampling_step.embed_patches_reference
        update = sampling_step.guided_update if self._kernels else sampling_step.guided_update_reference
        rows, numbers, cells = take_step(self.step, network.rows[:halves], network.rows_of_a_step, self._numbers)
        layer, positions = model.x_embedder.proj, network.positions
        added = None if model.config.positions_in_blocks else positions
        x, scale, column, old = self.state[0], numbers[:, 0], 1, [*self.state]
        for evaluation in range(kind.evaluations):
            last = evaluation + 1 == kind.evaluations
            tokens = ResidualStream(embed(x, layer.weight, cast(Tensor, layer.bias), added, scale, halves))
            output = network.of_tokens(tokens, rows if evaluation == 0 else rows + evaluation * network.conditions)
            new = self.state if last else self._between[evaluation]
            noisy = last and kind.noise
            terms = len(old) + 1 + noisy
            end = column + len(new) * terms
            update(
                output,
                old,
                [*new],
                numbers[:, column:end].unflatten(1, (len(new), terms)),
                model.config.patch,
                guidance=self._guidance if kind.guided else None,
                channels=self.channels,
                noise=self._noise if noisy else None,
                noise_rows=cells if noisy else None,
                variance=numbers[:, end : end + 2] if last and kind.variance else None,
            )
            x, scale, column = new[0], None, end
            old.append(new[-1])
        return kind.evaluations * halves * len(self.step)


def numbers_of(step: StepWeights) -> list[float]:
    """Return a step's weights in the order in which :meth:`FusedSteps.advance` reads them.

    1. the factor of the network's input
    2. for each evaluation except the last, the weights of the next input and of the prediction
    3. the new state's weights, and a learned variance's p and q"""
    numbers = [step.inputs[0][0]]
    for weights in step.inputs[1:]:
        numbers += [*weights, *[0.0] * (len(weights) - 1), 1.0]
    for weights in step.after:
        numbers += weights
    return numbers + list(step.variance or ())


def weights_of_steps(objective: Objective, sampler: Sampler, tensors: int) -> list[StepWeights] | None:
    """Return all steps' weights for the network's output. Return None if the kernels don't support the sampler's
    update. tensors: number of tensors in the sampler's state."""
    stated = [sampler.weights(i, objective.learn_sigma) for i in range(sampler.steps)]
    found = [weights_of_network(one, objective, sampler, i) for i, one in enumerate(stated) if one is not None]
    if len(found) < len(stated):
        return None
    most = max(len(one.inputs) for one in found)
    if tensors > sampling_step.MOST_NEW or tensors + most - 1 > sampling_step.MOST_OLD:
        return None
    return found


def weights_of_network(step: StepWeights, objective: Objective, sampler: Sampler, i: int) -> StepWeights:
    """Convert the weights ``step`` for the objective's prediction, such as x_0, to weights for the network's output."""
    of_input, of_output = objective.network_weights(sampler.trajectory, i)
    if (of_input, of_output) == (0.0, 1.0):
        return step
    (scales,) = step.inputs  # such objectives' samplers have one evaluation per step
    parts = len(scales)
    after = []
    for weights in step.after:
        output = weights[parts]
        kept = (weight + output * of_input * scale for weight, scale in zip(weights[:parts], scales, strict=True))
        after.append((*kept, output * of_output, *weights[parts + 1 :]))
    return step._replace(after=tuple(after))
