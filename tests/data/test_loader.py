"""The schedule of batches, and the worker processes."""

import gc
import os
import pickle
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data import (
    BadSample,
    BatchSchedule,
    DataError,
    MediaDataset,
    SampleKey,
    build_dataset,
    build_loader,
    loader,
)
from opendit.data.base import PLAIN, Description, Fingerprint, Item
from opendit.data.blend import BlendedDataset
from opendit.data.captioned_media import TableRow, write_csv
from opendit.data.held_out import SomeRows
from opendit.data.loader import read_batches
from opendit.data.shards.program import make_indexes
from tests.data.shards.tars import captioned, picture, write_tar


class Numbers(MediaDataset):
    """Row r is a 1x1 picture of value r, class r % 7; ``bad`` rows can't be read; ``deadly`` ones kill the process."""

    def __init__(self, size, bad=(), deadly=()):
        self.size, self.bad, self.deadly = size, frozenset(bad), frozenset(deadly)

    def __len__(self):
        return self.size

    def load(self, row, flip):
        if row in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if row in self.bad:
            raise BadSample(f"file{row}", "broken")
        return torch.full((1, 1, 1), float(row))

    def read(self, row, view=PLAIN):
        return Item(self.load(row, view.flip), row % 7)

    def fingerprint(self):
        return Fingerprint(lambda: str(self.size))

    def describe(self):
        return Description(text="numbers", sample_shape=(1, 1, 1), class_names=[str(i) for i in range(7)])


def collect(dataset, schedule, **options):
    iterator = build_loader(dataset, schedule, **options)
    batches = list(iterator)
    iterator.close()
    return batches


# ---------------------------------------------------------------- the schedule


def test_too_small_a_data_set():
    with pytest.raises(ValueError, match=r"10 samples.*global batch of 16 = batch_size x ranks x grad_accumulation.*"):
        BatchSchedule(10, 16, 0)
    with pytest.raises(ValueError):
        BatchSchedule(10, 0, 0)


# ---------------------------------------------------------------- cutting the global batch into parts


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(1, 4),
    micro=st.integers(1, 3),
    batch=st.integers(1, 4),
    spare=st.integers(0, 20),
    start=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_ranks_and_micro_batches_make_up_the_global_batch(ranks, micro, batch, spare, start, seed):
    total = ranks * micro * batch
    data, schedule = Numbers(total + spare), BatchSchedule(total + spare, total, seed)
    parts = [
        collect(
            data,
            BatchSchedule(total + spare, total, seed),
            dp_rank=rank,
            dp_size=ranks,
            batch_size=batch,
            micro_batches=micro,
            start_step=start,
            end_step=start + 3,
            num_workers=0,
        )
        for rank in range(ranks)
    ]
    assert all(len(part) == 3 * micro for part in parts)
    for step in range(start, start + 3):
        mine = [b for part in parts for b in part if b.step == step]
        index, x = torch.cat([b.index for b in mine]), torch.cat([b.x for b in mine]).flatten()
        assert index.sort().values.tolist() == list(range(total))
        assert x[index.argsort()].tolist() == schedule.rows(step)  # the same global batch however it is cut
        assert torch.equal(torch.cat([b.y for b in mine]), x.long() % 7)
        assert {b.epoch for b in mine} == {schedule.epoch(step)}
    for rank, part in enumerate(parts):
        for b in part:
            assert b.index.tolist() == [(b.micro * ranks + rank) * batch + i for i in range(batch)]
        assert [(b.step, b.micro) for b in part] == [(s, m) for s in range(start, start + 3) for m in range(micro)]
    assert part[0].x.dtype == torch.float32 and part[0].y.dtype == part[0].index.dtype == torch.int64


def test_the_parts_must_fit_the_schedule():
    data = Numbers(20)
    with pytest.raises(ValueError, match="global batch of 8"):
        build_loader(data, BatchSchedule(20, 8, 0), dp_rank=0, dp_size=2, batch_size=2)
    with pytest.raises(ValueError, match="20"):
        build_loader(data, BatchSchedule(21, 8, 0), dp_rank=0, dp_size=2, batch_size=4)


# ---------------------------------------------------------------- worker processes


def test_workers_give_what_this_process_gives_across_epochs_and_from_any_start():
    data = build_dataset("digits", 8, seed=5, random_flip=True)
    schedule = BatchSchedule(len(data), 600, 5)  # 2.4 steps an epoch
    options = dict(dp_rank=1, dp_size=2, batch_size=150, micro_batches=2, end_step=6)
    plain = collect(data, schedule, num_workers=0, **options)
    assert [b.epoch for b in plain] == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    worked = collect(data, schedule, num_workers=2, **options)
    resumed = collect(data, schedule, num_workers=1, start_step=3, **options)
    for a, b in [*zip(plain, worked, strict=True), *zip(plain[6:], resumed, strict=True)]:
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and torch.equal(a.index, b.index)
        assert (a.step, a.micro, a.epoch) == (b.step, b.micro, b.epoch)


