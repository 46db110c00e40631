"""Packs have the same samples, crops and places for any ranks and workers, and after any kill."""

import json
import os
import random
import signal
import time
from zlib import crc32

import numpy as np
import pytest
import torch
from PIL import Image

from opendit.data import build_dataset, build_loader
from opendit.data.loader import build_schedule
from opendit.data.row_arrays import FOLDER
from opendit.data.shaped import TokenSize, shape_media, shape_table

TOKENS, PACKS, STEPS = 200, 24, 40  # more than 2,000 samples
FEW = 20  # steps of tests that start many processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write two folders of pictures of random sizes, 60 in all, and a blend of them."""
    root, rng = tmp_path_factory.mktemp("packs"), np.random.default_rng(0)
    for name, count in (("a", 40), ("b", 20)):
        (root / name / "one").mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (*rng.integers(6, 40, 2), 3), np.uint8)
            Image.fromarray(pixels).save(root / name / "one" / f"{number}.png")
    (root / "blend.yaml").write_text(
        "sources: [{path: a, weight: 1}, {path: b, weight: 2}]\nchanges: [{step: 8, weights: {a: 1}}]\n"
    )
    os.environ[FOLDER] = str(root / "sizes")
    yield root
    del os.environ[FOLDER]


def opened(folder):
    data = build_dataset(str(folder / "blend.yaml"), 32, seed=3)
    return shape_media(
        data, shape_table(32, 1, TokenSize(1, 1, (2, 2)), TOKENS * 2, fine=True), 1, 1.25, "--pack_tokens"
    )


def scheduled(data):
    return build_schedule(data, PACKS, 1, 3, pack_tokens=2 * TOKENS, attention=100.0)


def seen(batch, schedule):
    """Return (step, index) -> (row, shape, checksum, pack, place in the pack)."""
    rows, ends = schedule.rows(batch.step), schedule.ends(batch.step)
    assert batch.samples_in_step == len(rows) and len(batch.x) == len(batch.index) == len(batch.y)
    lengths = [x[0].numel() for x in batch.x]
    assert lengths == sorted(lengths, reverse=True)
    found = {}
    for x, index in zip(batch.x, batch.index.tolist(), strict=True):
        pack = int(np.searchsorted(ends, index, side="right"))
        place = index - (ends[pack - 1] if pack else 0)
        found[batch.step, index] = rows[index], tuple(x.shape), crc32(x.numpy().tobytes()), pack, place
    return found


def read(data, schedule, world, start, stop, units=1, workers=0):
    found = {}
    for rank in range(world):
        how = dict(dp_rank=rank, dp_size=world, batch_size=units, micro_batches=PACKS // world // units)
        with build_loader(
            data, schedule, **how, start_step=start, end_step=stop, num_workers=workers, as_bytes=True
        ) as loader:
            for batch in list(loader):  # by now the worker may have reused their memory
                of_batch = seen(batch, schedule)
                assert not found.keys() & of_batch.keys()
                found |= of_batch
    return found


@pytest.fixture(scope="module")
def whole(folder):
    data = opened(folder)
    found = read(data, scheduled(data), 1, 0, STEPS)
    assert len(found) > 2_000 and len({entry[1] for entry in found.values()}) > 30
    tokens = sum(shape[1] * shape[2] // 4 for _, shape, *_ in found.values())
    assert tokens / (STEPS * PACKS * 2 * TOKENS) > 0.89
    return found


def up_to(whole, steps):
    return {key: entry for key, entry in whole.items() if key[0] < steps}


@pytest.mark.parametrize("workers", [1, 4])
def test_worker_processes_read_the_same(folder, whole, workers):
    data = opened(folder)
    assert read(data, scheduled(data), 1, 0, FEW, units=2, workers=workers) == up_to(whole, FEW)


def test_ranks_and_workers_that_change_read_the_same_and_go_on_from_the_checkpoints_carry(folder, whole):
    found, state, start = {}, None, 0
    for world, units, workers, stop in (
        (8, 1, 0, 5), (3, 2, 1, 12), (1, 1, 4, 20), (6, 2, 0, 31), (8, 3, 0, STEPS),
    ):  # fmt: skip
        data = opened(folder)
        schedule = scheduled(data)
        assert state is None or schedule.restore(json.loads(state), start)
        found |= read(data, schedule, world, start, stop, units, workers)
        start, state = stop, json.dumps(schedule.state(stop))
    assert found == whole


def train(folder, log):
    """Read on from the last line of the log, and add a line a step with what was read and the schedule's state."""
    lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    log.write_text("".join(lines))
    data = opened(folder)
    schedule, start = scheduled(data), len(lines)
    if lines:
        assert schedule.restore(json.loads(lines[-1])["packs"], start)
    with log.open("a") as file:
        for step in range(start, FEW):
            found = read(data, schedule, 3, step, step + 1, workers=step % 2)
            entries = [[*key, *map(list, [entry])] for key, entry in found.items()]
            file.write(json.dumps({"entries": entries, "packs": schedule.state(step + 1)}) + "\n")
            file.flush()


def test_kills_at_any_moment_lose_and_repeat_nothing(folder, whole, tmp_path):
    log, kills = tmp_path / "log.jsonl", 0
    log.touch()
    torch.set_num_threads(1)
    moments = random.Random(1)
    while True:
        if not (child := os.fork()):
            try:
                train(folder, log)
                os._exit(0)
            finally:
                os._exit(1)
        lines = log.read_text().count("\n") + moments.randint(1, 3) + FEW * (kills >= 4)
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and log.read_text().count("\n") < lines:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.02))  # somewhere in the next step
        if ended[0]:
            assert ended[1] == 0
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
    found = {}
    for line in log.read_text().splitlines():
        for step, index, (row, shape, crop, pack, place) in json.loads(line)["entries"]:
            assert (step, index) not in found
            found[step, index] = row, tuple(shape), crop, pack, place
    assert kills >= 2 and found == up_to(whole, FEW)
