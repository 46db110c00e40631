"""docs/architecture.md names only files, classes and methods that exist, and lists the packages in the order of
test_imports."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from opendit.diffusion.objectives.base import Objective
from opendit.diffusion.samplers import Sampler, Trajectory
from tests.test_imports import PROGRAMS, ROOMS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
OF_A_RUN = {"config.json"}  # files that a run writes
FILE = re.compile(r"[\w./-]+\.(?:py|sh|md|csv|json|toml|txt)|(?:opendit|tests|benchmarks|docs|scripts)(?:/[\w.-]+)*/?")


def quoted(page: str) -> list[str]:
    """Return the texts between backticks outside of code blocks."""
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S))


def files(page: str) -> set[str]:
    return {text for text in quoted(page) if FILE.fullmatch(text)} - OF_A_RUN


def missing(page: str) -> set[str]:
    """Return the files that a page names but that do not exist. For NAME.py the folder is checked."""
    return {name for name in files(page) if not (ROOT / re.sub(r"NAME\.py$", "", name)).exists()}


def classes(page: str) -> set[str]:
    """Return names in CamelCase, alone or with a method call."""
    return {found[1] for text in quoted(page) if (found := re.fullmatch(r"([A-Z][a-z]+\w*)(?:\.\w+\(.*\))?", text))}


def test_named_files_exist():
    assert missing(PAGE) == set() and len(files(PAGE)) > 60


def test_named_classes_exist():
    known = {
        node.name
        for path in [*(ROOT / "opendit").rglob("*.py"), *ROOT.glob("*.py")]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert classes(PAGE) - known == set() and len(classes(PAGE)) > 20


def test_packages_are_the_floors():
    table = PAGE.split("## The packages")[1].split("\n## ")[0]
    assert re.findall(r"^\| `opendit/(\w+)` \|", table, flags=re.M) == ROOMS
    assert all(f"`opendit/{name}`" in table for name in PROGRAMS)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("`opendit/models/dit.py`, `tests/`, `docs/log/README.md`", set()),
        ("`opendit/models/unet.py` and `bloks.py`", {"opendit/models/unet.py", "bloks.py"}),
        ("`opendit/modles`", {"opendit/modles"}),
        ("`opendit/models/NAME.py` and `opendit/modles/NAME.py`", {"opendit/modles/NAME.py"}),
        ("`DiT-XL/2`, `config.json`, `opendit.fused`, `q/k`", set()),
        ("```bash\npython nothing.py\n```\n`train.py`", set()),
    ],
)
def test_a_missing_file_is_seen(page, expected):
    assert missing(page) == expected


def test_the_methods_of_objectives_and_samplers_are_as_the_page_has_them():
    block = re.search(r"```python\n(class Objective:.*?)```", PAGE, re.DOTALL)
    assert block is not None
    shown = {node.name: node.body for node in ast.parse(block[1]).body if isinstance(node, ast.ClassDef)}
    assert set(shown) == {"Objective", "Trajectory", "Sampler"}
    for owner in (Objective, Trajectory, Sampler):
        methods = {one.name: [arg.arg for arg in one.args.args] for one in shown[owner.__name__]}
        for name, arguments in methods.items():
            assert list(inspect.signature(getattr(owner, name)).parameters) == arguments, f"{owner.__name__}.{name}"
        assert owner.__abstractmethods__ <= set(methods), owner
