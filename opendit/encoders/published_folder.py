"""Check the folder of a published pipeline, in diffusers' format, and load its autoencoder.

``model_index.json`` names the class of every component. The names are compared with the family's table, and only
classes from the table are imported. The module published_text loads the text encoders.
"""

from pathlib import Path
from typing import Any

import torch

from opendit.common.json_file import MIB
from opendit.common.json_models import FileKind, read_file
from opendit.common.utils import shown
from opendit.encoders.folder import (
    CONFIG,
    PIPELINE_INDEX,
    PretrainedConfig,
    reason,
    refuse_adapters,
    weight_shapes,
)
from opendit.encoders.vae import IMAGE_CLASSES, STEM, ImageCodec, load_codec, read_vae_config
from opendit.encoders.video_vae import VIDEO_CLASSES, VideoCodec, load_video_codec
from opendit.models.families.base import Family

VAE = "vae"
INDEX_FILE = FileKind(PretrainedConfig, MIB)
# Class with an extra head -> class of the same encoder without the head, which is loaded instead.
SAME = {"Qwen3ForCausalLM": "Qwen3Model", "Gemma2ForCausalLM": "Gemma2Model"}
NUMBERS = {"scalar": ("scaling_factor", "shift_factor"), "channel": ("latents_mean", "latents_std"), "batch": ()}


def check_index(folder: Path, family: Family) -> None:
    """Compare a folder's ``model_index.json`` with the family's pipelines and components.

    Raises FileNotFoundError or ValueError; the message names the file and the component that differs.
    """
    path = folder / PIPELINE_INDEX
    index = read_json_of(path, INDEX_FILE, f"a folder of diffusers' {family.pipelines[0]} has one")
    if index.get("_class_name") not in family.pipelines:
        found = shown(index.get("_class_name"))
        raise ValueError(
            f"{path}: _class_name is {found}, not {' or '.join(family.pipelines)}; other pipelines of {family.name}, "
            "such as those that are given pictures, are not known"
        )
    for component, (library, class_name) in family.components.items():
        if not names_class(index.get(component), library, class_name):
            found = index.get(component)
            found = ", ".join(map(shown, found[:2])) if isinstance(found, list) else shown(found)
            raise ValueError(f"{path}: {component} is {found}, not {class_name} of {library}")


def names_class(entry: Any, library: str, class_name: str) -> bool:
    """Return True if an entry of ``model_index.json`` names this class.

    NAME and NAMEFast count as the same tokenizer, because recent versions of transformers have only one class for both
    names.
    """
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
        return False
    found = SAME.get(entry[1], entry[1])
    return entry[0] == library and found.removesuffix("Fast") == class_name.removesuffix("Fast")


def read_json_of(path: Path, kind: FileKind, needed: str) -> Any:
    """Return the content of a JSON file, like :func:`read_file`.

    Raises FileNotFoundError with a message that ends with ``needed`` if the file is missing, and ValueError for any
    other problem.
    """
    try:
        return read_file(path, kind)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path} doesn't exist; {needed}") from error
    except OSError as error:
        raise ValueError(f"{path} can't be read: {reason(path, error)}") from error


def check_vae(folder: Path, family: Family) -> str:
    """Check the configuration of a folder's autoencoder and the header of its weights.

    Return the folder of the autoencoder. ``load_codec``, ``load_video_codec``, ``video_geometry`` and ``codec_scale``
    accept this folder as ``name``.

    Raises:
        FileNotFoundError, ValueError: the autoencoder is missing or damaged, or its class or normalisation is not that
            of the family.
    """
    latents, path = family.latents, folder / VAE
    _, config = read_vae_config(str(path), {latents.vae: (IMAGE_CLASSES | VIDEO_CLASSES)[latents.vae]})
    for key in NUMBERS[latents.normalised]:
        if config.get(key) is None:
            raise ValueError(f"{path / CONFIG}: {key} is missing, by which the latents of {family.name} are normalised")
    if latents.normalised == "scalar" and config.get("latents_mean") is not None:
        raise ValueError(f"{path / CONFIG}: has latents_mean, but {family.name} is normalised by scaling_factor")
    refuse_adapters(path)
    weight_shapes(path, STEM)
    return str(path)


def load_published_codec(
    folder: Path,
    family: Family,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
    tiling: bool = False,
    compiled: bool = False,
) -> ImageCodec | VideoCodec:
    """Load the autoencoder of a folder: a video codec if the family's latents have frames, else an image codec.

    The other arguments are those of ``load_codec`` and ``load_video_codec``. Raises the same errors as
    :func:`check_vae`.
    """
    load: Any = load_video_codec if family.latents.video else load_codec
    settings: dict[str, Any] = dict(dtype=dtype, chunk=chunk, tiling=tiling, compiled=compiled)
    return load(check_vae(folder, family), channels=3, device=device, **settings)
