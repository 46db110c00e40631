"""Encodes a data set, pictures or clips and their captions, once.

Every rank encodes the shards ``rank, rank + world_size, ...``; a shard's bytes depend on the settings alone, not
on how many ranks there are or how often the job was stopped and started again.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from opendit.common.safe_files import make_folder, refuse_links
from opendit.common.utils import sha256_of
from opendit.config.parallel_sizes import find_place
from opendit.config.public_models import family_in, name_of_folder
from opendit.data.base import BadFileCounter, BadSample, DataError, MediaDataset, Size
from opendit.data.captions import MOST_TOKENIZED, CaptionCount, count_captions
from opendit.data.latents import FILES
from opendit.data.latents_index import INDEX, LOCK, ShardForm, complete_shards, index_locked, put_index, take_index
from opendit.data.loader import ReadAhead
from opendit.data.order.buckets import token_size
from opendit.data.pictures_and_clips import PICTURE
from opendit.data.progress import Progress
from opendit.data.shaped import ShapedDataset, crop_media
from opendit.data.shards.latents import HEADERS, tars_of
from opendit.data.sources import build_dataset
from opendit.data.text_cache import (
    EMPTY,
    AnyEncoder,
    embed,
    form_of,
    pack_captions,
    pack_embeddings,
    write_empty_caption,
)
from opendit.encoders.published_text import load_published_text
from opendit.encoders.text import load_text_encoder
from opendit.encoders.vae import HUB, Codec, load_codec
from opendit.encoders.video_vae import load_video_codec
from opendit.models.families import FAMILIES
from opendit.parallel.rendezvous import meet
from opendit.parallel.supervisor import Supervisor

# Of a shard: moments (B, F, 2C, ...) fp16, labels, rows, captions and their embeddings, if there are any.
Part = tuple[Tensor, Tensor, Tensor, list[str], list[Any]]


class _RowReader(Dataset[Any]):
    """Reads batches of rows, unmirrored and without replacements, in a worker process."""

    def __init__(self, dataset: MediaDataset):
        self.dataset = dataset
        self.on_read: Callable[[int], None] | None = None

    def __getitem__(self, rows: list[int]) -> tuple[list[int], list[int], list[str], Tensor | None, list[str]]:
        """Return the readable rows, their labels, their captions if there are any, their pictures (B, C, H, W), clips
        (B, C, T, H, W) or None, and the skipped files."""
        good, labels, captions, pictures, skipped = [], [], [], [], []
        self.dataset.prefetch(rows)
        for row in rows:
            if self.on_read is not None:
                self.on_read(row)
            try:
                item = self.dataset.read(row)
            except BadSample as bad:
                skipped.append(str(bad))
                continue
            pictures.append(item.x)
            good.append(row)
            labels.append(item.y)
            if item.text is not None:
                captions.append(item.text)
        return good, labels, captions, torch.stack(pictures) if pictures else None, skipped


def make_latents(
    dataset: MediaDataset,
    codec: Codec,
    output: str | Path,
    *,
    image_size: int,
    flips: bool,
    encoder: AnyEncoder | None = None,
    counted: CaptionCount | None = None,
    batch_size: int = 64,
    num_workers: int = 4,
    shard_size: int = 4096,
    tar_bytes: int | None = None,
    bucket_tokens: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    max_bad: float = 0.05,
    patience: float = 0.0,
    on_hang: Callable[[str], None] | None = None,
) -> dict[str, Any] | None:
    """Write the latents of ``dataset`` to ``output``, keeping the shards there: tars of about ``tar_bytes``
    (``opendit.data.shards.latents``), beside those of the same data at other picture sizes; or, without it, safetensors
    files of ``shard_size`` samples (``opendit.data.latents``).

    dataset: with ``bucket_tokens``, a ShapedDataset, whose samples have up to so many tokens, for tars.
    codec: of pictures, or of clips if the data set's items are clips. flips: also encode every picture's mirror image.
    patience, on_hang: for a file that takes for ever, see ``ReadAhead``. encoder: a frozen text encoder, or those of a
    public model, for the captions, which are kept as words without one. counted: rank 0's count of the
    captions by the encoder's tokens, which the index keeps. With several ranks the default process group must exist.

    Returns the index on rank 0, None elsewhere. Raises ValueError if ``output`` holds latents of other settings,
    DataError if more than ``max_bad`` of the files can't be read or a latent doesn't fit float16.
    """
    output = Path(output)
    form = FILES if tar_bytes is None else tars_of(image_size)
    settings = _settings(dataset, codec, image_size, flips, tar_bytes or shard_size, encoder, form.version)
    if isinstance(dataset, ShapedDataset):
        # Several sizes of the same media may lie in one folder.
        settings |= {"data": dataset.whole.fingerprint().identity, "shapes": settings["data"]}
        settings |= {"bucket_tokens": bucket_tokens}
    plan = _plan(
        dataset, lambda rows: _samples_of_a_tar(dataset, codec, settings, rows, encoder) if tar_bytes else shard_size
    )
    shards = len(plan)
    make_folder(output)
    refuse_links(output, [INDEX, LOCK, EMPTY, *(form.name(shard, shards) for shard in range(shards))], "--output")
    kept = complete_shards(output, settings, form)
    before = _take_index(output, settings, form, world_size, rank)
    mine = {shard: plan[shard] for shard in range(rank, shards, world_size)}
    # What is kept is read once for its checksum; a shard that is not what an index said of it is remade.
    names = {shard: form.name(shard, shards) for shard in mine}
    checksums = {name: sha256_of(output / name) for name in names.values() if name in kept}
    checksums = {name: found for name, found in checksums.items() if before.get(name, found) == found}
    todo = {
        shard: [part[first : first + batch_size] for first in range(0, len(part), batch_size)]
        for shard, part in mine.items()
        if names[shard] not in checksums
    }

    title = "encoding" if world_size == 1 else f"encoding (rank 0's part of {world_size})"
    done = sum(len(part) for shard, part in mine.items() if shard not in todo)
    total = sum(map(len, mine.values()))
    counter = BadFileCounter(max_bad, on_skip=lambda file: Progress.write(f"skipped {file}"))
    reader, pin_memory = _RowReader(dataset), _device(codec).type == "cuda"
    with (
        Progress(total, noun_of(settings), initial=done, title=title, disable=rank > 0) as bar,
        ReadAhead(
            reader,
            list(chain(*todo.values())),
            num_workers=num_workers,
            pin_memory=pin_memory,
            patience=patience,
            on_hang=on_hang,
        ) as batches,
    ):
        for shard, jobs in todo.items():
            parts, skipped = _encode_shard(islice(batches, len(jobs)), dataset, codec, flips, encoder, counter, bar)
            views = 2 if flips else 1
            channels, *sides = latent_shape(codec, dataset, image_size, plan[shard])
            tensors = _join(parts, dataset, (views, 2 * channels, *sides), encoder)
            checksums[names[shard]] = form.write(output / names[shard], tensors, settings, skipped)

    everyone = [checksums]
    if world_size > 1:
        everyone = [{}] * world_size
        dist.all_gather_object(everyone, checksums, group=dist.group.WORLD)  # which waits for all
    checksums = {name: found for part in everyone for name, found in part.items()}
    if rank > 0:
        return None
    with index_locked(output, form):
        index = _finish(output, dataset, codec, settings, plan, max_bad, encoder, checksums, form, counted)
        put_index(output, settings, form, index)
    return index


def _take_index(output: Path, settings: dict[str, Any], form: ShardForm, world_size: int, rank: int) -> dict[str, str]:
    """Call ``take_index`` on rank 0, and return its result on every rank."""
    found: list[Any] = [{}]
    if rank == 0:
        found[0] = take_index(output, settings, form)
    if world_size > 1:
        dist.broadcast_object_list(found, src=0, group=dist.group.WORLD)
    return found[0]


def _plan(dataset: MediaDataset, shard_size: Callable[[list[int]], int]) -> list[list[int]]:
    """Return the rows of every shard: in order, but those of one shape first and then those of the next. shard_size:
    returns how many of these rows, which have one shape, are in a shard."""
    keys = dataset.shapes().array
    keys = np.zeros(len(dataset), dtype=np.int64) if keys is None else keys
    plan = []
    for key in np.unique(keys):
        rows = np.flatnonzero(keys == key).tolist()
        size = shard_size(rows)
        plan += [rows[first : first + size] for first in range(0, len(rows), size)]
    return plan or [[]]


def _samples_of_a_tar(dataset: MediaDataset, codec: Codec, settings: dict[str, Any], rows: list[int], encoder) -> int:
    """Return how many of these rows, at least one, a tar of about ``shard_size`` bytes holds, with captions of the
    longest length."""
    numbers = (4 if settings["flips"] else 2) * math.prod(latent_shape(codec, dataset, settings["image_size"], rows))
    if encoder:
        numbers += form_of(encoder).numbers(encoder.max_tokens)
    return max(1, settings["shard_size"] // (2 * numbers + HEADERS))


def _settings(
    dataset: MediaDataset,
    codec: Codec,
    image_size: int,
    flips: bool,
    shard_size: int,
    encoder,
    version: int,
) -> dict[str, Any]:
    """Return everything that a shard's bytes depend on."""
    settings = {
        "version": version,
        "data": dataset.fingerprint().identity,
        "pictures": len(dataset),
        "image_size": image_size,
        "vae": codec.fingerprint(),
        "latent_shape": list(latent_shape(codec, dataset, image_size)),
        "flips": flips,
        "precision": str(inner(codec).dtype).removeprefix("torch."),
        "shard_size": shard_size,
    }
    about = dataset.describe()
    if about.clips is not None:
        settings["video"] = {name: value for name, value in vars(about.clips).items() if value is not None}
    if about.conditioning == "text":
        settings["text"] = encoder and encoder.fingerprint()
    return settings


