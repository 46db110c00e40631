"""The samples of a run at shapes near their own: --bucket_tokens and --pack_tokens."""

import math
from typing import Any

from opendit.config.train import TrainConfig
from opendit.data import BatchSchedule, MediaDataset, build_schedule
from opendit.data.order.buckets import TokenSize, shape_table
from opendit.data.shaped import shape_latents, shape_media
from opendit.encoders.vae import codec_geometry
from opendit.encoders.video_vae import video_geometry
from opendit.models import DiTConfig


def shape_samples(flags: TrainConfig, dataset: MediaDataset, config: DiTConfig) -> MediaDataset:
    """The data set as --bucket_tokens or --pack_tokens has it, or as it is without them.

    Raises ValueError, naming the flag and what to do, for a model or a data set that they can't be used with.
    """
    if flags.tokens is None:
        return dataset
    flag = "--bucket_tokens" if flags.pack_tokens is None else "--pack_tokens"
    if flags.pack_tokens is not None:
        config.check_packs()
    if config.positions == "learned":
        raise ValueError(
            f"{flag} {flags.tokens}: this model has learned positions, of one size; give --positions sincos or rope"
        )
    *frames, height, width = config.patch
    along = frames[0] if frames else 1
    if dataset.kind == "latents":
        return shape_latents(dataset, TokenSize(along, 1, (height, width)), flags.tokens, flag)
    channels = dataset.sample_shape[0]
    downscale, temporal = codec_geometry(flags.vae, channels)[1], 1
    if flags.use_video:
        _, downscale, temporal = video_geometry(flags.vae, channels)
    token = TokenSize(along, temporal, (height * downscale, width * downscale))
    try:
        table = shape_table(
            flags.image_size,
            flags.num_frames if flags.use_video else 1,
            token,
            flags.tokens,
            fine=flags.pack_tokens is not None,
        )
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from error
    interval = 1 if flags.short_clips == "interval" or flags.fps is not None else flags.frame_interval
    return shape_media(dataset, table, interval, flags.max_upscale, flag)


def make_schedule(
    flags: TrainConfig,
    dataset: MediaDataset,
    global_batch: int,
    config: DiTConfig,
    parts: int | None = None,
) -> BatchSchedule:
    """Return the order in which the samples of :func:`shape_samples` are trained on. Raises as ``build_schedule`` does.

    parts: of one shape, in a step; None: as many as micro-batches."""
    return build_schedule(
        dataset,
        global_batch,
        parts or flags.grad_accumulation,
        flags.global_seed,
        bucket_tokens=flags.bucket_tokens,
        pack_tokens=flags.pack_tokens,
        attention=attention_length(config),
    )


def parts_of_run(stored: dict[str, Any], flags: TrainConfig, global_batch: int, experts: int) -> int | None:
    """Return the number of parts of one shape that a resumed run's steps have: as many as at its beginning, if a rank's
    micro-batches lie within them; None if they don't, or if the number is not known.

    stored: the checkpoint's fingerprint. experts: ranks that divide them, whose micro-batches must be of one shape.
    """
    split = str(stored.get("split", "")).split(" x ")
    # Checkpoints from before there were parts have as many as micro-batches.
    parts = stored.get("parts", int(split[2]) if len(split) == 3 else None)
    if parts is None or stored.get("global_batch") != global_batch or global_batch % parts:
        return None
    within = (global_batch // parts) % flags.batch_size == 0
    return parts if within and (experts == 1 or flags.grad_accumulation % parts == 0) else None


def attention_length(config: DiTConfig) -> float:
    """Tokens of a sample of which attention takes as many operations as the linear layers."""
    return config.hidden_size * (2 + config.mlp_ratio)


def samples_at_once(flags: TrainConfig, config: DiTConfig) -> int:
    """Samples of the model's configured size that have the tokens of a rank's micro-batch, at most."""
    return flags.batch_size if flags.tokens is None else math.ceil(flags.batch_size * flags.tokens / config.tokens)
