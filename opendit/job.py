"""From flags to everything a training run needs, checked before any weight of the model is made."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import opendit
from opendit.checkpoint import find_checkpoint, read_state, run_folder
from opendit.config import TrainConfig, to_dict
from opendit.data import BatchSchedule, DataError, LatentDataset, MediaDataset, build_dataset
from opendit.encoders.vae import ImageCodec, codec_geometry, load_codec, sample_moments
from opendit.kernels.select import KernelChoice, select_kernels
from opendit.models import DiTConfig, model_config
from opendit.models.pretrained import Weights, find_weights, infer_config, read_weights
from opendit.models.zoo import patch_size
from opendit.parallel.engine import PRECISIONS
from opendit.parallel.mesh import Mesh
from opendit.random import Stream, normal

USER_ERRORS = (ValueError, OSError, DataError)  # of prepare(): the message is enough, no traceback needed


@dataclass
class Job:
    """A checked training run."""

    flags: TrainConfig
    mesh: Mesh
    dataset: MediaDataset
    schedule: BatchSchedule
    model_config: DiTConfig
    codec: ImageCodec | None  # None: training on cached latents whose VAE is not at hand
    vae: str
    kernels: KernelChoice
    folder: Path
    resume: Path | None
    first_step: int
    last_step: int
    initial: Weights | None
    notes: list[str]

    def latents(self, x: Tensor, step: int, index: Tensor) -> Tensor:
        """What the model learns from a batch of the data set: (B, C, h, w) fp32 on the device.

        Args:
            x: (B, ...) the data set's items on the device.
            index: (B,) positions in the global batch; the VAE's noise is keyed by them.
        """
        if isinstance(self.dataset, LatentDataset):
            scale = (self.dataset.scaling_factor, self.dataset.shift_factor)
            return sample_moments(x, self._vae_noise(step, index), *scale)
        return self.codec.encode(x, None if self.vae == "none" else self._vae_noise(step, index))

    def _vae_noise(self, step: int, index: Tensor) -> Tensor:
        shape = (self.model_config.in_channels, *self.model_config.input_size)
        return normal(self.flags.global_seed, step, index, Stream.VAE, shape)

    def info(self) -> dict:
        """What this run's weights files say of themselves."""
        return {
            "model": self.flags.model,
            "config": self.model_config.to_dict(),
            "class_names": self.dataset.class_names,
            "vae": self.vae if self.vae in ("none", "ema", "mse") else str(Path(self.vae).resolve()),
            "image_size": self.flags.image_size,
        }


