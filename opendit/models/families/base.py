"""The vocabulary of families: public models as data.

A file of this package describes one family, as diffusers publishes it: how its ``config.json`` becomes a specification
of blocks, the names of its weights, what conditions it, its latents, and how it is sampled. Nothing here or there needs
diffusers; ``opendit.encoders`` and ``opendit.checkpoint`` read these tables when they load a folder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Match:
    """Weights of ours and of a published folder that hold the same numbers.

    The tensors ``ours`` joined along ``dim`` are the tensors ``theirs`` joined along ``dim``: so q, k and v become one
    projection, and one projection of attention and MLP becomes two. ``*`` stands for the number of a block, in both.

    Attributes:
        blocks: numbers of our blocks that the names with ``*`` are of; None for the other names.
        offset: number of the first of these blocks among ours less its number among theirs.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    dim: int = 0
    blocks: range | None = None
    offset: int = 0

    def names(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """List the names of every block: (ours, theirs)."""
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
    """Match whole layers.

    Args:
        names: of our layers -> of theirs; several of theirs are joined along dimension 0.
        kinds: of their parameters.
        ours, theirs: what all names begin with.
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
    """The tokens of prompts, as a family takes them.

    Attributes:
        tokens: to which prompts are cut, and padded unless ``padding`` is "remove".
        padding: what the network sees of padded tokens: "attend" (as the encoder gives them), "zero" (zeros that are
            attended to), or "remove" (nothing: a prompt has as many tokens as it needs, and the network masks what
            pads it to others, or adds learned ones).
        pooled: whether there is a pooled vector beside the tokens.
        beside: of ``tokens``, those of other encoders, which come first and are always as many.
    """

    tokens: int
    padding: Literal["attend", "zero", "remove"]
    pooled: bool = False
    beside: int = 0


@dataclass(frozen=True)
class LatentSpace:
    """The latents of a family.

    Attributes:
        vae: class of diffusers. Shift and scale are read from its ``config.json``.
        normalised: how latents are made of the VAE's: "scalar", (z - shift_factor) * scaling_factor; or "channel", (z -
            latents_mean) / latents_std for every channel; or "batch", by the statistics of the VAE's batch norm.
        video: they have frames.
        downscale: pixels per latent value along a side.
        frames_downscale: frames per latent frame after the first one.
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
        scale: by default, as its pipeline counts it.
        formula: "uncond", uncond + scale * (cond - uncond); "cond", cond + scale * (cond - uncond); "embedded", one
            pass, to which the scale is an input.
        rescaled: the parts of a guided prediction that get back the norm that they have in the conditional one: every
            "row" of a picture's latents, or every "patch" of 2 x 2; "" for none.
    """

    scale: float
    formula: Literal["uncond", "cond", "embedded"] = "uncond"
    rescaled: Literal["", "row", "patch"] = ""


@dataclass(frozen=True)
class Variant:
    """Models of a family that differ from the others, and whose ``model_index.json`` says so.

    Attributes:
        setting: of ``model_index.json``, which is on in these.
        image_size, frames, steps: as of :class:`Family`.
        scale: of guidance by default.
        downscale: pixels per latent value along a side.
        fps: frames a second of their clips.
        given_frames: the frames that a clip may begin with, in place ("first"), see opendit.models.given_frames.
        architecture: as of :class:`Family`, if it is another.
        experts: there are two networks, and ``setting`` is the time, as a share of 1, from which on the first is used.
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
        """The usual size of latents, (frames, rows, columns)."""
        return (self.frames - 1) // 4 + 1, *(side // self.downscale for side in self.image_size)


@dataclass(frozen=True)
class Family:
    """A family of public models.

    Attributes:
        name: equal to its file's.
        network: diffusers' class of the network, the ``_class_name`` of its ``config.json``.
        pipelines: diffusers' classes whose folders hold such a network, the first the usual one.
        components: the pipeline's components that are used -> (library, class), as ``model_index.json`` must have them.
        layout: makes the specification of the values of ``config.json``. Raises ValueError for values that are not
            those of this family.
        names: all weights of a network of such a specification.
        constants: published tensors that are no weights; they are computed here, and exported as they were.
        text, latents, guidance: see there.
        steps: of sampling by default.
        shifted_end: sampling's times are spaced evenly down to the last one that is trained, shifted, instead of 0.
        karras: sampling's noise levels are Karras et al.'s, from 80 to 0.002, and not those of the folder's scheduler.
        image_size: side in pixels by default, or (height, width).
        license: of the published weights, as the hub writes it; what a run or an export states.
        original: layers by their authors' names, as in LoRA files of ComfyUI and kohya's trainers -> the published
            layers whose rows are joined in each. ``*`` stands for the number of a block. Others have one name.
        exchanged: those of ``original`` whose two halves of rows are in the other order.
        comfyui: whose names ComfyUI's LoRA files have: "original", or "published" with q, k and v apart.
        architecture: what the metadata of a LoRA file calls the model.
        variants: models of other sizes.
        distilled: steps and scale of guidance, by default, of folders whose ``model_index.json`` has is_distilled.
        when: values of ``config.json`` that tell its networks from another family's of the same class.
        shift: of the times by the number of tokens: as the folder's scheduler has it ("scheduler"), or by FLUX.2's law
            of tokens and steps ("empirical").
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
        """Return the variant that a ``model_index.json`` is of; None for the usual models."""
        return next((variant for variant in self.variants if (index or {}).get(variant.setting)), None)

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Return True if a network with this ``config.json`` is of the family."""
        same = all(config.get(key, value) == value for key, value in self.when.items())
        return config.get("_class_name") == self.network and same
