"""Models by name, KIND-SIZE/PATCH: DiT-XL/2 (patch 2 x 2), vDiT-XL/222 or vDiT-XL/2x2x2 (frames, rows, columns).

This module does not import torch, so that flags can be checked quickly; ``opendit.models.zoo`` creates the models.

To add an architecture, write ``opendit/models/NAME.py``, whose ``ARCHITECTURE`` names the classes of the configuration
and the network. It also names the cost plan if that does not follow from the specification of the blocks. Then add a
row to :data:`KINDS`. NAME is the key of that row in lower case without dashes.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from opendit.config.flags import Setting, nearest
from opendit.config.public_models import PUBLIC, family_in

POSITIONS = ("sincos", "learned", "rope")  # position encodings of tokens
NORMS = ("layer", "rms")  # choices of the norm before every branch of a block
MLP_KINDS = ("gelu", "swiglu")
# Size -> hidden size, depth, heads. Ti is for the embedded demo and for tests. S to XL are the DiT paper's sizes
# (Peebles & Xie 2023, table 1). 7B is DiT7BConfig of NVIDIA NeMo's first releases with DiT; a later NeMo release
# changed DiT7BConfig to Cosmos' size, 4096 x 28 x 32. 28B comes from NeMo's table of training speeds.
SIZES = {
    "Ti": (128, 4, 4),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1152, 28, 16),
    "7B": (3072, 32, 24),
    "28B": (6144, 32, 48),
}
GIVEN = "first, prefix:K or random"  # values of --given_frames
PATCHES = (2, 4, 8)  # patch sides for pictures; a patch for clips is three numbers from 1 to 8
PIXEL_PATCHES = (16, 32)  # patch sides for pictures without a VAE


@dataclass(frozen=True)
class Kind:
    """An architecture.

    Attributes:
        sizes: name -> (hidden size, depth, heads, other fields of the configuration).
        patches: common patches, which lists of models show.
        pictures: True if the architecture has models for pictures, whose patch is one number.
        clips: True if the architecture has models for clips.
        cross_attention: True if the model attends to captions even without --cross_attention.
        revision_1: size -> fields that differ in configurations of revision 1.
        settings: flags for fields of the configuration that no other architecture has.
    """

    sizes: dict[str, tuple[Any, ...]]
    patches: tuple[str, ...]
    pictures: bool = True
    clips: bool = True
    cross_attention: bool = False
    revision_1: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()


_PLAIN = {size: (*values, {}) for size, values in SIZES.items()}
KINDS = {
    "DiT": Kind(_PLAIN, tuple(map(str, PATCHES)), clips=False),
    "EC-DiT": Kind(
        {
            "Ti": (128, 4, 4, {"mlp_ratio": 3.0, "experts": 8, "expert_hidden": 64}),
            "1B": (1152, 28, 16, {"mlp_ratio": 3.75, "experts": 64, "expert_hidden": 144}),
        },
        ("2",),
        settings=(
            Setting(
                "expert_capacity", None, "of EC-DiT: experts of a token, on average (2)", "float",
                {"above": 0, "at_most": 1024, "unit": "experts"},
            ),
        ),
    ),
    "vDiT": Kind(_PLAIN, ("122", "222"), pictures=False),
    "ST-DiT": Kind(
        {size: _PLAIN[size] for size in ("Ti", "B", "XL")}, ("122", "222"),
        pictures=False, cross_attention=True,
        settings=(Setting("full_attention", None, "of ST-DiT: attend to all tokens of a clip too", "bool"),),
    ),
    "MovieGen": Kind(
        {
            "Ti": (128, 4, 4, {"mlp_ratio": 8 / 3, "kv_heads": 2}),
            "1B": (2048, 16, 32, {"mlp_ratio": 8192 / 2048, "kv_heads": 8}),
            "3B": (3072, 28, 24, {"mlp_ratio": 8192 / 3072, "kv_heads": 8}),
            "5B": (3072, 32, 24, {"mlp_ratio": 8192 / 3072, "kv_heads": 8}),
            "30B": (6144, 48, 48, {"mlp_ratio": 16384 / 6144, "kv_heads": 8}),
        },
        ("122",),
        cross_attention=True,
        revision_1={size: {"kv_heads": None} for size in ("1B", "3B", "5B")},
    ),
}  # fmt: skip
_LISTED = [f"{name}-{size}/{patch}" for name, kind in KINDS.items() for size in kind.sizes for patch in kind.patches]
NAMES = tuple(name for name in _LISTED if len(name.rpartition("/")[2]) == 1)
VIDEO_NAMES = tuple(name for name in _LISTED if name not in NAMES)


def module_of(kind: str) -> str:
    """Return an architecture's module name, such as "ecdit" for EC-DiT. Stored configurations use this name, too."""
    return kind.lower().replace("-", "")


