"""Untrusted clips: files that declare false sizes, or that refer to other files."""

import os
import struct
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data import clips
from opendit.data.container_header import problem_of_tables
from tests.data.test_broken_clips import reason
from tests.data.test_clips import encode, grey, numbers, read_clip


def table(path, target, box, at, value, kind=">I"):
    """Copy a file with one number in one of its boxes changed."""
    data = bytearray(path.read_bytes())
    begin = data.rindex(box) + 4 + at
    struct.pack_into(kind, data, begin, value)
    target.write_bytes(data)
    return target


@pytest.mark.parametrize(
    ("box", "at", "value", "says"),
    [
        (b"stts", 4, 233, "its table stts declares more entries than it holds"),  # could end the process
        (b"stsz", 8, 31, "its table stsz declares more entries than it holds"),
        (b"stco", 4, 2**30, "its table stco declares more entries than it holds"),
        (b"stts", 8, 2**32 - 1, "declares 4,294,967,295 samples, more than its "),  # could end the process
        (b"stsz", 8, 50_000_000, "declares 50,000,000 samples, more than its "),  # could take 3.5 GB
        (b"stts", 12, 2**31 - 1, "too short: 1 frame"),  # the edit list ends before the second frame
    ],
)
def test_tables_of_more_frames_than_bytes(tmp_path, box, at, value, says):
    path = encode(tmp_path / "clip.mp4", grey(30))
    path = table(path, tmp_path / "table.mp4", b"stsz", 4, 1) if value == 50_000_000 else path
    begin = time.monotonic()
    assert reason(table(path, tmp_path / "bomb.mp4", box, at, value), 4).startswith(says)
    assert time.monotonic() - begin < 10


def test_fragments_of_more_frames_than_bytes(tmp_path):
    path = encode(tmp_path / "clip.mp4", grey(30), movflags="frag_keyframe+empty_moov")
    assert numbers(read_clip(str(path), 4, 1, 16, start=0.0)) == [0, 1, 2, 3]
    bomb = table(path, tmp_path / "bomb.mp4", b"trun", 4, 2**31)
    assert reason(bomb) == "its table trun declares more entries than it holds"
    table(bomb, bomb, b"trun", 0, 0)  # entries without fields take no room
    assert reason(bomb).startswith("declares 2,147,483,6")


@pytest.mark.parametrize("reader", ["auto", "pyav"])
def test_a_damaged_time_of_a_fragment(tmp_path, reader):
    """FFmpeg would allocate memory for the time, and the process could crash."""
    path = encode(tmp_path / "clip.mp4", grey(30), movflags="frag_keyframe+empty_moov")
    late = table(path, tmp_path / "late.mp4", b"tfdt", 4, 2**40, ">Q")
    assert numbers(read_clip(str(late), 4, 1, 16, start=0.0, reader=reader)) == [0, 1, 2, 3]


def test_fragments_of_more_frames_than_bytes_in_all(tmp_path):
    """Each fragment alone is within the limit."""
    whole = encode(tmp_path / "clip.mp4", grey(30), movflags="frag_keyframe+empty_moov").read_bytes()
    at = whole.index(b"moof") - 4
    fragment = bytearray(whole[at : at + struct.unpack_from(">I", whole, at)[0]])
    struct.pack_into(">II", fragment, fragment.index(b"trun") + 4, 0, 600)
    assert len(whole) > 600 and reason_of(tmp_path, whole + fragment) is None
    assert reason_of(tmp_path, whole + fragment * 40).startswith("declares ")


def reason_of(folder, content):
    (folder / "some.mp4").write_bytes(content)
    return problem_of_tables(str(folder / "some.mp4"))


@pytest.mark.parametrize("size", ["of 64 bits", "up to the end"])
def test_tables_in_boxes_whose_size_is_written_otherwise(tmp_path, size):
    path = encode(tmp_path / "clip.mp4", grey(30))
    data = path.read_bytes()
    lie = table(path, tmp_path / "lie.mp4", b"stts", 4, 233).read_bytes()
    for content, problem in ((data, None), (lie, "its table stts declares more entries than it holds")):
        begin = content.index(b"moov") - 4
        length = struct.unpack_from(">I", content, begin)[0]
        inner, rest = content[begin + 8 : begin + length], content[begin + length :]
        track = inner.index(b"trak") - 4
        held = struct.unpack_from(">I", inner, track)[0]
        if size == "of 64 bits":
            head = struct.pack(">I4sQ", 1, b"trak", held + 8)
            inner = inner[:track] + head + inner[track + 8 :]
        else:  # a size of 0, for the last box of its parent
            inner = (
                inner[:track]
                + inner[track + held :]
                + struct.pack(">I4s", 0, b"trak")
                + inner[track + 8 : track + held]
            )
        moved = content[:begin] + struct.pack(">I4s", len(inner) + 8, b"moov") + inner + rest
        assert reason_of(tmp_path, moved) == problem


@pytest.mark.parametrize("box", [b"stts", b"stsz", b"stsc"])
def test_a_table_without_room_for_its_count(tmp_path, box):
    data = encode(tmp_path / "clip.mp4", grey(30)).read_bytes()
    at = data.rindex(box) - 4
    assert reason_of(tmp_path, data[:at] + struct.pack(">I", 12) + data[at + 4 :]) == (
        f"its table {box.decode()} declares more entries than it holds"
    )


def test_a_file_of_very_many_boxes(tmp_path):
    content = struct.pack(">I4s", 16, b"ftyp") + b"isom" * 2 + struct.pack(">I4s", 8, b"free") * 100_001
    assert reason_of(tmp_path, content) == "more than 100,000 boxes"


def test_a_header_of_very_many_boxes(tmp_path):
    path, box = tmp_path / "boxes.mp4", struct.pack(">I4s", 8, b"free")
    path.write_bytes(
        struct.pack(">I4s", 16, b"ftyp") + b"isom" * 2 + struct.pack(">I4s", 8 + 8 * 10**6, b"moov") + box * 10**6
    )
    assert reason(path) == "more than 100,000 boxes"


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
    for ending in ("mp4", "avi"):  # for each decoder
        path = encode(tmp_path / f"large.{ending}", grey(3))
        assert reason(path) == "frames of 64 x 48 pixels, more than 3,071"


@pytest.mark.parametrize("ending", ["mp4", "avi"])  # for each decoder
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
    """FFmpeg recognises files by their contents, and some formats list other files and addresses."""
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


@pytest.mark.parametrize("ending", [b"mp4", b"avi"])  # for each decoder
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
        why = problem_of_tables(str(folder / "damaged.mp4"))
        assert why is None or len(why) < 200
    assert problem_of_tables(str(sound)) is None
