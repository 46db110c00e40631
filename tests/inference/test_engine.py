"""The sampling engine draws what sample_latents draws, kernel by kernel and recorded."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opendit.diffusion import DDPMObjective, EDMObjective, FlowObjective
from opendit.diffusion.sampling import sample_latents
from opendit.inference.engine import SamplingEngine
from opendit.models import DiTConfig, TextCondition, VDiTConfig, build_model, encode_bytes
from tests.inference.tape import TapeRecorder
from tests.models.test_dit import randomised
from tests.models.test_zoo import CLIP, CONFIGS, NAMED, PICTURE, TEXT

OBJECTIVES = {
    "ddpm": DDPMObjective(),
    "v": DDPMObjective("v"),
    "flow": FlowObjective(3.0),
    "edm": EDMObjective(),
}
EVERY = [(which, name) for which, objective in OBJECTIVES.items() for name in objective.samplers]
LABELS = DiTConfig(**PICTURE, num_classes=5)
CAPTIONS = VDiTConfig(**CLIP, text=TEXT)


def fresh(config, objective=OBJECTIVES["ddpm"]):
    torch.manual_seed(0)
    return randomised(build_model(replace(config, learn_sigma=objective.learn_sigma))).eval()


def conditions(config, count: int):
    """y of ``count`` samples, and the null condition."""
    generator, text = torch.Generator().manual_seed(count), config.text
    if text is None:
        return torch.randint(0, config.num_classes, (count,), generator=generator), torch.tensor([config.num_classes])
    if text.inside:
        words = ["seven", "a b", "an eight", "x", "yz"]
        return encode_bytes(words[:count], text.max_tokens), encode_bytes([""], text.max_tokens)
    tokens = torch.randn(count + 1, text.max_tokens, text.width, generator=generator)
    mask = torch.arange(text.max_tokens) <= torch.arange(count + 1).unsqueeze(1) % text.max_tokens
    both = TextCondition(tokens, mask, tokens.mean(1))
    return both[1:], both[:1]


def off_by(got: Tensor, want: Tensor) -> float:
    """The largest difference over the largest number."""
    assert got.shape == want.shape and got.dtype == want.dtype == torch.float32 and want.isfinite().all()
    return ((got - want).abs().max() / want.abs().max()).item()


def compare(
    config, which: str, sampler: str | None = None, counts=(3,), dtype=torch.float64, **settings
) -> SamplingEngine:
    """Draws batches by an engine, recorded (on CPU), and by the reference; returns the engine.

    Weights in float64 leave the rounding of the sampler's own arithmetic, which is the same; in float32, products of
    other shapes differ by what a network of random weights makes of it in a few steps.
    """
    bound = 1e-6 if dtype == torch.float64 else 1e-5
    objective = OBJECTIVES[which]
    model = fresh(config, objective).to(dtype)
    table_bytes = settings.pop("table_bytes", 1 << 28)
    settings = {"steps": 5, "sampler": sampler, "cfg_scale": 3.0, **settings}
    recorder = TapeRecorder()
    engine = SamplingEngine(model, objective, **settings, table_bytes=table_bytes, recorder=recorder)
    assert engine.records
    for seed, count in enumerate(counts):
        y, null = conditions(config, count)
        index = torch.arange(count) * 7 + seed
        want = sample_latents(model, y, null, index, objective=objective, seed=seed, **settings)
        got = engine.sample(y, null, index, seed)
        assert off_by(got, want) < bound, (which, sampler, count, off_by(got, want))
    assert recorder.replayed > 0
    return engine


@pytest.mark.parametrize("config", CONFIGS, ids=NAMED)
@pytest.mark.parametrize("which", ["ddpm", "flow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_architecture(config, which, dtype):
    compare(config, which, counts=(3, 3), dtype=dtype)


@pytest.mark.parametrize(("which", "sampler"), EVERY)
@pytest.mark.parametrize("config", [LABELS, CAPTIONS], ids=["labels", "captions"])
def test_every_sampler_guided_or_not_and_in_an_interval(which, sampler, config):
    """Two batches of one size, the second of which is replayed from its first step on; and a smaller one."""
    compare(config, which, sampler, counts=(3, 3, 1))
    compare(config, which, sampler, cfg_scale=1.0)
    engine = compare(config, which, sampler, counts=(2, 2), steps=7, cfg_interval=(0.3, 5.0), cfg_channels=2)
    assert len({kind for loop in engine._loops.values() for kind in loop.recordings}) >= 2


@pytest.mark.parametrize(("which", "sampler"), [("ddpm", "ddpm"), ("edm", "heun"), ("flow", "euler")])
def test_tables_of_a_few_steps(which, sampler):
    """One step in the tables, and three of eight (the last ones fewer)."""
    for memory in (1, 3 * 2 * 4 * 8 * 48 * 14):
        engine = compare(LABELS, which, sampler, counts=(3, 2, 3), steps=8, table_bytes=memory)
        (capacity,) = {loop.network.capacity for size, loop in engine._loops.items() if size == 3}
        assert capacity == 1 if memory == 1 else 1 < capacity < 8
    compare(CAPTIONS, which, sampler, counts=(2, 2), table_bytes=1)  # captions' keys are made in every step
