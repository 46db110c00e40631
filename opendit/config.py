"""Every flag once: name, type, default, one-line help; and the checks across flags.

A configuration is a dataclass; :func:`opendit.command_line.parse` makes one of a command line.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from opendit.command_line import flag
from opendit.command_line import parse as parse  # where the rest of the program looks for it
from opendit.diffusion import ALL_SAMPLERS, OBJECTIVES, PREDICTIONS
from opendit.diffusion.flow import TIME_SAMPLING
from opendit.kernels.attention import NAMES as ATTENTIONS
from opendit.kernels.attention import PACKAGE
from opendit.models.positions import POSITIONS
from opendit.models.zoo import canonical_name, is_video
from opendit.parallel.guidance import check_cfg_parallel
from opendit.parallel.mesh import check_sequence_parallel
from opendit.parallel.sequence.choose import KINDS as SEQUENCE_TYPES
from opendit.parallel.sequence.choose import OWN_ATTENTION

OBJECTIVE_FLAGS = {"prediction": "ddpm", "min_snr": "ddpm", "ddpm_shift": "ddpm", "flow_shift": "flow",
                   "flow_times": "flow", "edm_mean": "edm", "edm_std": "edm", "edm_sigma_data": "edm"}  # fmt: skip


@dataclass
class SpeedFlags:
    """The speed-ups that training and sampling share."""

    enable_modulate_kernel: bool = flag(
        False, "fused Triton kernels for adaLN's modulation and gated residuals", group="Speed"
    )
    enable_layernorm_kernel: bool = flag(
        False, "fused LayerNorm; with --enable_modulate_kernel one kernel does both", group="Speed"
    )
    enable_flashattn: bool = flag(
        False, "never materialise the N x N attention matrix; the fastest kernel for the card", group="Speed"
    )
    fp8: bool = flag(False, "block linears in FP8, with all fused kernels (Hopper and newer)", group="Speed")
    attention: str = flag(
        "auto", "force an attention kernel; flash_attn: the package, if installed", group="Speed", choices=ATTENTIONS
    )


@dataclass
class ParallelFlags(SpeedFlags):
    """How processes share a sample, in training and sampling."""

    sequence_parallel_size: int = flag(1, "processes that share one sample's sequence", group="Speed")
    sequence_parallel_type: str = flag(
        "auto", "how they do; auto: what suits ranks, tokens and heads", group="Speed", choices=SEQUENCE_TYPES
    )

    given: frozenset[str] = frozenset()  # the flags that stood on the command line

    def check_parallel(self, world_size: int) -> None:
        """Raises ValueError for sizes and combinations that can't work."""
        check_sequence_parallel(self.sequence_parallel_size, world_size)
        if self.fp8 and self.sequence_parallel_size > 1:
            raise ValueError("--fp8 does not work with --sequence_parallel_size above 1; leave one of them out")
        for name in sorted({"sequence_parallel_type", "keep_gathered"} & self.given):
            if self.sequence_parallel_size == 1:
                raise ValueError(f"--{name} needs --sequence_parallel_size above 1; add that, or leave it out")
        if self.attention != "auto" and self.sequence_parallel_type in OWN_ATTENTION:
            raise ValueError(
                f"--attention {self.attention}: --sequence_parallel_type {self.sequence_parallel_type} has a kernel of "
                "its own; leave one of them out"
            )

    def sequence_types(self, types: tuple[str, ...]) -> tuple[str, ...]:
        """Of the strategies that a model allows those that these flags do."""
        return types if self.attention == "auto" else tuple(t for t in types if t not in OWN_ATTENTION)


