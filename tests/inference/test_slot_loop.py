"""Continuous batching draws what sample_latents draws, whoever else is in the batch and whenever they come and go."""

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.diffusion.objectives.flow import FlowTrajectory
from opendit.diffusion.samplers import SAMPLERS, Sampler
from opendit.diffusion.sampling import sample_latents
from opendit.diffusion.trajectory import Trajectory
from opendit.inference.engine import SamplingEngine
from opendit.inference.slot_inputs import StepTable
from opendit.inference.slot_loop import SampleKind, SlotLoop, SlotSample, batch_sizes
from tests.inference.tape import TapeRecorder
from tests.inference.test_engine import CAPTIONS, EVERY, LABELS, OBJECTIVES, conditions, fresh, off_by
from tests.models.test_zoo import CONFIGS, NAMED

STEPS = (1, 2, 3, 5, 8)


class Bench:
    """A model, and samples of it at random: numbers of steps, conditions, null conditions, scales and seeds."""

    def __init__(
        self, config, which, sampler, dtype=torch.float64, guided=True, channels=None, steps=STEPS, model=None
    ):
        self.objective = OBJECTIVES[which]
        self.model = fresh(config, self.objective).to(dtype) if model is None else model
        self.kind = SampleKind(sampler, guided, channels, config.input_size)
        self.config, joint = self.model.config, {}
        shape, device = (config.in_channels, *config.input_size), self.model.device
        numbers = self.config.in_channels, self.config.out_channels
        with torch.inference_mode():
            self.tables = {
                n: StepTable(self.objective, sampler, n, numbers, shape, joint, max(steps), device) for n in steps
            }
        self.y, self.null = (condition.to(device) for condition in conditions(config, 5))
        self.wanted = {}

    def sample(self, draw: random.Random) -> SlotSample:
        table, row, other = self.tables[draw.choice(list(self.tables))], draw.randrange(5), draw.randrange(5)
        scale = draw.choice([1.5, 3.0, 0.5]) if self.kind.guided else 1.0
        null = self.null if draw.random() < 0.5 else self.y[other : other + 1]
        scales = np.full(table.steps, scale, dtype=np.float32)
        return SlotSample(None, draw.randrange(9), table, self.y[row : row + 1], null, scales, draw.randrange(2**63))

    def want(self, sample: SlotSample) -> torch.Tensor:
        return sample_latents(
            self.model,
            sample.y,
            sample.null,
            torch.tensor([sample.number], device=self.model.device),
            objective=self.objective,
            seed=sample.seed,
            steps=sample.table.steps,
            sampler=self.kind.sampler,
            cfg_scale=float(sample.scales[0]),
            cfg_channels=self.kind.channels,
        )

    @torch.inference_mode()
    def run(self, samples: list[SlotSample], sizes=(1, 2, 4), memory=1 << 20, recorder=None, draw=None, drops=0.0):
        """All samples through a loop: they come when ``draw`` says so, and a share ``drops`` of them is taken away.
        Yields (sample, its latents)."""
        loop, waiting = SlotLoop(self.model, self.objective, self.kind, samples[0], sizes, memory), list(samples)
        draw = draw or random.Random(0)
        self.loop = loop
        while waiting or loop.live:
            count = min(loop.free, len(waiting), draw.randrange(sizes[-1] + 1))
            loop.admit(waiting[:count])
            del waiting[:count]
            loop.drop([sample for sample in loop.live if draw.random() < drops])
            if loop.live:
                ended = loop.advance(recorder, contextlib.nullcontext())
                yield from zip(ended, loop.latents(ended).unsqueeze(1).clone(), strict=True)
                loop.drop(ended)

    def compare(self, count: int, bound: float = 1e-6, seed: int = 0, **how) -> int:
        draw = random.Random(seed)
        samples, seen = [self.sample(draw) for _ in range(count)], 0
        for sample, got in self.run(samples, draw=draw, **how):
            assert off_by(got, self.want(sample)) < bound, (sample.table.steps, off_by(got, self.want(sample)))
            seen += 1
        assert seen == count or how.get("drops")
        return seen


@pytest.mark.parametrize(("which", "sampler"), EVERY)
def test_every_sampler(which, sampler):
    """Of classes and of captions; in float64, then in float32 (where the products of other shapes differ)."""
    recorder = TapeRecorder()
    Bench(LABELS, which, sampler, channels=1).compare(7, recorder=recorder)
    assert recorder.recorded >= 1 and recorder.replayed > 3
    Bench(LABELS, which, sampler, guided=False).compare(5)
    Bench(CAPTIONS, which, sampler, torch.float32).compare(5, bound=3e-5, recorder=TapeRecorder())


@pytest.mark.parametrize("config", CONFIGS, ids=NAMED)
def test_every_architecture(config):
    Bench(config, "flow", "euler", steps=(2, 3)).compare(5, recorder=TapeRecorder())


@pytest.mark.parametrize("memory", [1, 60_000], ids=["a tick", "a few"])
def test_little_memory(memory):
    """Cells of one tick, or some; captions' keys are made in every step then."""
    for config in (LABELS, CAPTIONS):
        bench = Bench(config, "ddpm", "ddpm")
        bench.compare(6, memory=memory, recorder=TapeRecorder())
        ticks = bench.loop.network.cells / 4
        assert ticks == 1 if memory == 1 else ticks < 8


