"""Test every architecture with every objective: all parameters learn, and every sampler draws with guidance."""

from dataclasses import replace

import pytest
import torch

from opendit.diffusion.objectives import DDPMObjective, EDMObjective, FlowObjective
from opendit.diffusion.objectives.base import sample_latents
from opendit.models.conditioning import TextCondition
from opendit.models.dit import DiTConfig
from opendit.models.variants import ECDiTConfig, MovieGenConfig, STDiTConfig, VDiTConfig
from tests.models.test_zoo import CLIP, EXPERTS, OPTIONS, PICTURE, TEXT, inputs, model_of
from tests.objectives import losses_of

OBJECTIVES = {
    "ddpm": DDPMObjective(),
    "v, min-SNR": DDPMObjective("v", 5.0),
    "flow": FlowObjective(3.0),
    "edm": EDMObjective(),
}
ARCHITECTURES = {
    "DiT": DiTConfig(**PICTURE, num_classes=5),
    "DiT, options": DiTConfig(**PICTURE, text=TEXT, bias=False, **OPTIONS),
    "vDiT": VDiTConfig(**CLIP, num_classes=5),
    "ST-DiT": STDiTConfig(**CLIP, text=TEXT, full_attention=True),
    "MovieGen": MovieGenConfig(**CLIP, text=TEXT, kv_heads=2),
    "EC-DiT": ECDiTConfig(**PICTURE, num_classes=5, **EXPERTS),
}
INDEX = torch.arange(3)
INTERVAL = (0.3, 5.0)  # with three steps, every sampler has some inside and some outside


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread: on a busy machine, waiting for threads takes longer than these small products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[(o, a) for a in ARCHITECTURES for o in OBJECTIVES], ids=" by ".join)
def crossed(request):
    """Return an objective, a model for it, latents, their conditions, and the null condition."""
    objective, config = OBJECTIVES[request.param[0]], ARCHITECTURES[request.param[1]]
    model = model_of(replace(config, learn_sigma=objective.learn_sigma)).float()
    x0, _, y = inputs(model.config, dtype=torch.float32)
    if config.text is None:
        return objective, model, x0, y, torch.tensor([config.num_classes])
    tokens = torch.randn(1, TEXT.max_tokens, TEXT.width)
    return objective, model, x0, y, TextCondition(tokens, torch.arange(TEXT.max_tokens)[None] < 1, tokens[:, 0])


def test_every_parameter_learns(crossed):
    objective, model, x0, y, _ = crossed
    loss = losses_of(objective, model, x0, objective.times(0, 1, INDEX), torch.randn_like(x0), y=y)
    assert loss.shape == (3,) and loss.isfinite().all() and loss.min() > 0
    loss.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_every_sampler_draws_guided_in_and_out_of_an_interval(crossed):
    objective, model, x0, y, null = crossed
    for sampler in objective.samplers:
        settings = dict(objective=objective, seed=0, steps=3, sampler=sampler)
        everywhere, partly, nowhere = (
            sample_latents(model, y, null, INDEX, **settings, cfg_scale=scale, cfg_interval=interval)
            for scale, interval in ((3.0, None), (3.0, INTERVAL), (1.0, None))
        )
        for drawn, other in ((everywhere, partly), (partly, nowhere), (nowhere, everywhere)):
            assert drawn.shape == x0.shape and drawn.dtype == torch.float32 and drawn.isfinite().all(), sampler
            apart = (drawn - other).flatten(1).norm(dim=1) / other.flatten(1).norm(dim=1)
            assert apart.min() > 1e-4, (sampler, apart)  # for every sample; rounding error is 1e-6
