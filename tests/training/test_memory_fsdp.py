"""The memory estimate of --plugin fsdp matches closed forms and the bytes that ranks allocate."""

import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from benchmarks.bench_public import SUBJECTS
from opendit.config.parallel_sizes import ParallelDims
from opendit.kernels.adamw_ema import BLOCK
from opendit.kernels.operations import FLOAT8, chosen
from opendit.kernels.tensor_table import BlockTable, Staged
from opendit.models.conditioning import TextConfig
from opendit.models.dit import DiT, DiTConfig
from opendit.models.families.public_config import PublicConfig, public_config
from opendit.models.finetuning import Lora, add_lora
from opendit.models.zoo import build_model, model_config, plan_of
from opendit.parallel.fsdp import PREFETCHED, Sharding, float8_weights
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.training.memory import (
    GIB,
    LIBRARIES,
    RING,
    Estimate,
    Setup,
    advice,
    describe,
    estimate,
    largest_batch,
    resolve_sharding,
)
from tests.memory import peak_bytes
from tests.models.test_dit import randomised
from tests.ranks import run_ranks

XL = model_config("DiT-XL/2", input_size=(32, 32), in_channels=4, num_classes=1000)
GATHERED = 1 + PREFETCHED  # number of blocks on the device: the one that runs, and those gathered ahead
DEEP = DiTConfig((4, 4), 2, 2, 192, 10, 3, num_classes=3)  # with only 4 tokens, weights dominate


def batch(samples: int = 1) -> tuple:
    return torch.randn(samples, 2, 4, 4), torch.arange(samples) * 100, torch.arange(samples) % 3


def engine_of(mesh: Mesh, precision: str, sharding: Sharding, accumulation: int = 1, rank: int | None = None):
    from opendit.parallel.engines import build_engine

    torch.manual_seed(0)
    model = randomised(DiT(DEEP))
    if rank is not None:
        add_lora(model, Lora(rank, rank, ""), (), seed=0)
    return build_engine(
        model, mesh, plugin="fsdp", precision=precision, sharding=sharding, grad_accumulation=accumulation
    )


def states_held(mesh: Mesh, cases: list[tuple]) -> list[tuple[dict[str, int], int]]:
    """Return, for each case (replicate, precision, rank of LoRA), the bytes of each state, and of the gradients after
    the backward pass."""
    from opendit.checkpoint.ema import EMA

    found = []
    for replicate, precision, rank in cases:
        here = init_mesh(dims=ParallelDims.fill(mesh.world_size, dp_replicate=replicate))
        engine = engine_of(here, precision, Sharding(), rank=rank)
        ema = EMA(engine, [0.9, 0.99])
        with engine.micro_batch(last=True):
            engine.backward(engine.forward(*batch()).float().square().mean())
        gradients = sum(g.nbytes for g in engine.gradients if g is not None)
        engine.step()
        weights = [p.to_local() if isinstance(p, DTensor) else p for p in engine.module.parameters()]
        states = {"weights": sum(p.nbytes for p in weights), "averages": ema.bytes_per_rank()}
        moments = [t for state in engine.adam.state.values() for key, t in state.items() if key != "step"]
        states["moments"] = sum(t.nbytes for t in {id(t): t for t in moments}.values())
        if mesh.world_size == 1 and precision != "fp32":
            states["masters"] = sum(master.nbytes for master in engine.masters().values())
        found.append((states, gradients))
    return found


@pytest.mark.parametrize("world", (1, 4))
def test_states_are_those_of_the_engine(world):
    cases = [(1, "fp32", None), (1, "bf16", None), (1, "bf16", 8)] + [(2, "bf16", None)] * (world > 1)
    for found in run_ranks(world, states_held, cases):
        for (replicate, precision, rank), (states, gradients) in zip(cases, found, strict=True):
            lora = None if rank is None else Lora(rank, rank, "")
            setup = Setup("fsdp", precision, world, averages=2, lora=lora, replicate=replicate)
            needs = estimate(DEEP, setup, 1)
            for name, held in states.items():
                assert needs.states[name] == pytest.approx(held, rel=0.01), (name, replicate, precision)
            assert sum(needs.states.values()) == pytest.approx(sum(states.values()), rel=0.01)
            whole = estimate(DEEP, replace(setup, accumulate=True, keep_gradients=False), 1)
            shard = whole.gradients - needs.gradients
            assert gradients == pytest.approx(shard, rel=0.01)


