"""What ``--data_path`` can be: the files of opendit/data/sources. Needs no torch, so flags are checked by it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from opendit.common.literals import literals_of, module_files

FALLBACK = "pictures"  # what a folder is that no other source knows
ADDRESSES = "shards"  # what addresses are


@dataclass(frozen=True)
class SourceDescription:
    """What a source's file says of it, in constants that are literals and are read without running it.

    name: NAME, what ``--data_path`` says to ask for it; None of one that is recognised by the path. takes: TAKES, what
    is to be given, in lists of all that can be.
    """

    name: str | None
    takes: str

    @classmethod
    def read(cls, path: Path) -> "SourceDescription":
        found = literals_of(path, "NAME", "TAKES")
        return cls(found["NAME"], found["TAKES"])


_FILES = module_files(Path(__file__).parent / "sources", "base")
SOURCES = {name: SourceDescription.read(path) for name, path in _FILES.items()}


def named_sources() -> dict[str, str]:
    """Of the sources that have a name of their own: that name -> their file's."""
    return {source.name: file for file, source in SOURCES.items() if source.name is not None}


def is_address(data_path: str) -> bool:
    """Whether ``--data_path`` is an address (http://, s3://, ...) rather than a path or a name."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", data_path) is not None


def inline_sources(data_path: str) -> list[tuple[str, str]] | None:
    """(path, weight) of every source of ``A:0.7,B:0.3``; None for what is not written so, or is there as a file."""
    found = [re.fullmatch(r"\s*(.+):([-+.0-9eE]+)\s*", part) for part in data_path.split(",")]
    if len(found) < 2 or not all(found) or os.path.exists(data_path):
        return None
    return [(one[1], one[2]) for one in found]


def taken() -> str:
    """All that can be given, as "a CSV, a folder of pictures, or digits"."""
    *others, last = [source.takes for source in sorted(SOURCES.values(), key=lambda source: source.name is not None)]
    return f"{', '.join(others)}, or {last}"
