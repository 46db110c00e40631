"""Run the passes of a training step: kernel by kernel, from CUDA graphs, or over the stages of a pipeline.

A step of DiT-XL/2 launches about 3,900 kernels, and the host needs about 160 ms to enqueue them. With fewer than about
27,000 tokens per GPU, the device waits for the host. A recorded graph needs one launch.
"""

import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from opendit.diffusion.objectives.base import Objective, Prepared
from opendit.kernels.recording import GraphRecorder
from opendit.models.attention import Attention, local_attention
from opendit.models.conditioning import with_given
from opendit.models.dit import DiT
from opendit.models.layers import BlockOps
from opendit.parallel.engines import Engine, StepResult
from opendit.parallel.pipeline import Action, Links, PipelineStages, execute, make_schedule, one_by_one
from opendit.training.micro_batch import MicroBatch, PackedMicroBatch

GRAPH_WARMUP = 3  # micro-batches before a recording, in which kernels compile and communicators connect

logger = logging.getLogger(__name__)


class MicroBatchPasses(Protocol):
    """Interface of ``EagerPasses`` in train.py: a micro-batch's passes without a CUDA graph. A step's loss is the mean
    over its ``micro_batches`` micro-batches."""

    @property
    def engine(self) -> Engine: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def micro_batches(self) -> int: ...

    def losses(self, batch: MicroBatch | PackedMicroBatch) -> Tensor:
        """Return the samples' losses, (B,)."""
        ...

    def forward_backward(self, batch: MicroBatch | PackedMicroBatch, *, last: bool) -> Tensor:
        """Add a micro-batch's gradients to the engine's. Return its contribution to the step's loss, 0-dim."""
        ...


class Runner(ABC):
    """Runs the passes of training steps. In training, only runners call the model. note: on CUDA graphs, for users."""

    engine: Engine
    note: str

    @abstractmethod
    def passes(self, micro_batches: Iterable[MicroBatch | PackedMicroBatch]) -> Tensor:
        """Run the forward and backward passes of a step. The host does not wait for the device.

        A micro-batch is requested after the previous one's passes have been enqueued. Return the step's mean loss on
        this rank, 0-dim; in a pipeline, 0 except on the last stage. Raises ValueError for a wrong number of
        micro-batches.
        """

    def train_step(self, micro_batches: Iterable[MicroBatch | PackedMicroBatch]) -> StepResult:
        """Make a complete step without a :class:`~opendit.training.run.Run`, for tests and benchmarks."""
        loss = self.passes(micro_batches)
        return replace(self.engine.step(), loss=self.engine.mesh.sum(loss, "pp"))

    @abstractmethod
    def losses(self, micro_batch: MicroBatch | PackedMicroBatch) -> Tensor:
        """Return the samples' losses, (B,), without a CUDA graph."""

    @abstractmethod
    def forward_backward(self, micro_batch: MicroBatch | PackedMicroBatch, *, last: bool) -> Tensor:
        """Run a micro-batch's passes without a CUDA graph, so that hooks on modules run."""

    def close(self) -> None:
        """Release objects that use the mesh's communicators. No step may follow."""
        return None


class EagerRunner(Runner):
    """Runner that launches a micro-batch's kernels one by one."""

    def __init__(self, eager: MicroBatchPasses, note: str = ""):
        self.eager, self.engine, self.note = eager, eager.engine, note

    def passes(self, micro_batches: Iterable[MicroBatch | PackedMicroBatch]) -> Tensor:
        wanted = self.eager.micro_batches
        loss, number = torch.zeros((), device=self.engine.mesh.device), 0
        for number, micro_batch in enumerate(micro_batches, 1):
            loss += self.micro_step(micro_batch, first=number == 1, last=number == wanted)
        if number != wanted:
            raise ValueError(f"a step has {wanted} micro-batches, got {number}")
        return loss

    def micro_step(self, micro_batch: MicroBatch | PackedMicroBatch, *, first: bool, last: bool) -> Tensor:
        """Run a micro-batch's passes and add its gradients to the step's gradients.

        Return the micro-batch's contribution to the step's loss, 0-dim and detached. The next call may overwrite the
        result. first, last: True for the step's first or last micro-batch.
        """
        return self.forward_backward(micro_batch, last=last)

    def losses(self, micro_batch: MicroBatch | PackedMicroBatch) -> Tensor:
        return self.eager.losses(micro_batch)

    def forward_backward(self, micro_batch: MicroBatch | PackedMicroBatch, *, last: bool) -> Tensor:
        return self.eager.forward_backward(micro_batch, last=last)


