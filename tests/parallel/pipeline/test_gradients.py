"""A model divided into pipeline stages is compared with one process: losses and all gradients, in float64."""

import contextlib
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from benchmarks.bench_public import TINY, tiny
from opendit.config.parallel_sizes import ParallelDims
from opendit.diffusion.objectives.base import Prepared
from opendit.models.conditioning import TextCondition
from opendit.models.dit import DiT
from opendit.models.families.public_config import public_config
from opendit.models.plan import Execution
from opendit.models.zoo import build_model, plan_of
from opendit.parallel.apply import apply_parallel
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.pipeline import Absent, keep_stages, mesh_stages, on_every_stage, stages_of
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.tensor import ReplicatedGradients, divided_parameters, tensor_group
from opendit.training.memory import Setup, stage_setups
from opendit.training.micro_batch import MicroBatch
from opendit.training.runners import PipelineRunner
from tests.models.test_dit import randomised
from tests.models.test_zoo import inputs
from tests.parallel.tensor.models import MODELS
from tests.parallel.test_axial import strategy
from tests.ranks import run_ranks

TOLERANCE, SAMPLES, MICRO_BATCHES, DEPTH = 1e-10, 3, 4, 5
NAMES = ("DiT", "DiT, every option", "DiT, mixed", "DiT of text", "vDiT", "vDiT, no bias", "ST-DiT", "MovieGen, bias",
         "EC-DiT of text")  # fmt: skip
CONFIGS = {name: replace(MODELS[name], depth=DEPTH) for name in NAMES}
# A picture is a clip of one frame, which the patch embedding repeats to fill a patch.
PICTURE = replace(CONFIGS["vDiT"], input_size=(2, 2, 10), patch_size=(2, 2, 2))


def model_of(config) -> DiT:
    torch.manual_seed(0)
    return randomised(build_model(config)).double()


class WeightedSum:
    """An objective that sums a sample's outputs with random weights."""

    def prepare(self, x0: Tensor, t: Tensor, noise: Tensor) -> Prepared:
        return Prepared(x0 + noise, t, (noise,))

    def loss(self, output: Tensor, prepared: Prepared) -> Tensor:
        weights = torch.cat([prepared.context[0]] * 2, dim=1)
        return (output * weights).flatten(1).sum(1)


def micro_batches(config, frames: int | None = None) -> list[MicroBatch]:
    made, generator = [], torch.Generator().manual_seed(1)
    for number in range(MICRO_BATCHES):
        x, t, y = inputs(config, SAMPLES)
        x = x[:, :, :frames] if frames else x
        y = (
            TextCondition(y.tokens + number, y.mask, y.pooled - number)
            if isinstance(y, TextCondition)
            else y.roll(number, 0)
        )
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        made.append(MicroBatch(x * (number + 1), t + number, noise, y))
    return made


@dataclass
class BareEngine:
    """The engine methods that a runner calls, around a bare module."""

    module: DiT
    mesh: Mesh

    def micro_batch(self, last: bool):
        return contextlib.nullcontext()

    def forward(self, *args, **kwargs) -> Tensor:
        return self.module(*args, **kwargs)

    def backward(self, loss, gradient=None) -> None:
        torch.autograd.backward(loss, gradient)

    def step(self):
        return StepDone()


@dataclass
class StepDone:
    loss: Tensor | None = None


def of_one_process(config, given: list[MicroBatch]) -> tuple[list[float], dict[str, Tensor]]:
    model, objective, losses = model_of(config), WeightedSum(), []
    for micro_batch in given:
        prepared = objective.prepare(*micro_batch[:3])
        of_samples = objective.loss(model(prepared.x_t, prepared.timestep, micro_batch.condition), prepared)
        (of_samples.mean() / MICRO_BATCHES).backward()
        losses.append(of_samples.detach())
    return losses, {name: p.grad for name, p in model.named_parameters()}


def compare(mesh: Mesh, config, schedule="1f1b", kind=None, checkpointed=False, frames=None, summed=True):
    """Return relative errors of the loss, the samples' losses and this rank's gradients."""
    given = micro_batches(config, frames)
    losses, wanted = of_one_process(config, given)
    model, sequence = model_of(config), None
    if kind == "axial":
        sequence = strategy(mesh, config)
    elif kind is not None:
        heads = config.num_heads // mesh.tp_size
        how = dict(types=config.sequence_types, axial=config.axial_attention)
        sequence = sequence_parallel(mesh, kind, Shape(config.tokens, config.hidden_size, heads, **how))
    stages = mesh_stages(mesh, config, schedule)
    apply_parallel(model, stages=stages, tensor=tensor_group(mesh), sequence=sequence, grad_checkpoint=checkpointed)
    runner = PipelineRunner(BareEngine(model, mesh), WeightedSum(), MICRO_BATCHES)
    found = {"samples": max(off(runner.losses(m), of, 1e-6) for m, of in zip(given, losses, strict=True))}
    result = runner.train_step(iter(given))
    if schedule == "interleaved":  # forward_backward outside of a step must add up to the same
        step = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        apart = sum(runner.forward_backward(m, last=False) for m in given)
        found["loss apart"] = off(apart, result.loss, 1e-6)
        found["apart"] = max(off(p.grad, grad) for p, grad in zip(model.parameters(), step, strict=True))
    found["loss"] = off(result.loss, torch.stack(losses).mean(), 1e-6)  # the loss is kept in fp32
    names = [name for name, _ in model.named_parameters()]
    assert all(name in wanted for name in names)
    divided, gradients = divided_parameters(model), [p.grad for p in model.parameters()]
    shared = on_every_stage(model, names) if summed else ()
    ReplicatedGradients(mesh, names, divided, shared).sum(gradients)
    for name, ours in zip(names, gradients, strict=True):
        expected = wanted[name]
        if kind is not None:
            mesh.sum(ours, "sp").div_(mesh.sp_size)
        if name in divided:
            cut = divided[name].cut
            ranges = cut.ranges[mesh.coordinate("tp")]
            expected = torch.cat([expected.narrow(cut.dim, start, stop - start) for start, stop in ranges], cut.dim)
        found[name] = off(ours, expected)
    return found, len(wanted)


