"""Trains a Diffusion Transformer: data -> latents -> loss -> step -> EMA -> log and checkpoint.

One process:     python train.py --model DiT-S/2 --data_path FOLDER
Several GPUs:    torchrun --standalone --nproc_per_node=8 train.py --model DiT-XL/2 --data_path FOLDER
"""

import math
import os
import sys
import time
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from opendit import monitor as monitoring
from opendit.checkpoint import load_checkpoint
from opendit.config import TrainConfig, parse
from opendit.data import Batch, build_loader
from opendit.data.base import to_pixels
from opendit.dry_run import describe_recipe, dry_run
from opendit.ema import EMA
from opendit.forward_backward import ForwardBackward
from opendit.interrupt import Interrupt
from opendit.job import USER_ERRORS, Job, example_captions, open_folder, prepare
from opendit.kernels.recompute import recompute_in
from opendit.memory import USABLE, advice, card_memory, describe
from opendit.models import Condition, DiT, build_model
from opendit.models.adapt import adapt
from opendit.models.lora import add_lora, lora_parameters
from opendit.monitor import Monitor
from opendit.parallel.engine import Engine, build_engine
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.parallel.sequence import attention_note
from opendit.plan import config_of
from opendit.profiling import StepProfiler
from opendit.random import Stream, normal, uniform
from opendit.sampling import grid_columns, preview_labels, sample_in_batches, save_contact_sheet, save_grid
from opendit.saving import Checkpoints


def main(argv: list[str]) -> None:
    flags = parse(TrainConfig, argv)
    try:
        if flags.dry_run is not None:
            return dry_run(flags)
        mesh = init_mesh(sequence_parallel=flags.sequence_parallel_size)
        job = prepare(flags, mesh)
    except USER_ERRORS as error:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        close_mesh()
        sys.exit(2)
    try:
        failed_saves = train(job)
    finally:
        close_mesh()
    if failed_saves:
        sys.exit(1)


def train(job: Job) -> int:
    """Trains to the job's last step, or to the one in which a signal comes; returns how many saves failed."""
    flags, mesh = job.flags, job.mesh
    announce_memory(job)
    engine = build_model_and_engine(job)
    ema = EMA(engine, flags.ema_decays, flags.ema_warmup)
    skipped_before = load_checkpoint(job.resume, engine, ema)["skipped"] if job.resume else 0
    forward_backward = build_forward_backward(job, engine)
    announce(job, engine, ema, forward_backward.note, compile_blocks(job, engine))
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
        on_skip=partial(say_skipped, mesh),
        as_bytes=True,  # a quarter of the memory traffic and of the transfer; the device makes the floats
    )
    checkpoints = Checkpoints(
        job.folder / "checkpoints",
        engine,
        ema,
        job.info(),
        keep=flags.ckpt_keep,
        in_use=job.resume,
        say=monitor.say,
        enabled=flags.save,
    )
    profiler = StepProfiler(
        flags.profile and mesh.is_main,
        job.folder / "profile",
        mesh.device,
        steps=job.last_step - job.first_step,
        say=monitor.say,
    )
    save_owed = False
    with checkpoints, Interrupt(mesh) as interrupt:
        for step in range(job.first_step, job.last_step):
            engine.set_lr(lr := learning_rate(flags, step, job.last_step))
            step_loss = torch.zeros((), device=mesh.device)
            for micro in range(flags.grad_accumulation):
                asked = time.perf_counter()
                batch = next(loader)
                monitor.loader_wait(time.perf_counter() - asked)
                step_loss += forward_backward(*inputs(job, batch), last=micro == flags.grad_accumulation - 1)
            interrupted = interrupt.ask()
            result = engine.step()
            ema.update(result.finite)
            monitor.add(step_loss, result.finite)
            profiler.step()
            done, stopping = step + 1, interrupted()
            last = stopping or done == job.last_step
            save_owed |= flags.save and due(done, flags.ckpt_every)
            # Only here the host waits for the device. While steps are being skipped nothing is saved: the run may be
            # about to fail.
            looking = last or save_owed or due(done, flags.log_every) or due(done, flags.max_bad_steps)
            skipping = looking and check_health(engine, flags.max_bad_steps)
            saving = (flags.save and last) or (save_owed and not skipping)
            drawing = due(done, sample_every(flags)) or (done == job.last_step and flags.sample_every != 0)
            # A line at every save: a resumed run starts a new mean there, too.
            if saving or last or due(done, flags.log_every):
                grad_norm = result.grad_norm.item() if result.finite else None
                skipped = skipped_before + int(engine.skipped)
                seen = torch.tensor([loader.skipped, loader.shortened], device=mesh.device)
                bad_files, short_clips = mesh.sum(seen) // mesh.sp_size  # the ranks of a sequence group read the same
                counts = {"loss_scale": float(result.loss_scale), "skipped": skipped, "bad_files": int(bad_files)}
                counts |= {"short_clips": int(short_clips), "failed_saves": len(checkpoints.failures)}
                monitor.log(done, batch.epoch, lr, grad_norm, **counts)
            paused = monitor.pause() if saving or drawing else None
            if saving:
                checkpoints.save({"step": done, "epoch": batch.epoch, "skipped": skipped, **job.facts()})
                save_owed = False
            if drawing and not stopping and job.codec is not None:
                draw_grid(job, engine, ema, monitor, done)
            if paused is not None:
                monitor.resume(paused)
            if stopping:
                break
        profiler.close()
        loader.close()
        checkpoints.wait()
    monitor.close()
    if mesh.is_main:
        summarise(job, monitor, checkpoints)
    return len(checkpoints.failures)


