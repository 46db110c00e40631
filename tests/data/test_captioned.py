"""CSVs of captioned pictures and clips are read through data set, schedule and loader."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from opendit.data import (
    BatchSchedule,
    BucketSchedule,
    CaptionedDataset,
    DataError,
    SampleKey,
    build_dataset,
    build_loader,
    build_schedule,
    captioned_media,
)
from opendit.data.base import View
from opendit.data.captioned_media import TableRow
from opendit.data.clips import clip_window
from opendit.diffusion.random import Stream, uniform
from tests.data.test_clips import encode, grey, numbers

CLIPS, PICTURES = 14, 11


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    """Write clips and pictures that alternate until the pictures end. Captions contain the file's name."""
    folder = tmp_path_factory.mktemp("media")
    for i in range(CLIPS):
        encode(folder / f"clip{i}.mp4", grey(20 + i))
    for i in range(PICTURES):
        Image.new("RGB", (40, 30), (i * 20, 0, 0)).save(folder / f"picture{i}.png")
    names = [f"picture{i}.png" for i in range(PICTURES)]
    for i in range(CLIPS):
        names.insert(min(2 * i, len(names)), f"clip{i}.mp4")
    (folder / "media.csv").write_text("path,text\n" + "".join(f'{n},"a, {n}"\n' for n in names))
    return folder / "media.csv"


def video(csv, **options):
    return CaptionedDataset(csv, 16, **{"seed": 3, "num_frames": 4, "frame_interval": 2, "use_video": True, **options})


def rewrite(csv, name, change):
    """Write a copy of the CSV with each line changed, or left out where ``change`` returns None."""
    lines = [change(line) for line in csv.read_text().splitlines()[1:]]
    (csv.parent / name).write_text("\n".join(line for line in lines if line is not None))
    return csv.parent / name


# ---------------------------------------------------------------- the data set


def test_pictures_and_clips(csv):
    data = video(csv)
    assert (
        data.describe().conditioning == "text"
        and data.describe().num_classes == 0
        and data.sample_shape == (3, 4, 16, 16)
    )
    assert len(data) == CLIPS + PICTURES
    items = data.__getitems__([SampleKey(row, 7, row) for row in range(len(data))])
    starts = uniform(3, 7, torch.arange(len(data)), Stream.CROP).tolist()
    for row, item in enumerate(items):
        kind, name = data.shapes().key(row), item.text.removeprefix("a, ")
        assert item.text == data.caption(row) and item.y == 0 and item.skipped == ()
        if kind == 0:
            assert item.x.shape == (3, 1, 16, 16)
            assert name == f"picture{round((item.x[0].mean().item() + 1) * 127.5 / 20)}.png"
        else:
            length = 20 + int(name.removeprefix("clip").removesuffix(".mp4"))
            assert numbers(item.x) == clip_window(length, 4, 2, starts[row])
    assert "14 clips and 11 pictures with captions, 3x4x16x16, frame interval 2, read by " in data.describe().text
    assert f"read by {data.video_reader} ({data.why_reader}), not mirrored" in data.describe().text


def test_windows_are_drawn_for_each_sample_in_training_only(csv):
    row = int(np.flatnonzero(video(csv).keys)[-1])
    trained = {tuple(numbers(video(csv)[SampleKey(row, step, 0)].x)) for step in range(30)}
    assert len(trained) > 8
    middle = clip_window(20 + CLIPS - 1, 4, 2, None)
    evaluated = video(csv, training=False)
    assert {tuple(numbers(evaluated[SampleKey(row, step, 0)].x)) for step in range(5)} == {tuple(middle)}
    assert numbers(video(csv).read(row).x) == middle


def test_pictures_only(csv):
    data = CaptionedDataset(csv, 16, seed=0)
    assert len(data) == PICTURES and data.sample_shape == data[SampleKey(0, 0, 0)].x.shape == (3, 16, 16)
    assert [data.caption(row) for row in range(PICTURES)] == [f"a, picture{i}.png" for i in range(PICTURES)]
    assert "11 pictures with captions (14 clips left out: no --use_video), 3x16x16" in data.describe().text
    clips = rewrite(csv, "clips.csv", lambda line: line if "mp4" in line else None)
    with pytest.raises(ValueError, match="clips.csv: holds clips only; add --use_video"):
        CaptionedDataset(clips, 16, seed=0)