class Growing(Numbers):
    """Row r has bytes of value r % 256, in another order in memory; every third row is twice as large."""

    def load(self, row, flip):
        size = 200 if row % 3 else 400
        return torch.full((3, size, 200), row % 256, dtype=torch.uint8).permute(2, 0, 1)


@pytest.mark.parametrize("pin", [True, False])  # with a GPU
@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_batch_keeps_its_values_while_later_ones_are_made(as_bytes, pin):
    """Worker processes reuse the memory of earlier batches."""
    options = dict(dp_rank=0, dp_size=1, batch_size=1, end_step=24, as_bytes=as_bytes, pin_memory=pin)
    iterator = build_loader(Growing(24), BatchSchedule(24, 1, 0), num_workers=2, **options)
    batches = []
    for batch in iterator:
        batches.append(batch)
        time.sleep(0.005)  # let the workers run ahead
    iterator.close()
    for step, batch in enumerate(batches):
        (row,) = BatchSchedule(24, 1, 0).rows(step)
        assert batch.x.shape == (1, 200, 3, 200 if row % 3 else 400)
        assert torch.equal(
            batch.x.unique(), torch.tensor([row], dtype=torch.uint8) if as_bytes else row / 127.5 - 1 + torch.zeros(1)
        )
        assert as_bytes or batch.x.is_contiguous()


class ProcessIds(Numbers):
    def load(self, row, flip):
        return torch.tensor([[[float(os.getpid())]], [[float(torch.get_num_threads())]]])


def test_more_workers_than_cores_are_nothing_to_warn_of(monkeypatch, recwarn):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    given = dict(dp_rank=0, dp_size=1, batch_size=2, num_workers=2)
    iterator = build_loader(Numbers(4), BatchSchedule(4, 2, 0), **given)
    next(iterator)
    iterator.close()
    assert not [warning for warning in recwarn if "DataLoader" in str(warning.message)]


def test_workers_live_through_the_epochs_with_one_thread_each_and_end_on_close():
    iterator = build_loader(ProcessIds(4), BatchSchedule(4, 2, 0), dp_rank=0, dp_size=1, batch_size=2, num_workers=2)
    batches = [next(iterator) for _ in range(12)]
    pids = {int(pid) for b in batches for pid in b.x[:, 0].flatten()}
    assert len(pids) == 2 and os.getpid() not in pids
    assert {int(n) for b in batches for n in b.x[:, 1].flatten()} == {1}
    iterator.close()
    iterator.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(iterator) == []


def test_a_loader_that_ends_slowly_is_not_freed_by_its_thread(monkeypatch):
    """If that thread freed the loader's tensors while the interpreter ends, the process would abort."""
    slow, shut_down, seen = threading.Event(), loader.shut_down, []

    def end_slowly(results):
        seen.append(weakref.ref(results))
        slow.wait(60)
        shut_down(results)

    monkeypatch.setattr(loader, "shut_down", end_slowly)
    iterator = build_loader(Numbers(8), BatchSchedule(8, 2, 0), dp_rank=0, dp_size=1, batch_size=2, num_workers=1)
    next(iterator)
    iterator.close()  # waits two seconds for it
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "loader end")
    slow.set()
    thread.join(60)
    gc.collect()
    (results,) = seen
    assert not thread.is_alive() and results() is not None
    loader.not_ended.clear()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_thread_that_watches_a_loader_ends_with_it(workers):
    """A thread that frees batches while the interpreter ends would abort the process."""
    given = dict(dp_rank=0, dp_size=1, batch_size=2, num_workers=workers, patience=60.0)
    iterator = build_loader(Numbers(8), BatchSchedule(8, 2, 0), **given)
    next(iterator)
    (watcher,) = (thread for thread in threading.enumerate() if thread.name == "reading")
    iterator.close()
    assert not watcher.is_alive()


def test_a_worker_that_dies_is_reported():
    data = Numbers(100, deadly=[BatchSchedule(100, 1, 0).rows(20)[0]])
    iterator = build_loader(data, BatchSchedule(100, 1, 0), dp_rank=0, dp_size=1, batch_size=1, num_workers=1)
    with pytest.raises(DataError, match="process that reads the data died, exit code -9.*--num_workers"):
        for _ in range(30):
            next(iterator)
            time.sleep(0.01)  # a worker may die now: the error must wait for the next batch
    iterator.close()


def test_a_dead_worker_does_not_interrupt_the_program_anywhere(monkeypatch):
    """torch's signal handler would raise at any line that runs when a worker dies."""
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        data, schedule = Numbers(4), BatchSchedule(4, 1, 0)
        build_loader(data, schedule, dp_rank=0, dp_size=1, batch_size=1, num_workers=1).close()
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGCHLD, before)


class Collecting(Numbers):
    """Collects garbage while it reads."""

    def load(self, row, flip):
        assert gc.isenabled()
        gc.collect()
        return super().load(row, flip)


