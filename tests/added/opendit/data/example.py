"""An example data source, ``--data_path example``: pictures of horizontal and vertical stripes."""

import torch

from opendit.common.utils import hash_parts
from opendit.data.base import PLAIN, Description, Fingerprint, Item, MediaDataset, View
from opendit.data.sources import Request


class Stripes(MediaDataset):
    def __init__(self, asked: Request):
        self.seed, self.class_names = asked.seed, ["rows", "columns"]
        self.sample_shape = (1, asked.image_size, asked.image_size)

    def __len__(self) -> int:
        return 64

    def read(self, row: int, view: View = PLAIN) -> Item:
        side = self.sample_shape[-1]
        rows = torch.sin(torch.arange(side) * (1 + row / 16)).expand(side, side)
        return Item((rows if row % 2 else rows.t()).clone()[None], y=row % 2)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(lambda: hash_parts("example", str(self.sample_shape)))

    def describe(self) -> Description:
        return Description(
            text=f"stripes: {len(self)} pictures",
            class_names=self.class_names,
            sample_shape=self.sample_shape,
            seed=self.seed,
        )


def open_source(asked: Request) -> Stripes:
    return Stripes(asked)
