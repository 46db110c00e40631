"""The sampling server: the pipeline's samples, from many threads at once; bounds, cancels, failures, ends."""

import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest
import torch

import opendit
from opendit.inference.request import QueueFullError, ServerClosedError
from opendit.inference.server import SamplingServer
from opendit.inference.slot_loop import batch_sizes
from tests.inference.small import BYTES, write
from tests.inference.tape import TapeRecorder


@pytest.fixture(scope="module")
def pipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    found = {
        "classes": write(folder / "classes.safetensors"),
        "words": write(folder / "words.safetensors", text=BYTES),
        "clips": write(folder / "clips.safetensors", "vDiT-Ti/222", frames=4, text=BYTES),
    }
    return {name: opendit.load(path, device="cpu") for name, path in found.items()}


def pixels(samples) -> np.ndarray:
    return np.stack([np.asarray(getattr(sample, "frames", sample)) for sample in samples]).astype(int)


def same(got, want) -> bool:
    """Rounding of 1e-6 can move a byte by one."""
    got, want = pixels(got), pixels(want)
    return got.shape == want.shape and want.std() > 1 and np.abs(got - want).max() <= 1


ASKED = [
    ([3, 1, 4], {"steps": 5, "seed": 7}),
    ([2], {"steps": 3, "guidance": 1.5}),
    ([0, 1], {"steps": 4, "guidance": 1}),
    ([4, 4], {"steps": 6, "sampler": "ddim", "guided_channels": 1}),
    ([1], {"steps": 2, "sampler": "dpmpp", "seed": 2**62}),
    (2, {"steps": 3}),
    ([2, 3], {"steps": 9, "interval": (0.5, 20.0), "seed": 3}),
]


@pytest.mark.parametrize("recorder", [None, TapeRecorder()], ids=["kernel by kernel", "recorded"])
def test_what_the_pipeline_draws(pipes, recorder):
    """Five kinds, of which three are drawn at a time; four rows, from as many threads."""
    pipe = pipes["classes"]
    want = [pipe(what, progress=False, **arguments) for what, arguments in ASKED]
    with SamplingServer(pipe, batch_size=4, recorder=recorder) as server, ThreadPoolExecutor(4) as clients:
        for _ in range(2):
            asked = [clients.submit(server.submit, what, **arguments) for what, arguments in ASKED]
            got = [request.result().result(60) for request in asked]
            assert all(map(same, got, want))
    assert recorder is None or recorder.replayed > 10


@pytest.mark.parametrize("kind", ["words", "clips"])
def test_captions_with_negative_ones_in_one_batch(pipes, kind):
    pipe, asked = pipes[kind], [(["a", "b c"], None, 4), (["d"], "a seven", 6), (["e", "f"], "", 5)]
    with SamplingServer(pipe, batch_size=8) as server:
        requests = [server.submit(what, negative=negative, steps=steps) for what, negative, steps in asked]
        got = [request.result(60) for request in requests]
        assert len(server.loops) == 1
    for (what, negative, steps), samples in zip(asked, got, strict=True):
        assert same(samples, pipe(what, negative=negative, steps=steps, progress=False))


# ------------------------------------------------------------------------------------------- bounds, cancels, progress


class Gate:
    """A callback that holds the worker, once, until it is opened."""

    def __init__(self):
        self.reached, self.open, self.seen = threading.Event(), threading.Event(), []

    def __call__(self, progress: float) -> None:
        self.seen.append(progress)
        self.reached.set()
        assert self.open.wait(60)


