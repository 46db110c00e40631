"""Convert flags to a checked Run, before any weight of the model is allocated."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from opendit.checkpoint.ema import WARMUP
from opendit.checkpoint.foreign import TRANSFORMER
from opendit.checkpoint.load import Checkpoint, find_checkpoint
from opendit.checkpoint.pretrained import read_config, read_info
from opendit.checkpoint.run_folders import (
    CHECKPOINTS,
    LOW,
    WRITTEN,
    lock_folder,
    low_noise_of,
    new_run_folder,
    newest_run,
)
from opendit.config.architectures import family_in
from opendit.config.checks import check_writable, read_prompts
from opendit.config.components import CACHED_FEATURES
from opendit.config.names import OWN_ATTENTION, PLUGINS
from opendit.config.train import NO_BASE, TrainConfig
from opendit.data import DataError, MediaDataset
from opendit.data.mock import MockDataset
from opendit.data.packs import PackSchedule
from opendit.encoders.conditioner import CaptionConditioner, Conditioner, LabelConditioner, PublishedConditioner
from opendit.encoders.folder import KNOWN
from opendit.encoders.published_text import load_published_text
from opendit.encoders.text import load_text_encoder
from opendit.encoders.vae import ImageCodec, load_codec
from opendit.encoders.video_vae import VideoCodec, load_video_codec
from opendit.encoders.vision import CachedTeacher, PictureTokens, VisionTeacher
from opendit.kernels.attention import HALF, LocalAttention, resolve_attention
from opendit.kernels.select import KernelChoice, select_kernels
from opendit.models.conditioning import Condition
from opendit.models.dit import DiTConfig
from opendit.models.families.public_config import PublicConfig, embedded_guidance, family_of
from opendit.models.finetuning import A, Lora, lora_layers
from opendit.models.zoo import Weights, of_revision
from opendit.parallel.colossal import check_installed
from opendit.parallel.engines import PRECISIONS
from opendit.parallel.experts import check_expert_parallel
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline import mesh_stages
from opendit.parallel.sequence import SequenceParallel, sequence_parallel, sequence_shape
from opendit.training.data_plan import (
    caption_notes,
    clip_fps,
    fit_captions,
    held_out,
    last_step_of,
    make_schedule,
    open_data,
    parts_of_run,
    samples_at_once,
    shape_samples,
    text_before,
)
from opendit.training.fingerprint import changes, fingerprint, stored_fingerprint, warmup_of
from opendit.training.memory import card_memory, check_host, check_offload
from opendit.training.model_plan import (
    check_pretrained,
    check_resume,
    choose_sharding,
    encoder_bytes,
    lora_of,
    memory_setup,
    plan_model,
    saved_by_adaln_lora,
)
from opendit.training.run import Run

# Errors that are printed without a traceback, in prepare() and in the run.
USER_ERRORS, RUN_ERRORS = (ValueError, OSError, DataError), (DataError, FloatingPointError)


def prepare(flags: TrainConfig, mesh: Mesh, notes: list[str]) -> Run:
    """Check everything that can be wrong with a run, and load its data set and VAE. flags, notes: see
    ``TrainConfig.resolve``. Raises ValueError, OSError or DataError, with the flag and the fix."""
    check_installed()
    if flags.deterministic:
        make_deterministic()
    everything = open_data(flags)
    dataset, validation = held_out(flags, everything)
    validated_apart = validation if flags.validate_path is not None else None
    global_batch = flags.batch_size * mesh.dp_size * flags.grad_accumulation

    resume = find_checkpoint(flags.load, flags.outputs, flags.model, mesh) if flags.load else None
    if flags.load and resume is None:
        found = f"--load latest: no checkpoint of {flags.model} under {flags.outputs}, starting afresh"
        family = family_in(flags.model)
        if family and (run := newest_run(flags.outputs, f"{family}/*")):
            found += f"; to resume {run}, which trained another folder of {family} or this one before it was renamed, "
            found += f"give --load {run}"
        notes.append(found)
    flags = _lora_of_resume(_both_of_resume(flags, resume), resume, mesh.world_size)
    flags, of_captions = fit_captions(flags, everything, text_before(flags, resume), mesh)
    notes += of_captions
    plan = plan_model(flags, dataset, resume)
    flags, config, objective, vae = plan.flags, plan.config, plan.objective, plan.vae
    notes += plan.notes
    if config.given_beside and isinstance(dataset, MockDataset):
        raise ValueError(f"--data_path mock: has no first frames, which {flags.model} takes; give clips")

    dataset = shape_samples(flags, dataset, config)
    validation = None if validation is None else shape_samples(flags, validation, config)
    samples = samples_at_once(flags, config)
    check_expert_parallel(config, mesh.dims)
    setup = memory_setup(flags, mesh.world_size, encoder_bytes(flags, config, dataset))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_offload(config, setup, samples, ranks, flags.save)
    if mesh.device.type == "cpu":
        check_host(config, setup, samples, ranks)
    sequence = _sequence(flags, config, mesh, samples, notes)
    stages = mesh_stages(mesh, config, flags.pipeline_schedule)

    stored = stored_fingerprint(resume.state) if resume else {}
    parts = parts_of_run(stored, flags, global_batch, mesh.dims.ep) if resume else None
    schedule = make_schedule(flags, dataset, global_batch, config, parts)
    if resume and isinstance(schedule, PackSchedule):
        _resume_packs(schedule, resume, notes)
    if resume:
        resumed = read_config(resume.model)
        config = config if resumed is None else of_revision(config, flags.model, resumed.revision)
        notes += check_resume(resume, config, objective, bool(flags.lora))
    config, start = _starting_weights(flags, config, resume, mesh, notes)
    ema_warmup = _ema_warmup(flags, stored if resume else None)
    flags = replace(flags, ema_warmup=bool(ema_warmup))
    if config.adaln_lora is not None:
        notes.append(saved_by_adaln_lora(config))

    codec = _codec(flags, dataset, vae, mesh, notes)
    conditioner, prompts = _conditioning(flags, config, dataset, mesh, codec is not None)
    if mesh.is_main:
        notes += _notes_of_data(everything, validated_apart, config, conditioner.encoder)
    teacher = None if flags.repa is None else _teacher(flags, config, mesh)

    dtype, packs = PRECISIONS[flags.mixed_precision], flags.pack_tokens is not None
    kernels = select_kernels(flags, mesh.device, dtype, config.head_dim, config.tokens, packs=packs)
    kernels = agree_on_attention(kernels, stored.get("attention"), flags, config, mesh, notes)
    fused = kernels.ops.linear_gate_residual_layernorm_modulate is not None
    memory = replace(setup, fused=fused, fp8=kernels.ops.float8)
    capacity = card_memory(mesh.device)
    sharding = choose_sharding(config, memory, samples, capacity) if flags.plugin == "fsdp" else None

    folder = _folder(flags, resume, mesh, notes)
    lock, lock_notes = lock_folder(
        folder, mesh, f"--load {flags.load}", "stop it, or start a new run without --load", written=WRITTEN
    )
    notes += lock_notes
    last_step = last_step_of(flags, schedule)
    first_step = resume.state["step"] if resume else 0
    if resume and first_step >= last_step:
        notes.append(
            f"{resume.folder} is already at step {first_step} of {last_step}; raise --max_steps or --epochs to go on"
        )
    ignored = PLUGINS[flags.plugin].ignores.get("compile")

    run = Run(
        flags=flags,
        mesh=mesh,
        dataset=dataset,
        schedule=schedule,
        model_config=config,
        codec=codec,
        vae=vae,
        conditioner=conditioner,
        objective=objective,
        kernels=kernels,
        sequence=sequence,
        stages=stages,
        why_not_compiled=ignored and f"off: {ignored}" if flags.compile else "off (--compile is)",
        memory=memory,
        sharding=sharding,
        folder=folder,
        lock=lock,
        resume=resume,
        first_step=first_step,
        last_step=last_step,
        **start,
        notes=notes,
        ema_warmup=ema_warmup,
        validation=validation,
        prompts=prompts,
        teacher=teacher,
        samples_at_once=samples,
    )
    run.clip_fps, note = mesh.broadcast_object(clip_fps(flags, dataset) if mesh.is_main else None)
    notes += note
    if flags.expert == "both":
        run.low = _low_noise(run)
    run.fingerprint = mesh.broadcast_object(fingerprint(run) if mesh.is_main else None)
    if resume:
        notes += changes(stored, run.fingerprint, first_step)
    return run


def _resume_packs(schedule: PackSchedule, resume: Checkpoint, notes: list[str]) -> None:
    """Make ``schedule`` continue after the checkpoint's step."""
    packs, step = resume.state.get("packs"), resume.state["step"]
    if packs is None:
        schedule.begin_at(step)
        return
    schedule.restore(packs, step)
    if "step" not in packs:
        notes.append(
            "--pack_tokens: the checkpoint's packs were planned by another rule; the run continues where their last "
            "window began, so some of its samples come again"
        )


