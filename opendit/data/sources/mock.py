"""``--data_path mock``."""

from opendit.data.mock import MockDataset
from opendit.data.sources.base import Request


def open_source(asked: Request) -> MockDataset:
    return MockDataset(
        asked.image_size,
        asked.num_frames if asked.use_video else None,
        vae=asked.vae,
        seed=asked.seed,
        num_classes=asked.num_classes,
        text_encoder=asked.text_encoder,
        max_text_tokens=asked.max_text_tokens,
    )
