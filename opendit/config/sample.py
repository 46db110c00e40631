"""The flags of sample.py, and the checks across them.

Settings of the approximations --guidance_every and --cache come from two papers:

[T] Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", 2025
[F] Cheng, "ParaAttention: First Block Cache", 2024, a simpler form of Liu et al., "Timestep Embedding Tells: It's Time
    to Cache for Video Diffusion Model" (TeaCache), 2024
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from opendit.config.architectures import canonical_name
from opendit.config.checks import (
    check_exists,
    check_no_folder,
    check_output_file,
    check_vae,
    check_weights,
    check_writable,
    fetched,
    path_and_weight,
    resolve_precision,
)
from opendit.config.components import MOST_WIDTH, ParallelFlags, SpeedFlags
from opendit.config.console import OnThisMachine
from opendit.config.flags import (
    BATCH,
    FRAMES,
    GUIDANCE,
    SAMPLING_STEPS,
    SEED,
    SIDE,
    Flags,
    between,
    check_unused,
    check_values,
    flag,
)
from opendit.config.names import ALL_SAMPLERS, BASE_PRECISIONS, DESCRIPTIONS, PARTS, PRECISIONS, SHARDS, WHOLE
from opendit.config.parallel_sizes import check_cfg_parallel, check_tensor_parallel_size

MOST_ORDER = 4  # highest order of extrapolation; each order stores one more copy of the blocks' output
THRESHOLD = 0.1  # default of the first-block cache
FORMS = "first_block[:THRESHOLD] or taylor:K[:ORDER]"


@dataclass(frozen=True)
class TaylorCache:
    """TaylorSeers [T]: evaluate the blocks only in every ``every``-th step. Other steps extrapolate the blocks'
    residual (output minus input) from its last ``order`` + 1 values."""

    every: int
    order: int = 2

    def __str__(self) -> str:
        return f"taylor:{self.every}:{self.order}"

    @property
    def note(self) -> str:
        how = f"extrapolated with order {self.order}" if self.order else "reused"
        return f"blocks evaluated in one of {self.every} steps, their output {how} in the others"


@dataclass(frozen=True)
class FirstBlockCache:
    """First-block cache [F]: evaluate the first block in every step, and all others only if necessary.

    A block's residual is its output minus its input. The first block's residual is compared with the last complete
    step's. If it changed by less than ``threshold``, all other blocks' residual is taken from that step.
    """

    threshold: float = THRESHOLD

    def __str__(self) -> str:
        return f"first_block:{self.threshold:g}"

    @property
    def note(self) -> str:
        return f"blocks reused where the first one's output changes by less than {self.threshold:g}, decided per batch"


Cache = TaylorCache | FirstBlockCache


def parse_cache(text: str) -> Cache:
    text = str(text)
    name, _, rest = text.partition(":")
    if name == "first_block" and (rest or text == name):
        threshold = _number(rest or str(THRESHOLD))
        if threshold is None or not 0 <= threshold <= 10:
            raise ValueError(
                f"--cache {text}: THRESHOLD is out of range; give a relative change from 0 (exact) to 10, "
                f"as {THRESHOLD}"
            )
        return FirstBlockCache(threshold)
    found = re.fullmatch(r"taylor:([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if found is None:
        raise ValueError(f"--cache {text}: no such form; give {FORMS}, as taylor:3")
    every, order = int(found[1]), int(found[2] or TaylorCache.order)
    if not 2 <= every <= 1000:
        raise ValueError(f"--cache {text}: K is out of range; give 2 to 1,000 steps to one evaluation of the blocks")
    if order > MOST_ORDER:
        raise ValueError(f"--cache {text}: ORDER is out of range; give 0 to {MOST_ORDER} for the extrapolation")
    return TaylorCache(every, order)


def _number(text: str) -> float | None:
    try:
        return float(text) if re.fullmatch(r"[0-9.eE+-]+", text) else None
    except ValueError:
        return None


@dataclass(frozen=True)
class Approximations:
    """All approximations of a sampling run; none by default. guidance_every: number of steps per evaluation of
    guidance's unconditional half. Steps in between use the last difference between the two halves."""

    guidance_every: int = 1
    cache: Cache | None = None

    @classmethod
    def of(cls, guidance_every: int, cache: str | None, steps: int) -> "Approximations":
        """Return the approximations for --guidance_every, --cache and a number of steps. Raises ValueError."""
        found = cls(guidance_every, None if cache is None else parse_cache(cache))
        if guidance_every > max(1, steps - 1):
            raise ValueError(f"--guidance_every {guidance_every}: too many; give less than the {steps} sampling steps")
        if isinstance(found.cache, TaylorCache) and 2 * found.cache.every > steps:
            raise ValueError(f"--cache {found.cache}: K is too large; at most half the {steps} sampling steps")
        return found

    @property
    def by_batch(self) -> bool:
        return isinstance(self.cache, FirstBlockCache)

    def __post_init__(self) -> None:
        if self.guidance_every < 1:
            raise ValueError(f"--guidance_every {self.guidance_every}: out of range; give 1 or more")
        if self.guidance_every > 1 and self.cache is not None:
            raise ValueError(
                f"--guidance_every {self.guidance_every}: --cache {self.cache} saves work in both halves of guidance; "
                "leave one of them out"
            )

    @property
    def note(self) -> str:
        """Description of the approximation and its settings; "" without one."""
        if self.cache is not None:
            return f"{self.cache}: {self.cache.note}"
        every = self.guidance_every
        return f"guidance_every {every}: its unconditional half evaluated every {every} steps" if every > 1 else ""


