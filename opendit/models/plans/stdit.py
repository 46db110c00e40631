"""The plan of ST-DiT: several self-attentions in a block, one of them along time."""

from dataclasses import replace
from typing import TYPE_CHECKING

from opendit.models.plans import dit
from opendit.models.plans.terms import Execution, FlopTerm, Kept, MemoryTerm, Rule

if TYPE_CHECKING:
    from opendit.models.stdit import STDiTConfig


def rules(config: "STDiTConfig") -> dict[str, Rule]:
    attentions = {}
    for name in ("spatial_attn", "temporal_attn", "full_attn"):
        attentions |= dit.self_attention(f"blocks.*.{name}", config.num_heads)
    return {
        **dit.around_blocks(config),
        **dit.block_modulation(config),
        **attentions,
        **dit.cross_attention("blocks.*.cross_attn", config.num_heads),
        **dit.mlp("blocks.*.mlp"),
    }


def projections(config: "STDiTConfig") -> dict[str, tuple[str, ...]]:
    between = dit.block_projections("spatial_attn", "temporal_attn", "full_attn")
    return between | {"blocks.*.cross_attn.proj": between["blocks.*.mlp.fc2"]}


def _norms(config: "STDiTConfig") -> int:
    """One before each attention and one before the MLP."""
    return 3 + config.full_attention + config.cross_attention


def _attention_along_time(config: "STDiTConfig", execution: Execution) -> Kept:
    """Count what every self-attention keeps, and its result in the order that the projection reads, which is not the
    order it is written in. Rotated queries and keys are copies in that order; normalised ones are kept beside them."""
    weights = dit.float8_weights(execution, 4 * config.hidden_size**2)
    units = dit.attention_units(execution) + 1 + 5 * config.qk_norm
    if execution.sequence_parallel > 1 and execution.recompute != "none":
        units += 1  # its input has come from other ranks, and is not recomputed
    return Kept(units=units, weights=weights)


def _cross_attention_output(config: "STDiTConfig", execution: Execution) -> Kept:
    """The weight of its projection, which is the next norm's operation's, unlike a DiT's."""
    return Kept(weights=dit.float8_weights(execution, config.cross_attention * config.hidden_size**2))


def _projections(config: "STDiTConfig") -> int:
    return (2 + config.full_attention) * dit.projection_flops(config)


PLAN = replace(
    dit.PLAN,
    rules=rules,
    memory=(
        MemoryTerm("input", dit.block_input),
        dit.layer_norms(_norms),
        dit.attentions(lambda config: 1 + config.full_attention),
        MemoryTerm("attention along time", _attention_along_time),
        dit.caption_attention(lambda execution: 2),  # h before it, its projection
        MemoryTerm("cross-attention's output", _cross_attention_output),
        MemoryTerm("MLP", dit.gelu_mlp),
    ),
    flops=(
        FlopTerm("projections", _projections),
        dit.attention_term("attention in a frame", lambda config: config.tokens // config.grid[0]),
        dit.attention_term("attention along time", lambda config: config.grid[0]),
        dit.attention_term("attention", lambda config: config.tokens * config.full_attention),
        FlopTerm("MLP", dit.mlp_flops),
        *dit.COMMON_FLOPS,
    ),
    projections=projections,
)
