"""The plan of a model: what may be parallelised in it, and what it costs, as data that follows from its configuration
and from the specification of its blocks (opendit/models/blocks.py).

The first half of this file is the vocabulary: rules of parameters, stage cuts, terms of memory and work. Slices and
checks are made of it by opendit.parallel.rules, the estimate of the memory by opendit.training.memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from opendit.models import bytes_text
from opendit.models.blocks import ATTENTIONS, MLPS, Branch
from opendit.models.configuration import DiTConfig
from opendit.models.experts import chosen_tokens
from opendit.models.layers import TIME_FREQUENCIES

OwnConfig = Any  # the configuration of the plan's own architecture
Count = Callable[[OwnConfig], int]  # how many of something a block has

# --------------------------------------------------------------------------------------------- rules of parameters


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole parameter.

    ``partial_gradient``: each rank applies it to different features (its heads or its experts), so the gradient is the
    sum over the ranks. Without it every rank computes the same gradient, over all features.
    """

    partial_gradient: bool = False


@dataclass(frozen=True)
class Column:
    """Ranks have different output features of a linear layer: dimension 0 of its weight and of its bias.

    ``sections``: number of parts of equal width that lie side by side, such as SwiGLU's two halves; a rank has its
    share of each. ``gathered``: the ranks' outputs are gathered, so that the next layer sees all features.
    """

    sections: int = 1
    gathered: bool = False


@dataclass(frozen=True)
class Row:
    """Ranks have different input features of a linear layer, dimension 1 of its weight; the output is the sum of their
    products. Its bias, which is added to that sum once, is :class:`Replicated`.

    ``heads``: number of attention heads that make the input; a head is not divided.
    """

    heads: int | None = None


@dataclass(frozen=True)
class Heads:
    """A :class:`Column` that divides between heads. ``heads`` is their number in each section: (H, K, K) for a fused
    qkv projection [q; k; v] whose H heads of queries share K heads of keys and values; (H,) and (H, H) for
    cross-attention's q and [k; v].

    Heads of queries are on the same rank as the heads of keys and values that they use.

    of_context: the input is a caption's tokens, which every rank has, instead of the residual stream, whose tokens may
    be divided between ranks.
    """

    heads: tuple[int, ...]
    of_context: bool = False


@dataclass(frozen=True)
class Expert:
    """Ranks have different experts: dimension 0 of a stack (E, ...)."""


@dataclass(frozen=True)
class Vocabulary:
    """Ranks hold different rows of an embedding table. A lookup is summed over the ranks, and is zero on those that do
    not hold the row. Shares may be unequal, because a table has as many rows as there are classes."""


Rule = Replicated | Column | Row | Heads | Expert | Vocabulary


def linear(name: str, rule: Rule) -> dict[str, Rule]:
    """The rules of a linear layer's weight and of its bias, if it has one."""
    return {f"{name}.weight": rule, f"{name}.bias": Replicated() if isinstance(rule, Row) else rule}


# ------------------------------------------------------------------------------------------------------- stage cuts


@dataclass(frozen=True)
class StageCuts:
    """The places where a pipeline may cut a model: between any two modules of ``stack``.

    Names are those of the model's modules and buffers. ``first`` and ``last`` belong to those stages alone; ``every``
    is on every stage, which makes the condition itself from t and y, and its gradients are summed over the stages.
    ``crosses``: the arguments of a block that are sent from one stage to the next: x (B, N, D).
    """

    stack: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    every: tuple[str, ...]
    crosses: tuple[str, ...] = ("x",)


# -------------------------------------------------------------------------------------------------- memory and work


@dataclass(frozen=True)
class Execution:
    """The settings of a run that change what blocks keep for the backward pass.

    fused: norm + modulate in one kernel. autocast: weights are fp32, and cast to half precision in the forward pass.
    recompute: a level of --recompute. sequence_parallel: ranks that share a sample's tokens.
    """

    fused: bool = True
    autocast: bool = False
    fp8: bool = False
    recompute: str = "none"
    sequence_parallel: int = 1


