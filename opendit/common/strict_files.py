"""JSON files that are compared with a rule before anything of them is used.

Which kinds there are stands where they are written: opendit.checkpoint.schema, opendit.data.latents_schema,
opendit.encoders.folder.
"""

import dataclasses
from pathlib import Path
from typing import Any

from opendit.common.rules import Invalid, Rule, parse_json, read_json, string, whole

COUNT = whole(0)
NAME = string(4096)
PLAIN_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
FILE = string(255, PLAIN_NAME, "the plain name of a file in the same folder")
SHA256 = string(64, "[0-9a-f]{64}", "a SHA-256 in 64 hexadecimal digits")


@dataclasses.dataclass(frozen=True)
class FileKind:
    """The rule that files of one kind must meet, and the most bytes that are read of one."""

    rule: Rule
    most_bytes: int


def checked(value: Any, kind: FileKind, source: Path | str) -> Any:
    """``value`` if it keeps the kind's rule; else ValueError with one line that names the source and the field."""
    try:
        kind.rule(value, "")
    except Invalid as error:
        raise ValueError(f"{source}: {error}") from error
    return value


def read_file(path: Path, kind: FileKind) -> Any:
    """The content of a JSON file.

    Raises ValueError with one line that names the file and the field that breaks the rule; OSError if it can't be
    opened."""
    return checked(read_json(path, kind.most_bytes), kind, path)


def parse_text(text: str, kind: FileKind, source: Path | str) -> Any:
    """The JSON that a safetensors file has as metadata. Raises ValueError as :func:`read_file`."""
    if len(text) > kind.most_bytes:
        raise ValueError(f"{source} has metadata of {len(text):,} characters; at most {kind.most_bytes:,} are read")
    return checked(parse_json(text, f"the metadata of {source}"), kind, source)
