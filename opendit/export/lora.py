"""Write the LoRA of a public model as one file, with the names of diffusers, ComfyUI, or kohya's trainers.

diffusers  transformer.LAYER.lora_A.weight             diffusers' layers; B is multiplied by alpha / rank, no alphas
comfyui    diffusion_model.LAYER.lora_down.weight      the authors' or diffusers' layers, depending on the family
kohya      lora_unet_LAYER_WITH_UNDERSCORES.lora_down.weight      the authors' layers
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from opendit.checkpoint.lora import (
    ARCHITECTURE,
    Products,
    as_one,
    moved,
    of_run,
    original_layers,
    with_halves_exchanged,
)
from opendit.checkpoint.pretrained import read_newest
from opendit.checkpoint.published import PublishedFolder, expert_of, network_of, open_published
from opendit.checkpoint.tensor_set import write_weights
from opendit.export.published import caption_length, name_of
from opendit.models.families.base import Family
from opendit.models.lora import Lora, check_lora

LARGEST = 50 * 10**9  # maximum size of a file in bytes, so large that every LoRA fits into one file


def export_lora(
    ckpt: str,
    output: Path,
    base: str | None,
    families: Mapping[str, Family],
    form: str = "diffusers",
    which: str = "ema",
) -> list[str]:
    """Write the LoRA of a run as one file, and return messages for the user.

    Args:
        ckpt: a checkpoint of a run with --lora, or the run's folder.
        base: the public model's folder, whose headers are read; None for the folder that the checkpoint names.
        families: name -> known family.
        form: the naming scheme of the file: diffusers, comfyui or kohya.
        which: the set of weights of a checkpoint.

    Raises:
        ValueError, FileNotFoundError: a file is missing, or ``ckpt`` is not a LoRA of a public model. The message is
            one line.
        OSError: the file can't be written.
    """
    weights = read_newest(ckpt, which)
    if "lora" not in weights.info:
        raise ValueError(f"{weights.path} holds a whole model, not what --lora trains; export it as diffusers")
    check_lora(weights)
    lora = Lora(**weights.info["lora"])
    products, full = of_run(weights)
    if full:
        raise ValueError(f"{weights.path}: {min(full)} was trained as a whole, which a LoRA can't hold")
    opened, notes = open_published(network_of(base or lora.base, weights.config), families), []
    try:
        state = _named(products, opened, form)
        metadata = _metadata(lora, opened, form, output.stem) | caption_length(weights, opened.family, notes)
    finally:
        opened.close()
    write_weights(output, state, metadata, LARGEST)
    return notes


def _named(products: Products, opened: PublishedFolder, form: str) -> dict[str, Tensor]:
    """Convert products with OpenDiT's names to the tensors of the file."""
    family, shapes = opened.family, dict(opened.files.shapes)
    products = moved(products, opened.pairs, opened.shapes(), shapes)
    if form == "diffusers":
        return {
            f"transformer.{name.removesuffix('.weight')}.lora_{factor}.weight": tensor.contiguous()
            for name, parts in products.items()
            for factor, tensor in zip("AB", as_one(parts, shapes[name], scaled=True), strict=True)
        }
    if form == "kohya" or family.comfyui == "original":
        pairs = []
        joined: set[str] = set()
        for layer, parts in original_layers(family, shapes).items():
            theirs = tuple(f"{part}.weight" for part in parts)
            pairs.append((theirs, (f"{layer}.weight",), 0))
            shapes[f"{layer}.weight"] = (sum(shapes[name][0] for name in theirs), prod(shapes[theirs[0]][1:]))
            joined.update(theirs)
        pairs += [((name,), (name,), 0) for name in products if name not in joined]
        products = with_halves_exchanged(moved(products, pairs, shapes, shapes), family)
    state = {}
    for name, parts in products.items():
        layer = name.removesuffix(".weight")
        key = f"diffusion_model.{layer}" if form == "comfyui" else f"lora_unet_{layer.replace('.', '_')}"
        a, b = as_one(parts, shapes[name])
        state |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
        state[f"{key}.alpha"] = torch.tensor(parts[0].scale * len(a))  # all parts of a run's LoRA have one scale
    return state


def _metadata(lora: Lora, opened: PublishedFolder, form: str, title: str) -> dict[str, str]:
    """Return the metadata of the file.

    ComfyUI, AUTOMATIC1111 and model managers show the keys of StabilityAI's model specification and of kohya's
    trainers. No key is called rank or alpha, because a reader might apply such a value a second time.
    """
    family, alpha = opened.family, f"{lora.alpha:g}"
    variant = family.variant(opened.index)
    architecture = (variant and variant.architecture) or family.architecture
    found = {
        "format": "pt",
        "base": name_of(opened),
        "trained_rank": str(lora.rank),
        "trained_alpha": alpha,
        "modelspec.sai_model_spec": "1.0.0",
        ARCHITECTURE: f"{architecture}/lora",
        "modelspec.implementation": "diffusers" if form == "diffusers" else form,
        "modelspec.title": title,
        "ss_base_model_version": architecture,
    }
    if opened.alone:
        found["expert"] = str(expert_of(opened.transformer))
    if form != "diffusers":
        found |= {"ss_network_dim": str(lora.rank), "ss_network_alpha": alpha}
    return found | ({"license": family.license, "modelspec.license": family.license} if family.license else {})
