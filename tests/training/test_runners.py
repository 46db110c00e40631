"""Runners: the step that they make, and the CUDA graphs with a fake recorder. tests/gpu/ tests real graphs."""

import contextlib
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import opendit
import train as train_program
from opendit.diffusion.objectives import DDPMObjective, EDMObjective, FlowObjective
from opendit.diffusion.objectives.meanflow import MeanFlowObjective
from opendit.diffusion.random import Stream, normal
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import TextCondition, TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.parallel import supervisor
from opendit.parallel.engines import PRECISIONS, build_engine
from opendit.training import build
from opendit.training.micro_batch import MicroBatch
from opendit.training.runners import GRAPH_WARMUP, CUDAGraphRunner, build_runner
from tests.messages import logged
from tests.models.families.oracles import captions
from tests.models.test_dit import randomised
from tests.numbers import off_by
from tests.ranks import run_ranks
from tests.sampling.public import SIZES, VALUES, network
from tests.training.test_train import QUIET, TINY
from train import EagerPasses

LABELS = DiTConfig((4, 4), 2, 2, 24, 2, 3, num_classes=3)
SPRINT = replace(LABELS, sprint=(1, 2))  # its first five micro-batches have a route
CAPTIONS = DiTConfig((4, 4), 2, 2, 24, 1, 3, text=TextConfig("t5", 8, 5, cross_attention=True))


class Recorder:
    """A fake of CUDA graphs. Tensors are made while recording, and every replay writes into the same ones."""

    def __init__(self, engine):
        self.engine, self.recorded, self.replayed, self.beside = engine, 0, 0, 0

    @contextlib.contextmanager
    def side_stream(self):
        self.beside += 1
        yield

    def record(self, work):
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


def engine_of(mesh, config, precision="fp32", speed=None, accumulation=2):
    torch.manual_seed(0)
    model = randomised(DiT(config)).to(mesh.device)
    if speed is not None:
        dtype, head_dim = PRECISIONS[precision], config.hidden_size // config.num_heads
        kernels = select_kernels(speed, mesh.device, dtype, head_dim, config.tokens)
        model.use(ops=kernels.ops, attend=kernels.attend)
    return build_engine(model, mesh, plugin="zero2", precision=precision, lr=1e-3, grad_accumulation=accumulation)


def micro_batch(config, number: int, mesh, size: int = 2) -> MicroBatch:
    index = torch.arange(size, device=mesh.device) + 100 * mesh.rank
    x, noise = (normal(seed, number, index, Stream.NOISE, (2, *config.input_size)) for seed in (1, 2))
    t = (37 * index + number) % 1000
    if config.text is None:
        kept = torch.tensor([[0, 1 + number % 3]], device=mesh.device).expand(size, -1)
        routed = {"kept": kept if number < 5 else None, "dropped": index % 2 == number % 3} if config.sprint else {}
        return MicroBatch(x, t, noise, (index + number) % 3, **routed)
    tokens = normal(3, number, index, Stream.NOISE, (5, 8))
    return MicroBatch(x, t, noise, TextCondition(tokens, tokens[..., 0] < 1, tokens.mean(1)))


def train(mesh, config, sizes: list[list[int]], recorder=None, graph: bool = False, **how):
    """Return the masters after one step for each list of micro-batch sizes, all losses, and the recorder. All lists
    must have the same length."""
    engine, objective, losses = engine_of(mesh, config, **how), DDPMObjective(), []
    runner = build_runner(EagerPasses(engine, objective, len(sizes[0])), graph=graph)
    assert runner.note.startswith("forward and backward" if graph and mesh.device.type == "cuda" else "off")
    if recorder is not None:
        recorder = recorder(engine)
        runner = CUDAGraphRunner(EagerPasses(engine, objective, len(sizes[0])), recorder)
    number = 0
    for step in sizes:
        parts = (micro_batch(config, number + i, mesh, size) for i, size in enumerate(step))
        losses.append(runner.train_step(parts).loss)
        number += len(step)
    assert "failed" not in runner.note
    return {name: master.clone() for name, master in engine.masters().items()}, torch.stack(losses), recorder


