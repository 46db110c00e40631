"""Sample parts on disk: division among ranks, damaged files, differing settings, and memory for the .npz."""

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opendit.sampling import sample_cache as module
from opendit.sampling.output_files import write_npz
from opendit.sampling.output_pipeline import batch_size_of
from opendit.sampling.sample_cache import (
    CacheWriter,
    DamagedPart,
    SampleCache,
    SamplingJob,
    find_unfinished_job,
    samples_a_part,
)
from tests.memory import peak_bytes

SETTINGS = {"--seed": "0", "weights": "abc"}
JOB = SamplingJob(SETTINGS, count=11, kept=6, shape=(2, 5, 3), samples_a_part=4)


def pixels(job: SamplingJob, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (job.count, *job.shape), np.uint8)


def written(folder: Path, job: SamplingJob = JOB) -> tuple[SampleCache, np.ndarray]:
    parts, drawn = SampleCache(folder, job), pixels(job)
    parts.begin()
    for part in range(parts.count):
        first = parts.samples(part).start
        parts.write(part, drawn[first : first + parts.rows(part)])
    return parts, drawn


def test_a_part_is_a_npy_file_with_a_checksum(tmp_path):
    parts, drawn = written(tmp_path)
    assert [list(parts.samples(p)) for p in range(parts.count)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert [parts.rows(p) for p in range(3)] == [4, 2, 0]
    assert np.array_equal(np.load(parts.path(1)), drawn[4:6]) and np.load(parts.path(2)).shape == (0, 2, 5, 3)
    assert np.array_equal(np.concatenate(list(parts.all_blocks())), drawn[:6].reshape(-1))
    assert [len(parts.first(n)) for n in (1, 4, 5, 100)] == [1, 4, 5, 6]
    assert np.array_equal(parts.first(5), drawn[:5])
    assert parts.missing(lambda number: True) == ([], []) and parts.count_cached() == 11
    parts.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["short", "flipped", "checksum", "longer", "empty", "renamed", "of another job"])
def test_a_damaged_part_is_known(how, tmp_path):
    parts, drawn = written(tmp_path)
    path = parts.path(0)
    content = bytearray(path.read_bytes())
    if how == "short":
        content = content[:-40]
    elif how in ("flipped", "checksum"):
        content[-1 if how == "checksum" else -50] ^= 1
    elif how == "longer":
        content += b"\0"
    elif how == "empty":
        content = b""
    path.write_bytes(content)
    if how == "renamed":  # another part of the same shape
        parts, _ = written(tmp_path, job := replace(JOB, kept=11))
        path = parts.path(0)
        os.replace(parts.path(1), path)
        parts.write(1, pixels(job)[4:8])
    if how == "of another job":
        SampleCache(tmp_path, replace(JOB, settings={**SETTINGS, "--seed": "1"})).write(0, drawn[:4])
    missing, problems = parts.missing(lambda number: True)
    assert missing == [0] and problems == [f"{path} is damaged: its samples are drawn again"]
    with pytest.raises(DamagedPart, match="00000000.npy"):
        list(parts.all_blocks())


def test_parts_that_are_not_there_or_have_lost_a_file(tmp_path):
    parts, _ = written(tmp_path)
    parts.path(2).unlink()
    (parts.folder / ".00000001.77.npy").touch()
    assert parts.missing(lambda number: number != 5) == ([1, 2], ["sample 5 has lost its file: it is drawn again"])
    assert parts.count_cached() == 8
    parts.remove_unfinished()
    assert sorted(path.name for path in parts.folder.iterdir()) == ["00000000.npy", "00000001.npy", "manifest.json"]


def test_only_parts_are_removed(tmp_path):
    parts, _ = written(tmp_path)
    (parts.folder / "mine.npy").touch()
    parts.remove()
    assert [path.name for path in parts.folder.iterdir()] == ["mine.npy"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".parts").symlink_to(parts.folder)
    with pytest.raises(ValueError, match="symbolic link"):
        SampleCache(tmp_path / "b", JOB)


def test_what_differs_is_told(tmp_path):
    assert find_unfinished_job(tmp_path) is None
    parts, _ = written(tmp_path)
    found = find_unfinished_job(tmp_path)
    assert (found.cached, found.count, found.samples_a_part) == (11, 11, 4)
    assert found.differences(SETTINGS) == []
    assert found.differences({"--seed": "2", "extra": "x"}) == [
        "--seed 0 there, 2 here", "weights abc there, none here", "extra none there, x here"
    ]  # fmt: skip
    for part in range(3):
        parts.path(part).unlink()
    assert find_unfinished_job(tmp_path) is None  # nothing would be lost


