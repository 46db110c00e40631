"""A folder of cached latents."""

from opendit.data.folders import Ignored, files_below
from opendit.data.latents import LatentDataset
from opendit.data.latents_index import FILES_VERSION, choose_index, read_indexes
from opendit.data.picture_file import picture_suffixes
from opendit.data.shards.latents import TarLatents, open_tars
from opendit.data.sources.base import Request
from opendit.data.text_cache import read_empty_caption


def open_source(asked: Request) -> LatentDataset | TarLatents | None:
    if not asked.located.is_dir():
        return None
    indexes = read_indexes(asked.located)
    if indexes is None:
        if any(asked.located.glob("latents-*.safetensors")) or any(asked.located.glob("latents-*-of-*.tar")):
            raise ValueError(
                f"{asked.shown}: holds unfinished latents; run the preprocess.py command that made them again"
            )
        return None
    asked.check_split()
    if indexes[0]["version"] == FILES_VERSION:
        latents = LatentDataset(asked.located, asked.image_size, **asked.of_latents())
    else:
        index = choose_index(indexes, asked.shown, asked.image_size)
        text, tars = index.get("text"), open_tars(asked.located, index)
        empty = read_empty_caption(asked.located, text["max_tokens"]) if text else None
        latents = TarLatents(asked.shown, index, tars, empty_caption=empty, max_bad=asked.max_bad, **asked.of_latents())
    if next(files_below(str(asked.located), picture_suffixes(), Ignored(), visits=1), None) is not None:
        latents.note = "; the pictures that are in the folder as well are not read"
    return latents
