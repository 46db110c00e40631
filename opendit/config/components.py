"""A configuration's components: frozen dataclasses of flags with ranges and help."""

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from typing import Any, ClassVar

from opendit.config.architectures import GIVEN, KINDS, MLP_KINDS, NORMS, POSITIONS
from opendit.config.flags import (
    ABOVE_0,
    BATCH,
    COUNT,
    FPS,
    FRAMES,
    FROM_0,
    GUIDANCE,
    SAMPLING_STEPS,
    SCALE,
    SEED,
    SHARE,
    SIDE,
    WORKERS,
    Flags,
    Setting,
    between,
    check_unused,
    flag,
)
from opendit.config.names import (
    ATTENTION,
    AUTO,
    BASE_PRECISIONS,
    BEST,
    BLOCKS,
    BUT_ATTENTION,
    CHECKPOINT_FORMATS,
    DESCRIPTIONS,
    METRICS,
    OFFLOAD,
    OPTIMIZERS,
    OWN_ATTENTION,
    PIPELINE_SCHEDULES,
    PLUGINS,
    PRECISIONS,
    RECOMPUTE,
    REDUCE_DTYPES,
    RESHARD,
    SEQUENCE_TYPES,
    data_path_help,
)
from opendit.config.parallel_sizes import check_sequence_parallel, environment_world_size

TAKES = "FIRST:LAST:SHARE or FIRST:LAST:SHARE:sprint, as in 2:8:0.5: blocks from 0, two numbers and a share below 1"


@dataclass(frozen=True)
class TokenRoute:
    """A ``share`` of each sample's tokens skips blocks ``first`` to ``last`` - 1, counted from 0.

    fused: True to fuse the tokens before and after these blocks (SPRINT; False is TREAD). until: first step without a
    route, or None. drop: fraction of a training step's samples that ignore these blocks' result, only with ``fused``.
    """

    first: int
    last: int
    share: float
    fused: bool = False
    until: int | None = None
    drop: float = 0.0

    def kept(self, tokens: int) -> int:
        """Return how many of a sample's tokens pass through the routed blocks, at least one."""
        return max(1, round(tokens * (1 - self.share)))


def parse_route(text: str, flag: str = "route") -> TokenRoute:
    """Parse a value of ``--route`` or another ``flag``. Raises ValueError for an invalid value."""
    try:
        first, last, share, *fused = text.split(":")
        route = TokenRoute(int(first), int(last), float(share), bool(fused))
        if fused not in ([], ["sprint"]):
            raise ValueError
    except ValueError:
        raise ValueError(f"--{flag} {text}: is no route; give {TAKES}") from None
    if not (0 <= route.first < route.last and 0 <= route.share < 1) or math.isnan(route.share):
        raise ValueError(f"--{flag} {text}: out of range; give {TAKES}")
    if route.fused and route.first == 0:
        raise ValueError(f"--{flag} {text}: SPRINT fuses with a block before the route; begin at 1 or later")
    return route


def parse_target(text: str) -> tuple[str, int | None]:
    """Split PATTERN[:RANK] of --lora_targets into a pattern of layer names and a rank (None: --lora's rank)."""
    found = re.fullmatch(r"([\w*]+(?:\.[\w*]+)*)(?::([1-9]\d{0,4}))?", text, re.ASCII)
    if found is None:
        raise ValueError(f"--lora_targets {text}: no layer's name; give one as qkv, attn.*, or fc1:4 for rank 4")
    return found[1], None if found[2] is None else int(found[2])


def _with_flags(group: str, settings: Iterable[Setting]) -> type[Flags]:
    fields = [(s.flag, s.annotation, flag(s.default, s.help, **s.bounds)) for s in settings]
    title = group.partition(":")[0]
    return make_dataclass(f"{title}Settings", fields, bases=(Flags,), namespace={"group": group}, frozen=True)


FLOWS = "flow", "meanflow"  # objectives with a heading for their settings in --help


