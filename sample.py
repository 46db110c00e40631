"""Draws pictures or clips from a checkpoint: a labelled sheet, single PNGs or MP4s, on request an .npz for FID tools.

    python sample.py --ckpt outputs/000-DiT-XL-2 --class_labels 207 360 --cfg_scale 4
    python sample.py --model DiT-XL/2 --image_size 256 --ckpt ./model.pt            (Meta's weights)
    python sample.py --ckpt outputs/000-vDiT-XL-222 --use_video --prompt "a seven moving left"
    torchrun --standalone --nproc_per_node=8 sample.py --ckpt ... --num_samples 50000 --npz fid.npz
    torchrun --standalone --nproc_per_node=8 sample.py --ckpt ... --sequence_parallel_size 4 --cfg_parallel

Several processes split the samples, or share each of them; its noise depends on --seed and its number only.
"""

import os
import sys
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from opendit.checkpoint import newest_run
from opendit.config import SampleConfig, parse
from opendit.data.video_file import write_mp4
from opendit.diffusion import Objective, objective_from_dict
from opendit.encoders.conditioner import CaptionConditioner, Conditioner, LabelConditioner
from opendit.encoders.text import load_text_encoder
from opendit.encoders.vae import ImageCodec, codec_geometry, load_codec
from opendit.encoders.video_vae import VideoCodec, latent_frames, load_video_codec, video_geometry
from opendit.kernels.select import KernelChoice, select_kernels
from opendit.models import Condition, DiT
from opendit.models.pretrained import Weights, find_weights, load_pretrained, read_config
from opendit.monitor import print_block
from opendit.parallel.engine import PRECISIONS
from opendit.parallel.guidance import Replica, SharedBatch, make_replicas
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.parallel.sequence import SequenceParallel, attention_note, sequence_parallel
from opendit.parallel.sequence.choose import make_plan
from opendit.plan import sequence_shape
from opendit.sampling import (
    grid_columns,
    preview_labels,
    sample_in_batches,
    save_animation,
    save_contact_sheet,
    save_grid,
)

SOURCE_FPS = 24  # of the files that clips were read from, as --frame_interval counts

GRID_PICTURES, SHEET_CLIPS = 100, 16  # at most; the single files and the .npz hold all


@dataclass
class Job:
    """A checked sampling job. Sample number i draws ``choices[i]``: a class, or a row of the prompts."""

    flags: SampleConfig
    mesh: Mesh
    replica: Replica
    model: DiT
    codec: ImageCodec | VideoCodec | None  # only the rank that leads a replica has one
    objective: Objective
    kernels: KernelChoice
    sequence: SequenceParallel | None
    conditioner: Conditioner
    conditions: Condition  # of every class or prompt
    choices: Tensor
    names: list[str]  # of every class or prompt
    size: tuple[int, ...]  # of the latents
    fps: float
    source: Path
    notes: list[str]

    @property
    def captions(self) -> list[str]:
        """What every sample shows."""
        return [self.names[choice] for choice in self.choices.tolist()]


def main(argv: list[str]) -> None:
    flags = parse(SampleConfig, argv)
    try:
        mesh = init_mesh(sequence_parallel=flags.sequence_parallel_size)
        job = prepare(flags, mesh)
    except (ValueError, OSError) as error:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        close_mesh()
        sys.exit(2)
    try:
        run(job)
    finally:
        close_mesh()


