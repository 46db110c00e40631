"""Pictures from a model: labels and a seed in, pixels out; grids and files."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from opendit.diffusion import DDPM, SAMPLERS, cfg_model, initial_noise, keyed_noise
from opendit.models import DiT


@torch.inference_mode()
def sample_latents(
    model: DiT,
    labels: Tensor,
    index: Tensor,
    *,
    seed: int,
    steps: int,
    sampler: str = "ddpm",
    cfg_scale: float = 4.0,
    cfg_channels: int | None = None,
    progress=None,
) -> Tensor:
    """Draws latents (B, C, h, w), fp32.

    Args:
        labels: (B,) int64 classes, on the model's device.
        index: (B,) int64 numbers of the samples in the whole job. Noise depends on ``seed`` and this number
            only, so a sample is the same in any batch and on any number of processes.
        steps: denoising steps of the 1000-step schedule.
        progress: wraps the iterable of steps, e.g. tqdm.
    """
    config = model.config
    shape = (config.in_channels, *config.input_size)
    null = torch.full_like(labels, config.num_classes)
    return SAMPLERS[sampler](
        cfg_model(model, labels, null, cfg_scale, cfg_channels),
        initial_noise(seed, index, shape),
        DDPM.linear().respaced(steps),
        noise_fn=keyed_noise(seed, index, shape),
        progress=progress,
    )


def to_uint8(pixels: Tensor) -> np.ndarray:
    """Pixels (B, 1 or 3, H, W) in [-1, 1] to uint8 (B, H, W, 3)."""
    scaled = (pixels.float().clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8)
    return scaled.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu().numpy()


def sample_in_batches(
    model: DiT, codec, labels: Tensor, index: Tensor, batch_size: int, **settings
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Yields (index, uint8 pictures (B, H, W, 3)) batch by batch; see :func:`sample_latents`."""
    device = model.pos_embed.device
    for rows in torch.arange(len(labels)).split(batch_size):
        latents = sample_latents(model, labels[rows].to(device), index[rows].to(device), **settings)
        yield index[rows], to_uint8(codec.decode(latents))


def preview_labels(num_classes: int, count: int) -> Tensor:
    """``count`` labels spread evenly over the classes, (count,) int64, in order."""
    return torch.arange(count) * num_classes // count if count < num_classes else torch.arange(count) % num_classes


def save_grid(path: Path, pictures: np.ndarray, captions: list[str], columns: int | None = None) -> None:
    """One PNG of pictures (N, H, W, 3) uint8, each under its caption; small pictures are magnified."""
    count, height, width, _ = pictures.shape
    columns = columns or min(count, max(1, math.ceil(math.sqrt(count * 1.6))))
    zoom = max(1, 64 // height)
    cell_w, cell_h, text = width * zoom + 4, height * zoom + 18, 14
    sheet = Image.new("RGB", (columns * cell_w + 4, math.ceil(count / columns) * cell_h + 4), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for i, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = 4 + i % columns * cell_w, 4 + i // columns * cell_h
        while len(caption) > 4 and draw.textlength(caption, font=font) > width * zoom:
            caption = caption[:-2] + "…" if not caption.endswith("…") else caption[:-3] + "…"
        draw.text((x, y), caption, fill="black", font=font)
        image = Image.fromarray(picture).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
        sheet.paste(image, (x, y + text))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
