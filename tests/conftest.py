"""What tests of several folders share."""

import gc
import os

import pytest
from hypothesis import settings

# A busy machine takes longer than hypothesis' 200 ms for an example now and then; that is no failure of a test's.
settings.register_profile("opendit", deadline=None)
settings.load_profile("opendit")


def pytest_collection_finish() -> None:
    """What has been imported stays to the end: collections of garbage in tests need not walk through it, which took a
    tenth of their time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's bindings report leaks at the end


@pytest.fixture
def no_ranks():
    """Runs of one process in this one leave no rank variables behind."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
