"""Measure how long train.py waits for data from tars: pictures, or latents of pictures or clips.

    python benchmarks/bench_data_wait.py [--only latents] [--num_workers 12] [--results CSV]
    python benchmarks/bench_data_wait.py --tiny                 small models and few samples, to try it without a GPU

The program first makes the data with preprocess.py: JPEGs of 512 pixels in tars, and latents of them and of MP4 clips
of 256 pixels. The VAE has Stable Diffusion's shape and random weights. In the case "pictures", JPEGs are decoded,
cropped to 256 pixels and encoded during training. This case divides the VAE's widths by 32, because a full VAE would
hide the wait. The reported wait is log.jsonl's ``data_wait_s`` divided by the step time.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

from benchmarks import random_vae
from benchmarks.bench_decoders import write
from benchmarks.bench_recipes import ROOT, reason
from benchmarks.bench_shards import write_pictures
from benchmarks.results import add_flags, record
from opendit.checkpoint.run_folders import run_folders
from opendit.config.recipes import FAST
from opendit.data.captioned_media import TableRow, write_csv

EVERY, WARMUP = 5, 20  # steps per log line, and first steps that are not counted
FRAMES, NARROWER = 16, 32


@dataclass(frozen=True)
class Case:
    """A run to measure. tiny: the model with --tiny. flags: further flags of train.py. data: folder of the data."""

    name: str
    model: str
    tiny: str
    batch: int
    flags: str
    data: str
    about: str


CASES = (
    Case(
        "pictures", "DiT-XL/2", "DiT-Ti/2", 128, "--vae {folder}/narrow_vae", "pictures", "from JPEGs of 512 px in tars"
    ),
    Case("latents", "DiT-XL/2", "DiT-Ti/2", 128, "", "picture_latents", "from latents of 256 px in tars"),
    Case(
        "clips",
        "vDiT-XL/222",
        "vDiT-Ti/222",
        4,
        f"--use_video --num_frames {FRAMES}",
        "clip_latents",
        "from latents of clips in tars",
    ),
)


def call(program: str, flags: str, log: Path, limit: float) -> None:
    """Run one of the project's programs. Raises RuntimeError with the reason if it fails."""
    with log.open("a") as file:
        command = [sys.executable, *shlex.split(f"{program} {flags}")]
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit)
    if done.returncode:
        raise RuntimeError(f"{program}: {reason(log.read_text())} (see {log})")


def make_data(folder: Path, names: set[str], args: argparse.Namespace) -> None:
    """Write the data of these names, each into a separate folder."""
    vae, log, workers = folder / "vae", folder / "preprocess.txt", args.num_workers
    random_vae.write(vae, narrower=NARROWER if args.tiny else 1)
    random_vae.write(folder / "narrow_vae", NARROWER)
    latents = (
        f"latents --vae {vae} --image_size {args.side} --num_workers {workers} --batch_size {32 if args.tiny else 64}"
    )
    if names & {"pictures", "picture_latents"}:
        write_pictures(folder / "files", args.pictures, 2 * args.side, workers)
        size = 10**6 if args.tiny else 10**8
        call(
            "preprocess.py",
            f"shards --data_path {folder}/files --output {folder}/pictures --shard_size {size}B",
            log,
            300,
        )
    if "picture_latents" in names:
        call("preprocess.py", f"{latents} --data_path {folder}/pictures --output {folder}/picture_latents", log, 600)
    if "clip_latents" in names:
        rows = [TableRow(folder / f"{number}.mp4", f"clip {number}") for number in range(args.clips)]
        with ProcessPoolExecutor(workers) as pool:
            kinds = [args.side] * len(rows), [args.side] * len(rows), ["h264"] * len(rows), [24] * len(rows)
            list(pool.map(write, [str(row.path) for row in rows], *kinds))
        write_csv(folder / "clips.csv", rows)
        video = f"--use_video --num_frames {FRAMES} --no_flip --data_path {folder}/clips.csv"
        call("preprocess.py", f"{latents} {video} --output {folder}/clip_latents --batch_size 4", log, 600)


def measure(case: Case, folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Run a case and return (the wait as a share of the time, samples per second) after ``WARMUP`` steps."""
    outputs = folder / f"run_{case.name}"
    batch, model = (4, case.tiny) if args.tiny else (case.batch, case.model)
    flags = f"--model {model} --batch_size {batch} --image_size {args.side} --data_path {folder / case.data} "
    flags += f"--num_workers {args.num_workers} --max_steps {args.steps} --log_every {EVERY} --outputs {outputs} "
    flags += "--sample_every 0 --validate_every 0 --no_save " + ("" if args.tiny else FAST)
    flags += f" {case.flags.format(folder=folder)}"
    call("train.py", flags, folder / f"{case.name}.txt", 600)
    log = (run_folders(outputs)[-1] / "log.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, log) if "samples_per_s" in line and line["step"] > WARMUP]
    seconds = [EVERY * batch / line["samples_per_s"] for line in lines]
    return sum(line["data_wait_s"] for line in lines) / sum(seconds), EVERY * batch * len(lines) / sum(seconds)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--num_workers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pictures", type=int, default=4096)
    parser.add_argument("--clips", type=int, default=96)
    parser.add_argument("--tiny", action="store_true", help="a small model, pictures of 32 px and few of them")
    add_flags(parser)
    args = parser.parse_args(argv)
    args.side = 32 if args.tiny else 256
    cases = [case for case in CASES if args.only is None or case.name in args.only]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        make_data(folder, {case.data for case in cases}, args)
        print(f"data made in {time.monotonic() - began:.0f} s", flush=True)
        for case in cases:
            wait, speed = measure(case, folder, args)
            unit = "clips/s" if case.data == "clip_latents" else "img/s"
            model = case.tiny if args.tiny else case.model
            print(f"{case.name:10s} {model:12s} {speed:8.1f} {unit:8s} waits for {wait:.2%} of its time", flush=True)
            what = f"{model} {case.about}, batch {case.batch}, {args.num_workers} workers"
            row = {"bench": "data_wait", "case": what}
            rows.append(row | {"metric": "% of the step", "value": f"{100 * wait:.2f}"})
            rows.append(row | {"metric": unit, "value": f"{speed:.1f}"})
    record(rows, args)


if __name__ == "__main__":
    main()
