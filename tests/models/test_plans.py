"""Test plans: estimates match recorded ones, and a new architecture needs a model, a plan and a line in the zoo."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from opendit.models.blocks import Block
from opendit.models.dit import DiT, DiTConfig
from opendit.models.layers import TORCH_OPS, BlockOps, Mlp
from opendit.models.plan import PLAN, Column, Execution, FlopTerm, Kept, MemoryTerm, mlp_flops, mlp_rules, rules
from opendit.models.zoo import CLASSES, Classes, build_model, config_from_dict, model_config, plan_of
from opendit.parallel.rules import rule_of, shard_units
from opendit.training.memory import Setup, estimate
from tests.memory import kept_bytes
from tests.models.test_dit import randomised
from tests.models.test_zoo import inputs
from tests.training import recorded_estimates

RECORDED = json.loads(recorded_estimates.RECORDED.read_text())


def test_estimates_are_what_they_were():
    """Compare activations, totals and FLOPs of every model with recorded values.

    Two corrections were made since: recomputed blocks keep their modulation, with 2 bytes per number and sample in half
    precision; and all of ST-DiT's attentions count for weights in float8.
    """
    configs = recorded_estimates.configs()
    assert set(configs) == set(RECORDED) and len(configs) > 150
    for name, config in configs.items():
        found, known = recorded_estimates.record(config), RECORDED[name]
        given = 2 * 5 * (config.depth - 1) * config.modulation_width
        weights = 4 * (1 + config.full_attention) + config.cross_attention if config.kind == "stdit" else 0
        weights *= config.hidden_size**2
        since = [
            given + setup.fp8 * weights if setup.grad_checkpoint else setup.fp8 * weights * config.depth
            for setup in recorded_estimates.setups(config)
        ]
        known["activations"] = [sum(pair) for pair in zip(known["activations"], since, strict=True)]
        assert found["flops"] == known["flops"], name
        for figure in ("total", "activations"):
            assert found[figure] == pytest.approx(known[figure], rel=1e-9), (name, figure)


def test_terms_of_a_dit_s_block_are_those_of_the_list():
    """The terms match the list in opendit/kernels/recompute.py."""
    config = model_config("DiT-XL/2", input_size=(32, 32), in_channels=4, num_classes=3)
    parts = {term.part: term.kept(config, Execution()).units for term in plan_of(config).memory}
    parts = {part: units for part, units in parts.items() if units}
    assert parts == {"input": 1, "norms": 2, "attention": 6, "MLP": 9}


def test_amounts_add_up_scale_by_scale():
    assert Kept(1, 2, 3, 4) + Kept(10, 20, 30, 40) == Kept(11, 22, 33, 44)


# ------------------------------------------------------------------------- a new architecture: model, plan, zoo line


@dataclass(frozen=True)
class ThreefoldConfig(DiTConfig):
    kind: ClassVar[str] = "threefold"

    def mlp_parameters(self) -> int:
        d, hidden = self.hidden_size, self.mlp_hidden
        return 4 * d * hidden + (3 * hidden + d) * self.bias


class ThreefoldMlp(Mlp):
    """fc2(a * b * c), where a, b and c are the thirds of fc1's output."""

    branches: ClassVar[int] = 3

    def hidden(self, x: Tensor, ops: BlockOps = TORCH_OPS) -> Tensor:
        a, b, c = self.fc1(x).chunk(3, dim=-1)
        return a * b * c


class Threefold(DiT):
    def make_block(self) -> Block:
        block, config = super().make_block(), self.config
        block.mlp = ThreefoldMlp(config.hidden_size, config.mlp_hidden, config.bias)
        return block


# fc1's output, a * b, all three, fc2's output
MEMORY = MemoryTerm("MLP", lambda config, execution: Kept(units=5 * config.mlp_ratio + 1))
FLOPS = FlopTerm("MLP", lambda config: mlp_flops(config, matrices=4))
OWN_PLAN = replace(
    PLAN.with_terms(MEMORY, FLOPS),
    rules=lambda config: rules(config) | mlp_rules(branches=3),
)


@pytest.fixture
def threefold(monkeypatch) -> ThreefoldConfig:
    monkeypatch.setitem(CLASSES, "Threefold", Classes(ThreefoldConfig, Threefold, OWN_PLAN))
    return ThreefoldConfig((16, 16), 2, 2, 96, 3, 3, num_classes=3, mlp_ratio=2.0)


def test_a_new_architecture_has_work_and_memory(threefold):
    assert config_from_dict(threefold.to_dict()) == threefold
    model = randomised(build_model(threefold))
    assert isinstance(model, Threefold) and sum(p.numel() for p in model.parameters()) == threefold.parameters()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(*inputs(threefold, 1, torch.float32))
    assert counter.get_total_flops() == threefold.forward_flops()

    setup, arguments = Setup(precision="fp32", fused=False), inputs(threefold, 4, torch.float32)
    kept = kept_bytes(lambda: model(*arguments))
    model.blocks = torch.nn.ModuleList()  # what remains is outside the blocks
    kept -= kept_bytes(lambda: model(*arguments))
    unit = 4 * threefold.tokens * threefold.hidden_size * 4
    backward = 5 + 5 / 4 * (2 - 4)
    assert estimate(threefold, setup, 4).activations - backward * unit == pytest.approx(kept, rel=0.02)
    assert plan_of(threefold).kept(threefold, setup.execution).units == 1 + 4 + 6 + 11


def test_a_new_architecture_has_rules(threefold):
    names = dict(build_model(threefold).named_parameters())
    rules = plan_of(threefold).rules(threefold)
    assert rule_of(rules, "blocks.2.mlp.fc1.weight") == Column(3)
    assert all(rule_of(rules, name) for name in names)
    blocks = {f"blocks.{i}" for i in range(3)}
    assert set(shard_units(OWN_PLAN, names)) == {"", *blocks}
