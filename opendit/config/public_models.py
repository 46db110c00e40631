"""Public models by the names of their folders, FAMILY/FOLDER, as far as flags need them; no torch.

``opendit.models.families`` has what they are.
"""

from pathlib import Path
from typing import Any, NamedTuple

from opendit.common.hub import folder_name, on_hub
from opendit.common.json_file import MIB, read_json

RUN_CONFIG = "config.json"
CLIP_FRAMES = 17  # by default: 4 k + 1 and 8 k + 1, as their VAEs take them; the nearest number to the other models' 16


class Public(NamedTuple):
    """A family as flags see it: diffusers' class of its network, its patch, the usual side of its pictures, and the
    value of guidance_embeds that tells its networks from another family's, or None."""

    network: str
    patch: int | tuple[int, int, int]
    image_size: int
    guidance_embeds: bool | None = None

    def describes(self, config: dict[str, Any]) -> bool:
        """Return True if a network with this ``config.json`` is of the family."""
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
    """Return the family of a public model's name, FAMILY/FOLDER; None for any other name."""
    family, _, folder = name.partition("/")
    return family if folder and family in PUBLIC else None


def name_of_folder(path: str | Path) -> str | None:
    """Return the name of the public model that a folder holds, as diffusers writes it, or that a run trains; None if it
    holds none, or can't be read."""
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
    """Return the commit of the model on the hub, OWNER/NAME, that a run or a checkpoint of it began from; None if it
    began from another, or can't be read."""
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
