"""Trains a Diffusion Transformer: data -> prepare -> model -> loss -> step -> EMA -> log.

One process:     python train.py --model DiT-S/2 --data_path FOLDER
Several GPUs:    torchrun --standalone --nproc_per_node=8 train.py --model DiT-XL/2 --data_path FOLDER
"""

import sys
from typing import TYPE_CHECKING

from opendit.config.command_line import read_flags
from opendit.config.console import prepare_console
from opendit.config.train import TrainConfig

if TYPE_CHECKING:
    from pathlib import Path

    from opendit.training.build import Run


def main(argv: list[str]) -> None:
    """Trains as the flags say, or for --dry_run says what training would need."""
    prepare_console()
    start(read_flags(TrainConfig, argv))


def start(flags: TrainConfig) -> "Path | None":
    """Returns the run's folder; None for --dry_run.

    Ends the program with exit code 1 if a checkpoint, or something else that it writes, could not be written, and as
    ``Supervisor`` says if the run fails.
    """
    # torch and the rest, which a wrong flag need not wait for
    from opendit.parallel.mesh import init_mesh
    from opendit.parallel.supervisor import Supervisor
    from opendit.training.auto_parallel import choose_on_ranks
    from opendit.training.build import build
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
        flags, notes = flags.resolve(mesh.world_size, mesh.device.type == "cuda")
        spec = prepare(flags, mesh, notes)
        evaluation = None
        if flags.evaluate_every:
            from opendit.evaluation.in_training import RunEvaluation

            evaluation = RunEvaluation(spec)
        supervisor.started(RUN_ERRORS)
        with build(spec, supervisor, evaluation) as run:
            train(run)
        failed_writes = run.failed_writes()
    if failed_writes:
        sys.exit(1)
    return spec.folder


def train(run: "Run") -> None:
    """To the run's last step, to the one in which a signal comes, or to the last one that there are data for."""
    from opendit.training.interrupt import NoData

    result = None
    for step in range(run.first_step, run.last_step):
        run.engine.set_lr(lr := run.learning_rate.at(step))
        micro_batches = run.micro_batches.of_next_step()  # the data: latents, times, noise, conditions
        try:
            # prepare -> model -> loss of each (opendit/training/runners/eager.py), and the optimizer's step
            result = run.runner.train_step(micro_batches, before_update=run.interrupt.ask)
        except NoData:
            if result is not None:
                run.end_without_data(step, result)
            raise
        run.ema.update(result.finite)
        run.monitor.add(result.loss, result.finite)
        run.profiler.step()
        done, epoch, stopping = step + 1, run.schedule.epoch(step), run.interrupt.answer()
        if run.agenda.step_done(done, stopping):
            run.skipped.look(done, result)  # here alone, and for a line, a save or a drawing, the host waits
        due = run.agenda.due(run.skipped.skipping, run.skipped.failing)
        if due.refuse:
            run.checkpoints.refuse(done, "the gradients of this step were not finite")
        with run.monitor.paused(due.validate or due.evaluate):
            validation = run.validation.after(done) if due.validate else {}
            if due.evaluate:
                validation |= run.evaluation.after(done, run.sampler, run.monitor)
        if due.log:
            run.log.write(done, epoch, lr, result, validation)
        with run.monitor.paused(due.save or due.draw):
            if due.save:
                run.save(done, epoch)
            if due.draw:
                run.grids.draw(done)
        if stopping:
            break


if __name__ == "__main__":
    main(sys.argv[1:])
