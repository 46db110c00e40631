"""Weights from a file, with the file's metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from opendit.models.configuration import DiTConfig
from opendit.models.zoo import Shapes, config_from_dict


@dataclass
class Weights:
    """A state dict in the canonical layout, with its file's metadata. Tensors of safetensors files are read on
    access."""

    state: Mapping[str, Tensor]
    path: Path
    info: dict[str, Any] = field(
        default_factory=dict
    )  # of our files: model, config, class_names, vae, image_size, step
    num_classes: int | None = None  # of Meta's files: from their training arguments if stored, or from the user

    @property
    def config(self) -> DiTConfig | None:
        return config_from_dict(self.info["config"]) if "config" in self.info else None

    @property
    def shapes(self) -> Shapes:
        """The shape of every tensor. Tensors in safetensors files are not read for this."""
        known = getattr(self.state, "shapes", None)
        return {name: tuple(tensor.shape) for name, tensor in self.state.items()} if known is None else known
