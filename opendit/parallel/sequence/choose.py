"""Which strategy a sequence group should use: the one whose communication a layer's computation hides best.

The model counts, for one layer and one micro-batch, forward and backward, the seconds that a rank waits for others or
does work that a single rank would not. Volumes received by a rank are in units of N x D: FastSeq (P-1)/P for the
gather and (P-1)/P^2 for the heads, Ulysses 3 and 1 times (P-1)/P^2, ring attention 2 (P-1)/P forward.
"""

import math
from dataclasses import dataclass, field, replace

KINDS = ("auto", "fastseq", "ulysses", "ring", "usp")


@dataclass(frozen=True)
class Machine:
    """What the cost model knows of the hardware; the defaults are for H200s joined by NVLink, in half precision."""

    link: float = 300 * 2**30  # bytes/s that a rank receives
    latency: float = 20e-6  # s, of a collective or a hop
    matmul: float = 640e12  # FLOP/s of projections
    attention: float = 355e12  # FLOP/s of attention, forward; its backward pass is 2.5 times the work
    attention_backward: float = 318e12
    part: float = 239e12  # of the kernel that attends to a part of the keys and says their log-sum-exp
    part_backward: float = 192e12
    memory: float = 4e12  # bytes/s read or written
    overlap: float = 0.3  # of a transfer, what computation of its length beside it hides


@dataclass(frozen=True)
class Shape:
    """One micro-batch of a model's sequences."""

    tokens: int
    hidden: int
    heads: int
    samples: int = 1
    bytes: int = 2  # of an element of the activations


@dataclass(frozen=True)
class Plan:
    """A decision and its reason. heads_over: ranks that share the heads in usp; groups: see UlyssesRing."""

    kind: str
    reason: str
    groups: int = 1
    heads_over: int = 1
    seconds: float = field(default=0.0, compare=False)  # a layer, by the cost model

    def __str__(self) -> str:
        detail = f" of {self.heads_over} ranks x ring" if self.kind == "usp" else ""
        detail += f", {self.groups} head groups" if self.groups > 1 else ""
        return f"{self.kind}{detail}: {self.reason}"


@dataclass(frozen=True)
class _Costs:
    """Seconds of a layer's parts on one of P ranks."""

    ranks: int
    shape: Shape
    machine: Machine

    @property
    def whole(self) -> float:
        """To receive N x D."""
        s = self.shape
        return s.samples * s.tokens * s.hidden * s.bytes / self.machine.link

    @property
    def attention_flop(self) -> float:
        s = self.shape
        return 4 * s.samples * s.tokens**2 * s.hidden / self.ranks

    def exposed(self, transfer: float, work: float) -> float:
        """What is seen of a transfer with computation beside it. (NCCL's kernels and others take turns on the card.)"""
        return transfer - self.machine.overlap * min(transfer, work)

    def fastseq(self) -> float:
        s, m, P = self.shape, self.machine, self.ranks
        shard = 6 * s.samples * s.tokens * s.hidden**2 / P**2 / m.matmul  # q, k, v of one rank's tokens
        hop = self.whole / P + m.latency
        heads = self.whole * (P - 1) / P**2 + m.latency
        again = self.whole * (P - 1) / P + m.latency
        again = self.exposed(again, 2.5 * self.attention_flop / m.attention_backward)
        reduced = self.exposed((P - 1) * hop, (2 * P - 1) * shard)  # under the gradients of input and weight
        return (P - 1) * self.exposed(hop, shard) + 2 * heads + again + reduced

    def ulysses(self, groups: int, ranks: int | None = None) -> float:
        """The first group's q, k, v and the last group's result are never hidden, the others by attention."""
        m, P = self.machine, ranks or self.ranks
        part = self.whole * P / self.ranks * (P - 1) / P**2 / groups  # a quarter of a group's exchanges
        exposed, between = 4 * part + 2 * m.latency, (groups - 1) * (4 * part + 2 * m.latency)
        forward = self.attention_flop / m.attention * (groups - 1) / groups
        backward = 2.5 * self.attention_flop / m.attention_backward * (groups - 1) / groups
        return 2 * exposed + self.exposed(between, forward) + self.exposed(between, backward)

    def ring(self, ranks: int | None = None) -> float:
        s, m, P = self.shape, self.machine, ranks or self.ranks
        flop, hop = self.attention_flop, 2 * self.whole / self.ranks + m.latency
        forward, backward = flop / P / m.part, 2.5 * flop / P / m.part_backward
        slower = flop * (1 / m.part - 1 / m.attention + 2.5 / m.part_backward - 2.5 / m.attention_backward)
        merging = 2 * (P - 1) * 16 * s.samples * s.tokens * s.hidden / self.ranks / m.memory  # fp32, read and written
        return (P - 1) * (self.exposed(hop, forward) + self.exposed(2 * hop, backward)) + slower + merging


def _usp_split(ranks: int, heads: int) -> int:
    """The most ranks, but not all and not one, that can share the heads; 0 if there is no such number."""
    return max((u for u in range(2, ranks) if ranks % u == 0 and heads % u == 0), default=0)


def _plans(ranks: int, shape: Shape, machine: Machine, groups: int | None) -> list[Plan]:
    """All that the number of heads allows; Ulysses with its best number of groups, or the given one."""
    costs, plans = _Costs(ranks, shape, machine), []
    if shape.heads % ranks == 0:
        local = shape.heads // ranks
        several = [groups] if groups else [g for g in (1, 2, 3, 4) if local % g == 0]
        plans.append(Plan("fastseq", "", seconds=costs.fastseq()))
        plans.append(min((Plan("ulysses", "", g, seconds=costs.ulysses(g)) for g in several), key=lambda p: p.seconds))
    plans.append(Plan("ring", "", seconds=costs.ring()))
    if inner := _usp_split(ranks, shape.heads):
        seconds = costs.ulysses(1, inner) + costs.ring(ranks // inner)
        plans.append(Plan("usp", "", groups or 1, heads_over=inner, seconds=seconds))
    return plans


def make_plan(kind: str, ranks: int, shape: Shape, groups: int | None = None, machine: Machine | None = None) -> Plan:
    """How ``ranks`` ranks share sequences of ``shape``; ``kind`` is one of KINDS.

    groups: of Ulysses and usp, given; None: by the cost model.

    Raises:
        ValueError: the heads don't divide by the ranks, and this kind needs that; or not by the groups.
    """
    if kind not in KINDS:
        raise ValueError(f"--sequence_parallel_type {kind}: choose one of {', '.join(KINDS)}")
    inner = {"fastseq": ranks, "ulysses": ranks, "usp": _usp_split(ranks, shape.heads)}.get(kind, 1)
    if not inner or shape.heads % inner:
        raise ValueError(
            f"--sequence_parallel_type {kind}: {shape.heads} heads can't be shared out over {ranks} ranks that way; "
            "use ring or auto"
        )
    if groups and shape.heads // inner % groups:
        raise ValueError(f"{shape.heads // inner} heads a rank can't be exchanged in {groups} groups")
    plans = {plan.kind: plan for plan in _plans(ranks, shape, machine or Machine(), groups)}
    if kind != "auto":
        return replace(plans[kind], reason="asked for")
    best = min(plans.values(), key=lambda plan: plan.seconds)
    others = ", ".join(f"{name} {plan.seconds * 1e6:.0f}" for name, plan in plans.items())
    reason = f"communication costs least, in us a layer by the cost model: {others}"
    if "fastseq" not in plans:
        reason += f"; {math.gcd(shape.heads, ranks)} is all that {shape.heads} heads and {ranks} ranks divide by"
    return replace(best, reason=reason)
