"""The interface of data sources."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendit.data.files import printable


class NoSplit(ValueError):
    """A source that holds one set of samples was asked for a split of it."""


@dataclass(frozen=True)
class Request:
    """``--data_path`` and the flags beside it.

    path: what data_path names, a file or a folder that can be listed; None where it is a source's own name.
    random_flip: mirror half of the samples; None leaves it to the data set. split: "train" or "test", for a source that
    has both. max_bad: largest share of unreadable files to skip. vae to max_text_tokens: of random latents.
    video_reader: of ``video_readers.CHOICES``.
    energon_cooker: ``module:function`` that reads the samples of a folder that Energon prepared.
    """

    data_path: str
    path: Path | None
    image_size: int
    seed: int
    random_flip: bool | None = None
    split: str = "train"
    max_bad: float = 0.05
    num_frames: int = 16
    frame_interval: int = 1
    fps: float | None = None
    use_video: bool = False
    short_clips: str = "skip"
    video_reader: str = "auto"
    vae: str = "ema"
    num_classes: int | None = None
    text_encoder: str | None = None
    max_text_tokens: int | None = None
    energon_cooker: str | None = None

    @property
    def located(self) -> Path:
        """``path``, of a source that is no name of its own."""
        assert self.path is not None, "a source that is a name of its own has no path"
        return self.path

    @property
    def shown(self) -> str:
        """The flag as messages name it."""
        return f"--data_path {printable(self.data_path)}"

    def of_clips(self) -> dict[str, Any]:
        """The arguments of data sets of clips and pictures, by name; windows of clips are drawn in training alone."""
        names = "seed num_frames frame_interval fps use_video short_clips video_reader random_flip max_bad"
        return {name: getattr(self, name) for name in names.split()} | {"training": self.split == "train"}

    def of_latents(self) -> dict[str, Any]:
        """The arguments of data sets of cached latents, by name."""
        return {
            name: getattr(self, name) for name in "seed random_flip use_video num_frames frame_interval fps".split()
        }

    def check_split(self) -> None:
        """Raises NoSplit for a split of a source that has none."""
        if self.split != "train":
            raise NoSplit(f"{self.shown}: has no split {self.split!r}; give the folder of that split instead")
