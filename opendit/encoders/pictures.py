"""Convert decoded pixels to uint8 arrays, labelled grids, contact sheets and looping GIFs."""

import bisect
import math
import unicodedata
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from opendit.common.safe_files import replacing


def to_uint8(pixels: Tensor) -> np.ndarray:
    """Convert pixels (B, 1 or 3, ..., H, W) in [-1, 1] to uint8 (B, ..., H, W, 3) in numpy."""
    return to_bytes(pixels).cpu().numpy()


def to_bytes(pixels: Tensor) -> Tensor:
    """Return the result of :func:`to_uint8` as a contiguous tensor on the pixels' device."""
    scaled = (pixels.float().clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8)
    if scaled.shape[1] == 1:
        scaled = scaled.expand(-1, 3, *scaled.shape[2:])
    return scaled.movedim(1, -1).contiguous()


def draw_grid(pictures: np.ndarray, captions: list[str], columns: int | None = None, smallest: int = 64) -> Image.Image:
    """Draw pictures (N, H, W, 3) uint8 in a grid, with a caption above each. Pictures lower than ``smallest`` pixels
    are enlarged by an integer factor. columns: by default chosen from the number of pictures."""
    count, height, width, _ = pictures.shape
    across = columns or min(count, max(1, math.ceil(math.sqrt(count * 1.6))))
    zoom = max(1, smallest // height)
    cell_w, cell_h, text = width * zoom + 4, height * zoom + 18, 14
    sheet = Image.new("RGB", (across * cell_w + 4, math.ceil(count / across) * cell_h + 4), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for i, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = 4 + i % across * cell_w, 4 + i // across * cell_h
        draw.text((x, y), fit_caption(caption, width * zoom, font), fill="black", font=font)
        image = Image.fromarray(picture).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
        sheet.paste(image, (x, y + text))
    return sheet


def one_line(caption: str) -> str:
    """Convert a caption to one line that can be drawn. White space and control characters become single spaces; format
    characters are removed. Surrogates and unassigned or private code points become U+FFFD."""
    kinds = {"Cc": " ", "Cf": "", "Zs": " ", "Zl": " ", "Zp": " ", "Cs": "\ufffd", "Cn": "\ufffd", "Co": "\ufffd"}
    return " ".join("".join(kinds.get(unicodedata.category(c), c) for c in caption).split())


def fit_caption(caption: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Cut a caption to ``width`` pixels including a final "…", but keep at least three characters."""
    line = one_line(caption[:10_000])
    short = line[: 4 * width]  # bounds the measuring time; a character is at least a quarter pixel wide
    if len(short) <= 4 or (len(line) <= 4 * width and font.getlength(short) <= width):
        return short
    fits = bisect.bisect_left(range(4, len(short)), True, key=lambda end: font.getlength(short[:end] + "…") > width)
    return short[: max(4 + fits - 1, 3)] + "…"


def save_grid(
    path: Path, pictures: np.ndarray, captions: list[str], columns: int | None = None, root: Path | None = None
) -> None:
    """Save the image of :func:`draw_grid` as a PNG, and create its folder. root: see opendit/common/safe_files.py."""
    with replacing(path, root=root, make=True) as new:
        draw_grid(pictures, captions, columns).save(new, "PNG")


def save_animation(path: Path, clips: np.ndarray, captions: list[str], fps: float) -> None:
    """Save clips (N, T, H, W, 3) uint8 in one looping GIF: a grid with a caption above each clip."""
    columns = len(clips) if len(clips) <= 4 else None
    first, *others = (draw_grid(frame, captions, columns, smallest=120) for frame in clips.swapaxes(0, 1))
    with replacing(path, make=True) as new:
        first.save(new, "GIF", save_all=True, append_images=others, duration=max(20, round(1000 / fps)), loop=0)


def grid_columns(captions: list[str]) -> int | None:
    """Return the number of different captions as the number of columns, or None if it is not 4 to 12."""
    kinds = len(set(captions))
    return kinds if 4 <= kinds <= 12 else None


def save_contact_sheet(path: Path, clips: np.ndarray, captions: list[str], root: Path | None = None) -> None:
    """Save clips (N, T, H, W, 3) uint8 as one PNG. Every clip is a row with its caption and up to eight evenly spaced
    frames. root: see :func:`save_grid`."""
    shown = np.linspace(0, clips.shape[1] - 1, min(8, clips.shape[1])).round().astype(int)
    pictures = clips[:, shown].reshape(-1, *clips.shape[2:])
    numbers = [f"{frame}" for frame in shown]
    labels = [text for caption in captions for text in (caption, *numbers[1:])]
    save_grid(path, pictures, labels, columns=len(shown), root=root)
