"""Compare flags of train.py by the quality of CIFAR-10 pictures after the same GPU time. A row is a set of flags.

    python benchmarks/bench_cifar10.py --data CIFAR --rows base modern --gpus 2            a row on each GPU at once
    python benchmarks/bench_cifar10.py --data CIFAR --rows base --seeds 1 2 3 --gpus 3     the noise between seeds
    python benchmarks/bench_cifar10.py --data CIFAR --rows "mine=--lr 1e-3 --norm rms"     a row with your flags
    python benchmarks/bench_cifar10.py --list                                              the rows, with their flags
    python benchmarks/bench_cifar10.py --outputs FOLDER --plot                             plot existing results again

The folder CIFAR has train/CLASS/*.jpg and test/CLASS/*.jpg, or train.jpegs with train.npz and test.jpegs with
test.npz. train.py runs each row for --seconds of training, not counting start-up and checkpoints. The training time is
divided into --points equal parts, and the checkpoint nearest to the end of each part is measured. From each checkpoint,
--samples pictures are drawn with the averaged weights and without guidance, the same number for every class, and
compared with the test pictures:

    frechet    Fréchet distance in the penultimate features of a classifier that this program trains once
    accuracy   share of samples in which the classifier sees the requested class
    copies     share of samples whose pixels are closer to a training picture than those of 99 % of the test pictures

Rows with --repa use a vision transformer that this program trains once, without labels (SimCLR; Chen et al. 2020). Its
nearest-neighbour accuracy on the test pictures is written to real.json.

OUTPUTS gets classifier.safetensors, a JSON file for each row, results.json with all rows, and recipes.png, which plots
the distance against pictures seen and against GPU seconds. ``--tiny`` tests the program on a CPU in a minute; its
figures are meaningless.
"""

import argparse
import io
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports when this file is run as a script

import opendit
from benchmarks.results import add_flags, commit, record
from opendit.checkpoint.ema import reconstruct
from opendit.checkpoint.run_folders import run_folders
from opendit.common.utils import hash_parts
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.data.base import PLAIN, Description, Fingerprint, Item, MediaDataset, View
from opendit.evaluation.digits import share_of_copies
from opendit.evaluation.metrics import Gaussian, Moments, frechet_distance

BASE = (
    "--model DiT-S/2 --image_size 32 --vae none --objective flow --batch_size 512 --lr 3e-4 --warmup_steps 100 "
    "--ema_decay 0.999 --sample_every 0 --log_every 25"
)
ON_GPU = (
    "--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel --enable_cuda_graph "
    "--num_workers 8"
)
TINY = "--model DiT-S/8 --batch_size 16 --mixed_precision fp32 --log_every 1 --num_workers 0"
ROWS = {
    "base": "",
    "rms": "--norm rms",
    "swiglu": "--mlp swiglu",
    "rope": "--positions rope",
    "qk_norm": "--qk_norm",
    "modern": "--norm rms --mlp swiglu --positions rope --qk_norm",
    "logit_normal": "--flow_times logit_normal",
    "mode": "--flow_times mode",
    "shift_2": "--flow_shift 2",
    "tread": "--route 2:10:0.5",
    "tread_modern": "--route 2:10:0.5 --norm rms --mlp swiglu --positions rope --qk_norm",
}
SPRINT = "--route 2:10:0.75:sprint"
ROWS |= {
    "sprint": SPRINT,
    "sprint_end": f"{SPRINT} --route_until 1300",  # the last fifth of one minute on an H100 is dense
    "sprint_muon": f"{SPRINT} --optimizer muon",
    "speedrun": f"{SPRINT} --optimizer muon {ROWS['modern']} --flow_times logit_normal",
}
ROWS |= {
    "muon": "--optimizer muon",
    "power": f"{SPRINT} --average power:0.05,0.10",  # to be measured with --widths
    "meanflow": "--objective meanflow",  # to be measured with --steps 1 and 2
    "meanflow_guided": "--objective meanflow --meanflow_guidance 1.5",
}
PIXELS_64 = "--model DiT-S/16 --image_size 64"  # a token of width 384 has 768 values; measured at 32 px
ROWS |= {
    "min_snr": "--flow_min_snr 5",
    "contrast": "--flow_contrast 0.05",
    "uncertainty": "--uncertainty_weighting",
    "uncertainty_muon_modern": f"--uncertainty_weighting --optimizer muon {ROWS['modern']}",
    "x_prediction": "--flow_prediction x",
    "jit": "--flow_prediction x --flow_times logit_normal --flow_mean 0.8 --flow_std 0.8",
    "64_v": PIXELS_64,
    "64_x": f"{PIXELS_64} --flow_prediction x",
    "64_x_bottleneck": f"{PIXELS_64} --flow_prediction x --patch_bottleneck 128",
    "64_noise": f"{PIXELS_64} --objective ddpm",
}
TEACHER = "teacher"  # the encoder's folder in --outputs; rows refer to it by this name
ROWS |= {
    "repa": f"--repa {TEACHER} --repa_block 4",
    "irepa": f"--repa {TEACHER} --repa_block 4 --repa_projector conv",
    "tread_repa": f"--route 4:10:0.5 --repa {TEACHER} --repa_block 4",
    "tread_repa_modern": f"--route 4:10:0.5 --repa {TEACHER} --repa_block 4 {ROWS['modern']}",
}
SIDE, CLASSES = 32, 10
BATCH = 1000  # pictures drawn or measured at once
CLASSIFIER_BATCH, RATE, DECAY, SMOOTHING, CUTOUT, AVERAGE = 512, 0.4, 5e-4, 0.1, 8, 0.999
TEACHER_BATCH, TEACHER_RATE, TEMPERATURE, NEIGHBOURS = 1024, 1e-3, 0.2, 20