def _notes_of_data(
    everything: MediaDataset, validation: MediaDataset | None, config: DiTConfig, encoder: Any
) -> Iterator[str]:
    """Yield notes about the training data and about --validate_path's data, if any."""
    yield from everything.describe().notes
    # fit_captions has already counted the bytes encoder's captions
    if not (config.text and config.text.inside):
        yield from caption_notes(everything, config.text, encoder)
    if validation is not None:
        yield from validation.describe().notes
        yield from caption_notes(validation, config.text, encoder, "captions of --validate_path")


def _teacher(flags: TrainConfig, config: DiTConfig, mesh: Mesh) -> CachedTeacher | VisionTeacher:
    assert flags.repa is not None
    spatial, dtype = flags.repa_projector == "conv", PRECISIONS[flags.mixed_precision]
    if flags.repa == CACHED_FEATURES:
        return CachedTeacher(flags.repa_weight, spatial)
    return VisionTeacher(flags.repa, config.grid, flags.repa_weight, spatial, mesh.device, dtype)


def _ema_warmup(flags: TrainConfig, stored: dict[str, Any] | None) -> float:
    """Return the warm-up of the averages, 0 for none. stored: the resumed run's fingerprint, or None."""
    if stored is None:
        return WARMUP if flags.ema_warmup else 0
    if "ema_warmup" not in flags.given:
        return warmup_of(stored)
    return (warmup_of(stored) or WARMUP) if flags.ema_warmup else 0


