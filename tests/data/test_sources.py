"""Test the forms that --data_path takes, and the error for anything else."""

import os
import socket

import pytest
from PIL import Image

from opendit.data import build_dataset, latents, sources


@pytest.mark.parametrize(
    ("data_path", "says"),
    [
        (
            "",
            "--data_path: empty; give a CSV, .jsonl or .parquet of captioned media, a folder of pictures",
        ),
        ("  ", "--data_path: empty"),
        ("digit", r"--data_path digit: doesn't exist \(is digits meant\?\)"),
        ("CIFAR-10", r"--data_path CIFAR-10: doesn't exist \(a torchvision data set is named by the folder"),
        ("~nobody-at-all/pictures", "the home folder of that user is not known; write the path out"),
        ("a\0b", r"--data_path a\\x00b: can't be read \(embedded null"),
        ("x" * 300, r"can't be read \(File name too long\)"),
        ("pipe", "--data_path pipe: a named pipe; give a CSV"),
        ("pipe.csv", "--data_path pipe.csv: a named pipe"),
        ("/dev/zero", "--data_path /dev/zero: a device"),
        ("socket", "--data_path socket: a socket"),
        ("circle", "--data_path circle: can't be read .Too many levels"),
        ("cat.png", "--data_path cat.png: is a picture; give the folder that it is in"),
        ("cat.mp4", "is a clip; give a CSV of clips: python preprocess.py folder"),
        ("data.zip", "is an archive; unpack it"),
        ("data.tsv", "is a file; captions come as a .csv of path,text"),
        ("latents.json", "is a file; give the folder of cached latents that it is in"),
        ("odd", "is a file; give a CSV"),
    ],
)
def test_each_mistake_is_one_line_that_says_what_to_do(tmp_path, monkeypatch, data_path, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("opendit.data.latents_index.INDEX", "latents.json")
    for name in ("pipe", "pipe.csv"):
        os.mkfifo(name)
    os.symlink("circle", "circle")
    for name in ("cat.png", "cat.mp4", "data.zip", "data.tsv", "latents.json", "odd"):
        open(name, "w").close()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises((ValueError, FileNotFoundError), match=says) as caught:
            build_dataset(data_path, 8, seed=0)
    assert str(caught.value).startswith("--data_path") and str(caught.value).isprintable()


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(sources.os, "scandir", deny)  # tests may run as root, to whom nothing is denied
    with pytest.raises(ValueError, match=f"--data_path {tmp_path}: can't be read .Permission denied.; allow it .chmod"):
        build_dataset(str(tmp_path), 8, seed=0)


def test_latents_among_pictures_say_so(tmp_path, monkeypatch):
    class Latents:
        note = ""

        def __init__(self, *args, **options):
            pass

    monkeypatch.setattr(latents, "read_indexes", lambda path: [{"image_size": 8, "shards": []}])
    monkeypatch.setattr(latents, "LatentDataset", Latents)
    assert build_dataset(str(tmp_path), 8, seed=0).note == ""
    (tmp_path / "cats").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "cats" / "1.png")
    assert "pictures that are in the folder as well are not read" in build_dataset(str(tmp_path), 8, seed=0).note
