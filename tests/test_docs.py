"""The documentation: the site builds without a warning, links of the README lead somewhere, and every printed command
has flags that its program takes."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import preprocess
from opendit.cli.command_line import parse
from opendit.cli.evaluate_flags import EvaluateConfig
from opendit.cli.sample_flags import SampleConfig
from opendit.cli.train_flags import TrainConfig

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
    """Of a page's headings, as GitHub makes them."""
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


def commands(text: str) -> list[list[str]]:
    """The commands of a page's blocks for a shell, each by its words, without comments; those with variables or dots in
    the place of words are left out."""
    found = []
    for block in re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, flags=re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r" && | \| |; ", line):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:
                    continue
                if words and not any("$" in word or word == "..." for word in words):
                    found.append(words)
    return found


def program(words: list[str]) -> tuple[str, list[str]] | None:
    """(name, arguments) of one of ours; None of another."""
    names = ("train.py", "sample.py", "preprocess.py")
    scripts = {"train_img.sh": [], "train_video.sh": ["--use_video"]}  # what they add of what matters here
    for place, word in enumerate(words):
        if word in names:
            return word, words[place + 1 :]
        if word in scripts and len(words) > place + 1:
            return "train.py", [*scripts[word], *words[place + 1 :]]
        if word == "opendit" or (word.startswith("opendit.") and words[place - 1] == "-m"):
            name = words[place + 1] if word == "opendit" and len(words) > place + 1 else word.partition(".")[2]
            rest = words[place + (2 if word == "opendit" else 1) :]
            return {"evaluation": "evaluate"}.get(name, name), rest
    return None


CONFIGS = {"train.py": TrainConfig, "sample.py": SampleConfig, "evaluate": EvaluateConfig}
CONFIGS |= {"train": TrainConfig, "sample": SampleConfig}
PARSERS = {"export": "opendit.export.__main__", "links": "opendit.cli.links", "models": "opendit.models.__main__"}
PARSERS |= {"cli.links": "opendit.cli.links"}


def check(name: str, words: list[str]) -> bool:
    """Whether a command was looked at; raises SystemExit if its flags are none."""
    if any(word in ("--help", "-h", "list") or word.startswith("--help") for word in words):
        return False
    if name == "evaluate" and words[:1] == ["plot"]:
        importlib.import_module("opendit.evaluation.__main__").build_plot_parser().parse_args(words[1:])
    elif name in CONFIGS:
        if CONFIGS[name] is TrainConfig and "--dry_run" not in words and "--load" not in words:
            words = [*words, "--dry_run", "8"]  # with which it is checked across flags, and files need not be there
            parse(TrainConfig, words).settled(8, has_gpu=True)
        parse(CONFIGS[name], words)
    elif name in ("preprocess.py", "preprocess"):
        preprocess.build_parser("").parse_args(words)
    elif name in PARSERS:
        importlib.import_module(PARSERS[name]).build_parser().parse_args(words)
    else:
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_has_flags_that_its_program_takes(page, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in commands(page.read_text()):
        if (found := program(words)) is not None:
            try:
                check(*found)
            except SystemExit:
                pytest.fail(f"{shlex.join(words)}: {capsys.readouterr().err.strip()}")
            except ValueError as error:
                pytest.fail(f"{shlex.join(words)}: {error}")


def test_commands_are_found():
    """(So that the test above can't pass for finding none.)"""
    found = [program(words) for words in commands((ROOT / "README.md").read_text())]
    looked_at = [of[0] for of in found if of is not None and check(*of)]
    assert {"train.py", "sample.py", "preprocess.py", "evaluate"} <= set(looked_at) and len(looked_at) >= 8
    with pytest.raises(SystemExit):
        check("train.py", ["--no_such_flag"])
