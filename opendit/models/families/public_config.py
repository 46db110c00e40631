"""The configurations of public models. A configuration stores the family and the published ``config.json``."""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from opendit.models.blocks import BlockSpec
from opendit.models.conditioning import TextConfig
from opendit.models.configuration import DiTConfig
from opendit.models.families.base import Family, Variant
from opendit.models.families.network_spec import NetworkSpec


def published(values: Mapping[str, Any]) -> str:
    """Convert the values of a ``config.json`` to the string that a :class:`PublicConfig` stores."""
    return json.dumps(dict(values), sort_keys=True)


@functools.cache
def _spec_of(family: str, config: str) -> NetworkSpec:
    try:
        return family_of(family).layout(json.loads(config))
    except KeyError as error:
        raise ValueError(f"{error.args[0]}: not in the published configuration") from None


def family_of(name: str) -> Family:
    """Return the family with this name. Raises ValueError for an unknown name."""
    from opendit.models.families import FAMILIES as found

    if name not in found:
        raise ValueError(f"a model of family {name!r}: this version knows {', '.join(found)}")
    return found[name]


@dataclass(frozen=True)
class PublicConfig(DiTConfig):
    """The configuration of a public model. Use :func:`public_config` to create one, because fields such as hidden_size,
    depth and num_heads must match the published values.

    Attributes:
        family: Name of the family.
        published: The values of ``config.json`` as a JSON string.
        index: The relevant settings of ``model_index.json``, and "expert" (see :attr:`expert`), as a JSON string.
    """

    kind: ClassVar[str] = "public"
    plain_projections: ClassVar[bool] = False

    family: str = ""
    published: str = ""
    index: str = "{}"

    @property
    def variant(self) -> Variant | None:
        """The variant of the family that ``index`` marks; None for the family's usual models."""
        return family_of(self.family).variant(json.loads(self.index))

    @property
    def expert(self) -> str | None:
        """The selected network of a model with two networks, "high" or "low". None if both are selected, and for models
        with one network."""
        return json.loads(self.index).get("expert")

    @property
    def boundary(self) -> float | None:
        variant = self.variant
        return json.loads(self.index)[variant.setting] if variant is not None and variant.experts else None

    @property
    def index_of_both(self) -> str:
        """``index`` without the key that selects one of two networks."""
        return published({key: value for key, value in json.loads(self.index).items() if key != "expert"})

    @property
    def spec(self) -> NetworkSpec:
        """The network's specification."""
        return _spec_of(self.family, self.published)

    @property
    def block(self) -> BlockSpec:
        """The specification of the first block."""
        return self.spec.block

    @property
    def sequence_types(self) -> tuple[str, ...]:
        return ("ulysses",)

    @property
    def caption_tokens(self) -> int:
        multiple, text = self.spec.text.multiple, cast(TextConfig, self.text)
        return -(-text.max_tokens // multiple) * multiple if self.joint_sequence else 0

    @property
    def joint_sequence(self) -> bool:
        return bool(self.spec.order)

    @property
    def float8(self) -> bool:
        """True if FP8 supports the blocks. FP8's GELU needs a bias in the layer before it, and its qkv projection needs
        one head of keys and values for each query head."""
        blocks = self.spec.blocks
        return all((block.mlp != "gelu" or block.options.bias) and block.kv_heads is None for block in blocks)

    @property
    def rescaled_guidance(self) -> str:
        return family_of(self.family).guidance.rescaled

    def check_speed(self, fp8: bool, recompute: str) -> None:
        sizes = {size for block in self.spec.blocks for size in (block.width, block.mlp_hidden) if size % 16}
        if fp8 and sizes:
            raise ValueError(f"--fp8: a width of {min(sizes)} is no multiple of 16; leave it out")
        if fp8 and any(block.kv_heads is not None for block in self.spec.blocks):
            raise ValueError("--fp8: does not work with heads that share keys and values; leave it out")
        # The inherited check of FP8 requires all biases. Public models need a bias only before GELU, which ``float8``
        # checks. So skip the inherited check if ``float8`` is True.
        super().check_speed(fp8 and not self.float8, recompute)

    @property
    def given_channels(self) -> int:
        return 0

    @property
    def given_in_place(self) -> bool:
        return self.given_frames is not None and not self.spec.given

    @property
    def given_beside(self) -> bool:
        return bool(self.spec.given)

    def check_packs(self) -> None:
        if self.given_beside:
            raise ValueError("--pack_tokens: does not work with models of image to video; leave it out")
        super().check_packs()

    @property
    def in_operations(self) -> bool:
        """True if --recompute supports every norm, projection and MLP of the blocks."""
        return all(block.norm == "layer" and block.mlp == "gelu" for block in self.spec.blocks)

    @property
    def tables(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Return the family, the published values and the size of the latents as a dictionary for JSON."""
        return {
            "kind": self.kind,
            "family": self.family,
            "published": json.loads(self.published),
            "input_size": self.input_size,
            "max_tokens": cast(TextConfig, self.text).max_tokens,
            **({"index": json.loads(self.index)} if self.index != "{}" else {}),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PublicConfig":
        return public_config(
            values["family"],
            values["published"],
            tuple(values["input_size"]),
            values.get("max_tokens"),
            values.get("index"),
        )

    def check(self) -> None:
        """Do nothing, because the family's function ``layout`` has already checked the published values."""

    @property
    def modulation_width(self) -> int:
        """Average width of a block's modulation."""
        return sum(block.chunks * block.width for block in self.spec.blocks) // self.depth

    def parameters(self) -> int:
        """Return the number of trainable parameters."""
        return _parameters(self)[0]

    def whole_block_parameters(self) -> int:
        """Return the average number of parameters of a block."""
        return _parameters(self)[1] // self.depth


@functools.cache
def _parameters(config: PublicConfig) -> tuple[int, int]:
    """Return the number of trainable parameters of the model and of the main stack alone."""
    from opendit.models.zoo import model_shapes  # imported here, because the zoo imports this module

    counts = {name: math.prod(shape) for name, shape in model_shapes(config)[0].items()}
    return sum(counts.values()), sum(count for name, count in counts.items() if name.startswith("blocks."))


def public_config(
    family: str,
    values: Mapping[str, Any],
    input_size: tuple[int, ...] | None = None,
    max_tokens: int | None = None,
    index: Mapping[str, Any] | None = None,
) -> PublicConfig:
    """Return the configuration of a public model.

    Args:
        family: Name of the family.
        values: Values of ``config.json``.
        input_size: Size of the latents; None for the family's default size.
        max_tokens: Maximum number of tokens of a caption; None for the family's default.
        index: Values of ``model_index.json``, and "expert" ("high" or "low") to select one of two networks.

    Raises:
        ValueError: the values do not belong to this family.
    """
    about, text = family_of(family), published(values)
    spec, variant = _spec_of(family, text), about.variant(index)
    kept = () if variant is None else (variant.setting, "expert")
    known = {key: value for key, value in (index or {}).items() if key in kept}
    if input_size is None and variant is not None:
        input_size = variant.latent_size
    if input_size is None:
        side = about.image_size if isinstance(about.image_size, tuple) else (about.image_size,) * 2
        input_size = tuple(n // about.latents.downscale for n in side)
        if about.latents.video:
            input_size = ((cast(int, about.frames) - 1) // about.latents.frames_downscale + 1, *input_size)
    patch = spec.patch[0] if len(spec.patch) == 2 else spec.patch
    block = spec.block
    return PublicConfig(
        input_size=input_size,
        patch_size=cast(Any, patch),
        in_channels=spec.channels,
        hidden_size=block.width,
        depth=sum(stack.count for stack in spec.stacks),
        num_heads=block.heads,
        mlp_ratio=block.mlp_hidden / block.width,
        learn_sigma=False,
        text=TextConfig(family, spec.text.width, max_tokens or about.text.tokens, cross_attention=not spec.order),
        qk_norm=block.options.qk_norm,
        bias=block.options.bias,
        positions="rope",
        norm=block.norm,
        mlp=block.mlp,
        family=family,
        published=text,
        given_frames="first" if spec.given else None if variant is None else variant.given_frames,
        index=published(known),
    )


def embedded_guidance(config: DiTConfig, scale: float | None = None) -> float | None:
    """Return the scale of guidance for a network with the scale as an input: ``scale``, or the family's default if
    ``scale`` is None. Return None for networks without this input."""
    if not isinstance(config, PublicConfig) or not config.spec.guidance:
        return None
    return family_of(config.family).guidance.scale if scale is None else scale
