"""Estimate a training step's memory by formula, before anything is allocated.

A step's peak is at the beginning or at the end of the backward pass. At the beginning, memory holds all blocks'
activations, and no gradients of this micro-batch. At the end, it holds only the first block's activations, and all
other blocks' gradients.

Activations are counted in units. A unit is one vector of the model's width for each token of a rank's micro-batch.

The estimates are within 1 % of measured peaks (DiT-XL/2 on an H200), or 5 % for gemini in fp16. Not included are a
trained bytes encoder's activations, the CUDA context, NCCL's buffers, and fragmentation. Frozen encoders are included
only if ``Setup.encoders`` is set.
"""

import bisect
import contextlib
import functools
import itertools
import math
import os
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import cast

import torch

from opendit.config.components import TokenRoute
from opendit.config.names import BLOCKS, BUT_ATTENTION, BYTES
from opendit.config.parallel_sizes import divide_grid, parse_offload
from opendit.kernels.base_precision import is_stored, row_bytes
from opendit.kernels.common import next_power_of_2
from opendit.kernels.eight_bit_moments import ELEMENTS as DECODED
from opendit.kernels.eight_bit_moments import UNIT
from opendit.models.blocks import ATTENTIONS
from opendit.models.dit import DiTConfig
from opendit.models.finetuning import Lora, lora_layers, trains_modulation
from opendit.models.plan import Execution, Kept, Row
from opendit.models.zoo import model_shapes, plan_of
from opendit.parallel.experts import expert_parameters
from opendit.parallel.fsdp import PREFETCHED
from opendit.parallel.host_memory import AHEAD, blocks_of, spread_numbers
from opendit.parallel.muon import ELEMENTS, flops
from opendit.parallel.pipeline import PipelineStages, in_flight, make_schedule, stages_of
from opendit.parallel.rules import matrix_rows, rule_of
from opendit.parallel.tensor import DIVIDING, held_parameters

GIB = 2**30
# Fraction of a card's memory to plan with. The rest is for the CUDA context, NCCL and fragmentation.
USABLE = 0.94
WEIGHTS_SHARDED = ("gemini", "fsdp")
# workspaces of cuBLAS, cuDNN and other libraries, fitted to measured peaks
LIBRARIES = 0.18 * GIB


