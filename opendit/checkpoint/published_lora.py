"""LoRA files of others, for public models: the names of diffusers and PEFT, or the same layers with kohya's endings."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from opendit.checkpoint.published import PublishedFolder
from opendit.common.tensor_files import Kinds

PREFIXES = ("transformer.", "diffusion_model.", "base_model.model.")
ENDINGS = {
    ".lora_A.weight": "A",
    ".lora_A.default.weight": "A",
    ".lora_down.weight": "A",
    ".lora_B.weight": "B",
    ".lora_B.default.weight": "B",
    ".lora_up.weight": "B",
    ".alpha": "alpha",
}


class PublishedLora(Mapping[str, Tensor]):
    """A public model's weights under their published names, with (alpha / rank) B A added to those of the file's
    layers.

    A weight is made when it is asked for, in the dtype of the base. A file without alphas has alpha = rank, or the one
    in its metadata.

    Args:
        base: the model's folder, opened.
        state, metadata: the LoRA file's.
        path: its path, for messages.

    Raises:
        ValueError: in one line, a key that belongs to no layer of the base, a matrix without its counterpart, or one of
            another shape.
    """

    def __init__(self, base: PublishedFolder, state: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path):
        self._base, self._path = base.files, path
        self._layers: dict[str, dict[str, Tensor]] = {}
        shapes, strange = base.files.shapes, []
        for key, value in state.items():
            name, part = _layer_and_part(key)
            if part is None or f"{name}.weight" not in shapes:
                strange.append(key)
            else:
                self._layers.setdefault(name, {})[part] = value
        if strange:
            raise ValueError(
                f"{path}: {strange[0][:100]} and {len(strange) - 1} other keys belong to no layer of "
                f"{base.pipeline or base.transformer}; a LoRA of this model in diffusers' names is needed"
            )
        self._alpha = _alpha_of(metadata)
        for name, parts in self._layers.items():
            _check(name, parts, shapes[f"{name}.weight"], path)

    @property
    def kinds(self) -> Kinds:
        """Dtype and shape of every weight of the base."""
        return self._base.kinds

    def __getitem__(self, name: str) -> Tensor:
        weight, parts = self._base[name], self._layers.get(name.removesuffix(".weight"))
        if parts is None or not name.endswith(".weight"):
            return weight
        a, b = parts["A"].float().flatten(1), parts["B"].float().flatten(1)
        alpha = parts["alpha"].item() if "alpha" in parts else self._alpha or len(a)
        return (weight.float() + (alpha / len(a) * (b @ a)).view_as(weight)).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def _layer_and_part(key: str) -> tuple[str, str | None]:
    """Return a key's layer, and which of its tensors it is: A, B, alpha; None for another."""
    name = next((key.removeprefix(prefix) for prefix in PREFIXES if key.startswith(prefix)), key)
    ending = next((ending for ending in ENDINGS if name.endswith(ending)), None)
    return (name, None) if ending is None else (name.removesuffix(ending), ENDINGS[ending])


def _alpha_of(metadata: Mapping[str, str]) -> float | None:
    """Return the alpha that diffusers writes into a file's metadata, if it is there."""
    try:
        found: Any = json.loads(metadata.get("lora_adapter_metadata", "{}"))
    except ValueError:
        return None
    alpha = found.get("transformer.lora_alpha", found.get("lora_alpha")) if isinstance(found, dict) else None
    return float(alpha) if isinstance(alpha, int | float) else None


def _check(name: str, parts: Mapping[str, Tensor], shape: tuple[int, ...], path: Path) -> None:
    if "A" not in parts or "B" not in parts:
        raise ValueError(f"{path}: {name} has one matrix of a LoRA without the other")
    a, b = parts["A"].flatten(1), parts["B"].flatten(1)
    wanted, inputs = shape[0], 1
    for side in shape[1:]:
        inputs *= side
    if (len(b), a.shape[1]) != (wanted, inputs) or len(a) != b.shape[1] or not len(a):
        raise ValueError(
            f"{path}: {name} has matrices of {list(b.shape)} and {list(a.shape)}, which do not make {[wanted, inputs]}"
        )
    if "alpha" in parts and parts["alpha"].numel() != 1:
        raise ValueError(f"{path}: {name}.alpha is not one number")
