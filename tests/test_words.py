"""Words that only the project's first authors understood stay out of names, comments, messages and pages; the
glossary, docs/glossary.md, has the terms that are used in their place."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A pattern -> what to write.
PRIVATE = {
    r"heads have seen": "attention output",
    r"leaves? (?:its|their) last residual": "deferred residual",
    r"turned round": "transposed",
    r"(?:its|their) end undone|made again": "recomputed",
    r"way out\b": "mitigation",
    r"(?<!for )\b(?:ranks?|graphs?|cards?) (?:is|are|goes|go|runs?) in step\b|[\"*]in step[\"*]": "synchronised",
    r"\bof a turn\b|\ba turn may\b|\bhas a turn\b": "interleaved timing trial",
    r"through each other's memory|through one another's memory": "through symmetric memory",
    r"\bside.?channel\b": "control group",
    r"what (?:it|the run|the step) has said": "message",
}
FOLDERS = ("opendit", "benchmarks", "tests", "docs", "scripts")
WRITTEN_THEN = ("docs/log/", "CHANGELOG.md")  # what was true and said at its time


def pages() -> list[Path]:
    found = [path for folder in FOLDERS for end in ("py", "md", "sh") for path in (ROOT / folder).rglob(f"*.{end}")]
    found += [*ROOT.glob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("*.sh")]
    left_out = lambda path: str(path.relative_to(ROOT)).startswith(WRITTEN_THEN) or path == Path(__file__)  # noqa: E731
    return [path for path in found if not left_out(path)]


@pytest.mark.parametrize("pattern", PRIVATE)
def test_private_words_are_gone(pattern):
    of_it = re.compile(pattern, re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in pages()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if of_it.search(line)
    ]
    assert not found, f"write {PRIVATE[pattern]!r} for it:\n" + "\n".join(found)


def test_the_check_reads_the_project():
    names = {str(path.relative_to(ROOT)) for path in pages()}
    assert {"train.py", "README.md", "opendit/models/dit.py", "docs/training.md", "tests/test_imports.py"} <= names
    assert len(names) > 500