@dataclass
class TrainConfig(ParallelFlags):
    """Trains a Diffusion Transformer. Run it with torchrun for several processes."""

    model: str = flag("DiT-XL/2", "KIND-SIZE/PATCH: python -m opendit.models lists them", group="Model")
    num_classes: int | None = flag(None, "classes of the model (from the data when left out)", group="Model")
    text_encoder: str | None = flag(None, "of captions: bytes (trained, default), clip, t5 or a folder", group="Model")
    max_text_tokens: int | None = flag(None, "captions are cut to this (bytes: 64)", group="Model")
    cross_attention: bool = flag(False, "attend to all caption tokens, not to the pooled one only", group="Model")
    qk_norm: bool = flag(False, "RMSNorm of queries and keys: stable at large sizes and learning rates", group="Model")
    adaln_lora: int | None = flag(None, "rank of the blocks' modulation weights (full when left out)", group="Model")
    bias: bool | None = flag(None, "biases in the blocks' linear layers (default: all but MovieGen's)", group="Model")
    positions: str | None = flag(
        None, "how tokens know their places (default: sincos; MovieGen: learned)", group="Model", choices=POSITIONS
    )
    full_attention: bool | None = flag(None, "of ST-DiT: attend to all tokens of a clip too", group="Model")
    expert_capacity: float | None = flag(None, "of EC-DiT: experts of a token, on average (2)", group="Model")
    pretrained: str | None = flag(None, "start from these weights (our .safetensors or Meta's .pt)", group="Model")
    lora: int | None = flag(None, "train low-rank additions of this rank to --pretrained's blocks", group="Model")
    lora_alpha: float | None = flag(None, "they are scaled by this / rank (default: the rank)", group="Model")

    data_path: str = flag("digits", "digits, a FOLDER of pictures, a CSV, LATENTS, or mock: random ones", group="Data")
    image_size: int = flag(256, "side of the training pictures in pixels", group="Data")
    use_video: bool = flag(False, "train a vDiT on clips", group="Data")
    num_frames: int = flag(16, "frames of a clip", group="Data")
    frame_interval: int = flag(1, "every so many frames of the file", group="Data")
    short_clips: str = flag(
        "skip", "interval: read clips that are too short at a smaller one", group="Data", choices=("skip", "interval")
    )
    vae: str = flag("ema", "ema, mse, a folder with a VAE, or none to train on pixels", group="Data")
    random_flip: bool | None = flag(None, "mirror pictures at random (default: as suits the data set)", group="Data")
    label_drop: float = flag(0.1, "share of labels replaced by the null class, for guidance", group="Data")
    num_workers: int = flag(4, "loader processes per rank; 0 loads in the training process", group="Data")
    max_bad: float = flag(0.05, "share of unreadable files at which the run stops", group="Data")

    batch_size: int = flag(32, "samples per data-parallel rank and micro-batch", group="Training")
    grad_accumulation: int = flag(1, "micro-batches per step", group="Training")
    global_batch_size: int | None = flag(
        None, "samples per step on all GPUs, in micro-batches of --batch_size at most", group="Training"
    )
    epochs: int = flag(1400, "passes over the data", group="Training")
    max_steps: int | None = flag(None, "stop after this many steps, whatever --epochs says", group="Training")
    lr: float = flag(1e-4, "peak learning rate", group="Training")
    lr_schedule: str = flag("constant", "after the warm-up", group="Training", choices=("constant", "cosine"))
    warmup_steps: int = flag(0, "steps of linear warm-up", group="Training")
    weight_decay: float = flag(0.0, "AdamW's decoupled weight decay", group="Training")
    adam_beta1: float = flag(0.9, "decay of AdamW's mean of the gradients", group="Training")
    adam_beta2: float = flag(
        0.999, "of its mean of their squares; less (0.95) forgets outliers sooner", group="Training"
    )
    grad_clip: float = flag(1.0, "bound of the global gradient norm; 0: none", group="Training")
    ema_decay: float | list[float] = flag(
        0.9999,
        "decay of the weights' moving average; several: one average each, the first is sampled from",
        group="Training",
        several=True,
    )
    ema_warmup: bool = flag(False, "smaller decays at first: (1 + n) / (10 + n) after n updates", group="Training")
    objective: str = flag(
        "ddpm", "ddpm: noise and variance (the DiT paper); flow: velocity; edm: a preconditioned denoiser",
        group="Training", choices=tuple(OBJECTIVES),
    )  # fmt: skip
    prediction: str = flag("eps", "of ddpm: the noise, or v, the velocity", group="Training", choices=PREDICTIONS)
    min_snr: float | None = flag(None, "of ddpm: gamma of min-SNR loss weights, usually 5", group="Training")
    ddpm_shift: float = flag(1.0, "of ddpm's noise at every timestep, as --flow_shift", group="Training")
    flow_shift: float = flag(1.0, "of flow's times, above 1 to more noise: large pictures, clips", group="Training")
    flow_times: str = flag("uniform", "of flow's training samples", group="Training", choices=tuple(TIME_SAMPLING))
    edm_mean: float = flag(-1.2, "of the log of edm's noise levels in training (P_mean)", group="Training")
    edm_std: float = flag(1.2, "their standard deviation (P_std)", group="Training")
    edm_sigma_data: float = flag(0.5, "of edm: the standard deviation of what the model learns", group="Training")
    global_seed: int = flag(42, "seed of everything random", group="Training")
    max_bad_steps: int = flag(100, "stop after this many skipped (non-finite) steps in a row", group="Training")

    plugin: str = flag("zero2", "Colossal-AI plugin", group="Speed", choices=("zero2", "ddp", "gemini"))
    mixed_precision: str = flag("fp16", "precision of weights at work", group="Speed", choices=("fp16", "bf16", "fp32"))
    enable_cuda_graph: bool = flag(
        False, "replay forward and backward as one CUDA graph: no time lost between kernels (zero2)", group="Speed"
    )
    compile: bool = flag(False, "torch.compile for blocks and final layer (zero2, ddp)", group="Speed")
    grad_checkpoint: bool = flag(False, "recompute blocks in the backward pass: less memory, slower", group="Speed")
    recompute: str = flag(
        "none", "made again in backward: LayerNorms (norms), GELU too (cheap), fc1 too (mlp, half of them: half)",
        group="Speed", choices=("none", "norms", "cheap", "half", "mlp"),
    )  # fmt: skip
    keep_gathered: bool = flag(
        False, "fastseq: keep the gathered input for the backward pass: more memory, less traffic", group="Speed"
    )

    recipe: str | None = flag(
        None, "a named set of flags, which this command line overrides; list: shows them", group="Run", alias="factory"
    )
    dry_run: int | None = flag(
        None, "say what the run needs, on so many GPUs, and stop; nothing is built", group="Run", alone=0
    )
    outputs: str = flag("./outputs", "folder of the run folders", group="Run")
    load: str | None = flag(None, "resume: latest, a run folder or a checkpoint folder", group="Run")
    log_every: int = flag(10, "steps between log lines", group="Run")
    ckpt_every: int = flag(1000, "steps between checkpoints; 0: only the one at the end", group="Run")
    save: bool = flag(True, "write checkpoints; --no_save: none, to time steps", group="Run")
    ckpt_keep: int = flag(0, "checkpoints to keep, older ones are deleted; 0: all", group="Run")
    deterministic: bool = flag(False, "the same bits in every run on the same GPUs; slower", group="Run")
    profile: bool = flag(False, "record a few early steps: a trace and a table of where the time goes", group="Run")
    sample_every: int | None = flag(None, "steps between sample grids (default: as --ckpt_every); 0: none", group="Run")
    sample_steps: int = flag(50, "sampling steps of those grids", group="Run")
    sample_cfg_scale: float = flag(4.0, "guidance of those grids", group="Run")

    @property
    def architecture(self) -> dict:
        """The flags that say how a model of this kind and size is made; None: as its kind is."""
        names = ("qk_norm", "adaln_lora", "bias", "positions", "full_attention", "expert_capacity")
        return {name: getattr(self, name) for name in names}

    @property
    def ema_decays(self) -> list[float]:
        return self.ema_decay if isinstance(self.ema_decay, list) else [self.ema_decay]

    def check(self, world_size: int, has_gpu: bool) -> list[str]:
        """Settles values that depend on the hardware; returns the notes to print.

        Raises:
            ValueError: a combination that can't work; the message names the flag and the fix.
        """
        notes = []
        self.model = canonical_name(self.model)
        if is_video(self.model) != self.use_video:
            raise ValueError(
                f"--model {self.model} takes clips: add --use_video"
                if is_video(self.model)
                else f"--use_video: --model {self.model} takes pictures; clips need a vDiT, e.g. vDiT-XL/222"
            )
        self.mixed_precision, note = settle_precision(self.mixed_precision, "mixed_precision" in self.given, has_gpu)
        notes += note
        if self.plugin == "gemini" and self.mixed_precision == "fp32":
            raise ValueError(
                "--plugin gemini works in bf16 and fp16 only: use --mixed_precision bf16, or --plugin zero2 for fp32"
            )
        if self.deterministic and self.attention in ("cudnn", PACKAGE):
            raise ValueError(
                f"--attention {self.attention} adds gradients in any order; use flash with --deterministic"
            )
        if self.fp8 and self.plugin == "gemini":
            raise ValueError("--fp8 does not work with --plugin gemini; use --plugin zero2, or leave --fp8 out")
        notes += self._settle_recompute()
        positive(self, "image_size", "batch_size", "grad_accumulation", "epochs", "log_every", "sample_steps")
        positive(self, "lr", "max_bad_steps", "num_frames", "frame_interval")
        at_least_zero(self, "num_workers", "warmup_steps", "weight_decay", "grad_clip", "ckpt_every", "ckpt_keep")
        at_least_zero(self, "sample_cfg_scale")
        positive(self, "ddpm_shift", "flow_shift", "edm_std", "edm_sigma_data")
        if not math.isfinite(self.edm_mean):
            raise ValueError(f"--edm_mean {self.edm_mean}: must be finite")
        for name, objective in OBJECTIVE_FLAGS.items():
            if name in self.given and self.objective != objective:
                raise ValueError(f"--{name} belongs to --objective {objective}; add that, or leave it out")
        positive(self, "num_classes", "max_steps", "max_text_tokens", "min_snr", "global_batch_size")
        positive(self, "lora", "lora_alpha")
        at_least_zero(self, "dry_run", "sample_every")
        shares = [(name, getattr(self, name)) for name in ("label_drop", "max_bad", "adam_beta1", "adam_beta2")]
        for name, value in shares + [("ema_decay", decay) for decay in self.ema_decays]:
            if not 0 <= value < 1:
                raise ValueError(f"--{name} {value}: must be at least 0 and below 1")
        if len(set(self.ema_decays)) < len(self.ema_decays):
            raise ValueError(f"--ema_decay {' '.join(map(str, self.ema_decays))}: a decay is given twice")
        if self.lora is not None:
            self._check_lora()
        self.check_parallel(world_size)
        notes += self._settle_batch(world_size // self.sequence_parallel_size)
        if self.keep_gathered and self.sequence_parallel_type not in ("auto", "fastseq"):
            raise ValueError(f"--keep_gathered: --sequence_parallel_type {self.sequence_parallel_type} gathers nothing")
        if self.dry_run is None:
            check_writable(self.outputs, "--outputs")
        return notes

    def _settle_batch(self, dp_size: int) -> list[str]:
        """Of --global_batch_size: the largest micro-batch up to --batch_size, and how many of them."""
        if {"grad_accumulation", "global_batch_size"} <= self.given:
            raise ValueError("--grad_accumulation: --global_batch_size decides it; leave one of them out")
        if self.global_batch_size is None or "grad_accumulation" in self.given:  # rather than a recipe's global batch
            return []
        asked, fits = self.global_batch_size, max(1, self.global_batch_size // dp_size) * dp_size
        if fits != asked and "global_batch_size" in self.given:
            raise ValueError(
                f"--global_batch_size {asked}: {dp_size} data-parallel ranks can't share it evenly; use {fits}"
            )
        share = fits // dp_size
        self.global_batch_size = fits
        self.batch_size = next(size for size in range(min(self.batch_size, share), 0, -1) if share % size == 0)
        self.grad_accumulation = share // self.batch_size
        return [] if fits == asked else [f"global batch: {fits}, not {asked}, to be shared by {dp_size} ranks evenly"]

    def _check_lora(self) -> None:
        if self.pretrained is None:
            raise ValueError("--lora adds to trained weights: say which with --pretrained")
        clashes = {
            "--plugin gemini": self.plugin == "gemini",
            "--fp8": self.fp8,
            "--recompute": self.recompute != "none",
            "--sequence_parallel_size": self.sequence_parallel_size > 1,
        }
        for name, clash in clashes.items():
            if clash:
                raise ValueError(f"--lora does not work with {name}; leave one of them out")

    def _settle_recompute(self) -> list[str]:
        if self.recompute == "none":
            return []
        for name, why in (
            ("grad_checkpoint", "recomputes whole blocks already"),
            ("compile", "decides by itself what a block keeps"),
        ):
            if getattr(self, name):
                raise ValueError(f"--recompute {self.recompute}: --{name} {why}; choose one of the two")
        why = None
        if self.plugin == "gemini":
            why = "--plugin gemini has freed the weights by then"
        elif self.fp8:
            why = "--fp8 keeps these activations in one byte each, and can't make them again"
        if why is None:
            return []
        note, self.recompute = f"recompute: none, not {self.recompute}, because {why}", "none"
        return [note]


@dataclass
class SampleConfig(ParallelFlags):
    """Draws pictures from a checkpoint. Several processes (torchrun) share the work."""

    ckpt: str = flag("latest", "checkpoint file or folder, run folder, or latest", group="Model")
    lora: str | None = flag(None, "a run of train.py --lora, merged into --ckpt's weights", group="Model")
    model: str | None = flag(None, "needed only when the checkpoint does not say (Meta's .pt)", group="Model")
    image_size: int | None = flag(None, "pixels; from the checkpoint when left out", group="Model")
    vae: str | None = flag(None, "ema, mse, PATH or none; from the checkpoint when left out", group="Model")
    text_encoder: str | None = flag(None, "clip, t5 or a folder; from the checkpoint when left out", group="Model")
    use_video: bool = flag(False, "draw clips (a vDiT's checkpoint does anyway)", group="Model")
    num_frames: int | None = flag(None, "frames of a clip; from the checkpoint when left out", group="Model")
    frame_interval: int | None = flag(None, "of the training clips: sets the clip's frame rate", group="Output")
    weights: str = flag("ema", "which weights of a run's checkpoint", group="Model", choices=("ema", "model"))

    class_labels: list[int] = flag([], "labels to draw, repeated up to --num_samples", group="Sampling")
    prompt: list[str] = flag([], "captions to draw, or one file with a caption a line", group="Sampling")
    num_samples: int | None = flag(None, "pictures (default: one a label, or up to 16)", group="Sampling")
    num_sampling_steps: int = flag(250, "denoising steps", group="Sampling")
    sampler: str | None = flag(
        None, "of the model's objective (default: ddpm; flow: euler; edm: heun)", group="Sampling", choices=ALL_SAMPLERS
    )
    cfg_scale: float = flag(4.0, "classifier-free guidance; 1: off", group="Sampling")
    cfg_interval: list[float] = flag([], "LOW HIGH: guide at noise levels sigma between only", group="Sampling")
    cfg_channels: int | None = flag(None, "guide only the first channels (Meta's figures: 3)", group="Sampling")
    seed: int = flag(0, "seed of the noise", group="Sampling")
    batch_size: int = flag(32, "pictures at a time per process, or per group that shares them", group="Sampling")
    mixed_precision: str = flag("bf16", "precision of the model", group="Speed", choices=("fp16", "bf16", "fp32"))
    cfg_parallel: bool = flag(False, "the two halves of guidance on different processes", group="Speed")

    outputs: str = flag("./outputs", "where --ckpt latest looks for runs", group="Output")
    output: str = flag("./samples", "folder for the grid and the single pictures", group="Output")
    save_png: bool = flag(True, "write single pictures too", group="Output")
    npz: str | None = flag(None, "also write arr_0 (uint8 N,H,W,3) and arr_1 (labels) for FID tools", group="Output")

    def check(self, world_size: int, has_gpu: bool) -> list[str]:
        """As :meth:`TrainConfig.check`."""
        self.mixed_precision, notes = settle_precision(self.mixed_precision, "mixed_precision" in self.given, has_gpu)
        positive(
            self, "num_sampling_steps", "batch_size", "num_samples", "num_frames", "frame_interval", "cfg_channels"
        )
        at_least_zero(self, "cfg_scale")
        if self.cfg_interval:
            check_interval(self.cfg_interval)
        if self.num_sampling_steps > 1000:
            raise ValueError(f"--num_sampling_steps {self.num_sampling_steps}: the models have 1000 steps at most")
        if self.model is not None:
            self.model = canonical_name(self.model)
        self.check_parallel(world_size)
        if self.cfg_parallel:
            if self.cfg_scale == 1:
                raise ValueError("--cfg_parallel: --cfg_scale 1 is no guidance and has one half; leave one of them out")
            check_cfg_parallel(self.sequence_parallel_size, world_size)
        check_writable(self.output, "--output")
        return notes


def settle_precision(precision: str, asked_for: bool, has_gpu: bool) -> tuple[str, list[str]]:
    """Half precision needs a GPU: an error when it was asked for, a printed fallback when it was the default.

    (bf16 works on CPUs, slowly, and is allowed when asked for.)
    """
    if has_gpu or precision == "fp32" or (precision == "bf16" and asked_for):
        return precision, []
    if asked_for:
        raise ValueError(f"--mixed_precision {precision} needs a GPU, and there is none: use --mixed_precision fp32")
    return "fp32", [f"precision: fp32, because there is no GPU (the default {precision} needs one)"]


def positive(config, *names: str) -> None:
    """Raises ValueError for the first of these flags that is given and not a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} {value}: must be above 0 and finite")


def at_least_zero(config, *names: str) -> None:
    """Raises ValueError for the first of these flags that is given and not a finite number from 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"--{name} {value}: must be at least 0 and finite")


def check_interval(interval: list[float]) -> None:
    """Raises ValueError unless ``interval`` is two noise levels of --cfg_interval, the lower one first."""
    if len(interval) != 2 or not 0 <= interval[0] < interval[1]:
        given = " ".join(f"{level:g}" for level in interval)
        raise ValueError(f"--cfg_interval {given}: takes two noise levels, LOW HIGH, with 0 <= LOW < HIGH")


def check_writable(folder: str, flag_name: str) -> None:
    """Makes the folder and writes a file into it. Raises ValueError when that fails."""
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".write_test"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{flag_name} {folder}: can't write there ({error.strerror}); name another folder") from error


def to_dict(config) -> dict:
    """What config.json holds."""
    return {k: v for k, v in dataclasses.asdict(config).items() if k != "given"}