@dataclass(frozen=True)
class CheckpointFlags(Flags):
    """Flags that choose the checkpoint, and the encoders that go with it."""

    group: ClassVar[str] = "Model: the checkpoint, and what goes with it"

    ckpt: str = flag(
        "latest",
        "checkpoint file or folder, run folder, folder of diffusers' DiTPipeline, or latest",
        common="checkpoint, run folder, or latest",
        unit="path",
    )
    download: bool = flag(False, "fetch --ckpt OWNER/NAME[@REVISION] from the hub, if the cache has it not")
    weights: str = flag("ema", "which weights of a run's checkpoint", choices=("ema", "model"))
    ema: float | None = flag(
        None,
        "relative width of the power average to draw from, of a run with --average",
        **between(0.01, MOST_WIDTH, "width"),
    )
    lora: list[str] = flag(
        [], "PATH[:WEIGHT] of runs of train.py --lora and LoRA files of public models, merged into --ckpt", unit="path"
    )
    second_ckpt: str | None = flag(
        None, "of Wan 2.2 A14B, the run of the network that --ckpt does not hold", unit="path"
    )
    model: str | None = flag(
        None, "needed only when the checkpoint does not say (Meta's .pt)", common=True, unit="name"
    )
    num_classes: int | None = flag(
        None, "of a checkpoint that does not say (Meta's .pt)", **between(1, 1_000_000, "classes")
    )
    vae: str | None = flag(None, "ema, mse, PATH or none; from the checkpoint when left out", common=True, unit="name")
    vae_tiling: bool = flag(False, "decode large pictures and clips in overlapping tiles: less memory")
    vae_compile: bool = flag(False, "compile the decoder of pictures and frames with torch.compile")
    text_encoder: str | None = flag(None, "clip, t5 or a folder; from the checkpoint when left out", unit="name")
    text_precision: str = flag(
        "bf16",
        "how the weights of text encoders are stored: in half precision (bf16), in 1 byte (fp8, int8) or 0.56 (nf4)",
        choices=BASE_PRECISIONS,
    )


@dataclass(frozen=True)
class DrawFlags(Flags):
    """Flags that choose the samples to draw and the sampler's settings."""

    group: ClassVar[str] = "Sampling: what is drawn, and how"

    class_labels: list[str] = flag(
        [], "labels or class names to draw, repeated up to --num_samples", free=True, common=True, unit="label"
    )
    prompt: list[str] = flag(
        [], "captions to draw, or one file with a caption a line", free=True, common=True, unit="caption"
    )
    negative_prompt: str | None = flag(
        None, "guide away from this caption, not from the empty one", free=True, unit="caption"
    )
    num_samples: int | None = flag(
        None, "pictures (default: one a label, or up to 16)", common=True, **between(1, 10_000_000, "samples")
    )
    image_size: int | None = flag(
        None,
        "pixels: SIDE, or HEIGHT WIDTH; from the checkpoint when left out",
        several=True,
        common="pixels: SIDE, or HEIGHT WIDTH",
        **SIDE,
    )
    use_video: bool = flag(False, "draw clips (a vDiT's checkpoint does anyway)")
    num_frames: int | None = flag(None, "frames of a clip; from the checkpoint when left out", **FRAMES)
    num_sampling_steps: int = flag(250, "denoising steps", common=True, **SAMPLING_STEPS)
    sampler: str | None = flag(
        None,
        f"of the model's objective (default of {'; '.join(f'{n}: {d.sampler}' for n, d in DESCRIPTIONS.items())})",
        choices=ALL_SAMPLERS,
        common="as the objective allows",
    )
    cfg_scale: float = flag(4.0, "classifier-free guidance; 1: off", common=True, **GUIDANCE)
    cfg_interval: list[float] = flag(
        [], "LOW HIGH: guide at noise levels sigma between only", at_least=0, infinite=True, unit="sigma"
    )
    guidance_by: str = flag(
        "null",
        "away from the null class or caption; route: also without the blocks of a fused route (SPRINT); "
        "FIRST:LAST:SHARE: from the same class, these blocks without this share of the tokens (TREAD)",
        unit="route",
    )
    cfg_channels: int | None = flag(
        None, "guide only the first channels (Meta's figures: 3)", **between(1, 1024, "channels")
    )
    seed: int = flag(0, "seed of the noise", common=True, **SEED)
    batch_size: int = flag(32, "pictures at a time per process, or per group that shares them", common=True, **BATCH)


