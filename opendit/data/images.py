"""Pictures in folders: finding, checking and reading them, and the crop that ADM and Meta's DiT use."""

import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from opendit.data.base import BadSample, MediaDataset, flip_note, hash_parts, name_few, to_pixels

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
CHECKED_HEADERS = 2000


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """ADM's centre crop to size x size pixels: halve by box filter while both sides stay at least ``size``, bicubic
    to shorter side = ``size``, cut out the middle.

    The pixels equal those of ``center_crop_arr`` in Dhariwal and Nichol's guided-diffusion, on which the
    reference statistics of the field's FID numbers rest.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), resample=Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def read_picture(path: str) -> Image.Image:
    """A picture file as 8-bit RGB, upright. Raises BadSample naming the file and the reason."""
    try:
        with Image.open(path) as image:
            image.load()
            return _to_rgb(_upright(image))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly every type there is on broken files
        raise BadSample(path, _reason(error)) from error


def _upright(image: Image.Image) -> Image.Image:
    """Turned as the camera was held; a broken EXIF block is no reason to lose the picture."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: convert() would cut everything above 255 to white
        grey = np.asarray(image).astype(np.float32).clip(0, 65535) / 257
        image = Image.fromarray(grey.round().astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("a picture of floating-point numbers has no defined white")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "not a picture in any known format"
    return str(error) or type(error).__name__


def to_tensor(image: Image.Image, flip: bool, as_bytes: bool = False) -> Tensor:
    """8-bit picture -> float32 (C, H, W) in [-1, 1], or uint8, C = 1 for a grey one, mirrored if ``flip``."""
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    pixels = pixels.flip(-1) if flip else pixels
    return pixels if as_bytes else to_pixels(pixels)


class PathTable(Sequence):
    """An immutable list of paths in two arrays.

    A million Python strings, shared with forked workers, get copied page by page as their reference counts
    change: gigabytes over an epoch. Two numpy arrays stay shared.
    """

    def __init__(self, paths: Sequence[str]):
        encoded = [os.fsencode(path) for path in paths]
        self.ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self.text = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        row = range(len(self))[row]
        return os.fsdecode(self.text[self.ends[row - 1] if row else 0 : self.ends[row]].tobytes())


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _pictures_below(folder: str) -> Iterator[str]:
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not _hidden(name))
        for name in sorted(files):
            if name.lower().endswith(EXTENSIONS) and not _hidden(name):
                yield os.path.join(root, name)


def find_pictures(folder: str) -> tuple[list[str], list[str], list[int]]:
    """Class names, picture paths and their labels, sorted, of a folder of pictures.

    Every subfolder is a class and its name the class's name, searched to any depth; a folder with pictures
    and no subfolder is one class. Raises FileNotFoundError (no pictures) or ValueError (a class without
    pictures, a folder of splits), naming the flag and what to do.
    """
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    classes = [entry.name for entry in entries if entry.is_dir() and not _hidden(entry.name)]
    pictures = {name: list(_pictures_below(os.path.join(folder, name))) for name in classes}
    if any(pictures.values()):
        _check_classes(folder, pictures)
        labels = [label for label, name in enumerate(classes) for _ in pictures[name]]
        return classes, [path for name in classes for path in pictures[name]], labels
    paths = [entry.path for entry in entries if entry.is_file() and entry.name.lower().endswith(EXTENSIONS)]
    paths = [path for path in paths if not _hidden(os.path.basename(path))]
    if not paths:
        found = "is empty" if not entries else "holds no pictures"
        raise FileNotFoundError(
            f"--data_path {folder} {found}: give a folder with one subfolder of pictures a class, or with pictures "
            f"directly inside ({' '.join(EXTENSIONS)})"
        )
    return [os.path.basename(os.path.abspath(folder))], paths, [0] * len(paths)


def _check_classes(folder: str, pictures: dict[str, list[str]]) -> None:
    splits = [name for name in pictures if name.lower() in ("train", "val", "valid", "validation", "test")]
    if "train" in splits and len(splits) == len(pictures):
        train = os.path.join(folder, "train")
        if all(os.path.dirname(path) != train for path in pictures["train"]):
            raise ValueError(f"--data_path {folder} holds splits, not classes: pass --data_path {train}")
    empty = [name for name, paths in pictures.items() if not paths]
    if empty:
        raise ValueError(
            f"--data_path {folder}: no pictures in the class folders {name_few(empty)}; remove these folders or fill "
            f"them (known endings: {' '.join(EXTENSIONS)})"
        )


def check_headers(folder: str, paths: Sequence[str], max_bad: float) -> None:
    """Opens up to 2,000 pictures spread evenly over ``paths``, headers only.

    Raises ValueError naming the first few if all, or more than the share ``max_bad``, can't be opened."""

    def problem(row: int) -> str | None:
        try:
            Image.open(paths[row]).close()
        except Exception as error:
            return f"{paths[row]}: {_reason(error)}"

    Image.init()  # not left to the threads, which would race to register the formats
    rows = np.unique(np.linspace(0, len(paths) - 1, min(len(paths), CHECKED_HEADERS)).round().astype(np.int64))
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:  # a network disk answers eight as fast as one
        warnings.simplefilter("ignore")  # Pillow warns of large and odd files; whether one is usable shows anyway
        bad = [message for message in pool.map(problem, rows.tolist()) if message is not None]
    if len(bad) > max_bad * len(rows):
        share = "none can be read" if len(bad) == len(rows) else f"{len(bad):,} can't be read, more than {max_bad:.0%}"
        raise ValueError(
            f"--data_path {folder}: of {len(rows):,} pictures checked {share}: {name_few(bad)}. Remove or repair them."
        )


class FolderDataset(MediaDataset):
    """Pictures in folders as (3, image_size, image_size) in [-1, 1]; mirrored at random unless told otherwise.

    Pillow decodes them in the worker process; an unreadable one is replaced by the next readable row."""

    def __init__(
        self, folder: str, image_size: int, *, seed: int = 0, random_flip: bool | None = None, max_bad: float = 0.05
    ):
        self.class_names, paths, labels = find_pictures(folder)
        check_headers(folder, paths, max_bad)
        self.folder, self.paths, self.labels = folder, PathTable(paths), np.array(labels, dtype=np.int64)
        self.sample_shape = (3, image_size, image_size)
        self.seed, self.max_bad = seed, max_bad
        self.random_flip = True if random_flip is None else random_flip

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, row: int, flip: bool) -> Tensor:
        return to_tensor(center_crop(read_picture(self.paths[row]), self.sample_shape[1]), flip, self.as_bytes)

    def label(self, row: int) -> int:
        return int(self.labels[row])

    def identity(self) -> str:
        names = (os.path.relpath(path, self.folder) for path in self.paths)
        return hash_parts("folder", "\0".join(self.class_names), "\0".join(names), self.labels.tobytes())

    def describe(self) -> str:
        c, h, w = self.sample_shape
        classes = f"{self.num_classes:,} class{'es' if self.num_classes > 1 else ''}"
        return f"{self.folder}: {len(self):,} pictures of {classes}, {c}x{h}x{w}, {flip_note(self)}"
