"""The models by name, KIND-SIZE/PATCH: DiT-XL/2 (patch 2 x 2), vDiT-XL/222 or vDiT-XL/2x2x2 (frames, rows, columns)."""

import difflib
import re
from dataclasses import dataclass, fields, replace

from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.ecdit import ECDiT, ECDiTConfig
from opendit.models.moviegen import MovieGen, MovieGenConfig
from opendit.models.stdit import STDiT, STDiTConfig
from opendit.models.vdit import VDiT, VDiTConfig

# name: hidden size, depth, heads. Ti is for the embedded demo and for tests; S to XL are the DiT paper's, 7B and 28B
# NVIDIA NeMo's.
SIZES = {
    "Ti": (128, 4, 4),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1152, 28, 16),
    "7B": (3072, 32, 24),
    "28B": (6144, 32, 48),
}
PATCHES = (2, 4, 8)  # of pictures; of clips, three numbers of 1 to 8


@dataclass(frozen=True)
class Kind:
    """An architecture: its sizes as (hidden size, depth, heads, what else its configuration needs)."""

    config: type[DiTConfig]
    model: type[DiT]
    sizes: dict[str, tuple]
    patches: tuple[str, ...]  # the usual ones, to be listed
    pictures: bool = True  # takes pictures, with a patch of one number
    clips: bool = True
    cross_attention: bool = False  # attends to captions whatever the flag says


_PLAIN = {size: (*values, {}) for size, values in SIZES.items()}
KINDS = {
    "DiT": Kind(DiTConfig, DiT, _PLAIN, tuple(map(str, PATCHES)), clips=False),
    "EC-DiT": Kind(
        ECDiTConfig,
        ECDiT,
        {
            "Ti": (128, 4, 4, {"mlp_ratio": 3.0, "experts": 8, "expert_hidden": 64}),
            "1B": (1152, 28, 16, {"mlp_ratio": 3.75, "experts": 64, "expert_hidden": 144}),
        },
        ("2",),
    ),
    "vDiT": Kind(VDiTConfig, VDiT, _PLAIN, ("122", "222"), pictures=False),
    "ST-DiT": Kind(
        STDiTConfig, STDiT, {size: _PLAIN[size] for size in ("Ti", "B", "XL")}, ("122", "222"),
        pictures=False, cross_attention=True,
    ),
    "MovieGen": Kind(
        MovieGenConfig,
        MovieGen,
        {
            "Ti": (128, 4, 4, {"mlp_ratio": 8 / 3, "kv_heads": 2}),
            "1B": (2048, 16, 32, {"mlp_ratio": 8192 / 2048}),
            "3B": (3072, 28, 24, {"mlp_ratio": 8192 / 3072}),
            "5B": (3072, 32, 24, {"mlp_ratio": 8192 / 3072}),
            "30B": (6144, 48, 48, {"mlp_ratio": 16384 / 6144, "kv_heads": 8}),
        },
        ("122",),
        cross_attention=True,
    ),
}  # fmt: skip
_LISTED = [f"{name}-{size}/{patch}" for name, kind in KINDS.items() for size in kind.sizes for patch in kind.patches]
NAMES = tuple(name for name in _LISTED if len(name.rpartition("/")[2]) == 1)
VIDEO_NAMES = tuple(name for name in _LISTED if name not in NAMES)


def nearest(name: str, names) -> str:
    """The valid name most like ``name`` in whatever case, for error messages."""
    spelled = {valid.lower(): valid for valid in names}
    found = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.0)
    return spelled[found[0]] if found else ""


def _parse(name: str) -> tuple[str, str, int | tuple[int, ...]]:
    """("DiT", "XL", 2) of DiT-XL/2, ("vDiT", "XL", (2, 2, 2)) of vDiT-XL/222. Raises ValueError for another name."""
    match = re.fullmatch(r"([A-Za-z-]+)-([A-Za-z0-9]+)/(\d+|[1-8]x[1-8]x[1-8])", name, re.ASCII)
    if match:
        kind_name, size, patch = match.groups()
        kind_name = "vDiT" if kind_name == "VDiT" else kind_name
        kind = KINDS.get(kind_name)
        if kind and size in kind.sizes:
            if kind.clips and re.fullmatch("[1-8]{3}", digits := patch.replace("x", "")):
                return kind_name, size, tuple(map(int, digits))
            if kind.pictures and patch in map(str, PATCHES):
                return kind_name, size, int(patch)
    own = [known for known in _LISTED if known.lower().startswith(name.partition("-")[0].lower() + "-")]
    candidates = own if name[:1] in ("v", "V") and own else _LISTED
    sizes = "; ".join(f"{known}: {', '.join(kind.sizes)}" for known, kind in KINDS.items())
    raise ValueError(
        f"--model {name}: no such model; did you mean {nearest(name, candidates)}? (KIND-SIZE/PATCH, with a patch of "
        f"{', '.join(map(str, PATCHES))} for pictures, or for clips of T frames, H rows and W columns as THW, 1 to 8 "
        f"each. {sizes})"
    )


