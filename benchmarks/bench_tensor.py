"""Measure what communication costs in one DiT block, forward and backward, with tensor parallelism over all ranks.

    torchrun --standalone --nproc_per_node=2 benchmarks/bench_tensor.py [--results FILE]
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_tensor.py --tokens 64 --hidden 48 --heads 4       (CPUs)

*Compute only* is the same block without exchanges, on meaningless numbers. The result for each variant is the time of
compute only divided by the variant's time; 1 means that communication costs nothing. *Overlapped* is what
``--tensor_parallel_size`` does between GPUs that can access each other's memory, and *blocking* is what it does
otherwise. *Modulation on every rank* is blocking, and every rank computes the complete modulation instead of gathering
it. On GPUs each variant is a CUDA graph. Every trial runs between two trials of compute only, and the median ratio
counts."""

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run as a file by torchrun

import torch
from torch import Tensor

from benchmarks.bench_sequence import LEAST_STEPS, captured, interleaved, timed
from benchmarks.results import append
from opendit.config.components import SpeedFlags
from opendit.config.parallel_sizes import environment_world_size
from opendit.kernels.select import select_kernels
from opendit.models.attention import TokenGrid
from opendit.models.dit import DiTConfig
from opendit.models.zoo import build_model
from opendit.parallel import collectives, tensor
from opendit.parallel.collectives import Group
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.parallel.tensor import divide, tensor_group

COMPUTE_ONLY = "compute only"
OVERLAPPED = "overlapped"
VARIANTS = {COMPUTE_ONLY: {}, OVERLAPPED: {}, "blocking": {}, "modulation on every rank": {"column_modulation": False}}


class _Here:
    """Handle for a skipped collective. ``wait`` returns a stand-in for the result."""

    def __init__(self, received: Tensor):
        self._received = received

    def wait(self) -> Tensor:
        return self._received


@functools.cache
def _any_numbers(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def _nothing_gathered(share: Tensor, group: Group) -> _Here:
    return _Here(_any_numbers(torch.Size((group.size, *share.shape)), share.dtype, share.device))


def _nothing_summed(x: Tensor, dim: int, group: Group) -> _Here:
    return _Here(x.unflatten(dim, (group.size, -1)).select(dim, group.rank))


@contextlib.contextmanager
def exchanging(really: bool) -> Iterator[None]:
    """Skip all exchanges inside the block unless ``really``."""
    if really:
        yield
        return
    with mock.patch.multiple(collectives, start_gather=_nothing_gathered, start_sum=_nothing_summed):
        yield


@contextlib.contextmanager
def overlapping(really: bool) -> Iterator[None]:
    """Keep products from overlapping with communication inside the block unless ``really``."""
    with contextlib.nullcontext() if really else mock.patch.object(tensor, "overlaps", lambda *_: False):
        yield


class Layer:
    """A rank's part of a DiT block, on its tokens from ``samples`` sequences, with random weights."""

    def __init__(self, mesh: Mesh, samples: int, tokens: int, hidden: int, heads: int, dtype: torch.dtype, **how):
        torch.manual_seed(0)
        with torch.device(mesh.device):
            model = build_model(DiTConfig((2, 2), 2, 4, hidden, 1, heads, num_classes=1), seed=0)
        kernels = select_kernels(SpeedFlags(True, True, True), mesh.device, dtype, hidden // heads, tokens)
        self.shards = divide(model, cast(Group, tensor_group(mesh)), **how)(tokens)
        self.tokens = tokens
        self.block = model.use(ops=kernels.ops, attend=kernels.attend).to(dtype).blocks[0]
        for parameter in self.block.parameters():
            torch.nn.init.normal_(parameter, std=hidden**-0.5)
        self.x = torch.randn(samples, self.shards.rows, hidden, device=mesh.device).to(dtype).requires_grad_()
        self.c, self.weights = torch.randn(samples, hidden, device=mesh.device).to(dtype), torch.randn_like(self.x)

    def step(self) -> tuple[Tensor, ...]:
        """Return the gradients of input and weights."""
        grid = TokenGrid((self.tokens,), shards=self.shards)
        output = self.block(self.x, self.block.modulate(self.c), None, grid)
        return torch.autograd.grad(output, [self.x, *self.block.parameters()], self.weights)


def measure(
    mesh: Mesh, shape: tuple[int, int, int, int], dtype: torch.dtype, rounds: int, budget: float
) -> dict[str, float]:
    """Return every variant's seconds per step."""
    works = {}
    for name, how in VARIANTS.items():
        with exchanging(name != COMPUTE_ONLY), overlapping(name == OVERLAPPED):
            works[name] = captured(mesh, Layer(mesh, *shape, dtype, **how).step)
    repeats = max(LEAST_STEPS, min(50, int(budget / max(timed(mesh, works[COMPUTE_ONLY], 1) for _ in range(2)))))

    def trial(name: str) -> float:
        with (
            exchanging(name != COMPUTE_ONLY),
            overlapping(name == OVERLAPPED),
        ):  # for CPUs; a recorded graph stays as it is
            return timed(mesh, works[name], repeats)

    return interleaved(trial, COMPUTE_ONLY, [name for name in works if name != COMPUTE_ONLY], rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--hidden", type=int, nargs="+", default=[3072, 6144])
    parser.add_argument("--heads", type=int, nargs="+", default=[24, 48], help="one for each --hidden")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=0.1, help="seconds a trial takes, about")
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args()
    mesh = init_mesh(tensor_parallel=environment_world_size())
    dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    for hidden, heads in zip(args.hidden, args.heads, strict=True):
        for tokens in args.tokens:
            seconds = measure(mesh, (args.samples, tokens, hidden, heads), dtype, args.rounds, args.budget)
            if mesh.is_main:
                rows = report(mesh, f"layer {hidden}/{heads} N {tokens} B {args.samples} P {mesh.tp_size}", seconds)
                if args.results:
                    append(rows, args.results, gpus=mesh.world_size)
            if mesh.device.type == "cuda":
                _any_numbers.cache_clear()
                torch.cuda.empty_cache()
    close_mesh()


def report(mesh: Mesh, case: str, seconds: dict[str, float]) -> list[dict]:
    print(case, flush=True)
    alone, rows = seconds[COMPUTE_ONLY], []
    for name, took in seconds.items():
        print(f"  {name:26s} {took * 1e3:9.3f} ms   {alone / took:.3f}", flush=True)
        fields = dict(baseline=COMPUTE_ONLY, baseline_value=f"{alone * 1e3:.3f}", ratio=f"{alone / took:.4f}")
        rows.append(dict(bench="tensor", case=f"{case} {name}", metric="ms", value=f"{took * 1e3:.3f}", **fields))
    return rows


if __name__ == "__main__":
    main()