# ------------------------------------------------------------------------------------------------------------ pictures


@dataclass(frozen=True)
class Pictures:
    """Pictures uint8 (N, 32, 32, 3), classes int64 (N,), and class names."""

    pixels: np.ndarray
    labels: np.ndarray
    classes: list[str]


def read_pictures(folder: Path, split: str) -> Pictures:
    """Read a split ("train" or "test") of class folders or of a .jpegs file. Raises FileNotFoundError."""
    if (folder / f"{split}.jpegs").exists():
        table, data = np.load(folder / f"{split}.npz"), (folder / f"{split}.jpegs").read_bytes()
        ends = table["ends"][table["ends"] <= len(data)]  # the file may be truncated
        parts = [data[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        labels, names = table["labels"][: len(ends)], [str(name) for name in table["classes"]]
    elif (folder / split).is_dir():
        names = sorted(path.name for path in (folder / split).iterdir() if path.is_dir())
        files = [sorted((folder / split / name).iterdir()) for name in names]
        labels = np.repeat(np.arange(len(names)), [*map(len, files)])
        parts = [path.read_bytes() for of_class in files for path in of_class]
    else:
        raise FileNotFoundError(f"--data {folder}: neither {split}.jpegs nor a folder {split} of class folders there")
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(part)).convert("RGB")) for part in parts])
    return Pictures(pixels, labels.astype(np.int64), names)


def cached(outputs: Path) -> list[Pictures]:
    """Return both splits from the file that ``prepare`` wrote."""
    found = np.load(outputs / "pictures.npz")
    names = found["classes"].tolist()
    return [Pictures(found[f"{split}_pixels"], found[f"{split}_labels"], names) for split in ("train", "test")]


class InMemory(MediaDataset):
    """Pictures in memory, enlarged to ``side``."""

    def __init__(self, pictures: Pictures, seed: int, side: int = SIDE):
        self.pixels = torch.from_numpy(pictures.pixels).movedim(-1, 1).contiguous()
        if side != SIDE:
            parts = [F.interpolate(part.float(), (side, side), mode="bicubic") for part in self.pixels.split(BATCH)]
            self.pixels = torch.cat([part.round().clamp(0, 255).to(torch.uint8) for part in parts])
        self.labels, self.classes, self.seed = pictures.labels.tolist(), pictures.classes, seed

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, row: int, view: View = PLAIN) -> Item:
        x = self.pixels[row].flip(-1) if view.flip else self.pixels[row]
        return Item(x if view.as_bytes else x.float().div_(127.5).sub_(1), self.labels[row])

    def label(self, row: int) -> int:
        return self.labels[row]

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(lambda: hash_parts("in memory", self.pixels.numpy().tobytes(), str(self.labels)))

    def describe(self) -> Description:
        return Description(
            text=f"{len(self):,} pictures in memory, randomly mirrored",
            class_names=self.classes,
            sample_shape=tuple(self.pixels.shape[1:]),
            random_flip=True,
            seed=self.seed,
        )


# ---------------------------------------------------------------------------------------------------------- classifier


