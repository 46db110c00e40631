"""The flags of train.py, and the checks across them."""

import math
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from opendit.config import components as component
from opendit.config.architectures import (
    CLIP_FRAMES,
    KINDS,
    PUBLIC,
    canonical_name,
    commit_of_run,
    depth_and_heads,
    downscale_of_vae,
    family_in,
    flags_of_run,
    is_video,
    name_of_folder,
    parse_given,
    patch_size,
)
from opendit.config.checks import (
    check_data,
    check_exists,
    check_rate,
    check_vae,
    check_weights,
    check_workers,
    check_writable,
    fetched,
    read_prompts,
    resolve_precision,
)
from opendit.config.command_line import suggests_flags
from opendit.config.components import (
    EvaluationFlags,
    GridFlags,
    ParallelFlags,
    RunFlags,
    SaveFlags,
    SpeedFlags,
    TokenRoute,
    ValidationFlags,
    parse_route,
    parse_target,
)
from opendit.config.console import OnThisMachine
from opendit.config.evaluate import EvaluateConfig, rename_for_training
from opendit.config.flags import check_unused, check_values
from opendit.config.names import (
    AUTO,
    BLOCKS,
    BUT_ATTENTION,
    DESCRIPTIONS,
    DIGITS,
    OWN_ATTENTION,
    PLUGINS,
    PYTHON,
    check_precision,
    inline_sources,
    named_sources,
)
from opendit.config.parallel_sizes import (
    check_expert_parallel_size,
    check_pipeline_parallel_size,
    check_replicate,
    check_tensor_parallel_size,
    crossing,
    environment_node_size,
    parse_offload,
)
from opendit.config.recipes import find_recipe

KIND_FLAGS = {setting.flag: name for name, kind in KINDS.items() for setting in kind.settings}
OBJECTIVE_FLAGS = {setting.flag: name for name, of in DESCRIPTIONS.items() for setting in of.settings.values()}


NO_BASE = "--lora: adds to trained weights; say which with --pretrained"


