"""Check the words of all pages and sources, and the entries of docs/log.

    python scripts/check_pages.py

The program prints a line for each fault, and exits with 1 if there is a fault. It is a lint step of run_tests.sh.

An entry of the log has a question, a setting, a result and a verdict in this order, and is listed in the index. The
setting names the commit. For each bench that the setting names, results.csv has rows at one of the setting's commits.
"""

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("opendit", "benchmarks", "tests", "docs", "scripts")
WRITTEN_THEN = ("docs/log/", "CHANGELOG.md")  # historical texts, which are not changed afterwards
# Patterns of words that only the first authors understood -> words to write instead (docs/glossary.md).
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
PARTS = ("**Question.** ", "**Setting.** ", "**Result.**", "**Verdict.** ")


def private_words(name: str, text: str) -> Iterator[str]:
    """Yield a line for each word of ``PRIVATE`` in a file."""
    for pattern, instead in PRIVATE.items():
        for found in re.finditer(pattern, text, re.IGNORECASE):
            yield f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}: write {instead!r}"


def log_entry(name: str, text: str, rows: set[tuple[str, str]]) -> Iterator[str]:
    """Yield the faults of an entry of the log. rows: pairs (commit, bench) of results.csv."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md", name):
        yield f"docs/log/{name}: name it YYYY-MM-DD-words.md"
    places = [text.find(part) for part in PARTS]
    if -1 in places or places != sorted(places):
        yield f"docs/log/{name}: needs its four parts in order: {', '.join(part.strip(' *.') for part in PARTS)}"
        return
    setting = text[places[1] : places[2]]
    benches = re.findall(r"\bbench(?:es)? ((?:`[a-z._ ]+`(?:, | and )?)+)", setting)
    commits = re.findall(r"`([0-9a-f]{7})`", setting)
    if not commits:
        yield f"docs/log/{name}: the setting names no commit"
    for bench in re.findall(r"`([^`]+)`", " ".join(benches)):
        if not any((commit, bench) in rows for commit in commits):
            yield f"docs/log/{name}: results.csv has no row of {bench} at {commits}"


def faults() -> Iterator[str]:
    """Yield all faults of the repository."""
    paths = [path for folder in FOLDERS for end in ("py", "md", "sh") for path in (ROOT / folder).rglob(f"*.{end}")]
    paths += [*ROOT.glob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("*.sh")]
    for path in sorted(set(paths) - {Path(__file__).resolve()}):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(WRITTEN_THEN):
            yield from private_words(name, path.read_text(encoding="utf-8"))
    with open(ROOT / "benchmarks/results.csv", newline="") as file:
        rows = {(row["commit"], row["bench"]) for row in csv.DictReader(file)}
    log = ROOT / "docs/log"
    entries = sorted(path.name for path in log.glob("*.md") if path.name != "README.md")
    for name in entries:
        yield from log_entry(name, (log / name).read_text(), rows)
    if sorted(re.findall(r"\]\(([^)/#]+\.md)\)", (log / "README.md").read_text())) != entries:
        yield "docs/log/README.md: list every entry once"


if __name__ == "__main__":
    found = list(faults())
    print(*found, sep="\n", end="\n" * bool(found))
    sys.exit(bool(found))
