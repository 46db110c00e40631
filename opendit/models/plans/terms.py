"""The vocabulary of plans: rules of parameters, shard units, stage cuts, terms of memory and work. Data alone: slices
and checks are made of it by opendit.parallel.rules, the estimate of the memory by opendit.training.memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opendit.models.configuration import DiTConfig

OwnConfig = Any  # the configuration of the plan's own architecture

# --------------------------------------------------------------------------------------------- rules of parameters


@dataclass(frozen=True)
class Replicated:
    """Every rank has all of it.

    ``partial_gradient``: ranks apply it to features of their own (to their heads, to their experts), so that its
    gradient is the sum of theirs. Without it all ranks find the same gradient, of all features.
    """

    partial_gradient: bool = False


@dataclass(frozen=True)
class Column:
    """Ranks have different output features of a linear layer: dimension 0 of its weight and of its bias.

    ``sections``: so many parts of equal width lie side by side (SwiGLU's two halves), and a rank has its share of each.
    ``gathered``: the ranks' outputs are gathered, so that what comes next gets all features.
    """

    sections: int = 1
    gathered: bool = False


@dataclass(frozen=True)
class Row:
    """Ranks have different input features of a linear layer, dimension 1 of its weight; the output is the sum of their
    products. Its bias, which is added to that sum once, is :class:`Replicated`.

    ``heads``: the input is the output of so many attention heads, which stay whole.
    """

    heads: int | None = None


@dataclass(frozen=True)
class Heads:
    """A :class:`Column` of whole heads, so many in each section: (H, K, K) of a fused qkv projection [q; k; v] whose H
    heads of queries share K heads of keys and values; (H,) and (H, H) of cross-attention's q and [k; v].

    A rank's heads of queries and the heads of keys and values that they share have the same rank.

    of_context: the layer's input are a caption's tokens, which all ranks have, and not those of the residual stream,
    which they may share out.
    """

    heads: tuple[int, ...]
    of_context: bool = False


@dataclass(frozen=True)
class Expert:
    """Ranks have different experts: dimension 0 of a stack (E, ...)."""


@dataclass(frozen=True)
class Vocabulary:
    """Ranks have different rows of an embedding's table; a row's vector is the sum of what all find, zero for rows of
    others. Shares may be unequal, because a table has as many rows as there are classes."""


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
    ``crosses``: what goes from a stage to the next, named as the block's arguments: x (B, N, D).
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
    """The memory that is kept for the backward pass, in several units; amounts add up.

    units: tensors of tokens x hidden size in the precision of the activations.
    statistics: fp32 numbers a token. numbers: numbers a sample in the precision of the activations.
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
    units: patterns of modules that are shard units, each gathered and freed as a whole; what is outside of all of
        them is one more. A block's unit holds its modulation, too: as a unit of its own it would be reduced right after
        the block, and the backward pass would wait for the block's reduction, which nothing hides.
    """

    rules: Callable[[OwnConfig], dict[str, Rule]]
    divisible: Callable[[OwnConfig], dict[str, dict[str, int]]]
    memory: tuple[MemoryTerm, ...]
    backward: Callable[[OwnConfig, Execution], float]
    flops: tuple[FlopTerm, ...]
    stages: StageCuts
    projections: Callable[[OwnConfig], dict[str, tuple[str, ...]]]
    units: tuple[str, ...] = ("blocks.*",)

    def kept(self, config: "DiTConfig", execution: Execution) -> Kept:
        """Return the memory that a block keeps for its backward pass: the sum of the memory terms."""
        return sum((term.kept(config, execution) for term in self.memory), Kept())

    def forward_flops(self, config: "DiTConfig") -> int:
        """FLOPs of one sample's forward pass: the sum of the FLOP terms."""
        outside = sum(self.flops_at(config, place) for place in ("first", "last", "every"))
        return config.depth * self.flops_at(config, "block") + outside

    def flops_at(self, config: "DiTConfig", place: str) -> int:
        """The sum of the FLOP terms of a place: of one block, or of what is on the first, the last or every stage."""
        return sum(term.flops(config) for term in self.flops if term.place == place)