def prepare(flags: TrainConfig, mesh: Mesh) -> Job:
    """Checks everything that can be wrong with a run, and loads its data set and VAE.

    Raises:
        ValueError, OSError, DataError: with a message that names the flag and the fix.
    """
    notes = flags.check(mesh.world_size, mesh.device.type == "cuda")
    dataset = build_dataset(
        flags.data_path,
        flags.image_size,
        seed=flags.global_seed,
        random_flip=flags.random_flip,
        max_bad=flags.max_bad,
    )
    num_classes = flags.num_classes or dataset.num_classes
    if num_classes < dataset.num_classes:
        raise ValueError(
            f"--num_classes {num_classes}: --data_path {flags.data_path} has {dataset.num_classes} classes, "
            f"labels 0 to {dataset.num_classes - 1}; leave the flag out or raise it"
        )
    schedule = BatchSchedule(len(dataset), flags.batch_size * mesh.dp_size * flags.grad_accumulation, flags.global_seed)
    vae, channels, size = _latent_geometry(flags, dataset)
    config = model_config(flags.model, input_size=size, in_channels=channels, num_classes=num_classes)
    resume = find_checkpoint(flags.load, flags.outputs, flags.model) if flags.load else None
    if flags.load and resume is None:
        notes.append(f"--load latest: no run of {flags.model} under {flags.outputs}, starting afresh")
    first_step = _check_resume(resume, config) if resume else 0
    initial = _check_pretrained(flags, config) if flags.pretrained and not resume else None
    codec = _load_codec(flags, dataset, vae, mesh, notes)
    dtype = PRECISIONS[flags.mixed_precision]
    kernels = select_kernels(flags, mesh.device, dtype, config.hidden_size // config.num_heads, config.tokens)
    folder = resume.parent.parent if resume else run_folder(flags.outputs, flags.model) if mesh.is_main else None
    folder = Path(mesh.broadcast_object(str(folder)))
    last_step = min(flags.epochs * schedule.steps_per_epoch, flags.max_steps or flags.epochs * len(dataset))
    if first_step >= last_step:
        notes.append(f"{resume} is already at step {first_step} of {last_step}; raise --max_steps or --epochs to go on")
    return Job(
        flags=flags,
        mesh=mesh,
        dataset=dataset,
        schedule=schedule,
        model_config=config,
        codec=codec,
        vae=vae,
        kernels=kernels,
        folder=folder,
        resume=resume,
        first_step=first_step,
        last_step=last_step,
        initial=initial,
        notes=notes,
    )


def _latent_geometry(flags: TrainConfig, dataset: MediaDataset) -> tuple[str, int, tuple[int, int]]:
    """(the VAE's name, latent channels, latent height and width); raises ValueError if sizes don't divide."""
    patch = patch_size(flags.model)
    if isinstance(dataset, LatentDataset):
        vae = flags.vae if "vae" in flags.given else dataset.vae
        channels, (height, width) = dataset.sample_shape[0] // 2, dataset.sample_shape[1:]
        if height % patch or width % patch:
            raise ValueError(f"--data_path: latents of {height} x {width} don't divide by the patch of {flags.model}")
        return vae, channels, (height, width)
    channels, downscale = codec_geometry(flags.vae, dataset.sample_shape[0])
    multiple = downscale * patch
    if flags.image_size % multiple:
        raise ValueError(
            f"--image_size {flags.image_size} does not divide by {multiple} (--vae {flags.vae}: {downscale}, patch of "
            f"{flags.model}: {patch}); use {max(multiple, round(flags.image_size / multiple) * multiple)}"
        )
    side = flags.image_size // downscale
    return flags.vae, channels, (side, side)


def _check_resume(resume: Path, config: DiTConfig) -> int:
    from opendit.checkpoint import checkpoint_config

    found = DiTConfig.from_dict(checkpoint_config(resume))
    if found != config:
        differences = [
            f"{key} {value} there, {config.to_dict()[key]} here"
            for key, value in found.to_dict().items()
            if value != config.to_dict()[key]
        ]
        raise ValueError(f"--load: {resume} is a checkpoint of another model: {'; '.join(differences)}")
    return read_state(resume)["step"]


def _check_pretrained(flags: TrainConfig, config: DiTConfig) -> Weights:
    weights = read_weights(find_weights(flags.pretrained))
    found = weights.config or infer_config(weights.state, flags.model, weights.path)
    if found != config:
        raise ValueError(f"--pretrained {flags.pretrained} holds {found}; this run needs {config}")
    return weights


def _load_codec(flags, dataset, vae: str, mesh: Mesh, notes: list[str]) -> ImageCodec | None:
    # fp16 keeps Stable Diffusion's VAE within 0.14 % of fp32, bf16 within 1.2 % (docs/log.md).
    dtype = torch.float16 if mesh.device.type == "cuda" else torch.float32
    try:
        return load_codec(vae, channels=dataset.sample_shape[0], device=mesh.device, dtype=dtype)
    except (ValueError, OSError) as error:
        if not isinstance(dataset, LatentDataset) or "vae" in flags.given:
            raise
        notes.append(f"no sample grids: the latents' VAE can't be loaded ({error})")
        return None


def write_config(job: Job) -> None:
    """config.json of the run folder: every flag, and what was made of them."""
    content = {
        "opendit": opendit.__version__,
        "torch": torch.__version__,
        "world_size": job.mesh.world_size,
        "flags": to_dict(job.flags),
        "model_config": job.model_config.to_dict(),
        "steps_per_epoch": job.schedule.steps_per_epoch,
        "last_step": job.last_step,
    }
    (job.folder / "config.json").write_text(json.dumps(content, indent=1))