def _frames(dataset: MediaDataset) -> int | None:
    """Return the frames of a clip; None if samples are pictures without a time axis."""
    shape = dataset.describe().sample_shape
    return shape[1] if len(shape) == 4 else None


def noun_of(settings: dict[str, Any]) -> str:
    return "clips" if "video" in settings else "pictures"


def inner(codec: Codec) -> Any:
    return getattr(codec, "codec", codec)  # of a picture's codec that works frame by frame


def _device(codec: Codec) -> torch.device:
    return torch.device(inner(codec).device)


def latent_shape(codec: Codec, dataset: MediaDataset, image_size: int, rows: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the shape of a picture's latent, (C, h, w), or of a clip's, (C, t, h, w): of these rows, which have one
    shape, or without any of a sample of ``image_size``."""
    frames, latents_of = _frames(dataset), cast(Any, codec)  # pictures' take no frames
    size: Size = frames or 1, image_size, image_size
    if rows and isinstance(dataset, ShapedDataset):
        size = tuple(dataset.sizes[dataset.keys[rows[0]]].tolist())
    elif rows and dataset.shapes().key(rows[0]) == PICTURE:
        size = 1, image_size, image_size
    return latents_of.latent_shape(*(size[1:] if frames is None else size))


def _encode_shard(
    batches: Iterable[tuple[Any, ...]],
    dataset: MediaDataset,
    codec: Codec,
    flips: bool,
    encoder,
    counter: BadFileCounter,
    bar: Progress,
) -> tuple[list[Part], list[str]]:
    """Encode a shard. Return its batches, and the files skipped in it."""
    parts, all_skipped = [], []
    for rows, labels, captions, pictures, skipped in batches:
        counter.add(len(rows), skipped)
        all_skipped += skipped
        if rows:
            pictures = pictures.to(_device(codec), non_blocking=True)
            views = (pictures, pictures.flip(-1)) if flips else (pictures,)
            moments = torch.stack([codec.moments(view) for view in views], dim=1).half()
            if not moments.isfinite().all():
                raise DataError(
                    f"the latents of the pictures in rows {rows[0]} to {rows[-1]} overflow; pass --mixed_precision "
                    "bf16 or fp32, and check the VAE's weights if that doesn't help"
                )
            embedded = embed(encoder, captions) if encoder else []
            parts.append((moments.cpu(), torch.tensor(labels), torch.tensor(rows), captions, embedded))
        bar.update(len(rows) + len(skipped))
    return parts, all_skipped


def _join(parts: list[Part], dataset: MediaDataset, shape: tuple[int, ...], encoder) -> dict[str, Tensor]:
    """Join one shard's tensors. shape: of one picture's moments, for a shard without a single readable picture."""
    if not parts:
        parts = [(torch.empty(0, *shape, dtype=torch.half), torch.empty(0).long(), torch.empty(0).long(), [], [])]
    moments, labels, rows = (torch.cat(tensors) for tensors in list(zip(*parts, strict=True))[:3])
    tensors = {"moments": moments, "labels": labels.long(), "rows": rows.long()}
    if dataset.describe().conditioning == "text":
        tensors |= pack_captions([caption for part in parts for caption in part[3]])
    if encoder:
        embedded = [caption for part in parts for caption in part[4]]
        tensors |= pack_embeddings(embedded, form_of(encoder))
    return tensors


def _finish(
    output: Path,
    dataset: MediaDataset,
    codec: Codec,
    settings: dict[str, Any],
    plan: list[list[int]],
    max_bad: float,
    encoder,
    checksums: dict[str, str],
    form: ShardForm,
    counted: CaptionCount | None,
) -> dict[str, Any]:
    """Return the index once every shard is there. Raises DataError if too many files were skipped."""
    entries, all_skipped = [], []
    for shard, rows in enumerate(plan):
        name = form.name(shard, len(plan))
        header = form.header(output / name)
        if header is None or name not in checksums:
            raise DataError(f"{output / name} is missing or damaged; run the same command again")
        size = (output / name).stat().st_size
        entries.append({"file": name, "count": header[0], "bytes": size, "sha256": checksums[name]})
        if "video" in settings or "shapes" in settings:
            entries[-1]["shape_key"] = dataset.shapes().key(rows[0])
        if "shapes" in settings:
            entries[-1]["latent_shape"] = list(latent_shape(codec, dataset, settings["image_size"], rows))
        all_skipped += header[2]
    BadFileCounter(max_bad, minimum=1).add(len(dataset) - len(all_skipped), all_skipped)
    index = {
        "count": sum(entry["count"] for entry in entries),
        "class_names": list(dataset.describe().class_names),
        "image_size": settings["image_size"],
        "vae": codec.name,
        "scaling_factor": codec.scaling_factor,
        "shift_factor": codec.shift_factor,
        "latent_shape": settings["latent_shape"],
        "flips": settings["flips"],
        "settings": settings,
        "skipped": all_skipped,
        "shards": entries,
    }
    if "video" in settings:
        index["video"] = settings["video"]
        if (rate := dataset.shapes().frame_rate()) is not None:
            index["data_fps"] = rate
    if dataset.describe().conditioning == "text":
        index["conditioning"] = "text"
    if encoder:
        width, pooled, dtype = form_of(encoder)
        index["text"] = {"encoder": encoder.name, "max_tokens": encoder.max_tokens}
        index["text"] |= {"pooled": pooled} if pooled != width else {}
        index["text"] |= {"dtype": dtype} if dtype != "fp16" else {}
        if counted is not None:
            names = {"rows": counted.rows, "counted": counted.counted, "longest": counted.longest}
            index["captions"] = {**names, "cut": counted.over(encoder.max_tokens)}
        index["checksums"] = {EMPTY: write_empty_caption(output, encoder)}
    return index


def run(
    data_path: str,
    vae: str,
    image_size: int,
    output: str,
    *,
    batch_size: int = 64,
    num_workers: int = 4,
    flip: bool = True,
    mixed_precision: str = "auto",
    shard_size: int = 4096,
    tar_bytes: int | None = None,
    pretrained: str | None = None,
    bucket_tokens: int | None = None,
    max_upscale: float = 1.25,
    patch: tuple[int, ...] = (),
    text_encoder: str | None = None,
    max_text_tokens: int | None = None,
    data_timeout: float = 300.0,
    **media: Any,
) -> dict[str, Any] | None:
    """Run ``preprocess.py latents`` with its flags' values, with one process per GPU if torchrun started several.

    patch: of the model for which ``bucket_tokens`` counts tokens, ([frames,] rows, columns). media: fields of
    ``sources.Request``, about how files are read.

    Raises ValueError, OSError or DataError; among several processes, an error of one ends all, see ``Supervisor``.
    """
    place = find_place()
    rank, world_size = place.rank, place.world_size
    supervisor, stack = Supervisor((ValueError, DataError)), ExitStack()
    if world_size > 1:
        stack.enter_context(supervisor)
    with stack:
        if vae not in HUB:
            vae = str(Path(vae).expanduser().resolve())  # the index keeps it for runs that start in other folders
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        dtype = pick_dtype(mixed_precision, device, "fp16" if pretrained is None else "fp32")
        dataset = build_dataset(
            data_path,
            image_size,
            seed=0,
            random_flip=None if flip else False,
            **media,
        )
        use_video = media.get("use_video", False)
        clips: dict[str, Any] = {"num_frames": 16, "frame_interval": 1, "short_clips": "skip", "fps": None}
        clips = {name: media.get(name, usual) for name, usual in clips.items()}
        about = dataset.describe()
        if about.kind != "pixels":
            raise ValueError(f"--data_path {data_path}: holds latents already; give pictures or clips")
        codec = (load_video_codec if use_video else load_codec)(
            vae, channels=about.sample_shape[0], device=device, dtype=dtype
        )
        latent_shape(codec, dataset, image_size)
        if bucket_tokens is not None:
            dataset = crop_media(
                dataset,
                token_size(patch, codec.downscale, getattr(codec, "temporal_downscale", 1)),
                bucket_tokens,
                "--bucket_tokens",
                image_size=image_size,
                max_upscale=max_upscale,
                **clips | ({} if use_video else {"num_frames": 1}),
            )
            about = dataset.describe()
        encoder: AnyEncoder | None = None
        if text_encoder:
            if about.conditioning != "text":
                what = f"--text_encoder {text_encoder}" if pretrained is None else f"--pretrained {pretrained}"
                fix = "leave it out" if pretrained is None else "give a CSV of path,text"
                raise ValueError(f"{what}: --data_path {data_path} has no captions; {fix}")
            text_encoder = str(Path(text_encoder).resolve()) if Path(text_encoder).is_dir() else text_encoder
            encoder = _load_encoder(text_encoder, pretrained, max_text_tokens, device, dtype)
        if rank == 0:
            precision = str(inner(codec).dtype)[6:]
            captions = f", captions with --text_encoder {text_encoder}" if encoder else ""
            print("\n".join([about.text, *about.notes]))
            print(f"encoding with --vae {vae}{captions} on {device} in {precision}", flush=True)
        counted = _count_captions(dataset, encoder) if rank == 0 and about.conditioning == "text" else None
        if world_size > 1:
            # Only to wait for each other at the end, which may be long after the first rank is through.
            store = dist.PrefixStore("default", meet(place))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(days=30))
        index = make_latents(
            dataset,
            codec,
            output,
            image_size=image_size,
            flips=about.random_flip,
            encoder=encoder,
            counted=counted,
            batch_size=batch_size,
            num_workers=num_workers,
            shard_size=shard_size,
            tar_bytes=tar_bytes,
            bucket_tokens=bucket_tokens,
            rank=rank,
            world_size=world_size,
            max_bad=about.max_bad,
            patience=data_timeout,
            on_hang=supervisor.fail,
        )
        if index is not None:
            skipped = f", {len(index['skipped']):,} unreadable files left out" if index["skipped"] else ""
            noun = noun_of(index)
            shards = f"{len(index['shards']):,} shard{'s'[: len(index['shards']) != 1]}"
            print(f"{index['count']:,} {noun} in {shards}{skipped}: train with --data_path {output}")
        return index


def _load_encoder(
    name: str, pretrained: str | None, max_tokens: int | None, device: torch.device, dtype: torch.dtype
) -> AnyEncoder:
    """Load a text encoder, or those of a folder of the family of ``pretrained``, in the dtype that they train with."""
    if pretrained is not None:
        family = FAMILIES[cast(str, family_in(name_of_folder(pretrained) or ""))]
        return load_published_text(Path(name), family, device=device, dtype=torch.bfloat16, max_tokens=max_tokens)
    longest = {} if max_tokens is None else {"max_tokens": max_tokens}
    return load_text_encoder(name, device=device, dtype=dtype, **longest)


def _count_captions(dataset: MediaDataset, encoder: AnyEncoder | None) -> CaptionCount:
    """Count the captions, and print lines about those that are cut and those that say nothing."""
    if encoder is None:
        found = count_captions(dataset)
        lines = found.for_any_encoder()
    else:
        found = count_captions(dataset, encoder.count_tokens, MOST_TOKENIZED)
        lines = found.cut(encoder.max_tokens, encoder.name)
    for line in (*found.without_words(), *lines):
        print(line, flush=True)
    return found


def pick_dtype(mixed_precision: str, device: torch.device, auto: str = "fp16") -> torch.dtype:
    """Return the precision of the networks. auto: by default on a GPU; fp16 has the ten bits of mantissa that latents
    are stored with. A CPU computes in fp32."""
    if device.type != "cuda":
        if mixed_precision in ("fp16", "bf16"):
            raise ValueError(f"--mixed_precision {mixed_precision}: needs a GPU, and there is none; leave it out")
        return torch.float32
    name = auto if mixed_precision == "auto" else mixed_precision
    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[name]
