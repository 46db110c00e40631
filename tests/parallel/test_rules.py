"""Plans' rules cover every parameter, and their slices tile it; shard units and pipeline stages."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from opendit.config.architectures import NAMES, VIDEO_NAMES
from opendit.models.dit import DiTConfig
from opendit.models.initialization import fits
from opendit.models.plan import Column, Expert, Heads, Replicated, Row, Rule, Vocabulary
from opendit.models.zoo import CLASSES, build_model, plan_of
from opendit.parallel.rules import (
    FLAGS,
    balanced_blocks,
    check_divisible,
    check_stages,
    divided_dimension,
    local_slices,
    local_tensor,
    rule_of,
    shard_units,
    stage_blocks,
    stage_of,
)
from tests.models import test_zoo
from tests.training import recorded_estimates

RECORDED = recorded_estimates.configs()
NAMED_MODELS = {name: RECORDED[name] for name in (*NAMES, *VIDEO_NAMES)}
CONFIGS = dict(zip(test_zoo.NAMED, test_zoo.CONFIGS, strict=True))  # every architecture, condition and option
CONFIGS |= {name: replace(c, depth=2) for name, c in RECORDED.items() if "bytes" in name}
# Low-rank modulations with biases, and shared modulations.
LOW_RANK = {"adaln_lora": 3, "bias": True, "positions": "learned"}
CONFIGS |= {
    f"{config.kind} revision {revision}": replace(config, revision=revision, **LOW_RANK)
    for config in test_zoo.CONFIGS
    for revision in (1, 2)
}


def bare(config: DiTConfig) -> nn.Module:
    """Build the model on the meta device."""
    with torch.device("meta"):
        return build_model(config)


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {name: bare(config) for name, config in CONFIGS.items()}


# ------------------------------------------------------------------------------------------------- all models


def test_every_parameter_has_one_rule_and_every_pattern_a_parameter(models):
    used: dict[str, set[str]] = {}
    patterns: dict[str, set[str]] = {}
    for model in models.values():
        config = model.config
        rules = plan_of(config).rules(config)
        patterns.setdefault(config.kind, set()).update(rules)
        for parameter, _ in model.named_parameters():
            (pattern,) = (p for p in rules if fits(p, parameter))
            assert rule_of(rules, parameter) == rules[pattern]
            used.setdefault(config.kind, set()).add(pattern)
    assert set(patterns) == {made.config.kind for made in CLASSES.values()}
    for kind, fitting in used.items():
        assert patterns[kind] - fitting == set(), kind


def test_a_rule_is_asked_for_by_a_name_that_one_pattern_fits():
    rules = {"blocks.*.a": Row(), "blocks.**": Column(), "x.*.y": Expert()}
    assert rule_of(rules, "blocks.3.b.c") == Column() and rule_of(rules, "x.3.y") == Expert()
    for name, count in (("blocks.3.a", 2), ("x.y", 0), ("x.1.2.y", 0), ("z", 0), ("xx1xy", 0)):
        with pytest.raises(ValueError, match=f"{name}: one pattern of the plan has to fit it, not {count}"):
            rule_of(rules, name)


def coverage(shape: tuple[int, ...], rule: Rule, size: int) -> Tensor:
    """Count how many ranks' slices contain each element of a tensor."""
    count = torch.zeros(shape, dtype=torch.int64)
    for rank in range(size):
        parts = local_slices(shape, rule, rank, size)
        for slices in parts:
            count[slices] += 1
        full = torch.arange(math.prod(shape)).view(shape)
        dimension = divided_dimension(rule)
        expected = [full[slices] for slices in parts]
        expected = expected[0] if dimension is None else torch.cat(expected, dim=dimension)
        assert torch.equal(local_tensor(full, rule, rank, size), expected)
    return count


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_slices_of_all_ranks_tile_the_tensor(size):
    side = 30
    divided = [
        ((side, 7), Column()),
        ((side,), Column()),
        ((2 * side, 3), Column(sections=2)),
        ((7, side), Row()),
        ((5, side * 4), Row(heads=side)),
        ((3 * side * 2, 3), Heads((side, side, side))),
        (((2 * side + 2 * side) * 3,), Heads((2 * side, side, side))),
        ((side, 2, 3), Expert()),
        *(((rows, 4), Vocabulary()) for rows in (side, 31, 7, 11, 3)),
    ]
    for shape, rule in divided:
        assert (coverage(shape, rule, size) == 1).all(), (shape, rule)
        assert rule == Vocabulary() or local_tensor(torch.empty(shape), rule, 0, size).numel() * size == math.prod(
            shape
        )
    assert (coverage((3, 4), Replicated(), size) == size).all()


