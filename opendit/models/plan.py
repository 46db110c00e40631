"""A model's plan: how the model can be parallelised and what it costs. The plan follows from the model's configuration
and the blocks' specification (opendit/models/blocks.py).

The first half of this file defines the data classes: parameter rules, stage cuts, and terms of memory and FLOPs.
opendit.parallel.rules slices and checks parameters by these rules; opendit.training.memory estimates the memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from opendit.models.blocks import ATTENTIONS, MLPS, Branch
from opendit.models.conditioning import bytes_flops
from opendit.models.configuration import DiTConfig
from opendit.models.experts import chosen_tokens
from opendit.models.layers import TIME_FREQUENCIES

OwnConfig = Any  # the configuration class of the plan's architecture
Count = Callable[[OwnConfig], int]  # function that computes a number of tokens from the configuration

# --------------------------------------------------------------------------------------------- rules of parameters


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the complete parameter."""


@dataclass(frozen=True)
class Column:
    """Ranks have different output features of a linear layer: slices of weight and bias along dimension 0.

    Attributes:
        sections: Number of concatenated sections of equal width, such as SwiGLU's two halves. Each rank has a slice of
            every section.
        gathered: True if the ranks' outputs are gathered, so that the next layer gets all features.
    """

    sections: int = 1
    gathered: bool = False


@dataclass(frozen=True)
class Row:
    """Ranks have different input features of a linear layer: slices of the weight along dimension 1. The output is the
    sum of the ranks' products. The bias is added to the sum once and is :class:`Replicated`."""

    heads: int | None = None  # number of attention heads in the input, never split between ranks; None without heads


@dataclass(frozen=True)
class Heads:
    """A :class:`Column` rule that never splits an attention head between ranks. A query head is on the same rank as its
    key and value head.

    Attributes:
        heads: Number of heads in each concatenated section: (H, K, K) for a fused qkv projection with H query heads and
            K heads of keys and values; (H,) and (H, H) for cross-attention's q and [k; v].
        of_context: True if the input is a caption (every rank has all its tokens); False if the input is the residual
            stream (ranks may divide its tokens).
    """

    heads: tuple[int, ...]
    of_context: bool = False


@dataclass(frozen=True)
class Expert:
    """A stacked parameter (E, ...) of E experts. Each rank holds its experts' slices."""


@dataclass(frozen=True)
class Vocabulary:
    """Ranks hold different rows of an embedding table. A rank without the requested row looks up zero, and the lookups
    are summed over the ranks. Ranks may have unequal numbers of rows."""


Rule = Replicated | Column | Row | Heads | Expert | Vocabulary


def linear(name: str, rule: Rule) -> dict[str, Rule]:
    return {f"{name}.weight": rule, f"{name}.bias": Replicated() if isinstance(rule, Row) else rule}


# ------------------------------------------------------------------------------------------------------- stage cuts


@dataclass(frozen=True)
class StageCuts:
    """The division of a model into pipeline stages. The fields are names of modules and buffers."""

    stack: str  # the blocks; a stage can begin at any block
    first: tuple[str, ...]  # only on the first stage
    last: tuple[str, ...]  # only on the last stage
    every: tuple[str, ...]  # on all stages, to compute the condition from t and y; gradients are summed over stages


# ----------------------------------------------------------------------------------------------------- memory and FLOPs


@dataclass(frozen=True)
class Execution:
    """Settings of a run that determine what blocks keep for the backward pass."""

    fused: bool = True  # norm and modulation are one kernel
    autocast: bool = False  # fp32 weights are cast to half precision in the forward pass
    fp8: bool = False  # linear layers compute in FP8
    recompute: str = "none"  # level of --recompute
    sequence_parallel: int = 1  # number of ranks that divide a sample's tokens
    frozen_gates: bool = False  # LoRA leaves all gates without a gradient (only in plans of public models)
    block: int | None = None  # index of the block to count; None for the mean of all blocks


@dataclass(frozen=True)
class Kept:
    """Memory for the backward pass. Units and numbers have the activations' dtype."""

    units: float = 0  # tensors (tokens, hidden size) per sample
    statistics: float = 0  # fp32 values per token
    numbers: float = 0  # further values per sample
    weights: float = 0  # bytes, independent of the batch

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Kept)))


@dataclass(frozen=True)
class MemoryTerm:
    """A term of the memory that a block keeps for its backward pass."""

    part: str
    kept: Callable[[OwnConfig, Execution], Kept]