def test_mirroring_is_off_unless_asked_for(csv):
    plain, mirrored = video(csv), video(csv, random_flip=True)
    assert not plain.random_flip and "randomly mirrored" in mirrored.describe().text
    ramp = np.broadcast_to(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (64, 64, 3))
    encode(csv.parent / "ramp.mp4", [ramp] * 8)
    Image.fromarray(ramp).save(csv.parent / "ramp.png")
    (csv.parent / "ramp.csv").write_text("ramp.mp4,x\nramp.png,y")
    data = video(csv.parent / "ramp.csv", random_flip=True)
    for row in (0, 1):
        assert torch.equal(data.read(row, View(flip=True)).x, data.read(row).x.flip(-1))
    assert len({data[SampleKey(0, step, 0)].x[0, 0, 0, 0].item() > 0 for step in range(12)}) == 2


def test_a_bad_row_is_replaced_by_the_next_of_its_shape(csv):
    (csv.parent / "text.mp4").write_text("no clip")
    (csv.parent / "text.png").write_text("no picture")
    (csv.parent / "bad.csv").write_text(
        "clip0.mp4,zero\npicture0.png,one\ntext.mp4,two\ntext.png,three\npicture1.png,four\nclip1.mp4,five\ntext.png,six"
    )
    data = video(csv.parent / "bad.csv", max_bad=0.5)
    assert [data.next_row(row) for row in range(7)] == [2, 3, 5, 4, 6, 0, 1]
    for row, text in ((2, "five"), (3, "four"), (6, "one")):
        item = data[SampleKey(row, 0, 0)]
        assert item.text == text and item.x.shape[1] == (4 if data.shapes().key(row) else 1)
        assert len(item.skipped) == 1 and data.paths[row] in item.skipped[0]
    with pytest.raises(DataError, match="3 files in turn can't be read: .*clip0.mp4: too short: 20 frames"):
        video(csv.parent / "bad.csv", num_frames=30, max_bad=0.5)[SampleKey(2, 0, 0)]


