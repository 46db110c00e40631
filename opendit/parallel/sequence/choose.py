"""Choose the strategy of a sequence group with a cost model.

The cost model covers one layer and one micro-batch, forward and backward. The cost is the time that a rank waits for
communication, plus the time of computation that a single rank would not do. Numbers that a rank receives in the forward
pass, in units of N x D (tokens x width):

    FastSeq    (P-1)/P for the gather, (P-1)/P^2 for the heads
    Ulysses    3 (P-1)/P^2 for q, k, v, (P-1)/P^2 for the output
    ring       2 (P-1)/P
"""

import math
from dataclasses import dataclass, field, replace

from opendit.config.names import AXIAL, SEQUENCE_TYPES
from opendit.parallel.hardware import H200, HardwareModel

MOST_GROUPS = 6  # maximum number of groups of heads; the host makes about 30 calls for each group and layer


def split_groups(groups: int, samples: int, heads: int) -> tuple[int, int]:
    """Divide samples and a rank's ``heads`` into at most ``groups`` groups. Return (number of sample groups, number of
    head groups). Samples are divided first, because exchanges of single samples need fewer copies."""
    of_samples = math.gcd(groups, samples)
    return of_samples, math.gcd(groups // of_samples, heads)


def can_group(groups: int, samples: int, heads: int) -> bool:
    return math.prod(split_groups(groups, samples, heads)) == groups


@dataclass(frozen=True)
class Shape:
    """Shape and properties of one micro-batch of a model's sequences."""

    tokens: int
    hidden: int
    heads: int
    samples: int = 1
    bytes: int = 2  # bytes per element of the activations
    types: tuple[str, ...] = SEQUENCE_TYPES[1:]  # strategies that the model supports; auto chooses one
    axial: bool = False  # True if layers also attend along the axes of a grid
    plain: bool = True  # True if one product with weight and bias computes q, k, v; False with --lora


@dataclass(frozen=True)
class StrategyChoice:
    """A chosen strategy and the reason."""

    kind: str
    reason: str
    # number of groups for ulysses, see split_groups(); with symmetric memory, only heads are divided
    groups: int = 1
    heads_over: int = 1  # number of ranks that divide the heads (usp)
    seconds: float = field(default=0.0, compare=False)  # cost per layer

    def __str__(self) -> str:
        detail = f" of {self.heads_over} ranks x ring" if self.kind == "usp" else ""
        detail += f" in {self.groups} groups" if self.groups > 1 else ""
        return f"{self.kind}{detail}: {self.reason}"


@dataclass(frozen=True)
class _Costs:
    """Cost model: the seconds that each strategy costs in a layer, on one of P ranks."""

    ranks: int
    shape: Shape
    hardware: HardwareModel

    @property
    def whole(self) -> float:
        """Return the seconds to receive N x D numbers."""
        s = self.shape
        return s.samples * s.tokens * s.hidden * s.bytes / self.hardware.link

    @property
    def attention_flop(self) -> float:
        """Return the FLOPs of a rank's attention, divided by the size of a head."""
        s = self.shape
        return 4 * s.samples * s.tokens**2 * s.heads / self.ranks

    @property
    def attention_seconds(self) -> float:
        """Return the seconds of a rank's attention, forward and backward."""
        return self.attention_flop * (1 / self.hardware.attention + 2.5 / self.hardware.attention_backward)

    def exposed(self, transfer: float, work: float) -> float:
        """Return how many seconds of a transfer are visible during ``work`` seconds of computation. Computation never
        hides a transfer completely, because both share one card."""
        return transfer - self.hardware.overlap * min(transfer, work)

    def fastseq(self) -> float:
        """Return the seconds of FastSeq with collectives: the exchange of heads, visible gathers and visible sums of
        gradients."""
        s, m, P = self.shape, self.hardware, self.ranks
        # seconds to compute q, k, v of one rank's tokens
        shard = 6 * s.samples * s.tokens * s.hidden**2 / P**2 / m.matmul
        hop = self.whole / P + m.latency
        heads = self.whole * (P - 1) / P**2 + m.latency + self.copies(s.samples)
        again = self.whole * (P - 1) / P + m.latency
        again = self.exposed(again, 2.5 * self.attention_flop / m.attention_backward)
        # the reduction overlaps with the gradients of input and weight
        reduced = self.exposed((P - 1) * hop, (2 * P - 1) * shard)
        return (P - 1) * self.exposed(hop, shard) + 2 * heads + again + reduced

    def direct_fastseq(self) -> float:
        """Return the seconds of FastSeq with symmetric memory: visible transfers, the exchange of heads, and additional
        passes over memory for tokens, weights and weight gradients."""
        s, m, P = self.shape, self.hardware, self.ranks
        # seconds to compute q, k, v of one rank's tokens
        shard = 6 * s.samples * s.tokens * s.hidden**2 / P**2 / m.matmul
        hop = self.whole / P * m.link / m.copies
        arriving = (P - 1) * max(hop - shard, 0)
        # this transfer overlaps with all other products of the backward pass
        leaving = max((P - 1) * hop - (2 * P - 1) * shard, 0)
        exchanged = 2 * self.whole * (P - 1) / P**2 + (P + 2) * m.barrier + 2 * (P - 1) * m.part
        rows = (P + 4) * s.samples * s.tokens * s.hidden / P
        weights = (1 + 1 / P) * 3 * s.hidden**2
        return arriving + leaving + exchanged + (rows + weights) * s.bytes / m.memory

    def copies(self, samples: int) -> float:
        """Return the seconds to copy q, k, v and the attention output once, for exchanges of several samples."""
        return 2 * 4 * self.whole * self.hardware.link / self.ranks / self.hardware.memory if samples > 1 else 0.0

    def ulysses(self, groups: int = 1, ranks: int | None = None) -> float:
        """Return the seconds of Ulysses with collectives: visible all-to-alls among ``ranks`` ranks, forward and
        backward. One group's transfers are fully visible. Attention partly hides all other transfers, or with copy
        engines completely."""
        m, P = self.hardware, ranks or self.ranks
        number, of_heads = split_groups(groups, self.shape.samples, self.shape.heads // P)
        exchanged = 2 * 4 * self.whole * P / self.ranks * (P - 1) / P**2
        others, engines = (groups - 1) / groups, m.engines and ranks is None
        hidden = exchanged * others, self.attention_seconds * others
        visible = exchanged / groups + (max(hidden[0] - hidden[1], 0) if engines else self.exposed(*hidden))
        latency = 2 * (groups + 1) * (m.barrier if engines else m.latency)
        copied = 2 * self.copies(self.shape.samples // number)
        return visible + latency + copied + self.in_groups(of_heads, P, number)

    def waves(self, heads: int, samples: int) -> int:
        """Return how many waves of thread blocks attention needs for this number of heads and samples."""
        s, m = self.shape, self.hardware
        return math.ceil(samples * heads * math.ceil(s.tokens / m.tile) / m.multiprocessors)

    def direct_ulysses(self, groups: int) -> float:
        """Return the seconds of Ulysses with symmetric memory: one group's transfers, a copy of the attention output,
        and idle multiprocessors if a group has few heads. Attention hides all other transfers."""
        m, P = self.hardware, self.ranks
        exchanged = 2 * 4 * self.whole * (P - 1) / P**2 / groups + 4 * m.barrier
        copied = 2 * 2 * self.whole * m.link / P / m.memory
        return exchanged + copied + self.in_groups(groups, P)

    def in_groups(self, of_heads: int, ranks: int, of_samples: int = 1) -> float:
        """Return the additional seconds of attention in groups of heads and samples. ranks: number of ranks that divide
        the heads."""
        m, heads, samples = self.hardware, self.shape.heads // ranks, self.shape.samples
        together, groups = self.waves(heads, samples), of_heads * of_samples
        each = self.waves(heads // of_heads, samples // of_samples)
        idle = self.attention_seconds * (groups * each / together - 1)
        return (groups - 1) * (m.group + m.tail * self.attention_seconds / together) + idle

    def ring(self, ranks: int | None = None) -> float:
        """Return the seconds of ring attention over ``ranks`` ranks: visible transfers of keys and values, slower
        attention kernels, and merging in fp32."""
        s, m, P = self.shape, self.hardware, ranks or self.ranks
        flop, hop = self.attention_flop, 2 * self.whole / self.ranks + m.latency
        forward, backward = flop / P / m.partial, 2.5 * flop / P / m.partial_backward
        slower = flop * (1 / m.partial - 1 / m.attention + 2.5 / m.partial_backward - 2.5 / m.attention_backward)
        # 16 bytes per number: fp32 values are read and written
        merging = 2 * (P - 1) * 16 * s.samples * s.tokens * s.hidden / self.ranks / m.memory
        return (P - 1) * (self.exposed(hop, forward) + self.exposed(2 * hop, backward)) + slower + merging


def _usp_split(ranks: int, heads: int) -> int:
    """Return the largest divisor of ``ranks``, except 1 and ``ranks``, that divides the heads; 0 if there is none."""
    return max((u for u in range(2, ranks) if ranks % u == 0 and heads % u == 0), default=0)


def _plans(ranks: int, shape: Shape, hardware: HardwareModel, groups: int | None) -> list[StrategyChoice]:
    """List the strategies that work with the number of heads, with their costs. groups: number of groups for
    Ulysses; None for the cheapest number."""
    costs, plans = _Costs(ranks, shape, hardware), []
    if shape.heads % ranks == 0:
        plans.append(
            StrategyChoice("fastseq", "", seconds=costs.direct_fastseq() if hardware.direct else costs.fastseq())
        )
        local, cost = shape.heads // ranks, costs.direct_ulysses if hardware.direct else costs.ulysses
        samples = 1 if hardware.direct else shape.samples
        most = samples * min(local, MOST_GROUPS)
        several = [groups] if groups else [g for g in range(1, most + 1) if can_group(g, samples, local)]
        plans.append(min((StrategyChoice("ulysses", "", g, seconds=cost(g)) for g in several), key=lambda p: p.seconds))
    plans.append(StrategyChoice("ring", "", seconds=costs.ring()))
    if inner := _usp_split(ranks, shape.heads):
        seconds = costs.ulysses(ranks=inner) + costs.ring(ranks // inner)
        plans.append(StrategyChoice("usp", "", heads_over=inner, seconds=seconds))
    return plans


def make_plan(
    kind: str, ranks: int, shape: Shape, groups: int | None = None, hardware: HardwareModel | None = None
) -> StrategyChoice:
    """Choose how ``ranks`` ranks divide sequences of ``shape``.

    Args:
        kind: a strategy, or auto for the cheapest.
        groups: number of groups for Ulysses; None to choose.
        hardware: None for H200s.

    Raises ValueError if ``kind`` is unknown or does not work with the model, ``groups`` does not divide the samples and
    a rank's heads, or auto finds no strategy.
    """
    hardware = hardware or H200
    if kind not in SEQUENCE_TYPES:
        raise ValueError(f"--sequence_parallel_type {kind}: no such type; choose one of {', '.join(SEQUENCE_TYPES)}")
    if shape.types == (AXIAL,):
        if kind != "auto":
            why = "this model attends along the axes of a grid only, not to all tokens"
            raise ValueError(f"--sequence_parallel_type {kind}: {why}; leave the flag out")
        return StrategyChoice(AXIAL, "tokens by frames and by places in turn, for each attention as it needs them")
    inner = {"fastseq": ranks, "ulysses": ranks, "usp": _usp_split(ranks, shape.heads)}.get(kind, 1)
    if not inner or shape.heads % inner:
        why = f"{shape.heads} heads can't be shared out over {ranks} ranks that way"
        if kind == "usp" and all(ranks % size for size in range(2, ranks)):
            why = f"{ranks} ranks are no grid, which needs a number like 4 or 6"
        way_out = "ring or auto" if "ring" in shape.types else "a size that divides them"
        raise ValueError(f"--sequence_parallel_type {kind}: {why}; use {way_out}")
    if groups and not can_group(groups, 1 if hardware.direct else shape.samples, shape.heads // inner):
        several = "" if hardware.direct or shape.samples == 1 else f"{shape.samples} samples of "
        raise ValueError(f"{several}{shape.heads // inner} heads a rank can't be exchanged in {groups} groups")
    plans = {plan.kind: plan for plan in _plans(ranks, shape, hardware, groups)}
    if kind != "auto":
        return replace(plans[kind], reason="asked for")
    possible = {name: plan for name, plan in plans.items() if name in shape.types}
    if not possible:
        raise ValueError(
            f"--sequence_parallel_size {ranks}: this model can attend by {', '.join(shape.types)} only, and its "
            f"{shape.heads} heads can't be divided over this number of ranks; use a size that divides them"
        )
    best = min(possible.values(), key=lambda plan: plan.seconds)
    others = ", ".join(f"{name} {plan.seconds * 1e6:.0f}" for name, plan in possible.items())
    reason = f"communication costs least, in us a layer of H200s by the cost model: {others}"
    if "fastseq" not in plans:
        reason += f"; {math.gcd(shape.heads, ranks)} is all that {shape.heads} heads and {ranks} ranks divide by"
    return replace(best, reason=reason)
