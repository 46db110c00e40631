"""Run ``preprocess.py latents``, in one process or several."""

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opendit.config.parallel_sizes import find_place
from opendit.data.base import DataError, MediaDataset
from opendit.data.captions import MOST_TOKENIZED, CaptionCount, count_captions
from opendit.data.make_latents import inner, latent_shape, make_latents, noun_of
from opendit.data.resolve import build_dataset
from opendit.encoders.text import TextEncoder
from opendit.encoders.vae import HUB, load_codec
from opendit.encoders.video_vae import load_video_codec
from opendit.parallel.rendezvous import meet
from opendit.parallel.supervisor import Supervisor


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
    use_video: bool = False,
    num_frames: int = 16,
    frame_interval: int = 1,
    fps: float | None = None,
    short_clips: str = "skip",
    video_reader: str = "auto",
    energon_cooker: str | None = None,
    text_encoder: str | None = None,
    max_text_tokens: int | None = None,
    max_bad: float = 0.05,
    data_timeout: float = 300.0,
) -> dict[str, Any] | None:
    """``preprocess.py latents`` with its flags' values; one process a GPU if torchrun started several.

    Raises ValueError, OSError or DataError; of several processes, an error of one ends all, as ``Supervisor`` says.
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
        dtype = pick_dtype(mixed_precision, device)
        dataset = build_dataset(
            data_path,
            image_size,
            seed=0,
            random_flip=None if flip else False,
            use_video=use_video,
            num_frames=num_frames,
            frame_interval=frame_interval,
            fps=fps,
            short_clips=short_clips,
            video_reader=video_reader,
            energon_cooker=energon_cooker,
            max_bad=max_bad,
        )
        if dataset.kind != "pixels":
            raise ValueError(f"--data_path {data_path}: holds latents already; give pictures or clips")
        codec = (load_video_codec if use_video else load_codec)(
            vae, channels=dataset.sample_shape[0], device=device, dtype=dtype
        )
        latent_shape(codec, dataset, image_size)
        encoder = None
        if text_encoder:
            if dataset.conditioning != "text":
                raise ValueError(
                    f"--text_encoder {text_encoder}: --data_path {data_path} has no captions; leave it out"
                )
            from opendit.encoders.text import load_text_encoder  # seconds to import

            text_encoder = str(Path(text_encoder).resolve()) if Path(text_encoder).is_dir() else text_encoder
            longest = {} if max_text_tokens is None else {"max_tokens": max_text_tokens}
            encoder = load_text_encoder(text_encoder, device=device, dtype=dtype, **longest)
        if rank == 0:
            precision = str(inner(codec).dtype)[6:]
            captions = f", captions with --text_encoder {text_encoder}" if encoder else ""
            print(f"{dataset.describe()}\nencoding with --vae {vae}{captions} on {device} in {precision}", flush=True)
        counted = _count_captions(dataset, encoder) if rank == 0 and dataset.conditioning == "text" else None
        if world_size > 1:
            # Only to wait for each other at the end, which may be long after the first rank is through.
            store = dist.PrefixStore("default", meet(place))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(days=30))
        index = make_latents(
            dataset,
            codec,
            output,
            image_size=image_size,
            flips=dataset.random_flip,
            encoder=encoder,
            counted=counted,
            batch_size=batch_size,
            num_workers=num_workers,
            shard_size=shard_size,
            tar_bytes=tar_bytes,
            rank=rank,
            world_size=world_size,
            max_bad=dataset.max_bad,
            patience=data_timeout,
            on_hang=supervisor.fail,
        )
        if index is not None:
            skipped = f", {len(index['skipped']):,} unreadable files left out" if index["skipped"] else ""
            noun = noun_of(index)
            shards = f"{len(index['shards']):,} shard{'s'[: len(index['shards']) != 1]}"
            print(f"{index['count']:,} {noun} in {shards}{skipped}: train with --data_path {output}")
        return index


def _count_captions(dataset: MediaDataset, encoder: TextEncoder | None) -> CaptionCount:
    """The count of the captions, with lines printed on those that are cut and on those that say nothing."""
    if encoder is None:
        found = count_captions(dataset)
        lines = found.for_any_encoder()
    else:
        found = count_captions(dataset, encoder.count_tokens, MOST_TOKENIZED)
        lines = found.cut(encoder.max_tokens, encoder.name)
    for line in (*found.without_words(), *lines):
        print(line, flush=True)
    return found


def pick_dtype(mixed_precision: str, device: torch.device) -> torch.dtype:
    """auto: fp16 on a GPU, whose ten bits of mantissa are what the latents are stored with, else fp32."""
    if device.type != "cuda":
        if mixed_precision in ("fp16", "bf16"):
            raise ValueError(f"--mixed_precision {mixed_precision}: needs a GPU, and there is none; leave it out")
        return torch.float32
    return {"bf16": torch.bfloat16, "fp32": torch.float32}.get(mixed_precision, torch.float16)
