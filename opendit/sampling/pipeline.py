# pyright: standard
"""``opendit.load`` and ``Pipeline``: draw pictures or clips from a checkpoint, in Python (docs/python.md)."""

import contextlib
import math
import numbers
import os
import re
import shlex
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from opendit.checkpoint.run_folders import checkpoint_at
from opendit.common.hub import fetched
from opendit.config.checks import check_lora_weight, path_and_weight
from opendit.config.components import SpeedFlags
from opendit.config.names import BASE_PRECISIONS
from opendit.config.sample import Approximations
from opendit.diffusion.objectives.base import Objective
from opendit.encoders.conditioner import CaptionConditioner, Conditioner, PublishedConditioner, class_number
from opendit.encoders.pictures import to_uint8
from opendit.encoders.vae import ImageCodec
from opendit.encoders.video_vae import VideoCodec
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import Condition, same_length
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.families.public_config import embedded_guidance
from opendit.models.zoo import Weights
from opendit.parallel.engines import PRECISIONS
from opendit.sampling import model_loading as loading
from opendit.sampling.conditioning_frames import encode_frames, encode_pictures, frames_of_samples, with_pictures
from opendit.sampling.output_files import VideoClip
from opendit.sampling.sampling_engine import SamplingEngine

Place = str | os.PathLike[str]
LoraArgument = Place | Sequence[Place | tuple[Place, float]] | None
ENGINES = 2  # engines with CUDA graphs in a pipeline, at most
MOST_SAMPLES, MOST_STEPS, MOST_GUIDANCE, MOST_SEED = 10**7, 1000, 1000.0, 2**63 - 1  # as sample.py's flags
# sample.py's flags -> arguments with different names
ARGUMENTS = {
    "ckpt": "path",
    "mixed_precision": "precision",
    "cfg_scale": "guidance",
    "cfg_interval": "interval",
    "cfg_channels": "guided_channels",
    "num_sampling_steps": "steps",
    "negative_prompt": "negative",
    "second_ckpt": "second",
    "image_size": "size",
    "num_frames": "frames",
}


def weighted(lora: LoraArgument) -> list[tuple[Path, float]]:
    """Parse :func:`load`'s argument ``lora``; return (path, weight) pairs. Raises ValueError for an invalid weight."""
    found = []
    for each in [lora] if isinstance(lora, str | os.PathLike) else lora or ():
        path, weight = each if isinstance(each, tuple) else path_and_weight(os.fspath(each))
        check_lora_weight(path, weight)
        found.append((Path(path).expanduser(), float(weight)))
    return found