def make_deterministic() -> None:
    """Make torch give bit-identical results in every run on one kind of GPU and libraries (--deterministic).

    An operation without a deterministic implementation raises RuntimeError. ``warn_only`` is not used, because
    attention would then sum the gradient of q in any order. cuBLAS needs a workspace of fixed size before its first
    use.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Any: type checkers don't find the attribute
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False  # this program reads no uninitialized memory
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def _sequence(
    flags: TrainConfig, config: DiTConfig, mesh: Mesh, samples: int, notes: list[str]
) -> SequenceParallel | None:
    how = (flags, flags.attention, flags.mixed_precision, config, samples)
    shape = sequence_shape(*how, tensor_parallel=mesh.tp_size, lora=flags.lora is not None)
    if flags.pack_tokens is not None:
        shape = replace(shape, types=tuple(kind for kind in shape.types if kind not in OWN_ATTENTION))
    sequence = sequence_parallel(mesh, flags.sequence_parallel_type, shape, keep_gathered=flags.keep_gathered)
    if flags.keep_gathered and sequence is not None and sequence.plan.kind != "fastseq":
        notes.append(f"--keep_gathered does nothing: {sequence.plan.kind}, which auto took, gathers nothing")
    return sequence


def _folder(flags: TrainConfig, resume: Checkpoint | None, mesh: Mesh, notes: list[str]) -> Path:
    folder = resume.run if resume else None
    if folder is not None and flags.save:
        check_writable(str(folder), f"--load {flags.load}:")
    if folder is None:
        folder = mesh.broadcast_object(new_run_folder(flags.outputs, flags.model) if mesh.is_main else None)
    if resume and not resume.run:
        notes.append(f"--load: {resume.folder} lies in no run's own checkpoints folder, so the run goes on in {folder}")
    return folder


def agree_on_attention(
    kernels: KernelChoice, stored: str | None, flags: TrainConfig, config: DiTConfig, mesh: Mesh, notes: list[str]
) -> KernelChoice:
    """Choose the attention kernel on rank 0 for every rank. All ranks must call this. stored: the kernel of the
    checkpoint to resume from, if any.

    Attention kernels round differently. With --attention auto, a resumed run therefore prefers its checkpoint's kernel.
    With --deterministic, a GPU uses FlashAttention (in fp32, the memory-efficient kernel), because cuDNN sums the
    gradient of q in any order.
    """
    backend, note = kernels.attend.backend, kernels.attention_note
    stored = stored if flags.attention == "auto" else None
    wanted, why, dtype = stored, "as in the checkpoint", PRECISIONS[flags.mixed_precision]
    if flags.deterministic and mesh.device.type == "cuda" and {"auto", "cudnn"} & {backend, stored}:
        wanted, why = "flash" if dtype in HALF else "efficient", "--deterministic"
    if (flags.enable_flashattn or flags.deterministic) and wanted not in (None, "auto", backend):
        try:
            backend, _ = resolve_attention(wanted, mesh.device, dtype, config.head_dim, config.tokens, tiled=True)
            note = f"{backend}: {why}"
        except ValueError as error:
            notes.append(f"attention is not {wanted} ({why}), so this run continues within rounding: {error}")
    backend, note = mesh.broadcast_object((backend, note))
    return replace(kernels, attend=LocalAttention(backend), attention_note=note)


def _codec(
    flags: TrainConfig, dataset: MediaDataset, vae: str, mesh: Mesh, notes: list[str]
) -> ImageCodec | VideoCodec | None:
    """Load the VAE; None if nothing needs it. If only sample grids need it, a missing VAE gives None and a note."""
    if only_cached := _named_by_the_cache_alone(flags, dataset, vae):
        notes.append(
            f"no sample grids: only the index of --data_path {flags.data_path} names what they are drawn with, and "
            f"what only a file names is not loaded; if you trust it, add {' '.join(only_cached)}"
        )
        return None
    if isinstance(dataset, MockDataset):
        return None
    about = dataset.describe()
    # Stable Diffusion's VAE is much more exact in fp16 than in bf16. Public models' pipelines run VAEs in fp32.
    half = mesh.device.type == "cuda" and not family_in(flags.model)
    dtype = torch.float16 if half else torch.float32
    load = load_video_codec if flags.use_video else load_codec
    try:
        return load(vae, channels=about.sample_shape[0], device=mesh.device, dtype=dtype)
    except (ValueError, OSError) as error:
        if about.kind != "latents" or "vae" in flags.given:
            raise
        notes.append(f"no sample grids: the latents' VAE can't be loaded ({error})")
        return None


def _named_by_the_cache_alone(flags: TrainConfig, dataset: MediaDataset, vae: str) -> list[str]:
    """Return --vae and --text_encoder for encoders that only the index of cached latents names. An index may come from
    a stranger, so the user must confirm names that are not well-known."""
    about = dataset.describe()
    if about.kind != "latents" or isinstance(dataset, MockDataset):
        return []
    named = {"vae": vae, "text_encoder": about.text_encoder and flags.text_encoder}
    return [
        f"--{flag} {shlex.quote(name) if name.isprintable() else ascii(name)}"
        for flag, name in named.items()
        if name is not None and name not in KNOWN and flag not in flags.given
    ]


def _conditioning(
    flags: TrainConfig, config: DiTConfig, dataset: MediaDataset, mesh: Mesh, decodes: bool
) -> tuple[Conditioner, tuple[list[str], Condition] | None]:
    """Return the conditioner, and the captions of --sample_prompts with their conditions. decodes: True if a VAE is
    loaded."""
    # A public model's text encoders may be larger than the model, so sample grids use cached embeddings.
    drawn = flags.evaluate_every > 0 if family_in(flags.model) else decodes
    conditioner, prompts = _conditioner(flags, config, dataset, mesh, drawn or bool(flags.sample_prompts)), None
    if flags.sample_prompts and isinstance(conditioner, CaptionConditioner):
        captions = read_prompts(flags.sample_prompts, "--sample_prompts")
        prompts = captions, conditioner.encode(captions)
    if isinstance(conditioner, PublishedConditioner) and not drawn and dataset.describe().empty_caption is not None:
        conditioner.encoder = None  # frees memory for the model
    return conditioner, prompts


def _conditioner(flags: TrainConfig, config: DiTConfig, dataset: MediaDataset, mesh: Mesh, drawn: bool) -> Conditioner:
    """Make the conditioner. A frozen text encoder is loaded if samples are ``drawn`` or captions are not cached."""
    if config.text is None:
        return LabelConditioner(cast(int, config.num_classes), mesh.device)
    name = cast(str, flags.text_encoder)
    how: dict[str, Any] = dict(device=mesh.device, max_tokens=config.text.max_tokens, precision=flags.text_precision)
    encoder, empty = None, None if config.text.inside else dataset.describe().empty_caption
    empty = empty and [part.unsqueeze(0) for part in empty]
    needed = drawn or empty is None
    if isinstance(config, PublicConfig):
        guidance, published, family = embedded_guidance(config), None, family_of(config.family)
        if needed and not isinstance(dataset, MockDataset):
            published = load_published_text(Path(name).expanduser(), family, dtype=torch.bfloat16, **how)
        trim = family.text.padding == "remove"
        width, mock = config.spec.text.picture, isinstance(dataset, MockDataset)
        encodes = width and not mock and dataset.describe().first_frames is None  # the cache may hold tokens
        pictures = PictureTokens(Path(name), width, mesh.device) if encodes else None
        return PublishedConditioner(config.text, mesh.device, published, guidance, empty, trim, pictures)
    # random latents (mock) come with random embeddings
    if not config.text.inside and not isinstance(dataset, MockDataset) and needed:
        dtype = torch.float16 if mesh.device.type == "cuda" else torch.float32
        encoder = load_text_encoder(name, dtype=dtype, **how)
    return CaptionConditioner(config.text, mesh.device, encoder, empty)


def _lora_of_resume(flags: TrainConfig, resume: Checkpoint | None, world_size: int) -> TrainConfig:
    """Set LoRA flags that are not on the command line to the resumed run's values."""
    stored = read_info(resume.model).get("lora") if resume else None
    if stored is None:
        if flags.lora is not None and flags.pretrained is None:
            raise ValueError(NO_BASE)
        if flags.lora is None and flags.base_precision != "bf16":
            raise ValueError(f"--base_precision {flags.base_precision}: does nothing without --lora; leave it out")
        flags.check_streamed(world_size, known=True)
        return flags
    if "base_precision" not in flags.given:
        kept = stored_fingerprint(cast(Checkpoint, resume).state).get("base_precision", "bf16")
        flags = replace(flags, base_precision=kept)
    if flags.lora is None:
        lora = Lora(**stored)
        flags = replace(flags, lora=lora.rank, lora_alpha=lora.alpha, lora_targets=list(lora.targets))
    if flags.pretrained is None:
        if not Path(stored["base"]).exists():
            raise ValueError(f"--load: adds to {stored['base']}, which is gone; give its new place to --pretrained")
        flags = replace(flags, pretrained=stored["base"])
    flags.check_lora()
    flags.check_streamed(world_size, known=True)
    return flags


