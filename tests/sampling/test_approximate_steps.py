"""Approximations (--cache, --guidance_every) are compared with loops written from the formulas."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opendit.diffusion.objectives.base import sample_latents
from opendit.diffusion.random import initial_noise, keyed_noise
from opendit.diffusion.samplers import SAMPLERS
from opendit.models.blocks import run_blocks
from opendit.sampling.sampling_engine import SamplingEngine
from tests.models.test_zoo import CONFIGS, NAMED
from tests.sampling.tape import TapeRecorder
from tests.sampling.test_sampling_engine import CAPTIONS, EVERY, LABELS, OBJECTIVES, conditions, fresh, off_by

SCALE = 3.0

# ------------------------------------------------------------------------------------------------ a reference


class Reference:
    """Guided sampling as a plain loop over the model's public parts, one half of guidance at a time.

    Subclasses override ``blocks`` or ``difference`` to approximate.
    """

    def __init__(self, model, objective, steps: int, sampler: str):
        self.model, self.objective, self.steps, self.name = model, objective, steps, sampler
        self.i = self.number = 0
        self.full: list[int] = []  # steps of the last run that evaluated all blocks

    def draw(self, y, null, index: Tensor, seed: int, interval=None) -> Tensor:
        config = self.model.config
        shape = (config.in_channels, *config.input_size)
        trajectory = self.objective.trajectory(self.steps, SAMPLERS[self.name].even_in_noise)
        self.null = null[torch.zeros(len(y), dtype=torch.int64)] if len(null) == 1 else null
        self.y, self.kept, self.differences, self.full, self.run = y, {}, {}, [], 0
        sampler = SAMPLERS[self.name](
            self.objective.network(self._guided),
            trajectory,
            torch.zeros(len(y), *shape),
            keyed_noise(seed, index, shape),
        )
        state, before = sampler.init(trajectory.start(initial_noise(seed, index, shape))), None
        for self.i in range(sampler.steps):
            level = trajectory.levels[self.i]
            self.guides = interval is None or interval[0] <= level <= interval[1]
            if self.guides != before:  # nothing from earlier steps is used
                self.kept, self.differences, self.run, before = {}, {}, 0, self.guides
            self.number = 0
            with torch.inference_mode():
                state = sampler.step(state, self.i)
            self.run += 1
        return state.x

    def _guided(self, x: Tensor, t: Tensor) -> Tensor:
        number, self.number, channels = self.number, self.number + 1, x.shape[1]
        cond = self.network(x, t, self.y, ("cond", number))
        if not self.guides:
            return cond.float()
        difference = self.difference(x, t, cond, number)
        eps = cond[:, :channels] + (SCALE - 1) * difference[:, :channels]
        return torch.cat((eps, cond[:, channels:]), dim=1).float()

    def difference(self, x, t, cond, number) -> Tensor:
        return cond - self.network(x, t, self.null, ("null", number))

    def network(self, x: Tensor, t: Tensor, y, key) -> Tensor:
        """Run the model in parts: embedding, ``blocks``, final layer."""
        model, alone = self.model, x.shape[2:-2] == (1,)  # a picture is repeated over a patch's frames
        c, context = model.condition(t, y)
        *modulations, last = model.modulations(c)
        tokens, grid = model.embed(x.expand(-1, -1, model.config.patch[0], -1, -1) if alone else x)
        out = self.blocks(tokens, modulations, context, grid, key)
        out = model.unpatchify(model.final_layer(out, last), grid.sizes)
        return out.mean(dim=2, keepdim=True) if alone else out

    def blocks(self, x, modulations, context, grid, key) -> Tensor:
        return run_blocks(self.model.blocks, x, modulations, context, grid)


class Taylor(Reference):
    """Some steps evaluate all blocks. Others interpolate every block's residual with a polynomial through the last
    evaluations, from a system of linear equations."""

    def __init__(self, *args, order: int):
        super().__init__(*args)
        self.order, self.chosen = order, []

    def blocks(self, x, modulations, context, grid, key):
        known = self.kept.setdefault(key, [])
        if self.i in self.chosen:
            residuals = []
            for block, m in zip(self.model.blocks, modulations, strict=True):
                after = block(x, m, context, grid)
                residuals.append(after - x)
                x = after
            known.append((self.i, torch.stack(residuals)))
            self.full.append(self.i)
            return x
        used = known[-self.order - 1 :]
        # sum_j a_j i^j = F_i at the evaluated steps i, relative to this step, so the result is a_0.
        powers = torch.tensor(
            [[float(i - self.i) ** j for j in range(len(used))] for i, _ in used], dtype=torch.float64
        )
        values = torch.stack([f for _, f in used])
        (predicted, *_) = torch.linalg.solve(powers, values.flatten(1)).view_as(values)
        for residual in predicted:
            x = x + residual
        return x


class FirstBlock(Reference):
    """Both halves are one batch, and each step decides once whether it evaluates all blocks."""

    def __init__(self, *args, threshold: float):
        super().__init__(*args)
        self.threshold, self.first, self.changes = threshold, None, []

    def _guided(self, x, t):
        number, self.number, channels = self.number, self.number + 1, x.shape[1]
        n = len(x)
        if not self.guides:
            return self.network(x, t, self.y, ("cond", number)).float()
        y = getattr(self.y, "cat", torch.cat)((self.y, self.null))
        cond, null = self.network(torch.cat((x, x)), torch.cat((t, t)), y, ("both", number)).split(n)
        eps = null[:, :channels] + SCALE * (cond[:, :channels] - null[:, :channels])
        return torch.cat((eps, cond[:, channels:]), dim=1).float()

    def blocks(self, x, modulations, context, grid, key):
        blocks, number = self.model.blocks, key[1]
        x1 = blocks[0](x, modulations[0], context, grid)
        if number == 0:
            r = x1 - x
            self.all = self.run == 0
            if not self.all:
                change = ((r - self.first).abs().mean() / self.first.abs().mean()).item()
                self.changes.append(change)
                self.all = not change < self.threshold
            if self.all:
                self.first = r
                self.full.append(self.i)
        if not self.all:
            return x1 + self.kept[key]
        x = x1
        for block, m in zip(blocks[1:], modulations[1:], strict=True):
            x = block(x, m, context, grid)
        self.kept[key] = x - x1
        return x


class Reused(Reference):
    def __init__(self, *args, every: int):
        super().__init__(*args)
        self.every = every

    def difference(self, x, t, cond, number):
        if self.run % self.every == 0:
            self.differences[number] = super().difference(x, t, cond, number)
        return self.differences[number]


def compare(config, which: str, sampler: str, reference: type, how: dict, asked: dict, *, steps=9, interval=None):
    """Compare two batches of an engine, recorded and not, with a reference; return engine and reference."""
    objective = OBJECTIVES[which]
    model = fresh(config, objective).double()
    loop = reference(model, objective, steps, sampler, **how)
    settings = {"steps": steps, "sampler": sampler, "cfg_scale": SCALE, "cfg_interval": interval, **asked}
    recorder = TapeRecorder()
    engine = SamplingEngine(model, objective, **settings, recorder=recorder)
    plain = SamplingEngine(model, objective, **settings, record=False)
    loop.chosen = [i for i, step in enumerate(engine.loop_of(2).plan) if step.mode.blocks == "all"]
    for seed in (0, 1):
        y, null = conditions(config, 2)
        index = torch.arange(2) * 7 + seed
        want = loop.draw(y, null, index, seed, interval)
        for one in (engine, plain):
            assert off_by(one.sample(y, null, index, seed), want) < 1e-6, (which, sampler, asked)
        assert engine.share_evaluated == plain.share_evaluated < 1
    exact = sample_latents(
        model, y, null, index, objective=objective, seed=1, steps=steps, sampler=sampler, cfg_scale=SCALE,
        cfg_interval=interval,
    )  # fmt: skip
    assert off_by(want, exact) > 1e-5  # something was left out
    assert recorder.replayed > 0
    return engine, loop


# ------------------------------------------------------------------------------------------------ engines


@pytest.mark.parametrize(("which", "sampler"), EVERY)
def test_extrapolated_blocks_with_every_sampler(which, sampler):
    engine, loop = compare(LABELS, which, sampler, Taylor, {"order": 2}, {"cache": "taylor:3"})
    assert len(set(loop.full)) == 3 and loop.full[0] == 0 and loop.full[-1] == 8


@pytest.mark.parametrize("config", CONFIGS, ids=NAMED)
def test_extrapolated_blocks_of_every_architecture(config):
    compare(config, "flow", "euler", Taylor, {"order": 1}, {"cache": "taylor:2:1"}, steps=6)


@pytest.mark.parametrize("order", [0, 1, 3])
def test_orders(order):
    compare(CAPTIONS, "ddpm", "ddim", Taylor, {"order": order}, {"cache": f"taylor:2:{order}"})


@pytest.mark.parametrize(
    ("reference", "how", "asked"),
    [
        (Taylor, {"order": 2}, {"cache": "taylor:2"}),
        (FirstBlock, {"threshold": 0.3}, {"cache": "first_block:0.3"}),
        (Reused, {"every": 2}, {"guidance_every": 2}),
    ],
    ids=["taylor", "first_block", "guidance_every"],
)
@pytest.mark.parametrize(("which", "sampler"), [("ddpm", "ddpm"), ("edm", "heun")])
def test_in_an_interval_of_noise_everything_begins_anew_where_guidance_does(reference, how, asked, which, sampler):
    compare(CAPTIONS, which, sampler, reference, how, asked, steps=14, interval=(0.3, 5.0))


SOME = [("ddpm", "ddpm"), ("v", "ddim"), ("flow", "heun"), ("edm", "dpmpp")]
KINDS = list({config.kind: config for config in CONFIGS}.values())


@pytest.mark.parametrize(("which", "sampler"), SOME)
def test_first_block_cache(which, sampler):
    """The threshold is between changes seen in a first run, so only some steps evaluate all blocks."""
    objective = OBJECTIVES[which]
    look = FirstBlock(fresh(LABELS, objective).double(), objective, 9, sampler, threshold=0.0)
    look.draw(*conditions(LABELS, 2), torch.arange(2) * 7 + 1, 1)
    threshold = round(sorted(look.changes)[-2], 3)
    how = {"threshold": threshold}
    _, loop = compare(LABELS, which, sampler, FirstBlock, how, {"cache": f"first_block:{threshold}"})
    assert 1 < len(loop.full) < 9


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_first_block_cache_of_every_kind_of_model(config):
    compare(config, "flow", "euler", FirstBlock, {"threshold": 0.9}, {"cache": "first_block:0.9"}, steps=6)


@pytest.mark.parametrize(("which", "sampler"), SOME)
def test_guidance_that_is_reused(which, sampler):
    compare(LABELS, which, sampler, Reused, {"every": 3}, {"guidance_every": 3}, steps=6)


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_settings_that_leave_nothing_out_are_exact_bit_for_bit(record, dtype):
    objective, model = OBJECTIVES["ddpm"], fresh(CAPTIONS).to(dtype)
    given = *conditions(CAPTIONS, 3), torch.arange(3), 0
    drawn = []
    for asked in ({}, {"guidance_every": 1}, {"cache": "first_block:0"}):
        recorder = TapeRecorder() if record else None
        engine = SamplingEngine(model, objective, steps=5, sampler="ddpm", recorder=recorder, **asked)
        drawn += [engine.sample(*given), engine.sample(*given)]
        assert engine.records == record and engine.share_evaluated == 1
    assert all(torch.equal(one, drawn[0]) for one in drawn)


def test_a_sample_is_what_its_seed_says_in_any_batch():
    """A fixed schedule does not depend on the batch, and infinite values left by one batch do not reach the next."""
    objective, model = OBJECTIVES["flow"], fresh(LABELS, OBJECTIVES["flow"]).double()
    y, null = conditions(LABELS, 4)
    for asked in ({"cache": "taylor:3"}, {"guidance_every": 3}):
        engine = SamplingEngine(model, objective, steps=8, recorder=TapeRecorder(), **asked)
        whole = engine.sample(y, null, torch.arange(4), 0)
        for rows in (slice(0, 1), slice(1, 4), slice(2, 3)):
            assert off_by(engine.sample(y[rows], null, torch.arange(4)[rows], 0), whole[rows]) < 1e-6
        for kept in ([*loop.stack.kept.values()] for loop in engine.loops.values() if asked.get("cache")):
            for tensor in kept:
                with torch.inference_mode():
                    tensor.fill_(float("inf"))
        assert torch.equal(engine.sample(y, null, torch.arange(4), 0), whole)


def test_blocks_that_are_evaluated():
    """In 50 guided steps, taylor:3 evaluates 17 and guidance_every 4 evaluates the unconditional half in 13. The first
    block counts as one block."""
    objective, model = OBJECTIVES["flow"], fresh(LABELS, OBJECTIVES["flow"])
    given, blocks = (*conditions(LABELS, 1), torch.arange(1), 0), len(model.blocks)
    counts = {}
    for name, asked in {
        "exact": {},
        "taylor": {"cache": "taylor:3"},
        "guidance": {"guidance_every": 4},
        "first": {"cache": "first_block:10"},
    }.items():
        engine = SamplingEngine(model, objective, steps=50, recorder=TapeRecorder(), **asked)
        for _ in range(2):
            engine.sample(*given)
            counts.setdefault(name, []).append(round(engine.share_evaluated * 100 * blocks, 6))
    assert counts == {
        "exact": [100 * blocks] * 2,
        "taylor": [34 * blocks] * 2,
        "guidance": [63 * blocks] * 2,
        "first": [100 + 2 * (blocks - 1)] * 2,
    }


class LookedUp(TorchDispatchMode):
    """Counts the numbers that are looked up in some tensors, for each step of an engine."""

    def __init__(self, tensors):
        super().__init__()
        self.places, self.steps = {tensor.untyped_storage().data_ptr() for tensor in tensors}, [0]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor):
            if args[0].untyped_storage().data_ptr() in self.places:
                self.steps[-1] += result.numel()
        return result


@pytest.mark.parametrize(
    ("cache", "shared"),
    [(None, False), ("taylor:2", False), ("first_block:10", False), (None, True), ("taylor:2", True)],
)
def test_only_what_is_evaluated_is_looked_up(cache, shared):
    """A step only looks up the modulations of evaluated blocks, and their captions' keys and values if ranks share a
    batch. The last layer's modulations are always looked up."""
    objective, model = OBJECTIVES["flow"], fresh(CAPTIONS, OBJECTIVES["flow"])
    given, depth, steps = (*conditions(CAPTIONS, 2), torch.arange(2), 0), len(model.blocks), 6
    around = (lambda model: model) if shared else None
    engine = SamplingEngine(model, objective, steps=steps, record=False, cache=cache, around=around)
    engine.sample(*given)  # allocates everything
    loop = engine.loop_of(2)
    network, counts = loop.network, []
    for tensors in ([network.table], network.contexts):
        with LookedUp(tensors) as looked_up:
            engine.sample(*given, callback=lambda i, x, to=looked_up: to.steps.append(0))
        counts.append(looked_up.steps[:steps])
    run = [depth if step.mode.blocks == "all" else int(step.mode.blocks == "first") for step in loop.plan]
    assert run == {None: [depth] * 6, "taylor:2": run, "first_block:10": [depth] + [1] * 5}[cache]
    assert (0 in run) == (cache == "taylor:2") and depth > 1
    block, last, rows = 6 * 48, 2 * 48, 4  # numbers per row; a batch of two has both halves
    assert counts[0] == [rows * (block * blocks + last) for blocks in run]
    keys_and_values = sum(part[0].numel() for part in network.contexts[:2])
    mask = network.contexts[-1][0].numel()
    # On one rank they are views.
    assert counts[1] == [rows * (keys_and_values * blocks + mask * (blocks > 0)) * shared for blocks in run]
