"""Compare vDiT-XL training steps with and without packs, on pictures and clips of many sizes.

    python benchmarks/bench_packed_training.py [--mixes mix lognormal] [--captions] [--record]

Steps on random latents include noise, forward, backward, clipping, optimizer and average. All steps train on the same
number of tokens, in one of these ways:

    equal      only clips of 8,192 tokens, which need no packing: the reference for executed TFLOP/s
    packs      the mix, packed as in training; the lengths change in every step
    buckets    micro-batches of one size, each with the same number of tokens (``--bucket_tokens``)
    by size    micro-batches of one size, each with the same number of samples (``--batch_size``): as many as fit into a
               step if they are the longest
    padded     every sample padded to the longest length

"mix" has 4 x 8,192 + 4 x 4,096 + 8 x 1,024 + 32 x 256 tokens. "lognormal" draws multiples of 256 tokens up to 32,768,
with a median of 2,048 and a sigma of log 2.5. For micro-batches of one size, the time per token is the mean over sizes,
weighted by how often each size is drawn."""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_train import SEED, engine_step, measure
from benchmarks.results import add_flags, record
from opendit.config.components import SpeedFlags
from opendit.data.packs import PackSchedule
from opendit.diffusion.objectives import DDPMObjective
from opendit.diffusion.random import Stream, normal
from opendit.kernels.select import select_kernels
from opendit.models.conditioning import Condition, TextCondition, TextConfig
from opendit.models.dit import DiTConfig
from opendit.models.zoo import model_config
from opendit.parallel.mesh import Mesh, close_mesh, init_mesh
from opendit.training.micro_batch import MicroBatch, PackedMicroBatch, Packing
from opendit.training.run import TrainingFlops

SAMPLES = 20_000  # lengths drawn from a mix
PACK, EQUAL = 256, 32  # lengths of a pack and of an equal clip, in units of the smallest picture
WARMUP = 6


def mix(random: np.random.Generator) -> np.ndarray:
    return random.choice(np.repeat((32, 16, 4, 1), (4, 4, 8, 32)), SAMPLES)


def lognormal(random: np.random.Generator) -> np.ndarray:
    return np.clip(np.round(random.lognormal(np.log(8), np.log(2.5), SAMPLES)), 1, 128).astype(np.int64)


MIXES = {"mix": mix, "lognormal": lognormal}  # lengths in units of the smallest picture