def say_skipped(mesh: Mesh, file: str) -> None:
    if mesh.sp_rank == 0:  # the others of the group skip the same
        tqdm.write(f"rank {mesh.rank}: skipped {file}")


def due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def check_health(engine: Engine, max_bad_steps: int) -> bool:
    """Whether the last step was skipped. Raises FloatingPointError when too many in a row were."""
    in_a_row = int(engine.skipped_in_a_row)
    if in_a_row >= max_bad_steps:
        raise FloatingPointError(
            f"{in_a_row} steps in a row had non-finite gradients (weights and checkpoints are as before them); try a "
            "lower --lr, --mixed_precision bf16, or --load an earlier checkpoint"
        )
    return in_a_row > 0


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


def inputs(job: Job, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Condition]:
    """Latents, times, noise, conditions of a micro-batch; all their randomness is keyed by (seed, step, sample)."""
    device, seed, step = job.mesh.device, job.flags.global_seed, batch.step
    index = batch.index.to(device, non_blocking=True)
    latents = job.latents(to_pixels(batch.x.to(device, non_blocking=True)), step, index)
    t = job.objective.times(seed, step, index)
    noise = normal(seed, step, index, Stream.NOISE, tuple(latents.shape[1:]))
    dropped = uniform(seed, step, index, Stream.CONDITION_DROP) < job.flags.label_drop
    return latents, t, noise, job.conditioner.drop(job.conditioner.of_batch(batch), dropped)


def build_forward_backward(job: Job, engine: Engine) -> ForwardBackward:
    def loss(x: Tensor, t: Tensor, noise: Tensor, y: Condition) -> Tensor:
        return job.objective.loss(engine.forward, x, t, noise, y=y).mean() / job.flags.grad_accumulation

    return ForwardBackward(engine, loss, graph=job.flags.enable_cuda_graph, say=tqdm.write)


def build_model_and_engine(job: Job) -> Engine:
    flags = job.flags
    torch.manual_seed(flags.global_seed)  # the same initial weights on every rank
    torch.set_float32_matmul_precision("high")  # TF32 for what is left in fp32 on a GPU
    with job.mesh.device:
        model = build_model(job.model_config)
    if job.initial is not None:
        start = adapt(model, job.initial, config_of(job.initial, flags.model), job.dataset.class_names)
        job.notes += [f"--pretrained: {line}" for line in start.describe()]
        if job.lora is not None:
            add_lora(model, job.lora, start.untrained)
    model.use(ops=job.kernels.ops, attend=job.kernels.attend, sequence=job.sequence)
    recompute_in(model, flags.recompute)
    model.grad_checkpoint = flags.grad_checkpoint
    return build_engine(
        model.train(),
        job.mesh,
        plugin=flags.plugin,
        precision=flags.mixed_precision,
        lr=flags.lr,
        weight_decay=flags.weight_decay,
        betas=(flags.adam_beta1, flags.adam_beta2),
        grad_clip=flags.grad_clip,
        grad_accumulation=flags.grad_accumulation,
    )


def compile_blocks(job: Job, engine: Engine) -> str:
    """--compile, in place; returns whether it was done, and if not, why."""
    if not job.flags.compile:
        return "off (--compile is)"
    if not engine.whole:
        return "off: Gemini fetches weights in __torch_function__ and frees them after use, which compile can't follow"
    engine.module.compile_blocks()
    return "blocks and final layer, when they first meet a shape"


def draw_grid(job: Job, engine: Engine, ema: EMA, monitor: Monitor, step: int) -> None:
    """samples/NNNNNNN.png from the EMA weights, by rank 0 and those that share its samples; the others help to gather
    the weights.

    The training module itself takes them for the time; under a plugin that has cut it up, a second one does.
    """
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


