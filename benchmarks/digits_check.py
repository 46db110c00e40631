"""Are the generated digits digits? Scores samples of a digits checkpoint against scikit-learn's real ones.

    python benchmarks/digits_check.py --ckpt outputs/000-DiT-Ti-2 [--cfg_scale 1.5]

An SVM trained on the real training images names the digit in 500 samples, 50 a class. Two more figures show
that they are neither one picture per class nor copies: the pixel variance within a class, as a ratio to the
real images', and the distance to the nearest training image, beside the real held-out images' own.
"""

import argparse
import json

import numpy as np
import torch
from sklearn.metrics import pairwise_distances_argmin_min
from sklearn.svm import SVC

from opendit.data import digits_split
from opendit.data.moving_digits import name_digit
from opendit.diffusion import objective_from_dict
from opendit.diffusion.sampling import sample_latents
from opendit.encoders.conditioner import CaptionConditioner
from opendit.encoders.vae import load_codec
from opendit.state.pretrained import load_pretrained


def draw(ckpt: str, per_class: int, seed: int, steps: int, sampler: str, cfg_scale: float):
    """``per_class`` samples of every digit: ((N, 64) float in [-1, 1], labels (N,)). A model of captions is asked for
    "a seven"."""
    model, weights = load_pretrained(ckpt)
    text = model.config.text
    conditioned = text.inside if text is not None else model.config.num_classes == 10
    if not conditioned or weights.info.get("vae") != "none" or model.config.input_size != (8, 8):
        raise SystemExit(f"error: {weights.path} was not trained on 8 x 8 digits in pixels")
    codec = load_codec("none", channels=model.config.in_channels, device="cpu")
    labels = torch.arange(10).repeat_interleave(per_class)
    y, null = labels, torch.tensor([10])
    if text is not None:
        conditioner = CaptionConditioner(text, torch.device("cpu"))
        y, null = conditioner.encode([name_digit(label) for label in labels.tolist()]), conditioner.null()
    latents = sample_latents(
        model.eval(),
        y,
        null,
        torch.arange(len(labels)),
        seed=seed,
        steps=steps,
        objective=objective_from_dict(weights.info.get("objective")),
        sampler=sampler,
        cfg_scale=cfg_scale,
    )
    return codec.decode(latents).mean(dim=1).flatten(1).numpy(), labels.numpy()


def real_digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = digits_split(split)
    return images.flatten(1).numpy(), labels.numpy()


def score(samples: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The figures of samples (N, 64) in [-1, 1] asked for as ``labels`` (N,)."""
    (train_x, train_y), (test_x, test_y) = real_digits("train"), real_digits("test")
    svm = SVC(gamma=0.001 * 64).fit(train_x, train_y)  # scikit-learn's own digits setting, for a range of 2, not 16
    agree = svm.predict(samples) == labels

    def variance(x, y):
        return np.array([x[y == digit].var(axis=0).mean() for digit in range(10)])

    ratios = variance(samples, labels) / variance(train_x, train_y)
    _, sample_distance = pairwise_distances_argmin_min(samples, train_x)
    _, held_out_distance = pairwise_distances_argmin_min(test_x, train_x)
    return {
        "accuracy": float(agree.mean()),
        "worst class accuracy": float(min(agree[labels == digit].mean() for digit in range(10))),
        "held-out accuracy": float((svm.predict(test_x) == test_y).mean()),
        "variance ratio, least": float(ratios.min()),
        "variance ratio, most": float(ratios.max()),
        "nearest training image, samples": float(np.median(sample_distance)),
        "nearest training image, held-out": float(np.median(held_out_distance)),
        "samples closer than any held-out": float((sample_distance < held_out_distance.min()).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--per_class", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sampling_steps", type=int, default=100)
    parser.add_argument("--sampler")
    parser.add_argument("--cfg_scale", type=float, default=1.0)
    parser.add_argument("--json", help="also write the figures there")
    args = parser.parse_args()
    samples, labels = draw(args.ckpt, args.per_class, args.seed, args.num_sampling_steps, args.sampler, args.cfg_scale)
    figures = score(samples, labels)
    for name, value in figures.items():
        print(f"{name:34s} {value:.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
