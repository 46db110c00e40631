"""Choose a run's model, objective and starting weights from its flags and data, without building the model."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from opendit.checkpoint.foreign import assumption, infer_config
from opendit.checkpoint.load import Checkpoint
from opendit.checkpoint.pretrained import ALONE, find_weights, read_info, read_newest, table_notes
from opendit.checkpoint.tensor_set import compare
from opendit.config.architectures import family_in, name_of_folder, parse_given, patch_size
from opendit.config.components import CACHED_FEATURES, DataFlags, StartFlags
from opendit.config.train import TrainConfig
from opendit.data import MediaDataset
from opendit.data.base import CachedFeatures, Description
from opendit.data.mock import MockDataset
from opendit.diffusion.objectives import objective_from_dict, objective_from_flags
from opendit.diffusion.objectives.base import Objective
from opendit.diffusion.objectives.flow import FlowObjective
from opendit.encoders.folder import weight_count
from opendit.encoders.published_text import text_encoder_bytes
from opendit.encoders.text import check_tokens, text_geometry
from opendit.encoders.vae import STEM as VAE_STEM
from opendit.encoders.vae import codec_geometry
from opendit.encoders.video_vae import class_of, latent_frames, video_geometry
from opendit.encoders.vision import vision_config
from opendit.models.auxiliary import AlignmentConfig
from opendit.models.conditioning import TextConfig
from opendit.models.configuration import DiTConfig
from opendit.models.families.public_config import PublicConfig, family_of, public_config
from opendit.models.finetuning import Lora, check_same_blocks, check_targets, lora_layers, same_network
from opendit.models.zoo import Weights, config_from_dict, model_config, model_shapes, of_revision
from opendit.parallel.engines import PRECISIONS
from opendit.parallel.fsdp import Sharding
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline import check_pipeline, idle_stages, stages_of
from opendit.parallel.rules import check_divisible
from opendit.parallel.tensor import check_tensor_parallel
from opendit.training.data_plan import check_classes, resolve_captions
from opendit.training.memory import USABLE, Setup, resolve_sharding


@dataclass(frozen=True)
class ModelPlan:
    """The model to train on a data set, the objective, and the flags with resolved caption flags. ``config`` has the
    newest revision; :func:`check_pretrained` may return an earlier one."""

    flags: TrainConfig
    objective: Objective
    config: DiTConfig
    vae: str
    notes: list[str]


FORWARD_MODE = ("dit", "vdit")  # architectures in which every operation has a forward-mode derivative


def plan_model(flags: TrainConfig, dataset: MediaDataset, resume: Checkpoint | None = None) -> ModelPlan:
    """Choose the model's configuration and objective, and check them against the flags and the data set.

    A public model's configuration comes from ``resume``, if there is one. Raises ValueError or OSError, with the flag
    and the fix.
    """
    flags, notes = resolve_captions(flags, dataset)
    vae, channels, size, frames = _latent_geometry(flags, dataset)
    if family_in(flags.model):
        source = resume.model if resume else find_weights(cast(str, flags.pretrained))
        size = size if frames is None else (frames, *size)
        config, objective = _public_model(flags, source, channels, size, dataset.describe().max_tokens)
        _check_embeddings(flags, config, dataset.describe())
        if config.given_beside:
            _check_first_frames(flags, config, dataset)
        one = "trains two networks by turns" if flags.expert == "both" else "is of one network of two"
        why = one if config.expert else "has no pictures to begin clips with"
        if config.expert is not None or config.given_beside:
            if flags.evaluate_every:
                raise ValueError(f"--evaluate_every: a run of {flags.model} {why}; leave the flag out")
            flags = replace(flags, sample_every=0)
            notes.append(f"no sample grids: the run {why}")
    else:
        objective = objective_from_flags(flags)
        config = model_config(
            flags.model,
            input_size=size,
            in_channels=channels,
            frames=frames,
            learn_sigma=objective.learn_sigma,
            given_frames=_given_frames(flags.given_frames, flags.num_frames, frames),
            **_condition(flags, dataset),
            **flags.architecture,
            alignment=_alignment(flags, dataset),
            uncertainty=flags.uncertainty_weighting,
            sprint=(route.first, route.last) if (route := flags.token_route) and route.fused else None,
        )
    config.check_side(max(config.grid))
    check_features(config, dataset.describe().features)
    if flags.objective == "meanflow" and (config.text is not None or config.kind not in FORWARD_MODE):
        what = "has captions" if config.text is not None else f"is a {flags.model.partition('-')[0]}"
        raise ValueError(
            f"--objective meanflow: is for DiT and vDiT with classes, and this one {what}; use --objective flow"
        )
    config.check_speed(flags.fp8, flags.recompute)
    check_tensor_parallel(config, flags.tensor_parallel_size)
    check_divisible(config, "ep", flags.expert_parallel_size)
    pipeline, micro_batches = flags.pipeline_parallel_size, flags.grad_accumulation
    check_pipeline(config, flags.pipeline_schedule, pipeline, micro_batches)
    notes += idle_stages(flags.pipeline_schedule, pipeline, micro_batches)
    if (lora := lora_of(flags)) is not None:
        check_targets(config, lora)
        _check_stages(config, lora, flags.pipeline_schedule, pipeline)
    return ModelPlan(flags, objective, config, vae, notes)


def _alignment(flags: TrainConfig, dataset: MediaDataset) -> AlignmentConfig | None:
    """Return the alignment settings of --repa, or None. Raises ValueError for an unsuitable data set or encoder."""
    if flags.repa is None:
        return None
    about, make = dataset.describe(), "make latents with preprocess.py latents --repa FOLDER"
    if flags.repa == CACHED_FEATURES:
        if about.features is None:
            raise ValueError(f"--repa {flags.repa}: --data_path {flags.data_path} has no features; {make}")
        return AlignmentConfig(flags.aligned_block, about.features.width, flags.repa_projector)
    if about.kind != "pixels":
        raise ValueError(f"--repa {flags.repa}: cached latents have no pictures for it; {make}, and give --repa cached")
    return AlignmentConfig(flags.aligned_block, vision_config(flags.repa).hidden_size, flags.repa_projector)


def check_features(config: DiTConfig, features: CachedFeatures | None) -> None:
    if config.alignment is not None and features is not None and features.grid != config.grid:
        there, here = (" x ".join(map(str, grid)) for grid in (features.grid, config.grid))
        raise ValueError(f"--repa {CACHED_FEATURES}: has features of {there} tokens, the model {here}; make others")


def lora_of(flags: StartFlags, base: str = "") -> Lora | None:
    """Return the LoRA settings of the flags, or None. base: path of the base weights."""
    if flags.lora is None:
        return None
    return Lora(flags.lora, flags.lora_alpha or flags.lora, base, tuple(flags.lora_targets))


def _check_stages(config: DiTConfig, lora: Lora, schedule: str, ranks: int) -> None:
    """Raise ValueError if a pipeline rank would have nothing to train."""
    for rank in range(ranks):
        stages = stages_of(config, schedule, rank, ranks)
        if not any(stages.has(config, name) for name in lora_layers(config, lora)):
            raise ValueError(
                f"--lora_targets: the blocks of pipeline rank {rank} have none of these layers; choose layers of all "
                "blocks, or a smaller --pipeline_parallel_size"
            )


def _public_model(
    flags: TrainConfig, source: Path, channels: int, size: tuple[int, ...], cached_tokens: int
) -> tuple[PublicConfig, FlowObjective]:
    """Return configuration and objective of the public model at ``source``. Raises ValueError if the data don't fit.
    channels, size: of the latents. ``cached_tokens``: tokens of cached caption embeddings, or 0."""
    info = read_info(source)
    found = config_from_dict(info["config"]) if "config" in info else None
    if not isinstance(found, PublicConfig):
        raise ValueError(f"--pretrained {source}: holds no public model; give its folder, or a run that trains one")
    if channels != found.in_channels:
        raise ValueError(
            f"--vae {flags.vae}: has {channels} channels, {flags.model} takes {found.in_channels}; name the VAE of its "
            "pipeline"
        )
    wanted = family_of(found.family).latents.vae
    if flags.vae is not None and (stored := class_of(flags.vae)) not in (None, wanted):
        raise ValueError(f"--vae {flags.vae}: is a {stored}, not an {wanted}; name the VAE of its pipeline")
    if flags.given_frames not in (None, found.given_frames):
        asked = f"--given_frames {flags.given_frames}: {flags.model}"
        if found.given_frames is None:
            raise ValueError(f"{asked} takes none; leave it out")
        raise ValueError(f"{asked} takes the first frame alone; give {found.given_frames}")
    if flags.given_frames and flags.pack_tokens is not None:
        raise ValueError(f"--pack_tokens: {flags.model} takes given frames in batches alone; leave one of them out")
    if flags.text_encoder in (None, "bytes"):
        raise ValueError(f"--text_encoder: {flags.model} has none of its own; give the folder of its pipeline")
    assert found.text is not None
    tokens = flags.max_text_tokens or cached_tokens or found.text.max_tokens
    family_of(found.family).text.check_tokens(tokens, flags.model)
    config = public_config(found.family, json.loads(found.published), size, tokens, json.loads(found.index))
    config.grid_of(size)
    own = objective_from_dict(info["objective"])
    assert isinstance(own, FlowObjective), "a public model's is a flow"
    asked = objective_from_flags(flags)
    assert isinstance(asked, FlowObjective)
    changes: dict[str, Any] = {"times_are": asked.times_are} if "flow_times" in flags.given else {}
    if "flow_shift" in flags.given:
        changes |= {"shift": asked.shift, "shift_tokens": asked.shift_tokens, "shift_growth": None}
        changes["empirical_tokens"] = None
    return config, replace(own, **changes)


def _check_first_frames(flags: TrainConfig, config: PublicConfig, dataset: MediaDataset) -> None:
    """Raise ValueError for data or flags that an image-to-video model can't use."""
    about, width = dataset.describe(), config.spec.text.picture
    if about.kind == "latents" and about.first_frames != width and not isinstance(dataset, MockDataset):
        raise ValueError(f"--data_path {flags.data_path}: these cached latents lack first frames as {flags.model} is "
                         "given them; make them with preprocess.py latents --pretrained")  # fmt: skip
    if flags.pack_tokens:
        raise ValueError("--pack_tokens: does not work with a model of image to video; leave it out")