@dataclass(frozen=True)
class GivenFrameFlags(Flags):
    """Flags that choose the first frames of clips, for a model with conditioning frames (--given_frames)."""

    group: ClassVar[str] = "Given frames: what clips begin with, of models of --given_frames"

    image: list[str] = flag([], "pictures that clips begin with, of a model with given frames", free=True, unit="file")
    clip: list[str] = flag([], "clips whose last frames are continued, of such a model", free=True, unit="file")
    clip_frames: int | None = flag(None, "of --clip, of a model of any number of given frames", **FRAMES)


@dataclass(frozen=True)
class ApproximationFlags(Flags):
    """Flags that skip some of a sampling step's work. docs/sampling.md lists the errors."""

    group: ClassVar[str] = "Approximations: what is left out of steps, for speed"

    guidance_every: int = flag(1, "evaluate guidance's unconditional half every K steps", **between(1, 1000, "steps"))
    cache: str | None = flag(None, f"leave blocks out of steps: {FORMS}", unit="form")


@dataclass(frozen=True)
class SampleSpeedFlags(Flags):
    """Flags that set the precision."""

    group: ClassVar[str] = "Speed: precision, kernels and compilation"

    mixed_precision: str = flag("bf16", "precision of the model", choices=PRECISIONS, common=True)


@dataclass(frozen=True)
class GuidanceFlags(Flags):
    """Flags that split guidance and the model's layers over processes."""

    group: ClassVar[str] = "Parallelism: how processes share weights, samples and layers"

    cfg_parallel: bool = flag(False, "the two halves of guidance on different processes")
    tensor_parallel_size: int = flag(
        1, "processes that divide every layer of the model", **between(1, 4096, "processes")
    )


@dataclass(frozen=True)
class OutputFlags(Flags):
    """Flags that choose where to look for runs and where to write results."""

    group: ClassVar[str] = "Output: where results go"

    outputs: str = flag("./outputs", "where --ckpt latest looks for runs", unit="folder")
    output: str = flag("./samples", "folder for the grid and the single pictures", common=True, unit="folder")
    overwrite: bool = flag(False, "draw again what an unfinished job left in --output")
    save_png: bool = flag(True, "write single pictures too")
    npz: str | None = flag(
        None, "also write arr_0 (uint8 N,H,W,3) and arr_1 (labels) for FID tools", common=True, unit="file"
    )
    profile: bool = flag(False, "where the time goes from the start of the process: a table, and profile.json")
    frame_interval: int | None = flag(None, "of the training clips: sets the clip's frame rate", **FRAMES)


