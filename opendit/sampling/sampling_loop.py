"""The loop of one batch size: static memory, and its steps as CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opendit.config.approximations import Approximations, FirstBlockCache
from opendit.diffusion import Objective
from opendit.diffusion.guidance import cfg_model, guided_within, is_within
from opendit.diffusion.random import initial_noise, keyed_noise
from opendit.diffusion.samplers import SAMPLERS
from opendit.diffusion.samplers.base import Sampler
from opendit.kernels.recording import Recorder
from opendit.models import Condition, DiT
from opendit.sampling.approximations import FIRST, REST, REUSED, Mode, Step, plan_steps
from opendit.sampling.block_stacks import BlockStack, FirstBlockDone, FirstBlockStack, make_stack
from opendit.sampling.fused_steps import FusedSteps, fused_steps, usable
from opendit.sampling.prepared_model import PreparedModel
from opendit.sampling.reused_guidance import ReusedGuidance
from opendit.sampling.step_inputs import StepInputs


@dataclass(frozen=True)
class LoopSettings:
    """The settings that all batches of an engine share; the fields are those of :class:`SamplingEngine`."""

    model: DiT
    objective: Objective
    steps: int
    sampler: str
    cfg_scale: float
    cfg_channels: int | None
    cfg_interval: tuple[float, float] | None
    size: tuple[int, ...]
    around: Callable[..., Any] | None
    memory: int
    approximations: Approximations = Approximations()


class NotRecordedError(RuntimeError):
    """A step could not be recorded; nothing was computed."""


class SamplingLoop:
    """Draws batches of ``samples`` samples each: ``begin``, ``advance`` for every step, ``latents``.

    A step is the network on both halves of guidance, guidance and the sampler's ``advance``. All that it reads and
    writes lies in static memory, the number of the step among it, which it counts up itself. So a recorded step is
    replayed with one call, and nothing to copy. One recording serves all steps that call the same model, have the same
    inputs and leave out the same of the network. The first step of a kind runs kernel by kernel, which compiles kernels
    and sets libraries up; the second is recorded.

    Args:
        times: (steps, evaluations), see :class:`PreparedModel`.
    """

    samples: int
    settings: LoopSettings
    shape: tuple[int, ...]
    network: PreparedModel
    sampler: Sampler
    state: tuple[Tensor, ...]
    step: Tensor
    order: Tensor
    plan: list[Step]
    stack: BlockStack
    fused: FusedSteps | None
    evaluated: int
    whole: int

    def __init__(self, settings: LoopSettings, times: Tensor, samples: int):
        self.settings, self.samples = settings, samples
        model, objective = settings.model, settings.objective
        device, guided = model.device, settings.cfg_scale != 1.0
        self.shape = (model.config.in_channels, *settings.size)
        like = torch.zeros(samples, *self.shape, device=device)
        self.network = PreparedModel(
            model,
            times,
            samples,
            guided=guided,
            size=settings.size,
            memory=settings.memory,
            shared=settings.around is not None,
        )
        forward = self.network if settings.around is None else settings.around(self.network)
        self._guidance = ReusedGuidance(forward, samples)
        trajectory = objective.trajectory(settings.steps, SAMPLERS[settings.sampler].even_in_noise)
        # (For the kinds of steps no noise is drawn: x stands for it.)
        self.sampler = SAMPLERS[settings.sampler](objective.network(self._guided()), trajectory, like, lambda k: like)
        self._inputs: StepInputs | None = None
        self._like, self._trajectory = like, trajectory
        state = self.sampler.init(like)
        self._state_type: Any = type(state)  # a NamedTuple, which the type system can't make of its fields
        self.state = tuple(part.clone() for part in state)
        self.step = torch.zeros(samples, dtype=torch.int64, device=device)
        self.order = torch.arange(samples, device=device)
        models = [self.sampler.model_at(i) for i in range(self.sampler.steps)]
        starts = [i == 0 or models[i] != models[i - 1] for i in range(len(models))]
        self.plan = plan_steps(settings.approximations, starts, trajectory.levels)
        self.stack = self.network.stack = make_stack(settings.approximations, self.plan, device)
        self.fused = self._fuse()  # the kernels of a step's ends; None where torch does them
        self.recordings: dict[tuple[Any, ...], Callable[[], object]] = {}  # kind -> what replays it
        # Blocks times rows of a batch: kind -> what a step of it evaluates, and what it would if nothing were left out
        # (known once one ran); and of all steps so far.
        self._work: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.evaluated = self.whole = 0
        self._addresses: tuple[int, ...] = ()
        self._end = 0  # of the steps in the tables

    def _guided(self):
        """The model of (x, t) that the sampler calls: guidance around the prepared network, which is told by numbers of
        rows what to draw."""
        settings, rows = self.settings, torch.arange(2 * self.samples, device=self.settings.model.device)
        y, null = rows.chunk(2)
        forward = self._guidance
        guided = cfg_model(forward, y, null, settings.cfg_scale, settings.cfg_channels)
        if settings.cfg_interval is None:
            return guided
        conditional = cfg_model(forward, y, null, 1.0)
        return guided_within(settings.cfg_interval, settings.objective.noise_level, guided, conditional)

    def _fuse(self) -> FusedSteps | None:
        """The steps in few kernels, if they can be that."""
        settings, levels = self.settings, self._trajectory.levels[: self.settings.steps]
        given = settings.approximations
        if settings.around is not None or given.guidance_every > 1 or isinstance(given.cache, FirstBlockCache):
            return None
        if not usable(settings.model, settings.size):
            return None
        guided = [self.network.guided] * settings.steps
        if self.network.guided and settings.cfg_interval is not None:
            guided = [is_within(settings.cfg_interval, level) for level in levels]
        parts = self.network, settings.objective, self.sampler, guided, self.state, self.step
        return fused_steps(*parts, settings.cfg_scale, settings.cfg_channels)

    def begin(
        self, y: Condition, null: Condition, index: Tensor, seed: int | Tensor, given: Tensor | None = None
    ) -> None:
        """Takes the conditions and the noise of a batch; ``index`` (B,) int64 on the model's device, ``seed`` one for
        all or (B,) int64 there, ``given`` as of :meth:`PreparedModel.give`."""
        self.network.condition(y, null if self.network.guided else None)
        self.network.give(given)
        if self.fused is not None:
            if self.fused.capacity != self.network.capacity:
                self.fused.reserve(self.network.capacity)
                self.recordings.clear()
        elif self._inputs is None or self._inputs.capacity != self.network.capacity:
            self._inputs = StepInputs(self.sampler, self._like, self.network.capacity)
            self.recordings.clear()
        if self._addresses != self.network.addresses:  # what was recorded reads memory that is no longer there
            self._addresses = self.network.addresses
            self.recordings.clear()
        self.sampler.noise_fn = keyed_noise(seed, index, self.shape)
        start = self.sampler.init(self._trajectory.start(initial_noise(seed, index, self.shape)))
        for static, part in zip(self.state, start, strict=True):
            static.copy_(part)
        self._end = self.evaluated = self.whole = 0

    def advance(self, i: int, recorder: Recorder | None = None) -> None:
        """Takes step i; the steps are taken in their order. recorder: of its recording; None: kernel by kernel.

        Raises NotRecordedError if it can't be recorded; the step is still to be taken then.
        """
        if i == self._end:
            count = self.network.fill(i)
            if self.fused is None:
                assert self._inputs is not None
                self._inputs.fill(i, count)
            else:
                self.fused.fill(i, count, self.sampler.noise)
            self._end += count
            self.step.zero_()
        self.stack.prepare(i)
        mode = self.plan[i].mode
        if mode.blocks == FIRST:
            assert isinstance(self.stack, FirstBlockStack)
            self._take(i, mode, recorder)
            mode = mode._replace(blocks=REUSED if self.stack.reuses() else REST)
        self._take(i, mode, recorder)

    def _take(self, i: int, mode: Mode, recorder: Recorder | None) -> None:
        """Takes step i, or its part, in this mode."""
        kind: tuple[Any, ...]
        if self.fused is None:
            assert self._inputs is not None
            kind = mode, self.sampler.model_at(i), self._inputs.present[i]
        else:
            kind = mode, self.fused.kinds[i]
        if recorder is None or kind not in self._work:
            before = self.stack.evaluated, self._guidance.rows
            self._advance(*kind)
            rows = self._guidance.rows - before[1]
            self._work[kind] = self.stack.evaluated - before[0], rows * len(self.settings.model.blocks)
        else:
            if kind not in self.recordings:
                try:
                    _, self.recordings[kind] = recorder.record(lambda: self._advance(*kind))
                except RuntimeError as error:
                    raise NotRecordedError(str(error)) from error
            self.recordings[kind]()
        evaluated, whole = self._work[kind]
        self.evaluated, self.whole = self.evaluated + evaluated, self.whole + whole

    def _advance(self, mode: Mode, *kind) -> None:
        self.stack.begin(mode.blocks)
        if self.fused is not None:
            self._guidance.rows += self.fused.advance(*kind)
            return
        model, present = kind
        self.network.begin(self.step)
        self._guidance.begin(mode.null)
        assert self._inputs is not None
        inputs = self._inputs.at(self.step, self.order, present)
        try:
            after = self.sampler.advance(model, self._state_type(*self.state), inputs)
        except FirstBlockDone:
            return
        parts = [part.clone() if any(part is old for old in self.state) else part for part in after]
        for static, part in zip(self.state, parts, strict=True):
            static.copy_(part)
        self.step.add_(1)

    def latents(self) -> Tensor:
        """(B, C, ...) float32 after the last step."""
        return self._state_type(*self.state).x.clone()
