"""Data classes that describe families of public models.

Each other family file of this package describes one family in the form that diffusers publishes: the conversion of
``config.json`` to a specification of blocks, the names of the weights, the conditions, the latents, and the sampling
settings. None of the files needs diffusers. ``opendit.encoders`` and ``opendit.checkpoint`` read the descriptions when
they load a folder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Match:
    """A set of OpenDiT's weights and the set of published weights with the same values.

    The tensors ``ours``, concatenated along ``dim``, equal the tensors ``theirs``, concatenated along ``dim``. For
    example, published weights of q, k and v match one qkv weight, and one published projection of attention and MLP
    matches two weights. In names, ``*`` is a placeholder for the number of a block.

    Attributes:
        ours: Names of OpenDiT's parameters.
        theirs: Published names.
        dim: Dimension of the concatenation.
        blocks: Numbers of OpenDiT's blocks to put in place of ``*``; None for names without ``*``.
        offset: OpenDiT's number of a block minus its published number.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    dim: int = 0
    blocks: range | None = None
    offset: int = 0

    def names(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return the pairs (ours, theirs) of names, one pair for each block."""
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
    """Match all parameters of layers.

    Args:
        names: Names of OpenDiT's layers -> names of published layers. Several published layers are concatenated along
            dimension 0.
        kinds: Names of the parameters of each layer.
        ours: Prefix of all names of OpenDiT's layers.
        theirs: Prefix of all published names.
        blocks: See :class:`Match`.
        offset: See :class:`Match`.
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
        padding: Treatment of padding. "attend": the network attends to the encoder's outputs for padding. "zero": these
            outputs are set to zero, and the network attends to the zeros. "remove": the padding is removed; in a batch
            of prompts of unequal length, the network masks the padding or replaces it by learned tokens.
        pooled: True if there is a pooled vector in addition to the tokens.
        beside: Number of ``tokens`` that come from other encoders. They precede the other tokens, and their number is
            fixed.
    """

    tokens: int
    padding: Literal["attend", "zero", "remove"]
    pooled: bool = False
    beside: int = 0


@dataclass(frozen=True)
class LatentSpace:
    """The latents of a family.

    Attributes:
        vae: Name of the VAE's class in diffusers. Shift and scale are read from the VAE's ``config.json``.
        normalised: Normalisation of the VAE's output z. "scalar": (z - shift_factor) * scaling_factor. "channel":
            (z - latents_mean) / latents_std for each channel. "batch": by the statistics of the VAE's batch norm.
        video: True if the latents have frames.
        downscale: Pixels per latent value along a side.
        frames_downscale: Frames per latent frame, for latent frames after the first.
    """

    vae: str
    normalised: Literal["scalar", "channel", "batch"]
    video: bool = False
    downscale: int = 8
    frames_downscale: int = 4


@dataclass(frozen=True)
class Guidance:
    """The guidance of a family.

    Attributes:
        scale: Default scale, in the convention of the family's pipeline.
        formula: "uncond": uncond + scale * (cond - uncond). "cond": cond + scale * (cond - uncond). "embedded": a
            single forward pass with the scale as an input.
        rescaled: The unit in which a guided prediction is rescaled to the norm of the conditional prediction: each
            "row" of the latents, or each "patch" of 2 x 2 latent values; "" for no rescaling.
    """

    scale: float
    formula: Literal["uncond", "cond", "embedded"] = "uncond"
    rescaled: Literal["", "row", "patch"] = ""


@dataclass(frozen=True)
class Variant:
    """Models of a family that a setting of ``model_index.json`` distinguishes from the family's usual models.

    Attributes:
        setting: Setting of ``model_index.json`` that is on for these models.
        image_size, frames, steps: See :class:`Family`.
        scale: Default scale of guidance.
        downscale: Pixels per latent value along a side.
        fps: Frames per second of the clips.
        given_frames: Conditioning frames that are inserted in place ("first"); see opendit.models.given_frames.
        architecture: See :class:`Family`; "" for the family's.
        experts: True if the pipeline has two networks. The value of ``setting`` is then the time in [0, 1] at and above
            which the first network is used.
    """

    setting: str
    image_size: tuple[int, int]
    frames: int = 81
    steps: int = 50
    scale: float = 5.0
    downscale: int = 8
    fps: float = 16.0
    given_frames: str | None = None
    architecture: str = ""
    experts: bool = False

    @property
    def latent_size(self) -> tuple[int, ...]:
        """The default size of the latents, (frames, rows, columns)."""
        return (self.frames - 1) // 4 + 1, *(side // self.downscale for side in self.image_size)


@dataclass(frozen=True)
class Family:
    """A family of public models.

    Attributes:
        name: Name of the family.
        network: Name of the network's class in diffusers, the ``_class_name`` of ``config.json``.
        pipelines: Pipeline classes of diffusers that use this network; the first is the default.
        components: Names of the pipeline's components that are used -> (library, class), as required in
            ``model_index.json``.
        layout: Function that builds the network's specification from the values of ``config.json``. Raises ValueError
            for values that do not belong to this family.
        names: Function that returns the matches of all weights of a network with a given specification.
        text: Form of the prompt tokens.
        latents: Description of the latents.
        guidance: Description of the guidance.
        steps: Default number of sampling steps.
        shifted_end: True if the sampling times are evenly spaced down to the last trained time (shifted) instead of 0.
        karras: True if sampling uses the noise levels of Karras et al., from 80 to 0.002, instead of the noise levels
            of the folder's scheduler.
        constants: Names of published tensors that are not weights. OpenDiT computes them and exports them unchanged.
        image_size: Default side in pixels, or (height, width).
        frames: Default number of frames; None for pictures.
        license: License of the published weights, in the hub's spelling.
        original: Names of layers in the authors' own code, which LoRA files of ComfyUI and kohya's trainers use -> the
            published layers whose rows are joined in each. ``*`` is a placeholder for the number of a block. Layers
            that are missing here have the same name in both naming schemes.
        exchanged: The layers of ``original`` whose two halves of rows are in reversed order.
        comfyui: Naming scheme of ComfyUI's LoRA files: "original", or "published" with separate q, k and v.
        architecture: Name of the model in the metadata of a LoRA file.
        variants: Models of other sizes.
        distilled: Default steps and guidance scale of folders with ``is_distilled`` in ``model_index.json``.
        when: Values of ``config.json`` that distinguish the family from another family with the same network class.
        shift: Source of the shift of the sampling times: "scheduler" (the folder's scheduler), or "empirical" (FLUX.2's
            formula of tokens and steps).
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
    architecture: str = ""
    variants: tuple[Variant, ...] = ()
    distilled: tuple[int, float] | None = None
    when: Mapping[str, Any] = field(default_factory=dict)
    shift: Literal["scheduler", "empirical"] = "scheduler"

    def variant(self, index: Mapping[str, Any] | None) -> Variant | None:
        """Return the variant that a ``model_index.json`` marks; None for the family's usual models."""
        return next((variant for variant in self.variants if (index or {}).get(variant.setting)), None)

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Return True if a network with this ``config.json`` belongs to the family."""
        same = all(config.get(key, value) == value for key, value in self.when.items())
        return config.get("_class_name") == self.network and same
