"""The size of media inside other files is found by reading little of them."""

import struct

import av
import numpy as np
import pytest

from opendit.data import clips
from opendit.data.base import BadSample
from opendit.data.pictures_and_clips import HEAD, stored_size
from opendit.data.video_files import write_mp4

FRAMES = (30, 192, 256)  # noise, so that the file is large


class Stored:
    """A file's bytes, which record what was read of them."""

    def __init__(self, content):
        self.content, self.reads = content, []

    def read(self, at, count):
        assert 0 <= at and 0 < count and at + count <= len(self.content)
        self.reads.append((at, count))
        return self.content[at : at + count]

    def size(self):
        return stored_size("t.tar: clip.mp4", len(self.content), self.read, False)

    @property
    def share(self):
        return sum(count for _, count in self.reads) / len(self.content)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Write a clip whose tables are at its beginning."""
    path = tmp_path_factory.mktemp("clips") / "first.mp4"
    write_mp4(path, np.random.default_rng(0).integers(0, 256, (*FRAMES, 3), dtype=np.uint8), 24)
    assert path.stat().st_size > 8 * HEAD
    return path


def remuxed(path, name, **options):
    out = path.with_name(name)
    with av.open(str(path)) as source, av.open(str(out), "w", options=options) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    return out


@pytest.mark.parametrize("reader", ["auto", "pyav"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_of_an_mp4_its_tables_and_its_beginning_are_read(first, where, reader, monkeypatch):
    choose = clips.choose_reader
    monkeypatch.setattr(clips, "choose_reader", lambda _: choose(reader))
    path = first if where == "first" else remuxed(first, "last.mp4")
    stored = Stored(path.read_bytes())
    assert (stored.content.find(b"moov") < HEAD) == (where == "first")
    assert stored.size() == clips.clip_size(str(path)) == FRAMES
    assert stored.share < 0.25 and len(stored.reads) <= 2


@pytest.mark.parametrize("codec", ["libvpx-vp9", "libsvtav1"])
def test_other_codecs_in_an_mp4_too(tmp_path, codec):
    path, random = tmp_path / "clip.mp4", np.random.default_rng(0)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as file:
        stream = file.add_stream(codec, rate=24)
        stream.height, stream.width, stream.pix_fmt = 192, 256, "yuv420p"
        for _ in range(16):
            pixels = random.integers(0, 256, (192, 256, 3), dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    stored = Stored(path.read_bytes())
    assert len(stored.content) > 5 * HEAD and stored.size() == (16, 192, 256) and stored.share < 0.25


@pytest.mark.parametrize("name, options", [("fragments.mp4", {"movflags": "frag_keyframe"}), ("clip.mkv", {})])
def test_other_files_are_read_whole(first, name, options):
    path = remuxed(first, name, **options)
    stored = Stored(path.read_bytes())
    assert stored.size() == clips.clip_size(str(path)) == FRAMES and stored.share >= 1


def test_a_small_clip_is_read_at_once(tmp_path):
    write_mp4(tmp_path / "x.mp4", np.zeros((9, 32, 48, 3), np.uint8), 24)
    stored = Stored((tmp_path / "x.mp4").read_bytes())
    assert stored.size() == (9, 32, 48) and stored.reads == [(0, len(stored.content))]


def outcome(look):
    try:
        return look()
    except BadSample:
        return None


@pytest.mark.parametrize("length", [0, 7, 9, 2**31, 2**32 - 1])
def test_boxes_of_hostile_lengths_are_what_they_are_in_a_file(first, length, tmp_path):
    content = bytearray(first.read_bytes())
    at = content.find(b"moov") - 4
    content[at : at + 4] = struct.pack(">I", length)
    endless = struct.pack(">I4s", 16, b"ftyp") + bytes(8) + struct.pack(">I4s", 2**17, b"free") * 2**16
    for number, hostile in enumerate((bytes(content), endless)):
        path = tmp_path / f"{number}.mp4"
        path.write_bytes(hostile)
        assert outcome(Stored(hostile).size) == outcome(lambda path=path: clips.clip_size(str(path)))
