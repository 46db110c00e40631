"""Features of the built-in digits and moving digits, from a small classifier that is trained when needed.

Training takes seconds. It uses float64 and a fixed seed, so features differ between machines only by rounding. In a
clip, the classifier sees the digit cut out along its path."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.common.utils import hash_parts
from opendit.data.digits import DIGIT_NAMES, DIRECTIONS, SIZE, SPLITS, digits_split, parse_caption, render
from opendit.evaluation.media import Media, array_media

VERSION = "1"  # increase this if a code change affects the features
WIDTH = 16  # width of the features; a larger covariance would need more than the 359 held-out digits
HIDDEN, EPOCHS, BATCH, RATE = 256, 60, 128, 1e-2
# SHIFT: largest random shift in half widths. NOISE: standard deviation, for pixels in -1..1. SMOOTHING: label
# smoothing.
SHIFT, NOISE, SMOOTHING = 0.1, 0.3, 0.05
COPY_QUANTILE = 0.01  # samples that are closer to a training digit than this quantile of held-out digits are copies

# Constants of moving digits:
FILE_FRAMES, FILE_SIZE = 48, 64  # frames and side in pixels of the demo's clips
HELD_OUT = 400  # number of clips from the 359 held-out digits
# A clip's features include the digit's position (x, y) in PLACES frames, in frame widths times PATH_SCALE.
PLACES, PATH_SCALE = 4, 10.0
SEEDS = {"train": 1, "test": 2}


@dataclass(frozen=True)
class DigitClassifier:
    """A classifier of digits, in float64.

    hidden: pixels (B, 1, 8, 8) in -1..1 -> features (B, WIDTH). head: features -> logits (B, 10). images: the training
    digits' pixels (N, 64) in -1..1."""

    hidden: nn.Module
    head: nn.Module
    images: Tensor

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> dict[str, Tensor]:
        """Classify float64 pixels (B, 1, 8, 8) in -1..1. Return features "pool" (B, WIDTH), logits "digit" (B, 10), and
        the distance "nearest" (B, 1) to the nearest training digit."""
        hidden, head = self.hidden.to(pixels.device), self.head.to(pixels.device)
        images = self.images.to(pixels.device)
        pool = hidden(pixels)
        nearest = torch.cdist(pixels.flatten(1), images, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
        return {"pool": pool, "digit": head(pool), "nearest": nearest[:, None]}


def train_classifier(images: Tensor, labels: Tensor) -> DigitClassifier:
    """Train a classifier on digits (N, 1, 8, 8) in -1..1 and labels (N,), with small random shifts and noise."""
    x, y, generator = images.double(), labels, torch.Generator().manual_seed(0)

    def linear(inputs: int, outputs: int) -> nn.Linear:
        layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float64))
        with torch.no_grad():
            layer.weight.normal_(generator=generator).mul_((2 / inputs) ** 0.5)
            layer.bias.zero_()
        return layer

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1

    hidden = nn.Sequential(nn.Flatten(), linear(SIZE * SIZE, HIDDEN), nn.GELU(), linear(HIDDEN, WIDTH), nn.GELU())
    head = linear(WIDTH, 10)
    parameters, batch = [*hidden.parameters(), *head.parameters()], min(BATCH, len(x))
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.05)
    steps = len(x) // batch * EPOCHS
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    upright = torch.eye(2, dtype=torch.float64).expand(batch, 2, 2)
    with torch.enable_grad(), _one_thread():
        for _ in range(EPOCHS):
            order = torch.randperm(len(x), generator=generator)
            for rows in order[: len(x) // batch * batch].view(-1, batch):
                moved = F.affine_grid(
                    torch.cat([upright, SHIFT * uniform(batch, 2, 1)], dim=2),
                    [batch, 1, SIZE, SIZE],
                    align_corners=False,
                )
                # grid_sample pads with 0 but the background is -1, so shift the values by 1.
                pixels = F.grid_sample(x[rows] + 1, moved, align_corners=False) - 1
                pixels = pixels + NOISE * torch.randn(pixels.shape, generator=generator, dtype=torch.float64)
                loss = F.cross_entropy(head(hidden(pixels)), y[rows], label_smoothing=SMOOTHING)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    for part in (hidden, head):
        part.requires_grad_(False)
    return DigitClassifier(hidden, head, x.flatten(1))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, because several threads are slower for such small matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
@torch.inference_mode(False)  # the caller may be in inference mode, but the first call trains the classifier
def picture_classifier() -> DigitClassifier:
    """Return the classifier of the built-in training digits. The first call trains it."""
    return train_classifier(*digits_split("train"))


def picture_features(pixels: Tensor) -> dict[str, Tensor]:
    """Return :class:`DigitClassifier`'s features of uint8 pictures (B, 3, H, W), reduced to grey 8 x 8 pixels."""
    grey = pixels.double().mean(dim=1, keepdim=True) / 127.5 - 1
    if grey.shape[2:] != (SIZE, SIZE):
        grey = F.interpolate(grey, (SIZE, SIZE), mode="bilinear", antialias=True)
    return picture_classifier()(grey)


@functools.cache
def digits_sha256(kind: str) -> str:
    """Hash the data and constants that determine the features. kind: "pictures" or "clips"."""
    data = [part.numpy().tobytes() for split in SPLITS for part in digits_split(split)]
    constants = WIDTH, HIDDEN, EPOCHS, BATCH, RATE, SHIFT, NOISE, SMOOTHING
    return hash_parts("digits", kind, VERSION, str(constants), *data)


@dataclass(frozen=True)
class RealDigits:
    """Real samples, and their digits and directions."""

    media: Media
    asked: "AskedDigits"


def real_pictures(split: str, count: int | None = None) -> RealDigits:
    """Return a split's digits as uint8 pictures (8, 8, 3). count: choose at most this many, at random."""
    images, labels = digits_split(split)
    if count is not None and count < len(images):
        rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count]
        images, labels = images[rows], labels[rows]
    pixels = ((images + 1) * 127.5).round().to(torch.uint8).expand(-1, 3, -1, -1).movedim(1, -1).numpy()
    sha256 = hash_parts("digits", split, pixels.tobytes())
    return RealDigits(array_media(f"digits ({SPLIT_NAMES[split]})", lambda: sha256, pixels, None), AskedDigits(labels))


