"""Runs started by the page: one per GPU, found again by another page, and never mistaken for others."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from opendit.checkpoint.run_folders import Locked
from opendit.sampling.page import training_queue
from opendit.sampling.page.catalog import Catalog
from opendit.sampling.page.training_queue import FOLDER, TrainingQueue

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="runs are started from the page on Linux only")
# Trains until a signal and then ends cleanly, like train.py.
FAKE = """
import json, os, pathlib, signal, sys
if "OPENDIT_RUN_FOLDER_FILE" not in os.environ:  # a plan, which takes long
    signal.pause()
file = pathlib.Path(os.environ["OPENDIT_RUN_FOLDER_FILE"])
run = pathlib.Path(sys.argv[1]) / "outputs" / f"{int(file.parent.name):03d}-DiT-Ti-2"
run.mkdir(parents=True, exist_ok=True)
file.write_text(f"{run}\\n")
print("trains on", os.environ.get("CUDA_VISIBLE_DEVICES"), sys.argv[2:], flush=True)
def end(*_):
    (run / "ended.json").write_text(json.dumps({"step": 3, "done": False, "stopped": True}))
    sys.exit(0)
deaf = "deaf" in (file.parent / "config.yaml").read_text()
signal.signal(signal.SIGTERM, (lambda *_: print("heard", flush=True)) if deaf else end)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Start fake trainings instead of train.py; yield their processes, which are killed after the test."""
    processes = []

    def start(words, output, **more):
        words = [sys.executable, "-c", FAKE, str(tmp_path), *words]
        processes.append(
            subprocess.Popen(words, stdout=output, stderr=output, env={**os.environ, **more}, start_new_session=True)
        )
        return processes[-1]

    monkeypatch.setattr(training_queue, "_start", start)
    monkeypatch.setattr(training_queue, "TICK_S", 0.02)
    yield processes
    for each in processes:
        each.kill()
        each.wait()


def opened(root, gpus=(None,)):
    (root / "outputs").mkdir(exist_ok=True)
    return TrainingQueue(root, Catalog(root / "outputs"), gpus)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def ready(queue, name):
    wait_for(lambda: "ready" in queue.output(name))


def test_one_run_a_gpu_and_the_next_when_one_has_ended(tmp_path, started):
    with opened(tmp_path, ("2", "5")) as queue:
        names = [queue.add(f"run {i}", {"max_steps": i}) for i in range(3)]
        for name in names[:2]:
            ready(queue, name)
        assert [queue.status(name) for name in names] == ["running", "running", "waiting"]
        assert "trains on 2" in queue.output(names[0]) and "trains on 5" in queue.output(names[1])
        assert queue.stop(names[0]) == "it saves and ends"
        ready(queue, names[2])
        assert [queue.status(name) for name in names] == ["stopped", "running", "running"]
        assert "trains on 2" in queue.output(names[2]) and queue.run_of(names[2]) == "003-DiT-Ti-2"
        assert len(started) == 3 and queue.names() == names[::-1]


def test_runs_outlive_the_page_and_are_found_again(tmp_path, started):
    with opened(tmp_path) as queue:
        first, second = queue.add("first", {"recipe": "digits"}), queue.add("second", {"recipe": "digits"})
        ready(queue, first)
        with pytest.raises(Locked, match="close that page first"):
            opened(tmp_path)
    assert started[0].poll() is None and len(started) == 1
    with opened(tmp_path) as queue:  # the run is not this page's child, but has the start time
        assert [queue.status(name) for name in (first, second)] == ["running", "waiting"]
        time.sleep(0.2)
        assert len(started) == 1
        queue.stop(first)
        started[0].wait(20)
        ready(queue, second)  # queued by the previous page
        assert queue.status(first) == "stopped"
        queue.go_on(first)
        assert queue.status(first) == "waiting" and queue.stop(first) == "dropped from the queue"
        assert queue.status(first) == "dropped"


@pytest.mark.parametrize("changed", [{"started": 12345}, {"boot": "another"}, {"pid": 0}, {"started": 0}])
def test_a_number_that_another_process_has_is_not_signalled(tmp_path, started, changed):
    with opened(tmp_path) as queue:
        name = queue.add("a run", {})
        ready(queue, name)
    file = tmp_path / FOLDER / name / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with opened(tmp_path) as queue:
        assert queue.status(name) == "failed"
        with pytest.raises(ValueError, match="does not run"):
            queue.stop(name)
        time.sleep(0.1)
    assert started[0].poll() is None and len(started) == 1  # neither signalled nor started again


def test_a_process_that_is_gone(tmp_path, started):
    with opened(tmp_path) as queue:
        name = queue.add("a run", {})
        ready(queue, name)
        started[0].kill()
        wait_for(lambda: queue.status(name) == "failed")
        with pytest.raises(ValueError, match="does not run"):
            queue.stop(name)
        queue.go_on(name)  # starts anew, because there is no checkpoint
        wait_for(lambda: queue.output(name).count("ready") == 2)
        assert "load" not in queue.config(name)


def test_a_run_that_saves_gets_no_second_signal(tmp_path, started):
    with opened(tmp_path) as queue:
        name = queue.add("a run", {"deaf": True})
        ready(queue, name)
        queue.stop(name)
        wait_for(lambda: "heard" in queue.output(name))
        assert queue.status(name) == "stopping"
        with pytest.raises(ValueError, match="is stopping already: it saves and ends; kill [0-9]+ ends it at once"):
            queue.stop(name)
        time.sleep(0.2)
        assert queue.output(name).count("heard") == 1


def test_going_on_loads_the_run_and_leaves_its_first_weights(tmp_path, started):
    with opened(tmp_path) as queue:
        names = [
            queue.add("all weights", {"recipe": "digits", "pretrained": "x"}),
            queue.add("LoRA", {"lora": 4, "pretrained": "x"}),
        ]
        for number, name in enumerate(names, start=1):
            ready(queue, name)
            run = tmp_path / "outputs" / f"{number:03d}-DiT-Ti-2"
            (run / "checkpoints" / "step_0000003").mkdir(parents=True)
            queue.stop(name)
            wait_for(lambda name=name: queue.status(name) == "stopped")
        for name in names:
            queue.go_on(name)
        configs = [yaml.safe_load((tmp_path / FOLDER / name / "config.yaml").read_text()) for name in names]
    loads = [str(tmp_path / "outputs" / f"{number:03d}-DiT-Ti-2") for number in (1, 2)]
    assert configs == [{"recipe": "digits", "load": loads[0]}, {"lora": 4, "pretrained": "x", "load": loads[1]}]


def test_a_damaged_file_breaks_its_own_row(tmp_path, started):
    with opened(tmp_path, ()) as queue:
        names = [queue.add(f"run {i}", {}) for i in range(3)]
    (tmp_path / FOLDER / names[1] / "job.json").write_text('{"title": 1}')
    (tmp_path / FOLDER / names[2] / "run").write_text(f"{tmp_path}/../../etc\n")
    (tmp_path / FOLDER / names[2] / "output.txt").symlink_to("/etc/hostname")
    with opened(tmp_path, ()) as queue:
        assert queue.names() == [names[2], names[0]]
        assert queue.run_of(names[2]) is None and queue.output(names[2]) == ""
        assert queue.add("another", {}) == "0004"
        for hostile in ("0002", "../x", "", None, ["0001"], {"a": 1}, "0001\n"):
            for ask in (queue.status, queue.stop, queue.go_on, queue.output, queue.title):
                with pytest.raises(ValueError, match="no such run"):
                    ask(hostile)


def test_a_queue_is_bounded(tmp_path, started, monkeypatch):
    monkeypatch.setattr(training_queue, "MOST_WAITING", 2)
    with opened(tmp_path, ()) as queue:
        for _ in range(2):
            queue.add("x" * 1000, {})
        with pytest.raises(ValueError, match="2 runs wait already"):
            queue.add("a run", {})


def test_a_program_is_ended_with_the_page_and_one_runs_at_a_time(tmp_path, started, monkeypatch):
    from threading import Thread

    def ask():
        with contextlib.suppress(ValueError):
            queue.program(["train"])

    with opened(tmp_path, ()) as queue:
        thread = Thread(target=ask)
        thread.start()
        wait_for(lambda: started)
        with pytest.raises(ValueError, match="another plan"):
            queue.program(["train"])
    thread.join(20)
    assert started[0].returncode == -signal.SIGKILL
