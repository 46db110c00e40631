"""Media in: the built-in digits, picture folders, torchvision's data sets on disk, cached latents; the loader."""

from opendit.data.base import BadSample, DataError, Item, MediaDataset, Ticket
from opendit.data.digits import digits_split
from opendit.data.latents import LatentDataset
from opendit.data.loader import Batch, BatchIterator, BatchSchedule, build_loader
from opendit.data.resolve import build_dataset

__all__ = [
    "BadSample",
    "Batch",
    "BatchIterator",
    "BatchSchedule",
    "DataError",
    "Item",
    "LatentDataset",
    "MediaDataset",
    "Ticket",
    "build_dataset",
    "build_loader",
    "digits_split",
]
