"""Fine-tuning: LoRA, and training that begins with another model's weights.

LoRA is y = W x + (alpha / rank) B A x with frozen W, for the linear layers of attention and MLPs.
:class:`opendit.models.layers.Projection` adds LoRA's term. Parameters have the names that peft uses.
opendit/checkpoint/lora.py merges LoRA into the weights.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.common.torch_utils import on_meta
from opendit.config.components import parse_target
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.initialization import canonical_name, fits, initialize_parameter
from opendit.models.layers import Projection
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import Weights, build_model, model_shapes

TARGETS = ("qkv", "q", "kv", "proj", "fc1", "fc2")  # default targets: attention's and MLP's linear layers
OUTSIDE = ("media_refiner", "text_refiner", "final_layer")  # modules outside of the blocks that LoRA may adapt
A, B = ".lora_A.default.weight", ".lora_B.default.weight"  # peft's suffixes of parameter names


@dataclass(frozen=True)
class Lora:
    """A run's LoRA settings, as stored in checkpoints."""

    rank: int  # default rank of A and B
    alpha: float  # B A is multiplied by alpha / rank, with the default rank in all layers
    base: str  # file with the weights W
    targets: Sequence[str] = ()  # patterns of layer names; empty for all layers of attention and MLP in the blocks

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def to_dict(self) -> dict[str, Any]:
        targets = {"targets": list(self.targets)} if self.targets else {}
        return {"rank": self.rank, "alpha": self.alpha, "base": self.base} | targets

    def __str__(self) -> str:
        layers = f", in {' '.join(self.targets)}" if self.targets else ""
        return f"LoRA of rank {self.rank}, alpha {self.alpha:g}{layers}"


class LoraLayer(NamedTuple):
    """The rank and widths of a linear layer with LoRA."""

    rank: int
    inputs: int
    outputs: int


def targets(model: DiT, lora: Lora) -> dict[str, LoraLayer]:
    """Return the linear layers that get LoRA, by name. In the blocks, a pattern must match a layer's name or its end.
    In the modules ``OUTSIDE``, it must match the complete name. If several patterns match a layer, the last one sets
    the rank. Routers and experts never get LoRA."""
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
    """Return the result of :func:`targets` for a model with this configuration, without allocating weights."""
    with on_meta():
        return targets(build_model(config), lora)


def trains_modulation(config: DiTConfig, lora: Lora) -> bool:
    """Return True if LoRA changes a block's modulation. Shifts, scales and gates then have gradients."""
    return any("modulation" in name and not name.startswith("final_layer.") for name in lora_layers(config, lora))


def check_targets(config: DiTConfig, lora: Lora) -> None:
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
    """Add LoRA's matrices to the target layers, with initial values from ``seed``. Afterwards only these matrices and
    the parameters ``train_too`` require gradients. Target layers with a weight in ``train_too`` get no LoRA."""
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
    """Return the layer as a Projection. A layer of another class is replaced in the model by a Projection with the same
    parameters."""
    if isinstance(layer, Projection):
        return layer
    with on_meta():
        made = Projection(layer.in_features, layer.out_features, layer.bias is not None)
    made.weight, made.bias = layer.weight, layer.bias
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, made.train(layer.training))
    return made


def check_lora(weights: "Weights") -> None:
    """Raise ValueError, naming the file, unless a --lora run's weights match the configuration stored with them."""
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


# ------------------------------------------------------------------------------------------ weights of another model
#
# The blocks must be equal. Classes, resolution, text encoder, VAE and objective may differ. Weights that do not fit are
# resized or initialised anew.

# Fields of a configuration that only affect layers before and after the blocks. All other fields must be equal.
AROUND_THE_BLOCKS = {
    "input_size", "patch_size", "in_channels", "num_classes", "null_class", "learn_sigma", "text", "positions",
    "given_frames", "published", "index", "alignment", "uncertainty",
}  # fmt: skip
TABLE, HEAD, PATCHES = "y_embedder.embedding_table.weight", "final_layer.linear.", "x_embedder.proj.weight"


@dataclass
class Adaptation:
    """The origins of a model's parameters and buffers. The first five fields map names to element counts."""

    reused: dict[str, int] = field(default_factory=dict)
    resized: dict[str, int] = field(default_factory=dict)
    new: dict[str, int] = field(default_factory=dict)
    recomputed: dict[str, int] = field(default_factory=dict)  # buffers
    left_out: dict[str, int] = field(default_factory=dict)  # unused tensors in the file
    why: dict[str, str] = field(default_factory=dict)  # for each resized tensor, an explanation
    stored: dict[str, str] = field(default_factory=dict)  # for each reused tensor, the name in the file
    made: dict[str, Tensor] = field(default_factory=dict)  # values of the resized tensors

    @property
    def untrained(self) -> list[str]:
        return [*self.resized, *self.new]

    def describe(self) -> list[str]:
        if not (self.resized or self.new or self.recomputed or self.left_out):
            return [f"reused: all {sum(self.reused.values()):,} weights"]
        lines = []
        for kind in ("reused", "resized", "new", "recomputed", "left_out"):
            weights = getattr(self, kind)
            if weights:
                reasons = dict.fromkeys(self.why[name] for name in weights if name in self.why)
                because = f" ({'; '.join(reasons)})" if reasons else ""
                names = ", ".join(_groups(weights))
                what = {"left_out": "left out of the file"}.get(kind, kind)
                lines.append(f"{what}: {sum(weights.values()):,} weights, {names}{because}")
        return lines


