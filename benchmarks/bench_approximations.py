"""Measure how much sampling approximations save, and how far their samples are from the exact sampler's.

    python -m benchmarks.bench_approximations --ckpt outputs/000-DiT-Ti-2 outputs/001-vDiT-Ti-822 --samples 10000

The checkpoints are from the embedded demos, digits and moving digits (docs/images.md, docs/video.md). Every setting
draws the same samples with the same seeds. The table has a row per setting, with these columns:

- the exact sampler's block evaluations, divided by this setting's;
- milliseconds per sample, as a median over batches without the first;
- the relative error of the latents;
- the share of samples in which a classifier finds the requested digit (and for clips, the requested direction);
- the Fréchet distance to real training samples, with the features of ``opendit evaluate --features digits``.

Some rows use the exact sampler with fewer steps, for comparison. benchmarks/plot.py plots the rows of results.csv."""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import numpy as np
import torch
from torch import Tensor

import opendit
from benchmarks.results import append
from opendit.data.digits import DIRECTIONS, caption
from opendit.encoders.conditioner import CaptionConditioner
from opendit.evaluation.digits import (
    AskedDigits,
    ClipShape,
    clip_features,
    moved_right,
    named_right,
    picture_features,
    real_clips,
    real_pictures,
)
from opendit.evaluation.media import Media
from opendit.evaluation.metrics import Moments, frechet_distance
from opendit.sampling.sampling_engine import SamplingEngine

EXACT = "exact"
SETTINGS = (
    f"{EXACT} steps:25 steps:20 steps:17 taylor:2 taylor:3 taylor:4 taylor:5 taylor:3:0 taylor:3:1 taylor:3:3 "
    "first_block:0.03 first_block:0.06 first_block:0.1 guidance_every:2 guidance_every:3 guidance_every:5 "
    "cfg_interval:0.3:5 fp8"
)
SEED = 0


@dataclass(frozen=True)
class Row:
    """The result of one setting. fewer: the exact sampler's block evaluations divided by this setting's."""

    setting: str
    fewer: float
    milliseconds: float
    error: float
    accuracy: float
    distance: float


