"""The schedule of a data set."""

from opendit.data.base import MediaDataset
from opendit.data.order.blend import BlendSchedule
from opendit.data.order.pool import RowsByKey
from opendit.data.order.schedule import KEYED, SORTED, BatchSchedule, BucketSchedule
from opendit.data.order.sorted import SortedBucketSchedule, SortedSchedule


def build_schedule(
    dataset: MediaDataset, global_batch: int, micro_batches: int, seed: int, order: str = KEYED
) -> BatchSchedule:
    """The data set's schedule: in buckets if its samples have several shapes, by weights if it has several sources.

    order: ``KEYED``, or ``SORTED`` for a run that began with that. Raises ValueError if there are too few samples.
    """
    one_shape, by_shape = (SortedSchedule, SortedBucketSchedule) if order == SORTED else (BatchSchedule, BucketSchedule)
    keys = dataset.shape_keys()
    if (sources := dataset.source_rows()) is not None:
        return BlendSchedule(sources, global_batch, micro_batches, seed, keys)
    shapes = None if keys is None else RowsByKey(keys)
    if shapes is None or len(shapes.values) < 2:
        return one_shape(len(dataset), global_batch, seed)
    return by_shape(keys if order == SORTED else shapes, global_batch, micro_batches, seed)
