"""Clips that are enlarged when a batch is used have the same bits as clips enlarged when read."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate

from opendit.data import build_dataset, build_loader, build_schedule
from opendit.data.base import Small
from opendit.data.clips import enlarge, resize
from opendit.data.loader import build_schedule as schedule_of
from opendit.data.row_arrays import FOLDER
from opendit.data.shaped import TokenSize, shape_media, shape_table
from opendit.data.video_files import write_mp4

SIDES = st.integers(1, 70)


def of_torch(frames, height, width):
    """Resize (..., H, W, C) uint8 with torch on a CPU."""
    flat = frames.reshape(-1, *frames.shape[-3:]).permute(0, 3, 1, 2)
    out = interpolate(flat, (height, width), mode="bicubic", antialias=True).permute(0, 2, 3, 1)
    return out.reshape(*frames.shape[:-3], height, width, frames.shape[-1])


@settings(deadline=None)
@given(SIDES, SIDES, SIDES, SIDES, st.integers(1, 4), st.integers(0, 2**30), st.booleans())
def test_bits_are_those_of_torch_on_a_cpu(height, width, high, wide, channels, seed, harsh):
    frames = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (2, height, width, channels), np.uint8))
    frames = (frames > 127).to(torch.uint8) * 255 if harsh else frames  # overshoots both ends of the range
    assert torch.equal(resize(frames, (high, wide)), of_torch(frames, high, wide))


@pytest.mark.parametrize("side, target", [(240, 256), (255, 256), (64, 256), (1, 7), (223, 224), (113, 211)])
def test_bits_of_usual_and_of_prime_sizes(side, target):
    frames = torch.randint(0, 256, (3, side, side + 2, 3), dtype=torch.uint8)
    assert torch.equal(resize(frames, (target, target + 3)), of_torch(frames, target, target + 3))


def place(sample, shape):
    """Place ``sample`` in the upper left corner of noise."""
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    x[..., : sample.shape[-2], : sample.shape[-1]] = sample
    return x


@pytest.mark.parametrize("at_once", [1, 2000, 2**25])
@pytest.mark.parametrize("lead", [(3, 2), (3,)], ids=["clips", "pictures"])
@pytest.mark.parametrize("colours_last", [True, False])
def test_a_batch_of_all_kinds(at_once, lead, colours_last):
    whole = (13, 17)
    sizes = [(5, 7), (5, 7), None, (5, 7), (13, 9), (11, 17), None, (1, 1), (5, 7)]
    small, parts, wanted = [], [], []
    for number, size in enumerate(sizes):
        sample = torch.randint(0, 256, (*lead, *(size or whole)), dtype=torch.uint8)
        parts.append(place(sample, (*lead, *whole)))
        small.append(size and Small(*size, mirrored=number % 2 == 1))
        made = of_torch(sample.movedim(0, -1), *whole).movedim(-1, 0) if size else sample
        wanted.append(made.flip(-1) if size and number % 2 == 1 else made)
    x = torch.stack(parts)
    if colours_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    before = x.clone()
    assert torch.equal(enlarge(x, small, at_once), torch.stack(wanted)) and torch.equal(x, before)


def test_whole_batches_are_left_alone():
    x = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    for small in (None, [None, None]):
        assert torch.equal(enlarge(x, small), x)


# ---------------------------------------------------------------- through the loader

SIZES = [(20, 24), (20, 24), (48, 40), (24, 20), (31, 33), (20, 60)]
FRAMES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write clips smaller and larger than 32 pixels, two tables of them, and a blend of both."""
    root, rng = tmp_path_factory.mktemp("small"), np.random.default_rng(0)
    lines = ["path,text"]
    for number, size in enumerate(SIZES):
        write_mp4(root / f"{number}.mp4", rng.integers(0, 256, (9, *size, 3), np.uint8), 24)
        lines.append(f"{number}.mp4,clip {number}")
    (root / "clips.csv").write_text("\n".join(lines))
    (root / "other.csv").write_text("\n".join(lines[:1] + lines[3:6]))
    (root / "blend.yaml").write_text("sources: [{path: clips.csv, weight: 1}, {path: other.csv, weight: 2}]\n")
    return root


