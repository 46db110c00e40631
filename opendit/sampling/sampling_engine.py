"""The sampling engine: draws batches of latents with one model, and replays each step as one CUDA graph.

``opendit.diffusion.objectives.base.sample_latents`` is a shorter but slower implementation."""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opendit.config.components import TokenRoute
from opendit.config.sample import Approximations, FirstBlockCache
from opendit.diffusion.guidance import GuidedWithin, cfg_model, is_within
from opendit.diffusion.objectives import Objective
from opendit.diffusion.random import draw_kept_tokens, initial_noise, keyed_noise
from opendit.diffusion.samplers import SAMPLERS, Sampler
from opendit.kernels.fp8 import keep_weights
from opendit.kernels.recording import GraphRecorder, Recorder
from opendit.models.conditioning import Condition, of_same_pictures
from opendit.models.dit import DiT
from opendit.sampling import approximate_steps
from opendit.sampling.fused_steps import FusedSteps, can_fuse, weights_of_steps
from opendit.sampling.prepared_model import PreparedModel

TABLE_BYTES = 256 << 20  # enough for DiT-XL/2 with 12 guided samples and 50 steps, or 64 samples and 10 steps
LOOPS = 4  # batch sizes with stored recordings, at most

logger = logging.getLogger(__name__)


class SamplingEngine:
    """Draws latents with one model and one set of settings. The model's weights must not change or move.

    The first batch of each size records its steps as CUDA graphs, for later batches to replay. If recording is not
    possible, ``note`` says why, and steps run kernel by kernel. With float8 operations, weights are cast once.

    Args:
        model: on its device, in its precision and in eval mode.
        sampler: one of the objective's samplers; None for the default.
        cfg_scale, cfg_channels, cfg_interval: classifier-free guidance, as in ``sample_latents``.
        guidance_every: N evaluates guidance's unconditional half only in every N-th step.
        guidance_by: "null", or a route, see :func:`~opendit.sampling.approximate_steps.weak_route`.
        cache: "first_block[:THRESHOLD]" or "taylor:K[:ORDER]" (``opendit.sampling.approximate_steps``).
        size: (h, w) or (t, h, w) of the latents; by default the model's input size.
        around: wraps the callable ``model(x, t, y)`` inside guidance, so that ranks can share batches.
        record: allow recording steps as CUDA graphs.
        table_bytes: maximum bytes for precomputed modulations, and separately for the captions' keys and values.
        loops: maximum number of batch sizes with stored recordings.
        recorder: records steps; by default a new one, if recording is possible.

    Raises ValueError if the sampler belongs to another objective, or if the settings are invalid or can't be combined.
    """

    def __init__(
        self,
        model: DiT,
        objective: Objective,
        *,
        steps: int,
        sampler: str | None = None,
        cfg_scale: float = 4.0,
        cfg_channels: int | None = None,
        cfg_interval: tuple[float, float] | None = None,
        guidance_every: int = 1,
        guidance_by: str = "null",
        cache: str | None = None,
        size: tuple[int, ...] | None = None,
        around: Callable[..., Any] | None = None,
        record: bool = True,
        table_bytes: int = TABLE_BYTES,
        loops: int = LOOPS,
        recorder: GraphRecorder | None = None,
    ):
        size = tuple(size or model.config.input_size)
        objective = objective.for_tokens(math.prod(model.config.grid_of(size)))
        name = objective.choose(sampler)
        self.approximations = Approximations.of(guidance_every, cache, steps)
        if self.approximations.by_batch and (around is not None or model.sequence is not None):
            raise ValueError(f"--cache {cache}: decides by what a rank sees, and ranks share samples; use taylor:3")
        weak = approximate_steps.weak_route(model.config, guidance_by)
        if weak is not None and around is not None:
            raise ValueError(f"--guidance_by {guidance_by}: halves of a batch are of one rank; leave it out")
        self.settings = LoopSettings(
            model=model,
            objective=objective,
            steps=steps,
            sampler=name,
            cfg_scale=cfg_scale,
            cfg_channels=cfg_channels,
            cfg_interval=cfg_interval,
            size=size,
            around=around,
            memory=table_bytes,
            approximations=self.approximations,
            weak=weak,
        )
        if model.ops.float8 and model.sequence is None:
            keep_weights(model)
        channels = model.config.in_channels, model.config.out_channels
        times = evaluation_times(objective, name, steps, channels, model.device)
        most = max(map(len, times))
        # Pad steps with fewer evaluations. Nothing reads the padding.
        self._times = torch.stack([torch.cat([t, t[:1].repeat_interleave(most - len(t), dim=0)]) for t in times])
        self.evaluated = 0  # block evaluations so far: one for each block and batch row
        self._full_work = 0  # block evaluations of all ranks without approximations
        # batch size -> loop; the most recently used loop is last
        self.loops: OrderedDict[int, SamplingLoop] = OrderedDict()
        self._most_loops = loops
        why_not = why_not_recorded(model, record, recorder is not None)
        self._recorder = None if why_not else recorder or GraphRecorder()
        self.note = f"kernel by kernel: {why_not}" if why_not else "recorded as a CUDA graph"

    @property
    def records(self) -> bool:
        """True if steps are recorded as CUDA graphs."""
        return self._recorder is not None

    @torch.inference_mode()
    def sample(
        self,
        y: Condition,
        null: Condition,
        index: Tensor,
        seed: int,
        *,
        conditioning_frames: Tensor | None = None,
        progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
        callback: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Draw one batch of latents: float32 (B, C, h, w), or (B, C, t, h, w) for a clip model.

        Args:
            y: conditions of the B samples, on the model's device.
            null: the condition of guidance's unconditional half, as a batch of 1 or B.
            index: (B,) int64 indices of the samples; their noise depends only on ``seed`` and the indices.
            conditioning_frames: (B, 1 + C, T, H, W), a mask and the latents of the clips' first frames. The result has
                these latents, except for models with ``given_beside``.
            progress: wraps the iterable of steps, such as tqdm.
            callback: ``callback(i, x)`` is called after step i with a copy of the sampler's x (B, C, ...).

        Raises ValueError if y and index differ in length, null does not fit y, or the model takes no conditioning
        frames.
        """
        if len(y) != len(index):
            raise ValueError(f"{len(y)} conditions for {len(index)} samples")
        if conditioning_frames is not None and self.settings.model.config.given_frames is None:
            raise ValueError("the model was trained without --given_frames; leave the given frames out")
        weak = self.settings.weak
        null = of_same_pictures(null, y) if weak is None or weak.fused else y
        if self.settings.cfg_scale != 1.0 and (len(null) not in (1, len(y)) or null.shape[1:] != y.shape[1:]):
            raise ValueError(f"null_y {tuple(null.shape)} does not expand to y {tuple(y.shape)}")
        loop = self.loop_of(len(index))
        device = self.settings.model.device
        frames = None if conditioning_frames is None else conditioning_frames.to(device)
        loop.begin(y, null, index.to(device), seed, frames)
        steps = range(self.settings.steps)
        for i in steps if progress is None else progress(steps):
            self._advance(loop, i)
            if callback is not None:
                callback(i, loop.latents())
        self.evaluated, self._full_work = self.evaluated + loop.evaluated, self._full_work + loop.full_work
        latents = loop.latents()
        if frames is None or self.settings.model.config.given_beside:
            return latents
        return torch.where(frames[:, :1] > 0, frames[:, 1:], latents)

    @property
    def share_evaluated(self) -> float:
        """Block evaluations of this rank, as a fraction of all sharing ranks' evaluations without approximations."""
        return self.evaluated / max(1, self._full_work)

    def batches(
        self, y: Condition, null: Condition, index: Tensor, batch_size: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (index, latents) for up to ``batch_size`` samples at a time; see :meth:`sample`."""
        for first in range(0, len(index), batch_size):
            rows = slice(first, first + batch_size)
            yield index[rows], self.sample(y[rows], null if len(null) == 1 else null[rows], index[rows], seed)

    def loop_of(self, samples: int) -> "SamplingLoop":
        """Return the loop of a batch size. A new loop may replace the least recently used one."""
        if samples not in self.loops:
            while len(self.loops) >= self._most_loops:
                self.loops.popitem(last=False)
            self.loops[samples] = SamplingLoop(self.settings, self._times, samples)
        self.loops.move_to_end(samples)
        return self.loops[samples]

    def _advance(self, loop: "SamplingLoop", i: int) -> None:
        try:
            return loop.advance(i, self._recorder)
        except NotRecordedError as error:
            self._fall_back(error)
        return loop.advance(i)

    def _fall_back(self, error: "NotRecordedError") -> None:
        """Run kernel by kernel from now on, because a failed recording makes the graphs' memory pool unusable."""
        self.note = f"kernel by kernel: recording failed: {str(error).splitlines()[0]}"
        self._recorder = None
        for loop in self.loops.values():
            loop.recordings.clear()
        logger.warning("CUDA graph: %s", self.note)


def why_not_recorded(model: DiT, record: bool, has_recorder: bool) -> str:
    """Return why a model's sampling steps can't be recorded; "" if they can. record: False forbids recording."""
    if not record:
        return "recording is off"
    if not has_recorder and model.device.type != "cuda":
        return "CUDA graphs need a GPU"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast casts weights anew in every block that it is asked for"
    return model.no_graph


def evaluation_times(
    objective: Objective, name: str, steps: int, channels: tuple[int, int], device: torch.device
) -> list[Tensor]:
    """Return the times t at which the sampler ``name`` evaluates the network: for each step, (evaluations,) or
    (evaluations, K). channels: the network's input and output channels."""
    seen: list[list[Tensor]] = []

    def network(x: Tensor, t: Tensor) -> Tensor:
        seen[-1].append(t)
        return x.new_zeros(len(x), channels[1], *x.shape[2:])

    sampler_type = SAMPLERS[name]
    x = torch.zeros(1, channels[0], 1, 1, device=device)
    trajectory = objective.trajectory(steps, sampler_type.even_in_noise)
    sampler = sampler_type(objective.network(network), trajectory, x, lambda k: x)
    state = sampler.init(x)
    for i in range(sampler.steps):
        seen.append([])
        state = sampler.step(state, i)
    return [torch.cat(times) for times in seen]


@dataclass(frozen=True)
class LoopSettings:
    """Settings that all batches of an engine share. :class:`SamplingEngine` describes the fields."""

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
    weak: TokenRoute | None = None  # route of guidance's second half


class NotRecordedError(RuntimeError):
    """A step could not be recorded. Nothing was computed."""


class SamplingLoop:
    """Draws batches of ``samples`` samples: call ``begin``, then ``advance`` for every step, then ``latents``.

    A step's inputs, outputs and index are in static memory, so one recording serves all steps of a kind. A kind has one
    model, one set of inputs, and one mode. A kind's first step runs kernel by kernel, to compile kernels. The second
    step is recorded. times: see :class:`PreparedModel`."""

    def __init__(self, settings: LoopSettings, times: Tensor, samples: int):
        self.settings, self.samples = settings, samples
        model, objective = settings.model, settings.objective
        device, guided = model.device, settings.cfg_scale != 1.0
        self.shape = (model.config.in_channels, *settings.size)
        like = torch.zeros(samples, *self.shape, device=device)
        second = getattr(model, "second", None)
        self._networks = [
            PreparedModel(
                each,
                times,
                samples,
                guided=guided,
                size=settings.size,
                memory=settings.memory,
                shared=settings.around is not None,
            )
            for each in ([model] if second is None else [model, second])
        ]
        self._active = ActiveNetwork(self._networks[0])
        # the index of each step's network; the first of two networks is for times t >= boundary
        boundary = 1000 * (model.config.boundary or 0.0)
        self._which = [int(second is not None and t < boundary) for t in times[:, 0].tolist()]
        forward = self._active if settings.around is None else settings.around(self._active)
        self._guidance = approximate_steps.ReusedGuidance(forward, samples)
        trajectory = objective.trajectory(settings.steps, SAMPLERS[settings.sampler].even_in_noise)
        # ``begin`` replaces the placeholder ``like`` by the batch's noise.
        self.sampler = SAMPLERS[settings.sampler](objective.network(self._guided()), trajectory, like, lambda k: like)
        self._inputs: StepInputs | None = None
        self._like, self._trajectory = like, trajectory
        state = self.sampler.init(like)
        self._state_type: Any = type(state)  # Any: type checkers don't know this NamedTuple's fields
        self.state = tuple(part.clone() for part in state)
        self.step = torch.zeros(samples, dtype=torch.int64, device=device)
        models = [self.sampler.model_at(i) for i in range(self.sampler.steps)]
        models = list(zip(models, self._which, strict=True))
        starts = [i == 0 or models[i] != models[i - 1] for i in range(len(models))]
        self.plan = approximate_steps.plan_steps(settings.approximations, starts, trajectory.levels)
        self.stack = approximate_steps.make_stack(settings.approximations, self.plan, device)
        self.stack.use_routes(model.fusion, model.config.sprint, self._weak_half())
        for network in self._networks:
            network.stack = self.stack
        self.fused = self._fuse()  # fused kernels for a step's start and end; None: torch operations
        # kind of step -> function that replays its graph
        self.recordings: dict[tuple[Any, ...], Callable[[], object]] = {}
        # kind of step that has run -> block evaluations (with, without) approximations
        self._work: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.evaluated = self.full_work = 0  # sums of both numbers over the current batch
        self._addresses: tuple[int, ...] = ()
        self._end = 0  # first step that is not in the tables

    def _weak_half(self) -> approximate_steps.WeakHalf | None:
        route, model = self.settings.weak, self.settings.model
        if route is None or self.settings.cfg_scale == 1.0:
            return None
        tokens, sample = math.prod(self.network.grid), torch.zeros(1, dtype=torch.int64, device=model.device)
        kept = [draw_kept_tokens(route, tokens, 0, i, sample) for i in range(len(self.plan))]
        return approximate_steps.WeakHalf(route, self.samples, [indices for indices in kept if indices is not None])

    @property
    def network(self) -> PreparedModel:
        return self._active.network

    def _guided(self):
        """Return the guided network, a function of (x, t). Guidance passes row numbers instead of conditions."""
        settings, rows = self.settings, torch.arange(2 * self.samples, device=self.settings.model.device)
        y, null = rows.chunk(2)
        forward = self._guidance
        rescaled = settings.model.config.rescaled_guidance
        guided = cfg_model(forward, y, null, settings.cfg_scale, settings.cfg_channels, rescaled)
        if settings.cfg_interval is None:
            return guided
        conditional = cfg_model(forward, y, null, 1.0)
        return GuidedWithin(settings.cfg_interval, settings.objective.noise_level, guided, conditional)

    def _fuse(self) -> FusedSteps | None:
        """Return the fused kernels of the steps, or None if the settings don't allow them."""
        settings, levels = self.settings, self._trajectory.levels[: self.settings.steps]
        approximations = settings.approximations
        if settings.around is not None or approximations.guidance_every > 1 or len(self._networks) > 1:
            return None
        if settings.model.config.rescaled_guidance and self.network.guided:
            return None
        if isinstance(approximations.cache, FirstBlockCache) or not can_fuse(settings.model, settings.size):
            return None
        linear = weights_of_steps(settings.objective, self.sampler, len(self.state))
        if linear is None:
            return None
        guided = [self.network.guided] * settings.steps
        if self.network.guided and settings.cfg_interval is not None:
            guided = [is_within(settings.cfg_interval, level) for level in levels]
        parts = self.network, linear, guided, self.state, self.step
        return FusedSteps(*parts, settings.cfg_scale, settings.cfg_channels)

    def begin(
        self,
        y: Condition,
        null: Condition,
        index: Tensor,
        seed: int,
        conditioning_frames: Tensor | None = None,
    ) -> None:
        """Prepare a batch's conditions and noise. index: (B,) int64. All tensors are on the model's device."""
        for network in self._networks:
            network.condition(y, null if network.guided else None, conditioning_frames)
        if self.fused is not None:
            if self.fused.capacity != self.network.capacity:
                self.fused.reserve(self.network.capacity)
                self.recordings.clear()
        elif self._inputs is None or self._inputs.capacity != self.network.capacity:
            self._inputs = StepInputs(self.sampler, self._like, self.network.capacity)
            self.recordings.clear()
        addresses = tuple(address for network in self._networks for address in network.addresses)
        if self._addresses != addresses:  # the recordings would read freed memory
            self._addresses = addresses
            self.recordings.clear()
            self._work.clear()  # new shapes, such as longer captions, may need kernels to be compiled
            self.stack.clear()
        self.sampler.noise_fn = keyed_noise(seed, index, self.shape)
        start = self.sampler.init(self._trajectory.start(initial_noise(seed, index, self.shape)))
        for static, part in zip(self.state, start, strict=True):
            static.copy_(part)
        self._end = self.evaluated = self.full_work = 0

    def advance(self, i: int, recorder: Recorder | None = None) -> None:
        """Run step i. Call in the order of steps. recorder: records the step; None to run kernel by kernel. Raises
        NotRecordedError, without running the step, if it can't be recorded."""
        if self.network is not self._networks[self._which[i]]:
            # The network changes at step i. Fill the new network's tables from step i on.
            self._active.network, self._end = self._networks[self._which[i]], i
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
        if mode.blocks == approximate_steps.FIRST:
            assert isinstance(self.stack, approximate_steps.FirstBlockStack)
            self._run(i, mode, recorder)
            mode = mode._replace(blocks=approximate_steps.REUSED if self.stack.reuses() else approximate_steps.REST)
        self._run(i, mode, recorder)

    def _run(self, i: int, mode: approximate_steps.Mode, recorder: Recorder | None) -> None:
        """Run step i in this mode. Use a CUDA graph, except without a recorder or at a kind's first step."""
        kind: tuple[Any, ...]
        if self.fused is None:
            assert self._inputs is not None
            kind = mode, self.sampler.model_at(i), self._inputs.present[i]
        else:
            kind = mode, self.fused.kinds[i]
        key = (self._which[i], *kind)
        if recorder is None or key not in self._work:
            before = self.stack.evaluated, self._guidance.rows
            self._advance(*kind)
            rows = self._guidance.rows - before[1]
            self._work[key] = self.stack.evaluated - before[0], rows * len(self.settings.model.blocks)
        else:
            if key not in self.recordings:
                try:
                    _, self.recordings[key] = recorder.record(lambda: self._advance(*kind))
                except RuntimeError as error:
                    raise NotRecordedError(str(error)) from error
            self.recordings[key]()
        evaluated, full = self._work[key]
        self.evaluated, self.full_work = self.evaluated + evaluated, self.full_work + full

    def _advance(self, mode: approximate_steps.Mode, *kind) -> None:
        self.stack.begin(mode.blocks)
        if self.fused is not None:
            self._guidance.rows += self.fused.advance(*kind)
            return
        model, present = kind
        self.network.begin(self.step)
        self._guidance.begin(mode.null)
        assert self._inputs is not None
        inputs = self._inputs.at(self.step[:1], present)
        try:
            after = self.sampler.advance(model, self._state_type(*self.state), inputs)
        except approximate_steps.FirstBlockDone:
            return
        # clone tensors that are in both states, because copying could overwrite a tensor before its use
        parts = [part.clone() if any(part is old for old in self.state) else part for part in after]
        for static, part in zip(self.state, parts, strict=True):
            static.copy_(part)
        self.step.add_(1)

    def latents(self) -> Tensor:
        """Return the sampler's x, float32 (B, C, ...), after the steps that have run."""
        return self._state_type(*self.state).x.clone()


class ActiveNetwork:
    """Calls the current step's network. A loop with two networks changes ``network`` between steps. Guidance refers to
    this object, not to the loop, because only the garbage collector would free a loop that refers to itself."""

    network: PreparedModel

    def __init__(self, network: PreparedModel):
        self.network = network

    def __call__(self, x: Tensor, t: Tensor, rows: Tensor) -> Tensor:
        return self.network(x, t, rows)


class StepInputs:
    """Tables of a sampler's ``inputs`` for up to ``capacity`` steps.

    sampler: for B samples; ``sampler.noise_fn`` may be called for any step. like: a tensor of x's shape and dtype."""

    def __init__(self, sampler: Sampler, like: Tensor, capacity: int):
        self.sampler, self.capacity, self._rank = sampler, capacity, like.dim()
        inputs = [sampler.inputs(i) for i in range(sampler.steps)]
        self.type: Any = type(inputs[0])
        # for each step and input, False if the input is None; steps that differ here are recorded separately
        self.present = [tuple(value is not None for value in step) for step in inputs]
        # index of the input -> (capacity, *shape of the input)
        self._tables: dict[int, Tensor] = {}
        # index of the input -> its values at all steps; without noise, because noise differs between batches
        self._all: dict[int, Tensor] = {}
        for number, values in enumerate(zip(*inputs, strict=True)):
            example = next((value for value in values if value is not None), None)
            if example is None:
                continue
            self._tables[number] = example.new_zeros(capacity, *example.shape)
            if example.shape != like.shape:
                missing = torch.zeros_like(example)
                self._all[number] = torch.stack([missing if value is None else value for value in values])

    def fill(self, first: int, count: int) -> None:
        """Fill the tables with the inputs of ``count`` steps, beginning with step ``first``."""
        for number, table in self._tables.items():
            if number in self._all:
                table[:count].copy_(self._all[number][first : first + count])
                continue
            for i in range(count):
                if (noise := self.sampler.inputs(first + i)[number]) is not None:
                    table[i].copy_(noise)

    def at(self, step: Tensor, present: tuple[bool, ...]) -> NamedTuple:
        """Return a step's inputs. step: (1,), counted from the tables' first step. present: False for each input that
        is None."""
        values: list[Tensor | None] = []
        for number, there in enumerate(present):
            value = self._tables[number].index_select(0, step).squeeze(0) if there else None
            # the same type promotion as for the samplers' tables
            values.append(value.view((1,) * self._rank) if value is not None and value.dim() == 0 else value)
        return self.type(*values)
