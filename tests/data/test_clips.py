"""Clips: windows, resizing, and reading real encoded files."""

import struct
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opendit.data import clips
from opendit.data.clips import clip_window, resize_and_crop


def encode(path, frames, times=None, gop=10, codec="libx264", **options):
    """Encode (T, H, W, 3) uint8 frames as H.264, at 24 a second or at ``times`` in 24ths of a second."""
    height, width = frames[0].shape[:2]
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=24)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
        stream.options = {"crf": "5", "g": str(gop)}
        stream.codec_context.time_base = Fraction(1, 24)
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = i if times is None else times[i], Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def grey(count, width=64, height=48):
    """Return frames, where frame i is grey of level 5 i."""
    return [np.full((height, width, 3), 5 * i, dtype=np.uint8) for i in range(count)]


def read_clip(*args, **options):
    return clips.read_clip(*args, **options).pixels


def numbers(clip):
    """Return the numbers of the frames of ``grey`` that a clip shows."""
    levels = (clip.mean((0, 2, 3)) + 1) * 127.5
    assert clip.std((0, 2, 3)).max() < 0.02
    return (levels / 5).round().int().tolist()


def quadrants(width, height):
    """Return a frame with four corners of different brightness: 250 160 / 80 0."""
    frame = np.zeros((height, width, 3), dtype=np.uint8)
    frame[: height // 2, : width // 2], frame[: height // 2, width // 2 :] = 250, 160
    frame[height // 2 :, : width // 2] = 80
    return frame


def corners(clip):
    size = clip.shape[-1]
    near, far = size // 4, size - size // 4 - 1
    return [round((clip[0, -1, y, x].item() + 1) * 127.5) for y in (near, far) for x in (near, far)]


def rotate(source, target, degrees):
    """Copy a file with a display matrix, as phones write it, that turns the clip ``degrees`` clockwise."""
    data = bytearray(source.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    data[at : at + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    target.write_bytes(data)
    return target


# ---------------------------------------------------------------- windows


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 9), st.floats(0, 1, exclude_max=True) | st.none())
@example(46, 16, 3, 0.999999)
@example(10**6, 1, 1, 1 - 2**-53)
def test_a_window_fits_or_there_is_none(length, num_frames, interval, start):
    window = clip_window(length, num_frames, interval, start)
    if window is None:
        assert length < 1 + (num_frames - 1) * interval
        return
    assert len(window) == num_frames and 0 <= window[0] and window[-1] < length
    assert all(b - a == interval for a, b in zip(window, window[1:], strict=False))
    if start is None:
        assert abs(window[0] - (length - 1 - window[-1])) <= 1


@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 4))
def test_every_window_is_picked_equally_often(spare, num_frames, interval):
    length = 1 + (num_frames - 1) * interval + spare
    firsts = [clip_window(length, num_frames, interval, (i + 0.5) / 1000)[0] for i in range(1000)]
    counts = np.bincount(firsts)
    assert len(counts) == spare + 1 and counts.max() - counts.min() <= 1


# ---------------------------------------------------------------- resize and crop


