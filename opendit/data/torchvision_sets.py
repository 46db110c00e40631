"""Small picture data sets that torchvision downloads, recognised by their files on disk.

CIFAR's files are pickles, which may run code. So torchvision checks the MD5 sums of CIFAR-10, CIFAR-100, STL-10 and
SVHN before reading."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opendit.common.utils import hash_parts
from opendit.data.base import PLAIN, Description, Fingerprint, Item, MediaDataset, Medium, View, flip_note, of_picture
from opendit.data.picture_file import center_crop, to_tensor
from opendit.data.sources import Request

_DIGITS = [str(digit) for digit in range(10)]
_CLOTHES = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


@dataclass(frozen=True)
class KnownSet:
    """A data set that torchvision downloads."""

    name: str
    folder: str  # relative to torchvision's root
    marker: str  # a file that identifies the data set
    flip: bool  # True if mirrored pictures are equally likely
    kind: str  # torchvision's class
    names: list[str] | None = None  # class names; None if torchvision knows them

    def read(self, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Return (pictures uint8 (N, H, W, 3) or (N, H, W), labels (N,), class names)."""
        from torchvision import datasets
        from torchvision.datasets import mnist

        if self.kind == "MNIST":
            stem = str(folder / ("train" if split == "train" else "t10k"))
            images = mnist.read_image_file(f"{stem}-images-idx3-ubyte").numpy()
            return images, mnist.read_label_file(f"{stem}-labels-idx1-ubyte").numpy(), self.names or []
        root = folder if self.kind == "SVHN" else folder.parent
        if self.kind.startswith("CIFAR"):
            data = getattr(datasets, self.kind)(root, train=split == "train")
            return data.data, np.array(data.targets), list(data.classes)
        data = getattr(datasets, self.kind)(root, split=split)
        return data.data.transpose(0, 2, 3, 1), data.labels, self.names or list(data.classes)


KNOWN = (
    KnownSet("CIFAR-10", "cifar-10-batches-py", "data_batch_1", True, "CIFAR10"),
    KnownSet("CIFAR-100", "cifar-100-python", "train", True, "CIFAR100"),
    KnownSet("MNIST", "MNIST/raw", "train-images-idx3-ubyte", False, "MNIST", _DIGITS),
    KnownSet("Fashion-MNIST", "FashionMNIST/raw", "train-images-idx3-ubyte", False, "MNIST", _CLOTHES),
    KnownSet("STL-10", "stl10_binary", "train_X.bin", True, "STL10"),
    KnownSet("SVHN", "", "train_32x32.mat", False, "SVHN", _DIGITS),
)


def find_known(path: Path) -> tuple[KnownSet, Path] | None:
    """Return (data set, folder with its files) if ``path`` is torchvision's root or a folder of a data set, else None.

    Raises ValueError, naming the folders, if the root holds several data sets."""
    found = []
    for known in KNOWN:
        parts = Path(known.folder).parts
        # ``path`` may be the root, or any folder between the root and the data set's files.
        for walked in range(len(parts) + 1):
            if path.resolve().parts[-walked:] == parts[:walked] or walked == 0:
                folder = (path.resolve() if walked else path).joinpath(*parts[walked:])
                if os.path.isfile(folder / known.marker):
                    found.append((known, folder))
                    break
    if len(found) > 1:
        choices = " or ".join(f"--data_path {folder}" for _, folder in found)
        raise ValueError(f"--data_path {path}: holds several data sets; pass {choices}")
    return found[0] if found else None


class ArrayDataset(MediaDataset):
    """Pictures with classes in memory, uint8 (N, H, W, 3), or (N, H, W) with one channel, cropped by ``center_crop``.
    name: beginning of the description."""

    def __init__(
        self,
        name: str,
        images: Any,
        labels: np.ndarray,
        class_names: list[str],
        image_size: int,
        *,
        seed: int = 0,
        random_flip: bool = False,
        random_crop: bool = False,
    ):
        self.name, self.images, self.labels, self.class_names = name, images, labels.astype(np.int64), class_names
        self.sample_shape = (1 if images.ndim == 3 else 3, image_size, image_size)
        self.seed, self.random_flip, self.random_crop = seed, random_flip, random_crop

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, row: int, view: View = PLAIN) -> Item:
        picture = center_crop(Image.fromarray(self.images[row]), self.sample_shape[1], view.place)
        return Item(to_tensor(picture, view.flip, view.as_bytes), int(self.labels[row]))

    def label(self, row: int) -> int:
        return int(self.labels[row])

    def preview(self, row: int) -> tuple[Medium, np.ndarray]:
        return of_picture(Image.fromarray(self.images[row]))

    def fingerprint(self) -> Fingerprint:
        names = "\0".join(self.class_names)
        return Fingerprint(lambda: hash_parts(names, self.images.tobytes(), self.labels.tobytes()))

    def describe(self) -> Description:
        (c, h, w), mirrored = self.sample_shape, flip_note(self.random_flip)
        what = f"{len(self):,} pictures of {len(self.class_names):,} classes, {c}x{h}x{w}, {mirrored}"
        names = "class_names sample_shape random_flip random_crop seed".split()
        return Description(text=f"{self.name}: {what}", **{name: getattr(self, name) for name in names})


def open_source(asked: Request) -> ArrayDataset | None:
    match = find_known(asked.located) if asked.located.is_dir() and not asked.use_video else None
    if match is None:
        return None
    (known, folder), split = match, asked.split
    if split not in ("train", "test"):
        raise ValueError(f"{known.name} has the splits train and test, not {split!r}")
    try:
        images, labels, class_names = known.read(folder, split)
    except Exception as error:  # torchvision's message doesn't name the flag
        raise ValueError(f"--data_path {folder}: {known.name} can't be read ({error}); download it again") from error
    found = ""
    if len(images) == 0 or len(images) != len(labels) or 0 in images.shape:
        found = f"{len(images):,} pictures and {len(labels):,} labels"
    elif labels.min() < 0 or labels.max() >= len(class_names):
        found = f"labels from {labels.min()} to {labels.max()} of {len(class_names)} classes"
    if found:
        raise ValueError(f"--data_path {folder}: {known.name} is damaged: {found}; download it again")
    flip = known.flip if asked.random_flip is None else asked.random_flip
    return ArrayDataset(
        f"{known.name} ({split}) in {folder}",
        np.ascontiguousarray(images),
        labels,
        class_names,
        asked.image_size,
        seed=asked.seed,
        random_flip=flip,
        random_crop=asked.random_crop,
    )
