"""Data sets of pictures, clips and latents, the order of their samples, and the loader. Names are imported lazily."""

from typing import TYPE_CHECKING

from opendit.common.utils import import_when_used

if TYPE_CHECKING:
    from opendit.common.utils import DataError as DataError
    from opendit.data.base import BadSample as BadSample
    from opendit.data.base import Item as Item
    from opendit.data.base import MediaDataset as MediaDataset
    from opendit.data.base import SampleKey as SampleKey
    from opendit.data.digits import digits_split as digits_split
    from opendit.data.latents import LatentDataset as LatentDataset
    from opendit.data.loader import Batch as Batch
    from opendit.data.loader import BatchIterator as BatchIterator
    from opendit.data.loader import build_loader as build_loader
    from opendit.data.loader import build_schedule as build_schedule
    from opendit.data.order import BatchSchedule as BatchSchedule
    from opendit.data.order import BucketSchedule as BucketSchedule
    from opendit.data.pictures_and_clips import CaptionedDataset as CaptionedDataset
    from opendit.data.sources import build_dataset as build_dataset

__getattr__, __all__ = import_when_used(
    __name__,
    {
        "opendit.common.utils": "DataError",
        "opendit.data.base": "BadSample Item MediaDataset SampleKey",
        "opendit.data.pictures_and_clips": "CaptionedDataset",
        "opendit.data.digits": "digits_split",
        "opendit.data.latents": "LatentDataset",
        "opendit.data.loader": "Batch BatchIterator build_loader build_schedule",
        "opendit.data.order": "BatchSchedule BucketSchedule",
        "opendit.data.sources": "build_dataset",
    },
)
