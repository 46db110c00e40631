"""The models by name: DiT-XL/2 (patch 2 x 2), vDiT-XL/222 or vDiT-XL/2x2x2 (patch of frames x rows x columns)."""

import difflib
import re

from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.vdit import VDiT, VDiTConfig

# name: hidden size, depth, heads. Ti is for the embedded demo and for tests; the others are the paper's.
SIZES = {
    "Ti": (128, 4, 4),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1152, 28, 16),
}
PATCHES = (2, 4, 8)
VIDEO_PATCHES = ("122", "222")  # the usual ones; any three of 1 to 8 will do
NAMES = tuple(f"DiT-{size}/{patch}" for size in SIZES for patch in PATCHES)
VIDEO_NAMES = tuple(f"vDiT-{size}/{patch}" for size in SIZES for patch in VIDEO_PATCHES)
KINDS = {DiTConfig.kind: (DiTConfig, DiT), VDiTConfig.kind: (VDiTConfig, VDiT)}


def nearest(name: str, names) -> str:
    """The valid name most like ``name``, for error messages."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.0)), "")


def _parse(name: str) -> tuple[str, int | tuple[int, ...]]:
    """("XL", 2) of DiT-XL/2, ("XL", (2, 2, 2)) of vDiT-XL/222. Raises ValueError for an unknown model."""
    match = re.fullmatch(r"([vV]?)DiT-([A-Za-z]+)/(\d+|[1-8]x[1-8]x[1-8])", name, re.ASCII)
    if match and match[2] in SIZES:
        video, size, patch = match.groups()
        if video and re.fullmatch("[1-8]{3}", digits := patch.replace("x", "")):
            return size, tuple(map(int, digits))
        if not video and patch in map(str, PATCHES):
            return size, int(patch)
    candidates = VIDEO_NAMES if name[:1] in ("v", "V") else NAMES + VIDEO_NAMES
    raise ValueError(
        f"--model {name}: no such model; did you mean {nearest(name, candidates)}? "
        f"(DiT-{{{','.join(SIZES)}}}/{{{','.join(map(str, PATCHES))}}}, or for clips "
        f"vDiT-{{{','.join(SIZES)}}}/THW with a patch of T frames, H rows and W columns, 1 to 8 each)"
    )


def canonical_name(name: str) -> str:
    """The one way to write a model's name: vDiT-XL/222 for vDiT-XL/2x2x2. Raises ValueError for an unknown one."""
    size, patch = _parse(name)
    return f"DiT-{size}/{patch}" if isinstance(patch, int) else f"vDiT-{size}/{''.join(map(str, patch))}"


def is_video(name: str) -> bool:
    """Whether a model takes clips. Raises ValueError for an unknown model."""
    return not isinstance(patch_size(name), int)


def patch_size(name: str) -> int | tuple[int, int, int]:
    """Patch side of a DiT, (frames, rows, columns) of a vDiT. Raises ValueError for an unknown model."""
    return _parse(name)[1]


def model_config(
    name: str,
    *,
    input_size: tuple[int, int],
    in_channels: int,
    num_classes: int | None = None,
    frames: int | None = None,
    text: TextConfig | None = None,
    learn_sigma: bool = True,
) -> DiTConfig:
    """Configuration of a named model for latents of ``input_size`` (height, width).

    Args:
        num_classes, text: what it is conditioned on, one of the two.
        frames: of the latents, for a vDiT (1 for pictures).
        learn_sigma: predict a variance too, in as many channels again (see opendit.diffusion.objectives).

    Raises:
        ValueError: unknown name, a size that the patch does not divide, frames for a DiT or none for a vDiT.
    """
    size, patch = _parse(name)
    hidden, depth, heads = SIZES[size]
    if isinstance(patch, int):
        if frames is not None:
            raise ValueError(f"--model {name} takes pictures; for clips use vDiT-{size}/1{patch}{patch} or the like")
        kind, input_size = DiTConfig, tuple(input_size)
    else:
        if frames is None:
            raise ValueError(f"--model {name} takes clips (--use_video); for pictures use DiT-{size}/2 or the like")
        kind, input_size = VDiTConfig, (frames, *input_size)
    config = kind(
        input_size=input_size,
        patch_size=patch,
        in_channels=in_channels,
        hidden_size=hidden,
        depth=depth,
        num_heads=heads,
        num_classes=num_classes,
        text=text,
        learn_sigma=learn_sigma,
    )
    try:
        config.grid_of(input_size)
    except ValueError as error:
        sides = " x ".join(map(str, input_size))
        raise ValueError(f"--model {name}: latents of {sides} don't divide by patch {patch}") from error
    return config


def config_from_dict(values: dict) -> DiTConfig:
    """The configuration that ``to_dict`` wrote; one from before there were kinds is a DiT's.

    Raises ValueError for a kind that this version does not know.
    """
    kind = values.get("kind", DiTConfig.kind)
    if kind not in KINDS:
        raise ValueError(f"a model of kind {kind!r}: this version knows {', '.join(KINDS)}; use a newer OpenDiT")
    return KINDS[kind][0].from_dict(values)


def build_model(config: DiTConfig) -> DiT:
    """The network of a configuration, with fresh weights."""
    return KINDS[config.kind][1](config)
