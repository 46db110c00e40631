"""Draws pictures from a checkpoint: a labelled grid, single PNGs, and on request an .npz for FID tools.

    python sample.py --ckpt outputs/000-DiT-XL-2 --class_labels 207 360 --cfg_scale 4
    python sample.py --model DiT-XL/2 --image_size 256 --ckpt ./model.pt            (Meta's weights)
    torchrun --standalone --nproc_per_node=8 sample.py --ckpt ... --num_samples 50000 --npz fid.npz

Several processes split the samples; the noise of a sample depends on --seed and its number only.
"""

import sys
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from opendit.checkpoint import newest_run
from opendit.config import SampleConfig, parse
from opendit.encoders.vae import ImageCodec, codec_geometry, load_codec
from opendit.kernels.select import KernelChoice, select_kernels
from opendit.models import DiT
from opendit.models.pretrained import load_pretrained
from opendit.monitor import print_block
from opendit.parallel.engine import PRECISIONS
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.sampling import preview_labels, sample_in_batches, save_grid

GRID_PICTURES = 100  # at most; the single pictures and the .npz hold all


@dataclass
class Job:
    """A checked sampling job."""

    flags: SampleConfig
    mesh: Mesh
    model: DiT
    codec: ImageCodec
    kernels: KernelChoice
    labels: Tensor
    names: list[str]
    source: Path
    notes: list[str]


def main(argv: list[str]) -> None:
    flags = parse(SampleConfig, argv)
    mesh = init_mesh()
    try:
        job = prepare(flags, mesh)
    except (ValueError, OSError) as error:
        if mesh.local_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        close_mesh()
        sys.exit(2)
    try:
        run(job)
    finally:
        close_mesh()


