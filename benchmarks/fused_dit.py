"""The plain DiT with the five changed lines in docs/api.md. The diff is read from the page and applied to
plain_dit.py."""

import re
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent


def changes() -> list[tuple[str, str]]:
    """Return (old lines, new lines) for each change in the page's diff. New lines without old ones go to the top."""
    page = (HERE.parent / "docs" / "api.md").read_text(encoding="utf-8")
    lines = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)[0].splitlines(True)
    groups = re.findall(r"((?:-[^\n]*\n)*)((?:\+[^\n]*\n)+)", "".join(lines))
    return [(without_marks(old), without_marks(new)) for old, new in groups]


def without_marks(part: str) -> str:
    return "".join(line[1:] for line in part.splitlines(True))


def fused_dit(stream: str = "bfloat16") -> ModuleType:
    """Return plain_dit with the changes, as a separate module. stream: dtype of the activations between blocks.

    Raises ValueError if the page no longer fits the file."""
    source = (HERE / "plain_dit.py").read_text(encoding="utf-8")
    for old, new in changes():
        if old and source.count(old) != 1:
            raise ValueError(f"docs/api.md changes a line that plain_dit.py has {source.count(old)} times: {old}")
        source = source.replace(old, new) if old else new + source
    module = ModuleType("fused_dit")
    exec(compile(source.replace("torch.bfloat16", f"torch.{stream}"), "fused_dit", "exec"), module.__dict__)
    return module
