"""Whatever the file and the reader: the frames, and how many there are, that FFmpeg's decoding from the start gives."""

import itertools
import random
import struct
import threading
from fractions import Fraction

import av
import numpy as np
import pytest

from opendit.data.check_csv import probe
from opendit.data.clips import clip_size, clip_window, decode_frames
from opendit.data.media_size import stored_clip_size
from opendit.data.open_medium import open_clip
from opendit.data.video_readers import READERS, problem_of

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


def packets_of(codec, seed=0, **shape):
    """(An encoder's stream, copies of whose parameters muxers take; its packets as (bytes, pts, dts, is key))."""
    name, options = CODECS[codec]
    return name, options, pictures(seed, **shape)


def encoded(path, codec, container=("matroska", {}), seed=0, **shape):
    name, options, frames = packets_of(codec, seed, **shape)
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
    """A file of the packets from number ``first`` on, whose times begin ``shift`` frames earlier; with the streams of
    other files before it."""
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
    """The file with another edit list: (length in movie ticks, media time or -1, rate) each; its tables stand last."""
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
    """All frames of the best stream that is no cover, as FFmpeg's decoding from the start gives them."""
    with av.open(str(path)) as file:
        stream = file.streams.best("video")
        if av.stream.Disposition.attached_pic in stream.disposition:
            stream = next(s for s in file.streams.video if av.stream.Disposition.attached_pic not in s.disposition)
        stream.codec_context.thread_count = 1
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(stream)])


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A file of a kind, made once; None where a muxer or FFmpeg itself has no use for it."""
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
            return None  # the container does not take such packets
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
        return path, reference(path)

    def once(*kind):
        if kind not in known:
            known[kind] = make(*kind)
        return known[kind]

    return once


def check(path, frames, seed):
    generator = random.Random(seed)
    assert clip_size(str(path)) == frames.shape[:3]
    content = path.read_bytes()
    assert stored_clip_size("clip", len(content), lambda at, count: content[at : at + count]) == frames.shape[:3]
    medium, shown = open_clip(str(path))
    assert (medium.frames, medium.height, medium.width) == frames.shape[:3]
    assert np.array_equal(shown, frames[[0, len(frames) // 2, len(frames) - 1]])
    assert probe(str(path), False).frames == len(frames)
    for reader in ("auto", *HERE):
        for _ in range(4):
            asked = []

            def choose(length, asked=asked):
                assert length == len(frames)
                wanted, interval = generator.randint(1, 6), generator.randint(1, 3)
                asked.extend(clip_window(length, wanted, interval, generator.random()) or [length - 1])
                return asked

            found = decode_frames(str(path), choose, threading.Event(), reader=reader)
            assert np.array_equal(found, frames[asked]), (reader, asked)


KINDS = list(itertools.product(CODECS, CONTAINERS, CUTS, STREAMS))
