"""Measure what communication costs in one ST-DiT block, forward and backward, with its tokens split over all ranks.

    torchrun --standalone --nproc_per_node=4 benchmarks/bench_axial.py [--full_attention] [--results FILE]
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_axial.py --frames 4 --places 12 --hidden 48 --heads 4

The variants:

    compute only       the block without exchanges and the copies they need; its results are meaningless
    blocking           one all-to-all before and one after attention
    collectives x G    these all-to-alls, split into G parts
    direct x G         the exchanges in G parts, through symmetric memory
    ring               the baseline: tokens are split by position, and ring attention exchanges keys and values
    default            the variant that training uses

With --full_attention, attention to all tokens is split as ``--sequence_parallel_type auto`` chooses, except in compute
only and ring. A variant's ratio is the time of compute only divided by the variant's time; 1 means that communication
costs nothing. On CPUs the ratio is meaningless.

First, each variant's output and gradients on a small grid are compared with one rank's. On GPUs each variant is then
timed as a CUDA graph. Every trial runs between two trials of compute only, and the median ratio to these counts."""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.bench_sequence import LEAST_STEPS, ComputeOnly, captured, interleaved, timed
from benchmarks.results import append
from opendit.config.components import SpeedFlags
from opendit.config.parallel_sizes import environment_world_size
from opendit.kernels.select import select_kernels
from opendit.models.attention import Attention, SequenceShards, TokenGrid
from opendit.models.blocks import Block
from opendit.models.variants import STDiTConfig
from opendit.parallel.collectives import Group, Ring
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.parallel.sequence import SequenceParallel, SharedSequence, sequence_parallel
from opendit.parallel.sequence.axial import FRAMES, PLACES, AllToAll, DirectExchange, GridShare, SharedGrid
from opendit.parallel.sequence.choose import Shape, StrategyChoice
from opendit.parallel.sequence.peer_memory import PeerMemory, connect
from opendit.parallel.sequence.ulysses import UlyssesRing, ring_attention

WHOLE, COMPUTE_ONLY, BLOCKING, RING, DEFAULT = "whole", "compute only", "blocking", "ring", "default"
PARTS = (1, 2, 4)


class Nothing:
    """Exchange that sends nothing and treats a rank's tokens as if they were in the other layout."""

    def attend(self, grid: GridShare, x: Tensor, attend) -> Tensor:
        return attend(x, slice(0, grid.share(grid.away)))


class InPlace:
    """Exchange for tokens split by position: nothing moves here, because ring attention fetches keys and values."""

    def attend(self, grid: GridShare, x: Tensor, attend) -> Tensor:
        return attend(x, slice(0, grid.sizes[FRAMES]))


