"""Configurations and networks of the named models and of public models."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opendit.common.torch_utils import on_meta
from opendit.config.architectures import KINDS, parse_name
from opendit.models.conditioning import TextConfig
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import PublicConfig, plan_of_spec
from opendit.models.initialization import initialize
from opendit.models.plan import PLAN, Plan
from opendit.models.variants import (
    MOVIEGEN_PLAN,
    ECDiT,
    ECDiTConfig,
    MovieGen,
    MovieGenConfig,
    STDiT,
    STDiTConfig,
    VDiT,
    VDiTConfig,
)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Classes:
    """The configuration class, the model class and the plan (parallelism and costs) of an architecture."""

    config: type[DiTConfig]
    model: type[DiT]
    plan: Plan = PLAN


CLASSES = {
    "DiT": Classes(DiTConfig, DiT),
    "EC-DiT": Classes(ECDiTConfig, ECDiT),
    "vDiT": Classes(VDiTConfig, VDiT),
    "ST-DiT": Classes(STDiTConfig, STDiT),
    "MovieGen": Classes(MovieGenConfig, MovieGen, MOVIEGEN_PLAN),
}
PUBLIC = Classes(PublicConfig, PublicDiT)


def model_config(
    name: str,
    *,
    input_size: tuple[int, int],
    in_channels: int,
    num_classes: int | None = None,
    frames: int | None = None,
    text: TextConfig | None = None,
    learn_sigma: bool = True,
    revision: int | None = None,
    **options: Any,
) -> DiTConfig:
    """Return the configuration of a named model.

    Args:
        input_size: (height, width) of the latents.
        num_classes: number of classes. This or ``text`` is required.
        text: how captions condition the model.
        frames: number of latent frames; None for pictures.
        learn_sigma: True to also predict a variance, in ``in_channels`` more channels.
        revision: revision of the weights to load; None for the newest.
        options: further fields of the configuration (qk_norm, bias, positions, ...); None for the architecture's
            default.

    Raises ValueError for an unknown name, a size that the patch does not divide, ``frames`` or options that do not fit
    the architecture, and a model that can't be built.
    """
    kind_name, size, patch = parse_name(name)
    kind, made = KINDS[kind_name], CLASSES[kind_name]
    hidden, depth, heads, more = kind.sizes[size]
    if isinstance(patch, int):
        if frames is not None:
            clips = kind_name if kind.clips else "vDiT"
            raise ValueError(
                f"--model {name}: takes pictures; for clips use {clips}-{size}/1{patch}{patch} or the like"
            )
        size_of_latents: tuple[int, ...] = tuple(input_size)
    else:
        if frames is None:
            pictures = kind_name if kind.pictures else "DiT"
            raise ValueError(
                f"--model {name}: takes clips (--use_video); for pictures use {pictures}-{size}/2 or the like"
            )
        size_of_latents = (frames, *input_size)
    if kind.cross_attention and text is not None:
        text = replace(text, cross_attention=True)
    options = {key: value for key, value in options.items() if value is not None}
    unknown = options.keys() - {field.name for field in fields(made.config)}
    for key in sorted(unknown):
        owners = " or ".join(k for k, v in CLASSES.items() if key in {field.name for field in fields(v.config)})
        raise ValueError(f"--{key}: is not for --model {name}; it is for {owners or 'no model'}")
    mlp = options.get("mlp", made.config.mlp)
    if mlp != made.config.mlp and "mlp_ratio" not in options:
        options["mlp_ratio"] = exchanged_ratio(hidden, more.get("mlp_ratio", made.config.mlp_ratio), mlp)
    config = made.config(
        input_size=size_of_latents,
        patch_size=patch,
        in_channels=in_channels,
        hidden_size=hidden,
        depth=depth,
        num_heads=heads,
        num_classes=num_classes,
        text=text,
        learn_sigma=learn_sigma,
        **{**more, **options},
    )
    config = config if revision is None else of_revision(config, name, revision)
    try:
        config.grid_of(size_of_latents)
    except ValueError as error:
        sides = " x ".join(map(str, size_of_latents))
        raise ValueError(
            f"--model {name}: latents of {sides} don't divide by patch {patch}; take another --image_size or patch"
        ) from error
    config.check()
    return config


def exchanged_ratio(width: int, ratio: float, mlp: str) -> float:
    """Return the ``mlp_ratio`` that preserves the number of weights if ``mlp`` replaces the other MLP with ``ratio``.
    SwiGLU has three matrices and GELU has two (Shazeer 2020). The hidden width is rounded up to a multiple of 64."""
    hidden = ratio * width * (2 / 3 if mlp == "swiglu" else 3 / 2)
    return 64 * math.ceil(hidden / 64 - 1e-9) / width


def of_revision(config: DiTConfig, name: str, revision: int) -> DiTConfig:
    """Convert the model ``name``'s configuration from the newest revision to another. Return it unchanged if all
    revisions are equal."""
    if not config.depends_on_revision:
        return config
    kind_name, size, _ = parse_name(name)
    return replace(config, revision=revision, **(KINDS[kind_name].revision_1.get(size, {}) if revision < 2 else {}))


def config_from_dict(values: dict[str, Any]) -> DiTConfig:
    """Return the configuration from the result of ``to_dict``. A dictionary without a kind describes a DiT. Raises
    ValueError for a kind that this version does not know."""
    return _classes(values.get("kind", DiTConfig.kind)).config.from_dict(values)


def build_model(config: DiTConfig, seed: int | None = None) -> DiT:
    """Build a network on torch's default device, with the initial weights for ``seed``. If ``seed`` is None, torch's
    generator draws a seed. On the meta device, weights have no values. Raises ValueError for a configuration that can't
    be built."""
    if seed is None:
        return _classes(config.kind).model(config)
    model = empty_model(config)
    if model.device.type != "meta":
        initialize(model, seed)
    return model


def empty_model(config: DiTConfig, *, parameters: bool = True) -> DiT:
    """Build a network on torch's default device, with its fixed tables. The caller must set the parameters. parameters:
    False to leave the parameters on the meta device. Raises ValueError for a configuration that can't be built."""
    device = torch.get_default_device()
    with on_meta():
        model = _classes(config.kind).model(config)
    if device.type == "meta":
        return model
    if parameters:
        model.to_empty(device=device)
    model.fill_tables(device)
    return model


