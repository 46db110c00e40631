"""Time complete training steps of DiT for each plugin and precision, compared with a plain DiT in autocast bf16.

    python benchmarks/bench_train.py --batch_size 128 [--results FILE]
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_train.py --no_plain
    python benchmarks/bench_train.py --batch_size 256 --plugins zero2 --precisions bf16 --no_plain --kernels only --muon

A step is train.py's step on cached latents: noise, forward, backward, clipping, optimizer, EMA. The variants take turns
for --rounds rounds in one process, and the median over all rounds is reported. Steps are timed in groups of GROUP,
because the host does not wait for the device after every step, as in training. Variants whose kernels can't be used on
this machine are left out with a message."""

import argparse
import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.fused_dit import fused_dit
from benchmarks.plain_dit import PlainDiT, PlainVDiT
from benchmarks.results import append
from opendit.checkpoint.ema import EMA
from opendit.config.components import SpeedFlags
from opendit.diffusion.objectives import DDPMObjective
from opendit.diffusion.random import Stream, integers, normal
from opendit.kernels.attention import VarlenAttention
from opendit.kernels.common import kernels_available
from opendit.kernels.fp8_linear import float8_available
from opendit.kernels.select import KernelChoice, select_kernels
from opendit.models.zoo import build_model, model_config
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import PRECISIONS, MuonSettings, build_engine
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.parallel.rules import matrix_rows
from opendit.training.micro_batch import MicroBatch
from opendit.training.prepare import make_deterministic
from opendit.training.runners import GRAPH_WARMUP, build_runner
from train import EagerPasses

SEED, GROUP = 1, 4
PLAIN = "plain autocast bf16"
COMPILED = f"{PLAIN} compiled"


class Latents:
    """Random latents, with the randomness of train.py."""

    def __init__(self, config, batch_size: int, mesh: Mesh):
        self.config, self.objective = config, DDPMObjective()
        self.index = torch.arange(batch_size, device=mesh.device) + mesh.rank * batch_size
        generator = torch.Generator(mesh.device).manual_seed(mesh.rank)
        shape = (batch_size, config.in_channels, *config.input_size)
        self.x = torch.randn(shape, device=mesh.device, generator=generator)
        self.y = self.index % config.num_classes

    def micro_batch(self, step: int) -> MicroBatch:
        t = integers(SEED, step, self.index, Stream.TIMESTEP, 1000)
        noise = normal(SEED, step, self.index, Stream.NOISE, tuple(self.x.shape[1:]))
        return MicroBatch(self.x, t, noise, self.y)


def plain_step(args, config, mesh, data, compiled: bool = False, fused: bool = False):
    """Return a step of a modernised version of Meta's recipe: autocast bf16, fused AdamW, EMA over all weights.

    compiled: use torch.compile with cuDNN's attention. Its speed is right, but its gradients are wrong
    (docs/log/2026-11-21-cudnn-attention-under-compile.md). fused: apply the five changed lines of docs/api.md."""
    plain = PlainVDiT if config.is_video else fused_dit().PlainDiT if fused else PlainDiT
    model = plain(
        config.input_size,
        config.patch_size,
        config.in_channels,
        config.hidden_size,
        config.depth,
        config.num_heads,
        config.num_classes,
    ).to(mesh.device)
    params = [p for p in model.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in params]
    run = torch.compile(model, dynamic=False) if compiled else model
    cudnn = compiled and mesh.device.type == "cuda"
    adam = torch.optim.AdamW(params, lr=1e-4, weight_decay=0, fused=mesh.device.type == "cuda")

    def forward(x, t, y):
        attention = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else nullcontext()
        with torch.autocast(mesh.device.type, torch.bfloat16), attention:
            return run(x, t, y)

    def step(number: int) -> None:
        x, t, noise, y, *_ = data.micro_batch(number)
        prepared = data.objective.prepare(x, t, noise)
        output = forward(prepared.x_t, prepared.timestep, y=y)
        data.objective.loss(output, prepared).mean().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adam.step()
        adam.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(average, [*params], 1e-4)

    return step


def engine_step(
    args, config, mesh, data, plugin: str, precision: str, kernels: KernelChoice, *, graph: bool = False,
    recompute: str = "none", compiled: bool = False, varlen: VarlenAttention | None = None, muon: bool = False,
    eight_bits: bool = False,
):  # fmt: skip
    with mesh.device:
        model = build_model(config)
    apply_parallel(
        model,
        ops=kernels.ops,
        attend=kernels.attend,
        varlen=varlen,
        recompute=recompute,
        grad_checkpoint=args.grad_checkpoint,
        compiled=compiled,
    )
    settings = MuonSettings(matrix_rows(config)) if muon else None
    engine = build_engine(model.train(), mesh, plugin=plugin, precision=precision, muon=settings, eight_bits=eight_bits)
    ema = EMA(engine, 0.9999)
    runner = build_runner(EagerPasses(engine, data.objective), graph=graph)

    def step(number: int) -> None:
        ema.update(runner.train_step([data.micro_batch(number)]).finite)

    return step


