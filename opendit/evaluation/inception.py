"""FID's Inception network, with torchvision's parameter names, so that the published weights load strictly.

FID was defined with this network from December 2015. It differs from torchvision's network: it has 1,008 classes, its
average pooling excludes the padding, and its last block has maximum pooling."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.inception import BasicConv2d, InceptionA, InceptionB, InceptionC, InceptionD, InceptionE

CLASSES = 1008


class _A(InceptionA):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(
            [
                self.branch1x1(x),
                self.branch5x5_2(self.branch5x5_1(x)),
                self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
                self.branch_pool(_average(x)),
            ],
            dim=1,
        )


class _C(InceptionC):
    def forward(self, x: Tensor) -> Tensor:
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        return torch.cat(
            [
                self.branch1x1(x),
                self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x))),
                self.branch7x7dbl_5(self.branch7x7dbl_4(double)),
                self.branch_pool(_average(x)),
            ],
            dim=1,
        )


class _E(InceptionE):
    def __init__(self, in_channels: int, maximum: bool):
        super().__init__(in_channels)
        self.maximum = maximum

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.maximum else _average(x)
        single, double = self.branch3x3_1(x), self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        return torch.cat(
            [
                self.branch1x1(x),
                self.branch3x3_2a(single),
                self.branch3x3_2b(single),
                self.branch3x3dbl_3a(double),
                self.branch3x3dbl_3b(double),
                self.branch_pool(pooled),
            ],
            dim=1,
        )


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class FIDInception(nn.Module):
    """Maps pixels (B, 3, 299, 299) in 0..255 to "pool" (B, 2048), "spatial" (B, 2023) and "logits" (B, 1008).

    "spatial" is used in ADM's sFID. "logits" have no bias, as in the Inception score.
    """

    def __init__(self):
        super().__init__()
        self.Conv2d_1a_3x3: nn.Module = BasicConv2d(3, 32, kernel_size=3, stride=2)
        self.Conv2d_2a_3x3: nn.Module = BasicConv2d(32, 32, kernel_size=3)
        self.Conv2d_2b_3x3: nn.Module = BasicConv2d(32, 64, kernel_size=3, padding=1)
        self.Conv2d_3b_1x1: nn.Module = BasicConv2d(64, 80, kernel_size=1)
        self.Conv2d_4a_3x3: nn.Module = BasicConv2d(80, 192, kernel_size=3)
        self.Mixed_5b: nn.Module = _A(192, pool_features=32)
        self.Mixed_5c: nn.Module = _A(256, pool_features=64)
        self.Mixed_5d: nn.Module = _A(288, pool_features=64)
        self.Mixed_6a: nn.Module = InceptionB(288)
        self.Mixed_6b: nn.Module = _C(768, channels_7x7=128)
        self.Mixed_6c: nn.Module = _C(768, channels_7x7=160)
        self.Mixed_6d: Any = _C(768, channels_7x7=160)
        self.Mixed_6e: nn.Module = _C(768, channels_7x7=192)
        self.Mixed_7a: nn.Module = InceptionD(768)
        self.Mixed_7b: nn.Module = _E(1280, maximum=False)
        self.Mixed_7c: nn.Module = _E(2048, maximum=True)
        self.fc = nn.Linear(2048, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = (x - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, stride=2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, stride=2))))
        x = self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))
        spatial = self.Mixed_6d.branch1x1(x)[:, :7].permute(0, 2, 3, 1).flatten(1)
        x = self.Mixed_6e(self.Mixed_6d(x))
        pool = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x))).mean(dim=(2, 3))
        return {"pool": pool, "spatial": spatial, "logits": F.linear(pool, self.fc.weight)}