def both(mesh, config, sizes):
    """Compare an eager run with a recorded one. Return whether they are equal, and both counts of the recorder."""
    plain, recorded = train(mesh, config, sizes), train(mesh, config, sizes, Recorder)
    same = torch.equal(plain[1], recorded[1]) and all(torch.equal(recorded[0][n], m) for n, m in plain[0].items())
    recorder = recorded[2]
    assert recorder.beside == sum(map(len, sizes)) - recorder.replayed  # what is not replayed runs on the side stream
    return same, recorder.recorded, recorder.replayed


@pytest.mark.parametrize("config", (LABELS, CAPTIONS), ids=("labels", "captions"))
@pytest.mark.parametrize("world", (1, 2))
def test_replayed_steps_are_the_steps(world, config):
    for same, recorded, replayed in run_ranks(world, both, config, [[2]] * 8):
        assert same and recorded == 1 and replayed == 8 - GRAPH_WARMUP


def test_a_step_is_recorded_again_where_a_route_ends():
    ((same, recorded, replayed),) = run_ranks(1, both, SPRINT, [[2]] * 10)
    assert same and recorded == 2 and replayed == 10 - 2 * GRAPH_WARMUP


@pytest.mark.parametrize("world", (1, 2))
def test_accumulation_and_other_shapes(world):
    """Three micro-batches a step. Some have another size, both as the first in a step and later."""
    sizes = [[2, 2, 2]] * 5 + [[3, 2, 2], [2, 3, 2], [2, 2, 2]]
    for same, recorded, replayed in run_ranks(world, both, LABELS, sizes):
        assert same and recorded == 2
        # First micro-batches: steps 4, 5, 7, 8. Others: recorded in step 4, none after an eager first one.
        assert replayed == 4 + (2 + 2 + 1 + 2)


def closed(mesh):
    class Watched(Recorder):
        """Keeps a weak reference to the recording, to see if anything still holds it."""

        def record(self, work):
            result, replay = super().record(work)
            self.held = weakref.ref(replay)
            return result, replay

    engine = engine_of(mesh, LABELS, accumulation=1)
    recorder = Watched(engine)
    runner = CUDAGraphRunner(EagerPasses(engine, DDPMObjective()), recorder)
    for number in range(GRAPH_WARMUP + 2):
        result = runner.train_step([micro_batch(LABELS, number, mesh)])
    before = recorder.held() is not None
    runner.close()
    return before, recorder.held() is None, bool(result.loss.isfinite())


def test_a_closed_runner_holds_no_recording():
    """NCCL waits forever to destroy a communicator that a recorded graph still uses."""
    assert run_ranks(1, closed) == [(True, True, True)]


def fails(mesh):
    class Refuses(Recorder):
        def record(self, work):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    engine = engine_of(mesh, LABELS, accumulation=1)
    runner = CUDAGraphRunner(EagerPasses(engine, DDPMObjective()), Refuses(engine))
    with logged() as said:
        for number in range(6):
            result = runner.train_step([micro_batch(LABELS, number, mesh)])
            assert result.loss.isfinite() and result.finite
    return said, runner.note


def test_a_recording_that_fails_is_said_once_and_training_goes_on():
    ((said, note),) = run_ranks(1, fails)
    why = "recording failed, training goes on kernel by kernel: operation not permitted when stream is capturing"
    assert said == [f"CUDA graph: {why}"] and note == why


def why_off(mesh, plugin):
    engine = build_engine(DiT(LABELS), mesh, plugin=plugin, precision="bf16")
    notes = [build_runner(EagerPasses(engine, DDPMObjective()), graph=graph).note for graph in (True, False)]
    return *notes, build_runner(EagerPasses(engine, MeanFlowObjective()), graph=True).note, engine.no_graph


@pytest.mark.parametrize("plugin", ("zero2", "ddp", "gemini"))
def test_the_note_says_why_there_is_no_graph(plugin):
    ((note, not_asked, of_meanflow, reason),) = run_ranks(1, why_off, plugin)
    assert note == "off: it needs a CUDA GPU" and (plugin in reason) == (plugin != "zero2")
    assert of_meanflow == "off: --objective meanflow draws the number of a step's intervals"
    assert not_asked == "off: --enable_cuda_graph is off"


