"""Sharded averages are compared with full averages in float64, for every plugin and uneven sizes."""

import pytest
import torch

from opendit.checkpoint.ema import EMA, FIRST_WARMUP, WARMUP
from tests.parallel.engines.test_engines import CONFIG, build_model, loss_of
from tests.ranks import run_ranks

STEPS, DECAYS = 4, (0.9, 0.5)


def averaged(mesh, plugin: str, precision: str, warmup: float):
    """Return full averages, the masters after every step, this rank's bytes, and the results of ``swapped``."""
    from opendit.parallel.engines import build_engine

    engine = build_engine(build_model(), mesh, plugin=plugin, precision=precision, lr=1e-2)

    def masters():
        return {name: engine.layout.gather(name, engine.master(name)).clone() for name in engine.shapes}

    ema, history = EMA(engine, DECAYS, warmup), [masters()]
    for step in range(STEPS):
        index = mesh.rank + torch.arange(2) * mesh.world_size
        with engine.micro_batch(last=True):
            engine.backward(loss_of(engine.forward, step, index))
        ema.update(engine.step().finite)
        history.append(masters())
    averages = [{name: full.clone() for name, full in ema.gather(which)} for which in range(len(DECAYS))]
    return averages, history, ema.bytes_per_rank(), swapped(mesh, engine, ema, averages[0])


def swapped(mesh, engine, ema, average) -> tuple[bool, bool, bool]:
    """Return whether ``applied`` sets the averages, they differ from the weights, and an error restores the weights."""
    if engine.whole:
        model = engine.module
    else:
        model = build_model().to(engine.dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inside = True
    with pytest.raises(KeyError), ema.applied(model):
        inside = all(torch.equal(p, average[name].to(p.dtype)) for name, p in model.named_parameters())
        raise KeyError
    after = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    different = any(not torch.equal(average[name].to(p.dtype), p) for name, p in model.named_parameters())
    return inside, different, after


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_are_the_parts_of_the_whole_average(world):
    cases = [("zero2", "fp32", 0), ("ddp", "fp32", WARMUP), ("gemini", "bf16", WARMUP), ("zero2", "bf16", WARMUP)]
    cases += [("fsdp", "bf16", FIRST_WARMUP)]
    for case, ranks in zip(cases, zip(*run_ranks(world, all_averaged, cases), strict=True), strict=True):
        warmup, parameters = case[2], CONFIG.parameters()
        averages, history, _, _ = ranks[0]
        for which, decay in enumerate(DECAYS):
            expected = {name: first.double() for name, first in history[0].items()}
            for n, masters in enumerate(history[1:]):  # the definition in float64
                d = min(decay, 1 - warmup / (n + 10)) if warmup else decay
                expected = {name: d * old + (1 - d) * masters[name].double() for name, old in expected.items()}
            for name, value in expected.items():
                assert (averages[which][name] - value).abs().max() < 1e-6, (case, decay, name)
        assert all(all(swap) for *_, swap in ranks), (case, [swap for *_, swap in ranks])
        for *_, size, _ in ranks:  # a share of the memory, rounded up to whole elements for each parameter
            if case[0] not in ("gemini", "fsdp"):  # gemini divides by chunks, fsdp by rows
                assert size <= 4 * len(DECAYS) * (parameters / world + len(history[0]))
        assert sum(size for *_, size, _ in ranks) == 4 * len(DECAYS) * parameters


def all_averaged(mesh, cases):
    return [averaged(mesh, *case) for case in cases]


def test_warm_up_is_the_stated_rule():
    class Engine:
        def masters(self):
            return {"w": torch.ones(3)}

        def new_averages(self, count):
            return [{"w": torch.empty(3)} for _ in range(count)]

        def wait_for_averages(self):
            pass

        def attach_averages(self, *_):
            return False

    for warmup, expected in ((WARMUP, [0, 1 / 11, 2 / 12]), (FIRST_WARMUP, [1 / 10, 2 / 11, 3 / 12])):
        ema, decays = EMA(Engine(), 0.999, warmup), []
        for _ in range(3):
            decays.append(ema.decays_after(ema.updates).item())
            ema.update(torch.tensor(True))
        assert decays == pytest.approx(expected, rel=1e-15, abs=1e-15)
        ema.update(torch.tensor(False))
        assert ema.updates == 3
        assert ema.decays_after(torch.tensor(10**6)).item() == 0.999
    assert EMA(Engine(), 0.999).decays_after(torch.tensor(0)).item() == 0.999
