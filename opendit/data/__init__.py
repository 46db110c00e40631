"""Media in: the built-in digits, picture folders, CSVs of captioned media, torchvision's data sets, cached latents."""

from opendit.data.base import BadSample, DataError, Item, MediaDataset, SampleKey
from opendit.data.captioned import CaptionedDataset
from opendit.data.digits import digits_split
from opendit.data.latents import LatentDataset
from opendit.data.loader import Batch, BatchIterator, BatchSchedule, BucketSchedule, build_loader, build_schedule
from opendit.data.resolve import build_dataset

__all__ = [
    "BadSample",
    "Batch",
    "BatchIterator",
    "BatchSchedule",
    "BucketSchedule",
    "CaptionedDataset",
    "DataError",
    "Item",
    "LatentDataset",
    "MediaDataset",
    "SampleKey",
    "build_dataset",
    "build_loader",
    "build_schedule",
    "digits_split",
]
