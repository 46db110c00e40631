"""Fixtures for tests of models."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same weights and inputs in every run."""
    torch.manual_seed(0)
