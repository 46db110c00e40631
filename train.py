"""Trains a Diffusion Transformer: data -> latents -> loss -> step -> EMA -> log and checkpoint.

One process:     python train.py --model DiT-S/2 --data_path FOLDER
Several GPUs:    torchrun --standalone --nproc_per_node=8 train.py --model DiT-XL/2 --data_path FOLDER
"""

import math
import sys
import time

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from opendit import monitor as monitoring
from opendit.checkpoint import load_checkpoint, save_checkpoint
from opendit.config import TrainConfig, parse
from opendit.data import Batch, build_loader
from opendit.diffusion import DDPM, ddpm_loss
from opendit.ema import EMA
from opendit.job import USER_ERRORS, Job, example_captions, prepare, write_config
from opendit.models import Condition, build_model
from opendit.models.pretrained import load_state
from opendit.monitor import Monitor
from opendit.parallel.engine import PRECISIONS, Engine, build_engine
from opendit.parallel.mesh import close_mesh, init_mesh
from opendit.random import Stream, integers, normal, uniform
from opendit.sampling import grid_columns, preview_labels, sample_in_batches, save_contact_sheet, save_grid


def main(argv: list[str]) -> None:
    flags = parse(TrainConfig, argv)
    mesh = init_mesh()
    try:
        job = prepare(flags, mesh)
    except USER_ERRORS as error:
        if mesh.local_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        close_mesh()
        sys.exit(2)
    try:
        train(job)
    finally:
        close_mesh()


def train(job: Job) -> None:
    flags, mesh = job.flags, job.mesh
    engine = build_model_and_engine(job)
    ema = EMA(engine, flags.ema_decay)
    skipped_in_all = load_checkpoint(job.resume, engine, ema)["skipped"] if job.resume else 0
    announce(job, engine)
    monitor = Monitor(
        job.folder,
        mesh,
        first_step=job.first_step,
        last_step=job.last_step,
        samples_per_step=job.schedule.global_batch,
        flops_per_sample=3 * job.model_config.forward_flops(),
        precision=flags.mixed_precision,
    )
    loader = build_loader(
        job.dataset,
        job.schedule,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        batch_size=flags.batch_size,
        micro_batches=flags.grad_accumulation,
        start_step=job.first_step,
        end_step=job.last_step,
        num_workers=flags.num_workers,
        pin_memory=True,
        max_bad=flags.max_bad,
        on_skip=lambda file: tqdm.write(f"rank {mesh.rank}: skipped {file}"),
    )
    diffusion = DDPM.linear()
    skipped_in_a_row, saved_step = 0, job.first_step
    for step in range(job.first_step, job.last_step):
        engine.set_lr(lr := learning_rate(flags, step, job.last_step))
        step_loss = torch.zeros((), device=mesh.device)
        for micro in range(flags.grad_accumulation):
            asked = time.perf_counter()
            batch = next(loader)
            monitor.loader_wait(time.perf_counter() - asked)
            with engine.micro_batch(last=micro == flags.grad_accumulation - 1):
                loss = batch_loss(job, engine, diffusion, batch) / flags.grad_accumulation
                engine.backward(loss)
            step_loss += loss.detach()
        result = engine.step()
        if not result.skipped:
            ema.update()
        skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
        skipped_in_all += result.skipped
        if skipped_in_a_row >= flags.max_bad_steps:
            raise FloatingPointError(
                f"{skipped_in_a_row} steps in a row had non-finite gradients (weights and checkpoints are as before "
                f"them); try a lower --lr, --mixed_precision bf16, or --load an earlier checkpoint"
            )
        monitor.add(None if result.skipped else step_loss)
        done, last = step + 1, step + 1 == job.last_step
        if done % flags.log_every == 0 or last:
            grad_norm = result.grad_norm if math.isfinite(result.grad_norm) else None
            bad_files = int(mesh.sum(torch.tensor(loader.skipped, device=mesh.device)))
            counts = {"loss_scale": result.loss_scale, "skipped": skipped_in_all, "bad_files": bad_files}
            monitor.log(done, batch.epoch, lr, grad_norm, **counts)
        paused = monitor.pause() if due(done, flags.ckpt_every, last) or due(done, sample_every(flags), last) else None
        if due(done, flags.ckpt_every, last):
            state = {"step": done, "epoch": batch.epoch, "skipped": skipped_in_all, "world_size": mesh.world_size}
            saved = save_checkpoint(job.folder / "checkpoints", engine, ema, state, job.info())
            monitor.say(f"step {done}: saved {saved}")
            saved_step = done
        if due(done, sample_every(flags), last) and job.codec is not None:
            draw_grid(job, ema, monitor, done)
        if paused is not None:
            monitor.resume(paused)
    loader.close()
    monitor.close()
    if mesh.is_main:
        summarise(job, monitor, saved_step)


def due(done: int, every: int, last: bool) -> bool:
    return last or (every > 0 and done % every == 0)


def sample_every(flags: TrainConfig) -> int:
    return flags.ckpt_every if flags.sample_every is None else flags.sample_every


def learning_rate(flags: TrainConfig, step: int, last_step: int) -> float:
    """Linear warm-up to --lr, then constant, or a cosine to zero at the last step."""
    if step < flags.warmup_steps:
        return flags.lr * (step + 1) / flags.warmup_steps
    if flags.lr_schedule == "constant":
        return flags.lr
    progress = (step - flags.warmup_steps) / max(1, last_step - flags.warmup_steps)
    return flags.lr * 0.5 * (1 + math.cos(math.pi * progress))


