"""Run the micro-batches of a step over the stages of a pipeline.

torch.distributed.pipelining is not used, for two reasons. First, in torch 2.11 its ``schedule.step(target=)`` splits
one tensor, but the loss needs everything that the objective has prepared. Second, its stages call autograd directly,
but here an engine must run the backward passes, because it scales the loss and reduces gradients in buckets (zero2) or
only in the last pass (fsdp).
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from opendit.diffusion.objectives import Objective
from opendit.diffusion.objectives.base import Prepared
from opendit.models.given_frames import with_given
from opendit.parallel.engines import Engine
from opendit.parallel.pipeline import Action, Links, PipelineStages, execute, make_schedule, one_by_one
from opendit.training.micro_batch import MicroBatch
from opendit.training.runners import Runner


class PipelineRunner(Runner):
    """Runner for pipelines, which runs the micro-batches of a step according to a pipeline schedule. The engine's model
    must consist of this rank's ``stages``.

    Every rank of a pipeline reads the same micro-batches, so that only tokens and gradients are sent. Every stage needs
    the times and conditions, the first stage needs x_t, and the last stage needs the inputs of the loss.

    Args:
        links: connections to other stages. None to create them here, which is collective over all ranks of the mesh.
    """

    def __init__(self, engine: Engine, objective: Objective, micro_batches: int, links: Links | None = None):
        self.engine, self.micro_batches = engine, micro_batches
        self.note = "off: passes wait for other stages' messages (a pipeline)"
        self.objective = objective
        self.stages: PipelineStages = cast(Any, engine.module).stages
        self._links = links or Links(engine.mesh, around=self.stages.chunks > 1)
        self._actions = make_schedule(self.stages.schedule, self.stages.rank, self.stages.ranks, micro_batches)

    def passes(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        passes = Passes(self, micro_batches, self.micro_batches)
        self._execute(self._actions, passes)
        passes.check_number()
        return passes.loss

    def _execute(self, actions: list[Action], passes: "Passes") -> None:
        execute(actions, self._links, self.stages.chunks, passes.compute, passes.key_of)

    def forward_backward(self, micro_batch: MicroBatch, *, last: bool) -> Tensor:
        passes = Passes(self, [micro_batch], 1, last=last)
        self._execute(one_by_one(self.stages.chunks, self.stages.ranks, 1), passes)
        return self.engine.mesh.sum(passes.loss, "pp")

    def losses(self, micro_batch: MicroBatch) -> Tensor:
        passes = Passes(self, [micro_batch], 1)
        forwards = one_by_one(self.stages.chunks, self.stages.ranks, 1, backward=False)
        with torch.no_grad():
            self._execute(forwards, passes)
        losses = passes.losses.get(0, torch.zeros(len(micro_batch.x0), device=self.engine.mesh.device))
        return self.engine.mesh.sum(losses.float(), "pp")


class Passes:
    """The forward and backward passes of this rank's chunks of the model, for the micro-batches of a step.

    Args:
        number: number of micro-batches.
        last: True if the optimizer's step follows the last micro-batch.

    Attributes:
        loss: the step's loss so far on the last stage; 0 on other ranks.
        losses: losses of each micro-batch's samples, by the micro-batch's index, on the last stage.
    """

    def __init__(self, runner: PipelineRunner, micro_batches: Iterable[MicroBatch], number: int, last: bool = True):
        self._engine, self._objective, self._stages = runner.engine, runner.objective, runner.stages
        self._share, self._number, self._last = runner.micro_batches, number, last
        self._coming: Iterator[MicroBatch] = iter(micro_batches)
        self._given: list[tuple[MicroBatch, Prepared]] = []
        # (chunk, micro-batch) -> input tokens, and autograd node of the output.
        self._roots: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._left = number * runner.stages.chunks  # number of backward passes that remain
        self.loss = torch.zeros((), device=runner.engine.mesh.device)
        self.losses: dict[int, Tensor] = {}

    def _micro_batch(self, number: int) -> tuple[MicroBatch, Prepared]:
        """Return a micro-batch by its index, and the result of the objective's ``prepare`` for it. The first call
        fetches the micro-batch.

        Raises ValueError if the step has too few micro-batches.
        """
        while len(self._given) <= number:
            micro_batch = next(self._coming, None)
            if micro_batch is None:
                self.check_number()
            assert micro_batch is not None, "too few have been an error"
            self._given.append((micro_batch, self._objective.prepare(*micro_batch[:3])))
        return self._given[number]

    def check_number(self) -> None:
        """Raise ValueError unless the step had the right number of micro-batches."""
        number = len(self._given) + sum(1 for _ in self._coming)
        if number != self._number:
            raise ValueError(f"a step has {self._number} micro-batches, got {number}")

    def key_of(self, number: int) -> tuple[int, ...]:
        """Return the sizes that determine the number of tokens of a micro-batch: those of the latents and of the
        captions."""
        micro_batch = self._micro_batch(number)[0]
        return (*micro_batch.x0.shape, *micro_batch.condition.shape[1:])

    def compute(self, action: Action, value: Tensor | None) -> Tensor | None:
        """Run one pass for :func:`opendit.parallel.pipeline.executor.execute`."""
        return self._forward(action, value) if action.forward else self._backward(action, value)

    def _forward(self, action: Action, tokens: Tensor | None) -> Tensor:
        micro_batch, prepared = self._micro_batch(action.micro_batch)
        if tokens is not None and torch.is_grad_enabled():
            tokens.requires_grad_()
        x = with_given(prepared.x_t, micro_batch.given) if tokens is None else tokens
        shape = tuple(micro_batch.x0.shape)
        with self._engine.micro_batch(last=False):
            times = micro_batch.told(prepared.timestep)
            output = self._engine.forward(x, times, y=micro_batch.condition, chunk=action.chunk, shape=shape)
        result, root = output, output
        if self._stages.last and action.chunk == self._stages.chunks - 1:
            losses = micro_batch.losses(self._objective, output, prepared)
            self.losses[action.micro_batch] = losses.detach()
            result = root = losses.mean() / self._share
            self.loss += root.detach()
        elif torch.is_grad_enabled():
            # keep only the edge, so that the output can be freed when it has been sent
            root = get_gradient_edge(output)
        if torch.is_grad_enabled():
            self._roots[action.chunk, action.micro_batch] = tokens, root
        return result

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        tokens, root = self._roots.pop((action.chunk, action.micro_batch))
        self._left -= 1  # after the last backward pass, the gradients of all chunks are complete
        with self._engine.micro_batch(last=self._last and not self._left):
            self._engine.backward(root, gradient)
        return None if tokens is None else tokens.grad
