"""A folder of cached latents."""

from opendit.data.folders import Ignored, files_below
from opendit.data.latents import LatentDataset, read_index
from opendit.data.picture_file import picture_suffixes
from opendit.data.sources.base import Request

NAME = None
TAKES = "a folder of cached latents"


def open_source(asked: Request) -> LatentDataset | None:
    if not asked.path.is_dir():
        return None
    if read_index(asked.path) is None:
        if any(asked.path.glob("latents-*.safetensors")):
            raise ValueError(
                f"{asked.shown}: holds unfinished latents; run the preprocess.py command that made them again"
            )
        return None
    asked.check_split()
    latents = LatentDataset(
        asked.path,
        asked.image_size,
        seed=asked.seed,
        random_flip=asked.random_flip,
        use_video=asked.use_video,
        num_frames=asked.num_frames,
        frame_interval=asked.frame_interval,
    )
    if next(files_below(str(asked.path), picture_suffixes(), Ignored(), visits=1), None) is not None:
        latents.note = "; the pictures that are in the folder as well are not read"
    return latents
