"""Test FP8 under --plugin fsdp, with weights gathered in float8, or gathered in bf16 and cast by the blocks. The tests
run in Triton's interpreter, on gloo ranks."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from opendit.config.parallel_sizes import ParallelDims
from opendit.kernels import fp8
from opendit.kernels.fp8 import Float8Weight
from opendit.kernels.operations import FLOAT8, chosen
from opendit.models.conditioning import TextCondition, TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.variants import STDiTConfig
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import build_engine
from opendit.parallel.fsdp import Float8Shards, Sharding
from opendit.parallel.mesh import Mesh, init_mesh
from tests.kernels import conftest  # noqa: F401  (ranks must round as hardware does, too)
from tests.kernels.test_kernels_in_models import with_vectors
from tests.parallel.test_sequence import fresh, strategy
from tests.ranks import run_ranks

CONFIG = DiTConfig((6, 10), 2, 2, 64, 2, 4, num_classes=5)


def gradients(mesh: Mesh, plugin: str, sharding: Sharding | None = None, float8: bool = True) -> dict:
    model = with_vectors(fresh(CONFIG))
    if float8:
        model.use(ops=chosen({FLOAT8}))
    precision = "bf16" if float8 else "fp32"
    engine = build_engine(model, mesh, plugin=plugin, precision=precision, sharding=sharding)
    generator = torch.Generator().manual_seed(mesh.rank)
    x, target = torch.randn(2, 1, CONFIG.in_channels, 6, 10, generator=generator)
    with engine.micro_batch(last=True):
        output = engine.forward(x, torch.tensor([300 + mesh.rank]), y=torch.tensor([mesh.rank]))
        engine.backward((output[:, : CONFIG.in_channels].float() - target).square().mean())
    shards = {name: shard[: engine.layout.local(name).shape[0]] for name, shard in engine.gradient_shards().items()}
    return {name: engine.layout.gather(name, shard.float()).clone() for name, shard in shards.items()}


def of_both(mesh: Mesh) -> tuple[dict, ...]:
    ways = ("zero2", None), ("fsdp", Sharding(keep_gathered=False)), ("fsdp", Sharding(keep_gathered=True))
    return gradients(mesh, "zero2", float8=False), *(gradients(mesh, *way) for way in ways)


@pytest.mark.timeout(300)
def test_gradients_are_as_near_as_those_of_zero2():
    exact, zero2, freed, kept = run_ranks(2, of_both)[0]
    for name, gradient in exact.items():
        size, error = gradient.norm(), (zero2[name] - gradient).norm()
        assert torch.equal(freed[name], kept[name]), name
        # Shard units cut the stack, so values quantised between blocks are rounded once more.
        assert (freed[name] - gradient).norm() < 1.25 * error + 0.01 * size, name
    matrices = [name for name in exact if name.startswith("blocks") and exact[name].dim() == 2]
    assert all((freed[n] - exact[n]).norm() > 1e-3 * exact[n].norm() for n in matrices)  # FP8 was used


# --------------------------------------------------------------------------- gathering float8 or casting gathered bf16

FREED, KEPT = Sharding(keep_gathered=False), Sharding()
SMALL = replace(CONFIG, input_size=(4, 4), depth=1, num_heads=2)
CLIPS = STDiTConfig((2, 2, 4), (1, 2, 2), 2, 64, 1, 2, text=TextConfig("t5", 24, 7, True))
MATRICES = {  # (rows, columns) of the weights in float8
    SMALL: [(192, 64), (64, 64), (256, 64), (64, 256)],
    CLIPS: [(192, 64), (64, 64)] * 2 + [(64, 64), (256, 64), (64, 256)],
}


class Gathers(TorchDispatchMode):
    """Count the bytes that this rank sends in all-gathers."""

    sent = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and "allgather" in function.overloadpacket.__name__:
            self.sent += args[1].nbytes
        return function(*args, **(kwargs or {}))


def inputs(config: DiTConfig, seed: int) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, config.in_channels, *config.input_size, generator=generator)
    if config.text is None:
        return x, torch.tensor([300]), torch.tensor([seed % 5])
    tokens = torch.randn(1, config.text.max_tokens, config.text.width, generator=generator)
    mask = torch.arange(config.text.max_tokens)[None] < 4
    return x, torch.tensor([300]), TextCondition(tokens, mask, tokens.mean(1))


def trained(
    mesh: Mesh, config: DiTConfig, sharding: Sharding, steps: int, accumulation: int, checkpointed: bool
) -> tuple:
    """Train for some steps, and return outputs, gradients, masters, gathered bytes and the number of float8 weights.
    The last output is computed after all masters were doubled. The bytes are those of the last step."""
    model = with_vectors(fresh(config))
    sequence = strategy(mesh, "fastseq", config) if mesh.sp_size > 1 else None
    apply_parallel(model, ops=chosen({FLOAT8}), sequence=sequence, grad_checkpoint=checkpointed)
    engine = build_engine(
        model, mesh, plugin="fsdp", precision="bf16", lr=0.05, sharding=sharding, grad_accumulation=accumulation
    )
    outputs, gradients = [], []
    for step in range(steps):
        with Gathers() as gathers:
            for micro in range(accumulation):
                with engine.micro_batch(last=micro + 1 == accumulation):
                    output = engine.forward(*inputs(config, 10 * step + 2 * micro + mesh.dp_rank))
                    engine.backward(output.float().square().mean())
                outputs.append(output.detach())
        gradients += [gradient.clone() for gradient in engine.gradients]
        engine.step()
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
    in_float8 = sum(isinstance(parameter, Float8Weight) for parameter in model.parameters())
    masters = [master.clone() for master in engine.masters().values()]
    with torch.no_grad():
        for master in engine.masters().values():
            master.mul_(2)
        engine.finish_loading()
        outputs.append(engine.forward(*inputs(config, 0)))
    return outputs, gradients, masters, gathers.sent, in_float8


CASES = {  # (ranks, ranks that share a sequence, copies): model, sharding, steps, accumulation, checkpointed
    (2, 1, 1): [
        (SMALL, FREED, 2, 1, False),
        (SMALL, replace(FREED, reduce_dtype=torch.bfloat16), 1, 2, True),
        (CLIPS, FREED, 1, 1, False),
    ],
    (2, 2, 1): [(SMALL, KEPT, 1, 1, False)],
    (2, 1, 2): [(SMALL, FREED, 1, 1, False)],
    (3, 1, 1): [(SMALL, FREED, 1, 1, False)],  # 64 rows are 22, 22 and 20
}


def both_ways(mesh: Mesh, sp: int, copies: int, cases: list) -> list[tuple]:
    if sp * copies > 1:
        mesh = init_mesh(dims=ParallelDims.fill(mesh.world_size, sp=sp, dp_replicate=copies))
    return [
        tuple(trained(mesh, config, replace(how, gather_float8=way), *more) for way in (True, False))
        for config, how, *more in cases
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mesh", CASES, ids=str)
def test_gathering_float8_changes_no_bit(mesh):
    ranks, sp, copies = mesh
    for found in run_ranks(ranks, both_ways, sp, copies, CASES[mesh]):
        for case, (ours, theirs) in zip(CASES[mesh], found, strict=True):
            config, how, _, accumulation, _ = case
            for mine, other in zip(ours[:3], theirs[:3], strict=True):
                assert len(mine) == len(other) and all(map(torch.equal, mine, other)), case
            assert not torch.equal(ours[0][-1], ours[0][0])
            assert (ours[4], theirs[4]) == (len(MATRICES[config]), 0)
            # One byte less per weight and micro-batch, and again in the backward pass if weights were freed.
            shards = ranks // copies
            rows = sum(-(-length // shards) * width for length, width in MATRICES[config]) if shards > 1 else 0
            assert theirs[3] - ours[3] == rows * accumulation * (1 if how.keep_gathered else 2), case


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.even, self.uneven, self.one = nn.Linear(16, 8, bias=False), nn.Linear(16, 5), nn.Linear(3, 1)


def gathered_alone(mesh: Mesh, replicate: int) -> list[tuple]:
    """Return (name, whether in float8, whether correct) for every gathered parameter, before and after changes."""
    mesh = init_mesh(dims=ParallelDims.fill(mesh.world_size, dp_replicate=replicate))
    torch.manual_seed(0)
    layers, found = Layers(), []
    whole = {name: p.detach().clone() for name, p in layers.named_parameters()}
    names = ("dp_replicate", "fsdp") if replicate > 1 else ("fsdp",)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(layers, mesh=mesh.device_mesh(*names), mp_policy=half)
    shards = Float8Shards(layers, [n for n in whole if n.endswith("weight")], torch.bfloat16, mesh.group("fsdp"))
    for factor in (1, 3, 1000):
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.to_local().mul_(factor)
        whole = {name: values * factor for name, values in whole.items()}
        shards.refresh()
        layers.unshard()
        for name, parameter in layers.named_parameters():
            if isinstance(parameter, Float8Weight):
                cast = fp8.cast(whole[name].bfloat16(), fp8.E4M3, exact=True)
                same = torch.equal(parameter.float8.data.view(torch.uint8), cast.data.view(torch.uint8))
                found.append((name, True, same and torch.equal(parameter.float8.descale, cast.descale)))
            else:
                found.append((name, False, torch.equal(parameter.detach(), whole[name].bfloat16())))
        layers.reshard()
    return found


@pytest.mark.parametrize("replicate", (1, 2))
def test_rows_that_ranks_do_not_share_evenly(replicate):
    for found in run_ranks(4, gathered_alone, replicate):
        assert len(found) == 15 and all(right for *_, right in found), found
        assert [name.endswith("weight") for name, *_ in found] == [in_float8 for _, in_float8, _ in found]


def alone(mesh: Mesh) -> tuple:
    engine = build_engine(fresh(SMALL).use(ops=chosen({FLOAT8})), mesh, plugin="fsdp", precision="bf16")
    weight = engine.module.blocks[0].attn.qkv.weight
    return type(weight), weight.dtype


def test_one_rank_gathers_nothing():
    assert run_ranks(1, alone) == [(nn.Parameter, torch.bfloat16)]
