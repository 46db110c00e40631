# pyright: standard
"""A clip that was drawn, as Python's users get it."""

import base64
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from opendit.common.safe_files import replacing
from opendit.data.video_file import write_mp4


@dataclass(frozen=True, eq=False)
class VideoClip:
    """frames: uint8 (T, H, W, 3), RGB. fps: frames a second."""

    frames: np.ndarray
    fps: float

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes an .mp4 (H.264), or an endless .gif; returns the path. The file is whole, or not there.

        Raises ValueError for another ending.
        """
        path = Path(path)
        if path.suffix.lower() == ".mp4":
            write_mp4(path, self.frames, self.fps)
        elif path.suffix.lower() == ".gif":
            first, *others = map(Image.fromarray, self.frames)
            with replacing(path, make=True) as new:
                milliseconds = max(20, round(1000 / self.fps))  # viewers slow down what is faster
                first.save(new, "GIF", save_all=True, append_images=others, duration=milliseconds, loop=0)
        else:
            raise ValueError(f"{path}: a clip is saved as .mp4 or .gif")
        return path

    def __repr__(self) -> str:
        frames, height, width, _ = self.frames.shape
        return f"VideoClip({frames} frames of {height} x {width}, {self.fps:g} a second)"

    def _repr_html_(self) -> str:
        """Return a player, which notebooks show for a clip."""
        with tempfile.TemporaryDirectory() as folder:
            content = self.save(Path(folder) / "clip.mp4").read_bytes()
        source = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
        return f'<video controls loop autoplay muted src="{source}"></video>'
