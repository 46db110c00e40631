"""Weights in: our safetensors (the configuration is inside) and Meta's .pt files."""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from opendit.models.dit import DiT, DiTConfig
from opendit.models.zoo import SIZES, build_model, canonical_name, config_from_dict, is_video, model_config
from opendit.state_files import MANIFEST, damage, intact_before

METADATA_KEY = "opendit"


@dataclass
class Weights:
    """A state dict in the canonical layout, and what its file says about it."""

    state: dict[str, Tensor]
    path: Path
    info: dict = field(default_factory=dict)  # of our files: model, config, class_names, vae, image_size, step

    @property
    def config(self) -> DiTConfig | None:
        return config_from_dict(self.info["config"]) if "config" in self.info else None


def find_weights(path: str | Path, which: str = "ema") -> Path:
    """The weights file of a path: a file, a checkpoint folder, or a run folder (its newest checkpoint).

    A file that a checkpoint has lost is returned too: :func:`read_weights` says what to do about it.

    Raises:
        FileNotFoundError: nothing of the kind is there; the message says what was looked for.
    """
    path = Path(path)
    if path.is_file():
        return path
    for folder in (path, path / "checkpoints" / "latest"):
        if (folder / f"{which}.safetensors").is_file() or (folder / MANIFEST).is_file():
            return folder / f"{which}.safetensors"
    raise FileNotFoundError(
        f"{path}: no checkpoint there. Give a .safetensors or .pt file, a folder with {which}.safetensors, "
        "or a run folder with checkpoints/latest"
    )


def read_info(path: Path) -> dict:
    """What one of our safetensors files says of itself, without reading its weights; {} for other files."""
    if path.suffix != ".safetensors":
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); take another checkpoint") from error


def read_config(path: Path) -> DiTConfig | None:
    """The configuration in one of our safetensors files, without reading its weights; None for other files and for one
    that can't be read, of which :func:`read_weights` says more."""
    try:
        return Weights({}, path, read_info(path)).config
    except (ValueError, KeyError, TypeError):
        return None


def read_weights(path: Path) -> Weights:
    """Reads a weights file into CPU memory, verified if it is a checkpoint's. Pickles are read with ``weights_only``:
    they run no code.

    Meta's training checkpoints hold ``model``, ``ema``, ``opt`` and ``args``; ``ema`` is taken.

    Raises:
        ValueError: the file is damaged, can't be read, or holds no state dict.
    """
    if path.suffix == ".safetensors":
        _verify(path)
        info = read_info(path)
        with safe_open(path, framework="pt") as file:
            return Weights({name: file.get_tensor(name) for name in file.keys()}, path, info)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # the `args` of Meta's training checkpoints
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} can't be read as a weights-only .pt file ({str(error).splitlines()[0]}). "
            "Files that would run code when loaded are refused"
        ) from error
    if isinstance(content, dict) and "ema" in content and "model" in content:
        content = content["ema"]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{path} holds no state dict of a model")
    return Weights({name.removeprefix("module."): tensor for name, tensor in content.items()}, path)


def _verify(path: Path) -> None:
    """Compares a weights file with the manifest beside it, where there is one. Raises ValueError naming the damage and
    the newest earlier checkpoint whose weights are intact."""
    if (path.parent / MANIFEST).is_file() and (problem := damage(path.parent, only=[path.name])):
        earlier = intact_before(path.parent, only=[path.name])
        fix = f"take {earlier}, whose weights are intact" if earlier else "take another checkpoint"
        raise ValueError(f"{problem}; {fix}")


