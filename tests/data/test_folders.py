"""Folders of pictures that contain other things as well."""

import os
import socket

import pytest
from PIL import Image

from opendit.data import SampleKey, build_dataset, files
from opendit.data.files import Ignored, files_below, folders_above
from opendit.data.picture_file import picture_suffixes
from opendit.data.pictures_and_clips import FolderDataset, find_pictures

PNG = frozenset({".png"})


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 9), (200, 100, 50)).save(path)
    return path


def below(folder, **options):
    ignored = Ignored()
    found = list(files_below(str(folder), PNG, ignored, **options))
    return [os.path.relpath(path, folder) for path in found], ignored


def os_walk(folder):
    """Yield files in the order that folders of pictures have always had."""
    for root, names, found in os.walk(folder, followlinks=True):
        names[:] = sorted(names)
        yield from (os.path.relpath(os.path.join(root, name), folder) for name in sorted(found))


def test_the_order_is_that_of_os_walk(tmp_path):
    for name in ("b", "a/z", "a/b/c", "a/b", "a.d/x", "B/y", "a/Z", "é/x", "_/1"):
        picture(tmp_path / f"{name}.png")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    (tmp_path / "link.png").symlink_to(tmp_path / "b.png")
    found, ignored = below(tmp_path)
    assert found == list(os_walk(tmp_path)) and len(found) == 11 and not ignored


def test_links_that_lead_back_up(tmp_path):
    data = tmp_path / "up" / "data"
    picture(data / "a" / "deep" / "1.png")
    picture(data / "b" / "2.png")
    (data / "a" / "deep" / "self").symlink_to(".")
    (data / "a" / "deep" / "class").symlink_to("..")
    (data / "b" / "root").symlink_to(data)
    (data / "above").symlink_to("..")
    (data / "b" / "other").symlink_to(data / "a")  # not a cycle: its pictures are in two classes
    found = find_pictures(str(data))
    assert found.class_names == ["a", "b"] and found.labels == [0, 1, 1]
    assert [os.path.relpath(path, data) for path in found.paths] == ["a/deep/1.png", "b/2.png", "b/other/deep/1.png"]
    named = " ".join(found.ignored.named)
    for name in ("above", "a/deep/self", "a/deep/class", "b/root", "b/other/deep/self"):
        assert f"{data}/{name} (a link that leads back up)" in named
    assert "a link that leads back up" in FolderDataset(str(data), 8).describe().text


def test_links_without_end(tmp_path):
    """30 folders with two links each to the next one make a billion paths to one picture."""
    for i in range(30):
        (tmp_path / f"{i}").mkdir()
        for name in "ab":
            (tmp_path / f"{i}" / name).symlink_to(tmp_path / f"{i + 1}")
    picture(tmp_path / "30" / "x.png")
    found, ignored = below(tmp_path / "0")
    assert (
        len(found) <= files.VISITS and "a folder that links led to before" in str(ignored) and len(str(ignored)) < 2000
    )


def test_what_is_no_file_is_named_and_not_opened(tmp_path, monkeypatch):
    picture(tmp_path / "a" / "1.png")
    os.mkfifo(tmp_path / "a" / "pipe.png")
    os.mkfifo(tmp_path / "a" / "pipe")
    (tmp_path / "a" / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "a" / "linked.png").symlink_to(tmp_path / "a" / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "a" / "socket.png"))
        data = build_dataset(str(tmp_path), 8, seed=0)
    assert len(data) == 1 and "\n" not in data.describe().text
    for name in ("pipe (a named pipe)", "pipe.png (a named pipe)", "zero.png (a device)", "socket.png (a socket)"):
        assert f"{tmp_path}/a/{name}" in data.describe().text
    assert f"{tmp_path}/a/linked.png (a named pipe)" in data.describe().text


def test_what_was_ignored_is_counted_by_suffix(tmp_path):
    for name in ("a/1.png", "a/2.JPG", "b/deep/3.webp", "loose.png"):
        picture(tmp_path / name)
    for name in ("a/x.txt", "b/y.TXT", "b/deep/z.json", "b/clip.mp4", "b/art.eps", "a/README", "a/.hidden.png"):
        (tmp_path / name).write_text("-")
    picture(tmp_path / "a" / ".thumbs" / "1.png")
    assert FolderDataset(str(tmp_path), 8).describe().text == (
        f"{tmp_path}: 3 pictures of 2 classes, 3x8x8, randomly mirrored; ignored 1 file of PostScript, which is a "
        "program and no picture (1 .eps), 1 file of clips, which need a CSV (python preprocess.py folder) (1 .mp4), "
        "4 files of suffixes that are not read (2 .txt, 1 without one, 1 .json), 1 picture outside the class "
        "folders, 2 hidden"
    )