def _settings_of(*objectives: str) -> Iterable[Setting]:
    return (setting for name in objectives for setting in DESCRIPTIONS[name].settings.values())


@dataclass(frozen=True)
class ModelFlags(_with_flags("Model", (setting for kind in KINDS.values() for setting in kind.settings))):
    """The network: its kind, size and options."""

    group: ClassVar[str] = "Model: the network, its size and options"

    model: str = flag(
        "DiT-XL/2",
        "KIND-SIZE/PATCH: python -m opendit.models lists them",
        common="python -m opendit.models lists them",
        unit="name",
    )
    num_classes: int | None = flag(
        None, "classes of the model (from the data when left out)", **between(1, 1_000_000, "classes")
    )
    qk_norm: bool = flag(False, "RMSNorm of queries and keys: stable at large sizes and learning rates")
    adaln_lora: int | None = flag(
        None, "rank of what a block adds to a modulation that all share", **between(1, 16_384, "rank")
    )
    bias: bool | None = flag(None, "biases in the blocks' linear layers (default: all but MovieGen's)")
    given_frames: str | None = flag(None, f"of clips, image-to-video and continuation: {GIVEN}", unit="frames")
    positions: str | None = flag(
        None, "how tokens know their places (default: sincos; MovieGen: learned)", choices=POSITIONS
    )
    norm: str | None = flag(
        None, "before every part of a block: LayerNorm or RMSNorm (default: layer; MovieGen: rms)", choices=NORMS
    )
    mlp: str | None = flag(
        None, "of a block; the other one's width keeps its weights (default: gelu; MovieGen: swiglu)", choices=MLP_KINDS
    )

    patch_bottleneck: int | None = flag(
        None,
        "project patches to this many channels first, such as 128 for 16 x 16 pixels (JiT)",
        **between(1, 16_384, "channels"),
    )

    @property
    def architecture(self) -> dict[str, Any]:
        """Flags that change a model's architecture, by name; None keeps the kind's default."""
        names = ["qk_norm", "adaln_lora", "bias", "positions", "norm", "mlp", "patch_bottleneck"]
        return {name: getattr(self, name) for name in (*names, *(s.flag for k in KINDS.values() for s in k.settings))}


@dataclass(frozen=True)
class CaptionFlags(Flags):
    """Flags that turn captions into conditions."""

    group: ClassVar[str] = "Captions: how words become conditions"

    text_encoder: str | None = flag(
        None,
        "of captions: bytes (trained, default), clip, t5 or a folder",
        common="bytes (trained, default), clip, t5, folder",
        unit="name",
    )
    max_text_tokens: int | None = flag(
        None,
        "captions are cut to this (default: the encoder's; bytes: what fits the data, from 64 to 512)",
        **between(1, 16_384, "tokens"),
    )
    text_precision: str = flag(
        "bf16",
        "how the weights of frozen text encoders are stored: in half precision (bf16), in 1 byte (fp8, int8) or 0.56 "
        "(nf4)",
        choices=BASE_PRECISIONS,
    )
    cross_attention: bool = flag(False, "attend to all caption tokens, not to the pooled one only")


@dataclass(frozen=True)
class StartFlags(Flags):
    """Flags that choose the weights that a run starts from, and flags of LoRA."""

    group: ClassVar[str] = "Start from weights: of another run, and LoRA"

    pretrained: str | None = flag(
        None,
        "start from these weights (our .safetensors or Meta's .pt)",
        common="start from these weights",
        unit="path",
    )
    expert: str | None = flag(
        None,
        "of --pretrained of two networks, one for noisier times, the one to train, or both: each step trains one",
        choices=("high", "low", "both"),
    )
    download: bool = flag(False, "fetch --pretrained OWNER/NAME[@REVISION] from the hub, if the cache has it not")
    lora: int | None = flag(
        None, "train low-rank additions of this rank to --pretrained's blocks", **between(1, 16_384, "rank")
    )
    lora_alpha: float | None = flag(
        None, "they are scaled by this / rank (default: the rank)", above=0, at_most=1e6, unit="number"
    )
    lora_targets: list[str] = flag(
        [],
        "only of these layers, as qkv, attn.*, final_layer.linear, or fc1:4 for rank 4 (default: attention and MLP)",
        unit="pattern",
    )
    base_precision: str = flag(
        "bf16",
        "of --lora: how the frozen blocks are stored: as --mixed_precision says (bf16), in 1 byte a weight (fp8, int8) "
        "or 0.56 (nf4)",
        choices=BASE_PRECISIONS,
    )
    card: str | None = flag(
        None,
        "fit rank, FP8, what is recomputed and the micro-batch of --lora to a card's memory: auto (this one), its GiB, "
        "or H200, H100, ...; none: keep all flags",
        unit="name",
    )


