"""Curves as pictures, and programs' output."""

import re

import pytest

from opendit.sampling.page.views import HEIGHT, LEFT, TOP, WIDTH, log, plot


def test_a_curve_lies_where_its_values_are():
    shown = plot("loss", [(0, 1.0, "a"), (50, 3.0, "a"), (100, 5.0, "a"), (50, 2.0, "b")], {"a": "#111", "b": "#222"})
    lines = re.findall(r'<polyline points="([^"]*)" stroke="([^"]*)"><title>(.)</title>', shown)
    half, middle = LEFT + WIDTH / 2, TOP + HEIGHT / 2
    assert lines == [
        (f"{LEFT:.1f},{TOP + HEIGHT:.1f} {half:.1f},{middle:.1f} {LEFT + WIDTH:.1f},{TOP:.1f}", "#111", "a"),
        (f"{half:.1f},{TOP + 0.75 * HEIGHT:.1f}", "#222", "b"),
    ]
    assert re.findall(r">([\d.]+)</text>", shown) == ["1", "2", "3", "4", "5", "0", "20", "40", "60", "80", "100"]
    assert "no values yet" in plot("loss", [], {"a": "#111"})


def test_a_run_without_values_and_a_hostile_name():
    shown = plot("<b>", [(1, 1.0, "<i>")], {"<i>": "#111", "empty": "#222"})
    assert "<i>" not in shown and "<b>" not in shown and "&lt;i&gt;" in shown and 'points=""' in shown


@pytest.mark.parametrize(
    "values",
    [(0.1, 0.1), (0.0, 0.0), (1e-308, 1e308), (-1e308, 1e308), (0.0, 5e-324), (1.0, 1.0 + 1e-12), (-5.0, -5.0), (0.0,)],
)
def test_any_values_have_an_axis(values):
    shown = plot("x", [(step, value, "a") for step, value in enumerate(values)], {"a": "#111"})
    assert shown.count("<text") >= 2 and "inf" not in shown


def test_a_log_shows_its_end_as_text():
    text = "".join(f"line {i}\n" for i in range(100)) + "10 %\r20 %\r<script>\n\ud800"
    shown = log(text, 5)
    assert "line 96" not in shown and "line 97" in shown and "10 %" not in shown
    assert "&lt;script&gt;\n?" in shown and log("") == log("\n\n") == ""