def infer_config(state: dict[str, Tensor], name: str, path: Path) -> DiTConfig:
    """The configuration of a named DiT on labels from its weights' shapes (square inputs).

    Raises:
        ValueError: the weights are another model's; the message names the model they fit, if any.
    """
    if is_video(name):
        raise ValueError(f"{path} says nothing of the frames that --model {name} takes: give a checkpoint of OpenDiT")
    try:
        hidden, channels, patch, _ = state["x_embedder.proj.weight"].shape
        side = int(state["pos_embed"].shape[1] ** 0.5) * patch
        config = model_config(
            name,
            input_size=(side, side),
            in_channels=channels,
            num_classes=state["y_embedder.embedding_table.weight"].shape[0] - 1,
        )
        depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))
    except (KeyError, ValueError) as error:
        if isinstance(error, KeyError):
            raise ValueError(f"{path} does not hold a DiT: it has no {error}") from error
        raise
    if (config.hidden_size, config.depth, config.patch_size) != (hidden, depth, patch):
        fits = [f"DiT-{k}/{patch}" for k, v in SIZES.items() if v[:2] == (hidden, depth)]
        raise ValueError(
            f"--model {name} does not fit {path}: it holds {depth} blocks of width {hidden}, patch {patch}"
            + (f"; use --model {fits[0]}" if fits else "")
        )
    return config


def load_state(model: DiT, weights: Weights) -> None:
    """Strictly loads weights into a model. Raises ValueError naming the first differences."""
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - weights.state.keys()), sorted(weights.state.keys() - own.keys())
    shapes = [k for k in own.keys() & weights.state.keys() if own[k].shape != weights.state[k].shape]
    differences = {"missing": missing, "unexpected": unexpected, "of another shape": sorted(shapes)}
    problems = [f"{len(names)} {what} (first: {names[0]})" for what, names in differences.items() if names]
    if problems:
        raise ValueError(f"{weights.path} is a checkpoint of another model: parameters {', '.join(problems)}")
    model.load_state_dict(weights.state)


def load_pretrained(
    path: str | Path, name: str | None = None, which: str = "ema", lora: str | Path | None = None
) -> tuple[DiT, Weights]:
    """A model with weights: from our checkpoints, or from Meta's .pt with the model's ``name``.

    A checkpoint of --lora brings its base's weights and is merged into them; ``lora`` is one, to be merged into those
    of ``path``. What it says of itself (classes, size, objective) holds for the model then.

    Raises:
        FileNotFoundError, ValueError: nothing there, unreadable, or another model.
    """
    if lora is not None:
        added = read_weights(find_weights(lora, which))
        if "lora" not in added.info:
            raise ValueError(f"--lora {lora}: {added.path} holds a whole model, not what --lora trains; use --ckpt")
        return _with_lora(find_weights(path, which), added, name)
    weights = read_weights(find_weights(path, which))
    if "lora" in weights.info:
        return _with_lora(Path(weights.info["lora"]["base"]), weights, name)
    config = weights.config
    if config is None:
        if name is None:
            raise ValueError(f"{weights.path} does not say which model it is: name it with --model, e.g. DiT-XL/2")
        config = infer_config(weights.state, name, weights.path)
    else:
        _check_name(weights, name)
    model = build_model(config)
    load_state(model, weights)
    return model, weights


def _check_name(weights: Weights, name: str | None) -> None:
    if name is not None and weights.info["model"] != canonical_name(name):
        raise ValueError(f"{weights.path} is a checkpoint of {weights.info['model']}, not of --model {name}")


def _with_lora(base: Path, added: Weights, name: str | None) -> tuple[DiT, Weights]:
    from opendit.models.adapt import adapt, check_same_blocks  # they know Weights
    from opendit.models.lora import merge_lora

    _check_name(added, name)
    if not base.is_file():
        raise ValueError(f"{added.path} adds to {base}, which is not there: give its new place to --ckpt, and --lora")
    weights, model = read_weights(base), build_model(added.config)
    found = weights.config or infer_config(weights.state, added.info["model"], base)
    check_same_blocks(found, added.config, base)
    adapt(model, weights, found, added.info.get("class_names") or ())
    merge_lora(model, added)
    return model, added