@dataclass(frozen=True)
class DataFlags(Flags):
    """Flags that choose the samples and how they are prepared for training."""

    group: ClassVar[str] = "Data: the samples, and what they are turned into"

    data_path: str = flag("digits", data_path_help(), common="folder, CSV, tars, latents; digits", unit="data")
    image_size: int = flag(256, "side of the training pictures in pixels", common="side of the pictures", **SIDE)
    use_video: bool = flag(False, "train a vDiT on clips", common=True)
    num_frames: int = flag(16, "frames of a clip; 17 of public models", common=True, **FRAMES)
    frame_interval: int = flag(1, "take every N-th frame of the file", **FRAMES)
    fps: float | None = flag(None, "frames a second, by the times in a clip's file, instead of every N-th", **FPS)
    short_clips: str = flag(
        "skip", "interval: read clips that are too short at a smaller one", choices=("skip", "interval")
    )
    video_reader: str = flag(
        "auto",
        "what decodes clips: the fastest that works here, or this one; the pixels are the same",
        choices=("auto", "torchcodec", "decord", "pyav"),
    )
    energon_cooker: str | None = flag(
        None, "MODULE:FUNCTION of yours that reads the samples of an Energon folder", unit="name"
    )
    vae: str = flag(
        "ema",
        "ema, mse, a folder with a VAE, or none to train on pixels",
        common="ema, mse, a folder, or none: train on pixels",
        unit="name",
    )
    random_flip: bool | None = flag(None, "mirror pictures at random (default: as suits the data set)")
    random_crop: bool = flag(False, "crop pictures and clips at random places instead of in the middle")
    max_upscale: float = flag(
        1.25, "of --bucket_tokens, --pack_tokens: enlarge nothing by more; smaller samples get smaller shapes", **SCALE
    )
    label_drop: float = flag(0.1, "share of labels replaced by the null class, for guidance", **SHARE)


@dataclass(frozen=True)
class WordFlags(Flags):
    """Settings of captions: their source, and how training changes the captions."""

    group: ClassVar[str] = "Words: where captions come from, and what is changed about them"

    file_column: str | None = flag(
        None, "of a table or metadata.*: its column of files (default: path, or file_name)", unit="name"
    )
    caption_column: str | None = flag(
        None, "of a table or metadata.*: its column of captions (default: text)", unit="name"
    )
    caption_prefix: str | None = flag(
        None, "words before every caption; in a folder also for files without one", free=True, unit="words"
    )
    shuffle_tags: bool = flag(False, "of captions that are tags with commas between: another order at each use")
    tag_drop: float = flag(0.0, "share of these tags that a use leaves out", **SHARE)


@dataclass(frozen=True)
class LoaderFlags(Flags):
    """Flags that control how samples are read."""

    group: ClassVar[str] = "Loader: how samples are read"

    num_workers: int = flag(4, "loader processes per rank; 0 loads in the training process", **WORKERS)
    data_timeout: float = flag(
        300.0,
        "seconds for one file, after which the run ends and names it; 0: any",
        **between(0, 10_000_000, "seconds"),
    )
    max_bad: float = flag(0.05, "share of unreadable files at which the run stops", **SHARE)


