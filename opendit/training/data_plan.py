"""Open a run's data, apply the flags about captions and sizes, and choose the order of the samples."""

import math
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from opendit.checkpoint.load import Checkpoint
from opendit.checkpoint.pretrained import ALONE, find_weights, read_config
from opendit.common.utils import DataError
from opendit.config.architectures import family_in
from opendit.config.components import BatchFlags, DataFlags
from opendit.config.train import TrainConfig
from opendit.data import BatchSchedule, MediaDataset, build_dataset, build_schedule
from opendit.data.base import Description
from opendit.data.captions import MOST_TOKENIZED, count_captions, takes_whole
from opendit.data.held_out import SEED, hold_out
from opendit.data.mock import MockDataset
from opendit.data.shaped import ShapedDataset, TokenSize, crop_media, shape_latents, token_size
from opendit.data.sources import NoSplit, Request
from opendit.encoders.text import TextEncoder, fitting_tokens, text_geometry
from opendit.encoders.vae import codec_geometry
from opendit.encoders.video_vae import video_geometry
from opendit.models.conditioning import TextConfig
from opendit.models.configuration import DiTConfig
from opendit.parallel.mesh import Mesh


def open_data(flags: TrainConfig, seed: int | None = None, split: str = "train") -> MediaDataset:
    """Open the data set of --data_path, split "train" or "test", with the flags that ``Request`` has. Raises the errors
    of ``build_dataset``."""
    how = {item.name: getattr(flags, item.name) for item in fields(Request) if hasattr(flags, item.name)}
    how["text_encoder"] = flags.text_encoder or ("bytes" if flags.cross_attention else None)
    return build_dataset(**how, seed=flags.global_seed if seed is None else seed, split=split)


def clip_fps(data: DataFlags, dataset: MediaDataset) -> tuple[float | None, list[str]]:
    """Return the frame rate of drawn clips, and notes to print. The rate is --fps, or the files' median frame rate
    divided by --frame_interval. It is None for pictures, or if unknown."""
    rates = [] if not data.use_video or data.fps is not None else dataset.shapes().frame_rates()
    if not rates:
        return data.fps, []
    drawn, low, high = median(rates) / data.frame_interval, min(rates), max(rates)
    if high < 1.05 * low:
        return drawn, []
    return drawn, [
        f"clips: of {low:.4g} to {high:.4g} frames a second, so that one motion has several speeds; drawn clips play "
        f"at {drawn:.4g}, by the median. --fps reads all of them at one rate"
    ]


def held_out(flags: TrainConfig, dataset: MediaDataset) -> tuple[MediaDataset, MediaDataset | None]:
    """Return the training data set, and the validation data set or None. Raises ValueError, OSError or DataError if
    --validate_path can't be read or has other kinds of samples, or if no samples remain for training."""
    if not flags.validates:
        return dataset, None
    if flags.validate_path is None:
        return hold_out(dataset, flags.validate_share)
    return dataset, _open(flags, dataset)


def _open(flags: TrainConfig, training: MediaDataset) -> MediaDataset:
    """Open the test split of --validate_path, or all samples if there is no split."""
    path = flags.validate_path
    theirs = replace(flags, data_path=path, random_flip=False)
    try:
        try:
            found = open_data(theirs, SEED, split="test")
        except NoSplit:
            found = open_data(theirs, SEED)
    except (ValueError, OSError, DataError) as error:
        raise type(error)(str(error).replace("--data_path", "--validate_path")) from error
    if path != "mock" and found.fingerprint().identity == training.fingerprint().identity:
        raise ValueError(
            f"--validate_path {path}: these are the samples that are trained on; to hold a share of them out, give "
            "--validate_share 0.01 in its place"
        )
    for what, name in (
        ("kind", "{} where --data_path has {}"),
        ("conditioning", "samples with a {} where those of --data_path have a {}"),
        ("sample_shape", "samples of shape {} where those of --data_path have {}"),
        ("class_names", "the classes {} where --data_path has {}"),
        ("text_encoder", "captions encoded by {} where those of --data_path are by {}"),
        ("first_frames", "first frames with tokens of width {} where those of --data_path are of {}"),
    ):
        theirs, ours = (getattr(each.describe(), what) for each in (found, training))
        if theirs != ours:
            raise ValueError(
                f"--validate_path {path}: has {name.format(_shown(theirs), _shown(ours))}; give "
                "samples like the training data"
            )
    return found


