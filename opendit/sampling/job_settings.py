"""Settings that identify a sampling job, so that it can resume: all values that determine a sample, by name."""

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.config.sample import parse_cache
from opendit.encoders.conditioner import CaptionConditioner
from opendit.encoders.vae import FrozenVAE
from opendit.encoders.video_vae import FrameCodec, VideoCodec
from opendit.models.dit import DiT
from opendit.parallel.layout import Layout
from opendit.parallel.tensor import layout_of
from opendit.sampling.sample_cache import SamplingJob, samples_a_part
from opendit.sampling.sampling_run import SamplingRun

# maximum number of samples on the sheet; the single files and the .npz hold all samples
GRID_PICTURES, SHEET_CLIPS = 100, 16
ODD = -7046029254386353131  # an odd int64 near 2^64 / golden ratio, so that its multiples change all bits
# Number of words to sum at a time: small enough for the caches of a CPU, large enough to keep a GPU busy.
WORDS_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 22}


def job_of(sampling: SamplingRun, weights: str) -> SamplingJob:
    """Return the sampling job of a run. The size of its parts is that of a new job. weights: result of
    :func:`digest_of_weights`."""
    shape, count = pixel_shape(sampling), len(sampling.choices)
    size = samples_a_part(count, sampling.flags.batch_size, int(torch.tensor(shape).prod()))
    return SamplingJob(settings_of(sampling, weights), count, kept(sampling), shape, size)


def kept(sampling: SamplingRun) -> int:
    """Return how many samples, counted from the first, must stay in the cache until the end. For an .npz these are all
    samples, otherwise those on the sheet."""
    if sampling.flags.npz:
        return len(sampling.choices)
    return SHEET_CLIPS if sampling.model.config.is_video else GRID_PICTURES


def pixel_shape(sampling: SamplingRun) -> tuple[int, ...]:
    """Return the shape of a decoded sample: (H, W, 3), or (T, H, W, 3) for a clip.

    One channel of the VAE becomes 3. Other numbers of channels do not change.
    """
    codec, (*frames, height, width) = sampling.codec, sampling.size
    inner = codec.codec if isinstance(codec, FrameCodec) else codec
    channels = inner.latent_channels
    if isinstance(inner, FrozenVAE):
        config = inner.vae.config
        channels = config.get("out_channels", 3)
        # some VAEs count the channels of a patch of pixels instead of a pixel
        channels = channels // (config.get("patch_size") or 1) ** 2 or channels
    if frames and isinstance(codec, VideoCodec):
        frames = [(frames[0] - 1) * codec.temporal_downscale + 1]
    return (*frames, height * codec.downscale, width * codec.downscale, 3 if channels == 1 else channels)


def settings_of(sampling: SamplingRun, weights: str | None = None) -> dict[str, str]:
    """Return all settings that affect a sample or the stored files, as name -> value. Messages show these names.

    The number of processes and ``--batch_size`` are left out, because they change a sample only by the rounding of
    matrix products.

    weights: result of :func:`digest_of_weights`, if it is known.
    """
    flags, objective, conditioner = sampling.flags, sampling.objective, sampling.conditioner
    codec = sampling.codec.codec if isinstance(sampling.codec, FrameCodec) else sampling.codec
    vae = tensors_digest(codec.vae.state_dict())[:16] if isinstance(codec, FrozenVAE) else ""
    encoder = conditioner.encoder if isinstance(conditioner, CaptionConditioner) else None
    choices = sampling.choices.numpy().tobytes(), json.dumps(sampling.names)  # json turns any text into ASCII
    settings = {
        "weights": weights or digest_of_weights(sampling),
        "model": hash_parts(json.dumps(sampling.model.config.to_dict(), sort_keys=True))[:16],
        "objective": json.dumps(objective.to_dict(), sort_keys=True),
        "--sampler": objective.choose(flags.sampler),
        "--num_sampling_steps": flags.num_sampling_steps,
        "--cfg_scale": f"{flags.cfg_scale:g}",
        "--cfg_channels": flags.cfg_channels,
        "--cfg_interval": " ".join(f"{level:g}" for level in flags.cfg_interval) or None,
        "--guidance_every": flags.guidance_every if flags.guidance_every > 1 else None,
        "--guidance_by": flags.guidance_by if flags.guidance_by != "null" else None,
        "--cache": parse_cache(flags.cache) if flags.cache else None,
        "--seed": flags.seed,
        "--num_samples": len(sampling.choices),
        "classes or prompts": hash_parts(*choices)[:16],
        "given frames": None
        if sampling.conditioning_frames is None
        else tensors_digest({"given": sampling.conditioning_frames})[:16],
        "--negative_prompt": json.dumps(flags.negative_prompt) if flags.negative_prompt is not None else None,
        "text encoder": encoder and tensors_digest(encoder.model.state_dict())[:16],
        "size of latents": " x ".join(map(str, sampling.size)),
        "--mixed_precision": flags.mixed_precision,
        "kernels": sampling.kernels.ops_note,
        "attention": sampling.kernels.attention_note,
        "--vae": vae or codec.name,
        "--vae_tiling": "on" if flags.vae_tiling else "off",
        "--vae_compile": "on" if flags.vae_compile else None,
        "frames a second": f"{sampling.fps:g}" if sampling.model.config.is_video else None,
        "--save_png": "on" if flags.save_png else "off",
        "--npz": "given" if flags.npz else "not given",
    }
    return {name: str(value)[:4096] for name, value in settings.items() if value is not None}


def digest_of_weights(sampling: SamplingRun) -> str:
    """Hash the model's full tensors. This is a collective operation of the ranks that hold parts of the model."""
    model, mesh = sampling.model, sampling.mesh
    divided = mesh.tp_size > 1
    return tensors_digest(_GatheredTensors(model, layout_of(model, mesh)) if divided else model.state_dict())[:16]


class _GatheredTensors(Mapping[str, Tensor]):
    """The full tensors of a model that is divided over ranks. Each tensor is gathered when it is read."""

    def __init__(self, model: DiT, layout: Layout):
        self._own, self._layout = model.state_dict(), layout

    def __getitem__(self, name: str) -> Tensor:
        return self._layout.gather(name, self._own[name]) if name in self._layout.shapes else self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


@torch.no_grad()
def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash tensors' names, dtypes, shapes and contents, on their device.

    The hash covers contents through a sum modulo 2^64 of every word times an odd number that depends on the word's
    position. The sum is not cryptographic, but a change of any one word changes it. A GPU takes milliseconds for the
    sum; SHA-256 takes seconds.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        words = tensor.detach().contiguous().flatten().view(INTEGERS[tensor.element_size()])
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {weighted_sum(words)}\n".encode())
    return digest.hexdigest()


def weighted_sum(words: Tensor) -> int:
    """Return the sum over i of words[i] * ((i + 1) * ODD | 1), modulo 2^64.

    The words are summed in pieces. For an even start s, (s + i + 1) * ODD | 1 equals s * ODD + ((i + 1) * ODD | 1), so
    all pieces use the same tensor of factors.
    """
    size, device = WORDS_AT_ONCE[words.device.type], words.device
    factors = torch.arange(1, 1 + min(size, len(words)), device=device) * ODD | 1
    products, total = torch.empty_like(factors), torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(words), size):
        part = words[start : start + size]
        total += torch.mul(part, factors[: len(part)], out=products[: len(part)]).sum()
        total += part.sum(dtype=torch.int64) * _signed(start * ODD)
    return int(total.item())


def _signed(value: int) -> int:
    """Return the int64 value that equals ``value`` modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
