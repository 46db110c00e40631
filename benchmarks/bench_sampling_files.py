"""Time sampling from noise to PNGs on disk: latents only, VAE and files in turn, and VAE and files in parallel.

    python benchmarks/bench_sampling_files.py [--pictures 512] [--batch_size 64] [--fp8] [--vae_compile] [--results CSV]

The model and the VAE (of Stable Diffusion's shape, in fp16 on a GPU) have random weights. After a warm-up batch each,
the three variants take turns for --trials trials in one process, and each variant's median is reported. "latents" draws
latents and discards them. "in turn" decodes a batch, copies it to the host and writes its files before the next batch.
"beside" decodes and writes while the next batch is drawn, like sample.py (opendit/sampling/output_pipeline.py)."""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_sampling import CLASSES, SEED, Bench
from benchmarks.random_vae import random_vae
from benchmarks.results import append
from opendit.encoders.pictures import to_uint8
from opendit.encoders.vae import VAECodec
from opendit.parallel.mesh import Mesh
from opendit.sampling.output_files import save_one
from opendit.sampling.output_pipeline import OutputPipeline, Writers
from opendit.sampling.sample_output import writer_threads
from opendit.sampling.sampling_engine import SamplingEngine


def make_codec(args, device: torch.device, compiled: bool = False) -> VAECodec:
    return VAECodec(random_vae(args.vae_narrower), device=device, dtype=torch.float16, compiled=compiled)


class Variants:
    """The variants as methods. Each draws ``count`` pictures in batches and returns when all work is done."""

    def __init__(self, bench: Bench, codec: VAECodec, engine: SamplingEngine, folder: Path):
        self.bench, self.codec, self.engine, self.folder = bench, codec, engine, folder

    def batches(self, count: int):
        index = torch.arange(count)
        y = (index * 37 % CLASSES).to(self.bench.device)
        return self.engine.batches(y, self.bench.null, index, self.bench.args.batch_size, SEED)

    def latents(self, count: int) -> None:
        for _ in self.batches(count):
            pass

    def in_turn(self, count: int) -> None:
        for index, latents in self.batches(count):
            for number, picture in zip(index.tolist(), to_uint8(self.codec.decode(latents)), strict=True):
                self.save(number, picture)

    def beside(self, count: int) -> None:
        def deliver(index: Tensor, pictures: np.ndarray) -> None:
            for number, picture in zip(index.tolist(), pictures, strict=True):
                writers.put(self.save, number, picture)

        mesh = Mesh(0, 1, 0, self.bench.device)
        with (
            Writers(writer_threads(mesh), 4096) as writers,
            OutputPipeline(self.codec, mesh.device, deliver) as pipeline,
        ):
            for index, latents in self.batches(count):
                pipeline.put(index, latents)

    def save(self, number: int, picture: np.ndarray) -> None:
        save_one(self.folder / f"{number:06d}.png", picture, 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="DiT-XL/2")
    parser.add_argument("--image_size", type=int, default=256)
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sampler", default="ddim")
    parser.add_argument("--cfg_scale", type=float, default=4.0)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=220, help="after which no trial is begun")
    parser.add_argument("--vae_compile", action="store_true", help="as of sample.py")
    parser.add_argument("--vae_narrower", type=int, default=1, help="divides the VAE's widths, for a CPU")
    parser.add_argument("--results", help="a file to append rows to, as results.csv")
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("highest")
    bench = Bench(args)
    engine = SamplingEngine(bench.model(args.fp8), bench.objective, **bench.settings())
    precision = "fp8" if args.fp8 else str(bench.dtype).removeprefix("torch.")
    print(f"{args.model}, {precision}, steps {engine.note}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        variants = Variants(bench, make_codec(args, bench.device, args.vae_compile), engine, Path(folder))
        work = {"latents": variants.latents, "in turn": variants.in_turn, "beside": variants.beside}
        times: dict[str, list[float]] = {name: [] for name in work}
        for draw in work.values():
            draw(min(args.pictures, args.batch_size))
        for trial in range(args.trials):
            for name, draw in work.items():
                if trial and bench.left < 0:
                    continue
                bench.synchronize()
                start = time.perf_counter()
                draw(args.pictures)
                bench.synchronize()
                times[name].append(time.perf_counter() - start)
        files = len(list(Path(folder).glob("*.png")))
    print(f"\n{args.pictures} pictures of {args.image_size} px, batches of {args.batch_size}, {files} files")
    rates = {name: args.pictures / statistics.median(seconds) for name, seconds in times.items()}
    rows = []
    for name, rate in rates.items():
        print(f"{name:>8} {rate:9.2f} img/s  {rate / rates['latents']:.3f} x latents", flush=True)
        if name != "latents":
            case = f"{args.model} {args.image_size}px {args.steps} steps {precision} to PNG, {name}"
            case += ", compiled VAE" if args.vae_compile else ""
            row = {"bench": "sampling_files", "case": case, "metric": "img/s", "value": f"{rate:.2f}"}
            rows.append(row | {"baseline": "latents alone", "baseline_value": f"{rates['latents']:.2f}"})
    if bench.device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    if args.results:
        append(rows, args.results)


if __name__ == "__main__":
    main()
