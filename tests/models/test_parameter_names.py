"""Test patterns of parameter names."""

import pytest

from opendit.models.initialization import fits, value_of


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.b.c", False),
        ("a.*.c", "a.c", False),
        ("a.**.c", "a.b.b.c", True),
        ("a.**.c", "a.c", False),
        ("**.bias", "a.b.bias", True),
        ("**.bias", "a.b.biased", False),
        ("a.b", "axb", False),
    ],
)
def test_fits(pattern, name, expected):
    assert fits(pattern, name) is expected


def test_exactly_one_pattern_has_to_fit():
    table = {"*.weight": 1, "a.*": 2}
    assert value_of("b.weight", table, "the test") == 1
    for name in ("a.weight", "b.bias"):
        with pytest.raises(ValueError, match=f"parameter {name}: one pattern of the test has to fit it"):
            value_of(name, table, "the test")
