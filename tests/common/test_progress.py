"""Progress is a bar on a terminal and an occasional line elsewhere."""

import io
import sys

import pytest

from opendit.common import progress
from opendit.common.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_file_gets_a_line_every_half_minute(clock, capsys):
    with Progress(10_000, "steps", initial=4000, title="training") as bar:
        for step in range(6000):
            clock[0] += 0.02
            bar.figures({"loss": f"{step}"})
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and "\r" not in "".join(lines)  # 120 s: three lines on the way, and the last one
    assert lines[0].startswith("training: 5,501/10,000 steps (55.0%), 50.0") and lines[0].endswith("left, loss 1500")
    assert "01:29 left" in lines[0] and lines[-1].startswith("training: 10,000/10,000 steps (100.0%), 50.0")


def test_a_terminal_gets_a_bar_and_other_ranks_nothing(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(3, "samples", disable=True) as bar:
        bar.update(3)
    assert sys.stderr.getvalue() == ""
    with Progress(3, "samples") as bar:
        bar.update(2)
        bar.write("said")
    assert "\r" in sys.stderr.getvalue() and "2/3" in sys.stderr.getvalue()
    assert capsys.readouterr().out == "said\n"


def test_what_does_nothing_says_nothing(capsys):
    with Progress(0, "files") as bar:
        bar.update(0)
    bar.close()
    assert capsys.readouterr().err == ""
