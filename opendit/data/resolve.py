"""``--data_path``: which data set it names."""

from pathlib import Path

from opendit.data.base import MediaDataset
from opendit.data.captioned import CaptionedDataset
from opendit.data.digits import DigitsDataset
from opendit.data.images import FolderDataset
from opendit.data.latents import LatentDataset, read_index
from opendit.data.torchvision_sets import ArrayDataset, find_known


def build_dataset(
    data_path: str,
    image_size: int,
    *,
    seed: int,
    random_flip: bool | None = None,
    split: str = "train",
    max_bad: float = 0.05,
    num_frames: int = 16,
    frame_interval: int = 1,
    use_video: bool = False,
    short_clips: str = "skip",
) -> MediaDataset:
    """The data set of ``--data_path``: ``digits``, a CSV of captioned media, a folder of cached latents, a torchvision
    data set on disk, or a folder of pictures.

    image_size: pixels of a side. random_flip: mirror half of the samples; None leaves it to the data set.
    split: "train" or "test", for a data set that has both. max_bad: largest share of unreadable files to skip.
    use_video, num_frames, frame_interval, short_clips: for a CSV, see ``CaptionedDataset``.
    Raises ValueError or FileNotFoundError, naming the flag and what to do.
    """
    if image_size < 1:
        raise ValueError(f"--image_size {image_size} must be positive")
    if data_path == "digits" and use_video:
        raise ValueError(
            "--data_path digits holds pictures; --use_video needs a CSV of clips. For clips of moving digits "
            "run: python preprocess.py demo"
        )
    if data_path == "digits":
        return DigitsDataset(image_size, seed=seed, random_flip=random_flip, split=split)
    path = Path(data_path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"--data_path {data_path} doesn't exist; give digits, or a folder or CSV that does")
    if not path.is_dir():
        if path.suffix.lower() == ".csv":
            return CaptionedDataset(
                path,
                image_size,
                seed=seed,
                num_frames=num_frames,
                frame_interval=frame_interval,
                use_video=use_video,
                short_clips=short_clips,
                random_flip=random_flip,
                max_bad=max_bad,
                training=split == "train",
            )
        raise ValueError(
            f"--data_path {data_path} is a file; give digits, a CSV of captioned media, a folder of pictures, a "
            "torchvision data set's folder or a folder of cached latents"
        )
    if use_video and read_index(path) is None:
        raise ValueError(
            f"--data_path {data_path} is a folder; --use_video needs a CSV of clips. To make one of the clips in it "
            f"run: python preprocess.py folder {data_path} --output videos.csv"
        )
    known = find_known(path)
    if known is not None:
        return ArrayDataset(*known, image_size, seed=seed, random_flip=random_flip, split=split)
    if split != "train":
        raise ValueError(f"--data_path {data_path} has no split {split!r}: give the folder of that split instead")
    if read_index(path) is not None:
        return LatentDataset(
            path,
            image_size,
            seed=seed,
            random_flip=random_flip,
            use_video=use_video,
            num_frames=num_frames,
            frame_interval=frame_interval,
        )
    if any(path.glob("latents-*.safetensors")):
        raise ValueError(
            f"--data_path {data_path} holds unfinished latents: run the preprocess.py command that made them again"
        )
    return FolderDataset(str(path), image_size, seed=seed, random_flip=random_flip, max_bad=max_bad)
