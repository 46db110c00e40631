"""Compare torch's matrix products in a block, without gradients, with other algorithms of cuBLASLt.

    python benchmarks/bench_products.py [--rows 512 4096 32768] [--width 1152] [--results FILE]

Each call uses a different weight, so that weights are read from memory, as in a model. The calls take turns, and
medians are reported. "taken" is the algorithm that opendit/kernels/cublaslt.py would use: the fastest one that is
bit-identical to torch, or torch's call if no algorithm is 2 % faster."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
import torch.nn.functional as F

from benchmarks.results import append
from opendit.kernels import cublaslt
from opendit.kernels.cublaslt import Product, ProductShape, measured
from opendit.kernels.linear import product_and_gelu


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 4096, 32768])
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument("--results", help="a file to append rows to, as results.csv")
    args = parser.parse_args(argv)
    width, library, rows = args.width, cublaslt.loaded(torch.device("cuda:0")), []
    gelu = product_and_gelu
    layers = (
        ("qkv", 3 * width, width, True, F.linear),
        ("proj", width, width, False, F.linear),
        ("fc1 and GELU", 4 * width, width, True, gelu),
        ("fc2", width, 4 * width, False, F.linear),
    )
    for count in args.rows:
        for name, columns, inner, bias, torchs in layers:
            shape = ProductShape(count, columns, inner, torch.bfloat16, bias, torchs is gelu, torch.device("cuda:0"))
            product = Product(library, shape)
            found = measured(product, shape, torchs)
            number = cublaslt.fastest(found.microseconds, found.equal)
            taken = found.microseconds[0 if number is None else 1 + number]
            others = " ".join(
                f"{time:.2f}{'' if same else '*'}"
                for time, same in zip(found.microseconds[1:], found.equal, strict=True)
            )
            print(f"{count:6d} rows {name:13s} torch {found.microseconds[0]:8.2f} us, taken {taken:8.2f}; {others}")
            row = {"bench": "products", "case": f"{count} rows {name} {inner} to {columns} bf16", "metric": "us"}
            rows.append(
                row | {"value": f"{taken:.2f}", "baseline": "torch", "baseline_value": f"{found.microseconds[0]:.2f}"}
            )
    print("(* rounds otherwise than torch's call)")
    if args.results:
        append(rows, args.results)


if __name__ == "__main__":
    main()
