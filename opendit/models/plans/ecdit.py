"""The plan of EC-DiT: a DiT's, and experts beside its MLP."""

from dataclasses import replace
from typing import TYPE_CHECKING

from opendit.models.plans import dit
from opendit.models.plans.terms import Execution, Expert, FlopTerm, Kept, MemoryTerm, Replicated, Rule

if TYPE_CHECKING:
    from opendit.models.ecdit import ECDiTConfig


def rules(config: "ECDiTConfig") -> dict[str, Rule]:
    return dit.rules(config) | {
        # Every rank needs all affinities, for the softmax over the experts, and weights the outputs of its own by them.
        "blocks.*.mlp.router.weight": Replicated(partial_gradient=True),
        "blocks.*.mlp.expert_fc1": Expert(),
        "blocks.*.mlp.expert_fc2": Expert(),
    }


def divisible(config: "ECDiTConfig") -> dict[str, dict[str, int]]:
    return dit.divisible(config) | {"ep": {"number of experts": config.experts}}


def _experts(config: "ECDiTConfig", execution: Execution) -> Kept:
    """Count, for every expert of a token, its input, its output and its hidden layer before and after GELU; then the
    sum over experts."""
    return Kept(units=config.expert_capacity * (2 + 2 * config.expert_hidden / config.hidden_size) + 1)


def _router_flops(config: "ECDiTConfig") -> int:
    return 2 * config.tokens * config.hidden_size * config.experts


def _expert_flops(config: "ECDiTConfig") -> int:
    return 4 * config.experts * config.chosen * config.hidden_size * config.expert_hidden


PLAN = replace(
    dit.PLAN,
    rules=rules,
    divisible=divisible,
    memory=(*dit.MEMORY, MemoryTerm("experts", _experts)),
    flops=(*dit.FLOPS, FlopTerm("router", _router_flops), FlopTerm("experts", _expert_flops)),
)
