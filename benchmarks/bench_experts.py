"""Compare EC-DiT training steps under fsdp with all experts on every rank and with experts divided among the ranks.

    torchrun --standalone --nproc_per_node=4 benchmarks/bench_experts.py [--results FILE]
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_experts.py --tokens 32 --model EC-DiT-Ti/2     (CPUs)

In the first variant, "every expert on every rank", a rank gathers all experts' weights. In "nothing sent" the experts
are divided, but tokens stay on their ranks, so the difference from "experts divided" is the cost of the all-to-alls.
The batch is the same in all variants. Every trial runs between two trials of the first variant, and the median ratio to
these counts."""

import argparse
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from torch import Tensor

from benchmarks.results import append
from opendit.config.components import SpeedFlags
from opendit.config.parallel_sizes import ParallelDims, environment_world_size
from opendit.kernels.select import select_kernels
from opendit.models.variants import ECDiTConfig
from opendit.models.zoo import empty_model, model_config
from opendit.parallel import collectives
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import Engine, build_engine
from opendit.parallel.experts import expert_group, expert_parameters
from opendit.parallel.fsdp import Sharding
from opendit.parallel.layout import Shard
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh

ALL_HERE, DIVIDED, NOTHING_SENT = "every expert on every rank", "experts divided", "nothing sent"
GIB = 2**30


@contextlib.contextmanager
def sending(really: bool) -> Iterator[None]:
    """Keep tokens on their ranks inside the block unless ``really``."""
    stays = mock.patch.object(collectives, "_start_all_to_all", lambda send, *_: collectives.Flight([], send, send))
    with contextlib.nullcontext() if really else stays:
        yield


def some_values(name: str, shard: Shard) -> Tensor:
    return torch.empty(shard.shape).uniform_(-0.05, 0.05)


def build(mesh: Mesh, config: ECDiTConfig, keep_gathered: bool) -> Engine:
    half = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    with mesh.device:
        model = empty_model(config, parameters=False)
    kernels = select_kernels(SpeedFlags(True, True, True), mesh.device, half, config.head_dim, config.tokens)
    apply_parallel(model, ops=kernels.ops, attend=kernels.attend, experts=expert_group(mesh))
    sharding = Sharding(keep_gathered=keep_gathered)
    precision = "bf16" if half == torch.bfloat16 else "fp32"
    return build_engine(
        model, mesh, plugin="fsdp", precision=precision, lr=1e-5, sharding=sharding, initial=some_values
    )


def stepper(mesh: Mesh, engine: Engine, config: ECDiTConfig, samples: int, tokens_travel: bool) -> Callable[[], None]:
    torch.manual_seed(mesh.rank)
    x = torch.randn(samples, config.in_channels, *config.input_size, device=mesh.device)
    t, y = torch.arange(samples, device=mesh.device) + 500, torch.zeros(samples, dtype=torch.int64, device=mesh.device)

    def step() -> None:
        with sending(tokens_travel), engine.micro_batch(last=True):
            engine.backward(engine.forward(x, t, y).float().square().mean())
        engine.step()

    return step


def timed(mesh: Mesh, step: Callable[[], None], repeats: int) -> float:
    """Return the seconds per step of the slowest rank."""
    mesh.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor((time.perf_counter() - start) / repeats, device=mesh.device)
    torch.distributed.all_reduce(took, torch.distributed.ReduceOp.MAX, group=torch.distributed.group.WORLD)
    return took.item()


def peak(mesh: Mesh, step: Callable[[], None]) -> float:
    """Return the GiB that a step allocates in addition to the memory in use before."""
    if mesh.device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="EC-DiT-1B/2")
    parser.add_argument("--tokens", type=int, default=8192, help="twice a square number")
    parser.add_argument("--samples", type=int, default=1, help="of a rank")
    parser.add_argument("--capacity", type=float, default=2.0)
    parser.add_argument("--depth", type=int, help="blocks (default: the model's)")
    parser.add_argument("--reshard", action="store_true", help="free gathered weights after the forward pass")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=3, help="steps of a trial")
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args()
    rows = int((args.tokens // 2) ** 0.5)
    options = {"expert_capacity": args.capacity} | ({"depth": args.depth} if args.depth else {})
    size = {"input_size": (2 * rows, 4 * rows), "in_channels": 4, "num_classes": 1000}
    config = cast(ECDiTConfig, model_config(args.model, **size, **options))
    meshes = {
        ep: init_mesh(dims=ParallelDims.fill(environment_world_size(), ep=ep)) for ep in (1, environment_world_size())
    }
    mesh, apart = meshes.values()
    engines = [build(each, config, not args.reshard) for each in meshes.values()]
    steps = {
        ALL_HERE: stepper(mesh, engines[0], config, args.samples, True),
        DIVIDED: stepper(apart, engines[1], config, args.samples, True),
        NOTHING_SENT: stepper(apart, engines[1], config, args.samples, False),
    }
    memory = {name: [peak(mesh, step) for _ in range(2)][-1] for name, step in steps.items()}
    ratios, alone, shuffled = (
        {name: [] for name in steps},
        [timed(mesh, steps[ALL_HERE], args.repeats)],
        random.Random(0),
    )
    for _ in range(args.rounds):
        for name in shuffled.sample(list(steps)[1:], len(steps) - 1):
            took = timed(mesh, steps[name], args.repeats)
            alone.append(timed(mesh, steps[ALL_HERE], args.repeats))
            ratios[name].append(2 * took / sum(alone[-2:]))
    seconds = statistics.median(alone)
    found = {ALL_HERE: seconds} | {name: seconds * statistics.median(r) for name, r in ratios.items() if r}
    if mesh.is_main:
        case = f"{args.model} depth {config.depth} N {config.tokens} B {args.samples} C {args.capacity:g}"
        report(case, config, mesh.world_size, args.samples, found, memory, args.results)
    close_mesh()


def report(case, config, ranks, samples, found, memory, results) -> None:
    gathered = 2 * config.depth * expert_parameters(config) / GIB
    print(f"{case}, {ranks} ranks; experts in bf16 {gathered:.2f} GiB, of which a rank has {gathered / ranks:.2f}")
    baseline = samples * config.tokens / found[ALL_HERE]
    for name, seconds in found.items():
        speed = samples * config.tokens / seconds
        print(
            f"  {name:27s} {seconds * 1e3:9.2f} ms a step  {speed:9,.0f} tokens/s a rank  {speed / baseline:.3f} x  "
            f"{memory[name]:6.2f} GiB above what stays",
            flush=True,
        )
    if results:
        speeds = {name: samples * config.tokens / seconds for name, seconds in found.items()}
        same = dict(bench="experts", metric="tokens/s/GPU", baseline=ALL_HERE, baseline_value=f"{baseline:.0f}")
        append([dict(same, case=f"{case} {n}", value=f"{v:.0f}") for n, v in speeds.items()], results, gpus=ranks)


if __name__ == "__main__":
    main()