@dataclass
class Recording:
    """A recorded micro-batch: inputs, outputs (loss and gradients), and the function that replays the graph."""

    inputs: MicroBatch
    loss: Tensor
    gradients: list[Tensor | None]
    replay: Callable[[], None]

    def fits(self, micro_batch: MicroBatch) -> bool:
        own, others = ([(x.shape, x.dtype) for x in batch.tensors()] for batch in (self.inputs, micro_batch))
        return own == others and (micro_batch.full or not self.inputs.full)


class CUDAGraphRunner(EagerRunner):
    """Runner that records a micro-batch after a warm-up, and replays the recording for micro-batches of equal shapes.

    There are two graphs: a step's first micro-batch sets the gradients, and later micro-batches add to them. A
    micro-batch that can't be recorded or replayed runs without a graph, with equal results. The objective and model of
    ``eager`` must not wait for the device, and only the micro-batch may change between replays.
    """

    def __init__(self, eager: MicroBatchPasses, recorder: GraphRecorder):
        super().__init__(eager, f"forward and backward, from micro-batch {GRAPH_WARMUP + 1} on")
        self.recorder = recorder
        self._in_graph = False  # True if a recorded graph can add to the step's gradients
        # True for a step's first micro-batch, else False -> micro-batches until the recording
        self._warmup_left: dict[bool, float] = {True: GRAPH_WARMUP, False: GRAPH_WARMUP}
        self._recordings: dict[bool, Recording] = {}
        self._routed = False  # True if the last micro-batch used a route

    def micro_step(self, micro_batch: MicroBatch, *, first: bool, last: bool) -> Tensor:
        if self._routed != (routed := micro_batch.kept is not None):  # --route_until ends the route
            self._routed, self._warmup_left = routed, dict.fromkeys((True, False), float(GRAPH_WARMUP))
            self._recordings.clear()
        recording = self._recordings.get(first)
        usable = first or self._in_graph  # later micro-batches can only add to a recording's gradients
        if usable and recording is None and self._warmup_left[first] <= 0:
            recording = self._record(micro_batch, first, last)
        if usable and recording is not None and recording.fits(micro_batch):
            torch._foreach_copy_(recording.inputs.tensors(), micro_batch.tensors())
            recording.replay()
            self.engine.gradients = recording.gradients
            self._in_graph = True
            return recording.loss
        self._warmup_left[first] -= 1
        self._in_graph &= not first
        return self.forward_backward(micro_batch, last=last)

    def close(self) -> None:
        """Free the recordings. NCCL would otherwise wait forever to close a communicator that a graph uses."""
        self._recordings.clear()

    def forward_backward(self, micro_batch: MicroBatch, *, last: bool) -> Tensor:
        with self.recorder.side_stream():
            return self.eager.forward_backward(micro_batch, last=last)

    def _record(self, micro_batch: MicroBatch, first: bool, last: bool) -> Recording | None:
        """Record the passes of ``micro_batch`` without running them. If that fails, return None and record no more."""
        static, before = micro_batch.clone(), self.engine.gradients
        try:
            loss, replay = self.recorder.record(lambda: self.eager.forward_backward(static, last=last))
        except RuntimeError as error:
            self.engine.gradients = before
            self._warmup_left[first] = math.inf
            self.note = f"recording failed, training goes on kernel by kernel: {str(error).splitlines()[0]}"
            logger.warning("CUDA graph: %s", self.note)
            return None
        self._recordings[first] = Recording(static, loss, self.engine.gradients, replay)
        return self._recordings[first]


