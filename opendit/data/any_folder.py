"""A folder of pictures or clips that no other source recognises: with captions if there are any, else with classes."""

import shlex

from opendit.data.captioned import CaptionedDataset
from opendit.data.captioned_folder import CaptionedFiles, find_captions
from opendit.data.files import printable
from opendit.data.images import FolderDataset
from opendit.data.sources import Request


def open_source(asked: Request) -> CaptionedDataset | FolderDataset | None:
    if not asked.located.is_dir():
        return None
    path = str(asked.located)
    found = find_captions(asked.located, columns=asked.columns, bare=bool(asked.caption_prefix))
    if any(asked.columns) and found.table is None:
        raise ValueError(
            f"{asked.shown}: holds no metadata.jsonl, .csv or .parquet; leave --file_column and --caption_column out"
        )
    if found.has_captions:
        _check_rows(asked, found)
        return CaptionedDataset(path, asked.image_size, found=found, **asked.of_clips())
    if asked.use_video:
        raise ValueError(
            f"{asked.shown}: is a folder without captions; --use_video needs clip.txt beside clip.mp4, or "
            "metadata.jsonl with file_name and text; to take the folders' names run: python preprocess.py folder "
            f"{shlex.quote(printable(asked.data_path))} --output videos.csv"
        )
    asked.check_split()
    options = {name: getattr(asked, name) for name in ("seed", "random_flip", "random_crop", "max_bad")}
    return FolderDataset(path, asked.image_size, **options)


def _check_rows(asked: Request, found: CaptionedFiles) -> None:
    """Raise ValueError if no row of a folder that has captions is left."""
    if not found.rows:
        raise ValueError(f"{asked.shown}: no picture or clip has a caption ({'; '.join(found.lines())}); add some")
