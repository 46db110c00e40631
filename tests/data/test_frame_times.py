"""Clips read at a rate: frames match a known brightness over time, and windows match a slow search."""

import math
import threading
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opendit.data import build_dataset, clips
from opendit.data.base import BadSample
from opendit.data.captioned_media import TableRow, check_rows, write_csv
from opendit.data.clips import clip_rate, clip_size, read_clip, timed_window, whole_clip
from opendit.data.video_files import READERS, Timeline, problem_of

HERE = [reader for reader in READERS if not problem_of(reader)]
SECONDS, DARK, SLOPE = 3, 20, 70  # a clip's length, its grey at 0, and the grey added each second


def ramp(path, times, base, offset=Fraction(0), bf=2, **options):
    """Write a clip whose grey at time T is DARK + SLOPE * T. times: Fractions of seconds; base: the time unit."""
    with av.open(str(path), "w", **options) as file:
        stream = file.add_stream("libx264", rate=60)
        stream.width, stream.height, stream.pix_fmt = 88, 72, "yuv420p"
        stream.options = {"crf": "3", "bf": str(bf), "g": "12"}
        stream.codec_context.time_base = stream.time_base = base
        for time in times:
            grey = np.full((72, 88, 3), round(DARK + SLOPE * float(time)), np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts, frame.time_base = round((time + offset) / base), base
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def constant(rate):
    return [number / Fraction(rate) for number in range(int(SECONDS * Fraction(rate)))]


FILES = {
    "12": (constant(12), Fraction(1, 12_000)),
    "60": (constant(60), Fraction(1, 60_000)),
    "29.97": (constant(Fraction(30_000, 1001)), Fraction(1, 30_000)),
    "24 in milliseconds": (constant(24), Fraction(1, 1000)),
    "variable": ([Fraction(n, 30) for n in range(30)] + [1 + Fraction(n, 5) for n in range(10)], Fraction(1, 15_360)),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ramps")
    return {name: ramp(folder / f"{name}.mp4", *how) for name, how in FILES.items()}


def times_of(clip):
    """Return the time of each frame, read from its grey level."""
    return ((clip.pixels.float().mean((0, 2, 3)) - DARK) / SLOPE).numpy()


@pytest.mark.parametrize("reader", HERE)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fps", [2, 6, 12, 24, 23.976])
def test_a_frame_is_the_one_shown_at_its_time(files, reader, name, fps):
    times = np.array([float(time) for time in FILES[name][0]])
    with av.open(str(files[name])) as file:
        greys = np.array([frame.to_ndarray(format="rgb24").mean() for frame in file.decode(video=0)])
    assert np.abs((greys - DARK) / SLOPE - times).max() < 0.04  # two grey levels
    for start in (0.0, 0.4, 0.99):
        clip = read_clip(str(files[name]), 4, 1, 72, start=start, fps=fps, reader=reader, as_bytes=True)
        found = clip.pixels.float().mean((0, 2, 3)).numpy()
        due = times[:, None] + np.arange(4) / fps  # for every window that may have been chosen
        shown = greys[np.searchsorted(times, due + 1e-3 + 1e-6, side="right") - 1]
        assert np.abs(found - shown).max(axis=1).min() < 0.01 and not clip.shortened


def test_the_same_motion_at_two_rates_is_one_speed(files):
    """Without --fps the motion in one of the files seems 5 times as fast."""
    slow, fast = (
        times_of(read_clip(str(files[name]), 12, 1, 72, start=0.0, fps=12, as_bytes=True)) for name in ("12", "60")
    )
    assert np.abs(slow - fast).max() < 0.04
    slow, fast = (times_of(read_clip(str(files[name]), 12, 1, 72, start=0.0, as_bytes=True)) for name in ("12", "60"))
    assert abs(slow[-1] / fast[-1] - 5) < 0.4


@pytest.mark.parametrize("ending", ["mkv", "ts"])
def test_times_need_not_begin_at_0(tmp_path, ending):
    times = FILES["variable"][0]
    path = ramp(tmp_path / f"late.{ending}", times, Fraction(1, 90_000), offset=Fraction(7, 2))
    found = times_of(read_clip(str(path), 9, 1, 72, start=0.0, fps=4, as_bytes=True))
    # On the second part of the ramp, frames are 0.2 s apart.
    assert np.abs(found - [0, 0.25, 0.5, 0.75, 1, 1.2, 1.4, 1.6, 2.0]).max() < 0.05


@pytest.mark.parametrize("rate", [12, 60])
def test_clips_too_short_in_seconds(files, rate):
    path = str(files[str(rate)])
    assert read_clip(path, 24, 1, 16, start=None, fps=8).pixels.shape[1] == 24
    with pytest.raises(
        BadSample, match=r"too short: 3\.00 s, 26 frames at --fps 8 need more than 3\.12; --short_clips"
    ):
        read_clip(path, 26, 1, 16, start=None, fps=8)
    clip = read_clip(path, 26, 1, 72, start=None, fps=8, short_clips="interval", as_bytes=True)
    assert clip.shortened and len(times_of(clip)) == 26
    assert np.abs(times_of(clip)[[0, -1]] - [0, SECONDS - 1 / rate]).max() < 0.04
    with pytest.raises(BadSample, match="and it has"):
        read_clip(path, 500, 1, 16, start=None, fps=100, short_clips="interval")


def test_a_rate_and_an_interval(files):
    with pytest.raises(ValueError, match="--fps 8: does not go with --frame_interval 2; leave one of them out"):
        read_clip(str(files["12"]), 4, 2, 16, start=None, fps=8)
    with pytest.raises(ValueError, match="--fps 0: no rate"):
        read_clip(str(files["12"]), 4, 1, 16, start=None, fps=0)


def test_rates_of_files(files):
    found = {name: round(clip_rate(str(path)), 2) for name, path in files.items()}
    assert found == {"12": 12, "60": 60, "29.97": 29.97, "24 in milliseconds": 24.0, "variable": 30}


def test_data_sets_count_and_read_frames_by_time(files, tmp_path):
    rows = [TableRow(files[name], name) for name in ("12", "60", "variable")]
    write_csv(tmp_path / "clips.csv", rows)
    how = dict(seed=0, use_video=True, num_frames=4)
    data = build_dataset(str(tmp_path / "clips.csv"), 16, fps=8, **how)
    assert data.shapes().media()[:, 0].tolist() == [24, 24, 23] and "8 frames a second" in data.describe().text
    every = build_dataset(str(tmp_path / "clips.csv"), 16, **how)
    assert every.shapes().media()[:, 0].tolist() == [36, 180, 40]
    assert every.shapes().frame_rate() == pytest.approx(30, rel=1e-3)
    kept, _, dropped = check_rows(rows, num_frames=23, fps=8, num_workers=1)
    assert len(kept) == 3
    kept, _, dropped = check_rows(rows, num_frames=26, fps=8, num_workers=1)
    assert not kept and "3.00 s, needs 26 frames at 8 a second" in dropped["too short"][0]


# ---------------------------------------------------------------- the oracle


def naive(seconds, num_frames, fps):
    """Return the frames of every window. A window begins at a frame and has its last time before the clip's end."""
    slack = 1e-3 + 1e-6
    gaps = sorted(b - a for a, b in zip(seconds, seconds[1:], strict=False))
    middle = 0.0 if not gaps else (gaps[(len(gaps) - 1) // 2] + gaps[len(gaps) // 2]) / 2
    windows = []
    for first in seconds:
        due = [first + k / fps for k in range(num_frames)]
        if num_frames > 1 and due[-1] >= seconds[-1] + middle - slack:
            continue
        windows.append([max(i for i, time in enumerate(seconds) if time <= each + slack) for each in due])
    return windows


timelines = st.tuples(st.floats(-10, 10), st.lists(st.integers(2, 400), max_size=40)).map(
    lambda made: Timeline(made[0] + np.cumsum([0, *made[1]]) / 1000)
)


@settings(max_examples=300, deadline=None)
@given(timelines, st.integers(1, 20), st.sampled_from([0.7, 1, 4, 12, 23.976, 30, 59.94, 240]))
@example(Timeline(np.arange(72) / 24), 72, 24)
@example(Timeline(np.round(np.arange(72) / 24, 3)), 72, 24)
def test_windows_are_those_of_the_oracle(timeline, num_frames, fps):
    expected = naive(timeline.seconds.tolist(), num_frames, fps)
    if not expected:
        assert timed_window(timeline, num_frames, fps, 0.5) is None and timeline.count(fps) < num_frames
        return
    assert timeline.count(fps) >= num_frames or num_frames == 1
    for place, window in enumerate(expected):
        assert timed_window(timeline, num_frames, fps, (place + 0.5) / len(expected)) == window
    assert timed_window(timeline, num_frames, fps, None) == expected[(len(expected) - 1) // 2]
    assert timed_window(timeline, num_frames, fps, math.nextafter(1, 0)) == expected[-1]


@given(timelines, st.integers(1, 20))
def test_a_whole_clip_goes_from_its_first_frame_to_its_last(timeline, num_frames):
    found = whole_clip(timeline, num_frames)
    assert found[0] == 0 and found == sorted(found) and len(found) == num_frames
    assert num_frames == 1 or found[-1] == len(timeline.seconds) - 1


def test_sizes_count_what_can_be_read(files):
    for name, path in files.items():
        for fps in (3, 12.5, 48):
            most = clip_size(str(path), count=lambda timeline, fps=fps: timeline.count(fps))[0]
            assert read_clip(str(path), most, 1, 8, start=0.7, fps=fps).pixels.shape[1] == most, name
            with pytest.raises(BadSample, match="too short"):
                read_clip(str(path), most + 1, 1, 8, start=0.7, fps=fps)


def test_frames_that_are_asked_for_twice(files):
    for reader in HERE:
        found = clips.decode_frames(str(files["60"]), lambda _: [5, 5, 9, 9, 9], threading.Event(), reader=reader)
        assert np.array_equal(found[0], found[1]) and np.array_equal(found[2], found[4])
        assert not np.array_equal(found[1], found[2])
