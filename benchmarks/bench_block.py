"""Compare a public model's training block with its matrix products and attention alone, on one or several GPUs.

    python benchmarks/bench_block.py [--model wan-14b] [--size 24 60 104] [--rounds 5] [--results FILE]
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_block.py ...
    python benchmarks/bench_block.py --tiny

A block's time, forward and backward, is half the difference between the times of a three-block and a one-block network.
On one GPU the floor is also measured, the time of the block's products and attention alone with their gradients. The
networks and the floor take turns for --rounds rounds, and medians are reported. Several ranks split a sample's tokens
with Ulysses. Each rank holds all weights, and gradients are not summed over ranks."""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_public import SUBJECTS, caption_of, milliseconds, products_of, tiny
from benchmarks.random_folder import LAYERS, VALUES
from benchmarks.results import add_flags, record
from opendit.config.components import SpeedFlags
from opendit.config.parallel_sizes import environment_world_size
from opendit.kernels.select import select_kernels
from opendit.models.families.network import PublicDiT
from opendit.models.families.public_config import PublicConfig, public_config
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape

BLOCKS = 1, 3


class Network:
    """A network of ``count`` blocks on random latents. The ranks of ``mesh`` share the tokens."""

    def __init__(self, mesh: Mesh, name: str, size: tuple[int, ...], count: int, small: bool):
        known = "wan-1.3b" if name.startswith("wan") else name
        subject = tiny(known) if small else SUBJECTS[known]
        values = (subject.values if small else VALUES[name]) | {LAYERS.get(name, "num_layers"): count}
        self.config: PublicConfig = public_config(subject.family, values, size, subject.tokens)
        device = mesh.device
        self.dtype = dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        with device:
            self.model = PublicDiT(self.config).place(device, dtype)
            self.x = torch.randn(1, self.config.in_channels, *size)
            self.t = torch.full((1,), 500.0)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        self.y = caption_of(subject, self.config, device, dtype)
        switches = SpeedFlags(True, True, True) if device.type == "cuda" else SpeedFlags()
        kernels = select_kernels(switches, device, dtype, self.config.head_dim, self.config.tokens)
        sizes = self.config.tokens, self.config.hidden_size, self.config.num_heads
        shape = Shape(*sizes, 1, dtype.itemsize, ("ulysses",), plain=self.config.plain_projections)
        self.model.use(ops=kernels.ops, attend=kernels.attend, sequence=sequence_parallel(mesh, "auto", shape))
        self.attend = kernels.attend

    def step(self) -> None:
        """Run a forward and a backward pass."""
        self.model(self.x, self.t, self.y).float().square().mean().backward()
        self.model.zero_grad(set_to_none=True)


def floor_of(one: Network, more: Network, mesh: Mesh) -> Callable[[], None]:
    """Return a function that runs only one block's products and attention, with their gradients."""
    assert one.config.text is not None
    products, attentions = products_of(more.config, one.config.text.max_tokens)
    for found, less in zip((products, attentions), products_of(one.config, one.config.text.max_tokens), strict=True):
        found.subtract(less)
    device, dtype = mesh.device, one.dtype
    ready: list[tuple[Callable[..., Tensor], list[Tensor], Tensor]] = []

    def add(work: Callable[..., Tensor], shapes: list[tuple[int, ...]], result: tuple[int, ...]) -> None:
        inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
        ready.append((work, inputs, torch.randn(result, device=device, dtype=dtype)))

    for (rows, inner, outer), count in products.items():
        for _ in range(count // 2):
            add(F.linear, [(rows, inner), (outer, inner)], (rows, outer))
    for (queries, keys, heads, width), count in attentions.items():
        for _ in range(count // 2):
            shape = 1, heads, queries, width
            add(one.attend, [shape, (1, heads, keys, width), (1, heads, keys, width)], shape)

    def floor() -> None:
        for work, inputs, gradient in ready:
            torch.autograd.grad(work(*inputs), inputs, gradient)

    return floor


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="wan-14b", choices=VALUES)
    parser.add_argument("--size", type=int, nargs="+", default=[24, 60, 104], help="sides of the latents")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a small network of the same layout, to try this file")
    add_flags(parser)
    args = parser.parse_args(argv)
    mesh = init_mesh(sequence_parallel=environment_world_size())
    size = (3, 6, 10)[-len(args.size) :] if args.tiny else tuple(args.size)
    networks = [Network(mesh, args.model, size, count, args.tiny) for count in BLOCKS]
    ways: dict[str, Callable[[], None]] = {f"{n}": net.step for n, net in zip(BLOCKS, networks, strict=True)}
    if mesh.world_size == 1:
        one, more = networks
        ways["floor"] = floor_of(one, more, mesh)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, work in ways.items():
            seconds = milliseconds(work, mesh.device)
            if number:
                times[name].append(seconds)
    found = {name: statistics.median(each) for name, each in times.items()}
    if mesh.is_main:
        report(args, networks[0].config, mesh, found)
    close_mesh()


def report(args: Any, config: PublicConfig, mesh: Mesh, found: dict[str, float]) -> None:
    """Print the block's time and append it to the results."""
    block = (found[str(BLOCKS[1])] - found[str(BLOCKS[0])]) / (BLOCKS[1] - BLOCKS[0])
    case = f"{args.model} block, {config.tokens} tokens, forward and backward"
    case += f", {mesh.world_size} ranks" if mesh.world_size > 1 else ""
    figures = {"block": block} | ({"floor": found["floor"]} if "floor" in found else {})
    print(f"{case}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in figures.items()))
    row = {"bench": "bench_block", "case": case, "metric": "ms", "value": f"{block:.2f}"}
    if "floor" in found:
        row |= {"baseline": "products and attention alone", "baseline_value": f"{found['floor']:.2f}"}
    record([row], args)


if __name__ == "__main__":
    main()