STEPS = [  # reshard, micro-batches, keep full gradients
    ("never", 1, True),
    ("after_forward", 1, True),
    ("never", 3, True),
    ("after_forward", 3, True),
    ("after_forward", 3, False),
]


def peaks(mesh: Mesh) -> list[int]:
    """Return, for each case in STEPS, the peak bytes that a step's passes allocate."""
    found = []
    for reshard, accumulation, kept in STEPS:
        sharding = Sharding(keep_gathered=reshard == "never", keep_gradients=kept)
        engine = engine_of(mesh, "bf16", sharding, accumulation)

        def passes(engine=engine, accumulation=accumulation):
            for i in range(accumulation):
                with engine.micro_batch(last=i + 1 == accumulation):
                    engine.backward(engine.forward(*batch()).float().square().mean())

        passes()
        engine.step()  # on a CPU the optimizer takes memory that the GPU kernel does not take
        found.append(peak_bytes(passes))
    return found


def test_a_step_allocates_what_the_estimate_says():
    """The tolerance covers what is in flight at once, which depends on timing with gloo: some blocks' weights, and
    gradients being reduced. For comparison, the shard of all weights takes 14 MB, as do all weights in bf16."""
    flight = 1.5 * (2 + 4) * DEEP.whole_block_parameters()  # 6 MB
    for (reshard, accumulation, kept), held in zip(STEPS, run_ranks(2, peaks)[0], strict=True):
        setup = Setup("fsdp", "bf16", 2, reshard=reshard, keep_gradients=kept, accumulate=accumulation > 1)
        needs = estimate(DEEP, setup, 1)
        expected = needs.total - LIBRARIES - sum(needs.states.values())
        assert abs(expected - held) < flight, (reshard, accumulation, kept, held, expected)


def test_closed_forms():
    """For DiT-XL/2 with P weights on R ranks, the differences between settings are known in closed form."""
    few, P = GATHERED * XL.whole_block_parameters(), XL.parameters()

    def total(**changes) -> float:
        return estimate(XL, Setup("fsdp", "bf16", 8, **changes), 4).total

    states = estimate(XL, Setup("fsdp", "bf16", 8), 4).states
    assert sum(states.values()) == 16 * P / 8 and set(states) == {"weights", "moments", "averages"}
    assert sum(estimate(XL, Setup("fsdp", "bf16", 8, replicate=4), 4).states.values()) == 16 * P / 2
    assert sum(estimate(XL, Setup("fsdp", "bf16", 8, averages=3), 4).states.values()) == 24 * P / 8
    outside = P - XL.depth * XL.whole_block_parameters()
    assert total(reshard="never") - total(reshard="after_forward") == 2 * (P - few - outside)
    for offload, host in (("average", {"averages": 8}), ("state", {"moments": 8, "averages": 8})):
        on, off = (estimate(XL, Setup("fsdp", "bf16", 8, averages=2, offload=o), 4) for o in ("none", offload))
        assert off.host == {name: size * P / 8 for name, size in host.items()} and not on.host
        ring = RING if offload == "state" else 0
        assert on.total - off.total == pytest.approx(off.host_total - ring) and off.host_total == sum(off.host.values())
    each, kept = (estimate(XL, Setup("fsdp", "bf16", 8, accumulate=True, keep_gradients=k), 4) for k in (False, True))
    reduced = 4 * P / 8 + 4 * XL.whole_block_parameters() + 2 * outside  # shards, and the buffer being reduced
    assert kept.gradients_at_the_end - each.gradients_at_the_end == pytest.approx(4 * P - reduced)
    each, kept = each.total, kept.total
    half = total(accumulate=True, keep_gradients=True, reduce_dtype="bf16")
    assert kept - half == pytest.approx(2 * P)
    # Undecided settings count as the smallest.
    assert total() == total(reshard="after_forward") and total(accumulate=True) == each


