"""The plan of DiT and vDiT, and the parts that the plans of other architectures have in common with it."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from opendit.models import bytes_text
from opendit.models.layers import TIME_FREQUENCIES
from opendit.models.plans.terms import (
    Column,
    Execution,
    FlopTerm,
    Heads,
    Kept,
    MemoryTerm,
    OwnConfig,
    Plan,
    Replicated,
    Row,
    Rule,
    StageCuts,
    Vocabulary,
    linear,
)

if TYPE_CHECKING:
    from opendit.models.configuration import DiTConfig

Count = Callable[[OwnConfig], int]  # how many of something a block has

# ------------------------------------------------------------------------------------------------------------- rules


def around_blocks(config: "DiTConfig") -> dict[str, Rule]:
    """Return the rules of the layers outside of the blocks. Products of single vectors are not worth a collective,
    except for the modulations, which have many weights."""
    return {
        "x_embedder.proj.*": Replicated(),
        "t_embedder.mlp.*.*": Replicated(),
        "y_embedder.embedding_table.weight": Vocabulary(),
        "y_embedder.mlp.*.*": Replicated(),
        "y_embedder.tokens.*": Replicated(),
        "text_encoder.**": Replicated(),
        "learned_positions.axes.*.weight": Replicated(),
        **linear("shared_modulation.1", Column(gathered=True)),
        **linear("final_layer.adaLN_modulation.1", Column(gathered=True)),
        **linear("final_layer.linear", Replicated()),
    }


def block_modulation(config: "DiTConfig") -> dict[str, Rule]:
    """A block's modulation, whose output every rank needs: of full rank, or a product of two matrices."""
    name = "blocks.*.adaLN_modulation"
    if config.adaln_lora is None:
        return linear(f"{name}.1", Column(gathered=True))
    return {f"{name}.1.weight": Replicated(), **linear(f"{name}.2", Column(gathered=True))}


def self_attention(name: str, heads: int, kv_heads: int | None = None) -> dict[str, Rule]:
    """An ``Attention`` called ``name``, whose heads share ``kv_heads`` heads of keys and values (None: have their
    own)."""
    shared = kv_heads or heads
    return linear(f"{name}.qkv", Heads((heads, shared, shared))) | _end_of_attention(name, heads)


def cross_attention(name: str, heads: int) -> dict[str, Rule]:
    """A ``CrossAttention`` called ``name``."""
    q, kv = linear(f"{name}.q", Heads((heads,))), linear(f"{name}.kv", Heads((heads, heads), of_context=True))
    return q | kv | _end_of_attention(name, heads)


def _end_of_attention(name: str, heads: int) -> dict[str, Rule]:
    norms = {f"{name}.{norm}.weight": Replicated(partial_gradient=True) for norm in ("q_norm", "k_norm")}
    return norms | linear(f"{name}.proj", Row(heads))


def mlp(name: str, branches: int = 1) -> dict[str, Rule]:
    """An ``Mlp`` called ``name``, whose fc1 has so many branches side by side."""
    return linear(f"{name}.fc1", Column(branches)) | linear(f"{name}.fc2", Row())


def rules(config: "DiTConfig") -> dict[str, Rule]:
    return {
        **around_blocks(config),
        **block_modulation(config),
        **self_attention("blocks.*.attn", config.num_heads),
        **cross_attention("blocks.*.cross_attn", config.num_heads),
        **mlp("blocks.*.mlp"),
    }


def divisible(config: "DiTConfig") -> dict[str, dict[str, int]]:
    sizes = {"number of heads": config.num_heads, "hidden size": config.hidden_size, "MLP width": config.mlp_hidden}
    return {"tp": sizes}


def stages(*every: str) -> StageCuts:
    """A DiT's, with ``every`` more on every stage."""
    first = ("x_embedder", "pos_embed", "temporal_embed", "learned_positions")
    condition = ("t_embedder", "y_embedder", "text_encoder", "shared_modulation")
    return StageCuts("blocks", tuple(name for name in first if name not in every), ("final_layer",), condition + every)


