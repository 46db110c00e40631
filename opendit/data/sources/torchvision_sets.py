"""A folder that torchvision has downloaded a data set to."""

from opendit.data.sources.base import Request
from opendit.data.torchvision_sets import ArrayDataset, find_known


def open_source(asked: Request) -> ArrayDataset | None:
    known = find_known(asked.located) if asked.located.is_dir() and not asked.use_video else None
    if known is None:
        return None
    return ArrayDataset(*known, asked.image_size, seed=asked.seed, random_flip=asked.random_flip, split=asked.split)
