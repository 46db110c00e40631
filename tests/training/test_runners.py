"""Recorded micro-batches: the bookkeeping, with a recorder that needs no GPU. (tests/gpu/ has the real one.)"""

import pytest
import torch

from opendit.diffusion import DDPMObjective
from opendit.diffusion.random import Stream, normal
from opendit.kernels.select import select_kernels
from opendit.models import DiT, DiTConfig, TextCondition, TextConfig
from opendit.parallel.engines import PRECISIONS, build_engine
from opendit.training import runners as forward_backward
from opendit.training.runners import EAGER, ForwardBackward
from tests.models.test_dit import randomised
from tests.ranks import run_ranks

LABELS = DiTConfig((4, 4), 2, 2, 24, 2, 3, num_classes=3)
CAPTIONS = DiTConfig((4, 4), 2, 2, 24, 1, 3, text=TextConfig("t5", 8, 5, cross_attention=True))


class Recorder:
    """Stands in for CUDA graphs: tensors are made while recording, and every replay writes into the same ones."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, work, stream, pool):
        self.recorded += 1
        before = [None if g is None else g.clone() for g in self.engine.gradients]
        result = work()
        made = self.engine.gradients
        for gradient, old in zip(made, before, strict=True):  # a recording computes nothing
            if old is not None:
                gradient.copy_(old)

        def replay():
            self.replayed += 1
            if all(old is None for old in before):
                self.engine.optimizer.zero_grad()
            result.copy_(work())
            if all(old is None for old in before):
                for gradient, new in zip(made, self.engine.gradients, strict=True):
                    gradient.copy_(new)

        return result, replay


def engine_of(mesh, config, precision="fp32", speed=None):
    torch.manual_seed(0)
    model = randomised(DiT(config)).to(mesh.device)
    if speed is not None:
        dtype, head_dim = PRECISIONS[precision], config.hidden_size // config.num_heads
        kernels = select_kernels(speed, mesh.device, dtype, head_dim, config.tokens)
        model.use(ops=kernels.ops, attend=kernels.attend)
    return build_engine(model, mesh, plugin="zero2", precision=precision, lr=1e-3, grad_accumulation=2)


def micro_batch(config, number: int, mesh, size: int = 2):
    index = torch.arange(size, device=mesh.device) + 100 * mesh.rank
    x, noise = (normal(seed, number, index, Stream.NOISE, (2, *config.input_size)) for seed in (1, 2))
    t = (37 * index + number) % 1000
    if config.text is None:
        return x, t, noise, (index + number) % 3
    tokens = normal(3, number, index, Stream.NOISE, (5, 8))
    return x, t, noise, TextCondition(tokens, tokens[..., 0] < 1, tokens.mean(1))


def train(mesh, config, sizes: list[list[int]], recorder: Recorder | None, graph: bool = False, **how):
    """Masters after a step for each list of sizes of micro-batches, and all losses."""
    engine, objective, losses = engine_of(mesh, config, **how), DDPMObjective(), []
    run = ForwardBackward(engine, lambda x, t, e, y: objective.loss(engine.forward, x, t, e, y=y).mean(), graph=graph)
    if recorder is not None:
        run.graph, recorder.engine, forward_backward.record = True, engine, recorder
    assert run.note.startswith("forward and backward" if graph and mesh.device.type == "cuda" else "off")
    number = 0
    for step in sizes:
        for i, size in enumerate(step):
            losses.append(run(*micro_batch(config, number, mesh, size), last=i == len(step) - 1).clone())
            number += 1
        engine.step()
    assert "failed" not in run.note
    return {name: master.clone() for name, master in engine.masters().items()}, torch.stack(losses)


def both(mesh, config, sizes):
    """A run kernel by kernel and one with recordings: whether they agree to the bit, and what the recorder saw."""
    plain, recorder = train(mesh, config, sizes, None), Recorder()
    recorded = train(mesh, config, sizes, recorder)
    same = torch.equal(plain[1], recorded[1]) and all(torch.equal(recorded[0][n], m) for n, m in plain[0].items())
    return same, recorder.recorded, recorder.replayed


@pytest.mark.parametrize("config", (LABELS, CAPTIONS), ids=("labels", "captions"))
@pytest.mark.parametrize("world", (1, 2))
def test_replayed_steps_are_the_steps(world, config):
    for same, recorded, replayed in run_ranks(world, both, config, [[2]] * 8):
        assert same and recorded == 1 and replayed == 8 - EAGER


@pytest.mark.parametrize("world", (1, 2))
def test_accumulation_and_other_shapes(world):
    """Three micro-batches a step; now and then one of another size, as a first and as a later one of a step."""
    sizes = [[2, 2, 2]] * 5 + [[3, 2, 2], [2, 3, 2], [2, 2, 2]]
    for same, recorded, replayed in run_ranks(world, both, LABELS, sizes):
        assert same and recorded == 2
        # First micro-batches: steps 4, 5, 7, 8. Others: recorded in the fourth step; none after an eager first one.
        assert replayed == 4 + (2 + 2 + 1 + 2)


def fails(mesh):
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    said = []
    engine, objective = engine_of(mesh, LABELS), DDPMObjective()
    run = ForwardBackward(
        engine, lambda x, t, e, y: objective.loss(engine.forward, x, t, e, y=y).mean(), graph=True, say=said.append
    )
    run.graph, forward_backward.record = True, refuse
    for number in range(6):
        loss = run(*micro_batch(LABELS, number, mesh), last=True)
        assert loss.isfinite() and engine.step().finite
    return said


def why_off(mesh, plugin):
    engine = build_engine(DiT(LABELS), mesh, plugin=plugin, precision="bf16")
    return ForwardBackward(engine, None, graph=True).note, engine.no_graph


@pytest.mark.parametrize("plugin", ("zero2", "ddp", "gemini"))
def test_the_note_says_why_there_is_no_graph(plugin):
    ((note, reason),) = run_ranks(1, why_off, plugin)
    assert note == "off: it needs a CUDA GPU" and (plugin in reason) == (plugin != "zero2")


def test_a_recording_that_fails_is_said_once_and_training_goes_on():
    (said,) = run_ranks(1, fails)
    assert said == [
        "CUDA graph: recording failed, training goes on kernel by kernel: operation not permitted when stream is "
        "capturing"
    ]