def opened(folder, kind, **options):
    name = "blend.yaml" if kind == "blend" else "clips.csv"
    how = dict(use_video=True, num_frames=FRAMES, frame_interval=2, random_flip=True) | options
    data = build_dataset(str(folder / name), 32, seed=1, **how)
    if kind not in ("buckets", "packs"):
        return data, build_schedule(data, 6, 1, 1)
    table = shape_table(32, FRAMES, TokenSize(2, 1, (4, 4)), 160, fine=kind == "packs")
    shaped = shape_media(data, table, 2, 4.0, "--bucket_tokens")
    how = {"pack_tokens": 320, "attention": 100.0} if kind == "packs" else {"bucket_tokens": 160}
    return shaped, schedule_of(shaped, 2, 1, 1, **how)


def batches(data, schedule, workers, enlarge, steps=4):
    size = schedule.global_batch
    how = dict(dp_rank=0, dp_size=1, batch_size=size, num_workers=workers, as_bytes=True, enlarge=enlarge)
    with build_loader(data, schedule, **how, end_step=steps) as loader:
        return list(loader)


def tensors(batch):
    return (batch.x,) if isinstance(batch.x, torch.Tensor) else batch.x


def enlarged(batch):
    if isinstance(batch.x, torch.Tensor):
        return replace(batch, x=enlarge(batch.x, batch.small))
    small = batch.small or [None] * len(batch.x)
    return replace(batch, x=tuple(enlarge(x[None], [each])[0] for x, each in zip(batch.x, small, strict=True)))


@pytest.mark.parametrize("kind", ["table", "blend", "buckets", "packs"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_leaves_it_gives_the_same_samples(folder, kind, workers, monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path / "sizes"))
    early = batches(*opened(folder, kind), 0, True)
    later = batches(*opened(folder, kind), workers, False)
    assert all(batch.small is None for batch in early)
    left = [sample for batch in later for sample in batch.small or ()]
    assert any(left) and not all(left)  # some are smaller than the size asked for, some larger
    assert {sample.mirrored for sample in left if sample} == {True, False}
    for one, other in zip(early, map(enlarged, later), strict=True):
        assert torch.equal(one.index, other.index) and one.text == other.text
        for wanted, found in zip(tensors(one), tensors(other), strict=True):
            assert torch.equal(wanted, found)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_kept_do_not_change(folder, workers):
    """The memory of a batch is reused only when nobody holds it."""
    data, schedule = opened(folder, "table")
    kept = batches(data, schedule, workers, True, steps=12)
    for step, batch in enumerate(kept):
        assert batch.step == step
        with build_loader(
            data, schedule, dp_rank=0, dp_size=1, batch_size=6, num_workers=0, as_bytes=True, start_step=step
        ) as fresh:
            assert torch.equal(next(fresh).x, batch.x)


def test_memory_is_used_again_once_nobody_holds_it():
    from opendit.data.loader import OwnMemory

    memory, x = OwnMemory(), torch.arange(24, dtype=torch.int16).view(2, 3, 4).transpose(0, 2)
    held = memory.copy(x)
    part = memory.copy(x + 1)[1]  # a view holds it as well
    assert held.stride() == x.stride() and torch.equal(held, x) and torch.equal(part, (x + 1)[1])
    places = set()
    for _ in range(5):
        passing = memory.copy(x + 2)
        places.add(passing.data_ptr())
        del passing
    assert len(places) == 1 and torch.equal(held, x) and torch.equal(part, (x + 1)[1])
    place = held.data_ptr()
    del held
    assert place in {each.data_ptr() for each in [memory.copy(x), memory.copy(x)]}