@dataclass(frozen=True)
class ObjectiveFlags(_with_flags("Objective", _settings_of(*(name for name in DESCRIPTIONS if name not in FLOWS)))):
    """Flags that choose what the model learns to predict."""

    group: ClassVar[str] = "Objective: what the model learns to predict"

    objective: str = flag(
        "ddpm",
        "; ".join(f"{name}: {objective.predicts}" for name, objective in DESCRIPTIONS.items()),
        choices=tuple(DESCRIPTIONS),
        common="what is learned",
    )
    uncertainty_weighting: bool = flag(
        False, "learn how large the loss is at each time, and divide by that (EDM2); the logged loss is the sum of both"
    )


@dataclass(frozen=True)
class FlowFlags(_with_flags("Flow: settings of flow and meanflow", _settings_of(*FLOWS))):
    """Flags of the objectives flow and meanflow."""


@dataclass(frozen=True)
class RoutingFlags(Flags):
    """Flags of token routing."""

    group: ClassVar[str] = "Token routing: blocks that see a part of the tokens in training"

    route: str | None = flag(
        None,
        "FIRST:LAST:SHARE: blocks FIRST to LAST - 1, from 0, do without this share of the tokens (TREAD); "
        "FIRST:LAST:SHARE:sprint: their result is fused with the tokens before them (SPRINT)",
        unit="route",
    )
    route_until: int | None = flag(None, "from this step on these blocks see all tokens", unit="step", **COUNT)
    route_drop: float = flag(0.1, "sprint: share of samples without the result of these blocks", **SHARE)


CACHED_FEATURES = "cached"  # value of --repa: features stored with cached latents


@dataclass(frozen=True)
class AlignmentFlags(Flags):
    """Flags of representation alignment (REPA)."""

    group: ClassVar[str] = "Alignment: a block's tokens with a vision encoder's features (REPA)"

    repa: str | None = flag(
        None,
        "folder of a frozen vision transformer of transformers, such as DINOv2; cached: features that preprocess.py "
        "latents --repa has stored",
        unit="folder",
    )
    repa_block: int | None = flag(
        None, "tokens after this many blocks (default: two sevenths)", **between(1, 1024, "blocks")
    )
    repa_weight: float = flag(0.5, "of its term in the loss", above=0, at_most=1000, unit="weight")
    repa_projector: str = flag(
        "mlp",
        "of the tokens: three layers (REPA), or conv, with features normalised over places (iREPA)",
        choices=("mlp", "conv"),
    )


@dataclass(frozen=True)
class BatchFlags(Flags):
    """Flags that set the samples of a step and the steps of a run."""

    group: ClassVar[str] = "Batch and length: samples of a step, steps of a run"

    batch_size: int = flag(
        32, "samples per data-parallel rank and micro-batch", common="per rank and micro-batch", **BATCH
    )
    grad_accumulation: int = flag(1, "micro-batches per step", **between(1, 65_536, "micro-batches"))
    global_batch_size: int | None = flag(
        None,
        "samples per step on all GPUs, in micro-batches of --batch_size at most",
        common="of all GPUs, per step",
        **between(1, 2**30, "samples"),
    )
    bucket_tokens: int | None = flag(
        None,
        "crop samples to shapes near their own; --batch_size then counts groups of samples of one shape, of at most "
        "this many tokens each",
        **between(1, 2**30, "tokens"),
    )
    pack_tokens: int | None = flag(
        None,
        "pack samples of any shapes into sequences of this many tokens, which --batch_size then counts; FLUX.1's and "
        "Z-Image's captions are among the tokens",
        **between(1, 2**30, "tokens"),
    )
    epochs: int = flag(
        1400, "passes over the data; without the flag, --max_steps alone ends a run", unit="epochs", **COUNT
    )
    max_steps: int | None = flag(
        None,
        "stop after this many steps, or after the given --epochs if that is sooner",
        common="stop after this many",
        unit="steps",
        **COUNT,
    )
    max_hours: float | None = flag(
        None, "save and stop before the program has run this long; --load resumes", above=0, at_most=1e5, unit="hours"
    )

    @property
    def tokens(self) -> int | None:
        """Value of --pack_tokens or --bucket_tokens. None if --batch_size counts samples."""
        return self.bucket_tokens if self.pack_tokens is None else self.pack_tokens


