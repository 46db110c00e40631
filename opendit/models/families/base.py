"""Data classes that describe families of public models.

A family's file describes the conversion of ``config.json`` to a :class:`NetworkSpec`, the names of the weights, the
conditions, the latents, and the sampling settings. ``opendit.encoders`` and ``opendit.checkpoint`` use these
descriptions to load a folder, without diffusers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from opendit.models.blocks import BlockSpec
from opendit.models.positions import Rotary


@dataclass(frozen=True)
class TextEmbedding:
    """The embedding of the text encoder's tokens in the network."""

    width: int  # width of the text encoder's tokens
    layers: Literal["linear", "norm", "mlp", "none"] = "linear"  # norm: RMSNorm, linear; mlp: linear, GELU, linear
    multiple: int = 1  # captions are padded with learned tokens to a multiple of this number
    pooled: int = 0  # width of the pooled vector; 0 for none
    picture: int = 0  # width of a picture's tokens, passed instead of a pooled vector; 0 for none
    masked: bool = False  # True if attention excludes the captions' padding in the joint sequence


@dataclass(frozen=True)
class Stack:
    """Consecutive equal blocks."""

    count: int
    block: BlockSpec


@dataclass(frozen=True)
class NetworkSpec:
    """The specification of a network.

    Attributes:
        channels: Number of channels of the latents.
        patch: Patch size, (frames, rows, columns) or (rows, columns).
        stacks: The blocks, as stacks of equal blocks.
        text: Embedding of captions.
        rotary: Rotary positions.
        channels_last: (input, output): True if a patch's channels come after the patch's axes, False if they come
            before.
        convolution: True if the weight of the patch embedding has a convolution's shape.
        order: Order of the streams in the joint sequence; () for cross-attention to captions.
        media_refiner: Blocks that process only the media's tokens, before the streams are joined.
        text_refiner: Blocks that process only the captions' tokens, before the streams are joined.
        time_width: Width of the time's embedding and of the blocks' condition; 0 if equal to the blocks' width.
        time_hidden: Width between the two layers of the time's embedding.
        frequencies: Width of the time's sinusoids.
        reversed_time: True if the network's time is 1000 - t and the network predicts data - noise.
        time_unit: Divisor of the times before they are embedded.
        time_normed: True if the blocks' condition is the RMSNorm of the time's sinusoids, and the time's embedding is
            the modulation that all blocks share.
        guidance: True if the guidance scale is embedded and added to the time's embedding.
        shared: Number of modulation vectors shared by all blocks; 0 for none.
        final: Names of the final layer's modulation vectors, in order.
        final_table: True if the final layer's modulation is a learned table plus the time's embedding.
        final_rank: Rank of the final layer's correction to the shared modulation; None for a separate, full-rank
            modulation.
        table: (side, unit) of a sine-cosine table of ``side`` x ``side`` patches with positions from 0 to ``unit``;
            None without a table. A picture uses the positions in the middle.
        media_multiple: Media are padded with learned tokens to a multiple of this number.
        given: Number of channels after the latents, for models conditioned on the first frame: the repeated mask, and
            the latents of a clip that is grey after its first frame.
        zeros: Number of zero channels after the ``given`` channels. Their weights have no effect.
        bias: True if the layers outside of the blocks have biases.
    """

    channels: int
    patch: tuple[int, ...]
    stacks: tuple[Stack, ...]
    text: TextEmbedding
    rotary: Rotary
    channels_last: tuple[bool, bool] = (False, False)
    convolution: bool = False
    order: tuple[str, ...] = ()
    media_refiner: Stack | None = None
    text_refiner: Stack | None = None
    time_width: int = 0
    time_hidden: int | None = None
    frequencies: int = 256
    reversed_time: bool = False
    time_unit: float = 1.0
    time_normed: bool = False
    guidance: bool = False
    shared: int = 0
    final: tuple[str, ...] = ("shift", "scale")
    final_table: bool = False
    final_rank: int | None = None
    table: tuple[int, int] | None = None
    media_multiple: int = 1
    given: int = 0
    zeros: int = 0
    bias: bool = True

    @property
    def block(self) -> BlockSpec:
        return self.stacks[0].block

    @property
    def blocks(self) -> list[BlockSpec]:
        return [stack.block for stack in self.stacks for _ in range(stack.count)]