def load(
    path: str | os.PathLike[str],
    *,
    outputs: str | os.PathLike[str] = "./outputs",
    device: str | torch.device | None = None,
    precision: str | None = None,
    weights: str = "ema",
    model: str | None = None,
    num_classes: int | None = None,
    lora: LoraArgument = None,
    second: str | os.PathLike[str] | None = None,
    vae: str | None = None,
    vae_tiling: bool = False,
    vae_compile: bool = False,
    text_encoder: str | None = None,
    text_precision: str = "bf16",
    fp8: bool = False,
    kernels: bool = True,
    download: bool = False,
) -> "Pipeline":
    """Load a checkpoint, ready to draw from.

    Args:
        path: a run's folder (its newest intact checkpoint), a checkpoint, a .safetensors file, Meta's .pt, a folder of
            diffusers' ``DiTPipeline``, or "latest": the newest run under ``outputs`` that has a checkpoint.
        device: None for the GPU, or the CPU if there is none.
        precision: of the network: "bf16", "fp16" or "fp32"; None for bf16 on a GPU and fp32 on a CPU.
        weights: which weights of a checkpoint to load: "ema" or "model".
        model: name of the model, such as "DiT-XL/2", if the file does not name it (Meta's .pt).
        num_classes: number of classes, if the file does not store it.
        lora: LoRAs to merge into the weights: a path, or a list of paths and (path, weight) pairs. A path may end in a
            weight, as in ":0.8". Paths are runs of ``train.py --lora`` or, for public models, also other LoRA files.
        second: for Wan 2.2 A14B (two networks), a run with the network that ``path`` does not contain.
        vae: "ema", "mse", "none" or a folder; None for the VAE that the checkpoint names.
        vae_tiling: decode tile by tile, for large pictures and long clips.
        vae_compile: compile the decoder of pictures and frames.
        text_encoder: "clip", "t5" or a folder; None for the text encoder that the checkpoint names.
        text_precision: how the weights of frozen text encoders are stored: "bf16" (in half precision), "fp8", "int8" or
            "nf4".
        fp8: run the blocks' linear layers in FP8 (Hopper and newer).
        kernels: use the fused kernels and the fastest attention, on GPUs that support them.
        download: download the public model that ``path`` names on the hub, OWNER/NAME or OWNER/NAME@REVISION.

    Raises FileNotFoundError if there is no such checkpoint, and ValueError if the checkpoint is damaged or an argument
    does not fit. Warns if a newer checkpoint is damaged, the number of classes is assumed, or the GPU lacks FP8.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = precision or ("fp32" if device.type == "cpu" else "bf16")
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision}: must be one of {', '.join(PRECISIONS)}")
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("precision fp16 needs a GPU: use fp32")
    if text_precision not in BASE_PRECISIONS:
        raise ValueError(f"text_precision {text_precision}: must be one of {', '.join(BASE_PRECISIONS)}")
    if weights not in ("ema", "model"):
        raise ValueError(f"weights {weights}: must be ema or model")
    with arguments_named():
        loaded = loading.load_model(
            checkpoint_at(fetched(os.fspath(path), "--ckpt", True) if download else path, outputs, model),
            loading.VaeLoader(device, precision, vae_tiling, vae_compile),
            name=model,
            which=weights,
            lora=weighted(lora),
            second=None if second is None else Path(second),
            num_classes=num_classes,
            vae=vae,
        )
        network, found, notes = loaded.network, loaded.weights, loaded.notes
        config, dtype = network.config, PRECISIONS[precision]
        loading.check_text_encoder(text_encoder, text_precision, config, found)
        loading.latent_size(config, found, loaded.vae)
        if fp8:
            config.check_speed(True, "none")
        on = kernels and device.type == "cuda"
        switches = SpeedFlags(on, on, on, fp8)
        chosen = select_kernels(switches, device, dtype, config.head_dim, config.tokens, inference=True)
        network.eval().requires_grad_(False)
        network.use(ops=chosen.ops, attend=chosen.attend)
        codec = loaded.codec()
        conditioner = loading.make_conditioner(config, found, text_encoder, device, precision, text_precision)
    if fp8 and not chosen.ops.float8:
        notes.append(chosen.ops_note)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    described = Weights({}, found.path, found.info)  # without the tensors: the network holds them
    notes += [f"kernels: {chosen.ops_note}", f"attention: {chosen.attention_note}"]
    return Pipeline(network, loaded.objective, codec, conditioner, described, precision, notes)


@dataclass(eq=False, repr=False)
class Pipeline:
    """A model, ready to draw. :func:`load` returns a Pipeline; call the Pipeline to draw.

        pipe = opendit.load("outputs/000-DiT-XL-2")
        pictures = pipe([207, 360], steps=50, guidance=4, seed=0)

    Attributes:
        codec: converts between latents and pixels.
        conditioner: converts classes or captions to conditions.
        weights: the path (``path``) and the metadata (``info``) of the weights' file.
        notes: remarks about the loading, one line each.
        engines: settings -> engine, for the most recently used engines and their CUDA graphs.
    """

    model: DiT
    objective: Objective
    codec: ImageCodec | VideoCodec
    conditioner: Conditioner
    weights: Weights
    precision: str
    notes: list[str]
    engines: OrderedDict[tuple[Any, ...], SamplingEngine] = field(default_factory=OrderedDict, init=False)

    @property
    def config(self) -> DiTConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def samplers(self) -> tuple[str, ...]:
        """Names of the samplers that can draw from this model, the default one first."""
        return self.objective.samplers

    @property
    def class_names(self) -> list[str]:
        """Names of all classes. The list is empty for a model of captions."""
        return [] if self.config.text else loading.class_names(self.config, self.weights)

    def __repr__(self) -> str:
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        draws = "clips" if self.config.is_video else "pictures"
        draws += " of captions" if self.config.text else f" of {self.config.num_classes} classes"
        name = self.weights.info.get("model", self.config.kind)
        return f"Pipeline({name}, {millions:.1f} M parameters, draws {draws}, {self.precision} on {self.device})"

    def __call__(
        self,
        what: int | str | Sequence[int | str],
        *,
        steps: int | None = None,
        guidance: float | None = None,
        seed: int = 0,
        sampler: str | None = None,
        interval: tuple[float, float] | None = None,
        negative: str | None = None,
        guided_channels: int | None = None,
        guidance_every: int = 1,
        guidance_by: str = "null",
        cache: str | None = None,
        size: int | tuple[int, int] | None = None,
        frames: int | None = None,
        image: Any = None,
        clip: Any = None,
        clip_frames: int | None = None,
        batch_size: int = 32,
        progress: bool = True,
        callback: Callable[[int, Tensor], None] | None = None,
    ) -> list[Any]:
        """Draw one picture or clip for each element of ``what``. The noise of sample i depends only on ``seed`` and i.
        sample.py draws the same pictures from the same seed.

        Args:
            what: a list of class numbers and names, or of captions; or one name or caption. A bare number N draws N
                samples without a class or caption; a single class number must be a list, ``[207]``.
            steps: number of sampler steps; None for 50, for 2 with MeanFlow, or for a public model's usual number.
            guidance: scale of classifier-free guidance; None for 4, or for 1 with MeanFlow. 1 turns guidance off and
                halves the computation. For a public model, scale and default are as in its diffusers pipeline.
            sampler: one of ``samplers``; None for the model's default.
            interval: (low, high), guide only at noise levels sigma between these values; None for all levels.
            negative: a caption to guide away from, instead of the empty caption.
            guidance_every: an approximation: evaluate guidance's unconditional half only in every N-th step.
            guidance_by: the prediction to guide away from. "null": with the null class or caption. "route": like
                "null", but without the blocks of the fused route. "FIRST:LAST:SHARE": with the sample's class or
                caption, but a share of the tokens skips these blocks.
            cache: an approximation that skips blocks in some steps: "taylor:K[:ORDER]" or "first_block[:THRESHOLD]";
                see docs/sampling.md.
            guided_channels: guide only these first channels of the latents; None for all (Meta's published results use
                3).
            size: (height, width) or a side in pixels. A public model draws any size, other models only one.
            frames: number of frames of a clip; None for the number that the model was trained on.
            image: first frame, for a model with conditioning frames: a file, a ``PIL.Image``, uint8 (H, W, 3), or a
                list. Samples use the elements of a list in turn.
            clip: clip to continue, for a model with conditioning frames: a file, a :class:`VideoClip`, uint8 (T, H, W,
                3), or a list. Samples begin with the clip's last frames.
            clip_frames: number of frames to use from ``clip``; None for the number used in training, or, if that number
                varied, half of the frames to draw.
            batch_size: number of samples to draw at a time.
            progress: show a progress bar.
            callback: ``callback(step, latents)`` is called after every step of every batch. step: number of finished
                steps. latents: (B, C, ...), not to be changed. An exception ends the sampling.

        Returns ``PIL.Image``s, or :class:`VideoClip`s for a model of clips. Raises ValueError if a class is unknown
        (the message names the most similar class), or an argument does not fit.
        """
        check_number("batch_size", batch_size, 1, 65_536, int)
        usual = loading.usual_settings(self.config, DrawSettings.steps, DrawSettings.guidance, self.weights)
        steps, guidance = usual[0] if steps is None else steps, usual[1] if guidance is None else guidance
        settings = DrawSettings(
            steps=steps,
            guidance=guidance,
            seed=seed,
            sampler=sampler,
            interval=interval,
            negative=negative,
            guided_channels=guided_channels,
            guidance_every=guidance_every,
            guidance_by=guidance_by,
            cache=cache,
            size=size,
            frames=frames,
        )
        with self._arithmetic():
            y, null, plan = self._resolve(what, settings)
            engine, index, drawn = self._engine(plan), torch.arange(len(y)), []
            info = self.weights.info
            media: dict[str, Any] = dict(image=image, clip=clip, frames=clip_frames, path=str(self.weights.path))
            media |= dict(interval=info.get("frame_interval", 1), fps=info.get("fps"))
            with arguments_named():
                given = encode_frames(self.config, self.codec, plan["size"], self.device, **media)
            y = with_pictures(y, encode_pictures(self.conditioner.pictures, image, clip), index)
            total = steps * math.ceil(len(y) / batch_size)
            title = engine.approximations.note.partition(": ")[0] or None
            with tqdm(total=total, unit=" steps", desc=title, disable=not progress) as bar:

                def after_step(i: int, x: Tensor) -> None:
                    bar.update()
                    if callback is not None:
                        callback(i + 1, x)

                for first in range(0, len(y), batch_size):
                    rows = slice(first, first + batch_size)
                    latents = engine.sample(
                        y[rows],
                        null,
                        index[rows],
                        seed,
                        conditioning_frames=frames_of_samples(given, index[rows]),
                        callback=after_step,
                    )
                    drawn += self.decode(latents)
        return drawn

    def _resolve(
        self, what: int | str | Sequence[int | str], settings: "DrawSettings"
    ) -> tuple[Condition, Condition, dict[str, Any]]:
        """Check a call's arguments. Return the samples' conditions, guidance's null condition, and engine settings."""
        settings.check(self.config.in_channels)
        guidance, interval, negative = settings.guidance, settings.interval, settings.negative
        if isinstance(what, bool):
            raise ValueError(f"what to draw is a list of classes or captions, or a count, not {what}")
        if isinstance(what, numbers.Integral):
            what = int(what)  # converts NumPy integers, too
        with arguments_named():
            if settings.frames is not None:
                if not self.config.is_video:
                    raise ValueError(f"frames: {self.weights.path} draws pictures; leave it out")
                check_number("frames", settings.frames, 1, 16_384, int)
            place = self.codec.name, settings.frames, settings.size
            latents = loading.latent_size(self.config, self.weights, *place)
            sampler = self.objective.choose(settings.sampler or self.weights.info.get("sampler"))
            loading.check_guidance(
                self.config,
                self.weights,
                guidance,
                settings.guidance_by,
                settings.guidance_every,
                conditioned=not isinstance(what, int),
                cfg_interval=interval,
                negative_prompt=negative,
                cfg_channels=settings.guided_channels,
            )
        if isinstance(self.conditioner, PublishedConditioner):
            self.conditioner.guidance = embedded_guidance(self.config, guidance)
        y, scale = self._conditions(what), loading.guidance_of(self.config, float(guidance))
        if isinstance(what, int) and negative is None:
            scale, interval = 1.0, None  # without a condition, both halves of guidance are equal
        plan: dict[str, Any] = dict(
            steps=settings.steps,
            sampler=sampler,
            cfg_scale=scale,
            cfg_channels=settings.guided_channels,
            cfg_interval=None if interval is None else (float(interval[0]), float(interval[1])),
            guidance_every=1 if scale == 1 else settings.guidance_every,
            guidance_by="null" if scale == 1 else settings.guidance_by,
            cache=settings.cache,
            size=latents,
        )
        null, y = same_length(loading.null_of(self.conditioner, negative), y)
        return y, null, plan

    def _engine(self, settings: dict[str, Any]) -> SamplingEngine:
        """Return the engine for these settings. A new engine may replace the least recently used one."""
        key = tuple(settings.values())
        if key not in self.engines:
            while len(self.engines) >= ENGINES:
                self.engines.popitem(last=False)
            self.engines[key] = SamplingEngine(self.model, self.objective, **settings)
        self.engines.move_to_end(key)
        return self.engines[key]

    def decode(self, latents: Tensor) -> list[Any]:
        """Decode latents (B, C, ...) to pictures or clips."""
        pixels = to_uint8(self.codec.decode(latents))
        if not self.config.is_video:
            return [Image.fromarray(picture) for picture in pixels]
        return [VideoClip(frames, loading.frames_per_second(self.weights)) for frames in pixels]

    @contextlib.contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Select this pipeline's device, and compute fp32 matrix products in full fp32, as sample.py does."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                yield
        finally:
            torch.set_float32_matmul_precision(before)

    def _conditions(self, what: int | str | Sequence[int | str]) -> Condition:
        """Return the conditions of all samples, one row each."""
        if isinstance(what, int):
            return self._no_condition(what)
        wanted = [what] if isinstance(what, str) else list(what)
        if not wanted:
            raise ValueError("nothing to draw: the list is empty")
        if isinstance(self.conditioner, CaptionConditioner):
            captions = [item for item in wanted if isinstance(item, str)]
            if len(captions) < len(wanted):
                other = next(item for item in wanted if not isinstance(item, str))
                raise ValueError(f"{other!r}: {self.weights.path} is conditioned on captions; give text")
            for line in self.conditioner.cut(captions, "captions"):
                warnings.warn(line, stacklevel=3)
            return self.conditioner.encode(captions)
        return torch.tensor([self._class(item) for item in wanted], dtype=torch.int64, device=self.device)

    def _no_condition(self, count: int) -> Condition:
        if not 1 <= count <= MOST_SAMPLES:
            raise ValueError(
                f"{count} samples: a number alone is a count of 1 to {MOST_SAMPLES:,}; a class is [{count}]"
            )
        if not self.config.null_class:
            if self.config.num_classes != 1:
                raise ValueError(f"{self.weights.path} was trained without class dropout: say which classes to draw")
            return torch.zeros(count, dtype=torch.int64, device=self.device)
        return self.conditioner.null()[torch.zeros(count, dtype=torch.int64, device=self.device)]

    def _class(self, item: int | str) -> int:
        """Return the number of the class ``item``, a number or a name."""
        names = self.class_names
        if not isinstance(item, str):
            check_number("class", item, 0, len(names) - 1, int)
            return int(item)
        try:
            return class_number(item, names)
        except ValueError as error:
            raise ValueError(f"class {error} (class_names has all)") from error


