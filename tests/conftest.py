"""Fixtures and hooks for tests of several folders."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests import markers
from tests.kernels import interpreted

gc.disable()  # until all tests are collected: it would walk through all that they import, time and again

# A busy machine takes longer than hypothesis' 200 ms for an example now and then; that is no failure of a test's.
settings.register_profile("opendit", deadline=None)
settings.load_profile("opendit")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Put a test into its groups before ``-m`` chooses among them; see tests/markers.py."""
    if not isinstance(item, pytest.Function):
        return
    in_interpreter = item.path.name in interpreted.FILES or item.path.name == interpreted.RUNNER
    groups = markers.groups_of(item.path, item.function, item.fixturenames, in_interpreter, FAST_FILES)
    if markers.is_thorough(item.path, item.name, THOROUGH_TESTS):
        groups = (groups - {"fast"}) | {"thorough"}
    for name in groups:
        item.add_marker(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have long tests, so that no process is left alone with one at the end."""
    long = {item.path for item in items if any(item.get_closest_marker(name) for name in ("ranks", "interpreter"))}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Freeze all imported objects, so that garbage collections in tests need not walk through them."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's bindings report leaks at the end


FAST_FILES, THOROUGH_TESTS = markers.fast_files(), markers.thorough_tests()


@pytest.fixture
def no_ranks():
    """Restore the environment, so that runs in this process leave no rank variables behind."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def refusal(no_ranks, monkeypatch, capsys):
    """The error, one line, with which train.py ends of arguments that it refuses before it builds a model."""
    import train  # which imports colossalai, as few tests do

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
    """A folder with a file and a folder, neither of which may change; the test fails if they do."""
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
