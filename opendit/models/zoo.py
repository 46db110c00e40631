"""The models by name."""

import difflib
import re

from opendit.models.dit import DiTConfig

# name: hidden size, depth, heads. Ti is for the embedded demo and for tests; the others are the paper's.
SIZES = {
    "Ti": (128, 4, 4),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1152, 28, 16),
}
PATCHES = (2, 4, 8)
NAMES = tuple(f"DiT-{size}/{patch}" for size in SIZES for patch in PATCHES)


def nearest(name: str, names) -> str:
    """The valid name most like ``name``, for error messages."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.0)), "")


def patch_size(name: str) -> int:
    """Patch side of a model by its name. Raises ValueError for an unknown model."""
    match = re.fullmatch(r"DiT-([A-Za-z]+)/(\d+)", name)
    if not match or match[1] not in SIZES or int(match[2]) not in PATCHES:
        raise ValueError(
            f"--model {name}: no such model; did you mean {nearest(name, NAMES)}? "
            f"(DiT-{{{','.join(SIZES)}}}/{{{','.join(map(str, PATCHES))}}})"
        )
    return int(match[2])


def model_config(name: str, *, input_size: tuple[int, int], in_channels: int, num_classes: int) -> DiTConfig:
    """Configuration of a named model for latents of ``input_size`` (height, width).

    Raises:
        ValueError: unknown name, or a size that the patch does not divide.
    """
    patch = patch_size(name)
    if any(size % patch for size in input_size):
        raise ValueError(f"--model {name}: latents of {input_size[0]} x {input_size[1]} don't divide by patch {patch}")
    hidden, depth, heads = SIZES[name.split("-")[1].split("/")[0]]
    return DiTConfig(
        input_size=tuple(input_size),
        patch_size=patch,
        in_channels=in_channels,
        hidden_size=hidden,
        depth=depth,
        num_heads=heads,
        num_classes=num_classes,
    )
