"""Read and encode conditioning frames: pictures or clips that become the first frames of generated clips."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from opendit.config.architectures import parse_given
from opendit.data.base import ROUNDING, BadSample
from opendit.data.clips import decode_frames, resize_and_crop
from opendit.data.picture_file import read_picture
from opendit.data.video_files import Timeline
from opendit.encoders.vae import ImageCodec
from opendit.encoders.video_vae import VideoCodec
from opendit.encoders.vision import PictureTokens
from opendit.models.conditioning import Condition, TextCondition, give, give_beside
from opendit.models.configuration import DiTConfig
from opendit.models.families.public_config import PublicConfig
from opendit.sampling.output_files import VideoClip


def note_on_missing_frames(config: DiTConfig) -> list[str]:
    """Return [note] if the model has channels for conditioning frames, else []. Raises ValueError if the model can't
    draw without conditioning frames."""
    if config.given_beside:
        raise ValueError("a model of image to video is given a picture; draw with sample.py --image")
    if config.given_frames is None or config.given_in_place:
        return []
    return [f"the model was trained with --given_frames {config.given_frames}; here it draws without given frames"]


def encode_frames(
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
    """Read and encode conditioning frames: a picture, or the last frames of a clip.

    Args:
        size: (t, h, w) of the latents.
        image: one or a list of file names, ``PIL.Image``s or uint8 arrays (H, W, 3).
        clip: one or a list of file names, ``VideoClip``s or uint8 arrays (T, H, W, 3).
        frames: number of frames to use from a clip; by default as in training, or half of the frames to draw.
        interval, fps: interval between the frames to use, or alternatively their rate.
        path: path of the model, for messages.

    Returns masks and latents (n, 1 + C, T, H, W), fp32 on ``device``; None without pictures and clips. Raises
    ValueError, naming the flag and the fix, if the frames don't fit the model or a file can't be read.
    """
    flag, media = ("--image", image) if image is not None else ("--clip", clip)
    if frames is not None and clip is None:
        raise ValueError("--clip_frames: does nothing without --clip; leave it out")
    if media is None:
        if config.given_beside:
            raise ValueError(f"--image: {path} draws clips that begin with a picture; name one")
        return None
    if image is not None and clip is not None:
        raise ValueError("--image: --clip gives frames already; leave one of them out")
    if config.given_frames is None:
        what = "draws pictures" if not config.is_video else "was trained without --given_frames"
        advice = "leave it out" + ", or fine-tune the model with it (docs/video.md)" * config.is_video
        if config.is_video and isinstance(config, PublicConfig):  # such models have no --given_frames
            what, advice = "draws clips of captions alone", "leave it out, or take a model of image to video"
        raise ValueError(f"{flag}: {path} {what}; {advice}")
    assert isinstance(codec, VideoCodec)  # every model of clips has a VideoCodec
    count = _latent_count(config.given_frames, flag, size[0], frames, codec.temporal_downscale, path)
    pixels = (count - 1) * codec.temporal_downscale + 1
    height, width = (side * codec.downscale for side in size[1:])
    read = [_frames(flag, each, pixels, interval, fps, (height, width)) for each in _as_list(media)]
    if config.given_beside:  # these models take a clip that is grey after the first frame
        whole = (size[0] - 1) * codec.temporal_downscale + 1
        read, count = [pad(frame, (0, 0, 0, 0, 0, whole - 1)) for frame in read], size[0]
    encoded = []
    for clip_pixels in read:
        # With zero noise, the encoder returns the posterior's mean.
        mean = torch.zeros(1, config.in_channels, count, *size[1:], device=device)
        encoded.append(codec.encode(clip_pixels[None].to(device), mean).float())
    latents = torch.zeros(len(read), config.in_channels, *size, device=device)
    latents[:, :, :count] = torch.cat(encoded)
    if config.given_beside:
        return give_beside(latents)
    return give(latents, torch.full((len(read),), count))


def encode_pictures(pictures: PictureTokens | None, image: Any = None, clip: Any = None) -> Tensor | None:
    """Encode n pictures, or n clips' last frames, to tokens (n, tokens, width). None without an image encoder."""
    if pictures is None:
        return None
    if image is not None:
        return pictures.encode([Image.fromarray(_picture(each)[0]) for each in _as_list(image)])
    return pictures.encode([Image.fromarray(_last_frames(each, 1, 1, None)[0]) for each in _as_list(clip)])


def with_pictures(y: Condition, tokens: Tensor | None, index: Tensor) -> Condition:
    """Add picture tokens (n, tokens, width) to the caption conditions y of the samples ``index`` (B,). Sample i gets
    picture i modulo n. If ``tokens`` is None, y is returned unchanged."""
    if tokens is None or not isinstance(y, TextCondition):
        return y
    return replace(y, pooled=tokens[index.to(tokens.device) % len(tokens)])


def frames_of_samples(frames: Tensor | None, index: Tensor) -> Tensor | None:
    return None if frames is None else frames[index.to(frames.device) % len(frames)]


def _latent_count(mode: str, flag: str, drawn: int, frames: int | None, temporal: int, path: str) -> int:
    """Return the number of conditioning latent frames. Raises ValueError if the model or the clip does not allow it."""
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


def _as_list(media: Any) -> Sequence[Any]:
    return list(media) if isinstance(media, list | tuple) else [media]


def _frames(flag: str, media: Any, count: int, interval: int, fps: float | None, size: tuple[int, int]) -> Tensor:
    """Read a picture, or the last frames of a clip, as (3, count, *size) fp32 in [-1, 1]."""
    try:
        frames = _picture(media) if flag == "--image" else _last_frames(media, count, interval, fps)
    except BadSample as bad:
        raise ValueError(f"{flag}: {bad}; give another file") from bad
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or len(frames) != count:
        raise ValueError(f"{flag}: {frames.dtype} of {frames.shape} is no picture; give uint8 of height x width x 3")
    return resize_and_crop(torch.from_numpy(np.array(frames)), size)


def _picture(picture: Any) -> np.ndarray:
    if isinstance(picture, str | PathLike):
        picture = read_picture(fspath(picture))
    return np.asarray(picture.convert("RGB") if isinstance(picture, Image.Image) else picture)[None]


def _last_frames(clip: Any, count: int, interval: int, fps: float | None) -> np.ndarray:
    name = fspath(clip) if isinstance(clip, str | PathLike) else "the clip"

    def choose(length: int) -> list[int]:
        first = length - 1 - (count - 1) * interval
        if first < 0:
            needed = (count - 1) * interval + 1
            raise BadSample(name, f"too short: {length} frames, {count} at interval {interval} need {needed}")
        return list(range(first, length, interval))

    if isinstance(clip, str | PathLike):
        if fps is not None:
            return decode_frames(name, lambda timeline: _last_shown_at(name, timeline, count, fps), threading.Event())
        return decode_frames(name, lambda timeline: choose(len(timeline.seconds)), threading.Event())
    frames = np.asarray(clip.frames if isinstance(clip, VideoClip) else clip)
    # A generated clip in memory already has the training interval.
    interval = 1
    return frames[choose(len(frames))]


def _last_shown_at(name: str, timeline: Timeline, count: int, fps: float) -> list[int]:
    times = timeline.seconds[-1] - np.arange(count)[::-1] / fps
    if times[0] < timeline.seconds[0] - ROUNDING:
        seconds = timeline.end - timeline.seconds[0]
        raise BadSample(name, f"too short: {seconds:.2f} s, not {count} frames at {fps:g} a second")
    return timeline.shown_at(times)
