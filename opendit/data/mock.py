"""``--data_path mock``: random latents and labels or captions, to time training steps without data."""

import numpy as np
import torch
from torch import Tensor

from opendit.common.utils import hash_parts
from opendit.data.base import PLAIN, Description, Embedding, Fingerprint, Item, MediaDataset, View
from opendit.data.sources import Request
from opendit.encoders.published_text import published_geometry
from opendit.encoders.text import text_geometry
from opendit.encoders.vae import codec_geometry
from opendit.encoders.video_vae import latent_frames, video_geometry

ROWS, CLASSES, PIXEL_CHANNELS = 2**17, 1000, 3
_LATENT, _TEXT = 0, 1  # each row's two random streams


class MockDataset(MediaDataset):
    """Random data in the format of cached latents.

    ``x`` is (2C, h, w) or (2C, t, h, w): means from N(0, 1), keyed by seed and row, and deviations of 0. ``vae``,
    ``image_size`` and ``num_frames`` (None for pictures) determine the shape. Each row has one of ``num_classes``
    labels or, with a ``text_encoder``, a caption. Encoders other than ``bytes`` add random embeddings.

    Raises ValueError or FileNotFoundError for an unknown VAE or encoder, or for sizes that the VAE can't encode."""

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
        self.has_captions = text_encoder is not None
        self.class_names = [] if text_encoder else [str(label) for label in range(num_classes or CLASSES)]
        # Random embeddings replace a frozen encoder's output. The bytes encoder is trained, and needs text.
        self.text_encoder = text_encoder if text_encoder != "bytes" else None
        self.max_tokens, self.empty_caption = 0, None
        if self.text_encoder:
            if public := published_geometry(self.text_encoder):
                self.width, self.pooled, longest = public
            else:
                _, self.width, longest = text_geometry(self.text_encoder)
                self.pooled = self.width
            self.max_tokens = max_text_tokens or longest
            self.empty_caption = self._random_embedding(ROWS)

    def __len__(self) -> int:
        return ROWS

    def read(self, row: int, view: View = PLAIN) -> Item:
        half = self.sample_shape[0] // 2
        mean = self._normal(row, _LATENT, (half, *self.sample_shape[1:]))
        moments = torch.cat([mean, torch.zeros_like(mean)])
        return Item(
            moments.flip(-1) if view.flip else moments,
            row % max(1, len(self.class_names)),
            self.caption(row),
            embedding=self._random_embedding(row) if self.text_encoder else None,
        )

    def caption(self, row: int) -> str | None:
        return f"sample number {row}" if self.has_captions else None

    def _random_embedding(self, row: int) -> Embedding:
        numbers = self._normal(row, _TEXT, (self.pooled + self.max_tokens * self.width,)).half()
        tokens = numbers[self.pooled :].view(self.max_tokens, self.width)
        return Embedding(tokens, torch.ones(self.max_tokens, dtype=torch.bool), numbers[: self.pooled])

    def _normal(self, row: int, stream: int, shape: tuple[int, ...]) -> Tensor:
        generator = np.random.Generator(np.random.Philox(key=[self.seed % 2**64, 2 * row + stream]))
        return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))

    def fingerprint(self) -> Fingerprint:
        classes = str(len(self.class_names))
        return Fingerprint(lambda: hash_parts("mock", str(self.sample_shape), str(self.text_encoder), classes))

    def describe(self) -> Description:
        words = f"with captions ({self.text_encoder or 'bytes'})" if self.has_captions else ""
        words = words or f"of {len(self.class_names):,} classes"
        channels, *sides = self.sample_shape
        shape = "x".join(map(str, (channels // 2, *sides)))
        return Description(
            text=f"mock: random latents ({shape}, --vae {self.vae}) {words}",
            kind="latents",
            conditioning="text" if self.has_captions else "label",
            class_names=self.class_names,
            sample_shape=self.sample_shape,
            seed=self.seed,
            vae=self.vae,
            scaling_factor=1.0,
            shift_factor=0.0,
            text_encoder=self.text_encoder,
            max_tokens=self.max_tokens,
            empty_caption=self.empty_caption,
        )


def open_source(asked: Request) -> MockDataset:
    return MockDataset(
        asked.image_size,
        asked.num_frames if asked.use_video else None,
        vae=asked.vae,
        seed=asked.seed,
        num_classes=asked.num_classes,
        text_encoder=asked.text_encoder,
        max_text_tokens=asked.max_text_tokens,
    )
