"""Train a Diffusion Transformer: data -> latents -> noise -> model -> loss -> backward -> step -> EMA -> log -> save.

One process:     python train.py --model DiT-S/2 --data_path FOLDER
Several GPUs:    torchrun --standalone --nproc_per_node=8 train.py --model DiT-XL/2 --data_path FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opendit.config.command_line import read_flags
from opendit.config.console import prepare_console
from opendit.config.train import TrainConfig

if TYPE_CHECKING:  # torch, and all that needs it, is imported once the flags have been read: see start()
    from pathlib import Path

    import torch
    from torch import Tensor

    from opendit.config.token_routing import TokenRoute
    from opendit.data import Batch
    from opendit.diffusion import Objective
    from opendit.encoders.conditioner import Conditioner
    from opendit.encoders.vision import VisionTeacher
    from opendit.models import Condition
    from opendit.parallel.engines import Engine
    from opendit.training.build import Run
    from opendit.training.micro_batch import Latents, MicroBatch, PackedMicroBatch, Packing


def train(run: Run) -> None:
    """Train until the last step, a signal, or the end of the data."""
    for step in range(run.first_step, run.last_step):
        run.engine.set_lr(lr := run.learning_rate.at(step))
        with run.saving_if_data_end():
            # Kernel by kernel these are the passes of EagerPasses below; CUDA graphs replay them, and the stages of a
            # pipeline have a schedule of their own. build() has chosen.
            loss = run.runner.passes(micro_batches(run))
            run.interrupt.ask()  # all ranks, before any weight changes: is there a signal, does one lack data?
        run.result = result = run.engine.step()
        run.ema.update(result.finite)
        run.monitor.add(run.mesh.sum(loss, "pp"), result.finite)  # a pipeline's last stage has the loss, the others 0
        run.profiler.step()

        run.done = step + 1
        stopping = run.interrupt.answer()
        due = run.due(stopping)  # waits for the device only if something is due
        measured = run.measure(due)  # the held-out loss, the quality of samples
        if due.log:
            run.log.write(run.done, lr, result, measured)
        if due.save:
            run.save()
        if due.draw:
            run.draw()
        if stopping:
            break


def micro_batches(run: Run) -> Iterator[MicroBatch | PackedMicroBatch]:
    """Yield the micro-batches of the next step. Each is read when it is asked for, while the device computes."""
    for batch in run.batches.of_next_step():
        micro_batch = run.inputs.of(batch)
        run.count(batch, micro_batch)
        yield micro_batch


@dataclass(frozen=True)
class Inputs:
    """Makes a batch of the loader a micro-batch: latents, their noise, times and conditions.

    Everything random about a sample is keyed by (seed, step, its index in the global batch), so that any number of
    ranks, and a resumed run, draws the same.

    Args:
        label_drop: share of the conditions that become the null condition, for classifier-free guidance.
        packing: makes packs of samples of unequal size (``--pack_tokens``).
        tokens_of: gives the number of tokens of latents of a size, for objectives whose times depend on it.
        given_frames: which frames of a clip the model is given (``--given_frames``).
        in_place: it takes them in their places, without noise.
        beside: it is always given the first frame, of an image-to-video model.
        route: the blocks that see a part of the tokens (``--route``).
        teacher: the encoder that tokens are aligned with (``--repa``).
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
    teacher: VisionTeacher | None = None

    def of(self, batch: Batch) -> MicroBatch | PackedMicroBatch:
        """Return the micro-batch on the device, without waiting for it."""
        from opendit.data.base import to_pixels
        from opendit.data.enlarging import enlarge
        from opendit.diffusion.token_routing import draw_kept_tokens
        from opendit.training.micro_batch import MicroBatch

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
            condition, given = self.first_frames(condition, to_pixels(x))
        kept = draw_kept_tokens(self.route, tokens, self.seed, batch.step, index)
        alignment = None if self.teacher is None else self.teacher.alignment(to_pixels(x))
        noise = self.noise(x0, batch.step, index)
        return MicroBatch.of(x0, t, noise, condition, given, self.in_place, kept, alignment)

    def clean(self, x: Tensor, step: int, index: Tensor) -> Tensor:
        """Return the latents x0 (B, C, ...) fp32 of samples x of one shape."""
        from opendit.data.base import to_pixels

        return self.latents.of(to_pixels(x), step, index)

    def noise(self, x0: Tensor, step: int, index: Tensor) -> Tensor:
        """Draw the noise of latents x0, (B, C, ...) fp32."""
        from opendit.diffusion.random import Stream, normal

        return normal(self.seed, step, index, Stream.NOISE, tuple(x0.shape[1:]))

    def condition(self, batch: Batch, index: Tensor) -> Condition:
        """Return the samples' classes or captions, some of them replaced by the null condition."""
        from opendit.diffusion.random import Stream, uniform

        dropped = uniform(self.seed, batch.step, index, Stream.CONDITION_DROP) < self.label_drop
        return self.conditioner.drop(self.conditioner.of_batch(batch), dropped)

    def first_frames(self, y: Condition, pixels: Tensor) -> tuple[Condition, Tensor]:
        """Return conditions with the tokens of the clips' first frames, if the model attends to them, and the mask and
        the latents of clips that have nothing after those."""
        return self.conditioner.of_clips(y, pixels), self.latents.of_first_frames(pixels)

    def given(self, x0: Tensor, step: int, index: Tensor) -> Tensor | None:
        """Return the mask and the latents of the frames that the model is given, (B, 1 + C, T, H, W)."""
        from opendit.diffusion.conditioning_frames import draw_conditioning_frames

        return draw_conditioning_frames(self.given_frames, x0, self.seed, step, index)


