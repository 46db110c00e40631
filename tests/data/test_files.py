"""Disks that fail for a while or for good."""

import builtins
import contextlib
import errno
import io
import os

import pytest
import torch

from opendit.data import DataError, build_dataset, build_loader, build_schedule
from opendit.data import files as media_files
from opendit.data.base import BadFileCounter, BadSample
from opendit.data.files import Verification
from opendit.data.shards.program import make_indexes
from opendit.data.video_files import write_mp4
from tests.data.shards.tars import captioned, picture, write_tar

DOWN = "5 attempts: Input/output error: its disk or network is down"


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    monkeypatch.setattr(media_files, "PAUSES", (0.0,) * 4)


@pytest.fixture
def fails(monkeypatch):
    """Return a function that makes a module's function raise an error number the next n times."""

    def make(module, name, number, times):
        real, left = getattr(module, name), [times]

        def failing(*args, **options):
            if left[0]:
                left[0] -= 1
                raise OSError(number, os.strerror(number))
            return real(*args, **options)

        monkeypatch.setattr(module, name, failing)
        return left

    return make


@pytest.fixture
def tars(tmp_path):
    write_tar(tmp_path / "t.tar", captioned(6))
    make_indexes(str(tmp_path / "t.tar"))
    return tmp_path / "t.tar"


@pytest.mark.parametrize("name", ["pread", "open"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO])
def test_a_tar_whose_disk_comes_back_is_read(tars, fails, name, number):
    data = build_dataset(str(tars), 8, seed=0)
    expected = build_dataset(str(tars), 8, seed=0).read(2).x
    left = fails(os, name, number, 4)  # the index is read first
    assert torch.equal(data.read(2).x, expected) and not left[0]
    left = fails(os, "pread", number, 4)
    assert data.store.read(0, 0, 9) and not left[0]


def test_a_tar_whose_disk_stays_down_ends_the_run_with_its_name(tars, fails):
    data = build_dataset(str(tars), 8, seed=0)
    told = []
    schedule = build_schedule(data, 2, 1, 0)
    with build_loader(
        data, schedule, dp_rank=0, dp_size=1, batch_size=2, num_workers=0, on_skip=told.append
    ) as batches:
        next(batches)
        for module, name in ((os, "pread"), (os, "open")):
            fails(module, name, errno.EIO, 1000)
            with pytest.raises(DataError, match=f"t.tar(.index)? can't be read, {DOWN}"):
                next(batches)
    assert not told


def test_a_store_names_its_tar(tars, fails):
    store = build_dataset(str(tars), 8, seed=0).store
    store.read(0, 0, 9)
    for name in ("pread", "open"):
        fails(os, name, errno.EIO, 1000)
        with pytest.raises(DataError, match=f"t.tar can't be read, {DOWN}"):
            store.read(0, 0, 9)


@pytest.fixture
def table(tmp_path):
    (tmp_path / "0.png").write_bytes(picture(0))
    write_mp4(tmp_path / "1.mp4", torch.zeros(4, 32, 32, 3, dtype=torch.uint8).numpy(), 8)
    (tmp_path / "all.csv").write_text("path,text\n0.png,a\n1.mp4,b\n")
    return tmp_path / "all.csv"


# The size of a picture is looked up before it is read, and each attempt calls stat twice.
@pytest.mark.parametrize(
    "row, module, name, times", [(0, io, "FileIO", 4), (0, os, "stat", 9), (1, builtins, "open", 4), (1, os, "stat", 5)]
)
def test_pictures_and_clips_are_read_when_their_disk_comes_back(table, fails, row, module, name, times):
    data = build_dataset(str(table), 8, seed=0, use_video=True, num_frames=2)
    expected = data.read(row).x
    left = fails(module, name, errno.ESTALE, times)
    assert torch.equal(data.read(row).x, expected) and not left[0]
    left[0] = 1000
    with pytest.raises(DataError, match=f"{data.source(row)} can't be read, 5 attempts: Stale file handle: its disk"):
        data.read(row)


def test_missing_and_damaged_files_are_not_waited_for(table, tmp_path, monkeypatch):
    monkeypatch.setattr(media_files, "PAUSES", (1000.0,))
    data = build_dataset(str(table), 8, seed=0, use_video=True, num_frames=2)
    for name, row in (("0.png", 0), ("1.mp4", 1)):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(BadSample):
            data.read(row)
        (tmp_path / name).unlink()
        with pytest.raises(BadSample, match="No such file"):
            data.read(row)


def test_checksums_wait_for_the_disk_too(tmp_path, fails):
    (tmp_path / "file").write_bytes(b"1")
    for times, damage in ((4, "file is damaged"), (1000, DOWN)):
        fails(builtins, "open", errno.EIO, times)
        verification = Verification(tmp_path, {"file": "0" * 64}, "--data_path file")
        verification.check()
        verification.wait()
        with pytest.raises(DataError, match=damage):
            verification.check()


@pytest.mark.parametrize(("max_bad", "stops_at"), [(0.0, 1), (0.01, 100), (0.2, None)])
def test_no_bad_file_is_tolerated_at_0_and_a_share_counts_from_100_files_on(max_bad, stops_at):
    counter, read = BadFileCounter(max_bad), 0
    with pytest.raises(DataError, match="can't be read") if stops_at else contextlib.nullcontext():
        for read in range(1, 201):
            bad = ["a.png: broken"] if read % 10 == 1 else []
            counter.add(1 - len(bad), bad)
    assert read == (stops_at or 200)
