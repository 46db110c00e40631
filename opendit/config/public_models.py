"""Properties of public models that the check of flags needs. This module does not import torch. A public model's name
is FAMILY/FOLDER.

``opendit.models.families`` has the models' other properties.
"""

from pathlib import Path
from typing import Any, NamedTuple

from opendit.common.hub import folder_name, on_hub
from opendit.common.json_file import MIB, read_json

RUN_CONFIG = "config.json"
CLIP_FRAMES = 17  # default frames of a clip: the number closest to 16 that is 4 k + 1 and 8 k + 1, as VAEs need


class Public(NamedTuple):
    """Properties of a family that the check of flags needs.

    network: diffusers' class of the network. patch: its patch. image_size: usual side of pictures. guidance_embeds: the
    value in ``config.json`` that distinguishes the family from another family with the same class; None if the class
    alone identifies the family.
    """

    network: str
    patch: int | tuple[int, int, int]
    image_size: int
    guidance_embeds: bool | None = None

    def describes(self, config: dict[str, Any]) -> bool:
        """Return True if a network with this ``config.json`` belongs to the family."""
        told = config.get("guidance_embeds", self.guidance_embeds)
        return config.get("_class_name") == self.network and self.guidance_embeds in (None, told)


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


def family_in(name: str) -> str | None:
    """Return FAMILY if ``name`` is a public model's name of the form FAMILY/FOLDER, otherwise None."""
    family, _, folder = name.partition("/")
    return family if folder and family in PUBLIC else None


def name_of_folder(path: str | Path) -> str | None:
    """Return the name of the public model in a folder.

    ``path`` is a folder written by diffusers, or a run or checkpoint that trains a public model. Return None if the
    folder holds no public model, or can't be read.
    """
    folder = Path(path).expanduser()
    for inside in (folder / "transformer" / "config.json", folder / "config.json"):
        config = _read(inside)
        family = next((name for name, public in PUBLIC.items() if public.describes(config)), None)
        if family is not None:
            named = folder.resolve()
            inside = named.name in ("transformer", "transformer_2")
            return f"{family}/{folder_name(named.parent if inside else named)}"
    for run in (folder, *folder.resolve().parents[:2]):
        flags = _read(run / RUN_CONFIG).get("flags")
        stored = flags.get("model") if isinstance(flags, dict) else None
        if isinstance(stored, str) and family_in(stored):
            return stored
    return None


def commit_of_run(path: str | Path, name: str) -> str | None:
    """Return the hub commit of the model ``name`` (OWNER/NAME) from which a run started.

    ``path`` is the run's folder, or one of its checkpoints. Return None if the run started from another model, or can't
    be read.
    """
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