def prepare(flags: SampleConfig, mesh: Mesh) -> Job:
    """Loads the model and its VAE. Raises ValueError or OSError with a message for the user."""
    notes = flags.check(mesh.world_size, mesh.device.type == "cuda")
    if flags.npz and not Path(flags.npz).resolve().parent.is_dir():
        raise ValueError(f"--npz {flags.npz}: its folder does not exist")
    ckpt = flags.ckpt
    if ckpt == "latest":
        found = newest_run(flags.outputs, flags.model, flags.use_video)
        if found is None:
            raise ValueError(f"--ckpt latest: no run with a checkpoint under {flags.outputs}; give a path")
        ckpt = found
    if mesh.sp_size > 1 and (stored := read_config(find_weights(ckpt, flags.weights))):
        # What sequence_parallel would refuse, before the weights are read.
        make_plan(flags.sequence_parallel_type, mesh.sp_size, sequence_shape(flags, stored, samples_at_once(flags)))
    model, weights = load_pretrained(ckpt, flags.model, flags.weights, flags.lora)
    config = model.config
    if flags.use_video and not config.is_video:
        raise ValueError(f"--use_video: {weights.path} draws pictures; leave the flag out")
    objective = objective_from_dict(weights.info.get("objective"))
    objective.choose(flags.sampler)
    dtype = PRECISIONS[flags.mixed_precision]
    size = latent_size(flags, model, weights)
    if flags.fp8:
        config.check_speed(True, "none")
    replica = make_replicas(mesh, flags.cfg_parallel)
    shape = sequence_shape(flags, config, samples_at_once(flags), size)
    sequence = sequence_parallel(mesh, flags.sequence_parallel_type, shape)
    kernels = select_kernels(flags, mesh.device, dtype, config.hidden_size // config.num_heads, config.tokens)
    model.place(mesh.device, dtype).eval().use(ops=kernels.ops, attend=kernels.attend, sequence=sequence)
    half = torch.float32 if flags.mixed_precision == "fp32" else torch.float16  # closer to fp32 than bf16 for a VAE
    codec = None
    if replica.leads:
        load = load_video_codec if config.is_video else load_codec
        codec = load(vae_of(flags, weights), channels=config.in_channels, device=mesh.device, dtype=half)
    conditioner, conditions, choices, names = what_to_draw(flags, model, weights, half, mesh)
    if len(choices) < replica.count:
        notes.append(
            f"processes: {replica.count - len(choices)} of the {replica.count} groups have nothing to draw; "
            "--sequence_parallel_size and --cfg_parallel let several processes share a sample"
        )
    interval = flags.frame_interval or weights.info.get("frame_interval", 1)
    return Job(
        flags=flags,
        mesh=mesh,
        replica=replica,
        model=model,
        codec=codec,
        objective=objective,
        kernels=kernels,
        sequence=sequence,
        conditioner=conditioner,
        conditions=conditions,
        choices=choices,
        names=names,
        size=size,
        fps=max(1.0, SOURCE_FPS / interval),
        source=weights.path,
        notes=notes,
    )


def vae_of(flags: SampleConfig, weights: Weights) -> str:
    return flags.vae or weights.info.get("vae", "ema")


def latent_size(flags: SampleConfig, model: DiT, weights: Weights) -> tuple[int, ...]:
    """(h, w) or (t, h, w) to draw. Raises ValueError if a flag does not fit the model or its VAE."""
    config, vae = model.config, vae_of(flags, weights)
    *frames, height, width = config.input_size
    if frames:
        channels, downscale, temporal = video_geometry(vae, config.in_channels)
        if flags.num_frames is not None:
            frames = [latent_frames(flags.num_frames, temporal)]
    else:
        channels, downscale = codec_geometry(vae, config.in_channels)
    if channels != config.in_channels:
        raise ValueError(f"--vae {vae} has {channels} channels, the model {config.in_channels}; name the model's VAE")
    if flags.image_size not in (None, height * downscale):
        raise ValueError(
            f"--image_size {flags.image_size}: {weights.path} draws {height * downscale} x {width * downscale}; leave "
            "the flag out"
        )
    grid = config.grid_of((*frames, height, width))  # raises ValueError if the patch does not divide the frames
    if config.positions == "learned" and grid[0] > config.grid[0]:  # (the other sides are the model's own)
        most = (config.grid[0] * config.patch[0] - 1) * temporal + 1
        raise ValueError(f"--num_frames {flags.num_frames}: {weights.path} has learned the positions of {most} at most")
    return (*frames, height, width)


def samples_at_once(flags: SampleConfig) -> int:
    """That the model is given in one call: with guidance both halves, unless other processes have one of them."""
    return flags.batch_size * (1 if flags.cfg_scale == 1 or flags.cfg_parallel else 2)


def what_to_draw(
    flags: SampleConfig, model: DiT, weights: Weights, dtype: torch.dtype, mesh: Mesh
) -> tuple[Conditioner, Condition, Tensor, list[str]]:
    """The conditioner, the condition of every class or prompt, every sample's choice of them, and their names.

    Raises ValueError for classes that the model does not have, or for prompts given to a class model and the other
    way round.
    """
    text, info = model.config.text, weights.info
    if text is None:
        if flags.prompt:
            raise ValueError(f"--prompt: {weights.path} is conditioned on classes; use --class_labels")
        names = [*(info.get("class_names") or [])]
        names += [str(i) for i in range(len(names), model.config.num_classes)]
        choices = choose(flags, len(names))
        return LabelConditioner(len(names), mesh.device), torch.arange(len(names), device=mesh.device), choices, names
    if flags.class_labels:
        raise ValueError(f"--class_labels: {weights.path} is conditioned on captions; use --prompt")
    prompts = read_prompts(flags.prompt) or info.get("captions") or [""]
    encoder = None
    if not text.inside:
        name = flags.text_encoder or info.get("text_encoder") or text.name
        encoder = load_text_encoder(name, device=mesh.device, dtype=dtype, max_tokens=text.max_tokens)
    conditioner = CaptionConditioner(text, mesh.device, encoder)
    choices = torch.arange(flags.num_samples or len(prompts)) % len(prompts)
    return conditioner, conditioner.encode(prompts), choices, prompts


def read_prompts(given: list[str]) -> list[str]:
    """The prompts of --prompt: as they are, or the lines of one text file."""
    if len(given) == 1 and given[0].endswith(".txt"):
        try:
            lines = Path(given[0]).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"--prompt {given[0]}: can't be read ({error.strerror})") from error
        given = [line.strip() for line in lines if line.strip()]
        if not given:
            raise ValueError("--prompt: the file holds no caption; one a line is expected")
    return given


