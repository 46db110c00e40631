"""Tests get the markers of their groups, and the group fast has tests of every package."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import choose_fast, markers
from tests.markers import HERE, fast_files, groups_of, starts_ranks
from tests.ranks import run_ranks
from tests.test_imports import ROOMS

LAUNCH = [sys.executable, "-m", "torch.distributed.run"]


def through_a_helper():
    return [run_ranks(2, print) for _ in range(1)]


def in_an_inner_function():
    def inner():
        return through_a_helper()

    return inner


def by_torchrun():
    return subprocess.run([*LAUNCH, "train.py"])


def by_torchrun_in_place():
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "train.py"])


class Holder:
    def start(self):
        return through_a_helper()


def plain():
    return ROOMS, Path, markers.HERE


@pytest.mark.parametrize(
    ("function", "starts"),
    [(through_a_helper, True), (in_an_inner_function, True), (by_torchrun, True), (by_torchrun_in_place, True),
     (lambda: Holder().start(), True), (plain, False), (len, False)],
)  # fmt: skip
def test_what_starts_ranks_is_found(function, starts):
    assert starts_ranks(function, set()) == starts


@pytest.mark.parametrize(
    ("name", "function", "fixtures", "interpreted", "groups"),
    [
        ("config/test_help.py", plain, [], False, {"fast"}),
        ("cli/test_slow.py", plain, [], False, set()),
        ("config/test_help.py", through_a_helper, [], False, {"ranks"}),
        ("sampling/page/test_x.py", plain, ["visit", "chromium"], False, {"browser"}),
        ("gpu/test_x.py", through_a_helper, [], False, {"gpu", "ranks"}),
        ("kernels/test_fp8.py", plain, [], True, {"interpreter"}),
        ("training/test_x.py", plain, ["start"], False, {"ranks"}),
    ],
)
def test_groups(name, function, fixtures, interpreted, groups):
    assert groups_of(HERE / name, function, fixtures, interpreted, frozenset({"config/test_help.py"})) == groups


def test_every_room_has_fast_tests():
    files = fast_files()
    assert all((HERE / name).is_file() for name in files), "run tests/choose_fast.py again"
    assert {choose_fast.room_of(name) for name in files} >= set(ROOMS)


def test_files_are_chosen_by_room_and_then_by_time():
    seconds = {"a/1.py": 1.0, "a/2.py": 3.0, "a/3.py": 30.0, "b/1.py": 9.0, "c/1.py": 0.5, "c/2.py": 0.6}
    # One file of b, though it is too slow.
    assert choose_fast.choose(seconds, 9.0) == ["a/1.py", "b/1.py", "c/1.py", "c/2.py"]
    assert choose_fast.choose(seconds, 16.0) == ["a/1.py", "a/2.py", "b/1.py", "c/1.py", "c/2.py"]
    assert choose_fast.choose(seconds, 100.0) == sorted(seconds)


@pytest.mark.parametrize("line", markers.thorough_tests())
def test_thorough_tests_are_there(line):
    file, _, test = line.partition("::")
    name = test.partition("[")[0]
    assert name.startswith("*") or f"def {name.rstrip('*')}" in (HERE / file).read_text(encoding="utf-8"), line


def test_thorough_tests_are_found_by_their_names():
    listed = markers.thorough_tests()
    for name, thorough in (
        ("test_elastic.py::test_a_run_goes_on_under_any_plugin_and_world", True),
        ("test_ema.py::test_shards_are_the_parts_of_the_whole_average[4]", True),
        ("test_ema.py::test_shards_are_the_parts_of_the_whole_average[2]", False),
    ):
        file, _, test = name.partition("::")
        assert markers.is_thorough(HERE / "checkpoint" / file, test, listed) == thorough


def test_the_marks_are_declared(pytestconfig):
    declared = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert {"fast", "thorough", *markers.SLOW} <= declared
    assert pytestconfig.getoption("strict_markers", True) is not False
