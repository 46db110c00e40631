"""What tests of several folders share."""

import os

import pytest
from hypothesis import settings

# A busy machine takes longer than hypothesis' 200 ms for an example now and then; that is no failure of a test's.
settings.register_profile("opendit", deadline=None)
settings.load_profile("opendit")


@pytest.fixture
def no_ranks():
    """Runs of one process in this one leave no rank variables behind."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
