"""Open the data set that ``--data_path`` names.

A data source is a module of this package with a function ``open_source(asked: Request) -> MediaDataset | None``, and an
entry in ``opendit.config.names.SOURCES``. The function returns None for other kinds of data. It raises ValueError, with
the flag and the fix, for unusable data of its kind."""

import os
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from opendit.common.utils import hash_parts
from opendit.config.names import (
    ADDRESSES,
    BLENDS,
    ENERGON,
    MOCK,
    SOURCES,
    TABLES,
    check_address,
    data_path_help,
    inline_sources,
    is_address,
    named_sources,
)
from opendit.data.base import PLAIN, Description, Fingerprint, Item, MediaDataset, View
from opendit.data.captioned_media import Columns
from opendit.data.files import CLIPS, kind_of, printable
from opendit.data.held_out import SomeRows
from opendit.data.picture_file import picture_suffixes
from opendit.data.row_arrays import Complement


class NoSplit(ValueError):
    """Raised if a source lacks the requested split."""


@dataclass(frozen=True)
class Request:
    """``--data_path`` and the flags that determine how its data are read."""

    data_path: str
    path: Path | None  # the file or readable folder; None if data_path is not a path
    image_size: int
    seed: int
    random_flip: bool | None = None  # mirror half of the samples; None leaves the choice to the data set
    split: str = "train"  # or "test", for a source with both
    max_bad: float = 0.05  # largest fraction of unreadable files to skip
    num_frames: int = 16
    frame_interval: int = 1
    fps: float | None = None
    use_video: bool = False
    short_clips: str = "skip"
    video_reader: str = "auto"  # one of ``video_files.CHOICES``
    # Settings of random latents, see ``MockDataset``. Python data without class names also use num_classes.
    vae: str = "ema"
    num_classes: int | None = None
    text_encoder: str | None = None
    max_text_tokens: int | None = None
    energon_cooker: str | None = None  # ``module:function`` that reads samples of an Energon folder
    # See ``Columns``.
    file_column: str | None = None
    caption_column: str | None = None
    # See ``Recaptioned``.
    caption_prefix: str | None = None
    shuffle_tags: bool = False
    tag_drop: float = 0.0
    random_crop: bool = False  # crop pictures and clips at random positions

    @property
    def columns(self) -> Columns:
        return Columns(self.file_column, self.caption_column)

    @property
    def located(self) -> Path:
        """The path, for sources that are recognised by a path."""
        assert self.path is not None, "a source that has a name has no path"
        return self.path

    @property
    def shown(self) -> str:
        return f"--data_path {printable(self.data_path)}"

    def of_clips(self) -> dict[str, Any]:
        """Return the arguments for data sets of clips and pictures. Windows of clips are random only in training."""
        names = "seed num_frames frame_interval fps use_video short_clips video_reader random_flip random_crop max_bad"
        return {name: getattr(self, name) for name in names.split()} | {"training": self.split == "train"}

    def of_latents(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in "seed random_flip use_video num_frames frame_interval fps".split()
        }

    def check_split(self) -> None:
        """Raise NoSplit if ``split`` is not "train". Called by sources without splits."""
        if self.split != "train":
            raise NoSplit(f"{self.shown}: has no split {self.split!r}; give the folder of that split instead")


def build_dataset(data_path: str, image_size: int, **options: Any) -> MediaDataset:
    """Open the data set of ``--data_path`` with the first of ``SOURCES`` that recognises it.

    options: more fields of ``Request``, including ``seed``. Raises ValueError or FileNotFoundError, with the flag and
    the fix."""
    if image_size < 1:
        raise ValueError(f"--image_size {image_size}: not positive; give 1 or more")
    named = named_sources().get(data_path)
    if inline_sources(data_path):
        named = BLENDS
    elif is_address(data_path):
        check_address(data_path)
        named = ADDRESSES
    path = None if named else _locate(data_path)
    asked = Request(data_path, path, image_size, **options)
    unnamed = [module for module, source in SOURCES.items() if source.name is None and module != TABLES]
    for module in [named] if named else [*unnamed, TABLES]:
        dataset = import_module(f"opendit.data.{module}").open_source(asked)
        if dataset is not None:
            if asked.energon_cooker and module not in (ENERGON, BLENDS):
                raise ValueError(
                    f"--energon_cooker {asked.energon_cooker}: {asked.shown} is no folder that Energon prepared; leave "
                    "it out"
                )
            if module == MOCK:  # in a dry run, mock data replace any data
                return dataset
            if any(asked.columns) and module not in (TABLES, BLENDS):
                raise ValueError(
                    f"{asked.shown}: is no table of captioned media; leave --file_column and --caption_column out"
                )
            if asked.random_crop and not dataset.describe().random_crop:
                raise ValueError(f"--random_crop: {asked.shown} has no pictures or clips to crop; leave it out")
            return dataset if module == BLENDS else recaption(asked, dataset)
    assert path is not None, "a source that has a name has been opened"
    raise ValueError(f"{asked.shown}: is {_file_advice(path)}")


