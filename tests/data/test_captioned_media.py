"""CSVs made from folders, and their check: the sources of captions, and every reason to drop a row."""

import os
import signal
import time

import numpy as np
import pytest
from PIL import Image

from opendit.data import SampleKey, build_dataset, captioned_media
from opendit.data.base import DataError
from opendit.data.captioned_media import (
    REASONS,
    Medium,
    TableRow,
    check_rows,
    class_caption,
    find_folder,
    find_ucf101,
    make,
    read_table,
    table,
)
from opendit.data.video_files import write_mp4


def clip(path, frames=4, height=32, width=48, fps=8):
    noise = np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    write_mp4(path, noise, fps)
    return path


def picture(path, height=32, width=48):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), "red").save(path)
    return path


@pytest.mark.parametrize(
    "name, text",
    [
        ("ApplyEyeMakeup", "apply eye makeup"),
        ("YoYo", "yo yo"),
        ("HighJump", "high jump"),
        ("TaiChi", "tai chi"),
        ("CleanAndJerk", "clean and jerk"),
        ("TVShow", "TV show"),
        ("WatchTV", "watch TV"),
        ("play_piano", "play piano"),
        ("Run100Meters", "run 100 meters"),
        ("跳高", "跳高"),
        ("_", "_"),
    ],
)
def test_names_of_classes_become_words(name, text):
    assert class_caption(name) == text


