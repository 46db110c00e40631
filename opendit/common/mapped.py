"""safetensors files under any name."""

import os
from pathlib import Path

from safetensors import safe_open


def open_mapped(path: Path, framework: str = "pt") -> safe_open:
    """``safe_open`` of any path: the library itself refuses one whose name, or folder's name, is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return safe_open(
                f"/proc/self/fd/{file}", framework=framework
            )  # which maps it, and needs no name after that
        finally:
            os.close(file)
    return safe_open(path, framework=framework)
