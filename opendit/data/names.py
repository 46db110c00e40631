"""What ``--data_path`` can be: the files of opendit/data/sources. Needs no torch, so flags are checked by it."""

from dataclasses import dataclass
from pathlib import Path

from opendit.common.literals import literals_of, module_files

FALLBACK = "pictures"  # what a folder is that no other source knows


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


def taken() -> str:
    """All that can be given, as "a CSV, a folder of pictures, or digits"."""
    *others, last = [source.takes for source in sorted(SOURCES.values(), key=lambda source: source.name is not None)]
    return f"{', '.join(others)}, or {last}"