@dataclass(frozen=True)
class DrawSettings:
    """Arguments of :meth:`Pipeline.__call__`."""

    steps: int = 50
    guidance: float = 4.0
    seed: int = 0
    sampler: str | None = None
    interval: tuple[float, float] | None = None
    negative: str | None = None
    guided_channels: int | None = None
    guidance_every: int = 1
    guidance_by: str = "null"
    cache: str | None = None
    size: int | tuple[int, int] | None = None
    frames: int | None = None

    def check(self, channels: int) -> None:
        """Raise ValueError for invalid settings. channels: number of channels of the model's latents."""
        check_number("steps", self.steps, 1, MOST_STEPS, int)
        check_number("seed", self.seed, 0, MOST_SEED, int)
        check_number("guidance", self.guidance, 0, MOST_GUIDANCE)
        check_number("guidance_every", self.guidance_every, 1, MOST_STEPS, int)
        without = {"interval": self.interval, "negative": self.negative, "guidance_every": self.guidance_every}
        for name, value in without.items():
            if self.guidance == 1 and value not in (None, 1):
                raise ValueError(f"{name} does nothing with guidance 1, which is none; leave one of them out")
        if self.guided_channels is not None:
            check_number("guided_channels", self.guided_channels, 1, channels, int)
        with arguments_named():
            Approximations.of(self.guidance_every, self.cache, self.steps)
        if self.interval is not None:
            low, high = self.interval
            if not 0 <= low < high:
                raise ValueError(f"interval {low:g} {high:g}: two noise levels with 0 <= LOW < HIGH")