@dataclass(frozen=True)
class Match:
    """A correspondence of weights: OpenDiT's weights ``ours``, concatenated along ``dim``, equal the concatenated
    published weights ``theirs``. For example, one qkv weight matches three published weights. ``*`` in names is
    replaced by each number in ``blocks``. offset: OpenDiT's block number minus the published number."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    dim: int = 0
    blocks: range | None = None
    offset: int = 0

    def names(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        if self.blocks is None:
            return [(self.ours, self.theirs)]
        return [
            (
                tuple(name.replace("*", str(number)) for name in self.ours),
                tuple(name.replace("*", str(number - self.offset)) for name in self.theirs),
            )
            for number in self.blocks
        ]


WEIGHT, BOTH = ("weight",), ("weight", "bias")


def layers(
    names: Mapping[str, str | tuple[str, ...]],
    kinds: tuple[str, ...] = BOTH,
    *,
    ours: str = "",
    theirs: str = "",
    blocks: range | None = None,
    offset: int = 0,
) -> list[Match]:
    """Return the matches for all parameters of some layers.

    Args:
        names: OpenDiT's name -> published name, or several names to concatenate along dimension 0.
        kinds: parameters of each layer.
        ours, theirs: prefixes of all names.
        blocks, offset: see :class:`Match`.
    """
    found = []
    for own, published in names.items():
        parts = (published,) if isinstance(published, str) else published
        for kind in kinds:
            joined = tuple(f"{theirs}{part}.{kind}" for part in parts)
            found.append(Match((f"{ours}{own}.{kind}",), joined, 0, blocks, offset))
    return found


@dataclass(frozen=True)
class Text:
    """The form of a family's prompt tokens.

    Attributes:
        tokens: Maximum number of tokens of a prompt. Longer prompts are cut; shorter prompts are padded unless
            ``padding`` is "remove".
        padding: "attend": the network attends to the encoder's outputs for padding. "zero": the network attends to
            zeros instead of these outputs. "remove": padding is removed; between prompts of unequal length, it is
            masked or replaced by learned tokens.
        pooled: True if there is a pooled vector in addition to the tokens.
        beside: Number of tokens that come from other encoders. These tokens come first and are included in ``tokens``.
    """

    tokens: int
    padding: Literal["attend", "zero", "remove"]
    pooled: bool = False
    beside: int = 0

    def check_tokens(self, tokens: int, model: str) -> None:
        """Raise ValueError unless --max_text_tokens can be ``tokens``. model: name of the model, for the message."""
        if tokens > self.tokens:
            raise ValueError(f"--max_text_tokens {tokens}: out of range of {model}; give {self.tokens} at most")
        if tokens <= self.beside:
            raise ValueError(
                f"--max_text_tokens {tokens}: the first {self.beside} tokens of {model} come from other encoders; give "
                f"{self.beside + 1} or more"
            )


@dataclass(frozen=True)
class LatentSpace:
    """The latents of a family. normalised: "scalar" for (z - shift_factor) * scaling_factor, "channel" for
    (z - latents_mean) / latents_std, "batch" for the statistics of the VAE's batch norm."""

    vae: str  # the VAE's class in diffusers
    normalised: Literal["scalar", "channel", "batch"]
    video: bool = False  # True if latents have frames
    downscale: int = 8  # pixels per latent value along a side
    frames_downscale: int = 4  # frames per latent frame after the first


@dataclass(frozen=True)
class Guidance:
    """The guidance of a family.

    Attributes:
        scale: Default scale, in the convention of the family's pipeline.
        formula: "uncond": uncond + scale * (cond - uncond). "cond": cond + scale * (cond - uncond). "embedded": a
            single forward pass with the scale as an input.
        rescaled: Unit of rescaling, "" for none. Each "row" of the latents, or each "patch" of 2 x 2 latent values,
            then gets the norm that it has in the conditional prediction.
    """

    scale: float
    formula: Literal["uncond", "cond", "embedded"] = "uncond"
    rescaled: Literal["", "row", "patch"] = ""


