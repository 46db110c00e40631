"""Model names: KIND-SIZE/PATCH for OpenDiT's architectures, FAMILY/FOLDER for public models.

In vDiT-XL/222, the patch is (frames, rows, columns). This module does not import torch.

To add an architecture, write its configuration and network classes. Then add a row to ``CLASSES`` in
``opendit/models/zoo.py`` and one to :data:`KINDS`. Blocks with unusual costs also need a plan, see
``opendit/models/plan.py``. The configuration's ``kind`` is the row's key in lower case without dashes.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from opendit.common.hub import folder_name, on_hub
from opendit.common.json_file import MIB, read_json
from opendit.common.utils import shown
from opendit.config.flags import Setting, nearest

RUN_CONFIG = "config.json"
CLIP_FRAMES = 17  # default frames of a clip, near 16; VAEs need 4 k + 1 or 8 k + 1


class Public(NamedTuple):
    """A family of public models: its class in diffusers, patch size, and usual picture side in pixels. Families with
    equal classes differ in ``guidance_embeds`` of ``config.json``."""

    network: str
    patch: int | tuple[int, int, int]
    image_size: int
    guidance_embeds: bool | None = None

    def describes(self, config: dict[str, Any]) -> bool:
        has_guidance = config.get("guidance_embeds", self.guidance_embeds)
        return config.get("_class_name") == self.network and self.guidance_embeds in (None, has_guidance)


PUBLIC = {
    "flux": Public("FluxTransformer2DModel", 2, 1024),
    "z_image": Public("ZImageTransformer2DModel", 2, 1024),
    "wan": Public("WanTransformer3DModel", (1, 2, 2), 480),
    "ltx": Public("LTXVideoTransformer3DModel", (1, 1, 1), 512),
    "sd3": Public("SD3Transformer2DModel", 2, 1024),
    "qwen_image": Public("QwenImageTransformer2DModel", 2, 1024),
    "flux2": Public("Flux2Transformer2DModel", 1, 1024, True),
    "flux2_klein": Public("Flux2Transformer2DModel", 1, 1024, False),
    "lumina2": Public("Lumina2Transformer2DModel", 2, 1024),
    "cosmos2": Public("CosmosTransformer3DModel", 2, 768),
}

# diffusers' classes that are not supported, and why.
UNSUPPORTED = {
    "ChromaTransformer2DModel": "one network makes the modulation of all blocks of Chroma",
    "CogVideoXTransformer3DModel": "CogVideoX is not a flow-matching model",
    "HunyuanVideo15Transformer3DModel": "HunyuanVideo-1.5 has three kinds of condition tokens",
    "Ideogram4Transformer2DModel": "Ideogram 4 has a second network for guidance",
    "Krea2Transformer2DModel": "the attention of Krea-2 has an output gate",
    "LTX2VideoTransformer3DModel": "LTX-2 also generates sound",
    "PRXTransformer2DModel": "blocks of PRX read captions only as keys and values",
    "PixArtTransformer2DModel": "PixArt is not a flow-matching model",
    "UNet2DConditionModel": "this version of Stable Diffusion is a U-Net, not a transformer",
    "WanAnimateTransformer3DModel": "Wan Animate also takes clips as input",
    "WanVACETransformer3DModel": "Wan VACE also takes clips as input",
    "Cosmos2VideoToWorldPipeline": "Cosmos-Predict2 Video2World continues a picture or clip",
    "CosmosTextToWorldPipeline": "Cosmos 1 is not a flow-matching model",
    "CosmosVideoToWorldPipeline": "Cosmos 1 is not a flow-matching model",
    "FluxControlPipeline": "FLUX.1 Canny and Depth also take pictures as input",
    "FluxFillPipeline": "FLUX.1 Fill also takes pictures as input",
    "FluxKontextPipeline": "FLUX.1 Kontext also takes pictures as input",
    "LTXConditionPipeline": "this version of LTX-Video also takes pictures and clips as input",
    "LTXImageToVideoPipeline": "this version of LTX-Video also takes a picture as input",
    "QwenImageEditPipeline": "Qwen-Image-Edit also takes pictures as input",
    "QwenImageEditPlusPipeline": "Qwen-Image-Edit also takes pictures as input",
    "QwenImageLayeredPipeline": "Qwen-Image-Layered divides a picture into layers",
}


def unsupported(folder: str | Path) -> str | None:
    """Return why a diffusers folder's model is not supported, beginning with a file's name; None if it is."""
    names = ("model_index.json", "transformer/config.json", "unet/config.json", "config.json")
    for path in (Path(folder).expanduser() / name for name in names):
        name = _read(path).get("_class_name")
        if isinstance(name, str) and name in UNSUPPORTED:
            return f"{path}: {name} is not supported: {UNSUPPORTED[name]}"
        networks = sorted({public.network for public in PUBLIC.values()})
        if isinstance(name, str) and path.name == "config.json" and name not in (*networks, "DiTTransformer2DModel"):
            return f"{path}: {shown(name)} is a network that is not known; known are {', '.join(networks)}"
    return None


def family_in(name: str) -> str | None:
    """Return FAMILY if ``name`` has the form FAMILY/FOLDER of a public model, otherwise None."""
    family, _, folder = name.partition("/")
    return family if folder and family in PUBLIC else None


def name_of_folder(path: str | Path) -> str | None:
    """Return FAMILY/FOLDER of the public model in a diffusers folder, a run or a checkpoint, or None."""
    folder = Path(path).expanduser()
    for inside in (folder / "transformer" / "config.json", folder / "config.json"):
        config = _read(inside)
        family = next((name for name, public in PUBLIC.items() if public.describes(config)), None)
        if family is not None:
            named = folder.resolve()
            inside = named.name in ("transformer", "transformer_2")
            return f"{family}/{folder_name(named.parent if inside else named)}"
    stored = flags_of_run(path).get("model")
    return stored if isinstance(stored, str) and family_in(stored) else None


def flags_of_run(path: str | Path) -> dict[str, Any]:
    """Return the flags with which the run of a run folder or checkpoint was started; {} for other paths."""
    folder = Path(path).expanduser()
    for run in (folder, *folder.resolve().parents[:2]):
        flags = _read(run / RUN_CONFIG).get("flags")
        if isinstance(flags, dict):
            return flags
    return {}


def downscale_of_vae(vae: str) -> int | None:
    """Return the number of pixels per latent value along a side, or None if the VAE's config does not give it."""
    if vae in ("ema", "mse"):
        return 8
    config = _read(Path(vae).expanduser() / "config.json")
    blocks = config.get("block_out_channels")
    return 2 ** (len(blocks) - 1) if config.get("_class_name") == "AutoencoderKL" and isinstance(blocks, list) else None


