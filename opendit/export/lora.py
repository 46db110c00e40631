"""The LoRA of a public model, under the names of diffusers' ``load_lora_weights``: peft's, below ``transformer.``."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from opendit.checkpoint.matched import Pair
from opendit.checkpoint.pretrained import read_newest
from opendit.checkpoint.published import open_published
from opendit.checkpoint.tensor_set import write_weights
from opendit.export.published import name_of
from opendit.models.families.base import Family
from opendit.models.lora import A, B, Lora, check_lora

LARGEST = 50 * 10**9  # bytes: always one file


def under_published_names(
    state: Mapping[str, Tensor], scale: float, pairs: tuple[Pair, ...], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return a LoRA of our layers as one of the published layers, whose products B A are the same.

    A layer of ours that is several published ones shares its A with them, and its B's rows, or its A's columns, are
    theirs. Several layers of ours that are one published layer give it the sum of their ranks.

    Args:
        state: of a run with --lora, by our names.
        scale: alpha / rank; B is multiplied by it, so that readers need no alpha.
        pairs: our names, published names, and the dimension along which they are joined.
        shapes: of the published weights.

    Returns:
        LAYER.lora_A.weight (rank, in) and LAYER.lora_B.weight (out, rank) of every published layer that changes.
    """
    found: dict[str, Tensor] = {}
    for ours, theirs, dim in pairs:
        layers = [name.removesuffix(".weight") for name in ours]
        if not all(layer + A in state for layer in layers):
            continue
        first = [state[layer + A] for layer in layers]
        second = [state[layer + B] * scale for layer in layers]
        a = torch.block_diag(*first) if dim == 1 else torch.cat(first, dim=0)
        b = torch.cat(second, dim=1) if dim == 1 else torch.block_diag(*second)
        start = 0
        for name in theirs:
            layer, size = name.removesuffix(".weight"), shapes[name][dim]
            found[f"{layer}.lora_A.weight"] = (a.narrow(1, start, size) if dim == 1 else a).contiguous()
            found[f"{layer}.lora_B.weight"] = (b if dim == 1 else b.narrow(0, start, size)).contiguous()
            start += size
    return found


def export_lora(ckpt: str, output: Path, base: str | None, families: Mapping[str, Family], which: str = "ema") -> None:
    """Write the LoRA of a run as one file that diffusers loads.

    Args:
        ckpt: a checkpoint of a run with --lora, or the run.
        base: the public model's folder; None: the one that the checkpoint names. Its headers are read.
        families: those that are known.
        which: the set of weights of a checkpoint.

    Raises:
        ValueError, FileNotFoundError: in one line, what is missing, or is no LoRA of a public model.
        OSError: the file can't be written.
    """
    weights = read_newest(ckpt, which)
    if "lora" not in weights.info:
        raise ValueError(f"{weights.path} holds a whole model, not what --lora trains; export it as diffusers")
    check_lora(weights)
    lora = Lora(**weights.info["lora"])
    whole = [name for name in weights.state if not name.endswith((A, B))]
    if whole:
        raise ValueError(f"{weights.path}: {whole[0]} was trained as a whole, which a LoRA can't hold")
    opened = open_published(base or lora.base, families)
    try:
        scale = lora.alpha / lora.rank
        found = under_published_names(weights.state, scale, opened.pairs, opened.files.shapes)
        # Not as "rank" and "alpha", which a reader may apply once more: B is multiplied already.
        trained = {"trained_rank": str(lora.rank), "trained_alpha": f"{lora.alpha:g}"}
        metadata = {"format": "pt", "base": name_of(opened), **trained}
        metadata |= {"license": opened.family.license} if opened.family.license else {}
    finally:
        opened.close()
    write_weights(output, {f"transformer.{name}": tensor for name, tensor in found.items()}, metadata, LARGEST)
