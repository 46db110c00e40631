"""A run's fingerprint, and config.json with all starts of the run.

The fingerprint holds everything that determines the loss curve: flags, data, encoder weights, kernels, versions. Every
checkpoint stores it, and a resumed run reports the differences.

Flags in FREE do not affect the curve, and flags in OF_THE_MODEL can't change on resuming. Any other flag is assumed to
change the curve. The fingerprint holds flags in DERIVED under other names.
"""

import json
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch

import opendit
from opendit.checkpoint.ema import FIRST_WARMUP
from opendit.checkpoint.foreign import TRANSFORMER
from opendit.checkpoint.tensor_set import files_of
from opendit.common.hub import origin
from opendit.common.safe_files import rename, replacing, sync_folder, write_whole
from opendit.common.utils import hash_parts
from opendit.config.architectures import family_in
from opendit.config.command_line import overridden, to_yaml
from opendit.config.flags import flags_of, to_dict
from opendit.config.names import DESCRIPTIONS
from opendit.config.train import OBJECTIVE_FLAGS, TrainConfig
from opendit.data.files import hash_files
from opendit.data.order import KEYED
from opendit.diffusion.objectives import objective_from_dict
from opendit.encoders.text import encoder_folder
from opendit.encoders.vae import vae_folder
from opendit.training.run import Run
from opendit.training.validation import number_of_losses

# Texts that tell the user what a difference between two fingerprints means.
CURVE = "the curve is another from here on"
AVERAGES = "the averages are others from here on, the curve is the same"
ROUNDING = "the same curve within rounding, not bit for bit"
CODE = "the same curve only if nothing that computes it was changed"

FREE = frozenset(
    "num_workers data_timeout max_bad max_bad_steps max_hours enable_cuda_graph keep_gathered recipe config dry_run "
    "outputs load download log_every ckpt_every save ckpt_keep checkpoint_format profile "
    "sample_every sample_steps sample_cfg_scale sample_prompts "
    "video_reader reshard offload gather_fp8 parallel hardware card gpus_per_node "
    "log_to validate_every validate_path validate_samples ckpt_best "
    "evaluate_every evaluate_samples evaluate_metrics evaluate_reference evaluate_features evaluate_video_features "
    "evaluate_steps evaluate_cfg_scale".split()
)
OF_THE_MODEL = frozenset(
    "model num_classes max_text_tokens cross_attention qk_norm adaln_lora bias positions norm mlp full_attention "
    "patch_bottleneck expert_capacity use_video lora lora_alpha lora_targets given_frames".split()
)
# Flags that are compared through entries with other names, see :func:`fingerprint`.
DERIVED = frozenset(
    "data_path energon_cooker file_column caption_column caption_prefix validate_share vae text_encoder text_precision "
    "pretrained expert random_flip batch_size grad_accumulation global_batch_size epochs max_steps ema_decay "
    "ema_warmup enable_modulate_kernel enable_layernorm_kernel enable_flashattn fp8 attention sequence_parallel_size "
    "sequence_parallel_type grad_checkpoint recompute recompute_blocks".split()
)
# Entry -> what a difference means. Entries that are not listed mean CURVE.
MEANS = {
    "ema_decay": AVERAGES,
    "ema_warmup": AVERAGES,
    "average": AVERAGES,
    **dict.fromkeys(("plugin", "mixed_precision", "compile", "deterministic"), ROUNDING),
    **dict.fromkeys(("tensor_parallel_size", "expert_parallel_size"), ROUNDING),
    **dict.fromkeys(("data_parallel_replicate", "reduce_dtype"), ROUNDING),
    **dict.fromkeys(("pipeline_parallel_size", "pipeline_schedule"), ROUNDING),
    **dict.fromkeys(("fp8", "attention", "kernels", "recomputed", "sequence", "split", "world_size"), ROUNDING),
    "muon_precision": ROUNDING,
    **dict.fromkeys(("torch", "colossalai", "triton", "cuda", "cudnn", "processor"), ROUNDING),
    "source": CODE,
    "order": f"samples come in another order from this step on, some of this epoch twice: {CURVE}",
}
CALLED = {
    "global_batch": "the global batch",
    "order": "the order of samples",
    "blend": "the sources' weights",
    "parts": "the parts of one shape in a step",
    "split": "--batch_size x data-parallel ranks x --grad_accumulation",
    "world_size": "processes",
    "last_step": "the last step, where the cosine ends,",
    "kernels": "fused kernels",
    "pretrained_low": "--pretrained, the low-noise network,",
    "recomputed": "recomputed in the backward pass",
    "sequence": "sequence parallelism",
    "processor": "the processor",
    "source": "OpenDiT's code",
}
SHOWN_ONLY = frozenset(
    "data_path validation vae_path text_encoder_path pretrained_path pretrained_low_path hub opendit commit".split()
)
# Names of entries in checkpoints without a fingerprint -> present names.
BEFORE = {"precision": "mixed_precision", "seed": "global_seed", "sequence_parallel": "sequence"}


