"""Headers of intact files are accepted, and those of damaged files raise no exception."""

from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data.container_header import problem_of_tables
from opendit.data.picture_file import has_animation_format
from opendit.data.video_files import look_up


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
    "name, codec, options",
    [
        ("plain.avi", "mpeg4", {}),
        ("h264.mp4", "libx264", {"bf": 2}),
        ("two.mp4", "libx264", {"tracks": 2}),
        ("sound.mov", "libx264", {"sound": True}),
        ("h264.mkv", "libx264", {}),
    ],
)
def test_sound_files_have_no_problem(tmp_path, name, codec, options):
    path = write(tmp_path / name, codec, **options)
    assert problem_of_tables(path) is None and not has_animation_format(path) and look_up(path).length == 12


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
    problem = problem_of_tables(str(path))
    assert problem is None or problem.isprintable()
    assert not has_animation_format(str(path))