def test_slices_keep_sections_and_heads_together():
    """The cases are [q; k; v] with 4 query and 2 key heads, two halves of 4 rows, and 7 rows in unequal shares."""
    rows = [part[0] for part in local_slices((24, 5), Heads((4, 2, 2)), 1, 2)]
    assert rows == [slice(6, 12), slice(15, 18), slice(21, 24)]
    assert [part[0] for part in local_slices((8, 5), Column(2), 1, 2)] == [slice(2, 4), slice(6, 8)]
    assert local_slices((5, 8), Row(), 1, 2) == ((slice(0, 5), slice(4, 8)),)
    assert [local_slices((7, 1), Vocabulary(), rank, 3)[0][0] for rank in range(3)] == [
        slice(0, 3), slice(3, 5), slice(5, 7),
    ]  # fmt: skip
    assert [len(range(7)[local_slices((7, 1), Vocabulary(), rank, 9)[0][0]]) for rank in range(9)] == [1] * 7 + [0] * 2


@pytest.mark.parametrize(
    ("shape", "rule", "message"),
    [
        ((10, 4), Column(), "10 features can't be divided evenly into 4 ranks"),
        ((12, 4), Column(2), "6 features can't be divided evenly into 4 ranks"),
        ((9, 4), Column(2), "9 features can't be divided evenly into 2 sections"),
        ((4, 10), Row(), "10 features can't be divided evenly into 4 ranks"),
        ((4, 24), Row(heads=6), "6 heads can't be divided evenly into 4 ranks"),  # although 24 features can
        ((32, 4), Heads((4, 2, 2)), "2 heads can't be divided evenly into 4 ranks"),
        ((30, 4), Heads((4, 2, 2)), "30 features can't be divided evenly into 8 heads"),
        ((6, 2, 2), Expert(), "6 experts can't be divided evenly into 4 ranks"),
    ],
)
def test_what_does_not_divide_is_an_error(shape, rule, message):
    with pytest.raises(ValueError, match=message):
        local_slices(shape, rule, 0, 4)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_is_one_of_its_group(rank, size):
    with pytest.raises(ValueError, match=f"rank {rank} of a group of {size}"):
        local_slices((4, 4), Column(), rank, size)


GROUPS = {Replicated: None, Expert: "ep"}  # the group that divides a parameter; "tp" for all other rules


def test_sizes_are_refused_where_slices_do_not_divide():
    """check_divisible refuses exactly the sizes for which local_slices fails, for every named model."""
    outcomes = set()
    for config in NAMED_MODELS.values():
        rules = plan_of(config).rules(config)
        shapes = {name: p.shape for name, p in bare(replace(config, depth=1)).named_parameters()}
        of_parameters = {name: rule_of(rules, name) for name in shapes}
        for (group, flag), size in itertools.product(FLAGS.items(), (2, 3, 4, 8, 16)):
            mine = {name: rule for name, rule in of_parameters.items() if GROUPS.get(type(rule), "tp") == group}
            divides = bool(mine) and all(_divides(shapes[name], rule, size) for name, rule in mine.items())
            outcomes.add((group, divides))
            if divides:
                check_divisible(config, group, size)
                continue
            with pytest.raises(ValueError, match=f"^{flag} {size}: .*; (use|leave it out)[^\n]*$") as error:
                check_divisible(config, group, size)
            _, _, works = str(error.value).partition("; use ")
            for other in works.split(", ") if works else ():
                check_divisible(config, group, int(other))
    assert outcomes == set(itertools.product(FLAGS, (True, False)))


def _divides(shape: tuple[int, ...], rule: Rule, size: int) -> bool:
    try:
        local_slices(shape, rule, 0, size)
    except ValueError:
        return False
    return True


