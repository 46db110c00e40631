"""YAML that the user wrote."""

from pathlib import Path
from typing import Any

import yaml

from opendit.common.rules import read_bounded

MOST_BYTES = 1 << 20


def read_yaml(path: Path, shown: str, most: int = MOST_BYTES) -> Any:
    """The content of a YAML file; nothing in it is run. Raises ValueError that begins with ``shown``, and OSError."""
    try:
        return yaml.load(read_bounded(path, most), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{shown}: not YAML that can be read ({reason}); correct it") from error
