"""Fused steps, here with the kernels' torch references, are compared with the samplers in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opendit.diffusion.guidance import GuidedWithin, cfg_model
from opendit.diffusion.random import initial_noise, keyed_noise
from opendit.diffusion.samplers import SAMPLERS, sample
from opendit.models.dit import DiTConfig
from opendit.models.zoo import build_model
from opendit.sampling import fused_steps, prepared_model, sampling_engine
from opendit.sampling.sampling_engine import SamplingEngine
from tests.models.test_zoo import CONFIGS, NAMED
from tests.sampling.tape import TapeRecorder
from tests.sampling.test_sampling_engine import CAPTIONS, EVERY, LABELS, OBJECTIVES, SPRINT, conditions, fresh, off_by

SETTINGS = {
    "guided": {},
    "unguided": {"cfg_scale": 1.0},
    "interval": {"cfg_interval": (0.3, 5.0), "cfg_channels": 2, "steps": 7},
}


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(sampling_engine, "can_fuse", fused_steps.fits_kernels)


@torch.inference_mode()
def exact(model, objective, given, seed: int, *, steps, sampler, cfg_scale, cfg_interval=None, cfg_channels=None):
    """Return the samples with weights, state and noise in float64."""
    y, null, index = given
    shape = (model.config.in_channels, *model.config.input_size)
    guided = cfg_model(model, y, null, cfg_scale, cfg_channels)
    if cfg_interval is not None:
        conditional = cfg_model(model, y, null, 1.0)
        guided = GuidedWithin(cfg_interval, objective.noise_level, guided, conditional)
    trajectory = objective.trajectory(steps, SAMPLERS[sampler].even_in_noise)
    x = trajectory.start(initial_noise(seed, index, shape)).double()
    noise = keyed_noise(seed, index, shape)
    return sample(sampler, objective.network(guided), x, trajectory, noise_fn=lambda k: noise(k).double())


def compare(config, which: str, sampler: str, counts=(3, 3, 1), table_bytes: int = 1 << 28, **settings):
    objective, recorder = OBJECTIVES[which], TapeRecorder()
    model = fresh(config, objective).double()
    settings = {"steps": 5, "sampler": sampler, "cfg_scale": 3.0, **settings}
    engine = SamplingEngine(model, objective, **settings, table_bytes=table_bytes, recorder=recorder)
    for seed, count in enumerate(counts):
        given = *conditions(config, count), torch.arange(count) * 7 + seed
        want = exact(model, objective, given, seed, **settings).float()
        assert off_by(engine.sample(*given, seed), want) < 1e-6, (which, sampler, count)
    repeated = config.input_size[:-2] == (1,) and config.patch[0] > 1  # pictures in a clip model are not fused
    unfused = repeated or config.patch_bottleneck is not None
    assert {loop.fused is None for loop in engine.loops.values()} == {unfused} and recorder.replayed
    return engine


# UniPC is left out: its steps have three state tensors, more than the kernel writes.
@pytest.mark.parametrize(("which", "sampler"), [pair for pair in EVERY if pair[1] != "unipc"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_sampler(which, sampler, settings):
    engine = compare(LABELS, which, sampler, **settings)
    kinds = {kind for loop in engine.loops.values() for kind in loop.recordings}
    assert len(kinds) >= (2 if "cfg_interval" in settings else 1)


@pytest.mark.parametrize("config", [*CONFIGS, SPRINT], ids=[*NAMED, "sprint"])
def test_every_architecture(config):
    compare(config, "ddpm", "ddpm", counts=(2, 2))


@pytest.mark.parametrize(("which", "sampler"), [("ddpm", "ddpm"), ("edm", "heun")])
def test_tables_of_a_few_steps(which, sampler, monkeypatch):
    monkeypatch.setattr(prepared_model, "CAPTIONS_SHARE", 0)
    for memory in (1, 3 * 2 * 4 * 8 * 48 * 14):
        engine = compare(CAPTIONS, which, sampler, counts=(3, 2, 3), steps=8, table_bytes=memory)
        assert {loop.fused.capacity for size, loop in engine.loops.items() if size == 3} < set(range(1, 8))


class Counts(TorchDispatchMode):
    """Records operators that launch a kernel, which are those that return no view."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in function.name():
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_a_step_is_few_operators_beside_its_blocks(monkeypatch):
    """The operators around the network's blocks are counted; each of the three fused kernels counts as one."""

    def counted_as_one(name: str) -> None:
        function = getattr(fused_steps.sampling_step, name)

        def call(*args, **kwargs):
            before = len(counted.names)
            result = function(*args, **kwargs)
            counted.names[before:] = [name]
            return result

        monkeypatch.setattr(fused_steps.sampling_step, name, call)

    config = DiTConfig((8, 8), 2, 4, 64, 2, 2, num_classes=3)
    model = build_model(config).eval()
    engine = SamplingEngine(model, OBJECTIVES["ddpm"], steps=4, sampler="ddpm", record=False)
    engine.sample(*conditions(config, 2), torch.arange(2), 0)
    (loop,) = engine.loops.values()
    for name in ("take_step_reference", "embed_patches_reference", "guided_update_reference"):
        counted_as_one(name)
    with torch.inference_mode():
        loop.step.zero_()
    with torch.inference_mode(), Counts() as counted:
        loop.advance(0)
    step = counted.names
    x, m = torch.randn(4, 16, 64), torch.randn(4, 6 * 64)
    with torch.inference_mode(), Counts() as counted:
        model.blocks[0](x, m)
        block = list(counted.names)
        model.final_layer(x, m[:, :128])
    final = counted.names[len(block) :]
    before = ["take_step_reference", "embed_patches_reference", "aten::index_select"]
    assert step == [*before, *2 * block, *final, "guided_update_reference"]