@dataclass(frozen=True)
class Setup:
    """The settings that determine a run's memory, besides model and batch. Most are flags.

    Attention needs no setting: all kernels except ``math`` keep q, k, v, the output and one number per query and head.

    Attributes:
        fused: True if one kernel computes LayerNorm and modulation.
        reshard: "auto" counts as "after_forward", see :func:`resolve_sharding`.
        keep_gradients: for fsdp, True to add up full gradients of all micro-batches before one reduction. None counts
            as False.
        absent: number of parameters outside the blocks that a pipeline stage lacks.
        trained: number of LoRA weights on a pipeline stage; None without pipelines or LoRA.
        held_micro_batches: number of micro-batches with activations on a stage at once.
        encoders: bytes of frozen encoders that stay on the GPU during training.
        muon: precision of Muon's orthogonalisation; None for AdamW. Muon keeps one moment per matrix.
        networks: number of networks that the run trains by turns. Memory holds the state of all networks.
        route: the parsed --route, if every step follows it.
    """

    plugin: str = "zero2"
    precision: str = "bf16"
    world: int = 1
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    averages: int = 1
    accumulate: bool = False
    fused: bool = True
    fp8: bool = False
    compiled: bool = False
    recompute: str = "none"
    grad_checkpoint: bool = False
    recompute_blocks: int | None = None
    lora: Lora | None = None
    base_precision: str = "bf16"
    replicate: int = 1
    reduce_dtype: str = "fp32"
    reshard: str = "auto"
    keep_gradients: bool | None = None
    offload: str = "none"
    gather_fp8: bool = True
    pipeline_parallel: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    absent: int = 0
    trained: int | None = None
    held_micro_batches: float = 1
    encoders: int = 0
    muon: str | None = None
    eight_bits: bool = False
    networks: int = 1
    route: TokenRoute | None = None

    @property
    def autocast(self) -> bool:
        """True if the forward pass casts fp32 weights to half precision."""
        return self.plugin == "ddp" and self.precision != "fp32"

    @property
    def gathers_float8(self) -> bool:
        """True if the ranks store and gather the weights of float8 products in float8."""
        asked = self.plugin == "fsdp" and self.fp8 and self.gather_fp8 and self.base_precision == "bf16"
        return asked and self.world > 1 and not self.compiled and not self.streamed_blocks

    @property
    def offloaded_state(self) -> str:
        """Kind of state that --offload keeps in host memory, one of ``OFFLOAD``."""
        return parse_offload(self.offload, self.lora is not None)[0]

    @property
    def streamed_blocks(self) -> int:
        """Number of blocks in host memory. For all blocks, it may exceed the model's depth."""
        return parse_offload(self.offload, self.lora is not None)[1]

    @property
    def hosted(self) -> bool:
        """True if host memory holds a rank's shards of blocks instead of complete blocks (opendit/parallel/fsdp.py)."""
        return self.streamed_blocks > 0 and self.plugin == "fsdp" and self.loss_ranks > 1

    @property
    def loss_ranks(self) -> int:
        """Number of ranks that hold equal slices of every layer: the size of the mesh's group "loss"."""
        return self.world // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def state_ranks(self) -> int:
        """Number of ranks that divide a slice's state."""
        return self.loss_ranks // (self.replicate if self.plugin == "fsdp" else 1)

    @property
    def checkpointed(self) -> bool:
        """True if blocks are recomputed, perhaps except their attention."""
        return self.grad_checkpoint or self.recompute == BUT_ATTENTION

    def kept_blocks(self, depth: int) -> int:
        if not self.checkpointed:
            return depth
        return 0 if self.recompute_blocks is None else max(0, depth - self.recompute_blocks)

    def tokens_share(self, config: DiTConfig) -> float:
        """Return the share of a sample's tokens that a block processes, on average over all blocks."""
        route = self.route
        if route is None:
            return 1.0
        return 1 - (route.last - route.first) / config.depth * (1 - route.kept(config.tokens) / config.tokens)

    @property
    def execution(self) -> Execution:
        """Settings for the memory terms of an architecture's plan."""
        level = "none" if self.checkpointed else self.recompute
        return Execution(self.fused, self.autocast, self.fp8, level, self.sequence_parallel)


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes of one rank. ``states`` are always allocated on the device, ``host`` in host memory.

    ``activations``, ``gradients`` (beyond those in ``states``) and ``gathered`` (weights) are needed at the beginning
    of the backward pass. ``last_block`` (activations) and the fields ``..._at_the_end`` are needed at its end.
    """

    states: dict[str, float]
    activations: float
    gradients: float
    gradients_at_the_end: float
    gathered: float = 0
    gathered_at_the_end: float = 0
    last_block: float = 0
    host: dict[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> dict[str, float]:
        """Bytes by name, without the states, at the beginning or the end of the backward pass, whichever is more."""
        first = {"activations": self.activations, "gradients": self.gradients, "gathered weights": self.gathered}
        last = {
            "activations": self.last_block,
            "gradients": self.gradients_at_the_end,
            "gathered weights": self.gathered_at_the_end,
        }
        return max(first, last, key=lambda parts: sum(parts.values()))

    @property
    def total(self) -> float:
        return sum(self.states.values()) + sum(self.peak.values()) + LIBRARIES

    @property
    def host_total(self) -> float:
        return sum(self.host.values())


def estimate(config: DiTConfig, setup: Setup, batch: int) -> Estimate:
    """Estimate a rank's peak memory on a GPU for micro-batches of ``batch`` samples, in a pipeline the
    largest rank's.

    With LoRA, activations are counted as if all weights were trained, except for frozen gates of public models. The
    true activations may take up to a fifth less.
    """
    if setup.pipeline_parallel > 1:
        stages = (estimate(*stage, batch) for stage in stage_setups(config, setup))
        return max(stages, key=lambda needs: needs.total)
    fsdp = setup.plugin == "fsdp"
    needs = _offloaded(_estimate_fsdp(config, setup, batch), setup) if fsdp else _estimate_whole(config, setup, batch)
    needs = _streamed(needs, config, setup)
    if setup.eight_bits:
        needs = _in_eight_bits(config, setup, needs)
    if setup.muon is not None:
        needs = _with_muon(config, setup, needs)
    states, host = ({name: setup.networks * n for name, n in of.items()} for of in (needs.states, needs.host))
    return replace(needs, states=states | ({"encoders": setup.encoders} if setup.encoders else {}), host=host)


def _estimate_whole(config: DiTConfig, setup: Setup, batch: int) -> Estimate:
    """Estimate the memory of ddp, zero2 and gemini."""
    size, ranks, (model, _) = BYTES[setup.precision], setup.loss_ranks, held_counts(config, setup)
    trained = trained_count(config, setup)
    parameters = model + (0 if setup.lora is None else trained)
    fp32 = 4 * trained
    share = fp32 / ranks
    averages = setup.averages * share  # every plugin shards the averages
    if setup.plugin == "ddp":  # every rank has all gradients, as views of DDP's permanent buckets
        numbers, stored, _ = stored_weights(config, setup)
        states = {"weights": 4 * (parameters - numbers) + stored, "gradients": fp32, "moments": 2 * fp32}
        states |= {"averages": averages} | ({"cast weights": size * (parameters - numbers)} if setup.autocast else {})
        return Estimate(states, sum(_activations(config, setup, batch)[:2]), 0, 0)
    weights = (size * parameters - saved(config, setup)) / (ranks if setup.plugin == "gemini" else 1)
    states = {"weights": weights, "masters": share, "moments": 2 * share, "averages": averages}
    gradients = size * trained / ranks
    if setup.plugin == "gemini":  # without accumulation, gradients overwrite the weights in Gemini's chunks
        gradients = gradients if setup.accumulate else 0
    others, block, _ = _activations(config, setup, batch)
    own = gradients * held_counts(config, setup)[1] / model  # gradients of the first block do not exist yet
    last = max(0, _activations(config, setup, batch, 0)[1] - own)
    return Estimate(states, others + block, gradients * setup.accumulate, gradients, last_block=last)


def stored_weights(config: DiTConfig, setup: Setup) -> tuple[int, int, int]:
    """Return the number of weights that --base_precision compresses, their bytes, and the largest tensor's number."""
    return _stored_weights(config, setup.base_precision)


