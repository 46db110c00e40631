"""Media in: the built-in digits, picture folders, CSVs of captioned media, torchvision's data sets, cached latents.
A name's module is imported when it is first used: ``names`` needs no torch."""

from opendit.common.lazy import import_when_used

__getattr__, __all__ = import_when_used(
    __name__,
    {
        "opendit.common.errors": "DataError",
        "opendit.data.base": "BadSample Item MediaDataset SampleKey",
        "opendit.data.captioned": "CaptionedDataset",
        "opendit.data.digits": "digits_split",
        "opendit.data.latents": "LatentDataset",
        "opendit.data.loader": "Batch BatchIterator build_loader",
        "opendit.data.order.build": "build_schedule",
        "opendit.data.order.schedule": "BatchSchedule BucketSchedule",
        "opendit.data.resolve": "build_dataset",
    },
)
