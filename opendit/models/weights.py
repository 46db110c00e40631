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
    """A state dict in the canonical layout, with the metadata of the file. Tensors in a safetensors file are read on
    access."""

    state: Mapping[str, Tensor]
    path: Path
    # Metadata. OpenDiT's files have the keys model, config, class_names, vae, image_size and step.
    info: dict[str, Any] = field(default_factory=dict)
    # for Meta's files, the number of classes in their training arguments, or the number that the user sets
    num_classes: int | None = None

    @property
    def config(self) -> DiTConfig | None:
        return config_from_dict(self.info["config"]) if "config" in self.info else None

    @property
    def shapes(self) -> Shapes:
        """The shape of every tensor. Tensors in safetensors files are not read for this."""
        known = getattr(self.state, "shapes", None)
        return {name: tuple(tensor.shape) for name, tensor in self.state.items()} if known is None else known
