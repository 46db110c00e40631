"""Time how long a GPU takes to enlarge clips and to encode them with a VAE of Stable Diffusion's shape.

    python benchmarks/bench_enlarging.py [--clips 16] [--results CSV]

The exit code is 1 unless the enlarged frames are bit-identical to those that torch computes on the CPU.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import torch
from torch.nn.functional import interpolate

from benchmarks.bench_sampling_files import make_codec
from benchmarks.results import add_flags, record
from opendit.data.base import Small, to_pixels
from opendit.data.clips import enlarge
from opendit.encoders.video_vae import FrameCodec


def milliseconds(work, device: torch.device, trials: int) -> float:
    """Return the median time of ``trials`` calls, after two calls that are not counted."""
    times = []
    for _ in range(trials + 2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--side", type=int, default=240)
    parser.add_argument("--image_size", type=int, default=256)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--vae_narrower", type=int, default=1, help="divides the VAE's widths, for a CPU")
    add_flags(parser)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    side, whole = args.side, args.image_size
    x = torch.randint(0, 256, (args.clips, args.frames, whole, whole, 3), dtype=torch.uint8)
    corner = x[0, :, :side, :side].permute(0, 3, 1, 2)
    wanted = interpolate(corner, (whole, whole), mode="bicubic", antialias=True)
    x, small = x.to(device).movedim(-1, 1), [Small(side, side, False)] * args.clips
    same = torch.equal(enlarge(x, small)[0].cpu().transpose(0, 1), wanted)
    print(f"the CPU's bits: {'yes' if same else 'NO'}")
    codec = FrameCodec(make_codec(args, device))
    pixels = to_pixels(x)
    with torch.inference_mode():
        enlarging = milliseconds(lambda: enlarge(x, small), device, args.trials)
        encoding = milliseconds(lambda: codec.moments(pixels), device, 3)
    print(f"{args.clips} clips: enlarged in {enlarging:.2f} ms, encoded in {encoding:.1f} ms")
    case = f"{args.clips} clips of {args.frames} x {side} x {side} to {whole} px"
    row = {"bench": "enlarging", "case": case, "metric": "ms", "value": f"{enlarging:.2f}"}
    record([row | {"baseline": "encoding them", "baseline_value": f"{encoding:.1f}"}], args)
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
