"""One model in memory, requests one after the other, cancelled and failing ones included."""

import gc
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import opendit
from opendit.inference.page.catalog import WeightsChoice
from opendit.inference.page.drawing_queue import Cancelled, DrawingQueue, DrawingRequest, QueueFull
from tests.inference.small import write

A, B = (WeightsChoice(name, Path(name), "ema") for name in "AB")


def request(weights=A, what=(1, 2), steps=5, **more) -> DrawingRequest:
    return DrawingRequest(weights, what, steps, 1.0, 0, **more)


class Model:
    """Counts the models that are alive, and draws when it is allowed to."""

    alive = weakref.WeakSet()
    notes = ["a note", "kernels: none"]

    def __init__(self, choice: WeightsChoice):
        gc.collect()
        assert len(self.alive) == 0, "two models in memory"
        self.alive.add(self)
        self.choice, self.go = choice, threading.Event()
        self.go.set()

    def __call__(self, what, *, steps, batch_size, callback, progress, **settings):
        for _ in range(0, what if isinstance(what, int) else len(what), batch_size):
            for step in range(steps):
                self.go.wait(10)
                callback(step + 1, torch.zeros(1))
        return [f"{self.choice.name}{settings['seed']}"]


@pytest.fixture
def models():
    Model.alive.clear()
    return []


@pytest.fixture
def queue(models):
    def load(choice):
        model = Model(choice)
        models.append(weakref.ref(model))
        return model

    with DrawingQueue(load, batch_size=1, most_waiting=3) as queue:
        yield queue


def until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def hold(queue, models):
    """A request that is being drawn, and stays so until the event that is returned is set."""
    first = queue.submit(request())
    first.result(10)
    models[-1]().go.clear()
    held = queue.submit(request())
    until(lambda: held.stage == "drawing")
    return held, models[-1]().go


def test_models_are_loaded_once_and_one_at_a_time(queue, models):
    drawn = [queue.submit(request(weights)) for weights in (A, A, B)]
    assert [one.result(10) for one in drawn] == [["A0"], ["A0"], ["B0"]]
    assert queue.submit(request(A)).result(10) == ["A0"]
    assert len(models) == 3 and drawn[0].notes == ["a note"] and drawn[0].progress == 1


def test_progress_and_cancel(queue, models):
    held, go = hold(queue, models)
    waiting = [queue.submit(request()) for _ in range(3)]
    assert [queue.before(one) for one in waiting] == [0, 1, 2] and waiting[0].stage == "waiting"
    with pytest.raises(QueueFull):
        queue.submit(request())
    waiting[1].cancel()
    with pytest.raises(Cancelled):
        waiting[1].result(0)  # at once
    held.cancel()
    assert not held.done and queue.before(waiting[2]) == 1
    go.set()
    with pytest.raises(Cancelled):
        held.result(10)
    assert waiting[0].result(10) == waiting[2].result(10) == ["A0"]
    assert waiting[1].progress == 0 and len(models) == 1


def test_close_ends_all(queue, models):
    held, go = hold(queue, models)
    waiting = queue.submit(request())
    closing = threading.Thread(target=queue.close)
    closing.start()
    until(lambda: held.cancelled)
    go.set()
    closing.join(10)
    assert isinstance(held.error, Cancelled) and isinstance(waiting.error, Cancelled) and not queue._thread.is_alive()
    with pytest.raises(QueueFull):
        queue.submit(request())


@pytest.mark.parametrize("error", [ValueError("damaged"), OSError("no disk"), RuntimeError("CUDA out of memory")])
def test_what_fails_fails_alone(error, capsys):
    class Failing(Model):
        def __call__(self, *_, **__):
            self.huge = bytearray(10)
            raise error

    def load(choice):
        return (Failing if choice == A else Model)(choice)

    Model.alive.clear()
    with DrawingQueue(load, 1) as queue:
        failed = queue.submit(request(A))
        with pytest.raises(type(error), match=str(error)):
            failed.result(10)
        assert queue.submit(request(B)).result(10) == ["B0"]  # whose load finds no other model alive
    unexpected = isinstance(error, RuntimeError)
    assert ("Traceback" in capsys.readouterr().err) == unexpected


def test_a_model_that_can_not_be_loaded(models):
    def load(choice):
        raise ValueError(f"{choice.name} is damaged")

    with DrawingQueue(load, 1) as queue:
        for _ in range(2):
            with pytest.raises(ValueError, match="A is damaged"):
                queue.submit(request(A)).result(10)


def test_the_samples_are_the_pipelines(tmp_path):
    path = write(tmp_path / "weights.safetensors")
    choice = WeightsChoice("x", path, "ema")
    asked = DrawingRequest(choice, (3, 1, 0), 4, 2.0, 7, "ddim", (0.5, 50.0))
    with DrawingQueue(lambda c: opendit.load(c.path, device="cpu"), batch_size=2) as queue:
        mine = queue.submit(asked).result(60)
    theirs = opendit.load(path, device="cpu")(
        [3, 1, 0], steps=4, guidance=2.0, seed=7, sampler="ddim", interval=(0.5, 50.0), batch_size=2, progress=False
    )
    assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True)) and len(mine) == 3
