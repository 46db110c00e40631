"""Choose the schedule of a data set."""

from typing import cast

from opendit.data.base import MediaDataset
from opendit.data.order.packs import PackSchedule
from opendit.data.order.schedule import BatchSchedule, BlendSchedule, BucketSchedule
from opendit.data.order.sequences import RowsByKey
from opendit.data.shaped import ShapedDataset


def build_schedule(
    dataset: MediaDataset,
    global_batch: int,
    micro_batches: int,
    seed: int,
    *,
    bucket_tokens: int | None = None,
    pack_tokens: int | None = None,
    caption_tokens: int = 0,
    attention: float = float("inf"),
) -> BatchSchedule:
    """Return the data set's schedule: in buckets if its samples have several shapes, by weights if it has several
    sources.

    Args:
        bucket_tokens: tokens of a unit of several samples of one shape; for a ``ShapedDataset``.
        pack_tokens: tokens of a unit of any samples; for a ``ShapedDataset``.
        caption_tokens: tokens of a pack that each sample takes beside its media's.
        attention: see ``PackSchedule``.

    Raises:
        ValueError: there are too few samples.
    """
    if pack_tokens is not None:
        shaped, sources = cast(ShapedDataset, dataset), dataset.describe().sources
        tokens = shaped.token_counts(caption_tokens)
        return PackSchedule(tokens, pack_tokens, global_batch, seed, sources=sources, attention=attention)
    if bucket_tokens is not None:
        return _in_buckets(cast(ShapedDataset, dataset), global_batch, micro_batches, seed, bucket_tokens)
    keys = dataset.shapes().array
    if (sources := dataset.describe().sources) is not None:
        return BlendSchedule(sources, global_batch, micro_batches, seed, keys)
    shapes = None if keys is None else RowsByKey(keys)
    if shapes is None or len(shapes.values) < 2:
        return BatchSchedule(len(dataset), global_batch, seed)
    return BucketSchedule(shapes, global_batch, micro_batches, seed)


def _in_buckets(dataset: ShapedDataset, global_batch: int, micro_batches: int, seed: int, tokens: int) -> BatchSchedule:
    keys, sources = dataset.keys, dataset.describe().sources
    shapes = RowsByKey(keys)
    samples = [tokens // int(dataset.tokens[key]) for key in shapes.values]
    if sources is not None:
        return BlendSchedule(sources, global_batch, micro_batches, seed, keys, samples)
    return BucketSchedule(shapes, global_batch, micro_batches, seed, samples)
