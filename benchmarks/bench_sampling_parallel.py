"""Compare sampling one picture or clip on several GPUs with one GPU, including sampler, noise, guidance and VAE.

    torchrun --standalone --nproc_per_node=2 benchmarks/bench_sampling_parallel.py [--model vDiT-XL/222]
        [--num_frames 16] [--image_size 256] [--steps 50] [--sequence_parallel_size 1] [--groups N] [--profile]
        [--results FILE]

The ranks share a sample as in sample.py. With two groups of --sequence_parallel_size ranks, each group computes one
half of guidance; a single group divides only the sequence. ``--groups`` makes Ulysses exchange a batch in that many
parts, which divide samples first, then heads. ``--profile`` prints the kernels that take rank 0 the most time. Rank 0
alone and all ranks together take turns, and medians are reported. The model and the VAE have random weights. The VAE
has Stable Diffusion's shape and decodes clips frame by frame. A public model, such as ``--model wan-1.3b``, is measured
at its published size without a VAE."""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench_public import SUBJECTS, caption_of
from benchmarks.bench_sampling import SEED, Bench
from benchmarks.bench_sampling_files import make_codec
from benchmarks.results import append
from opendit.config.components import SpeedFlags
from opendit.diffusion.objectives import FlowObjective
from opendit.encoders.video_vae import FrameCodec
from opendit.kernels.select import select_kernels
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import public_config
from opendit.parallel.collectives import SharedBatch
from opendit.parallel.mesh import Replica, close_mesh, init_mesh, make_replicas
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.sampling.output_pipeline import OutputPipeline
from opendit.sampling.sampling_engine import SamplingEngine


class PublicBench(Bench):
    """A public model: its network, and a caption that also serves as the empty one."""

    def __init__(self, args, device: torch.device):
        self.args, self.objective, self.device = args, FlowObjective(3.0), device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        subject = SUBJECTS[args.model]
        self.config = public_config(subject.family, subject.values, subject.size, subject.tokens)
        self.null = caption_of(subject, self.config, device, self.dtype)
        self.frames = subject.size[0] if len(subject.size) == 3 else 0

    def model(self, fp8: bool, sequence=None):
        """Return the network with the fused kernels for sampling. sequence: how ranks share samples."""
        torch.manual_seed(SEED)
        with torch.device("meta"):
            model = PublicDiT(self.config)
        model = model.to_empty(device=self.device).to(self.dtype)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.02)
        speed = SpeedFlags(True, True, True, fp8=fp8)
        on = self.device, self.dtype, self.config.head_dim, self.config.tokens
        kernels = select_kernels(speed, *on, inference=True, shared=sequence is not None)
        model.eval().requires_grad_(False)
        return model.place(self.device, self.dtype).use(ops=kernels.ops, attend=kernels.attend, sequence=sequence)

    def batch(self, size: int):
        return self.null, torch.arange(size, device=self.device)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="vDiT-XL/222")
    parser.add_argument("--num_frames", type=int, default=16, help="of latents; 0: a picture")
    parser.add_argument("--image_size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sampler", default="ddim")
    parser.add_argument("--cfg_scale", type=float, default=4.0)
    parser.add_argument("--sequence_parallel_size", type=int, default=1)
    parser.add_argument("--groups", type=int, help="of samples, then heads, for Ulysses; default: by cost model")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print kernel times, of the GPU or else the CPU")
    parser.add_argument("--vae_narrower", type=int, default=1, help="divides the VAE's widths, for a CPU")
    parser.add_argument("--results", help="a file to append rows to, as results.csv")
    args = parser.parse_args(argv)
    args.seconds = float("inf")
    torch.set_float32_matmul_precision("highest")
    mesh = init_mesh(sequence_parallel=args.sequence_parallel_size)
    public = args.model in SUBJECTS
    bench = PublicBench(args, mesh.device) if public else Bench(args)
    bench.device = mesh.device
    cfg_parallel = mesh.world_size == 2 * mesh.sp_size
    replica = make_replicas(mesh, cfg_parallel)
    codec = None if public else make_codec(args, mesh.device)
    codec = FrameCodec(codec) if codec is not None and args.num_frames else codec
    c = bench.config
    sizes = c.tokens, c.hidden_size, c.num_heads, 1 if cfg_parallel else 2
    kinds = {"types": c.sequence_types, "plain": c.plain_projections} if public else {}
    kind = "auto" if args.groups is None else "ulysses"
    strategy = sequence_parallel(mesh, kind, Shape(*sizes, **kinds), groups=args.groups, sampling=True)
    alone, shared = bench.model(False), bench.model(False, strategy)
    halves = replica.halves
    around = None if halves is None else lambda model: SharedBatch(model, halves)
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
        if codec is None and (name == "all" or mesh.is_main):
            engines[name].sample(y, bench.null, index, SEED)
        elif codec is not None and (name == "all" or mesh.is_main):
            mine = replica if name == "all" else single
            with OutputPipeline(codec, mesh.device, lambda *part: found.append(part), mine.ranks, mine.leads) as out:
                out.put(index.cpu(), engines[name].sample(y, bench.null, index, SEED))
        bench.synchronize()
        return time.perf_counter() - start

    times = {name: [] for name in engines}
    for trial in range(args.trials + 2):
        for name in engines:
            taken = seconds(name)
            if trial > 1:  # after compiling and recording
                times[name].append(taken)
    for name in engines if args.profile else ():
        device = ProfilerActivity.CUDA if mesh.device.type == "cuda" else ProfilerActivity.CPU
        with profile(activities=[device]) as profiled:
            seconds(name)
        if mesh.is_main:
            by = f"self_{device.name.lower()}_time_total"
            print(name, profiled.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=80), sep="\n")
    one, all_ranks = (statistics.median(times[name]) for name in engines)
    if mesh.is_main:
        how = f"guidance's halves x sp {mesh.sp_size}" if cfg_parallel else f"sp {mesh.sp_size}"
        if public:
            case = f"{args.model} {SUBJECTS[args.model].where} {args.steps} steps, {how}"
        else:
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
