"""The codec read from a file's header is never anything that FFmpeg does not find."""

from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data import clips
from opendit.data.clips import read_clip
from opendit.data.container_header import IN_ORDER, ContainerHeader, read_header
from opendit.data.video_readers import DecordReader, look_up


def write(path, codec, length=12, size=(48, 64), sound=False, tracks=1, **options):
    random = np.random.default_rng(0)
    with av.open(str(path), "w") as file:
        streams = []
        for _ in range(tracks):
            stream = file.add_stream(codec, rate=24, options={name: str(value) for name, value in options.items()})
            stream.height, stream.width = size
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            streams.append(stream)
        if sound:
            voice = file.add_stream("mp3", rate=44100)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 2048), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 44100
            file.mux(voice.encode(frame))
            file.mux(voice.encode())
        for number in range(length):
            pixels = np.roll(random.integers(0, 256, (*size, 3), np.uint8) // 8, number, axis=1)
            for stream in streams:
                file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        for stream in streams:
            file.mux(stream.encode())
    return str(path)


@pytest.mark.parametrize(
    "name, codec, options, found",
    [
        ("plain.avi", "mpeg4", {}, True),
        ("key.avi", "mpeg4", {"g": 1}, True),
        ("sound.avi", "mpeg4", {"sound": True}, True),
        ("b.avi", "mpeg4", {"bf": 2}, False),
        ("two.avi", "mpeg4", {"tracks": 2}, False),
        ("h264.avi", "libx264", {}, False),
        ("mjpeg.avi", "mjpeg", {}, False),
    ],
)
def test_avi_files(tmp_path, name, codec, options, found):
    path = write(tmp_path / name, codec, **options)
    assert read_header(path) == ContainerHeader(None, IN_ORDER if found else "")
    assert DecordReader.finds(read_header(path)) == found


@pytest.mark.parametrize(
    "name, codec, options, letters, plain",
    [
        ("h264.mp4", "libx264", {}, "avc1", True),
        ("h264.mov", "libx264", {"bf": 2}, "avc1", True),
        ("vp9.mp4", "libvpx-vp9", {}, "vp09", True),
        ("mpeg4.mp4", "mpeg4", {}, "mp4v", True),
        ("hevc.mp4", "libx265", {}, "hev1", False),
        ("two.mp4", "libx264", {"tracks": 2}, "", False),
        ("sound.mp4", "libx264", {"sound": True}, "avc1", True),
        ("h264.mkv", "libx264", {}, "", False),
    ],
)
def test_mp4_files(tmp_path, name, codec, options, letters, plain):
    path = write(tmp_path / name, codec, **options)
    header = read_header(path)
    assert header._replace(track=None) == ContainerHeader(None, letters)
    if plain:
        found = look_up(path)
        assert header.track.time_base == found.time_base
        # FFmpeg shifts the times by the edit list, so that the first frame is shown at 0.
        assert np.array_equal(np.diff(header.track.times), np.diff(found.times))
    assert DecordReader.finds(header) == (plain and codec != "mpeg4")


@pytest.mark.parametrize("name, codec", [("a.avi", "mpeg4"), ("a.mp4", "libx264")])
def test_ffmpeg_is_not_asked_where_the_file_says_it(tmp_path, name, codec, monkeypatch):
    path = write(tmp_path / name, codec)
    wanted = read_clip(path, 4, 2, 32, start=0.3, as_bytes=True, reader="pyav").pixels

    def asked(*_, **__):
        raise AssertionError("looked up")

    monkeypatch.setattr(clips, "look_up", asked)
    found = read_clip(path, 4, 2, 32, start=0.3, as_bytes=True, reader="decord").pixels
    assert (found == wanted).all()


@pytest.fixture(scope="module")
def sound_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("headers")
    kinds = (("a.avi", "mpeg4"), ("b.mp4", "libx264"))
    return [Path(write(folder / name, codec)).read_bytes() for name, codec in kinds]


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 1),
    st.integers(0, 20_000),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 255)), max_size=12),
)
def test_damaged_headers_raise_nothing(sound_files, tmp_path_factory, which, length, edits):
    content = bytearray(sound_files[which][:length])
    for at, value in edits if content else ():
        content[at % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    codec = read_header(str(path)).codec
    assert codec in ("", IN_ORDER) or len(codec) == 4


def test_what_later_headers_say_counts_too(tmp_path):
    """A second header that allows B frames makes it no plain file, wherever it stands."""
    path = write(tmp_path / "a.avi", "mpeg4")
    content = Path(path).read_bytes()
    layer = content.index(b"\0\0\1\x20")
    bits = "".join(f"{byte:08b}" for byte in content[layer + 4 : layer + 12])
    at = 10 + (7 if bits[9] == "1" else 0) + 4
    assert bits[at] == "1" and bits[at + 3] == "1"
    changed = int(bits[: at + 3] + "0" + bits[at + 4 :], 2).to_bytes(8, "big")
    (tmp_path / "b.avi").write_bytes(content[: layer + 4] + changed + content[layer + 12 :])
    assert read_header(path).codec == IN_ORDER and not read_header(str(tmp_path / "b.avi")).codec


def test_a_first_frame_out_of_sight_is_no_answer(tmp_path):
    """Such as of a file whose frames are grouped in lists: its description alone may be that of another stream."""
    path = write(tmp_path / "a.avi", "mpeg4")
    content = Path(path).read_bytes()
    frames = content.index(b"movi")
    hidden = content[:frames] + content[frames:].replace(b"00dc", b"00pc")
    (tmp_path / "b.avi").write_bytes(hidden)
    assert read_header(path).codec == IN_ORDER and not read_header(str(tmp_path / "b.avi")).codec
