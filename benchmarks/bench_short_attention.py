"""Compare the tiles of opendit/kernels/short_attention.py with torch's kernels, on short sequences without gradients.

    python benchmarks/bench_short_attention.py [--batches 2 16 128] [--tokens 256] [--heads 16] [--head_dim 72]
                                              [--rows 64 128]

q, k and v are views of one qkv tensor, as in a block. CUDA graphs of many calls take turns, and the median is reported.
The results show which tiles to use, and up to which number of programs."""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from torch import Tensor

from opendit.kernels.attention import LocalAttention
from opendit.kernels.short_attention import AttentionTiles, short_attention, short_attention_reference

CALLS = 50  # calls per graph


WARPS = {32: (2, 4), 64: (4,), 128: (4, 8), 256: (8, 16)}  # queries per program -> warps


def variants(rows: list[int]) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        name: LocalAttention(name) for name in ("cudnn", "flash")
    }
    for count, keys, stages in itertools.product(rows, (64, 128, 256), (2, 3)):
        for warps in WARPS[count]:
            tiles = AttentionTiles(count, keys, stages, warps)
            found[f"tiles {count} x {keys}, {stages} stages, {warps} warps"] = lambda q, k, v, tiles=tiles: (
                short_attention(q, k, v, tiles)
            )
    return found


def recorded(work: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end) / CALLS


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8, 16, 128], help="rows, both halves")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head_dim", type=int, default=72)
    parser.add_argument("--rows", type=int, nargs="+", default=list(WARPS), choices=list(WARPS), help="of a program")
    parser.add_argument("--trials", type=int, default=7)
    args = parser.parse_args(argv)
    for batch in args.batches:
        shape = batch, args.tokens, 3, args.heads, args.head_dim
        q, k, v = torch.randn(shape, device="cuda", dtype=torch.bfloat16).permute(2, 0, 3, 1, 4).unbind(0)
        want, graphs = short_attention_reference(q, k, v), {}
        print(f"\n{batch} x {args.tokens} tokens, {args.heads} heads of {args.head_dim}", flush=True)
        for name, attend in variants(args.rows).items():
            try:
                error = float((attend(q, k, v) - want).norm() / want.norm())
                graphs[name] = recorded(lambda attend=attend, q=q, k=k, v=v: attend(q, k, v)), error
            except torch.AcceleratorError:
                print(f"{name} failed, and nothing runs on the GPU after it", flush=True)
                raise
            except Exception as error:  # a kernel failed to compile or run; the others still run
                print(f"{name} failed: {str(error).splitlines()[0]}", flush=True)
        times = {name: [] for name in graphs}
        for _ in range(args.trials):
            for name, (graph, _) in graphs.items():
                times[name].append(microseconds(graph))
        for name in sorted(times, key=lambda name: statistics.median(times[name])):
            print(f"{statistics.median(times[name]):9.2f} us  error {graphs[name][1]:.1e}  {name}", flush=True)


if __name__ == "__main__":
    main()
