"""Compare attention in packs of unequal samples with dense attention of equal samples, on a GPU.

    python benchmarks/bench_packed_attention.py [--ways runs varlen] [--mixes mix lognormal] [--seconds 170] [--record]

q, k, v are views of one tensor (N, 3, H, d), as in a block. The ways are:

    runs          as in models: dense calls for runs of equal lengths, and a varlen kernel for short samples
    dense runs    a dense call for each run of equal lengths
    varlen        torch's varlen kernel for all samples at once
    flash_attn    FlashAttention 4 for all samples at once
    flex          FlexAttention

The program first compares a short pack's output and gradients with float64. It then measures speeds, counting
4 H d sum(L^2) FLOP forward and 2.5 times as many backward. The ways take turns with the baseline, cuDNN's dense kernel
on the same number of tokens in samples of 8,192. A way that fails prints its error, and the others continue."""

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_attention import Trials, device_ms
from benchmarks.results import add_flags, record
from opendit.kernels.attention import TORCH, LocalAttention, VarlenAttention, resolve_attention, resolve_varlen
from opendit.kernels.flash_attention_4 import CUTE
from opendit.models.segments import PlacedSegments, Segments, segment_attention

HEADS = {64: 24, 72: 16, 128: 24}  # DiT-XL has 16 of 72, vDiT-7B has 24 of 128
LONGEST = 8192
MIX = ((4, 1), (4, 2), (8, 8), (32, 32))  # (number of samples, longest length / these samples' length)
Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # each tensor is (1, H, N, d)


