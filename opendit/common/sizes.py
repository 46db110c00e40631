"""Sizes in bytes, as people write them."""

import re


def read_size(text: str, name: str) -> int:
    """Bytes of ``1GB``, ``500MB``, ``64MiB`` or a bare number; ``name`` is what messages call it. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kmgt]?)(i?)b?", text.lower())
    size = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ") if found else 0
    if found is None or not 1 <= size <= 1e15 or (found[3] and not found[2]):
        raise ValueError(f"{name} {text}: no size; give one such as 200MB or 1GB")
    return int(size)
