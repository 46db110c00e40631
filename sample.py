"""Draws pictures or clips from a checkpoint: a labelled sheet, single PNGs or MP4s, and with --npz an .npz for FID.

    python sample.py --ckpt outputs/000-DiT-XL-2 --class_labels 207 360 --cfg_scale 4
    python sample.py --model DiT-XL/2 --image_size 256 --ckpt ./model.pt            (Meta's weights)
    python sample.py --ckpt outputs/000-vDiT-XL-222 --use_video --prompt "a seven moving left"
    torchrun --standalone --nproc_per_node=8 sample.py --ckpt ... --num_samples 50000 --npz fid.npz
    torchrun --standalone --nproc_per_node=8 sample.py --ckpt ... --sequence_parallel_size 4 --cfg_parallel

Several processes divide the samples, or share the work of each sample. A sample's noise depends only on --seed and the
sample's index."""

import sys

from opendit.config.console import answer_interrupts, prepare_console, run_program

if __name__ == "__main__":
    answer_interrupts()  # Ctrl-C prints one line, even during the imports below

from typing import TYPE_CHECKING

from opendit.common.stages import Stages
from opendit.common.utils import collection_paused
from opendit.config.command_line import read_flags
from opendit.config.sample import SampleConfig

if TYPE_CHECKING:
    from torch import Tensor

    from opendit.sampling.sample_output import SampleOutput
    from opendit.sampling.sampling_run import SamplingRun


def main(argv: list[str]) -> None:
    """Draw samples with these flags. After an error, ``Supervisor`` ends the program with a one-line message."""
    prepare_console()
    flags = read_flags(SampleConfig, argv)
    stages = Stages("Python, flags")  # the stages' times, for --profile
    # imported now, so that a wrong flag is reported without waiting for torch
    with stages("imports"), collection_paused():
        import torch

        from opendit.parallel.mesh import init_mesh
        from opendit.parallel.supervisor import Supervisor
        from opendit.sampling.sample_output import open_output
        from opendit.sampling.sampling_run import load_run

    with Supervisor((ValueError, OSError)) as supervisor:
        with stages("processes, device"):
            mesh = init_mesh(
                sequence_parallel=flags.sequence_parallel_size,
                tensor_parallel=flags.tensor_parallel_size,
                group_of_one=False,
            )
            if flags.profile and mesh.device.type == "cuda":
                # wait for the device, so that stages don't overlap
                stages.wait = torch.cuda.synchronize
        with stages("flags and files: checked"):
            run = load_run(flags, mesh, stages)
        with run.lock:
            output = open_output(run)
            supervisor.started(())  # later errors are not the flags' fault
            draw(run, output)


def draw(run: "SamplingRun", output: "SampleOutput") -> None:
    """Draw the samples that ``output`` lacks. The model's replicas divide the samples."""
    with output.missing_batches() as batches:
        for batch in batches:
            with run.stages("drawing"):
                index, latents = draw_batch(run, batch)
            batches.decode(index, latents)  # runs while the next batch is drawn; threads write the files


def draw_batch(run: "SamplingRun", batch: range) -> tuple["Tensor", "Tensor"]:
    """Draw a batch of samples; return their indices (B,) and latents (B, C, ...)."""
    import torch

    index = torch.arange(batch.start, batch.stop)
    y, conditioning_frames = run.conditions_of(index)
    latents = run.engine.sample(  # the noise is keyed by the seed and the sample's index
        y,
        run.null,
        index,
        run.flags.seed,
        conditioning_frames=conditioning_frames,
        progress=run.profiled_steps(len(index)),
    )
    return index, latents


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
