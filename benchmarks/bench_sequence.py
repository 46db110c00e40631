"""Measure what communication costs in one transformer layer, forward and backward, with tokens split over all ranks.

    torchrun --standalone --nproc_per_node=4 benchmarks/bench_sequence.py [--results FILE]
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_sequence.py --tokens 64 --hidden 48 --heads 4     (CPUs)

All kinds of sequence parallelism, two blocking baselines (benchmarks/sequence_baselines.py) and these variants are
timed in turn:

    compute only    the layer without communication, on meaningless numbers
    synchronised    compute only, but ranks wait for each other before and after attention; shows the cost of ranks that
                    are not equally fast
    whole           the layer over the complete sequence, on every rank alone
    plain           the expected time of compute only: the block on a rank's tokens, with the time of its attention
                    replaced by the time of attention to all tokens with a rank's heads

The result for each kind is the time of compute only divided by the kind's time; 1 means that communication costs
nothing. On GPUs every variant is a CUDA graph, so that launches by the host don't count. Before the timing, the output
and gradients of each kind on a short sequence are compared with one rank's.
"""

import argparse
import contextlib
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.clocks import Clocks
from benchmarks.results import append
from benchmarks.sequence_baselines import BlockingFastSeq, BlockingUlysses
from opendit.config.components import SpeedFlags
from opendit.config.parallel_sizes import environment_world_size
from opendit.kernels.recording import record
from opendit.kernels.select import select_kernels
from opendit.kernels.split_heads import head_views
from opendit.models.attention import SequenceShards, TokenGrid
from opendit.models.blocks import Block, BlockSpec
from opendit.parallel.collectives import Group
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.parallel.sequence import SequenceParallel, sequence_parallel
from opendit.parallel.sequence.choose import MOST_GROUPS, Shape, StrategyChoice
from opendit.parallel.sequence.peer_memory import Buffer, connect

LEAST_STEPS = 4  # minimum number of steps of a trial
WHOLE, COMPUTE_ONLY, SYNCHRONISED = "whole", "compute only", "synchronised"
PLAIN, PLAIN_ATTENTION, RANKS_ATTENTION = "plain", "plain attention", "a rank's attention"
BLOCKING = {"blocking fastseq": BlockingFastSeq, "blocking ulysses": BlockingUlysses}


