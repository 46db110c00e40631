"""Encode a data set's pictures or clips, and their captions, once before training.

Every rank encodes the shards ``rank, rank + world_size, ...``. A shard's bytes depend only on the data and the
settings."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from opendit.common.json_file import MIB, read_json
from opendit.common.progress import Progress
from opendit.common.safe_files import make_folder, refuse_links
from opendit.common.utils import sha256_of
from opendit.config.architectures import family_in, name_of_folder
from opendit.config.parallel_sizes import find_place
from opendit.data.base import BadFileCounter, BadSample, DataError, MediaDataset, Size
from opendit.data.captions import MOST_TOKENIZED, CaptionCount, count_captions
from opendit.data.files import file_locked
from opendit.data.latents import (
    EMPTY,
    HEADERS,
    AnyEncoder,
    CachedSample,
    complete_tars,
    embed,
    form_of,
    read_header,
    tar_name,
    write_empty_caption,
    write_shard,
)
from opendit.data.latents_index import INDEX, LOCK, VERSION, put_index, take_index
from opendit.data.loader import ReadAhead
from opendit.data.pictures_and_clips import PICTURE
from opendit.data.shaped import ShapedDataset, crop_media, token_size
from opendit.data.sources import build_dataset
from opendit.encoders.published_text import load_published_text
from opendit.encoders.text import load_text_encoder
from opendit.encoders.vae import HUB, Codec, load_codec
from opendit.encoders.video_vae import load_video_codec
from opendit.encoders.vision import PictureTokens, VisionTeacher
from opendit.models.conditioning import first_frames_alone
from opendit.models.families import FAMILIES
from opendit.parallel.mesh import meet
from opendit.parallel.supervisor import Supervisor


class _RowReader(Dataset[Any]):
    """Data set that reads batches of rows in a worker process. Unreadable rows are left out."""

    def __init__(self, dataset: MediaDataset):
        self.dataset = dataset
        self.on_read: Callable[[int], None] | None = None

    def __getitem__(self, rows: list[int]) -> tuple[list[int], list[int], list[str], Tensor | None, list[str]]:
        """Return (rows, labels, captions, media, skipped files). The first four have no unreadable rows. The media are
        pictures (B, C, H, W) or clips (B, C, T, H, W); None if all rows are unreadable."""
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


@dataclass(frozen=True)
class FirstFrameEncoder:
    """Encodes clips' first frames as inputs for an image-to-video model."""

    width: int  # width of a first frame's tokens; 0 for models without such tokens
    tokens: PictureTokens | None  # network that computes the tokens

    @classmethod
    def of(cls, folder: Path, family: str, device: torch.device) -> "FirstFrameEncoder | None":
        """Return the encoder for the model in a pipeline's folder; None if the model needs no first frames."""
        path = folder / "transformer/config.json"
        try:
            spec = FAMILIES[family].layout(read_json(path, MIB))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: {error!r}") from error
        if not spec.given:
            return None
        return cls(spec.text.picture, PictureTokens(folder, spec.text.picture, device) if spec.text.picture else None)

    def fingerprint(self) -> str:
        return "latents" if self.tokens is None else self.tokens.fingerprint()

    def encode(self, codec: Codec, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the tensors to cache for B clips, each (B, V, ...) fp16 on the CPU. views: V tensors (B, 3, T, H, W)
        in [-1, 1]: the clips and, if V is 2, their mirror images."""
        grey = [first_frames_alone(view) for view in views]
        made = {"first_latents": [codec.moments(view).chunk(2, dim=1)[0] for view in grey]}
        if self.tokens is not None:
            made["first_tokens"] = [self.tokens.of_clips(view) for view in views]
        return {name: torch.stack(parts, dim=1).half().cpu() for name, parts in made.items()}


def make_latents(
    dataset: MediaDataset,
    codec: Codec,
    output: str | Path,
    *,
    image_size: int,
    flips: bool,
    encoder: AnyEncoder | None = None,
    counted: CaptionCount | None = None,
    first: FirstFrameEncoder | None = None,
    batch_size: int = 64,
    num_workers: int = 4,
    shard_size: int = 4096,
    tar_bytes: int | None = None,
    bucket_tokens: int | None = None,
    teacher: VisionTeacher | None = None,
    rank: int = 0,
    world_size: int = 1,
    max_bad: float = 0.05,
    patience: float = 0.0,
    on_hang: Callable[[str], None] | None = None,
) -> dict[str, Any] | None:
    """Write the latents of ``dataset`` to tars in ``output``. Complete tars from an earlier run are not encoded again.

    A folder can hold several picture sizes of one data set. All ranks must call this function, with an initialized
    default process group.

    Args:
        flips: also encode each picture's mirror image.
        encoder: text encoder; None stores the captions as text.
        counted: statistics of the captions in the encoder's tokens, for the index; needed on rank 0 only.
        first: encodes clips' first frames for an image-to-video model.
        shard_size: samples per tar.
        tar_bytes: approximate maximum bytes of a tar, instead of ``shard_size``.
        bucket_tokens: maximum tokens of a sample, if ``dataset`` is a ShapedDataset.
        teacher: vision encoder; its features of the pictures are stored, too.
        max_bad: largest tolerated fraction of unreadable files.
        patience, on_hang: handling of a file that never arrives, see ``ReadAhead``.

    Return the index on rank 0, None on other ranks. Raises ValueError if ``output`` holds latents with other settings.
    Raises DataError if more than ``max_bad`` of the files are unreadable, or if a latent, feature or embedding
    overflows its dtype."""
    output = Path(output)
    work = _Encoding(dataset, codec, encoder, image_size, flips, teacher, first)
    settings = work.settings(tar_bytes or shard_size, bucket_tokens)
    plan = _plan(dataset, lambda rows: work.samples_of_a_tar(tar_bytes, rows) if tar_bytes else shard_size)
    all_names = [tar_name(image_size, shard, len(plan)) for shard in range(len(plan))]
    make_folder(output)
    refuse_links(output, [INDEX, LOCK, EMPTY, *all_names], "--output")
    kept = complete_tars(output, settings)
    before: list[Any] = [take_index(output, settings) if rank == 0 else {}]
    if world_size > 1:
        dist.broadcast_object_list(before, src=0, group=dist.group.WORLD)
    mine = {shard: plan[shard] for shard in range(rank, len(plan), world_size)}
    # Hash every complete shard once. If the hash differs from the index, encode the shard again.
    names = {shard: all_names[shard] for shard in mine}
    checksums = {name: sha256_of(output / name) for name in names.values() if name in kept}
    checksums = {name: found for name, found in checksums.items() if before[0].get(name, found) == found}
    todo = {
        shard: [part[first : first + batch_size] for first in range(0, len(part), batch_size)]
        for shard, part in mine.items()
        if names[shard] not in checksums
    }

    title = "encoding" if world_size == 1 else f"encoding (rank 0's part of {world_size})"
    done, total = sum(len(part) for shard, part in mine.items() if shard not in todo), sum(map(len, mine.values()))
    counter = BadFileCounter(max_bad, on_skip=lambda file: Progress.write(f"skipped {file}"))
    how: dict[str, Any] = {"num_workers": num_workers, "pin_memory": work.device.type == "cuda"}
    requests = list(chain(*todo.values()))
    with (
        Progress(total, noun_of(settings), initial=done, title=title, disable=rank > 0) as bar,
        ReadAhead(_RowReader(dataset), requests, **how, patience=patience, on_hang=on_hang) as batches,
    ):
        for shard, jobs in todo.items():
            samples, skipped = work.encode(islice(batches, len(jobs)), counter, bar)
            checksums[names[shard]] = write_shard(output / names[shard], samples, settings, skipped)

    everyone = [checksums]
    if world_size > 1:
        everyone = [{}] * world_size
        dist.all_gather_object(everyone, checksums, group=dist.group.WORLD)  # also waits for all ranks
    checksums = {name: found for part in everyone for name, found in part.items()}
    if rank > 0:
        return None
    with file_locked(output / LOCK):
        entries, skipped = work.entries(output, settings, plan, checksums)
        BadFileCounter(max_bad, minimum=1).add(len(dataset) - len(skipped), skipped)
        index = work.index(settings, entries, skipped, counted)
        if encoder:
            index["checksums"] = {EMPTY: write_empty_caption(output, encoder)}
        put_index(output, settings, index)
    return index


def _plan(dataset: MediaDataset, shard_size: Callable[[list[int]], int]) -> list[list[int]]:
    """Return the rows of every shard, in order. All rows in a shard have one shape. shard_size: function from a shape's
    rows to the number of rows per shard."""
    keys = dataset.shapes().array
    keys = np.zeros(len(dataset), dtype=np.int64) if keys is None else keys
    plan = []
    for key in np.unique(keys):
        rows = np.flatnonzero(keys == key).tolist()
        size = shard_size(rows)
        plan += [rows[first : first + size] for first in range(0, len(rows), size)]
    return plan or [[]]


def noun_of(settings: dict[str, Any]) -> str:
    return "clips" if "video" in settings else "pictures"


def inner(codec: Codec) -> Any:
    return getattr(codec, "codec", codec)  # a frame-by-frame video codec wraps a picture codec


@dataclass(frozen=True)
class _Encoding:
    """Encodes a data set's samples, and describes the result for the index."""

    dataset: MediaDataset
    codec: Codec
    encoder: AnyEncoder | None
    image_size: int
    flips: bool
    teacher: VisionTeacher | None = None
    first: FirstFrameEncoder | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(inner(self.codec).device)

    @cached_property
    def has_captions(self) -> bool:
        return self.dataset.describe().conditioning == "text"

    def latent_shape(self, rows: Sequence[int] = ()) -> tuple[int, ...]:
        """Return a latent's shape: (C, h, w) for a picture, (C, t, h, w) for a clip. rows: rows of one shape; () means
        a square picture of ``image_size``."""
        shape, latents_of = self.dataset.describe().sample_shape, cast(Any, self.codec)  # picture codecs take (h, w)
        frames = shape[1] if len(shape) == 4 else None
        size: Size = frames or 1, self.image_size, self.image_size
        if rows and isinstance(self.dataset, ShapedDataset):
            size = tuple(self.dataset.sizes[self.dataset.keys[rows[0]]].tolist())
        elif rows and self.dataset.shapes().key(rows[0]) == PICTURE:
            size = 1, self.image_size, self.image_size
        return latents_of.latent_shape(*(size[1:] if frames is None else size))

    def samples_of_a_tar(self, tar_bytes: int, rows: list[int]) -> int:
        """Return how many of ``rows`` fit into a tar of about ``tar_bytes``, at least 1. Captions count as the
        longest."""
        numbers = (4 if self.flips else 2) * math.prod(self.latent_shape(rows))
        if self.first:
            numbers += numbers // 2
        if self.encoder:
            numbers += form_of(self.encoder).numbers(self.encoder.max_tokens)
        if self.teacher is not None:
            numbers += (2 if self.flips else 1) * math.prod(self.teacher.grid) * self.teacher.width
        return max(1, tar_bytes // (2 * numbers + HEADERS))

    def settings(self, shard_size: int, bucket_tokens: int | None) -> dict[str, Any]:
        """Return all settings that determine a shard's bytes."""
        about, data = self.dataset.describe(), self.dataset.fingerprint().identity
        settings = {
            "version": VERSION,
            "data": data,
            "pictures": len(self.dataset),
            "image_size": self.image_size,
            "vae": self.codec.fingerprint(),
            "latent_shape": list(self.latent_shape()),
            "flips": self.flips,
            "precision": str(inner(self.codec).dtype).removeprefix("torch."),
            "shard_size": shard_size,
        }
        if about.clips is not None:
            settings["video"] = {name: value for name, value in vars(about.clips).items() if value is not None}
        if self.first is not None:
            settings["first_frames"] = self.first.fingerprint()
        if self.has_captions:
            settings["text"] = self.encoder and self.encoder.fingerprint()
        if self.teacher is not None:
            settings["features"] = self.teacher.fingerprint()
        if isinstance(self.dataset, ShapedDataset):  # "data" must be equal for all picture sizes in a folder
            whole = self.dataset.whole.fingerprint().identity
            settings |= {"data": whole, "shapes": data, "bucket_tokens": bucket_tokens}
        return settings

    def encode(
        self, batches: Iterable[tuple[Any, ...]], counter: BadFileCounter, bar: Progress
    ) -> tuple[list[CachedSample], list[str]]:
        """Encode a shard's batches. Return its samples, and "path: reason" for each skipped file."""
        samples, all_skipped = [], []
        for rows, labels, captions, pictures, skipped in batches:
            counter.add(len(rows), skipped)
            all_skipped += skipped
            if rows:
                pictures = pictures.to(self.device, non_blocking=True)
                shown = (pictures, pictures.flip(-1)) if self.flips else (pictures,)
                made = torch.stack([self.codec.moments(view) for view in shown], dim=1).half()
                if not made.isfinite().all():
                    raise DataError(
                        f"the latents of the pictures in rows {rows[0]} to {rows[-1]} overflow; pass --mixed_precision "
                        "bf16 or fp32, and check the VAE's weights if that doesn't help"
                    )
                firsts = {} if self.first is None else self.first.encode(self.codec, shown)
                embedded = embed(self.encoder, captions) if self.encoder else [()] * len(rows)
                seen = self._features(shown, rows)
                parts = zip(rows, made.cpu(), embedded, seen, labels, captions or [None] * len(rows), strict=True)
                for number, (row, moments, words, features, label, caption) in enumerate(parts):
                    tensors = {"moments": moments, **dict(zip(("tokens", "pooled"), words, strict=False)), **features}
                    tensors |= {name: made[number] for name, made in firsts.items()}
                    samples.append(CachedSample(row, tensors, label, caption))
            bar.update(len(rows) + len(skipped))
        return samples, all_skipped

    def _features(self, views: Sequence[Tensor], rows: list[int]) -> list[dict[str, Tensor]]:
        """Return {"features": (F, N, W) fp16} for each picture; {} without a vision encoder."""
        if self.teacher is None:
            return [{}] * len(rows)
        found = torch.stack([self.teacher.features(view) for view in views], dim=1).half()
        if not found.isfinite().all():
            raise DataError(
                f"the features of the pictures in rows {rows[0]} to {rows[-1]} overflow; pass --mixed_precision bf16 "
                "or fp32, or leave --repa out"
            )
        return [{"features": features.contiguous()} for features in found.cpu()]

    def entries(
        self, output: Path, settings: dict[str, Any], plan: list[list[int]], checksums: dict[str, str]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the index entries of all shards, and the skipped files. Raises DataError for a bad shard."""
        entries, all_skipped = [], []
        for shard, rows in enumerate(plan):
            name = tar_name(self.image_size, shard, len(plan))
            header = read_header(output / name)
            if header is None or name not in checksums:
                raise DataError(f"{output / name} is missing or damaged; run the same command again")
            size = (output / name).stat().st_size
            entries.append({"file": name, "count": header[0], "bytes": size, "sha256": checksums[name]})
            if "video" in settings or "shapes" in settings:
                entries[-1]["shape_key"] = self.dataset.shapes().key(rows[0])
            if "shapes" in settings:
                entries[-1]["latent_shape"] = list(self.latent_shape(rows))
            all_skipped += header[2]
        return entries, all_skipped

    def index(
        self, settings: dict[str, Any], entries: list[dict[str, Any]], skipped: list[str], counted: CaptionCount | None
    ) -> dict[str, Any]:
        """Return the content of index.json for pictures of one size. entries: one entry for each tar. counted: see
        :func:`make_latents`."""
        index = {
            "count": sum(entry["count"] for entry in entries),
            "class_names": list(self.dataset.describe().class_names),
            "image_size": self.image_size,
            "vae": self.codec.name,
            "scaling_factor": self.codec.scaling_factor,
            "shift_factor": self.codec.shift_factor,
            "latent_shape": settings["latent_shape"],
            "flips": self.flips,
            "settings": settings,
            "skipped": skipped,
            "shards": entries,
        }
        if "video" in settings:
            index["video"] = settings["video"]
            if (rate := self.dataset.shapes().frame_rate()) is not None:
                index["data_fps"] = rate
        if self.first is not None:
            index["first_frames"] = self.first.width
        if self.has_captions:
            index["conditioning"] = "text"
        if self.teacher is not None:
            teacher = self.teacher
            index["features"] = {"encoder": teacher.name, "grid": [*teacher.grid], "width": teacher.width}
        if self.encoder:
            width, pooled, dtype = form_of(self.encoder)
            index["text"] = {"encoder": self.encoder.name, "max_tokens": self.encoder.max_tokens}
            index["text"] |= {"pooled": pooled} if pooled != width else {}
            index["text"] |= {"dtype": dtype} if dtype != "fp16" else {}
            if counted is not None:
                names = {"rows": counted.rows, "counted": counted.counted, "longest": counted.longest}
                index["captions"] = {**names, "cut": counted.over(self.encoder.max_tokens)}
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
    repa: str | None = None,
    text_precision: str = "bf16",
    data_timeout: float = 300.0,
    **media: Any,
) -> dict[str, Any] | None:
    """Run ``preprocess.py latents`` with its flags as arguments. Each process of torchrun uses one GPU, if there is
    one. If one process fails, all end, see ``Supervisor``. Raises ValueError, OSError or DataError.

    patch: the model's patch ([frames,] rows, columns), for ``bucket_tokens`` and ``repa``. media: fields of
    ``sources.Request`` about how files are read."""
    place = find_place()
    rank, world_size = place.rank, place.world_size
    supervisor, stack = Supervisor((ValueError, DataError)), ExitStack()
    if world_size > 1:
        stack.enter_context(supervisor)
    with stack:
        if vae not in HUB:
            vae = str(Path(vae).expanduser().resolve())  # absolute, because the index stores it
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        dtype = pick_dtype(mixed_precision, device, "fp16" if pretrained is None else "fp32")
        dataset = build_dataset(data_path, image_size, seed=0, random_flip=None if flip else False, **media)
        use_video = media.get("use_video", False)
        clips: dict[str, Any] = {"num_frames": 16, "frame_interval": 1, "short_clips": "skip", "fps": None}
        clips = {name: media.get(name, usual) for name, usual in clips.items()}
        clips["num_frames"] = clips["num_frames"] if use_video else 1
        about = dataset.describe()
        if about.kind != "pixels":
            raise ValueError(f"--data_path {data_path}: holds latents already; give pictures or clips")
        codec = (load_video_codec if use_video else load_codec)(
            vae, channels=about.sample_shape[0], device=device, dtype=dtype
        )
        _Encoding(dataset, codec, None, image_size, flip).latent_shape()  # raises for sizes that the VAE can't encode
        if bucket_tokens is not None:
            dataset = crop_media(
                dataset,
                token_size(patch, codec.downscale, getattr(codec, "temporal_downscale", 1)),
                bucket_tokens,
                "--bucket_tokens",
                image_size=image_size,
                max_upscale=max_upscale,
                **clips,
            )
            about = dataset.describe()

        encoder: AnyEncoder | None = None
        if text_encoder:
            if about.conditioning != "text":
                what = f"--text_encoder {text_encoder}" if pretrained is None else f"--pretrained {pretrained}"
                fix = "leave it out" if pretrained is None else "put name.txt beside name.jpg (docs/data.md)"
                raise ValueError(f"{what}: --data_path {data_path} has no captions; {fix}")
            text_encoder = str(Path(text_encoder).resolve()) if Path(text_encoder).is_dir() else text_encoder
            encoder = _load_encoder(text_encoder, pretrained, max_text_tokens, device, dtype, text_precision)
        teacher = None
        if repa is not None:
            _, *sides = _Encoding(dataset, codec, None, image_size, flip).latent_shape()
            teacher = _load_teacher(repa, sides, patch, device, dtype)
        first = None
        if pretrained is not None and use_video:
            family = cast(str, family_in(name_of_folder(pretrained) or ""))
            first = FirstFrameEncoder.of(Path(pretrained), family, device)

        if rank == 0:
            precision = str(inner(codec).dtype)[6:]
            captions = f", captions with --text_encoder {text_encoder}" if encoder else ""
            print("\n".join([about.text, *about.notes]))
            print(f"encoding with --vae {vae}{captions} on {device} in {precision}", flush=True)
        counted = _count_captions(dataset, encoder) if rank == 0 and about.conditioning == "text" else None
        if world_size > 1:
            # A long timeout, because the last rank may finish long after the first.
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
            first=first,
            batch_size=batch_size,
            num_workers=num_workers,
            shard_size=shard_size,
            tar_bytes=tar_bytes,
            bucket_tokens=bucket_tokens,
            teacher=teacher,
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


def _load_teacher(
    folder: str, sides: Sequence[int], patch: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> VisionTeacher:
    """Load the vision encoder of --repa for latents with these ``sides``. Raises ValueError if ``patch`` does not
    divide them."""
    if any(side % p for side, p in zip(sides, patch, strict=True)):
        raise ValueError(f"--repa {folder}: a patch of {patch[0]} does not divide {sides} latents; give --model")
    grid = tuple(side // p for side, p in zip(sides, patch, strict=True))
    return VisionTeacher(str(Path(folder).expanduser().resolve()), grid, 1.0, False, device, dtype)


def _load_encoder(
    name: str, pretrained: str | None, max_tokens: int | None, device: torch.device, dtype: torch.dtype, precision: str
) -> AnyEncoder:
    """Load the text encoder ``name`` in ``dtype``. With ``pretrained``, load the pipeline's text encoders from the
    folder ``name`` in bfloat16."""
    how: dict[str, Any] = {"device": device, "precision": precision}
    if pretrained is not None:
        model = name_of_folder(pretrained) or ""
        family = FAMILIES[cast(str, family_in(model))]
        if max_tokens is not None:
            family.text.check_tokens(max_tokens, model)
        return load_published_text(Path(name), family, dtype=torch.bfloat16, max_tokens=max_tokens, **how)
    return load_text_encoder(name, dtype=dtype, max_tokens=max_tokens, **how)


def _count_captions(dataset: MediaDataset, encoder: AnyEncoder | None) -> CaptionCount:
    """Count the captions, and print lines about truncated captions and captions without words."""
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
    """Return the networks' dtype: fp32 on a CPU, else as in ``mixed_precision``. auto: dtype for ``--mixed_precision
    auto`` on a GPU. The default is fp16, as for stored latents."""
    if device.type != "cuda":
        if mixed_precision in ("fp16", "bf16"):
            raise ValueError(f"--mixed_precision {mixed_precision}: needs a GPU, and there is none; leave it out")
        return torch.float32
    name = auto if mixed_precision == "auto" else mixed_precision
    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[name]
