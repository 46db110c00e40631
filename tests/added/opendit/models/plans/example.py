"""The plan of the example."""

from dataclasses import replace

from opendit.models.plans import dit
from opendit.models.plans.terms import FlopTerm, Kept, MemoryTerm

PLAN = replace(
    dit.PLAN,
    rules=lambda config: dit.rules(config) | dit.mlp("blocks.*.mlp", branches=2),
    memory=(*dit.MEMORY[:-1], MemoryTerm("MLP", lambda config, execution: Kept(units=3 * config.mlp_ratio + 1))),
    flops=(
        FlopTerm("projections", dit.projection_flops),
        dit.attention_term("attention", lambda config: config.tokens),
        FlopTerm("MLP", lambda config: dit.mlp_flops(config, products=3)),
        *dit.COMMON_FLOPS,
    ),
)