ROOT = Path(__file__).resolve().parents[2]
FIRST_DERIVATIVE = """
import contextlib, torch
from types import SimpleNamespace
from opendit.models.dit import DiT, DiTConfig
from opendit.training.runners import TargetNetwork
engine = SimpleNamespace(module=DiT(DiTConfig((4, 4), 2, 2, 24, 2, 3, num_classes=3)), autocast=contextlib.nullcontext)
network, x, time = TargetNetwork(engine, torch.tensor([0, 2])), torch.ones(2, 2, 4, 4), torch.ones(2)
print(network.derivative(x, time, x, time, torch.arange(2)).shape)
"""


def test_the_first_derivative_of_meanflow_shows_no_warning_of_torch():
    command = [sys.executable, "-c", FIRST_DERIVATIVE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("torch.Size([2, ") and done.stderr == ""


class Plain(torch.nn.Module):
    """A network with known gradients. It returns w x_t."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([0.5]))

    def forward(self, x, t, y):
        return self.w * x


def plain_step(mesh, plugin: str):
    """Return a step's events, whether steps with wrong numbers of micro-batches were made, the loss and the norm."""
    engine = build_engine(Plain(), mesh, plugin=plugin, precision="fp32", lr=1e-2, grad_clip=0.0, grad_accumulation=3)
    objective, order = FlowObjective(), []

    def parts(count: int):
        for number in range(count):
            order.append(f"load {number}")
            yield given[number]

    def forward_ended():
        order.append("forward")

    index = torch.arange(4) + 10 * mesh.rank
    given = []
    for number in range(4):
        x0, noise = (normal(seed, number, index, Stream.NOISE, (3, 5)) for seed in (5, 6))
        given.append(MicroBatch(x0, objective.times(0, number, index), noise, index))
    true_around, true_backward, true_step = engine.micro_batch, engine.backward, engine.step
    engine.micro_batch = lambda last: (order.append(f"last {last}"), true_around(last))[1]
    engine.backward = lambda loss: (order.append("backward"), true_backward(loss))
    engine.step = lambda: (order.append("step"), true_step())[1]
    runner = build_runner(EagerPasses(engine, objective, 3, forward_ended))
    stepped = []
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"3 micro-batches, got {count}"):
            runner.train_step(parts(count))
        stepped.append("step" in order)
        engine.adam.zero_grad()
        if plugin == "zero2":
            engine.optimizer.zero_grad()
        order.clear()
    result = runner.train_step(parts(3))
    return order, stepped, result.loss.item(), result.grad_norm.item()


def by_hand(ranks: int) -> tuple[list[float], float]:
    """Return each rank's loss in float64 and the gradient norm. The loss is the mean of (w x_t - (noise - x_0))^2."""
    losses, gradient = [], 0.0
    for rank in range(ranks):
        index, loss = torch.arange(4) + 10 * rank, 0.0
        for number in range(3):
            x0, noise = (normal(seed, number, index, Stream.NOISE, (3, 5)).double() for seed in (5, 6))
            t = FlowObjective().times(0, number, index).view(-1, 1, 1)
            x_t = (1 - t) * x0 + t * noise
            error = 0.5 * x_t - (noise - x0)
            loss += error.square().mean().item() / 3
            gradient += (2 * error * x_t).mean().item() / 3 / ranks
        losses.append(loss)
    return losses, abs(gradient)


def plain_steps(mesh) -> list:
    return [plain_step(mesh, plugin) for plugin in ("zero2", "ddp")]


def test_a_step_is_the_mean_of_its_micro_batches():
    losses, gradient = by_hand(2)
    one = ["forward", "backward"]
    expected = ["load 0", "last False", *one, "load 1", "last False", *one, "load 2", "last True", *one]
    expected += ["step"]
    for rank, plugins in enumerate(run_ranks(2, plain_steps)):
        for order, stepped, loss, norm in plugins:
            assert order == expected  # each micro-batch is loaded after the previous one is done
            assert not any(stepped)
            assert loss == pytest.approx(losses[rank], rel=1e-5) and norm == pytest.approx(gradient, rel=1e-4)