def canonical_name(name: str) -> str:
    """The one way to write a model's name: vDiT-XL/222 for vDiT-XL/2x2x2. Raises ValueError for an unknown one."""
    kind, size, patch = _parse(name)
    return f"{kind}-{size}/{patch if isinstance(patch, int) else ''.join(map(str, patch))}"


def is_video(name: str) -> bool:
    """Whether a model takes clips. Raises ValueError for an unknown model."""
    return not isinstance(patch_size(name), int)


def patch_size(name: str) -> int | tuple[int, int, int]:
    """Patch side of a model of pictures, (frames, rows, columns) of one of clips. Raises ValueError for an unknown
    model."""
    return _parse(name)[2]


def model_config(
    name: str,
    *,
    input_size: tuple[int, int],
    in_channels: int,
    num_classes: int | None = None,
    frames: int | None = None,
    text: TextConfig | None = None,
    learn_sigma: bool = True,
    **options,
) -> DiTConfig:
    """Configuration of a named model for latents of ``input_size`` (height, width).

    Args:
        num_classes, text: what it is conditioned on, one of the two.
        frames: of the latents, for a model of clips (1 for pictures).
        learn_sigma: predict a variance too, in as many channels again (see opendit.diffusion.objectives).
        options: more fields of the configuration (qk_norm, adaln_lora, bias, positions, ...); None is the kind's own.

    Raises:
        ValueError: unknown name, a size that the patch does not divide, frames for a model of pictures or none for one
            of clips, an option that this kind does not have or values that can't be built.
    """
    kind_name, size, patch = _parse(name)
    kind = KINDS[kind_name]
    hidden, depth, heads, more = kind.sizes[size]
    if isinstance(patch, int):
        if frames is not None:
            clips = kind_name if kind.clips else "vDiT"
            raise ValueError(f"--model {name} takes pictures; for clips use {clips}-{size}/1{patch}{patch} or the like")
        input_size = tuple(input_size)
    else:
        if frames is None:
            pictures = kind_name if kind.pictures else "DiT"
            raise ValueError(
                f"--model {name} takes clips (--use_video); for pictures use {pictures}-{size}/2 or the like"
            )
        input_size = (frames, *input_size)
    if kind.cross_attention and text is not None:
        text = replace(text, cross_attention=True)
    options = {key: value for key, value in options.items() if value is not None}
    unknown = options.keys() - {field.name for field in fields(kind.config)}
    for key in sorted(unknown):
        owners = " or ".join(k for k, v in KINDS.items() if key in {field.name for field in fields(v.config)})
        raise ValueError(f"--{key} is not for --model {name}" + (f"; it is for {owners}" if owners else ""))
    config = kind.config(
        input_size=input_size,
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
    try:
        config.grid_of(input_size)
    except ValueError as error:
        sides = " x ".join(map(str, input_size))
        raise ValueError(f"--model {name}: latents of {sides} don't divide by patch {patch}") from error
    config.check()
    return config


def config_from_dict(values: dict) -> DiTConfig:
    """The configuration that ``to_dict`` wrote; one from before there were kinds is a DiT's.

    Raises ValueError for a kind that this version does not know.
    """
    return _kind(values.get("kind", DiTConfig.kind)).config.from_dict(values)


def build_model(config: DiTConfig) -> DiT:
    """The network of a configuration, with fresh weights. Raises ValueError for what can't be built."""
    return _kind(config.kind).model(config)


def _kind(stored: str) -> Kind:
    """By the name that configurations have."""
    known = {kind.config.kind: kind for kind in KINDS.values()}
    if stored not in known:
        raise ValueError(f"a model of kind {stored!r}: this version knows {', '.join(known)}; use a newer OpenDiT")
    return known[stored]
