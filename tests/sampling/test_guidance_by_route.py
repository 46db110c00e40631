"""Guidance by a route, in recorded and fused steps, is compared with two model calls per evaluation."""

import pytest
import torch

from opendit.diffusion.objectives.base import sample_latents
from opendit.diffusion.random import draw_kept_tokens
from opendit.models.dit import DiTConfig
from opendit.models.variants import ECDiTConfig, MovieGenConfig, VDiTConfig
from opendit.parallel.mesh import init_mesh
from opendit.sampling import fused_steps, sampling_engine
from opendit.sampling.approximate_steps import weak_route
from opendit.sampling.sampling_engine import SamplingEngine
from tests.models.test_zoo import CLIP, EXPERTS, PICTURE, TEXT
from tests.parallel.test_sequence import strategy
from tests.ranks import run_ranks
from tests.sampling.tape import TapeRecorder
from tests.sampling.test_sampling_engine import OBJECTIVES, SPRINT, conditions, fresh, off_by

DEEP = PICTURE | {"depth": 4}
CONFIGS = {
    "sprint": (SPRINT, "route"),
    "sprint with captions": (DiTConfig(**DEEP, text=TEXT, sprint=(2, 4), norm="rms", positions="rope"), "route"),
    "tread": (DiTConfig(**DEEP, num_classes=5, positions="rope"), "1:3:0.6"),
    "tread from the first block": (DiTConfig(**DEEP, num_classes=5), "0:3:0.6"),
    "tread of clips with captions": (VDiTConfig(**CLIP | {"depth": 4}, text=TEXT), "1:4:0.5"),
    "tread with positions in blocks": (MovieGenConfig(**CLIP | {"depth": 3}, num_classes=5), "1:2:0.5"),
}
INDEX = torch.arange(3)
WAYS = {
    "plain": {},
    "first block": {"cache": "first_block:1e-9"},
    "interval": {"cfg_interval": (0.3, 5.0), "steps": 7},
    "channels": {"cfg_channels": 2},
}


class Reference:
    """Both halves of the network, which :func:`sample_latents` calls once per evaluation."""

    def __init__(self, model, route, samples: int, evaluations: int):
        self.model, self.route, self.samples, self.evaluations, self.calls = model, route, samples, evaluations, 0
        model.route = route.first, route.last

    def __call__(self, x, t, y):
        step, self.calls = self.calls // self.evaluations, self.calls + 1
        if len(x) == self.samples:
            return self.model(x, t, y)
        (x, same), (t, _), rows = x.chunk(2), t.chunk(2), slice(self.samples)
        assert torch.equal(x, same)
        if self.route.fused:
            weak = self.model(x, t, y[self.samples :], dropped=torch.ones(self.samples, dtype=torch.bool))
        else:
            tokens = self.model.config.tokens
            kept = draw_kept_tokens(self.route, tokens, 0, step, torch.zeros(1, dtype=torch.int64))
            weak = self.model(x, t, y[rows], kept=kept.expand(self.samples, -1))
        return torch.cat([self.model(x, t, y[rows]), weak])


def compare(name: str, which: str, sampler: str, **settings) -> SamplingEngine:
    config, by = CONFIGS[name]
    objective, samples, cache = OBJECTIVES[which], 3, settings.pop("cache", None)
    model = fresh(config, objective).double()
    settings = {"steps": 4, "sampler": sampler, "cfg_scale": 3.0, **settings}
    recorder = TapeRecorder()
    engine = SamplingEngine(model, objective, **settings, cache=cache, guidance_by=by, recorder=recorder)
    for seed in (0, 1):
        y, null = conditions(config, samples)
        index = torch.arange(samples) * 7 + seed
        forward = Reference(model, weak_route(config, by), samples, 2 if sampler == "heun" else 1)
        want = sample_latents(model, y, null, index, objective=objective, seed=seed, **settings, forward=forward)
        assert off_by(engine.sample(y, null, index, seed), want) < 1e-6, (name, which, sampler)
    assert engine.records and recorder.replayed > 0
    return engine


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_latents_are_those_of_two_calls_of_the_model(name, way):
    engine = compare(name, "flow", "euler", **WAYS[way])
    if name == "sprint" and way == "plain":  # two of four blocks in the second half
        assert engine.share_evaluated == 0.75


def test_fused_steps_and_two_evaluations_a_step(monkeypatch):
    compare("sprint", "edm", "heun")
    monkeypatch.setattr(sampling_engine, "can_fuse", fused_steps.fits_kernels)
    for name in ("sprint", "tread"):
        engine = compare(name, "ddpm", "ddpm")
        assert all(loop.fused is not None for loop in engine.loops.values())


def shared(mesh) -> list[tuple[bool, float]]:
    """Return whether ranks divide the tokens, and their latents' difference from one process."""
    mesh, found = init_mesh(sequence_parallel=mesh.world_size), []
    for name in ("sprint", "tread"):
        config, by = CONFIGS[name]
        drawn, model = [], fresh(config, OBJECTIVES["flow"])
        for sequence in (None, strategy(mesh, "fastseq", config)):
            model.use(sequence=sequence)
            how = {"steps": 3, "sampler": "euler", "cfg_scale": 3.0, "guidance_by": by}
            drawn.append(SamplingEngine(model, OBJECTIVES["flow"], **how).sample(*conditions(config, 3), INDEX, 0))
        found.append((model.sequence(config.tokens, config.grid).rows < config.tokens, off_by(*drawn)))
    return found


def test_ranks_that_share_sequences_draw_what_one_process_does():
    for found in run_ranks(2, shared):
        assert all(divided and off < 1e-5 for divided, off in found), found


def test_what_can_not_be_guided_so_is_named():
    tread = CONFIGS["tread"][0]
    assert weak_route(tread, "null") is None and weak_route(SPRINT, "route").fused
    for config, by, said in (
        (tread, "route", "not trained with --route"),
        (tread, "1:3:0.5:sprint", "without a fused route; give null"),
        (SPRINT, "1:3:0.5", "without a fused route; give route"),
        (tread, "1:5:0.5", "end at block 4"),
        (tread, "1:3:0", "share above 0"),
        (tread, "weak", "is no route"),
        (ECDiTConfig(**PICTURE, num_classes=5, **EXPERTS), "0:1:0.5", "need all tokens"),
    ):
        with pytest.raises(ValueError, match=f"--guidance_by {by}: .*{said}"):
            weak_route(config, by)
    model = fresh(tread)
    with pytest.raises(ValueError, match="--guidance_by 1:3:0.5: halves"):
        SamplingEngine(model, OBJECTIVES["ddpm"], steps=2, guidance_by="1:3:0.5", around=lambda each: each)