def parse_name(name: str) -> tuple[str, str, int | tuple[int, int, int]]:
    """Split a model's name into kind, size and patch: ("DiT", "XL", 2) for DiT-XL/2, ("vDiT", "XL", (2, 2, 2)) for
    vDiT-XL/222.

    Raises ValueError for an unknown name.
    """
    match = re.fullmatch(r"([A-Za-z-]+)-([A-Za-z0-9]+)/(\d+|[1-8]x[1-8]x[1-8])", name, re.ASCII)
    if match:
        kind_name, size, patch = match.groups()
        kind_name = "vDiT" if kind_name == "VDiT" else kind_name
        kind = KINDS.get(kind_name)
        if kind and size in kind.sizes:
            if kind.clips and re.fullmatch("[1-8]{3}", digits := patch.replace("x", "")):
                frames, rows, columns = map(int, digits)
                return kind_name, size, (frames, rows, columns)
            if kind.pictures and patch in map(str, PATCHES + PIXEL_PATCHES):
                return kind_name, size, int(patch)
    own = [known for known in _LISTED if known.lower().startswith(name.partition("-")[0].lower() + "-")]
    candidates = own if name[:1] in ("v", "V") and own else _LISTED
    sizes = "; ".join(f"{known}: {', '.join(kind.sizes)}" for known, kind in KINDS.items())
    raise ValueError(
        f"--model {name}: no such model; did you mean {nearest(name, candidates)}? (KIND-SIZE/PATCH, with a patch of "
        f"{', '.join(map(str, PATCHES + PIXEL_PATCHES))} for pictures, or for clips of T frames, H rows and W "
        f"columns as THW, 1 to 8 each. {sizes})"
    )


def canonical_name(name: str) -> str:
    """Return the canonical spelling of a model's name: vDiT-XL/222 for vDiT-XL/2x2x2.

    Raises ValueError for an unknown name.
    """
    if family_in(name):
        return name
    kind, size, patch = parse_name(name)
    return f"{kind}-{size}/{patch if isinstance(patch, int) else ''.join(map(str, patch))}"


def is_video(name: str) -> bool:
    """Return True if a model takes clips. Raises ValueError for an unknown model."""
    return not isinstance(patch_size(name), int)


def patch_size(name: str) -> int | tuple[int, int, int]:
    """Return the patch side of a picture model, or (frames, rows, columns) of a clip model. Raises ValueError for an
    unknown model."""
    family = family_in(name)
    return parse_name(name)[2] if family is None else PUBLIC[family].patch


def depth_and_heads(name: str) -> tuple[int, int] | None:
    """Return the number of blocks of a model, and the number of heads per block.

    Return None for a public model, whose folder has these numbers. Raises ValueError for an unknown model.
    """
    if family_in(name):
        return None
    kind, size, _ = parse_name(name)
    _, depth, heads, _ = KINDS[kind].sizes[size]
    return depth, heads


def parse_given(text: str) -> int | None:
    """Parse a value of --given_frames: return the number of conditioning frames at the beginning of a clip.

    The number is 1 for "first", K for "prefix:K", and None for "random". Raises ValueError, which names the flag, for
    any other text.
    """
    if text == "random":
        return None
    if text == "first":
        return 1
    found = re.fullmatch(r"prefix:([1-9][0-9]{0,4})", text)
    if found is None:
        raise ValueError(f"--given_frames {text}: no such frames; give {GIVEN}, K being a number from 1 on")
    return int(found[1])
