"""One model in memory, requests one after the other, cancelled and failing ones included."""

import gc
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import opendit
from opendit.inference.page.catalog import WeightsChoice
from opendit.inference.page.drawing_queue import DrawingQueue, DrawingRequest, TooManyRequests
from opendit.inference.server import SamplingServer
from opendit.inference.settings import DrawSettings
from tests.inference.small import write

A, B = (WeightsChoice(name, Path(name), "ema") for name in "AB")


def request(weights=A, what=(1, 2), steps=5, **more) -> DrawingRequest:
    return DrawingRequest(weights, what, DrawSettings(steps=steps, guidance=1.0, **more))


class Server:
    """Counts the servers that are alive, and draws what it is told to."""

    alive = weakref.WeakSet()

    def __init__(self, choice: WeightsChoice):
        gc.collect()
        assert len(self.alive) == 0, "two models in memory"
        self.alive.add(self)
        self.choice, self.notes, self.asked = choice, ["a note", "kernels: none"], []
        self.hold = self.closed = False

    def submit(self, what, **settings):
        future = Future()
        request = SimpleNamespace(
            what=what, settings=settings, progress=0.5, result=future.result, cancel=future.cancel,
            add_done_callback=lambda function: future.add_done_callback(lambda _: function(request)),
            finish=lambda: future.set_result([f"{self.choice.name}{settings['seed']}"]), fail=future.set_exception,
        )  # fmt: skip
        self.asked.append(request)
        if not self.hold:
            request.finish()
        return request

    def close(self):
        self.closed = True


@pytest.fixture
def servers():
    Server.alive.clear()
    return []


@pytest.fixture
def queue(servers):
    def start(choice):
        server = Server(choice)
        servers.append(weakref.ref(server))
        return server

    with DrawingQueue(start, most_waiting=3) as queue:
        yield queue


def until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def hold(queue, servers):
    """(a request that is being drawn until its server is told to finish, the server)."""
    queue.submit(request()).result(10)
    servers[-1]().hold = True
    held = queue.submit(request())
    until(lambda: held.stage == "drawing")
    return held, servers[-1]()


def test_models_are_loaded_once_and_one_at_a_time(queue, servers):
    drawn = [queue.submit(request(weights)) for weights in (A, A, B)]
    assert [one.result(10) for one in drawn] == [["A0"], ["A0"], ["B0"]]
    assert queue.submit(request(A)).result(10) == ["A0"]
    assert len(servers) == 3 and drawn[0].notes == ["a note"] and drawn[0].progress == 1


def test_requests_of_one_model_are_drawn_together_and_nobody_waits_for_ever(queue, servers):
    held, server = hold(queue, servers)
    beside = queue.submit(request())
    until(lambda asked=server.asked: len(asked) == 3)
    other = queue.submit(request(B))
    late = queue.submit(request())  # of the model that is there, but after one of another model
    time.sleep(0.05)
    assert (other.stage, late.stage) == ("waiting", "waiting") and queue.before(late) == 1
    assert beside.stage == "drawing" and beside.progress == 0.5
    server.asked[1].finish()
    time.sleep(0.05)
    assert held.result(0) == ["A0"] and not server.closed and other.stage == "waiting"
    server.asked[2].finish()
    del server
    assert other.result(10) == ["B0"] and late.result(10) == ["A0"] and len(servers) == 3


def test_cancel(queue, servers):
    held, server = hold(queue, servers)
    waiting = [queue.submit(request(B)) for _ in range(3)]
    assert [queue.before(one) for one in waiting] == [0, 1, 2]
    with pytest.raises(TooManyRequests):
        queue.submit(request(B))
    for one in (waiting[1], held):
        one.cancel()
        with pytest.raises(CancelledError):
            one.result(0)  # at once
    assert server.asked[1].result.__self__.cancelled()
    del server
    assert waiting[0].result(10) == waiting[2].result(10) == ["B0"]
    held.cancel()
    assert isinstance(held.error, CancelledError)  # again


def drawing_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "drawing-queue"}


def test_close_ends_all(queue, servers):
    held, server = hold(queue, servers)
    waiting, before = queue.submit(request(B)), drawing_threads()
    queue.close()
    assert isinstance(held.error, CancelledError) and isinstance(waiting.error, CancelledError)
    assert server.closed and len(before - drawing_threads()) == 1  # (Pages of other tests have some, too.)
    with pytest.raises(TooManyRequests):
        queue.submit(request())


def test_what_fails_in_drawing_fails_alone(queue, servers):
    held, server = hold(queue, servers)
    beside = queue.submit(request())
    until(lambda asked=server.asked: len(asked) == 3)
    server.asked[1].fail(RuntimeError("drawing failed: out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        held.result(10)
    after = queue.submit(request())  # gets a server of its own, when nobody needs this one
    time.sleep(0.05)
    assert after.stage == "waiting" and not server.closed
    server.asked[2].finish()
    del server
    assert beside.result(0) == after.result(10) == ["A0"] and len(servers) == 2


@pytest.mark.parametrize("error", [ValueError("damaged"), OSError("no disk"), RuntimeError("CUDA out of memory")])
def test_what_can_not_be_loaded(error, capsys):
    def start(choice):
        huge = Server(choice)
        if choice == A:
            raise error
        return huge

    Server.alive.clear()
    with DrawingQueue(start) as queue:
        for _ in range(2):
            failed = queue.submit(request(A))
            with pytest.raises(type(error), match=str(error)):
                failed.result(10)
            failed.error.__traceback__ = None  # pytest's own
        assert queue.submit(request(B)).result(10) == ["B0"]  # whose load finds no other model alive
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, RuntimeError)


def test_the_samples_are_the_pipelines(tmp_path):
    path = write(tmp_path / "weights.safetensors")
    choice = WeightsChoice("x", path, "ema")
    asked = DrawingRequest(choice, (3, 1, 0), DrawSettings(4, 2.0, 7, "ddim", (0.5, 50.0)))

    def start(choice):
        return SamplingServer(opendit.load(choice.path, device="cpu"), batch_size=2)

    with DrawingQueue(start) as queue:
        mine = queue.submit(asked).result(60)
    theirs = opendit.load(path, device="cpu")(
        [3, 1, 0], steps=4, guidance=2.0, seed=7, sampler="ddim", interval=(0.5, 50.0), batch_size=2, progress=False
    )
    for a, b in zip(mine, theirs, strict=True):  # of batches of one size; rounding can move a byte by one
        assert np.abs(np.asarray(a).astype(int) - np.asarray(b)).max() <= 1 and np.asarray(a).std() > 1