@pytest.mark.parametrize(
    ("name", "batch", "checkpointed", "measured"),
    (("vDiT-7B/122", 2, False, 70.7), ("vDiT-28B/122", 3, True, 91.6)),
)
def test_peaks_measured_of_fsdp2(name, batch, checkpointed, measured):
    """GiB on four H200s with 8k tokens, measured with plain FSDP2 around blocks and no EMA."""
    config = model_config(name, input_size=(32, 32), in_channels=4, frames=32, num_classes=1000)
    setup = Setup("fsdp", "bf16", 4, averages=0, reshard="after_forward", grad_checkpoint=checkpointed)
    assert estimate(config, setup, batch).total / GIB == pytest.approx(measured, rel=0.04)


def test_the_peak_measured_at_the_end_of_the_backward_pass():
    """GiB on one H100 with Wan TI2V-5B and a 27,900-token clip. Gradients grow faster than block inputs are freed."""
    values = dict(num_attention_heads=24, attention_head_dim=128, in_channels=48, out_channels=48, text_dim=4096)
    config = public_config(
        "wan", values | dict(freq_dim=256, ffn_dim=14336, num_layers=30, patch_size=[1, 2, 2]), (31, 60, 60)
    )
    setup = Setup("fsdp", "bf16", 1, fused=True, grad_checkpoint=True, offload="state")
    assert estimate(config, setup, 1).total / GIB == pytest.approx(42.31, rel=0.01)
    for batch in range(1, 6):
        assert largest_batch(config, setup, estimate(config, setup, batch).total) == batch


WHOLE = Setup("fsdp", "bf16", 2, averages=0, grad_checkpoint=True, offload="blocks")


def flux(**values) -> PublicConfig:
    return public_config("flux", SUBJECTS["flux"].values | values, (64, 64), 512)


def test_the_peak_measured_with_blocks_in_host_memory():
    """GiB on each of two H100s, training all of FLUX.1 on 32 pictures of 512 px a rank (benchmarks/bench_cards.py)."""
    assert estimate(flux(), WHOLE, 32).total / GIB == pytest.approx(24.04, rel=0.02)


def test_each_end_of_the_pass_counts_its_own_block():
    """A block with two streams has 36 D^2 weights in its matrices, and a block with one stream 15 D^2."""
    ends = (57, 0), (0, 57), (19, 38)
    double, single, both = (estimate(flux(num_layers=d, num_single_layers=s), WHOLE, 32) for d, s in ends)
    assert both.gathered == pytest.approx(single.gathered)
    assert both.gathered_at_the_end == pytest.approx(double.gathered_at_the_end)
    blocks = (double.gathered - single.gathered) / (2 * 3)  # one block that computes, and two ahead
    assert blocks == pytest.approx(21 * 3072**2, rel=0.01)
    for name in ("last_block", "gradients_at_the_end"):  # its activations and gradients
        of_both, of_double, of_single = (getattr(each, name) for each in (both, double, single))
        # A recomputed block's input includes modulation, which is averaged over all blocks.
        assert of_both == pytest.approx(of_double, rel=1e-3) and of_double > 1.1 * of_single


def test_what_is_left_open_is_settled_by_what_fits():
    setup = Setup("fsdp", "bf16", 8, accumulate=True)

    def chosen(capacity: float | None, setup: Setup = setup) -> tuple[str, bool]:
        found = resolve_sharding(XL, setup, 1, capacity)
        return found.reshard, found.keep_gradients

    least = estimate(XL, setup, 1).total
    seen = [chosen(least + tenths * 0.1 * GIB) for tenths in range(50)]
    assert list(dict.fromkeys(seen)) == [("after_forward", False), ("never", False), ("never", True)]
    assert chosen(None) == ("never", True)
    assert chosen(0, replace(setup, reshard="never", keep_gradients=True)) == ("never", True)  # unchanged
    assert chosen(None, replace(setup, reshard="after_forward")) == ("after_forward", True)
    for batch in (largest_batch(XL, setup, 40 * GIB),):  # undecided settings count as the smallest
        assert estimate(XL, setup, batch).total <= 40 * GIB < estimate(XL, setup, batch + 1).total


