"""Measure training steps, sampling steps and memory of models whose sequences are split over 1, 2, 4, ... ranks.

    torchrun --standalone --nproc_per_node=4 benchmarks/bench_sequence_model.py [--results FILE]
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_sequence_model.py --small                       (CPUs)

Groups of every size do the same work (strong scaling). The speed-up is one rank's time divided by the group's. A
training step is forward, backward, the sum of the gradients over the group and AdamW, with bf16 weights. A sampling
step is the forward pass of both halves of guidance. A clip's latency is 250 such steps.

The longest clip that fits in training is found by extrapolation, because memory is linear in the length. In these
trials attention stores as much as real attention but computes nothing, because a real step would take minutes.
"""

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bench_sequence import timed
from benchmarks.results import append
from opendit.config.components import SpeedFlags
from opendit.config.parallel_sizes import environment_world_size
from opendit.kernels.select import select_kernels
from opendit.models.variants import VDiT, VDiTConfig
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape

PATCH, CHANNELS, STEPS_OF_A_CLIP = (2, 2, 2), 4, 250


@dataclass(frozen=True)
class Case:
    name: str
    size: tuple[int, int, int]  # frames, height and width of the latent
    hidden: int
    depth: int
    heads: int
    samples: int = 1

    @property
    def config(self) -> VDiTConfig:
        return VDiTConfig(self.size, PATCH, CHANNELS, self.hidden, self.depth, self.heads, num_classes=10)


XL, SEVEN_B = (1152, 28, 16), (3072, 4, 24)
TRAIN = [Case("vDiT-XL/222 64k", (128, 64, 64), *XL), Case("7B-like, 4 layers, 64k", (128, 64, 64), *SEVEN_B)]
SAMPLE = [Case("vDiT-XL/222 64 frames 512px", (64, 64, 64), *XL, samples=2)]
LONGEST = Case("vDiT-XL/222 512px", (16, 64, 64), *XL)
SMALL = Case("small", (4, 8, 8), 48, 2, 4)


