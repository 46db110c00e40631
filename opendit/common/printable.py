"""Names and reasons as one line of text."""

from pathlib import Path


def printable(text: str | Path) -> str:
    """A name or a reason on one line that any UTF-8 output takes: control characters, and bytes that are not UTF-8,
    become ``\\xNN`` and the like."""
    text = str(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(c: str) -> str:
    if "\udc80" <= c <= "\udcff":  # as Python has a byte that is not UTF-8
        return f"\\x{ord(c) - 0xDC00:02x}"
    return c.encode("unicode_escape").decode()