def model_shapes(config: DiTConfig) -> tuple[Shapes, Shapes]:
    """Return the shapes of a model's parameters and buffers, without allocating memory. Raises ValueError for a
    configuration that can't be built."""
    parameters, buffers = _model_shapes(config)
    return dict(parameters), dict(buffers)


@functools.lru_cache(64)  # --parallel auto checks hundreds of combinations of flags
def _model_shapes(config: DiTConfig) -> tuple[Shapes, Shapes]:
    try:
        with on_meta():
            model = build_model(config)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, AssertionError) as error:
        raise ValueError(f"a model of this configuration can't be built ({str(error).splitlines()[0]})") from error
    parameters, buffers = model.named_parameters(), model.named_buffers()
    return {n: tuple(p.shape) for n, p in parameters}, {n: tuple(b.shape) for n, b in buffers}


def plan_of(config: DiTConfig) -> Plan:
    return plan_of_spec(config.spec) if isinstance(config, PublicConfig) else _classes(config.kind).plan


def _classes(stored: str) -> Classes:
    known = {made.config.kind: made for made in (*CLASSES.values(), PUBLIC)}
    if stored not in known:
        raise ValueError(f"a model of kind {stored!r}: this version knows {', '.join(known)}; use a newer OpenDiT")
    return known[stored]


@dataclass
class Weights:
    """A state dict in the canonical layout, and the file's metadata. Tensors in a safetensors file are read on
    access."""

    state: Mapping[str, Tensor]
    path: Path
    # Metadata. OpenDiT's files have the keys model, config, class_names, vae, image_size and step.
    info: dict[str, Any] = field(default_factory=dict)
    # for Meta's files, the number of classes in their training arguments, or the number that the user sets
    num_classes: int | None = None

    @property
    def config(self) -> DiTConfig | None:
        return config_from_dict(self.info["config"]) if "config" in self.info else None

    @property
    def shapes(self) -> Shapes:
        """The shape of every tensor. This reads no tensors from a safetensors file."""
        known = getattr(self.state, "shapes", None)
        return {name: tuple(tensor.shape) for name, tensor in self.state.items()} if known is None else known
