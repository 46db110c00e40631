"""Fixtures and hooks for tests of several folders."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests import markers
from tests.kernels import interpreted

gc.disable()  # until all tests are collected, because each collection would visit all imported objects

# On a busy machine, an example may take longer than hypothesis' deadline of 200 ms. This is not a failure of the test.
settings.register_profile("opendit", deadline=None)
settings.load_profile("opendit")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the markers of a test's groups before ``-m`` selects tests (see tests/markers.py)."""
    if not isinstance(item, pytest.Function):
        return
    in_interpreter = item.path.name in interpreted.FILES or item.path.name == interpreted.RUNNER
    groups = markers.groups_of(item.path, item.function, item.fixturenames, in_interpreter, FAST_FILES)
    if markers.is_thorough(item.path, item.name, THOROUGH_TESTS):
        groups = (groups - {"fast"}) | {"thorough"}
    for name in groups:
        item.add_marker(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with long tests first, so that no process runs a long test alone at the end."""
    long = {item.path for item in items if any(item.get_closest_marker(name) for name in ("ranks", "interpreter"))}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Freeze all imported objects, so that garbage collections in tests do not visit them."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise Triton's bindings report leaks at exit


FAST_FILES, THOROUGH_TESTS = markers.fast_files(), markers.thorough_tests()


@pytest.fixture
def no_ranks():
    """Restore the environment after the test, to remove the rank variables that a run sets in this process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def refusal(no_ranks, monkeypatch, capsys):
    """Return a function that runs train.py with invalid flags and returns the error line. No model may be built."""
    import train  # imports colossalai, which few tests need

    monkeypatch.setattr("opendit.training.build.build_model_and_engine", lambda *_: pytest.fail("a model was built"))

    def of(argv: list[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            train.main(argv)
        error = capsys.readouterr().err.splitlines()[-1]
        assert ended.value.code != 0 and error.startswith("error: ")
        return error

    return of


@pytest.fixture
def outside(tmp_path):
    """Return a folder with a file and a subfolder. The test fails if any of these change."""
    folder = tmp_path / "outside"
    (folder / "deep").mkdir(parents=True)
    (folder / "file").write_text("precious")
    (folder / "deep" / "file").write_text("precious, too")
    for path in (folder / "file", folder / "deep" / "file", folder / "deep", folder):
        os.utime(path, ns=(10**18, 10**18))
    before = _state_of(folder)
    yield folder
    assert _state_of(folder) == before


def _state_of(folder: Path) -> list:
    paths = sorted([folder, *folder.rglob("*")])
    return [(path, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths]
