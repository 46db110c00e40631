"""Pictures from a model: labels and a seed in, pixels out; grids and files."""

import bisect
import math
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from opendit.common.replace import replacing
from opendit.diffusion import Objective, cfg_model, guided_within
from opendit.models import Condition, DiT


@torch.inference_mode()
def sample_latents(
    model: DiT,
    y: Condition,
    null: Condition,
    index: Tensor,
    *,
    objective: Objective,
    seed: int,
    steps: int,
    sampler: str | None = None,
    cfg_scale: float = 4.0,
    cfg_channels: int | None = None,
    cfg_interval: tuple[float, float] | None = None,
    size: tuple[int, ...] | None = None,
    forward: Callable[[Tensor, Tensor, Condition], Tensor] | None = None,
    progress=None,
) -> Tensor:
    """Draws latents (B, C, h, w), or (B, C, t, h, w) of a clip model, fp32.

    Args:
        y: what to draw, B rows, on the model's device.
        null: the condition of guidance's other half, one row.
        index: (B,) int64 numbers of the samples in the whole job. Noise depends on ``seed`` and this number
            only, so a sample is the same in any batch and on any number of processes.
        objective: what the model was trained by.
        steps: of the sampler.
        sampler: one of the objective's; None for its default.
        cfg_interval: the noise levels between which guidance is at work, in the objective's ``noise_level``; None: all.
        size: (h, w) or (t, h, w) of the latents; the model's own when left out.
        forward: what guidance calls in the model's place, as ``forward(x, t, y)``: a parallel strategy around it.
        progress: wraps the iterable of steps, e.g. tqdm.
    """
    shape = (model.config.in_channels, *(size or model.config.input_size))
    guided = cfg_model(forward or model, y, null, cfg_scale, cfg_channels)
    if cfg_interval is not None:
        conditional = cfg_model(forward or model, y, null, 1.0)
        guided = guided_within(cfg_interval, objective.noise_level, guided, conditional)
    return objective.sample(guided, index, shape, seed=seed, steps=steps, sampler=sampler, progress=progress)


def to_uint8(pixels: Tensor) -> np.ndarray:
    """Pixels (B, 1 or 3, ..., H, W) in [-1, 1] to uint8 (B, ..., H, W, 3)."""
    scaled = (pixels.float().clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8)
    if scaled.shape[1] == 1:
        scaled = scaled.expand(-1, 3, *scaled.shape[2:])
    return scaled.movedim(1, -1).cpu().numpy()


def sample_in_batches(
    model: DiT, codec, y: Condition, null: Condition, index: Tensor, batch_size: int, **settings
) -> Iterator[tuple[Tensor, np.ndarray | None]]:
    """Yields (index, uint8 pictures (B, H, W, 3) or clips (B, T, H, W, 3)) batch by batch; see
    :func:`sample_latents`. ``index`` may lie on the CPU. Without a ``codec``, on ranks that help another one to draw
    its samples, there are no pictures (None)."""
    for first in range(0, len(index), batch_size):
        rows = slice(first, first + batch_size)
        latents = sample_latents(model, y[rows], null, index[rows].to(model.device), **settings)
        yield index[rows], None if codec is None else to_uint8(codec.decode(latents))


def preview_labels(num_classes: int, count: int) -> Tensor:
    """``count`` labels spread evenly over the classes, (count,) int64, in order."""
    return torch.arange(count) * num_classes // count if count < num_classes else torch.arange(count) % num_classes


def draw_grid(pictures: np.ndarray, captions: list[str], columns: int | None = None, smallest: int = 64) -> Image.Image:
    """One picture of pictures (N, H, W, 3) uint8, each under its caption, magnified if lower than ``smallest``."""
    count, height, width, _ = pictures.shape
    columns = columns or min(count, max(1, math.ceil(math.sqrt(count * 1.6))))
    zoom = max(1, smallest // height)
    cell_w, cell_h, text = width * zoom + 4, height * zoom + 18, 14
    sheet = Image.new("RGB", (columns * cell_w + 4, math.ceil(count / columns) * cell_h + 4), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for i, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = 4 + i % columns * cell_w, 4 + i // columns * cell_h
        draw.text((x, y), _fit(caption, width * zoom, font), fill="black", font=font)
        image = Image.fromarray(picture).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
        sheet.paste(image, (x, y + text))
    return sheet


def one_line(caption: str) -> str:
    """A caption as one line that can be drawn: white space and control characters are one space, what is no character
    at all (half a surrogate pair, an unassigned code point) is U+FFFD."""
    kinds = {"Cc": " ", "Cf": "", "Zs": " ", "Zl": " ", "Zp": " ", "Cs": "\ufffd", "Cn": "\ufffd", "Co": "\ufffd"}
    return " ".join("".join(kinds.get(unicodedata.category(c), c) for c in caption).split())


def _fit(caption: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    """As much of a caption as is at most ``width`` pixels wide, the first four characters in any case."""
    line = one_line(caption[:10_000])
    short = line[: 4 * width]  # measuring takes time per character, and no font's are that narrow
    if len(short) <= 4 or (len(line) <= 4 * width and font.getlength(short) <= width):
        return short
    fits = bisect.bisect_left(range(4, len(short)), True, key=lambda end: font.getlength(short[:end] + "…") > width)
    return short[: max(4 + fits - 1, 3)] + "…"


def save_grid(path: Path, pictures: np.ndarray, captions: list[str], columns: int | None = None) -> None:
    """:func:`draw_grid` as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        draw_grid(pictures, captions, columns).save(new)


def save_animation(path: Path, clips: np.ndarray, captions: list[str], fps: float) -> None:
    """An endless GIF of clips (N, T, H, W, 3) uint8, all at once, each under its caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = len(clips) if len(clips) <= 4 else None
    first, *others = (draw_grid(frame, captions, columns, smallest=120) for frame in clips.swapaxes(0, 1))
    with replacing(path) as new:
        first.save(new, save_all=True, append_images=others, duration=max(20, round(1000 / fps)), loop=0)


def grid_columns(captions: list[str]) -> int | None:
    """A column a class, where there are few classes; None leaves it to the number of pictures."""
    kinds = len(set(captions))
    return kinds if 4 <= kinds <= 12 else None


def save_contact_sheet(path: Path, clips: np.ndarray, captions: list[str], frames: int = 8) -> None:
    """One PNG of clips (N, T, H, W, 3) uint8: a row a clip, its caption and up to ``frames`` frames spread over it."""
    shown = np.linspace(0, clips.shape[1] - 1, min(frames, clips.shape[1])).round().astype(int)
    pictures = clips[:, shown].reshape(-1, *clips.shape[2:])
    numbers = [f"{frame}" for frame in shown]
    labels = [text for caption in captions for text in (caption, *numbers[1:])]
    save_grid(path, pictures, labels, columns=len(shown))