def _both_of_resume(flags: TrainConfig, resume: Checkpoint | None) -> TrainConfig:
    """Set --expert both if the resumed run trains two networks. Raises ValueError for another --expert."""
    if resume is None:
        return flags
    both, folder = low_noise_of(resume.folder) is not None, resume.folder
    if folder.parents[1].name == LOW and (folder.parents[2] / CHECKPOINTS).is_dir():
        raise ValueError(f"--load: {folder} is of one network of a run of both; load {folder.parents[2]}")
    if both and flags.expert not in (None, "both"):
        raise ValueError(f"--expert {flags.expert}: {folder} is of a run of both networks; give both")
    if not both and flags.expert == "both":
        raise ValueError(f"--expert both: {folder} is of a run of one network; give the one that it trains")
    return replace(flags, expert="both") if both else flags


def _low_noise(high: Run) -> Run:
    """Return a copy of the run ``high`` for the low-noise network."""
    flags, resume, mesh = high.flags, high.resume, high.mesh
    if getattr(high.model_config, "expert", None) != "high":
        raise ValueError(f"--expert both: {flags.pretrained} has one network; leave the flag out")
    if resume is not None:
        resume = find_checkpoint(str(low_noise_of(resume.folder)), flags.outputs, flags.model, mesh)
    if flags.pretrained is not None:
        beside = Path(flags.pretrained).with_name(f"{TRANSFORMER}_2")
        flags = replace(flags, pretrained=str(low_noise_of(flags.pretrained) or beside))
    plan = plan_model(flags, high.dataset, resume)
    if resume is not None:
        check_resume(resume, plan.config, plan.objective, bool(flags.lora))
    config, start = _starting_weights(flags, plan.config, resume, mesh, [])
    folder = high.folder / LOW
    return replace(high, objective=plan.objective, model_config=config, resume=resume, folder=folder, **start)


