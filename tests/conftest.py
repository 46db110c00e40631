"""What tests of several folders share."""

import os

import pytest


@pytest.fixture
def no_ranks():
    """Runs of one process in this one leave no rank variables behind."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
