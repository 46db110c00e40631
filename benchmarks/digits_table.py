"""Train every kind of model with every objective on the digits, score it, and print a table.

    python -m benchmarks.digits_table                                       all nine, one after another
    CUDA_VISIBLE_DEVICES=1 python -m benchmarks.digits_table --only ST-DiT  some of them, on one GPU
    python -m benchmarks.digits_table --table                               the table of the scores so far

A case is a run of train.py with the demo's recipe (docs/recipes.md). Then 500 pictures or 100 clips are scored by
``opendit evaluate --features digits``. A case with an existing run continues from its checkpoint, or is only scored
again.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import opendit
from benchmarks.results import RESULTS, append
from opendit.checkpoint.run_folders import newest_run
from opendit.data import digits_split
from opendit.data.captioned_media import TableRow, write_csv
from opendit.data.digits import make_demo, name_digit

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = {"class accuracy": 0.9, "digit": 0.8, "direction": 0.9}  # minimum values


@dataclass(frozen=True)
class Objective:
    """Flags of training and sampling. EDM needs the data's standard deviation: 0.75 for digits, 0.48 for clips."""

    title: str
    pictures: str  # flags of train.py
    clips: str
    sampler: str
    steps: int


@dataclass(frozen=True)
class Architecture:
    title: str
    flags: str
    data: str  # digits, captioned digits or moving digits
    cfg_scale: float


OBJECTIVES = (
    # Clips use velocity prediction, because the loss of noise prediction hardly weighs the noise levels that determine
    # a clip. These levels are higher than for a picture, because frames repeat each other. So the schedules are
    # shifted, and EDM's noise levels are centred at 6 = exp(1.8) (docs/log/2026-11-21-st-dit-moving-digits.md).
    Objective(
        "DDPM, DDIM 50",
        "--objective ddpm",
        "--objective ddpm --prediction v --ddpm_shift 6 --max_steps 4000",
        "ddim",
        50,
    ),
    Objective(
        "EDM, Heun 18",
        "--objective edm --edm_sigma_data 0.75",
        "--objective edm --edm_sigma_data 0.48 --edm_mean 1.8 --edm_std 1.8",
        "heun",
        18,
    ),
    Objective("flow, Euler 25", "--objective flow", "--objective flow --flow_shift 6", "euler", 25),
)
ARCHITECTURES = (
    Architecture("DiT-Ti/2", "--recipe digits", "digits", 1.3),
    Architecture(
        "DiT-Ti/2, cross-attention",
        "--recipe digits --text_encoder bytes --max_text_tokens 12 --cross_attention",
        "captioned digits",
        1.3,
    ),
    Architecture("ST-DiT-Ti/422", "--recipe digits_video --model ST-DiT-Ti/422", "moving digits", 3.0),
)


@dataclass(frozen=True)
class Case:
    architecture: Architecture
    objective: Objective

    @property
    def name(self) -> str:
        return f"{self.architecture.title}; {self.objective.title}"

    def folder(self, outputs: Path) -> Path:
        return outputs / "".join(c if c.isalnum() or c == "-" else "_" for c in self.name)

    @property
    def moving(self) -> bool:
        return self.architecture.data == "moving digits"


CASES = [Case(architecture, objective) for architecture in ARCHITECTURES for objective in OBJECTIVES]


def captioned_digits(folder: Path) -> Path:
    """Write the training digits as PNGs with captions like "a seven", and return the CSV."""
    csv = folder / "digits.csv"
    if not csv.exists():
        folder.mkdir(parents=True, exist_ok=True)
        images, labels = digits_split("train")
        pixels = ((images[:, 0] + 1) * 127.5).round().numpy().astype(np.uint8)
        rows = []
        for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
            Image.fromarray(image).save(folder / f"{number:04d}.png")
            rows.append(TableRow(folder / f"{number:04d}.png", name_digit(label)))
        write_csv(csv, rows)
    return csv


