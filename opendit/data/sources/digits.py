"""``--data_path digits``."""

from opendit.data.digits import DigitsDataset
from opendit.data.sources.base import Request


def open_source(asked: Request) -> DigitsDataset:
    if asked.use_video:
        raise ValueError(
            "--data_path digits: holds pictures; --use_video needs a CSV of clips. For clips of moving digits "
            "run: python preprocess.py demo"
        )
    return DigitsDataset(asked.image_size, seed=asked.seed, random_flip=asked.random_flip, split=asked.split)