@dataclass(frozen=True)
class Kept:
    """Memory kept for the backward pass, by how it scales; instances add up.

    Attributes:
        units: tensors of tokens x hidden size, in the precision of the activations.
        statistics: fp32 numbers a token.
        numbers: numbers a sample, in the precision of the activations.
        weights: bytes that do not grow with the batch.
    """

    units: float = 0
    statistics: float = 0
    numbers: float = 0
    weights: float = 0

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Kept)))


@dataclass(frozen=True)
class MemoryTerm:
    """The memory that a part of a block keeps for its backward pass."""

    part: str
    kept: Callable[[OwnConfig, Execution], Kept]


@dataclass(frozen=True)
class FlopTerm:
    """FLOPs of a part's matrix products in one sample's forward pass (2 a multiply-add). ``place``: in each block, or
    once on the first, the last or every stage of a pipeline.

    keys: of an attention kernel, how many tokens each query attends to, on which its rate depends; None: the part is
    made of linear layers.
    """

    part: str
    flops: Callable[[OwnConfig], int]
    place: Literal["block", "first", "last", "every"] = "block"
    keys: Callable[[OwnConfig], int] | None = None

    @property
    def per_block(self) -> bool:
        """True if every block has the part."""
        return self.place == "block"


# ------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Plan:
    """The parallelism that the models of an architecture allow, and their costs.

    rules: of a configuration, patterns of parameters' names -> rule; ``*`` stands for one part of a name between dots,
        ``**`` for one or more. Every parameter fits exactly one pattern; patterns may fit none (biases of a model
        without them).
    divisible: of a configuration, the numbers that a group's size has to divide: group ("tp", "ep") -> what is counted
        -> number. A model without the key can't use the group.
    memory: what a block keeps; backward: the units that its backward pass takes at its worst beyond that.
    projections: of a configuration, patterns of modules -> the operations (fields of BlockOps) that a block gives them
        to as their projection; nothing else reads their weights.
    units: patterns of modules that are shard units, each gathered and freed at once; the rest of the model is one more
        unit. A block's unit includes its modulation: as a separate unit it would be reduced right after the block, and
        the backward pass would wait for the block's reduction, which nothing hides.
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
        """Return the plan with these terms instead of those of the same parts."""
        memory = {term.part: term for term in terms if isinstance(term, MemoryTerm)}
        flops = {term.part: term for term in terms if isinstance(term, FlopTerm)}
        return replace(
            self,
            memory=tuple(memory.get(term.part, term) for term in self.memory),
            flops=tuple(flops.get(term.part, term) for term in self.flops),
        )

    def kept(self, config: DiTConfig, execution: Execution) -> Kept:
        """Return the memory that a block keeps for its backward pass: the sum of the memory terms."""
        return sum((term.kept(config, execution) for term in self.memory), Kept())

    def forward_flops(self, config: DiTConfig) -> int:
        """FLOPs of one sample's forward pass: the sum of the FLOP terms."""
        outside = sum(self.flops_at(config, place) for place in ("first", "last", "every"))
        return config.depth * self.flops_at(config, "block") + outside

    def flops_at(self, config: DiTConfig, place: str) -> int:
        """The sum of the FLOP terms of a place: of one block, or of what is on the first, the last or every stage."""
        return sum(term.flops(config) for term in self.flops if term.place == place)


# -------------------------------------------------------------------------------------------------- rules of a model


