"""Comparisons of numbers for tests."""

import math
from collections.abc import Iterable


def largest(values: Iterable[float]) -> float:
    """Their maximum, and NaN if one is: Python's max passes over a NaN that is not the first."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def off_by(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """The largest relative difference."""
    return largest(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