MOST_WIDTH = 0.28  # largest relative width of an EDM2 power average; at 0.289, all weights are equal


def power_widths(text: str) -> list[float]:
    """Parse the relative widths in ``power:0.05,0.10``, a value of --average. Raises ValueError."""
    kind, _, widths = text.partition(":")
    with suppress(ValueError):
        found = [float(width) for width in widths.split(",")]
        if kind == "power" and len(set(found)) == len(found) and all(0.01 <= width <= MOST_WIDTH for width in found):
            return found
    raise ValueError(
        f"--average {text}: not power: and different widths between 0.01 and {MOST_WIDTH}; give power:0.05,0.10"
    )


@dataclass(frozen=True)
class OptimizerFlags(Flags):
    """Flags of the optimizer (AdamW or Muon), its learning rate, and the average of the weights."""

    group: ClassVar[str] = "Optimizer: AdamW or Muon, its learning rate, and the average of the weights"

    optimizer: str = flag(
        "adamw",
        "adamw8bit: AdamW whose moments are kept in 8 bits; muon: orthogonalised momentum for the blocks' matrices, "
        "AdamW for the rest (both: zero2, ddp, fsdp)",
        choices=OPTIMIZERS,
    )
    muon_momentum: float = flag(0.95, "decay of Muon's mean of the gradients", **SHARE)
    muon_precision: str = flag(
        "bf16", "of Muon's orthogonalisation; fp32 is for comparisons, and slow", choices=("bf16", "fp32")
    )
    lr: float = flag(1e-4, "peak learning rate", common=True, unit="rate", **ABOVE_0)
    lr_schedule: str = flag("constant", "after the warm-up", choices=("constant", "cosine"))
    warmup_steps: int = flag(0, "steps of linear warm-up", unit="steps", **FROM_0)
    weight_decay: float = flag(0.0, "decoupled weight decay", **between(0, 1000, "number"))
    adam_beta1: float = flag(0.9, "decay of AdamW's mean of the gradients", **SHARE)
    adam_beta2: float = flag(0.999, "of its mean of their squares; less (0.95) forgets outliers sooner", **SHARE)
    grad_clip: float = flag(1.0, "bound of the global gradient norm; 0: none", **between(0, 1e38, "norm"))
    max_bad_steps: int = flag(100, "stop after this many skipped (non-finite) steps in a row", unit="steps", **COUNT)
    ema_decay: float | list[float] = flag(
        0.9999,
        "decay of the weights' moving average; several: one average each, the first is sampled from",
        several=True,
        **SHARE,
    )
    ema_warmup: bool = flag(
        True, "smaller decays at first: 1 - 10 / (n + 10) after n updates; a resume keeps its own rule"
    )

    average: str | None = flag(
        None,
        "power:0.05,0.10: averages by power functions of these relative widths, of which sample.py --ema makes others",
        unit="rule",
    )

    @property
    def ema_decays(self) -> list[float]:
        """Decays of the averages, or relative widths of power averages. Raises ValueError for invalid widths."""
        if self.average is not None:
            return power_widths(self.average)
        return self.ema_decay if isinstance(self.ema_decay, list) else [self.ema_decay]


@dataclass(frozen=True)
class TrainSpeedFlags(Flags):
    """Flags of precision, CUDA graphs and compilation."""

    group: ClassVar[str] = "Speed: precision, kernels and compilation"

    mixed_precision: str = flag("fp16", "precision of weights at work", choices=PRECISIONS, common="of weights at work")
    enable_cuda_graph: bool = flag(
        False, "replay forward and backward as one CUDA graph: no time lost between kernels (zero2; fsdp on one GPU)"
    )
    compile: bool = flag(False, "torch.compile for blocks and final layer (zero2, ddp, fsdp)")