class PipelineRunner(Runner):
    """Runner of the pipeline schedule. stages: this rank's stages, from the engine's module.

    All ranks of a pipeline read equal micro-batches, so that only tokens and gradients are sent. All ranks must
    construct their runners together, because the constructor connects ``links`` between stages.

    torch.distributed.pipelining (torch 2.11) does not fit. Its loss function gets one target tensor, but this loss
    needs several. Its stages call autograd directly, but an engine must scale the loss and reduce the gradients.
    """

    def __init__(self, engine: Engine, objective: Objective, micro_batches: int, links: Links | None = None):
        self.engine, self.micro_batches = engine, micro_batches
        self.note = "off: passes wait for other stages' messages (a pipeline)"
        self.objective = objective
        self.stages: PipelineStages = cast(Any, engine.module).stages
        self._links = links or Links(engine.mesh, around=self.stages.chunks > 1)
        self._actions = make_schedule(self.stages.schedule, self.stages.rank, self.stages.ranks, micro_batches)

    def passes(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        passes = StagePasses(self, micro_batches, self.micro_batches)
        self._execute(self._actions, passes)
        passes.check_number()
        return passes.loss

    def _execute(self, actions: list[Action], passes: "StagePasses") -> None:
        execute(actions, self._links, self.stages.chunks, passes.compute, passes.key_of)

    def forward_backward(self, micro_batch: MicroBatch, *, last: bool) -> Tensor:
        passes = StagePasses(self, [micro_batch], 1, last=last)
        self._execute(one_by_one(self.stages.chunks, self.stages.ranks, 1), passes)
        return self.engine.mesh.sum(passes.loss, "pp")

    def losses(self, micro_batch: MicroBatch) -> Tensor:
        passes = StagePasses(self, [micro_batch], 1)
        forwards = one_by_one(self.stages.chunks, self.stages.ranks, 1, backward=False)
        with torch.no_grad():
            self._execute(forwards, passes)
        losses = passes.losses.get(0, torch.zeros(len(micro_batch.x0), device=self.engine.mesh.device))
        return self.engine.mesh.sum(losses.float(), "pp")


class StagePasses:
    """The passes of this rank's model chunks for a step's ``number`` micro-batches.

    Attributes:
        loss: the step's loss so far on the last stage; 0 on other ranks.
        losses: micro-batch index -> the samples' losses, on the last stage.
    """

    def __init__(self, runner: PipelineRunner, micro_batches: Iterable[MicroBatch], number: int, last: bool = True):
        self._engine, self._objective, self._stages = runner.engine, runner.objective, runner.stages
        self._share, self._number, self._last = runner.micro_batches, number, last
        self._coming: Iterator[MicroBatch] = iter(micro_batches)
        self._given: list[tuple[MicroBatch, Prepared]] = []
        # (chunk, micro-batch) -> input tokens, and the output's autograd node
        self._roots: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._left = number * runner.stages.chunks  # backward passes that remain
        self.loss = torch.zeros((), device=runner.engine.mesh.device)
        self.losses: dict[int, Tensor] = {}

    def _micro_batch(self, number: int) -> tuple[MicroBatch, Prepared]:
        """Return a micro-batch and the result of ``objective.prepare``. The first call fetches the micro-batch."""
        while len(self._given) <= number:
            micro_batch = next(self._coming, None)
            if micro_batch is None:
                self.check_number()
            assert micro_batch is not None, "too few have been an error"
            self._given.append((micro_batch, self._objective.prepare(*micro_batch[:3])))
        return self._given[number]

    def check_number(self) -> None:
        number = len(self._given) + sum(1 for _ in self._coming)
        if number != self._number:
            raise ValueError(f"a step has {self._number} micro-batches, got {number}")

    def key_of(self, number: int) -> tuple[int, ...]:
        """Return the sizes of a micro-batch's latents and captions. The number of tokens depends on them."""
        micro_batch = self._micro_batch(number)[0]
        return (*micro_batch.x0.shape, *micro_batch.condition.shape[1:])

    def compute(self, action: Action, value: Tensor | None) -> Tensor | None:
        return self._forward(action, value) if action.forward else self._backward(action, value)

    def _forward(self, action: Action, tokens: Tensor | None) -> Tensor:
        micro_batch, prepared = self._micro_batch(action.micro_batch)
        if tokens is not None and torch.is_grad_enabled():
            tokens.requires_grad_()
        x = with_given(prepared.x_t, micro_batch.given) if tokens is None else tokens
        shape = tuple(micro_batch.x0.shape)
        with self._engine.micro_batch(last=False):
            times = micro_batch.network_times(prepared.timestep)
            output = self._engine.forward(x, times, y=micro_batch.condition, chunk=action.chunk, shape=shape)
        result, root = output, output
        if self._stages.last and action.chunk == self._stages.chunks - 1:
            losses = micro_batch.losses(self._objective, output, prepared)
            self.losses[action.micro_batch] = losses.detach()
            result = root = losses.mean() / self._share
            self.loss += root.detach()
        elif torch.is_grad_enabled():
            # a gradient edge lets the output be freed once it has been sent
            root = get_gradient_edge(output)
        if torch.is_grad_enabled():
            self._roots[action.chunk, action.micro_batch] = tokens, root
        return result

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        tokens, root = self._roots.pop((action.chunk, action.micro_batch))
        self._left -= 1  # the last backward pass completes the gradients of all chunks
        with self._engine.micro_batch(last=self._last and not self._left):
            self._engine.backward(root, gradient)
        return None if tokens is None else tokens.grad


def build_runner(eager: MicroBatchPasses, *, graph: bool = False, packs: bool = False) -> Runner:
    """Return a runner for pipelines, for CUDA graphs, or for eager passes. graph: True to use CUDA graphs if possible.
    packs: True with --pack_tokens."""
    engine = eager.engine
    if engine.mesh.pp_size > 1:
        return PipelineRunner(engine, eager.objective, eager.micro_batches)
    why_not = "--enable_cuda_graph is off"
    if graph and packs:
        why_not = "every pack has other segments (--pack_tokens), and a graph can replay but one"
    elif graph and eager.objective.asks_network:
        why_not = "--objective meanflow draws the number of a step's intervals"
    elif graph:
        why_not = (
            engine.no_graph or engine.module.no_graph if engine.mesh.device.type == "cuda" else "it needs a CUDA GPU"
        )
    return EagerRunner(eager, f"off: {why_not}") if why_not else CUDAGraphRunner(eager, GraphRecorder())


@contextmanager
def torch_operations(model: DiT) -> Iterator[None]:
    """Context in which a model uses torch's operations instead of kernels, for forward-mode derivatives."""
    parts = (model, *model.blocks, model.final_layer)
    attentions = [module for module in model.blocks.modules() if isinstance(module, Attention)]
    before = [part.ops for part in parts], [module.attend for module in attentions]
    for part in parts:
        part.ops = BlockOps()
    for module in attentions:
        module.attend = local_attention
    try:
        with sdpa_kernel([SDPBackend.MATH]):
            yield
    finally:
        for part, ops in zip(parts, before[0], strict=True):
            part.ops = ops
        for module, attend in zip(attentions, before[1], strict=True):
            module.attend = attend


class TargetNetwork:
    """The trained model as a :class:`opendit.diffusion.objectives.meanflow.Network`, without gradients. Every rank must
    hold all weights. labels: (B,) int64 labels of the micro-batch."""

    dropped: Tensor

    def __init__(self, engine: Engine, labels: Tensor):
        # torch's formulas for forward-mode derivatives use its own deprecated compiler
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=FutureWarning)
        self._engine, self._model, self._labels = engine, cast(DiT, engine.module), labels
        self.dropped = labels == self._model.config.num_classes

    @torch.no_grad()
    def __call__(self, x: Tensor, time: Tensor, rows: Tensor) -> Tensor:
        return self._output(x, time, self._labels[rows])

    @torch.no_grad()
    def unconditional(self, x: Tensor, time: Tensor) -> Tensor:
        return self._output(x, time, torch.full_like(self._labels, cast(int, self._model.config.num_classes)))

    @torch.no_grad()
    def derivative(self, x: Tensor, time: Tensor, dx: Tensor, dtime: Tensor, rows: Tensor) -> Tensor:
        with torch_operations(self._model), forward.dual_level():
            dual = forward.make_dual(x, dx.to(x.dtype)), forward.make_dual(time, dtime)
            _, tangent = forward.unpack_dual(self._output(*dual, self._labels[rows]))
            assert tangent is not None  # the output depends on both inputs
            return tangent

    def _output(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        with self._engine.autocast():
            return self._model(x, time, labels).float()
