"""A model of which this rank has some stages: blocks that are neighbours, what comes before the first or after the last
of them, and the modules that make the condition, which are on every rank."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from opendit.models import Condition, DiT, DiTConfig, plan_of
from opendit.models.attention import TokenGrid
from opendit.models.blocks import run_blocks
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline.schedule import check_micro_batches, chunks_of
from opendit.parallel.rules import balanced_blocks, check_stages, stage_of


@dataclass(frozen=True)
class PipelineStages:
    """The part of a model that ``rank`` of the ``ranks`` of a pipeline has.

    blocks: of every stage of the pipeline, of which rank r has r, r + ranks, ...: one for each of its chunks.
    """

    schedule: str
    rank: int
    ranks: int
    blocks: tuple[range, ...]

    @property
    def chunks(self) -> int:
        """The number of stages that each rank has."""
        return len(self.blocks) // self.ranks

    @property
    def first(self) -> bool:
        """True if this rank has the model's first stage."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """True if this rank has the model's last stage, and so the loss."""
        return self.rank == self.ranks - 1

    def own(self, chunk: int) -> range:
        """The blocks of one of this rank's chunks."""
        return self.blocks[chunk * self.ranks + self.rank]

    def has(self, config: DiTConfig, name: str) -> bool:
        """Return True if a parameter or buffer is on this rank. Raises ValueError as ``stage_of`` does."""
        return any(stage % self.ranks == self.rank for stage in stage_of(plan_of(config), name, self.blocks))

    def describe(self) -> str:
        """describe() -> "2 stages of 14 + 14 blocks, 1f1b"."""
        counts = " + ".join(str(len(own)) for own in self.blocks)
        return f"{len(self.blocks)} stages of {counts} blocks on {self.ranks} ranks, {self.schedule}"


def stages_of(config: DiTConfig, schedule: str, rank: int, ranks: int) -> PipelineStages:
    """The stages of a model, balanced by its plan. Raises ValueError as :func:`check_pipeline`, micro-batches aside."""
    chunks = chunks_of(schedule)
    check_stages(config, ranks, chunks)
    return PipelineStages(schedule, rank, ranks, tuple(balanced_blocks(config, ranks * chunks)))


def mesh_stages(mesh: Mesh, config: DiTConfig, schedule: str) -> PipelineStages | None:
    """The stages of a run; None: it has no pipeline."""
    return stages_of(config, schedule, mesh.pp_rank, mesh.pp_size) if mesh.pp_size > 1 else None


def check_pipeline(config: DiTConfig, schedule: str, ranks: int, micro_batches: int) -> None:
    """Raises ValueError, which names the flags, unless a model can be trained by a pipeline of so many ranks."""
    if ranks > 1:
        check_stages(config, ranks, chunks_of(schedule))
        check_micro_batches(schedule, ranks, micro_batches)


MOSTLY_IDLE = 0.25  # of a step, from which on a run says so


def idle_stages(schedule: str, ranks: int, micro_batches: int) -> list[str]:
    """A note where the ranks of a pipeline wait for each other for much of a step."""
    waits = (ranks - 1) / chunks_of(schedule)
    idle = waits / (micro_batches + waits)
    if idle < MOSTLY_IDLE:
        return []
    return [
        f"--pipeline_parallel_size {ranks}: with {micro_batches} micro-batches (--grad_accumulation) every process "
        f"idles for {idle:.0%} of a step; with {8 * ranks} for {waits / (8 * ranks + waits):.0%}"
    ]


class Absent(nn.Module):
    """In the place of a module that is on other ranks, so that those that are here keep their names."""


def keep_stages(model: DiT, stages: PipelineStages) -> DiT:
    """Leaves this rank its stages of ``model``, in place; returns it. Parameters keep their canonical names. The model
    is called for one chunk at a time then: see :class:`StageForward`."""
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
    """Return the unit of a name that is kept or left out as a whole: a block, or another top-level module or buffer."""
    top, *rest = name.split(".")
    return f"{top}.{rest[0]}" if top == plan_of(model.config).stages.stack else top


def on_every_stage(model: nn.Module, names: Collection[str]) -> frozenset[str]:
    """Those of a model's parameters that all ranks of its pipeline have; none if it has no stages."""
    if getattr(model, "stages", None) is None:
        return frozenset()
    every = plan_of(cast(DiT, model).config).stages.every
    return frozenset(name for name in names if name.partition(".")[0] in every)


class StageForward:
    """``forward`` of a model of which this rank has ``stages``."""

    def __init__(self, model: DiT, stages: PipelineStages):
        self._model, self._stages = model, stages

    def __call__(self, x: Tensor, t: Tensor, y: Condition, *, chunk: int, shape: tuple[int, ...]) -> Tensor:
        """Run a chunk's forward pass on a micro-batch.

        The condition is made of t and y anew on every stage: that is a small part of a block's work, and neither its
        vector nor a caption's tokens cross a border, nor do their gradients.

        Args:
            x: of the first stage as of ``DiT.forward``; of others this rank's tokens (B, n, D) of the stage before.
            t, y: as of ``DiT.forward``.
            shape: of the first stage's x.

        Returns:
            Of the last stage as ``DiT.forward``; of others this rank's tokens (B, n, D).
        """
        model, stages = self._model, self._stages
        blocks = [model.blocks[number] for number in stages.own(chunk)]
        repeats = model.config.patch[0] if shape[2:-2] == (1,) else 1  # of a picture: see ``DiT.predict``
        sizes = (repeats, *shape[-2:]) if repeats > 1 else tuple(shape[2:])
        if stages.first and chunk == 0:
            tokens, grid = model.embed(x if repeats == 1 else x.expand(-1, -1, repeats, -1, -1))
        else:
            tokens, grid = x, grid_of_tokens(model, sizes)
        c, context = model.condition(t, y)
        modulations = model.modulations(c, blocks)
        checkpointed = model.grad_checkpoint and torch.is_grad_enabled()
        tokens = run_blocks(blocks, tokens, modulations, context, grid, checkpointed=checkpointed)
        if not (stages.last and chunk == stages.chunks - 1):
            return tokens
        x = model.final_layer(tokens, next(modulations))
        x = model.unpatchify(x if grid.shards is None else grid.shards.gather(x), grid.sizes)
        return x if repeats == 1 else x.mean(dim=2, keepdim=True)


def grid_of_tokens(model: DiT, size: tuple[int, ...]) -> TokenGrid:
    """Describe the places of the tokens of latents of this size, for a stage that gets tokens."""
    sizes = model.config.grid_of(size)
    shards = None if model.sequence is None else model.sequence(math.prod(sizes), sizes)
    positions = model.positions(sizes) if model.config.positions_in_blocks else None
    if positions is not None and shards is not None:
        positions = shards.take(positions)
    return model.token_grid(sizes, positions, shards)