def recomputed(flags: TrainConfig) -> str:
    """Describe which activations the backward pass recomputes."""
    found = "blocks" if flags.grad_checkpoint else flags.recompute
    return found if flags.recompute_blocks is None else f"{found} in {flags.recompute_blocks} blocks"


def fingerprint(run: Run) -> dict[str, Any]:
    """Return a run's fingerprint as JSON values. Call on one rank. Reads some of the data's files."""
    flags, mesh, dataset, ops = run.flags, run.mesh, run.dataset, run.kernels.ops
    data, about = dataset.fingerprint(), dataset.describe()
    cuda = mesh.device.type == "cuda"
    # repository, commit and file hashes of the hub model that the run started from
    hub = None if flags.pretrained is None else origin(flags.pretrained)
    found = {name: getattr(flags, name) for name in by_value(flags.objective)}
    found |= {
        "data_path": flags.data_path,
        "data": data.identity,
        "samples": len(dataset),
        "contents": data.contents,
        "validation": run.validation and f"{number_of_losses(run)} of {run.validation.fingerprint().identity}",
        "random_flip": about.random_flip,
        **_encoders(run),
        "hub": hub or (stored_fingerprint(run.resume.state).get("hub") if run.resume else None),
        "global_batch": run.schedule.global_batch,
        "order": KEYED,
        "blend": about.blend,
        "parts": run.schedule.micro_batches,
        "split": f"{flags.batch_size} x {mesh.dp_size} x {flags.grad_accumulation}",
        "world_size": mesh.world_size,
        "last_step": run.last_step if flags.lr_schedule == "cosine" else None,
        "ema_decay": flags.ema_decays,
        "ema_warmup": run.ema_warmup,
        "kernels": ops.replaced,
        "attention": run.kernels.attend.backend,
        "fp8": ops.float8,
        # recomputation can change bits on a GPU, but not on a CPU
        "recomputed": recomputed(flags) if cuda else "none",
        "sequence": run.sequence and f"{run.sequence.plan.kind} over {mesh.sp_size} ranks",
        "processor": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s)",
        **code(),
    }
    return json.loads(json.dumps(found))


def by_value(objective: str) -> list[str]:
    """Return the names of flags to compare on resuming a run with this objective."""
    others = {name for name, of in OBJECTIVE_FLAGS.items() if of != objective}
    left_out = FREE | OF_THE_MODEL | DERIVED | others
    return [item.name for item in flags_of(TrainConfig) if item.name not in left_out]


def _encoders(run: Run) -> dict[str, str | None]:
    """Return hashes and paths of the frozen networks: VAE, text encoder, and base weights of a LoRA.

    The hash is None for a network that processes no training samples. pretrained_low is the low-noise network of
    --expert both; earlier versions did not store its hash.
    """
    vae = text = None
    about = run.dataset.describe()
    if about.kind == "pixels":
        vae = "none" if run.vae == "none" else _network(vae_folder(run.vae))
    if run.conditioner.encoder is not None and about.text_encoder is None:
        name = cast(str, run.flags.text_encoder)
        if family_in(run.flags.model):
            found = Path(name).expanduser().iterdir()
            parts = sorted(path for path in found if path.name.startswith(("tokenizer", "text_encoder")))
            text = hash_parts(*map(_network, parts))
        else:
            text = _network(encoder_folder(name))
        if run.flags.text_precision != "bf16":
            text = hash_parts(text, run.flags.text_precision)
    high, low = (each.initial if each and each.lora else None for each in (run, run.low))
    return {
        "vae": vae,
        "vae_path": run.vae,
        "text_encoder": text,
        "text_encoder_path": run.flags.text_encoder,
        "pretrained": high and _weights(high.path),
        "pretrained_path": high and str(high.path),
        "pretrained_low": low and _weights(low.path),
        "pretrained_low_path": low and str(low.path),
    }


def _weights(path: Path) -> str:
    if path.is_dir():
        return _network(path / TRANSFORMER if (path / TRANSFORMER).is_dir() else path)
    return hash_files([str(path), *(str(path.with_name(name)) for name in files_of(path))])


def _network(folder: Path) -> str:
    """Return one hash over the files of a diffusers or transformers folder."""
    kinds = (".json", ".safetensors", ".txt", ".model")
    files = sorted(path for path in folder.iterdir() if path.suffix in kinds)
    return hash_parts(*(path.name for path in files), hash_files([str(path) for path in files]))