@dataclass(frozen=True)
class EagerPasses:
    """The passes of a micro-batch: noise the latents, predict, compare, and go backward.

    Args:
        micro_batches: in a step, whose loss is their mean.
        after_forward: called once the forward pass is enqueued, unless a CUDA graph replays it.
    """

    engine: Engine
    objective: Objective
    micro_batches: int = 1
    after_forward: Callable[[], None] = lambda: None

    def losses(self, batch: MicroBatch | PackedMicroBatch) -> Tensor:
        """Return the loss of each sample, (B,) fp32."""
        from opendit.training.target_network import TargetNetwork

        prepared = self.objective.prepare(batch.x0, batch.row_times, batch.noise)
        if self.objective.asks_network:
            prepared = self.objective.complete(prepared, TargetNetwork(self.engine, batch.condition))
        inputs, conditions = batch.network_inputs(prepared.x_t, prepared.timestep)
        output = self.engine.forward(*inputs, **conditions)
        return batch.losses(self.objective, output, prepared)

    def forward_backward(self, batch: MicroBatch | PackedMicroBatch, *, last: bool) -> Tensor:
        """Add the gradients of a micro-batch to the engine's. Return its share of the step's loss, 0-dim, detached.

        last: the optimizer's step follows.
        """
        with self.engine.micro_batch(last=last):
            loss = batch.mean(self.losses(batch)) / self.micro_batches
            self.after_forward()
            self.engine.backward(loss)
        return loss.detach()


def start(flags: TrainConfig) -> Path | None:
    """Check the flags against the machine and the data, then train. Return the run's folder; None for --dry_run.

    Raises:
        SystemExit: code 1 if a checkpoint or another file could not be written; otherwise as ``Supervisor`` says.
    """
    # torch and the rest, which a wrong flag need not wait for
    from opendit.parallel.mesh import init_mesh
    from opendit.parallel.supervisor import Supervisor
    from opendit.training.auto_parallel import choose_on_ranks
    from opendit.training.build import build
    from opendit.training.card import fit_on_ranks
    from opendit.training.dry_run import dry_run
    from opendit.training.prepare import RUN_ERRORS, USER_ERRORS, prepare

    if flags.dry_run is not None:
        return dry_run(flags)
    with Supervisor(USER_ERRORS) as supervisor:
        mesh = init_mesh(
            sequence_parallel=flags.sequence_parallel_size,
            tensor_parallel=flags.tensor_parallel_size,
            expert_parallel=flags.expert_parallel_size,
            pipeline_parallel=flags.pipeline_parallel_size,
            replicate=flags.data_parallel_replicate,
        )
        if flags.parallel == "auto":
            flags, mesh = choose_on_ranks(flags, mesh)
        elif flags.card is not None:
            flags = fit_on_ranks(flags, mesh)
        flags, notes = flags.resolve(mesh.world_size, mesh.device.type == "cuda")
        spec = prepare(flags, mesh, notes)
        evaluation = None
        if flags.evaluate_every:
            from opendit.evaluation.in_training import RunEvaluation

            evaluation = RunEvaluation(spec)
        supervisor.started(RUN_ERRORS)
        with build(spec, supervisor, Inputs, EagerPasses, evaluation) as run:
            train(run)
        failed_writes = run.failed_writes()
    if failed_writes:
        sys.exit(1)
    return spec.folder


def main(argv: list[str]) -> int:
    """Train as the flags say, or for --dry_run print what training would need. Return the exit code."""
    prepare_console()
    if (folder := start(read_flags(TrainConfig, argv))) is None:
        return 0
    from opendit.training.run_end import exit_code

    return exit_code(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