class Owned:
    """Records the process in which it is freed."""

    def __init__(self, path):
        self.path, self.cycle = path, self

    def __del__(self):
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()} ")


def test_workers_do_not_collect_the_garbage_that_they_inherit(tmp_path):
    """An inherited object that ends a thread, such as a process group, would hang or crash a worker, which lacks the
    thread."""
    schedule = BatchSchedule(8, 1, 0)
    gc.collect()
    gc.disable()  # only in this process; workers must still collect
    try:
        Owned(tmp_path / "freed")
        loader = build_loader(Collecting(8), schedule, dp_rank=0, dp_size=1, batch_size=1, num_workers=2)
        assert not gc.isenabled()
        for _ in range(8):
            next(loader)
        loader.close()
        assert not (tmp_path / "freed").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "freed").read_text().split() == [str(os.getpid())]
    build_loader(Collecting(8), schedule, dp_rank=0, dp_size=1, batch_size=1, num_workers=1).close()
    assert gc.isenabled()


def test_data_sets_travel_to_processes_that_are_not_forked():
    data = build_dataset("digits", 8, seed=1)
    assert torch.equal(pickle.loads(pickle.dumps(data)).images, data.images)


# ---------------------------------------------------------------- unreadable files


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_files_are_replaced_counted_and_told_once(workers):
    told = []
    data = Numbers(100, bad=[10, 50, 51])
    iterator = build_loader(
        data,
        BatchSchedule(100, 100, 0),
        dp_rank=0,
        dp_size=1,
        batch_size=100,
        end_step=3,
        num_workers=workers,
        on_skip=told.append,
    )
    first = next(iterator)
    assert (iterator.read, iterator.skipped) == (104, 4)  # row 50 is replaced by 51, which is bad too, and then by 52
    rows = first.x.flatten().tolist()
    wanted = [{10: 11, 50: 52, 51: 52}.get(row, row) for row in BatchSchedule(100, 100, 0).rows(0)]
    assert rows == wanted and first.y.tolist() == [row % 7 for row in wanted]
    list(iterator)
    assert (iterator.read, iterator.skipped) == (312, 12)
    assert sorted(told) == ["file10: broken", "file50: broken", "file51: broken"]


def test_too_many_bad_files_stop_the_run_after_a_hundred():
    data = Numbers(1000, bad=range(0, 1000, 10))
    iterator = build_loader(data, BatchSchedule(1000, 10, 0), dp_rank=0, dp_size=1, batch_size=10, num_workers=0)
    with pytest.raises(
        DataError, match=r"files read so far can't be read, more than --max_bad 0.05: file\d+0: broken; .*"
    ):
        for _ in range(100):
            next(iterator)
    assert 100 <= iterator.read < 112
    patient = build_loader(
        data, BatchSchedule(1000, 10, 0), dp_rank=0, dp_size=1, batch_size=10, num_workers=0, max_bad=0.2, end_step=100
    )
    assert len(list(patient)) == 100


def test_batches_tell_how_many_bytes_were_read(tmp_path):
    write_tar(tmp_path / "t.tar", members := captioned(6))
    make_indexes(str(tmp_path / "t.tar"))
    rows = []
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(picture(i, size=(20 + i, 21)))
        rows.append(TableRow(tmp_path / f"{i}.png", "a"))
    write_csv(tmp_path / "pictures.csv", rows)
    tar, table = (build_dataset(str(tmp_path / name), 8, seed=0) for name in ("t.tar", "pictures.csv"))
    blend = BlendedDataset(["tar", "table"], [tar, table], [(0, (1, 1))], shown="--data_path blend")
    table_bytes = sum((tmp_path / f"{i}.png").stat().st_size for i in range(6))
    tar_bytes = sum(len(content) for _, content in members)
    for data, expected in ((table, table_bytes), (blend, tar_bytes + table_bytes)):
        some = SomeRows(data, np.arange(len(data)), "all")
        keys = [[SampleKey(row, 0, row)] for row in range(len(data))]
        with read_batches(some, keys, num_workers=1) as batches:
            assert sum(batch.bytes_read for batch in batches) == batches.bytes_read == expected


@pytest.mark.parametrize(
    "error, kind, message",
    [
        (MemoryError("no room"), DataError, r"ran out of memory at \w+.* \(no room\); lower --num_workers"),
        (RuntimeError("unable to write to shared memory"), DataError, "raise the size of /dev/shm"),
        (OSError("the disk is down"), DataError, "^the disk is down$"),
        (KeyError("a defect"), RuntimeError, r"(?s)a loader process failed at .*KeyError: 'a defect'.*in read\n"),
    ],
)
def test_an_error_of_a_worker_names_its_cause_and_the_fix(error, kind, message):
    class Failing(Numbers):
        def read(self, row, view=PLAIN):
            raise error

    with build_loader(Failing(8), BatchSchedule(8, 8, 0), dp_rank=0, dp_size=1, batch_size=8, num_workers=1) as batches:
        with pytest.raises(kind, match=message):
            next(batches)