def until(condition) -> None:
    """Waits for what other threads do."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_queue_is_bounded(pipes):
    gate = Gate()
    with SamplingServer(pipes["classes"], batch_size=2, max_waiting=3) as server:
        first = server.submit([0, 1, 2], steps=2, callback=gate)
        assert gate.reached.wait(60) and server.waiting == 1
        second = server.submit([3], steps=2)
        with pytest.raises(QueueFullError, match="2 samples wait for a row, and 2 more would be over the 3 that"):
            server.submit([3, 4], steps=2)
        third = server.submit([4], steps=2)
        with pytest.raises(QueueFullError, match="3 samples wait for a row, and 1 more"):
            server.submit(["nobody looks at this"], steps=2)
        assert third.cancel() and server.waiting == 2
        third = server.submit([4], steps=2)
        gate.open.set()
        assert [len(request.result(60)) for request in (first, second, third)] == [3, 1, 1]
        until(lambda: server.waiting == 0)


def test_progress_and_callback(pipes):
    seen = []
    with SamplingServer(pipes["classes"], batch_size=2) as server:
        request = server.submit([0, 1, 2], steps=4, callback=seen.append)
        assert repr(request) == "SampleRequest(3 samples, 4 steps, 0%)" or request.progress > 0
        with pytest.raises(TimeoutError):
            server.submit([1], steps=999).result(0.001)
        assert len(request.result(60)) == 3 and request.done and request.progress == 1
        assert "done" in repr(request) and not request.cancel() and not request.cancelled
    # Two rows: two samples at once, then the third one alone.
    assert seen == sorted(seen) and seen[-1] == 1 and len(seen) == 8 and seen[3] == 8 / 12


def test_a_cancelled_request_frees_its_rows(pipes):
    gate, ended = Gate(), []
    with SamplingServer(pipes["classes"], batch_size=2) as server:
        long = server.submit([0, 1, 2, 3], steps=1000, callback=gate)
        long.add_done_callback(ended.append)
        assert gate.reached.wait(60)
        other = server.submit([4], steps=3, seed=5)
        assert long.cancel() and long.done and long.cancelled and ended == [long] and "cancelled" in repr(long)
        gate.open.set()
        with pytest.raises(CancelledError):
            long.result(60)
        assert same(other.result(60), pipes["classes"]([4], steps=3, seed=5, progress=False))
        assert len(gate.seen) == 1 and server.waiting == 0 and server.computed < 50


def test_a_request_of_many_does_not_keep_others_waiting(pipes):
    order = []
    with SamplingServer(pipes["classes"], batch_size=2) as server:
        many = server.submit([0] * 30, steps=3)
        many.add_done_callback(lambda _: order.append("many"))
        for name in "ab":
            request = server.submit([1], steps=3)
            request.add_done_callback(lambda _, name=name: order.append(name))
        many.result(60)
    assert order == ["a", "b", "many"]


def test_every_kind_gets_its_turn(pipes):
    """Of five kinds three are drawn at a time; those that are busy all the time make room for the others."""
    kinds = [{"sampler": "ddpm"}, {"sampler": "ddim"}, {"sampler": "dpmpp"}, {"guidance": 1}, {"guided_channels": 1}]
    with SamplingServer(pipes["classes"], batch_size=2) as server:
        busy = [server.submit([0] * 300, steps=4, **kind) for kind in kinds[:3]]
        others = [server.submit([1], steps=4, **kind) for kind in kinds[3:]]
        assert all(len(request.result(120)) == 1 for request in others) and not any(r.done for r in busy)
        assert len(server.loops) == 3


# -------------------------------------------------------------------------------------------------- failures and ends


def test_bad_arguments_are_told_at_once(pipes):
    with SamplingServer(pipes["classes"], batch_size=1) as server:
        for arguments, said in [
            ({"what": [9]}, "class 9: must be a whole number from 0 to 4"),
            ({"what": []}, "nothing to draw"),
            ({"what": [1], "steps": 0}, "steps 0"),
            ({"what": [1], "sampler": "euler"}, "sampler euler"),
            ({"what": [1], "negative": "x"}, "negative"),
        ]:
            with pytest.raises(ValueError, match=said):
                server.submit(**arguments)
        assert len(server.submit([1], steps=1).result(60)) == 1
    for arguments in ({"batch_size": 0}, {"max_waiting": 0}):
        with pytest.raises(ValueError, match="must be a whole number"):
            SamplingServer(pipes["classes"], **arguments)


def test_a_failed_decode_ends_its_request_only(pipes):
    def decode(latents):
        if len(latents) == 2:
            raise OSError("no more\nof it")
        return list(latents)

    with SamplingServer(pipes["classes"], batch_size=4, decode=decode) as server:
        bad, good = server.submit([0, 1], steps=3), server.submit([0], steps=3)
        with pytest.raises(RuntimeError, match="^decoding failed: OSError: no more$") as failure:
            bad.result(60)
        assert isinstance(failure.value.__cause__, OSError) and good.result(60)[0].shape == (1, 8, 8)
        assert len(server.submit([0], steps=2).result(60)) == 1


def test_an_error_of_a_callback_is_its_requests(pipes):
    def refuse(progress):
        raise KeyError("mine")

    with SamplingServer(pipes["classes"], batch_size=4) as server:
        bad, good = server.submit([0, 1], steps=3, callback=refuse), server.submit([0], steps=3)
        with pytest.raises(KeyError, match="mine"):
            bad.result(60)
        assert len(good.result(60)) == 1


@pytest.mark.parametrize("recorder", [None, TapeRecorder()], ids=["kernel by kernel", "recorded"])
def test_an_error_of_a_step_ends_its_batch_and_the_server_goes_on(pipes, recorder, monkeypatch):
    pipe = pipes["classes"]
    predict = pipe.model.predict
    gate = Gate()
    with SamplingServer(pipe, batch_size=4, recorder=recorder, say=pytest.fail) as server:
        bad = [server.submit([0], steps=300, callback=gate), server.submit([1, 2], steps=300)]
        assert gate.reached.wait(60)
        monkeypatch.setattr(pipe.model, "predict", lambda *_: 1 / 0)
        other = server.submit([0] * 3, steps=20)  # a larger batch: nothing of it is recorded
        gate.open.set()
        for request in [*bad, other]:
            with pytest.raises(RuntimeError, match="^drawing failed: ZeroDivisionError: division by zero$"):
                request.result(60)
        monkeypatch.setattr(pipe.model, "predict", predict)
        assert same(server.submit([2], steps=3).result(60), pipe([2], steps=3, progress=False))


class Refuses:
    """A recorder of a GPU that can't record."""

    def record(self, work):
        raise RuntimeError("operation not permitted\nwhile it records")