@functools.cache
def _stored_weights(config: DiTConfig, kind: str) -> tuple[int, int, int]:
    if kind == "bf16":
        return 0, 0, 0
    shapes = [shape for name, shape in model_shapes(config)[0].items() if is_stored(name, shape)]
    numbers, sizes = sum(map(math.prod, shapes)), (rows * row_bytes(kind, width) for rows, width in shapes)
    return numbers, sum(sizes), max(map(math.prod, shapes))


def saved(config: DiTConfig, setup: Setup) -> int:
    """Return the bytes that --base_precision saves for all weights."""
    numbers, stored, _ = stored_weights(config, setup)
    return BYTES[setup.precision] * numbers - stored


@functools.cache
def matrix_count(config: DiTConfig) -> int:
    """Count the weights of the matrices that Muon updates."""
    shapes, _ = model_shapes(config)
    return sum(math.prod(shapes[name]) for name in matrix_rows(config))


@functools.cache
def muon_flops(config: DiTConfig) -> int:
    """Count the FLOPs of orthogonalising all matrices once."""
    shapes, _ = model_shapes(config)
    return sum(flops(shapes[name], rows) for name, rows in matrix_rows(config).items())


def _with_muon(config: DiTConfig, setup: Setup, needs: Estimate) -> Estimate:
    ranks, size = setup.state_ranks, BYTES[cast(str, setup.muon)]
    matrices = matrix_count(config)
    copies = 1 if setup.plugin == "ddp" else ranks
    moments = needs.states["moments"] - 4 * matrices / copies
    exchanged = 0 if ranks == 1 else 4 * matrices if setup.plugin == "ddp" else 3 * size * matrices / ranks
    step = exchanged + 4 * size * min(ELEMENTS, matrices / ranks)
    return replace(
        needs,
        states=needs.states | {"moments": moments},
        gradients_at_the_end=needs.gradients_at_the_end + step,
        last_block=max(0, needs.last_block - step),  # the step runs after the block's activations have been freed
    )


def in_eight_bits(setup: Setup) -> Setup:
    """Return the setup with AdamW's moments in 8 bits, or unchanged if the settings do not allow them."""
    possible = (
        setup.plugin != "gemini" and setup.muon is None and setup.offloaded_state != "state" and setup.lora is None
    )
    return replace(setup, eight_bits=True) if possible else setup


def _in_eight_bits(config: DiTConfig, setup: Setup, needs: Estimate) -> Estimate:
    """Change an estimate to 8-bit moments, plus an fp32 buffer in which a few tensors' moments are decoded."""
    weights = needs.states["moments"] / 8
    shapes = model_shapes(config)[0].values() if setup.lora is None else ()
    copies = 1 if setup.plugin == "ddp" else setup.state_ranks
    largest = max(map(math.prod, shapes), default=0) / copies
    decoded = 8 * min(weights, DECODED + largest)
    states = needs.states | {"moments": 2 * (1 + 4 / UNIT) * weights}
    if setup.plugin != "ddp":
        return replace(needs, states=states | {"decoded moments": decoded})
    last = max(0, needs.last_block - decoded)
    return replace(needs, states=states, gradients_at_the_end=needs.gradients_at_the_end + decoded, last_block=last)


