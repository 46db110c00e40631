"""A folder of pictures: what a folder is that no other source knows."""

from opendit.data.files import printable
from opendit.data.images import FolderDataset
from opendit.data.sources.base import Request


def open_source(asked: Request) -> FolderDataset | None:
    if not asked.located.is_dir():
        return None
    if asked.use_video:
        raise ValueError(
            f"{asked.shown}: is a folder; --use_video needs a CSV of clips: to make one of the clips in it "
            f"run: python preprocess.py folder {printable(asked.data_path)} --output videos.csv"
        )
    asked.check_split()
    path = str(asked.located)
    return FolderDataset(path, asked.image_size, seed=asked.seed, random_flip=asked.random_flip, max_bad=asked.max_bad)
