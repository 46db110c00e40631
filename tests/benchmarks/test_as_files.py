"""Benchmarks find the project's packages when run as ``python benchmarks/NAME.py``."""

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_finds_the_project_before_it_imports_of_it(name):
    """Starting every benchmark would take minutes, so only the first statements are checked."""
    found = False
    for statement in ast.parse((BENCHMARKS / name).read_text()).body:
        found |= ast.unparse(statement) == "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"
        names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
        own = [each for each in names if each.partition(".")[0] in ("benchmarks", "opendit", "tests")]
        assert found or not own, f"{own[0]} is imported first"
