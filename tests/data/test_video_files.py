"""All readers of clips give the same frames, numbers of frames and errors, and the fastest one is chosen."""

import builtins
import threading

import av
import numpy as np
import pytest

from opendit.data import clips, video_files
from opendit.data.base import BadSample
from opendit.data.clips import decode_frames
from opendit.data.video_files import READERS, choose_reader, problem_of
from tests.data.test_clips import encode, rotate


@pytest.fixture(params=READERS)
def reader(request):
    problem = problem_of(request.param)
    if request.param == "torchcodec" and problem:  # only torchcodec is optional
        pytest.skip(f"{request.param}: {problem}")
    assert not problem
    return request.param


@pytest.fixture
def fresh():
    """Clear the caches of the readers' checks before and after a test."""
    for _ in "ba":
        choose_reader.cache_clear()
        problem_of.cache_clear()
        if _ == "b":
            yield


def noise(count, width, height, seed=0):
    small = np.random.default_rng(seed).integers(0, 256, (count, height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return small.repeat(4, 1).repeat(4, 2)[:, :height, :width].copy()


def in_order(path):
    """Return all frames through FFmpeg's filters, without any code of this project."""
    frames = []
    with av.open(str(path)) as file:
        stream, graph = file.streams.video[0], av.filter.Graph()
        stream.codec_context.thread_count = 1
        parts = [graph.add_buffer(template=stream), graph.add("scale", "flags=bicubic"), graph.add("format", "rgb24")]
        parts.append(graph.add("buffersink"))
        for first, second in zip(parts, parts[1:], strict=False):
            first.link_to(second)
        graph.configure()
        for frame in file.decode(stream):
            turns = round(frame.rotation / 90)
            graph.push(frame)
            frames.append(np.rot90(graph.pull().to_ndarray(format="rgb24"), turns))
    return np.stack(frames)


def read(path, indices, reader):
    """Return (frames, the number of frames that the reader found in the file)."""
    lengths = []

    def choose(timeline):
        lengths.append(len(timeline.seconds))
        return indices

    return decode_frames(str(path), choose, threading.Event(), reader=reader), lengths[0]


def write(path, codec="libx264", pix_fmt="yuv420p", colours=(1, 1), count=30, width=128, height=96, **options):
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=24, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.gop_size = 9
        stream.codec_context.colorspace, stream.codec_context.color_range = colours
        for pixels in noise(count, width, height):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return path


OPEN_GOP = {"x264-params": "open-gop=1:keyint=9:bframes=3:scenecut=0"}
CODECS = {
    "H.264": ("libx264", {}),
    "H.264, open GOPs": ("libx264", OPEN_GOP),
    "HEVC": ("libx265", {"x265-params": "keyint=9:log-level=0"}),
    "MPEG-4": ("mpeg4", {}),
    "MPEG-4, B frames": ("mpeg4", {"bf": "2"}),
    "MPEG-2, B frames": ("mpeg2video", {"bf": "2"}),
    "VP9": ("libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
}


@pytest.mark.parametrize("ending", ["mp4", "mkv", "avi", "ts", "mpg"])
@pytest.mark.parametrize("codec", CODECS)
def test_the_same_pixels_and_numbers_of_frames(tmp_path, reader, codec, ending):
    name, options = CODECS[codec]
    if (codec, ending) in (("VP9", "ts"), ("VP9", "mpg"), ("VP9", "avi"), ("HEVC", "avi")):
        pytest.skip("not in that container")
    path = write(tmp_path / f"clip.{ending}", name, **options)
    frames = in_order(path)
    for indices in ([0, 1, 2], [1, 4, 7, 10, 13, 16, 19, 22, 25, 28], [25], [17, 18, 27], [9, 20]):
        found, length = read(path, indices, reader)
        assert length == len(frames) == 30
        assert np.array_equal(found, frames[indices]), indices


@pytest.mark.parametrize("colours", [(1, 1), (5, 2), (9, 1)], ids=["BT.709", "full range", "BT.2020"])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv422p", "yuv444p", "gray", "yuv420p10le"])
def test_the_same_colours(tmp_path, reader, pix_fmt, colours):
    path = write(tmp_path / "clip.mp4", pix_fmt=pix_fmt, colours=colours, count=6)
    assert np.array_equal(read(path, [1, 4], reader)[0], in_order(path)[[1, 4]])


@pytest.mark.parametrize("sides", [(8, 16), (48, 64), (96, 20), (63, 47), (130, 71), (322, 18)])
def test_the_same_sizes(tmp_path, reader, sides):
    path = encode(tmp_path / "clip.mp4", noise(8, *sides))
    assert np.array_equal(read(path, [1, 3, 5], reader)[0], in_order(path)[[1, 3, 5]])


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_the_same_turns_and_times(tmp_path, reader, degrees):
    times = np.cumsum([1, 3, 1, 12, 2] * 4).tolist()
    path = encode(tmp_path / "plain.mp4", noise(20, 150, 100), times, gop=7)
    turned = rotate(path, tmp_path / "turned.mp4", degrees)
    found, length = read(turned, [2, 9, 16], reader)
    assert length == 20 and np.array_equal(found, in_order(turned)[[2, 9, 16]])


def outcome(path, reader):
    try:
        return read(path, [3, 13, 23], reader)
    except BadSample as bad:
        return str(bad)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_damaged_files_are_the_same_frames_or_an_error(tmp_path, reader, ending, seed):
    """Zeros in the middle or a missing end must not make any reader lose its place."""
    random = np.random.default_rng(seed)
    data = bytearray(encode(tmp_path / f"whole.{ending}", noise(30, 64, 48), movflags="faststart").read_bytes())
    if seed % 3 == 0:
        data = data[: random.integers(len(data) // 3, len(data))]
    else:
        begin = int(random.integers(len(data) // 4, len(data) - 200))
        data[begin : begin + 150] = bytes(150)
    path = tmp_path / f"damaged.{ending}"
    path.write_bytes(data)
    whole = in_order(tmp_path / f"whole.{ending}")[[3, 13, 23]]
    found, as_pyav = outcome(path, reader), outcome(path, "pyav")
    if isinstance(found, str) or isinstance(as_pyav, str):
        assert isinstance(found, str) == isinstance(as_pyav, str), (found, as_pyav)
        return
    assert found[1] == as_pyav[1]
    # Decoders conceal missing data in different ways, but an intact frame must be the right one.
    for ours, theirs, right in zip(found[0], as_pyav[0], whole, strict=True):
        assert np.array_equal(ours, right) or not np.array_equal(theirs, right)


def test_errors_are_in_the_same_words(tmp_path, reader):
    (tmp_path / "text.mp4").write_text("hello\n" * 1000)
    with av.open(str(tmp_path / "audio.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux([*stream.encode(frame), *stream.encode()])
    says = {"text": "not a video that can be decoded", "audio": "holds no video stream", "none": "No such file"}
    for name, words in says.items():
        assert words in outcome(tmp_path / f"{name}.mp4", reader)


# ---------------------------------------------------------------- which reader is chosen


def test_auto_takes_the_fastest_that_works(monkeypatch, fresh):
    problems = {"torchcodec": "not installed", "pyav": ""}
    monkeypatch.setattr(video_files, "problem_of", problems.get)
    assert choose_reader() == ("pyav", "torchcodec: not installed")
    choose_reader.cache_clear()
    problems["torchcodec"] = ""
    assert choose_reader() == ("torchcodec", "the fastest")
    choose_reader.cache_clear()
    problems.update(torchcodec="broken", pyav="broken")
    with pytest.raises(ValueError, match="--video_reader auto: none works here"):
        choose_reader()


def test_one_that_is_asked_for_and_missing_is_an_error(monkeypatch, fresh):
    real = builtins.__import__

    def missing(name, *args, **options):
        if name.startswith("torchcodec"):
            raise ImportError(name)
        return real(name, *args, **options)

    video_files.import_torchcodec.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match="--video_reader torchcodec: not installed; install it, or give auto"):
        choose_reader("torchcodec")
    assert choose_reader()[0] == "pyav"
    with pytest.raises(ValueError, match="--video_reader fast: no such reader; give one of auto, torchcodec"):
        choose_reader("fast")


def test_one_with_other_pixels_is_not_taken(monkeypatch, fresh):
    class Black(video_files.PyAVReader):
        def read(self, indices):
            return 0 * super().read(indices)

    monkeypatch.setattr(video_files, "import_torchcodec", lambda: None)
    monkeypatch.setitem(video_files.OPENERS, "torchcodec", Black)
    assert problem_of("torchcodec") == "other pixels than PyAV's" and choose_reader()[0] == "pyav"


def test_decord_of_earlier_runs_is_pyav():
    name, why = choose_reader("decord")
    assert name == "pyav" and "decord is no longer used" in why


def test_a_reader_that_fails_is_helped_out(tmp_path, monkeypatch, reader):
    """A clip that a reader fails on is decoded from its start instead."""
    path = encode(tmp_path / "clip.mp4", noise(12, 64, 48))

    def fail(self, indices):
        raise RuntimeError("no")

    monkeypatch.setattr(clips.OPENERS[reader], "read", fail)
    assert np.array_equal(read(path, [2, 7], reader)[0], in_order(path)[[2, 7]])
