"""Pictures and clips that sampling is given: which frames they are, read and encoded."""

import threading
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opendit.config.architectures import parse_given
from opendit.data.base import BadSample, name_few
from opendit.data.clips import decode_chosen, decode_frames, resize_and_crop
from opendit.data.frame_times import ROUNDING, Timeline
from opendit.data.picture_file import read_picture
from opendit.encoders.vae import ImageCodec
from opendit.encoders.video_vae import VideoCodec
from opendit.models.configuration import DiTConfig
from opendit.models.given_frames import give
from opendit.sampling.clip import VideoClip


def drawn_without(config: DiTConfig) -> list[str]:
    """Return a note for a model that takes given frames and gets none here; empty for other models."""
    if config.given_frames is None:
        return []
    return [f"the model was trained with --given_frames {config.given_frames}; here it draws without given frames"]


def describe_given(given: Tensor | None, files: Sequence[str]) -> dict[str, str]:
    """The row that says how many frames of mask ++ given (n, 1 + C, T, H, W) are given, and by which files."""
    if given is None:
        return {}
    mask = given[0, 0].flatten(1).amax(1)
    return {"given": f"{int(mask.sum())} of {len(mask)} latent frames, by {name_few(list(files))}"}


def given_latents(
    config: DiTConfig,
    codec: ImageCodec | VideoCodec,
    size: tuple[int, ...],
    device: torch.device,
    *,
    image: Any = None,
    clip: Any = None,
    frames: int | None = None,
    interval: int = 1,
    fps: float | None = None,
    path: str,
) -> Tensor | None:
    """mask ++ given (n, 1 + C, T, H, W) fp32 on ``device``, of n pictures or clips; None if there are none.

    size: (t, h, w) of the latents. image, clip: one or a list: a file's name, a ``PIL.Image`` or a ``VideoClip``, or
    uint8 (H, W, 3) or (T, H, W, 3). Of a clip its last frames are given, those of a file ``interval`` apart, or those
    that are shown ``fps`` times a second: as many
    as the model was trained on; of "random" ``frames``, or half of those that are drawn. path: of the model, for
    messages.

    Raises ValueError, naming the flag and what to do, for a model that takes none, for files that can't be read, and
    for other numbers of frames than the model was trained on.
    """
    flag, given = ("--image", image) if image is not None else ("--clip", clip)
    if frames is not None and clip is None:
        raise ValueError("--clip_frames: does nothing without --clip; leave it out")
    if given is None:
        return None
    if image is not None and clip is not None:
        raise ValueError("--image: --clip gives frames already; leave one of them out")
    if config.given_frames is None:
        what = "draws pictures" if not config.is_video else "was trained without --given_frames"
        advice = "leave it out" + ", or fine-tune the model with it (docs/video.md)" * config.is_video
        raise ValueError(f"{flag}: {path} {what}; {advice}")
    assert isinstance(codec, VideoCodec)  # of a model of clips
    count = _latent_count(config.given_frames, flag, size[0], frames, codec.temporal_downscale, path)
    pixels = (count - 1) * codec.temporal_downscale + 1
    side = size[1] * codec.downscale
    read = [_frames(flag, each, pixels, interval, fps, side) for each in _listed(given)]
    encoded = []
    for clip_pixels in read:
        mean = torch.zeros(1, config.in_channels, count, *size[1:], device=device)  # no noise around it
        encoded.append(codec.encode(clip_pixels[None].to(device), mean).float())
    latents = torch.zeros(len(read), config.in_channels, *size, device=device)
    latents[:, :, :count] = torch.cat(encoded)
    return give(latents, torch.full((len(read),), count))


def rows_of(given: Tensor | None, index: Tensor) -> Tensor | None:
    """Return the given frames of the samples ``index`` (B,), which take turns."""
    return None if given is None else given[index.to(given.device) % len(given)]


def _latent_count(mode: str, flag: str, drawn: int, frames: int | None, temporal: int, path: str) -> int:
    """Return the number of latent frames that are given. Raises ValueError if the model or clip can't have as many."""
    trained = parse_given(mode)
    if frames is not None:
        if (frames - 1) % temporal:
            whole = (frames - 1) // temporal * temporal + 1
            raise ValueError(f"--clip_frames {frames}: no whole latents of the VAE; give {whole} or {whole + temporal}")
        asked = (frames - 1) // temporal + 1
    else:
        asked = 1 if flag == "--image" else trained or max(1, drawn // 2)
    if trained is not None and asked != trained:
        counted = (trained - 1) * temporal + 1
        do = "give --clip" if flag == "--image" else "leave --clip_frames out"
        raise ValueError(f"{flag}: {path} was trained with {counted} given frame{'s' * (counted > 1)}; {do}")
    if asked >= drawn:
        most = max(0, drawn - 2) * temporal + 1
        raise ValueError(f"{flag}: all frames would be given, and none drawn; give --clip_frames {most} or fewer")
    return asked


def _listed(given: Any) -> Sequence[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _frames(flag: str, given: Any, count: int, interval: int, fps: float | None, side: int) -> Tensor:
    """(3, count, side, side) fp32 in [-1, 1]: the picture, or the last frames of the clip."""
    try:
        frames = _picture(given) if flag == "--image" else _last_frames(given, count, interval, fps)
    except BadSample as bad:
        raise ValueError(f"{flag}: {bad}; give another file") from bad
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or len(frames) != count:
        raise ValueError(f"{flag}: {frames.dtype} of {frames.shape} is no picture; give uint8 of height x width x 3")
    return resize_and_crop(torch.from_numpy(np.array(frames)), side)


def _picture(given: Any) -> np.ndarray:
    if isinstance(given, str | PathLike):
        given = read_picture(fspath(given))
    return np.asarray(given.convert("RGB") if isinstance(given, Image.Image) else given)[None]


def _last_frames(given: Any, count: int, interval: int, fps: float | None) -> np.ndarray:
    name = fspath(given) if isinstance(given, str | PathLike) else "the clip"

    def choose(length: int) -> list[int]:
        first = length - 1 - (count - 1) * interval
        if first < 0:
            needed = (count - 1) * interval + 1
            raise BadSample(name, f"too short: {length} frames, {count} at interval {interval} need {needed}")
        return list(range(first, length, interval))

    if isinstance(given, str | PathLike):
        if fps is not None:
            return decode_chosen(name, lambda timeline: _last_at(name, timeline, count, fps), threading.Event())
        return decode_frames(name, choose, threading.Event())
    frames = np.asarray(given.frames if isinstance(given, VideoClip) else given)
    interval = 1  # what was drawn has the frames of training already
    return frames[choose(len(frames))]


def _last_at(name: str, timeline: Timeline, count: int, fps: float) -> list[int]:
    times = timeline.seconds[-1] - np.arange(count)[::-1] / fps
    if times[0] < timeline.seconds[0] - ROUNDING:
        seconds = timeline.end - timeline.seconds[0]
        raise BadSample(name, f"too short: {seconds:.2f} s, not {count} frames at {fps:g} a second")
    return timeline.shown_at(times)
