# pyright: standard
"""``opendit.load`` and ``Pipeline``: from a checkpoint to pictures or clips, in Python (docs/python.md)."""

import contextlib
import math
import numbers
import os
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

from opendit.config.flags import nearest
from opendit.diffusion.objectives.base import Objective
from opendit.encoders.conditioner import CaptionConditioner, Conditioner
from opendit.encoders.pictures import to_uint8
from opendit.encoders.vae import ImageCodec
from opendit.encoders.video_vae import VideoCodec
from opendit.kernels.select import KernelSwitches, select_kernels
from opendit.models.conditioning import Condition
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.weights import Weights
from opendit.parallel.engines import PRECISIONS
from opendit.sampling.arguments import MOST_SAMPLES, arguments_named, check_number
from opendit.sampling.clip import VideoClip
from opendit.sampling.engine import SamplingEngine
from opendit.sampling.given import given_latents, rows_of
from opendit.sampling.loading import (
    VaeLoader,
    check_guidance,
    check_negative,
    check_text_encoder,
    checkpoint_at,
    class_names,
    frames_per_second,
    latent_size,
    load_model,
    make_conditioner,
    null_of,
)
from opendit.sampling.settings import DrawSettings, EnginePlan

ENGINES = 2  # settings whose recorded steps are kept


