"""LoRA: y = W x + (alpha / rank) B A x with W frozen, for the linear layers of a model's attention and MLPs (Hu et al.,
"LoRA: Low-Rank Adaptation of Large Language Models", 2021).

:class:`opendit.models.layers.Projection` adds the LoRA term in its product. Parameters have the names that peft uses.
opendit/checkpoint/lora.py merges LoRA into the weights.
"""

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from torch import nn

from opendit.common.torch_utils import on_meta
from opendit.config.components import parse_target
from opendit.models.dit import DiT, DiTConfig
from opendit.models.initialization import initialize_parameter
from opendit.models.layers import Projection
from opendit.models.parameter_names import canonical_name, fits
from opendit.models.weights import Weights
from opendit.models.zoo import build_model, model_shapes

TARGETS = ("qkv", "q", "kv", "proj", "fc1", "fc2")  # default targets: all linear layers of attention and MLP
OUTSIDE = ("media_refiner", "text_refiner", "final_layer")  # modules outside of the blocks that LoRA may adapt
A, B = ".lora_A.default.weight", ".lora_B.default.weight"  # suffixes of peft's parameter names


@dataclass(frozen=True)
class Lora:
    """The LoRA settings of a training run, which its checkpoints store.

    Attributes:
        rank: Default rank of A and B.
        alpha: Numerator of the LoRA term's factor, alpha / rank.
        base: Weights file that LoRA is added to.
        targets: Patterns of layer names in the format of --lora_targets. Empty for all layers of attention and MLP in
            the blocks.
    """

    rank: int
    alpha: float
    base: str
    targets: Sequence[str] = ()

    @property
    def scale(self) -> float:
        """The factor by which B A is multiplied. Layers with another rank than the default have the same factor."""
        return self.alpha / self.rank

    def to_dict(self) -> dict[str, Any]:
        targets = {"targets": list(self.targets)} if self.targets else {}
        return {"rank": self.rank, "alpha": self.alpha, "base": self.base} | targets

    def __str__(self) -> str:
        layers = f", in {' '.join(self.targets)}" if self.targets else ""
        return f"LoRA of rank {self.rank}, alpha {self.alpha:g}{layers}"


class LoraLayer(NamedTuple):
    """Rank and numbers of features of a linear layer with LoRA."""

    rank: int
    inputs: int
    outputs: int


def targets(model: DiT, lora: Lora) -> dict[str, LoraLayer]:
    """Return the linear layers that get LoRA, by name. In the blocks, a pattern must match the end of a layer's name.
    Outside of the blocks, it must match the whole name and begin with the name of a module in ``OUTSIDE``. If several
    patterns match a layer, the last one determines the rank. Routers and experts never get LoRA."""
    layers, found = _linear_layers(model), {}
    for text in lora.targets or TARGETS:
        pattern, rank = parse_target(text)
        first = pattern.partition(".")[0]
        for name, layer in layers.items():
            here = name.partition(".")[0] in ("blocks", first)
            if here and (fits(pattern, name) or (name.startswith("blocks.") and fits(f"**.{pattern}", name))):
                found[name] = LoraLayer(rank or lora.rank, layer.in_features, layer.out_features)
    return {name: found[name] for name in layers if name in found}


def _linear_layers(model: DiT) -> dict[str, nn.Linear]:
    found = {}
    for part in ("blocks", *OUTSIDE):
        if (owner := getattr(model, part, None)) is not None:
            found |= {name: layer for name, layer in owner.named_modules(prefix=part) if isinstance(layer, nn.Linear)}
    return {name: layer for name, layer in found.items() if not name.endswith(".router")}


@functools.cache
def lora_layers(config: DiTConfig, lora: Lora) -> dict[str, LoraLayer]:
    """Return the layers that get LoRA in a model with this configuration, as :func:`targets` does, without allocating
    weights."""
    with on_meta():
        return targets(build_model(config), lora)


def trains_modulation(config: DiTConfig, lora: Lora) -> bool:
    """Return True if LoRA changes the modulation of a block, so that shifts, scales and gates have gradients."""
    return any("modulation" in name and not name.startswith("final_layer.") for name in lora_layers(config, lora))


def check_targets(config: DiTConfig, lora: Lora) -> None:
    """Raise ValueError if a pattern matches no layer, or if a rank is not less than a layer's width."""
    for text in lora.targets:
        if not lora_layers(config, replace(lora, targets=(text,))):
            with on_meta():
                names = _linear_layers(build_model(config))
            ends = sorted({re.sub(r"\.\d+\.", ".*.", name).removeprefix("blocks.*.") for name in names})
            raise ValueError(f"--lora_targets {text}: fits no linear layer; give one of {', '.join(ends)}")
    for rank, *widths in lora_layers(config, lora).values():
        if rank >= min(widths):
            flag = f"--lora {rank}" if rank == lora.rank else f"--lora_targets with rank {rank}"
            raise ValueError(f"{flag}: out of range; give a rank from 1 to below the width, {min(widths)}")


def add_lora(model: DiT, lora: Lora, train_too: Collection[str], seed: int) -> None:
    """Add LoRA's matrices to the target layers, with initial values from ``seed``.

    Afterwards only these matrices and the parameters named in ``train_too`` require gradients. Target layers whose
    weight is in ``train_too`` get no LoRA."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(canonical_name(name) in train_too)
    for name, target in targets(model, lora).items():
        layer = cast(nn.Linear, model.get_submodule(name))
        if layer.weight.requires_grad:
            continue
        _projection(model, name, layer).add_low_rank(target.rank, lora.scale)
        for factor in (A, B):
            initialize_parameter(model, seed, name + factor)


def _projection(model: DiT, name: str, layer: nn.Linear) -> Projection:
    """Replace the layer of this name by a Projection with the same parameters, unless it is a Projection already.
    Return the Projection."""
    if isinstance(layer, Projection):
        return layer
    with on_meta():
        made = Projection(layer.in_features, layer.out_features, layer.bias is not None)
    made.weight, made.bias = layer.weight, layer.bias
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, made.train(layer.training))
    return made


def check_lora(weights: "Weights") -> None:
    """Check the LoRA weights of a --lora run against the configuration stored with them. Raise ValueError, naming the
    file, if they do not match."""
    lora, state = Lora(**weights.info["lora"]), weights.state
    assert weights.config is not None, "what a run of --lora left is a file of ours"
    parameters, buffers = model_shapes(weights.config)
    wanted = dict(parameters | buffers)
    for name in parameters:
        layer, shape = name.removesuffix(".weight"), parameters[name]
        stored = weights.shapes.get(layer + A) if lora.targets else None
        rank = stored[0] if stored else lora.rank
        if layer != name and len(shape) == 2:
            wanted |= {layer + A: (rank, shape[1]), layer + B: (shape[0], rank)}
    for name, value in state.items():
        pair = name.endswith(A) and name.removesuffix(A) + B
        if wanted.get(name) != tuple(value.shape) or (pair and pair not in state):
            raise ValueError(
                f"{weights.path}: {name[:100]} of shape {list(value.shape)[:8]} fits no layer of the model it adds to"
            )