def test_short_clips_can_be_read_at_a_smaller_interval(csv):
    data = video(csv, num_frames=16, frame_interval=3, short_clips="interval", training=False)
    clip = next(row for row in range(len(data)) if data.caption(row) == "a, clip0.mp4")
    item = data.read(clip)
    assert numbers(item.x) == clip_window(20, 16, 1, None) and item.shortened
    with pytest.raises(ValueError, match="--short_clips both"):
        video(csv, short_clips="both")
    with pytest.raises(ValueError, match="--frame_interval 0: not positive"):
        video(csv, frame_interval=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_clips_read_at_a_smaller_interval_are_counted(csv, workers):
    """Among clips of 20 to 33 frames, those below 22 are too short for 8 frames at interval 3."""
    only = rewrite(csv, "only.csv", lambda line: line if "clip" in line else None)
    for short_clips, shortened, skipped in (("interval", 2, 0), ("skip", 0, 2)):
        data = video(only, num_frames=8, frame_interval=3, short_clips=short_clips, max_bad=0.5)
        schedule = BatchSchedule(CLIPS, CLIPS // 2, 0)
        options = dict(dp_rank=0, dp_size=1, batch_size=CLIPS // 2, num_workers=workers, max_bad=0.5, end_step=4)
        loader = build_loader(data, schedule, **options)
        batches = list(loader)
        loader.close()
        assert loader.shortened == 2 * shortened == sum(batch.shortened for batch in batches)  # in two epochs
        assert loader.skipped >= 2 * skipped and bool(loader.skipped) == bool(skipped)
        assert ("(smaller where a clip is too short)" in data.describe().text) == (short_clips == "interval")


def test_media_without_a_known_suffix(tmp_path, monkeypatch):
    encode(tmp_path / "clip.mp4", grey(20)).rename(tmp_path / "clip")
    encode(tmp_path / "clip.dat.mp4", grey(20)).rename(tmp_path / "clip.dat")
    names, formats = ["clip", "clip.dat"], ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF"]
    for i, name in enumerate(formats):
        path = tmp_path / (f"picture{i}.dat" if i % 2 else f"picture{i}")
        Image.new("RGB", (40, 30), (200, 0, 0)).save(path, format=name)
        names.append(path.name)
    (tmp_path / "media.csv").write_text("".join(f"{name},{name}\n" for name in [*names, "gone.dat"]))
    data = video(tmp_path / "media.csv", max_bad=0.5)
    assert [data.shapes().key(row) for row in range(len(names) + 1)] == [1, 1, *[0] * len(formats), 1]
    for row in range(len(names)):
        frames = data.read(row).x
        assert frames.shape[1] == (4 if row < 2 else 1) and (row < 2 or abs(frames[0].mean() - 0.57) < 0.03)
    os.mkfifo(tmp_path / "pipe")  # opening it would take for ever
    assert not TableRow(tmp_path / "pipe", "x").is_picture


def test_known_suffixes_are_believed_without_a_look_at_the_file(csv, monkeypatch):
    monkeypatch.setattr(captioned_media, "first_bytes", lambda path, count: pytest.fail(f"{path} was opened"))
    assert video(csv).keys.tolist().count(0) == PICTURES
    assert not TableRow(Path("CLIP.MP4"), "x").is_picture and TableRow(Path("x.JPG"), "x").is_picture


def test_missing_files_are_named_at_the_start(csv):
    some = rewrite(csv, "some.csv", lambda line: line.replace("clip3.mp4,", "gone3.mp4,"))
    assert len(video(some)) == CLIPS + PICTURES  # 4 %
    more = rewrite(csv, "more.csv", lambda line: line.replace("clip1", "gone1"))
    with pytest.raises(
        ValueError, match=r"--data_path .*more.csv: of 25 files checked 5 can't be read, more than 5%.*gone1.mp4"
    ):
        video(more)
    none = rewrite(csv, "none.csv", lambda line: "x" + line)
    with pytest.raises(ValueError, match=r"--data_path .*none.csv: of 25 files checked none can.*xclip0.mp4.*folder"):
        video(none)


def test_what_is_no_file_is_named_at_the_start(csv):
    os.mkfifo(csv.parent / "pipe.mp4")
    (csv.parent / "zero.mp4").symlink_to("/dev/zero")
    names = iter(["pipe.mp4", "zero.mp4", ".", "$HOME/x.mp4", r"clips\x.mp4", "x" * 300 + ".mp4"])
    odd = rewrite(csv, "odd.csv", lambda line: line.replace(line.split(",")[0], next(names, line.split(",")[0]), 1))
    with pytest.raises(ValueError) as caught:
        video(odd)
    for part in (
        "of 25 files checked 6 can't be read", "pipe.mp4: a named pipe, not a file", "zero.mp4: a device, not a file",
        ": a folder, not a file", "$HOME/x.mp4: No such file", r"$HOME and \ are not replaced",
    ):  # fmt: skip
        assert part in str(caught.value)
    data = video(odd, max_bad=0.5)
    for row in range(6):
        assert len(data[SampleKey(row, 0, 0)].skipped) == 6 - row


def test_identity_tells_paths_captions_and_order(csv):
    other = rewrite(csv, "other.csv", lambda line: line.replace('"a, clip3', '"b, clip3'))
    fewer = rewrite(csv, "fewer.csv", lambda line: None if "clip3" in line else line)
    names = {
        video(csv).fingerprint().identity,
        video(other).fingerprint().identity,
        video(fewer).fingerprint().identity,
    }
    assert len(names) == 3 and video(csv, seed=9, training=False).fingerprint().identity in names


# ---------------------------------------------------------------- --data_path


def test_data_path(csv):
    data = build_dataset(str(csv), 16, seed=1, num_frames=3, use_video=True, short_clips="interval")
    assert isinstance(data, CaptionedDataset) and data.sample_shape == (3, 3, 16, 16) and data.random_window
    assert data.short_clips == "interval" and data.seed == 1
    assert not build_dataset(str(csv), 16, seed=1, use_video=True, split="test").random_window
    with pytest.raises(ValueError, match=r"--use_video.*python preprocess.py folder .*media\S* --output videos.csv"):
        build_dataset(str(csv.parent), 16, seed=1, use_video=True)
    with pytest.raises(ValueError, match="--use_video.*python preprocess.py demo"):
        build_dataset("digits", 16, seed=1, use_video=True)
    with pytest.raises(FileNotFoundError, match="--data_path none.csv: doesn't exist"):
        build_dataset("none.csv", 16, seed=1)


# ---------------------------------------------------------------- batches of one shape


def test_any_number_of_ranks_sees_the_same_samples(csv):
    """A global batch of 8 has the same rows, flips and windows for any ranks and micro-batches."""
    data = video(csv, random_flip=True)
    seen = []
    for ranks, micro in ((1, 2), (2, 2), (4, 2), (1, 4), (1, 8), (2, 4), (2, 1), (4, 1), (8, 1)):
        samples = {}
        for rank in range(ranks):
            options = dict(dp_rank=rank, dp_size=ranks, batch_size=8 // ranks // micro, micro_batches=micro)
            for batch in build_loader(data, build_schedule(data, 8, 2, 5), end_step=4, num_workers=0, **options):
                for i, index in enumerate(batch.index.tolist()):
                    samples[batch.step, index] = (batch.text[i], batch.x[i].numpy().tobytes())
        seen.append(samples)
    assert len(seen[0]) == 32 and all(each == seen[0] for each in seen)


def test_which_schedule(csv):
    assert type(build_schedule(CaptionedDataset(csv, 16, seed=0), 4, 2, 5)) is BatchSchedule
    schedule = build_schedule(video(csv), 8, 2, 5)
    assert type(schedule) is BucketSchedule
    assert schedule.steps_per_epoch == (CLIPS // 4 + PICTURES // 4) // 2
    with pytest.raises(ValueError, match=r"micro-batch of 20 samples.*shapes have 11, 14 samples.*--batch_size"):
        build_schedule(video(csv), 20, 1, 5)
    with pytest.raises(ValueError, match="8.*3 equal micro-batches"):
        BucketSchedule([0, 1] * 9, 8, 3, 0)
    with pytest.raises(ValueError, match="of 8 a rank don't lie within the 2 parts of one shape"):
        build_loader(video(csv), schedule, dp_rank=0, dp_size=1, batch_size=8, micro_batches=1)


def test_workers_ranks_and_restarts_give_the_same_batches(csv):
    data = video(csv)
    schedule = build_schedule(data, 8, 2, 5)
    options = dict(dp_size=2, batch_size=2, micro_batches=2, end_step=5)

    def collect(rank, workers, start=0):
        loader = build_loader(data, schedule, dp_rank=rank, num_workers=workers, start_step=start, **options)
        batches = list(loader)
        loader.close()
        return batches

    ranks = [collect(rank, 0) for rank in (0, 1)]
    shapes = [batch.x.shape for batch in ranks[0]]
    assert shapes == [batch.x.shape for batch in ranks[1]]  # all ranks have the same shape
    assert {tuple(shape) for shape in shapes} == {(2, 3, 1, 16, 16), (2, 3, 4, 16, 16)}
    for batch in ranks[0]:
        assert batch.text == tuple(data.caption(schedule.rows(batch.step)[i]) for i in batch.index)
    for a, b in [
        *zip(ranks[0], collect(0, 2), strict=True),
        *zip(ranks[1][4:], collect(1, 2, start=2), strict=True),
    ]:
        assert torch.equal(a.x, b.x) and torch.equal(a.index, b.index) and a.text == b.text
        assert (a.step, a.micro, a.epoch) == (b.step, b.micro, b.epoch)


def test_labelled_data_has_no_text():
    data = build_dataset("digits", 8, seed=0)
    assert data.describe().conditioning == "label" and data.caption(0) is None
    loader = build_loader(data, build_schedule(data, 4, 1, 0), dp_rank=0, dp_size=1, batch_size=4, num_workers=0)
    assert next(loader).text is None
