"""One picture or clip on several GPUs against one: sampler, noise, guidance and VAE included.

    torchrun --standalone --nproc_per_node=2 benchmarks/bench_sampling_parallel.py [--model vDiT-XL/222]
        [--num_frames 16] [--image_size 256] [--steps 50] [--sequence_parallel_size 1] [--results FILE]

The ranks share a sample as sample.py's do: with two groups of --sequence_parallel_size, the halves of guidance; with
one, the sequence alone. Rank 0 draws by itself, then all of them together, in turns; medians count. Model and VAE (of
Stable Diffusion's shape, a frame at a time for clips) have random weights.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run as a file from elsewhere

import torch
import torch.distributed as dist

from benchmarks.bench_sampling import SEED, Bench
from benchmarks.bench_sampling_files import make_codec
from benchmarks.results import append
from opendit.encoders.video_vae import FrameCodec
from opendit.parallel.guidance import Replica, SharedBatch, make_replicas
from opendit.parallel.mesh import close_mesh, init_mesh
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.sampling.output_pipeline import OutputPipeline
from opendit.sampling.sampling_engine import SamplingEngine


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="vDiT-XL/222")
    parser.add_argument("--num_frames", type=int, default=16, help="of latents; 0: a picture")
    parser.add_argument("--image_size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sampler", default="ddim")
    parser.add_argument("--cfg_scale", type=float, default=4.0)
    parser.add_argument("--sequence_parallel_size", type=int, default=1)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--vae_narrower", type=int, default=1, help="divides the VAE's widths, for a CPU")
    parser.add_argument("--results", help="a file to append rows to, as results.csv")
    args = parser.parse_args(argv)
    args.seconds = float("inf")
    torch.set_float32_matmul_precision("highest")
    mesh = init_mesh(sequence_parallel=args.sequence_parallel_size)
    bench = Bench(args)
    bench.device = mesh.device
    cfg_parallel = mesh.world_size == 2 * mesh.sp_size
    replica = make_replicas(mesh, cfg_parallel)
    codec = make_codec(args, mesh.device)
    codec = FrameCodec(codec) if args.num_frames else codec
    c = bench.config
    strategy = sequence_parallel(mesh, "auto", Shape(c.tokens, c.hidden_size, c.num_heads, 1 if cfg_parallel else 2))
    alone, shared = bench.model(False), bench.model(False, strategy)
    around = (lambda model: SharedBatch(model, replica.halves)) if cfg_parallel else None
    engines = {
        "one GPU": SamplingEngine(alone, bench.objective, **bench.settings()),
        "all": SamplingEngine(shared, bench.objective, around=around, **bench.settings()),
    }
    single = Replica(0, 1, True, None)

    def seconds(name: str) -> float:
        y, index = bench.batch(1)
        dist.barrier()
        bench.synchronize()
        start, found = time.perf_counter(), []
        if name == "all" or mesh.is_main:
            mine = replica if name == "all" else single
            with OutputPipeline(codec, mesh.device, lambda *part: found.append(part), mine.ranks, mine.leads) as out:
                out.put(index.cpu(), engines[name].sample(y, bench.null, index, SEED))
        bench.synchronize()
        return time.perf_counter() - start

    times = {name: [] for name in engines}
    for trial in range(args.trials + 2):
        for name in engines:
            taken = seconds(name)
            if trial > 1:  # compiled, and recorded
                times[name].append(taken)
    one, all_ranks = (statistics.median(times[name]) for name in engines)
    if mesh.is_main:
        how = f"guidance's halves x sp {mesh.sp_size}" if cfg_parallel else f"sp {mesh.sp_size}"
        what = f"{args.num_frames} frames " if args.num_frames else ""
        case = f"{args.model} {what}{args.image_size}px {args.steps} steps with VAE, {how}"
        print(f"{case}: one {1e3 * one:.1f} ms, all {1e3 * all_ranks:.1f} ms, {one / all_ranks:.3f} x; "
              f"steps {engines['all'].note}", flush=True)  # fmt: skip
        if args.results:
            row = {"bench": "sampling_parallel", "case": case, "metric": "ms", "value": f"{1e3 * all_ranks:.1f}"}
            row |= {"baseline": "one GPU", "baseline_value": f"{1e3 * one:.1f}"}
            append([row], args.results, gpus=mesh.world_size)
    close_mesh()


if __name__ == "__main__":
    main()