SPLIT_NAMES = {"train": "train", "test": "held out"}


@dataclass(frozen=True)
class AskedDigits:
    """The digits that samples should show, and their movement.

    digits: (N,) int64. directions: (x, y) of the movement, (N, 2) float64, or None."""

    digits: Tensor
    directions: Tensor | None = None


def asked_of_labels(labels: Sequence[int] | np.ndarray | None) -> AskedDigits | None:
    """Return the digits that class labels request; None without labels, or for a label other than 0 to 9."""
    found = torch.as_tensor(np.asarray([] if labels is None else labels))
    if not len(found) or found.is_floating_point() or found.ndim != 1 or found.min() < 0 or found.max() > 9:
        return None
    return AskedDigits(found.long())


def asked_of_captions(captions: Sequence[str] | None) -> AskedDigits | None:
    """Return the digits that captions such as "a seven" or "a seven moving left" request; None without captions, or for
    a caption of another form."""
    try:
        found = [parse_caption(text) for text in captions or ()]
        directions = torch.tensor([DIRECTIONS[direction] for _, direction in found], dtype=torch.float64)
        return AskedDigits(torch.tensor([digit for digit, _ in found]), directions) if found else None
    except ValueError:
        words = [text.lower().split() for text in captions or ()]
    if not all(len(two) == 2 and two[0] in ("a", "an") and two[1] in DIGIT_NAMES for two in words):
        return None
    return AskedDigits(torch.tensor([DIGIT_NAMES.index(two[1]) for two in words]))


def named_right(logits: Tensor, asked: AskedDigits) -> Tensor:
    """Return (N,) bool: True if the largest of a sample's 10 logits belongs to the requested digit."""
    return logits.argmax(dim=1).cpu() == asked.digits


def share_of_copies(nearest: Tensor, held_out: Tensor) -> float:
    """Return the share of samples that are copies of training digits. A copy is closer to a training digit than nearly
    all held-out digits are, by COPY_QUANTILE. nearest: the samples' distances (N, 1) to the nearest training digit.
    held_out: the held-out digits' distances (M, 1)."""
    border = held_out.double().flatten().quantile(COPY_QUANTILE)
    return float((nearest.double().flatten() < border).double().mean())


@dataclass(frozen=True)
class ClipShape:
    """A clip's number of frames, interval between frames, and side in pixels."""

    frames: int
    interval: int
    size: int


