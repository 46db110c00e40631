"""Fixtures of the tests of training."""

from tests.training.programs import start

__all__ = ["start"]