class Classifier(nn.Module):
    """A small ResNet from pixels (B, 3, 32, 32) in [-1, 1] to features (B, 5 * width) and logits (B, 10)."""

    def __init__(self, width: int = 64):
        super().__init__()
        a, b, c, d = width, 2 * width, 4 * width, 5 * width

        def layer(inputs: int, outputs: int, *more: nn.Module) -> nn.Sequential:
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), *more)

        self.start = nn.Sequential(layer(3, a), layer(a, b, nn.MaxPool2d(2)))
        self.first = nn.Sequential(layer(b, b), layer(b, b))
        self.middle = nn.Sequential(layer(b, c, nn.MaxPool2d(2)), layer(c, d, nn.MaxPool2d(2)))
        self.second = nn.Sequential(layer(d, d), layer(d, d))
        self.head = nn.Linear(d, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.start(x)
        x = self.middle(x + self.first(x))
        pool = (x + self.second(x)).mean(dim=(2, 3))
        return pool, self.head(pool)


def scaled(pixels: Tensor) -> Tensor:
    """Return uint8 pictures (B, 32, 32, 3) as float (B, 3, 32, 32) in [-1, 1], channels last."""
    return pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1)


def augmented(padded: Tensor, rows: Tensor) -> Tensor:
    """Return the pictures ``rows`` of ``padded`` (N, 40, 40, 3): cropped to (B, 32, 32, 3), mirrored and partly covered
    by a grey square, at random."""
    count, device, reach = len(rows), padded.device, torch.arange(SIDE, device=padded.device)
    down, across = torch.randint(9, (2, count, 1), device=device) + reach
    across = torch.where(torch.rand(count, 1, device=device) < 0.5, across, across.flip(1))
    x = padded[rows[:, None, None], down[:, :, None], across[:, None, :]]
    hidden = [(reach - torch.randint(SIDE, (count, 1), device=device)).abs() < CUTOUT // 2 for _ in range(2)]
    return torch.where((hidden[0][:, :, None] & hidden[1][:, None, :])[..., None], x.new_full((), 127), x)


def train_classifier(
    pictures: Pictures, test: Pictures, file: Path, epochs: int, width: int = 64, batch: int = CLASSIFIER_BATCH
) -> float:
    """Train the classifier, store the average of its weights in ``file``, and return its accuracy on ``test``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Classifier(width).to(device).to(memory_format=torch.channels_last)
    averaging = torch.optim.swa_utils.get_ema_multi_avg_fn(AVERAGE)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=averaging)
    clean = torch.from_numpy(pictures.pixels).to(device)
    padded = F.pad(clean.permute(0, 3, 1, 2).float(), (4, 4, 4, 4), mode="reflect").to(torch.uint8)
    padded = padded.permute(0, 2, 3, 1).contiguous()
    labels = torch.from_numpy(pictures.labels).to(device)
    batch = min(batch, len(labels))
    steps = epochs * (len(labels) // batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=DECAY, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=max(steps, 2), pct_start=0.2)
    began = time.perf_counter()
    for _ in range(epochs):
        order = torch.randperm(len(labels), device=device)
        for rows in order[: len(labels) // batch * batch].view(-1, batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(scaled(augmented(padded, rows)))[1]
                loss = F.cross_entropy(logits, labels[rows], label_smoothing=SMOOTHING)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
    # Update batch norm with real pictures, because augmented pictures have other means and variances.
    torch.optim.swa_utils.update_bn((scaled(part) for part in clean.split(BATCH)), average.module)
    # Store convolutions, the only large weights, in half precision. The result does not change.
    tensors = {k: v.half() if v.dim() == 4 else v for k, v in average.module.state_dict().items()}
    tensors = {k: v.cpu().contiguous() for k, v in tensors.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, {"width": str(width)})
    accuracy = share_named(load_classifier(file, device), test)
    seconds = f"{time.perf_counter() - began:.0f}"
    save_file(tensors, file, {"width": str(width), "accuracy": str(accuracy), "seconds": seconds})
    return accuracy


def load_classifier(file: Path, device: torch.device) -> Classifier:
    """Return the stored classifier in fp32. Also turn TF32 off, which would make small distances inaccurate."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    with safe_open(file, "pt") as stored:
        model = Classifier(int(stored.metadata()["width"]))
        model.load_state_dict({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118 (no dict)
    return model.float().eval().requires_grad_(False).to(device).to(memory_format=torch.channels_last)


@torch.inference_mode()
def features_of(model: Classifier, pixels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return features (N, D) and classes (N,) of uint8 pictures (N, 32, 32, 3), averaged with their mirror images."""
    device, pools, named = model.head.weight.device, [], []
    for part in torch.from_numpy(pixels).split(BATCH):
        x = scaled(part.to(device))
        (pool, logits), (mirrored_pool, mirrored_logits) = model(x), model(x.flip(3))
        pools.append((pool + mirrored_pool) / 2)
        named.append((logits + mirrored_logits).argmax(1))
    return torch.cat(pools), torch.cat(named)


def share_named(model: Classifier, pictures: Pictures) -> float:
    """Return the share of pictures that the classifier assigns to the right class."""
    _, named = features_of(model, pictures.pixels)
    return float((named.cpu() == torch.from_numpy(pictures.labels)).double().mean())


# ------------------------------------------------------------------------------------------------------------- teacher


def views(pixels: Tensor) -> Tensor:
    """Return random views of pictures (B, 3, 32, 32) in [-1, 1]: cropped, mirrored, and recoloured or grey."""
    count, device = len(pixels), pixels.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, device=device) * (high - low) + low

    scale = uniform(0.2, 1.0).sqrt()
    turned = scale * torch.where(uniform(0, 1) < 0.5, -1, 1)
    place = (1 - scale)[:, None] * uniform(-1, 1, 2)
    zero = torch.zeros_like(scale)
    matrix = torch.stack([turned, zero, place[:, 0], zero, scale, place[:, 1]], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(matrix, list(pixels.shape), align_corners=False)
    x = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    x = x * uniform(0.6, 1.4, 3, 1, 1) + uniform(-0.4, 0.4, 1, 1, 1)
    return torch.where(uniform(0, 1, 1, 1, 1) < 0.2, x.mean(dim=1, keepdim=True), x).clamp(-1, 1)


def train_teacher(pictures: Pictures, folder: Path, epochs: int, tiny: bool) -> None:
    """Train a small vision transformer without labels, and store it in the format of transformers."""
    from transformers import Dinov2Config, Dinov2Model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    width, depth = (24, 1) if tiny else (192, 6)
    shape: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 3}
    model = Dinov2Model(Dinov2Config(**shape, image_size=SIDE, patch_size=8 if tiny else 2)).train()
    model.to(device)  # pyright: ignore[reportArgumentType]  # transformers' decorator hides the first argument
    head = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 128)).to(device)
    pixels = torch.from_numpy(pictures.pixels).to(device)
    batch, parameters = min(TEACHER_BATCH, len(pixels)), [*model.parameters(), *head.parameters()]
    steps = max(2, epochs * (len(pixels) // batch))
    optimizer = torch.optim.AdamW(parameters, TEACHER_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, TEACHER_RATE, total_steps=steps, pct_start=0.15)
    same = torch.arange(2 * batch, device=device).roll(batch)  # index of the same picture's other view
    for _ in range(epochs):
        for rows in torch.randperm(len(pixels), device=device)[: len(pixels) // batch * batch].view(-1, batch):
            clean = scaled(pixels[rows])
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                tokens = model(torch.cat([views(clean), views(clean)])).last_hidden_state[:, 1:]
                found = F.normalize(head(tokens.mean(dim=1)).float(), dim=1)
            likeness = (found @ found.T / TEMPERATURE).fill_diagonal_(-torch.inf)
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(likeness, same).backward()
            optimizer.step()
            schedule.step()
    model.eval().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))


@torch.inference_mode()
def share_of_neighbours(folder: Path, train: Pictures, test: Pictures) -> float:
    """Return the nearest-neighbour accuracy on the test pictures. Features are the mean of the encoder's tokens."""
    from transformers import Dinov2Model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Dinov2Model.from_pretrained(folder).eval()
    model.to(device)  # pyright: ignore[reportArgumentType]  # transformers' decorator hides the first argument

    def features(pixels: np.ndarray) -> Tensor:
        parts = torch.from_numpy(pixels).split(BATCH)
        return torch.cat(
            [F.normalize(model(scaled(part.to(device))).last_hidden_state[:, 1:].mean(dim=1), dim=1) for part in parts]
        )

    known, labels = features(train.pixels), torch.from_numpy(train.labels).to(device)
    near = torch.cat([(part @ known.T).topk(NEIGHBOURS).indices for part in features(test.pixels).split(BATCH)])
    named = F.one_hot(labels[near], CLASSES).sum(dim=1).argmax(dim=1)
    return float((named.cpu() == torch.from_numpy(test.labels)).double().mean())


# -------------------------------------------------------------------------------------------------------------- metric


def nearest(pixels: np.ndarray, train: np.ndarray, device: torch.device) -> Tensor:
    """Return each picture's distance to the nearest training picture or its mirror image, (N, 1).

    The distance is 1 minus the correlation of the pixels. By Euclidean distance, a picture without contrast would be
    near every other picture."""

    def unit(part: Tensor) -> Tensor:
        x = part.to(device).flatten(1).float()
        x = x - x.mean(dim=1, keepdim=True)
        return x / x.norm(dim=1, keepdim=True).clamp_min(1.0)

    others = torch.from_numpy(train)
    every = [unit(part) for part in (others, others.flip(2))]
    rows = torch.from_numpy(pixels).split(BATCH)
    found = [torch.stack([1 - (unit(part) @ each.T).amax(1) for each in every]).amin(0) for part in rows]
    return torch.cat(found)[:, None].cpu()


@dataclass(frozen=True)
class Metric:
    """Compares samples with the test pictures."""

    classifier: Classifier
    test: Gaussian
    train: np.ndarray
    held_out: Tensor

    @classmethod
    def of(cls, classifier: Classifier, train: Pictures, test: Pictures) -> "Metric":
        """Build the metric from the classifier and both splits."""
        pool, _ = features_of(classifier, test.pixels)
        device = classifier.head.weight.device
        held_out = nearest(test.pixels, train.pixels, device)
        return cls(classifier, Moments.of(pool).gaussian(), train.pixels, held_out)

    def __call__(self, pixels: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Return the metrics. pixels: uint8 (N, 32, 32, 3). labels: (N,) requested classes."""
        pool, named = features_of(self.classifier, pixels)
        near = nearest(pixels, self.train, pool.device)
        return {
            "frechet": frechet_distance(Moments.of(pool).gaussian(), self.test),
            "accuracy": float((named.cpu() == torch.from_numpy(labels)).double().mean()),
            "copies": share_of_copies(near, self.held_out),
        }


def floor(classifier: Classifier, train: Pictures, test: Pictures) -> dict[str, float]:
    """Return two Fréchet distances between real pictures: between halves of the test split, and between training
    pictures and the test split."""
    pool, _ = features_of(classifier, test.pixels)
    rows = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))  # may be sorted by class
    halves = [Moments.of(pool[part.to(pool.device)]).gaussian() for part in rows.chunk(2)]
    of_train, _ = features_of(classifier, train.pixels[: len(pool)])
    whole = Moments.of(pool).gaussian()
    return {
        "halves of test": frechet_distance(*halves),
        "train, test": frechet_distance(Moments.of(of_train).gaussian(), whole),
    }


# ----------------------------------------------------------------------------------------------------------- one row


def seconds_of(lines: Sequence[dict[str, Any]], batch: int, step: int | None = None) -> float:
    """Return the seconds of training up to ``step``, or up to the last logged step, at the median speed in the log.

    The first line includes compilation, so it counts only if it is the only one."""
    if not lines:
        return 0.0
    rate = statistics.median(line["samples_per_s"] for line in lines[1:] or lines)
    return (lines[-1]["step"] if step is None else step) * batch / rate


def read_log(outputs: Path) -> list[dict[str, Any]]:
    """Return the complete log lines of the newest run in ``outputs``."""
    runs = run_folders(outputs)
    log = runs[-1] / "log.jsonl" if runs else outputs
    if not log.is_file():
        return []
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def stop_after(seconds: float, outputs: Path, batch: int, ended: threading.Event) -> None:
    """Signal this process to save and stop when the run in ``outputs`` has trained for ``seconds``."""
    while not ended.wait(0.2):
        if seconds_of(read_log(outputs), batch) >= seconds:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def flags_of(args: argparse.Namespace, own: str, seed: int) -> list[str]:
    """Return the flags of train.py for a row."""
    speed = TINY if args.tiny else ON_GPU if torch.cuda.is_available() else "--mixed_precision fp32 --num_workers 0"
    words, last = shlex.split(f"{BASE} {speed} {args.more} {own} --ckpt_every {args.every} --global_seed {seed}"), {}
    words = [str(args.outputs / TEACHER) if word == TEACHER else word for word in words]
    for word in words:  # keep only a flag's last occurrence, so that train.py gives no warning
        if word.startswith("--"):
            values = last[word.replace("--no_", "--").partition("=")[0]] = [word]
        else:
            values.append(word)
    if "--average" in last:  # replaces --ema_decay
        del last["--ema_decay"]
    return [word for values in last.values() for word in values]


def run_row(args: argparse.Namespace, name: str, own: str, seed: int) -> None:
    """Train a row, measure it, and write its JSON file."""
    train, test = cached(args.outputs)
    outputs = args.outputs / "runs" / f"{name}-{seed}"
    config = parse(TrainConfig, [*flags_of(args, own, seed), "--outputs", str(outputs)])
    batch, ended = config.global_batch_size or config.batch_size * config.grad_accumulation, threading.Event()
    watch = threading.Thread(target=stop_after, args=(args.seconds, outputs, batch, ended), daemon=True)
    watch.start()
    try:
        folder = opendit.train(config, InMemory(train, seed, config.image_size))
    finally:
        ended.set()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    metric = Metric.of(load_classifier(args.outputs / "classifier.safetensors", device), train, test)
    labels = np.arange(args.samples) % len(train.classes)
    lines, points = read_log(outputs), []
    for checkpoint in chosen(folder / "checkpoints", args.points):
        step, began = int(checkpoint.name.removeprefix("step_")), time.perf_counter()
        pixels = draw(checkpoint, labels, args.steps, args)
        points.append(
            {"step": step, "pictures": step * batch, "seconds": seconds_of(lines, batch, step)}
            | metric(pixels, labels)
            | {"evaluation_s": time.perf_counter() - began}
        )
        print(f"{name} (seed {seed}): {points[-1]}", flush=True)
    also: dict[str, dict[str, float]] = {}
    others = [(f"{steps} steps", checkpoint, steps) for steps in args.also]
    others += [(f"width {width:g}", reconstruct(checkpoint, width), args.steps) for width in args.widths]
    for what, weights, steps in others:
        also[what] = metric(draw(weights, labels, steps, args), labels)
        print(f"{name} (seed {seed}): {what}: {also[what]}", flush=True)
    shutil.rmtree(folder / "checkpoints")  # each takes half a GiB
    image = Image.fromarray(pixels[:100].reshape(-1, 10, SIDE, SIDE, 3).swapaxes(1, 2).reshape(-1, 10 * SIDE, 3))
    image.save(args.outputs / f"{name}-{seed}.png")
    rate = statistics.median(line["samples_per_s"] for line in lines[1:] or lines)
    memory = max(line["memory_gib"] for line in lines)
    of_run = {"name": name, "flags": own, "seed": seed, "more": args.more, "pictures_per_s": rate, "memory_gib": memory}
    of_run["waited_for_data"] = sum(line["data_wait_s"] for line in lines) / seconds_of(lines, batch)
    of_run |= {"card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "commit": commit()}
    of_run |= {
        "sampling_steps": args.steps,
        "guidance": args.guidance,
        "guidance_by": args.guidance_by,
        "samples": args.samples,
        "points": points,
        "also": also,
    }
    (args.outputs / f"{name}-{seed}.json").write_text(json.dumps(of_run, indent=1) + "\n")


def chosen(checkpoints: Path, count: int) -> list[Path]:
    """Return the checkpoints nearest to the ends of ``count`` equal parts of the run."""
    found = sorted(checkpoints.glob("step_*"))
    steps = np.array([int(path.name.removeprefix("step_")) for path in found])
    wanted = steps[-1] * (1 + np.arange(count)) / count
    return [found[at] for at in sorted({int(np.abs(steps - step).argmin()) for step in wanted})]


def draw(weights: Path, labels: np.ndarray, steps: int, args: argparse.Namespace) -> np.ndarray:
    """Return samples from a checkpoint's averaged weights, uint8 (N, 32, 32, 3). Larger samples are scaled down."""
    pipe = opendit.load(weights)
    how = {"steps": steps, "guidance": args.guidance, "guidance_by": args.guidance_by}
    drawn = pipe(labels.tolist(), **how, seed=0, batch_size=min(BATCH, args.samples), progress=False)
    return np.stack(
        [np.asarray(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)) for picture in drawn]
    )


# ----------------------------------------------------------------------------------------------------------- all rows


def named_rows(asked: Sequence[str]) -> dict[str, str]:
    """Return {name: flags} of the rows; NAME=FLAGS defines a new row. Raises ValueError for an unknown name."""
    found = {}
    for each in asked:
        name, given, flags = each.partition("=")
        if not given and name not in ROWS:
            raise ValueError(f"--rows {name}: unknown; give NAME=FLAGS or one of {', '.join(ROWS)}")
        found[name] = flags if given else ROWS[name]
    return found


def run_rows(args: argparse.Namespace, argv: list[str], rows: dict[str, str]) -> bool:
    """Run all rows with all seeds, one per GPU at a time. Return True if all succeeded."""
    left = [(name, own, seed) for seed in args.seeds for name, own in rows.items()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    free = visible.split(",")[: args.gpus] if visible else [str(gpu) for gpu in range(max(args.gpus, 1))]
    running, good = {}, True
    while left or running:
        while left and free:
            (name, own, seed), gpu = left.pop(0), free.pop(0)
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if torch.cuda.is_available() else {})
            output = (args.outputs / f"{name}-{seed}.txt").open("w")
            command = [sys.executable, str(Path(__file__).resolve()), *argv, f"--child={json.dumps([name, own, seed])}"]
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            running[gpu] = process, name, seed, output
            print(f"{name} (seed {seed}): on GPU {gpu}", flush=True)
        time.sleep(0.2)
        for gpu, (process, name, seed, output) in list(running.items()):
            if process.poll() is None:
                continue
            output.close()
            del running[gpu]
            free.append(gpu)
            if process.returncode:
                good = False
                tail = "\n  ".join(Path(output.name).read_text().splitlines()[-8:])
                print(f"{name} (seed {seed}): failed, {output.name} ends with\n  {tail}", flush=True)
            else:
                print(f"{name} (seed {seed}): done", flush=True)
    return good


def collect(outputs: Path) -> list[dict[str, Any]]:
    """Write results.json and recipes.png, print the table, and return the rows from all JSON files."""
    facts = json.loads((outputs / "real.json").read_text())
    rows = [json.loads(path.read_text()) for path in sorted(outputs.glob("*-*.json"))]
    (outputs / "results.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    print(f"classifier: {facts['accuracy']:.2%} on the test split; real pictures: {facts['floor']}\n")
    title = f"{'row':18s} {'seed':>4s} {'img/s':>7s} {'GiB':>5s} {'seconds':>7s} {'pictures':>10s} {'frechet':>8s}"
    print(f"{title} {'accuracy':>8s} {'copies':>6s}")
    for row in rows:
        for at in row["points"]:
            text = f"{row['name']:18s} {row['seed']:4d} {row['pictures_per_s']:7.0f} {row['memory_gib']:5.1f} "
            text += f"{at['seconds']:7.0f} {at['pictures']:10,d} {at['frechet']:8.4f} "
            print(f"{text}{at['accuracy']:8.1%} {at['copies']:6.1%}")
    if rows:
        plot(rows, facts["floor"]["halves of test"], outputs / "recipes.png")
    return rows


def csv_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows for results.csv. The baseline is the base row with the same seed, at the same time within 5 %."""
    found = []
    for row in rows:
        case = f"{row['name']} {row['flags']} {row['more']} seed {row['seed']}"
        bases = [r for r in rows if r["name"] == "base" and r["seed"] == row["seed"] and r is not row]
        for at in row["points"]:
            made = {"bench": "cifar10", "case": " ".join(case.split()), "value": f"{at['frechet']:.4f}"}
            made["metric"] = f"frechet after {at['seconds']:.0f} s"
            near = [b for r in bases for b in r["points"] if abs(b["seconds"] / at["seconds"] - 1) < 0.05]
            if near:
                made |= {"baseline": "base", "baseline_value": f"{near[0]['frechet']:.4f}"}
            found.append(made)
    return found


def plot(rows: Sequence[dict[str, Any]], lowest: float, file: Path) -> None:
    """Plot the distance against pictures seen and against GPU seconds. Rows with one name share a colour."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(row["name"] for row in rows))
    for axis, key, unit, label in zip(
        axes, ("pictures", "seconds"), (1e6, 1), ("million pictures seen", "GPU seconds"), strict=True
    ):
        for row in rows:
            number, first = names.index(row["name"]), row is next(r for r in rows if r["name"] == row["name"])
            axis.plot(
                [at[key] / unit for at in row["points"]],
                [at["frechet"] for at in row["points"]],
                color=f"C{number % 10}",
                linestyle=("-", "--", ":")[number // 10 % 3],
                marker="o",
                markersize=3,
                label=row["name"] if first else None,
            )
        axis.set(xlabel=label, xlim=(0, None), yscale="log")
        axis.yaxis.set(major_locator=LogLocator(2, subs=(1, 1.5)), minor_locator=NullLocator(), major_formatter="{x:g}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"Fréchet distance (halves of real pictures: {lowest:.2f})")
    axes[1].legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=110)


def prepare_teacher(args: argparse.Namespace, stored: Path) -> None:
    """Train the encoder for rows with --repa, and add its accuracy to the file ``stored``."""
    train, test = cached(args.outputs)
    began = time.perf_counter()
    train_teacher(train, args.outputs / TEACHER, args.teacher_epochs, args.tiny)
    share, seconds = share_of_neighbours(args.outputs / TEACHER, train, test), time.perf_counter() - began
    print(f"teacher: its neighbours name {share:.2%} of the test split right, {seconds:.0f} s", flush=True)
    facts = json.loads(stored.read_text()) | {"teacher": {"neighbours": share, "seconds": seconds}}
    stored.write_text(json.dumps(facts) + "\n")


def prepare(args: argparse.Namespace, needs_teacher: bool) -> None:
    """Read the pictures, train classifier and teacher, and measure the real pictures. Existing results are reused."""
    args.outputs.mkdir(parents=True, exist_ok=True)
    stored, teacher = args.outputs / "real.json", args.outputs / TEACHER
    if stored.exists():
        if needs_teacher and not teacher.exists():
            prepare_teacher(args, stored)
        return
    if args.data is None:
        raise ValueError(f"--data: {args.outputs} has no classifier yet; name the folder with CIFAR-10")
    train, test = (read_pictures(args.data, split) for split in ("train", "test"))
    arrays: dict[str, Any] = {"classes": np.array(train.classes)}
    for name, each in (("train", train), ("test", test)):
        arrays |= {f"{name}_pixels": each.pixels, f"{name}_labels": each.labels}
    np.savez(args.outputs / "pictures.npz", **arrays)
    file = args.outputs / "classifier.safetensors"
    if args.classifier is not None:
        file.write_bytes(args.classifier.read_bytes())
    elif not file.exists():
        began = time.perf_counter()
        accuracy = train_classifier(train, test, file, args.epochs, 8 if args.tiny else 64)
        print(f"classifier: {accuracy:.2%} after {time.perf_counter() - began:.0f} s, {file}", flush=True)
    classifier = load_classifier(file, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    facts = {
        "accuracy": share_named(classifier, test),
        "weights": sum(p.numel() for p in classifier.parameters()),
        "floor": floor(classifier, train, test),
        "pictures": {"train": len(train.labels), "test": len(test.labels)},
    }
    stored.write_text(json.dumps(facts) + "\n")
    if needs_teacher:
        prepare_teacher(args, stored)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10; needed once for every --outputs")
    parser.add_argument("--rows", nargs="+", default=[], metavar="NAME[=FLAGS]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--gpus", type=int, default=1, help="rows that run at once, one on each GPU")
    parser.add_argument("--seconds", type=float, default=180, help="of training, for each row")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=3, help="moments of a run that are measured, equally far apart")
    parser.add_argument("--steps", type=int, default=50, help="of the sampler")
    parser.add_argument("--also", type=int, nargs="+", default=[], help="more numbers of steps, at the end of a run")
    parser.add_argument("--widths", type=float, nargs="+", default=[], help="also of these power averages")
    parser.add_argument("--guidance", type=float, default=1.0, help="1: none")
    parser.add_argument("--guidance_by", default="null", help="as of sample.py: null, route or FIRST:LAST:SHARE")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--more", default="", metavar="'--FLAG VALUE'", help="flags of train.py for all rows")
    parser.add_argument("--classifier", type=Path, help="one that this program has stored, instead of a new one")
    parser.add_argument("--epochs", type=int, default=73, help="of the classifier's training")
    parser.add_argument("--teacher_epochs", type=int, default=40, help="of the training of --repa's encoder")
    parser.add_argument("--outputs", type=Path, default=Path("outputs/bench_cifar10"))
    parser.add_argument("--tiny", action="store_true", help="a small model of 16 tokens, to try the program on a CPU")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--plot", action="store_true", help="only collect and plot what is there")
    add_flags(parser)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)  # run one row in this process
    args = parser.parse_args(argv)
    args.outputs = args.outputs.resolve()
    if args.list:
        print(f"all: {BASE}\n" + "\n".join(f"{name}: {flags}" for name, flags in ROWS.items()))
        return 0
    if args.child is not None:
        run_row(args, *args.child)
        return 0
    try:
        rows = named_rows(args.rows)
        needs_teacher = any(TEACHER in own.split() for own in rows.values())
        for own in rows.values():  # report wrong flags before training the classifier
            parse(TrainConfig, flags_of(args, own, args.seeds[0]))
        if not args.plot:
            prepare(args, needs_teacher)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    good = args.plot or run_rows(args, argv, rows)
    record(csv_rows(collect(args.outputs)), args)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
