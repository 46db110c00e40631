"""Time drawing latents with guidance: the sampling engine in bf16 and FP8, eager sampling, and a plain compiled DiT.

    python benchmarks/bench_sampling.py [--batches 1 8 64] [--results FILE] [--profile]

Every variant draws the same samples from a model with random weights. The variants take turns for --trials trials in
one process, and each variant's median is reported. The plain DiT (benchmarks/plain_dit.py) uses torch's operations and
the same sampler, and is compiled as a whole in the mode reduce-overhead. The VAE is not included. After --seconds no
variant is built and no trial begins. A variant that can't be used on this machine is reported and left out."""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from torch import Tensor

from benchmarks.plain_dit import PlainDiT
from benchmarks.results import append
from opendit.config.components import SpeedFlags
from opendit.diffusion.guidance import cfg_model
from opendit.diffusion.objectives import DDPMObjective
from opendit.diffusion.objectives.base import sample_latents
from opendit.kernels.common import kernels_available
from opendit.kernels.fp8_linear import float8_available
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiT, DiTConfig
from opendit.models.zoo import build_model, model_config
from opendit.sampling.sampling_engine import SamplingEngine

CHANNELS, CLASSES, SEED = 4, 1000, 0
PLAIN = "plain compiled"
PRODUCTS = ("nvjet", "gemm", "cutlass", "sdpa", "flash", "attention")  # parts of kernel names
Draw = Callable[[Tensor, Tensor], Tensor]  # (y, index (B,)) -> latents


def random_model(config: DiTConfig) -> DiT:
    """Return a model with random weights, the same at every call."""
    torch.manual_seed(0)
    model = build_model(config)
    for parameter in model.parameters():
        if not parameter.any():  # zero-initialised gates would remove the blocks from the result
            torch.nn.init.normal_(parameter, std=0.02)
    return model


class Bench:
    """The variants, each built on request. ``draws[name](y, index)`` draws samples."""

    def __init__(self, args):
        self.args, self.objective = args, DDPMObjective()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        side = args.image_size // 8
        self.frames = getattr(args, "num_frames", 0)
        what = {"in_channels": CHANNELS, "num_classes": CLASSES, "frames": self.frames or None}
        self.config = model_config(args.model, input_size=(side, side), **what)
        self.null = torch.tensor([CLASSES], device=self.device)
        self.start, self.engines = time.perf_counter(), {}

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.args.seconds - (time.perf_counter() - self.start)

    def model(self, fp8: bool, sequence=None):
        """Return a model with the fused kernels. sequence: how ranks share samples. Raises ValueError if none work."""
        usable, why = (float8_available if fp8 else kernels_available)(self.device, self.dtype)
        if not usable and self.device.type == "cuda":
            raise ValueError(why)
        if fp8 and not usable:
            raise ValueError(why)
        with self.device:
            model = random_model(self.config)
        config, speed = self.config, SpeedFlags(True, True, True, fp8=fp8)
        kernels = select_kernels(speed, self.device, self.dtype, config.head_dim, config.tokens, inference=True)
        return (
            model.place(self.device, self.dtype).eval().use(ops=kernels.ops, attend=kernels.attend, sequence=sequence)
        )

    def settings(self) -> dict:
        return {"steps": self.args.steps, "sampler": self.args.sampler, "cfg_scale": self.args.cfg_scale}

    def engine(self, fp8: bool, **approximations) -> Draw:
        engine = SamplingEngine(self.model(fp8), self.objective, **self.settings(), **approximations)
        print(f"{'fp8' if fp8 else 'engine'}: steps {engine.note} {engine.approximations.note}".rstrip(), flush=True)
        return lambda y, index: engine.sample(y, self.null, index, SEED)

    def eager(self) -> Draw:
        model = self.model(False)
        settings = {"objective": self.objective, "seed": SEED, **self.settings()}
        return lambda y, index: sample_latents(model, y, self.null, index, **settings)

    def plain(self) -> Draw:
        c = self.config
        sizes = (c.patch_size, c.in_channels, c.hidden_size, c.depth, c.num_heads, c.num_classes)
        with self.device:
            model = PlainDiT(c.input_size, *sizes).to(self.device, self.dtype).eval()
        compiled = model
        if self.device.type == "cuda":
            compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)

        def forward(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(x.to(self.dtype), t, y)

        @torch.inference_mode()
        def draw(y: Tensor, index: Tensor) -> Tensor:
            guided = cfg_model(forward, y, self.null, self.args.cfg_scale)
            settings = {"seed": SEED, "steps": self.args.steps, "sampler": self.args.sampler}
            return self.objective.sample(guided, index, (c.in_channels, *c.input_size), **settings)

        return draw

    def variants(self) -> dict[str, Callable[[], Draw]]:
        found = {"engine bf16": lambda: self.engine(False), "engine fp8": lambda: self.engine(True)}
        for setting in self.args.approximations:
            name, _, value = setting.partition(":")
            asked = {name: int(value)} if name == "guidance_every" else {"cache": setting}
            found[f"engine bf16 {setting}"] = functools.partial(self.engine, False, **asked)
        found |= {"eager bf16": self.eager} | ({} if self.frames else {PLAIN: self.plain})
        return {name: build for name, build in found.items() if name not in self.args.without}

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(size, device=self.device)
        return index * 37 % CLASSES, index

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, draw: Draw, size: int) -> float:
        y, index = self.batch(size)
        self.synchronize()
        start = time.perf_counter()
        draw(y, index)
        self.synchronize()
        return time.perf_counter() - start


