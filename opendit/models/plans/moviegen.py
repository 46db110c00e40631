"""The plan of MovieGen: RMSNorms, heads that share keys and values, SwiGLU."""

from dataclasses import replace
from typing import TYPE_CHECKING

from opendit.models.plans import dit
from opendit.models.plans.terms import Execution, FlopTerm, Kept, MemoryTerm, Replicated, Rule

if TYPE_CHECKING:
    from opendit.models.moviegen import MovieGenConfig


def rules(config: "MovieGenConfig") -> dict[str, Rule]:
    return {
        **dit.around_blocks(config),
        **dit.block_modulation(config),
        **dit.self_attention("blocks.*.attn", config.num_heads, config.kv_heads),
        **dit.cross_attention("blocks.*.cross_attn", config.num_heads),
        **dit.mlp("blocks.*.mlp", branches=2),
        **{f"blocks.*.{norm}.weight": Replicated() for norm in ("attn_norm", "cross_norm", "mlp_norm")},
    }


def divisible(config: "MovieGenConfig") -> dict[str, dict[str, int]]:
    kv_heads = {"number of heads of keys and values": config.kv_heads or config.num_heads}
    return {"tp": dit.divisible(config)["tp"] | kv_heads}


def projections(config: "MovieGenConfig") -> dict[str, tuple[str, ...]]:
    found = dit.block_projections("attn", norm="rmsnorm")
    by_torch = ["blocks.*.mlp.fc1"]  # SwiGLU is given its output
    if config.kv_heads not in (None, config.num_heads):
        by_torch.append("blocks.*.attn.qkv")
    return {name: operations for name, operations in found.items() if name not in by_torch}


def _rms_norms(config: "MovieGenConfig", execution: Execution) -> Kept:
    """Two RMSNorms' products and their modulations; fused, the modulations alone."""
    return Kept(units=2 * (1 if execution.fused else 3), statistics=4)


def _attention(config: "MovieGenConfig", execution: Execution) -> Kept:
    """q, k, v, with keys and values that heads share for every head too; what attention returns, its projection and the
    sum with x. Ranks that share a sample make copies of shared keys and values before they exchange them."""
    keys = config.key_value_width / config.hidden_size
    copied = keys == 1 or execution.sequence_parallel > 1
    units = 3 + (3 if copied else 1 + 2 * keys + 2)
    if config.qk_norm:  # both products of an RMSNorm; of shared keys what is attended to is a copy anyway
        units += 2 + (2 if keys == 1 else keys)
    elif config.positions == "rope":
        units += 2 if keys == 1 else -2 * keys
    return Kept(units=units, statistics=config.num_heads)


def _swiglu(config: "MovieGenConfig", execution: Execution) -> Kept:
    """fc1's two halves, SiLU's output unless fused, their product; fc2's output."""
    return Kept(units=(3 if execution.fused else 4) * config.mlp_ratio + 1)


PLAN = replace(
    dit.PLAN,
    rules=rules,
    divisible=divisible,
    memory=(
        MemoryTerm("input", dit.block_input),
        MemoryTerm("norms", _rms_norms),
        MemoryTerm("attention", _attention),
        dit.caption_attention(lambda execution: 3),  # h before it, its RMSNorm's two products
        MemoryTerm("MLP", _swiglu),
    ),
    flops=(
        FlopTerm("projections", lambda config: dit.projection_flops(config, config.key_value_width)),
        dit.attention_term("attention", lambda config: config.tokens),
        FlopTerm("MLP", lambda config: dit.mlp_flops(config, products=3)),
        *dit.COMMON_FLOPS,
    ),
    stages=dit.stages("learned_positions"),  # added before every block
    projections=projections,
)
