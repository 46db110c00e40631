"""Estimate a training step's time by formula, without building the model.

Computation time follows from the FLOPs in the model's plan. Communication time follows from each strategy's bytes,
links, and the fraction that computation hides.

Not included are reading data, encoding (latents and embeddings are assumed to be cached), saving, and waiting for
slower ranks.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from opendit.config.components import TokenRoute
from opendit.config.names import AXIAL, BYTES
from opendit.models.blocks import MLPS
from opendit.models.dit import DiTConfig
from opendit.models.finetuning import Lora, lora_layers, trains_modulation
from opendit.models.variants import ECDiTConfig
from opendit.models.zoo import plan_of
from opendit.parallel.experts import expert_parameters
from opendit.parallel.hardware import HardwareModel
from opendit.parallel.pipeline import chunks_of
from opendit.parallel.sequence.choose import Shape, StrategyChoice, make_plan
from opendit.training.memory import (
    Setup,
    held_counts,
    muon_flops,
    of_streamed,
    stage_setups,
    stored_weights,
    trained_count,
)

# How often elementwise kernels read or write each unit of a block's stored activations, forward and backward. Fitted to
# the training steps in benchmarks/results.csv.
PASSES = 2.3
# --recompute -> (units read and written again, fraction of the MLP's first product computed again). A unit is N x D
# values, for N tokens and width D.
AGAIN = {"none": (0, 0), "norms": (4, 0), "cheap": (12, 0), "half": (12, 0.5), "mlp": (12, 1)}
QUANTISED = 20  # units read and written to quantise the operands of float8 products
UPDATE = 30  # bytes that AdamW reads and writes per weight: master, both moments, gradient, working weight
# Further bytes per weight to decode and encode 8-bit moments: by kernels, and by torch's many passes (ddp).
DECODED, DECODED_BY_TORCH = 20, 330
AVERAGE = 8  # bytes read and written per weight for each moving average
# Tensor parallelism's gathers and sums of N x D values per pair of divided layers. A matrix product hides one of them.
GATHERS_OF_A_PAIR = 5


@dataclass(frozen=True)
class Traffic:
    """Data that a rank receives in a step by one kind of communication. seconds: duration. exposed: seconds of the
    duration that computation does not hide."""

    bytes: float = 0
    seconds: float = 0
    exposed: float = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes + other.bytes, self.seconds + other.seconds, self.exposed + other.exposed)

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(self.bytes * times, self.seconds * times, self.exposed * times)


@dataclass(frozen=True)
class StepCost:
    """Estimated seconds of a rank's step: ``work`` and ``traffic`` by kind, and ``waiting`` for the host's launches."""

    work: dict[str, float]
    traffic: dict[str, Traffic]
    waiting: float = 0
    sequence: StrategyChoice | None = field(default=None, compare=False)

    @property
    def exposed(self) -> float:
        return sum(kind.exposed for kind in self.traffic.values())

    @property
    def total(self) -> float:
        return sum(self.work.values()) + self.exposed + self.waiting


@dataclass(frozen=True)
class Span:
    """Placement of a group: ``ranks`` ranks, ``here`` of them on each machine."""

    ranks: int
    here: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.here)


def span(ranks: int, stride: int, node: int) -> Span:
    """Place a group on machines of ``node`` ranks each. stride: distance between the group's ranks."""
    return Span(ranks, max(1, min(ranks, node // stride)))


def gather(size: float, over: Span, hardware: HardwareModel) -> tuple[Traffic, float]:
    """Return an all-gather's or reduce-scatter's traffic, and the fraction that computation hides. size: total bytes.

    Every machine receives all other machines' data once, over all links, and distributes the data to its ranks. The
    slower of the two transfers determines the time.
    """
    if over.ranks == 1:
        return Traffic(), 0
    received = size * (over.ranks - 1) / over.ranks
    inside = received / hardware.gather_rate(over.here) if over.here > 1 else 0
    outside = size * (over.nodes - 1) / over.nodes / (over.here * hardware.node_link)
    seconds = max(inside, outside) + hardware.latency + (over.nodes - 1) * hardware.node_latency
    return Traffic(received, seconds, seconds), hardware.node_overlap if outside > inside else hardware.overlap


def beside(transfer: tuple[Traffic, float], work: float) -> Traffic:
    traffic, hidden = transfer
    return replace(traffic, exposed=traffic.seconds - hidden * min(traffic.seconds, work))


class _FewerTokens:
    def __init__(self, config: DiTConfig, tokens: int):
        self._config, self.tokens = config, tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


@functools.cache
def _terms(config: DiTConfig, route: TokenRoute | None = None) -> tuple[tuple[int, int, int | None], ...]:
    """Return the plan's terms with FLOPs: (count, a sample's forward FLOPs, attention's number of keys or None). route:
    the parsed --route."""
    found, routed, fewer = [], 0, config
    if route is not None:
        routed, fewer = route.last - route.first, cast(DiTConfig, _FewerTokens(config, route.kept(config.tokens)))
    for term in plan_of(config).flops:
        counts = ((config.depth - routed, config), (routed, fewer)) if term.per_block else ((1, config),)
        for count, of in counts:
            found.append((count, term.flops(of), None if term.keys is None else term.keys(of)))
    return tuple(part for part in found if part[0] and part[1])


def training_flops(config: DiTConfig, lora: Lora | None = None, route: TokenRoute | None = None) -> int:
    """Return the FLOPs of a sample's forward and backward pass. route: the parsed --route.

    With LoRA, gradients of frozen weights are not counted. LoRA's products count as if all layers except the
    modulations processed the media's tokens.
    """
    whole = 3 * sum(count * flops for count, flops, _ in _terms(config, route))
    if lora is None:
        return whole
    linear = (term for term in plan_of(config).flops if term.keys is None)
    frozen = sum(term.flops(config) * (config.depth if term.per_block else 1) for term in linear)
    thin = 0
    for name, (rank, inputs, outputs) in lora_layers(config, lora).items():
        thin += (1 if "modulation" in name else config.tokens) * rank * (inputs + outputs)
    return whole - frozen + 3 * 2 * thin


class _Step:
    def __init__(self, config: DiTConfig, setup: Setup, batch: int, hardware: HardwareModel, node: int):
        self.config, self.setup, self.batch, self.hardware, self.node = config, setup, batch, hardware, node
        self.plan, self.size = plan_of(config), BYTES[setup.precision]
        self.sharing = setup.sequence_parallel * setup.tensor_parallel
        self.parameters, self.block_parameters = held_counts(config, setup)
        self.terms = _terms(config, setup.route)
        self.depth = config.depth * setup.tokens_share(config)  # blocks with all tokens that cost as much
        # bytes of one unit (N x D values), summed over all ranks that share a sample
        self.unit = batch * config.tokens * config.hidden_size * self.size

    def products(self) -> tuple[float, float]:
        """Return the seconds of a micro-batch's forward pass in all linear layers, and in one MLP layer of a block."""
        hardware, fp8 = self.hardware, self.setup.fp8
        rate = (hardware.matmul_fp8 if fp8 else hardware.matmul) * hardware.sustained
        total = 0.0
        for count, flops, keys in self.terms:
            if keys is None:
                total += count * (self.batch * flops / self.sharing / rate + 2 * hardware.launch)
        config = self.config
        one = 2 * self.batch * config.tokens * config.hidden_size * config.mlp_hidden / self.sharing / rate
        return total, one

    def attention(self) -> tuple[float, float]:
        forward = backward = 0.0
        for count, flops, keys in self.terms:
            if keys is not None:
                rates = self.hardware.attention_rates(self.config.head_dim, keys)
                work = count * self.batch * flops / self.sharing
                forward, backward = forward + work / rates[0], backward + 2.5 * work / rates[1]
        return forward, backward

    def work(self) -> dict[str, float]:
        """Return the seconds of a micro-batch's computation, by kind."""
        config, setup = self.config, self.setup
        forward, second = self.products()
        first = MLPS[config.mlp].branches * second
        there, back = self.attention()
        whole = replace(setup.execution, recompute="none")
        units = PASSES * self.plan.kept(config, whole).units + QUANTISED * setup.fp8
        elementwise = self.depth * units * self.unit / self.sharing / self.hardware.memory
        again, share = AGAIN.get(setup.recompute, (0, 0))
        recomputed = self.depth * (again * self.unit / self.sharing / self.hardware.memory + share * first)
        if setup.checkpointed:
            share = 1 - setup.kept_blocks(config.depth) / config.depth
            # LoRA does not repeat the last product, unless a gate or a norm after the branch needs it.
            skips = setup.lora is not None and not trains_modulation(config, setup.lora) and not config.block.norm_after
            products = forward - config.depth * second * skips
            recomputed = share * (products + there * setup.grad_checkpoint + 0.4 * elementwise)
        if setup.plugin == "fsdp" and setup.loss_ranks > 1:  # gathered weights and gradients are copied in memory
            passes = 2 if setup.reshard == "never" else 4
            copied = self.parameters * (passes * self.size + self.size + 2 * BYTES[setup.reduce_dtype])
            elementwise += copied / self.hardware.memory
        found = {
            # 3: forward, gradients of inputs and of weights; LoRA's frozen weights have no gradients
            "products": (3 if setup.lora is None else 2) * forward,
            "attention": there + back,
            "elementwise": elementwise,
            "recomputed": recomputed,
        }
        if setup.base_precision != "bf16" and not (setup.fp8 and setup.base_precision == "fp8"):
            # Every pass reads stored weights and writes weights in the working precision.
            numbers, stored, _ = stored_weights(config, setup)
            passes = 3 if setup.checkpointed else 2
            found["weights made dense"] = passes * (stored + self.size * numbers) / self.hardware.memory
        # Both passes copy blocks in one direction of the link. Gradients use the opposite direction.
        travel = of_streamed(config, setup)[0] / (self.hardware.host_link / 2)
        in_forward = forward + there + elementwise / 3
        passes = in_forward, sum(found.values()) - in_forward
        return found | {"waiting for blocks": sum(max(0.0, travel - computing) for computing in passes)}

    def update(self) -> float:
        """Return the seconds to update this rank's shard of the optimizer's state and averages."""
        setup = self.setup
        ranks = setup.state_ranks
        trained = trained_count(self.config, setup)
        share = trained / (1 if setup.plugin == "ddp" else ranks)
        averaged = AVERAGE * setup.averages * trained / ranks
        decoded = (DECODED_BY_TORCH if setup.plugin == "ddp" else DECODED) if setup.eight_bits else 0
        seconds = ((UPDATE + decoded) * share + averaged) / self.hardware.memory
        if setup.muon is not None:
            seconds += muon_flops(self.config) / ranks / self.hardware.matmul
        # Moments are read and written. Averages change in place while other work runs, so they count less.
        if setup.offloaded_state != "none":
            moved = 16 * share if setup.offloaded_state == "state" else 0
            if setup.hosted and setup.lora is None:  # masters are read and written; gradients are read twice
                moved += 4 * of_streamed(self.config, setup)[0]
            seconds += (moved + 0.3 * averaged) / self.hardware.host_link
        return seconds

    def sharding(self, work: float, micro_batches: int) -> Iterator[tuple[str, Traffic]]:
        """Yield (kind, traffic) for weights and gradients between ranks that hold equal slices of every layer. work:
        seconds of a micro-batch's computation. Transfers can overlap with this time."""
        setup, stride = self.setup, self.setup.tensor_parallel
        group = span(setup.loss_ranks, stride, self.node)
        trained = trained_count(self.config, setup)
        share, depth = trained / self.parameters, self.config.depth
        forward, backward = work / 3, work * 2 / 3  # rough split of the computation
        if setup.plugin == "ddp":
            reduced = beside(gather(4 * trained, group, self.hardware), backward)
            yield "gradients", reduced * 2  # a reduce-scatter and an all-gather
            return
        if setup.plugin in ("zero2", "gemini"):
            reduced = beside(gather(self.size * trained, group, self.hardware), backward)
            yield "gradients", reduced * micro_batches
            weights = gather(self.size * trained, group, self.hardware)[0]
            if setup.plugin == "gemini":  # both passes gather all weights, without overlap
                weights = gather(self.size * self.parameters, group, self.hardware)[0] * (2 * micro_batches)
            yield "weights", weights
            return
        shards = span(setup.state_ranks, stride, self.node)
        divided = setup.expert_parallel > 1 and setup.tensor_parallel == 1
        experts = expert_parameters(self.config) if divided else 0  # gathered separately
        block_parameters = self.block_parameters - experts
        bytes_of_block = self.size * block_parameters
        if setup.gathers_float8:
            bytes_of_block -= self.plan.kept(self.config, setup.execution).weights * (self.size - 1)
        block = gather(bytes_of_block, shards, self.hardware)
        passes = [forward] if setup.reshard == "never" else [forward, backward]
        gathered = Traffic()
        for seconds in passes:  # no computation hides the first block's gather
            gathered += beside(block, seconds / depth) * (depth - 1) + block[0]
        yield "weights", gathered * micro_batches
        reduced = beside(
            gather(BYTES[setup.reduce_dtype] * share * block_parameters, shards, self.hardware), backward / depth
        )
        yield "gradients", reduced * depth * (1 if setup.keep_gradients else micro_batches)
        if divided:
            same = span(shards.ranks // setup.expert_parallel, setup.expert_parallel, self.node)
            # Each micro-batch gathers the experts' weights and reduces their gradients, without overlap.
            sizes = self.size, BYTES[setup.reduce_dtype]
            stacks = experts / setup.expert_parallel
            own = sum((gather(size * stacks, same, self.hardware)[0] for size in sizes), Traffic())
            yield "experts", own * (depth * micro_batches)
        if setup.replicate > 1:
            copies = span(setup.replicate, stride * shards.ranks, self.node)
            summed = gather(BYTES[setup.reduce_dtype] * trained / shards.ranks, copies, self.hardware)
            yield "gradients of copies", beside(summed, backward) * 2

    def sequence(self, kind: str, types: tuple[str, ...]) -> tuple[Traffic, StrategyChoice | None]:
        """Return a micro-batch's traffic between ranks that share sequences, and the chosen strategy, None for one
        rank. Raises ValueError if no strategy works."""
        setup, config, ranks = self.setup, self.config, self.setup.sequence_parallel
        if ranks == 1:
            return Traffic(), None
        tensor = setup.tensor_parallel
        shape = Shape(
            config.tokens,
            config.hidden_size // tensor,
            config.num_heads // tensor,
            self.batch,
            self.size,
            types,
            axial=config.axial_attention,
        )
        inside, hardware = span(ranks, tensor, self.node).nodes == 1, self.hardware
        if not inside:
            hardware = replace(hardware, link=hardware.node_link, latency=hardware.node_latency)
        plan = make_plan(kind, ranks, shape, hardware=replace(hardware, direct=inside and ranks <= 8))
        received, seconds = received_by_attention(plan, ranks) * self.unit / tensor, plan.seconds
        if config.axial_attention:  # each pass has two all-to-alls: to another axis and back
            exchanged = 4 * (ranks - 1) / ranks**2 * self.unit / tensor
            received, seconds = received + exchanged, seconds + exchanged / hardware.link + 4 * hardware.latency
        # recomputation repeats the forward pass's communication
        times = self.depth * (4 / 3 if setup.checkpointed else 1)
        return Traffic(received, seconds, seconds) * times, plan

    def tokens_to_experts(self) -> Traffic:
        """Return the traffic of tokens to their experts and back, in both passes. The shared MLP hides half."""
        ranks, config, hardware = self.setup.expert_parallel, self.config, self.hardware
        if ranks == 1 or self.setup.tensor_parallel > 1:
            return Traffic()
        received = (
            cast(ECDiTConfig, config).expert_capacity * self.unit / self.setup.sequence_parallel * (ranks - 1) / ranks
        )
        inside = span(ranks, 1, self.node).nodes == 1
        seconds = received / (hardware.link if inside else hardware.node_link) + hardware.latency
        one = Traffic(received, seconds, seconds)
        hidden = hardware.overlap if inside else hardware.node_overlap
        there, back = beside((one, hidden), math.inf), one
        return (there + back) * ((2 + self.setup.checkpointed) * config.depth)

    def tensor(self) -> Traffic:
        """Return the traffic of tensor parallelism: gathers and sums of tokens (docs/parallelism.md)."""
        ranks, config = self.setup.tensor_parallel, self.config
        if ranks == 1:
            return Traffic()
        pairs = 1 + sum(keys is not None for _, _, keys in _terms(config))
        tokens = self.unit / self.setup.sequence_parallel
        one = gather(tokens, span(ranks, 1, self.node), self.hardware)
        alone = GATHERS_OF_A_PAIR - 1 + 2 * self.setup.checkpointed
        return (one[0] * alone + beside(one, math.inf)) * (config.depth * pairs)


def received_by_attention(plan: StrategyChoice, ranks: int) -> float:
    """Return the data that a rank receives in a layer, forward and backward, in units of N x D.
    docs/sequence_parallel.md derives the amounts."""
    here, ring = ranks, 1
    if plan.kind == AXIAL:
        return 0
    if plan.kind == "fastseq":
        # attention's inputs twice, their gradients once, and the heads' results in both passes
        return (ranks - 1) / ranks * (3 + 2 / ranks)
    if plan.kind == "ring":
        here, ring = 1, ranks
    elif plan.kind == "usp":
        here, ring = plan.heads_over, ranks // plan.heads_over
    by_heads = 8 * (here - 1) / (here * ranks)
    # keys and values in both passes, and their gradients in the backward pass
    return by_heads + 6 * (ring - 1) / ranks


def step_cost(
    config: DiTConfig,
    setup: Setup,
    batch: int,
    micro_batches: int,
    hardware: HardwareModel,
    node: int,
    *,
    sequence_type: str = "auto",
    sequence_types: tuple[str, ...] | None = None,
    graph: bool = False,
) -> StepCost:
    """Estimate the cost of a rank's step. Raises ValueError if ranks can't share sequences by ``sequence_type``.

    Args:
        setup: a setup without "auto" settings; see ``resolve_sharding``.
        batch: samples per micro-batch, shared by the ranks of a sequence or tensor group.
        node: number of ranks per machine.
        sequence_types: strategies that --attention allows; None for all that the model allows.
        graph: True if forward and backward are replayed as a CUDA graph.
    """
    if setup.pipeline_parallel > 1:
        how: dict[str, Any] = dict(sequence_type=sequence_type, sequence_types=sequence_types, graph=graph)
        setup = replace(setup, micro_batches=micro_batches)
        stages = (
            step_cost(*stage, batch, micro_batches, hardware, node, **how) for stage in stage_setups(config, setup)
        )
        return _pipelined(max(stages, key=lambda stage: stage.total), config, setup, batch, hardware, node)
    step = _Step(config, setup, batch, hardware, node)
    once = step.work()
    sequence, plan = step.sequence(sequence_type, config.sequence_types if sequence_types is None else sequence_types)
    traffic = {"sequence": sequence, "layers": step.tensor(), "tokens to experts": step.tokens_to_experts()}
    traffic = {kind: found * micro_batches for kind, found in traffic.items()}
    for kind, found in step.sharding(sum(once.values()), micro_batches):
        traffic[kind] = found
    device = sum(once.values()) + sum(kind.exposed for kind in traffic.values()) / micro_batches
    waiting = 0.0 if graph else max(0.0, config.depth * hardware.host - device) * micro_batches
    work = {name: seconds * micro_batches for name, seconds in once.items()} | {"update": step.update()}
    work = {name: seconds for name, seconds in work.items() if seconds}
    return StepCost(work, {name: kind for name, kind in traffic.items() if kind.bytes}, waiting, plan)


def _pipelined(
    slowest: StepCost, config: DiTConfig, setup: Setup, batch: int, hardware: HardwareModel, node: int
) -> StepCost:
    """Add a pipeline's idle time (bubble, Narayanan et al. 2021) and token transfers to the slowest rank's cost."""
    ranks, chunks = setup.pipeline_parallel, chunks_of(setup.schedule)
    computing = slowest.total - slowest.work["update"]
    bubble = (ranks - 1) / chunks * computing / setup.micro_batches
    sent = batch * config.tokens * config.hidden_size * BYTES[setup.precision]
    sent /= setup.sequence_parallel * setup.tensor_parallel
    inside = setup.world // ranks < node and span(ranks, setup.world // ranks, node).nodes == 1
    seconds = sent / (hardware.copies if inside else hardware.node_link) + hardware.latency
    hidden = hardware.overlap if inside else hardware.node_overlap
    messages = 2 * chunks * setup.micro_batches  # messages per step: tokens and their gradients
    stages = beside((Traffic(sent, seconds, seconds), hidden), math.inf) * messages
    return replace(slowest, work={**slowest.work, "bubble": bubble}, traffic={**slowest.traffic, "stages": stages})


def tokens_per_second(config: DiTConfig, setup: Setup, batch: int, micro_batches: int, seconds: float) -> float:
    """Return how many tokens a rank processes per second, for a step of ``seconds``; 0 if unknown."""
    sharing = setup.sequence_parallel * setup.tensor_parallel * setup.pipeline_parallel
    if not math.isfinite(seconds) or seconds <= 0:
        return 0.0
    return batch * micro_batches * config.tokens / sharing / seconds