@dataclass(frozen=True)
class MemoryFlags(Flags):
    """Flags that choose what the backward pass recomputes and what stays in memory."""

    group: ClassVar[str] = "Memory: what is recomputed in the backward pass"

    grad_checkpoint: bool = flag(
        False, "recompute blocks in the backward pass: less memory, slower", common="recompute blocks in backward"
    )
    recompute: str = flag(
        "none",
        "recomputed in backward: LayerNorms (norms), GELU too (cheap), fc1 too (mlp, half of them: half), all but "
        "attention (but_attention); auto: what fits and costs least",
        choices=(*RECOMPUTE, AUTO),
    )
    recompute_blocks: int | None = flag(
        None,
        f"with --recompute {BUT_ATTENTION} or --grad_checkpoint: this many blocks, evenly spread, and not all",
        unit="blocks",
        **COUNT,
    )
    keep_gathered: bool = flag(
        False, "fastseq: keep the gathered input for the backward pass: more memory, less traffic"
    )

    @property
    def checkpointed(self) -> bool:
        """True if the backward pass recomputes blocks, perhaps except their attention."""
        return self.grad_checkpoint or self.recompute == BUT_ATTENTION


@dataclass(frozen=True)
class PluginFlags(Flags):
    """Flags that choose the engine and how it shards the state."""

    group: ClassVar[str] = "Parallelism: how processes share weights, samples and layers"

    parallel: str = flag(
        "flags",
        "auto: choose plugin, sizes, what is recomputed and the micro-batch for the fastest step that fits, but what "
        "is given; flags: as these say",
        choices=("flags", "auto"),
        common="auto: choose what fits and is fastest",
    )
    gpus_per_node: int | None = flag(
        None, "processes of a machine (default: those started on it; of --dry_run 8)", **between(1, 4096, "processes")
    )
    hardware: str | None = flag(
        None,
        "whose figures auto and --dry_run count with: a file of python -m opendit.cli.links, or H200, H100, ...",
        unit="name",
    )
    plugin: str = flag(
        "zero2",
        "Colossal-AI plugin; " + "; ".join(f"{name}: {plugin.summary}" for name, plugin in PLUGINS.items()),
        choices=tuple(PLUGINS),
        common="what shards the state",
    )
    tensor_parallel_size: int = flag(
        1, "processes that divide every layer of the model", **between(1, 4096, "processes")
    )
    expert_parallel_size: int = flag(
        1, "of fsdp: processes that have different experts of an EC-DiT's blocks", **between(1, 4096, "processes")
    )
    pipeline_parallel_size: int = flag(
        1,
        "processes among which the model's blocks are divided, as stages of a pipeline",
        **between(1, 4096, "processes"),
    )
    pipeline_schedule: str = flag(
        "1f1b",
        "of the pipeline; interleaved: two stages a process, which idles half as long and sends twice as much",
        choices=PIPELINE_SCHEDULES,
    )
    data_parallel_replicate: int = flag(
        1, "of fsdp: copies of the sharded model, for example one per machine (HSDP)", **between(1, 2**20, "copies")
    )
    reshard: str = flag(
        "auto",
        "of fsdp: free a block's gathered weights after its forward pass, or never before its backward pass; auto: "
        "never, if they fit",
        choices=RESHARD,
    )
    reduce_dtype: str = flag("fp32", "of fsdp: in which gradients are summed over ranks", choices=REDUCE_DTYPES)
    offload: str = flag(
        "none",
        "what lies in host memory: of fsdp the averages of the weights (average), or Adam's moments too (state); with "
        "--lora frozen blocks, which are copied when they are due (blocks), or N of them (blocks:N); without --lora "
        "blocks, gradients and the state (fsdp on several GPUs)",
        choices=(*OFFLOAD, BLOCKS),
        counted=BLOCKS,
    )
    gather_fp8: bool = flag(
        True, "of fsdp with --fp8: quantise weights on their shards and gather them in FP8; --no_gather_fp8: in bf16"
    )


