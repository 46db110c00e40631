"""Continuous batching on a GPU: recorded steps are the steps, samples are those of the engine, threads and streams."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import opendit
from opendit.inference import sampling_loop
from opendit.inference.engine import SamplingEngine
from opendit.inference.server import SamplingServer
from opendit.kernels.fp8_linear import float8_available
from opendit.kernels.recording import GraphRecorder
from tests.encoders.test_vae import small_vae
from tests.gpu.test_sampling_gpu import CONFIGS, LABELS, model_of
from tests.inference.small import BYTES, write
from tests.inference.test_pipeline import pixels
from tests.inference.test_slot_loop import OBJECTIVES, Bench

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SAMPLERS = [("ddpm", "ddim"), ("ddpm", "ddpm"), ("ddpm", "dpmpp"), ("edm", "heun"), ("flow", "euler")]


def drawn(bench: Bench, recorder, **how) -> tuple[list, list]:
    samples = [bench.sample(random.Random(number)) for number in range(9)]
    ended = list(bench.run(samples, recorder=recorder, draw=random.Random(1), **how))
    return [sample for sample, _ in ended], [latents for _, latents in ended]


def same(bench: Bench, bound: float, **how) -> None:
    """The recorded steps are, bit for bit, the steps kernel by kernel; near to the eager reference."""
    samples, got = drawn(bench, GraphRecorder(), **how)
    assert bench.loop.recordings
    again, want = drawn(bench, None, **how)
    assert [s.seed for s in samples] == [s.seed for s in again]
    for sample, one, other in zip(samples, got, want, strict=True):
        assert torch.equal(one, other), sample.table.steps
        exact = bench.want(sample)
        assert (one - exact).norm() < bound * exact.norm(), (one - exact).norm() / exact.norm()


@pytest.mark.parametrize(("which", "sampler"), SAMPLERS)
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=["fp32", "bf16"])
def test_recorded_steps_are_the_steps(which, sampler, dtype, bound):
    torch.set_float32_matmul_precision("highest")
    model = model_of(LABELS, OBJECTIVES[which], dtype)
    for memory in (1, 1 << 20):
        same(Bench(LABELS, which, sampler, channels=3, model=model, steps=(3, 5, 8)), bound, memory=memory)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_kind_of_model(config):
    model = model_of(config, OBJECTIVES["ddpm"], torch.bfloat16)
    same(Bench(config, "ddpm", "ddim", model=model, steps=(3, 5, 8)), 0.1)


@pytest.mark.skipif(not float8_available("cuda", torch.bfloat16)[0], reason="needs a GPU with FP8")
@pytest.mark.parametrize("name", ["DiT", "vDiT, captions"])
def test_in_fp8(name):
    model = model_of(CONFIGS[name], OBJECTIVES["ddpm"], torch.bfloat16, fp8=True)
    same(Bench(CONFIGS[name], "ddpm", "ddim", model=model, steps=(3, 5, 8)), 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bit_for_bit_the_engine_in_a_batch_of_one_size(dtype, monkeypatch):
    """The engine without its fused steps, which the server does not take; and near to the engine with them."""
    torch.set_float32_matmul_precision("highest")
    bench = Bench(LABELS, "ddpm", "ddpm", model=model_of(LABELS, OBJECTIVES["ddpm"], dtype), steps=(6,))
    draw = random.Random(1)
    samples = [replace(bench.sample(draw), null=bench.null, number=number, seed=3) for number in range(4)]
    samples = [replace(sample, scales=samples[0].scales) for sample in samples]
    scale = float(samples[0].scales[0])
    given = torch.cat([sample.y for sample in samples]), bench.null, torch.arange(4), 3
    settings = {"steps": 6, "sampler": "ddpm", "cfg_scale": scale}
    fused = SamplingEngine(bench.model, bench.objective, **settings).sample(*given)
    monkeypatch.setattr(sampling_loop, "usable", lambda *_: False)
    want = SamplingEngine(bench.model, bench.objective, **settings).sample(*given)
    assert (fused - want).norm() < (1e-4 if dtype == torch.float32 else 0.1) * want.norm()
    others = [bench.sample(draw) for _ in range(4)]
    mixed = [*others[:2], samples[0], others[2], samples[1], samples[2], others[3], samples[3]]
    run = bench.run(mixed, sizes=(4,), draw=random.Random(2), recorder=GraphRecorder())
    got = {id(sample): latents for sample, latents in run}
    assert all(torch.equal(got[id(sample)][0], want[number]) for number, sample in enumerate(samples))


@pytest.fixture(scope="module")
def pipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    small_vae().save_pretrained(folder / "vae")
    return {
        "words": opendit.load(write(folder / "words.safetensors", text=BYTES), precision="fp32"),
        "vae": opendit.load(
            write(folder / "classes.safetensors", in_channels=4), vae=str(folder / "vae"), precision="fp32"
        ),
    }


def near(got, want) -> bool:
    """Rounding of fp32 in batches of other sizes, and of steps that are not fused, moves few bytes, and not far."""
    difference = np.abs(pixels(got).astype(int) - pixels(want).astype(int))
    return difference.max() <= 2 and difference.mean() < 0.1 and pixels(want).std() > 1


@pytest.mark.parametrize("kind", ["words", "vae"])
def test_from_many_threads_with_decoding_beside(pipes, kind):
    pipe = pipes[kind]
    asked = [
        {"what": ["ab", "c"] if kind == "words" else [number % 5, 1], "steps": 3 + number % 7, "seed": number,
         "sampler": ("ddim", "ddpm")[number % 4 == 3], "guidance": 1.5 + number % 3}
        for number in range(24)
    ]  # fmt: skip
    want = [pipe(arguments.pop("what"), progress=False, **arguments) for arguments in map(dict, asked)]
    with SamplingServer(pipe, batch_size=8) as server, ThreadPoolExecutor(8) as clients:
        for _ in range(2):
            got = list(clients.map(lambda arguments: server.submit(**arguments).result(120), asked))
            assert all(map(near, got, want)) and server.records


def test_memory_does_not_grow(pipes):
    after = []
    with SamplingServer(pipes["words"], batch_size=8) as server:
        for call in range(12):
            for count in (1, 5, 8, 3):
                server.submit(["a"] * count, steps=4, seed=call).result(60)
            torch.cuda.synchronize()
            after.append(torch.cuda.memory_reserved())
    assert max(after[8:]) <= max(after[4:8]), after


def test_a_step_that_cannot_be_recorded_runs_kernel_by_kernel(pipes, monkeypatch):
    pipe, said = pipes["words"], []
    predict = pipe.model.predict

    def waits(x, *rest):
        float(x.sum())
        return predict(x, *rest)

    want = pipe(["a", "b"], steps=6, progress=False)
    monkeypatch.setattr(pipe.model, "predict", waits)
    with SamplingServer(pipe, batch_size=2, say=said.append) as server:
        for _ in range(2):
            assert near(server.submit(["a", "b"], steps=6).result(60), want)
    assert len(said) == 1 and "recording failed" in said[0] and not server.records


@pytest.mark.parametrize("kernels", [True, False])
def test_batches_that_leave_something_out_are_the_pipelines(tmp_path, monkeypatch, kernels):
    """Recorded with the server's recorder, beside other batches."""
    pipe = opendit.load(write(tmp_path / "classes.safetensors"), device="cuda", kernels=kernels)
    asked = [
        {"steps": 12, "cache": "taylor:3", "seed": 2**40},
        {"steps": 9, "guidance_every": 3, "sampler": "ddim"},
        {"steps": 10, "cache": "first_block:0.3"},
    ]
    with SamplingServer(pipe, batch_size=8, decode=lambda x: list(x.clone())) as server:
        beside = [server.submit([0, 4, 1], steps=5 + number) for number in range(4)]
        requests = [server.submit([3, 1, 4], **settings) for settings in asked]
        got = [torch.stack(request.result(120)) for request in requests]
        assert server.records and all(request.result(120) for request in beside)
    seen = []
    monkeypatch.setattr(type(pipe), "shown", lambda self, latents: seen.append(latents.clone()) or [0] * len(latents))
    for settings in asked:
        pipe([3, 1, 4], progress=False, **settings)
    assert all(map(torch.equal, got, seen)) and got[0].std() > 0.1