class _Keeps(torch.autograd.Function):
    """Replacement for attention that uses as much memory, forward and backward, but computes nothing."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor):
        seen, lse = v.clone(), q.new_zeros(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, seen, lse)
        return seen

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.clone(), grad.clone(), grad.clone()


class Run:
    """A case's model, the same on every rank. The ranks of ``mesh`` share its sequences."""

    def __init__(self, mesh: Mesh, case: Case, *, attend=None):
        self.mesh, config, device = mesh, case.config, mesh.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        with device:
            self.model = VDiT(config).place(device, dtype)
            self.x = torch.randn(case.samples, CHANNELS, *case.size)
            self.t, self.y = torch.full((case.samples,), 500), torch.zeros(case.samples, dtype=torch.long)
        kernels = select_kernels(
            SpeedFlags(True, True, True), device, dtype, case.hidden // case.heads, config.tokens
        )  # fmt: skip
        shape = Shape(config.tokens, case.hidden, case.heads, case.samples, dtype.itemsize)
        sequence = sequence_parallel(mesh, "auto", shape)
        self.plan = str(sequence.plan) if sequence else "one rank"
        self.model.use(ops=kernels.ops, attend=attend or kernels.attend, sequence=sequence)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def forward(self) -> None:
        with torch.inference_mode():
            self.model(self.x, self.t, self.y)

    def train(self) -> None:
        self.model(self.x, self.t, self.y).float().square().mean().backward()
        if self.mesh.sp_group is not None:
            grads = [cast(Tensor, p.grad) for p in self.model.parameters()]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=self.mesh.sp_group)
            parts = flat.div_(self.mesh.sp_size).split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def activations(self) -> float:
        """Return a training step's peak GiB in addition to the weights and AdamW's state."""
        self.train()
        if self.mesh.device.type != "cuda":
            return 0.0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.train()
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def free(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()


def scaling(meshes: list[Mesh], case: Case, kind: str, repeats: int) -> list[dict]:
    """Return rows with a step's median seconds for every group size."""
    rows, alone = [], None
    for mesh in meshes:
        run = Run(mesh, case)
        step = getattr(run, kind)
        step()
        seconds = statistics.median(timed(mesh, step, 1) for _ in range(repeats))
        memory = run.activations() if kind == "train" else 0.0
        alone = alone or seconds
        if mesh.is_main:
            more = f", {memory:.1f} GiB of activations" if memory else ""
            more += f", {seconds * STEPS_OF_A_CLIP:.1f} s a clip" if case in SAMPLE else ""
            print(f"{case.name}, {kind}, P={mesh.sp_size}: {seconds * 1e3:.1f} ms, {alone / seconds:.2f} x{more}")
            print(f"    {run.plan}", flush=True)
        name = f"{case.name} P {mesh.sp_size}"
        fields = dict(bench="sequence model", case=name, baseline="P 1", baseline_value=f"{alone * 1e3:.2f}")
        rows.append(dict(metric=f"{kind} ms", value=f"{seconds * 1e3:.2f}", **fields))
        if memory:
            rows.append(dict(bench="sequence model", case=name, metric="activations GiB", value=f"{memory:.2f}"))
        del run, step
        free(mesh)
    return rows


def with_frames(case: Case, frames: int) -> Case:
    return Case(case.name, (frames, *case.size[1:]), case.hidden, case.depth, case.heads, case.samples)


def next_try(used: dict[int, float], limit: float) -> int:
    """Return the number of frames to try next. The search is over if this number has been tried before.

    Memory is assumed to be linear between the longest clip that fits and the next longer one. While all clips fit, the
    two longest are used, and the result is at most twice the longest.

    Args:
        used: frames -> GiB of the clips tried so far.

    Raises:
        ValueError: no clip fits.
    """
    fit = sorted(frames for frames, gib in used.items() if gib <= limit)
    if not fit:
        raise ValueError(f"{min(used)} frames take {used[min(used)]:.1f} GiB, more than {limit}: take a larger --limit")
    above = min((frames for frames, gib in used.items() if gib > limit and frames > fit[-1]), default=None)
    if above is None:
        few, more = fit[-2:] if len(fit) > 1 else (0, fit[-1])
        slope = (used[more] - used.get(few, 0.0)) / (more - few)
        most = more + (limit - used[more]) / slope if slope > 0 else math.inf
        return int(min(most, 2 * more)) // 2 * 2
    few, more = fit[-1], above
    frames = int(few + (limit - used[few]) * (more - few) / (used[more] - used[few])) // 2 * 2
    return frames if frames > few or more - few <= 2 else (few + more) // 4 * 2


def longest(mesh: Mesh, case: Case, limit: float) -> list[dict]:
    """Return a row with the largest number of frames that train within ``limit`` GiB, see the module's docstring."""

    def peak(frames: int) -> float:
        run = Run(mesh, with_frames(case, frames), attend=_Keeps.apply)
        for _ in range(2):
            run.train()
        free_now, total = torch.cuda.mem_get_info()  # includes torch's cache and other ranks' buffers
        found = torch.tensor((total - free_now) / 2**30, device=mesh.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        del run
        free(mesh)
        return found.item()

    used = {frames: peak(frames) for frames in (case.size[0], 2 * case.size[0])}
    while (frames := next_try(used, limit)) not in used:
        used[frames] = peak(frames)
    frames = max(frames for frames, gib in used.items() if gib <= limit)
    if mesh.is_main:
        print(f"{case.name}, P={mesh.sp_size}: {frames} frames train in {used[frames]:.1f} GiB", flush=True)
    name = f"{case.name} P {mesh.sp_size}"
    return [dict(bench="sequence model", case=name, metric="longest clip, frames", value=str(frames))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=("train", "forward", "sample", "longest"), help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=132.0, help="GiB of a GPU that a clip may take")
    parser.add_argument("--small", action="store_true", help="one tiny model")
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args()
    world = environment_world_size()
    meshes = [init_mesh(sequence_parallel=p) for p in (1, 2, 4, 8) if p <= world and world % p == 0]
    wanted = args.only or ("train", "forward", "sample", "longest")
    work = [(case, "train") for case in TRAIN if "train" in wanted]
    work += [(case, "forward") for case in TRAIN if "forward" in wanted]
    work += [(case, "forward") for case in SAMPLE if "sample" in wanted]
    if args.small:
        work = [(SMALL, kind) for kind in ("train", "forward")]
    parts = [partial(scaling, meshes, case, kind, args.repeats) for case, kind in work]
    if "longest" in wanted and not args.small and meshes[0].device.type == "cuda":
        parts += [partial(longest, mesh, LONGEST, args.limit) for mesh in meshes]
    for part in parts:
        rows = part()
        if meshes[0].is_main and args.results:
            append(rows, args.results, gpus=world)  # after each part, so that an interrupted run keeps its results
    close_mesh()


if __name__ == "__main__":
    main()
