"""Writing samples: any label as a file name, files of an earlier run, two runs at once, and small disks."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

import sample
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.checkpoint.run_folders import FolderLock
from opendit.models.dit import DiT
from opendit.models.zoo import model_config
from opendit.sampling import output_files as writing
from opendit.sampling.output_files import INDEX, OutputFolder, file_name, texts, write_npz
from opendit.sampling.sample_cache import FOLDER, SampleCache
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["zero", "a\nb\tc\x00d/../e", "x" * 5000, "مرحبا", "\udce9\ud800", "", "👩‍👩‍👧 e\u0301"]


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    path = tmp_path_factory.mktemp("ckpt") / "ema.safetensors"
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=len(NAMES))
    torch.manual_seed(0)
    info = {"model": "DiT-Ti/2", "config": config.to_dict(), "class_names": NAMES, "vae": "none", "image_size": 8}
    save_file(DiT(config).state_dict(), path, metadata={METADATA_KEY: json.dumps(info)})
    return path


def argv(ckpt: Path, folder: Path, count: int, *more: str) -> list[str]:
    return ["--ckpt", str(ckpt), "--num_sampling_steps", "1", "--cfg_scale", "1", "--output", str(folder),
            "--num_samples", str(count), "--batch_size", "4", *more]  # fmt: skip


@given(st.text(st.characters(codec=None), max_size=80), st.integers(0, 10**7))
@settings(max_examples=300)
def test_any_label_is_part_of_a_files_name(label, number):
    name = file_name(number, label)
    assert name.startswith(f"{number:06d}") and len(os.fsencode(name)) < 120
    assert all(c.isalnum() or c in "-_" for c in name) and Path(name).name == name
    assert (
        file_name(7, "a cat, asleep") == "000007-a_cat__asleep" and file_name(7, "\n") == file_name(7, "") == "000007"
    )


def test_labels_in_another_encoding(monkeypatch):
    monkeypatch.setattr(writing.os, "fsencode", lambda text: text.encode("latin-1", "surrogateescape"))
    assert file_name(1, "café 漢字x") == "000001-café___x"


def test_an_npz_in_blocks_is_numpys(tmp_path):
    pictures = np.random.default_rng(0).integers(0, 256, (11, 4, 4, 3), np.uint8)
    labels, words = np.arange(11), [*NAMES, "漢"] * 40
    blocks = np.split(pictures.reshape(-1), [7, 100, 101])
    arrays = {"arr_0": ("|u1", pictures.shape, blocks), "arr_1": (labels.dtype.str, labels.shape, [labels])}
    write_npz(tmp_path / "a.npz", {**arrays, "arr_2": texts(words)})
    found = np.load(tmp_path / "a.npz")
    assert np.array_equal(found["arr_0"], pictures) and np.array_equal(found["arr_1"], labels)
    assert found["arr_2"].tolist() == words and os.listdir(tmp_path) == ["a.npz"]


def test_a_small_run_after_a_large_one_leaves_no_mixed_folder(tmp_path, ckpt, no_ranks, capsys):
    mine = tmp_path / "mine.png"
    mine.write_text("not of sample.py")
    (tmp_path / "grid").mkdir()
    sample.main(argv(ckpt, tmp_path, 9))
    first = {path.name for path in tmp_path.iterdir()}
    assert len([name for name in first if name[0] == "0"]) == 9 and "000005.png" in first
    (tmp_path / ".000003-x.4242.png").touch()  # made by somebody else
    (tmp_path / ".000000-zero.4242.png").touch()  # left by a killed run
    (tmp_path / "000099-old.png").touch()
    (tmp_path / "000004-x").mkdir()
    sample.main(argv(ckpt, tmp_path, 2, "--class_labels", "3"))
    assert {path.name for path in tmp_path.iterdir()} == {
        *("000000-مرحبا.png", "000001-مرحبا.png", "grid.png", INDEX),
        *("mine.png", "grid", ".000003-x.4242.png", "000099-old.png", "000004-x"),
    }
    assert "holds 1 other files that look like samples" in capsys.readouterr().out
    assert mine.read_text() == "not of sample.py"


@pytest.mark.parametrize(
    "content", ['{"files": ["../outside.png", "..", "", 3, null]}', "{", "[]", '{"files": 3}', "\x00"]
)
def test_a_damaged_index_deletes_nothing(content, tmp_path):
    folder, outside = tmp_path / "f", tmp_path / "outside.png"
    folder.mkdir()
    outside.touch()
    (folder / "x.png").touch()
    (folder / INDEX).write_text(content)
    OutputFolder(folder, ["000000.png"]).begin()
    assert outside.exists() and sorted(os.listdir(folder)) == [INDEX, "x.png"]
    assert json.loads((folder / INDEX).read_text()) == {"files": ["000000.png"]}


def test_two_at_once_in_one_folder(tmp_path, ckpt, no_ranks, capsys):
    with FolderLock(tmp_path, "--output", "wait"), pytest.raises(SystemExit) as stop:
        sample.main(argv(ckpt, tmp_path, 2))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and f"--output: {tmp_path} is in use: process {os.getpid()} on" in said
    sample.main(argv(ckpt, tmp_path, 2))
    assert not (tmp_path / ".lock").exists() and (tmp_path / "grid.png").exists()


def sample_here(mesh, words: list[str]) -> None:
    sample.main(words)


def test_ranks_share_an_npz_of_odd_names(tmp_path, ckpt):
    npz = tmp_path / "s.npz"
    for world in (1, 2):
        run_ranks(world, sample_here, argv(ckpt, tmp_path / str(world), 9, "--npz", str(npz)))
        found = np.load(npz)
        pngs = sorted((tmp_path / str(world)).glob("0*.png"))
        assert found["arr_0"].shape == (9, 8, 8, 3) and len(pngs) == 9
        assert all(np.array_equal(Image.open(png), picture) for png, picture in zip(pngs, found["arr_0"], strict=True))
        assert not (tmp_path / str(world) / FOLDER).exists() and not list(tmp_path.glob(".s.*"))


@pytest.mark.parametrize("how", ["single files", "npz too large", "parts too large"])
def test_a_full_disk_says_what_is_there(how, tmp_path, ckpt, no_ranks, capsys, monkeypatch):
    """This process can't fill a tmpfs, so writing is made to fail as if the disk were full."""
    npz, more = tmp_path / "s.npz", ["--npz", str(tmp_path / "s.npz")]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if how == "single files":
        true_save, left = Image.Image.save, [5]

        def save(self, file, *args, **options):
            left[0] -= 1
            if left[0] < 0:
                file.write(b"half")
                raise full
            true_save(self, file, *args, **options)

        monkeypatch.setattr(Image.Image, "save", save)
        expected = "5 of 9 samples are there and whole"
    else:
        more.append("--no_save_png")

        def fails(*args, **options):
            raise full

        if how == "npz too large":
            monkeypatch.setattr("opendit.sampling.sample_output.write_npz", fails)
            expected = f"9 of 9 samples are in {tmp_path}/o/{FOLDER}/*.npy, for np.load"
        else:
            monkeypatch.setattr(SampleCache, "write", fails)
            expected = "no sample is there"
    with pytest.raises(SystemExit) as stop:
        sample.main(argv(ckpt, tmp_path / "o", 9, *more))
    said = capsys.readouterr()
    (line,) = said.err.strip().splitlines()[-1:]
    assert stop.value.code == 1 and line.startswith("error: [Errno 28] No space left on device") and expected in line
    assert "make room" in line and "Traceback" not in said.err and "Done" not in said.out and not npz.exists()
    left = sorted(path.name for path in (tmp_path / "o").iterdir() if path.name not in (INDEX, FOLDER))
    parts = sorted((tmp_path / "o" / FOLDER).glob("*.npy"))
    assert ("start it again as it was: it goes on from there" in line) == (how != "parts too large")
    if how == "single files":
        assert len(left) == 5 and all(Image.open(tmp_path / "o" / name).size == (8, 8) for name in left)
        assert 0 < len(parts) <= 5
    else:
        assert left == [] and (tmp_path / "o" / FOLDER).exists() == (how == "npz too large")
        assert [np.load(part).shape for part in parts] == [(1, 8, 8, 3)] * (9 if how == "npz too large" else 0)


SMALL = """
mount -t tmpfs -o size=8m tmpfs {disk} || exit 99
cd {root}
{python} sample.py {argv} --npz {told}/s.npz --num_samples 50000 > {told}/said 2>&1
echo $? > {told}/code
ls -A {disk} > {told}/left
"""


def test_a_disk_that_is_really_small(tmp_path, ckpt):
    disk, told = tmp_path / "disk", tmp_path / "told"
    disk.mkdir()
    told.mkdir()
    words = " ".join(argv(ckpt, disk / "o", 0)[:8])
    script = SMALL.format(disk=disk, told=told, root=ROOT, python=sys.executable, argv=words)
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=300)
    if not (told / "code").exists():
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    said = (told / "said").read_text()
    assert (told / "code").read_text() == "1\n", said
    last = said.strip().splitlines()[-1]
    assert (
        last.startswith("error: [Errno 28] No space left on device: ")
        and "make room" in last
        and last.count(str(disk / "o" / ".parts")) == 1
    ), said
    assert not (told / "s.npz").exists()