# ------------------------------------------------------------------------------------------------------- projections

RESIDUAL = "linear_gate_residual"


def block_projections(*attentions: str, norm: str = "layernorm") -> dict[str, tuple[str, ...]]:
    """Return the projections of blocks with these self-attentions and an MLP. norm: layernorm or rmsnorm."""
    residual = RESIDUAL, f"{RESIDUAL}_{norm}_modulate"
    inputs = {f"blocks.*.{name}.qkv": ("linear_heads",) for name in attentions}
    outputs = {f"blocks.*.{name}.proj": residual for name in attentions}
    return inputs | outputs | {"blocks.*.mlp.fc1": ("linear_gelu",), "blocks.*.mlp.fc2": residual}


def projections(config: "DiTConfig") -> dict[str, tuple[str, ...]]:
    return block_projections("attn")


# ------------------------------------------------------------------------------------------------------------ memory
# What a DiT's block keeps is listed in opendit/kernels/recompute.py.


def block_input(config: "DiTConfig", execution: Execution) -> Kept:
    """x; of a sample its modulation and what that is made of."""
    return Kept(units=1, numbers=config.modulation_width + config.hidden_size)


def layer_norms(count: Count) -> MemoryTerm:
    """Outputs of LayerNorm + modulation. Mean and 1 / deviation are counted for two of them, whatever the number."""

    def kept(config: "DiTConfig", execution: Execution) -> Kept:
        if execution.recompute != "none":
            return Kept(statistics=4)
        if execution.fp8:
            return Kept(units=count(config) / 2, statistics=4)
        # What lies between LayerNorm and modulation. Under autocast LayerNorm works on fp32 copies.
        between = 0 if execution.fused else 3 if execution.autocast else 1
        return Kept(units=count(config) * (1 + between), statistics=4)

    return MemoryTerm("norms", kept)


def float8_weights(execution: Execution, count: int) -> int:
    """Bytes of ``count`` weights that operations in float8 read, which keep them in e4m3."""
    return count if execution.fp8 else 0


def attention_units(execution: Execution) -> float:
    """Count what self-attention keeps: q, k, v, its output, that output projected, and the sum with x."""
    # In FP8 the attention's output is there in both forms.
    return 6 + (execution.fp8 and execution.recompute == "none") / 2


def attentions(count: Count) -> MemoryTerm:
    """Self-attentions. All of torch's kernels but ``math`` keep a log-sum-exp a row and head, counted for
    one attention, whatever the number."""

    def kept(config: "DiTConfig", execution: Execution) -> Kept:
        each = attention_units(execution)
        if config.qk_norm:
            each += 4  # both products of an RMSNorm, of queries and of keys
        elif config.positions == "rope":
            each += 2
        weights = float8_weights(execution, 4 * config.hidden_size**2)
        return Kept(units=each * count(config), statistics=config.num_heads, weights=weights * count(config))

    return MemoryTerm("attention", kept)


def caption_attention(outside: Callable[[Execution], float]) -> MemoryTerm:
    """Cross-attention: q and what it returns, k and v of the text, and so many units ``outside`` of its heads."""

    def kept(config: "DiTConfig", execution: Execution) -> Kept:
        if not config.cross_attention:
            return Kept()
        heads = 2 + 2 * _caption_keys(config) / config.tokens
        return Kept(units=outside(execution) + heads * (1 + config.qk_norm))

    return MemoryTerm("cross-attention", kept)


def gelu_mlp(config: "DiTConfig", execution: Execution) -> Kept:
    """fc1's output, GELU's, fc2's."""
    wide, level = config.mlp_ratio, execution.recompute
    units = 1 + {"half": wide / 2, "mlp": 0}.get(level, wide)
    if level in ("none", "norms"):  # one byte a number in FP8
        units += wide / 2 if execution.fp8 and level == "none" else wide
    return Kept(units=units, weights=float8_weights(execution, 2 * config.hidden_size * config.mlp_hidden))