def batch_loss(job: Job, engine: Engine, diffusion: DDPM, batch: Batch) -> Tensor:
    """Mean diffusion loss of one micro-batch; all its randomness is keyed by (seed, step, sample)."""
    device, seed, step = job.mesh.device, job.flags.global_seed, batch.step
    index = batch.index.to(device, non_blocking=True)
    latents = job.latents(batch.x.to(device, non_blocking=True), step, index)
    t = integers(seed, step, index, Stream.TIMESTEP, diffusion.num_steps)
    noise = normal(seed, step, index, Stream.NOISE, tuple(latents.shape[1:]))
    dropped = uniform(seed, step, index, Stream.CONDITION_DROP) < job.flags.label_drop
    y = job.conditioner.drop(job.conditioner.of_batch(batch), dropped)
    return ddpm_loss(diffusion, engine.forward, latents, t, noise, y=y).loss.mean()


def build_model_and_engine(job: Job) -> Engine:
    flags = job.flags
    torch.manual_seed(flags.global_seed)  # the same initial weights on every rank
    torch.set_float32_matmul_precision("high")  # TF32 for what is left in fp32 on a GPU
    with job.mesh.device:
        model = build_model(job.model_config)
    if job.initial is not None:
        load_state(model, job.initial)
    model.use(ops=job.kernels.ops, attend=job.kernels.attend).grad_checkpoint = flags.grad_checkpoint
    return build_engine(
        model.train(),
        job.mesh,
        plugin=flags.plugin,
        precision=flags.mixed_precision,
        lr=flags.lr,
        weight_decay=flags.weight_decay,
        grad_clip=flags.grad_clip,
        grad_accumulation=flags.grad_accumulation,
    )


def draw_grid(job: Job, ema: EMA, monitor: Monitor, step: int) -> None:
    """samples/NNNNNNN.png from the EMA weights; rank 0 draws, the others help to gather the weights."""
    model = None
    if job.mesh.is_main:
        with job.mesh.device:
            model = build_model(job.model_config)
        model.place(job.mesh.device, PRECISIONS[job.flags.mixed_precision]).eval()
    for name, full in ema.gather():
        if model is not None:
            model.get_parameter(name).data.copy_(full)
    if model is not None:
        model.use(ops=job.kernels.ops, attend=job.kernels.attend)
        y, captions = what_to_draw(job)
        batches = sample_in_batches(
            model,
            job.codec,
            y,
            job.conditioner.null(),
            torch.arange(len(captions)),
            batch_size=32,
            seed=job.flags.global_seed,
            steps=job.flags.sample_steps,
            sampler="ddim",
            cfg_scale=job.flags.sample_cfg_scale,
        )
        pictures = np.concatenate([pictures for _, pictures in batches])
        path = job.folder / "samples" / f"{step:07d}.png"
        if pictures.ndim == 5:
            save_contact_sheet(path, pictures, captions)
        else:
            save_grid(path, pictures, captions, columns=grid_columns(captions))
        monitor.picture(path, step)
        monitor.say(f"step {step}: drew {path}")
    if job.mesh.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the drawing's memory is not the training's
    job.mesh.barrier()


def what_to_draw(job: Job) -> tuple[Condition, list[str]]:
    """The conditions of a sample grid, and what to write above the pictures."""
    if job.model_config.text is not None:
        captions = example_captions(job.dataset, count=8 if job.flags.use_video else 16)
        return job.conditioner.encode(captions), captions
    names = job.dataset.class_names
    labels = preview_labels(len(names), 4 * len(names) if len(names) <= 10 else 32)
    return labels.to(job.mesh.device), [names[label] for label in labels]


def announce(job: Job, engine: Engine) -> None:
    """One block that says what is in use, and why."""
    if not job.mesh.is_main:
        return
    write_config(job)
    flags, mesh, config = job.flags, job.mesh, job.model_config
    cuda = mesh.device.type == "cuda"
    processor = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s) each"
    rows = {
        "model": f"{flags.model}: {config.parameters() / 1e6:.1f} M parameters, {config.tokens} tokens, "
        f"{3 * config.forward_flops() / 1e9:.2f} GFLOP a training sample",
        "data": job.dataset.describe(),
        "latents": f"{' x '.join(map(str, (config.in_channels, *config.input_size)))} (--vae {job.vae})",
        "processes": f"{mesh.world_size} ({processor}), plugin {flags.plugin}",
        "precision": flags.mixed_precision + (", blocks recomputed in backward" if flags.grad_checkpoint else ""),
        "optimizer": engine.optimizer_name,
        "attention": job.kernels.attention_note,
        "kernels": job.kernels.ops_note,
        "batch": f"{flags.batch_size} x {mesh.dp_size} ranks x {flags.grad_accumulation} micro-batches = "
        f"{job.schedule.global_batch}; {job.schedule.steps_per_epoch} steps an epoch",
        "steps": f"{job.first_step} to {job.last_step}" + (f", resumed from {job.resume}" if job.resume else ""),
        "run folder": str(job.folder),
    }
    monitoring.print_block("OpenDiT training", rows)
    for note in job.notes:
        print(f"note: {note}", flush=True)


def summarise(job: Job, monitor: Monitor, saved_step: int) -> None:
    folder = job.folder
    rows = {
        "checkpoint": str(folder / "checkpoints" / f"step_{saved_step:07d}"),
        "log": str(folder / "log.jsonl"),
        "pictures": str(folder / "samples"),
        "curves": f"tensorboard --logdir {folder / 'tensorboard'}",
        "next": f"python sample.py --ckpt {folder}",
    }
    loss = f", last logged loss {monitor.last['loss']:.4f}" if monitor.last.get("loss") is not None else ""
    print()
    monitoring.print_block(f"Done: step {job.last_step}{loss}", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
