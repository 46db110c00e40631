"""The sampling engine with public models: unequal captions, recorded steps, approximations, and two ranks."""

from dataclasses import replace

import pytest
import torch

from opendit.models import attention
from opendit.models.attention import CrossAttention
from opendit.parallel.mesh import Mesh
from opendit.sampling import fused_steps, prepared_model, sampling_engine
from opendit.sampling.sampling_engine import SamplingEngine
from tests.models.families.oracles import captions
from tests.numbers import largest
from tests.ranks import run_ranks
from tests.sampling.public import CASES, NULL, VALUES, WAYS, Case, drawn, exact, network, shared
from tests.sampling.tape import TapeRecorder

NAMES = [f"{case.family}, {case.sampler}" for case in CASES]


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference relative to the largest entry."""
    assert found.shape == wanted.shape and wanted.isfinite().all()
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_recorded_steps_draw_what_the_formula_draws(case, monkeypatch):
    """Batches with other caption lengths get separate recordings."""
    monkeypatch.setattr(sampling_engine, "can_fuse", fused_steps.fits_kernels)
    recorder = TapeRecorder()
    engine = SamplingEngine(network(case.family), case.objective, recorder=recorder, **case.settings)
    for number, latents in zip((0, 1, 2, 0), drawn(engine, case.family, numbers=(0, 1, 2, 0)), strict=True):
        assert off(latents, exact(case, number)) < 1e-5, number
    assert engine.records and recorder.recorded >= 3 and recorder.replayed >= 4
    fused = {loop.fused is not None for loop in engine.loops.values()}
    assert fused == {case.family == "wan" and case.sampler == "euler"}


APPROXIMATIONS = [{"cache": "taylor:2:1"}, {"cache": "first_block:10"}, {"guidance_every": 2}]


@pytest.mark.parametrize("asked", APPROXIMATIONS, ids=str)
@pytest.mark.parametrize("case", CASES[:3], ids=NAMES[:3])
def test_approximations_recorded_or_not(case, asked):
    if case.scale == 1 and "guidance_every" in asked:
        case = Case(case.family, case.sampler)  # FLUX.1's pipelines don't guide like this, but the engine can
    settings = case.settings | {"steps": 6} | asked
    recorded, eager = (
        SamplingEngine(network(case.family), case.objective, recorder=recorder, **settings)
        for recorder in (TapeRecorder(), None)
    )
    plain = SamplingEngine(network(case.family), case.objective, **(case.settings | {"steps": 6}))
    found, wanted, without = (drawn(engine, case.family, numbers=(0, 1)) for engine in (recorded, eager, plain))
    for one, other, third in zip(found, wanted, without, strict=True):
        assert off(one, other) < 1e-5 < off(one, third) < 1
    assert recorded.share_evaluated == eager.share_evaluated < 1


@pytest.mark.parametrize("share,times_made", [(1e9, 1), (0, 6)])
def test_captions_keys_and_values_are_made_once_a_prompt(share, times_made, monkeypatch):
    """They are recomputed in each of the 6 steps only if they take too much memory beside the weights."""
    made, make = [], CrossAttention.keys_values
    monkeypatch.setattr(prepared_model, "CAPTIONS_SHARE", share)
    monkeypatch.setattr(
        CrossAttention, "keys_values", lambda layer, *context: made.append(layer) or make(layer, *context)
    )
    case, model = next(case for case in CASES if case.family == "wan"), network("wan")
    engine = SamplingEngine(model, case.objective, **(case.settings | {"steps": 6}), table_bytes=1)
    for number in (0, 1):
        drawn(engine, "wan", numbers=(number,))
        assert len(made) == (1 + number) * times_made * len(model.blocks)


# (caption lengths in a step, with the empty caption last if guided; whether a mask is needed)
MASKS = [([40], False), ([20, NULL], False), ([40, NULL], True), ([40, 33], False), ([40, 20], True)]


@pytest.mark.parametrize("lengths,needed", MASKS, ids=str)
def test_captions_are_masked_only_where_one_has_fewer_tokens(lengths, needed, monkeypatch):
    """Z-Image pads captions to a multiple of 32 with tokens that are attended to."""
    seen, masked = [], attention.masked_attention
    monkeypatch.setattr(attention, "masked_attention", lambda *args: seen.append(args) or masked(*args))
    both = replace(captions("z_image", VALUES["z_image"], lengths, torch.float32), shortest=min(lengths))
    guided = NULL in lengths
    y, null = both[: len(lengths) - guided], both[-1:]
    settings = dict(steps=1, sampler="euler", cfg_scale=3.0 if guided else 1.0)
    engine = SamplingEngine(network("z_image"), CASES[1].objective, **settings)
    engine.sample(y, null, torch.arange(len(y)), 0)
    assert bool(seen) == needed


def compare(mesh: Mesh) -> list[tuple[str, list[float], bytes]]:
    """Draw all cases in all ways on this rank; return the differences from one process, and the latents."""
    found = []
    for case in CASES[:3]:
        wanted = [exact(case, number) for number in (0, 1)]
        for way in WAYS:
            model, around = shared(case, way, mesh, torch.float32)
            engine = SamplingEngine(model, case.objective, around=around, **case.settings)
            latents = drawn(engine, case.family, numbers=(0, 1))
            errors = [off(*pair) for pair in zip(latents, wanted, strict=True)]
            found.append((f"{case.family}, {way}", errors, torch.stack(latents).numpy().tobytes()))
    return found


def test_two_ranks_draw_what_one_draws():
    for (name, errors, latents), (_, others, others_latents) in zip(*run_ranks(2, compare), strict=True):
        assert largest([*errors, *others]) < 1e-5 and latents == others_latents, (name, errors)