def measure(build, steps: int, warmup: int, mesh: Mesh) -> tuple[list[float], float]:
    """Return a freshly built variant's seconds per step in every timed group, and its peak memory in GiB."""
    cuda = mesh.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step, times = build(), []
    for number in range(warmup):
        step(number)
    for first in range(warmup, warmup + steps, GROUP):
        mesh.barrier()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for number in range(first, first + GROUP):
            step(number)
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / GROUP)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    del step
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return times, peak


def kernels_of(args, config, mesh: Mesh, precision: str, speed: SpeedFlags) -> KernelChoice:
    """Select the kernels of ``speed``. Raises ValueError if they can't be used."""
    dtype = PRECISIONS[precision]
    if speed != SpeedFlags():
        usable, why = (float8_available if speed.fp8 else kernels_available)(mesh.device, dtype)
        if not usable:
            raise ValueError(why)
    if args.deterministic and mesh.device.type == "cuda":
        speed = replace(speed, attention="flash")  # as in train.py
    return select_kernels(speed, mesh.device, dtype, config.hidden_size // config.num_heads, config.tokens)


def speeds_of(args) -> dict[tuple[str, ...], SpeedFlags]:
    found: dict[tuple[str, ...], SpeedFlags] = {} if args.kernels == "only" else {(): SpeedFlags()}
    if args.kernels:
        found["kernels",] = SpeedFlags(True, True, True)
    if args.kernels and args.fp8:
        found["fp8",] = SpeedFlags(True, True, True, fp8=True)
    return found


def ways_of(args, plugin: str, speed: SpeedFlags) -> dict[tuple[str, ...], dict]:
    """Return the ways to run a variant: words of its name -> arguments of engine_step, or kernels ("speed"). The first
    entry changes nothing."""
    graphs: dict[tuple[str, ...], dict] = {(): {}}
    if args.graph and plugin == "zero2":
        graphs["graph",] = {"graph": True}
    found = dict(graphs)
    if args.muon and plugin != "gemini":
        found |= {(*way, "muon"): {"muon": True, **how} for way, how in graphs.items()}
    if args.adamw8bit and plugin != "gemini":
        found |= {(*way, "adamw8bit"): {"eight_bits": True, **how} for way, how in graphs.items()}
    if speed.fp8:
        return found
    if args.compile and plugin != "gemini":
        found["compile",] = {"compiled": True}
    if plugin != "gemini":
        for level in args.recompute:
            found |= {(f"recompute {level}", *graph): {"recompute": level, **how} for graph, how in graphs.items()}
    if args.ablation and speed != SpeedFlags():
        flags = ("enable_modulate_kernel", "enable_layernorm_kernel", "enable_flashattn")
        found |= {(f"without {flag}",): {"speed": replace(speed, **{flag: False})} for flag in flags}
    return found


def variants_of(args, config, mesh: Mesh, data: Latents) -> dict[str, Callable]:
    """Return name -> function that builds a variant's step. Print each variant's kernels, or why it is left out."""
    say, found = print if mesh.is_main else lambda _: None, {}
    if not args.no_plain:
        found[PLAIN] = lambda: plain_step(args, config, mesh, data)
    if args.fused_plain:
        found[f"{PLAIN} five lines"] = lambda: plain_step(args, config, mesh, data, fused=True)
    if args.compiled:
        found[COMPILED] = lambda: plain_step(args, config, mesh, data, compiled=True)
    for plugin, precision in itertools.product(args.plugins, args.precisions):
        for suffix, speed in speeds_of(args).items():
            for way, settings in ways_of(args, plugin, speed).items():
                name, settings = " ".join([plugin, precision, *suffix, *way]), {"speed": speed, **settings}
                try:
                    kernels = kernels_of(args, config, mesh, precision, settings.pop("speed"))
                except ValueError as error:
                    say(f"{name}: left out: {error}")
                    continue
                say(f"{name}: kernels {kernels.ops_note}; attention {kernels.attention_note}")
                found[name] = functools.partial(
                    engine_step, args, config, mesh, data, plugin, precision, kernels, **settings
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="DiT-XL/2")
    parser.add_argument("--image_size", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12, help=f"of a variant and round, in groups of {GROUP}")
    parser.add_argument("--warmup", type=int, default=GRAPH_WARMUP + 2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plugins", nargs="+", default=["zero2", "ddp", "gemini"])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp16"])
    parser.add_argument("--no_plain", action="store_true", help="leave the plain baseline out")
    parser.add_argument("--fused_plain", action="store_true", help="also the plain model with docs/api.md's change")
    parser.add_argument("--compiled", action="store_true", help="also the plain baseline under torch.compile")
    parser.add_argument("--kernels", choices=("too", "only"), help="each variant with all kernels on")
    parser.add_argument("--ablation", action="store_true", help="with --kernels: each also with one flag less")
    parser.add_argument("--fp8", action="store_true", help="with --kernels: each also with the block linears in FP8")
    parser.add_argument(
        "--graph", action="store_true", help="each zero2 variant as a CUDA graph too, recomputing or not"
    )
    parser.add_argument("--compile", action="store_true", help="each zero2 and ddp variant with compiled blocks too")
    parser.add_argument(
        "--recompute", nargs="+", choices=("norms", "cheap", "half", "mlp"), default=[], help="likewise, one each"
    )
    parser.add_argument("--muon", action="store_true", help="each variant but gemini's with Muon too, and its share")
    parser.add_argument("--adamw8bit", action="store_true", help="likewise with AdamW's moments in 8 bits")
    parser.add_argument("--frames", type=int, help="of a vDiT: latent frames")
    parser.add_argument("--grad_checkpoint", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="as train.py --deterministic")
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args()
    if args.deterministic:
        make_deterministic()
    mesh = init_mesh()
    torch.set_float32_matmul_precision("high")
    side = args.image_size // 8
    config = model_config(args.model, input_size=(side, side), frames=args.frames, in_channels=4, num_classes=1000)
    data = Latents(config, args.batch_size, mesh)
    variants = variants_of(args, config, mesh, data)
    times, peaks = {name: [] for name in variants}, {}
    for turn in range(args.rounds):
        for name, build in variants.items():
            started = time.perf_counter()
            seconds, peaks[name] = measure(build, args.steps, args.warmup, mesh)
            times[name] += seconds
            if mesh.is_main:
                took = time.perf_counter() - started
                print(f"round {turn}: {name}: {statistics.median(seconds) * 1e3:.1f} ms ({took:.0f} s)", flush=True)
    if mesh.is_main:
        report(args, config, mesh, times, peaks)
    close_mesh()