def test_many_suffixes_stay_one_short_line(tmp_path):
    picture(tmp_path / "a" / "1.png")
    for i in range(300):
        (tmp_path / "a" / f"{i}.kind{i}").touch()
    (tmp_path / "a" / "x.new\nline").touch()
    line = FolderDataset(str(tmp_path), 8).describe().text
    assert "301 files of suffixes" in line and "295 of others" in line and len(line) < 500 and line.isprintable()


def deny(monkeypatch, *denied):
    """Deny these folders, even to root, as whom tests may run."""
    scandir = os.scandir

    def guarded(path="."):
        if os.fspath(path) in [str(folder) for folder in denied]:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(files.os, "scandir", guarded)


def test_folders_that_cannot_be_read_are_called_that(tmp_path, monkeypatch):
    for name in ("a/1", "a/deep/2", "b/3"):
        picture(tmp_path / f"{name}.png")
    deny(monkeypatch, tmp_path / "a" / "deep")
    data = FolderDataset(str(tmp_path), 8)
    assert (
        len(data) == 2 and f"folders that can't be read: {tmp_path}/a/deep (Permission denied)" in data.describe().text
    )
    for denied in (tmp_path / "b", tmp_path):
        deny(monkeypatch, denied)
        with pytest.raises(ValueError) as caught:
            FolderDataset(str(tmp_path), 8)
        assert f"--data_path {tmp_path}: folders can't be read: {denied} (Permission denied)" in str(caught.value)
        assert "chmod" in str(caught.value)


def test_empty_classes_say_what_they_hold(tmp_path):
    picture(tmp_path / "cats" / "1.png")
    (tmp_path / "dogs").mkdir()
    (tmp_path / "owls").mkdir()
    for i in range(3):
        (tmp_path / "owls" / f"{i}.heic").touch()
    with pytest.raises(ValueError, match=r"class folders dogs; owls \(ignored 3 files .*\(3 \.heic\)\)"):
        FolderDataset(str(tmp_path), 8)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"holds no pictures \(ignored 1 file .*1 \.txt"):
        FolderDataset(str(tmp_path / "text"), 8)


def test_links_to_nothing_stay_rows(tmp_path):
    """An unmounted disk must not silently make a data set smaller."""
    for i in range(40):
        picture(tmp_path / "a" / f"{i:02d}.png")
    (tmp_path / "a" / "05.png").unlink()
    (tmp_path / "a" / "05.png").symlink_to(tmp_path / "unmounted" / "05.png")
    data = FolderDataset(str(tmp_path), 8)
    assert len(data) == 40
    assert data[SampleKey(5, 0, 0)].skipped == (f"{tmp_path}/a/05.png: a link to a file that doesn't exist",)


def test_every_suffix_of_pillow_is_tried(tmp_path):
    suffixes = sorted(picture_suffixes())
    assert {".jfif", ".tga", ".jp2", ".qoi", ".ico", ".avif", ".jpe", ".mpo"} <= set(suffixes)
    for i, suffix in enumerate(suffixes):
        picture(tmp_path / "a" / "x.png").rename(tmp_path / "a" / f"{i}{suffix.upper() if i % 2 else suffix}")
    data = FolderDataset(str(tmp_path), 8)
    assert len(data) == len(suffixes) and not data.ignored


def test_names_that_are_not_utf8(tmp_path):
    root = os.path.join(os.fsencode(tmp_path), b"d\xe9")
    for name in (b"caf\xe9/\xff\n.png", b"tea/1.png"):
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        picture(tmp_path / "x.png").rename(os.fsdecode(path))
    os.mkfifo(os.path.join(root, b"tea", b"\xfe"))
    data = build_dataset(os.fsdecode(root), 8, seed=0)
    assert data.class_names == ["caf\\xe9", "tea"] and data[SampleKey(0, 0, 0)].y == 0
    assert os.fsencode(data.paths[0]) == os.path.join(root, b"caf\xe9/\xff\n.png")
    assert data.describe().text.isprintable() and "tea/\\xfe (a named pipe)" in data.describe().text
    "".join(data.class_names).encode()  # as logs and checkpoints need it
    first = data.fingerprint().identity
    os.rename(os.path.join(root, b"caf\xe9"), os.path.join(root, b"caf\xe8"))
    assert len({first, build_dataset(os.fsdecode(root), 8, seed=0).fingerprint().identity}) == 2
    os.unlink(data.paths[1])
    with open(data.paths[1], "w") as file:
        file.write("no picture")
    (tmp_path / "bad").mkdir()
    os.rename(data.paths[1], os.path.join(os.fsencode(tmp_path), b"bad", b"\xe9.png"))
    with pytest.raises(ValueError, match=r"none can be read \(.*/bad/\\xe9\.png: not a picture") as caught:
        build_dataset(str(tmp_path / "bad"), 8, seed=0)
    assert str(caught.value).isprintable()


def test_folders_above(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    above = folders_above(str(tmp_path / "a" / "b"))
    expected = [os.stat(folder) for folder in (tmp_path / "a" / "b", *(tmp_path / "a" / "b").parents)]
    assert above == {(state.st_dev, state.st_ino) for state in expected}
