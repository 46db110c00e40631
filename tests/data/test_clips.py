"""Clips: windows, resizing, and reading real encoded files, sound and broken."""

import gc
import multiprocessing
import os
import struct
import threading
import time
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opendit.data import clips
from opendit.data.base import BadSample
from opendit.data.clips import clip_window, resize_and_crop
from opendit.data.mp4_header import too_many_frames


def encode(path, frames, times=None, gop=10, codec="libx264", **options):
    """An H.264 file of (T, H, W, 3) uint8 frames, 24 a second or at ``times`` in 24ths of a second."""
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
    """Frame i is grey of level 5 i."""
    return [np.full((height, width, 3), 5 * i, dtype=np.uint8) for i in range(count)]


def read_clip(*args, **options):
    return clips.read_clip(*args, **options).pixels


def numbers(clip):
    """Which frames of ``grey`` a clip shows."""
    levels = (clip.mean((0, 2, 3)) + 1) * 127.5
    assert clip.std((0, 2, 3)).max() < 0.02
    return (levels / 5).round().int().tolist()


def quadrants(width, height):
    """Four corners of different brightness: 250 160 / 80 0."""
    frame = np.zeros((height, width, 3), dtype=np.uint8)
    frame[: height // 2, : width // 2], frame[: height // 2, width // 2 :] = 250, 160
    frame[height // 2 :, : width // 2] = 80
    return frame


def corners(clip):
    size = clip.shape[-1]
    near, far = size // 4, size - size // 4 - 1
    return [round((clip[0, -1, y, x].item() + 1) * 127.5) for y in (near, far) for x in (near, far)]


def rotate(source, target, degrees):
    """The same file with a display matrix, as telephones write it: turn ``degrees`` clockwise to show."""
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
    step = min(width, height) / size  # source pixels an output pixel
    middle = slice(size // 4, size - size // 4)  # away from the border, where bicubic has no neighbours
    place = (torch.arange(size)[middle] + 0.5 - size / 2) * step
    expected_x = (width / 2 + place) / width * 255
    expected_y = (height / 2 + place) / height * 255
    shown = (out + 1) * 127.5
    # Half a source pixel where the square can't be centred, rounding to 8 bits twice.
    assert (shown[0, 0, size // 2, middle] - expected_x).abs().max() < 0.5 * 255 / width + 2.1
    assert (shown[1, 0, middle, size // 2] - expected_y).abs().max() < 0.5 * 255 / height + 2.1


def test_crop_of_the_right_size_is_exact_and_reduction_is_antialiased():
    frames = torch.randint(0, 256, (2, 16, 21, 3), dtype=torch.uint8)
    expected = frames[:, :, 2:18].permute(3, 0, 1, 2).float() / 127.5 - 1
    assert torch.allclose(resize_and_crop(frames, 16), expected, atol=1e-6)
    stripes = torch.zeros(1, 512, 512, 3, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    assert resize_and_crop(stripes, 32).abs().max() < 0.03


# ---------------------------------------------------------------- sound files


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
    """Turned, 48 and 96 are among the widths that decord fails on: both decoders are tested here."""
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
    """decord misses the first frames of a transport stream, so one must be told from the rest by its contents."""
    for ending in ("mp4", "mkv", "ts"):
        path = encode(tmp_path / f"clip.{ending}", grey(40), gop=7).rename(tmp_path / f"{ending}-clip")
        assert numbers(read_clip(str(path), 4, 5, 16, start=0.0)) == [0, 5, 10, 15]


# ---------------------------------------------------------------- short and broken files


def reason(path, num_frames=2, interval=1, **options):
    with pytest.raises(BadSample) as caught:
        read_clip(str(path), num_frames, interval, 16, start=None, **options)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)[len(f"{path}: ") :]


def test_too_short_a_clip(tmp_path):
    path = encode(tmp_path / "short.mp4", grey(20))
    assert reason(path, 16, 3) == (
        "too short: 20 frames, 16 frames at interval 3 need 46; --short_clips interval reads it at a smaller interval"
    )
    few = "too short: 20 frames, --num_frames 21 needs at least as many"
    assert reason(path, 21, 3) == reason(path, 21, 3, short_clips="interval") == few
    for frames, interval, used in ((16, 3, 1), (8, 5, 2), (20, 2, 1), (3, 99, 9)):
        clip = clips.read_clip(str(path), frames, interval, 16, start=None, short_clips="interval")
        assert numbers(clip.pixels) == clip_window(20, frames, used, None) and clip.interval == used
        assert clip_window(20, frames, used + 1, None) is None  # the largest that fits
    assert clips.read_clip(str(path), 7, 3, 16, start=None, short_clips="interval").interval == 3  # 19 frames
    with pytest.raises(ValueError, match="--short_clips longer must be one of skip, interval"):
        read_clip(str(path), 2, 1, 16, start=None, short_clips="longer")


def test_a_clip_of_one_frame(tmp_path):
    path = encode(tmp_path / "one.mp4", grey(1))
    assert numbers(read_clip(str(path), 1, 3, 16, start=0.5)) == [0]
    assert reason(path) == "too short: 1 frame, --num_frames 2 needs at least as many"


def test_files_that_are_no_clips(tmp_path):
    (tmp_path / "zero.mp4").touch()
    assert reason(tmp_path / "zero.mp4") == "the file is empty"
    (tmp_path / "text.mp4").write_text("hello\n" * 1000)
    assert reason(tmp_path / "text.mp4") == "not a video that can be decoded"
    assert reason(tmp_path / "none.mp4") == "No such file or directory"
    assert reason(tmp_path) == "a folder, not a file"
    os.mkfifo(tmp_path / "pipe.mp4")
    assert reason(tmp_path / "pipe.mp4") == "a named pipe, not a file"
    (tmp_path / "zero.mkv").symlink_to("/dev/zero")
    assert reason(tmp_path / "zero.mkv") == "a device, not a file"


def test_audio_only(tmp_path):
    with av.open(str(tmp_path / "audio.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux([*stream.encode(frame), *stream.encode()])
    assert reason(tmp_path / "audio.mp4") == "holds no video stream"


def test_truncated_and_damaged_files(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 64, 3), dtype=np.uint8)
    for ending, options in (("mp4", {}), ("mp4", {"movflags": "faststart"}), ("mkv", {}), ("ts", {})):
        data = bytearray(encode(tmp_path / f"whole.{ending}", noise, **options).read_bytes())
        cut, damaged = tmp_path / f"cut.{ending}", tmp_path / f"damaged.{ending}"
        cut.write_bytes(data[: len(data) * 3 // 5])
        data[len(data) // 3 : len(data) * 2 // 3] = bytes(len(data) * 2 // 3 - len(data) // 3)
        damaged.write_bytes(data)
        for path in (cut, damaged):
            begin = time.monotonic()
            try:
                clip = read_clip(str(path), 20, 2, 16, start=None)
                assert clip.isfinite().all()  # a decoder may conceal what is missing
            except BadSample as bad:
                assert str(bad).startswith(f"{path}: ") and len(str(bad)) < len(str(path)) + 120
            assert time.monotonic() - begin < 10
    data = encode(tmp_path / "whole.mp4", noise).read_bytes()  # its index stands at the end
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    assert reason(tmp_path / "cut.mp4") == "not a video that can be decoded"
    data = bytearray(encode(tmp_path / "whole.mp4", noise).read_bytes())
    data[len(data) // 3 : len(data) // 2] = b"\xff" * (len(data) // 2 - len(data) // 3)
    (tmp_path / "damaged.mp4").write_bytes(data)
    assert reason(tmp_path / "damaged.mp4", 40).startswith("damaged: ")


def test_a_file_that_never_answers(tmp_path, monkeypatch):
    """Opening a pipe that nobody writes to blocks inside C code for ever, as a stalled disk does."""
    os.mkfifo(tmp_path / "stuck.mp4")
    monkeypatch.setattr(clips, "_open", lambda path: open(path, "rb"))
    begin = time.monotonic()
    assert reason(tmp_path / "stuck.mp4", time_limit=0.5) == "not read within 0.5 seconds; not tried again"
    assert time.monotonic() - begin < 5
    os.close(os.open(tmp_path / "stuck.mp4", os.O_WRONLY | os.O_NONBLOCK))  # lets the thread end


def test_slow_decoding_is_stopped(tmp_path, monkeypatch):
    stopped = []

    def slow(path, choose, stop, size):
        stopped.append(stop.wait(20))

    monkeypatch.setattr(clips, "decode_frames", slow)
    assert reason(tmp_path / "slow.mp4", time_limit=0.2) == "not read within 0.2 seconds; not tried again"
    time.sleep(0.1)
    assert stopped == [True]


def test_a_file_that_hung_once_fails_at_once_and_no_other_does(tmp_path, monkeypatch):
    path = encode(tmp_path / "slow.mp4", grey(3))
    asked, decode = [], clips.decode_frames

    def slow(path, choose, stop, size):
        asked.append(threading.current_thread())
        return (
            np.zeros((2, 16, 16, 3), np.uint8) if "slow" in path and stop.wait(20) else decode(path, choose, stop, size)
        )

    monkeypatch.setattr(clips, "decode_frames", slow)
    first = reason(path, time_limit=0.2)
    begin = time.monotonic()
    assert [reason(path) for _ in range(3)] == [first] * 3 == ["not read within 0.2 seconds; not tried again"] * 3
    assert time.monotonic() - begin < 0.1 and len(asked) == 1
    other = encode(tmp_path / "other.mp4", grey(3))
    for _ in range(3):
        assert numbers(read_clip(str(other), 2, 1, 16, start=0.0)) == [0, 1]
    assert len(set(asked)) == 2 and len(asked) == 4  # one thread for all reads, another one since one hangs
    asked[0].join(timeout=5)
    assert not asked[0].is_alive()  # told to stop, it ends


def test_reading_goes_on_in_a_forked_process(tmp_path):
    """It has the object that stood for its parent's thread, and no such thread."""
    path = str(encode(tmp_path / "clip.mp4", grey(3)))
    read_clip(path, 2, 1, 16, start=0.0)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(numbers_read, (path,)).get(timeout=30) == [0, 1]


def numbers_read(path: str) -> list[int]:
    """In a process of its own: numbers come back through a pipe, a tensor through sockets between the two processes."""
    return numbers(read_clip(path, 2, 1, 16, start=0.0, time_limit=20))


def test_an_error_keeps_no_decoder(tmp_path):
    """Collected in a process forked later, one would wait for its threads for ever."""
    path = encode(tmp_path / "short.mp4", grey(3))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(BadSample) as caught:
            read_clip(str(path), 4, 1, 16, start=None)
        left = [thing for thing in gc.get_objects() if type(thing).__name__ == "VideoReader"]
    finally:
        gc.enable()
    assert "too short" in str(caught.value) and not left


def test_a_file_that_can_not_be_opened_is_opened_once_until_it_changes(tmp_path, monkeypatch):
    """decord keeps memory of every such file, each time."""
    import decord

    opened, reader = [], decord.VideoReader

    def count(path, **options):
        opened.append(path)
        return reader(path, **options)

    monkeypatch.setattr(decord, "VideoReader", count)
    path = tmp_path / "text.mp4"
    path.write_text("hello\n" * 1000)
    assert {reason(path) for _ in range(4)} == {"not a video that can be decoded"} and len(opened) == 1
    path.write_text("other\n" * 999)
    assert reason(path) == "not a video that can be decoded" and len(opened) == 2
    encode(path, grey(3))
    assert numbers(read_clip(str(path), 2, 1, 16, start=0.0)) == [0, 1]
    path.unlink()
    assert reason(path) == "No such file or directory"


def test_what_is_remembered_of_files_is_bounded(monkeypatch):
    monkeypatch.setattr(clips, "REMEMBERED", 3)
    memory = clips._Memory()
    for path in ("a", "b", "c", "a", "d"):
        memory.add(path, path.upper())
    assert [memory.get(path) for path in "abcd"] == [("A",), None, ("C",), ("D",)]


def test_running_out_of_memory_is_no_bad_file(tmp_path, monkeypatch):
    def greedy(path, choose, stop, size):
        raise MemoryError

    monkeypatch.setattr(clips, "decode_frames", greedy)
    with pytest.raises(MemoryError):
        read_clip("any.mp4", 2, 1, 16, start=None)


# ---------------------------------------------------------------- files of strangers


def table(path, target, box, at, value, kind=">I"):
    """A copy of a file with a number at a place in one of its boxes changed."""
    data = bytearray(path.read_bytes())
    begin = data.rindex(box) + 4 + at
    struct.pack_into(kind, data, begin, value)
    target.write_bytes(data)
    return target


@pytest.mark.parametrize(
    ("box", "at", "value", "says"),
    [
        (b"stts", 8, 2**32 - 1, "declares 4,294,967,295 samples, more than its "),  # used to end the process
        (b"stsz", 8, 50_000_000, "declares 50,000,000 samples, more than its "),  # used to take 3.5 GB
        (b"stts", 12, 2**31 - 1, "damaged: "),
    ],
)
def test_tables_of_more_frames_than_bytes(tmp_path, box, at, value, says):
    path = encode(tmp_path / "clip.mp4", grey(30))
    path = table(path, tmp_path / "table.mp4", b"stsz", 4, 1) if box == b"stsz" else path
    begin = time.monotonic()
    assert reason(table(path, tmp_path / "bomb.mp4", box, at, value), 4).startswith(says)
    assert time.monotonic() - begin < 10


def test_fragments_of_more_frames_than_bytes(tmp_path):
    path = encode(tmp_path / "clip.mp4", grey(30), movflags="frag_keyframe+empty_moov")
    assert numbers(read_clip(str(path), 4, 1, 16, start=0.0)) == [0, 1, 2, 3]
    bomb = table(path, tmp_path / "bomb.mp4", b"trun", 4, 2**31)
    assert reason(bomb).startswith("declares 2,147,483,648 samples, more than its ")


def test_a_clip_of_very_many_frames(tmp_path, monkeypatch):
    monkeypatch.setattr(clips, "MAX_FRAMES", 20)
    path = encode(tmp_path / "long.mkv", grey(21))
    assert reason(path) == "21 frames, more than 20"


def test_sizes_that_a_header_declares_are_not_believed(tmp_path):
    """The frames are 64 x 48, whatever the container says."""
    path = encode(tmp_path / "clip.mp4", grey(30))
    for kind, at in ((b"avc1", 24), (b"tkhd", 76)):
        lie = table(path, tmp_path / "lie.mp4", kind, at, 60000 << 16 | 60000)
        assert numbers(read_clip(str(lie), 4, 1, 16, start=0.0)) == [0, 1, 2, 3]


def test_large_frames_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(clips, "MAX_FRAME_PIXELS", 64 * 48 - 1)
    for ending in ("mp4", "avi"):  # of each decoder
        path = encode(tmp_path / f"large.{ending}", grey(3))
        assert reason(path) == "frames of 64 x 48 pixels, more than 3,071"


@pytest.mark.parametrize("ending", ["mp4", "avi"])  # of each decoder
@pytest.mark.parametrize("window", [1, 3 * 64 * 48 * 3, 3 * 64 * 48 * 5])
def test_a_window_larger_than_memory_is_resized_piece_by_piece(tmp_path, monkeypatch, ending, window):
    noise = np.random.default_rng(0).integers(0, 256, (12, 48, 64, 3), dtype=np.uint8)
    path = str(encode(tmp_path / f"clip.{ending}", noise))
    for size in (16, 48, 70):
        whole = [read_clip(path, 5, 2, size, start=None, as_bytes=as_bytes) for as_bytes in (False, True)]
        with monkeypatch.context() as patch:
            patch.setattr(clips, "WINDOW", window)
            pieces = [read_clip(path, 5, 2, size, start=None, as_bytes=as_bytes) for as_bytes in (False, True)]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(whole, pieces, strict=True))


def test_playlists_and_descriptions_open_nothing_else(tmp_path):
    """FFmpeg tells a file by its contents, and some kinds are lists of other files and addresses."""
    encode(tmp_path / "other.mp4", grey(30))
    texts = {
        "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nother.mp4\n#EXT-X-ENDLIST\n",
        "remote": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n",
        "concat": "ffconcat version 1.0\nfile other.mp4\n",
        "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.mp4").write_text(text)
        assert reason(tmp_path / f"{name}.mp4") == "not a video that can be decoded"


@pytest.mark.parametrize("ending", [b"mp4", b"avi"])  # of each decoder
def test_names_that_ffmpeg_takes_for_addresses_or_that_are_not_utf8(tmp_path, monkeypatch, ending):
    path = encode(tmp_path / f"clip.{ending.decode()}", grey(5))
    monkeypatch.chdir(tmp_path)
    for name in (b"concat:a|b.", b"http:x.", b"caf\xe9\n.", b"-i."):
        odd = os.fsdecode(name + ending)
        path = path.rename(odd)
        assert numbers(read_clip(odd, 2, 1, 16, start=0.0)) == [0, 1]


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=300), edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8))
def test_damaged_tables_are_read_in_bounds(tmp_path_factory, data, edits):
    folder = tmp_path_factory.getbasetemp()
    sound = folder / "sound.mp4"
    if not sound.exists():
        encode(sound, grey(30))
    for content in (data, data + sound.read_bytes(), sound.read_bytes()):
        content = bytearray(content)
        for at, value in edits if content else ():
            content[at % len(content)] = value
        (folder / "damaged.mp4").write_bytes(content)
        why = too_many_frames(str(folder / "damaged.mp4"))
        assert why is None or len(why) < 200
    assert too_many_frames(str(sound)) is None
