"""Time the parts of a DiT block in float8 sampling: matrix products, and the kernels that make their inputs.

    python benchmarks/bench_fp8_sampling.py [--samples 2 16 128] [--only PART ...]

Times are microseconds per call in a CUDA graph of many calls. Each call uses a different weight, so that weights are
read from memory, as in a model, rather than from a cache. Products and the kernels for activations are timed in bf16,
in float8 with one scale per tensor, and in float8 with one scale per row. With one scale per tensor, the kernels' time
includes the pass that computes the scale."""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
import torch.nn.functional as F

from opendit.kernels import fp8
from opendit.kernels.bias_gelu import bias_gelu, bias_gelu_float8
from opendit.kernels.common import Launch, forced_launch
from opendit.kernels.fp8 import E4M3, rows_in_float8
from opendit.kernels.gate_residual_layernorm_modulate import (
    gate_residual_layernorm_modulate,
    gate_residual_layernorm_modulate_float8,
)
from opendit.models.layers import Projection

Work = Callable[[int], object]  # argument: index of the weight
WEIGHTS = 16
PARTS = ["qkv", "proj", "fc1", "fc1_gelu", "fc2", "gelu", "cast", "norm"]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def product(rows: int, inputs: int, outputs: int, biased: bool) -> dict[str, Work]:
    x, bias = random(rows, inputs), random(outputs) if biased else None
    weights = [random(outputs, inputs) / inputs**0.5 for _ in range(WEIGHTS)]
    casts = [fp8.cast(weight, E4M3, exact=True) for weight in weights]
    columns = [cast.descale.expand(1, outputs).contiguous() for cast in casts]
    x8, rows8 = fp8.cast(x, E4M3), rows_in_float8(x)
    dtype = torch.bfloat16

    def tensorwise(i: int):
        return fp8.product(x8.data, casts[i].data, (x8.descale, casts[i].descale), dtype, bias)

    def rowwise(i: int):
        return fp8.product(rows8.data, casts[i].data, (rows8.descale, columns[i]), dtype, bias)

    want = x.float() @ weights[0].float().t() + (0 if bias is None else bias)
    for name, work in (("tensorwise", tensorwise), ("rowwise", rowwise)):
        try:
            print(f"  {name}: relative error {float((work(0) - want).norm() / want.norm()):.3f}")
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0]}")
    return {
        "bf16": lambda i: F.linear(x, weights[i], bias),
        "float8, a scale a tensor": tensorwise,
        "float8, a scale a row": rowwise,
    }


def gelu_in_the_product(rows: int, inputs: int, outputs: int) -> dict[str, Work]:
    from opendit.kernels.linear import linear_gelu

    x, layers = random(1, rows, inputs), []
    for _ in range(WEIGHTS):
        layers.append(Projection(inputs, outputs).to("cuda", torch.bfloat16))
    return {"bf16, GELU in the product": lambda i: linear_gelu(x, layers[i])}


def gelu(rows: int, width: int) -> dict[str, Work]:
    x, bias = random(rows, width), random(width)
    found: dict[str, Work] = {
        "bf16": lambda i: bias_gelu(x, bias),
        "float8, a scale a tensor": lambda i: bias_gelu_float8(x, bias),
    }
    for warps in (2, 4, 8):
        for chunk in (1, 4):
            name = f"float8, a scale a row, {warps} warps, {chunk} rows a program"
            found[name] = lambda i, warps=warps, chunk=chunk: rows_in_float8(x, bias, warps=warps, chunk=chunk)
    return found


def cast(rows: int, width: int) -> dict[str, Work]:
    x = random(rows, width)
    found: dict[str, Work] = {"float8, a scale a tensor": lambda i: fp8.cast(x, E4M3)}
    for warps in (1, 2, 4):
        for chunk in (1, 4):
            name = f"float8, a scale a row, {warps} warps, {chunk} rows a program"
            found[name] = lambda i, warps=warps, chunk=chunk: rows_in_float8(x, warps=warps, chunk=chunk)
    return found