def test_the_runner_calls_the_model_between_the_objective_s_halves():
    for objective in (DDPMObjective("v", 5.0), FlowObjective(3.0), EDMObjective()):
        index = torch.arange(3)
        x0, noise = (normal(seed, 0, index, Stream.NOISE, (2, 4, 4)) for seed in (1, 2))
        given = MicroBatch(x0, objective.times(0, 1, index), noise, torch.tensor([2, 0, 1]))
        called = []

        class Engine:
            def forward(self, x, t, y, called=called, objective=objective):
                called.append((x, t, y))
                return torch.cat((x, -x), 1) if objective.learn_sigma else -x

        losses = EagerPasses(Engine(), objective).losses(given)
        prepared = objective.prepare(*given[:3])
        ((x, t, y),) = called
        assert torch.equal(x, prepared.x_t) and torch.equal(t, prepared.timestep) and y is given.condition
        output = torch.cat((x, -x), 1) if objective.learn_sigma else -x
        assert torch.equal(losses, objective.loss(output, prepared)) and losses.shape == (3,)


def of_captions(mesh, lengths: list[list[int]]):
    """Return Z-Image's losses for captions of these lengths, first eager and then recorded, and the numbers of
    recordings and replays."""
    losses, recorder = [], None
    for recorded in (False, True):
        model, objective = network("z_image").requires_grad_(True).train(), FlowObjective(3.0)
        engine = build_engine(model, mesh, plugin="zero2", precision="fp32", lr=1e-3)
        passes = EagerPasses(engine, objective)
        recorder = Recorder(engine)
        runner = CUDAGraphRunner(passes, recorder) if recorded else build_runner(passes)
        for number, part in enumerate(lengths):
            torch.manual_seed(number)
            y = captions("z_image", VALUES["z_image"], part, torch.float32, padded=64)
            x, noise = torch.randn(2, len(part), 4, *SIZES["z_image"])
            given = MicroBatch(x, torch.rand(len(part)), noise, replace(y, shortest=min(part)))
            losses.append(runner.train_step([given]).loss.item())
    return losses, recorder.recorded, recorder.replayed


FULL, PADDED = [64, 64], [64, 20]


@pytest.mark.parametrize("first,replayed", [(FULL, 2), (PADDED, 4)], ids=["full", "padded"])
def test_a_recording_without_a_mask_is_for_full_captions(first, replayed):
    """Z-Image masks only padded captions. A graph recorded with a mask also works for full ones."""
    lengths = [first] * GRAPH_WARMUP + [first, PADDED, FULL, [40, 64]]
    ((losses, recorded, count),) = run_ranks(1, of_captions, lengths)
    eager, others = losses[: len(lengths)], losses[len(lengths) :]
    assert off_by(others, eager) < 1e-5 and (recorded, count) == (1, replayed)


@pytest.mark.parametrize("config", (LABELS, CAPTIONS), ids=("labels", "captions"))
def test_a_clone_of_a_micro_batch_has_its_own_memory(config):
    class Mesh:
        device, rank = torch.device("cpu"), 0

    given = micro_batch(config, 1, Mesh)
    copy = given.clone()
    assert type(copy.condition) is type(given.condition)
    assert len(copy.tensors()) == len(given.tensors()) == (4 if config.text is None else 6)
    for a, b in zip(copy.tensors(), given.tensors(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.data_ptr() != b.data_ptr()


def test_nothing_else_calls_the_model_in_training():
    root = Path(opendit.__file__).parent
    calls = {str(path.relative_to(root)) for path in root.rglob("*.py") if "engine.forward" in path.read_text()}
    assert calls == {"training/runners.py"} and "engine.forward" in Path(train_program.__file__).read_text()


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_closes_its_runner_before_its_communicators(tmp_path, no_ranks, monkeypatch, fails):
    order = []

    def spied(*args, **kwargs):
        runner = build_runner(*args, **kwargs)
        monkeypatch.setattr(runner, "close", lambda: order.append("runner"))
        if fails:
            monkeypatch.setattr(runner, "passes", lambda *_: 1 / 0)
        return runner

    monkeypatch.setattr(build, "build_runner", spied)
    monkeypatch.setattr(supervisor, "close_mesh", lambda: order.append("mesh"))
    with pytest.raises(SystemExit) if fails else contextlib.nullcontext():
        train_program.main([*TINY, *QUIET, "--max_steps", "1", "--outputs", str(tmp_path)])
    assert order[:2] == ["runner", "mesh"]
