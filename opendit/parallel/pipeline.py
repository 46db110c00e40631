"""Pipeline parallelism: the ranks of the group ``pp`` have different blocks of a model; see docs/parallelism.md.

- A schedule lists a rank's forward and backward passes, in order. Every rank has ``chunks`` chunks of consecutive
  blocks. Chunk c of rank r is stage c * ranks + r of the model.
- :func:`keep_stages` removes all modules except those in this rank's stages. Modules before the first block are on the
  first stage, modules after the last block on the last stage. Modules that compute the condition are on every rank.
- :class:`Links` sends tensors between stages, and :func:`execute` runs a schedule. :class:`PipelineForward` calls a
  divided model like an undivided one.

opendit/training/runners.py defines the passes of training.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opendit.config.names import PIPELINE_SCHEDULES
from opendit.models.blocks import run_blocks
from opendit.models.conditioning import Condition
from opendit.models.dit import DiT, DiTConfig
from opendit.models.zoo import plan_of
from opendit.parallel.mesh import Mesh
from opendit.parallel.rules import balanced_blocks, check_stages, stage_of


@dataclass(frozen=True)
class Action:
    """A forward or backward pass of one chunk over one micro-batch."""

    forward: bool
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{'F' if self.forward else 'B'}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


def chunks_of(schedule: str) -> int:
    """Return the number of chunks on every rank."""
    return 2 if schedule == "interleaved" else 1


def make_schedule(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """List the passes of one rank in a step, in order.

    1f1b: first ``ranks - 1 - rank`` forward passes, then one forward and one backward pass in turn (PipeDream-flush:
    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021). The rank stores activations for at
    most ``ranks - rank`` micro-batches. It idles for (ranks - 1) / (micro_batches + ranks - 1) of the step.

    interleaved: like 1f1b, with 2 chunks per rank (Narayanan et al., "Efficient Large-Scale Language Model Training on
    GPU Clusters Using Megatron-LM", SC 2021). A rank idles for half as long, stores more activations, and sends twice
    as much.

    Raises ValueError if the schedule is unknown, or does not work with this number of micro-batches.
    """
    if schedule not in PIPELINE_SCHEDULES:
        raise ValueError(
            f"--pipeline_schedule {schedule}: no such schedule; choose one of {', '.join(PIPELINE_SCHEDULES)}"
        )
    chunks = chunks_of(schedule)
    check_micro_batches(schedule, ranks, micro_batches)
    forwards = list(_passes(True, chunks, ranks, micro_batches))
    backwards = list(_passes(False, chunks, ranks, micro_batches))
    behind = ranks - 1 - rank
    ahead = behind if chunks == 1 else 2 * behind + (chunks - 1) * ranks  # forward passes before the first backward
    ahead = min(ahead, len(forwards))
    turns = zip(forwards[ahead:], backwards, strict=False)
    return [
        *forwards[:ahead],
        *(action for turn in turns for action in turn),
        *backwards[len(forwards) - ahead :],
    ]


def check_micro_batches(schedule: str, ranks: int, micro_batches: int) -> None:
    """Raise ValueError if the schedule does not work with this number of micro-batches. The message names the flags."""
    if chunks_of(schedule) > 1 and micro_batches % ranks:
        raise ValueError(
            f"--pipeline_schedule {schedule}: takes micro-batches in groups of --pipeline_parallel_size {ranks}, and "
            f"--grad_accumulation {micro_batches}: does not divide by it; use "
            f"{max(ranks, round(micro_batches / ranks) * ranks)}, or 1f1b"
        )


def _passes(forward: bool, chunks: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """Yield the passes in one direction, in the same order on all ranks. Each chunk in turn processes ``ranks``
    micro-batches. Backward passes begin with the last chunk."""
    if chunks == 1:
        yield from (Action(forward, 0, number) for number in range(micro_batches))
        return
    for first in range(0, micro_batches, ranks):
        for chunk in range(chunks) if forward else reversed(range(chunks)):
            last = min(first + ranks, micro_batches)
            yield from (Action(forward, chunk, number) for number in range(first, last))


def one_by_one(chunks: int, ranks: int, micro_batches: int, backward: bool = True) -> list[Action]:
    """List all forward passes, then all backward passes if ``backward``. The list is equal on all ranks, and works with
    any number of micro-batches."""
    directions = (True, False) if backward else (True,)
    return [action for forward in directions for action in _passes(forward, chunks, ranks, micro_batches)]


def in_flight(actions: list[Action]) -> int:
    """Return the largest number of forward passes with activations in memory at one time."""
    held = most = 0
    for action in actions:
        held += 1 if action.forward else -1
        most = max(most, held)
    return most


@dataclass(frozen=True)
class Message:
    """Tensor from one rank of a pipeline to another: activations if ``forward``, otherwise gradients."""

    forward: bool
    source: int
    target: int
    chunk: int  # receiving chunk on the target rank
    micro_batch: int


def received(action: Action, rank: int, ranks: int, chunks: int) -> Message | None:
    """Return the message that a pass receives; None if the pass starts from the model's input or from the loss."""
    first, last = _ends(action.chunk, rank, ranks, chunks)
    if action.forward:
        return None if first else Message(True, (rank - 1) % ranks, rank, action.chunk, action.micro_batch)
    return None if last else Message(False, (rank + 1) % ranks, rank, action.chunk, action.micro_batch)


def sent(action: Action, rank: int, ranks: int, chunks: int) -> Message | None:
    """Return the message that a pass sends to another rank; None if the pass sends nothing."""
    first, last = _ends(action.chunk, rank, ranks, chunks)
    if action.forward:
        chunk = action.chunk + (rank == ranks - 1)
        return None if last else Message(True, rank, (rank + 1) % ranks, chunk, action.micro_batch)
    chunk = action.chunk - (rank == 0)
    return None if first else Message(False, rank, (rank - 1) % ranks, chunk, action.micro_batch)


def _ends(chunk: int, rank: int, ranks: int, chunks: int) -> tuple[bool, bool]:
    """Return (True if a chunk is the model's first stage, True if a chunk is the model's last stage)."""
    stage = chunk * ranks + rank
    return stage == 0, stage == chunks * ranks - 1


# dtypes of messages; a header contains an index into this tuple
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
IN_FLIGHT = 2  # maximum number of unfinished sends of a channel


class Links:
    """Channels to this rank's neighbours in a pipeline, in a circle if ``around``. Construct on all ranks.

    Two neighbours have separate process groups for activations and gradients. A group sends in one direction only,
    because a send and a receive in one group could deadlock on a GPU.

    Before the first activations with a ``key`` (see :func:`execute`), a chunk sends their shape and dtype. The
    chunk's later activations and gradients with this key must have the same shape and dtype.
    """

    def __init__(self, mesh: Mesh, around: bool):
        self.device, self.rank, self.ranks = mesh.device, mesh.pp_rank, mesh.pp_size
        self._members = next(members for members in mesh.dims.groups("pp") if mesh.rank in members)
        self._groups = mesh.links(around)
        self._shapes: dict[tuple[Any, ...], tuple[torch.dtype, tuple[int, ...]]] = {}
        self._sends: dict[tuple[int, int, bool], deque[Any]] = {}
        self._connect()

    def _connect(self) -> None:
        """Send a number through every channel, one after another. At the first message, NCCL makes both hosts wait for
        a connection. In the middle of a schedule, this wait could deadlock."""
        number = torch.zeros(1, device=self.device)
        for first, forward in sorted(self._groups):
            ends = self._members[first], self._members[(first + 1) % self.ranks]
            source, target = ends if forward else reversed(ends)
            group, rank = self._groups[first, forward], self._members[self.rank]
            if rank == source:
                dist.send(number, dst=target, group=group)
            elif rank == target:
                dist.recv(number, src=source, group=group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _channel(self, message: Message) -> tuple[dist.ProcessGroup, int, int]:
        """Return (process group, sender's global rank, receiver's global rank)."""
        first = message.source if message.forward else message.target
        ends = self._members[message.source], self._members[message.target]
        return self._groups[first, message.forward], *ends

    def known(self, message: Message, key: tuple[Any, ...]) -> bool:
        """Return True if a message's shape is known. Then receiving need not wait for the sender."""
        return (message.forward, message.chunk, key) in self._shapes

    def post(self, message: Message, key: tuple[Any, ...]) -> tuple[Tensor, dist.Work]:
        """Start to receive a message. Return (tensor for the message, handle to wait for)."""
        group, source, _ = self._channel(message)
        if not self.known(message, key):
            header = torch.empty(4, dtype=torch.int64, device=self.device)
            dist.recv(header, src=source, group=group)
            number, *shape = header.tolist()
            self._shapes[True, message.chunk, key] = DTYPES[number], tuple(shape)
        dtype, shape = self._shapes[message.forward, message.chunk, key]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor, cast(dist.Work, dist.irecv(tensor, src=source, group=group))

    def send(self, message: Message, tensor: Tensor, chunk: int, key: tuple[Any, ...]) -> None:
        """Start to send ``tensor`` as a message. chunk: the chunk of this rank that computed the tensor."""
        group, source, target = self._channel(message)
        if message.forward and (False, chunk, key) not in self._shapes:
            header = torch.tensor([DTYPES.index(tensor.dtype), *tensor.shape], device=self.device)
            dist.send(header, dst=target, group=group)
            self._shapes[False, chunk, key] = tensor.dtype, tuple(tensor.shape)
        tensor = tensor.detach().contiguous()
        sends = self._sends.setdefault((source, target, message.forward), deque())
        sends.append((dist.isend(tensor, dst=target, group=group), tensor))
        while len(sends) > IN_FLIGHT:  # limit unfinished sends, because they hold tensors in memory
            sends.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until all messages have been sent. On a GPU, only the stream waits, not the host."""
        for sends in self._sends.values():
            while sends:
                sends.popleft()[0].wait()


AHEAD = 1  # receives are posted this number of passes ahead
Pass = Callable[[Action, Tensor | None], Tensor | None]


def execute(
    actions: Sequence[Action], links: Links, chunks: int, compute: Pass, key_of: Callable[[int], tuple[Any, ...]]
) -> None:
    """Run this rank's ``actions``. Each pass receives a tensor, computes, and sends the result. Call on all ranks of
    the pipeline.

    Args:
        compute: runs one pass. It takes the received tensor (None if the pass starts from the model's input or from the
            loss), and returns the tensor to send.
        key_of: maps a micro-batch's number to a key. Micro-batches with equal keys must have equal activation shapes.
    """
    incoming = [received(action, links.rank, links.ranks, chunks) for action in actions]
    posted: dict[int, tuple[Any, ...]] = {}

    def post(place: int) -> None:
        message = incoming[place]
        if place not in posted and message is not None:
            posted[place] = links.post(message, key_of(actions[place].micro_batch))

    for place, action in enumerate(actions):
        post(place)
        for further in range(place + 1, min(len(actions), place + 1 + AHEAD)):
            message = incoming[further]
            if message is not None and links.known(message, key_of(actions[further].micro_batch)):
                post(further)
        value = None
        if place in posted:
            value, work = posted.pop(place)
            work.wait()
        result = compute(action, value)
        del value
        message = sent(action, links.rank, links.ranks, chunks)
        if message is not None:
            links.send(message, cast(Tensor, result), action.chunk, key_of(action.micro_batch))
        del result
    links.finish()


@dataclass(frozen=True)
class PipelineStages:
    """One rank's stages of a model. Rank r has the stages r, r + ranks, ..., one for each chunk."""

    schedule: str
    rank: int
    ranks: int
    blocks: tuple[range, ...]  # block indices of every stage of the pipeline

    @property
    def chunks(self) -> int:
        return len(self.blocks) // self.ranks

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        """True if this rank has the model's last stage, where the loss is computed."""
        return self.rank == self.ranks - 1

    def own(self, chunk: int) -> range:
        """Return the block indices of one of this rank's chunks."""
        return self.blocks[chunk * self.ranks + self.rank]

    def has(self, config: DiTConfig, name: str) -> bool:
        """Return True if a parameter or buffer is on this rank. Raises the errors of ``stage_of``."""
        return any(stage % self.ranks == self.rank for stage in stage_of(plan_of(config), name, self.blocks))

    def describe(self) -> str:
        """Return, for example, "2 stages of 14 + 14 blocks on 2 ranks, 1f1b"."""
        counts = " + ".join(str(len(own)) for own in self.blocks)
        return f"{len(self.blocks)} stages of {counts} blocks on {self.ranks} ranks, {self.schedule}"


def stages_of(config: DiTConfig, schedule: str, rank: int, ranks: int) -> PipelineStages:
    """Divide a model into stages with about equal FLOPs. Raises ValueError if the model has too few blocks for this
    number of ranks and chunks."""
    chunks = chunks_of(schedule)
    check_stages(config, ranks, chunks)
    return PipelineStages(schedule, rank, ranks, tuple(balanced_blocks(config, ranks * chunks)))


def mesh_stages(mesh: Mesh, config: DiTConfig, schedule: str) -> PipelineStages | None:
    return stages_of(config, schedule, mesh.pp_rank, mesh.pp_size) if mesh.pp_size > 1 else None


def check_pipeline(config: DiTConfig, schedule: str, ranks: int, micro_batches: int) -> None:
    """Raise ValueError if a pipeline with this number of ranks can't train the model. The message names the flags."""
    if ranks > 1:
        check_stages(config, ranks, chunks_of(schedule))
        check_micro_batches(schedule, ranks, micro_batches)


MOSTLY_IDLE = 0.25  # minimum idle fraction of a step for which a run prints a note


def idle_stages(schedule: str, ranks: int, micro_batches: int) -> list[str]:
    """Return [note] if a pipeline's ranks idle for at least MOSTLY_IDLE of a step, otherwise an empty list."""
    waits = (ranks - 1) / chunks_of(schedule)
    idle = waits / (micro_batches + waits)
    if idle < MOSTLY_IDLE:
        return []
    return [
        f"--pipeline_parallel_size {ranks}: with {micro_batches} micro-batches (--grad_accumulation) every process "
        f"idles for {idle:.0%} of a step; with {8 * ranks} for {waits / (8 * ranks + waits):.0%}"
    ]


class Absent(nn.Module):
    """Placeholder for a module on another rank. Placeholders preserve the names of this rank's modules."""


def keep_stages(model: DiT, stages: PipelineStages) -> DiT:
    """Remove all modules except those in this rank's stages, in place, and return the model. Parameters keep their
    canonical names. Afterwards ``model(...)`` runs one chunk: see :class:`StageForward`."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    kept = {_part(name, model) for name in names if stages.has(model.config, name)}
    for part in {_part(name, model) for name in names} - kept:
        parent, _, attribute = part.rpartition(".")
        owner = model.get_submodule(parent)
        if attribute in owner._buffers:
            delattr(owner, attribute)
        else:
            owner._modules[attribute] = Absent()
    cut: Any = model
    cut.stages, cut.forward = stages, StageForward(model, stages)
    return model


def _part(name: str, model: DiT) -> str:
    """Return the name of a tensor's unit: the block, or outside of blocks the top-level module. Stages never split a
    unit."""
    top, *rest = name.split(".")
    return f"{top}.{rest[0]}" if top == plan_of(model.config).stages.stack else top


def on_every_stage(model: nn.Module, names: Collection[str]) -> frozenset[str]:
    """Return those ``names`` that all ranks of the pipeline have; none for an undivided model."""
    if getattr(model, "stages", None) is None:
        return frozenset()
    every = plan_of(cast(DiT, model).config).stages.every
    return frozenset(name for name in names if name.partition(".")[0] in every)


class StageForward:
    """Replacement for ``forward`` of a model with only this rank's stages."""

    def __init__(self, model: DiT, stages: PipelineStages):
        self._model, self._stages = model, stages

    def __call__(self, x: Tensor, t: Tensor, y: Condition, *, chunk: int, shape: tuple[int, ...]) -> Tensor:
        """Run a chunk's forward pass on a micro-batch. The last stage returns the result of ``DiT.forward``, earlier
        stages return tokens. Every stage computes the condition, so the condition is never sent.

        Args:
            x: the model's input for the first stage, this rank's tokens (B, n, D) for later stages.
            shape: shape of the model's input.
        """
        model, stages = self._model, self._stages
        blocks = [model.blocks[number] for number in stages.own(chunk)]
        # In a video model, a picture's single frame is repeated to fill the patch; see ``DiT.forward``.
        repeats = model.config.patch[0] if shape[2:-2] == (1,) else 1
        sizes = (repeats, *shape[-2:]) if repeats > 1 else tuple(shape[2:])
        c, context = model.condition(t, y)
        begins = stages.first and chunk == 0
        modulations = model.modulations(c, blocks, first=begins)
        if begins:
            x = x if repeats == 1 else x.expand(-1, -1, repeats, -1, -1)
            tokens, grid = model.enter(x, modulations, context)
        else:
            tokens, grid = x, model.places(sizes, context, len(x), t.dim() > 1)[0]
        across = context if model.config.cross_attention else None
        tokens = run_blocks(blocks, tokens, modulations, across, grid, checkpointed=model.checkpointed)
        if not (stages.last and chunk == stages.chunks - 1):
            return tokens
        x = model.leave(tokens, cast(Tensor, next(modulations)), grid)
        return x if repeats == 1 else x.mean(dim=2, keepdim=True)


class PipelineForward:
    """Calls ``model(x, t, y)`` through a pipeline, without gradients, for sampling. Every rank passes the same batch,
    and gets the result in fp32. The batch is divided into one micro-batch per rank. Construct on all ranks of the
    mesh."""

    def __init__(self, mesh: Mesh, chunks: int):
        self._mesh, self._links, self._chunks = mesh, Links(mesh, around=chunks > 1), chunks
        self._last = next(ranks[-1] for ranks in mesh.dims.groups("pp") if mesh.rank in ranks)
        self._group = mesh.group("pp")

    @torch.no_grad()
    def __call__(self, model: DiT, x: Tensor, t: Tensor, y: Condition) -> Tensor:
        """Return the model's prediction for a batch. x (B, C, ...), t (B,) and y are the arguments of ``DiT.forward``.
        ``model`` has only this rank's stages."""
        rows = -(-len(x) // self._mesh.pp_size)
        parts = [slice(start, start + rows) for start in range(0, len(x), rows)]
        predicted = x.new_empty((len(x), model.config.out_channels, *x.shape[2:]), dtype=torch.float32)
        shapes = [tuple(x[part].shape) for part in parts]
        stages: PipelineStages = cast(Any, model).stages

        def compute(action: Action, tokens: Tensor | None) -> Tensor:
            part, shape = parts[action.micro_batch], shapes[action.micro_batch]
            given = x[part] if tokens is None else tokens
            output = model(given, t[part], y[part], chunk=action.chunk, shape=shape)
            if stages.last and action.chunk == self._chunks - 1:
                predicted[part] = output
            return output

        actions = one_by_one(self._chunks, self._mesh.pp_size, len(parts), backward=False)
        execute(actions, self._links, self._chunks, compute, lambda number: (*shapes[number], *y.shape[1:]))
        dist.broadcast(predicted, src=self._last, group=self._group)
        return predicted