@dataclass(frozen=True)
class Variant:
    """A variant of a family, marked by ``setting`` in ``model_index.json``."""

    setting: str
    image_size: tuple[int, int]
    frames: int = 81
    steps: int = 50
    scale: float = 5.0
    downscale: int = 8
    fps: float = 16.0
    given_frames: str | None = None  # conditioning frames that are inserted in place ("first")
    architecture: str = ""  # "" for the family's
    # True for two networks; the value of ``setting`` is then the time in [0, 1] from which the first network is used
    experts: bool = False

    @property
    def latent_size(self) -> tuple[int, ...]:
        return (self.frames - 1) // 4 + 1, *(side // self.downscale for side in self.image_size)


@dataclass(frozen=True)
class Family:
    """A family of public models.

    Attributes:
        name: Name of the family.
        network: Name of the network's class in diffusers, the ``_class_name`` of ``config.json``.
        pipelines: Pipeline classes of diffusers that use this network; the first is the default.
        components: Name of a component -> (library, class), as required in ``model_index.json``.
        layout: Function that builds the network's specification from the values of ``config.json``. Raises ValueError
            for values that do not belong to this family.
        names: Function from a network's specification to the matches of all weights.
        text: Form of the prompt tokens.
        latents: Description of the latents.
        guidance: Description of the guidance.
        steps: Default number of sampling steps.
        shifted_end: True if the sampling times are evenly spaced down to the last trained time (shifted) instead of 0.
        karras: True if sampling uses the noise levels of Karras et al., from 80 to 0.002, instead of the folder's
            scheduler.
        constants: Names of published tensors that are not weights. OpenDiT computes and exports these.
        image_size: Default side in pixels, or (height, width).
        license: License of the published weights, in the hub's spelling.
        original: The authors' layer name -> the published layers that hold its rows. LoRA files of ComfyUI and kohya's
            trainers use the authors' names. ``*`` stands for a block's number. Layers with equal names are missing.
        exchanged: Layers of ``original`` with the two halves of the rows swapped.
        comfyui: Naming scheme of ComfyUI's LoRA files: "original", or "published" with separate q, k and v.
        loadable: Formats of LoRA files that ``load_lora_weights`` of diffusers' pipeline reads.
        architecture: Name of the model in a LoRA file's metadata.
        variants: Variants with other settings, such as larger pictures.
        distilled: Default steps and guidance scale of folders with ``is_distilled`` in ``model_index.json``.
        when: Values of ``config.json`` that distinguish the family from another one with this network class.
        shift: Source of the shift of the sampling times: "scheduler" (the folder's), or "empirical" (FLUX.2's formula).
    """

    name: str
    network: str
    pipelines: tuple[str, ...]
    components: Mapping[str, tuple[str, str]]
    layout: Callable[[Mapping[str, Any]], Any]
    names: Callable[[Any], tuple[Match, ...]]
    text: Text
    latents: LatentSpace
    guidance: Guidance
    steps: int
    shifted_end: bool = False
    karras: bool = False
    constants: tuple[str, ...] = ()
    image_size: int | tuple[int, int] = 1024
    frames: int | None = None
    license: str = ""
    original: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    exchanged: frozenset[str] = frozenset()
    comfyui: Literal["original", "published"] = "original"
    loadable: tuple[str, ...] = ("diffusers", "comfyui", "kohya")
    architecture: str = ""
    variants: tuple[Variant, ...] = ()
    distilled: tuple[int, float] | None = None
    when: Mapping[str, Any] = field(default_factory=dict)
    shift: Literal["scheduler", "empirical"] = "scheduler"

    def variant(self, index: Mapping[str, Any] | None) -> Variant | None:
        """Return the variant that a ``model_index.json`` marks; None for the family's usual models."""
        return next((variant for variant in self.variants if (index or {}).get(variant.setting)), None)

    def describes(self, config: Mapping[str, Any]) -> bool:
        same = all(config.get(key, value) == value for key, value in self.when.items())
        return config.get("_class_name") == self.network and same
