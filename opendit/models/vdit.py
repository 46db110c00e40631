"""vDiT: a DiT for clips. Patches have frames, rows and columns, and every token attends to all tokens of the clip."""

from dataclasses import dataclass
from typing import ClassVar

from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT


@dataclass(frozen=True)
class VDiTConfig(DiTConfig):
    """The configuration of a vDiT."""

    kind: ClassVar[str] = "vdit"

    input_size: tuple[int, int, int]  # (frames, height, width) of the latents
    patch_size: tuple[int, int, int]  # (frames, rows, columns)


class VDiT(DiT):
    """Diffusion Transformer on latents (B, C, T, H, W), in which every token attends to the tokens of all frames."""


ARCHITECTURE = VDiTConfig, VDiT
