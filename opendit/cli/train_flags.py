"""Every flag of train.py once: name, type, default, one-line help; and the checks across flags."""

from dataclasses import dataclass
from typing import ClassVar

from opendit.cli.checks import check_exists, check_vae, check_weights, check_workers, check_writable, settle_precision
from opendit.cli.command_line import check_values, flag, settle_idle
from opendit.cli.shared_flags import ParallelFlags
from opendit.cli.values import (
    ABOVE_0,
    BATCH,
    COUNT,
    FRAMES,
    FROM_0,
    GUIDANCE,
    SAMPLING_STEPS,
    SEED,
    SHARE,
    SIDE,
    WORKERS,
)
from opendit.diffusion.names import FLOW_TIMES, PREDICTIONS, SAMPLERS_OF
from opendit.kernels.names import PACKAGE, RECOMPUTE
from opendit.models.names import POSITIONS, canonical_name, is_video
from opendit.parallel.names import PLUGINS, PRECISIONS

KIND_FLAGS = {"full_attention": "ST-DiT", "expert_capacity": "EC-DiT"}
OBJECTIVE_FLAGS = {"prediction": "ddpm", "min_snr": "ddpm", "ddpm_shift": "ddpm", "flow_shift": "flow",
                   "flow_times": "flow", "edm_mean": "edm", "edm_std": "edm", "edm_sigma_data": "edm"}  # fmt: skip