def off(ours: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> float:
    """Return the relative error in units of the tolerance."""
    assert wanted.norm() > 1e-8
    return ((ours - wanted).norm() / wanted.norm() / tolerance).item()


def on_two(mesh: Mesh) -> dict:
    two = init_mesh(dims=ParallelDims(pp=2))
    found = {("pp 2", name): compare(two, config, checkpointed=number % 2 == 1)
             for number, (name, config) in enumerate(CONFIGS.items())}  # fmt: skip
    found["picture"] = compare(two, PICTURE, frames=1)
    for name in ("DiT", "MovieGen, bias"):
        found["interleaved", name] = compare(two, CONFIGS[name], "interleaved")
    found["conditioning's gradients are not summed"] = compare(two, CONFIGS["DiT"], summed=False)
    return found


def on_three(mesh: Mesh) -> dict:
    three = init_mesh(dims=ParallelDims(pp=3))
    return {name: compare(three, CONFIGS[name]) for name in ("DiT of text", "MovieGen, bias")}


def on_four(mesh: Mesh) -> dict:
    found, config = {}, CONFIGS["vDiT"]
    four = init_mesh(dims=ParallelDims(pp=4))
    found["pp 4"] = compare(four, config)
    deep = replace(CONFIGS["DiT"], depth=9)
    found["interleaved by 4"] = compare(four, deep, "interleaved")
    tensor = init_mesh(dims=ParallelDims(pp=2, tp=2))
    for name in ("vDiT", "MovieGen, bias", "EC-DiT of text"):
        found["pp 2 x tp 2", name] = compare(tensor, CONFIGS[name])
    sequence = init_mesh(dims=ParallelDims(pp=2, sp=2))
    for kind, name in (("ulysses", "MovieGen, bias"), ("fastseq", "DiT of text"), ("axial", "ST-DiT")):
        found["pp 2 x sp 2", name] = compare(sequence, CONFIGS[name], "interleaved", kind)
    found["pp 2 x sp 2", "Latte"] = compare(sequence, replace(MODELS["Latte"], depth=DEPTH), kind="auto")
    return found


@pytest.mark.parametrize(("ranks", "function"), [(2, on_two), (3, on_three), (4, on_four)])
def test_losses_and_every_gradient_are_those_of_one_process(ranks, function):
    results = run_ranks(ranks, function)
    for case in results[0]:
        errors = [rank[case][0] for rank in results]
        bad = {name: error for of_rank in errors for name, error in of_rank.items() if not error < 1}
        if case == "conditioning's gradients are not summed":
            assert bad and all(name.startswith(("t_embedder", "y_embedder")) for name in bad)
        else:
            assert not bad, (case, bad)
            assert len(set().union(*errors) - {"loss", "samples", "loss apart", "apart"}) == results[0][case][1], case


def test_what_other_ranks_have_is_not_there():
    config = CONFIGS["MovieGen, bias"]
    whole = model_of(config)
    parts = [keep_stages(model_of(config), stages_of(config, "interleaved", rank, 2)) for rank in range(2)]
    held = [dict(part.named_parameters()) for part in parts]
    assert held[0].keys() | held[1].keys() == dict(whole.named_parameters()).keys()
    everywhere = held[0].keys() & held[1].keys()
    assert everywhere == on_every_stage(parts[0], held[0]) == on_every_stage(parts[1], held[1])
    assert {name.partition(".")[0] for name in everywhere} == {
        "t_embedder", "y_embedder", "text_encoder", "learned_positions"}  # fmt: skip
    for number, part in enumerate(parts):
        assert isinstance(part.final_layer if number == 0 else part.x_embedder, Absent)
        absent = [isinstance(block, Absent) for block in part.blocks]
        assert [not gone for gone in absent] == [any(i in part.stages.own(c) for c in (0, 1)) for i in range(DEPTH)]


@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_of_the_memory_counts_a_stages_parameters(name):
    setup = Setup(pipeline_parallel=3, world=3, micro_batches=8)
    for rank, (fewer, stage) in enumerate(stage_setups(CONFIGS[name], setup)):
        part = keep_stages(model_of(CONFIGS[name]), stages_of(CONFIGS[name], "1f1b", rank, 3))
        held = sum(p.numel() for p in part.parameters())
        assert fewer.parameters() - stage.absent == held and stage.world == 1
        assert stage.held_micro_batches == 3 - rank


@pytest.mark.parametrize("name", TINY)
def test_the_estimate_counts_a_stages_own_blocks_of_a_public_model(name):
    subject = tiny(name)
    whole = public_config(subject.family, subject.values, subject.size, subject.tokens)
    found = stage_setups(whole, Setup(pipeline_parallel=2, world=2, micro_batches=8))
    for rank, (fewer, stage) in enumerate(found):
        part = keep_stages(build_model(whole), stages_of(whole, "1f1b", rank, 2))
        assert fewer.parameters() - stage.absent == sum(p.numel() for p in part.parameters())
    for of_block in (
        lambda config: plan_of(config).flops_at(config, "block"),  # rounded down
        lambda config: plan_of(config).kept(config, Execution()).units,
        lambda config: config.modulation_width,
    ):
        assert sum(of_block(part) * part.depth for part, _ in found) == pytest.approx(
            of_block(whole) * whole.depth, rel=1e-3
        )
