"""Compare checkpoints with whole tensors and with shards: stall, write and load times, and host memory per rank.

    torchrun --standalone --nproc_per_node=4 benchmarks/bench_checkpoint.py [--formats sharded] [--results FILE] -- \\
        --plugin fsdp --model vDiT-7B/122 --use_video --data_path mock --mixed_precision bf16
    python benchmarks/bench_checkpoint.py -- --model DiT-Ti/2 --image_size 64 --batch_size 4          (a CPU)

Flags of train.py, such as the model and the plugin, follow ``--``. ``--blocks N`` keeps only N blocks of a model that
would not fit otherwise. No step is trained; the optimizer's moments are created before the first save.
"""

import argparse
import resource
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

from benchmarks.bench_state import seconds
from benchmarks.results import append
from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import find_checkpoint, load_checkpoint
from opendit.checkpoint.save import Checkpoints
from opendit.config.command_line import parse
from opendit.config.parallel_sizes import ParallelDims, environment_world_size
from opendit.config.train import TrainConfig
from opendit.parallel.engines import MOMENTS, Engine
from opendit.parallel.mesh import ControlGroup, Mesh, close_mesh, init_mesh
from opendit.training.build import build_model_and_engine
from opendit.training.prepare import prepare

GIB = 2**30
FORMATS = ("whole", "sharded")


def local_bytes(engine: Engine, ema: EMA) -> int:
    """Return the bytes of master weights, moments and averages on this rank."""
    numel = sum(engine.layout.local(name).numel for name in engine.shapes)
    return 4 * numel * (1 + len(MOMENTS) + len(ema.decays))


def measure(args, info: dict, engine: Engine, ema: EMA, mesh: Mesh, folder: Path, kind: str) -> dict[str, float]:
    """Return one format's figures, by metric. Each is the maximum over ranks."""
    stalls, writes = [], []
    with Checkpoints(folder, engine, ema, info, keep=1, sharded=kind == "sharded") as checkpoints:
        for step in range(1, args.saves + 1):
            mesh.barrier()
            checkpoints.save({"step": step, "epoch": 0, "skipped": 0, "fingerprint": {}})
            stalls.append(checkpoints.stall_s)
            checkpoints.wait()
            writes.append(checkpoints.write_s)
        host = checkpoints.host_bytes
    if checkpoints.failures:
        raise SystemExit("; ".join(checkpoints.failures))
    newest, found = cast(Path, checkpoints.newest), []
    figures = {
        "first stall s": stalls[0],
        "stall s": min(stalls),
        "write s": min(writes),
        "checkpoint GiB": sum(path.stat().st_size for path in newest.iterdir()) / GIB,
        "host buffer GiB, most of a rank": host / GIB,
        "host buffer / local state": host / max(1, local_bytes(engine, ema)),
        "verify s": seconds(mesh, lambda: found.append(find_checkpoint(str(newest), "", info["model"], mesh))),
        "load s": seconds(mesh, lambda: load_checkpoint(found[0], engine, ema)),
        "peak resident GiB of a rank": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
    }
    ranks = ControlGroup(mesh).gather(figures)
    return {metric: max(rank[metric] for rank in ranks) for metric in figures}


def main() -> None:
    argv = sys.argv[1:]
    own, train = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--blocks", type=int, help="of the model, instead of all of them")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args(own)
    flags = parse(TrainConfig, ["--data_path", "mock", *train])
    sizes = dict(sp=flags.sequence_parallel_size, dp_replicate=flags.data_parallel_replicate)
    mesh = init_mesh(dims=ParallelDims.fill(environment_world_size(), **sizes))
    made = tempfile.mkdtemp(dir=args.folder) if mesh.is_main else None
    folder = Path(mesh.broadcast_object(made))
    try:
        flags, notes = flags.resolve(mesh.world_size, mesh.device.type == "cuda")
        spec = prepare(replace(flags, outputs=str(folder / "outputs"), save=False), mesh, notes)
        if args.blocks:
            spec.model_config = replace(spec.model_config, depth=args.blocks)
        engine = build_model_and_engine(spec)
        ema = EMA(engine, flags.ema_decays)
        for name in engine.shapes:
            engine.moments(name)
        rows, weights = [], sum(parameter.numel() for parameter in engine.module.parameters())
        blocks = f" {args.blocks} blocks" if args.blocks else ""
        case = f"{flags.model}{blocks} {flags.plugin} {flags.mixed_precision}"
        for kind in args.formats:
            figures = measure(args, spec.info(), engine, ema, mesh, folder / kind, kind)
            if mesh.is_main:
                print(f"{case} {kind}, {mesh.world_size} rank(s), {weights:,} weights on rank 0")
                for metric, value in figures.items():
                    print(f"  {metric:34s} {value:10.3f}", flush=True)
                rows += [dict(bench="checkpoint", case=f"{case} {kind}", metric=m, value=f"{v:.3f}")
                         for m, v in figures.items()]  # fmt: skip
                shutil.rmtree(folder / kind, ignore_errors=True)
            mesh.barrier()
        if mesh.is_main and args.results:
            append(rows, args.results, gpus=mesh.world_size)
    finally:
        if mesh.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    close_mesh()


if __name__ == "__main__":
    main()