@dataclass(frozen=True)
class FlopTerm:
    """FLOPs of a layer's matrix products, per sample and forward pass (2 per multiply-add)."""

    part: str
    flops: Callable[[OwnConfig], int]
    # "block" for a layer in every block; otherwise the pipeline stages that compute the layer
    place: Literal["block", "first", "last", "every"] = "block"
    keys: Callable[[OwnConfig], int] | None = None  # for attention, keys per query; they determine the kernel's speed

    @property
    def per_block(self) -> bool:
        return self.place == "block"


# ------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Plan:
    """The parallelism that an architecture supports, and the costs of its models.

    Attributes:
        rules: Function that returns pattern -> rule. Every parameter's name matches exactly one pattern: ``*`` matches
            one name between dots, and ``**`` one or more. A pattern may match no parameter.
        divisible: Function that returns the numbers that a parallel group's size must divide, as group ("tp", "ep") ->
            description -> number. Missing groups are not supported.
        memory: Terms of the memory that a block keeps for the backward pass.
        backward: Function that returns a block's peak of additional memory in the backward pass, in ``Kept.units``.
        flops: Terms of the FLOPs.
        stages: Points where a pipeline may cut the model.
        projections: Function that returns module pattern -> operations (fields of BlockOps) that get the module. Only
            these operations read the module's weights.
        units: Patterns of modules that are shard units. A unit's parameters are gathered and freed at once. The
            remaining modules form one more unit. A block's modulation belongs to the block's unit: a separate unit
            would make the backward pass wait for the block's reduction.
    """

    rules: Callable[[OwnConfig], dict[str, Rule]]
    divisible: Callable[[OwnConfig], dict[str, dict[str, int]]]
    memory: tuple[MemoryTerm, ...]
    backward: Callable[[OwnConfig, Execution], float]
    flops: tuple[FlopTerm, ...]
    stages: StageCuts
    projections: Callable[[OwnConfig], dict[str, tuple[str, ...]]]
    units: tuple[str, ...] = ("blocks.*",)

    def with_terms(self, *terms: "MemoryTerm | FlopTerm") -> "Plan":
        memory = {term.part: term for term in terms if isinstance(term, MemoryTerm)}
        flops = {term.part: term for term in terms if isinstance(term, FlopTerm)}
        return replace(
            self,
            memory=tuple(memory.get(term.part, term) for term in self.memory),
            flops=tuple(flops.get(term.part, term) for term in self.flops),
        )

    def kept(self, config: DiTConfig, execution: Execution) -> Kept:
        return sum((term.kept(config, execution) for term in self.memory), Kept())

    def forward_flops(self, config: DiTConfig) -> int:
        outside = sum(self.flops_at(config, place) for place in ("first", "last", "every"))
        return config.depth * self.flops_at(config, "block") + outside

    def flops_at(self, config: DiTConfig, place: str) -> int:
        """Return the FLOPs of all terms with this place (see :class:`FlopTerm`). "block" counts one block."""
        return sum(term.flops(config) for term in self.flops if term.place == place)


# -------------------------------------------------------------------------------------------------- rules of a model


def rules(config: DiTConfig) -> dict[str, Rule]:
    """Return the rules of all parameters. Layers that process one vector per sample are replicated, because dividing
    them would cost a collective and save little. Modulations are divided, because they have many weights."""
    found: dict[str, Rule] = {
        "x_embedder.*.*": Replicated(),
        **({} if config.alignment is None else {"projector.layers.*.*": Replicated()}),
        **({"uncertainty.linear.*": Replicated()} if config.uncertainty else {}),
        **({} if config.sprint is None else {"fusion.**": Replicated()}),
        "t_embedder.mlp.*.*": Replicated(),
        "y_embedder.embedding_table.weight": Vocabulary(),
        "y_embedder.mlp.*.*": Replicated(),
        "y_embedder.tokens.*": Replicated(),
        "text_encoder.**": Replicated(),
        "learned_positions.axes.*.weight": Replicated(),
        **linear("shared_modulation.1", Column(gathered=True)),
        **linear("final_layer.adaLN_modulation.1", Column(gathered=True)),
        **linear("final_layer.linear", Replicated()),
        **_block_modulation(config),
    }
    for branch in config.branches:
        found |= _branch_rules(config, branch)
    return found


