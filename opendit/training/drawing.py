"""The sample grids that a run draws from its EMA weights."""

import numpy as np
import torch

from opendit.diffusion.sampling import sample_in_batches
from opendit.encoders.conditioner import preview_labels
from opendit.encoders.pictures import grid_columns, save_contact_sheet, save_grid, to_uint8
from opendit.models import Condition, DiT, build_model
from opendit.parallel.engines import Engine
from opendit.state.ema import EMA
from opendit.training import monitor as monitoring
from opendit.training.monitor import Monitor
from opendit.training.prepare import TrainingRun, example_captions


def draw_grid(job: TrainingRun, engine: Engine, ema: EMA, monitor: Monitor, step: int) -> None:
    """samples/NNNNNNN.png from the EMA weights, by rank 0 and those that share its samples; the others help to gather
    the weights. Without the latents' VAE there is none.

    The training module itself takes them for the time; under a plugin that has cut it up, a second one does.
    """
    if job.codec is None:
        return
    mesh, model, trained = job.mesh, None, monitoring.allocated_gib()
    if mesh.dp_rank == 0 and engine.whole:
        model = engine.module
    elif mesh.dp_rank == 0:
        with mesh.device:
            model = build_model(job.model_config)
        model.place(mesh.device, engine.dtype)
        model.use(ops=job.kernels.ops, attend=job.kernels.attend, sequence=job.sequence)
    with ema.applied(model), engine.autocast():
        if model is not None:
            draw(job, model, monitor, step)
    monitor.forget_drawing(trained)
    mesh.barrier()


def draw(job: TrainingRun, model: DiT, monitor: Monitor, step: int) -> None:
    y, captions = what_to_draw(job)
    batches = sample_in_batches(
        model,
        y,
        job.conditioner.null(),
        torch.arange(len(captions)),
        batch_size=32,
        seed=job.flags.global_seed,
        steps=job.flags.sample_steps,
        objective=job.objective,
        sampler=job.objective.preview_sampler,
        cfg_scale=job.flags.sample_cfg_scale,
    )
    pictures = np.concatenate([to_uint8(job.codec.decode(latents)) for _, latents in batches])
    if not job.mesh.is_main:
        return
    path = job.folder / "samples" / f"{step:07d}.png"
    with monitor.failures.survive("samples", step):
        if pictures.ndim == 5:
            save_contact_sheet(path, pictures, captions)
        else:
            save_grid(path, pictures, captions, columns=grid_columns(captions))
        monitor.say(f"step {step}: drew {path}")
        monitor.picture(path, step)


def what_to_draw(job: TrainingRun) -> tuple[Condition, list[str]]:
    """The conditions of a sample grid, and what to write above the pictures."""
    if job.model_config.text is not None:
        captions = example_captions(job.dataset, count=8 if job.flags.use_video else 16)
        return job.conditioner.encode(captions), captions
    names = job.dataset.class_names
    labels = preview_labels(len(names), 4 * len(names) if len(names) <= 10 else 32)
    return labels.to(job.mesh.device), [names[label] for label in labels]
