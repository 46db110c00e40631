"""The sampling engine draws the same samples as sample_latents, recorded and kernel by kernel."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opendit.diffusion.objectives import DDPMObjective, EDMObjective, FlowObjective
from opendit.diffusion.objectives.base import sample_in_batches, sample_latents
from opendit.models.conditioning import TextCondition, encode_bytes
from opendit.models.dit import DiTConfig
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import build_model
from opendit.sampling import prepared_model
from opendit.sampling.sampling_engine import SamplingEngine
from tests.models.test_dit import randomised
from tests.models.test_zoo import CLIP, CONFIGS, NAMED, PICTURE, TEXT
from tests.sampling.tape import TapeRecorder

OBJECTIVES = {
    "ddpm": DDPMObjective(),
    "v": DDPMObjective("v"),
    "flow": FlowObjective(3.0),
    "edm": EDMObjective(),
}
# "v" has the same samplers as "ddpm".
EVERY = [(which, name) for which, of in OBJECTIVES.items() for name in of.samplers[: 1 if which == "v" else None]]
LABELS = DiTConfig(**PICTURE, num_classes=5)
CAPTIONS = VDiTConfig(**CLIP, text=TEXT)
SPRINT = DiTConfig(**PICTURE | {"depth": 4}, num_classes=5, sprint=(1, 3))


def fresh(config, objective=OBJECTIVES["ddpm"]):
    torch.manual_seed(0)
    return randomised(build_model(replace(config, learn_sigma=objective.learn_sigma))).eval()


def conditions(config, count: int):
    """Return y for ``count`` samples, and the null condition."""
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
    """Return the largest difference relative to the largest number."""
    assert got.shape == want.shape and got.dtype == want.dtype == torch.float32 and want.isfinite().all()
    return ((got - want).abs().max() / want.abs().max()).item()


def compare(
    config, which: str, sampler: str | None = None, counts=(3,), dtype=torch.float64, **settings
) -> SamplingEngine:
    """Compare batches from a recorded engine with the reference; return the engine.

    With float64 weights, only the sampler's arithmetic rounds, which is the same. In float32, products of other shapes
    round differently, which grows over a few steps.
    """
    bound = 1e-6 if dtype == torch.float64 else 1e-5
    objective = OBJECTIVES[which]
    model = fresh(config, objective).to(dtype)
    table_bytes = settings.pop("table_bytes", 1 << 28)
    cache = settings.pop("cache", None)
    settings = {"steps": 5, "sampler": sampler, "cfg_scale": 3.0, **settings}
    recorder = TapeRecorder()
    engine = SamplingEngine(model, objective, **settings, cache=cache, table_bytes=table_bytes, recorder=recorder)
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
@pytest.mark.parametrize(("which", "dtype"), [("ddpm", torch.float64), ("flow", torch.float32)], ids=str)
def test_every_architecture(config, which, dtype):
    compare(config, which, counts=(3, 3), dtype=dtype)


@pytest.mark.parametrize("cache", [None, "first_block:1e-9"])
@pytest.mark.parametrize("route", [(1, 3), (2, 4)])
def test_fused_routes_with_blocks_in_parts_and_in_one(route, cache):
    engine = compare(replace(SPRINT, sprint=route), "flow", counts=(3, 3), cache=cache)
    assert engine.share_evaluated == 1


@pytest.mark.parametrize(
    ("config", "which", "sampler"),
    [
        *((LABELS, *every) for every in EVERY),
        *((CAPTIONS, which, objective.samplers[0]) for which, objective in OBJECTIVES.items()),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_every_sampler_guided_or_not_and_in_an_interval(which, sampler, config):
    """Two batches of one size, the second of which is replayed completely, and a smaller one."""
    compare(config, which, sampler, counts=(3, 3, 1))
    compare(config, which, sampler, cfg_scale=1.0)
    engine = compare(config, which, sampler, counts=(2, 2), steps=7, cfg_interval=(0.3, 5.0), cfg_channels=2)
    assert len({kind for loop in engine.loops.values() for kind in loop.recordings}) >= 2


@pytest.mark.parametrize(("which", "sampler"), [("ddpm", "ddpm"), ("edm", "heun"), ("flow", "euler")])
def test_tables_of_a_few_steps(which, sampler, monkeypatch):
    """The tables hold one of eight steps, or a few."""
    monkeypatch.setattr(prepared_model, "CAPTIONS_SHARE", 0)
    for memory in (1, 3 * 2 * 4 * 8 * 48 * 14):
        engine = compare(LABELS, which, sampler, counts=(3, 2, 3), steps=8, table_bytes=memory)
        (capacity,) = {loop.network.capacity for size, loop in engine.loops.items() if size == 3}
        assert capacity == 1 if memory == 1 else 1 < capacity < 8
    compare(CAPTIONS, which, sampler, counts=(2, 2), table_bytes=1)  # captions' keys are made in every step


def test_batches_and_the_last_one_is_smaller():
    objective, model = OBJECTIVES["ddpm"], fresh(CAPTIONS).double()
    y, null = conditions(CAPTIONS, 5)
    settings = {"steps": 4, "sampler": "ddpm", "cfg_scale": 3.0}
    engine = SamplingEngine(model, objective, **settings, recorder=TapeRecorder())
    reference = sample_in_batches(model, y, null, torch.arange(5) + 3, 5, objective=objective, seed=1, **settings)
    ((_, want),) = reference
    for size in (2, 3):
        drawn = list(engine.batches(y, null, torch.arange(5) + 3, size, 1))
        assert [index.tolist() for index, _ in drawn] == [part.tolist() for part in (torch.arange(5) + 3).split(size)]
        assert off_by(torch.cat([latents for _, latents in drawn]), want) < 1e-6


@pytest.mark.parametrize("config", [LABELS, CAPTIONS], ids=["labels", "captions"])
def test_a_negative_condition_for_every_sample(config):
    objective, model = OBJECTIVES["ddpm"], fresh(config).double()
    (y, _), (negative, _) = conditions(config, 3), conditions(config, 4)
    settings = {"steps": 4, "sampler": "ddim", "cfg_scale": 3.0}
    engine = SamplingEngine(model, objective, **settings, recorder=TapeRecorder())
    for null in (negative[:3], negative[3:], negative[:3]):  # other tables, and back
        want = sample_latents(model, y, null, torch.arange(3), objective=objective, seed=0, **settings)
        assert off_by(engine.sample(y, null, torch.arange(3), 0), want) < 1e-6
    (_, one), (_, two) = engine.batches(y[:2], negative[:2], torch.arange(2), 1, 0)
    assert not torch.equal(one[0], two[0])


def test_a_recording_has_nothing_of_the_callers_tensors():
    objective, model = OBJECTIVES["ddpm"], fresh(CAPTIONS).double()
    settings = {"steps": 4, "sampler": "ddpm", "cfg_scale": 3.0}
    engine = SamplingEngine(model, objective, **settings, recorder=TapeRecorder())
    y, null = conditions(CAPTIONS, 2)
    index = torch.arange(2)
    engine.sample(y, null, index, 0)
    for tensor in (y.tokens, y.pooled, null.tokens, null.pooled):
        tensor.fill_(float("nan"))
    y.mask.fill_(False), index.fill_(99)
    given = *conditions(CAPTIONS, 2), torch.arange(2)
    want = sample_latents(model, *given, objective=objective, seed=5, **settings)
    got = engine.sample(*given, 5)
    kept = got.clone()
    assert off_by(got, want) < 1e-6
    engine.sample(*given, 6)
    assert torch.equal(got, kept)  # returned latents belong to the caller


def test_recordings_of_the_sizes_used_last_are_kept():
    objective, model = OBJECTIVES["flow"], fresh(LABELS, OBJECTIVES["flow"]).double()
    recorder = TapeRecorder()
    engine = SamplingEngine(model, objective, steps=4, recorder=recorder, loops=2)
    recorded = []
    for size in (1, 2, 1, 3, 1, 2):
        engine.sample(*conditions(LABELS, size), torch.arange(size), 0)
        recorded.append(recorder.recorded)
    assert recorded == [1, 2, 2, 3, 3, 4] and list(engine.loops) == [1, 2]


class Refuses:
    """A recorder whose second recording fails."""

    def __init__(self):
        self.tape, self.asked = TapeRecorder(), 0

    def record(self, work):
        self.asked += 1
        if self.asked == 2:
            raise RuntimeError("operation not permitted\nwhile it records")
        return self.tape.record(work)


def test_a_recording_that_fails(caplog):
    objective, model = OBJECTIVES["ddpm"], fresh(LABELS).double()
    settings = {"steps": 8, "sampler": "ddim", "cfg_scale": 3.0, "cfg_interval": (0.3, 5.0)}
    recorder = Refuses()
    engine = SamplingEngine(model, objective, **settings, recorder=recorder)
    given = *conditions(LABELS, 2), torch.arange(2)
    want = sample_latents(model, *given, objective=objective, seed=0, **settings)
    for _ in range(2):
        assert off_by(engine.sample(*given, 0), want) < 1e-6
    assert recorder.asked == 2 and not engine.records
    assert caplog.messages == ["CUDA graph: kernel by kernel: recording failed: operation not permitted"]


def test_an_error_of_a_step_is_no_failed_recording(caplog):
    model = fresh(LABELS)
    engine = SamplingEngine(model, OBJECTIVES["ddpm"], steps=3, recorder=TapeRecorder())
    model.predict = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.sample(*conditions(LABELS, 2), torch.arange(2), 0)
    assert not caplog.messages and engine.records


@pytest.mark.parametrize("size", [(2, 4, 3), (1, 8, 6), (6, 8, 6)], ids=str)
def test_other_sizes_than_the_models(size):
    compare(CAPTIONS, "ddpm", "ddim", counts=(2, 2), size=size)


def test_without_a_null_class():
    objective, config = OBJECTIVES["ddpm"], replace(LABELS, null_class=False)
    model, y = fresh(config).double(), torch.tensor([0, 4])
    engine = SamplingEngine(model, objective, steps=3, sampler="ddim", cfg_scale=1.0)
    settings = dict(objective=objective, seed=0, steps=3, sampler="ddim", cfg_scale=1.0)
    null = torch.tensor([5])  # no row of the table
    want = sample_latents(model, y, null, torch.arange(2), **settings)
    assert off_by(engine.sample(y, null, torch.arange(2), 0), want) < 1e-6


def test_in_autocast():
    objective, model = OBJECTIVES["ddpm"], fresh(LABELS)
    given = *conditions(LABELS, 3), torch.arange(3)
    with torch.autocast("cpu", torch.bfloat16):
        engine = SamplingEngine(model, objective, steps=5, sampler="ddim", recorder=TapeRecorder())
        got = engine.sample(*given, 0)
        want = sample_latents(model, *given, objective=objective, seed=0, steps=5, sampler="ddim")
    assert not engine.records and "autocast" in engine.note
    assert (got - want).norm() < 0.05 * want.norm()


def test_progress_and_callback():
    objective = OBJECTIVES["flow"]
    engine = SamplingEngine(fresh(LABELS, objective), objective, steps=4, cfg_scale=1.0, recorder=TapeRecorder())
    steps, seen = [], []

    def progress(of):
        for i in of:
            steps.append(i)
            yield i

    given = *conditions(LABELS, 2), torch.arange(2), 0
    got = engine.sample(*given, progress=progress, callback=lambda i, x: seen.append((i, x)))
    assert steps == [i for i, _ in seen] == [0, 1, 2, 3] and torch.equal(seen[-1][1], got)
    assert not torch.equal(seen[0][1], got)


def test_what_does_not_fit_is_refused():
    engine = SamplingEngine(fresh(LABELS), OBJECTIVES["ddpm"], steps=3)
    assert not engine.records and "CUDA graphs need a GPU" in engine.note
    y, null = conditions(LABELS, 3)
    with pytest.raises(ValueError, match="3 conditions for 2 samples"):
        engine.sample(y, null, torch.arange(2), 0)
    for wrong in (torch.tensor([5, 5]), torch.tensor([[5]])):
        with pytest.raises(ValueError, match="does not expand"):
            engine.sample(y, wrong, torch.arange(3), 0)
    with pytest.raises(ValueError, match="--sampler euler"):
        SamplingEngine(fresh(LABELS), OBJECTIVES["ddpm"], steps=3, sampler="euler")
    with pytest.raises(ValueError, match="LOW < HIGH"):
        SamplingEngine(fresh(LABELS), OBJECTIVES["ddpm"], steps=3, cfg_interval=(3.0, 1.0)).sample(
            y, null, torch.arange(3), 0
        )
