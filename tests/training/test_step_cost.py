"""The predicted time of a step, and the bytes that it communicates, match closed forms."""

from dataclasses import replace

import pytest

from opendit.config.components import TokenRoute
from opendit.config.parallel_sizes import ParallelDims
from opendit.models.finetuning import Lora
from opendit.models.zoo import model_config
from opendit.parallel.hardware import H200
from opendit.parallel.sequence.choose import Shape, make_plan
from opendit.training.memory import Setup
from opendit.training.step_cost import Span, Traffic, beside, gather, received_by_attention, span, step_cost

CONFIG = model_config("vDiT-XL/122", input_size=(32, 32), in_channels=4, num_classes=10, frames=8)  # 2,048 tokens
WEIGHTS, UNIT = CONFIG.parameters(), 2 * 2048 * 1152  # bytes of one sample's N x D numbers in bf16


def cost(batch: int = 2, micro_batches: int = 1, node: int = 8, hardware=H200, config=CONFIG, graph=True, **setup):
    return step_cost(config, Setup(**setup), batch, micro_batches, hardware, node, graph=graph)


@pytest.mark.parametrize("node", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [dict(tp=2, sp=2, dp_shard=2), dict(dp_replicate=2, dp_shard=4), dict(tp=8)])
def test_spans_are_those_of_the_mesh(node, sizes):
    """Count the ranks on one machine in the mesh's own groups."""
    dims = ParallelDims(**sizes)
    strides = {"tp": 1, "sp": dims.tp, "fsdp": dims.tp, "loss": dims.tp, "dp_replicate": dims.tp * dims.size("fsdp")}
    for name, stride in strides.items():
        for group in dims.groups(name):
            machines = [rank // node for rank in group]
            found = span(len(group), stride, node)
            assert found.nodes == len(set(machines)) and found.here == machines.count(machines[0]), (name, group)


def test_a_gather_takes_what_its_slowest_link_takes():
    free = replace(H200, latency=0, node_latency=0, gather=((2, 100.0), (4, 200.0)), node_link=30.0)
    alone, hidden = gather(1200, Span(4, 4), free)
    assert (alone.bytes, alone.seconds, hidden) == (900, 900 / 200, H200.overlap)
    # 2 machines of 2 ranks: 600 bytes take 10 s over both ranks' links. Within a machine, 900 bytes take 9 s.
    apart, hidden = gather(1200, Span(4, 2), free)
    assert (apart.bytes, apart.seconds, hidden) == (900, 600 / (2 * 30), H200.node_overlap)
    assert gather(1200, Span(1, 1), free)[0] == Traffic()
    slow = replace(free, latency=1, node_latency=0.25)
    assert gather(1200, Span(6, 1), slow)[0].seconds == pytest.approx(1000 / 30 + 1 + 5 * 0.25)
    assert beside((alone, 0.5), 1e9).exposed == alone.seconds / 2 and beside((alone, 0.5), 1).exposed == 4


@pytest.mark.parametrize(("plugin", "moved"), [("zero2", 20), ("fsdp", 20), ("ddp", 330)])
def test_moments_in_8_bits_are_decoded_and_encoded(plugin, moved):
    exact, stored = (cost(plugin=plugin, world=4, eight_bits=on).work["update"] for on in (False, True))
    share = WEIGHTS / (1 if plugin == "ddp" else 4)
    assert stored - exact == pytest.approx(moved * share / H200.memory)
    assert cost(eight_bits=True).total > cost().total


def test_work_scales_with_samples_micro_batches_and_ranks():
    one, two = cost(1), cost(2)
    assert two.work["attention"] == pytest.approx(2 * one.work["attention"])
    assert cost(1, 3).work["products"] == pytest.approx(3 * one.work["products"])
    assert cost(1, 3).work["update"] == one.work["update"]
    shared = cost(2, world=2, sequence_parallel=2)
    assert shared.work["attention"] == pytest.approx(one.work["attention"])
    assert not cost(1).traffic and one.waiting == 0 < cost(1, graph=False).waiting
    flops = CONFIG.forward_flops()
    rates = H200.attention_rates(72, 2048)
    scores = 4 * 2048**2 * 1152 * CONFIG.depth
    assert one.work["attention"] == pytest.approx(scores / rates[0] + 2.5 * scores / rates[1])
    free = replace(H200, launch=0)
    products = cost(1, hardware=free).work["products"]
    assert products == pytest.approx(3 * (flops - scores) / H200.matmul / H200.sustained)


@pytest.mark.parametrize("recompute", ("none", "cheap"))
def test_a_route_saves_its_share_of_a_step(recompute):
    config = model_config("DiT-XL/2", input_size=(32, 32), in_channels=4, num_classes=1000)
    dense = cost(256, config=config, recompute=recompute)
    routed = cost(256, config=config, recompute=recompute, route=TokenRoute(2, 24, 0.5))
    assert routed.total / dense.total == pytest.approx(0.616, rel=0.03)  # measured on an H200 (better_training.md)
    assert routed.work["update"] == dense.work["update"]
    kinds = {"elementwise"} | ({"recomputed"} if recompute != "none" else set())
    assert all(routed.work[kind] / dense.work[kind] == pytest.approx(1 - 22 / 28 / 2, abs=1e-3) for kind in kinds)
    share = 1 - 22 / 28 * (1 - 0.5**2)  # attention's work is quadratic; fewer keys are a little slower
    assert share <= routed.work["attention"] / dense.work["attention"] < 1.3 * share
    all_tokens = cost(256, config=config, recompute=recompute, route=TokenRoute(2, 24, 0.0))
    assert all_tokens.total == pytest.approx(dense.total, rel=1e-3)


def test_what_is_made_again_costs_more_the_more_it_is():
    again = [cost(recompute=level).work.get("recomputed", 0) for level in ("none", "norms", "cheap", "half", "mlp")]
    assert again == sorted(set(again)) and again[0] == 0
    but_attention = cost(recompute="but_attention").work["recomputed"]
    assert cost(grad_checkpoint=True).work["recomputed"] > but_attention > again[-1]
    assert cost(recompute="but_attention", recompute_blocks=CONFIG.depth // 2).work["recomputed"] == but_attention / 2
    assert cost(fp8=True).total < cost().total


def test_lora_does_not_repeat_the_last_product_of_a_block():
    def repeated(**how) -> float:
        return cost(recompute="but_attention", **how).work["recomputed"]

    flops = 2 * 2 * CONFIG.tokens * CONFIG.hidden_size * CONFIG.mlp_hidden  # for two samples
    assert repeated() - repeated(lora=Lora(16, 16.0, "")) == pytest.approx(
        CONFIG.depth * flops / H200.matmul / H200.sustained
    )
    assert repeated() == repeated(lora=Lora(16, 16.0, "", ("fc1", "adaLN_modulation.1")))


def test_each_pass_waits_for_the_blocks_that_it_can_not_hide():
    blocks = 2 * CONFIG.depth * CONFIG.whole_block_parameters()

    def waiting(travel: float) -> tuple[float, float]:
        """Return the seconds of waiting and of computation if a pass's copies take ``travel`` seconds."""
        how = {"lora": Lora(16, 16.0, ""), "grad_checkpoint": True, "offload": "blocks"}
        work = cost(hardware=replace(H200, host_link=2 * blocks / travel), **how).work
        wait = work.pop("waiting for blocks", 0)
        return wait, sum(seconds for kind, seconds in work.items() if kind != "update")

    both, computing = waiting(1e3)
    assert both == pytest.approx(2e3 - computing)
    travel = computing / 3  # longer than the forward pass, shorter than the backward pass
    wait, _ = waiting(travel)
    assert 0 < wait < travel and waiting(0.99 * (travel - wait))[0] == 0
    assert waiting(travel * 1.01)[0] - wait == pytest.approx(0.01 * travel)


def test_bytes_of_every_plugin():
    """One of 4 ranks receives 3/4 of the weights and gradients that are gathered or reduced."""
    share = 3 / 4 * WEIGHTS
    zero = cost(micro_batches=3, world=4).traffic
    assert zero["gradients"].bytes == pytest.approx(3 * 2 * share)  # of each micro-batch, in bf16
    assert zero["weights"].bytes == pytest.approx(2 * share) and zero["weights"].exposed == zero["weights"].seconds
    assert cost(micro_batches=3, world=4, plugin="ddp").traffic["gradients"].bytes == pytest.approx(2 * 4 * share)
    blocks = 3 / 4 * CONFIG.depth * CONFIG.whole_block_parameters()
    for reshard, passes in (("never", 1), ("after_forward", 2)):
        for kept, reductions in ((True, 1), (False, 3)):
            found = cost(micro_batches=3, world=4, plugin="fsdp", reshard=reshard, keep_gradients=kept).traffic
            assert found["weights"].bytes == pytest.approx(3 * passes * 2 * blocks)
            assert found["gradients"].bytes == pytest.approx(reductions * 4 * blocks)
    copies = cost(world=8, plugin="fsdp", replicate=2, reshard="never", keep_gradients=True, node=4).traffic
    assert copies["gradients of copies"].bytes == pytest.approx(2 * 4 * WEIGHTS / 4 / 2)


def test_copies_of_the_model_help_where_machines_are_far_apart():
    far = replace(H200, node_link=H200.node_link / 10)
    how = dict(micro_batches=4, world=16, plugin="fsdp", reshard="after_forward", keep_gradients=True, hardware=far)
    assert cost(replicate=2, **how).exposed < cost(replicate=1, **how).exposed


@pytest.mark.parametrize(
    ("kind", "ranks", "units"),
    [
        ("ulysses", 4, 2 * 4 * 3 / 16),  # docs/sequence_parallel.md: 4 (P-1) / P^2 forward, and as much backward
        ("ring", 4, 3 * 2 * 3 / 4),  # keys and values; both, and their gradients
        ("fastseq", 2, 1 / 2 * (1 + 1 / 2) + 1 / 2 * (2 + 1 / 2)),  # backward: inputs again, their gradients, heads
        ("usp", 4, 8 / (2 * 4) + 6 / 4),
    ],
)
def test_bytes_of_shared_sequences(kind, ranks, units):
    found = step_cost(
        CONFIG, Setup(world=ranks, sequence_parallel=ranks), 3, 2, H200, 8, sequence_type=kind
    )  # fmt: skip
    assert found.traffic["sequence"].bytes == pytest.approx(2 * CONFIG.depth * units * 3 * UNIT)
    assert received_by_attention(found.sequence, ranks) == pytest.approx(units) and found.sequence.kind == kind
    again = cost(3, world=ranks, sequence_parallel=ranks, grad_checkpoint=True).traffic["sequence"]
    assert again.bytes == pytest.approx(4 / 3 * cost(3, world=ranks, sequence_parallel=ranks).traffic["sequence"].bytes)
    with pytest.raises(ValueError, match="heads"):
        step_cost(CONFIG, Setup(world=3, sequence_parallel=3), 1, 1, H200, 8, sequence_type="ulysses")


def test_sequences_across_machines_go_over_the_links_between_them():
    near, far = (cost(2, node=node, world=4, sequence_parallel=4).traffic["sequence"] for node in (4, 2))
    assert far.seconds > 2 * near.seconds
    frames = model_config("ST-DiT-XL/122", input_size=(32, 32), in_channels=4, num_classes=10, frames=8)
    found = cost(1, config=frames, world=4, sequence_parallel=4).traffic["sequence"]
    assert found.bytes == pytest.approx(frames.depth * 4 * 3 / 16 * UNIT)


def test_bytes_of_divided_layers():
    """10 (P - 1) / P x N D numbers per block and sample (docs/parallelism.md)."""
    for ranks in (2, 4):
        found = cost(3, world=ranks, tensor_parallel=ranks).traffic["layers"]
        assert found.bytes == pytest.approx(CONFIG.depth * 10 * (ranks - 1) / ranks * 3 * UNIT)
    both = cost(3, world=4, tensor_parallel=2, sequence_parallel=2).traffic
    assert both["layers"].bytes == pytest.approx(CONFIG.depth * 10 / 2 * 3 * UNIT / 2)
    halves = make_plan("auto", 2, Shape(2048, 576, 8, 3, 2, CONFIG.sequence_types), hardware=replace(H200, direct=True))
    received = received_by_attention(halves, 2) * 3 * UNIT / 2
    assert both["sequence"].bytes == pytest.approx(CONFIG.depth * received)


def test_bytes_of_experts():
    """Tokens go to the experts that chose them and back, in both passes. Divided experts are not gathered."""
    config = model_config("EC-DiT-1B/2", input_size=(32, 32), in_channels=4, num_classes=10)  # 256 tokens, C = 2
    how = dict(config=config, batch=3, world=8, plugin="fsdp", reshard="after_forward", keep_gradients=True)
    one, four, eight = (cost(expert_parallel=ranks, **how).traffic for ranks in (1, 4, 8))
    tokens = 4 * 2 * 3 * 2 * 256 * 1152 * 3 / 4
    assert four["tokens to experts"].bytes == pytest.approx(config.depth * tokens) and "experts" not in one | eight
    stacks = 64 * 2 * 1152 * 144  # of one block
    assert one["weights"].bytes - four["weights"].bytes == pytest.approx(config.depth * 2 * 2 * stacks * 7 / 8)
    assert four["experts"].bytes == pytest.approx(config.depth * (2 + 4) * stacks / 4 / 2)
    assert "tokens to experts" not in cost(config=config, world=2, tensor_parallel=2).traffic


def test_a_pipeline_waits_for_its_first_and_last_micro_batches():
    """With 1F1B: (P - 1) / M of the slowest stage's work (Narayanan et al. 2021). Half with 2 stages a rank."""
    how = dict(batch=2, world=2, pipeline_parallel=2)
    plain, interleaved = (cost(micro_batches=8, schedule=name, **how) for name in ("1f1b", "interleaved"))
    computing = plain.total - plain.work["bubble"] - plain.work["update"] - plain.traffic["stages"].exposed
    assert plain.work["bubble"] == pytest.approx(computing / 8)
    assert interleaved.work["bubble"] == pytest.approx(computing / 16, rel=0.05)
    assert cost(micro_batches=32, **how).work["bubble"] < 1.05 * plain.work["bubble"]
    assert plain.traffic["stages"].bytes == pytest.approx(2 * 8 * 2 * UNIT)
    assert plain.work["attention"] == pytest.approx(cost(2, 8).work["attention"] / 2)
