"""Train a Diffusion Transformer: data -> latents -> noise -> model -> loss -> backward -> step -> EMA -> log -> save.

One process:     python train.py --model DiT-S/2 --data_path FOLDER
Several GPUs:    torchrun --standalone --nproc_per_node=8 train.py --model DiT-XL/2 --data_path FOLDER
"""

from __future__ import annotations

import sys

from opendit.config.console import answer_interrupts, prepare_console, run_program

if __name__ == "__main__":
    answer_interrupts()  # Ctrl-C prints one line, even during the imports below

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from opendit.common.utils import collection_paused
from opendit.config.command_line import read_flags
from opendit.config.train import TrainConfig

if TYPE_CHECKING:  # start() imports them after the flags have been read
    from pathlib import Path

    import torch
    from torch import Tensor

    from opendit.config.components import TokenRoute
    from opendit.data import Batch
    from opendit.diffusion.objectives.base import Objective
    from opendit.encoders.conditioner import Conditioner
    from opendit.encoders.vision import CachedTeacher, VisionTeacher
    from opendit.models.conditioning import Condition
    from opendit.parallel.engines import Engine
    from opendit.training.micro_batch import Latents, MicroBatch, PackedMicroBatch, Packing
    from opendit.training.run import Run


def train(run: Run) -> None:
    """Train until the last step, a signal, the end of --max_hours, or data that can't be read."""
    for step in range(run.first_step, run.last_step):
        run.begin(step)
        run.engine.set_lr(lr := run.learning_rate.at(step))
        with run.saving_if_data_end():
            # The runner runs EagerPasses (below) directly, as CUDA graphs, or in pipeline stages
            # (opendit/training/runners.py).
            loss = run.runner.passes(micro_batches(run))
            run.interrupt.ask()  # before weights change, ask all ranks for signals and unreadable data
        run.result = result = run.engine.step()
        run.ema.update(result.finite)
        run.monitor.add(run.mesh.sum(loss, "pp"), result.finite)  # in a pipeline, only the last stage has a loss
        run.profiler.step()

        run.done = step + 1
        stopping = run.interrupt.answer()
        due = run.due(stopping)  # waits for the device only if a check for skipped steps is due
        measured = run.measure(due)  # held-out loss and samples' quality, if due
        if due.log:
            run.log.write(run.done, lr, result, measured)
        if due.save:
            run.save()
        if due.draw:
            run.draw()
        if stopping:
            break


def micro_batches(run: Run) -> Iterator[MicroBatch | PackedMicroBatch]:
    """Yield the next step's micro-batches. Each one is read when it is requested, while the device computes."""
    for batch in run.batches.of_next_step():
        micro_batch = run.inputs.of(batch)
        run.count(batch, micro_batch)
        yield micro_batch


@dataclass(frozen=True)
class Inputs:
    """Converts the loader's batches to micro-batches: latents, noise, times and conditions.

    A sample's random numbers are keyed by (seed, step, index in the global batch). So they do not depend on the number
    of ranks or on resuming.

    Args:
        packing: how samples of different sizes are packed; None without ``--pack_tokens``.
        tokens_of: maps a latent size to a number of tokens, for objectives with times that depend on this number.
        in_place: True if the conditioning frames replace frames of x_t, without noise.
        beside: True for an image-to-video model. Its condition is always the first frame.
        teacher: vision encoder of ``--repa``, or the reader of its cached features; None without ``--repa``.
        uncertain: True if the model learns the losses' weights (``--uncertainty_weighting``).
    """

    latents: Latents
    objective: Objective
    conditioner: Conditioner
    device: torch.device
    seed: int
    label_drop: float
    packing: Packing | None = None
    tokens_of: Callable[[tuple[int, ...]], int] | None = None
    given_frames: str | None = None
    in_place: bool = False
    beside: bool = False
    route: TokenRoute | None = None
    teacher: VisionTeacher | CachedTeacher | None = None
    uncertain: bool = False

    def of(self, batch: Batch) -> MicroBatch | PackedMicroBatch:
        """Return the micro-batch on the device. The host does not wait for the device."""
        from opendit.data.base import to_pixels
        from opendit.data.clips import enlarge
        from opendit.diffusion.random import draw_route
        from opendit.training.micro_batch import MicroBatch, condition_on_first_frames

        index = batch.index.to(self.device, non_blocking=True)
        if isinstance(batch.x, tuple):
            assert self.packing is not None, "a run of packs has samples of unequal sizes"
            return self.packing.micro_batch(self, batch, index)
        x = enlarge(batch.x.to(self.device, non_blocking=True), batch.small)
        x0 = self.clean(x, batch.step, index)
        tokens = None if self.tokens_of is None else self.tokens_of(tuple(x0.shape[2:]))
        t = self.objective.times(self.seed, batch.step, index, None if tokens is None else [tokens] * len(x0))
        condition, given = self.condition(batch, index), self.given(x0, batch.step, index)
        if self.beside:
            condition, given = condition_on_first_frames(condition, batch, x, self.latents, self.conditioner)
        alignment = None
        if self.teacher is not None:
            features = to_pixels(x) if batch.features is None else batch.features.to(self.device, non_blocking=True)
            alignment = self.teacher.alignment(features)
        kept, dropped = draw_route(self.route, tokens, self.seed, batch.step, index)
        noise, more = self.noise(x0, batch.step, index), dict(alignment=alignment, uncertain=self.uncertain)
        return MicroBatch.of(x0, t, noise, condition, given, self.in_place, kept=kept, dropped=dropped, **more)

    def clean(self, x: Tensor, step: int, index: Tensor) -> Tensor:
        """Return the samples x as latents, (B, C, ...) fp32. All samples have one shape."""
        from opendit.data.base import to_pixels

        return self.latents.of(to_pixels(x), step, index)

    def noise(self, x0: Tensor, step: int, index: Tensor) -> Tensor:
        """Draw noise for the latents x0, (B, C, ...) fp32."""
        from opendit.diffusion.random import Stream, normal

        return normal(self.seed, step, index, Stream.NOISE, tuple(x0.shape[1:]))

    def condition(self, batch: Batch, index: Tensor) -> Condition:
        """Return the samples' classes or captions. The null condition replaces a random fraction."""
        from opendit.diffusion.random import Stream, uniform

        dropped = uniform(self.seed, batch.step, index, Stream.CONDITION_DROP) < self.label_drop
        return self.conditioner.drop(self.conditioner.of_batch(batch), dropped)

    def given(self, x0: Tensor, step: int, index: Tensor) -> Tensor | None:
        """Return the conditioning frames' mask and latents, (B, 1 + C, T, H, W); None without --given_frames."""
        from opendit.diffusion.random import draw_conditioning_frames

        return draw_conditioning_frames(self.given_frames, x0, self.seed, step, index)