def _shown(value) -> str:
    if isinstance(value, list):
        return ", ".join(value[:5]) + (f" and {len(value) - 5:,} more" if len(value) > 5 else "")
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def resolve_captions(flags: TrainConfig, dataset: MediaDataset) -> tuple[TrainConfig, list[str]]:
    """Set ``text_encoder`` for data with captions; reset a recipe's caption flags for data with classes. Return the
    flags and notes. Raises ValueError for caption flags that don't fit the data."""
    path = flags.data_path
    about = dataset.describe()
    encoder = (flags.text_encoder or about.text_encoder or "bytes") if about.conditioning == "text" else "bytes"
    if encoder == "bytes" and "text_precision" in flags.given:
        raise ValueError("--text_precision: the run has no frozen text encoder; leave it out")
    if about.conditioning == "text":
        if flags.num_classes is not None:
            raise ValueError(f"--num_classes: --data_path {path} has captions, not classes; leave it out")
        cached, given = about.text_encoder, flags.text_encoder
        other = cached and given not in (None, "bytes", cached) and str(Path(given).expanduser().resolve()) != cached
        # the folder of a public model may have moved; _public_model checks it
        if other and not family_in(flags.model):
            raise ValueError(f"--text_encoder {given}: {path} was made with {cached}; leave it out, or give that")
        return replace(flags, text_encoder=given or cached or "bytes"), []
    notes, unused = [], {}
    for name in ("text_encoder", "cross_attention", "max_text_tokens", "sample_prompts"):
        if name in flags.given:
            needs = "pretrained" if family_in(flags.model) else name
            raise ValueError(
                f"--{needs}: needs captions, and --data_path {path} has none; put name.txt beside name.jpg "
                "(docs/data.md), or add --caption_prefix TEXT"
            )
        if getattr(flags, name):  # a recipe has set the flag
            notes.append(f"{name} of --recipe {flags.recipe} is not used: --data_path {path} has classes")
            unused[name] = TrainConfig.__dataclass_fields__[name].default
    return replace(flags, **unused), notes


def text_before(flags: TrainConfig, resume: Checkpoint | None = None) -> TextConfig | None:
    """Return the caption settings of the model to resume or start from. None without such a model or its file."""
    if resume is None and flags.pretrained is None:
        return None
    with suppress(OSError):
        config = read_config(find_weights(cast(str, flags.pretrained)) if resume is None else resume.model)
        return config and config.text
    return None


def fit_captions(
    flags: TrainConfig, dataset: MediaDataset, keeps: TextConfig | None = None, mesh: Mesh = ALONE
) -> tuple[TrainConfig, list[str]]:
    """Set the number of tokens for the ``bytes`` encoder. Return the flags, and notes on captions that are cut or
    empty.

    The number comes from --max_text_tokens, else from the model to start from (``keeps``), else from the data. All
    ranks must call this; rank 0 counts the captions. Raises the errors of :func:`resolve_captions`.
    """
    given = flags.max_text_tokens
    resolved, _ = resolve_captions(flags, dataset)
    if resolved.text_encoder != "bytes" or isinstance(dataset, MockDataset):
        return flags, []
    found = count_captions(dataset) if mesh.is_main else None
    longest = mesh.broadcast_object(found and found.longest)
    kept = keeps.max_tokens if keeps is not None and keeps.inside else None
    tokens = given or kept or fitting_tokens(longest)
    notes = []
    if found is not None:
        notes += found.without_words()
        if tokens > text_geometry("bytes")[2] and tokens not in (given, kept):
            notes.append(
                f"{found.name}: --text_encoder bytes takes {tokens:,} tokens, for the longest {found.among} has "
                f"{longest:,} ({found.longest_at})"
            )
        notes += found.cut(tokens, "bytes", takes_whole(longest))
    return replace(flags, max_text_tokens=tokens), notes


def caption_notes(
    dataset: MediaDataset, text: TextConfig | None, encoder: TextEncoder | None, name: str = "captions"
) -> list[str]:
    """Return notes on captions that are empty, or cut by the encoder. Each begins with ``name``."""
    if text is None or isinstance(dataset, MockDataset):
        return []
    if text.inside:
        found = count_captions(dataset, name=name)
        return [*found.without_words(), *found.cut(text.max_tokens, text.name)]
    about = dataset.describe()
    if encoder is None or about.text_encoder is not None:
        return [*count_captions(dataset, name=name).without_words(), *about.cut_captions]
    found = count_captions(dataset, encoder.count_tokens, MOST_TOKENIZED, name)
    advice = takes_whole(found.longest) if getattr(encoder, "kind", "") == "t5" else ""
    return [*found.without_words(), *found.cut(encoder.max_tokens, encoder.name, advice)]


def last_step_of(batch: BatchFlags, schedule: BatchSchedule) -> int:
    """Return the step that ends the run. The default of --epochs does not end a run that has --max_steps."""
    if batch.max_steps is not None and "epochs" not in batch.given and batch.epochs == BatchFlags.epochs:
        return batch.max_steps
    steps = schedule.steps(batch.epochs)
    return min(steps, batch.max_steps or steps)


def check_classes(num_classes: int | None, data_path: str, about: Description) -> None:
    """Raise ValueError if the data set has more than ``num_classes`` classes. None and 0 allow any number."""
    if not num_classes or num_classes >= about.num_classes:
        return
    found = about.largest_label()
    sample = f" ({found[1]} has the label {found[0]})" if found and found[0] >= num_classes else ""
    raise ValueError(
        f"--num_classes {num_classes}: --data_path {data_path} has {about.num_classes} classes, "
        f"labels 0 to {about.num_classes - 1}{sample}; leave the flag out or raise it"
    )