def prepare(flags: SampleConfig, mesh: Mesh) -> Job:
    """Loads the model and its VAE. Raises ValueError or OSError with a message for the user."""
    notes = flags.check(mesh.device.type == "cuda")
    if flags.npz and not Path(flags.npz).resolve().parent.is_dir():
        raise ValueError(f"--npz {flags.npz}: its folder does not exist")
    ckpt = flags.ckpt
    if ckpt == "latest":
        found = newest_run(flags.outputs, flags.model)
        if found is None:
            raise ValueError(f"--ckpt latest: no run with a checkpoint under {flags.outputs}; give a path")
        ckpt = found
    model, weights = load_pretrained(ckpt, flags.model, flags.weights)
    config = model.config
    vae = flags.vae or weights.info.get("vae", "ema")
    channels, downscale = codec_geometry(vae, config.in_channels)
    size = config.input_size[0] * downscale
    if channels != config.in_channels:
        raise ValueError(f"--vae {vae} has {channels} channels, the model {config.in_channels}; name the model's VAE")
    if flags.image_size not in (None, size):
        raise ValueError(f"--image_size {flags.image_size}: {weights.path} draws {size} x {size}; leave the flag out")
    dtype = PRECISIONS[flags.mixed_precision]
    kernels = select_kernels(flags, mesh.device, dtype, config.hidden_size // config.num_heads, config.tokens)
    positions = model.pos_embed
    model.to(mesh.device, dtype).eval().use(ops=kernels.ops, attend=kernels.attend)
    model.pos_embed = positions.to(mesh.device)  # stays fp32
    half = torch.float32 if flags.mixed_precision == "fp32" else torch.float16  # closer to fp32 than bf16 for a VAE
    codec = load_codec(vae, channels=config.in_channels, device=mesh.device, dtype=half)
    labels = choose_labels(flags, config.num_classes)
    names = weights.info.get("class_names") or []
    names += [str(i) for i in range(len(names), config.num_classes)]
    return Job(flags, mesh, model, codec, kernels, labels, names, weights.path, notes)


def choose_labels(flags: SampleConfig, num_classes: int) -> Tensor:
    """The label of every sample, (N,) int64. Raises ValueError for labels the model does not have."""
    bad = [label for label in flags.class_labels if not 0 <= label < num_classes]
    if bad:
        raise ValueError(f"--class_labels {bad[0]}: the model has labels 0 to {num_classes - 1}")
    if flags.class_labels:
        given = torch.tensor(flags.class_labels)
        return given[torch.arange(flags.num_samples or len(given)) % len(given)]
    return preview_labels(num_classes, flags.num_samples or min(16, 2 * num_classes))


def run(job: Job) -> None:
    flags, mesh = job.flags, job.mesh
    output = Path(flags.output)
    announce(job)
    count = len(job.labels)
    mine = torch.arange(count).tensor_split(mesh.world_size)[mesh.rank]
    progress = tqdm(total=len(mine), unit="picture", disable=not mesh.is_main, dynamic_ncols=True)
    # Through a file: with 50,000 pictures the .npz does not fit in every process's memory.
    side = job.model.config.input_size[0] * job.codec.downscale
    part_path = output / f".part-{mesh.rank:04d}.npy"
    part = np.lib.format.open_memmap(part_path, "w+", np.uint8, (max(1, len(mine)), side, side, 3))
    torch.set_float32_matmul_precision("highest")
    batches = sample_in_batches(
        job.model,
        job.codec,
        job.labels[mine],
        mine,
        flags.batch_size,
        seed=flags.seed,
        steps=flags.num_sampling_steps,
        sampler=flags.sampler,
        cfg_scale=flags.cfg_scale,
        cfg_channels=flags.cfg_channels,
    )
    for index, pictures in batches:
        for number, picture in zip(index.tolist(), pictures, strict=True):
            part[number - mine[0]] = picture
            if flags.save_png:
                save_png(output / f"{number:06d}-{file_name(job.names[job.labels[number]])}.png", picture)
        progress.update(len(index))
    progress.close()
    part.flush()
    mesh.barrier()
    if mesh.is_main:
        collect(job, output)
    mesh.barrier()
    part_path.unlink()


def collect(job: Job, output: Path) -> None:
    """Rank 0: the grid and the .npz from all ranks' parts."""
    flags, count, world = job.flags, len(job.labels), job.mesh.world_size
    sizes = [len(part) for part in torch.arange(count).tensor_split(world)]
    parts = [np.load(output / f".part-{rank:04d}.npy", mmap_mode="r")[:size] for rank, size in enumerate(sizes) if size]
    shown = np.stack(list(islice(chain.from_iterable(parts), GRID_PICTURES)))
    kinds = len(set(job.labels.tolist()))  # a column a class, where they fit
    captions = [job.names[label] for label in job.labels[: len(shown)].tolist()]
    save_grid(output / "grid.png", shown, captions, columns=kinds if 4 <= kinds <= 12 else None)
    rows = {"grid": str(output / "grid.png")}
    if flags.save_png:
        rows["pictures"] = f"{count} in {output}"
    if flags.npz:
        np.savez(flags.npz, arr_0=np.concatenate(parts), arr_1=job.labels.numpy())
        rows["npz"] = f"{flags.npz}: arr_0 {count} x {parts[0].shape[1]} x {parts[0].shape[2]} x 3, arr_1 labels"
    print_block("\nDone", rows)


def announce(job: Job) -> None:
    if not job.mesh.is_main:
        return
    flags, device = job.flags, job.mesh.device
    processor = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    rows = {
        "weights": str(job.source),
        "model": f"{sum(p.numel() for p in job.model.parameters()) / 1e6:.1f} M parameters, {flags.mixed_precision}",
        "sampler": f"{flags.sampler}, {flags.num_sampling_steps} steps, guidance {flags.cfg_scale}",
        "vae": job.codec.name,
        "attention": job.kernels.attention_note,
        "kernels": job.kernels.ops_note,
        "processes": f"{job.mesh.world_size} ({processor})",
        "pictures": f"{len(job.labels)}, seed {flags.seed}",
    }
    print_block("OpenDiT sampling", rows)
    for note in job.notes:
        print(f"note: {note}", flush=True)


def save_png(path: Path, picture: np.ndarray) -> None:
    from PIL import Image

    Image.fromarray(picture).save(path)


def file_name(label: str) -> str:
    """A class name as part of a file name."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in label)[:40]


if __name__ == "__main__":
    main(sys.argv[1:])
