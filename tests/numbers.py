"""Functions that compare numbers in tests."""

import math
from collections.abc import Iterable


def largest(values: Iterable[float]) -> float:
    """Return the maximum, or NaN if any value is NaN. Python's max ignores a NaN that is not the first value."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def off_by(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Return the largest relative difference."""
    return largest(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
