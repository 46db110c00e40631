"""Measure how long pipeline ranks wait for each other in a training step's forward and backward passes.

    torchrun --standalone --nproc_per_node=2 benchmarks/bench_pipeline.py [--results FILE]
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_pipeline.py --hidden 48 --heads 4 --depth 4 \\
        --latents 2 8 8                                                                                         (CPUs)

"Alone" is the time in which the slowest rank does its own passes without messages, on meaningless numbers. The result
is the time alone divided by the step's time; 1 means that ranks never wait. With P ranks, M micro-batches and V stages
per rank, a schedule can reach at most M / (M + (P - 1) / V). The step includes summing the condition's gradients, but
not the optimizer's step. Every trial of a step runs between two trials alone, and the median ratio counts."""

import argparse
import contextlib
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from torch import Tensor

from benchmarks.bench_sequence import timed
from benchmarks.results import append
from opendit.config.components import SpeedFlags
from opendit.config.names import PIPELINE_SCHEDULES
from opendit.config.parallel_sizes import ParallelDims, environment_world_size
from opendit.diffusion.objectives import FlowObjective
from opendit.kernels.select import select_kernels
from opendit.models.variants import VDiTConfig
from opendit.models.zoo import empty_model
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import Engine
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.parallel.pipeline import Links, Message, chunks_of, mesh_stages, on_every_stage
from opendit.parallel.tensor import ReplicatedGradients, allocate
from opendit.training.micro_batch import MicroBatch
from opendit.training.runners import PipelineRunner


class NoLinks:
    """Replacement for ``Links`` in which every message is available at once and contains meaningless numbers."""

    def __init__(self, mesh: Mesh, tokens: Tensor):
        self.rank, self.ranks, self._tokens = mesh.pp_rank, mesh.pp_size, tokens

    def known(self, message: Message, key: tuple) -> bool:
        return True

    def post(self, message: Message, key: tuple):
        return self._tokens.detach(), self

    def wait(self) -> None:
        pass

    def send(self, message: Message, tensor: Tensor, chunk: int, key: tuple) -> None:
        pass

    def finish(self) -> None:
        pass


@dataclass
class Done:
    loss: Tensor | None = None


class PassesAlone:
    """Minimal engine for a runner. Its step only sums the condition's gradients."""

    def __init__(self, module, mesh: Mesh):
        self.module, self.mesh = module, mesh
        names = [name for name, _ in module.named_parameters()]
        self._replicated = ReplicatedGradients(mesh, names, (), on_every_stage(module, names))
        self.together = True

    def micro_batch(self, last: bool):
        return contextlib.nullcontext()

    def forward(self, *args, **kwargs) -> Tensor:
        return self.module(*args, **kwargs)

    def backward(self, loss, gradient=None) -> None:
        torch.autograd.backward(loss, gradient)

    def step(self) -> Done:
        if self.together:
            self._replicated.sum([parameter.grad for parameter in self.module.parameters()])
        self.module.zero_grad(set_to_none=True)
        return Done()


class Step:
    """The passes of a step with one schedule, with or without messages."""

    def __init__(self, mesh: Mesh, schedule: str, args: argparse.Namespace, dtype: torch.dtype):
        size, shape = tuple(args.latents), (args.hidden, args.depth, args.heads)
        config = VDiTConfig(size, (1, 2, 2), 4, *shape, num_classes=1000, learn_sigma=False)
        kernels = select_kernels(SpeedFlags(True, True, True), mesh.device, dtype, config.head_dim, config.tokens)
        with mesh.device:
            model = empty_model(config, parameters=False)
        stages = mesh_stages(mesh, config, schedule)
        assert stages is not None
        apply_parallel(model, ops=kernels.ops, attend=kernels.attend, stages=stages)
        allocate(model, mesh.device)
        model.place(mesh.device, dtype)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        self.described, self.tokens = stages.describe(), config.tokens
        self._engine = PassesAlone(model, mesh)
        engine = cast(Engine, self._engine)
        self._together = PipelineRunner(engine, FlowObjective(), args.micro_batches)
        made = torch.randn(args.samples, config.tokens, args.hidden, device=mesh.device, dtype=dtype)
        links = cast(Links, NoLinks(mesh, made))
        self._alone = PipelineRunner(engine, FlowObjective(), args.micro_batches, links=links)
        x, noise = torch.randn(2, args.samples, 4, *size, device=mesh.device)
        t = torch.rand(args.samples, device=mesh.device)
        y = torch.zeros(args.samples, dtype=torch.int64, device=mesh.device)
        self._given = [MicroBatch(x, t, noise, y)] * args.micro_batches

    def together(self) -> None:
        self._engine.together = True
        self._together.train_step(self._given)

    def alone(self) -> None:
        self._engine.together = False
        self._alone.passes(self._given)
        self._engine.step()


def measure(mesh: Mesh, step: Step, rounds: int) -> dict[str, float]:
    """Return the slowest rank's seconds alone, and the seconds of the step."""
    for work in (step.together, step.alone) * 2:  # compile kernels, create links, allocate memory
        timed(mesh, work, 1)
    alone, ratios = [timed(mesh, step.alone, 1)], []
    for _ in range(rounds):
        took = timed(mesh, step.together, 1)
        alone.append(timed(mesh, step.alone, 1))
        ratios.append(2 * took / sum(alone[-2:]))
    seconds = statistics.median(alone)
    return {"alone": seconds, "step": statistics.median(ratios) * seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--latents", type=int, nargs=3, default=[16, 32, 64], help="frames, height, width: 8,192 tokens"
    )
    parser.add_argument("--samples", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--depth", type=int, default=16, help="blocks; 32: vDiT-7B's")
    parser.add_argument("--micro_batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedules", nargs="+", choices=PIPELINE_SCHEDULES, default=list(PIPELINE_SCHEDULES))
    parser.add_argument("--results", help="append to this CSV")
    args = parser.parse_args()
    mesh = init_mesh(dims=ParallelDims(pp=environment_world_size()))
    dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    for schedule in args.schedules:
        step = Step(mesh, schedule, args, dtype)
        seconds = measure(mesh, step, args.rounds)
        if mesh.is_main:
            rows = report(mesh, schedule, args, step, seconds)
            if args.results:
                append(rows, args.results, gpus=mesh.world_size)
        del step
        if mesh.device.type == "cuda":
            torch.cuda.empty_cache()
    close_mesh()


def report(mesh: Mesh, schedule: str, args: argparse.Namespace, step: Step, seconds: dict[str, float]) -> list[dict]:
    count, waits = args.micro_batches, (mesh.pp_size - 1) / chunks_of(schedule)
    alone, together = seconds["alone"], seconds["step"]
    case = f"{args.hidden}/{args.heads} x {args.depth} N {step.tokens} B {args.samples} M {count} P {mesh.pp_size}"
    print(f"{case}: {step.described}", flush=True)
    print(f"  slowest rank alone {alone * 1e3:9.1f} ms   step {together * 1e3:9.1f} ms   {alone / together:.3f}, of at "
          f"most {count / (count + waits):.3f}", flush=True)  # fmt: skip
    return [
        dict(bench="pipeline", case=f"{case} {schedule}", metric="ms", value=f"{together * 1e3:.3f}",
             baseline="slowest rank alone", baseline_value=f"{alone * 1e3:.3f}", ratio=f"{alone / together:.4f}")
    ]  # fmt: skip


if __name__ == "__main__":
    main()