def same_network(first: DiTConfig, second: DiTConfig, but_guidance: bool = False) -> bool:
    """Return True unless two configurations of public models describe different networks. but_guidance: ignore the
    embedding of the guidance scale, which FLUX.1-dev has and FLUX.1-schnell lacks."""
    specs = [getattr(config, "spec", None) for config in (first, second)]  # None except for public models
    if but_guidance:
        specs = [spec and replace(spec, guidance=False) for spec in specs]
    return specs[0] == specs[1]


def block_differences(found: DiTConfig, wanted: DiTConfig) -> list[str]:
    """Return the differences between two models' blocks, as text. If ``found`` is a DiT and ``wanted`` a vDiT (DiT for
    clips), the different kind does not count."""
    ours, theirs = ({f.name: getattr(c, f.name) for f in dataclasses.fields(c)} for c in (wanted, found))
    differs = [
        f"{name} {theirs.get(name)} there, {ours.get(name)} here"
        for name in dict.fromkeys([*ours, *theirs])
        if name not in AROUND_THE_BLOCKS and ours.get(name) != theirs.get(name)
    ]
    if not same_network(found, wanted, but_guidance=True) and not differs:
        differs.append("its config.json describes them otherwise")
    kinds = (found.kind, wanted.kind)
    if found.kind != wanted.kind and kinds != (DiTConfig.kind, VDiTConfig.kind):
        differs.insert(0, f"kind {found.kind} there, {wanted.kind} here")
    return differs


def check_same_blocks(found: DiTConfig, wanted: DiTConfig, path: str | Path) -> None:
    """Raise ValueError, naming the differences, unless both models have equal blocks."""
    if differs := block_differences(found, wanted):
        raise ValueError(
            f"--pretrained: {path} has other blocks than this run's model ({', '.join(differs)}); repeat its flags"
        )


@torch.no_grad()
def adapt(
    model: DiT,
    weights: Weights,
    found: DiTConfig,
    class_names: Sequence[str] = (),
    *,
    fresh: Callable[[str], Tensor],
) -> Adaptation:
    """Decide for every parameter and buffer of ``model`` whether it comes from ``weights``, is resized or is new. The
    model is not changed and may be on the meta device.

    - A tensor of equal name and shape is reused, unless it belongs to another text encoder.
    - Label table for other classes: rows are reused for classes with equal names, and for the null class if the file
      has it. The other rows are new.
    - Head: the channels of a learned variance are dropped, or added as zeros.
    - Patch filters: a picture's filter is spread over the frames of a patch. Filters for channels of conditioning
      frames are zeros.
    - Learned positions are interpolated linearly along each axis. From pictures to clips, rows and columns are reused
      and the table of frames is new. From clips to pictures, the table of frames is left out.
    - Sine-cosine tables are always computed.

    ``fresh`` returns a parameter's initial values. Only resized tensors are read from the file.
    """
    done, config, theirs = Adaptation(), model.config, weights.shapes
    unused = dict.fromkeys(theirs)  # keys in the order of the file
    buffers = {name for name, _ in model.named_buffers()}
    other_words = _text_name(found) != _text_name(config)
    for name, own in model.state_dict().items():
        stored, shape, made, why = _stored_as(name, found, config), tuple(own.shape), None, None
        there = theirs[stored] if stored in unused else None
        unused.pop(stored, None)
        if name in buffers:
            done.recomputed[name] = own.numel()
            continue
        if there is not None and other_words and name.startswith(("y_embedder.", "text_encoder.")):
            done.left_out[name], there = math.prod(there), None
        if there is not None and name == TABLE:
            before = weights.info.get("class_names") or ()
            if not _same_table(shape, there, before, class_names, found.null_class):
                made, why = _relabelled(fresh(name), weights.state[stored], before, class_names, found.null_class)
        elif there is not None and there != shape:
            made, why = _resized(name, shape, weights.state[stored], found, config)
        if made is not None and why is not None:
            done.resized[name], done.made[name], done.why[name] = own.numel(), made, why
        elif there is not None and why is None:
            done.reused[name], done.stored[name] = own.numel(), stored
        else:
            done.new[name] = own.numel()
    done.left_out.update((name, math.prod(theirs[name])) for name in unused)
    return done