def recaption(asked: Request, dataset: MediaDataset) -> MediaDataset:
    """Return the data set with its captions changed by the flags. Raises ValueError if that is impossible."""
    flags = {
        "caption_prefix": bool(asked.caption_prefix),
        "shuffle_tags": asked.shuffle_tags,
        "tag_drop": asked.tag_drop > 0,
    }
    given = next((name for name, is_given in flags.items() if is_given), None)
    if given is None:
        return dataset
    about = dataset.describe()
    if about.conditioning != "text":
        raise ValueError(f"--{given}: {asked.shown} has classes and no captions; leave it out")
    if about.text_encoder is not None:
        raise ValueError(
            f"--{given}: the captions of {asked.shown} are embedded already; leave it out, or "
            + ("make the latents again with it" if given == "caption_prefix" else "train on the files themselves")
        )
    return Recaptioned(dataset, asked.caption_prefix or "", shuffle=asked.shuffle_tags, drop=asked.tag_drop)


def _locate(data_path: str) -> Path:
    shown = f"--data_path {printable(data_path)}"
    if not data_path.strip():
        raise ValueError(f"--data_path: empty; give {data_path_help()}")
    try:
        path = Path(data_path).expanduser() if data_path[0] == "~" else Path(data_path)
        kind = kind_of(os.stat(path).st_mode)
        if kind == "a folder":
            os.scandir(path).close()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{shown}: doesn't exist{_name_advice(data_path)}; give {data_path_help()}") from error
    except PermissionError as error:
        raise ValueError(f"{shown}: can't be read ({error.strerror}); allow it (chmod -R u+rX)") from error
    except RuntimeError as error:
        raise ValueError(f"{shown}: the home folder of that user is not known; write the path out") from error
    except (OSError, ValueError) as error:  # the name is too long or contains a NUL, or links form a cycle
        raise ValueError(
            f"{shown}: can't be read ({getattr(error, 'strerror', None) or error}); give {data_path_help()}"
        ) from error
    if kind not in (None, "a folder"):
        raise ValueError(f"{shown}: {kind}; give {data_path_help()}")
    return path


def _name_advice(name: str) -> str:
    known = name.lower().replace("-", "").replace("_", "")
    if known in ("cifar10", "cifar100", "mnist", "fashionmnist", "stl10", "svhn"):
        return " (a torchvision data set is named by the folder that it was downloaded to)"
    meant = get_close_matches(name.lower(), named_sources(), n=1)
    return f" (is {meant[0]} meant?)" if meant else ""


def _file_advice(path: Path) -> str:
    """Return an unusable file's kind and the fix, for an error message."""
    from opendit.data.latents_index import INDEX  # imports pydantic, so only for this message

    suffix = path.suffix.lower()
    if path.name == INDEX or suffix == ".safetensors":
        return "a file; give the folder of cached latents that it is in"
    if suffix in picture_suffixes():
        return "a picture; give the folder that it is in"
    if suffix in CLIPS:
        return "a clip; give a CSV of clips: python preprocess.py folder FOLDER --output videos.csv"
    if suffix in (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst"):
        return "an archive; unpack it and give its folder"
    if suffix in (".tsv", ".txt", ".json", ".xlsx"):
        return "a file; captions come as a .csv of path,text"
    return f"a file; give {data_path_help()}"


class Recaptioned(SomeRows):
    """All rows of another data set with changed captions. prefix: text before each caption, followed by a blank.

    Tags in a caption are separated by commas. Each read of a sample may shuffle the tags, and drop each tag with the
    probability ``drop``, but never all. ``View.tags`` is the random key; None leaves the tags unchanged."""

    def __init__(self, whole: MediaDataset, prefix: str, *, shuffle: bool = False, drop: float = 0.0):
        super().__init__(whole, Complement(len(whole), np.zeros(0, np.int64)), "")
        self.prefix, self.shuffle, self.drop = prefix, shuffle, drop

    def caption(self, row: int) -> str | None:
        return self._changed(self.whole.caption(row), None)

    def read(self, row: int, view: View = PLAIN) -> Item:
        item = self.whole.read(row, view)
        return item._replace(text=self._changed(item.text, view.tags))

    def _changed(self, text: str | None, key: int | None) -> str | None:
        if text is None:
            return None
        if key is not None and (self.shuffle or self.drop):
            text = change_tags(text, key, shuffle=self.shuffle, drop=self.drop)
        return f"{self.prefix} {text}".strip() if self.prefix else text

    def fingerprint(self) -> Fingerprint:
        found = self.whole.fingerprint()
        if not self.prefix:
            return found
        return Fingerprint(
            lambda: hash_parts("prefix", self.prefix, found.identity), lambda: found.contents, found.checksums
        )

    def describe(self) -> Description:
        about = self.whole.describe()
        parts = [f"captions after {self.prefix!r}"] * bool(self.prefix) + ["shuffled tags"] * self.shuffle
        parts += [f"{self.drop:.0%} of the tags dropped"] * (self.drop > 0)
        random_tags = self.shuffle or self.drop > 0
        return replace(about, text=f"{about.text}, {', '.join(parts)}", random_tags=random_tags)


def change_tags(text: str, key: int, *, shuffle: bool, drop: float) -> str:
    """Shuffle and drop a caption's tags at random, keyed by ``key``. A single tag is unchanged."""
    tags = [tag for part in text.split(",") if (tag := part.strip())]
    if len(tags) < 2:
        return text
    # Use numpy's generator, because opendit.diffusion.random takes a millisecond.
    numbers = np.random.Philox(key=key).random_raw(2 * len(tags)).reshape(2, -1) / 2**64
    order = numbers[0].argsort() if shuffle else np.arange(len(tags))
    kept = numbers[1] >= min(drop, numbers[1].max())
    return ", ".join(tags[place] for place in order[kept[order]])
