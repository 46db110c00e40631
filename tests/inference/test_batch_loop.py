"""Requests to the sampling server that leave something out of steps: the pipeline's batches, bit for bit."""

import threading
import time
from concurrent.futures import CancelledError

import pytest
import torch

import opendit
from opendit.inference.batch_loop import BatchLoop
from opendit.inference.server import SamplingServer
from tests.inference.small import BYTES, write
from tests.inference.tape import TapeRecorder

ASKED = [
    ([3, 1, 4], {"steps": 8, "seed": 7, "cache": "taylor:2"}),
    ([2], {"steps": 6, "guidance": 1.5, "guidance_every": 2, "sampler": "ddim"}),
    ([0, 1], {"steps": 7, "guidance": 1, "cache": "taylor:3:1"}),
    ([2, 3], {"steps": 9, "interval": (0.5, 20.0), "seed": 3, "cache": "first_block:0.3"}),
    (2, {"steps": 6, "cache": "taylor:2:0"}),
]


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return opendit.load(write(tmp_path_factory.mktemp("weights") / "classes.safetensors"), device="cpu")


def latents_of(pipe, monkeypatch, what, **arguments) -> torch.Tensor:
    """What the pipeline decodes."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(type(pipe), "shown", lambda self, latents: seen.append(latents.clone()) or [0] * len(latents))
        pipe(what, progress=False, **arguments)
    return torch.cat(seen)


@pytest.mark.parametrize("recorder", [None, TapeRecorder()], ids=["kernel by kernel", "recorded"])
def test_the_pipelines_latents_bit_for_bit_beside_others(pipe, recorder, monkeypatch):
    want = [latents_of(pipe, monkeypatch, what, **arguments) for what, arguments in ASKED]
    exact = latents_of(pipe, monkeypatch, ASKED[0][0], steps=8, seed=7)
    assert not torch.allclose(want[0], exact, rtol=1e-4)  # something was left out
    with SamplingServer(pipe, batch_size=4, decode=lambda x: list(x.clone()), recorder=recorder) as server:
        for _ in range(2):
            beside = [server.submit([0, 4], steps=5 + number) for number in range(3)]
            requests = [server.submit(what, **arguments) for what, arguments in ASKED]
            for request, expected in zip(requests, want, strict=True):
                assert torch.equal(torch.stack(request.result(60)), expected)
                assert request.progress == 1
            assert all(torch.stack(request.result(60)).std() > 0.1 for request in beside)
    assert recorder is None or recorder.replayed > 10


@pytest.mark.parametrize(("cache", "batches"), [("taylor:2", [8, 4]), ("first_block:0.3", [8, 2, 2])])
def test_requests_of_the_same_settings_share_a_batch_unless_it_decides_for_all(pipe, cache, batches, monkeypatch):
    begun, begin = [], BatchLoop.begin
    monkeypatch.setattr(BatchLoop, "begin", lambda self: begun.append(len(self.live)) or begin(self))
    with SamplingServer(pipe, batch_size=8, decode=lambda x: list(x.clone())) as server:
        drawing = threading.Event()
        first = server.submit([1] * 8, steps=100, cache=cache, callback=lambda _: drawing.set())
        assert drawing.wait(60)  # all of it has rows: so the others wait, and meet
        others = [server.submit([2, 3], steps=100, seed=seed, cache=cache) for seed in (1, 2)]
        got = [torch.stack(request.result(60)) for request in others]
        assert first.done
    assert begun == batches
    assert not torch.allclose(got[0], got[1], rtol=1e-2)  # every sample has its own request's seed


def test_a_cancelled_request_frees_its_batch_and_others_of_it_go_on(pipe):
    with SamplingServer(pipe, batch_size=8, decode=lambda x: list(x.clone())) as server:
        alone = torch.stack(server.submit([2, 3], steps=40, seed=5, cache="taylor:2").result(60))
        cancelled = server.submit([1] * 6, steps=1000, cache="taylor:2")
        while not cancelled.progress:
            time.sleep(0.001)
        assert cancelled.cancel()
        with pytest.raises(CancelledError):
            cancelled.result(60)
        again = torch.stack(server.submit([2, 3], steps=40, seed=5, cache="taylor:2").result(60))
        assert torch.equal(again, alone)


def test_what_the_pipeline_refuses(pipe):
    with SamplingServer(pipe, batch_size=4) as server:
        for arguments, message in (
            ({"cache": "teacache"}, "cache teacache: no such form"),
            ({"guidance_every": 2, "guidance": 1}, "guidance_every does nothing with guidance 1"),
            ({"guidance_every": 2, "cache": "taylor:2"}, "leave one of them out"),
        ):
            for ask in (server.submit, pipe):
                with pytest.raises(ValueError, match=message):
                    ask([1], **arguments)
        with pytest.raises(TypeError, match="stepz"):
            server.submit([1], stepz=3)


def test_captions(tmp_path, monkeypatch):
    pipe = opendit.load(write(tmp_path / "words.safetensors", text=BYTES), device="cpu")
    arguments = {"steps": 6, "cache": "taylor:2", "negative": "a seven"}
    want = latents_of(pipe, monkeypatch, ["a", "b c"], **arguments)
    with SamplingServer(pipe, decode=lambda x: list(x.clone())) as server:
        assert torch.equal(torch.stack(server.submit(["a", "b c"], **arguments).result(60)), want)
