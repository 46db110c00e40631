"""docs/log: an entry a file, each with its question, setting, result and verdict, all of them in the index, and every
commit that is cited for rows of results.csv has such rows."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "docs/log"
ENTRIES = sorted(path for path in LOG.glob("*.md") if path.name != "README.md")
PARTS = ("**Question.** ", "**Setting.** ", "**Result.**", "**Verdict.** ")


def rows() -> set[tuple[str, str]]:
    """(commit, bench) of every row of results.csv."""
    with open(ROOT / "benchmarks/results.csv", newline="") as file:
        return {(row["commit"], row["bench"]) for row in csv.DictReader(file)}


def cited(text: str) -> tuple[set[str], set[str]]:
    """Commits and benches that an entry's setting names, the latter after the word bench or benches."""
    setting = text.split("**Setting.**")[1].split("**Result.**")[0]
    benches = re.findall(r"\bbench(?:es)? ((?:`[a-z._ ]+`(?:, | and )?)+)", setting)
    return set(re.findall(r"`([0-9a-f]{7})`", setting)), set(re.findall(r"`([^`]+)`", " ".join(benches)))


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: path.stem)
def test_entry(path):
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md", path.name)
    text = path.read_text()
    places = [text.find(part) for part in PARTS]
    assert places == sorted(places) and -1 not in places, "each entry has its four parts, in their order"
    commits, benches = cited(text)
    assert commits, "the setting names the commit"
    for bench in benches:
        assert any((commit, bench) in rows() for commit in commits), f"results.csv has no row of {bench} at {commits}"


def test_index_has_every_entry():
    linked = re.findall(r"\]\(([^)/#]+\.md)\)", (LOG / "README.md").read_text())
    assert sorted(linked) == [path.name for path in ENTRIES] and len(ENTRIES) > 30