@functools.cache
def real_clips(split: str, shape: ClipShape, count: int | None = None) -> RealDigits:
    """Render a split's moving digits as uint8 clips (T, H, W, 3). The four directions take turns.

    count: number of clips; by default HELD_OUT for the held-out split, else one per training digit. Raises ValueError
    if the clips would be longer than FILE_FRAMES."""
    span = (shape.frames - 1) * shape.interval + 1
    if span > FILE_FRAMES:
        raise ValueError(
            f"--features digits: moving digits have {FILE_FRAMES} frames, fewer than {span}; lower --num_frames "
            "or --frame_interval"
        )
    images, labels = digits_split(split)
    first, names = (FILE_FRAMES - span) // 2, list(DIRECTIONS)
    random, clips, asked = np.random.default_rng(SEEDS[split]), [], []
    order = random.permutation(len(images))
    for number in range(count or (HELD_OUT if split == "test" else len(images))):
        row, name = int(order[number % len(order)]), names[number % len(names)]
        clip = render(images[row, 0], name, FILE_FRAMES, FILE_SIZE, jitter_seed=int(random.integers(2**31)))
        used = torch.from_numpy(clip[first : first + span : shape.interval, ..., 0].copy()).float()[:, None]
        clips.append(F.interpolate(used, (shape.size, shape.size), mode="area")[:, 0].round().to(torch.uint8))
        asked.append((int(labels[row]), DIRECTIONS[name]))
    pixels = torch.stack(clips)[..., None].expand(-1, -1, -1, -1, 3).numpy()
    sha256 = hash_parts("moving digits", split, pixels.tobytes())
    media = array_media(f"moving digits ({SPLIT_NAMES[split]})", lambda: sha256, pixels, None)
    digits, directions = zip(*asked, strict=True)
    return RealDigits(media, AskedDigits(torch.tensor(digits), torch.tensor(directions, dtype=torch.float64)))


@functools.cache
@torch.inference_mode(False)  # the caller may be in inference mode, but the first call trains the classifier
def clip_classifier(shape: ClipShape) -> DigitClassifier:
    """Return a classifier of digits cut out of training clips. The first call trains it."""
    real = real_clips("train", shape)
    grey = _grey(torch.from_numpy(np.array(real.media.read_all())).movedim(-1, 1))
    return train_classifier(centred_digits(grey, centres(grey)), real.asked.digits)


def clip_features(shape: ClipShape, pixels: Tensor) -> dict[str, Tensor]:
    """Compute features of uint8 clips (B, 3, T, H, W). "pool" has the classifier's "pool" and the digit's position in
    PLACES frames. "moved" (B, 2) is the digit's displacement (x, y) in frame widths. "digit" and "nearest" are as in
    :class:`DigitClassifier`."""
    grey = _grey(pixels)
    path = centres(grey)
    found = clip_classifier(shape)(centred_digits(grey, path))
    times = torch.linspace(0, grey.shape[1] - 1, PLACES).round().long()
    places = PATH_SCALE * (path[:, times] / grey.shape[-1]).flatten(1)
    quarter = max(1, grey.shape[1] // 4)
    moved = (path[:, -quarter:].mean(dim=1) - path[:, :quarter].mean(dim=1)) / grey.shape[-1]
    return {**found, "pool": torch.cat([found["pool"], places], dim=1), "moved": moved}


def _grey(pixels: Tensor) -> Tensor:
    return pixels.double().mean(dim=1) / 255


def centres(clips: Tensor) -> Tensor:
    """Return each frame's centre of mass (x, y) in pixels, (B, T, 2). clips: (B, T, H, W)."""
    mass = clips.sum(dim=(2, 3)) + 1e-6
    x, y = (torch.arange(size, dtype=clips.dtype, device=clips.device) for size in (clips.shape[3], clips.shape[2]))
    return torch.stack([(clips.sum(dim=2) * x).sum(-1) / mass, (clips.sum(dim=3) * y).sum(-1) / mass], dim=-1)


def centred_digits(clips: Tensor, path: Tensor) -> Tensor:
    """Return each clip's digit, (B, 1, 8, 8) in -1..1. The frames are centred on the digit and averaged. clips: (B, T,
    H, W) in 0..1. path: the digit's centres, (B, T, 2)."""
    height, width = clips.shape[2:]
    half = max(1, int(width * 0.4))
    padded = F.pad(clips, (half, half, half, half))
    corner = path.round().long()
    rows = (corner[..., 1].clamp(0, height - 1)[..., None] + torch.arange(2 * half, device=clips.device))[..., :, None]
    columns = (corner[..., 0].clamp(0, width - 1)[..., None] + torch.arange(2 * half, device=clips.device))[
        ..., None, :
    ]
    sample = torch.arange(len(clips), device=clips.device)[:, None, None, None]
    frame = torch.arange(clips.shape[1], device=clips.device)[None, :, None, None]
    digit = padded[sample, frame, rows, columns].mean(dim=1, keepdim=True)
    if half != SIZE // 2:
        digit = F.interpolate(digit, (SIZE, SIZE), mode="area")
    return 2 * digit - 1


def moved_right(moved: Tensor, asked: AskedDigits) -> Tensor:
    """Return (N,) bool: True if a sample moved more than 0.05 frame widths in the requested direction, and less across.
    moved: displacements (N, 2) in frame widths."""
    moved, wanted = moved.double().cpu(), asked.directions
    assert wanted is not None
    along, across = (moved * wanted).sum(dim=1), (moved * wanted.flip(1)).sum(dim=1).abs()
    return along > across.clamp_min(0.05)
