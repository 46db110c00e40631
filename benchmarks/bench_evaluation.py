"""Time FID, sFID, Inception score, precision, recall and KID of pictures in an .npz. Inception has random weights.

    python benchmarks/bench_evaluation.py [--pictures 10000] [--side 256] [--results FILE]

The features of two files are computed in fp32 and, on a GPU, in tf32, and stored on disk as in ``opendit evaluate``.
Then each metric is timed separately. The program also prints how much tf32 changes FID.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import numpy as np
import torch

from benchmarks.results import append
from opendit.config.evaluate import EvaluateConfig
from opendit.evaluation.extract import Extractor, Features, extract_media
from opendit.evaluation.figures import MetricInputs, figures
from opendit.evaluation.inception import FIDInception
from opendit.evaluation.media import MediaOptions, open_media
from opendit.evaluation.networks import load_network
from opendit.evaluation.samples import Reference
from opendit.parallel.mesh import Mesh

METRICS = ("fid", "sfid", "is", "pr", "kid")


def write_pictures(path: Path, count: int, side: int, seed: int) -> Path:
    """Write smooth noise of varying brightness as an .npz like sample.py's."""
    rng = np.random.default_rng(seed)
    small = rng.normal(128 + 5 * seed, 60, (count, 8, 8, 3)).clip(0, 255).astype(np.uint8)
    np.savez(path, arr_0=small.repeat(side // 8, axis=1).repeat(side // 8, axis=2))
    return path


def write_inception(path: Path) -> Path:
    """Write random weights that preserve the scale of activations."""
    torch.manual_seed(0)
    network = FIDInception()
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    torch.save(network.state_dict(), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--side", type=int, default=256, help="a multiple of 8")
    parser.add_argument("--batch_size", type=int, default=EvaluateConfig().feature_batch_size)
    parser.add_argument("--results", help="also append rows to this CSV")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh, rows, distances = Mesh(0, 1, 0, device), [], {}
    case = f"{args.pictures} pictures {args.side}px"

    def told(name: str, value: float, metric: str) -> None:
        print(f"{name:34s} {value:12,.4g} {metric}", flush=True)
        rows.append({"bench": "evaluation", "case": f"{case} {name}", "metric": metric, "value": f"{value:.5g}"})

    def sync() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        weights = write_inception(Path(folder) / "inception.pth")
        files = [write_pictures(Path(folder) / f"{seed}.npz", args.pictures, args.side, seed) for seed in (0, 1)]
        for precision in ("fp32", "tf32") if device.type == "cuda" else ("fp32",):
            network = load_network(weights, device, precision=precision)
            extractor = Extractor(device, network, batch_size=args.batch_size)
            extractor(torch.zeros(args.batch_size, args.side, args.side, 3, dtype=torch.uint8))
            found: list[Features] = []
            for file in files:
                media = open_media(file, "--samples", MediaOptions())
                found.append(extract_media(media, extractor, Path(folder) / precision, mesh))
            told(f"features, {precision}", max(f.computed / f.seconds for f in found), "pictures/s")
            reference = Reference("1.npz", "", args.pictures, {}, found[1].arrays)
            inputs = MetricInputs(found[0].arrays, False, True, reference, device, intervals=False)
            for name in METRICS:
                before = sync()
                values = list(figures(name, inputs))
                told(f"{name}, {precision}", sync() - before, "s")
                if name == "fid":
                    distances[precision] = values[0].value
                for figure in values:
                    print(f"  {figure.metric} {figure.value:.6g}")
        if len(distances) == 2:
            told("FID's shift by tf32", abs(distances["tf32"] / distances["fp32"] - 1), "relative")
    if args.results:
        append(rows, args.results)


if __name__ == "__main__":
    main()