@pytest.mark.parametrize(
    "change", [lambda c: c.update(samples=12), lambda c: c["settings"].update(weights="x"), lambda c: c.pop("part")]
)
def test_a_damaged_manifest_is_an_error(change, tmp_path):
    parts, _ = written(tmp_path)
    path = parts.folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest.json.*--overwrite"):
        find_unfinished_job(tmp_path)


def test_a_part_is_written_when_it_is_complete_by_whichever_thread(tmp_path):
    parts, drawn = SampleCache(tmp_path, JOB), pixels(JOB)
    parts.begin()
    assembly = CacheWriter(parts, [0, 2])
    assert [number for number in range(11) if assembly.wants(number)] == [0, 1, 2, 3, 8, 9, 10]
    for number in (3, 9, 0, 1):
        assembly.add(number, drawn[number])
    assert parts.count_cached() == 0
    threads = [Thread(target=assembly.add, args=(number, drawn[number])) for number in (2, 10, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(np.load(parts.path(0)), drawn[:4]) and parts.missing(lambda number: True)[0] == [1]


@given(
    st.integers(1, 3000),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([1, 3 * 64, 10**6, 10**8]),
    st.integers(1, 9),
    st.data(),
)
def test_every_missing_sample_is_drawn_once_in_the_same_company(count, batch, later, size, replicas, data):
    parts = SampleCache(Path("nowhere"), SamplingJob({}, count, 0, (1,), samples_a_part(count, batch, size)))
    assert parts.size == 1 or parts.size % batch == 0
    missing = data.draw(st.sets(st.integers(0, parts.count - 1)))
    everything, some = parts.batches_to_draw(range(parts.count), later), parts.batches_to_draw(sorted(missing), later)
    wanted = {number for part in missing for number in parts.samples(part)}
    numbers = [number for group in some for draw in group for number in draw]
    assert wanted <= set(numbers) and len(numbers) == len(set(numbers))
    assert all(len(draw) <= later for group in some for draw in group)
    assert all(group in everything for group in some) and (later >= parts.size or len(numbers) == len(wanted))
    # A part is in one group, which one replica draws, so nobody else writes its file.
    owners = [{n // parts.size for draw in group for n in draw} for group in some]
    assert sum(map(len, owners)) == len(set().union(*owners))


@given(st.integers(1, 5000), st.integers(1, 70), st.integers(1, 9), st.sampled_from([1, 3 * 64, 10**6]))
def test_replicas_end_at_about_the_same_time(count, most, replicas, size):
    job = SamplingJob({}, count, 0, (1,), samples_a_part(count, most, size))
    batch = batch_size_of(job, most, replicas)
    assert 1 <= batch <= most
    if count <= module.FINE:
        batches, rounds = -(-count // batch), -(-count // (most * replicas))
        assert -(-batches // replicas) == rounds  # as many rounds as with the largest batches ...
        assert batch == 1 or rounds * replicas * (batch - 1) < count  # ... and smaller batches would need more
    elif count >= most * replicas:
        assert batch == most


def test_the_npz_takes_less_memory_than_two_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 1 << 18)
    job = SamplingJob(SETTINGS, count=24, kept=24, shape=(64, 1024, 16), samples_a_part=4)  # 4 MiB a part, 24 in all
    parts, drawn = written(tmp_path, job)
    part = 4 * 64 * 1024 * 16
    arrays = {"arr_0": ("|u1", drawn.shape, parts.all_blocks())}
    peak_of(lambda: write_npz(tmp_path / "a.npz", {"x": ("|u1", (3,), [np.zeros(3)])}))  # loads modules
    peak = peak_of(lambda: write_npz(tmp_path / "a.npz", arrays))
    assert peak < part, peak
    assert np.array_equal(np.load(tmp_path / "a.npz")["arr_0"], drawn)
    assert peak_of(lambda: write_npz(tmp_path / "b.npz", {"arr_0": ("|u1", drawn.shape, [drawn.copy()])})) > 5 * part


def peak_of(work) -> int:
    """Return the peak of :func:`peak_bytes`, which measures after torch operations, also while blocks are written."""
    true_open = zipfile.ZipFile.open

    def opened(self, *args, **kwargs):
        file = true_open(self, *args, **kwargs)
        true_write = file.write

        def write(data):
            torch.zeros(())
            return true_write(data)

        file.write = write
        return file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "open", opened)
        return peak_bytes(work)
