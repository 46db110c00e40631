"""Fixtures for the training tests."""

from tests.training.programs import start

__all__ = ["start"]
