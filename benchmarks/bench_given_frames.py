"""Test how well a model continues conditioning frames, on held-out moving digits with known next frames.

    python preprocess.py demo --output videos
    python preprocess.py check videos/demo.csv --output videos/checked.csv --num_frames 8 --frame_interval 6
    python train.py --use_video --recipe digits_video --data_path videos/checked.csv --given_frames random
    python -m benchmarks.bench_given_frames --ckpt outputs/000-vDiT-Ti-822 --output given

The model gets the first frames of clips of unseen digits and draws the others. A digit moves in a straight line at
constant speed, so two frames determine the next ones. With a single frame, only the caption tells the direction. The
error is compared with the error of repeating the last conditioning frame.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import opendit
from opendit.data.clips import resize_and_crop
from opendit.data.digits import DIRECTIONS, caption, digits_split, render
from opendit.encoders.pictures import save_contact_sheet

FRAMES, FULL, SIZE, INTERVAL, SEED = 8, 48, 64, 6, 1


def held_out(count: int, side: int) -> tuple[np.ndarray, list[str]]:
    """Return frames as training would read them, uint8 (count, 8, side, side, 3), and captions."""
    images, labels = digits_split("test")
    random, pairs = np.random.default_rng(SEED), [(digit, way) for digit in range(10) for way in DIRECTIONS]
    clips, captions = [], []
    for i in range(count):
        digit, way = pairs[i * 7 % len(pairs)]
        choices = images[labels == digit, 0]
        image, jitter = choices[random.integers(len(choices))], int(random.integers(2**31))
        frames = torch.from_numpy(render(image, way, FULL, SIZE, jitter_seed=jitter).copy())
        start = (FULL - 1 - (FRAMES - 1) * INTERVAL) // 2
        window = frames[start::INTERVAL][:FRAMES]
        clips.append(resize_and_crop(window, side, as_bytes=True).permute(1, 2, 3, 0).numpy())
        captions.append(caption(digit, way))
    return np.stack(clips), captions


def error(drawn: np.ndarray, real: np.ndarray) -> float:
    """Return the root mean square difference, in levels of 255."""
    return float(np.sqrt(np.square(drawn.astype(float) - real).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="a run of --given_frames random on moving digits")
    parser.add_argument("--output", default="given", help="folder for contact sheets")
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--guidance", type=float, default=3.0)
    args = parser.parse_args()
    pipe = opendit.load(args.ckpt)
    real, captions = held_out(args.clips, pipe.config.input_size[-1])
    how = dict(steps=args.steps, guidance=args.guidance, seed=0, progress=False)
    print(f"{'given':>6}  {'drawn':>6}  {'still':>6}  RMS error of the other frames, of 255")
    for count in (0, 1, 2, 4, 6):
        what = {} if not count else {"clip": [clip[:count] for clip in real], "clip_frames": count}
        drawn = np.stack([clip.frames for clip in pipe(captions, **how, **what)])
        assert np.abs(drawn[:, :count].astype(int) - real[:, :count]).max(initial=0) <= 1  # unchanged
        still = np.broadcast_to(real[:, max(0, count - 1) : max(1, count)], real[:, count:].shape)
        print(f"{count:6}  {error(drawn[:, count:], real[:, count:]):6.1f}  {error(still, real[:, count:]):6.1f}")
        both = np.concatenate([drawn, real], axis=3)[:8]  # drawn left, real right
        both = both.repeat(4, axis=2).repeat(4, axis=3)
        names = [f"{text}: {count} given; real" for text in captions[:8]]
        save_contact_sheet(Path(args.output) / f"{count}_given.png", both, names)


if __name__ == "__main__":
    main()