class Layer:
    """An ST-DiT block on this rank's tokens of one clip. All ranks have the same random weights."""

    def __init__(self, mesh: Mesh, sizes: tuple[int, int], hidden: int, heads: int, full: bool, dtype: torch.dtype):
        self.mesh, self.sizes, self.group = mesh, sizes, Group.of(mesh.sp_group)
        given = (sizes[0], 1, sizes[1]), (1, 1, 1), 4, hidden, 1, heads
        self.config = STDiTConfig(*given, num_classes=1, full_attention=full)
        torch.manual_seed(0)
        self.block = Block(self.config.block).to(mesh.device, dtype)
        kernels = select_kernels(SpeedFlags(True, True, True), mesh.device, dtype, hidden // heads, self.config.tokens)
        self.block.ops, self.attend = kernels.ops, kernels.attend
        for parameter in self.block.parameters():
            nn.init.normal_(parameter, std=hidden**-0.5)
        self.whole = torch.randn(1, self.config.tokens, hidden, device=mesh.device).to(dtype)
        self.c, self.weights = torch.randn(1, hidden, device=mesh.device).to(dtype), torch.randn_like(self.whole)
        types = self.config.sequence_types
        shape = Shape(self.config.tokens, hidden, heads, 1, dtype.itemsize, types=types, axial=True)
        self.default = cast(SequenceParallel, sequence_parallel(mesh, "auto", shape))

    def shards(self, name: str) -> SequenceShards:
        if name == DEFAULT:
            return self.default(self.config.tokens, self.config.grid)
        full: Any = self.default.strategy
        exchange: Any = {COMPUTE_ONLY: Nothing(), BLOCKING: AllToAll(1), RING: InPlace()}.get(name)
        kind, _, parts = name.partition(" x ")
        if parts:
            memory = cast(PeerMemory, self.memory)  # DirectExchange needs the memory, and exists only with it
            exchange = AllToAll(int(parts)) if kind == "collectives" else DirectExchange(memory, int(parts))
        if full is not None and name in (COMPUTE_ONLY, RING):
            full = ComputeOnly() if name == COMPUTE_ONLY else UlyssesRing(Group(None, 0, 1), self.group)
        shared = SequenceParallel(self.group, StrategyChoice(name, ""), full)
        whole = None if full is None else cast(SequenceShards, SharedSequence(shared, self.config.tokens))
        grid = GridShare(self.group, self.sizes, PLACES if name == RING else FRAMES)
        return cast(SequenceShards, SharedGrid(grid, exchange, whole))

    @property
    def memory(self) -> PeerMemory | None:
        """The ranks' symmetric memory; None if the machine has none."""
        return connect(self.group, self.mesh.device)[0]

    def step(self, name: str, shards: SequenceShards | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return (output, gradient of x, gradients of the weights) for this rank's tokens. Without shards: for all
        tokens."""
        for module in self.block.modules():
            if isinstance(module, Attention):
                module.attend = self.attend
        if name == RING:
            rows = self.sizes[1] // self.group.size
            how = dict(ring=Ring(self.group), lengths=[rows] * self.group.size)
            cast(Attention, self.block.spatial_attn).attend = functools.partial(ring_attention, **how)
        x, weights = (t if shards is None else shards.take(t) for t in (self.whole, self.weights))
        x = x.detach().requires_grad_()
        grid = TokenGrid(self.config.grid, shards=shards)
        output = self.block(x, self.block.modulate(self.c), None, grid)
        dx, *grads = torch.autograd.grad(output, [x, *self.block.parameters()], weights)
        return output.detach(), dx, grads

    def error(self, name: str) -> float:
        """Return the largest relative error in the output and the gradients of x and the weights, against one rank."""
        shards = self.shards(name)
        (output, dx, grads), (want, want_dx, want_grads) = self.step(name, shards), self.step(WHOLE, None)
        for grad in grads:
            dist.all_reduce(grad, group=self.mesh.sp_group)
        pairs = [(output, shards.take(want)), (dx, shards.take(want_dx)), *zip(grads, want_grads, strict=True)]
        worst = torch.stack([(a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-6) for a, b in pairs]).max()
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.mesh.sp_group)
        return worst.item()


def names(layer: Layer) -> list[str]:
    found = [BLOCKING, *(f"collectives x {parts}" for parts in PARTS[1:])]
    if layer.memory is not None:
        found += [f"direct x {parts}" for parts in PARTS]
    return [*found, RING, DEFAULT]


def measure(layer: Layer, variants: list[str], rounds: int, budget: float) -> dict[str, float]:
    """Return the seconds per step of every variant."""
    mesh, works = layer.mesh, {}
    for name in (COMPUTE_ONLY, *variants):
        works[name] = captured(mesh, functools.partial(layer.step, name, layer.shards(name)))
    works[WHOLE] = captured(mesh, functools.partial(layer.step, WHOLE, None))
    once = max(timed(mesh, works[COMPUTE_ONLY], 1) for _ in range(2))
    repeats = max(LEAST_STEPS, min(50, int(budget / once)))

    def trial(name: str) -> float:
        return timed(mesh, works[name], repeats if name != WHOLE else max(1, repeats // mesh.sp_size))

    return interleaved(trial, COMPUTE_ONLY, [name for name in works if name != COMPUTE_ONLY], rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--places", type=int, default=2304, help="of a frame; 32 x 2304 are 73,728 tokens")
    parser.add_argument("--hidden", type=int, default=1152)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--full_attention", action="store_true", help="a third attention, to all tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=0.1, help="seconds a trial takes, about")
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args()
    ranks = environment_world_size()
    if ranks == 1 or args.frames % ranks or args.places % ranks:
        parser.error(f"{ranks} ranks must be several and divide {args.frames} frames and {args.places} places")
    mesh = init_mesh(sequence_parallel=ranks)
    how = args.hidden, args.heads, args.full_attention, torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    small = Layer(mesh, (2 * ranks, 8 * ranks), *how)
    variants = names(small)
    errors = {name: small.error(name) for name in variants}
    layer = Layer(mesh, (args.frames, args.places), *how)
    seconds = measure(layer, variants, args.rounds, args.budget)
    if mesh.is_main:
        rows = report(layer, seconds, errors)
        if args.results:
            append(rows, args.results, gpus=ranks)
    close_mesh()


def report(layer: Layer, seconds: dict[str, float], errors: dict[str, float]) -> list[dict]:
    config, (frames, places) = layer.config, layer.sizes
    full = ", full attention" if config.full_attention else ""
    case = f"ST-DiT layer {config.hidden_size}/{config.num_heads} {frames} x {places}{full} P {layer.mesh.sp_size}"
    alone, share, rows = seconds[COMPUTE_ONLY], seconds[WHOLE] / layer.mesh.sp_size * 1e3, []
    print(f"{case}: compute only {alone * 1e3:.3f} ms (whole / {layer.mesh.sp_size} {share:.3f}); {layer.default.plan}")
    for name, error in errors.items():
        took, ratio = seconds[name], alone / seconds[name]
        ring = seconds[RING] / took
        print(f"  {name:17s} {took * 1e3:9.3f} ms {ratio:7.3f}  ring / this {ring:6.2f}  error {error:.1e}", flush=True)
        fields = dict(baseline=COMPUTE_ONLY, baseline_value=f"{alone * 1e3:.3f}", ratio=f"{ratio:.4f}")
        rows.append(dict(bench="axial", case=f"{case} {name}", metric="ms", value=f"{took * 1e3:.3f}", **fields))
    return rows


if __name__ == "__main__":
    main()