def held_counts(config: DiTConfig, setup: Setup) -> tuple[int, int]:
    """Return a rank's numbers of parameters, in the model and in a block. Tensor-parallel ranks hold slices."""
    model, block = config.parameters(), config.whole_block_parameters()
    if setup.tensor_parallel > 1:
        model, block = held_parameters(config, setup.tensor_parallel)
    return model - setup.absent, block


@functools.cache
def lora_parameters(config: DiTConfig, lora: Lora, ranks: int = 1, stages: PipelineStages | None = None) -> int:
    """Count a rank's LoRA weights, in all layers or in a pipeline's ``stages``. ranks: number of tensor-parallel ranks.
    They divide A in row-parallel layers and B in column-parallel layers."""
    rules, total = plan_of(config).rules(config), 0
    for name, (rank, inputs, outputs) in lora_layers(config, lora).items():
        if stages is not None and not stages.has(config, name):
            continue
        rule = rule_of(rules, f"{name}.weight")
        if isinstance(rule, Row):
            inputs //= ranks
        elif isinstance(rule, DIVIDING):
            outputs //= ranks
        total += rank * (inputs + outputs)
    return total


def trained_count(config: DiTConfig, setup: Setup) -> int:
    if setup.lora is None:
        return held_counts(config, setup)[0]
    if setup.trained is not None:
        return setup.trained
    return lora_parameters(config, setup.lora, setup.tensor_parallel)


def _estimate_fsdp(config: DiTConfig, setup: Setup, batch: int) -> Estimate:
    """Estimate the memory of FSDP2.

    A rank holds fp32 shards of weights, gradients, moments and averages. It also holds the gathered units' weights, the
    current block's gradients, and the previous block's reduction buffer. A float8 weight takes one byte in a gathered
    unit and one in the shard.

    The backward pass begins with the last block and ends with the first. A public model's blocks may differ, so each
    end counts its own block: FLUX.1's first block has 2.4 times the weights of its last.
    """
    size, reduced, ranks = BYTES[setup.precision], BYTES[setup.reduce_dtype], setup.state_ranks
    model, block = held_counts(config, setup)
    trained = trained_count(config, setup)
    frozen = 0 if setup.lora is None else model
    share, (others, at_the_start, given) = 4 * trained / ranks, _activations(config, setup, batch)
    _, last_block, given_first = _activations(config, setup, batch, 0)
    first, last = _relative_sizes(config)
    ahead = min(AHEAD if setup.hosted else PREFETCHED, config.depth - 1)
    gradients = share - (of_streamed(config, setup)[0] if setup.hosted and setup.lora is None else 0)
    activations = others + at_the_start
    states = {"moments": 2 * share, "averages": setup.averages * share}
    if setup.loss_ranks == 1:  # not sharded: weights in the forward pass's precision, and fp32 masters
        states["weights"] = size * (trained + frozen) - saved(config, setup)
        states["masters"] = 0 if setup.precision == "fp32" else share
        last_block = max(0, last_block - size * trained * block / model)  # the first block's gradients do not exist yet
        return Estimate(states, activations, size * trained * setup.accumulate, size * trained, last_block=last_block)
    states["weights"] = share + (size * frozen - saved(config, setup)) / ranks
    float8 = plan_of(config).kept(config, setup.execution).weights if setup.gathers_float8 else 0
    states |= {"float8 weights": config.depth * float8 / ranks} if float8 else {}
    outside = model - config.depth * block
    # Divided experts are not gathered with the block. Each rank keeps its experts until the backward pass.
    divided = setup.expert_parallel > 1 and setup.tensor_parallel == 1
    experts = expert_parameters(config) if divided else 0
    block, own = block - experts, experts / setup.expert_parallel
    kept = size * own * (1 if setup.checkpointed else config.depth)
    trained_block = (block + own) * trained / (trained + frozen)
    if setup.accumulate and setup.keep_gradients:  # gradients are reduced after the last micro-batch
        before = after = reduced * trained + size * trained_block
    else:
        # The last block's activations are freed before its reduction buffer is allocated. So the peak is at that block,
        # at the next one (with the buffer), or in between (with buffer and gradients).
        buffer = reduced * trained_block * last
        begun = max(0, buffer - given, buffer + size * trained_block * last - at_the_start)
        before = gradients * setup.accumulate + begun + size * outside
        after = gradients + (size + reduced) * trained_block * first + size * outside
    whole = size * block - (size - 1) * float8 - saved(config, setup) / config.depth
    if setup.reshard == "never":
        gathered = size * (trained + frozen) - config.depth * (size * (block + experts) - whole)
        left, ahead = size * outside + whole * first, 0
    else:
        gathered, left = (size * outside + (1 + ahead) * whole * each for each in (last, first))
    # At the first block, the gradients of this block and of the embedders do not exist, and no block is gathered ahead.
    # A few blocks earlier, weights are gathered ahead, but these blocks' gradients do not exist. Count the larger sum.
    reduces = not setup.accumulate and not (setup.hosted and setup.lora is None)
    earlier = given_first + whole * first - 4 * trained_block * first / ranks * reduces
    absent = size * trained_block * first + size * outside + ahead * (whole * first - max(0, earlier))
    last_block = max(0, last_block - absent)
    return Estimate(states, activations, before, after, gathered + kept, left + size * own, last_block)


