"""For any file and reader, the frames and their number are those that FFmpeg decodes from the start."""

import itertools
import random
import struct
import threading
from fractions import Fraction

import av
import numpy as np
import pytest

from opendit.data.captioned_media import probe
from opendit.data.clips import clip_size, clip_window, decode_frames, open_clip
from opendit.data.pictures_and_clips import stored_size
from opendit.data.video_files import READERS, problem_of

WIDTH, HEIGHT, COUNT, RATE = 88, 72, 26, 24
HERE = [reader for reader in READERS if not problem_of(reader)]
X264 = "bframes={}:keyint=7:min-keyint=7:scenecut=0:b-pyramid=normal:open-gop={}"
CODECS = {
    "h264": ("libx264", {"x264-params": X264.format(0, 0)}),
    "h264 B": ("libx264", {"x264-params": X264.format(3, 0)}),
    "h264 open": ("libx264", {"x264-params": X264.format(3, 1)}),
    "h264 refresh": ("libx264", {"x264-params": "intra-refresh=1:keyint=7:bframes=0"}),
    "hevc": ("libx265", {"x265-params": "keyint=7:min-keyint=7:open-gop=0:log-level=0:pools=1:frame-threads=1"}),
    "hevc open": ("libx265", {"x265-params": "keyint=7:min-keyint=7:open-gop=1:log-level=0:pools=1:frame-threads=1"}),
    "mpeg4": ("mpeg4", {"g": "7"}),
    "mpeg4 B": ("mpeg4", {"g": "7", "bf": "2"}),
    "mpeg2": ("mpeg2video", {"g": "7", "bf": "2"}),
    "vp8": ("libvpx", {"g": "7", "auto-alt-ref": "1", "lag-in-frames": "12", "deadline": "good", "cpu-used": "5"}),
    "vp9": ("libvpx-vp9", {"g": "7", "auto-alt-ref": "1", "lag-in-frames": "12", "deadline": "good", "cpu-used": "8"}),
    "av1": ("libsvtav1", {"preset": "12", "svtav1-params": "keyint=7:irefresh-type=1:lp=1"}),
}
CONTAINERS = {
    "mp4": ("mp4", {}),
    "first.mp4": ("mp4", {"movflags": "faststart"}),
    "fragments.mp4": ("mp4", {"movflags": "frag_keyframe+empty_moov"}),
    "mov": ("mov", {}),
    "mkv": ("matroska", {}),
    "webm": ("webm", {}),
    "ts": ("mpegts", {}),
    "avi": ("avi", {}),
    "nut": ("nut", {}),
}
CUTS = ("whole", "later", "from no key", "edits", "empty edit", "repeated", "fast")
STREAMS = ("alone", "second is larger", "cover first")