def choose(flags: SampleConfig, num_classes: int) -> Tensor:
    """The label of every sample, (N,) int64. Raises ValueError for labels the model does not have."""
    bad = [label for label in flags.class_labels if not 0 <= label < num_classes]
    if bad:
        raise ValueError(f"--class_labels {bad[0]}: the model has labels 0 to {num_classes - 1}")
    if flags.class_labels:
        given = torch.tensor(flags.class_labels)
        return given[torch.arange(flags.num_samples or len(given)) % len(given)]
    return preview_labels(num_classes, flags.num_samples or min(16, 2 * num_classes))


def run(job: Job) -> None:
    flags, mesh, replica = job.flags, job.mesh, job.replica
    output = Path(flags.output)
    announce(job)
    mine = torch.arange(len(job.choices)).tensor_split(replica.count)[replica.number]
    progress = tqdm(total=len(mine), unit="sample", disable=not mesh.is_main, dynamic_ncols=True)
    torch.set_float32_matmul_precision("highest")
    batches = sample_in_batches(
        job.model,
        job.codec,
        job.conditions[job.choices[mine].to(mesh.device)],
        job.conditioner.null(),
        mine,
        flags.batch_size,
        seed=flags.seed,
        steps=flags.num_sampling_steps,
        objective=job.objective,
        sampler=flags.sampler,
        cfg_scale=flags.cfg_scale,
        cfg_channels=flags.cfg_channels,
        cfg_interval=tuple(flags.cfg_interval) or None,
        size=job.size,
        forward=SharedBatch(job.model, replica.halves) if replica.halves else None,
    )
    # Through a file: with 50,000 pictures the .npz does not fit in every process's memory.
    part, part_path, captions = None, output / f".part-{replica.number:04d}.npy", job.captions
    for index, pictures in batches:
        if pictures is None:
            continue
        if part is None:
            part = np.lib.format.open_memmap(part_path, "w+", np.uint8, (len(mine), *pictures.shape[1:]))
        for number, picture in zip(index.tolist(), pictures, strict=True):
            part[number - mine[0]] = picture
            if flags.save_png:
                save_one(output / f"{number:06d}-{file_name(captions[number])}", picture, job.fps)
        progress.update(len(index))
    progress.close()
    if part is not None:
        part.flush()
    mesh.barrier()
    if mesh.is_main:
        collect(job, output)
    mesh.barrier()
    if part is not None:
        part_path.unlink()