def load(
    path: str | os.PathLike[str],
    *,
    outputs: str | os.PathLike[str] = "./outputs",
    device: str | torch.device | None = None,
    precision: str | None = None,
    weights: str = "ema",
    model: str | None = None,
    num_classes: int | None = None,
    lora: str | os.PathLike[str] | None = None,
    vae: str | None = None,
    vae_tiling: bool = False,
    vae_compile: bool = False,
    text_encoder: str | None = None,
    fp8: bool = False,
    kernels: bool = True,
) -> "Pipeline":
    """A checkpoint, ready to draw from.

    Args:
        path: a run's folder (its newest intact checkpoint), a checkpoint, a .safetensors file, Meta's .pt, a folder of
            diffusers' ``DiTPipeline``, or "latest": the newest run under ``outputs`` that has a checkpoint.
        outputs: where runs are, for "latest".
        device: None for the GPU if there is one.
        precision: of the network: "bf16", "fp16" or "fp32"; None for bf16 on a GPU, fp32 on a CPU.
        weights: "ema" or "model", of a run or checkpoint.
        model: its name, where the file does not say (Meta's .pt): "DiT-XL/2".
        num_classes: the number of classes, where the file does not say.
        lora: a run of ``train.py --lora``, merged into the weights of ``path``.
        vae: "ema", "mse", "none" or a folder; None for what the checkpoint names.
        vae_tiling: the VAE decodes tile by tile, for large pictures and long clips.
        vae_compile: the decoder of pictures and frames is compiled.
        text_encoder: "clip", "t5" or a folder; None for what the checkpoint names.
        fp8: the blocks' linear layers in FP8 (Hopper and newer).
        kernels: the fused kernels and the fastest attention, on GPUs that have them.

    Raises:
        FileNotFoundError: nothing of the kind is there.
        ValueError: damaged, another model than said, or an argument that does not fit it; the message names it.

    What is not an error and should be known is a warning: a newer checkpoint that is damaged, a number of classes that
    was taken for granted, FP8 that this GPU does not have.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = precision or ("fp32" if device.type == "cpu" else "bf16")
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision}: must be one of {', '.join(PRECISIONS)}")
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("precision fp16 needs a GPU: use fp32")
    if weights not in ("ema", "model"):
        raise ValueError(f"weights {weights}: must be ema or model")
    with arguments_named():
        loaded = load_model(
            checkpoint_at(path, outputs, model),
            VaeLoader(device, precision, vae_tiling, vae_compile),
            name=model,
            which=weights,
            lora=None if lora is None else Path(lora).expanduser(),
            num_classes=num_classes,
            vae=vae,
        )
        network, found, notes = loaded.network, loaded.weights, loaded.notes
        config, dtype = network.config, PRECISIONS[precision]
        check_text_encoder(text_encoder, config, found)
        latent_size(config, found, loaded.vae)
        if fp8:
            config.check_speed(True, "none")
        on = kernels and device.type == "cuda"
        switches = KernelSwitches(on, on, on, fp8)
        chosen = select_kernels(switches, device, dtype, config.head_dim, config.tokens, inference=True)
        network.eval().requires_grad_(False)
        network.use(ops=chosen.ops, attend=chosen.attend)
        codec = loaded.codec()
        conditioner = make_conditioner(config, found, text_encoder, device, precision)
    if fp8 and not chosen.ops.float8:
        notes.append(chosen.ops_note)
    for note in notes:  # a damaged checkpoint that was passed over, what was taken for granted
        warnings.warn(note, stacklevel=2)
    said = Weights({}, found.path, found.info)  # without the tensors, which the network has
    notes += [f"kernels: {chosen.ops_note}", f"attention: {chosen.attention_note}"]
    return Pipeline(network, loaded.objective, codec, conditioner, said, precision, notes)


@dataclass(frozen=True, eq=False)
class Order:
    """A checked request, see :meth:`Pipeline.order`. y: the samples' conditions. null: guidance's other one, a row."""

    y: Condition
    null: Condition
    plan: EnginePlan


@dataclass(eq=False, repr=False)
class Pipeline:
    """A network with what it takes to draw from it; made by :func:`load`, called to draw.

        pipe = opendit.load("outputs/000-DiT-XL-2")
        pictures = pipe([207, 360], steps=50, guidance=4, seed=0)

    Attributes:
        model: the network.
        objective: what it was trained by.
        codec: latents to pixels and back.
        conditioner: classes or captions to conditions.
        weights: where the weights are from (``path``) and what their file says of them (``info``).
        precision: of the network.
        notes: what is worth knowing of the loading, a line each.
        engines: those that drew last, by their settings, with what they have recorded.
    """

    model: DiT
    objective: Objective
    codec: ImageCodec | VideoCodec
    conditioner: Conditioner
    weights: Weights
    precision: str
    notes: list[str]
    engines: OrderedDict[EnginePlan, SamplingEngine] = field(default_factory=OrderedDict, init=False)

    @property
    def config(self) -> DiTConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def samplers(self) -> tuple[str, ...]:
        """Those that can draw from this model, the default one first."""
        return self.objective.samplers

    @property
    def class_names(self) -> list[str]:
        """The name of every class; none of a model of captions."""
        return [] if self.config.text else class_names(self.config, self.weights)

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
        steps: int = 50,
        guidance: float = 4.0,
        seed: int = 0,
        sampler: str | None = None,
        interval: tuple[float, float] | None = None,
        negative: str | None = None,
        guided_channels: int | None = None,
        guidance_every: int = 1,
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
        """Draws one picture or clip for each of ``what``.

        The noise of sample number i depends on ``seed`` and i only, as with sample.py, whose pictures these are.

        Args:
            what: a list of class numbers and names, or of captions; or one name or caption. A number alone is a count:
                so many samples of no class or caption at all (a single class is a list: ``[207]``).
            steps: of the sampler.
            guidance: classifier-free; 1 is none, and half the work.
            sampler: one of ``samplers``; None for the first.
            interval: (low, high), the noise levels sigma between which there is guidance; None for all.
            negative: a caption to guide away from, instead of the empty one.
            guidance_every: an approximation: guidance's unconditional half is evaluated every so many steps only.
            cache: an approximation: "taylor:K[:ORDER]" or "first_block[:THRESHOLD]" leave blocks out of steps
                (docs/sampling.md has their errors).
            guided_channels: so many of the latents' first channels are guided; None for all (Meta's figures: 3).
            size: pixels, (height, width) or a side. A model draws one size: this only checks it.
            frames: of a clip; None for as many as the model was trained on.
            image: what clips begin with, of a model with given frames: a file, a ``PIL.Image``, uint8 (H, W, 3), or a
                list of these, of which sample number i has number i, beginning again after the last.
            clip: what clips go on from: a file, a :class:`VideoClip`, uint8 (T, H, W, 3), or a list of these. They
                begin with its last frames: as many as the model was trained on, or ``clip_frames``.
            batch_size: samples at a time.
            progress: shows a bar.
            callback: ``callback(step, latents)`` after every step of every batch: how many steps are done, and the
                latents (B, C, ...) there, which it must not change. An exception in it ends the sampling.

        Returns:
            ``PIL.Image``s, or :class:`VideoClip`s of a model of clips.

        Raises:
            ValueError: an unknown class (the message has the most similar name), or an argument that does not fit.
        """
        check_number("batch_size", batch_size, 1, 65_536, int)
        settings = DrawSettings(
            steps=steps,
            guidance=guidance,
            seed=seed,
            sampler=sampler,
            interval=interval,
            negative=negative,
            guided_channels=guided_channels,
            guidance_every=guidance_every,
            cache=cache,
            size=size,
            frames=frames,
        )
        with self._arithmetic():
            order = self.order(what, settings)
            engine = self._engine(order.plan)
            y, index, drawn = order.y, torch.arange(len(order.y)), []
            given = self._given(order.plan.size, image, clip, clip_frames)
            total, said = steps * math.ceil(len(y) / batch_size), engine.approximations.note.partition(": ")[0] or None
            with tqdm(total=total, unit=" steps", desc=said, disable=not progress) as bar:

                def after_step(i: int, x: Tensor) -> None:
                    bar.update()
                    if callback is not None:
                        callback(i + 1, x)

                for first in range(0, len(y), batch_size):
                    rows = slice(first, first + batch_size)
                    own = rows_of(given, index[rows])
                    drawn += self.shown(
                        engine.sample(y[rows], order.null, index[rows], seed, given=own, callback=after_step)
                    )
        return drawn

    def _given(self, size: tuple[int, ...], image: Any, clip: Any, frames: int | None) -> Tensor | None:
        """The given frames of the samples, see :func:`given_latents`."""
        what = dict(image=image, clip=clip, frames=frames, interval=self.weights.info.get("frame_interval", 1))
        what["fps"] = self.weights.info.get("fps")
        with arguments_named():
            return given_latents(self.config, self.codec, size, self.device, path=str(self.weights.path), **what)

    def order(self, what: int | str | Sequence[int | str], settings: DrawSettings) -> "Order":
        """Check and encode the arguments of a call, without drawing; raises as the call does."""
        settings.check(self.config.in_channels)
        guidance, interval, negative = settings.guidance, settings.interval, settings.negative
        if isinstance(what, bool):
            raise ValueError(f"what to draw is a list of classes or captions, or a count, not {what}")
        if isinstance(what, numbers.Integral):
            what = int(what)  # numpy's, too
        with arguments_named():
            latents = self._latent_size(settings.size, settings.frames)
            check_negative(negative, self.config, self.weights)
            sampler = self.objective.choose(settings.sampler)
            if not isinstance(what, int):
                check_guidance(self.config, self.weights, guidance)
        y = self._conditions(what)
        if isinstance(what, int) and negative is None:
            guidance, interval = 1.0, None  # away from what is drawn itself
        plan = EnginePlan(
            steps=settings.steps,
            sampler=sampler,
            cfg_scale=float(guidance),
            cfg_channels=settings.guided_channels,
            cfg_interval=None if interval is None else (float(interval[0]), float(interval[1])),
            guidance_every=1 if guidance == 1 else settings.guidance_every,
            cache=settings.cache,
            size=latents,
        )
        return Order(y, null_of(self.conditioner, negative), plan)

    def _engine(self, plan: EnginePlan) -> SamplingEngine:
        """The engine of a plan; those used last are kept, with what they have recorded."""
        if plan not in self.engines:
            while len(self.engines) >= ENGINES:
                self.engines.popitem(last=False)
            self.engines[plan] = plan.engine(self.model, self.objective, say=warnings.warn)
        self.engines.move_to_end(plan)
        return self.engines[plan]

    def shown(self, latents: Tensor) -> list[Any]:
        """Pictures or clips of latents (B, C, ...)."""
        pixels = to_uint8(self.codec.decode(latents))
        if not self.config.is_video:
            return [Image.fromarray(picture) for picture in pixels]
        return [VideoClip(frames, frames_per_second(self.weights)) for frames in pixels]

    @contextlib.contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Matrix products of fp32 in fp32, as sample.py has them, on this pipeline's device."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                yield
        finally:
            torch.set_float32_matmul_precision(before)

    def _latent_size(self, size: int | tuple[int, int] | None, frames: int | None) -> tuple[int, ...]:
        """Raises ValueError for sizes that the model does not draw."""
        if frames is not None:
            if not self.config.is_video:
                raise ValueError(f"frames: {self.weights.path} draws pictures; leave it out")
            check_number("frames", frames, 1, 16_384, int)
        return latent_size(self.config, self.weights, self.codec.name, frames, size)

    def _conditions(self, what: int | str | Sequence[int | str]) -> Condition:
        """The condition of every sample, one row each."""
        if isinstance(what, int):
            return self._no_condition(what)
        wanted = [what] if isinstance(what, str) else list(what)
        if not wanted:
            raise ValueError("nothing to draw: the list is empty")
        if isinstance(self.conditioner, CaptionConditioner):
            captions = [item for item in wanted if isinstance(item, str)]
            if len(captions) < len(wanted):
                strange = next(item for item in wanted if not isinstance(item, str))
                raise ValueError(f"{strange!r}: {self.weights.path} is conditioned on captions; give text")
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
        """The number of a class, or of the one of this name; of names with commas, each part is one, too."""
        names = self.class_names
        if not isinstance(item, str):
            check_number("class", item, 0, len(names) - 1, int)
            return int(item)
        wanted = item.strip().casefold()
        found = [number for number, name in enumerate(names) if name.strip().casefold() == wanted]
        found = found or [n for n, name in enumerate(names) if wanted in map(str.strip, name.casefold().split(","))]
        if not found:
            raise ValueError(
                f"class {item!r}: no such class; did you mean {nearest(item, names)!r}? (class_names has all)"
            )
        if len(found) > 1:
            raise ValueError(f"class {item!r}: numbers {', '.join(map(str, found))} are called so; give one of these")
        return found[0]