def norm(samples: int, tokens: int, width: int) -> dict[str, Work]:
    x, branch, bias = random(samples, tokens, width), random(samples, tokens, width), random(width)
    gate, shift, scale = random(samples, 6 * width).chunk(6, dim=1)[:3]
    fused, number = gate_residual_layernorm_modulate_float8, random(samples * tokens, 1).float()
    return {
        "bf16": lambda i: gate_residual_layernorm_modulate(x, gate, branch, shift, scale, bias),
        "float8, a scale a tensor": lambda i: fused(x, gate, branch, shift, scale, bias),
        "float8, a scale a row": lambda i: fused(x, gate, branch, shift, scale, bias, by_row=True),
        "float8, a scale a row, the branch's too": lambda i: fused(
            x, gate, branch, shift, scale, bias, by_row=True, branch_scale=number
        ),
    }


def norm_launches(samples: int, tokens: int, width: int) -> dict[str, Work]:
    """Return the fused residual and norm with different launch shapes, in bf16 and in float8 with one scale per row."""
    number = random(samples * tokens, 1).float()
    x, branch, bias = random(samples, tokens, width), random(samples, tokens, width), random(width)
    gate, shift, scale = random(samples, 6 * width).chunk(6, dim=1)[:3]
    plain, float8, found = gate_residual_layernorm_modulate, gate_residual_layernorm_modulate_float8, {}
    name = "gate_residual_layernorm_modulate_forward"
    for tiles, warps, stages, hold in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 3), (True, False)):
        if (stages == 3 and tiles == 1) or (warps == 1 and hold):
            continue
        launch = Launch(rows=1, tiles=tiles, warps=warps, stages=stages, hold=hold)

        def work(i: int, function: Callable, launch: Launch = launch, **options):
            with forced_launch(**{name: launch}):
                return function(x, gate, branch, shift, scale, bias, **options)

        how = f"{tiles} rows a program, {warps} warps, {stages} stages, modulation {'held' if hold else 'read again'}"
        found[f"bf16, {how}"] = lambda i, work=work: work(i, plain)
        found[f"float8, {how}"] = lambda i, work=work: work(i, float8, by_row=True, branch_scale=number)
    return found


def microseconds(variants: dict[str, Work], trials: int) -> None:
    graphs = {}
    for name, work in variants.items():
        try:
            work(0)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(2 * WEIGHTS):
                    work(i % WEIGHTS)
            graphs[name] = graph
        except Exception as error:  # a kernel failed to compile or run; the others still run
            print(f"  {name} failed: {str(error).splitlines()[0]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(trials):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(1000 * start.elapsed_time(end) / (2 * WEIGHTS))
    medians = {name: statistics.median(seen) for name, seen in times.items()}
    for name in sorted(medians, key=lambda name: medians[name])[:20]:
        print(f"  {medians[name]:9.2f} us  {name}", flush=True)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[2, 16, 128], help="of a batch, both halves")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument(
        "--only", nargs="*", default=PARTS, help="parts: qkv proj fc1 fc1_gelu fc2 gelu cast norm norm_launches"
    )
    args = parser.parse_args(argv)
    width = args.width
    for samples in args.samples:
        rows = samples * args.tokens
        parts = {
            "qkv": lambda rows=rows: product(rows, width, 3 * width, True),
            "proj": lambda rows=rows: product(rows, width, width, False),
            "fc1": lambda rows=rows: product(rows, width, 4 * width, False),
            "fc1_gelu": lambda rows=rows: gelu_in_the_product(rows, width, 4 * width),
            "fc2": lambda rows=rows: product(rows, 4 * width, width, False),
            "gelu": lambda rows=rows: gelu(rows, 4 * width),
            "cast": lambda rows=rows: cast(rows, width),
            "norm": lambda samples=samples: norm(samples, args.tokens, width),
            "norm_launches": lambda samples=samples: norm_launches(samples, args.tokens, width),
        }
        for name, build in parts.items():
            if name in args.only:
                print(f"\n{name}, {rows} tokens", flush=True)
                microseconds(build(), args.trials)


if __name__ == "__main__":
    main()