def test_a_ucf101_tree(tmp_path, capsys):
    root = tmp_path / "UCF-101"
    for name in ("YoYo/v_YoYo_g01_c02.avi", "HighJump/b.mp4", "HighJump/a.avi", "HighJump/notes.txt", "stray.avi"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    make("ucf101", str(root), str(tmp_path / "ucf.csv"))
    assert (tmp_path / "ucf.csv").read_text().splitlines() == [
        "path,text",
        "UCF-101/HighJump/a.avi,high jump",
        "UCF-101/HighJump/b.mp4,high jump",
        "UCF-101/YoYo/v_YoYo_g01_c02.avi,yo yo",
    ]
    out = capsys.readouterr().out
    assert "3 clips with captions (3 from the names of 2 classes)" in out
    assert "left out 1 files that are not in a folder of their class: " in out and "stray.avi" in out
    (tmp_path / "empty").mkdir()
    for missing in ("empty", "none"):
        with pytest.raises(FileNotFoundError, match=missing):
            find_ucf101(tmp_path / missing)


def test_captions_come_from_the_nearest_source(tmp_path):
    """clip.txt comes before clip.json, which comes before the folder's name. Empty side-cars and the root's name do not
    count."""
    for name in ("both", "json", "text_key", "empty", "list", "plain", "broken", "latin"):
        clip(tmp_path / "red-panda_cub" / f"{name}.mp4", frames=1)
    picture(tmp_path / "deep" / "er" / "x.PNG")
    clip(tmp_path / "bare.mp4", frames=1)
    clip(tmp_path / "told.mp4", frames=1).with_suffix(".txt").write_text("told, twice\n\n")
    clip(tmp_path / ".hidden" / "h.mp4", frames=1)
    clip(tmp_path / ".h.mp4", frames=1)
    os.symlink(tmp_path, tmp_path / "deep" / "loop")
    side = tmp_path / "red-panda_cub"
    (side / "both.txt").write_text('\ufeffa "quoted",\n  caption\n', encoding="utf-8")
    (side / "both.json").write_text('{"caption": "not this"}')
    (side / "json.json").write_text('{"text": "not this", "caption": "from json"}')
    (side / "text_key.json").write_text('{"caption": " ", "text": "from the text"}')
    (side / "empty.txt").write_text(" \n")
    (side / "list.json").write_text('["caption"]')
    (side / "broken.json").write_text("{")
    (side / "latin.txt").write_bytes(b"caf\xe9")
    found = find_folder(tmp_path)
    assert {row.path.name: row.text for row in found.rows} == {
        "told.mp4": "told, twice",
        "both.mp4": 'a "quoted", caption',
        "json.mp4": "from json",
        "text_key.mp4": "from the text",
        "empty.mp4": "red panda cub",
        "list.mp4": "red panda cub",
        "plain.mp4": "red panda cub",
        "x.PNG": "er",
    }
    assert found.sources == {".txt files": 2, ".json files": 2, "folder names": 4}
    assert found.left_out["files without a caption"] == [str(tmp_path / "bare.mp4")]
    broken, latin = found.left_out["files whose caption can't be read"]
    assert "broken.mp4: broken.json isn't JSON" in broken and "latin.mp4: latin.txt isn't UTF-8" in latin

    make("folder", str(tmp_path), str(tmp_path / "all.csv"))
    assert {row.path.name: row.text for row in read_table(tmp_path / "all.csv")} == {
        row.path.name: row.text for row in found.rows
    }


def test_folders_without_media_or_captions(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no clips or pictures"):
        find_folder(tmp_path)
    clip(tmp_path / "bare.mp4", frames=1)
    with pytest.raises(FileNotFoundError, match="none of the 1 files .* has a caption"):
        find_folder(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write clips.csv with three good rows, rows for every reason to drop one, and more columns."""
    root = tmp_path_factory.mktemp("check")
    clip(root / "good.mp4", frames=31)
    clip(root / "long.mp4", frames=60, height=64, width=64, fps=30)
    picture(root / "good.png")
    clip(root / "short.mp4", frames=30)
    clip(root / "small.mp4", frames=31, height=30)
    clip(root / "silent.mp4", frames=31)
    (root / "zero.mp4").write_bytes(b"")
    (root / "text.mp4").write_text("not a clip\n" * 100)
    (root / "broken.png").write_bytes((root / "good.png").read_bytes()[:60])
    (root / "cut.mp4").write_bytes((root / "good.mp4").read_bytes()[:300])
    lines = ["id,path,text,source", '1,good.mp4,"a ""big"", red thing",x', "2,short.mp4,short,x", "3,small.mp4,small,x"]
    lines += ["4,silent.mp4,  ,x", "5,gone.mp4,gone,x", "6,zero.mp4,zero,x", f"7,{root}/good.png,a picture,y"]
    lines += ["8,text.mp4,text,x", "9,broken.png,broken,x", "10,cut.mp4,cut,x", "11,long.mp4,été,z"]
    (root / "clips.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def test_every_reason_is_counted_once(folder, tmp_path, capsys):
    captioned_media.check(
        str(folder / "clips.csv"),
        str(folder / "ok.csv"),
        num_frames=16,
        frame_interval=2,
        min_size=32,
        num_workers=3,
        image_size=64,
    )
    rows = read_table(folder / "ok.csv")
    assert [(row.path.name, row.text, row.extra) for row in rows] == [
        ("good.mp4", 'a "big", red thing', {"id": "1", "source": "x"}),
        ("good.png", "a picture", {"id": "7", "source": "y"}),
        ("long.mp4", "été", {"id": "11", "source": "z"}),
    ]
    out = capsys.readouterr().out
    lines = {line.split(":")[0].strip(): line for line in out.splitlines() if ": " in line}
    assert "kept 3 of 11 rows, dropped 8" in out
    assert "kept, and enlarged by training at 64: 2 (" in out and "long.mp4: 64x64" not in out  # no reason to drop it
    for reason, count, names in [
        ("missing", 1, ["gone.mp4"]),
        ("undecodable", 4, ["zero.mp4", "text.mp4", "broken.png", "cut.mp4"]),
        ("too short", 1, ["short.mp4: 30 frames, needs 31"]),
        ("too small", 1, ["small.mp4: 48x30, needs 32"]),
        ("empty caption", 1, ["silent.mp4"]),
    ]:
        assert f"{reason}: {count} (" in lines[reason] and all(name in lines[reason] for name in names), out
    figures = {line[:14].strip(): line.split()[-3:] for line in out.splitlines()}
    assert figures["duration (s)"] == ["2.00", "2.94", "3.88"] and figures["frames"] == ["31", "46", "60"]
    assert figures["width"] == ["48", "48", "64"] and figures["height"] == ["32", "32", "64"]
    assert figures["frame rate"] == ["8.00", "19.00", "30.00"]


def test_shorter_windows_keep_shorter_clips(folder):
    kept, media, dropped = check_rows(read_table(folder / "clips.csv"), num_frames=16, num_workers=1)
    assert [row.path.name for row in kept] == ["good.mp4", "short.mp4", "small.mp4", "good.png", "long.mp4"]
    assert media[0] == Medium(31, 32, 48, 8.0) and media[3] == Medium(1, 32, 48)
    assert {reason: len(files) for reason, files in dropped.items()} == dict(zip(REASONS, (1, 4, 0, 0, 1), strict=True))


def test_when_nothing_is_left_nothing_is_written(folder, tmp_path):
    (tmp_path / "in.csv").write_text("path,text\ngone.mp4,a\n")
    with pytest.raises(DataError, match="no row of .*in.csv is left"):
        captioned_media.check(str(tmp_path / "in.csv"), str(tmp_path / "out.csv"))
    assert not (tmp_path / "out.csv").exists()


def test_a_crash_or_hang_of_the_decoder_costs_one_row(folder, monkeypatch):
    def probe(path, is_picture):
        if "short" in path:
            os.kill(os.getpid(), signal.SIGKILL)
        if "small" in path:
            time.sleep(60)
        return Medium(50, 40, 40, 8.0)

    monkeypatch.setattr(captioned_media, "probe", probe)
    names = ["a", "short1", "small", "b", "c", "short2", "short3"]
    rows = [TableRow(folder / f"{name}.mp4", name) for name in names]
    monkeypatch.setattr(captioned_media, "problem", lambda path: None)
    start = time.monotonic()
    kept, media, dropped = check_rows(rows, num_workers=2, time_limit=1.0)
    assert [row.text for row in kept] == ["a", "b", "c"] and len(media) == 3 and time.monotonic() - start < 20
    assert [os.path.basename(line.split(": ")[0]) for line in dropped["undecodable"]] == [
        "short1.mp4", "small.mp4", "short2.mp4", "short3.mp4",
    ]  # fmt: skip
    assert "crashed (-9)" in dropped["undecodable"][0] and "no answer in 1 s" in dropped["undecodable"][1]


def test_a_table_of_pictures_has_no_durations():
    assert [line.split()[0] for line in table([Medium(1, 5, 7)]).splitlines()] == ["min", "width", "height"]


def test_pipes_circles_and_names_of_any_bytes(tmp_path, capsys):
    root = tmp_path / "media"
    (root / "a cat").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(root / "a cat" / "1.png")
    odd = os.fsdecode(b"caf\xe9\n.png")
    Image.new("RGB", (9, 9)).save(root / "a cat" / "x.png")
    os.rename(root / "a cat" / "x.png", root / "a cat" / odd)
    (root / "~home").mkdir()
    Image.new("RGB", (9, 9)).save(root / "~home" / " 2.png")
    (root / os.fsdecode(b"d\xe9")).mkdir()
    Image.new("RGB", (9, 9)).save(root / os.fsdecode(b"d\xe9") / "3.png")
    os.mkfifo(root / "a cat" / "pipe.mp4")
    (root / "a cat" / "up").symlink_to(root)
    (root / "again").symlink_to(root / "a cat")
    make("folder", str(root), str(root / "media.csv"))
    text = capsys.readouterr().out
    for part in (
        "left out 1 files whose", "d\\xe9/3.png: its folder's name isn't UTF-8", "pipe.mp4 (a named pipe)",
        "up (a link that leads back up)", "again (a folder that links led to before)",
    ):  # fmt: skip
        assert part in text
    rows = read_table(root / "media.csv")
    assert [(row.path.name, row.text) for row in rows] == [("1.png", "a cat"), (odd, "a cat"), (" 2.png", "~home")]
    assert all(row.path.is_file() for row in rows)
    data = build_dataset(str(root / "media.csv"), 8, seed=0)
    assert [data[SampleKey(i, 0, 0)].skipped for i in range(3)] == [()] * 3 and data.describe().text.isprintable()
    captioned_media.check(str(root / "media.csv"), str(root / "checked.csv"), num_workers=1)
    assert read_table(root / "checked.csv") == rows


def test_side_cars_that_are_no_captions(tmp_path):
    for name in ("long", "deep", "good"):
        Image.new("RGB", (9, 9)).save(tmp_path / f"{name}.png")
    (tmp_path / "long.txt").write_text("x" * (2**20 + 1))
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "good.txt").write_text("a caption")
    found = find_folder(tmp_path)
    assert [row.text for row in found.rows] == ["a caption"]
    deep, long = found.left_out["files whose caption can't be read"]
    assert "deep.json isn't JSON" in deep and "1,048,577 bytes, too many" in long


def test_what_is_no_file_is_dropped_unopened(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp4")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    names = ["pipe.mp4", "zero.png", "x" * 300 + ".png", "gone.png"]
    kept, _, dropped = check_rows([TableRow(tmp_path / name, "text") for name in names])
    assert not kept and [line.split(": ")[1] for line in dropped["missing"]] == [
        "a named pipe, not a file", "a device, not a file", "File name too long", "No such file or directory",
    ]  # fmt: skip