def commit_of_run(path: str | Path, name: str) -> str | None:
    """Return the hub commit of the model OWNER/NAME that a run started from, or None. path: a run or checkpoint."""
    folder, asked = Path(path).expanduser(), on_hub(name)
    if asked is None:
        return None
    for run in (folder, *folder.resolve().parents[:2]):
        found = _read(run / RUN_CONFIG).get("hub")
        if isinstance(found, dict) and found.get("repository") == asked[0] and isinstance(found.get("commit"), str):
            return found["commit"]
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, 4 * MIB) if path.is_file() else {}
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


POSITIONS = ("sincos", "learned", "rope")  # position encodings of tokens
NORMS = ("layer", "rms")  # norms before every branch of a block
MLP_KINDS = ("gelu", "swiglu")
# Size -> hidden size, depth, heads. Ti is for the embedded demo and tests. S to XL are from the DiT paper (Peebles &
# Xie 2023, table 1), 7B and 28B from early releases of NeMo.
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
        patches: common patches, to show in lists of models.
        pictures: True if there are picture models. A picture model's patch is one number.
        cross_attention: True if the model attends to captions even without --cross_attention.
        revision_1: size -> fields with other values in checkpoints of revision 1.
        settings: flags for configuration fields that only this architecture has.
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
    """Return an architecture's name in stored configurations: "ecdit" for EC-DiT."""
    return kind.lower().replace("-", "")


def parse_name(name: str) -> tuple[str, str, int | tuple[int, int, int]]:
    """Split a model's name: ("DiT", "XL", 2) for DiT-XL/2, ("vDiT", "XL", (2, 2, 2)) for vDiT-XL/222. Raises
    ValueError."""
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
    """Return the canonical spelling: vDiT-XL/222 for vDiT-XL/2x2x2. Raises ValueError for an unknown name."""
    if family_in(name):
        return name
    kind, size, patch = parse_name(name)
    return f"{kind}-{size}/{patch if isinstance(patch, int) else ''.join(map(str, patch))}"


def is_video(name: str) -> bool:
    return not isinstance(patch_size(name), int)


def patch_size(name: str) -> int | tuple[int, int, int]:
    """Return the patch side of a picture model, or (frames, rows, columns) of a clip model. Raises ValueError."""
    family = family_in(name)
    return parse_name(name)[2] if family is None else PUBLIC[family].patch


def depth_and_heads(name: str) -> tuple[int, int] | None:
    """Return (number of blocks, heads per block), or None for a public model. Raises ValueError."""
    if family_in(name):
        return None
    kind, size, _ = parse_name(name)
    _, depth, heads, _ = KINDS[kind].sizes[size]
    return depth, heads


def parse_given(text: str) -> int | None:
    """Return how many frames at a clip's start are conditions: 1 for "first", K for "prefix:K", None for "random".

    Raises ValueError for any other text.
    """
    if text == "random":
        return None
    if text == "first":
        return 1
    found = re.fullmatch(r"prefix:([1-9][0-9]{0,4})", text)
    if found is None:
        raise ValueError(f"--given_frames {text}: no such frames; give {GIVEN}, K being a number from 1 on")
    return int(found[1])
