"""Prepare the input of FID's Inception and pick its features, for weights from any of the known files."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 299  # pixels that it sees
SPATIAL_CHANNELS = 7  # of the first branch of Mixed_6d: 17 x 17 x 7 numbers are ADM's spatial features


class ScriptedInception(nn.Module):
    """The same of NVIDIA's TorchScript of that network (StyleGAN's metrics), whose layers have TensorFlow's names."""

    def __init__(self, script: torch.jit.ScriptModule):
        super().__init__()
        self.script = script

    @staticmethod
    def fits(script: torch.jit.ScriptModule) -> bool:
        layers = getattr(script, "layers", None)
        return layers is not None and hasattr(layers, "mixed_6") and hasattr(script, "output")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, spatial = (x - 128) / 128, None
        for name, layer in self.script.layers.named_children():
            if name == "mixed_6":
                spatial = spatial_features(layer.conv(x))
            x = layer(x)
        assert spatial is not None  # :meth:`fits`
        pool = x.flatten(1)
        return {"pool": pool, "spatial": spatial, "logits": F.linear(pool, self.script.output.weight)}


def spatial_features(x: Tensor) -> Tensor:
    return x[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)


def resize(x: Tensor, how: str, side: int = SIDE) -> Tensor:
    """Pictures (B, 3, H, W) float32 to side x side pixels.

    how: "tf", the bilinear filter of TensorFlow 1 that FID was defined with, which takes pixel i of the result from
    i * H / side and no more than two neighbours; "torch", the same from the middle of pixels (pytorch-fid's); "clean",
    Pillow's bicubic filter with antialiasing, clipped to 0..255 (clean-fid, Parmar et al. 2022).
    """
    if how == "clean":
        return F.interpolate(x, (side, side), mode="bicubic", antialias=True).clamp(0, 255)
    if how == "torch":
        return F.interpolate(x, (side, side), mode="bilinear")
    for dim in (3, 2):
        at = torch.arange(side, dtype=torch.float32, device=x.device) * (x.shape[dim] / side)
        low = at.long()
        share = (at - low).view(-1, *[1] * (3 - dim))
        first, second = (x.index_select(dim, rows.clamp_max(x.shape[dim] - 1)) for rows in (low, low + 1))
        x = first + (second - first) * share
    return x