def shape_samples(flags: TrainConfig, dataset: MediaDataset, config: DiTConfig) -> MediaDataset:
    """Return the data set with the sample shapes of --bucket_tokens or --pack_tokens; unchanged without these flags.
    Raises ValueError, with the flag and the fix, if the model or the data don't allow these shapes."""
    if flags.tokens is None:
        latents = dataset.shapes().latents
        if config.positions == "learned" and latents and len({size[1:] for _, size in latents()}) > 1:
            raise ValueError(
                f"--data_path {flags.data_path}: samples of several sizes, but this model has learned positions, of "
                "one size; give --positions sincos or rope"
            )
        return dataset
    flag = "--bucket_tokens" if flags.pack_tokens is None else "--pack_tokens"
    caption = 0 if flags.pack_tokens is None else config.caption_tokens
    if flags.pack_tokens is not None:
        config.check_packs()
        if config.joint_sequence and flags.sequence_parallel_size > 1:
            raise ValueError(
                f"{flag} {flags.tokens}: ranks can't share the packs of a model whose captions are tokens of the "
                "sequence; leave --sequence_parallel_size out, or give --bucket_tokens"
            )
    if config.positions == "learned":
        raise ValueError(
            f"{flag} {flags.tokens}: this model has learned positions, of one size; give --positions sincos or rope"
        )
    about = dataset.describe()
    if about.kind == "latents":
        token = token_size(config.patch)
        return _of_known_positions(shape_latents(dataset, token, flags.tokens, flag, beside=caption), token, config)
    if caption and flags.tokens < config.tokens + caption:
        raise ValueError(
            f"{flag} {flags.tokens}: a picture of --image_size {flags.image_size} has {config.tokens:,} tokens and its "
            f"caption up to {caption:,} more; raise it to {config.tokens + caption} at least"
        )
    channels = about.sample_shape[0]
    if flags.use_video:
        _, downscale, temporal = video_geometry(flags.vae, channels)
    else:
        downscale, temporal = codec_geometry(flags.vae, channels)[1], 1
    token = token_size(config.patch, downscale, temporal)
    shaped = crop_media(
        dataset,
        token,
        flags.tokens - caption,
        flag,
        image_size=flags.image_size,
        num_frames=flags.num_frames if flags.use_video else 1,
        frame_interval=flags.frame_interval,
        short_clips=flags.short_clips,
        fps=flags.fps,
        max_upscale=flags.max_upscale,
        fine=flags.pack_tokens is not None,
    )
    return _of_known_positions(shaped, token, config)


def _of_known_positions(shaped: ShapedDataset, token: TokenSize, config: DiTConfig) -> ShapedDataset:
    if config.longest_side is not None:
        config.check_side(int((shaped.sizes[np.unique(shaped.keys), 1:] // token.side).max()))
    return shaped


def make_schedule(
    flags: TrainConfig, dataset: MediaDataset, global_batch: int, config: DiTConfig, parts: int | None = None
) -> BatchSchedule:
    """Return the order of the run's samples. Raises the errors of ``build_schedule``. parts: number of groups of
    samples with equal shapes in a step; by default, the number of micro-batches."""
    return build_schedule(
        dataset,
        global_batch,
        parts or flags.grad_accumulation,
        flags.global_seed,
        bucket_tokens=flags.bucket_tokens,
        pack_tokens=flags.pack_tokens,
        caption_tokens=config.caption_tokens,
        # the sequence length at which attention takes as many FLOPs as the linear layers
        attention=config.hidden_size * (2 + config.mlp_ratio),
    )


def parts_of_run(stored: dict[str, Any], flags: TrainConfig, global_batch: int, experts: int) -> int | None:
    """Return the number of groups for :func:`make_schedule` in a resumed run with the fingerprint ``stored``.

    Return None if the number is unknown, or if samples of different shapes would meet in one micro-batch. With expert
    parallelism, the micro-batches of ``experts`` ranks must have one shape.
    """
    split = str(stored.get("split", "")).split(" x ")
    # older checkpoints do not store the number: each micro-batch was a group
    parts = stored.get("parts", int(split[2]) if len(split) == 3 else None)
    if parts is None or stored.get("global_batch") != global_batch or global_batch % parts:
        return None
    within = (global_batch // parts) % flags.batch_size == 0
    return parts if within and (experts == 1 or flags.grad_accumulation % parts == 0) else None


def samples_at_once(flags: TrainConfig, config: DiTConfig) -> int:
    """Return a rank's micro-batch size. Tokens are converted to samples of the configured size."""
    if flags.tokens is None:
        return flags.batch_size
    tokens = config.tokens + (config.caption_tokens if flags.pack_tokens is not None else 0)
    return math.ceil(flags.batch_size * flags.tokens / tokens)
