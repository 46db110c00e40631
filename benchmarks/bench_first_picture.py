"""Measure the time from the start of sample.py to its first picture on disk, by stage.

    python benchmarks/bench_first_picture.py [--model DiT-XL/2] [--trials 3] [--results CSV]

The program writes a checkpoint and a VAE of Stable Diffusion's shape, both with random values, into a temporary folder.
It then runs ``sample.py --profile`` for one picture, --trials times in sequence, with the files in the page cache. The
first start may compile kernels, so it is reported separately from the median of the others."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch

from benchmarks import random_vae
from benchmarks.bench_sampling import CHANNELS, CLASSES, random_model
from benchmarks.results import add_flags, record
from opendit.models.zoo import model_config

ROOT = Path(__file__).resolve().parents[1]
FIRST = "first sample on disk"  # name of this mark in the profile


def write_model(args: argparse.Namespace, path: Path) -> None:
    """Write a state dict in fp32."""
    side = args.image_size // 8
    config = model_config(args.model, input_size=(side, side), in_channels=CHANNELS, num_classes=CLASSES)
    torch.save(random_model(config).state_dict(), path)


def trial(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Start the program once, and return its profile. Raises CalledProcessError if it fails."""
    output = folder / "pictures"
    command = [sys.executable, str(ROOT / "sample.py"), "--model", args.model, "--image_size", str(args.image_size)]
    command += ["--ckpt", str(folder / "model.pt"), "--vae", str(folder / "vae"), "--output", str(output)]
    command += ["--num_samples", "1", "--class_labels", "207", "--cfg_scale", "4", "--sampler", args.sampler]
    command += ["--num_sampling_steps", str(args.steps), "--profile", "--overwrite", *args.flag]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        done.check_returncode()
    print(done.stdout[done.stdout.index("profile of rank 0") :], flush=True)
    return json.loads((output / "profile.json").read_text())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="DiT-XL/2")
    parser.add_argument("--image_size", type=int, default=256)
    parser.add_argument("--sampler", default="ddim")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--vae_narrower", type=int, default=1, help="divides the VAE's widths, for a CPU")
    parser.add_argument("--flag", action="append", default=[], help="one more of sample.py, as --flag=--fp8")
    add_flags(parser)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(args, folder / "model.pt")
        random_vae.write(folder / "vae", args.vae_narrower)
        profiles = [trial(args, folder) for _ in range(args.trials)]
    seconds = [profile["marks"][FIRST] for profile in profiles]
    imports = [profile["stages"]["imports"] for profile in profiles]
    case = " ".join([args.model, f"{args.image_size}px {args.steps} steps with VAE, one picture", *args.flag])
    rows = [{"case": f"{case}, first start", "metric": "s to the first picture", "value": f"{seconds[0]:.2f}"}]
    if later := seconds[1:]:
        rows.append({"case": case, "metric": "s to the first picture", "value": f"{statistics.median(later):.2f}"})
        rows.append({"case": case, "metric": "s of imports", "value": f"{statistics.median(imports[1:]):.2f}"})
    print(f"seconds to the first picture, by start: {', '.join(f'{value:.2f}' for value in seconds)}")
    record([{"bench": "first_picture", **row} for row in rows], args)


if __name__ == "__main__":
    main()
