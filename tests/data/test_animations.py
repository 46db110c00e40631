"""Animated GIF, WebP, APNG and AVIF are read as clips with the frames that Pillow and FFmpeg show."""

import io
import struct
import tempfile
import threading
import time
import zlib

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageSequence, features

from opendit.data import SampleKey, build_dataset, captioned_media, clips, video_files
from opendit.data.base import BadSample
from opendit.data.captioned_media import read_table
from opendit.data.clips import open_clip
from opendit.data.picture_file import is_animated, is_animation, read_picture
from opendit.data.pictures_and_clips import file_size
from opendit.data.shards.index import TarIndex, index_of
from opendit.data.shards.program import make_indexes
from opendit.data.video_files import AnimationReader
from opendit.evaluation.media import MediaOptions, open_media
from tests.data.shards.tars import picture, write_tar
from tests.data.test_picture_colours import by_pillow, display_p3

KINDS = ["gif", "webp", "png", "apng", *(["avif"] if features.check("avif") else [])]


def frames_of(count=6, width=40, height=32, seed=0):
    """Return frames with smooth colours, transparent except for a moving box."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    found = []
    for number in range(count):
        pixels = np.stack([x * 6, y * 7, np.full_like(x, 40 * number), np.zeros_like(x)], -1).clip(0, 255)
        left, top = random.integers(0, width - 12), random.integers(0, height - 12)
        pixels[top : top + 12, left : left + 12, 3] = 255
        found.append(Image.fromarray(pixels.astype(np.uint8)))
    return found


def save(path, frames=None, duration=40, **options):
    frames = frames or frames_of()
    kind = {"gif": "GIF", "webp": "WEBP", "avif": "AVIF"}.get(path.suffix[1:], "PNG")
    options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 90}}.get(kind, {}) | options
    frames[0].save(path, kind, save_all=True, append_images=frames[1:], duration=duration, loop=0, **options)
    return path


def shown(path):
    """Return all frames on white, composed by Pillow."""
    found = []
    with Image.open(path) as image:
        for frame in ImageSequence.Iterator(image):
            rgba = frame.convert("RGBA")
            below = Image.new("RGBA", rgba.size, "white")
            below.alpha_composite(rgba)
            found.append(np.asarray(below.convert("RGB")))
    return np.stack(found)


def read(path, indices, size=None):
    lengths = []

    def choose(timeline):
        lengths.append(len(timeline.seconds))
        return indices

    return clips.decode_frames(str(path), choose, threading.Event(), size), lengths[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("disposal", [0, 1, 2, 3])
def test_frames_are_composed_as_shown(tmp_path, kind, disposal):
    if disposal and kind in ("webp", "avif"):
        pytest.skip("chosen by the encoder")
    if disposal == 3 and kind != "gif":
        pytest.skip("GIF's alone")
    options = {"disposal": disposal if kind == "gif" else max(0, disposal - 1)} if kind in ("gif", "png") else {}
    path = save(tmp_path / f"a.{kind}", **options)
    wanted = shown(path)
    for indices in ([0, 1, 2], [1, 3, 5], [5], [4, 5]):
        found, length = read(path, indices)
        assert length == len(wanted) == 6
        assert np.abs(found.astype(int) - wanted[indices]).max() <= 1, indices
    assert file_size(str(path), False) == (6, 32, 40)


@pytest.mark.parametrize("codec, ending", [("gif", "gif"), ("apng", "apng")])
def test_frames_are_those_of_ffmpeg(tmp_path, codec, ending):
    """FFmpeg encodes the file, storing only the parts that change, and decodes it as the reference."""
    path, pictures = tmp_path / f"a.{ending}", [np.asarray(frame.convert("RGB")) for frame in frames_of(seed=3)]
    form = {"gif": "rgb8", "apng": "rgb24"}[codec]
    with av.open(str(path), "w", format=codec) as file:
        stream = file.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 40, 32, form
        for pixels in pictures:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=form)))
        file.mux(stream.encode())
    with av.open(str(path)) as file:
        wanted = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
    found, length = read(path, list(range(6)))
    assert length == 6 and np.array_equal(found, wanted)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["gif", "webp", "png"]),
    st.lists(st.integers(2, 90), min_size=2, max_size=7),
    st.integers(0, 2),
    st.integers(1, 60),
    st.booleans(),
)
def test_numbers_and_times_are_pillow_s(kind, tens, disposal, side, opaque):
    random = np.random.default_rng(side)
    pixels = random.integers(0, 256, (len(tens), side, side + 1, 4), dtype=np.uint8)
    pixels[..., 3] = 255 if opaque else pixels[..., 3] // 128 * 255
    frames, file = [Image.fromarray(each) for each in pixels], io.BytesIO()
    options = {"disposal": disposal} if kind != "webp" else {}
    duration = [10 * each for each in tens]
    frames[0].save(file, kind.upper(), save_all=True, append_images=frames[1:], duration=duration, **options)
    with Image.open(file) as image:
        count = image.n_frames
        wanted = []
        for number in range(count):
            image.seek(number)
            image.load()
            wanted.append(image.info["duration"] / 1000)
    assert is_animated(file) == (count > 1)
    if count > 1:
        with tempfile.NamedTemporaryFile() as copy:
            copy.write(file.getvalue())
            copy.flush()
            reader = AnimationReader(copy.name, 2**26)
            assert reader.durations.tolist() == pytest.approx(wanted)
            times = reader.timeline().seconds
            assert times[0] == 0 and np.diff(times).tolist() == pytest.approx(wanted[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_times_of_each_frame(tmp_path, kind):
    path = save(tmp_path / f"a.{kind}", duration=[50, 50, 500, 30, 200, 1000])
    reader = AnimationReader(str(path), 2**26)
    assert reader.durations.tolist() == pytest.approx([0.05, 0.05, 0.5, 0.03, 0.2, 1])
    assert reader.timeline().seconds.tolist() == pytest.approx([0, 0.05, 0.1, 0.6, 0.63, 0.83])
    medium, frames = open_clip(str(path))
    assert (medium.frames, len(frames)) == (6, 3) and medium.fps == pytest.approx(20)  # from the median distance


def test_windows_by_time_take_the_frames_that_are_shown(tmp_path):
    path = save(tmp_path / "a.gif", frames_of(8), duration=[50, 50, 50, 50, 500, 500, 20, 300])
    wanted = shown(path)[[0, 2, 4, 4, 4, 4]]
    found = clips.read_clip(str(path), 6, 1, (32, 40), start=0.0, fps=10.0, as_bytes=True).pixels
    assert np.abs(found.permute(1, 2, 3, 0).numpy().astype(int) - wanted).max() <= 1


def test_frames_too_short_to_be_seen_take_what_browsers_give_them(tmp_path):
    save(tmp_path / "a.gif", duration=[0, 10, 20, 30, 40, 50])
    assert AnimationReader(str(tmp_path / "a.gif"), 2**26).durations.tolist() == [0.1, 0.1, 0.02, 0.03, 0.04, 0.05]


def test_a_png_s_picture_for_old_viewers_is_no_frame(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue", "white")]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:], default_image=True, duration=100)
    found, length = read(tmp_path / "a.png", [0, 1, 2])
    assert length == 3
    assert found[:, 0, 0].tolist() == [[0, 128, 0], [0, 0, 255], [255, 255, 255]]


def test_profiles_and_turns_of_animations_are_those_of_pictures(tmp_path):
    frames = [Image.fromarray(np.random.default_rng(n).integers(0, 256, (8, 12, 3), dtype=np.uint8)) for n in range(3)]
    save(tmp_path / "a.png", frames, icc_profile=display_p3())
    found, _ = read(tmp_path / "a.png", [0, 1, 2])
    assert np.array_equal(found, np.stack([by_pillow(frame, display_p3()) for frame in frames]))
    exif = Image.Exif()
    exif[274] = 6
    save(tmp_path / "b.webp", frames, exif=exif)
    found, _ = read(tmp_path / "b.webp", [0, 2])
    assert np.array_equal(found, np.rot90(np.stack([np.asarray(frames[n]) for n in (0, 2)]), -1, (1, 2)))
    assert file_size(str(tmp_path / "b.webp"), False) == (3, 12, 8)


# ---------------------------------------------------------------- folders, tables and tars


@pytest.fixture
def folder(tmp_path):
    """Write animations and still pictures of every kind, and a CSV of them."""
    for kind in KINDS:
        save(tmp_path / f"moving.{kind}")
        if kind != "apng":
            still = frames_of()[0].convert("RGB")
            still.save(tmp_path / f"still.{kind}")
    (tmp_path / "moving").write_bytes((tmp_path / "moving.gif").read_bytes())  # no suffix
    save(tmp_path / "named.mp4".replace("mp4", "gif")).rename(tmp_path / "named.mp4")  # a wrong suffix
    names = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "all.csv").write_text("path,text\n" + "".join(f"{name},a {name}\n" for name in names))
    return tmp_path


def test_tables_tell_animations_from_pictures(folder):
    for row in read_table(folder / "all.csv"):
        assert row.is_picture == row.path.name.startswith("still"), row.path
        assert is_animation(row.path) != row.is_picture


def test_a_run_on_clips_reads_them(folder):
    data = build_dataset(str(folder / "all.csv"), 16, seed=0, use_video=True, num_frames=4, split="test")
    assert f"{len(KINDS) + 2} clips and {len(KINDS) - 1} pictures" in data.describe().text
    for row in range(len(data)):
        name = data.source(row)
        x = data.read(row).x
        if "still" in name:
            assert x.shape == (3, 1, 16, 16) and data.media_size(row)[0] == 1
            continue
        assert x.shape == (3, 4, 16, 16) and data.media_size(row) == (6, 32, 40)
        wanted = torch.from_numpy(np.array(shown(name)[1:5]))
        assert (x - clips.resize_and_crop(wanted, 16)).abs().max() < 0.02


def test_a_run_on_pictures_takes_the_first_frame(folder):
    data = build_dataset(str(folder / "all.csv"), 32, seed=0, use_video=False)
    assert len(data) == 2 * len(KINDS)  # all but the one that is named .mp4
    row = next(row for row in range(len(data)) if data.source(row).endswith("moving.png"))
    assert np.array_equal(np.asarray(read_picture(data.source(row))), shown(folder / "moving.png")[0])


def test_tars_hold_the_same(folder):
    (folder / "tars").mkdir()
    rows = [row for row in read_table(folder / "all.csv") if row.path.suffix]
    members = []
    for number, row in enumerate(rows):
        members += [(f"{number:03d}{row.path.suffix}", row.path.read_bytes()), (f"{number:03d}.txt", row.text.encode())]
    write_tar(folder / "tars" / "0.tar", members)
    make_indexes(str(folder / "tars"), num_workers=1)
    lines = "".join(f"{row.path},{row.text}\n" for row in rows)
    (folder / "some.csv").write_text("path,text\n" + lines)
    for use_video in (True, False):
        options = dict(seed=1, use_video=use_video, num_frames=3, split="train")
        tars, files = (build_dataset(str(folder / name), 16, **options) for name in ("tars", "some.csv"))
        assert len(tars) == len(files)
        for row in range(len(files)):
            assert torch.equal(tars[SampleKey(row, 2, row)].x, files[SampleKey(row, 2, row)].x), files.source(row)
            assert tars.shapes().key(row) == files.shapes().key(row)
            assert tars.source(row).endswith(files.source(row)[-4:])
        assert use_video is False or np.array_equal(tars.shapes().media(), files.shapes().media())


def test_an_index_of_before_does_not_make_stills_of_animations(folder, monkeypatch):
    (folder / "tars").mkdir()
    members = [("0.gif", (folder / "moving.gif").read_bytes()), ("0.txt", b"x"), ("1.png", picture(1)), ("1.txt", b"y")]
    members += [("2.mp4", (folder / "named.mp4").read_bytes()), ("2.txt", b"z")]
    write_tar(folder / "tars" / "0.tar", members)
    from opendit.data.shards import index as scan

    monkeypatch.setattr(scan, "ANIMATION_SUFFIXES", frozenset())
    make_indexes(str(folder / "tars"), num_workers=1)
    data = build_dataset(str(folder / "tars"), 16, seed=0, use_video=True, num_frames=3)
    with pytest.raises(BadSample, match=r"0.tar: 0.gif: an animation that is taken for a picture; run preprocess"):
        data.read(0)
    assert data.read(1).x.shape == (3, 1, 16, 16)
    monkeypatch.undo()
    before = data.fingerprint().identity
    index_of(folder / "tars" / "0.tar").unlink()
    make_indexes(str(folder / "tars"), num_workers=1)
    data = build_dataset(str(folder / "tars"), 16, seed=0, use_video=True, num_frames=3)
    assert data.read(0).x.shape == (3, 3, 16, 16) and data.fingerprint().identity != before
    assert TarIndex(index_of(folder / "tars" / "0.tar")).header.pictures == 1


def test_check_and_folder_count_them_as_clips(folder, capsys):
    captioned_media.check(str(folder / "all.csv"), str(folder / "kept.csv"), num_frames=4)
    told = capsys.readouterr().out
    assert "dropped 0" in told and "frame rate" in told and "25.00" in told
    captioned_media.check(str(folder / "all.csv"), str(folder / "kept.csv"), num_frames=7)
    assert f"too short: {len(KINDS) + 2} " in capsys.readouterr().out
    (folder / "root" / "sub").mkdir(parents=True)
    for name in ("moving.gif", "moving.webp", "still.gif"):
        (folder / "root" / "sub" / name).write_bytes((folder / name).read_bytes())
    captioned_media.make("folder", str(folder / "root"), str(folder / "found.csv"))
    assert "2 clips and 1 pictures with captions" in capsys.readouterr().out


def test_evaluation_reads_a_folder_of_animations_as_clips(tmp_path):
    for number in range(3):
        save(tmp_path / f"{number}.gif", frames_of(seed=number))
    media = open_media(tmp_path, "--samples", MediaOptions(image_size=16, num_frames=4))
    assert media.clips and media.read(1).shape == (4, 16, 16, 3)
    Image.new("RGB", (8, 8)).save(tmp_path / "still.gif")
    with pytest.raises(ValueError, match="pictures and clips"):
        open_media(tmp_path, "--samples", MediaOptions(image_size=16, num_frames=4))


# ---------------------------------------------------------------- untrusted files


def test_damaged_and_absurd_animations_are_bad_samples(tmp_path, monkeypatch):
    data = save(tmp_path / "a.gif").read_bytes()
    for cut in (14, 60, len(data) // 2, len(data) - 40):
        (tmp_path / "cut.gif").write_bytes(data[:cut])
        with pytest.raises(BadSample):
            read(tmp_path / "cut.gif", [0, 5])
    still = Image.new("RGB", (8, 8))
    still.save(tmp_path / "still.png")
    with pytest.raises(BadSample, match="a still picture, not a clip"):
        read(tmp_path / "still.png", [0])
    # The canvas has 65,535 x 65,535 pixels, and the file one pixel a frame.
    bomb = bytearray(data)
    bomb[6:10] = struct.pack("<HH", 65535, 65535)
    (tmp_path / "bomb.gif").write_bytes(bomb)
    with pytest.raises(BadSample, match="pixels, more than"):
        read(tmp_path / "bomb.gif", [0])
    bomb[6:10] = struct.pack("<HH", 12000, 8000)
    (tmp_path / "bomb.gif").write_bytes(bomb)
    for look in (lambda: read(tmp_path / "bomb.gif", [0]), lambda: file_size(str(tmp_path / "bomb.gif"), False)):
        with pytest.raises(BadSample, match="frames of 12,000 x 8,000 pixels"):
            look()


def test_what_lies_beyond_the_canvas_is_cut_off(tmp_path):
    frames = [Image.new("RGB", (16, 16), "red"), Image.new("RGB", (16, 16), "red")]
    frames[1].paste("blue", (4, 4, 12, 12))
    data = bytearray(save(tmp_path / "a.gif", frames).read_bytes())
    at = data.index(b"!\xf9\x04", data.index(b"!\xf9\x04") + 1) + 8
    assert data[at : at + 3] == b",\x04\0"  # the second picture begins at 4
    data[at + 1] = 10
    (tmp_path / "b.gif").write_bytes(data)
    found, length = read(tmp_path / "b.gif", [0, 1])
    assert length == 2 and found.shape == (2, 16, 16, 3)
    assert (found[1, 4:12, 10:] == [0, 0, 255]).all() and (found[1, :, :10] == found[0, 0, 0]).all()


def test_an_animation_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    path = save(tmp_path / "a.webp")
    monkeypatch.setattr(video_files, "TIME_LIMIT", -1.0)
    with pytest.raises(BadSample, match="not read within"):
        AnimationReader(str(path), 2**26)
    monkeypatch.setattr(video_files, "TIME_LIMIT", 60.0)
    reader = AnimationReader(str(path), 2**26)
    clock = iter([0.0, *np.arange(50.0, 1000, 5)])  # at opening, and at every later look
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with pytest.raises(BadSample, match="not read within 60 seconds"):
        reader.read([5])


def test_a_png_that_says_it_has_more_frames_than_it_has(tmp_path):
    data = save(tmp_path / "a.png").read_bytes()
    at = data.index(b"acTL")
    for said in (2**31, 1000, 4):
        body = struct.pack(">II", said, 0)
        patched = data[: at + 4] + body + struct.pack(">I", zlib.crc32(b"acTL" + body)) + data[at + 16 :]
        (tmp_path / "b.png").write_bytes(patched)
        if said > 6:
            with pytest.raises(BadSample):
                read(tmp_path / "b.png", [0, 3])
        else:
            found, length = read(tmp_path / "b.png", [0, 3])
            assert length == 4 and np.array_equal(found, shown(tmp_path / "a.png")[[0, 3]])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["gif", "webp", "png"]), st.integers(0, 10_000), st.binary(min_size=1, max_size=6))
def test_damage_is_frames_or_a_bad_sample(kind, at, damage):
    file = io.BytesIO()
    frames = frames_of(3, 16, 16)
    frames[0].save(file, kind.upper(), save_all=True, append_images=frames[1:], duration=40)
    data = bytearray(file.getvalue())
    at = 14 + at % (len(data) - 14)
    data[at : at + len(damage)] = damage
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(data)
        copy.flush()
        is_animation(copy.name)
        try:
            reader = AnimationReader(copy.name, 2**22)
            reader.timeline()
            assert reader.read([0, reader.length - 1]).shape[0] == 2
        except BadSample as bad:
            assert str(bad).startswith(copy.name)