def mixed(longest: int) -> list[int]:
    """Return the lengths 4 x 8,192 + 4 x 4,096 + 8 x 1,024 + 32 x 256, scaled to ``longest``."""
    return [longest // part for samples, part in MIX for _ in range(samples)]


def lognormal(longest: int) -> list[int]:
    """Draw lengths with a median of longest / 6 and a sigma of log 2.5, in total as many tokens as :func:`mixed`."""
    drawn = np.random.default_rng(0).lognormal(math.log(longest / 6), math.log(2.5), 10_000)
    left, found = sum(mixed(longest)), []
    for length in np.clip(drawn, longest / 64, 4 * longest).astype(int).tolist():
        found.append(min(max(length, 1), left))
        left -= found[-1]
        if not left:
            return sorted(found, reverse=True)
    raise AssertionError("unreachable: 10,000 lengths fill every pack")


MIXES = {"mix": mixed, "lognormal": lognormal}


def placed(lengths: list[int], device: str) -> PlacedSegments:
    segments = Segments(tuple((1, 1, length) for length in lengths), sum(lengths))
    return segments.place(torch.device(device))


def inputs(tokens: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor]:
    """Return (leaves q, k, v (1, H, N, d) in one tensor's memory, a gradient of the result)."""
    generator, heads = torch.Generator(device).manual_seed(0), HEADS.get(head_dim, 2)
    random = functools.partial(torch.randn, device=device, generator=generator)
    qkv = random(1, tokens, 3, heads, head_dim).to(dtype)
    grad = random(1, tokens, heads, head_dim).to(dtype).transpose(1, 2)
    return [x.detach().requires_grad_() for x in qkv.permute(2, 0, 3, 1, 4).unbind()], grad


def dense(head_dim: int, dtype: torch.dtype, device: str) -> LocalAttention:
    return LocalAttention(resolve_attention("auto", device, dtype, head_dim, LONGEST)[0])


def runs(packed: PlacedSegments, head_dim: int, dtype: torch.dtype, device: str) -> Way:
    attend, (varlen, _) = dense(head_dim, dtype, device), resolve_varlen(device, dtype, head_dim)
    return lambda q, k, v: segment_attention(q, k, v, packed, attend, varlen)


def dense_runs(packed: PlacedSegments, head_dim: int, dtype: torch.dtype, device: str) -> Way:
    attend = dense(head_dim, dtype, device)
    return lambda q, k, v: segment_attention(q, k, v, packed, attend)


def by_package(package: str) -> Callable[..., Way]:
    def make(packed: PlacedSegments, head_dim: int, dtype: torch.dtype, device: str) -> Way:
        size = -(-head_dim // 32) * 32 if package == CUTE else head_dim
        attend, longest = VarlenAttention(package, size), max(packed.segments.lengths)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            return attend(q, k, v, packed.offsets, longest).unsqueeze(0).transpose(1, 2)

        return call

    return make


def flex(packed: PlacedSegments, head_dim: int, dtype: torch.dtype, device: str) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = packed.sample_of_row
    mask = create_block_mask(lambda b, h, i, j: rows[i] == rows[j], None, None, len(rows), len(rows), device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


WAYS = {
    "runs": runs,
    "dense runs": dense_runs,
    "varlen": by_package(TORCH),
    "flash_attn": by_package(CUTE),
    "flex": flex,
}
BASELINE = "dense cudnn at 8,192"


def forward_flop(lengths: list[int], head_dim: int) -> float:
    return 4.0 * HEADS.get(head_dim, 2) * head_dim * sum(length**2 for length in lengths)


def exact(lengths: list[int], leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of q, k, v in float64, computed segment by segment."""
    wide = [x.detach().double().requires_grad_() for x in leaves]
    parts = zip(*(x.split(lengths, dim=2) for x in wide), strict=True)
    scale = leaves[0].shape[-1] ** -0.5
    out = torch.cat([torch.softmax(q @ k.mT * scale, dim=-1) @ v for q, k, v in parts], dim=2)
    return [out, *torch.autograd.grad(out, wide, grad.double())]


def errors(make: Callable[..., Way], lengths: list[int], head_dim: int, dtype: torch.dtype, device: str) -> list[float]:
    """Return the relative errors (Frobenius norm) of the output, dq, dk and dv."""
    leaves, grad = inputs(sum(lengths), head_dim, dtype, device)
    out = make(placed(lengths, device), head_dim, dtype, device)(*leaves)
    made, wanted = [out, *torch.autograd.grad(out, leaves, grad)], exact(lengths, leaves, grad)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(made, wanted, strict=True)]


def tflops(way: Way, lengths: list[int], head_dim: int, args) -> tuple[float, float]:
    """Return TFLOP/s forward and backward."""
    leaves, grad = inputs(sum(lengths), head_dim, args.type, args.device)
    with torch.no_grad():
        forward = device_ms(lambda: way(*leaves), args.milliseconds, args.device)
    out = way(*leaves)
    backward = device_ms(
        lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), args.milliseconds, args.device
    )
    flop = forward_flop(lengths, head_dim) / 1e9
    return flop / forward, 2.5 * flop / backward


def equal_lengths(head_dim: int, args) -> tuple[float, float]:
    """Measure the baseline: one dense call on as many tokens, in samples of the longest length."""
    samples = sum(mixed(args.longest)) // args.longest
    attend = LocalAttention("cudnn" if args.device == "cuda" else "math")
    lengths = [args.longest] * samples

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x[0].transpose(0, 1).unflatten(0, (samples, -1)).transpose(1, 2) for x in (q, k, v))
        return attend(*parts).transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2)

    return tflops(way, lengths, head_dim, args)


def speed_table(args, trials: Trials) -> list[dict]:
    rows = []
    print(f"{'TFLOP/s':58s} {'forward':>8s} {'backward':>8s}   of the baseline")
    for head_dim, mix in itertools.product(args.head_dims, args.mixes):
        lengths, found = MIXES[mix](args.longest), {}
        packed, ways = placed(lengths, args.device), {}
        for _ in range(args.rounds):  # in turns, so that clock drift affects all ways equally
            pair = trials.run(f"{BASELINE}, {head_dim}", equal_lengths, head_dim, args)
            found.setdefault(BASELINE, []).append(pair)
            for name in args.ways:
                case = f"{name}, {mix}, head size {head_dim}"
                if name not in ways:
                    ways[name] = trials.run(case, WAYS[name], packed, head_dim, args.type, args.device)
                if ways[name] is not None:
                    pair = trials.run(case, tflops, ways[name], lengths, head_dim, args)
                    found.setdefault(name, []).append(pair)
        best = {name: [max(v) for v in zip(*filter(None, pairs), strict=True)] for name, pairs in found.items()}
        base = best.pop(BASELINE, None)
        for name, pair in best.items():
            if not pair:
                continue
            case = f"{name}, {mix} of {len(lengths)} up to {max(lengths)}, head size {head_dim}"
            share = " / ".join(f"{a / b:.2f}" for a, b in zip(pair, base, strict=True)) if base else "-"
            print(f"{case:58s} {pair[0]:8.1f} {pair[1]:8.1f}   {share}", flush=True)
            for which, direction in enumerate(("forward", "backward")):
                row = {"bench": "packed_attention", "case": f"{case} {args.dtype}", "metric": f"TFLOP/s {direction}"}
                row["value"] = f"{pair[which]:.4g}"
                if base:
                    row |= {"baseline": BASELINE, "baseline_value": f"{base[which]:.4g}"}
                rows.append(row)
    return rows


def error_table(args, trials: Trials) -> list[dict]:
    rows = []
    print(f"{'relative error, against float64':44s} {'out':>8s} {'dq':>8s} {'dk':>8s} {'dv':>8s}")
    for head_dim, name in itertools.product(args.head_dims, args.ways):
        case = f"{name}, head size {head_dim}"
        found = trials.run(case, errors, WAYS[name], mixed(args.short), head_dim, args.type, args.device)
        if found is not None:
            print(f"{case:44s}" + "".join(f" {error:8.1e}" for error in found), flush=True)
            for what, error in zip(("out", "dq", "dk", "dv"), found, strict=True):
                metric = f"relative error of {what}"
                common = {"bench": "packed_attention", "case": f"{case} {args.dtype}"}
                rows.append({**common, "metric": metric, "value": f"{error:.2e}"})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=[*MIXES])
    parser.add_argument("--head_dims", nargs="+", type=int, default=[72, 128])
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the mix's longest samples")
    parser.add_argument("--short", type=int, default=256, help="the same of the pack against float64")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this program")
    parser.add_argument("--milliseconds", type=int, default=100, help="time for each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each way; the best counts")
    parser.add_argument("--seconds", type=float, default=170, help="no measurement begins after so long")
    add_flags(parser)
    args = parser.parse_args(argv)
    args.type = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    trials = Trials(args.seconds)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {args.dtype}")
    for head_dim in args.head_dims:
        print(f"head size {head_dim}: {resolve_varlen(args.device, args.type, head_dim)[1]}")
    rows = error_table(args, trials) + speed_table(args, trials)
    if trials.skipped:
        print(f"no time left for {len(trials.skipped)}: {'; '.join(dict.fromkeys(trials.skipped))}")
    record(rows, args)


if __name__ == "__main__":
    main()