def _stored_as(name: str, found: DiTConfig, config: DiTConfig) -> str:
    """Return the parameter's name in weights of ``found``. The tables of learned positions are numbered: table 0 is for
    time in clips, and for rows in pictures."""
    axis = re.fullmatch(r"learned_positions\.axes\.(\d+)\.weight", name)
    if axis is None:
        return name
    return f"learned_positions.axes.{int(axis[1]) + len(found.grid) - len(config.grid)}.weight"


def _text_name(config: DiTConfig) -> str | None:
    return config.text and config.text.name


def _same_classes(before: Sequence[str], after: Sequence[str]) -> bool:
    return not before or not after or list(before) == list(after)


def _same_table(
    own: Sequence[int], there: Sequence[int], before: Sequence[str], after: Sequence[str], null_class: bool
) -> bool:
    return own == there and null_class and _same_classes(before, after)


def _relabelled(
    own: Tensor, value: Tensor, before: Sequence[str], after: Sequence[str], null_class: bool
) -> tuple[Tensor, str]:
    """Return a label table and an explanation. The last row is the null class.

    Args:
        own: initial values.
        value: the file's table.
        null_class: True if the file's table ends with a null class.
    """
    if own.shape[1] != value.shape[1]:
        return own, "the null class too"
    made, rows, classes = own.clone(), {name: row for row, name in enumerate(before)}, len(own) - 1
    if not null_class and len(value) == classes and _same_classes(before, after):
        made[:-1] = value
        return made, f"all {classes} classes are kept, and the null class, which the file does not have, is fresh"
    if null_class:
        made[-1] = value[-1]
    known = [(row, rows[name]) for row, name in enumerate(after) if name in rows]
    for row, source in known:
        made[row] = value[source]
    kept = f"{classes} classes, of which {len(known)} by the same name"
    return made, f"{kept}, and the null class are kept" if null_class else f"{kept} are kept, and no null class"


def _resized(
    name: str, shape: tuple[int, ...], value: Tensor, found: DiTConfig, config: DiTConfig
) -> tuple[Tensor | None, str]:
    """Return ``value`` resized to ``shape``, and an explanation; (None, "") if the tensor can't be resized."""
    if name == PATCHES and found.in_channels == config.in_channels and shape[-2:] == value.shape[-2:]:
        return _filters(shape, value)
    if name.startswith(HEAD) and found.in_channels == config.in_channels and found.patch[-2:] == config.patch[-2:]:
        channels, rest = min(found.out_channels, config.out_channels), value.shape[1:]
        # The head's rows are ordered by position in the patch (frame, row, column), then by channel.
        rows = value.view(-1, found.out_channels, *rest)[:, :channels]
        made = torch.zeros(shape, device="cpu").view(-1, config.out_channels, *rest)
        frames = config.patch[0] if config.is_video and not found.is_video else 1
        if frames * len(rows) == len(made):
            made[:, :channels] = rows.repeat(frames, *(1,) * (rows.dim() - 1))
            return made.view(shape), "the head" + _variance(found, config)
    if name.startswith("learned_positions.") and shape[1] == value.shape[1]:
        table = F.interpolate(value.float().t()[None], shape[0], mode="linear", align_corners=True)
        return table[0].t(), "interpolated linearly"
    return None, ""


def _filters(shape: tuple[int, ...], value: Tensor) -> tuple[Tensor | None, str]:
    """Resize patch filters (D, channels, [frames,] rows, columns) to other channels or more frames. Return the filters
    and an explanation, or (None, "") if this is impossible."""
    how = []
    if value.dim() < len(shape):
        value = (value.unsqueeze(2) / shape[2]).expand(*value.shape[:2], *shape[2:])
        how.append("a picture's filter, spread over the frames")
    if value.shape[2:] != shape[2:] or len(value) != shape[0]:
        return None, ""
    if value.shape[1] != shape[1]:
        made, kept = torch.zeros(shape, device="cpu"), min(value.shape[1], shape[1])
        made[:, :kept] = value[:, :kept]
        how.append("of given frames, which begin at zero" if kept < shape[1] else "without those of given frames")
        value = made
    return value, ", ".join(how)


def _variance(found: DiTConfig, config: DiTConfig) -> str:
    if found.learn_sigma == config.learn_sigma:
        return ""
    return ", its learned variance dropped" if found.learn_sigma else ", with a learned variance that begins at zero"


def _groups(names) -> list[str]:
    """Return the names of the parameters' modules, each once. All blocks share one name, such as blocks.*.attn."""
    groups = (re.sub(r"^blocks\.\d+\.", "blocks.*.", name).split(".") for name in names)
    apart = ("blocks", "learned_positions")  # list the children of these modules separately
    return list(dict.fromkeys(".".join(parts[: 3 if parts[0] in apart else 1]) for parts in groups))
