"""vDiT: the DiT of clips. Patches are blocks of frames, rows and columns, and attention is over all of them.

Everything but the patches' shape, the positions and the treatment of a single picture is DiT's.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opendit.models.conditioning import Condition
from opendit.models.dit import DiT, DiTConfig
from opendit.models.layers import sincos_position_table


@dataclass(frozen=True)
class VDiTConfig(DiTConfig):
    """Everything needed to build a vDiT."""

    kind: ClassVar[str] = "vdit"

    input_size: tuple[int, int, int]  # frames, height, width of the latent
    patch_size: tuple[int, int, int]  # frames, rows, columns

    @property
    def patch(self) -> tuple[int, ...]:
        return self.patch_size

    def grid_of(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """As of DiT; a single frame is one patch long, because it is repeated."""
        frames, *sides = size
        return super().grid_of((self.patch[0] if frames == 1 else frames, *sides))


class VDiT(DiT):
    """Diffusion Transformer on latents (B, C, T, H, W), of the configured size or any that divides.

    A token's position is a temporal table's row plus a spatial table's row, both fixed and both counted from 0
    whatever the size, so a picture has the positions of a clip's first patch.
    """

    def forward(self, x: Tensor, t: Tensor, y: Condition) -> Tensor:
        """As of DiT, with x (B, C, T, H, W) and the result (B, out_channels, T, H, W).

        A picture is a clip with T = 1. Where the patch holds more frames, the frame, with its noise, is repeated to
        fill it and the prediction is the mean over the repeats, so it has T = 1 again: its loss counts one
        frame, not one for each repeat, and every frame of the patch is trained.
        """
        repeats = self.config.patch[0] if x.shape[2] == 1 else 1
        if repeats == 1:
            return super().forward(x, t, y)
        return super().forward(x.expand(-1, -1, repeats, -1, -1), t, y).mean(dim=2, keepdim=True)

    def register_positions(self) -> None:
        frames, *sides = self.config.grid
        dim = self.config.hidden_size
        self.register_buffer("pos_embed", sincos_position_table(dim, *sides).unsqueeze(0))
        self.register_buffer("temporal_embed", sincos_position_table(dim, frames).unsqueeze(0))

    def positions(self, grid: tuple[int, ...]) -> Tensor:
        temporal = self.table("temporal_embed", grid[:1], self.config.grid[:1])
        spatial = self.table("pos_embed", grid[1:], self.config.grid[1:])
        return torch.flatten(temporal.unsqueeze(2) + spatial.unsqueeze(1), 1, 2)
