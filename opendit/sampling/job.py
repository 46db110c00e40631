"""Describe a run of sample.py for its parts on disk: everything that decides a sample, by name."""

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.config.approximations import parse_cache
from opendit.encoders.conditioner import CaptionConditioner
from opendit.encoders.vae import FrozenVAE
from opendit.encoders.video_vae import FrameCodec, VideoCodec
from opendit.models import DiT
from opendit.parallel.layout import Layout
from opendit.parallel.tensor import layout_of
from opendit.sampling.parts import Job, samples_a_part
from opendit.sampling.prepare import SamplingRun

GRID_PICTURES, SHEET_CLIPS = 100, 16  # at most; the single files and the .npz hold all
ODD = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed number: multiples of it are spread over all bits
# Words that are summed up at once: as many as a CPU's own caches hold, or as many as keep a GPU busy.
WORDS_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 22}


def job_of(sampling: SamplingRun, weights: str) -> Job:
    """The job of a run, with parts of the size that a first start gives them. weights: of
    :func:`digest_of_weights`."""
    shape, count = pixel_shape(sampling), len(sampling.choices)
    size = samples_a_part(count, sampling.flags.batch_size, int(torch.tensor(shape).prod()))
    return Job(settings_of(sampling, weights), count, kept(sampling), shape, size)


def kept(sampling: SamplingRun) -> int:
    """Return how many of the first samples are needed again after they are drawn: all for an .npz, otherwise those on
    the sheet."""
    if sampling.flags.npz:
        return len(sampling.choices)
    return SHEET_CLIPS if sampling.model.config.is_video else GRID_PICTURES


def pixel_shape(sampling: SamplingRun) -> tuple[int, ...]:
    """(H, W, 3) of a picture, (T, H, W, 3) of a clip; other channels than 1 or 3 as the model has them."""
    codec, (*frames, height, width) = sampling.codec, sampling.size
    inner = codec.codec if isinstance(codec, FrameCodec) else codec
    channels = inner.latent_channels
    if isinstance(inner, FrozenVAE):
        config = inner.vae.config
        channels = config.get("out_channels", 3) // (config.get("patch_size") or 1) ** 2
    if frames and isinstance(codec, VideoCodec):
        frames = [(frames[0] - 1) * codec.temporal_downscale + 1]
    return (*frames, height * codec.downscale, width * codec.downscale, 3 if channels == 1 else channels)


def settings_of(sampling: SamplingRun, weights: str | None = None) -> dict[str, str]:
    """Everything that decides a sample or what is kept of it: what differs in two starts is shown by these names.
    weights: of :func:`digest_of_weights`, where that is known.

    The number of processes and ``--batch_size`` are not among them: they change a sample by the rounding of matrix
    products only.
    """
    flags, objective, conditioner = sampling.flags, sampling.objective, sampling.conditioner
    codec = sampling.codec.codec if isinstance(sampling.codec, FrameCodec) else sampling.codec
    vae = tensors_digest(codec.vae.state_dict())[:16] if isinstance(codec, FrozenVAE) else ""
    encoder = conditioner.encoder if isinstance(conditioner, CaptionConditioner) else None
    choices = sampling.choices.numpy().tobytes(), json.dumps(sampling.names)  # which writes any text in ASCII
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
        "--cache": parse_cache(flags.cache) if flags.cache else None,
        "--seed": flags.seed,
        "--num_samples": len(sampling.choices),
        "classes or prompts": hash_parts(*choices)[:16],
        "given frames": None if sampling.given is None else tensors_digest({"given": sampling.given})[:16],
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
    """Hash the model's whole tensors. Collective over the ranks that divide them."""
    model, mesh = sampling.model, sampling.mesh
    divided = mesh.tp_size > 1
    return tensors_digest(_WholeTensors(model, layout_of(model, mesh)) if divided else model.state_dict())[:16]


class _WholeTensors(Mapping[str, Tensor]):
    """A model's tensors, of which ranks have parts; each is gathered when it is asked for."""

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
    """A hash of tensors' names, types, shapes and contents, computed where they are.

    The contents count as the sum, modulo 2^64, of word times an odd number that depends on its place: it keeps no
    secret, but any one word that is another makes another sum. A GPU takes milliseconds where SHA-256 takes seconds.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        words = tensor.detach().contiguous().flatten().view(INTEGERS[tensor.element_size()])
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {weighted_sum(words)}\n".encode())
    return digest.hexdigest()


def weighted_sum(words: Tensor) -> int:
    """The sum of word i times (i + 1) * ODD | 1, modulo 2^64.

    For an even s, (s + i + 1) * ODD | 1 is s * ODD + ((i + 1) * ODD | 1): the same factors serve all parts, and so
    does their memory."""
    size, device = WORDS_AT_ONCE[words.device.type], words.device
    factors = torch.arange(1, 1 + min(size, len(words)), device=device) * ODD | 1
    products, total = torch.empty_like(factors), torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(words), size):
        part = words[start : start + size]
        total += torch.mul(part, factors[: len(part)], out=products[: len(part)]).sum()
        total += part.sum(dtype=torch.int64) * _signed(start * ODD)
    return int(total.item())


def _signed(value: int) -> int:
    """A number modulo 2^64, as int64 has it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
