"""The stages of a process's start add up to its age; parallel work is listed separately."""

import subprocess
import sys
import threading

import psutil
import pytest

from opendit.common import stages as module
from opendit.common.stages import Background, Stages, process_seconds


class Clock:
    """Replaces ``time``; only the tests advance it."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "process_seconds", lambda: 7.0)
    return clock


def test_stages_add_up_to_the_age_of_the_process(clock):
    stages, waited = Stages("start"), []
    stages.wait = lambda: waited.append(setattr(clock, "now", clock.now + 0.5))  # the accelerator takes half a second
    clock.now += 1
    with stages("outer"):
        clock.now += 2
        with stages("inner"):
            clock.now += 4
        clock.now += 8
        with pytest.raises(ValueError), stages("inner"):
            raise ValueError
    stages.mark("a picture")
    clock.now += 16
    stages.mark("a picture")  # only the first time counts
    seconds = stages.seconds()
    assert seconds == {"start": 7 + 1 + 16, "outer": 2 + 8 + 0.5, "inner": 4 + 0.5 + 0.5} and len(waited) == 3
    assert sum(seconds.values()) == clock.now - 100 + 7 and list(seconds) == ["start", "outer", "inner"]
    assert stages.seconds() == seconds and stages.marks == {"a picture": 100 - 93 + 1 + 2 + 4 + 8 + 1.5}


def test_the_table_and_the_file(clock):
    stages = Stages("start")
    with stages("a stage"):
        clock.now += 21
    stages.beside("files", 1.5)
    stages.beside("files", 1.0)
    assert stages.table().splitlines()[1:] == [
        "      7.00   25.0%  start",
        "     21.00   75.0%  a stage",
        "     28.00  100.0%  from the start of the process",
        "",
        "      2.50          beside them: files",
    ]
    assert stages.to_dict() == {"stages": {"start": 7.0, "a stage": 21.0}, "beside": {"files": 2.5}, "marks": {}}


def test_the_age_of_a_process_is_the_systems(monkeypatch):
    code = "import time; time.sleep(0.3); from opendit.common.stages import process_seconds as s; print(s())"
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.3 < age < 60
    here = psutil.Process().create_time()
    assert abs(process_seconds() - (module.time.time() - here)) < 1.5  # psutil knows it to the second
    monkeypatch.setattr("builtins.open", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError))
    assert 0 <= process_seconds() < module.time.time() - here + 1.5


def test_work_in_the_background():
    go = threading.Event()
    work = Background(lambda: go.wait(30) and "done")
    assert work.seconds == 0.0
    go.set()
    assert work.result() == work.result() == "done" and work.seconds > 0

    def fails() -> None:
        raise FileNotFoundError("nothing there")

    with pytest.raises(FileNotFoundError, match="nothing there"):
        Background(fails).result()