@suggests_flags
@dataclass(frozen=True)
class TrainConfig(
    component.ModelFlags,
    component.CaptionFlags,
    component.DataFlags,
    component.WordFlags,
    component.LoaderFlags,
    component.StartFlags,
    component.ObjectiveFlags,
    component.FlowFlags,
    component.RoutingFlags,
    component.AlignmentFlags,
    component.BatchFlags,
    component.OptimizerFlags,
    component.TrainSpeedFlags,
    SpeedFlags,
    component.MemoryFlags,
    component.PluginFlags,
    ParallelFlags,
    RunFlags,
    SaveFlags,
    GridFlags,
    ValidationFlags,
    EvaluationFlags,
):
    """Trains a Diffusion Transformer. Run it with torchrun for several processes."""

    program: ClassVar[str] = "train.py"
    examples: ClassVar[tuple[str, ...]] = (
        "python train.py --model DiT-S/2 --data_path PICTURES --image_size 256",
        "python train.py --model DiT-S/2 --data_path PICTURES --load latest    # resumes",
        "torchrun --standalone --nproc_per_node=8 train.py --recipe dit_xl_imagenet256",
        "python train.py --recipe lora --pretrained Z-Image --data_path photos    # fitted to this card",
        "python train.py --recipe pretrain_7b --dry_run 64    # what it would need",
    )

    def world_size(self) -> int:
        """Return the number of processes, or with --dry_run the number of GPUs to plan for."""
        found = super().world_size()
        return found if self.dry_run is None else self.dry_run or max(found, self.sharing)

    @property
    def decided_by_estimates(self) -> bool:
        """True if estimates of memory and time choose some flags before the run starts."""
        return self.parallel == AUTO or self.card is not None or self.recompute == AUTO

    @property
    def sharing(self) -> int:
        """Number of processes that share each sample."""
        return self.sequence_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    def node_size(self, world_size: int) -> int:
        found = environment_node_size() if self.dry_run in (None, 0) else None
        return min(world_size, self.gpus_per_node or found or (8 if self.dry_run is not None else world_size))

    def resolve(self, world_size: int, has_gpu: bool) -> tuple["TrainConfig", list[str]]:
        """Check all flags, and fill in values that depend on other flags and on the hardware.

        Return the resolved flags, and notes to print. Raises ValueError with the flag and the fix.
        """
        check_values(self)
        for name in ("data_path", "validate_path"):
            inline_sources(getattr(self, name) or "", f"--{name}")  # raises its errors
        flags = self._fetched()._resolve_public()
        flags = replace(flags, model=canonical_name(flags.model))
        if flags.given_frames is not None:
            parse_given(flags.given_frames)
        flags._check_kind()
        notes = check_unused(flags, flags._unused()) + flags._check_steps()
        flags, note = flags._resolve_frames()
        notes += note
        if flags.plugin != "fsdp" and not flags.streamed_blocks:  # a recipe may have set ``--offload``
            flags = replace(flags, offload="none")
        precision, note = resolve_precision(flags.mixed_precision, "mixed_precision" in flags.given, has_gpu)
        flags, notes = replace(flags, mixed_precision=precision), notes + note
        flags._check_speed()
        flags, note = flags._resolve_recompute()
        notes += note
        flags._check_optimizer()
        flags, note = flags._resolve_meanflow()
        notes += note
        check_rate(flags.fps, flags.given)
        flags._check_validation()
        flags._check_evaluation()
        if flags.lora is not None:
            flags.check_lora()
        flags.check_streamed(world_size)
        if flags.parallel != "auto" or flags.sequence_parallel_size > 1:
            flags.check_parallel(world_size)
        if flags.expert == "both":
            flags._check_both()
        flags._check_tensor_parallel(world_size)
        flags._check_pipeline_parallel(world_size)
        flags._check_sizes()
        check_replicate(flags.data_parallel_replicate, flags.sharing, world_size)
        flags._check_expert_parallel(world_size)
        flags, note = flags._resolve_tokens()
        notes += note
        flags._check_packs()
        flags._check_route()
        flags._check_alignment()
        flags._check_uncertainty()
        if flags.parallel != "auto":  # --parallel auto chooses the batch size itself
            flags, note = flags._resolve_batch(world_size // flags.sharing)
            notes += note
        flags._check_contrast()
        notes += crossing(
            flags.node_size(world_size), world_size, flags.tensor_parallel_size, flags.sequence_parallel_size
        )
        if flags.keep_gathered and flags.sequence_parallel_type not in ("auto", "fastseq"):
            kind = flags.sequence_parallel_type
            raise ValueError(f"--keep_gathered: --sequence_parallel_type {kind} gathers nothing; leave it out")
        flags._check_files()
        return flags, notes + flags._recipe_notes()

    def _fetched(self) -> "TrainConfig":
        """Replace a hub name in --pretrained by the local folder. A dry run without --download keeps the name."""
        if self.pretrained is None or (self.dry_run is not None and not self.download):
            return self
        commit = None if self.load in (None, "latest") else commit_of_run(self.load, self.pretrained)
        return replace(self, pretrained=fetched(self.pretrained, "--pretrained", self.download, commit))

    def _resolve_public(self) -> "TrainConfig":
        """Fill in a public model's flags, if --pretrained or --load names its folder or a run that trains the model.
        The user's picture size, VAE and text encoders stay. Raises ValueError for flags that contradict the model."""
        source = self.pretrained or (None if self.load == "latest" else self.load)
        name = None if source is None else name_of_folder(source)
        if source is None or name is None:
            if family_in(self.model):
                raise ValueError(
                    f"--model {self.model}: is read from a folder; give that to --pretrained, or a run to --load"
                )
            return self
        if self.pretrained is not None and self.load not in (None, "latest"):
            run = name_of_folder(self.load)  # the run keeps its name if the folder of --pretrained has moved
            if run is not None and family_in(run) == family_in(name):
                name = run
        if "model" in self.given and self.model != name:
            raise ValueError(f"--model {self.model}: {source} holds {name}; leave the flag out")
        if "objective" in self.given and self.objective != "flow":
            raise ValueError(f"--objective {self.objective}: {source} is a flow model; leave the flag out")
        if given := self.given & {"flow_prediction", "flow_noise_scale", "flow_contrast"}:
            raise ValueError(f"--{min(given)}: {source} has learned velocities by its own loss; leave the flag out")
        changed = self.architecture | {"cross_attention": self.cross_attention or None}
        own = [flag for flag, value in changed.items() if flag in self.given and value is not None]
        if own:
            raise ValueError(f"--{own[0]}: {source} says itself how its network is built; leave the flag out")
        settings: dict[str, Any] = {"model": name, "objective": "flow"}
        folder = Path(source).expanduser()
        if self.pretrained is not None:
            settings["pretrained"] = self._expert_of(folder)
        if "image_size" not in self.given:
            settings["image_size"] = PUBLIC[name.partition("/")[0]].image_size
        named = self._encoders_beside(folder)
        return replace(self, **settings, **named, given=self.given | named.keys())

    def _encoders_beside(self, folder: Path) -> dict[str, str]:
        """Return --vae and --text_encoder of a public model, unless the user sets them: those in its pipeline's folder,
        or those with which the run in ``folder`` was started."""
        stored, named = flags_of_run(folder), {}
        vae = str(folder / "vae") if (folder / "vae").is_dir() else stored.get("vae")
        text = str(folder) if (folder / "text_encoder").is_dir() else stored.get("text_encoder")
        for flag, path, unset in (("vae", vae, "vae" not in self.given), ("text_encoder", text, not self.text_encoder)):
            if unset and isinstance(path, str) and Path(path).expanduser().is_dir():
                named[flag] = path
        return named

    def _resolve_frames(self) -> tuple["TrainConfig", list[str]]:
        """Set --num_frames to a number that a public model's VAE supports, unless the user sets it."""
        if not self.use_video or family_in(self.model) is None or "num_frames" in self.given:
            return self, []
        note = f"--num_frames {CLIP_FRAMES} of clips that are read, the nearest to 16 that {self.model} takes"
        return replace(self, num_frames=CLIP_FRAMES), [note]

    def _expert_of(self, folder: Path) -> str:
        """Return the path of the network that --expert names in ``folder``; for ``both``, the high-noise network."""
        inside = {"high": folder / "transformer", "low": folder / "transformer_2"}
        if not inside["low"].is_dir():
            of_both = self.expert == "both" and (folder / "low").is_dir()  # a run's folder
            if self.expert is not None and not of_both and folder.name not in ("transformer", "transformer_2"):
                raise ValueError(f"--expert {self.expert}: {folder} has one network; leave the flag out")
            if (self.expert, folder.name) in (("high", inside["low"].name), ("low", inside["high"].name)):
                raise ValueError(f"--expert {self.expert}: {folder} is the other network; give {folder.parent}")
            return str(self.pretrained)
        if self.expert is None:
            raise ValueError(f"--expert: {folder} has two networks; say which to train, high, low or both")
        return str(inside["low" if self.expert == "low" else "high"])

    def _check_both(self) -> None:
        clashes = {
            "--pipeline_parallel_size, whose stages are of one network": self.pipeline_parallel_size > 1,
            "--plugin gemini, which keeps the chunks of one network": self.plugin == "gemini",
            "--parallel auto, which counts with one network": self.parallel == "auto",
            "--card, which counts with one network": self.card is not None,
            "held-out losses (--validate_*), which are of one network": self.validates,
        }
        self._reject("expert", clashes)

    def evaluating(self) -> EvaluateConfig:
        """Return the configuration of ``opendit evaluate`` for --evaluate_every."""
        how = {
            "features": self.evaluate_features,
            "video_features": self.evaluate_video_features,
            "reference": self.evaluate_reference or (DIGITS if self.evaluate_features == DIGITS else None),
            "metrics": self.evaluate_metrics,
        }
        return EvaluateConfig(**how, intervals=False, given=frozenset(how))

    def _recipe_notes(self) -> list[str]:
        """Return a note if the recipe continues from another stage's weights, but no flag names weights."""
        recipe = find_recipe(self.recipe) if self.recipe else None
        if recipe is None or recipe.follows is None or self.pretrained or self.data_path == "mock":
            return []
        return [
            f"--recipe {self.recipe} follows {recipe.follows}: give that run to --pretrained; without it training "
            "starts from fresh weights"
        ]

    def _check_kind(self) -> None:
        if is_video(self.model) != self.use_video:
            if self.pretrained and "model" not in self.given and not Path(self.pretrained).expanduser().exists():
                raise ValueError(f"--pretrained {self.pretrained}: doesn't exist; name a file or folder that does")
            raise ValueError(
                f"--model {self.model}: takes clips; add --use_video"
                if is_video(self.model)
                else f"--use_video: --model {self.model} takes pictures; clips need a vDiT, e.g. vDiT-XL/222"
            )

    def _check_sizes(self) -> None:
        """Raise ValueError for sizes that don't fit the model. Sizes in the data are checked later."""
        patch = patch_size(self.model)
        side = patch if isinstance(patch, int) else math.lcm(*patch[1:])
        what = f"patch of {self.model}: {side}"
        downscale = downscale_of_vae(self.vae) if "vae" in self.given or self._reads_files() else None
        if downscale is not None:
            side, what = downscale * side, f"--vae {self.vae}: {downscale}, {what}"
        if self.image_size % side:
            fits = max(side, round(self.image_size / side) * side)
            raise ValueError(f"--image_size {self.image_size}: does not divide by {side} ({what}); use {fits}")
        if (found := depth_and_heads(self.model)) is None:
            return
        (depth, heads), size, stages = found, self.tensor_parallel_size, self.pipeline_parallel_size
        if heads % size:
            works = [str(n) for n in range(2, heads + 1) if heads % n == 0]
            raise ValueError(
                f"--tensor_parallel_size {size}: the {heads} heads of --model {self.model} can't be divided by it; use "
                + ", ".join(works)
            )
        if stages > depth:
            raise ValueError(
                f"--pipeline_parallel_size {stages}: the {depth} blocks of --model {self.model} make at most {depth} "
                f"stages; use {depth} or less"
            )

    def _reads_files(self) -> bool:
        """Return True if the data are certainly pictures or clips, not cached latents."""
        path = Path(self.data_path or "").expanduser()
        if path.is_dir():
            return not any(any(path.glob(pattern)) for pattern in ("index.json", "*.tar", ".nv-meta"))
        return self.data_path in named_sources() or (path.is_file() and path.suffix in (".csv", ".jsonl", ".parquet"))

    def _check_speed(self) -> None:
        check_precision(self.plugin, self.mixed_precision)
        if self.reduce_dtype not in ("fp32", self.mixed_precision):
            raise ValueError(
                f"--reduce_dtype {self.reduce_dtype}: gradients are made in --mixed_precision {self.mixed_precision}; "
                "leave it out"
            )
        if self.deterministic and self.attention == "cudnn":
            raise ValueError("--attention cudnn: adds gradients in any order; use flash with --deterministic")
        if self.enable_flashattn and self.attention == "math":
            raise ValueError(
                "--attention math: builds the N x N matrix, which --enable_flashattn rules out; leave one out"
            )
        if self.fp8 and "fp8" in PLUGINS[self.plugin].rejects:
            other = next(name for name, plugin in PLUGINS.items() if "fp8" not in plugin.rejects)
            raise ValueError(
                f"--fp8: does not work with --plugin {self.plugin}; use --plugin {other}, or leave --fp8 out"
            )

    def _check_optimizer(self) -> None:
        if len(set(self.ema_decays)) < len(self.ema_decays):
            raise ValueError(
                f"--ema_decay {' '.join(map(str, self.ema_decays))}: a decay is given twice; give each once"
            )
        clashes = {
            f"--plugin {self.plugin}, which cuts whole layers into chunks for all processes": (
                self.optimizer in PLUGINS[self.plugin].rejects
            ),
            "--offload state, which keeps AdamW's moments in host memory": (
                self.optimizer != "adamw" and self.offload == "state"
            ),
        }
        if self.optimizer == "muon":
            clashes |= {
                "--lora, which trains factors of matrices, where Muon orthogonalises whole ones": self.lora is not None,
                "--tensor_parallel_size, whose ranks have parts of a matrix": self.tensor_parallel_size > 1,
                "--expert_parallel_size, which divides other weights than those around them": (
                    self.expert_parallel_size > 1
                ),
                "--parallel auto, which counts with AdamW's steps and may divide matrices": self.parallel == "auto",
            }
        self._reject("optimizer", clashes)

    def _resolve_meanflow(self) -> tuple["TrainConfig", list[str]]:
        """Reject flags that --objective meanflow excludes. By default, sample in two steps without guidance."""
        if self.objective != "meanflow":
            return self, []
        clashes = {
            f"--plugin {self.plugin}, with which no process has all weights for the target": (
                self.plugin in ("gemini", "fsdp")
            ),
            "--compile, which has no forward-mode derivatives": self.compile,
            "--route, because the target is made of all tokens": self.token_route is not None,
            "--repa, whose term has not been tried beside it": self.repa is not None,
            "--uncertainty_weighting, whose target has two times": self.uncertainty_weighting,
            "--lora, whose layers have none": self.lora is not None,
            "--pack_tokens, whose tokens have one time each": self.pack_tokens is not None,
            "--parallel auto, which may divide the model": self.parallel == "auto",
        }
        for name in ("sequence", "tensor", "pipeline", "expert"):
            divided = getattr(self, f"{name}_parallel_size") > 1
            clashes[f"--{name}_parallel_size, with which no process has the whole model for the target"] = divided
        self._reject("objective", clashes)
        guidance = getattr(self, "meanflow_guidance")  # noqa: B009  (a field of the table of objectives)
        if guidance != 1 and self.label_drop == 0:
            raise ValueError(
                f"--meanflow_guidance {guidance:g}: the null class, which it guides away from, is not "
                "learned; give --label_drop 0.1"
            )
        drawn = {"sample_steps": 2, "sample_cfg_scale": 1.0, "evaluate_steps": 2, "evaluate_cfg_scale": 1.0}
        flags = replace(self, **{name: value for name, value in drawn.items() if name not in self.given})
        note = "--objective meanflow: the derivative through the network is computed by torch, without kernels"
        return flags, [note] if self.enable_modulate_kernel or self.enable_layernorm_kernel or self.fp8 else []

    def _check_evaluation(self) -> None:
        if self.ckpt_best not in (None, "val_loss") and not self.evaluate_every:
            raise ValueError(f"--ckpt_best {self.ckpt_best}: it is a figure of samples; give --evaluate_every N")
        if not self.evaluate_every:
            return
        try:
            self.evaluating().check_what()
        except (ValueError, OSError) as error:
            if self.dry_run is None or not isinstance(error, OnThisMachine):
                raise type(error)(rename_for_training(str(error))) from error
        if self.data_path == "mock":
            raise ValueError("--evaluate_every: --data_path mock has no samples to learn from; leave it out")

    def _check_validation(self) -> None:
        asked = [name for name in ("validate_every", "validate_samples") if getattr(self, name)]
        if self.ckpt_best == "val_loss":
            asked.append("ckpt_best")
        if asked and not self.validates:
            raise ValueError(
                f"--{asked[0]} {getattr(self, asked[0])}: no samples to validate on; give --validate_path DATA, or "
                "--validate_share 0.01 of the training data"
            )
        if self.validate_path is not None and self.validate_share > 0:
            raise ValueError("--validate_share: --validate_path names the samples already; leave one of them out")
        if self.validate_share > 0 and self.data_path == "mock":
            raise ValueError("--validate_share: --data_path mock has random samples; use --validate_path mock")
        if self.ckpt_best is not None and not self.save:
            raise ValueError(f"--ckpt_best {self.ckpt_best}: --no_save keeps no checkpoint; leave one of them out")

    def _check_files(self) -> None:
        check_workers(self.num_workers, "num_workers" in self.given)
        if self.load not in (None, "latest"):
            check_exists(self.load, "--load", "latest, a run folder or a checkpoint folder")
            if self.dry_run is None:
                check_weights(self.load, "--load", pipeline=True)
        check_vae(self.vae)
        if self.repa not in (None, component.CACHED_FEATURES):
            check_exists(self.repa, "--repa", "the folder of a vision transformer")
        if self.dry_run is None:
            if missing := next((name for name in self.loggers if find_spec(name) is None), None):
                raise ValueError(f"--log_to {missing}: needs the package {missing}; pip install {missing}")
            read_prompts(self.sample_prompts, "--sample_prompts")
            if self.pretrained is not None:
                check_weights(self.pretrained, "--pretrained", pipeline=True)
            for name in ("data_path", "validate_path"):
                check_data(getattr(self, name), f"--{name}")
            check_writable(self.outputs, "--outputs")

    def _unused(self) -> dict[str, str]:
        kind, mock = self.model.rpartition("-")[0], self.data_path == "mock"
        unused = {name: f"belongs to --objective {of}" for name, of in OBJECTIVE_FLAGS.items() if of != self.objective}
        unused |= {name: f"does nothing without --model {of}-..." for name, of in KIND_FLAGS.items() if of != kind}
        if self.optimizer != "muon":
            unused |= dict.fromkeys(("muon_momentum", "muon_precision"), "does nothing without --optimizer muon")
        if not (self.checkpointed or self.parallel == "auto" or self.card):
            why = f"does nothing without --recompute {BUT_ATTENTION} or --grad_checkpoint"
            unused["recompute_blocks"] = why
        if self.average is not None:
            unused |= dict.fromkeys(("ema_decay", "ema_warmup"), "does nothing with --average")
        if self.tokens is None:
            unused["max_upscale"] = "does nothing without --bucket_tokens or --pack_tokens"
        if self.route is None:
            unused["route_until"] = "does nothing without --route"
        if self.token_route is None or not self.token_route.fused:
            unused["route_drop"] = "does nothing without --route FIRST:LAST:SHARE:sprint"
        if self.repa is None:
            of_it = ("repa_block", "repa_weight", "repa_projector")
            unused |= dict.fromkeys(of_it, "does nothing without --repa")
        if self.pretrained is None:
            unused["download"] = "does nothing without --pretrained"
        if self.lora is None:
            unused |= dict.fromkeys(("lora_alpha", "lora_targets", "card"), "does nothing without --lora")
            if self.load is None:
                unused["base_precision"] = "does nothing without --lora"
        if self.parallel == "auto":
            unused["card"] = "does nothing with --parallel auto, which chooses by the memory of --hardware"
        if self.streamed_blocks and self.lora is None and self.load is None and self.plugin != "fsdp":
            unused["offload"] = "keeps frozen blocks in host memory, and without --lora needs --plugin fsdp"
        if self.parallel != "auto" and self.dry_run is None:
            unused["hardware"] = "does nothing without --parallel auto or --dry_run"
        if self.plugin != "fsdp" and self.parallel != "auto":
            of_fsdp = (
                "expert_parallel_size",
                "data_parallel_replicate",
                "reshard",
                "reduce_dtype",
                "gather_fp8",
                *([] if self.streamed_blocks or self.card else ["offload"]),  # --card may choose to offload blocks
            )
            unused |= dict.fromkeys(of_fsdp, "does nothing without --plugin fsdp")
        elif self.plugin == "fsdp" and not self.fp8:
            unused["gather_fp8"] = "does nothing without --fp8"
        if self.pipeline_parallel_size == 1:
            unused["pipeline_schedule"] = "does nothing without --pipeline_parallel_size above 1"
        if not self.evaluate_every:
            of_it = (item.name for item in fields(EvaluationFlags) if item.name != "evaluate_every")
            unused |= dict.fromkeys(of_it, "does nothing without --evaluate_every")
        if not self.use_video:
            of_clips = ("num_frames", "frame_interval", "fps", "short_clips", "video_reader", "given_frames")
            unused |= dict.fromkeys(of_clips, "does nothing without --use_video")
        if not self.save:
            unused |= dict.fromkeys(("ckpt_keep", "checkpoint_format"), "does nothing with --no_save")
            if mock or self.sample_every is not None:  # grids are otherwise drawn every --ckpt_every steps
                other = "--data_path mock" if mock else f"--sample_every {self.sample_every}"
                unused["ckpt_every"] = f"does nothing with --no_save and {other}"
        # Mock data have no sample grids. Among the flags for grids, only --sample_every 0 is allowed.
        if mock:
            why = "does nothing with --data_path mock, whose samples are not drawn"
            unused |= dict.fromkeys(("sample_steps", "sample_cfg_scale", "sample_prompts"), why)
            if self.sample_every != 0:
                unused["sample_every"] = why
            of_files = ("random_flip", "random_crop", "frame_interval", "fps", "short_clips", "video_reader")
            of_files += tuple(item.name for item in fields(component.WordFlags))
            unused |= dict.fromkeys(of_files, "does nothing with --data_path mock")
        if self.data_path in named_sources() and self.data_path != PYTHON:
            unused["max_bad"] = f"does nothing with --data_path {self.data_path}, which has no files"
        # A public model's folder also has the VAE and the text encoders.
        if self.pretrained and self.lora is None and self.load not in (None, "latest") and not family_in(self.model):
            unused["pretrained"] = "does nothing with --load, which brings its own weights"
        return unused

    def _check_steps(self) -> list[str]:
        if self.max_steps is None or self.warmup_steps <= self.max_steps:
            return []
        found = f"--warmup_steps {self.warmup_steps}: the run ends before, at --max_steps {self.max_steps}"
        if "warmup_steps" in self.given:
            raise ValueError(f"{found}; lower it, or raise --max_steps")
        return [f"{found}, so that --lr {self.lr:g} is never reached"]

    def _resolve_batch(self, dp_size: int) -> tuple["TrainConfig", list[str]]:
        """Divide --global_batch_size among ranks and into the fewest micro-batches of at most --batch_size samples."""
        if {"grad_accumulation", "global_batch_size"} <= self.given:
            raise ValueError("--grad_accumulation: --global_batch_size decides it; leave one of them out")
        # A user's --grad_accumulation overrides a recipe's --global_batch_size.
        if self.global_batch_size is None or "grad_accumulation" in self.given:
            return self, []
        asked, fits = self.global_batch_size, max(1, self.global_batch_size // dp_size) * dp_size
        if fits != asked and "global_batch_size" in self.given:
            raise ValueError(
                f"--global_batch_size {asked}: {dp_size} data-parallel ranks can't share it evenly; use {fits}"
            )
        share = fits // dp_size
        size = next(size for size in range(min(self.batch_size, share), 0, -1) if share % size == 0)
        flags = replace(self, global_batch_size=fits, batch_size=size, grad_accumulation=share // size)
        same = fits == asked
        return flags, [] if same else [f"global batch: {fits}, not {asked}, to be shared by {dp_size} ranks evenly"]

    def _resolve_tokens(self) -> tuple["TrainConfig", list[str]]:
        """With --bucket_tokens or --pack_tokens, set --batch_size to 1 by default. The flag then counts groups or
        packs."""
        if self.tokens is None:
            return self, []
        if self.bucket_tokens is not None and self.pack_tokens is not None:
            raise ValueError("--pack_tokens: --bucket_tokens makes micro-batches of one shape; leave one of them out")
        if self.parallel == "auto":
            name = "bucket_tokens" if self.pack_tokens is None else "pack_tokens"
            raise ValueError(f"--parallel auto: counts with samples of one size, not with --{name}; leave one out")
        if "batch_size" in self.given or self.batch_size == 1:
            return self, []
        what = "groups of one shape" if self.pack_tokens is None else "packs"
        return replace(self, batch_size=1), [f"batch size: 1; it counts {what} of {self.tokens:,} tokens"]

    def _check_packs(self) -> None:
        if self.pack_tokens is None:
            return
        kind, ranks, tokens = self.sequence_parallel_type, self.sequence_parallel_size, self.pack_tokens
        clashes = {
            "--compile: every pack has other lengths to attend to": self.compile,
            "--tensor_parallel_size: its ranks divide the tokens of samples of one size": self.tensor_parallel_size > 1,
            "--pipeline_parallel_size: its stages are sent samples of one size": self.pipeline_parallel_size > 1,
            f"--sequence_parallel_type {kind}: it attends to a part of the keys at a time": kind in OWN_ATTENTION,
        }
        for what, clash in clashes.items():
            if clash:
                name, why = what.split(": ")
                raise ValueError(f"--pack_tokens {tokens}: does not work with {name}, as {why}; leave one of them out")
        if tokens * self.batch_size % ranks:
            raise ValueError(
                f"--pack_tokens {tokens}: {ranks} ranks can't share {tokens * self.batch_size:,} tokens evenly; take a "
                f"multiple of {ranks}"
            )

    def _check_contrast(self) -> None:
        if not (weight := vars(self)["flow_contrast"]):
            return
        asked = f"--flow_contrast {weight:g}"
        if self.tokens is not None:
            name = "bucket_tokens" if self.pack_tokens is None else "pack_tokens"
            raise ValueError(f"{asked}: compares samples of one size, which --{name} has not; leave one of them out")
        if self.batch_size % 2:
            raise ValueError(
                f"{asked}: compares samples in pairs, and --batch_size {self.batch_size} is odd; take an even one"
            )

    @property
    def token_route(self) -> TokenRoute | None:
        """The parsed --route; None if all blocks see all tokens and no tokens are fused."""
        if self.route is None:
            return None
        route = replace(parse_route(self.route), until=self.route_until, drop=self.route_drop)
        return route if route.share > 0 or route.fused else None

    def _check_route(self) -> None:
        if self.route is None:
            return
        route, kind, sizes = parse_route(self.route), self.model.rpartition("-")[0], depth_and_heads(self.model)
        clashes = {
            f"--model {self.model}, whose blocks attend along the axes of a clip": kind == "ST-DiT",
            f"--model {self.model}, whose experts choose among all tokens of a sample": kind == "EC-DiT",
            f"--model {self.model}, whose blocks have tokens of captions as well": sizes is None,
            "--lora, which adds to blocks that have learned to see all tokens": self.lora is not None,
            "--tensor_parallel_size, whose ranks each have a part of the tokens": self.tensor_parallel_size > 1,
            "--pipeline_parallel_size, whose stages are sent all tokens": self.pipeline_parallel_size > 1,
            "--parallel auto, which counts with all tokens": self.parallel == "auto",
        }
        self._reject("route", clashes)
        if sizes is not None and route.last > sizes[0]:
            raise ValueError(f"--route {self.route}: --model {self.model} has {sizes[0]} blocks; end at {sizes[0]}")

    @property
    def aligned_block(self) -> int:
        """Number of blocks after which --repa aligns tokens with features."""
        depth = (depth_and_heads(self.model) or (0, 0))[0]
        return self.repa_block or max(1, round(depth * 2 / 7))  # block 8 of 28, as in REPA's paper

    def _check_alignment(self) -> None:
        if self.repa is None:
            return
        sizes, at, route = depth_and_heads(self.model), self.aligned_block, self.token_route
        clashes = {
            f"--model {self.model}, whose blocks have tokens of captions as well": sizes is None,
            "--use_video, for the features are of pictures": self.use_video,
            "--lora, which trains additions to blocks alone": self.lora is not None,
            "--pack_tokens, whose packs have samples of several sizes": self.pack_tokens is not None,
            "--bucket_tokens, whose samples have several sizes": self.bucket_tokens is not None,
            "--sequence_parallel_size, whose ranks each have a part of the tokens": self.sequence_parallel_size > 1,
            "--tensor_parallel_size, whose ranks each have a part of the tokens": self.tensor_parallel_size > 1,
            "--pipeline_parallel_size, whose stages each have some of the blocks": self.pipeline_parallel_size > 1,
            "--parallel auto, which counts without the encoder": self.parallel == "auto",
            "--data_path mock, whose samples are no pictures": self.data_path == "mock",
        }
        self._reject("repa", clashes)
        if sizes is not None and at > sizes[0]:
            raise ValueError(f"--repa_block {at}: --model {self.model} has {sizes[0]} blocks; give {sizes[0]} or less")
        if route is not None and route.first < at < route.last:
            raise ValueError(
                f"--repa_block {at}: --route {self.route} has a part of the tokens there; give {route.first} or less, "
                f"or {route.last} or more"
            )

    def _check_uncertainty(self) -> None:
        if not self.uncertainty_weighting:
            return
        clashes = {
            f"--model {self.model}, which has no part for it": depth_and_heads(self.model) is None,
            "--lora, which trains additions to blocks alone": self.lora is not None,
            "--pipeline_parallel_size, whose stages each have some of the blocks": self.pipeline_parallel_size > 1,
            "--parallel auto, which may choose a pipeline": self.parallel == "auto",
        }
        self._reject("uncertainty_weighting", clashes)

    def check_lora(self) -> None:
        """Raise ValueError if --lora can't be combined with another flag."""
        if self.pretrained is None and self.load is None:
            raise ValueError(NO_BASE)
        for target in self.lora_targets:
            parse_target(target)
        self._check_base()
        if "lora" in PLUGINS[self.plugin].rejects:
            raise ValueError(
                f"--lora: does not work with --plugin {self.plugin}, which has frozen weights whole on every GPU; use "
                "--plugin fsdp"
            )

    def _check_base(self) -> None:
        if self.base_precision == "bf16":
            return
        if not family_in(self.model):
            raise ValueError(
                f"--base_precision {self.base_precision}: is for public models, not --model {self.model}; leave it out"
            )
        clashes = {
            "--compile, which can't follow weights that are made dense for one product": self.compile,
            "--sequence_parallel_size, whose ranks send parts of dense weights": self.sequence_parallel_size > 1,
            "--tensor_parallel_size, which divides dense weights": self.tensor_parallel_size > 1,
            "--pipeline_parallel_size, whose stages are filled with dense weights": self.pipeline_parallel_size > 1,
        }
        self._reject("base_precision", clashes)

    @property
    def streamed_blocks(self) -> int:
        """Number of blocks in host memory (--offload blocks[:N]); 10**6 for all."""
        return parse_offload(self.offload, frozen=True)[1]

    @property
    def offloaded_state(self) -> str:
        """The training state that --offload keeps in host memory: one of OFFLOAD."""
        return parse_offload(self.offload, frozen=self.lora is not None)[0]

    def check_streamed(self, world_size: int, known: bool = False) -> None:
        """Raise ValueError for flags that exclude --offload blocks. known: True if resuming has already set the LoRA
        flags."""
        if not self.streamed_blocks or self.parallel == "auto":
            return
        sharded = self.plugin == "fsdp" and world_size > 1
        whole = self.lora is None and (known or self.load is None)
        if not sharded and not family_in(self.model):
            raise ValueError(
                f"--offload {self.offload}: is for public models, not --model {self.model}, unless --plugin fsdp has "
                "several GPUs; leave it out"
            )
        chosen_by_card = self.card is not None and not {"recompute", "grad_checkpoint"} & self.given
        recomputed = self.checkpointed or self.recompute == AUTO or chosen_by_card
        if not sharded and not recomputed:
            raise ValueError(
                f"--offload {self.offload}: only recomputed blocks can be in host memory; add "
                f"--recompute {BUT_ATTENTION} or --grad_checkpoint"
            )
        count = self.recompute_blocks
        if not sharded and count is not None and count < self.streamed_blocks and self.offload != BLOCKS:
            raise ValueError(
                f"--offload {self.offload}: only recomputed blocks can be in host memory, and --recompute_blocks has "
                f"{count}; use --offload {BLOCKS}:{count}"
            )
        if whole and not sharded:
            raise ValueError(
                f"--offload {self.offload}: needs --plugin fsdp and several GPUs for weights that are trained; add "
                "--lora or take more GPUs"
            )
        clashes = {
            f"--optimizer {self.optimizer}, for Adam's moments move to host memory with weights that are trained": (
                whole and self.optimizer != "adamw"
            ),
            "--reshard never, which keeps blocks on the GPU": sharded and self.reshard == "never",
            "--expert_parallel_size, whose experts are not gathered with their block": self.expert_parallel_size > 1,
            "--compile, which can't follow weights that are copied before a call": not sharded and self.compile,
            "--sequence_parallel_size, with which it was not tried": self.sequence_parallel_size > 1,
            "--tensor_parallel_size, which divides dense weights": self.tensor_parallel_size > 1,
            "--pipeline_parallel_size, whose stages hold few blocks": self.pipeline_parallel_size > 1,
        }
        self._reject("offload", clashes)

    def _check_tensor_parallel(self, world_size: int) -> None:
        check_tensor_parallel_size(self.tensor_parallel_size, self.sequence_parallel_size, world_size)
        if self.tensor_parallel_size == 1:
            return
        rejected = "tensor_parallel_size" in PLUGINS[self.plugin].rejects
        clashes = {
            f"--plugin {self.plugin}, which cuts whole layers into chunks for all processes": rejected,
            "--fp8, whose operations read a projection's whole weight": self.fp8,
            "--compile, which can't follow the exchange inside of a layer": self.compile,
        }
        self._reject("tensor_parallel_size", clashes)

    def _check_pipeline_parallel(self, world_size: int) -> None:
        sizes = self.pipeline_parallel_size, self.sequence_parallel_size, self.tensor_parallel_size
        check_pipeline_parallel_size(*sizes, world_size)
        if self.pipeline_parallel_size == 1:
            return
        rejected = "pipeline_parallel_size" in PLUGINS[self.plugin].rejects
        clashes = {
            f"--plugin {self.plugin}, whose chunks are of all processes together": rejected,
            "--checkpoint_format whole, for no process gathers the stages": self.checkpoint_format == "whole",
        }
        self._reject("pipeline_parallel_size", clashes)

    def _reject(self, flag: str, clashes: dict[str, bool]) -> None:
        """Raise ValueError for the first true value in ``clashes``, a dictionary "--other, reason" -> bool."""
        for what, clash in clashes.items():
            if clash:
                raise ValueError(f"--{flag} {getattr(self, flag)}: does not work with {what}; leave one of them out")

    def _check_expert_parallel(self, world_size: int) -> None:
        size, tensor_parallel = self.expert_parallel_size, self.tensor_parallel_size
        copies, stages = self.data_parallel_replicate, self.pipeline_parallel_size
        check_expert_parallel_size(size, tensor_parallel, copies, world_size, stages)
        if size > 1:
            self._reject("expert_parallel_size", {"--compile, which can't follow tokens to other ranks": self.compile})

    def _resolve_recompute(self) -> tuple["TrainConfig", list[str]]:
        """Turn --recompute off if it has no effect with the plugin or --fp8. Return flags and notes."""
        if self.recompute_blocks is not None:
            clashes = {
                "--pipeline_parallel_size, whose stages recompute all of theirs": self.pipeline_parallel_size > 1,
                "--parallel auto, which chooses what is recomputed": self.parallel == "auto",
            }
            self._reject("recompute_blocks", clashes)
        if self.recompute == "none":
            return self, []
        for name, why in (
            ("grad_checkpoint", "recomputes whole blocks already"),
            ("compile", "decides by itself what a block keeps"),
        ):
            if getattr(self, name):
                raise ValueError(f"--recompute {self.recompute}: --{name} {why}; choose one of the two")
        if self.recompute == AUTO:
            return self, []
        why = PLUGINS[self.plugin].ignores.get("recompute")
        if why is None and self.fp8 and self.recompute != BUT_ATTENTION:
            why = "--fp8 keeps these activations in one byte each, and can't recompute them"
        if why is None:
            return self, []
        return replace(self, recompute="none"), [f"recompute: none, not {self.recompute}, because {why}"]