@dataclass(frozen=True)
class SampleConfig(
    CheckpointFlags,
    DrawFlags,
    GivenFrameFlags,
    ApproximationFlags,
    SampleSpeedFlags,
    SpeedFlags,
    GuidanceFlags,
    ParallelFlags,
    OutputFlags,
):
    """Draws pictures from a checkpoint. Several processes (torchrun) share the work."""

    program: ClassVar[str] = "sample.py"
    examples: ClassVar[tuple[str, ...]] = (
        "python sample.py --ckpt outputs/000-DiT-XL-2 --class_labels 207 360 --cfg_scale 4",
        "python sample.py --model DiT-XL/2 --image_size 256 --ckpt model.pt    # Meta's weights",
        'python sample.py --ckpt Z-Image --lora RUN:0.8 style.safetensors:0.5 --prompt "a lighthouse"',
        'python sample.py --ckpt outputs/001-vDiT-XL-222 --use_video --prompt "a seven moving left"',
        "torchrun --standalone --nproc_per_node=8 sample.py --num_samples 50000 --npz fid.npz",
    )

    def resolve(self, world_size: int, has_gpu: bool) -> tuple["SampleConfig", list[str]]:
        """Check all flags, and fill in values that depend on the hardware; see :meth:`TrainConfig.resolve`."""
        if (levels := self.cfg_interval) and (len(levels) != 2 or not 0 <= levels[0] < levels[1]):
            given = " ".join(f"{level:g}" for level in levels)
            raise ValueError(f"--cfg_interval {given}: no two noise levels; give LOW HIGH with 0 <= LOW < HIGH")
        check_values(self)
        if isinstance(self.image_size, list) and len(self.image_size) != 2:
            given = " ".join(map(str, self.image_size))
            raise ValueError(f"--image_size {given}: is no size; give SIDE, or HEIGHT WIDTH")
        self = replace(self, ckpt=fetched(self.ckpt, "--ckpt", self.download))
        precision, notes = resolve_precision(self.mixed_precision, "mixed_precision" in self.given, has_gpu)
        notes += check_unused(self, self._unused())
        model = None if self.model is None else canonical_name(self.model)
        self.check_parallel(world_size)
        check_tensor_parallel_size(self.tensor_parallel_size, self.sequence_parallel_size, world_size)
        if self.tensor_parallel_size > 1 and self.fp8:
            raise ValueError(
                f"--tensor_parallel_size {self.tensor_parallel_size}: does not work with --fp8, whose operations "
                "read a projection's whole weight; leave one of them out"
            )
        asked = Approximations.of(self.guidance_every, self.cache, self.num_sampling_steps)
        sizes = ("tensor_parallel_size", "sequence_parallel_size")
        sharing = ["cfg_parallel"] * self.cfg_parallel + [name for name in sizes if getattr(self, name) > 1]
        if asked.by_batch and sharing:
            shared = f"--{sharing[0]}"
            raise ValueError(f"--cache {self.cache}: decides by a batch, which {shared} shares out; use taylor:3")
        if self.cfg_parallel:
            if self.cfg_scale == 1:
                raise ValueError("--cfg_parallel: --cfg_scale 1 is no guidance and has one half; leave one of them out")
            if self.guidance_by != "null":
                raise ValueError(
                    f"--guidance_by {self.guidance_by}: does not work with --cfg_parallel, which expects halves of "
                    "equal work; leave one of them out"
                )
            check_cfg_parallel(self.sequence_parallel_size, self.tensor_parallel_size, world_size)
        if self.ckpt != "latest":
            check_weights(self.ckpt, "--ckpt", pipeline=True)
        if self.second_ckpt is not None:
            check_weights(self.second_ckpt, "--second_ckpt")
        for text in self.lora:
            if re.fullmatch(r"[-+]?\d*\.?\d+", text) and not Path(text).exists():
                raise ValueError(f"--lora {text}: is no path; a weight follows its path after a colon, as PATH:{text}")
            check_weights(path_and_weight(text)[0], "--lora")
        for name, what in (("image", "a picture"), ("clip", "a clip")):
            for path in getattr(self, name):
                check_exists(path, f"--{name}", what)
                if Path(path).expanduser().is_dir():
                    raise OnThisMachine(f"--{name} {path}: is a folder; give {what}")
        check_writable(self.output, "--output")
        if self.vae is not None:
            check_vae(self.vae)
        npz = self.npz
        if npz is not None:
            check_no_folder(npz, "--npz")
            npz += "" if npz.endswith(".npz") else ".npz"  # np.savez adds the suffix as well
            check_output_file(npz, "--npz")
        return replace(self, model=model, mixed_precision=precision, npz=npz), notes

    def _unused(self) -> dict[str, str]:
        unused = {}
        if self.cfg_scale == 1:
            unused |= dict.fromkeys(
                ("cfg_interval", "cfg_channels", "guidance_every", "guidance_by", "negative_prompt"),
                "does nothing with --cfg_scale 1, which is no guidance",
            )
        elif self.guidance_by not in ("null", "route"):
            unused["negative_prompt"] = "does nothing with --guidance_by FIRST:LAST:SHARE, which keeps the caption"
        if self.ema is not None:
            unused["weights"] = "does nothing with --ema, which names an average"
        if self.ckpt != "latest":
            unused["outputs"] = "does nothing with --ckpt PATH"
            names = [self.weights + suffix for suffix in (WHOLE, SHARDS, PARTS)]
            if Path(self.ckpt).is_file() and Path(self.ckpt).name not in names:
                unused["weights"] = "does nothing with a file as --ckpt"
        return unused