@functools.cache
def _relative_sizes(config: DiTConfig) -> tuple[float, float]:
    """Return the first and the last block's number of weights, each divided by the mean of all blocks."""
    sizes = _block_bytes(config, "bf16", 1)
    mean = sum(sizes) / len(sizes)
    return sizes[0] / mean, sizes[-1] / mean


RING = 48 << 20  # bytes of the buffer that copies moments to and from host memory
OFFLOADED: dict[str, tuple[str, ...]] = {"none": (), "average": ("averages",), "state": ("averages", "moments")}


@functools.cache
def _block_bytes(config: DiTConfig, kind: str, size: int) -> list[int]:
    found: defaultdict[int, int] = defaultdict(int)
    for name, shape in model_shapes(config)[0].items():
        if name.startswith("blocks."):
            is_packed = kind != "bf16" and is_stored(name, shape)
            found[int(name.split(".")[1])] += (
                shape[0] * row_bytes(kind, shape[1]) if is_packed else size * math.prod(shape)
            )
    return [found[number] for number in sorted(found)]


def of_streamed(config: DiTConfig, setup: Setup) -> tuple[float, float]:
    """Return a rank's bytes of offloaded blocks in host memory, and the bytes of its ring buffer on the device."""
    if not setup.streamed_blocks:
        return 0, 0
    size = 4 if setup.plugin == "ddp" or setup.lora is None else BYTES[setup.precision]
    sizes = _block_bytes(config, setup.base_precision, size)
    host, ring = blocks_of(sizes, setup.streamed_blocks, None if setup.hosted else setup.recompute_blocks)
    # fsdp needs no ring: a shard's copy on the device is freed before the block computes
    return (host / setup.state_ranks, 0) if setup.hosted else (host, ring)