@dataclass(frozen=True)
class SpeedFlags(Flags):
    """Flags of the speed-ups that training and sampling have in common."""

    group: ClassVar[str] = "Speed: precision, kernels and compilation"

    enable_modulate_kernel: bool = flag(
        False,
        "fused Triton kernels for adaLN's modulation and gated residuals",
        common="fused modulation, gated residuals",
    )
    enable_layernorm_kernel: bool = flag(
        False, "fused LayerNorm; with --enable_modulate_kernel one kernel does both", common="fused LayerNorm"
    )
    enable_flashattn: bool = flag(
        False,
        "never materialise the N x N attention matrix; the fastest kernel for the card",
        common="the fastest attention kernel",
    )
    fp8: bool = flag(
        False,
        "block linears in FP8, with all fused kernels (Hopper and newer)",
        common="blocks in FP8 (Hopper and newer)",
    )
    attention: str = flag("auto", "force an attention kernel; flash_attn: the package, if installed", choices=ATTENTION)


@dataclass(frozen=True)
class ParallelFlags(Flags):
    """Flags that split one sample over processes. A configuration needs :class:`SpeedFlags` too."""

    group: ClassVar[str] = "Parallelism: how processes share weights, samples and layers"

    sequence_parallel_size: int = flag(1, "processes that share one sample's sequence", **between(1, 4096, "processes"))
    sequence_parallel_type: str = flag(
        "auto", "how they do; auto: what suits ranks, tokens and heads", choices=SEQUENCE_TYPES
    )

    def world_size(self) -> int:
        return environment_world_size()

    def check_parallel(self, world_size: int) -> None:
        """Raise ValueError for sizes and combinations that can't work."""
        check_sequence_parallel(self.sequence_parallel_size, world_size)
        if self.sequence_parallel_size == 1:
            unused = ("sequence_parallel_type", "keep_gathered")
            check_unused(self, dict.fromkeys(unused, "does nothing without --sequence_parallel_size above 1"))
        assert isinstance(self, SpeedFlags)
        if self.attention != "auto" and self.sequence_parallel_type in OWN_ATTENTION:
            raise ValueError(
                f"--attention {self.attention}: --sequence_parallel_type {self.sequence_parallel_type} has a kernel of "
                "its own; leave one of them out"
            )

    def sequence_types(self, types: tuple[str, ...], attention: str) -> tuple[str, ...]:
        """Return the strategies of sequence parallelism in ``types`` that work with --attention."""
        excluded = OWN_ATTENTION if attention != "auto" else ()
        return tuple(kind for kind in types if kind not in excluded)


@dataclass(frozen=True)
class GridFlags(Flags):
    """Flags of the sample grids that a run draws."""

    group: ClassVar[str] = "Sample grids: what a run draws of itself"

    sample_every: int | None = flag(
        None, "steps between sample grids (default: as --ckpt_every); 0: none", unit="steps", **FROM_0
    )
    sample_steps: int = flag(50, "sampling steps of those grids", **SAMPLING_STEPS)
    sample_cfg_scale: float = flag(4.0, "guidance of those grids", **GUIDANCE)
    sample_prompts: list[str] = flag(
        [], "captions that those grids show, or one file with a caption a line", free=True, unit="caption"
    )


@dataclass(frozen=True)
class SaveFlags(Flags):
    """Flags that choose what a run saves and what it resumes from."""

    group: ClassVar[str] = "Checkpoints: what a run saves and resumes from"

    outputs: str = flag("./outputs", "folder of the run folders", common=True, unit="folder")
    load: str | None = flag(
        None,
        "resume: latest, a run folder or a checkpoint folder",
        common="resume: latest, a run or a checkpoint",
        unit="folder",
    )
    save: bool = flag(True, "write checkpoints; --no_save: none, to time steps")
    ckpt_every: int = flag(
        1000, "steps between checkpoints; 0: only the one at the end", common=True, unit="steps", **FROM_0
    )
    ckpt_keep: int = flag(0, "checkpoints to keep, older ones are deleted; 0: all", unit="checkpoints", **FROM_0)
    ckpt_best: str | None = flag(
        None, "also keep the checkpoint that is best by this, as checkpoints/best", choices=tuple(BEST)
    )
    checkpoint_format: str = flag(
        "auto",
        "whole: whole tensors; sharded: each rank writes its shards, for models larger than a host",
        choices=CHECKPOINT_FORMATS,
    )