@dataclass
class TrainConfig(ParallelFlags):
    """Trains a Diffusion Transformer. Run it with torchrun for several processes."""

    program: ClassVar[str] = "train.py"

    model: str = flag("DiT-XL/2", "KIND-SIZE/PATCH: python -m opendit.models lists them", group="Model")
    num_classes: int | None = flag(
        None, "classes of the model (from the data when left out)", group="Model", at_least=1, at_most=1_000_000
    )
    text_encoder: str | None = flag(None, "of captions: bytes (trained, default), clip, t5 or a folder", group="Model")
    max_text_tokens: int | None = flag(
        None, "captions are cut to this (bytes: 64)", group="Model", at_least=1, at_most=16_384
    )
    cross_attention: bool = flag(False, "attend to all caption tokens, not to the pooled one only", group="Model")
    qk_norm: bool = flag(False, "RMSNorm of queries and keys: stable at large sizes and learning rates", group="Model")
    adaln_lora: int | None = flag(
        None, "rank of what a block adds to a modulation that all share", group="Model", at_least=1, at_most=16_384
    )
    bias: bool | None = flag(None, "biases in the blocks' linear layers (default: all but MovieGen's)", group="Model")
    positions: str | None = flag(
        None, "how tokens know their places (default: sincos; MovieGen: learned)", group="Model", choices=POSITIONS
    )
    full_attention: bool | None = flag(None, "of ST-DiT: attend to all tokens of a clip too", group="Model")
    expert_capacity: float | None = flag(
        None, "of EC-DiT: experts of a token, on average (2)", group="Model", above=0, at_most=1024
    )
    pretrained: str | None = flag(None, "start from these weights (our .safetensors or Meta's .pt)", group="Model")
    lora: int | None = flag(
        None,
        "train low-rank additions of this rank to --pretrained's blocks",
        group="Model",
        at_least=1,
        at_most=16_384,
    )
    lora_alpha: float | None = flag(
        None, "they are scaled by this / rank (default: the rank)", group="Model", above=0, at_most=1e6
    )

    data_path: str = flag("digits", "digits, a FOLDER of pictures, a CSV, LATENTS, or mock: random ones", group="Data")
    image_size: int = flag(256, "side of the training pictures in pixels", group="Data", **SIDE)
    use_video: bool = flag(False, "train a vDiT on clips", group="Data")
    num_frames: int = flag(16, "frames of a clip", group="Data", **FRAMES)
    frame_interval: int = flag(1, "every so many frames of the file", group="Data", **FRAMES)
    short_clips: str = flag(
        "skip", "interval: read clips that are too short at a smaller one", group="Data", choices=("skip", "interval")
    )
    vae: str = flag("ema", "ema, mse, a folder with a VAE, or none to train on pixels", group="Data")
    random_flip: bool | None = flag(None, "mirror pictures at random (default: as suits the data set)", group="Data")
    label_drop: float = flag(0.1, "share of labels replaced by the null class, for guidance", group="Data", **SHARE)
    num_workers: int = flag(4, "loader processes per rank; 0 loads in the training process", group="Data", **WORKERS)
    data_timeout: float = flag(
        300.0,
        "seconds for one file, after which the run ends and names it; 0: any",
        group="Data",
        at_least=0,
        at_most=10_000_000,
    )
    max_bad: float = flag(0.05, "share of unreadable files at which the run stops", group="Data", **SHARE)

    batch_size: int = flag(32, "samples per data-parallel rank and micro-batch", group="Training", **BATCH)
    grad_accumulation: int = flag(1, "micro-batches per step", group="Training", at_least=1, at_most=65_536)
    global_batch_size: int | None = flag(
        None,
        "samples per step on all GPUs, in micro-batches of --batch_size at most",
        group="Training",
        at_least=1,
        at_most=2**30,
    )
    epochs: int = flag(1400, "passes over the data", group="Training", **COUNT)
    max_steps: int | None = flag(None, "stop after this many steps, whatever --epochs says", group="Training", **COUNT)
    lr: float = flag(1e-4, "peak learning rate", group="Training", **ABOVE_0)
    lr_schedule: str = flag("constant", "after the warm-up", group="Training", choices=("constant", "cosine"))
    warmup_steps: int = flag(0, "steps of linear warm-up", group="Training", **FROM_0)
    weight_decay: float = flag(0.0, "AdamW's decoupled weight decay", group="Training", at_least=0, at_most=1000)
    adam_beta1: float = flag(0.9, "decay of AdamW's mean of the gradients", group="Training", **SHARE)
    adam_beta2: float = flag(
        0.999, "of its mean of their squares; less (0.95) forgets outliers sooner", group="Training", **SHARE
    )
    grad_clip: float = flag(
        1.0, "bound of the global gradient norm; 0: none", group="Training", at_least=0, at_most=1e38
    )
    ema_decay: float | list[float] = flag(
        0.9999,
        "decay of the weights' moving average; several: one average each, the first is sampled from",
        group="Training",
        several=True,
        **SHARE,
    )
    ema_warmup: bool = flag(False, "smaller decays at first: (1 + n) / (10 + n) after n updates", group="Training")
    objective: str = flag(
        "ddpm", "ddpm: noise and variance (the DiT paper); flow: velocity; edm: a preconditioned denoiser",
        group="Training", choices=tuple(SAMPLERS_OF),
    )  # fmt: skip
    prediction: str = flag("eps", "of ddpm: the noise, or v, the velocity", group="Training", choices=PREDICTIONS)
    min_snr: float | None = flag(
        None, "of ddpm: gamma of min-SNR loss weights, usually 5", group="Training", at_least=0.001, at_most=1e6
    )
    ddpm_shift: float = flag(
        1.0, "of ddpm's noise at every timestep, as --flow_shift", group="Training", at_least=0.01, at_most=100
    )
    flow_shift: float = flag(
        1.0,
        "of flow's times, above 1 to more noise: large pictures, clips",
        group="Training",
        at_least=0.01,
        at_most=100,
    )
    flow_times: str = flag("uniform", "of flow's training samples", group="Training", choices=FLOW_TIMES)
    edm_mean: float = flag(
        -1.2, "of the log of edm's noise levels in training (P_mean)", group="Training", at_least=-10, at_most=10
    )
    edm_std: float = flag(1.2, "their standard deviation (P_std)", group="Training", at_least=0.001, at_most=5)
    edm_sigma_data: float = flag(
        0.5, "of edm: the standard deviation of what the model learns", group="Training", at_least=0.001, at_most=1000
    )
    global_seed: int = flag(42, "seed of everything random", group="Training", **SEED)
    max_bad_steps: int = flag(
        100, "stop after this many skipped (non-finite) steps in a row", group="Training", **COUNT
    )

    plugin: str = flag("zero2", "Colossal-AI plugin", group="Speed", choices=PLUGINS)
    mixed_precision: str = flag("fp16", "precision of weights at work", group="Speed", choices=PRECISIONS)
    enable_cuda_graph: bool = flag(
        False, "replay forward and backward as one CUDA graph: no time lost between kernels (zero2)", group="Speed"
    )
    compile: bool = flag(False, "torch.compile for blocks and final layer (zero2, ddp)", group="Speed")
    grad_checkpoint: bool = flag(False, "recompute blocks in the backward pass: less memory, slower", group="Speed")
    recompute: str = flag(
        "none", "made again in backward: LayerNorms (norms), GELU too (cheap), fc1 too (mlp, half of them: half)",
        group="Speed", choices=RECOMPUTE,
    )  # fmt: skip
    keep_gathered: bool = flag(
        False, "fastseq: keep the gathered input for the backward pass: more memory, less traffic", group="Speed"
    )

    recipe: str | None = flag(
        None, "a named set of flags, which this command line overrides; list: shows them", group="Run", alias="factory"
    )
    dry_run: int | None = flag(
        None,
        "say what the run needs, on so many GPUs, and stop; nothing is built",
        group="Run",
        alone=0,
        at_least=0,
        at_most=2**20,
    )
    outputs: str = flag("./outputs", "folder of the run folders", group="Run")
    load: str | None = flag(None, "resume: latest, a run folder or a checkpoint folder", group="Run")
    log_every: int = flag(10, "steps between log lines", group="Run", **COUNT)
    ckpt_every: int = flag(1000, "steps between checkpoints; 0: only the one at the end", group="Run", **FROM_0)
    save: bool = flag(True, "write checkpoints; --no_save: none, to time steps", group="Run")
    ckpt_keep: int = flag(0, "checkpoints to keep, older ones are deleted; 0: all", group="Run", **FROM_0)
    deterministic: bool = flag(False, "the same bits in every run on the same GPUs; slower", group="Run")
    profile: bool = flag(False, "record a few early steps: a trace and a table of where the time goes", group="Run")
    sample_every: int | None = flag(
        None, "steps between sample grids (default: as --ckpt_every); 0: none", group="Run", **FROM_0
    )
    sample_steps: int = flag(50, "sampling steps of those grids", group="Run", **SAMPLING_STEPS)
    sample_cfg_scale: float = flag(4.0, "guidance of those grids", group="Run", **GUIDANCE)

    @property
    def architecture(self) -> dict:
        """The flags that say how a model of this kind and size is made; None: as its kind is."""
        names = ("qk_norm", "adaln_lora", "bias", "positions", "full_attention", "expert_capacity")
        return {name: getattr(self, name) for name in names}

    @property
    def ema_decays(self) -> list[float]:
        return self.ema_decay if isinstance(self.ema_decay, list) else [self.ema_decay]

    def world_size(self) -> int:
        """The processes of the run: those there are, or that --dry_run asks about."""
        found = super().world_size()
        return found if self.dry_run is None else self.dry_run or max(found, self.sequence_parallel_size)

    def check(self, world_size: int, has_gpu: bool) -> list[str]:
        """Settles values that depend on the hardware; returns the notes to print.

        Raises:
            ValueError: a combination that can't work; the message names the flag and the fix.
        """
        check_values(self)
        self.model = canonical_name(self.model)
        if is_video(self.model) != self.use_video:
            raise ValueError(
                f"--model {self.model} takes clips: add --use_video"
                if is_video(self.model)
                else f"--use_video: --model {self.model} takes pictures; clips need a vDiT, e.g. vDiT-XL/222"
            )
        notes = settle_idle(self, self._idle()) + self._check_steps()
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
        if self.enable_flashattn and self.attention == "math":
            raise ValueError(
                "--attention math builds the N x N matrix, which --enable_flashattn rules out; leave one out"
            )
        if self.fp8 and self.plugin == "gemini":
            raise ValueError("--fp8 does not work with --plugin gemini; use --plugin zero2, or leave --fp8 out")
        notes += self._settle_recompute()
        if len(set(self.ema_decays)) < len(self.ema_decays):
            raise ValueError(f"--ema_decay {' '.join(map(str, self.ema_decays))}: a decay is given twice")
        if self.lora is not None:
            self._check_lora()
        self.check_parallel(world_size)
        notes += self._settle_batch(world_size // self.sequence_parallel_size)
        if self.keep_gathered and self.sequence_parallel_type not in ("auto", "fastseq"):
            raise ValueError(f"--keep_gathered: --sequence_parallel_type {self.sequence_parallel_type} gathers nothing")
        check_workers(self.num_workers, "num_workers" in self.given)
        if self.load not in (None, "latest"):
            check_exists(self.load, "--load", "latest, a run folder or a checkpoint folder")
        check_vae(self.vae)
        if self.dry_run is None:
            if self.pretrained is not None:
                check_weights(self.pretrained, "--pretrained")
            if self.data_path not in ("digits", "mock"):
                check_exists(self.data_path, "--data_path", "digits, or a folder or CSV that does")
            check_writable(self.outputs, "--outputs")
        return notes

    def _idle(self) -> dict[str, str]:
        """The flags that would change nothing with the others as they are, and why."""
        kind, mock = self.model.rpartition("-")[0], self.data_path == "mock"
        idle = {name: f"belongs to --objective {of}" for name, of in OBJECTIVE_FLAGS.items() if of != self.objective}
        idle |= {name: f"does nothing without --model {of}-..." for name, of in KIND_FLAGS.items() if of != kind}
        if self.lora is None:
            idle["lora_alpha"] = "does nothing without --lora"
        if not self.use_video:
            idle |= dict.fromkeys(("num_frames", "frame_interval", "short_clips"), "does nothing without --use_video")
        if not self.save:
            idle["ckpt_keep"] = "does nothing with --no_save"
            if mock or self.sample_every is not None:  # otherwise grids follow it
                other = "--data_path mock" if mock else f"--sample_every {self.sample_every}"
                idle["ckpt_every"] = f"does nothing with --no_save and {other}"
        # (--sample_every 0 switches the grids off, in a command line that may go on saying how they are drawn.)
        if mock:
            why = "does nothing with --data_path mock, whose samples are not drawn"
            idle |= dict.fromkeys(("sample_steps", "sample_cfg_scale"), why)
            if self.sample_every != 0:
                idle["sample_every"] = why
            idle |= dict.fromkeys(
                ("random_flip", "frame_interval", "short_clips"), "does nothing with --data_path mock"
            )
        if mock or self.data_path == "digits":
            idle["max_bad"] = f"does nothing with --data_path {self.data_path}, which has no files"
        if self.pretrained and self.lora is None and self.load not in (None, "latest"):
            idle["pretrained"] = "does nothing with --load, which brings its own weights"
        return idle

    def _check_steps(self) -> list[str]:
        if self.max_steps is None or self.warmup_steps <= self.max_steps:
            return []
        found = f"--warmup_steps {self.warmup_steps}: the run ends before, at --max_steps {self.max_steps}"
        if "warmup_steps" in self.given:
            raise ValueError(f"{found}; lower it, or raise --max_steps")
        return [f"{found}, so that --lr {self.lr:g} is never reached"]

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
