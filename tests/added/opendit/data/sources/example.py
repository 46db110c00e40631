"""An example of a data source: ``--data_path example``, stripes of two directions."""

import torch

from opendit.common.utils import hash_parts
from opendit.data.base import MediaDataset
from opendit.data.sources.base import Request


class Stripes(MediaDataset):
    def __init__(self, asked: Request):
        self.seed, self.class_names = asked.seed, ["rows", "columns"]
        self.sample_shape = (1, asked.image_size, asked.image_size)

    def __len__(self) -> int:
        return 64

    def load(self, row: int, flip: bool) -> torch.Tensor:
        side = self.sample_shape[-1]
        rows = torch.sin(torch.arange(side) * (1 + row / 16)).expand(side, side)
        return (rows if row % 2 else rows.t()).clone()[None]

    def label(self, row: int) -> int:
        return row % 2

    def identity(self) -> str:
        return hash_parts("example", str(self.sample_shape))

    def describe(self) -> str:
        return f"stripes: {len(self)} pictures"


def open_source(asked: Request) -> Stripes:
    return Stripes(asked)