def _starting_weights(
    flags: TrainConfig, config: DiTConfig, resume: Checkpoint | None, mesh: Mesh, notes: list[str]
) -> tuple[DiTConfig, dict[str, Any]]:
    """Find the weights of --pretrained. Return ``config`` in the weights' revision, and the values of the run's fields
    ``initial``, ``initial_config`` and ``lora``."""
    initial, initial_config = None, None
    if flags.pretrained and (flags.lora or not resume):  # a LoRA's checkpoints do not contain its base weights
        initial, initial_config, config = check_pretrained(
            flags.pretrained, flags.model, config, notes, mesh, resumed=resume is not None
        )
    lora = _lora(flags, config, initial, resume, notes) if flags.lora else None
    return config, dict(initial=initial, initial_config=initial_config, lora=lora)


def _lora(
    flags: TrainConfig, config: DiTConfig, initial: Weights | None, resume: Checkpoint | None, notes: list[str]
) -> Lora:
    """Return the LoRA settings. Raises ValueError if the resumed checkpoint has other settings."""
    assert initial is not None, "--lora adds to --pretrained"
    lora = cast(Lora, lora_of(flags, str(initial.path.resolve())))
    if resume is not None:
        stored = Lora(**read_info(resume.model)["lora"])
        if (stored.rank, stored.alpha, *stored.targets) != (lora.rank, lora.alpha, *lora.targets):
            made = f"--lora {stored.rank} --lora_alpha {stored.alpha:g}"
            made += f" --lora_targets {' '.join(stored.targets)}" if stored.targets else ""
            made += "" if stored.targets or not lora.targets else " and without --lora_targets"
            raise ValueError(f"--load: {resume.folder} was made with {made}; repeat that")
        with resume.open(resume.model.name) as tensors:
            trained = [name.removesuffix(A) for name in tensors if name.endswith(A)]
        # earlier versions also trained a LoRA in the bytes encoder
        if gone := set(trained) - lora_layers(config, lora).keys():
            raise ValueError(
                f"--load: {resume.folder} has LoRA at {min(gone)}, where none is trained now; start a new run, or draw "
                "from it by sample.py"
            )
        if stored.base != lora.base and "pretrained" not in stored_fingerprint(resume.state):
            notes.append(f"--pretrained {lora.base}: the checkpoint was made for {stored.base}")
    return lora