def pictures(seed, count=COUNT, width=WIDTH, height=HEIGHT):
    small = np.random.default_rng(seed).integers(0, 256, (count, height // 8, width // 8, 3), dtype=np.uint8)
    return small.repeat(8, 1).repeat(8, 2)


def encoded(path, codec, container=("matroska", {}), seed=0, **shape):
    (name, options), frames = CODECS[codec], pictures(seed, **shape)
    with av.open(str(path), "w", format=container[0], options=container[1]) as file:
        stream = file.add_stream(name, rate=RATE, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        stream.codec_context.time_base = Fraction(1, RATE)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def remuxed(source, path, container, first=0, shift=0, beside=()):
    """Write a file with the packets from number ``first`` on, shown ``shift`` frames earlier, and with the streams of
    other files before them."""
    with av.open(str(path), "w", format=container[0], options=container[1]) as target:
        inputs = [av.open(str(each)) for each in (*beside, source)]
        streams = []
        for file in inputs:
            streams.append(target.add_stream_from_template(file.streams.video[0]))
            if file.format.name in ("png_pipe", "image2", "mjpeg") or file.streams.video[0].codec_context.name == "png":
                streams[-1].disposition = av.stream.Disposition.attached_pic
        for file, stream in zip(inputs, streams, strict=True):
            packets = [packet for packet in file.demux(file.streams.video[0]) if packet.size]
            late = first if file is inputs[-1] else 0
            for packet in packets[late:]:
                moved = round(shift / RATE / packet.time_base) if file is inputs[-1] else 0
                packet.pts = None if packet.pts is None else packet.pts - moved
                packet.dts = None if packet.dts is None else packet.dts - moved
                packet.stream = stream
                target.mux(packet)
        for file in inputs:
            file.close()
    return path


def with_edits(path, entries):
    """Replace the edit list of a file with its tables at the end. An entry is (length in movie ticks, media time or -1,
    rate)."""
    data = bytearray(path.read_bytes())
    moov = data.rindex(b"moov") - 4
    assert moov + struct.unpack_from(">I", data, moov)[0] == len(data)
    table = struct.pack(">II", 0, len(entries)) + b"".join(struct.pack(">Iihh", a, b, c, 0) for a, b, c in entries)
    box = struct.pack(">I4sI4s", 16 + len(table), b"edts", 8 + len(table), b"elst") + table
    begin = data.find(b"edts", moov) - 4
    length = struct.unpack_from(">I", data, begin)[0] if begin > 0 else 0
    begin = begin if begin > 0 else data.index(b"mdia", moov) - 4
    data[begin : begin + length] = box
    for kind in (b"moov", b"trak"):
        at = data.index(kind, moov) - 4
        struct.pack_into(">I", data, at, struct.unpack_from(">I", data, at)[0] + len(box) - length)
    path.write_bytes(data)
    return path


def reference(path):
    """Return all frames of the best stream that is no cover, as FFmpeg decodes them from the start."""
    with av.open(str(path)) as file:
        stream = file.streams.best("video")
        if av.stream.Disposition.attached_pic in stream.disposition:
            stream = next(s for s in file.streams.video if av.stream.Disposition.attached_pic not in s.disposition)
        stream.codec_context.thread_count = 1
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(stream)])


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Return a function that makes each kind of file once. It returns None where a muxer or FFmpeg does not support the
    kind."""
    folder, known = tmp_path_factory.mktemp("shown"), {}

    def base(codec):
        path = folder / f"{codec}.mkv"
        return path if path.exists() else encoded(path, codec)

    def make(codec, container, cut, streams):
        path = folder / f"{codec}-{cut}-{streams}.{container}".replace(" ", "_")
        beside = []
        if streams == "second is larger":
            other = folder / "other.mkv"
            beside = [other if other.exists() else encoded(other, "h264", seed=1, width=64, height=48, count=9)]
        elif streams == "cover first":
            cover = folder / "cover.png"
            if not cover.exists():
                av.VideoFrame.from_ndarray(pictures(2, 1)[0], format="rgb24").to_image().save(cover)
            beside = [cover]
        shift = {"later": 10, "from no key": 0}.get(cut, 0)
        first = {"later": 7, "from no key": 3}.get(cut, 0)
        try:
            remuxed(base(codec), path, CONTAINERS[container], first, shift, beside)
        except (av.error.FFmpegError, ValueError):
            return None  # the container does not allow such packets
        if cut in ("edits", "empty edit", "repeated", "fast"):
            if container not in ("mp4", "mov") or streams != "alone":
                return None
            with av.open(str(path)) as file:
                base_ = file.streams.video[0].time_base
            frame, movie = round(1 / RATE / base_), round(1000 / RATE)
            entries = {
                "edits": [(9 * movie, 5 * frame, 1), (4 * movie, 19 * frame, 1)],
                "empty edit": [(10 * movie, -1, 1), (12 * movie, 8 * frame, 1)],
                "repeated": [(6 * movie, 7 * frame, 1), (6 * movie, 7 * frame, 1)],
                "fast": [(10 * movie, 2 * frame, 2)],
            }[cut]
            with_edits(path, entries)
        with av.open(str(path)) as file:
            if file.streams.best("video") is None:
                return None
        try:
            return path, reference(path)
        except av.error.FFmpegError:
            return None  # the beginning can't be decoded

    def once(*kind):
        if kind not in known:
            known[kind] = make(*kind)
        return known[kind]

    return once


def check(path, frames, seed):
    generator = random.Random(seed)
    assert clip_size(str(path)) == frames.shape[:3]
    content = path.read_bytes()
    assert stored_size("clip", len(content), lambda at, count: content[at : at + count], False) == frames.shape[:3]
    medium, shown = open_clip(str(path))
    assert (medium.frames, medium.height, medium.width) == frames.shape[:3]
    assert np.array_equal(shown, frames[[0, len(frames) // 2, len(frames) - 1]])
    assert probe(str(path), False).frames == len(frames)
    for reader in ("auto", *HERE):
        for _ in range(4):
            asked = []

            def choose(timeline, asked=asked):
                length = len(timeline.seconds)
                assert length == len(frames)
                wanted, interval = generator.randint(1, 6), generator.randint(1, 3)
                asked.extend(clip_window(length, wanted, interval, generator.random()) or [length - 1])
                return asked

            found = decode_frames(str(path), choose, threading.Event(), reader=reader)
            assert np.array_equal(found, frames[asked]), (reader, asked)


KINDS = list(itertools.product(CODECS, CONTAINERS, CUTS, STREAMS))
ALWAYS = [
    ("h264 open", "mp4", "whole", "alone"),
    ("h264 open", "mkv", "later", "alone"),
    ("h264 B", "mp4", "later", "alone"),  # frames before a cut that an edit list hides
    ("h264 B", "mp4", "edits", "alone"),
    ("h264", "mp4", "whole", "second is larger"),
    ("h264", "mkv", "whole", "cover first"),
    ("h264 refresh", "mp4", "whole", "alone"),
    ("h264 refresh", "mkv", "later", "alone"),
    ("hevc open", "mov", "edits", "alone"),
    ("mpeg2", "mov", "from no key", "alone"),
    ("mpeg4 B", "avi", "later", "alone"),
    ("h264 B", "ts", "from no key", "alone"),
    ("vp8", "webm", "whole", "alone"),
    ("av1", "mp4", "whole", "alone"),
]


@pytest.mark.parametrize("kind", [*ALWAYS, *random.Random(0).sample(KINDS, 90)], ids=" ".join)
def test_frames_and_their_number_are_those_of_decoding_from_the_start(made, kind):
    found = made(*kind)
    if found is None or len(found[1]) < 2:
        pytest.skip("no such file, or nothing in it that can be decoded")
    check(*found, seed=0)


# ---------------------------------------------------------------- geometry


def with_matrix(path, target, a, b, c, d):
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    struct.pack_into(">9i", data, at, a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    target.write_bytes(data)
    return target


def with_box(path, target, box):
    """Add a box to the only sample entry of a file with its tables at the end."""
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"avcC") - 4
    data[entry:entry] = box
    moov = data.rindex(b"moov") - 4
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"avc1"):
        at = data.index(kind, moov) - 4
        struct.pack_into(">I", data, at, struct.unpack_from(">I", data, at)[0] + len(box))
    target.write_bytes(data)
    return target


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    return encoded(tmp_path_factory.mktemp("plain") / "plain.mp4", "h264 B", CONTAINERS["mp4"])


def shown(path, reader):
    frames = decode_frames(str(path), lambda length: [0, 7, 20], threading.Event(), reader=reader)
    assert clip_size(str(path)) == (COUNT, *frames.shape[1:3])
    return frames


@pytest.mark.parametrize("reader", HERE)
@pytest.mark.parametrize(
    "matrix", [m for m in itertools.product((-1, 0, 1), repeat=4) if m.count(0) == 2 and m[0] * m[3] - m[1] * m[2]]
)
def test_turned_and_mirrored(plain, tmp_path, reader, matrix):
    """Every pixel (x, y) is shown at (a x + c y, b x + d y), moved so that both begin at 0."""
    a, b, c, d = matrix
    path = with_matrix(plain, tmp_path / "turned.mp4", *matrix)
    frames = reference(plain)[[0, 7, 20]]
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    right, down = a * x + c * y, b * x + d * y
    right, down = right - right.min(), down - down.min()
    expected = np.zeros((3, down.max() + 1, right.max() + 1, 3), np.uint8)
    expected[:, down, right] = frames
    assert np.array_equal(shown(path, reader), expected)


@pytest.mark.parametrize("reader", HERE)
@pytest.mark.parametrize("wide, high", [(4, 3), (8, 9), (40, 33), (1, 1), (64, 45)])
def test_pixels_that_are_not_square(plain, tmp_path, reader, wide, high):
    path = with_box(plain, tmp_path / "wide.mp4", struct.pack(">I4sII", 16, b"pasp", wide, high))
    frames, found = reference(plain)[[0, 7, 20]], shown(path, reader)
    pixel = Fraction(wide, high)
    height, width = (HEIGHT, round(WIDTH * pixel)) if pixel >= 1 else (round(HEIGHT / pixel), WIDTH)
    assert found.shape == (3, height, width, 3)
    for frame, ours in zip(frames, found, strict=True):
        theirs = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(
            width, height, "rgb24", interpolation="BICUBIC"
        )
        assert np.abs(theirs.to_ndarray().astype(int) - ours).mean() < 4
    turned = shown(with_matrix(path, tmp_path / "both.mp4", 0, 1, -1, 0), reader)
    assert np.array_equal(turned, np.rot90(found, -1, (1, 2)))


@pytest.mark.parametrize("reader", HERE)
def test_the_shape_of_pixels_in_the_stream_alone(tmp_path, reader):
    """FFmpeg writes it into the container as well, other programs into the H.264 stream alone."""
    path = tmp_path / "wide.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=RATE, options={"x264-params": "sar=4/3:keyint=9"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(4, 3)
        for pixels in pictures(0):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    data = path.read_bytes()
    if b"pasp" in data:
        path.write_bytes(data.replace(b"pasp", b"free"))
    assert shown(path, reader).shape == (3, HEIGHT, round(WIDTH * 4 / 3), 3)


@pytest.mark.parametrize("reader", HERE)
@pytest.mark.parametrize("cut", [(0, 0, 0, 0), (3, 5, 2, 9), (8, 8, 0, 0), (0, 0, 36, 30)])
def test_what_a_container_hides(plain, tmp_path, reader, cut):
    left, right, top, bottom = cut
    width, height = WIDTH - left - right, HEIGHT - top - bottom
    fields = (width, 1, height, 1, left - right, 2, top - bottom, 2)  # offsets between the centres
    path = with_box(plain, tmp_path / "cut.mp4", struct.pack(">I4sIIIIiIiI", 40, b"clap", *fields))
    expected = reference(plain)[[0, 7, 20], top : HEIGHT - bottom, left : WIDTH - right]
    assert np.array_equal(shown(path, reader), expected)


@pytest.mark.parametrize("reader", HERE)
def test_what_a_matroska_file_crops(tmp_path, reader):
    path = encoded(tmp_path / "plain.mkv", "h264 B")
    frames = reference(path)[[0, 7, 20]]
    data = path.read_bytes()
    # Replace elements that FFmpeg writes with as many bytes that crop 6 columns and 10 rows, so 82 x 62 pixels are
    # shown.
    known = bytes.fromhex("e08ab08158ba814854b28104" + "55ee8100" + "ec010000000000000200" + "00")
    cut = bytes.fromhex("e096b08158ba8148" + "54b0815254ba813e" + "54cc810654aa810a" + "ec8100")
    assert data.count(known) == 1 and len(known) == len(cut)
    data = data.replace(known, cut)
    path.write_bytes(data)
    assert np.array_equal(shown(path, reader), frames[:, : HEIGHT - 10, 6:])