def _block_modulation(config: DiTConfig) -> dict[str, Rule]:
    """Return the rules of a block's modulation. Every rank needs the modulation's output, so the output is gathered."""
    name = "blocks.*.adaLN_modulation"
    if config.adaln_lora is None:
        return linear(f"{name}.1", Column(gathered=True))
    return {f"{name}.1.weight": Replicated(), **linear(f"{name}.2", Column(gathered=True))}


def _branch_rules(config: DiTConfig, branch: Branch) -> dict[str, Rule]:
    spec, name = config.block, f"blocks.*.{branch.name}"
    heads, shared = spec.heads, spec.kv_heads or spec.heads
    found: dict[str, Rule] = {f"blocks.*.{branch.norm}.weight": Replicated()} if spec.norm == "rms" else {}
    if branch.sees is None:
        return found | mlp_rules(MLPS[spec.mlp].branches) | (EXPERT_RULES if spec.experts else {})
    if branch.sees == "caption":
        found |= linear(f"{name}.q", Heads((heads,))) | linear(f"{name}.kv", Heads((heads, heads), of_context=True))
    else:
        found |= linear(f"{name}.qkv", Heads((heads, shared, shared)))
    norms = {f"{name}.{norm}.weight": Replicated() for norm in ("q_norm", "k_norm")}
    return found | norms | linear(f"{name}.proj", Row(heads))


def mlp_rules(branches: int = 1) -> dict[str, Rule]:
    return linear("blocks.*.mlp.fc1", Column(branches)) | linear("blocks.*.mlp.fc2", Row())


EXPERT_RULES: dict[str, Rule] = {
    # Every rank needs the full router for the softmax, but uses only its experts' affinities. So the router's gradient
    # is the sum over the ranks.
    "blocks.*.mlp.router.weight": Replicated(),
    "blocks.*.mlp.expert_fc1": Expert(),
    "blocks.*.mlp.expert_fc2": Expert(),
}


def divisible(config: DiTConfig) -> dict[str, dict[str, int]]:
    spec = config.block
    sizes = {"number of heads": spec.heads, "hidden size": spec.width, "MLP width": spec.mlp_hidden}
    if spec.kv_heads is not None:
        sizes["number of heads of keys and values"] = spec.kv_heads
    return {"tp": sizes} | ({} if spec.experts is None else {"ep": {"number of experts": spec.experts.count}})


def stages(*every: str) -> StageCuts:
    """Return the stage cuts of a DiT. every: names of further modules that are on every stage."""
    first = ("x_embedder", "pos_embed", "temporal_embed", "learned_positions")
    condition = ("t_embedder", "y_embedder", "text_encoder", "shared_modulation")
    return StageCuts("blocks", tuple(name for name in first if name not in every), ("final_layer",), condition + every)


def projections(config: DiTConfig) -> dict[str, tuple[str, ...]]:
    """Map a block's linear layers to the operations that use them. Layers that torch computes directly are missing: qkv
    if query heads share keys and values, and most layers of cross-attention."""
    spec, found = config.block, {}
    norm = "rmsnorm" if spec.norm == "rms" else "layernorm"
    residual = "linear_gate_residual", f"linear_gate_residual_{norm}_modulate"
    for branch in spec.branches:
        name = f"blocks.*.{branch.name}"
        if branch.sees is None:
            found[f"{name}.fc1"] = ("linear_gelu" if spec.mlp == "gelu" else "linear",)
            found[f"{name}.fc2"] = residual
        elif branch.modulated:
            if branch.sees != "caption" and spec.kv_heads in (None, spec.heads):
                found[f"{name}.qkv"] = ("linear_heads",)
            found[f"{name}.proj"] = residual
    return found


# ------------------------------------------------------------------------------------------------------------ memory
# opendit/kernels/recompute.py lists the tensors that a DiT block keeps.


def _sees(config: DiTConfig, *what: str) -> int:
    return sum(branch.sees in what for branch in config.branches)


def _input(config: DiTConfig, execution: Execution) -> Kept:
    """Return the memory of a block's inputs: x, and each sample's modulation and condition."""
    return Kept(units=1, numbers=config.modulation_width + config.hidden_size)


def _norms(config: DiTConfig, execution: Execution) -> Kept:
    """Return the memory of norms and modulations. Without fusion, tensors between norm and modulation are kept, too."""
    count = sum(branch.modulated for branch in config.branches)
    if execution.recompute != "none":
        return Kept(statistics=4)
    if config.norm == "rms":
        return Kept(units=count * (1 if execution.fused else 3), statistics=4)
    if execution.fp8:
        return Kept(units=count / 2, statistics=4)
    # autocast's LayerNorm makes additional fp32 copies
    between = 0 if execution.fused else 3 if execution.autocast else 1
    return Kept(units=count * (1 + between), statistics=4)