def test_messages_name_the_flag_and_what_works():
    config = NAMED_MODELS["MovieGen-5B/122"]
    check_divisible(config, "tp", 1)
    for group, size, message in (
        ("tp", 3, "--tensor_parallel_size 3: the model's MLP width, 8192, can't be divided by it; use 2, 4, 8"),
        ("tp", 16, "--tensor_parallel_size 16: the model's number of heads, 24, can't be divided by it; use 2, 4, 8"),
        ("ep", 2, "--expert_parallel_size 2: moviegen models have nothing that it divides; leave it out"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            check_divisible(config, group, size)
    with pytest.raises(ValueError, match="number of experts, 64, can't be divided by it; use 2, 4, 8, 16, 32, 64$"):
        check_divisible(NAMED_MODELS["EC-DiT-1B/2"], "ep", 5)
    with pytest.raises(ValueError, match="number of heads of keys and values, 8, can't be divided by it; use 2, 4, 8$"):
        check_divisible(NAMED_MODELS["MovieGen-30B/122"], "tp", 16)
    check_stages(config, 32)
    with pytest.raises(ValueError, match="^--pipeline_parallel_size 33: the model's 32 blocks make .* use 32 or less$"):
        check_stages(config, 33)
    check_stages(config, 16, chunks=2)
    with pytest.raises(
        ValueError, match="^--pipeline_parallel_size 17: the model has 32 blocks, .* use 16 or less, or"
    ):
        check_stages(config, 17, chunks=2)


# ------------------------------------------------------------------------------------------- shard units and stages


def test_shard_units_are_blocks_and_what_is_outside(models):
    for model in models.values():
        names = [name for name, _ in model.named_parameters()]
        units = shard_units(plan_of(model.config), names)
        assert sorted(itertools.chain(*units.values())) == sorted(names)
        blocks = [f"blocks.{i}" for i in range(model.config.depth)]
        assert set(units) == {"", *blocks}
        for unit, parameters in units.items():
            assert all(parameter.startswith("blocks.") == bool(unit) for parameter in parameters)
            assert all(parameter.startswith(unit) for parameter in parameters)


@pytest.mark.parametrize(("depth", "stages"), [(28, 4), (7, 3), (5, 5), (4, 1)])
def test_stages_have_neighbours_evenly(depth, stages):
    blocks = stage_blocks(depth, stages)
    assert list(itertools.chain(*blocks)) == list(range(depth)) and len(blocks) == stages
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def test_stages_have_as_little_work_as_the_slowest_can_have():
    """The division is compared with all other divisions of a few blocks."""
    for depth, stages, first, last in ((7, 3, 0.1, 0.4), (8, 2, 0.0, 2.2), (9, 4, 1.7, 0.0), (5, 5, 3.0, 0.1)):

        def slowest(counts, first=first, last=last) -> float:
            return max(n + first * (i == 0) + last * (i == len(counts) - 1) for i, n in enumerate(counts))

        others = itertools.product(range(1, depth + 1), repeat=stages)
        best = min(slowest(counts) for counts in others if sum(counts) == depth)
        blocks = stage_blocks(depth, stages, first, last)
        assert list(itertools.chain(*blocks)) == list(range(depth))
        assert slowest([len(own) for own in blocks]) == best, (depth, stages)


def test_the_final_layer_and_the_patches_weigh_as_much_as_their_products():
    small = replace(NAMED_MODELS["DiT-XL/2"], patch_size=8, input_size=(32, 32))  # 16 tokens of 8 x 8 x 4 values
    block = plan_of(small).flops_at(small, "block")
    d, values = small.hidden_size, 8 * 8 * 4
    first, last = 2 * 16 * d * values, 2 * 16 * d * 2 * values + 2 * d * 2 * d
    assert (plan_of(small).flops_at(small, "first"), plan_of(small).flops_at(small, "last")) == (first, last)
    assert balanced_blocks(small, 2) == stage_blocks(28, 2, first / block, last / block)


def test_every_parameter_and_buffer_has_its_stages(models):
    for name, model in models.items():
        config, plan = model.config, plan_of(model.config)
        blocks = balanced_blocks(config, 2)
        stages = {n: stage_of(plan, n, blocks) for n in model.state_dict()}
        expected = {"x_embedder": {0}, "pos_embed": {0}, "temporal_embed": {0}, "final_layer": {1}}
        expected |= {"learned_positions": {0, 1} if config.positions_in_blocks or config.kind == "moviegen" else {0}}
        for parameter, found in stages.items():
            top, *rest = parameter.split(".")
            block = {int(int(rest[0]) in blocks[1])} if top == "blocks" else {0, 1}
            assert set(found) == expected.get(top, block), (name, parameter)
        with pytest.raises(ValueError, match="head.weight: the plan does not say which stages"):
            stage_of(plan, "head.weight", blocks)