# Units that the backward pass of a block takes at its worst beyond what was kept: in fc2's, dout, gate * dout and the
# gradient of GELU's output, 1 + 1 + 4, less fc2's output, which is not needed any more. Recomputing adds what it has
# made: GELU's output 4; fc1's output and its input, 4 + 1.
BACKWARD = {"none": 5, "norms": 5, "cheap": 9, "half": 14, "mlp": 14}


def backward(config: "DiTConfig", execution: Execution) -> float:
    return BACKWARD[execution.recompute] + 5 / 4 * (config.mlp_ratio - 4)


# -------------------------------------------------------------------------------------------------------------- work


def projection_flops(config: "DiTConfig", kv_width: int | None = None) -> int:
    """Count the FLOPs of self-attention's linear layers. kv_width: of all heads of keys (None: the hidden size)."""
    n, d = config.tokens, config.hidden_size
    return 2 * n * d * (d + 2 * (kv_width or d)) + 2 * n * d * d


def attention_term(part: str, keys: Count) -> FlopTerm:
    """Both products of an attention in which every token sees so many ``keys``."""
    return FlopTerm(part, lambda config: 4 * config.tokens * keys(config) * config.hidden_size, keys=keys)


def mlp_flops(config: "DiTConfig", products: int = 2) -> int:
    """Count the FLOPs of an MLP. products: matrices of hidden size x MLP width; 3 for SwiGLU."""
    return 2 * products * config.tokens * config.hidden_size * config.mlp_hidden


def _modulation(config: "DiTConfig") -> int:
    return 2 * config.modulation_weights


def _cross_attention(config: "DiTConfig") -> int:
    if not config.cross_attention:
        return 0
    n, m, d = config.tokens, _caption_keys(config), config.hidden_size
    return 2 * n * d * d + 2 * m * d * (2 * d) + 2 * n * d * d


def _caption_keys(config: "DiTConfig") -> int:
    return config.text.max_tokens if config.text and config.text.cross_attention else 0


def _patches(config: "DiTConfig") -> int:
    return 2 * config.tokens * math.prod(config.patch) * config.embedded_channels * config.hidden_size


def _time(config: "DiTConfig") -> int:
    return 2 * TIME_FREQUENCIES * config.hidden_size + 2 * config.hidden_size**2


def _shared_modulation(config: "DiTConfig") -> int:
    return 2 * config.modulation_width * config.hidden_size * config.shared_modulation


def _caption(config: "DiTConfig") -> int:
    text, d = config.text, config.hidden_size
    if text is None:
        return 0
    tokens = 2 * text.max_tokens * text.width * d * text.cross_attention
    encoder = bytes_text.forward_flops(text) if text.inside else 0
    return 2 * text.width * d + 2 * d * d + tokens + encoder


def _final_layer(config: "DiTConfig") -> int:
    d = config.hidden_size
    return 2 * config.tokens * d * math.prod(config.patch) * config.out_channels + 2 * d * 2 * d


COMMON_FLOPS = (  # of all architectures
    FlopTerm("modulation", _modulation),
    FlopTerm("cross-attention", _cross_attention),
    attention_term("attention to captions", _caption_keys),
    FlopTerm("patches", _patches, place="first"),
    FlopTerm("time", _time, place="every"),
    FlopTerm("shared modulation", _shared_modulation, place="every"),
    FlopTerm("caption", _caption, place="every"),
    FlopTerm("final layer", _final_layer, place="last"),
)


# -------------------------------------------------------------------------------------------------------------- plan

MEMORY = (
    MemoryTerm("input", block_input),
    layer_norms(lambda config: 2),
    attentions(lambda config: 1),
    caption_attention(lambda execution: 2 + execution.autocast),  # h before it, its LayerNorm, which autocast copies
    MemoryTerm("MLP", gelu_mlp),
)
FLOPS = (
    FlopTerm("projections", projection_flops),
    attention_term("attention", lambda config: config.tokens),
    FlopTerm("MLP", mlp_flops),
    *COMMON_FLOPS,
)
PLAN = Plan(rules, divisible, MEMORY, backward, FLOPS, stages(), projections)