def data_path(case: Case, outputs: Path) -> str:
    """Return the path of the case's data. Missing data are made first."""
    if case.moving:
        return str(make_demo(outputs / "moving_digits"))
    return str(captioned_digits(outputs / "captioned_digits")) if "captioned" in case.architecture.data else "digits"


def train(case: Case, outputs: Path, more: list[str], environment: dict[str, str]) -> Path:
    """Train a case in a separate process, or resume it. Return its run folder."""
    flags = [*case.architecture.flags.split(), "--data_path", data_path(case, outputs)]
    flags += (case.objective.clips if case.moving else case.objective.pictures).split()
    if torch.cuda.is_available():
        # Launching such small kernels takes longer than running them, and so does reading clips.
        flags += ["--enable_cuda_graph", *(["--num_workers", "8"] if case.moving else [])]
    folder = case.folder(outputs)
    command = [sys.executable, "train.py", *flags, "--outputs", str(folder), "--load", "latest", *more]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return cast(Path, newest_run(str(folder)))


def score(case: Case, run: Path, count: int) -> dict[str, float]:
    """Return the metrics in BOUNDS that apply. count: number of clips, or a fifth of the number of pictures."""
    rows = opendit.evaluate(
        opendit.EvaluateConfig(
            ckpt=str(run),
            features="digits",
            metrics=["accuracy", "direction"] if case.moving else ["accuracy"],
            num_samples=count if case.moving else 5 * count,
            num_sampling_steps=case.objective.steps,
            sampler=case.objective.sampler,
            cfg_scale=case.architecture.cfg_scale,
            mixed_precision="fp32",
            output=str(run / "evaluation"),
        )
    )
    found = {row.metric: row.value for row in rows}
    if case.moving:
        return {"digit": found["accuracy"], "direction": found["direction"]}
    return {"class accuracy": found["accuracy"]}


def table(outputs: Path) -> str:
    """Return a Markdown table of the scored cases, with a row per architecture and a column per objective."""
    lines = ["| | " + " | ".join(objective.title for objective in OBJECTIVES) + " |", "|---" * 4 + "|"]
    for architecture in ARCHITECTURES:
        cells = [cell(Case(architecture, objective).folder(outputs) / "score.json") for objective in OBJECTIVES]
        lines.append(f"| {architecture.title}, {architecture.data} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(path: Path) -> str:
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    return ", ".join(
        f"{name} {value:.1%}" + ("" if value >= BOUNDS[name] else f" (below {BOUNDS[name]:.0%})")
        for name, value in found.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases whose name has all of these, e.g. ST-DiT flow")
    parser.add_argument("--outputs", type=Path, default=Path("outputs/digits_table"))
    parser.add_argument("--device_index", help="the GPU to use, as CUDA_VISIBLE_DEVICES")
    parser.add_argument("--count", type=int, default=100, help="clips to score, and five times as many pictures")
    parser.add_argument("--max_steps", type=int, help="fewer training steps, to see that it works (in other --outputs)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the table of what has been scored")
    args = parser.parse_args()
    outputs = args.outputs.resolve()
    chosen = [case for case in CASES if all(text in case.name for text in args.only or ())]
    if not chosen:
        raise SystemExit(f"error: --only {' '.join(args.only)}: the cases are\n" + "\n".join(c.name for c in CASES))
    environment = dict(os.environ)
    if args.device_index is not None:
        environment["CUDA_VISIBLE_DEVICES"] = args.device_index
    for case in [] if args.table else chosen:
        more = [] if args.max_steps is None else ["--max_steps", str(args.max_steps)]
        run = train(case, outputs, more, environment)
        found = score(case, run, args.count)
        (case.folder(outputs) / "score.json").write_text(json.dumps(found))
        append(
            [{"bench": "digits_table", "case": case.name, "metric": k, "value": f"{v:.4f}"} for k, v in found.items()],
            args.results,
        )
    print(table(outputs))


if __name__ == "__main__":
    main()