class _TakenForAll(torch.autograd.Function):
    """View q, k, v (B, H, n, d), a rank's tokens and all heads, as (B, h, N, d), all tokens and a rank's heads.

    The views contain meaningless numbers."""

    @staticmethod
    def forward(ctx, ranks: int, *parts: Tensor):
        (B, H, n, d), row = parts[0].shape, parts[0].stride(2) // ranks
        ctx.shape, strides = (B, n, H, d), (parts[0].stride(0), d, row, 1)
        first = min(part.storage_offset() for part in parts)
        thirds = (first + (part.storage_offset() - first) // ranks for part in parts)
        return tuple(
            part.as_strided((B, H // ranks, n * ranks, d), strides, start)
            for part, start in zip(parts, thirds, strict=True)
        )

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, *(grad.transpose(1, 2).reshape(ctx.shape).transpose(1, 2) for grad in grads)


class ComputeOnly:
    """Attention without exchanges and without the copies that they need."""

    takes_projection = False

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend, length: int) -> Tensor:
        B, H, n, d = q.shape
        return attend(*_TakenForAll.apply(length // n, q, k, v)).transpose(1, 2).reshape(B, n, H * d)


class _Meet(torch.autograd.Function):
    """Waits for all ranks, in the forward and the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, wait: Callable[[Buffer], None], forward: Buffer, backward: Buffer):
        wait(forward)
        ctx.wait, ctx.backward_of = wait, backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.wait(ctx.backward_of)
        return grad, None, None, None


class InStep(ComputeOnly):
    """ComputeOnly with barriers where the inputs and outputs of attention would be exchanged."""

    def __init__(self, group: Group, device: torch.device):
        self.group, (self.memory, _) = group, connect(group, device)

    def wait(self, buffer: Buffer) -> None:
        if self.memory is None:
            dist.barrier(self.group.handle)
        else:
            self.memory.rows(buffer, (1,), torch.uint8)
            self.memory.ready(buffer)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend, length: int) -> Tensor:
        def met(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output = attend(_Meet.apply(q, self.wait, Buffer.INPUT, Buffer.OUTPUT), k, v)
            return _Meet.apply(output, self.wait, Buffer.OUTPUT, Buffer.INPUT)

        return super().attention(q, k, v, met, length)


class Layer:
    """A DiT block on this rank's tokens from a sequence of ``tokens``. All ranks have the same random weights."""

    def __init__(self, mesh: Mesh, tokens: int, hidden: int, heads: int, dtype: torch.dtype):
        self.mesh, self.tokens, self.shape = mesh, tokens, Shape(tokens, hidden, heads, 1, dtype.itemsize)
        torch.manual_seed(0)
        self.block = Block(BlockSpec(hidden, heads, 4 * hidden)).to(mesh.device, dtype)
        kernels = select_kernels(SpeedFlags(True, True, True), mesh.device, dtype, hidden // heads, tokens)
        self.block.ops, self.block.attn.attend = kernels.ops, kernels.attend
        for parameter in self.block.parameters():
            nn.init.normal_(parameter, std=hidden**-0.5)
        self.whole = torch.randn(1, tokens, hidden, device=mesh.device).to(dtype)
        self.c, self.weights = torch.randn(1, hidden, device=mesh.device).to(dtype), torch.randn_like(self.whole)

    def step(self, shards: SequenceShards | None, tokens: int | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return (output, gradient of x, gradients of the weights) for this rank's tokens. Without shards, return them
        for all tokens or the first ``tokens``."""
        x, weights = (t[:, :tokens] if shards is None else shards.take(t) for t in (self.whole, self.weights))
        x = x.detach().requires_grad_()
        output = self.block(x, self.block.modulate(self.c), None, TokenGrid((x.shape[1],), shards=shards))
        dx, *grads = torch.autograd.grad(output, [x, *self.block.parameters()], weights)
        return output.detach(), dx, grads

    def attention(self, heads: int, tokens: int) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v for attention alone, with this number of heads and tokens."""
        d = self.shape.hidden // self.shape.heads
        qkv = self.whole.new_ones(1, tokens, 3 * heads * d).normal_().requires_grad_()
        parts = head_views(qkv, heads)
        seen = self.block.attn.attend(*parts)
        return torch.autograd.grad(seen, parts, torch.ones_like(seen))

    def strategy(self, name: str) -> SequenceParallel:
        if name in (COMPUTE_ONLY, SYNCHRONISED, *BLOCKING):
            group = Group.of(self.mesh.sp_group)
            strategy: Any = ComputeOnly()
            if name != COMPUTE_ONLY:
                strategy = InStep(group, self.mesh.device) if name == SYNCHRONISED else BLOCKING[name](group)
            return SequenceParallel(group, StrategyChoice(name, ""), strategy)
        kind, *how = name.split()
        groups = int(how[1]) if how[:1] == ["x"] else None
        found = sequence_parallel(self.mesh, kind, self.shape, groups=groups, direct=how != ["nccl"])
        return cast(SequenceParallel, found)

    def error(self, name: str) -> float:
        """Return the largest relative error in the output and the gradients of x and the weights, against one rank."""
        shards = self.strategy(name)(self.tokens)
        (output, dx, grads), (want, want_dx, want_grads) = self.step(shards), self.step(None)
        for grad in grads:
            dist.all_reduce(grad, group=self.mesh.sp_group)
        real = shards.take(torch.ones_like(want))  # the output of padding is arbitrary
        pairs = [(output * real, shards.take(want)), (dx, shards.take(want_dx)), *zip(grads, want_grads, strict=True)]
        worst = torch.stack([(a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-6) for a, b in pairs]).max()
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.mesh.sp_group)
        return worst.item()


def names(mesh: Mesh, heads: int) -> list[str]:
    """Return the variants that are possible with this number of heads and on this machine."""
    found, ranks = [COMPUTE_ONLY, SYNCHRONISED], mesh.world_size
    if heads % ranks == 0:
        found += [*BLOCKING, "fastseq nccl", "ulysses nccl"]
        if connect(Group.of(mesh.sp_group), mesh.device)[0] is not None:
            found += ["fastseq", *(f"ulysses x {g}" for g in range(1, MOST_GROUPS + 1) if heads // ranks % g == 0)]
    return [*found, "ring", "auto"]


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """Return the stream that records all graphs.

    torch cycles through 32 streams. With a new stream per graph, a graph might be recorded on a stream that it also
    uses inside. Work that should run in parallel then would not."""
    return torch.cuda.Stream()


def captured(mesh: Mesh, work: Callable[[], object]) -> Callable[[], object]:
    """Return ``work`` as one CUDA graph if there is a GPU."""
    if mesh.device.type != "cuda":
        return work
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    kept, replay = record(work, stream, torch.cuda.graph_pool_handle())
    return functools.partial(_replay_keeping, replay, kept, work)  # keep alive the memory that the graph uses


def _replay_keeping(replay: Callable[[], None], kept: object, _: object) -> object:
    replay()
    return kept


def timed(mesh: Mesh, work: Callable[[], object], repeats: int) -> float:
    """Return the slowest rank's seconds per call."""
    cuda = mesh.device.type == "cuda"
    mesh.barrier()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if cuda:
        torch.cuda.synchronize()
    took = torch.tensor((time.perf_counter() - start) / repeats, device=mesh.device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def interleaved(trial: Callable[[str], float], alone: str, others: list[str], rounds: int) -> dict[str, float]:
    """Return the seconds of ``alone`` and of the others. Every trial of the others runs between two trials of
    ``alone``, and the median ratio to these counts. All ranks use the same order."""
    shuffled, ratios, base = random.Random(0), {name: [] for name in others}, [trial(alone)]
    for _ in range(rounds):
        for name in shuffled.sample(others, len(others)):
            took = trial(name)
            base.append(trial(alone))
            ratios[name].append(2 * took / sum(base[-2:]))
    seconds = statistics.median(base)
    return {alone: seconds} | {name: statistics.median(found) * seconds for name, found in ratios.items()}


def trace(work: Callable[[], object], path: str) -> None:
    """Write a Chrome trace of this rank's kernels and copies in two steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            work()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)


def measure(
    layer: Layer,
    variants: list[str],
    rounds: int,
    budget: float,
    trace_to: str | None = None,
    clocks: Clocks | None = None,
) -> dict[str, float]:
    """Return every variant's seconds per step, in interleaved trials of about ``budget`` seconds.

    At its power limit a GPU's clock varies by several percent within seconds. Therefore every trial is between two
    trials of compute only. The result is the median ratio to these two, times the median of compute only."""
    mesh = layer.mesh
    works = {n: captured(mesh, functools.partial(layer.step, layer.strategy(n)(layer.tokens))) for n in variants}
    works[WHOLE] = captured(mesh, functools.partial(layer.step, None))
    heads, ranks = layer.shape.heads, mesh.sp_size
    if heads % ranks == 0:
        rows = layer.tokens // ranks
        works[PLAIN] = captured(mesh, functools.partial(layer.step, None, rows))
        works[PLAIN_ATTENTION] = captured(mesh, functools.partial(layer.attention, heads, rows))
        works[RANKS_ATTENTION] = captured(mesh, functools.partial(layer.attention, heads // ranks, layer.tokens))
    once = max(timed(mesh, works[COMPUTE_ONLY], 1) for _ in range(2))
    repeats = max(LEAST_STEPS, min(50, int(budget / once)))

    def turn(name: str) -> float:
        times = repeats if name != WHOLE else max(1, repeats // mesh.sp_size)
        with clocks.during(name) if clocks else contextlib.nullcontext():
            return timed(mesh, works[name], times)

    ratios, shuffled = {name: [] for name in works if name != COMPUTE_ONLY}, random.Random(0)  # same on all ranks
    unhindered = [turn(COMPUTE_ONLY)]
    for _ in range(rounds):
        for name in shuffled.sample(list(ratios), len(ratios)):
            took = turn(name)
            unhindered.append(turn(COMPUTE_ONLY))
            ratios[name].append(2 * took / sum(unhindered[-2:]))
    if trace_to:
        name = f"{layer.tokens}-{layer.shape.hidden}-{mesh.sp_size}-rank{mesh.rank}.json"
        trace(works["auto" if "auto" in works else variants[-1]], f"{trace_to}/{name}")
    seconds = {COMPUTE_ONLY: statistics.median(unhindered)}
    seconds |= {name: statistics.median(found) * seconds[COMPUTE_ONLY] for name, found in ratios.items()}
    if PLAIN in seconds:
        seconds[PLAIN] += seconds.pop(RANKS_ATTENTION) - seconds.pop(PLAIN_ATTENTION)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 65536])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1152, 3072])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 24], help="one for each --hidden")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=0.1, help="seconds a variant's turn takes, about")
    parser.add_argument("--only", nargs="+", help="these variants, besides compute only")
    parser.add_argument("--clocks", action="store_true", help="the GPUs' clock and power, too; take a --budget of 1.5")
    parser.add_argument("--trace", help="folder for a trace of auto, or of the last variant")
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args()
    mesh = init_mesh(sequence_parallel=environment_world_size())
    dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    for hidden, heads in zip(args.hidden, args.heads, strict=True):
        variants = names(mesh, heads)
        variants = [name for name in variants if not args.only or name in (COMPUTE_ONLY, SYNCHRONISED, *args.only)]
        short = Layer(mesh, 16 * mesh.world_size * 3 + 5, hidden, heads, dtype)
        errors = {
            name: None if name == SYNCHRONISED else short.error(name) for name in variants[1:]
        }  # the output of compute only is arbitrary
        for tokens in args.tokens:
            layer = Layer(mesh, tokens, hidden, heads, dtype)
            clocks = Clocks(mesh.world_size) if args.clocks and mesh.is_main else None
            seconds = measure(layer, variants, args.rounds, args.budget, args.trace, clocks)
            if mesh.is_main:
                rows = report(layer, seconds, errors, str(layer.strategy("auto").plan))
                if clocks:
                    rows += report_clocks(layer, clocks)
                if args.results:
                    append(rows, args.results, gpus=mesh.world_size)
            elif "auto" in variants:
                layer.strategy("auto")  # a collective call
            del layer
            if mesh.device.type == "cuda":
                torch.cuda.empty_cache()
    close_mesh()


def case_name(layer: Layer) -> str:
    return f"layer {layer.shape.hidden}/{layer.shape.heads} N {layer.shape.tokens} P {layer.mesh.world_size}"


def report_clocks(layer: Layer, clocks: Clocks) -> list[dict]:
    clocks.close()
    rows, means = [], clocks.means()
    for name, (megahertz, watts) in means.items():
        print(f"  {name:17s} {megahertz:9.0f} MHz {watts:6.0f} W")
        fields = dict(baseline=COMPUTE_ONLY, baseline_value=f"{means[COMPUTE_ONLY][0]:.0f}")
        case = f"{case_name(layer)} {name}"
        rows.append(
            dict(bench="sequence", case=case, metric="MHz, mean of the GPUs", value=f"{megahertz:.0f}", **fields)
        )
    sys.stdout.flush()
    return rows


def report(layer: Layer, seconds: dict[str, float], errors: dict[str, float | None], auto: str) -> list[dict]:
    case, ranks = case_name(layer), layer.mesh.world_size
    compute, blocking = seconds[COMPUTE_ONLY], seconds.get("blocking ulysses")
    share, plain = seconds[WHOLE] / ranks * 1e3, seconds.get(PLAIN, float("nan")) * 1e3
    print(
        f"\n{case}: compute only {compute * 1e3:.3f} ms (plain {plain:.3f}, whole / {ranks} {share:.3f}); auto: {auto}"
    )
    rows = []
    for name, error in errors.items():
        exposed = (seconds[name] - compute) / (blocking - compute) if blocking else float("nan")
        ratio = compute / seconds[name]
        off = "" if error is None else f"  error {error:.1e}"
        print(f"  {name:17s} {seconds[name] * 1e3:9.3f} ms {ratio:7.3f}  exposed {exposed:6.2f}{off}")
        fields = dict(value=f"{seconds[name] * 1e3:.3f}", baseline=COMPUTE_ONLY, baseline_value=f"{compute * 1e3:.3f}")
        rows.append(dict(bench="sequence", case=f"{case} {name}", metric="ms", ratio=f"{ratio:.3f}", **fields))
    sys.stdout.flush()
    own = dict(value=f"{compute * 1e3:.3f}", baseline=PLAIN, baseline_value=f"{plain:.3f}")
    return [*rows, dict(bench="sequence", case=f"{case} {COMPUTE_ONLY}", metric="ms", **own)]


if __name__ == "__main__":
    main()
