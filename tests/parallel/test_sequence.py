"""Sequence parallelism is compared with one process: outputs and all gradients."""

import copy
import functools
import itertools
import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.sequence_baselines import BlockingFastSeq, BlockingUlysses
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.layers import BlockOps
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import build_model
from opendit.parallel.collectives import Group
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.sequence import SequenceParallel, sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.sequence.fastseq import DirectFastSeq
from opendit.parallel.sequence.ulysses import DirectUlysses
from tests.models.test_dit import randomised
from tests.numbers import largest
from tests.parallel.shared_memory import SharedMemory
from tests.ranks import run_ranks

TOLERANCE = 1e-5
IMAGE = DiTConfig((6, 10), 2, 3, 48, 2, 12, num_classes=5)  # 15 tokens
VIDEO = VDiTConfig((4, 4, 6), (2, 2, 2), 2, 48, 2, 12, num_classes=5)  # 12 tokens
TEXT = replace(VIDEO, num_classes=None, text=TextConfig("bytes", 32, 7, cross_attention=True))
SIX_HEADS = replace(IMAGE, num_heads=6)
NO_BIAS = replace(IMAGE, bias=False)
FIVE_HEADS = replace(IMAGE, hidden_size=40, num_heads=5)
PICTURE = (1, 4, 6)  # for a video model: 6 tokens
TYPES = {
    "fastseq": {"kind": "fastseq"},
    "fastseq, kept": {"kind": "fastseq", "keep_gathered": True},
    "ulysses": {"kind": "ulysses"},
    "ulysses in groups": {"kind": "ulysses", "groups": 3},
    "ring": {"kind": "ring"},
    "usp": {"kind": "usp"},
}
DIRECT = {
    "direct ulysses": DirectUlysses,
    "direct ulysses in groups": functools.partial(DirectUlysses, groups=3),
    "direct fastseq": DirectFastSeq,
    "direct fastseq, kept": functools.partial(DirectFastSeq, keep_gathered=True),
}
DIRECT |= {f"{name}, early": strategy for name, strategy in DIRECT.items()}  # see SharedMemory
BASELINES = {"blocking fastseq": BlockingFastSeq, "blocking ulysses": BlockingUlysses}


def inputs(config: DiTConfig, index: Tensor, size: tuple[int, ...]) -> tuple:
    """Return x, t, y and loss weights for the samples ``index``; a sample is the same in every batch."""
    rows = []
    for i in index.tolist():
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(config.in_channels, *size, generator=generator)
        weights = torch.randn(config.out_channels, *size, generator=generator)
        words = torch.randint(1, 200, (config.text.max_tokens if config.text else 1,), generator=generator)
        rows.append((x, torch.tensor(100 * i + 7), words if config.text else torch.tensor(i % 6), weights))
    return tuple(map(torch.stack, zip(*rows, strict=True)))


