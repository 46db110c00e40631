"""preprocess.py shards and index can be resumed, and every run writes the same bytes."""

import os
import signal
import time

import numpy as np
import pytest
import webdataset
import wids
from PIL import Image

import preprocess
from opendit.common.utils import read_size
from opendit.data import build_dataset
from tests.data.shards.tars import picture
from tests.data.test_preprocess import contents, start


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    for i in range(37):
        path = root / "ab"[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture(i))
    return root


def pack(data, output, *flags):
    words = ["shards", "--data_path", data, "--output", output, "--shard_size", "9KB", *flags]
    return preprocess.main([str(word) for word in words])


def test_webdataset_reads_what_was_packed(pictures, tmp_path, capsys):
    assert pack(pictures, tmp_path / "out", "--num_workers", 2) == 0
    assert "37 samples in " in capsys.readouterr().out
    tars = sorted(map(str, (tmp_path / "out").glob("*.tar")))
    assert len(tars) > 5 and all(os.path.getsize(tar) <= 10240 for tar in tars)
    found = list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))
    files = [path for folder in "ab" for path in sorted((pictures / folder).iterdir())]
    assert [sample["png"] for sample in found] == [path.read_bytes() for path in files]
    assert [sample["cls"] for sample in found] == [str("ab".index(path.parent.name)).encode() for path in files]
    assert pack(pictures, tmp_path / "out") == 0  # nothing is left to do
    before = contents(tmp_path / "out")
    for index in (tmp_path / "out").glob("*.index"):
        index.unlink()
    assert preprocess.main(["index", str(tmp_path / "out")]) == 0
    now = contents(tmp_path / "out")
    assert now.keys() == before.keys() and all(now[n] == before[n] for n in now if n.endswith(".tar"))


def test_wids_finds_the_same_bytes_at_the_same_numbers(pictures, tmp_path):
    """Read many tars in random order, with the index that wids itself makes."""
    assert pack(pictures, tmp_path / "out") == 0
    data = build_dataset(str(tmp_path / "out"), 16, seed=0)
    tars = [{"url": shard.path, "nsamples": len(shard)} for shard in data.shards]
    other = wids.ShardListDataset(tars, transformations=[], cache_dir=str(tmp_path / "cache"), keep=True)
    assert len(other) == len(data) == 37
    for row in np.random.default_rng(0).permutation(37).tolist():
        sample = other[row]
        assert sample[".png"].read() == data.read_medium(row) and int(sample[".cls"].read()) == data.label(row)
        assert data.source(row) == f"{sample['__shard__']}: {sample['__key__']}.png"


def test_killed_at_any_moment_it_ends_with_the_same_bytes(pictures, tmp_path):
    assert pack(pictures, tmp_path / "whole", "--num_workers", 1) == 0
    killed, random = 0, np.random.default_rng(0)
    for _ in range(12):
        process = start(
            tmp_path / "log",
            *["shards", "--data_path", pictures, "--output", tmp_path / "killed"],
            "--shard_size",
            "9KB",
            "--num_workers",
            "2",
        )
        time.sleep(float(random.uniform(0, 0.12)))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed > 0
    deadline = time.monotonic() + 20
    while True:  # the writers that it started may run for another moment
        assert pack(pictures, tmp_path / "killed") == 0
        if contents(tmp_path / "killed") == contents(tmp_path / "whole"):
            break
        assert time.monotonic() < deadline, contents(tmp_path / "killed").keys()


def test_other_contents_and_other_tars_are_refused(pictures, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (8, 8)).save(data / "1.png")
    assert pack(data, tmp_path / "out") == 0
    Image.new("RGB", (9, 8)).save(data / "1.png")
    assert pack(data, tmp_path / "out") == 2
    assert "was made of other files" in capsys.readouterr().err
    assert pack(pictures, tmp_path / "out") == 2
    assert "holds other tars" in capsys.readouterr().err


def test_a_csv_with_missing_files_and_no_captions(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(picture(0))
    (tmp_path / "data.csv").write_text('path,text\na.png,"one, two"\ngone.png,x\na.png, \n')
    assert pack(tmp_path / "data.csv", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "left out 2 files" in out and "gone.png: No such file" in out and "empty caption" in out
    (tar,) = (tmp_path / "out").glob("*.tar")
    (sample,) = webdataset.WebDataset(str(tar), shardshuffle=False, empty_check=False)
    assert sample["txt"] == b"one, two" and sample["__key__"] == "000000000"


def test_a_folder_without_tars(tmp_path, capsys):
    assert preprocess.main(["index", str(tmp_path)]) == 2
    assert "holds no .tar files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("1GB", 10**9), ("64MiB", 64 << 20), ("1.5kb", 1500), ("700", 700), ("2g", 2 * 10**9)]
)
def test_sizes(text, size):
    assert read_size(text, "--shard_size") == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "1XB", "GB", "nan", "1e99TB", "5iB", "1 GB", "٣GB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="--shard_size .*no size; give one such as"):
        read_size(text, "--shard_size")
