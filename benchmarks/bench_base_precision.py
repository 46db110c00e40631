"""Measure the error that each --base_precision causes in a public model's output and in the gradients of its LoRA.

    python benchmarks/bench_base_precision.py [--blocks 2 4] [--tokens 1024] [--width 3072] [--fp8] [--record]

The model is FLUX.1 with random weights from N(0, 1 / inputs) and a non-zero LoRA of rank 16. Errors are relative RMS
differences from a model that computes in float32 with the same weights. For gradients, the table has the median and the
maximum over all LoRA matrices A, and over all B. The first row shows the error of bf16 alone. On a CPU this error is
zero, because models compute in fp32 there. --fp8 adds rows with FP8 matrix products. The table also has the bytes per
weight in the frozen layers."""

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from torch import Tensor

from benchmarks.bench_public import SUBJECTS
from benchmarks.results import add_flags, record
from opendit.config.components import SpeedFlags
from opendit.config.names import BASE_PRECISIONS
from opendit.kernels.base_precision import base_layers, store_base
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import TextCondition
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.models.finetuning import A, B, Lora, add_lora
from opendit.parallel.tensor import allocate

SEED = 0


def drawn(shape: Any, device: torch.device, seed: int = SEED) -> Tensor:
    """Return normal random numbers that depend only on the seed and the shape."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def value_of(name: str, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Return a parameter's fp32 values, which are the same in every model."""
    numbers = drawn(shape, device, seed)
    if len(shape) > 1:
        return numbers / shape[1:].numel() ** 0.5 * (0.3 if "modulation" in name or name.endswith(B) else 1)
    return 1 + 0.1 * numbers if "norm" in name else 0.1 * numbers


def model_of(config: Any, kind: str, dtype: torch.dtype, device: torch.device, float8: bool) -> PublicDiT:
    """Return the model in ``dtype``, with its frozen blocks stored as ``kind``."""
    with torch.device("meta"):
        model = PublicDiT(config)
    shapes = {}
    add_lora(model, Lora(16, 16.0, ""), (), seed=SEED)
    for name, parameter in model.named_parameters():
        shapes[name] = parameter.shape
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if kind != "bf16":
        store_base(model, kind, dtype, device)
    allocate(model, device)
    stored = dict(base_layers(model))
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        values = value_of(name, shapes[name], seed, device)
        if name in stored:
            stored[name].store(parameter.data, values, torch.clone)
        else:
            parameter.data.copy_(values)
    if device.type == "cuda" and dtype != torch.float32:
        kernels = select_kernels(SpeedFlags(True, True, True, float8), device, dtype, 128, config.tokens)
        model.use(ops=kernels.ops, attend=kernels.attend)
    return model.train()


def results(model: PublicDiT, x: Tensor, y: TextCondition) -> dict[str, Tensor]:
    """Return the output, under the name "", and the gradients of the LoRA matrices."""
    output = model(x, torch.full((len(x),), 500.0, device=x.device), y)
    (output.float() * drawn(output.shape, x.device, SEED + 3)).sum().backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"": output.detach().float()}


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--blocks", type=int, nargs=2, default=(2, 4), help="with two streams of tokens, and with one")
    parser.add_argument("--width", type=int, default=3072, help="a multiple of 128")
    parser.add_argument("--tokens", type=int, default=1024, help="of the picture, a square number")
    parser.add_argument("--fp8", action="store_true", help="also with products in FP8")
    add_flags(parser)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    values = SUBJECTS["flux"].values | dict(num_layers=args.blocks[0], num_single_layers=args.blocks[1])
    values |= dict(num_attention_heads=args.width // 128)
    side = 2 * round(args.tokens**0.5)
    config = public_config("flux", values, (side, side))
    x = drawn((1, 16, side, side), device, SEED + 1)
    y = TextCondition(
        drawn((1, 128, 4096), device, SEED + 2), torch.ones(1, 128, dtype=torch.bool, device=device),
        drawn((1, 768), device, SEED + 4),
    )  # fmt: skip
    wanted = results(model_of(config, "bf16", torch.float32, device, False), x, y)
    size = f"{args.blocks[0]} + {args.blocks[1]} blocks of width {args.width}, {args.tokens} tokens"
    columns = ("output", "A median", "A largest", "B median", "B largest")
    print(f"{size}\n{'base':<6}{'products':<10}{'bytes':>7}" + "".join(f"{column:>11}" for column in columns))
    rows = []
    ways = [(kind, float8) for float8 in (False, *([True] * args.fp8)) for kind in BASE_PRECISIONS]
    for kind, float8 in ways:
        model = model_of(config, kind, dtype, device, float8)
        layers = [layer for _, layer in base_layers(model)]
        stored = dtype.itemsize
        if layers:
            stored = sum(layer.weight.nbytes for layer in layers) / sum(math.prod(layer.shape) for layer in layers)
        found = results(model, x, y)
        errors = {name: error(found[name], wanted[name]) for name in wanted}
        row = [errors[""]]
        for ending in (A, B):
            each = [value for name, value in errors.items() if name.endswith(ending)]
            row += [statistics.median(each), max(each)]
        products = "fp8" if float8 else str(dtype).removeprefix("torch.")
        print(f"{kind:<6}{products:<10}{stored:>7.3f}" + "".join(f"{value:>11.2e}" for value in row), flush=True)
        case = {"bench": "base precision", "case": f"FLUX.1, {size}, {kind} base, {products} products"}
        rows.append(case | {"metric": "bytes a weight", "value": f"{stored:.4f}"})
        rows += [case | {"metric": f"error, {c}", "value": f"{v:.4e}"} for c, v in zip(columns, row, strict=True)]
        del model, found
    record(rows, args)


if __name__ == "__main__":
    main()
