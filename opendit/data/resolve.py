"""``--data_path``: which data set it names."""

import os
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from opendit.config.data_sources import (
    ADDRESSES,
    FALLBACK,
    SOURCES,
    check_address,
    check_inline,
    data_path_help,
    inline_sources,
    is_address,
    named_sources,
)
from opendit.data.base import MediaDataset
from opendit.data.files import kind_of, printable
from opendit.data.folders import CLIPS
from opendit.data.latents_index import INDEX
from opendit.data.picture_file import picture_suffixes
from opendit.data.sources.base import Request


def build_dataset(data_path: str, image_size: int, **options: Any) -> MediaDataset:
    """The data set of ``--data_path``, by the first of opendit/data/sources that knows it.

    image_size: pixels of a side. options: more fields of ``Request``, among them ``seed``.
    Raises ValueError or FileNotFoundError, naming the flag and what to do.
    """
    if image_size < 1:
        raise ValueError(f"--image_size {image_size}: not positive; give 1 or more")
    if inline := inline_sources(data_path):
        check_inline(data_path)
        from opendit.data.sources.several import open_inline  # which opens its sources by this function

        return open_inline(inline, Request(data_path, None, image_size, **options))
    if is_address(data_path):
        check_address(data_path)
    named = ADDRESSES if is_address(data_path) else named_sources().get(data_path)
    path = None if named else _locate(data_path)
    asked = Request(data_path, path, image_size, **options)
    files = (
        [named]
        if named
        else sorted(set(SOURCES) - set(named_sources().values()), key=lambda name: (name == FALLBACK, name))
    )
    for file in files:
        dataset = import_module(f"opendit.data.sources.{file}").open_source(asked)
        if dataset is not None:
            if asked.energon_cooker and file not in ("energon", "several"):
                raise ValueError(
                    f"--energon_cooker {asked.energon_cooker}: {asked.shown} is no folder that Energon prepared; leave "
                    "it out"
                )
            return dataset
    assert path is not None, "what is a name of its own has been opened"
    raise ValueError(f"{asked.shown}: is {_file_advice(path)}")


def _locate(data_path: str) -> Path:
    """The path that ``--data_path`` names, of a file or of a folder that can be listed.

    Raises ValueError or FileNotFoundError, naming the flag and what to do."""
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
    except (OSError, ValueError) as error:  # too long, a circle of links, a NUL
        raise ValueError(
            f"{shown}: can't be read ({getattr(error, 'strerror', None) or error}); give {data_path_help()}"
        ) from error
    if kind not in (None, "a folder"):
        raise ValueError(f"{shown}: {kind}; give {data_path_help()}")
    return path


def _name_advice(name: str) -> str:
    """Guess what a name that is no path was meant for, for an error message."""
    known = name.lower().replace("-", "").replace("_", "")
    if known in ("cifar10", "cifar100", "mnist", "fashionmnist", "stl10", "svhn"):
        return " (a torchvision data set is named by the folder that it was downloaded to)"
    meant = get_close_matches(name.lower(), named_sources(), n=1)
    return f" (is {meant[0]} meant?)" if meant else ""


def _file_advice(path: Path) -> str:
    """Name the kind of a file that is no CSV, and what to give instead."""
    suffix = path.suffix.lower()
    if path.name == INDEX or suffix == ".safetensors":
        return "a file; give the folder of cached latents that it is in"
    if suffix in picture_suffixes():
        return "a picture; give the folder that it is in"
    if suffix in CLIPS:
        return "a clip; give a CSV of clips: python preprocess.py folder FOLDER --output videos.csv"
    if suffix in (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst"):
        return "an archive; unpack it and give its folder"
    if suffix in (".tsv", ".txt", ".json", ".jsonl", ".parquet", ".xlsx"):
        return "a file; captions come as a .csv of path,text"
    return f"a file; give {data_path_help()}"
