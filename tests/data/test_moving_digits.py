"""The video demo's clips show what they should, survive H.264, and are the same when made twice."""

import json

import av
import numpy as np
import pytest
import torch

from opendit.data.captioned_media import read_table
from opendit.data.digits import DIGIT_NAMES, DIRECTIONS, caption, digits_split, make_demo, parse_caption, render
from opendit.data.video_files import write_mp4

PAIRS = [(digit, direction) for digit in range(10) for direction in DIRECTIONS]


def read(path):
    with av.open(str(path)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def centroids(clip):
    """Return (T, 2), the x and y of the mean of the light."""
    light = clip[..., 0].astype(float)
    total = light.sum((1, 2))
    x, y = np.arange(clip.shape[2]), np.arange(clip.shape[1])
    return np.stack([(light * x).sum((1, 2)) / total, (light * y[:, None]).sum((1, 2)) / total], 1)


def test_captions_can_be_read_back():
    assert caption(7, "left") == "a seven moving left" and caption(8, "up") == "an eight moving up"
    assert len({caption(*pair) for pair in PAIRS}) == 40
    assert all(parse_caption(caption(*pair)) == pair for pair in PAIRS)
    assert parse_caption("A  Eight moving DOWN ") == (8, "down")
    for text in ("", "a seven", "a seven moving", "a ten moving left", "the seven moving left", "a two moving on"):
        with pytest.raises(ValueError, match="isn't like"):
            parse_caption(text)
    for pair in ((10, "left"), (-1, "left"), (3, "north")):
        with pytest.raises(ValueError):
            caption(*pair)


@pytest.mark.parametrize("digit", range(10))
def test_digits_move_as_named_and_stay_in_view(digit):
    """Every step goes in the named direction by the same distance, and no light leaves the frame."""
    images, labels = digits_split("train")
    image = images[labels == digit][3, 0]
    lights = []
    for seed, (name, direction) in enumerate(DIRECTIONS.items()):
        clip = render(image, name, 48, 64, jitter_seed=seed)
        assert clip.shape == (48, 64, 64, 3) and clip.dtype == np.uint8 and clip.max() > 200
        along = np.diff(centroids(clip), axis=0)
        speed = along @ np.array(direction)
        assert speed.min() > 0.4 and np.allclose(speed, 24 / 47, atol=0.06)
        assert np.abs(along @ np.array(direction[::-1])).max() < 0.03
        lights.append(clip[..., 0].astype(float).sum((1, 2)))
    lights = np.concatenate(lights)
    assert lights.max() / lights.min() < 1.02  # a pixel column outside of the frame would show


def test_the_offset_across_the_motion_is_drawn_and_small():
    image = digits_split("train")[0][0, 0]
    clips = [render(image, "right", 8, 64, jitter_seed=seed) for seed in range(20)]
    y = np.array([centroids(clip)[0, 1] for clip in clips])
    assert 8 < np.ptp(y) <= 16.1
    assert np.array_equal(clips[3], render(image, "right", 8, 64, jitter_seed=3))


def test_odd_sizes_single_frames_and_mistakes():
    image = digits_split("train")[0][0, 0]
    assert render(image, "up", 1, 33, jitter_seed=0).shape == (1, 33, 33, 3)
    for bad in ((image[:7], "up", 4, 64), (image, "north", 4, 64), (image, "up", 0, 64), (image, "up", 4, 4)):
        with pytest.raises(ValueError, match="can't draw"):
            render(*bad, jitter_seed=0)


def test_mp4_keeps_the_pictures(tmp_path):
    """Brightness and colours come back in order, within the codec's error."""
    image = digits_split("train")[0][5, 0]
    clip = render(image, "right", 24, 64, jitter_seed=1)
    write_mp4(tmp_path / "a" / "digit.mp4", clip, 24)
    back = read(tmp_path / "a" / "digit.mp4")
    assert back.shape == clip.shape and np.abs(back.astype(int) - clip).mean() < 2
    with av.open(str(tmp_path / "a" / "digit.mp4")) as file:
        assert file.streams.video[0].average_rate == 24
    colours = np.array([[200, 60, 30], [20, 180, 90], [10, 30, 220]], np.uint8)
    flat = np.broadcast_to(colours[:, None, None], (3, 720, 1280, 3)).copy()  # too large for readers to assume BT.601
    write_mp4(tmp_path / "flat.mp4", flat, 29.97)
    assert np.abs(read(tmp_path / "flat.mp4").astype(int) - flat).max() <= 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "flat.mp4"]


def test_odd_sizes_grow_by_a_copy_of_the_edge(tmp_path):
    frames = np.zeros((2, 33, 41, 3), np.uint8)
    frames[:, -1], frames[:, :, -1] = 255, 255
    write_mp4(tmp_path / "odd.mp4", frames, 8)
    back = read(tmp_path / "odd.mp4")
    assert back.shape == (2, 34, 42, 3)
    assert back[:, -2:].min() > 200 and back[:, :, -2:].min() > 200 and back[:, :30, :38].max() < 40


def test_what_is_no_clip_is_refused(tmp_path):
    good = np.zeros((2, 8, 8, 3), np.uint8)
    for frames in (good[0], good[..., 0], good[..., :2], good[:0], good.astype(float), torch.from_numpy(good)):
        with pytest.raises(ValueError, match="a clip "):
            write_mp4(tmp_path / "bad.mp4", frames, 8)
    with pytest.raises(ValueError, match="fps"):
        write_mp4(tmp_path / "bad.mp4", good, 0)
    assert not list(tmp_path.iterdir())


def test_the_demo_is_balanced_the_same_again_and_resumed(tmp_path):
    table = make_demo(tmp_path / "one", clips=80, size=20, frames=6)
    rows = read_table(table)
    assert table == tmp_path / "one" / "demo.csv" and len(rows) == 80
    assert sorted(parse_caption(row.text) for row in rows) == sorted(PAIRS * 2)
    assert table.read_text().splitlines()[1] == "clips/00000-zero-left.mp4,a zero moving left"
    contents = {row.path.name: row.path.read_bytes() for row in rows}
    for row in rows[:40:7]:
        step = np.diff(centroids(read(row.path)), axis=0) @ np.array(DIRECTIONS[parse_caption(row.text)[1]])
        assert step.min() > 0 and DIGIT_NAMES[parse_caption(row.text)[0]] in row.path.name

    kept = {row.path: row.path.stat().st_mtime_ns for row in rows[1:]}
    rows[0].path.unlink()
    make_demo(tmp_path / "one", clips=80, size=20, frames=6)
    assert {row.path.name: row.path.read_bytes() for row in rows} == contents
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())

    other = read_table(make_demo(tmp_path / "other", clips=3, size=20, frames=6, seed=1))
    assert [row.path.name for row in other] == list(contents)[:3]
    assert all(row.path.read_bytes() != contents[row.path.name] for row in other)


def test_a_demo_of_other_settings_is_not_mixed_in(tmp_path):
    make_demo(tmp_path, clips=1, size=16, frames=2)
    with pytest.raises(ValueError, match="--output .*: holds a demo of other settings \\(size 16 there, 18 now\\)"):
        make_demo(tmp_path, clips=1, size=18, frames=2)
    assert json.loads((tmp_path / "demo.json").read_text())["size"] == 16
