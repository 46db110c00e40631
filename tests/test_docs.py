"""The documentation site builds without a warning, links lead to existing files and anchors, and printed commands have
valid flags."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs_commands import check, commands, program

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
OUTSIDE = re.compile(r"https?://|mailto:")


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the documentation's tools are not installed (pip install -e '.[docs]')")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    home, reference = ((tmp_path / page / "index.html").read_text() for page in ("", "reference"))
    assert "OpenDiT: the documentation" in home and "opendit.load" in reference
    assert "../assets/page.png" in (tmp_path / "page" / "index.html").read_text()
    assert (tmp_path / "assets" / "page.png").stat().st_size > 10_000


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, flags=re.M)
    for link in links:
        if OUTSIDE.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_has_flags_that_its_program_takes(page, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for _, words in commands(page.read_text()):
        if (found := program(words)) is not None:
            try:
                check(*found)
            except SystemExit:
                pytest.fail(f"{shlex.join(words)}: {capsys.readouterr().err.strip()}")
            except ValueError as error:
                pytest.fail(f"{shlex.join(words)}: {error}")


def test_commands_are_found():
    """The test above would also pass if no commands were found."""
    found = [program(words) for _, words in commands((ROOT / "README.md").read_text())]
    looked_at = [of[0] for of in found if of is not None and check(*of)]
    assert {"train.py", "sample.py", "preprocess.py", "evaluate"} <= set(looked_at) and len(looked_at) >= 8
    with pytest.raises(SystemExit):
        check("train.py", ["--no_such_flag"])