def test_offload_is_advised_where_recomputing_does_not_do():
    setup = Setup("fsdp", "bf16", 4, reshard="after_forward")
    recomputed = estimate(XL, replace(setup, grad_checkpoint=True), 10).total
    average, share = "--offload average --grad_checkpoint", 4 * XL.parameters() / 4
    but_attention = estimate(XL, replace(setup, recompute="but_attention"), 10).total
    assert advice(XL, setup, 10, but_attention) == "--recompute but_attention"
    assert advice(XL, setup, 10, recomputed) == "--grad_checkpoint"
    assert advice(XL, setup, 10, recomputed - 0.5 * share) == average
    assert advice(XL, setup, 10, recomputed - 1.5 * share) == average.replace("average", "state")
    assert "offload" not in advice(XL, replace(setup, plugin="zero2"), 8, 0.8 * recomputed)
    already = replace(setup, offload="state")
    assert advice(XL, already, 10, recomputed - 3 * share) == average.replace("average", "blocks")
    assert "offload" not in advice(XL, replace(setup, offload="blocks"), 8, recomputed - 3 * share)
    for flags, changes in ((average, {"offload": "average"}), ("state", {"offload": "state"})):
        assert estimate(XL, replace(setup, grad_checkpoint=True, **changes), 10).total < recomputed, flags


@pytest.mark.parametrize("kind", ("vDiT-7B/122", "ST-DiT-XL/122"))
def test_float8_weights_take_a_byte_where_they_are_gathered_and_another_on_their_shard(kind):
    text = TextConfig("t5", 64, 7, True)
    config = model_config(kind, input_size=(32, 32), in_channels=4, frames=8, text=text)
    with torch.device("meta"):
        model = build_model(config).use(ops=chosen({FLOAT8}))
    shapes = {name: math.prod(parameter.shape) for name, parameter in model.named_parameters()}
    float8 = sum(shapes[name] for name in float8_weights(model))
    assert float8 == config.depth * plan_of(config).kept(config, Setup(fp8=True).execution).weights
    setup = Setup("fsdp", "bf16", 4, fp8=True, reshard="never")

    def needs(**changes) -> Estimate:
        return estimate(config, replace(setup, **changes), 1)

    ours, theirs = needs(), needs(compiled=True)  # compiled blocks cast to float8 after gathering in bf16
    assert theirs.gathered - ours.gathered == float8 and theirs.activations - ours.activations == float8
    assert sum(ours.states.values()) - sum(theirs.states.values()) == float8 / 4 == ours.states["float8 weights"]
    few = GATHERED * float8 / config.depth
    ours, theirs = needs(reshard="after_forward"), needs(reshard="after_forward", compiled=True)
    assert (
        theirs.gathered - ours.gathered == pytest.approx(few) == theirs.gathered_at_the_end - ours.gathered_at_the_end
    )
    assert needs(world=2, replicate=2).states["float8 weights"] == float8
    assert "float8 weights" not in needs(world=1).states and "float8 weights" not in needs(fp8=False).states
    assert "float8 weights" not in needs(gather_fp8=False).states
    assert "(float8 where it is read so)" in describe(config, setup, 1, None)
    assert "float8" not in describe(config, replace(setup, fp8=False), 1, None)


def test_the_ring_buffer_of_moments_is_as_large_as_the_estimate_says():
    rows = torch.zeros(2, BLOCK)
    staged = Staged(rows, rows.unsqueeze(1).unbind(), BlockTable([BLOCK], BLOCK, rows.device), rows.device)
    assert staged.nbytes == RING
