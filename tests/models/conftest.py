"""Fixtures for tests of models."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Seed torch before every test, so that weights and inputs are equal in every run."""
    torch.manual_seed(0)
