"""``--data_path``: which data set it names."""

import os
from difflib import get_close_matches
from pathlib import Path

from opendit.data.base import MediaDataset
from opendit.data.captioned import CaptionedDataset
from opendit.data.digits import DigitsDataset
from opendit.data.files import kind_of, printable
from opendit.data.folders import CLIPS, Ignored, files_below
from opendit.data.images import FolderDataset
from opendit.data.latents import INDEX, LatentDataset, read_index
from opendit.data.picture_file import picture_suffixes
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
    shown = f"--data_path {printable(data_path)}"
    if data_path == "digits" and use_video:
        raise ValueError(
            "--data_path digits holds pictures; --use_video needs a CSV of clips. For clips of moving digits "
            "run: python preprocess.py demo"
        )
    if data_path == "digits":
        return DigitsDataset(image_size, seed=seed, random_flip=random_flip, split=split)
    path = _locate(data_path)
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
        raise ValueError(f"{shown} is {_file_advice(path)}")
    if use_video and read_index(path) is None:
        raise ValueError(
            f"{shown} is a folder; --use_video needs a CSV of clips. To make one of the clips in it "
            f"run: python preprocess.py folder {printable(data_path)} --output videos.csv"
        )
    known = find_known(path)
    if known is not None:
        return ArrayDataset(*known, image_size, seed=seed, random_flip=random_flip, split=split)
    if split != "train":
        raise ValueError(f"{shown} has no split {split!r}: give the folder of that split instead")
    if read_index(path) is not None:
        latents = LatentDataset(
            path,
            image_size,
            seed=seed,
            random_flip=random_flip,
            use_video=use_video,
            num_frames=num_frames,
            frame_interval=frame_interval,
        )
        if next(files_below(str(path), picture_suffixes(), Ignored(), visits=1), None) is not None:
            latents.note = "; the pictures that are in the folder as well are not read"
        return latents
    if any(path.glob("latents-*.safetensors")):
        raise ValueError(f"{shown} holds unfinished latents: run the preprocess.py command that made them again")
    return FolderDataset(str(path), image_size, seed=seed, random_flip=random_flip, max_bad=max_bad)


TAKEN = (
    "digits, a CSV of captioned media, a folder of pictures, a torchvision data set's folder or one of cached latents"
)


def _locate(data_path: str) -> Path:
    """The path that ``--data_path`` names, of a file or of a folder that can be listed.

    Raises ValueError or FileNotFoundError, naming the flag and what to do."""
    shown = f"--data_path {printable(data_path)}"
    if not data_path.strip():
        raise ValueError(f"--data_path is empty; give {TAKEN}")
    try:
        path = Path(data_path).expanduser() if data_path[0] == "~" else Path(data_path)
        kind = kind_of(os.stat(path).st_mode)
        if kind == "a folder":
            os.scandir(path).close()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{shown} doesn't exist{_name_advice(data_path)}; give {TAKEN}") from error
    except PermissionError as error:
        raise ValueError(f"{shown} can't be read ({error.strerror}); allow it (chmod -R u+rX)") from error
    except RuntimeError as error:
        raise ValueError(f"{shown}: the home folder of that user is not known; write the path out") from error
    except (OSError, ValueError) as error:  # too long, a circle of links, a NUL
        raise ValueError(
            f"{shown} can't be read ({getattr(error, 'strerror', None) or error}); give {TAKEN}"
        ) from error
    if kind not in (None, "a folder"):
        raise ValueError(f"{shown} is {kind}; give {TAKEN}")
    return path


def _name_advice(name: str) -> str:
    """What a name that is no path may have been meant for."""
    known = name.lower().replace("-", "").replace("_", "")
    if known in ("cifar10", "cifar100", "mnist", "fashionmnist", "stl10", "svhn"):
        return " (a torchvision data set is named by the folder that it was downloaded to)"
    meant = get_close_matches(name.lower(), ("digits", "mock"), n=1)
    return f" (is {meant[0]} meant?)" if meant else ""


def _file_advice(path: Path) -> str:
    """What a file is that is no CSV, and what to give in its place."""
    suffix = path.suffix.lower()
    if path.name == INDEX or suffix == ".safetensors":
        return "a file; give the folder of cached latents that it is in"
    if suffix in picture_suffixes():
        return "a picture; give the folder that it is in"
    if suffix in CLIPS:
        return "a clip; give a CSV of clips: python preprocess.py folder FOLDER --output videos.csv"
    if suffix in (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst"):
        return "an archive; unpack it and give its folder"
    if suffix in (".tsv", ".txt", ".json", ".jsonl", ".parquet", ".xlsx"):
        return "a file; captions come as a .csv of path,text"
    return f"a file; give {TAKEN}"
