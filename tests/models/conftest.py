"""What tests of models share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same weights and inputs in every run."""
    torch.manual_seed(0)
