"""Do generated clips follow their prompt? Scores samples of a moving-digits checkpoint.

    python benchmarks/clips_check.py --ckpt outputs/000-vDiT-Ti-822 [--cfg_scale 3]

100 clips, of every digit and direction. A classifier trained on real moving digits names the digit; the digit's
centre of mass must move in the direction asked for. Beside the figures: the same without guidance, the
classifier on real clips of held-out digits, and the distance to the nearest of 2,000 clips of training digits beside
held-out clips' own (samples are no copies).
"""

import argparse
import json

import numpy as np
import torch
from sklearn.metrics import pairwise_distances_argmin_min
from sklearn.svm import SVC

from opendit.data import digits_split
from opendit.data.moving_digits import DIRECTIONS, caption, render
from opendit.diffusion import objective_from_dict
from opendit.diffusion.sampling import sample_latents
from opendit.encoders.conditioner import CaptionConditioner
from opendit.encoders.video_vae import load_video_codec
from opendit.state.pretrained import load_pretrained

FILE_FRAMES, FILE_SIZE = 48, 64  # of the demo's clips


def real_clips(split: str, count: int, frames: int, interval: int, size: int, seed: int):
    """Clips as the loader reads them: ((N, T, size, size) in [0, 1], digits (N,))."""
    images, labels = digits_split(split)
    rng = np.random.default_rng(seed)
    first = (FILE_FRAMES - (frames - 1) * interval - 1) // 2
    clips, digits = [], []
    for i in range(count):
        row, direction = int(rng.integers(len(images))), list(DIRECTIONS)[i % len(DIRECTIONS)]
        clip = render(images[row, 0], direction, FILE_FRAMES, FILE_SIZE, jitter_seed=int(rng.integers(2**31)))
        used = torch.from_numpy(clip[first : first + frames * interval : interval, :, :, 0].copy()).float() / 255
        clips.append(torch.nn.functional.interpolate(used[:, None], (size, size), mode="area")[:, 0].numpy())
        digits.append(int(labels[row]))
    return np.stack(clips), np.array(digits)


def centres(clips: np.ndarray) -> np.ndarray:
    """Centre of mass (x, y) of every frame: (N, T, 2), in pixels."""
    mass = clips.sum(axis=(2, 3)) + 1e-6
    axis = np.arange(clips.shape[-1])
    return np.stack([(clips.sum(axis=2) * axis).sum(-1) / mass, (clips.sum(axis=3) * axis).sum(-1) / mass], axis=-1)


def digit_features(clips: np.ndarray) -> np.ndarray:
    """The digit itself, (N, features): the mean of all frames after each was moved to have its mass in the middle."""
    size = clips.shape[-1]
    half = int(size * 0.4)
    padded = np.pad(clips, ((0, 0), (0, 0), (size // 2,) * 2, (size // 2,) * 2))
    features = []
    for clip, path in zip(padded, centres(clips).round().astype(int) + size // 2, strict=True):
        crops = [frame[y - half : y + half, x - half : x + half] for frame, (x, y) in zip(clip, path, strict=True)]
        features.append(np.mean(crops, axis=0).ravel())
    return np.array(features)


def follows(clips: np.ndarray, directions: list[str]) -> np.ndarray:
    """(N,) bool: from the first quarter to the last the digit moved more along its direction than across it."""
    path = centres(clips)
    quarter = max(1, clips.shape[1] // 4)
    moved = path[:, -quarter:].mean(axis=1) - path[:, :quarter].mean(axis=1)
    wanted = np.array([DIRECTIONS[d] for d in directions])
    along, across = (moved * wanted).sum(1), np.abs((moved * wanted[:, ::-1]).sum(1))
    return along > np.maximum(across, 0.05 * clips.shape[-1])


def draw(model, info: dict, prompts: list[str], seed: int, steps: int, sampler: str | None, cfg_scale: float):
    """Clips of the prompts, (N, T, H, W) float32 in [0, 1]."""
    conditioner = CaptionConditioner(model.config.text, torch.device("cpu"))
    codec = load_video_codec(info["vae"], channels=model.config.in_channels, device="cpu", dtype=torch.float32)
    latents = sample_latents(
        model,
        conditioner.encode(prompts),
        conditioner.null(),
        torch.arange(len(prompts)),
        objective=objective_from_dict(info.get("objective")),
        seed=seed,
        steps=steps,
        sampler=sampler,
        cfg_scale=cfg_scale,
    )
    return ((codec.decode(latents).mean(dim=1) + 1) / 2).clamp(0, 1).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sampling_steps", type=int, default=50)
    parser.add_argument("--sampler")
    parser.add_argument("--cfg_scale", type=float, default=3.0)
    parser.add_argument("--json", help="also write the figures there")
    args = parser.parse_args()
    figures = score(args.ckpt, args.count, args.seed, args.num_sampling_steps, args.sampler, args.cfg_scale)
    for name, value in figures.items():
        print(f"{name:34s} {value:.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)


def score(ckpt: str, count: int, seed: int, steps: int, sampler: str | None, cfg_scale: float) -> dict[str, float]:
    """The figures of ``count`` clips, without guidance and with it."""
    model, weights = load_pretrained(ckpt)
    text = model.config.text
    if text is None or not text.inside or len(model.config.input_size) != 3:
        raise SystemExit(f"error: {weights.path} is not a clip model with the bytes encoder")
    frames, size = model.config.input_size[0], model.config.input_size[1]
    interval = weights.info["frame_interval"]
    train, train_digits = real_clips("train", 2000, frames, interval, size, seed=1)
    held_out, held_out_digits = real_clips("test", 400, frames, interval, size, seed=2)
    svm = SVC(C=10).fit(digit_features(train), train_digits)
    wanted = [(i % 10, list(DIRECTIONS)[i // 10 % 4]) for i in range(count)]
    prompts = [caption(digit, direction) for digit, direction in wanted]
    figures = {"digit, real held-out clips": float((svm.predict(digit_features(held_out)) == held_out_digits).mean())}
    for scale in dict.fromkeys((1.0, cfg_scale)):
        clips = draw(model.eval(), weights.info, prompts, seed, steps, sampler, scale)
        named = svm.predict(digit_features(clips)) == [digit for digit, _ in wanted]
        figures[f"digit, guidance {scale:g}"] = float(named.mean())
        figures[f"direction, guidance {scale:g}"] = float(follows(clips, [d for _, d in wanted]).mean())
    flat = [part.reshape(len(part), -1) for part in (train, held_out, clips)]
    _, own = pairwise_distances_argmin_min(flat[1], flat[0])
    _, distance = pairwise_distances_argmin_min(flat[2], flat[0])
    figures["nearest clip of a training digit"] = float(np.median(distance))
    figures["the same of real held-out clips"] = float(np.median(own))
    figures["samples closer than any held-out"] = float((distance < own.min()).mean())
    return figures


if __name__ == "__main__":
    main()