def _host_gradients(config: DiTConfig, setup: Setup) -> float:
    """Return the host bytes for offloaded blocks' gradients. torch rounds page-locked tensors up to powers of 2."""
    ranks, numbers = setup.state_ranks, spread_numbers(config.depth, setup.streamed_blocks)
    prefixes = tuple(f"blocks.{number}." for number in numbers)
    shapes = (shape for name, shape in model_shapes(config)[0].items() if name.startswith(prefixes))
    return sum(next_power_of_2(4 * -(-shape[0] // ranks) * math.prod(shape[1:])) for shape in shapes)


def _streamed(needs: Estimate, config: DiTConfig, setup: Setup) -> Estimate:
    blocks, ring = of_streamed(config, setup)
    if not blocks:
        return needs
    states = needs.states | {"weights": needs.states["weights"] - blocks}
    states |= {"ring of blocks": ring} if ring else {}
    host = needs.host | {"blocks": blocks}
    if setup.hosted and setup.lora is None:
        host["gradients"] = _host_gradients(config, setup)
    return replace(needs, states=states, host=host)


def _offloaded(needs: Estimate, setup: Setup) -> Estimate:
    host = {name: size for name, size in needs.states.items() if name in OFFLOADED[setup.offloaded_state]}
    states = {name: size for name, size in needs.states.items() if name not in host}
    states |= {"ring buffer": RING} if "moments" in host else {}
    return replace(needs, states=states, host=host)


def resolve_sharding(config: DiTConfig, setup: Setup, batch: int, capacity: float | None) -> Setup:
    """Replace fsdp's "auto" settings by the values with the least traffic that fit in ``capacity`` bytes; None for no
    limit. Keeping gathered weights is preferred to keeping full gradients."""

    def fits(**changes) -> bool:
        return capacity is None or estimate(config, replace(setup, **changes), batch).total <= capacity

    if setup.reshard == "auto" and setup.hosted:
        setup = replace(setup, reshard="after_forward")
    if setup.reshard == "auto":
        setup = replace(setup, reshard="never" if fits(reshard="never") else "after_forward")
    if setup.keep_gradients is None:
        setup = replace(setup, keep_gradients=fits(keep_gradients=True))
    return setup


def largest_batch(config: DiTConfig, setup: Setup, capacity: float) -> int:
    """Return the largest micro-batch, in samples, that fits in ``capacity`` bytes; 0 if the states alone do not fit."""
    if setup.pipeline_parallel > 1:
        return min(largest_batch(*stage, capacity) for stage in stage_setups(config, setup))
    if estimate(config, setup, 0).total > capacity:
        return 0
    fixed, one = (estimate(config, setup, batch) for batch in (0, 1))
    room = capacity - LIBRARIES - sum(fixed.states.values()) - fixed.gradients - fixed.gathered - fixed.activations
    largest = max(0, int(room // (one.activations - fixed.activations)))
    # ``largest`` samples fit at the beginning of the backward pass. The end may need more memory.
    return bisect.bisect_right(range(1, largest + 1), capacity, key=lambda size: estimate(config, setup, size).total)


def _activations(config: DiTConfig, setup: Setup, batch: int, number: int = -1) -> tuple[float, float, float]:
    """Return bytes of activations at the beginning of the backward pass: (all blocks except block ``number``, this
    block with temporary tensors, this block before its recomputation)."""
    plan, size, kept_blocks = plan_of(config), BYTES[setup.precision], setup.kept_blocks(config.depth)
    frozen = setup.lora is not None and not trains_modulation(config, setup.lora)
    execution = replace(setup.execution, frozen_gates=frozen)
    kept, backward = plan.kept(config, execution), plan.backward(config, execution)
    own_kept = plan.kept(config, replace(execution, block=number))
    tokens = config.tokens
    if config.axial_attention and setup.sequence_parallel > 1:
        frames, *places = config.grid
        by_frames = "axial" not in config.sequence_types
        _, tokens = divide_grid(frames, math.prod(places), setup.sequence_parallel, by_frames)
        tokens *= setup.sequence_parallel
    tokens = batch * -(-tokens // (setup.sequence_parallel * setup.tensor_parallel))
    if setup.tensor_parallel > 1:  # a layer's gathered input, and this rank's term in the sum over ranks
        backward += 2 * setup.tensor_parallel
    unit, share = tokens * config.hidden_size * size, setup.tokens_share(config)

    def of_block(kept: Kept, share: float) -> float:
        found = share * (kept.units * unit + 4 * tokens * kept.statistics) + size * batch * kept.numbers
        if not setup.gathers_float8 and setup.base_precision != "fp8":
            found += kept.weights  # FP8 copies of weights, or equally large buffers with LoRA
        return found

    block, own = of_block(kept, share), of_block(own_kept, 1)
    backward_of_one = backward * unit + size * stored_weights(config, setup)[2]
    if kept_blocks < config.depth:  # only input and modulation of a recomputed block stay
        streams = 1 + config.caption_tokens / config.tokens
        given = unit * streams
        if setup.recompute == BUT_ATTENTION:  # attention's outputs and log-sum-exps are also stored
            attentions = sum(branch.sees in ATTENTIONS for branch in config.block.branches)
            given += attentions * streams * (unit + 4 * tokens * config.num_heads)
        modulation = size * batch * config.modulation_width
        given, own_given = share * given + modulation, given + modulation
    else:
        given, own_given = block, own
    held = kept_blocks * block + (config.depth - kept_blocks) * given
    held += 2 * unit * (config.sprint is not None)  # the tokens after and before the route, which are fused
    return setup.held_micro_batches * held - own_given, own + backward_of_one, own_given


def advice(config: DiTConfig, setup: Setup, batch: int, capacity: float) -> str | None:
    """Suggest the first change that makes a step fit in ``capacity`` bytes; None if it fits already.

    Suggestions come in this order: recompute some operations, then complete blocks; move state to host memory (fsdp);
    smaller micro-batches; 8-bit moments; share samples between ranks; more ranks.
    """

    def fits(**changes) -> bool:
        return estimate(config, replace(setup, **changes), batch).total <= capacity

    if fits():
        return None
    if setup.plugin != "gemini" and not setup.grad_checkpoint:
        parts = ("norms", "cheap", "half", "mlp") if config.recomputable and not setup.fp8 else ()
        for level in (*parts, BUT_ATTENTION):
            if not setup.compiled and fits(recompute=level):
                return f"--recompute {level}"
    if fits(grad_checkpoint=True, recompute="none"):
        return "--grad_checkpoint"
    if setup.plugin == "fsdp" and not setup.streamed_blocks:
        sharing = setup.sequence_parallel * setup.tensor_parallel * setup.expert_parallel * setup.pipeline_parallel
        more = (BLOCKS,) if setup.loss_ranks > sharing == 1 else ()
        ways = ("", {}), (" --grad_checkpoint", dict(grad_checkpoint=True, recompute="none"))
        for offloads in (("average", "state"), more):
            for (flags, changes), offload in itertools.product(ways, offloads):
                if fits(offload=offload, **changes):
                    return f"--offload {offload}{flags}"
    smaller = largest_batch(config, replace(setup, accumulate=True), capacity)
    smaller = next((size for size in range(min(smaller, batch - 1), 0, -1) if batch % size == 0), 0)
    if smaller:
        return f"--batch_size {smaller} with {batch // smaller} x the --grad_accumulation"
    if in_eight_bits(setup) != setup and fits(eight_bits=True):
        return "--optimizer adamw8bit"

    def shared(world: int) -> str | None:
        ranks = replace(setup, world=world).loss_ranks
        sizes = [size for size in range(setup.sequence_parallel + 1, ranks + 1) if ranks % size == 0]
        for flag, changes in (("", {}), (" --grad_checkpoint", dict(grad_checkpoint=True, recompute="none"))):
            for size in sizes:
                if fits(world=world, sequence_parallel=size, **changes):
                    return f"--sequence_parallel_size {size}{flag}"
        return None

    if flags := shared(setup.world):
        return flags
    ranks = [setup.world * 2**i for i in range(1, 8)]
    enough = next((world for world in ranks if setup.plugin != "ddp" and fits(world=world)), None)
    if enough:
        return f"{enough} ranks, which share the states"
    for world in ranks:
        if flags := shared(world):
            return f"{world} ranks and {flags}"
    return (
        "a smaller model" if setup.plugin in WEIGHTS_SHARDED else "--plugin fsdp on several ranks, or a smaller model"
    )


def card_memory(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def parts(needs: Estimate, libraries: float = LIBRARIES) -> str:
    """Describe the terms of an estimate in words."""
    encoders = f" (of text and pixels {needs.states['encoders'] / GIB:,.2f})" if "encoders" in needs.states else ""
    float8 = " (float8 where it is read so)" if "float8 weights" in needs.states else ""
    shown = {f"states{encoders}": sum(needs.states.values()), **needs.peak, "libraries": libraries}
    text = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in shown.items() if size)
    text = text.replace("gathered weights", f"gathered weights{float8}")
    return text + (f"; in host memory {' and '.join(needs.host)} {needs.host_total / GIB:,.2f}" if needs.host else "")


def describe(config: DiTConfig, setup: Setup, batch: int, capacity: float | None) -> str:
    """Return the line on memory that train.py prints. capacity: bytes of the GPU; None on a CPU."""
    resolved = resolve_sharding(config, setup, batch, None if capacity is None else USABLE * capacity)
    needs = estimate(config, resolved, batch)
    if capacity is None:  # no ring buffer on a CPU
        needs = replace(needs, states={name: size for name, size in needs.states.items() if name != "ring buffer"})
    total = needs.total if capacity is not None else needs.total - LIBRARIES + needs.host_total
    text = f"{total / GIB:.2f} GiB a rank estimated: {parts(needs, 0 if capacity is None else LIBRARIES)}"
    if setup.plugin == "fsdp" and setup.loss_ranks > 1:
        text += f" (--reshard {resolved.reshard})"
    if setup.recompute != "none":
        text += f" (--recompute {setup.recompute})"
    if setup.recompute_blocks is not None:
        text += f" (--recompute_blocks {setup.recompute_blocks})"
    if capacity is None:
        return f"{text}; on a CPU in {setup.precision}, libraries and loader processes not counted"
    largest = largest_batch(config, setup, USABLE * capacity)
    room = f"enough for --batch_size {largest}" if largest else "too little for one sample"
    return f"{text}; the GPU has {capacity / GIB:.1f}, {room}"


def stage_setups(config: DiTConfig, setup: Setup) -> list[tuple[DiTConfig, Setup]]:
    """Return a configuration and a setup for each pipeline rank, with its layers and the micro-batches in flight."""
    ranks, found = setup.pipeline_parallel, []
    for rank in range(ranks):
        stages = stages_of(config, setup.schedule, rank, ranks)
        actions = make_schedule(setup.schedule, rank, ranks, setup.micro_batches)
        own = [number for chunk in range(stages.chunks) for number in stages.own(chunk)]
        tensor = setup.tensor_parallel
        changes = dict(
            pipeline_parallel=1,
            world=setup.world // ranks,
            absent=absent_parameters(config, stages, tensor),
            trained=setup.lora and lora_parameters(config, setup.lora, tensor, stages),
            held_micro_batches=in_flight(actions) / stages.chunks,
        )
        found.append((config.with_blocks(own), replace(setup, **changes)))
    return found


@functools.cache
def absent_parameters(config: DiTConfig, stages: PipelineStages, tensor_parallel: int) -> int:
    (shapes, _), plan = model_shapes(config), plan_of(config)
    rules, absent = plan.rules(config), 0
    for name, shape in shapes.items():
        if name.partition(".")[0] != plan.stages.stack and not stages.has(config, name):
            divided = isinstance(rule_of(rules, name), DIVIDING)
            absent += math.prod(shape) // (tensor_parallel if divided else 1)
    return absent


# Fraction of host memory to plan with. Data loaders, libraries and the page cache need the rest.
USABLE_OF_A_HOST = 0.8


def host_memory(root: Path = Path("/")) -> int:
    """Return this machine's bytes of memory, or the container's limit if lower. root: the file system's root."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # the file is missing or in another format
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, name = root / "sys/fs/cgroup", "memory.max"
            elif "memory" in controllers.split(","):
                base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            else:
                continue
            inside = PurePosixPath(path.lstrip("/"))
            for folder in (inside, *inside.parents):  # a container may see its control group as the root
                with contextlib.suppress(OSError, ValueError):  # no such file, or no limit ("max")
                    found.append(int((base / folder / name).read_text()))
    return min(found)


def check_host(config: DiTConfig, setup: Setup, batch: int, ranks: int) -> None:
    """Raise ValueError if ``ranks`` CPU processes don't fit into memory. Linux would kill them silently."""
    needs = estimate(config, setup, batch)
    needed, there = ranks * (needs.total + needs.host_total), host_memory()
    if needed > there:
        raise ValueError(
            f"training needs about {needed / GIB:,.0f} GiB and this machine has {there / GIB:,.0f}; lower "
            "--image_size, --num_frames, --batch_size or --num_classes, or take a smaller --model"
        )


def save_buffers(config: DiTConfig, setup: Setup) -> float:
    """Return the bytes of a rank's save buffer: its even share of masters, averages and moments."""
    trained = trained_count(config, replace(setup, tensor_parallel=1))
    squares = trained - (0 if setup.muon is None else matrix_count(config))
    return 4 * setup.networks * (trained * (2 + setup.averages) + squares) / setup.world


def check_offload(config: DiTConfig, setup: Setup, batch: int, ranks: int, saves: bool) -> None:
    """Raise ValueError if this machine's memory is too small for the state that ``ranks`` processes offload or save."""
    host = lambda offload: estimate(config, replace(setup, offload=offload), batch).host_total  # noqa: E731
    state = host(setup.offload)
    buffers = save_buffers(config, setup) if saves else 0
    needed, there = ranks * (state + buffers), host_memory()
    if not state or needed <= USABLE_OF_A_HOST * there:
        return
    less = ["state", "average", "none"] if setup.plugin == "fsdp" else ["none"]
    if setup.streamed_blocks:
        room = USABLE_OF_A_HOST * there / ranks - buffers
        every = [f"{BLOCKS}:{count}" for count in range(1, config.depth + 1)]
        less = [*[other for other in every if host(other) <= room][-1:], *less]
    fixes = [f"--offload {other}" for other in less if host(other) < state]
    fixes += ["--no_save"] * (saves and ranks * state <= USABLE_OF_A_HOST * there) + ["more machines"]
    raise ValueError(
        f"--offload {setup.offload}: keeps {ranks * state / GIB:,.1f} GiB in host memory"
        + (f", saves take {ranks * buffers / GIB:,.1f} more," if saves else "")
        + f" and of the {there / GIB:,.1f} GiB of this machine {USABLE_OF_A_HOST:.0%} can be used; take "
        + " or ".join(fixes)
    )
