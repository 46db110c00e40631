"""Training on packs matches training on the samples one by one, in losses and gradients, on one rank or two."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from opendit.config.components import TokenRoute
from opendit.data import Batch
from opendit.diffusion.objectives import DDPMObjective, EDMObjective, FlowObjective, Objective
from opendit.encoders.conditioner import LabelConditioner
from opendit.models.dit import DiTConfig
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import build_model
from opendit.parallel.engines import build_engine
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.training.micro_batch import Latents, MicroBatch, PackedMicroBatch, Packing, same_size
from opendit.training.runners import build_runner
from tests.models.packs import assert_same, with_vectors
from tests.models.test_dit import randomised
from tests.numbers import off_by
from tests.parallel.test_sequence import strategy
from tests.ranks import run_ranks
from train import EagerPasses, Inputs

SEED, CLASSES, TOKENS, LR, CLIP, STEPS = 3, 5, 32, 2e-3, 0.2, 5
CONFIG = VDiTConfig((2, 4, 4), (2, 2, 2), 3, 36, 2, 6, num_classes=CLASSES)
PICTURES = DiTConfig((4, 4), 2, 3, 36, 2, 6, num_classes=CLASSES, learn_sigma=False)
# Two packs a step, with four samples and with three. The first ends with padding.
SIZES = (((4, 4, 8), (2, 4, 4), (1, 4, 4), (1, 2, 2)), ((2, 8, 8), (2, 4, 8), (2, 4, 8)))
SAMPLES = sum(map(len, SIZES))
OBJECTIVES = {
    "ddpm": DDPMObjective(min_snr=5.0),
    "flow": FlowObjective(shift=3.0, shift_tokens=8),
    "edm": EDMObjective(),
}
CPU = torch.device("cpu")


def batch(step: int, pack: int, sizes=SIZES) -> Batch:
    """Make a pack as the loader does, with each sample's means and deviations in a tensor of its shape."""
    first, generator = sum(map(len, sizes[:pack])), torch.Generator().manual_seed(100 * step + pack)
    x = tuple(torch.randn(6, *size, generator=generator).abs() for size in sizes[pack])
    index = torch.arange(first, first + len(x))
    return Batch(x, (index + step) % CLASSES, index, step, pack, epoch=0, samples_in_step=sum(map(len, sizes)))


def losses_of(batch: MicroBatch | PackedMicroBatch, objective: Objective, model) -> Tensor:
    """Return the loss of each sample from the program's passes, calling ``model`` directly."""
    return EagerPasses(SimpleNamespace(forward=model), objective).losses(batch)


def alone(made: Batch, number: int) -> Batch:
    """Return one sample as the loader returns it without packs."""
    rows = slice(number, number + 1)
    return Batch(made.x[number].unsqueeze(0), made.y[rows], made.index[rows], made.step, made.micro, epoch=0)


def inputs(
    objective: Objective,
    config: DiTConfig,
    micro_batches: int = 2,
    tokens: int = TOKENS,
    route: TokenRoute | None = None,
) -> Inputs:
    latents = Latents(None, cached=(0.5, 0.1), sampled=True, seed=SEED)
    packing = Packing(config.patch, tokens, micro_batches)
    conditioner = LabelConditioner(CLASSES, CPU)
    count = lambda size: math.prod(config.grid_of(size))  # noqa: E731
    return Inputs(latents, objective, conditioner, CPU, SEED, 0.3, packing, count, route=route)


def model_of(config: DiTConfig = CONFIG, route: TokenRoute | None = None):
    torch.manual_seed(0)
    model = with_vectors(randomised(build_model(config)))
    if route is not None:
        model.route = (route.first, route.last)
    return model


def one_by_one(model, objective: Objective, made: Batch, given: Inputs) -> list[Tensor]:
    """Return the loss of each sample, calling the model for one at a time."""
    found = []
    for number in range(len(made.index)):
        alone_here = given.of(alone(made, number))
        assert isinstance(alone_here, MicroBatch)
        found.append(losses_of(alone_here, objective, model).squeeze(0))
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_those_of_the_samples_one_by_one(name):
    objective = OBJECTIVES[name]
    config = CONFIG if name == "ddpm" else VDiTConfig(**{**vars(CONFIG), "learn_sigma": False})
    model, given, made = model_of(config), inputs(objective, config, micro_batches=2), batch(2, 0)
    wanted = torch.stack(one_by_one(model, objective, made, given))
    wanted.sum().mul(2 / SAMPLES).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    packed = given.of(made)
    assert isinstance(packed, PackedMicroBatch) and packed.segments.filled < packed.segments.tokens == TOKENS
    losses = losses_of(packed, objective, model)
    assert off_by(losses.tolist(), wanted.tolist()) < 1e-5
    packed.mean(losses).backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, gradients, 1e-5)