def _check_embeddings(flags: TrainConfig, config: PublicConfig, about: Description) -> None:
    """Raise ValueError for cached caption embeddings with other shapes than the model's, or from another family's
    encoders."""
    if about.empty_caption is None:
        return
    assert config.text is not None
    made_by = cast(str, about.text_encoder)
    if family_in(name_of_folder(made_by) or "") not in (None, config.family):
        raise ValueError(
            f"--data_path {flags.data_path}: its captions were embedded by the text encoders of another model "
            f"({made_by}), not of {flags.model}; make it with preprocess.py latents --pretrained"
        )
    text, (tokens, _, pooled) = config.spec.text, about.empty_caption
    found, taken = (*tokens.shape, *pooled.shape), (config.text.max_tokens, text.width, text.pooled)
    if found != taken:
        shown = ["{} tokens of {} numbers and a vector of {}".format(*each) for each in (found, taken)]
        raise ValueError(
            f"--data_path {flags.data_path}: its captions are {shown[0]}, {flags.model} takes {shown[1]}; make it with "
            "preprocess.py latents --pretrained"
        )


def _given_frames(asked: str | None, num_frames: int, latent: int | None) -> str | None:
    """Convert --given_frames to latent frames. A clip has ``num_frames`` frames, or ``latent`` latent frames. Raises
    ValueError for frames that end inside a latent frame."""
    if asked is None or latent is None or not asked.startswith("prefix:"):
        return asked
    count, temporal = cast(int, parse_given(asked)), (num_frames - 1) // max(1, latent - 1) or 1
    if (count - 1) % temporal:
        whole = max(0, (count - 1) // temporal) * temporal + 1
        raise ValueError(
            f"--given_frames {asked}: the VAE makes one latent frame of the first frame and of {temporal} frames each "
            f"after it; use prefix:{whole} or prefix:{whole + temporal}"
        )
    return f"prefix:{(count - 1) // temporal + 1}"


def check_pretrained(
    pretrained: str, model: str, config: DiTConfig, notes: list[str], mesh: Mesh = ALONE, resumed: bool = False
) -> tuple[Weights, DiTConfig, DiTConfig]:
    """Find the weights of --pretrained and check that the model can start from them. Call on every rank of ``mesh``.

    Return the weights (not read yet), the configuration of the weights' model, and ``config`` in that model's revision.
    For a ``resumed`` run, ``config`` is returned unchanged. Raises ValueError or FileNotFoundError.
    """
    weights = read_newest(pretrained, notes=notes, mesh=mesh)
    if "lora" in weights.info:
        raise ValueError(
            f"--pretrained {pretrained}: holds what --lora adds to {weights.info['lora']['base']}; give that"
        )
    # Meta's files have no configuration: infer one from the shapes.
    found = weights.config or infer_config(weights.state, model, weights.path, weights.num_classes)
    config = config if resumed else of_revision(config, model, found.revision)
    check_same_blocks(found, config, weights.path)
    if resumed and not same_network(found, config):  # for example FLUX.1-schnell, which has no guidance scale
        raise ValueError(f"--pretrained {pretrained}: is another network than that of --load; give the run's own")
    notes += [*assumption(weights, found), *table_notes(found, weights.state, weights.path)]
    return weights, found, config


def saved_by_adaln_lora(config: DiTConfig) -> str:
    full, low = (made.parameters() / 1e6 for made in (replace(config, adaln_lora=None), config))
    share = (full - low) / full
    return f"--adaln_lora {config.adaln_lora} saves {full - low:,.1f} M of {full:,.1f} M weights ({share:.0%})"


def memory_setup(flags: TrainConfig, world: int, encoders: int = 0) -> Setup:
    """Return the settings for a memory estimate on ``world`` GPUs. encoders: bytes of frozen encoders."""
    same = (
        "plugin fp8 recompute grad_checkpoint recompute_blocks base_precision reduce_dtype reshard offload gather_fp8"
    )
    return Setup(
        **{name: getattr(flags, name) for name in same.split()},
        encoders=encoders,
        precision=flags.mixed_precision,
        world=world,
        sequence_parallel=flags.sequence_parallel_size,
        tensor_parallel=flags.tensor_parallel_size,
        expert_parallel=flags.expert_parallel_size,
        pipeline_parallel=flags.pipeline_parallel_size,
        schedule=flags.pipeline_schedule,
        micro_batches=flags.grad_accumulation,
        averages=len(flags.ema_decays),
        accumulate=flags.grad_accumulation > 1,
        fused=flags.enable_modulate_kernel and flags.enable_layernorm_kernel,
        compiled=flags.compile,
        lora=lora_of(flags),
        replicate=flags.data_parallel_replicate,
        muon=flags.muon_precision if flags.optimizer == "muon" else None,
        eight_bits=flags.optimizer == "adamw8bit",
        networks=2 if flags.expert == "both" else 1,
        route=flags.token_route if flags.route_until is None else None,
    )


def encoder_bytes(flags: TrainConfig, config: DiTConfig, dataset: MediaDataset) -> int:
    """Return the bytes of a public model's text encoders and VAE on every GPU; 0 if their folder does not exist."""
    if not isinstance(config, PublicConfig) or isinstance(dataset, MockDataset):
        return 0
    found, about = 0, dataset.describe()
    with suppress(OSError, ValueError):
        # With cached embeddings, sample grids need no text encoder.
        if about.empty_caption is None or flags.evaluate_every > 0:
            folder, family = Path(cast(str, flags.text_encoder)), family_of(config.family)
            found += text_encoder_bytes(folder, family, flags.text_precision)
    with suppress(OSError, ValueError):
        if flags.vae != "none" and (about.kind == "pixels" or flags.sample_every != 0):
            found += 4 * weight_count(Path(flags.vae).expanduser(), VAE_STEM)
    return found


def _condition(flags: TrainConfig, dataset: MediaDataset) -> dict[str, Any]:
    """Return {"num_classes": ...} or {"text": ...}, an argument of ``model_config``."""
    about = dataset.describe()
    if about.conditioning == "text":
        name, cached = cast(str, flags.text_encoder), about.text_encoder
        kind, width, longest = text_geometry(name)
        tokens = flags.max_text_tokens or (about.max_tokens if cached and name != "bytes" else longest)
        check_tokens(name, kind, longest, tokens)
        return {"text": TextConfig(kind, width, tokens, flags.cross_attention)}
    check_classes(flags.num_classes, flags.data_path, about)
    return {"num_classes": flags.num_classes or about.num_classes}


def _check_decodes(data: DataFlags, channels: int, side: int) -> None:
    theirs, downscale = video_geometry(data.vae, 3)[:2] if data.use_video else codec_geometry(data.vae, 3)
    if (theirs, data.image_size // downscale) != (channels, side):
        raise ValueError(
            f"--vae {data.vae}: a picture of {data.image_size} px has {theirs} x {data.image_size // downscale} x "
            f"{data.image_size // downscale} latents, --data_path {data.data_path} has {channels} x {side} x {side}; "
            "name the VAE that made them, or leave the flag out"
        )


def _latent_geometry(flags: TrainConfig, dataset: MediaDataset) -> tuple[str, int, tuple[int, int], int | None]:
    """Return the VAE's name, the latents' channels, (height, width), and the number of latent frames or None. Raises
    ValueError if --image_size or --num_frames does not divide into patches."""
    patch, about = patch_size(flags.model), dataset.describe()
    if about.kind == "latents":
        channels, *frames, height, width = about.sample_shape
        if "vae" in flags.given:
            _check_decodes(flags, channels // 2, width)
        vae = flags.vae if "vae" in flags.given else cast(str, about.vae)
        return vae, channels // 2, (height, width), frames[0] if frames else None
    if family_in(flags.model) and "vae" not in flags.given:  # the default is the VAE of our own models
        source = flags.pretrained or flags.load
        raise ValueError(f"--vae: {source} has no folder vae; give the VAE of {flags.model}'s pipeline, as FOLDER/vae")
    if flags.use_video:
        assert not isinstance(patch, int), "--use_video is for models of clips"
        channels, downscale, temporal = video_geometry(flags.vae, about.sample_shape[0])
        frames, side = latent_frames(flags.num_frames, temporal), math.lcm(*patch[1:])
        if frames % patch[0]:
            raise ValueError(
                f"--num_frames {flags.num_frames}: {frames} latent frames do not divide by the {patch[0]} frames of a "
                f"patch of {flags.model}; change it, or take a model with a shorter patch"
            )
    else:
        assert isinstance(patch, int), "models of clips need --use_video"
        (channels, downscale), frames, side = codec_geometry(flags.vae, about.sample_shape[0]), None, patch
    multiple = downscale * side
    if flags.image_size % multiple:
        raise ValueError(
            f"--image_size {flags.image_size}: does not divide by {multiple} (--vae {flags.vae}: {downscale}, patch of "
            f"{flags.model}: {side}); use {max(multiple, round(flags.image_size / multiple) * multiple)}"
        )
    latent = flags.image_size // downscale
    return flags.vae, channels, (latent, latent), frames


def choose_sharding(config: DiTConfig, setup: Setup, batch: int, capacity: float | None) -> Sharding:
    """Choose the sharding. "auto" and None become the values with the least traffic that fit into memory. batch:
    samples per micro-batch. capacity: bytes of the GPU; None on a CPU, where everything is assumed to fit."""
    resolved = resolve_sharding(config, setup, batch, None if capacity is None else USABLE * capacity)
    return Sharding(
        reduce_dtype=PRECISIONS[resolved.reduce_dtype],
        keep_gathered=resolved.reshard == "never",
        keep_gradients=cast(bool, resolved.keep_gradients),  # resolve_sharding has replaced None
        gather_float8=setup.gathers_float8,
        hosted=setup.streamed_blocks,
    )


def check_resume(checkpoint: Checkpoint, config: DiTConfig, objective: Objective, adds: bool) -> list[str]:
    """Check that the run can resume from a checkpoint; return notes to print. adds: True if the run trains a LoRA.
    Raises ValueError if the model or objective differs, or if the checkpoint's weights don't fit its configuration."""
    folder, info = checkpoint.folder, read_info(checkpoint.model)
    if "config" not in info:
        raise ValueError(f"--load: {checkpoint.model} does not say which model it holds; load another checkpoint")
    found = config_from_dict(info["config"])
    if ("lora" in info) != adds:
        raise ValueError(f"--load: {folder} was made with{'out' if adds else ''} --lora; do so again")
    if found != config:
        there, here = found.to_dict(), config.to_dict()
        differences = [
            f"{key} {there.get(key)} there, {here.get(key)} here"
            for key in dict.fromkeys([*there, *here])
            if there.get(key) != here.get(key)
        ]
        raise ValueError(
            f"--load: {folder} is a checkpoint of another model ({', '.join(differences)}); give that model's flags"
        )
    if not adds:
        _check_shapes(checkpoint, config)
    then = objective_from_dict(info.get("objective") or checkpoint.state.get("objective")).predicts
    if then != objective.predicts:
        flags = " ".join(f"--{name} {value}" for name, value in then.items())
        raise ValueError(
            f"--load: the model in {folder} learned another objective; repeat its {flags}, or give it to --pretrained "
            "to start from its weights"
        )
    with checkpoint.open(checkpoint.model.name) as tensors:
        notes = table_notes(config, tensors, checkpoint.model)
    if not checkpoint.damaged:
        return notes
    return [*notes, f"--load: {'; '.join(checkpoint.damaged)}; going on from {folder}, the newest that is intact"]


def _check_shapes(checkpoint: Checkpoint, config: DiTConfig) -> None:
    """Raise ValueError if the checkpoint's weights or averages don't have the model's shapes. Only headers are read."""
    own = model_shapes(config)[0]
    for name in (checkpoint.model.name, *checkpoint.state["ema"]["files"]):
        with checkpoint.open(name) as tensors:
            tensors.check_floats()
            theirs = {key: shape for key, shape in tensors.shapes.items() if key in own}
        compare(own, theirs, checkpoint.folder / name)