def report(args, config, mesh: Mesh, times: dict, peaks: dict) -> None:
    batch, rows = args.batch_size * mesh.world_size, []
    rates = {name: batch / statistics.median(seconds) for name, seconds in times.items()}
    plain = next((name for name in (COMPILED, PLAIN) if name in rates), None)
    print(f"\n{args.model} {args.image_size}px, batch {args.batch_size} x {mesh.world_size}, {torch.__version__}")
    print(f"{'variant':28s} {'img/s':>8s} {'TFLOP/s':>8s} {'ms min':>8s} {'median':>8s} {'max':>8s} {'GiB':>6s}")
    for name, seconds in times.items():
        tflops = rates[name] * 3 * config.forward_flops() / 1e12 / mesh.world_size
        low, mid, high = (f(seconds) * 1e3 for f in (min, statistics.median, max))
        print(f"{name:28s} {rates[name]:8.1f} {tflops:8.1f} {low:8.1f} {mid:8.1f} {high:8.1f} {peaks[name]:6.1f}")
        case = f"{args.model} {name} {args.image_size}px batch {args.batch_size}"
        case += " grad_checkpoint" * args.grad_checkpoint + " deterministic" * args.deterministic
        common = {"bench": "train", "case": case}
        rows.append({**common, "metric": "img/s", "value": f"{rates[name]:.1f}"})
        if plain and name != plain:
            rows[-1].update(baseline=plain, baseline_value=f"{rates[plain]:.1f}")
        rows.append({**common, "metric": "peak GiB", "value": f"{peaks[name]:.1f}"})
        for optimizer, called in (("muon", "Muon"), ("adamw8bit", "adamw8bit")):
            if name.endswith(f" {optimizer}"):
                share = 100 * (1 - rates[name] / rates[name.removesuffix(f" {optimizer}")])
                print(f"{name}: {share:.1f} % of the step are {called}'s, beyond AdamW's")
                metric = f"{called}'s share of a step beyond AdamW's, %"
                rows.append({**common, "metric": metric, "value": f"{share:.1f}"})
    ours = max((name for name in rates if "bf16 kernels" in name), key=lambda name: rates[name], default=None)
    if ours and plain:
        headline = {"bench": "train", "case": f"{args.model} bf16 {args.image_size}px", "metric": "img/s"}
        against = {"baseline": plain, "baseline_value": f"{rates[plain]:.1f}"}
        rows.append({**headline, "value": f"{rates[ours]:.1f}", **against})
    if args.results:
        append(rows, args.results, gpus=mesh.world_size)


if __name__ == "__main__":
    main()