@cache
def code() -> dict[str, str | None]:
    """Return the versions of this package and its libraries, and a hash of the package's source files."""
    package = Path(opendit.__file__).parent
    files = sorted(package.rglob("*.py"))
    names = (str(path.relative_to(package)) for path in files)
    contents = (path.read_bytes() for path in files)
    return {
        "opendit": opendit.__version__,
        "commit": _commit(package),
        "source": hash_parts(*names, *contents),
        "torch": torch.__version__,
        "colossalai": _installed("colossalai"),
        "triton": _installed("triton"),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None,
    }


def _commit(package: Path) -> str | None:
    """Return the commit of a git checkout, with "-dirty" if tracked files were changed. None if there is no
    checkout."""
    if not (package.parent / ".git").exists():
        return None
    ask = ["git", "-C", str(package.parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # git must not write into the checkout
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=5, env=quiet)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def stored_fingerprint(state: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprint in a checkpoint's state.json. Older checkpoints have only some entries."""
    found = state.get("fingerprint")
    if found is None:
        old = ("world_size", "plugin", "precision", "fp8", "attention", "sequence_parallel", "global_batch", "seed")
        found = {BEFORE.get(name, name): state[name] for name in old if name in state}
        objective = objective_from_dict(state.get("objective"))
        found["objective"] = objective.name
        flag_of = {name: setting.flag for name, setting in DESCRIPTIONS[objective.name].settings.items()}
        found |= {flag_of[setting]: value for setting, value in asdict(objective).items() if setting in flag_of}
    decays = list(state["ema"]["files"].values())
    found = {name: value for name, value in found.items() if name != "ema_decay"}
    found["ema_warmup"] = warmup_of(found)
    found.setdefault("order", "sorted")  # the only order in the oldest releases
    return {**found, "ema_decay": decays} if decays else found


def warmup_of(stored: dict[str, Any]) -> float:
    """Return the rate of a checkpoint's warm-up of averages, 0 for none. A stored True means FIRST_WARMUP."""
    value = stored.get("ema_warmup", 0)
    return FIRST_WARMUP * value if isinstance(value, bool) else value


def changes(stored: dict[str, Any], now: dict[str, Any], step: int) -> list[str]:
    """Return a line for each difference between a checkpoint's fingerprint ``stored`` and the present one. The line
    says what the difference means for the loss curve after ``step``."""
    found = [_data_line(stored, now), *(_line(name, stored, now, step) for name in now)]
    gone = stored.keys() - now.keys() - SHOWN_ONLY - OBJECTIVE_FLAGS.keys()
    lines = [line for line in found if line]
    lines += [f"{_called(name)} was {_shown(stored[name])}, and is not known here: {CURVE}" for name in sorted(gone)]
    lines += _not_recorded(stored, now)
    return [f"resume: {line}" for line in lines]


def _not_recorded(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return notes on settings that the checkpoint does not record."""
    compared = set(by_value(now["objective"]))
    values = {item.name: item.default for item in flags_of(TrainConfig) if item.name in compared}
    missing = [name for name in values if name not in stored]
    if "data" not in stored:  # the oldest checkpoints have no fingerprint
        names = ", ".join(["its data", "its code", *map(_called, missing)])
        return [f"the checkpoint is too old to record {names}: whether they are the same is not known"]
    if stored.get("objective") != now["objective"]:
        return []  # another line reports the objectives
    # The flag may be newer than the checkpoint. Earlier versions then behaved as with its default.
    news = {name: now.get(name) for name in missing if now.get(name) != values[name]}
    return [f"{_called(name)} {_shown(value)} is new to it: {MEANS.get(name, CURVE)}" for name, value in news.items()]


def _data_line(stored: dict[str, Any], now: dict[str, Any]) -> str | None:
    if "data" not in stored:
        return None
    if stored.get("samples") != now["samples"]:
        what = f"{_shown(stored.get('samples'))} samples there, {now['samples']:,} here"
    elif stored["data"] != now["data"]:
        what = "other files, labels or captions"
    elif stored.get("contents") != now["contents"]:
        what = "files of the same names, but with other contents"
    else:
        return None
    return f"--data_path {_shown(stored.get('data_path'))} -> {_shown(now['data_path'])}: other data ({what}): {CURVE}"


def _line(name: str, stored: dict[str, Any], now: dict[str, Any], step: int) -> str | None:
    if name in SHOWN_ONLY or name not in stored or name in ("data", "samples", "contents"):
        return None
    then, value, means = stored[name], now[name], MEANS.get(name, CURVE)
    if then == value or NO_MATTER.get(name, lambda *_: False)(stored, now, step):
        return None
    if name == "ema_decay":
        return _averages_line(then, value)
    if name == "ema_warmup":
        then, value = bool(then), bool(value)
    if name == "source":
        then, value = (f"{one.get('opendit')} ({one.get('commit') or 'no commit'})" for one in (stored, now))
    elif f"{name}_path" in now:  # show the path, because a hash tells a reader nothing
        then, value = (one.get(f"{name}_path") for one in (stored, now))
        means = f"other weights: {means}"
    return f"{_called(name)} {_shown(then)} -> {_shown(value)}: {means}"


def _warmed_up(stored: dict[str, Any], now: dict[str, Any], step: int) -> bool:
    """Return True if --warmup_steps changes no learning rate from this step on."""
    constant = stored.get("lr_schedule") == now.get("lr_schedule") == "constant"
    return (
        constant
        and isinstance(stored["warmup_steps"], int)
        and step >= max(stored["warmup_steps"], now["warmup_steps"])
    )


# Entry -> function that returns True if a difference needs no line.
NO_MATTER: dict[str, Callable[[dict[str, Any], dict[str, Any], int], bool]] = {
    "warmup_steps": _warmed_up,
    # The last step is None without a cosine schedule. Entry "lr_schedule" then reports the difference.
    "last_step": lambda stored, now, _: None in (stored["last_step"], now["last_step"]),
    "split": lambda stored, now, _: stored.get("global_batch") != now["global_batch"],
    "world_size": lambda stored, now, _: "split" in stored,
    # Earlier versions stored this hash for every folder, independent of the weights.
    "pretrained": lambda stored, now, _: stored["pretrained"] == hash_parts("1", b""),
}


def _averages_line(then: list[float], now: list[float]) -> str:
    parts = [f"that of {decay} begins as the checkpoint's of {then[0]}" for decay in now if decay not in then]
    parts += [f"that of {decay} ends with the checkpoint" for decay in then if decay not in now]
    if then[0] != now[0]:
        parts.append(f"sample.py draws from that of {now[0]}")
    return f"--ema_decay {_shown(then)} -> {_shown(now)}: {', '.join(parts) or 'in another order'}: {AVERAGES}"


def _called(name: str) -> str:
    flag = any(item.name == name for item in flags_of(TrainConfig))
    return CALLED.get(name, f"--{name}" if flag else _shown(name))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        value = " ".join(_shown(item) for item in value)
    text = "none" if value in (None, "") else str(value)
    return text if text.isprintable() and len(text) <= 200 else ascii(text)[:200]


CONFIG, DAMAGED, YAML = "config.json", "config_damaged.json", "config.yaml"


def write_config(run: Run) -> None:
    """Add this start to the run's config.json, and write config.yaml for --config. Call on one rank. Raises OSError."""
    path, start = run.folder / CONFIG, describe_start(run)
    starts = _earlier_starts(path, run.notes)
    content = {key: start[key] for key in ("opendit", "torch", "world_size", "flags", "recipe")}
    content |= {"clip_fps": run.clip_fps} if run.clip_fps is not None else {}
    content |= {"hub": run.fingerprint["hub"]} if run.fingerprint["hub"] else {}
    content |= {"model_config": run.model_config.to_dict()}
    content |= {key: start[key] for key in ("steps_per_epoch", "last_step")}
    with replacing(path) as file:
        file.write(json.dumps({**content, "starts": [*starts, start]}, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    write_whole(run.folder / YAML, to_yaml(run.flags).encode())
    sync_folder(run.folder)


def describe_start(run: Run) -> dict[str, Any]:
    """Return the entry for this start in config.json."""
    flags, found = run.flags, run.fingerprint
    return {
        "time": _iso(datetime.now(timezone.utc).timestamp()),
        "host": socket.gethostname(),
        **{key: found[key] for key in ("opendit", "commit", "torch", "colossalai", "triton", "processor")},
        "world_size": run.mesh.world_size,
        "first_step": run.first_step,
        "last_step": run.last_step,
        "steps_per_epoch": run.schedule.steps_per_epoch,
        "resumed_from": run.resume and str(run.resume.folder),
        "changes": [note for note in run.notes if note.startswith("resume: ")],
        "recipe": flags.recipe and {"name": flags.recipe, "changed": list(overridden(flags))},
        "flags": to_dict(flags),
    }


def _earlier_starts(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the starts in a config.json. A damaged file is renamed, and a note is added."""
    if not os.path.lexists(path):
        return []
    from opendit.checkpoint.schema import RUN_CONFIG  # slow: imports pydantic
    from opendit.common.json_models import read_file

    try:
        content = read_file(path, RUN_CONFIG)
    except (OSError, ValueError) as error:
        rename(path, path.with_name(DAMAGED))
        notes.append(f"{error}: it is kept as {DAMAGED}, and {CONFIG} begins anew")
        return []
    if "starts" in content:
        return content["starts"]
    return [{"time": _iso(path.stat().st_mtime), **content}]


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