def latents_size(tokens: int, place: int, patch: tuple[int, ...]) -> tuple[int, ...]:
    """Return a latent size (frames, rows, columns) with ``tokens`` tokens. Frames have one of two sizes.

    place: patches along each side of the smallest picture."""
    side = 2 * place if tokens % (4 * place**2) == 0 else place
    grid = (tokens // side**2, side, side)
    return tuple(n * p for n, p in zip(grid, patch, strict=True))


class Samples:
    """Micro-batches of random latents, with the randomness of train.py."""

    def __init__(self, config: DiTConfig, device: torch.device, place: int):
        self.config, self.device, self.objective = config, device, DDPMObjective()
        self.place, self.capacity = place, PACK * place**2
        self.packing = Packing(config.patch, self.capacity, 1)
        self._generator = torch.Generator(device).manual_seed(SEED)

    def condition(self, count: int) -> Condition:
        if self.config.text is None:
            return torch.arange(count, device=self.device) % cast(int, self.config.num_classes)
        length, width = self.config.text.max_tokens, self.config.text.width
        tokens = torch.randn(count, length, width, device=self.device, generator=self._generator)
        mask = torch.arange(length, device=self.device) < torch.randint(8, length, (count, 1), device=self.device)
        return TextCondition(tokens, mask, tokens.mean(dim=1))

    def latents(self, count: int, tokens: int, step: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return (latents, noise), each (count, C, ...), for the step's samples from index ``first`` on."""
        shape = (self.config.in_channels, *latents_size(tokens, self.place, self.config.patch))
        index = torch.arange(first, first + count, device=self.device)
        found = torch.randn((count, *shape), device=self.device, generator=self._generator)
        return found, normal(SEED, step, index, Stream.NOISE, shape)

    def of_one_size(self, count: int, tokens: int, step: int) -> MicroBatch:
        x0, noise = self.latents(count, tokens, step)
        t = self.objective.times(SEED, step, torch.arange(count, device=self.device))
        return MicroBatch(x0, t, noise, self.condition(count))

    def pack(self, lengths: list[int], step: int) -> PackedMicroBatch:
        sizes, counts = (found.tolist() for found in np.unique(lengths, return_counts=True))
        groups = [*zip(sizes, counts, strict=True)][::-1]
        parts = [self.latents(count, tokens, step, 1000 * i) for i, (tokens, count) in enumerate(groups)]
        x0, noise = zip(*parts, strict=True)
        t = self.objective.times(SEED, step, torch.arange(len(lengths), device=self.device))
        segments = self.packing.segments(tuple(x.shape[2:]) for x in x0 for _ in x)
        shares = self.packing.shares(len(lengths), len(lengths)).to(self.device)
        found = self.packing.patches(x0), t, self.packing.patches(noise)
        return PackedMicroBatch(*found, self.condition(len(lengths)), segments, shares)


class Work:
    """Source of micro-batches for ``engine_step``. It counts the tokens and FLOPs after the warm-up.

    make: returns (a step's micro-batch, how many of its tokens are not padding)."""

    def __init__(self, samples: Samples, make: Callable[[int], tuple[MicroBatch | PackedMicroBatch, int]]):
        self.objective, self._make, self._flops = samples.objective, make, TrainingFlops(samples.config)
        self.tokens, self.flops = 0, 0.0

    def micro_batch(self, step: int) -> MicroBatch | PackedMicroBatch:
        found, tokens = self._make(step)
        if step >= WARMUP:
            self.tokens += tokens
            self.flops += self._flops.of(found)
        return found


def rates(args, mesh: Mesh, samples: Samples, make, steps: int) -> tuple[float, float]:
    """Return (tokens/s, executed TFLOP/s)."""
    config = samples.config
    speed = SpeedFlags(True, True, True) if mesh.device.type == "cuda" else SpeedFlags()
    kernels = select_kernels(speed, mesh.device, torch.bfloat16, config.head_dim, EQUAL * args.place**2, packs=True)
    settings = SimpleNamespace(grad_checkpoint=False)
    work = Work(samples, make)
    seconds, peak = measure(
        lambda: engine_step(
            settings, config, mesh, work, "zero2", "bf16", kernels, recompute=args.recompute, varlen=kernels.varlen
        ),
        steps,
        WARMUP,
        mesh,
    )
    total = sum(seconds) * steps / len(seconds)
    print(f"    {total / steps * 1e3:7.1f} ms a step, {peak:5.1f} GiB", flush=True)
    return work.tokens / total, work.flops / total / 1e12


def packs_of(lengths: np.ndarray, args, samples: Samples) -> Callable:
    schedule = PackSchedule(lengths, samples.capacity, 1, SEED, attention=6.0 * samples.config.hidden_size)

    def make(step: int):
        drawn = lengths[schedule.rows(step)].tolist()
        return samples.pack(drawn, step), sum(drawn)

    return make


def by_size(args, mesh, samples, shares: dict[int, float], count: Callable[[int], int]) -> tuple[float, float]:
    """Measure micro-batches of ``count(length)`` samples with one length. shares: length -> share of the samples."""
    seconds = flops = 0.0
    for tokens, share in shares.items():
        number = count(tokens)
        made = rates(args, mesh, samples, lambda step: (samples.of_one_size(number, tokens, step), number * tokens), 4)  # noqa: B023
        seconds += share * tokens / made[0]
        flops += share * tokens / made[0] * made[1]
    return sum(share * tokens for tokens, share in shares.items()) / seconds, flops / seconds


def ways(args, mesh: Mesh, samples: Samples, mix: str) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield (way, (tokens/s without padding, executed TFLOP/s)) for each way."""
    lengths = MIXES[mix](np.random.default_rng(0)) * args.place**2
    longest, equal = int(lengths.max()), EQUAL * args.place**2

    def equal_samples(tokens: int):
        number = samples.capacity // tokens
        return rates(
            args, mesh, samples, lambda step: (samples.of_one_size(number, tokens, step), number * tokens), args.steps
        )

    yield "equal", equal_samples(equal)
    yield "packs", rates(args, mesh, samples, packs_of(lengths, args, samples), args.steps)
    yield "equal again", equal_samples(equal)
    tokens_a_second, tflops = equal_samples(longest) if longest != equal else (0.0, 0.0)
    if tokens_a_second:
        yield "padded", (tokens_a_second * float(lengths.mean()) / longest, tflops)
    if mix == "mix":  # the other mix has too many sizes
        sizes, counts = np.unique(lengths, return_counts=True)
        shares = dict(zip(sizes.tolist(), (counts / len(lengths)).tolist(), strict=True))
        yield "buckets", by_size(args, mesh, samples, shares, lambda tokens: samples.capacity // tokens)
        yield "by size", by_size(args, mesh, samples, shares, lambda _: samples.capacity // longest)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vDiT-XL/222")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=[*MIXES])
    parser.add_argument("--place", type=int, default=16, help="patches along each side of the smallest picture")
    parser.add_argument("--captions", action="store_true", help="captions of 120 tokens in place of classes")
    parser.add_argument("--recompute", default="none", help="as train.py")
    parser.add_argument("--steps", type=int, default=16, help="that are timed")
    add_flags(parser)
    args = parser.parse_args(argv)
    mesh = init_mesh()
    torch.set_float32_matmul_precision("high")
    condition: dict[str, Any] = {"text": TextConfig("t5", 4096, 120, False)} if args.captions else {"num_classes": 1000}
    config = model_config(args.model, input_size=(4 * args.place,) * 2, frames=16, in_channels=4, **condition)
    samples, rows = Samples(config, mesh.device, args.place), []
    for mix in args.mixes:
        found: dict[str, list[tuple[float, float]]] = {}
        for way, made in ways(args, mesh, samples, mix):
            print(f"{mix}, {way}: {made[0]:,.0f} tokens/s, {made[1]:.1f} TFLOP/s", flush=True)
            found.setdefault(way.removesuffix(" again"), []).append(made)
        means = {way: [statistics.mean(column) for column in zip(*pairs, strict=True)] for way, pairs in found.items()}
        means.setdefault("padded", [means["equal"][0] * float(mean_share(mix)), means["equal"][1]])
        packs = means["packs"]
        words = " captions" * args.captions + f" recompute {args.recompute}" * (args.recompute != "none")
        for way, (tokens, tflops) in means.items():
            print(f"{mix}: packs / {way}: tokens of use {packs[0] / tokens:.3f}, TFLOP/s {packs[1] / tflops:.3f}")
            if way != "packs":
                case = {"bench": "packed_training", "case": f"{args.model} {mix} of {samples.capacity}{words}"}
                rows.append({**case, "metric": "tokens of use/s", "value": f"{packs[0]:.0f}", "baseline": way})
                rows[-1]["baseline_value"] = f"{tokens:.0f}"
                rows.append({**case, "metric": "executed TFLOP/s", "value": f"{packs[1]:.1f}", "baseline": way})
                rows[-1]["baseline_value"] = f"{tflops:.1f}"
    record(rows, args)
    close_mesh()


def mean_share(mix: str) -> float:
    """Return the mean length divided by the longest."""
    lengths = MIXES[mix](np.random.default_rng(0))
    return float(lengths.mean() / lengths.max())


if __name__ == "__main__":
    main()