def measure(bench: Bench, draws: dict[str, Draw], size: int) -> dict[str, float]:
    """Return each variant's median seconds per batch. The first calls, which compile and record, do not count."""
    times: dict[str, list[float]] = {}
    for name, draw in draws.items():
        if bench.left < 0 or (name == PLAIN and bench.left < bench.args.compile_seconds):
            print(f"batch {size}: no time left for {name}", flush=True)
            continue
        try:
            first, second = bench.seconds(draw, size), bench.seconds(draw, size)
        except RuntimeError as error:  # compiling failed or memory ran out; the others still run
            print(f"batch {size}, {name} failed: {str(error).splitlines()[0]}", flush=True)
            continue
        times[name] = []
        print(f"batch {size}, {name}: first call {first:.2f} s, second {second:.2f} s", flush=True)
    for _ in range(bench.args.trials):
        for name in times:
            if bench.left > 0 or not times[name]:
                times[name].append(bench.seconds(draws[name], size))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def profile(bench: Bench, draw: Draw, name: str, size: int, count: int, seconds: float) -> None:
    """Print the kernels that take longest, per step, and the share of matrix products and attention in a batch's time.

    seconds: a batch's time without the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    draw(*bench.batch(size))
    with torch.profiler.profile(activities=activities) as profiler:
        draw(*bench.batch(size))
        bench.synchronize()
    steps, rows = bench.args.steps, []
    for event in profiler.key_averages():
        total = event.self_device_time_total if bench.device.type == "cuda" else event.self_cpu_time_total
        rows.append((total / steps, event.count / steps, event.key))
    rows.sort(reverse=True)
    print(
        f"\n{name}, batch {size}: {sum(row[0] for row in rows):,.0f} us a step in {sum(r[1] for r in rows):.0f} kernels"
    )
    alone = sum(row[0] for row in rows if any(word in row[2] for word in PRODUCTS))
    print(f"matrix products and attention: {alone:,.0f} us, {alone * steps / seconds / 1e6:.3f} of a step's time")
    for microseconds, calls, key in rows[:count]:
        print(f"{microseconds:10.1f} us {calls:7.1f} x  {key[:110]}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="DiT-XL/2")
    parser.add_argument("--image_size", type=int, default=256)
    parser.add_argument("--num_frames", type=int, default=0, help="of a clip model, in latents; 0: a model of pictures")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sampler", default="ddim")
    parser.add_argument("--cfg_scale", type=float, default=4.0)
    parser.add_argument(
        "--approximations",
        nargs="*",
        default=[],
        help="more variants: taylor:K[:ORDER], first_block[:THRESHOLD] (10: always reuses), guidance_every:K; their "
        "errors with weights that mean something: bench_approximations.py",
    )
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[], help="variants to leave out, by name")
    parser.add_argument("--seconds", type=float, default=220, help="after which nothing new is begun")
    parser.add_argument("--compile_seconds", type=float, default=45, help="that compiling the plain DiT may take")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step by their time")
    parser.add_argument("--kernels", type=int, default=25, help="lines of --profile")
    parser.add_argument("--results", help="a file to append rows to, as results.csv")
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("highest")
    bench, draws, rows = Bench(args), {}, []
    for name, build in bench.variants().items():
        try:
            draws[name] = build()
        except ValueError as error:
            print(f"{name} is left out: {error}", flush=True)
    if "eager bf16" in draws:
        want = draws["eager bf16"](*bench.batch(2))
        for name in [name for name in draws if name.startswith("engine")]:
            error = (draws[name](*bench.batch(2)) - want).norm() / want.norm()
            print(f"{name} against eager: relative error of latents {error:.1e}", flush=True)
    frames = f"{args.num_frames} frames " if args.num_frames else ""
    case = f"{args.model} {frames}{args.image_size}px {args.steps} {args.sampler} steps guidance {args.cfg_scale:g}"
    for size in args.batches:
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found = measure(bench, draws, size)
        baseline, width = found.get(PLAIN), max(map(len, found), default=0)
        print(f"\n{case}, batch {size}")
        for name, seconds in found.items():
            ratio = f"{baseline / seconds:6.2f} x {PLAIN}" if baseline else ""
            print(
                f"{name:>{width}} {1000 * seconds:10.1f} ms {size / seconds:9.2f} img/s {ratio}",
                flush=True,
            )
            row = {"bench": "sampling", "case": f"{case} batch {size} {name}", "metric": "img/s"}
            row["value"] = f"{size / seconds:.2f}"
            if baseline and name != PLAIN:
                row |= {"baseline": PLAIN, "baseline_value": f"{size / baseline:.2f}"}
            rows.append(row)
        if bench.device.type == "cuda":
            print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
        for name in [name for name in found if args.profile and name.startswith("engine")]:
            profile(bench, draws[name], name, size, args.kernels, found[name])
    if args.results:
        append(rows, args.results)


if __name__ == "__main__":
    main()
