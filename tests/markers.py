"""Find the groups of a test from its folder, the functions and fixtures that it uses, and its file's duration.

gpu          lies in tests/gpu
browser      looks at the page with Chromium
ranks        starts several processes that meet as ranks
interpreter  runs kernels in Triton's interpreter
fast         none of these, and in a file of fast.txt, which tests/choose_fast.py writes
thorough     listed in thorough.txt: left to the weekly run

pyproject.toml declares them; ``pytest -m fast``, ``pytest -m "not ranks"``.
"""

import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).parent
FAST, THOROUGH = HERE / "fast.txt", HERE / "thorough.txt"
SLOW = ("gpu", "browser", "ranks", "interpreter")
FIXTURES = {"chromium": "browser", "start": "ranks"}  # fixture, used directly or indirectly -> group
STARTERS = {("tests.ranks", "run_ranks"), ("tests.ranks", "context")}
LAUNCHER = "torch.distributed.run"  # torchrun's module, in a command line


def fast_files() -> frozenset[str]:
    """Return the files of the group ``fast``, as paths below tests/."""
    return frozenset(_lines(FAST))


def thorough_tests() -> dict[str, re.Pattern[str]]:
    """Return line -> regular expression of matching test names, for the lines of thorough.txt."""
    return {line: re.compile(".*".join(map(re.escape, line.split("*")))) for line in _lines(THOROUGH)}


def is_thorough(path: Path, name: str, listed: dict[str, re.Pattern[str]]) -> bool:
    """Return True if :func:`thorough_tests` has the test with this name, parameters included, in this file."""
    file = f"{path.relative_to(HERE).as_posix()}::"
    return any(pattern.fullmatch(file + name) for line, pattern in listed.items() if line.startswith(file))


def _lines(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


def groups_of(path: Path, function: Any, fixtures: list[str], interpreted: bool, fast: frozenset[str]) -> set[str]:
    """Return the names of a test's markers.

    Args:
        path: the test's file.
        function: the test's function.
        fixtures: names of all fixtures that the test uses.
        interpreted: True if the file runs in Triton's interpreter, or starts such files.
        fast: the result of :func:`fast_files`.
    """
    inside = path.relative_to(HERE)
    found = {FIXTURES[name] for name in fixtures if name in FIXTURES}
    if inside.parts[0] == "gpu":
        found.add("gpu")
    if interpreted:
        found.add("interpreter")
    module = inspect.getmodule(function)
    used = [function, *(getattr(module, name) for name in fixtures if hasattr(module, name))]
    if any(_starts_ranks(each) for each in used):
        found.add("ranks")
    if inside.as_posix() in fast and not found:
        found.add("fast")
    return found


@functools.cache
def _starts_ranks(function: Any) -> bool:
    return starts_ranks(inspect.unwrap(function), set())


def starts_ranks(function: Any, seen: set[int]) -> bool:
    """Return True if a function of the tests starts ranks, directly or through the functions that it uses."""
    if id(function) in seen:
        return False
    seen.add(id(function))
    if (getattr(function, "__module__", None), getattr(function, "__qualname__", None)) in STARTERS:
        return True
    if inspect.isclass(function):
        return any(starts_ranks(each, seen) for each in vars(function).values() if inspect.isfunction(each))
    if not inspect.isfunction(function):
        return False
    for code in _codes(function.__code__):
        if LAUNCHER in code.co_consts or any(LAUNCHER in each for each in code.co_consts if isinstance(each, tuple)):
            return True
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, (list, tuple)) and LAUNCHER in value:
                return True
            if (getattr(value, "__module__", None) or "").startswith("tests.") and starts_ranks(value, seen):
                return True
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code object of a function, and those of nested functions."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
