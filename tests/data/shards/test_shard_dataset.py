"""Training samples from tars equal those from the same files read one by one."""

import glob
import os
import pickle
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from opendit.data import DataError, SampleKey, build_dataset, build_loader, build_schedule, files, row_arrays
from opendit.data.base import View
from opendit.data.held_out import hold_out
from opendit.data.shards import dataset, store
from opendit.data.shards.index import ROW, TarIndex, index_of, write_index
from opendit.data.shards.program import make_indexes
from opendit.data.video_files import write_mp4
from tests.data.shards.tars import captioned, header_of, picture, write_tar


@pytest.fixture
def mixed(tmp_path):
    """Write two tars of pictures and clips, and a CSV of the same files in the same order."""
    (tmp_path / "tars").mkdir()
    lines, number = ["path,text"], 0
    for tar in range(2):
        members = []
        for suffix in ("png", "mp4", "jpg"):
            path = tmp_path / f"{number}.{suffix}"
            if suffix == "mp4":
                frames = np.random.default_rng(number).integers(0, 256, (9, 32, 40, 3), dtype=np.uint8)
                write_mp4(path, frames, 8)
            else:
                path.write_bytes(picture(number, suffix))
            members += [(path.name, path.read_bytes()), (f"{number}.txt", f"caption {number}".encode())]
            lines.append(f"{path.name},caption {number}")
            number += 1
        write_tar(tmp_path / "tars" / f"{tar}.tar", members)
    (tmp_path / "all.csv").write_text("\n".join(lines))
    make_indexes(str(tmp_path / "tars"), num_workers=1)
    return tmp_path


@pytest.mark.parametrize("split", ["train", "test"])  # windows of clips are random in train and in the middle in test
@pytest.mark.parametrize("use_video", [False, True])
def test_samples_are_those_of_the_files(mixed, use_video, split):
    options = dict(seed=3, use_video=use_video, num_frames=3, frame_interval=2, split=split)
    shards, files = (build_dataset(str(mixed / name), 16, **options) for name in ("tars", "all.csv"))
    assert len(shards) == len(files) == (6 if use_video else 4) and shards.sample_shape == files.sample_shape
    for row in range(len(files)):
        one, other = (data[SampleKey(row, 5, row)] for data in (shards, files))
        assert torch.equal(one.x, other.x) and (one.text, one.y) == (other.text, other.y)
        assert shards.shapes().key(row) == files.shapes().key(row) and shards.next_row(row) == files.next_row(row)
    keys = [None if data.shapes().array is None else data.shapes().array.tolist() for data in (shards, files)]
    assert keys == ([[0, 1, 0, 0, 1, 0]] * 2 if use_video else [None, keys[1]])
    assert ("clips" in shards.describe().text) and "with captions" in shards.describe().text
    again = pickle.loads(pickle.dumps(shards))
    assert (
        torch.equal(again.read(1, View(flip=True)).x, shards.read(1, View(flip=True)).x)
        and again.fingerprint().identity == shards.fingerprint().identity
    )


def test_a_loader_with_workers_reads_the_same(mixed):
    data = build_dataset(str(mixed / "tars"), 16, seed=0)
    schedule = build_schedule(data, 2, 1, 0)
    runs = []
    for workers in (0, 2):
        options = dict(dp_rank=0, dp_size=1, batch_size=2, end_step=3, num_workers=workers)
        with build_loader(data, schedule, **options) as batches:
            runs.append([(batch.x, batch.text) for batch in batches])
    assert len(runs[0]) == 3
    for (x, text), (x2, text2) in zip(*runs, strict=True):
        assert torch.equal(x, x2) and text == text2


def test_damage_is_named_by_tar_and_key(tmp_path):
    path = write_tar(tmp_path / "x.tar", captioned(4))
    make_indexes(str(tmp_path), num_workers=1)
    data = build_dataset(str(tmp_path), 8, seed=0)
    row = TarIndex(index_of(path)).rows[2]
    with open(path, "r+b") as file:
        file.seek(int(row["medium_at"]) + 60)
        file.write(b"\0damage\0")
    item = data[SampleKey(2, 0, 0)]
    assert item.text == "a 3" and item.skipped == (f"{path}: 0002.png: damaged: its checksum is not the index's",)
    check = data.fingerprint().checksums.share(0, 1)
    check.check()
    check.wait()
    with pytest.raises(DataError, match="x.tar is damaged: its checksum is not the index's"):
        check.check()
    os.truncate(path, 3000)
    with pytest.raises(DataError, match="x.tar is truncated: it ends before byte"):
        data[SampleKey(3, 0, 0)]
    with pytest.raises(DataError, match="x.tar is truncated: it has 3,000 bytes, its index says"):
        pickle.loads(pickle.dumps(data))[SampleKey(3, 0, 0)]  # a copy opens the file again
    with pytest.raises(ValueError, match="--data_path .*x.tar is truncated"):
        build_dataset(str(tmp_path), 8, seed=0)


