"""``--data_path mock``: random latents of the model's size, to time a training step where there is no data."""

import numpy as np
import torch
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.data.base import Embedding, MediaDataset
from opendit.encoders.text import text_geometry
from opendit.encoders.vae import codec_geometry
from opendit.encoders.video_vae import latent_frames, video_geometry

ROWS, CLASSES, PIXEL_CHANNELS = 2**17, 1000, 3
_LATENT, _TEXT = 0, 1  # streams of random numbers of a row


class MockDataset(MediaDataset):
    """Looks like cached latents: ``x`` is means and standard deviations (2C, h, w) or (2C, t, h, w), drawn from N(0, 1)
    by the row's number.

    image_size, num_frames (None: pictures) and vae give the shape. Rows have one of ``num_classes`` labels, or with a
    ``text_encoder`` captions: words for ``bytes``, random embeddings of the encoder's width for another one.
    Raises ValueError or FileNotFoundError for an unknown VAE or encoder, or sizes that the VAE can't take.
    """

    kind = "latents"
    scaling_factor, shift_factor = 1.0, 0.0

    def __init__(
        self,
        image_size: int,
        num_frames: int | None,
        *,
        vae: str,
        seed: int = 0,
        num_classes: int | None = None,
        text_encoder: str | None = None,
        max_text_tokens: int | None = None,
    ):
        if num_frames is None:
            (channels, downscale), frames = codec_geometry(vae, PIXEL_CHANNELS), []
        else:
            channels, downscale, temporal = video_geometry(vae, PIXEL_CHANNELS)
            frames = [latent_frames(num_frames, temporal)]
        if image_size % downscale:
            raise ValueError(
                f"--image_size {image_size}: does not divide by {downscale} (--vae {vae}); use "
                f"{max(1, round(image_size / downscale)) * downscale}"
            )
        self.sample_shape = (2 * channels, *frames, image_size // downscale, image_size // downscale)
        self.vae, self.seed = vae, seed
        self.conditioning = "text" if text_encoder else "label"
        self.class_names = [] if text_encoder else [str(label) for label in range(num_classes or CLASSES)]
        # Of captions that a frozen encoder has seen; the bytes encoder is a part of the model and is given words.
        self.text_encoder = text_encoder if text_encoder != "bytes" else None
        if self.text_encoder:
            _, self.width, longest = text_geometry(self.text_encoder)
            self.max_tokens = max_text_tokens or longest
            self.empty_caption = self._random_embedding(ROWS)

    def __len__(self) -> int:
        return ROWS

    def load(self, row: int, flip: bool) -> Tensor:
        half = self.sample_shape[0] // 2
        mean = self._normal(row, _LATENT, (half, *self.sample_shape[1:]))
        moments = torch.cat([mean, torch.zeros_like(mean)])
        return moments.flip(-1) if flip else moments

    def label(self, row: int) -> int:
        return row % max(1, self.num_classes)

    def caption(self, row: int) -> str | None:
        return f"sample number {row}" if self.conditioning == "text" else None

    def embedding(self, row: int) -> Embedding | None:
        return self._random_embedding(row) if self.text_encoder else None

    def _random_embedding(self, row: int) -> Embedding:
        numbers = self._normal(row, _TEXT, (self.max_tokens + 1, self.width)).half()
        return Embedding(numbers[1:], torch.ones(self.max_tokens, dtype=torch.bool), numbers[0])

    def _normal(self, row: int, stream: int, shape: tuple[int, ...]) -> Tensor:
        generator = np.random.Generator(np.random.Philox(key=[self.seed % 2**64, 2 * row + stream]))
        return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))

    def identity(self) -> str:
        return hash_parts("mock", str(self.sample_shape), str(self.text_encoder), str(self.num_classes))

    def describe(self) -> str:
        words = f"with captions ({self.text_encoder or 'bytes'})" if self.conditioning == "text" else ""
        words = words or f"of {self.num_classes:,} classes"
        channels, *sides = self.sample_shape
        return f"mock: random latents ({'x'.join(map(str, (channels // 2, *sides)))}, --vae {self.vae}) {words}"