class Digits:
    """Pictures of digits, from a model with ten classes."""

    sampler, scale = "ddim", 1.3

    def __init__(self, pipe: opendit.Pipeline, samples: int):
        if pipe.config.num_classes != 10 or tuple(pipe.config.input_size) != (8, 8):
            raise SystemExit(f"error: {pipe.weights.path} draws neither 8 x 8 digits nor moving digits")
        self.codec = pipe.codec
        self.labels = np.arange(samples) % 10
        self.y, self.null = torch.from_numpy(self.labels), torch.tensor([10])
        real = real_pictures("train").media
        self.real = Moments.of(picture_features(whole(real))["pool"]).gaussian()

    def judge(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return (correct (N,) bool, features (N, D)). A sample is correct if it shows what was requested."""
        found = picture_features(pixels_of(self.codec.decode(latents)))
        return named_right(found["digit"], AskedDigits(torch.from_numpy(self.labels))), found["pool"]


class Clips:
    """Clips of moving digits, from a model with captions as conditions."""

    sampler, scale = None, 3.0

    def __init__(self, pipe: opendit.Pipeline, samples: int):
        frames, size = pipe.config.input_size[0], pipe.config.input_size[1]
        self.codec = pipe.codec
        self.wanted = [(i % 10, list(DIRECTIONS)[i // 10 % 4]) for i in range(samples)]
        assert isinstance(pipe.conditioner, CaptionConditioner)
        self.y = pipe.conditioner.encode([caption(digit, direction) for digit, direction in self.wanted])
        self.null = pipe.conditioner.null()
        self.shape = ClipShape(frames, pipe.weights.info["frame_interval"], size)
        real = whole(real_clips("train", self.shape).media)
        self.real = Moments.of(clip_features(self.shape, real)["pool"]).gaussian()

    def judge(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        found = clip_features(self.shape, pixels_of(self.codec.decode(latents)))
        digits, directions = zip(*self.wanted, strict=True)
        ways = torch.tensor([DIRECTIONS[direction] for direction in directions], dtype=torch.float64)
        asked = AskedDigits(torch.tensor(digits), ways)
        return named_right(found["digit"], asked) & moved_right(found["moved"], asked), found["pool"]


def pixels_of(decoded: Tensor) -> Tensor:
    """Convert decoded pixels in [-1, 1] to uint8 on the CPU."""
    return ((decoded.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()


def whole(media: Media) -> Tensor:
    """Return all media as uint8 (N, 3, H, W), or (N, 3, T, H, W) for clips."""
    return torch.from_numpy(media.read_all()).movedim(-1, 1)


class Bench:
    """A checkpoint, and the samples that every setting draws from it."""

    def __init__(self, ckpt: str, args):
        self.args, self.ckpt = args, ckpt
        self.pipe = opendit.load(ckpt, device=args.device, precision=args.precision)
        self.task = (Clips if self.pipe.config.is_video else Digits)(self.pipe, args.samples)
        device = self.pipe.device
        self.y, self.null = self.task.y.to(device), self.task.null.to(device)
        self.sampler = self.pipe.objective.choose(args.sampler or self.task.sampler)
        self.scale = args.cfg_scale or self.task.scale
        self.title = (
            f"{self.pipe.weights.info.get('model', self.pipe.config.kind)}, {args.steps} {self.sampler} steps, "
            f"guidance {self.scale:g}, {self.pipe.precision}"
        )

    def engine(self, setting: str) -> SamplingEngine:
        """Build a setting's engine. Raises ValueError if this machine or model does not support the setting."""
        name, *values = setting.split(":")
        settings, model = {"steps": self.args.steps}, self.pipe.model
        if name == "steps":
            settings["steps"] = int(values[0])
        elif name == "guidance_every":
            settings[name] = int(values[0])
        elif name == "cfg_interval":
            settings[name] = float(values[0]), float(values[1])
        elif name == "fp8":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the ValueError below reports missing FP8
                pipe = opendit.load(self.ckpt, device=self.args.device, precision=self.args.precision, fp8=True)
            if not pipe.model.ops.float8:
                raise ValueError(next(note for note in pipe.notes if "kernels" in note))
            model = pipe.model
        elif name != EXACT:
            settings["cache"] = setting
        objective = self.pipe.objective
        return SamplingEngine(model, objective, sampler=self.sampler, cfg_scale=self.scale, **settings)

    def draw(self, engine: SamplingEngine) -> tuple[Tensor, float]:
        """Return (all samples' latents, milliseconds per sample)."""
        args, drawn, seconds = self.args, [], []
        for first in range(0, args.samples, args.batch_size):
            index = torch.arange(first, min(first + args.batch_size, args.samples))
            start = time.perf_counter()
            drawn.append(engine.sample(self.y[index.to(self.pipe.device)], self.null, index, SEED).cpu())
            seconds.append((time.perf_counter() - start) / len(index))
        return torch.cat(drawn), 1000 * statistics.median(seconds[1:] or seconds)

    def rows(self, say: Callable[[Row, Row], None]) -> list[Row]:
        """Return a row for each setting, the exact one first. say: called with each row and the exact row."""
        rows: list[Row] = []
        for setting in dict.fromkeys([EXACT, *self.args.settings]):
            try:
                engine = self.engine(setting)
            except ValueError as error:
                print(f"{setting} is left out: {error}", flush=True)
                continue
            latents, milliseconds = self.draw(engine)
            if setting == EXACT:
                self.exact, whole = latents, engine.evaluated
            error = ((latents - self.exact).norm() / self.exact.norm()).item()
            right, features = self.task.judge(latents.to(self.pipe.device))
            distance = frechet_distance(Moments.of(features).gaussian(), self.task.real)
            fewer = whole / engine.evaluated
            rows.append(Row(setting, fewer, milliseconds, error, float(right.double().mean()), distance))
            say(rows[-1], rows[0])
        return rows


HEAD = (
    "| setting | fewer evaluations | ms a sample | error of latents | accuracy | Fréchet distance |\n"
    + "|---" * 6
    + "|"
)


def line(row: Row, exact: Row) -> str:
    """Return a line of the table."""
    accuracy, distance = f"{row.accuracy:.2%}", f"{row.distance:.3f}"
    if row is not exact:
        accuracy += f" ({100 * (row.accuracy - exact.accuracy):+.2f})"
        distance += f" ({row.distance / exact.distance - 1:+.1%})"
    error = "" if row is exact else f"{row.error:.2%}"
    return f"| {row.setting} | {row.fewer:.2f} x | {row.milliseconds:.2f} | {error} | {accuracy} | {distance} |"


def records(title: str, rows: list[Row]) -> list[dict]:
    """Return rows for results.csv, with the exact sampler as their baseline."""
    found, exact = [], rows[0]
    for row in rows:
        case = {"bench": "approximations", "case": f"{title}, {row.setting}"}
        beside = {
            "ms a sample": (row.milliseconds, exact.milliseconds),
            "accuracy": (row.accuracy, exact.accuracy),
            "Frechet distance": (row.distance, exact.distance),
        }
        for metric, (value, known) in beside.items():
            found.append({**case, "metric": metric, "value": f"{value:.4f}"})
            if row is not exact and known:
                found[-1] |= {"baseline": EXACT, "baseline_value": f"{known:.4f}"}
        found.append({**case, "metric": "fewer block evaluations", "value": f"{row.fewer:.3f}"})
        found.append({**case, "metric": "relative error of latents", "value": f"{row.error:.5f}"})
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ckpt", nargs="+", required=True, help="runs or checkpoints of the embedded demos")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--batch_size", type=int, default=500)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sampler", help="default: ddim for digits, the model's own for clips")
    parser.add_argument("--cfg_scale", type=float, help="default: 1.3 for digits, 3 for clips")
    parser.add_argument("--settings", nargs="*", default=SETTINGS.split(), help=f"default: {SETTINGS}")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--precision", default="fp32", help="of the network")
    parser.add_argument("--results", help="a file to append rows to, as results.csv")
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("highest")
    for ckpt in args.ckpt:
        bench = Bench(ckpt, args)
        title = f"{bench.title}, {args.samples:,} samples in batches of {args.batch_size}"
        print(f"\n{title}\n\n{HEAD}", flush=True)
        rows = bench.rows(lambda row, exact: print(line(row, exact), flush=True))
        if args.results:
            append(records(title, rows), args.results)


if __name__ == "__main__":
    main()