def test_mistakes_are_told_before_training(tmp_path):
    path = write_tar(tmp_path / "x.tar", captioned(2))
    with pytest.raises(ValueError, match=f"no index beside x.tar; make it: python preprocess.py index {tmp_path}"):
        build_dataset(str(tmp_path), 8, seed=0)
    make_indexes(str(path), num_workers=1)
    assert len(build_dataset(str(path), 8, seed=0)) == 2
    write_tar(path, captioned(30))
    with pytest.raises(ValueError, match="x.tar is not the tar that its index was made of"):
        build_dataset(str(tmp_path), 8, seed=0)
    make_indexes(str(tmp_path), num_workers=1)
    write_tar(tmp_path / "y.tar", [("a.png", picture(0)), ("a.cls", b"1")])
    make_indexes(str(tmp_path), num_workers=2)
    with pytest.raises(ValueError, match="x.tar has captions and .*y.tar classes"):
        build_dataset(str(tmp_path), 8, seed=0)
    (tmp_path / "x.tar").unlink()
    (tmp_path / "class_names.json").write_text('["cat"]')
    (tmp_path / "far").mkdir()
    write_tar(tmp_path / "far" / "z.tar", [("a.png", picture(0)), ("a.cls", b"2000000000")])
    make_indexes(str(tmp_path / "far"))
    with pytest.raises(ValueError, match="a sample of .*z.tar has the class 2,000,000,000; at most 1,000,000 classes"):
        build_dataset(str(tmp_path / "far"), 8, seed=0)
    with pytest.raises(ValueError, match="class_names.json names 1 classes, the labels go to 1"):
        build_dataset(str(tmp_path), 8, seed=0)
    (tmp_path / "class_names.json").write_text('["cat", "dog"]')
    data = build_dataset(str(tmp_path), 8, seed=0)
    assert data.class_names == ["cat", "dog"] and data[SampleKey(0, 0, 0)].y == 1 and data.random_flip


def test_more_tars_than_a_process_may_open(mixed, monkeypatch):
    monkeypatch.setattr(files, "MOST_OPEN", 2)

    def read() -> int:
        data = build_dataset(str(mixed / "tars"), 8, seed=0)
        assert [data[SampleKey(row, 0, row)].text for row in (0, 3, 1, 2)] == [f"caption {i}" for i in (0, 5, 2, 3)]
        return len(os.listdir("/proc/self/fd"))

    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(1) as pool:  # a thread begins without open files
        assert pool.submit(read).result() - before == 2