ROUTES = {
    "": (CONFIG, None),
    "tread": (CONFIG, TokenRoute(1, 2, 0.4)),
    "sprint": (replace(CONFIG, sprint=(1, 2)), TokenRoute(1, 2, 0.4, fused=True, drop=0.5)),
}


def plain_run(routed: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and first moments of one fp32 process without packs, averaging over a step's samples."""
    (config, route), objective, losses = ROUTES[routed], OBJECTIVES["ddpm"], []
    model, given = model_of(config, route), inputs(objective, config, route=route)
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for step in range(STEPS):
        parts = [one_by_one(model, objective, batch(step, pack), given) for pack in (0, 1)]
        loss = sum(sum(parts, [])) / SAMPLES
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses, {name: adam.state[p]["exp_avg"] for name, p in model.named_parameters()}


def packed_run(
    mesh: Mesh,
    plugin: str,
    kind: str | None,
    checkpointed: bool = False,
    precision: str = "fp32",
    routed: str = "",
):
    if kind is not None:
        mesh = init_mesh(sequence_parallel=mesh.world_size)
    config, route = ROUTES[routed]
    model, micro_batches = model_of(config, route), 2 // mesh.dp_size
    model.use(sequence=strategy(mesh, kind, config) if kind else None)
    model.grad_checkpoint = checkpointed
    settings = dict(lr=LR, weight_decay=0.01, grad_clip=CLIP, grad_accumulation=micro_batches)
    engine = build_engine(model, mesh, plugin=plugin, precision=precision, **settings)
    objective, losses = OBJECTIVES["ddpm"], []
    runner = build_runner(EagerPasses(engine, objective, micro_batches), packs=True, graph=True)
    assert runner.note.startswith("off: every pack has other segments")
    given = inputs(objective, config, route=route)
    for step in range(STEPS):
        packs = [mesh.dp_rank] if mesh.dp_size == 2 else [0, 1]
        result = runner.train_step(given.of(batch(step, pack)) for pack in packs)
        assert result.finite
        losses.append((mesh.sum(result.loss) / mesh.world_size).item())
    return losses, {name: engine.layout.gather(name, engine.moments(name)["exp_avg"]).clone() for name in engine.shapes}


@functools.cache
def wanted(routed: str = ""):
    return plain_run(routed)


@pytest.mark.parametrize(
    ("world", "plugin", "kind", "checkpointed", "routed"),
    (
        (1, "zero2", None, False, ""),
        (2, "ddp", None, True, ""),
        (2, "fsdp", None, False, ""),
        (2, "zero2", "ulysses", False, ""),
        (2, "fsdp", "direct fastseq", False, ""),
        (1, "zero2", None, False, "tread"),
        (1, "zero2", None, True, "sprint"),
        (2, "zero2", "ulysses", False, "sprint"),
        (2, "fsdp", "direct fastseq", False, "tread"),
    ),
)
def test_curves_are_those_of_the_samples_one_by_one(world, plugin, kind, checkpointed, routed):
    losses_alone, moments_alone = wanted(routed)
    for losses, moments in run_ranks(world, packed_run, plugin, kind, checkpointed, "fp32", routed):
        assert off_by(losses, losses_alone) < 1e-5
        assert_same(moments, moments_alone, 1e-4)


@pytest.mark.parametrize(("plugin", "precision"), (("gemini", "bf16"), ("zero2", "fp16")))
def test_curves_in_half_precision(plugin, precision):
    for losses, _ in run_ranks(2, packed_run, plugin, None, False, precision):
        assert off_by(losses, wanted()[0]) < 3e-3


def test_samples_are_told_by_tokens_and_by_segments():
    packed = inputs(OBJECTIVES["flow"], CONFIG).of(batch(0, 0))
    assert packed.segments.lengths == (16, 4, 4, 1)
    marks = torch.zeros(TOKENS, 7, dtype=torch.bool)
    marks[[3, 21, 24], 2] = True
    assert packed.samples_of(marks) == packed.samples_of(marks.unsqueeze(0)) == [0, 2, 3]
    assert packed.samples_of(torch.tensor([False, True, False, True])) == [1, 3]
    assert packed.samples_of(torch.tensor(True)) == packed.samples_of(torch.ones(3, dtype=torch.bool)) == [0, 1, 2, 3]


def test_neighbours_of_one_shape():
    shapes = ((2, 3), (2, 3), (4, 1), (2, 3))
    assert same_size([torch.zeros(shape) for shape in shapes]) == [slice(0, 2), slice(2, 3), slice(3, 4)]
