"""Clips that are short, broken or slow."""

import errno
import gc
import multiprocessing
import os
import threading
import time

import av
import numpy as np
import pytest

from opendit.data import clips
from opendit.data.base import BadSample
from opendit.data.clips import clip_window
from opendit.data.video_files import OPENERS, choose_reader
from tests.data.test_clips import encode, grey, numbers, read_clip

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
        assert numbers(clip.pixels) == clip_window(20, frames, used, None) and clip.shortened
        assert clip_window(20, frames, used + 1, None) is None  # the largest that fits
    assert clips.read_clip(str(path), 7, 3, 16, start=None, short_clips="interval").shortened is False  # 19 frames
    with pytest.raises(ValueError, match="--short_clips longer: no such way; give one of skip, interval"):
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
    data = encode(tmp_path / "whole.mp4", noise).read_bytes()  # its index is at the end
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    assert reason(tmp_path / "cut.mp4") == "not a video that can be decoded"
    data = bytearray(encode(tmp_path / "whole.mp4", noise).read_bytes())
    data[len(data) // 3 : len(data) // 2] = b"\xff" * (len(data) // 2 - len(data) // 3)
    (tmp_path / "damaged.mp4").write_bytes(data)
    assert reason(tmp_path / "damaged.mp4", 40).startswith("damaged: ")


def test_a_file_that_never_answers(tmp_path, monkeypatch):
    """Opening a pipe that nobody writes to blocks inside C code for ever, as a stalled disk does."""
    choose_reader("pyav")  # cache this check, which would fail below
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setitem(OPENERS, "pyav", lambda name, contents: open(tmp_path / "pipe", "rb"))
    path = encode(tmp_path / "stuck.mp4", grey(4))
    begin = time.monotonic()
    assert reason(path, time_limit=0.5, reader="pyav") == "not read within 0.5 seconds; not tried again"
    assert time.monotonic() - begin < 5
    os.close(os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK))  # lets the thread end


def test_slow_decoding_is_stopped(tmp_path, monkeypatch):
    stopped = []

    def slow(path, choose, stop, size, reader):
        stopped.append(stop.wait(20))

    monkeypatch.setattr(clips, "decode_frames", slow)
    assert reason(tmp_path / "slow.mp4", time_limit=0.2) == "not read within 0.2 seconds; not tried again"
    time.sleep(0.1)
    assert stopped == [True]


def test_a_file_that_hung_once_fails_at_once_and_no_other_does(tmp_path, monkeypatch):
    path = encode(tmp_path / "slow.mp4", grey(3))
    asked, decode = [], clips.decode_frames

    def slow(path, choose, stop, size, reader):
        asked.append(threading.current_thread())
        return (
            np.zeros((2, 16, 16, 3), np.uint8)
            if "slow" in path and stop.wait(20)
            else decode(path, choose, stop, size, reader)
        )

    monkeypatch.setattr(clips, "decode_frames", slow)
    first = reason(path, time_limit=0.2)
    begin = time.monotonic()
    assert [reason(path) for _ in range(3)] == [first] * 3 == ["not read within 0.2 seconds; not tried again"] * 3
    assert time.monotonic() - begin < 0.1 and len(asked) == 1
    other = encode(tmp_path / "other.mp4", grey(3))
    for _ in range(3):
        assert numbers(read_clip(str(other), 2, 1, 16, start=0.0)) == [0, 1]
    assert len(asked) == 4
    asked[0].join(timeout=5)
    assert not asked[0].is_alive()  # it ends when told to stop


def test_reading_goes_on_in_a_forked_process(tmp_path):
    path = str(encode(tmp_path / "clip.mp4", grey(3)))
    read_clip(path, 2, 1, 16, start=0.0)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(numbers_read, (path,)).get(timeout=30) == [0, 1]


def numbers_read(path: str) -> list[int]:
    """Return frame numbers, because a tensor would need sockets between the two processes."""
    return numbers(read_clip(path, 2, 1, 16, start=0.0, time_limit=20))


def test_an_error_keeps_no_decoder(tmp_path):
    """A decoder that is garbage-collected in a process forked later would wait for its threads for ever."""
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
    """Decoders leak memory on such files, and each attempt costs time."""
    opened, look_up = [], clips.look_up

    def count(path, **options):
        opened.append(path)
        return look_up(path, **options)

    monkeypatch.setattr(clips, "look_up", count)
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
    memory = clips.FileMemory()
    for path in ("a", "b", "c", "a", "d"):
        memory[path] = (path.upper(),)
    assert [memory.get(path) for path in "abcd"] == [("A",), None, ("C",), ("D",)]


def test_running_out_of_memory_is_no_bad_file(tmp_path, monkeypatch):
    def greedy(path, choose, stop, size, reader):
        raise MemoryError

    monkeypatch.setattr(clips, "decode_frames", greedy)
    with pytest.raises(MemoryError):
        read_clip("any.mp4", 2, 1, 16, start=None)


@pytest.mark.parametrize("step", ["look_up", "open_container"])
def test_a_file_that_asks_libav_for_too_much_is_a_bad_file(tmp_path, monkeypatch, step):
    """libav raises a MemoryError, too, for an absurd size in a header."""
    path = encode(tmp_path / "clip.avi", grey(8))

    def absurd(*_, **__):
        raise av.error.MemoryError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(clips, step, absurd)
    monkeypatch.setattr(OPENERS["pyav"], "read", absurd)
    says = "not a video that can be decoded" if step == "look_up" else "damaged: Cannot allocate memory"
    with pytest.raises(BadSample, match=says):
        read_clip(str(path), 2, 1, 16, start=None, reader="pyav")
