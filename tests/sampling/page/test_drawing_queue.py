"""One model is in memory, and requests run one after the other, even if some are cancelled or fail."""

import gc
import threading
import time
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

import opendit
from opendit.models.zoo import model_config
from opendit.sampling.page.catalog import WeightsChoice
from opendit.sampling.page.drawing import DrawingQueue, DrawingRequest
from opendit.sampling.pipeline import DrawSettings
from tests.sampling.small import write

A, B = (WeightsChoice(name, Path(name), "ema") for name in "AB")


def request(weights=A, what=(1, 2), steps=5, **more) -> DrawingRequest:
    return DrawingRequest(weights, what, DrawSettings(steps=steps, guidance=1.0, **more))


class Pipe:
    """A stand-in for a pipeline that draws a name, waits in a step until it may continue, or fails."""

    alive: "weakref.WeakSet[Pipe]" = weakref.WeakSet()

    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=5)

    def __init__(self, choice: WeightsChoice):
        gc.collect()
        assert len(self.alive) == 0, "two models in memory"
        self.alive.add(self)
        self.choice, self.notes, self.calls = choice, ["a note", "kernels: none"], []
        self.go_on = threading.Event()
        self.go_on.set()
        self.error: Exception | None = None

    def __call__(self, what, *, steps, seed, batch_size, callback, **settings):
        self.calls.append((what, steps, seed, batch_size, settings))
        batches = -(-len(what) // batch_size)
        for step in range(steps * batches):
            if step == 3:
                self.go_on.wait(10)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            callback(step % steps + 1, None)
        return [f"{self.choice.name}{seed}"]


@pytest.fixture
def pipes():
    Pipe.alive.clear()
    return []


@pytest.fixture
def queue(pipes):
    def load(choice):
        pipe = Pipe(choice)
        pipes.append(weakref.ref(pipe))
        return pipe

    with DrawingQueue(load, batch_size=2, most_waiting=3) as queue:
        yield queue
        for pipe in pipes:
            if pipe() is not None:
                pipe().go_on.set()


def until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def hold(queue, pipes, **more):
    """Return a request that waits in its fourth step, and its pipeline."""
    queue.submit(request()).result(10)
    pipe = pipes[-1]()
    pipe.go_on.clear()
    held = queue.submit(request(**more))
    until(lambda: len(pipe.calls) == 2 and held.progress > 0)
    return held, pipe


def test_models_are_loaded_once_and_one_at_a_time(queue, pipes):
    drawn = [queue.submit(request(weights, seed=seed)) for seed, weights in enumerate((A, A, B))]
    assert [one.result(10) for one in drawn] == [["A0"], ["A1"], ["B2"]]
    assert queue.submit(request(A)).result(10) == ["A0"]
    assert len(pipes) == 3 and drawn[0].notes == ["a note"] and drawn[0].progress == 1
    assert pipes[-1]().calls[0][:4] == ([1, 2], 5, 0, 2)


def test_progress_counts_steps_of_all_batches(queue, pipes):
    held, pipe = hold(queue, pipes, what=(1, 2, 3))
    until(lambda: held.progress == 3 / 10)
    assert held.stage == "drawing" and not held.done
    pipe.go_on.set()
    assert held.result(10) == ["A0"] and held.progress == 1


def test_requests_are_drawn_in_the_order_in_which_they_came(queue, pipes):
    held, pipe = hold(queue, pipes)
    other, late = queue.submit(request(B)), queue.submit(request())
    assert (other.stage, late.stage) == ("waiting", "waiting") and queue.before(late) == 1
    pipe.go_on.set()
    del pipe
    assert held.result(10) == ["A0"] and other.result(10) == ["B0"] and late.result(10) == ["A0"] and len(pipes) == 3


def test_cancel(queue, pipes):
    held, pipe = hold(queue, pipes)
    waiting = [queue.submit(request(B)) for _ in range(3)]
    assert [queue.before(one) for one in waiting] == [0, 1, 2]
    with pytest.raises(ValueError, match="too many requests"):
        queue.submit(request(B))
    for one in (waiting[1], held):
        one.cancel()
        with pytest.raises(CancelledError):
            one.result(0)  # immediately
    pipe.go_on.set()
    del pipe
    assert waiting[0].result(10) == waiting[2].result(10) == ["B0"]
    held.cancel()
    with pytest.raises(CancelledError):  # a second time
        held.result(0)


def drawing_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("drawing-queue")}


def test_close_ends_all(queue, pipes):
    held, pipe = hold(queue, pipes)
    waiting, before = queue.submit(request(B)), drawing_threads()
    threading.Timer(0.1, pipe.go_on.set).start()  # a step is finished first
    del pipe
    queue.close()
    for one in (held, waiting):
        with pytest.raises(CancelledError):
            one.result(0)
    assert len(before - drawing_threads()) == 1 and pipes[-1]() is None  # the model is freed
    with pytest.raises(ValueError, match="too many requests"):
        queue.submit(request())


def test_a_model_that_failed_is_loaded_again(queue, pipes, capsys):
    queue.submit(request()).result(10)
    pipes[-1]().error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        queue.submit(request()).result(10)
    assert queue.submit(request()).result(10) == ["A0"] and len(pipes) == 2
    assert "Traceback" in capsys.readouterr().err
    pipes[-1]().error = ValueError("class 'x': no such class")  # the user's mistake; the model still works
    with pytest.raises(ValueError, match="no such class"):
        queue.submit(request()).result(10)
    assert queue.submit(request()).result(10) == ["A0"] and len(pipes) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("damaged"), OSError("no disk"), RuntimeError("CUDA out of memory")])
def test_what_can_not_be_loaded(error, capsys):
    def load(choice):
        huge = Pipe(choice)
        if choice == A:
            raise error
        return huge

    Pipe.alive.clear()
    with DrawingQueue(load) as queue:
        for _ in range(2):
            failed = queue.submit(request(A))
            with pytest.raises(type(error), match=str(error)):
                failed.result(10)
            failed.future.exception().__traceback__ = None  # pytest keeps the traceback
        assert queue.submit(request(B)).result(10) == ["B0"]  # its load finds no other model alive
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, RuntimeError)


def test_the_samples_are_the_pipelines(tmp_path):
    path = write(tmp_path / "weights.safetensors")
    choice = WeightsChoice("x", path, "ema")
    asked = DrawingRequest(choice, (3, 1, 0), DrawSettings(4, 2.0, 7, "ddim", (0.5, 50.0)))
    with DrawingQueue(lambda choice: opendit.load(choice.path, device="cpu"), batch_size=2) as queue:
        mine = queue.submit(asked).result(60)
    theirs = opendit.load(path, device="cpu")(
        [3, 1, 0], steps=4, guidance=2.0, seed=7, sampler="ddim", interval=(0.5, 50.0), batch_size=2, progress=False
    )
    for a, b in zip(mine, theirs, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b)) and np.asarray(a).std() > 1