def rules(config: DiTConfig) -> dict[str, Rule]:
    """Return the rules of all parameters. Products of single vectors, outside of the blocks, are not worth a
    collective, except for the modulations, which have many weights."""
    found: dict[str, Rule] = {
        "x_embedder.*.*": Replicated(),
        **({} if config.alignment is None else {"projector.layers.*.*": Replicated()}),
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
    """A block's modulation, whose output every rank needs: of full rank, or a product of two matrices."""
    name = "blocks.*.adaLN_modulation"
    if config.adaln_lora is None:
        return linear(f"{name}.1", Column(gathered=True))
    return {f"{name}.1.weight": Replicated(), **linear(f"{name}.2", Column(gathered=True))}


def _branch_rules(config: DiTConfig, branch: Branch) -> dict[str, Rule]:
    """Return the rules of a branch's layers and of the norm before it."""
    spec, name = config.block, f"blocks.*.{branch.name}"
    heads, shared = spec.heads, spec.kv_heads or spec.heads
    found: dict[str, Rule] = {f"blocks.*.{branch.norm}.weight": Replicated()} if spec.norm == "rms" else {}
    if branch.sees is None:
        return found | mlp_rules(MLPS[spec.mlp].branches) | (EXPERT_RULES if spec.experts else {})
    if branch.sees == "caption":
        found |= linear(f"{name}.q", Heads((heads,))) | linear(f"{name}.kv", Heads((heads, heads), of_context=True))
    else:
        found |= linear(f"{name}.qkv", Heads((heads, shared, shared)))
    norms = {f"{name}.{norm}.weight": Replicated(partial_gradient=True) for norm in ("q_norm", "k_norm")}
    return found | norms | linear(f"{name}.proj", Row(heads))


def mlp_rules(branches: int = 1) -> dict[str, Rule]:
    """Return the rules of a block's MLP. branches: matrices that lie side by side in fc1."""
    return linear("blocks.*.mlp.fc1", Column(branches)) | linear("blocks.*.mlp.fc2", Row())


EXPERT_RULES: dict[str, Rule] = {
    # Every rank needs all affinities, for the softmax over the experts, and weights its experts' outputs by them.
    "blocks.*.mlp.router.weight": Replicated(partial_gradient=True),
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
    """The cuts of a model that has, on every stage, ``every`` beside what makes the condition."""
    first = ("x_embedder", "pos_embed", "temporal_embed", "learned_positions")
    condition = ("t_embedder", "y_embedder", "text_encoder", "shared_modulation")
    return StageCuts("blocks", tuple(name for name in first if name not in every), ("final_layer",), condition + every)


def projections(config: DiTConfig) -> dict[str, tuple[str, ...]]:
    """Heads that share keys and values are torch's."""
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
# What a DiT's block keeps is listed in opendit/kernels/recompute.py.


def _sees(config: DiTConfig, *what: str) -> int:
    """Count the branches that attend to one of these."""
    return sum(branch.sees in what for branch in config.branches)


def _input(config: DiTConfig, execution: Execution) -> Kept:
    """x; of a sample its modulation and what that is made of."""
    return Kept(units=1, numbers=config.modulation_width + config.hidden_size)


def _norms(config: DiTConfig, execution: Execution) -> Kept:
    """Outputs of norm + modulation; not fused, also what lies between the two, and an RMSNorm has two products. Mean
    and 1 / deviation are counted for two of them, whatever the number."""
    count = sum(branch.modulated for branch in config.branches)
    if execution.recompute != "none":
        return Kept(statistics=4)
    if config.norm == "rms":
        return Kept(units=count * (1 if execution.fused else 3), statistics=4)
    if execution.fp8:
        return Kept(units=count / 2, statistics=4)
    between = 0 if execution.fused else 3 if execution.autocast else 1  # autocast's LayerNorm works on fp32 copies
    return Kept(units=count * (1 + between), statistics=4)


def _float8_weights(execution: Execution, count: int) -> int:
    """Bytes of ``count`` weights that operations in float8 read, which keep them in e4m3."""
    return count if execution.fp8 else 0


def _attention(config: DiTConfig, execution: Execution) -> Kept:
    """Return what self-attention keeps: q, k, v, its output, the projected output, and the sum with x.

    Keys and values that heads share are kept for every head, since ranks that share a sample make copies before they
    exchange them. In FP8 the output is kept in both forms. All of torch's kernels but ``math`` keep a log-sum-exp a row
    and head, counted for one attention, whatever the number.
    """
    keys = config.key_value_width / config.hidden_size
    copied = keys == 1 or execution.sequence_parallel > 1
    units = 3 + (3 if copied else 1 + 2 * keys + 2) + (execution.fp8 and execution.recompute == "none") / 2
    if config.qk_norm and execution.fused:  # queries and keys, normalised; of shared keys a copy is there anyway
        units += 1 + (keys == 1)
    elif config.qk_norm:  # both products of an RMSNorm
        units += 2 + (2 if keys == 1 else keys)
    elif config.positions == "rope":
        units += 2 if keys == 1 else -2 * keys
    weights, count = _float8_weights(execution, 4 * config.hidden_size**2), _sees(config, "all", "frame")
    return Kept(units=units * count, statistics=config.num_heads, weights=weights * count)


def _attention_along_time(config: DiTConfig, execution: Execution) -> Kept:
    """Return what self-attention keeps, plus its result in the order that the projection reads, which differs from the
    order of writing. Rotated queries and keys are copies in that order; normalised ones are kept beside them, unless
    one kernel does both, which keeps its input alone."""
    if not _sees(config, "time"):
        return Kept()
    weights = _float8_weights(execution, 4 * config.hidden_size**2)
    units = 7 + (execution.fp8 and execution.recompute == "none") / 2 + (3 if execution.fused else 5) * config.qk_norm
    if execution.sequence_parallel > 1 and execution.recompute != "none":
        units += 1  # its input has come from other ranks, and is not recomputed
    return Kept(units=units, weights=weights)


def _cross_attention(config: DiTConfig, execution: Execution) -> Kept:
    """Return what cross-attention keeps: q, its output, and k and v of the text.

    Outside of its heads, with a gate: the input h and the projection, an operation whose weight is kept in float8.
    Without a gate: h and the norm before it, which autocast copies, or both products of an RMSNorm.
    """
    if not config.cross_attention:
        return Kept()
    gated = any(branch.sees == "caption" and branch.modulated for branch in config.branches)
    outside = 2 if gated else 3 if config.norm == "rms" else 2 + execution.autocast
    heads = 2 + 2 * _caption_keys(config) / config.tokens
    weights = _float8_weights(execution, config.hidden_size**2) if gated else 0
    return Kept(units=outside + heads * (1 + config.qk_norm), weights=weights)


def _mlp(config: DiTConfig, execution: Execution) -> Kept:
    """fc1's output, GELU's, fc2's; of SwiGLU fc1's two halves, SiLU's output unless fused, their product, fc2's
    output."""
    wide, level = config.mlp_ratio, execution.recompute
    if config.mlp == "swiglu":
        return Kept(units=(3 if execution.fused else 4) * wide + 1)
    units = 1 + {"half": wide / 2, "mlp": 0}.get(level, wide)
    if level in ("none", "norms"):  # one byte a number in FP8
        units += wide / 2 if execution.fp8 and level == "none" else wide
    return Kept(units=units, weights=_float8_weights(execution, 2 * config.hidden_size * config.mlp_hidden))


def _experts(config: DiTConfig, execution: Execution) -> Kept:
    """Return what the experts keep: for every expert of a token its input, its output, and its hidden layer before and
    after GELU; then the sum over experts."""
    experts = config.block.experts
    if experts is None:
        return Kept()
    return Kept(units=experts.capacity * (2 + 2 * experts.hidden / config.hidden_size) + 1)


# Units that the backward pass of a block takes at its worst beyond what was kept: in fc2's, dout, gate * dout and the
# gradient of GELU's output, 1 + 1 + 4, less fc2's output, which is not needed any more. Recomputing adds what it has
# made: GELU's output 4; fc1's output and its input, 4 + 1.
BACKWARD = {"none": 5, "norms": 5, "cheap": 9, "half": 14, "mlp": 14}


def backward(config: DiTConfig, execution: Execution) -> float:
    return BACKWARD[execution.recompute] + 5 / 4 * (config.mlp_ratio - 4)


# -------------------------------------------------------------------------------------------------------------- work


def _projections(config: DiTConfig) -> int:
    """The linear layers of all self-attentions."""
    n, d = config.tokens, config.hidden_size
    return _sees(config, *ATTENTIONS) * (2 * n * d * (d + 2 * config.key_value_width) + 2 * n * d * d)


def attention_term(part: str, keys: Count) -> FlopTerm:
    """The two products of an attention in which every token attends to ``keys`` tokens."""
    return FlopTerm(part, lambda config: 4 * config.tokens * keys(config) * config.hidden_size, keys=keys)


def mlp_flops(config: DiTConfig, matrices: int | None = None) -> int:
    """Count the FLOPs of an MLP. matrices: number of matrices of hidden size x MLP width; None for those of the block's
    MLP."""
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
    encoder = bytes_text.forward_flops(text) if text.inside else 0
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
    FlopTerm("final layer", _final_layer, place="last"),
)
PLAN = Plan(rules, divisible, MEMORY, backward, FLOPS, stages(), projections)
