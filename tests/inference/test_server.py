"""The sampling server: the pipeline's samples, from many threads at once; bounds, cancels, failures, ends."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import opendit
from opendit.inference.server import SamplingServer
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
        assert len(server._loops) == 1
    for (what, negative, steps), samples in zip(asked, got, strict=True):
        assert same(samples, pipe(what, negative=negative, steps=steps, progress=False))
