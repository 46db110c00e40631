"""A CSV of captioned media."""

from opendit.data.captioned import CaptionedDataset
from opendit.data.sources.base import Request

NAME = None
TAKES = "a CSV of captioned media"


def open_source(asked: Request) -> CaptionedDataset | None:
    if asked.path.is_dir() or asked.path.suffix.lower() != ".csv":
        return None
    return CaptionedDataset(
        asked.path,
        asked.image_size,
        seed=asked.seed,
        num_frames=asked.num_frames,
        frame_interval=asked.frame_interval,
        use_video=asked.use_video,
        short_clips=asked.short_clips,
        random_flip=asked.random_flip,
        max_bad=asked.max_bad,
        training=asked.split == "train",
    )