def test_ten_million_samples_cost_what_is_read_of_them(tmp_path):
    """Tar and index are sparse files, so that the test writes next to nothing."""
    rows = 10_000_000
    tar = tmp_path / "x.tar"
    header = header_of(rows=rows, tar_bytes=4 << 40, pictures=rows, suffixes=[".png"])
    write_index(index_of(tar), header, np.zeros(0, ROW), b"")
    index_path, start = index_of(tar), index_of(tar).stat().st_size
    os.truncate(index_path, start + rows * ROW.itemsize)
    with open(tar, "wb") as file:
        file.truncate(4 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = build_dataset(str(tmp_path), 8, seed=0)
    assert len(data) == rows and data.label(rows - 1) == 0 and data.shapes().key(12345) == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB


def index_alone(folder, name, kinds):
    """Write an empty tar whose index has a clip where ``kinds`` is true and a picture elsewhere."""
    rows = np.zeros(len(kinds), ROW)
    rows["suffix"], rows["number"] = kinds, np.arange(len(kinds))
    pictures = len(kinds) - int(sum(kinds))
    (folder / f"{name}.tar").write_bytes(bytes(1024))
    header = header_of(rows=len(kinds), tar_bytes=1024, sha256=name * 64, pictures=pictures, suffixes=[".png", ".mp4"])
    write_index(index_of(folder / f"{name}.tar"), header, rows, b"")


@pytest.fixture
def kinds(tmp_path, monkeypatch):
    """Write tars to ``tmp_path / "tars"``, some of one kind alone; return which samples are clips."""
    monkeypatch.setenv(row_arrays.FOLDER, str(tmp_path / "sizes"))
    random = np.random.default_rng(0)
    of = [*(random.random(1500) < 0.3 for _ in range(2)), [True] * 1100, [False] * 1030, random.random(7) < 0.5]
    (tmp_path / "tars").mkdir()
    for name, each in zip("abcde", of, strict=True):
        index_alone(tmp_path / "tars", name, each)
    return np.concatenate(of)


@pytest.mark.parametrize("large", [1, 2**20])  # kept in a file and mapped, or in memory
def test_the_pictures_of_mixed_tars_are_found_without_a_list_of_them(tmp_path, kinds, large, monkeypatch):
    monkeypatch.setattr(row_arrays, "LARGE", large)
    for _ in range(2):
        data = build_dataset(str(tmp_path / "tars"), 8, seed=0)
        pictures = np.flatnonzero(~kinds)
        assert len(data) == len(pictures)
        for row in (0, 1, 999, *range(1000, len(data), 97), len(data) - 1):
            number, place, _ = data.find_record(row)
            assert data.starts[number] + place == pictures[row] and data.next_row(row) == (row + 1) % len(data)
        both = build_dataset(str(tmp_path / "tars"), 8, seed=0, use_video=True)
        assert (
            isinstance(both.shapes().array, np.memmap) == (large == 1)
            and both.shapes().array.tolist() == kinds.tolist()
        )
    index_alone(tmp_path / "tars", "e", [True, False, True, False, False, False, False])  # same tar, other kinds
    again = build_dataset(str(tmp_path / "tars"), 8, seed=0, use_video=True)
    assert again.shapes().array[-7:].tolist() == [1, 0, 1, 0, 0, 0, 0]


def test_the_next_row_of_a_shape_is_found_without_a_look_at_those_between(tmp_path, kinds, monkeypatch):
    data = build_dataset(str(tmp_path / "tars"), 8, seed=0, use_video=True)
    sides = (data, *hold_out(data, 0.2))
    of_sides = [np.array([kinds[row] for row in side.rows[:]]) for side in sides[1:]]
    looked = []
    read = TarIndex.record
    monkeypatch.setattr(TarIndex, "record", lambda index, row: looked.append(row) or read(index, row))
    for side, of_side in zip(sides, (kinds, *of_sides), strict=True):
        for row in (0, 17, len(side) // 2, len(side) - 1):
            later = np.flatnonzero(np.concatenate([of_side[row + 1 :], of_side[: row + 1]]) == of_side[row])
            assert side.next_row(row) == (row + 1 + later[0]) % len(side)
    assert len(looked) <= 12


def test_tars_of_one_kind_are_known_by_their_headers(tmp_path, monkeypatch):
    for name, is_clip in zip("abcd", (False, True, True, False), strict=True):
        index_alone(tmp_path, name, [is_clip] * 5)
    monkeypatch.setattr(TarIndex, "rows", property(lambda index: pytest.fail("all records are looked at")))
    data = build_dataset(str(tmp_path), 8, seed=0)
    assert [data.find_record(row)[0] for row in range(10)] == [0] * 5 + [3] * 5
    both = build_dataset(str(tmp_path), 8, seed=0, use_video=True)
    assert both.shapes().array.tolist() == [0] * 5 + [1] * 10 + [0] * 5


def test_sizes_are_looked_up_by_several_threads_which_open_few_files(mixed, tmp_path, monkeypatch):
    sizes, threads = [], {8: set(), 1: set()}
    for count in (8, 1):
        monkeypatch.setenv(row_arrays.FOLDER, str(tmp_path / str(count)))
        monkeypatch.setattr(dataset.ShardDataset, "size_threads", count)
        pool = ThreadPoolExecutor(1)  # a thread's files are closed when it ends
        data = pool.submit(partial(build_dataset, str(mixed / "tars"), 16, seed=0, use_video=True)).result()
        meet, read = threading.Barrier(min(count, len(data))), store.LocalTars.read

        def together(tars, *place, meet=meet, read=read, threads=threads[count]):
            meet.wait(10)  # wait until all threads read
            threads.add(threading.get_ident())
            return read(tars, *place)

        with monkeypatch.context() as patched, pool:
            patched.setattr(store.LocalTars, "read", together)
            sizes.append(pool.submit(lambda data=data: data.shapes().media().tolist()).result())
        assert not [path for path in map(os.path.realpath, glob.glob("/proc/self/fd/*")) if str(mixed) in path]
    assert sizes[0] == sizes[1] == [[1, 17, 20], [9, 32, 40], [1, 17, 20]] * 2 and [
        len(each) for each in threads.values()
    ] == [6, 1]