@dataclass(frozen=True)
class EagerPasses:
    """The passes of a micro-batch: add noise to the latents, run the network, compute the loss, run the backward pass.

    Args:
        micro_batches: number of micro-batches in a step. A step's loss is the mean of their losses.
        after_forward: called when the forward pass has been enqueued, but not when a CUDA graph replays the pass.
    """

    engine: Engine
    objective: Objective
    micro_batches: int = 1
    after_forward: Callable[[], None] = lambda: None

    def losses(self, batch: MicroBatch | PackedMicroBatch) -> Tensor:
        """Return the samples' losses, (B,) fp32."""
        from opendit.training.runners import TargetNetwork

        prepared = self.objective.prepare(batch.x0, batch.row_times, batch.noise)
        if self.objective.asks_network:
            labels = cast("Tensor", batch.condition)  # such an objective has classes
            prepared = self.objective.complete(prepared, TargetNetwork(self.engine, labels))
        inputs, conditions = batch.network_inputs(prepared.x_t, prepared.timestep)
        output = self.engine.forward(*inputs, **conditions)
        return batch.losses(self.objective, output, prepared)

    def forward_backward(self, batch: MicroBatch | PackedMicroBatch, *, last: bool) -> Tensor:
        """Add a micro-batch's gradients to the engine's. Return its contribution to the step's loss, 0-dim, detached.
        last: True if the optimizer's step follows."""
        with self.engine.micro_batch(last=last):
            loss = batch.mean(self.losses(batch)) / self.micro_batches
            self.after_forward()
            self.engine.backward(loss)
        return loss.detach()


def start(flags: TrainConfig) -> Path | None:
    """Check the flags against the machine and the data, then train. Return the run's folder; None for --dry_run.

    Raises:
        SystemExit: code 1 if a file could not be written; other codes come from ``Supervisor`` and ``dry_run``.
    """
    # imported here, so that a wrong flag is reported without waiting for torch
    with collection_paused():
        from opendit.parallel.mesh import init_mesh
        from opendit.parallel.supervisor import Supervisor
        from opendit.training.auto_parallel import decide_on_ranks, dims_of
        from opendit.training.build import build
        from opendit.training.prepare import RUN_ERRORS, USER_ERRORS, prepare
        from opendit.training.summary import dry_run

    if flags.dry_run is not None:
        return dry_run(flags)
    with Supervisor(USER_ERRORS) as supervisor:
        mesh = init_mesh(dims=dims_of(flags, flags.world_size()))
        if flags.decided_by_estimates:
            flags, mesh = decide_on_ranks(flags, mesh)
        flags, notes = flags.resolve(mesh.world_size, mesh.device.type == "cuda")
        run = prepare(flags, mesh, notes)
        evaluation = None
        if flags.evaluate_every:
            from opendit.evaluation.in_training import RunEvaluation

            evaluation = RunEvaluation(run)
        supervisor.started(RUN_ERRORS)
        with build(run, supervisor, Inputs, EagerPasses, evaluation):
            train(run)
        failed_writes = run.failed_writes()
    if failed_writes:
        sys.exit(1)
    return run.folder


def main(argv: list[str]) -> int:
    """Train, or with --dry_run print what the training would need. Return the exit code."""
    prepare_console()
    if (folder := start(read_flags(TrainConfig, argv))) is None:
        return 0
    from opendit.training.interrupt import exit_code

    return exit_code(folder)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