@settings(max_examples=150, deadline=None)
@given(st.integers(32, 2100), st.integers(32, 2100), st.sampled_from([8, 16, 33, 64, 256]))
@example(2100, 32, 256)
@example(32, 2100, 256)
@example(257, 256, 256)
@example(255, 2099, 256)
def test_crop_keeps_the_centre_and_the_scale(width, height, size):
    """On a ramp, every output pixel must show the value at its place in the centred square."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    y, x = (y + 0.5) / height * 255, (x + 0.5) / width * 255
    out = resize_and_crop(torch.stack((x, y, x), -1)[None].round().to(torch.uint8), size)
    assert out.shape == (3, 1, size, size) and out.dtype == torch.float32 and out.is_contiguous()
    assert out.min() >= -1 and out.max() <= 1
    step = min(width, height) / size  # source pixels per output pixel
    middle = slice(size // 4, size - size // 4)  # away from the border, where bicubic has no neighbours
    place = (torch.arange(size)[middle] + 0.5 - size / 2) * step
    expected_x = (width / 2 + place) / width * 255
    expected_y = (height / 2 + place) / height * 255
    shown = (out + 1) * 127.5
    # The tolerance is half a source pixel, since the square can't always be centred, and two roundings to 8 bits.
    assert (shown[0, 0, size // 2, middle] - expected_x).abs().max() < 0.5 * 255 / width + 2.1
    assert (shown[1, 0, middle, size // 2] - expected_y).abs().max() < 0.5 * 255 / height + 2.1


def test_crop_of_the_right_size_is_exact_and_reduction_is_antialiased():
    frames = torch.randint(0, 256, (2, 16, 21, 3), dtype=torch.uint8)
    expected = frames[:, :, 2:18].permute(3, 0, 1, 2).float() / 127.5 - 1
    assert torch.allclose(resize_and_crop(frames, 16), expected, atol=1e-6)
    stripes = torch.zeros(1, 512, 512, 3, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    assert resize_and_crop(stripes, 32).abs().max() < 0.03


# ---------------------------------------------------------------- encoded files


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    return tmp_path_factory.mktemp("clips")


@pytest.mark.parametrize("start", [None, 0.0, 0.3, 0.77, 0.9999])
@pytest.mark.parametrize(("frames", "interval"), [(1, 1), (5, 3), (16, 3), (50, 1)])
def test_the_frames_read_are_the_windows(media, start, frames, interval):
    path = media / "steady.mp4"
    if not path.exists():
        encode(path, grey(50))
    clip = read_clip(str(path), frames, interval, 32, start=start)
    assert clip.shape == (3, frames, 32, 32) and clip.dtype == torch.float32
    assert numbers(clip) == clip_window(50, frames, interval, start)


@pytest.mark.parametrize("ending", ["mp4", "mov", "mkv", "avi", "ts"])
def test_frames_go_by_number_at_a_variable_rate_and_in_other_containers(tmp_path, ending):
    times = None if ending in ("avi", "ts") else np.cumsum([1, 3, 1, 12, 2] * 8).tolist()
    path = encode(tmp_path / f"clip.{ending}", grey(40), times, gop=7)
    for start in (None, 0.0, 0.5, 0.99):
        assert numbers(read_clip(str(path), 4, 5, 16, start=start)) == clip_window(40, 4, 5, start)


@pytest.mark.parametrize("width,height", [(64, 48), (128, 96), (150, 100)])
@pytest.mark.parametrize(
    ("degrees", "expected"), [(90, [80, 250, 0, 160]), (180, [0, 80, 160, 250]), (270, [160, 0, 250, 80])]
)
def test_clips_are_upright(tmp_path, width, height, degrees, expected):
    """Narrow frames are included because their rows are padded."""
    path = encode(tmp_path / "plain.mp4", [quadrants(width, height)] * 3)
    assert np.allclose(corners(read_clip(str(path), 2, 1, 32, start=None)), [250, 160, 80, 0], atol=4)
    turned = rotate(path, tmp_path / "turned.mp4", degrees)
    assert np.allclose(corners(read_clip(str(turned), 2, 1, 32, start=None)), expected, atol=4)


@pytest.mark.parametrize(
    "width,height",
    [(8, 16), (16, 16), (24, 40), (32, 32), (48, 64), (96, 20), (144, 30), (63, 47), (65, 33), (130, 71), (322, 18)],
)
def test_odd_sizes(tmp_path, width, height):
    path = encode(tmp_path / "odd.mp4", [quadrants(width, height)] * 3)
    side, size = min(width, height), 16
    assert read_clip(str(path), 3, 1, size, start=None).shape == (3, 3, size, size)
    whole = read_clip(str(path), 3, 1, side, start=None)
    expected = resize_and_crop(torch.from_numpy(quadrants(width, height))[None], side)
    assert (whole - expected).abs().mean() < 0.03


def test_containers_are_known_without_their_suffix(tmp_path):
    """Containers, such as a transport stream, are recognised by their contents."""
    for ending in ("mp4", "mkv", "ts"):
        path = encode(tmp_path / f"clip.{ending}", grey(40), gop=7).rename(tmp_path / f"{ending}-clip")
        assert numbers(read_clip(str(path), 4, 5, 16, start=0.0)) == [0, 5, 10, 15]