def collect(job: Job, output: Path) -> None:
    """Rank 0: the sheet and the .npz from all replicas' parts."""
    flags, captions = job.flags, job.captions
    sizes = [len(part) for part in torch.arange(len(captions)).tensor_split(job.replica.count)]
    parts = [np.load(output / f".part-{number:04d}.npy", mmap_mode="r") for number, size in enumerate(sizes) if size]
    clips = parts[0].ndim == 5
    shown = np.stack(list(islice(chain.from_iterable(parts), SHEET_CLIPS if clips else GRID_PICTURES)))
    if clips:
        save_contact_sheet(output / "grid.png", shown, captions[: len(shown)])
        save_animation(output / "grid.gif", shown, captions[: len(shown)], job.fps)
    else:
        save_grid(output / "grid.png", shown, captions[: len(shown)], columns=grid_columns(captions))
    rows = {"sheet": f"{output / 'grid.png'}{', moving in grid.gif' if clips else ''}"}
    if flags.save_png:
        rows["clips" if clips else "pictures"] = f"{len(captions)} in {output}"
    if flags.npz:
        labels = job.choices.numpy() if job.model.config.text is None else np.array(captions)
        np.savez(flags.npz, arr_0=np.concatenate(parts), arr_1=labels)
        shape = " x ".join(map(str, (len(captions), *parts[0].shape[1:])))
        rows["npz"] = f"{flags.npz}: arr_0 {shape}, arr_1 {'captions' if job.model.config.text else 'labels'}"
    print_block("\nDone", rows)


def announce(job: Job) -> None:
    if not job.mesh.is_main:
        return
    flags, device = job.flags, job.mesh.device
    processor = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    sampler = job.objective.choose(flags.sampler)
    shares = f", shared out over {job.replica.count}" if job.replica.count > 1 else ""
    rows = {
        "weights": str(job.source),
        "model": f"{sum(p.numel() for p in job.model.parameters()) / 1e6:.1f} M parameters, {flags.mixed_precision}",
        "sampler": f"{sampler}, {flags.num_sampling_steps} steps, guidance {flags.cfg_scale}"
        f"{', its halves on different processes' if job.replica.halves else ''}",
        "vae": job.codec.name,
        "attention": attention_note(job.kernels.attention_note, job.sequence),
        "kernels": job.kernels.ops_note,
        "sequence": f"over {job.mesh.sp_size} ranks, {job.sequence.plan}" if job.sequence else "whole on every rank",
        "processes": f"{job.mesh.world_size} ({processor})",
        "samples": f"{len(job.choices)}{shares}, seed {flags.seed}",
    }
    print_block("OpenDiT sampling", rows)
    for note in job.notes:
        print(f"note: {note}", flush=True)


def save_one(stem: Path, picture: np.ndarray, fps: float) -> None:
    """STEM.png of a picture (H, W, 3), STEM.mp4 of a clip (T, H, W, 3)."""
    if picture.ndim == 4:
        write_mp4(stem.with_name(stem.name + ".mp4"), picture, fps)
    else:
        Image.fromarray(picture).save(stem.with_name(stem.name + ".png"))


def file_name(label: str) -> str:
    """A class name or caption as part of a file name."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in label)[:40]


if __name__ == "__main__":
    main(sys.argv[1:])
