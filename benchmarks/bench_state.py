"""Measure what state costs: EMA's share of a step and of memory, and the times of saving, writing and resuming.

    python benchmarks/bench_state.py --model DiT-XL/2 --batch_size 128 [--results FILE]
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_state.py --batch_size 32 --plugin ddp --full_ema
    python benchmarks/bench_state.py --model DiT-Ti/2 --image_size 64 --batch_size 4 --precision fp32      (a CPU)

--full_ema keeps the complete average on every rank, as plain training loops do, to compare peak memory.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from torch import Tensor

from benchmarks.bench_train import Latents
from benchmarks.results import append
from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import find_checkpoint, load_checkpoint
from opendit.checkpoint.save import Checkpoints
from opendit.config.components import SpeedFlags
from opendit.config.names import PLUGINS
from opendit.kernels.select import select_kernels
from opendit.models.dit import DiT
from opendit.models.zoo import model_config
from opendit.parallel.engines import PRECISIONS, Engine, build_engine
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.training.monitor import resident_gib
from opendit.training.runners import build_runner
from train import EagerPasses


class FullEMA:
    """Average of all weights on every rank, for engines with whole weights (ddp)."""

    def __init__(self, engine: Engine, decay: float):
        self.weights, self.decay = list(engine.module.parameters()), decay
        self.averages = [p.detach().float().clone() for p in self.weights]

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        torch._foreach_lerp_(self.averages, [*self.weights], 1.0 - self.decay)

    def bytes_per_rank(self) -> int:
        return sum(a.numel() * a.element_size() for a in self.averages)


def seconds(mesh: Mesh, work) -> float:
    """Return the wall time of ``work()``, until all ranks and their devices have finished."""
    cuda = mesh.device.type == "cuda"
    mesh.barrier()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    mesh.barrier()
    return time.perf_counter() - start


def build(args, config, mesh: Mesh) -> Engine:
    with mesh.device:
        model = DiT(config)
    cuda = mesh.device.type == "cuda"
    speed = SpeedFlags(cuda, cuda, cuda)
    head_dim = config.hidden_size // config.num_heads
    kernels = select_kernels(speed, mesh.device, PRECISIONS[args.precision], head_dim, config.tokens)
    model.use(ops=kernels.ops, attend=kernels.attend)
    return build_engine(model.train(), mesh, plugin=args.plugin, precision=args.precision)


def measure(args, config, mesh: Mesh, folder: Path) -> dict[str, float]:
    """Return the figures, by metric."""
    cuda = mesh.device.type == "cuda"
    data, engine = Latents(config, args.batch_size, mesh), build(args, config, mesh)
    runner, ema = build_runner(EagerPasses(engine, data.objective)), None

    def step() -> None:
        result = runner.train_step([data.micro_batch(0)])
        if ema is not None:
            ema.update(result.finite)

    def median_step() -> float:
        for _ in range(args.warmup):
            step()
        return statistics.median(seconds(mesh, step) for _ in range(args.steps))

    without = median_step()
    ema = FullEMA(engine, 0.9999) if args.full_ema else EMA(engine, 0.9999)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with_ema = median_step()
    figures = {
        "step without EMA ms": without * 1e3,
        "step ms": with_ema * 1e3,
        "EMA share of a step %": 100 * (with_ema - without) / with_ema,
        "EMA MiB per rank": ema.bytes_per_rank() / 2**20,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else resident_gib(),
    }
    if isinstance(ema, FullEMA):
        return figures
    info = {"model": args.model, "config": config.to_dict()}
    with Checkpoints(folder, engine, ema, info, keep=1) as checkpoints:
        stalls, writes = [], []
        for number in range(1, args.saves + 1):
            checkpoints.save({"step": number, "epoch": 0, "skipped": 0, "fingerprint": {}})
            stalls.append(checkpoints.stall_s)
            during = seconds(mesh, step)  # a step while the files are being written
            checkpoints.wait()
            writes.append(checkpoints.write_s)
    if checkpoints.failures:
        raise SystemExit("; ".join(checkpoints.failures))
    newest, found = cast(Path, checkpoints.newest), []
    size = sum(path.stat().st_size for path in newest.iterdir())
    figures |= {
        "save stall s": max(stalls),
        "save write s": statistics.median(writes),
        "step ms while writing": during * 1e3,
        "checkpoint GiB": size / 2**30,
        "host buffer GiB of rank 0": checkpoints.host_bytes / 2**30,
        "verify s": seconds(mesh, lambda: found.append(find_checkpoint(str(newest), "", args.model, mesh))),
        "load s": seconds(mesh, lambda: load_checkpoint(found[0], engine, ema)),
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="DiT-XL/2")
    parser.add_argument("--image_size", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=128, help="per rank")
    parser.add_argument("--plugin", default="zero2", choices=tuple(PLUGINS))
    parser.add_argument("--precision", default="bf16", choices=tuple(PRECISIONS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--full_ema", action="store_true", help="with --plugin ddp: the unsharded average, no saves")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args()
    if args.full_ema and args.plugin != "ddp":
        raise SystemExit("--full_ema needs --plugin ddp, whose weights are whole and fp32 on every rank")
    mesh = init_mesh()
    torch.set_float32_matmul_precision("high")
    side = args.image_size // 8
    config = model_config(args.model, input_size=(side, side), in_channels=4, num_classes=1000)
    made = tempfile.mkdtemp(dir=args.folder) if mesh.is_main else None
    folder = Path(mesh.broadcast_object(made))
    try:
        figures = measure(args, config, mesh, folder)
    finally:
        if mesh.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    if mesh.is_main:
        ema = "full EMA" if args.full_ema else "sharded EMA"
        case = f"{args.model} {args.plugin} {args.precision} {args.image_size}px batch {args.batch_size} {ema}"
        print(f"{case}, {mesh.world_size} rank(s)")
        for metric, value in figures.items():
            print(f"  {metric:26s} {value:10.3f}")
        rows = [dict(bench="state", case=case, metric=m, value=f"{v:.3f}") for m, v in figures.items()]
        if args.results:
            append(rows, args.results, gpus=mesh.world_size)
    close_mesh()


if __name__ == "__main__":
    main()
