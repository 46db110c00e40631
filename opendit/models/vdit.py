"""vDiT: the DiT of clips. Patches are blocks of frames, rows and columns, and attention is over all of them."""

from dataclasses import dataclass
from typing import ClassVar

from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT


@dataclass(frozen=True)
class VDiTConfig(DiTConfig):
    """Everything needed to build a vDiT."""

    kind: ClassVar[str] = "vdit"

    input_size: tuple[int, int, int]  # frames, height, width of the latent
    patch_size: tuple[int, int, int]  # frames, rows, columns


class VDiT(DiT):
    """Diffusion Transformer on latents (B, C, T, H, W): DiT, with every token attending to those of all frames."""


ARCHITECTURE = VDiTConfig, VDiT
