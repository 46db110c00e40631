"""What a data source is asked for."""

from dataclasses import dataclass
from pathlib import Path

from opendit.data.files import printable


@dataclass(frozen=True)
class Request:
    """``--data_path`` and the flags beside it.

    path: what data_path names, a file or a folder that can be listed; None where it is a source's own name.
    random_flip: mirror half of the samples; None leaves it to the data set. split: "train" or "test", for a source that
    has both. max_bad: largest share of unreadable files to skip. The last four: of random latents.
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
    use_video: bool = False
    short_clips: str = "skip"
    vae: str = "ema"
    num_classes: int | None = None
    text_encoder: str | None = None
    max_text_tokens: int | None = None

    @property
    def shown(self) -> str:
        """The flag as messages name it."""
        return f"--data_path {printable(self.data_path)}"

    def check_split(self) -> None:
        """Raises ValueError for a split of a source that has none."""
        if self.split != "train":
            raise ValueError(f"{self.shown} has no split {self.split!r}: give the folder of that split instead")