def _float8_weights(execution: Execution, count: int) -> int:
    return count if execution.fp8 else 0


def _attention(config: DiTConfig, execution: Execution) -> Kept:
    """Return the memory of self-attention: q, k, v, its output, the projected output, and the sum with x."""
    keys = config.key_value_width / config.hidden_size
    copied = keys == 1 or execution.sequence_parallel > 1  # ranks copy shared keys and values for every head
    units = 3 + (3 if copied else 1 + 2 * keys + 2) + (execution.fp8 and execution.recompute == "none") / 2
    if config.qk_norm and execution.fused:  # normalised queries and keys; copies of shared keys are counted above
        units += 1 + (keys == 1)
    elif config.qk_norm:  # both products of each RMSNorm
        units += 2 + (2 if keys == 1 else keys)
    elif config.positions == "rope":
        units += 2 if keys == 1 else -2 * keys
    weights, count = _float8_weights(execution, 4 * config.hidden_size**2), _sees(config, "all", "frame")
    return Kept(units=units * count, statistics=config.num_heads, weights=weights * count)


def _attention_along_time(config: DiTConfig, execution: Execution) -> Kept:
    """Return the memory of self-attention along time. The attention output, queries and keys are also copied to another
    token order."""
    if not _sees(config, "time"):
        return Kept()
    weights = _float8_weights(execution, 4 * config.hidden_size**2)
    units = 7 + (execution.fp8 and execution.recompute == "none") / 2 + (3 if execution.fused else 5) * config.qk_norm
    if execution.sequence_parallel > 1 and execution.recompute != "none":
        units += 1  # the input has come from other ranks and is not recomputed
    return Kept(units=units, weights=weights)


def _cross_attention(config: DiTConfig, execution: Execution) -> Kept:
    """Return the memory of cross-attention: q, k, v, the attention output, and tensors outside of the attention."""
    if not config.cross_attention:
        return Kept()
    gated = any(branch.sees == "caption" and branch.modulated for branch in config.branches)
    # with a gate, input and projected output; without, input and norm's output, or both products of an RMSNorm
    outside = 2 if gated else 3 if config.norm == "rms" else 2 + execution.autocast
    heads = 2 + 2 * _caption_keys(config) / config.tokens
    weights = _float8_weights(execution, config.hidden_size**2) if gated else 0
    return Kept(units=outside + heads * (1 + config.qk_norm), weights=weights)


def _mlp(config: DiTConfig, execution: Execution) -> Kept:
    """Return the memory of the MLP: the outputs of its layers and of the activation."""
    wide, level = config.mlp_ratio, execution.recompute
    units = 1 + {"half": 0.5, "mlp": 0}.get(level, 1) * wide * MLPS[config.mlp].branches
    if level in ("none", "norms"):  # in FP8, one byte per value
        units += wide / 2 if execution.fp8 and level == "none" else wide
    if config.mlp == "swiglu":
        return Kept(units=units + (not execution.fused) * wide)  # without fusion, SiLU's output is kept, too
    return Kept(units=units, weights=_float8_weights(execution, 2 * config.hidden_size * config.mlp_hidden))


def _experts(config: DiTConfig, execution: Execution) -> Kept:
    """Return the memory of the experts: each expert's input, hidden layer (before and after GELU) and output, and the
    sum of the outputs."""
    experts = config.block.experts
    if experts is None:
        return Kept()
    return Kept(units=experts.capacity * (2 + 2 * experts.hidden / config.hidden_size) + 1)


# Level of --recompute -> a block's peak of additional memory in the backward pass, in units (see Kept). The peak is in
# fc2's backward pass. It adds dout (1), gate * dout (1) and the gradient of GELU's output (4), and frees fc2's output
# (1). Recomputation adds GELU's output (4), or also fc1's output and input (4 + 1).
BACKWARD = {"none": 5, "norms": 5, "cheap": 9, "half": 14, "mlp": 14}


def backward(config: DiTConfig, execution: Execution) -> float:
    own = BACKWARD[execution.recompute] + 5 / 4 * (config.mlp_ratio - 4)
    gated = config.mlp_ratio * (MLPS[config.mlp].branches - 1)  # SwiGLU's fc1 has two outputs
    return own + gated * (execution.recompute in ("half", "mlp"))


