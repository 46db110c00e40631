"""Data sources by name, and the forms of ``--data_path``.

To add a source, write ``opendit/data/NAME.py`` with a function ``open_source``, and a row in :data:`SOURCES`.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from opendit.common.utils import printable

FOREIGN_FORMS = ("mean_std", "mean_logvar", "sample")  # formats of the latents in other programs' tar files
MOCK, PYTHON = "mock", "python"  # names of the source of random latents, and of a data set passed to opendit.train
ADDRESSES = "shards.source"  # the source that reads addresses
ENERGON, BLENDS = "energon.source", "blend"
TABLES = "pictures_and_clips"  # reads tables and any other folder, and is therefore tried last
_WITHOUT_BUCKET = ("file", "local", "memory")  # kinds of addresses that have no bucket


@dataclass(frozen=True)
class SourceDescription:
    """Description of a data source for the command line.

    Attributes:
        name: the source's name in ``--data_path``; None for a source that is recognised by its files.
        takes: description of the data that the source reads, for lists.
    """

    name: str | None
    takes: str


# Keys are modules of opendit.data. Sources other than TABLES are tried in this order.
SOURCES = {
    TABLES: SourceDescription(
        None, "a CSV, .jsonl or .parquet of captioned media, a folder of pictures or of such media"
    ),
    "digits": SourceDescription("digits", "digits"),
    "energon.source": SourceDescription(None, "an Energon folder or metadataset"),
    "latents": SourceDescription(None, "a folder of cached latents"),
    MOCK: SourceDescription(MOCK, "mock: random latents"),
    "python_data": SourceDescription(PYTHON, "python: what a program hands to opendit.train"),
    "blend": SourceDescription(None, "a YAML file of several sources"),
    "shards.source": SourceDescription(None, "a folder of indexed tars"),
    "torchvision_sets": SourceDescription(None, "a torchvision data set's folder"),
}


def named_sources() -> dict[str, str]:
    """Return name -> module for the sources that have a name."""
    return {source.name: module for module, source in SOURCES.items() if source.name is not None}


def is_address(data_path: str) -> bool:
    """Return True if ``--data_path`` is an address (http://, s3://, ...) rather than a path or a name."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", data_path) is not None


def check_address(address: str, flag: str = "--data_path") -> None:
    """Raise ValueError, naming the flag, if an address lacks a server, a bucket or a file."""
    kind, _, rest = address.partition("://")
    kind, shown = kind.lower(), f"{flag} {printable(address)[:200]}"
    if not address.isprintable():
        raise ValueError(f"{shown}: an address has no line breaks and the like; write it without")
    if kind in ("http", "https"):
        try:
            parts = urlsplit(address)
            host, _ = parts.hostname, parts.port  # these properties raise an error if the address is invalid
        except ValueError as error:
            raise ValueError(f"{shown}: is no address ({error}); give {kind}://HOST/FOLDER") from error
        if not host or not host.strip("."):
            raise ValueError(f"{shown}: names no server; give {kind}://HOST/FOLDER or {kind}://HOST/train.tar")
    elif not rest.strip("/ ") or kind not in _WITHOUT_BUCKET and not rest.partition("/")[0].strip():
        raise ValueError(f"{shown}: names no bucket; give {kind}://BUCKET/FOLDER or {kind}://BUCKET/train.tar")


def inline_sources(data_path: str) -> list[tuple[str, str]] | None:
    """Return (path, weight) of every source in ``A:0.7,B:0.3``; None for any other form, or for an existing file."""
    found = [re.fullmatch(r"\s*(.+):([-+.0-9eE]+)\s*", part) for part in data_path.split(",")]
    sources = [one for one in found if one is not None]
    if len(found) < 2 or len(sources) < len(found) or os.path.exists(data_path):
        return None
    return [(one[1], one[2]) for one in sources]


def check_inline(data_path: str, flag: str = "--data_path") -> None:
    """Check a blend that is written as ``A:0.7,B:0.3``.

    A file's name and a text without weights are not blends. They are accepted unchecked.

    Raises:
        ValueError: a source has no weight, or a weight that is not a number above 0; a source occurs twice; a source is
            random latents or another blend. The message names the flag.
    """
    parts = [part.strip() for part in data_path.split(",")]
    found = [re.fullmatch(r"(.+):([^/:]*)", part) for part in parts]
    if len(parts) < 2 or os.path.exists(data_path) or not any(one and _is_number(one[2]) for one in found):
        return
    example = "write SOURCE:WEIGHT,SOURCE:WEIGHT, as pictures:0.7,more.csv:0.3"
    paths = []
    for part, one in zip(parts, found, strict=True):
        if one is None:
            raise ValueError(f"{flag} {data_path}: {part or 'a source without a name'} has no weight; {example}")
        path, weight = one[1], one[2]
        if not _is_number(weight) or not 0 < float(weight) < 1e15:
            raise ValueError(
                f"{flag} {data_path}: the weight of {path} must be a number above 0, not {weight or 'nothing'}; leave "
                "the source out to train without it"
            )
        if path == "mock":
            raise ValueError(f"{flag} {data_path}: mock has random latents, and can't be blended; leave it out")
        if Path(path).suffix.lower() in (".yaml", ".yml"):
            raise ValueError(f"{flag} {data_path}: {path} is a blend of its own; list its sources here")
        paths.append(path)
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ValueError(f"{flag} {data_path}: names the source {twice} twice; give it once, with a larger weight")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def data_path_help() -> str:
    """Return a list of all kinds of data for ``--data_path``, such as "a CSV, a folder of pictures, or digits"."""
    *others, last = [source.takes for source in sorted(SOURCES.values(), key=lambda source: source.name is not None)]
    return f"{', '.join(others)}, or {last}"