LABEL_BENCH = {name: Bench(LABELS, which, name) for which, name in (("ddpm", "ddpm"), ("edm", "heun"))}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(LABEL_BENCH)), st.integers(0, 2**32), st.integers(1, 12), st.booleans(), st.booleans())
def test_any_schedule(name, seed, count, recorded, dropped):
    """Arrivals at random times, and some who leave before they are done."""
    bench = LABEL_BENCH[name]
    recorder = TapeRecorder() if recorded else None
    bench.compare(
        count, seed=seed, recorder=recorder, drops=0.1 * dropped, sizes=(1, 3, 5), memory=1 << (8 + seed % 12)
    )


@pytest.mark.parametrize(("which", "sampler"), [("ddpm", "ddpm"), ("ddpm", "dpmpp"), ("edm", "heun")])
def test_bit_for_bit_the_engine_in_a_batch_of_one_size(which, sampler):
    """Samples that start at other steps than the others, in float32: the same bits as the engine's batch of four."""
    bench = Bench(LABELS, which, sampler, torch.float32, steps=(5,))
    draw = random.Random(1)
    samples = [replace(bench.sample(draw), null=bench.null, number=number, seed=3) for number in range(4)]
    samples = [replace(sample, scales=samples[0].scales) for sample in samples]
    engine = SamplingEngine(bench.model, bench.objective, steps=5, sampler=sampler, cfg_scale=samples[0].scales[0])
    want = engine.sample(torch.cat([sample.y for sample in samples]), bench.null, torch.arange(4), 3)
    others = [bench.sample(draw) for _ in range(4)]
    mixed = [*others[:2], samples[0], others[2], samples[1], samples[2], others[3], samples[3]]
    got = {id(sample): latents for sample, latents in bench.run(mixed, sizes=(4,), draw=random.Random(2))}
    assert all(torch.equal(got[id(sample)][0], want[number]) for number, sample in enumerate(samples))


def test_the_batch_grows_at_once_and_shrinks_when_a_smaller_one_has_been_enough():
    bench = Bench(LABELS, "ddpm", "ddim", steps=(4, 12))
    draw, sizes = random.Random(0), []
    samples = [bench.sample(draw) for _ in range(6)]
    with torch.inference_mode():
        loop = SlotLoop(bench.model, bench.objective, bench.kind, samples[0], batch_sizes(6), 1 << 20)
        samples = [replace(s, table=bench.tables[12 if n == 5 else 4], scales=np.full(12, 2.0, np.float32))
                   for n, s in enumerate(samples)]  # fmt: skip
        loop.admit(samples[:1])
        loop.advance()
        loop.admit(samples[1:])
        for _ in range(12):
            before = loop.computed
            ended = loop.advance()
            sizes.append(loop.computed - before)
            for sample, got in zip(ended, loop.latents(ended), strict=True):
                want = sample_latents(bench.model, sample.y, sample.null, torch.tensor([sample.number]),
                                      objective=bench.objective, seed=sample.seed, steps=sample.table.steps,
                                      sampler="ddim", cfg_scale=2.0)  # fmt: skip
                assert off_by(got[None], want) < 1e-6
            loop.drop(ended)
    assert sizes == [6] * 5 + [1] * 7 and not loop.live
    assert batch_sizes(64) == (1, 2, *range(4, 65, 4)) and batch_sizes(1) == (1,) and batch_sizes(6) == (1, 2, 4, 6)


@pytest.mark.parametrize("memory", [1, 1 << 24], ids=["a tick", "all"])
@pytest.mark.parametrize(("which", "sampler"), [("ddpm", "ddim"), ("ddpm", "ddpm"), ("edm", "euler")])
def test_free_rows_stay_finite(which, sampler, memory):
    """Rows that nobody has, at first and behind their trajectory's end, beside others whose steps would make them grow
    a hundredfold each."""
    bench = Bench(LABELS, which, sampler, torch.float32, steps=(2, 40))
    sample = bench.sample(random.Random(0))
    short, long = (
        replace(sample, table=table, scales=np.full(table.steps, 2.0, np.float32)) for table in bench.tables.values()
    )
    with torch.inference_mode():
        loop = SlotLoop(bench.model, bench.objective, bench.kind, short, (4,), memory)
        for come, ticks in [([short, long], 40), *[([short], 2)] * 25]:
            loop.admit([replace(sample) for sample in come])
            for _ in range(ticks):
                loop.drop(loop.advance())
                assert all(part.isfinite().all() for part in loop.state)


def test_a_sampler_whose_steps_differ_is_refused(monkeypatch):
    monkeypatch.setattr(SAMPLERS["ddpm"], "mixed_inputs", Sampler.mixed_inputs)
    with pytest.raises(ValueError, match="sampler ddpm: its steps differ"):
        Bench(LABELS, "ddpm", "ddpm")


def test_an_objective_of_which_nothing_is_said_is_refused(monkeypatch):
    monkeypatch.setattr(FlowTrajectory, "joint", Trajectory.joint)
    with pytest.raises(ValueError, match="objective flow: the server can't mix"):
        Bench(LABELS, "flow", "euler")