@contextlib.contextmanager
def arguments_named() -> Iterator[None]:
    """Replace the flags of sample.py in error messages by the names of this module's arguments."""
    try:
        yield
    except (ValueError, OSError) as error:
        message = re.sub(r"(?<= add )--\w+ .+$", _as_keywords, str(error))
        message = re.sub(r"(?<![\w./-])--(\w+)", lambda found: ARGUMENTS.get(found[1], found[1]), message)
        message = message.replace("leave the flag out", "leave it out")
        if message == str(error):
            raise
        kinds = (FileNotFoundError, OSError, ValueError)
        raise next(kind for kind in kinds if isinstance(error, kind))(message) from error


def _as_keywords(found: re.Match[str]) -> str:
    """Rewrite ``--flag value ...`` as Python arguments, if every value is a single word."""
    try:
        words = shlex.split(found[0])
    except ValueError:  # an unclosed quote
        return found[0]
    flags = [word.removeprefix("--") for word in words[::2] if word.startswith("--")]
    if 2 * len(flags) != len(words):
        return found[0]
    return ", ".join(f"{ARGUMENTS.get(flag, flag)}={value!r}" for flag, value in zip(flags, words[1::2], strict=True))


def check_number(name: str, value: Any, low: float, high: float, kind: type[Any] = float) -> None:
    """Raise ValueError unless ``value`` is a number of this kind from ``low`` to ``high``."""
    try:
        number = value.__index__() if kind is int else float(value)
        fits = not isinstance(value, bool) and low <= number <= high
    except (AttributeError, TypeError, ValueError):
        fits = False
    if not fits:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} {value!r}: must be {what} from {low:,} to {high:,}")