def run(model: DiT, index: Tensor, size: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    *arguments, weights = inputs(model.config, index, size)
    model.zero_grad()
    output = model(*arguments)
    (output * weights).sum().div(len(index)).backward()
    return output.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def errors(
    mesh: Mesh, model: DiT, sequence, size: tuple[int, ...], samples: int, reference=None
) -> tuple[float, float, str]:
    """Return relative errors of the output and the worst gradient, and that gradient's name.

    The reference is one process with all tokens. ``reference`` is a result of ``run`` to compare with; None uses
    ``fresh``.
    """
    everything = torch.arange(samples * mesh.dp_size)
    mine = everything.chunk(mesh.dp_size)[mesh.dp_rank]
    whole, reference = reference or whole_sequence(model.config, len(everything), size)
    output, grads = run(model.use(sequence=sequence), mine, size)
    found = {}
    for name, grad in summed(grads).items():  # the mean over all ranks, as in ZeRO and DDP
        assert reference[name].norm() > 0, name
        found[name] = ((grad / mesh.world_size - reference[name]).norm() / reference[name].norm()).item()
    worst = largest(found.values())
    which = next(name for name, error in found.items() if not error < worst)
    return ((output - whole[mine]).norm() / whole[mine].norm()).item(), worst, which


def summed(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum over all ranks in one message, because many small ones are slow when ranks outnumber cores."""
    flat = torch.cat([grad.flatten() for grad in grads.values()])
    dist.all_reduce(flat)
    parts = flat.split([grad.numel() for grad in grads.values()])
    return {name: part.view_as(grad) for (name, grad), part in zip(grads.items(), parts, strict=True)}


def fresh(config: DiTConfig) -> DiT:
    """Return a copy of the model with the same weights and random state every time."""
    model = copy.deepcopy(made_once(config))
    torch.manual_seed(1)
    return model


@functools.cache
def made_once(config: DiTConfig) -> DiT:
    torch.manual_seed(0)
    return randomised(build_model(config))


@functools.cache
def whole_sequence(config: DiTConfig, samples: int, size: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one process's output and gradients, the reference for every type."""
    return run(fresh(config), torch.arange(samples), size)


@functools.cache
def shared_memory(group: Group, early: bool) -> SharedMemory:
    folder = [tempfile.mkdtemp() if group.rank == 0 else None]
    dist.broadcast_object_list(folder, group=group.handle, group_src=0)
    return SharedMemory(group, folder[0], early)


def strategy(mesh: Mesh, name: str, config: DiTConfig) -> SequenceParallel:
    shape = Shape(config.tokens, config.hidden_size, config.num_heads)
    if name in BASELINES or name in DIRECT:
        made = sequence_parallel(mesh, "ring", shape)
        if name in BASELINES:
            return replace(made, strategy=BASELINES[name](made.group))
        return replace(made, strategy=DIRECT[name](shared_memory(made.group, "early" in name)))
    return sequence_parallel(mesh, shape=shape, **TYPES[name])


def many_cases(mesh: Mesh, cases: list[tuple]) -> list:
    """Return the errors of each case (sequence group size, type, config, input size, samples, checkpointed)."""
    meshes = {ranks: init_mesh(sequence_parallel=ranks) for ranks in sorted({ranks for ranks, *_ in cases})}
    results = []
    for ranks, name, config, size, samples, checkpointed in cases:
        model, sequence = fresh(config), strategy(meshes[ranks], name, config)
        model.grad_checkpoint = checkpointed
        results.append(errors(meshes[ranks], model, sequence, size or config.input_size, samples))
    return results


def possible(ranks: int, config: DiTConfig) -> list[str]:
    """Return the types that these ranks and heads allow."""
    names = ["ring"]
    if config.num_heads % ranks == 0:
        names += ["fastseq", "fastseq, kept", "ulysses", "ulysses in groups", *DIRECT]
        names = [name for name in names if "in groups" not in name or config.num_heads // ranks % 3 == 0]
    return names + ["usp"] * (ranks == 4 and config.num_heads % 2 == 0)


def cases_of(world: int) -> list[tuple]:
    cases = []
    for ranks in (4, 2) if world == 4 else (world,):  # with 4 ranks also data parallel 2 x sequence parallel 2
        cases += [(ranks, name, IMAGE, None, 2, False) for name in possible(ranks, IMAGE)]
        cases += [(ranks, name, TEXT, None, 1, False) for name in possible(ranks, TEXT)]
        cases += [(ranks, name, VIDEO, PICTURE, 1, True) for name in possible(ranks, VIDEO)]
    # Some ranks have only padding: 5 tokens on 4 ranks are 2, 2, 1, 0, and 2 tokens leave one or two ranks empty.
    cases += [(world, name, IMAGE, (2, 10), 2, True) for name in possible(world, IMAGE)]
    cases += [(world, name, IMAGE, (2, 4), 1, False) for name in possible(world, IMAGE)]
    cases += [(world, name, IMAGE, None, 2, False) for name in BASELINES]
    cases += [(world, name, SIX_HEADS, None, 1, False) for name in possible(world, SIX_HEADS)]
    cases += [(world, name, NO_BIAS, None, 2, False) for name in possible(world, NO_BIAS)]
    return [*cases, (world, "ring", FIVE_HEADS, None, 2, False)]


def check(world: int, ranks: list) -> None:
    for rank, results in enumerate(ranks):
        for case, (output, gradient, name) in zip(cases_of(world), results, strict=True):
            assert output < TOLERANCE and gradient < TOLERANCE, (rank, case, output, gradient, name)


@pytest.mark.parametrize("world", [2, 3])
def test_outputs_and_every_gradient_equal_one_process(world):
    check(world, run_ranks(world, many_cases, cases_of(world)))


def compiled(mesh: Mesh, names: list[str]) -> list:
    mesh, results = init_mesh(sequence_parallel=mesh.world_size), []
    for name in names:
        model = fresh(IMAGE)
        model.compile_blocks(backend="aot_eager")
        results.append(errors(mesh, model, strategy(mesh, name, IMAGE), IMAGE.input_size, 2))
        torch._dynamo.reset()
    return results


def test_compiled_blocks_share_sequences():
    names = ["fastseq", "ulysses", "ring", "direct ulysses", "direct fastseq"]
    for results in run_ranks(2, compiled, names):
        for name, (output, gradient, which) in zip(names, results, strict=True):
            assert largest((output, gradient)) < TOLERANCE, (name, which)


# -------------------------------------------------------------------- four ranks, which are started once for all tests


def in_the_wrong_group(mesh: Mesh) -> list:
    """Return the errors of data parallel 2 x sequence parallel 2 with the right groups, and with the world group."""
    right = init_mesh(sequence_parallel=2)
    meshes = (right, replace(right, groups={"sp": dist.group.WORLD}))
    return [
        [errors(mesh, fresh(IMAGE), strategy(mesh, name, IMAGE), IMAGE.input_size, 1) for mesh in meshes]
        for name in ("fastseq", "ulysses", "direct ulysses", "direct fastseq", "ring")
    ]


def gradients_of_padding(mesh: Mesh) -> list:
    """Return the number of padding values and their summed gradient sizes in the first block, and of tokens."""
    mesh, results = init_mesh(sequence_parallel=4), []
    for name in possible(4, IMAGE):
        model, seen = fresh(IMAGE).use(sequence=strategy(mesh, name, IMAGE)), []
        keep = seen.append
        model.blocks[0].register_forward_pre_hook(lambda _, args, keep=keep: args[0].register_hook(keep) and None)
        for size, real in (((6, 10), 15), ((2, 10), 5)):
            run(model, torch.arange(2), size)
            grad = seen.pop()
            here = min(max(real - mesh.rank * grad.shape[1], 0), grad.shape[1])
            padding, tokens = grad[:, here:].abs(), grad[:, :here].abs()
            results.append((padding.numel(), padding.sum().item(), tokens.numel(), tokens.sum().item()))
    return results


def under_autocast(mesh: Mesh) -> list:
    """Return the distances from fp32 of outputs and gradients under bf16 autocast, in one process and divided."""
    mesh, results = init_mesh(sequence_parallel=4), []
    for name in possible(4, IMAGE):
        model, sequence = fresh(IMAGE), strategy(mesh, name, IMAGE)
        exact, exact_grads = run(model, torch.arange(2), IMAGE.input_size)
        distances = []
        for used in (None, sequence):
            with torch.autocast("cpu", torch.bfloat16):
                output, grads = run(model.use(sequence=used), torch.arange(2), IMAGE.input_size)
            if used:
                grads = {name: grad / mesh.world_size for name, grad in summed(grads).items()}
            worst = largest(((grads[n] - g).norm() / g.norm()).item() for n, g in exact_grads.items())
            distances.append((((output - exact).norm() / exact.norm()).item(), worst))
        results.append(distances)
    return results


def frozen_before_the_first_block(mesh: Mesh) -> list:
    """Return errors where the first block's input needs no gradient, but its attention or only a bias does."""
    mesh, results = init_mesh(sequence_parallel=4), []
    for name, bias_only in itertools.product(possible(4, IMAGE), (False, True)):
        model = fresh(IMAGE).requires_grad_(False)
        attention = model.blocks[0].attn
        (attention.qkv.bias if bias_only else attention).requires_grad_(True)
        results.append(errors(mesh, model, strategy(mesh, name, IMAGE), IMAGE.input_size, 1))
    return results


def said(mesh: Mesh) -> str:
    return str(sequence_parallel(init_mesh(sequence_parallel=4), "ulysses", Shape(15, 48, 12)).plan)


FOUR = {
    "said": said,
    "cases": many_cases,
    "wrong": in_the_wrong_group,
    "padding": gradients_of_padding,
    "autocast": under_autocast,
    "frozen": frozen_before_the_first_block,
}


def on_four_ranks(mesh: Mesh, cases: list[tuple]) -> dict:
    return {name: made(mesh, *([cases] if name == "cases" else [])) for name, made in FOUR.items()}


@pytest.fixture(scope="module")
def four() -> list[dict]:
    return run_ranks(4, on_four_ranks, cases_of(4))


def test_outputs_and_every_gradient_on_four_ranks(four):
    check(4, [rank["cases"] for rank in four])


def test_talking_to_the_whole_world_would_be_noticed(four):
    for rank in four:
        for right, wrong in rank["wrong"]:
            assert largest(right[:2]) < TOLERANCE and min(wrong[:2]) > 0.01


def test_padding_has_no_gradient(four):
    for rank in four:
        for _, padding, tokens, total in rank["padding"]:
            assert padding == 0.0 and (total > 0) == (tokens > 0)
    assert all(count for count, *_ in four[3]["padding"])


def test_what_is_before_the_first_block_may_be_frozen(four):
    for rank in four:
        assert len(rank["frozen"]) == 2 * len(possible(4, IMAGE))
        assert all(largest((output, gradient)) < TOLERANCE for output, gradient, _ in rank["frozen"])


def test_autocast_rounds_as_in_one_process(four):
    for rank in four:
        for (output, gradient), (shared_output, shared_gradient) in rank["autocast"]:
            assert 1e-3 < output and shared_output < 1.5 * output and shared_gradient < 1.5 * gradient


def test_a_plan_says_why_there_is_no_symmetric_memory(four):
    assert {rank["said"] for rank in four} == {"ulysses: asked for; by collectives (no CUDA GPUs)"}


def test_the_model_does_nothing_of_the_kind_alone():
    model = build_model(IMAGE)
    assert model.sequence is None and model.use(ops=BlockOps()).sequence is None