def draw(job: Job, model: DiT, monitor: Monitor, step: int) -> None:
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
        objective=job.objective,
        sampler=job.objective.preview_sampler,
        cfg_scale=job.flags.sample_cfg_scale,
    )
    pictures = np.concatenate([pictures for _, pictures in batches])
    if not job.mesh.is_main:
        return
    path = job.folder / "samples" / f"{step:07d}.png"
    if pictures.ndim == 5:
        save_contact_sheet(path, pictures, captions)
    else:
        save_grid(path, pictures, captions, columns=grid_columns(captions))
    monitor.picture(path, step)
    monitor.say(f"step {step}: drew {path}")


def what_to_draw(job: Job) -> tuple[Condition, list[str]]:
    """The conditions of a sample grid, and what to write above the pictures."""
    if job.model_config.text is not None:
        captions = example_captions(job.dataset, count=8 if job.flags.use_video else 16)
        return job.conditioner.encode(captions), captions
    names = job.dataset.class_names
    labels = preview_labels(len(names), 4 * len(names) if len(names) <= 10 else 32)
    return labels.to(job.mesh.device), [names[label] for label in labels]


def announce_memory(job: Job) -> None:
    """What the step will need and, where the GPU has less, the cheapest way out: before building runs out of it."""
    if not job.mesh.is_main:
        return
    config, batch = job.model_config, job.flags.batch_size
    card = card_memory(job.mesh.device)
    setup = job.memory_setup(lora_parameters(config, job.lora.rank) if job.lora else config.parameters())
    print(f"memory: {describe(config, setup, batch, card)}", flush=True)
    if card is not None and (way_out := advice(config, setup, batch, USABLE * card)):
        print(f"note: memory: the estimate is above what the GPU has; the cheapest way out is {way_out}", flush=True)


def announce(job: Job, engine: Engine, ema: EMA, graph_note: str, compile_note: str) -> None:
    """One block that says what is in use, and why."""
    if not job.mesh.is_main:
        return
    open_folder(job)
    flags, mesh, config = job.flags, job.mesh, job.model_config
    cuda = mesh.device.type == "cuda"
    weights = sum(math.prod(shape) for shape in engine.shapes.values())  # that are trained
    processor = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s) each"
    rows = {"recipe": describe_recipe(flags)} if flags.recipe else {}
    rows |= {
        "model": f"{flags.model}: {config.parameters() / 1e6:.1f} M parameters, {config.tokens} tokens, "
        f"{3 * config.forward_flops() / 1e9:.2f} GFLOP a training sample",
        "data": job.dataset.describe(),
        "latents": f"{' x '.join(map(str, (config.in_channels, *config.input_size)))} (--vae {job.vae})",
        "processes": f"{mesh.world_size} ({processor}), plugin {flags.plugin}",
        "precision": flags.mixed_precision + (", blocks recomputed in backward" if flags.grad_checkpoint else ""),
        "trained": f"{weights:,} weights" + (f": {job.lora}, and what is new" if job.lora else ""),
        "optimizer": engine.optimizer_name,
        "EMA": f"decay {', '.join(map(str, ema.decays))}{', warm-up' if ema.warmup else ''}; "
        f"{ema.bytes_per_rank() / 2**20:.1f} MiB a rank (4 bytes x parameters / ranks each)",
        "attention": attention_note(job.kernels.attention_note, job.sequence),
        "sequence": f"over {mesh.sp_size} ranks, {job.sequence.plan}" if job.sequence else "whole on every rank",
        "kernels": job.kernels.ops_note,
        "CUDA graph": graph_note,
        "compile": compile_note,
        "batch": f"{flags.batch_size} x {mesh.dp_size} ranks x {flags.grad_accumulation} micro-batches = "
        f"{job.schedule.global_batch}; {job.schedule.steps_per_epoch} steps an epoch",
        "steps": f"{job.first_step} to {job.last_step}" + (f", resumed from {job.resume}" if job.resume else ""),
        "run folder": str(job.folder),
    }
    monitoring.print_block("OpenDiT training", rows)
    for note in job.notes:
        print(f"note: {note}", flush=True)


def summarise(job: Job, monitor: Monitor, checkpoints: Checkpoints) -> None:
    folder, step = job.folder, monitor.last.get("step", job.first_step)
    rows = {
        "checkpoint": str(checkpoints.newest) if job.flags.save else "none (--no_save)",
        "log": str(folder / "log.jsonl"),
        "pictures": str(folder / "samples"),
        "curves": f"tensorboard --logdir {folder / 'tensorboard'}",
        "next": f"python sample.py --ckpt {folder}",
    }
    if step < job.last_step:
        rows["next"] = f"the same command with --load latest goes on to step {job.last_step}"
    if checkpoints.failures:
        rows["NOT SAVED"] = "; ".join(checkpoints.failures)
    loss = f", last logged loss {monitor.last['loss']:.4f}" if monitor.last.get("loss") is not None else ""
    print()
    monitoring.print_block(f"{'Stopped' if step < job.last_step else 'Done'}: step {step}{loss}", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