def test_where_recording_fails_it_goes_on_kernel_by_kernel(pipes):
    said = []
    with SamplingServer(pipes["classes"], batch_size=2, recorder=Refuses(), say=said.append) as server:
        assert server.note == "recorded as a CUDA graph"
        got = server.submit([2, 3], steps=5).result(60)
    assert same(got, pipes["classes"]([2, 3], steps=5, progress=False)) and not server.records
    assert said == ["CUDA graph: kernel by kernel: recording failed: operation not permitted"]


def test_nobody_hangs_when_the_worker_dies(pipes, monkeypatch):
    gate = Gate()
    with SamplingServer(pipes["classes"], batch_size=1) as server:
        requests = [server.submit([0], steps=100, callback=gate), server.submit([1], steps=100)]
        assert gate.reached.wait(60)
        monkeypatch.setattr(SamplingServer, "undelivered", property(lambda server: 1 / 0))  # which the worker asks
        gate.open.set()
        for request in requests:
            with pytest.raises(ServerClosedError, match="^the sampling server's worker died: ZeroDivisionError: div"):
                request.result(60)
        with pytest.raises(ServerClosedError, match="worker died"):
            server.submit([0])


def test_close_ends_soon_and_everything(pipes):
    before = threading.active_count()
    torch.set_float32_matmul_precision("high")
    try:
        server = SamplingServer(pipes["classes"], batch_size=2)
        requests = [server.submit([0] * 50, steps=1000) for _ in range(3)]
        until(lambda: requests[0].progress > 0)
        start = time.monotonic()
        server.close()
        assert time.monotonic() - start < 20 and threading.active_count() == before
        for request in requests:
            with pytest.raises(ServerClosedError, match="^the sampling server was closed$"):
                request.result(1)
        with pytest.raises(ServerClosedError, match="was closed"):
            server.submit([0])
        server.close()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_it_can_be_closed_from_a_callback(pipes):
    before = set(threading.enumerate())
    server = SamplingServer(pipes["classes"], batch_size=2)
    (worker,) = [one for one in set(threading.enumerate()) - before if one.name == "sampling-server"]
    request = server.submit([0], steps=100, callback=lambda _: server.close())
    with pytest.raises(ServerClosedError):
        request.result(60)
    server.close()
    assert not worker.is_alive()


def test_nothing_is_drawn_while_too_much_waits_to_be_decoded(pipes):
    gate = threading.Event()

    def decode(latents):
        assert gate.wait(60)
        return list(latents)

    with SamplingServer(pipes["classes"], batch_size=2, decode=decode) as server:
        requests = [server.submit([0], steps=1) for _ in range(20)]
        until(lambda: server.undelivered > 4)
        time.sleep(0.1)
        assert server.undelivered <= 6 and server.waiting >= 14
        gate.set()
        assert all(len(request.result(60)) == 1 for request in requests)


def test_many_threads_at_once(pipes):
    """Each asks again as soon as it is served, and gives up now and then; everybody gets their own samples."""
    pipe, errors = pipes["classes"], []
    want = {
        (kind, steps): pipe([kind], steps=steps, seed=kind, progress=False) for kind in range(5) for steps in (2, 5)
    }

    def client(number):
        draw = np.random.default_rng(number)
        try:
            for _ in range(8):
                kind, steps = int(draw.integers(5)), int(draw.choice([2, 5]))
                request = server.submit([kind], steps=steps, seed=kind)
                if draw.random() < 0.2:
                    request.cancel()
                elif not same(request.result(60), want[kind, steps]):
                    errors.append((kind, steps))
        except BaseException as error:
            errors.append(error)

    with SamplingServer(pipe, batch_size=4, recorder=TapeRecorder()) as server:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


def test_all_batch_sizes_can_be_recorded_before_they_are_needed(pipes):
    pipe, recorder, gate = pipes["classes"], TapeRecorder(), Gate()
    with SamplingServer(pipe, batch_size=5, recorder=recorder) as server:
        first = server.submit([1, 2], steps=6, seed=4, callback=gate)
        assert gate.reached.wait(60) and recorder.recorded == 0
        second = server.submit([0], steps=3, record_all=True)
        gate.open.set()
        assert len(second.result(60)) == 1 and recorder.recorded == len(batch_sizes(5)) == 4
        assert same(first.result(60), pipe([1, 2], steps=6, seed=4, progress=False))  # in rows all the time
        assert same(server.submit([3] * 5, steps=4).result(60), pipe([3] * 5, steps=4, progress=False))
        assert recorder.recorded == 4
    with SamplingServer(pipe, batch_size=2) as server:  # nothing is recorded here
        assert len(server.submit([0], steps=2, record_all=True).result(60)) == 1
