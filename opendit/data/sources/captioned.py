"""A CSV of captioned media."""

from opendit.data.captioned import CaptionedDataset
from opendit.data.sources.base import Request


def open_source(asked: Request) -> CaptionedDataset | None:
    if asked.located.is_dir() or asked.located.suffix.lower() != ".csv":
        return None
    return CaptionedDataset(asked.located, asked.image_size, **asked.of_clips())