@dataclass(frozen=True)
class RunFlags(Flags):
    """Flags of the run itself."""

    group: ClassVar[str] = "Run: recipes, seeds, logs"

    recipe: str | None = flag(
        None,
        "a named set of flags, which this command line overrides; list: shows them",
        alias="factory",
        common="a named set of flags; list: shows them",
        unit="name",
    )
    config: str | None = flag(
        None, "a YAML file of flags, over the recipe's and under this command line's; a run writes one", unit="file"
    )
    dry_run: int | None = flag(
        None,
        "print what the run needs, on this many GPUs, and stop; nothing is built",
        alone=0,
        common="print what it needs on this many GPUs",
        **between(0, 2**20, "gpus"),
    )
    global_seed: int = flag(42, "seed of everything random", **SEED)
    log_every: int = flag(10, "steps between log lines", unit="steps", **COUNT)
    log_to: str | list[str] | None = flag(
        None,
        "beside TensorBoard; their environment variables decide what is sent to a server, if anything",
        several=True,
        choices=("wandb", "mlflow"),
    )
    deterministic: bool = flag(False, "the same bits in every run on the same GPUs; slower")
    profile: bool = flag(False, "record a few early steps: a trace and a table of where the time goes")

    @property
    def loggers(self) -> list[str]:
        return [self.log_to] if isinstance(self.log_to, str) else list(dict.fromkeys(self.log_to or ()))


@dataclass(frozen=True)
class ValidationFlags(Flags):
    """Flags of the loss on samples that are not trained on."""

    group: ClassVar[str] = "Validation: the loss on samples that are not trained on"

    validate_every: int | None = flag(
        None,
        "steps between losses of the EMA weights on held-out samples (default: as --ckpt_every)",
        unit="steps",
        **FROM_0,
    )
    validate_path: str | None = flag(
        None, "those samples, as --data_path takes them (digits: its test split)", unit="data"
    )
    validate_share: float = flag(0.0, "hold this share of --data_path out of training, and validate on it", **SHARE)
    validate_samples: int | None = flag(
        None,
        "losses that are averaged (default: at most 1,000, and few enough to cost little)",
        **between(10, 10_000_000, "losses"),
    )

    @property
    def validates(self) -> bool:
        return self.validate_path is not None or self.validate_share > 0


@dataclass(frozen=True)
class EvaluationFlags(Flags):
    """Flags that measure the quality of the EMA weights' samples during a run."""

    group: ClassVar[str] = "Evaluation: how good samples of the EMA weights are"

    evaluate_every: int = flag(0, "steps between evaluations of a few samples; 0: none", unit="steps", **FROM_0)
    evaluate_samples: int = flag(1000, "samples that are drawn for each of them", **between(20, 10_000_000, "samples"))
    evaluate_metrics: list[str] = flag(
        [], "as --metrics of opendit evaluate; all that can be computed when left out", choices=tuple(METRICS)
    )
    evaluate_reference: str | None = flag(None, "as --reference of opendit evaluate", unit="data")
    evaluate_features: str | None = flag(None, "as --features of opendit evaluate: digits, or a network", unit="file")
    evaluate_video_features: str | None = flag(None, "as --video_features of opendit evaluate", unit="file")
    evaluate_steps: int = flag(50, "denoising steps of those samples", **SAMPLING_STEPS)
    evaluate_cfg_scale: float = flag(1.5, "guidance of those samples; 1: off", **GUIDANCE)