# ---------------------------------------------------------------------------------------------------------------- FLOPs


def _projections(config: DiTConfig) -> int:
    n, d = config.tokens, config.hidden_size
    return _sees(config, *ATTENTIONS) * (2 * n * d * (d + 2 * config.key_value_width) + 2 * n * d * d)


def attention_term(part: str, keys: Count) -> FlopTerm:
    """Return the FLOP term of an attention's two matrix products. Every token attends to ``keys`` tokens."""
    return FlopTerm(part, lambda config: 4 * config.tokens * keys(config) * config.hidden_size, keys=keys)


def mlp_flops(config: DiTConfig, matrices: int | None = None) -> int:
    """Return the FLOPs of an MLP. matrices: number of (hidden size x MLP width) matrices; None for the block's MLP."""
    matrices = 1 + MLPS[config.mlp].branches if matrices is None else matrices
    return 2 * matrices * config.tokens * config.hidden_size * config.mlp_hidden


def _router_flops(config: DiTConfig) -> int:
    experts = config.block.experts
    return 0 if experts is None else 2 * config.tokens * config.hidden_size * experts.count


def _expert_flops(config: DiTConfig) -> int:
    experts = config.block.experts
    if experts is None:
        return 0
    chosen = chosen_tokens(config.tokens, experts.count, experts.capacity)
    return 4 * experts.count * chosen * config.hidden_size * experts.hidden


def _modulation(config: DiTConfig) -> int:
    return 2 * config.modulation_weights


def _caption_projections(config: DiTConfig) -> int:
    if not config.cross_attention:
        return 0
    n, m, d = config.tokens, _caption_keys(config), config.hidden_size
    return 2 * n * d * d + 2 * m * d * (2 * d) + 2 * n * d * d


def _caption_keys(config: DiTConfig) -> int:
    return config.text.max_tokens if config.text and config.text.cross_attention else 0


def _patches(config: DiTConfig) -> int:
    values, narrow, d = math.prod(config.patch) * config.embedded_channels, config.patch_bottleneck, config.hidden_size
    return 2 * config.tokens * (values * d if narrow is None else narrow * (values + d))


def _time(config: DiTConfig) -> int:
    return 2 * TIME_FREQUENCIES * config.hidden_size + 2 * config.hidden_size**2


def _shared_modulation(config: DiTConfig) -> int:
    return 2 * config.modulation_width * config.hidden_size * config.shared_modulation


def _caption(config: DiTConfig) -> int:
    text, d = config.text, config.hidden_size
    if text is None:
        return 0
    tokens = 2 * text.max_tokens * text.width * d * text.cross_attention
    encoder = bytes_flops(text) if text.inside else 0
    return 2 * text.width * d + 2 * d * d + tokens + encoder


def _final_layer(config: DiTConfig) -> int:
    d = config.hidden_size
    return 2 * config.tokens * d * math.prod(config.patch) * config.out_channels + 2 * d * 2 * d


# -------------------------------------------------------------------------------------------------------------- plan

MEMORY = (
    MemoryTerm("input", _input),
    MemoryTerm("norms", _norms),
    MemoryTerm("attention", _attention),
    MemoryTerm("attention along time", _attention_along_time),
    MemoryTerm("cross-attention", _cross_attention),
    MemoryTerm("MLP", _mlp),
    MemoryTerm("experts", _experts),
)
FLOPS = (
    FlopTerm("projections", _projections),
    attention_term("attention in a frame", lambda config: _sees(config, "frame") * config.tokens // config.grid[0]),
    attention_term("attention along time", lambda config: _sees(config, "time") * config.grid[0]),
    attention_term("attention", lambda config: _sees(config, "all") * config.tokens),
    FlopTerm("MLP", mlp_flops),
    FlopTerm("router", _router_flops),
    FlopTerm("experts", _expert_flops),
    FlopTerm("modulation", _modulation),
    FlopTerm("cross-attention", _caption_projections),
    attention_term("attention to captions", _caption_keys),
    FlopTerm("patches", _patches, place="first"),
    FlopTerm("time", _time, place="every"),
    FlopTerm("shared modulation", _shared_modulation, place="every"),
    FlopTerm("caption", _caption, place="every"),
    FlopTerm("fusion", lambda c: 4 * c.tokens * c.hidden_size**2 * (c.sprint is not None), place="last"),
    FlopTerm("final layer", _final_layer, place="last"),
)
PLAN = Plan(rules, divisible, MEMORY, backward, FLOPS, stages(), projections)
