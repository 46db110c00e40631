"""Inputs of a step: latents for every kind of data set, and random numbers that depend on samples, not on batches."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import interpolate

from opendit.data import Batch
from opendit.data.base import Small, to_pixels
from opendit.diffusion.objectives import OBJECTIVES
from opendit.diffusion.random import Stream, normal
from opendit.encoders.conditioner import LabelConditioner
from opendit.training.micro_batch import Latents, Packing
from opendit.training.run import Batches
from train import Inputs, micro_batches

SEED, STEP, CLASSES = 11, 5, 10
INDEX = torch.tensor([6, 0, 13])


class Codec:
    """A VAE whose moments have mean 2 x and deviation 3, in channels_last as a VAE on a CPU may return them."""

    def moments(self, x):
        moments = torch.cat([2 * x, torch.full_like(x, 3.0)], dim=1)
        return moments.to(memory_format=torch.channels_last)

    def sample(self, moments, noise):
        mean, deviation = moments.chunk(2, dim=1)
        return (mean + deviation * noise).to(memory_format=torch.channels_last)

    def encode(self, x, noise):
        assert noise is None
        return 5 * x


def vae_noise(shape):
    return normal(SEED, STEP, INDEX, Stream.VAE, shape)


def test_cached_moments_are_sampled_shifted_and_scaled():
    mean, deviation = torch.randn(3, 4, 6, 2), torch.rand(3, 4, 6, 2)
    found = Latents(None, cached=(0.25, 0.5), sampled=True, seed=SEED).of(
        torch.cat([mean, deviation], dim=1), STEP, INDEX
    )
    wanted = mean.double() + deviation.double() * vae_noise((4, 6, 2)).double()
    torch.testing.assert_close(found.double(), (wanted - 0.5) * 0.25, rtol=1e-5, atol=1e-5)


def test_pixels_go_through_the_vae_or_stay_pixels():
    x = torch.randn(3, 2, 4, 6)
    found = Latents(Codec(), cached=None, sampled=True, seed=SEED).of(x, STEP, INDEX)
    torch.testing.assert_close(found, 2 * x + 3 * vae_noise((2, 4, 6)))
    assert found.is_contiguous()
    assert torch.equal(Latents(Codec(), cached=None, sampled=False, seed=SEED).of(x, STEP, INDEX), 5 * x)


def inputs(objective="ddpm", label_drop=0.5) -> Inputs:
    cpu = torch.device("cpu")
    latents = Latents(Codec(), cached=None, sampled=True, seed=SEED)
    return Inputs(latents, OBJECTIVES[objective](), LabelConditioner(CLASSES, cpu), cpu, SEED, label_drop)


def batch(rows: slice = slice(None), micro: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 3, 4, 4, generator=generator)
    return Batch(x[rows], torch.arange(64)[rows] % CLASSES, torch.arange(64)[rows], STEP, micro, epoch=0)


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_a_sample_is_the_same_in_whichever_micro_batch_it_is(objective):
    make = inputs(objective)
    whole = make.of(batch())
    parts = [make.of(batch(rows, micro)) for micro, rows in enumerate((slice(0, 7), slice(7, 20), slice(20, 64)))]
    for wanted, *found in zip(whole.tensors(), *(part.tensors() for part in parts), strict=True):
        torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-6, atol=1e-6)
    later = make.of(Batch(**{**vars(batch()), "step": STEP + 1}))
    assert not torch.equal(later.noise, whole.noise) and not torch.equal(later.t, whole.t)


def test_pixels_are_converted_once(monkeypatch):
    """Only --repa needs the pixels beside the latents."""
    converted = []
    monkeypatch.setattr("opendit.data.base.to_pixels", lambda x: converted.append(x) or to_pixels(x))
    inputs().of(batch())
    assert len(converted) == 1


class Pixels(Codec):
    def encode(self, x, noise):
        return x


def clips_of(sizes, whole=(8, 10)):
    """Return clips padded for enlarging on the device, the same clips enlarged early, and their true sizes."""
    small, left, early = [], [], []
    for number, size in enumerate(sizes):
        clip = torch.randint(0, 256, (3, 2, *(size or whole)), dtype=torch.uint8)
        place = torch.zeros(3, 2, *whole, dtype=torch.uint8)
        place[..., : clip.shape[-2], : clip.shape[-1]] = clip
        made = interpolate(clip.transpose(0, 1), whole, mode="bicubic", antialias=True).transpose(0, 1)
        early.append(made.flip(-1) if size and number % 2 else clip if size is None else made)
        left.append(place)
        small.append(size and Small(*size, bool(number % 2)))
    return left, early, tuple(small)


@pytest.mark.parametrize("packed", [False, True])
def test_clips_left_small_by_the_loader_are_enlarged(packed):
    left, early, small = clips_of([(4, 5), (4, 5), None, (7, 9), (4, 5)])
    cpu, index = torch.device("cpu"), torch.arange(5)
    latents = Latents(Pixels(), cached=None, sampled=False, seed=SEED)
    packing = Packing((1, 2, 2), 200, 1) if packed else None
    make = Inputs(latents, OBJECTIVES["flow"](), LabelConditioner(CLASSES, cpu), cpu, SEED, 0.0, packing)
    x, wanted = (tuple(left), tuple(early)) if packed else (torch.stack(left), torch.stack(early))
    there = Batch(x, index, index, STEP, 0, epoch=0, samples_in_step=5, small=small)
    whole = Batch(wanted, index, index, STEP, 0, epoch=0, samples_in_step=5)
    for _ in range(2):  # the batch must not change, because a batch that ended a run is tried again
        found = make.of(there)
        assert torch.equal(found.x0, make.of(whole).x0) and found.x0.std() > 0.1


def test_the_share_of_conditions_that_are_dropped():
    rows = batch().y
    assert torch.equal(inputs(label_drop=0.0).of(batch()).condition, rows)
    assert torch.equal(inputs(label_drop=1.0).of(batch()).condition, torch.full_like(rows, CLASSES))
    half = inputs(label_drop=0.5).of(batch()).condition
    dropped = half == CLASSES
    assert 16 < dropped.sum() < 48 and torch.equal(half[~dropped], rows[~dropped])


def test_a_batch_is_read_when_it_is_asked_for_and_seen_by_all_who_must():
    read, seen = [], []

    def loader():
        for micro in range(5):
            read.append(micro)
            yield batch(micro=micro)

    counted = []
    monitor = SimpleNamespace(loader_wait=lambda waited: seen.append(("monitor", waited)))
    pace = SimpleNamespace(begin=lambda waited: seen.append(("pace", waited)))
    diagnosis = SimpleNamespace(keep=lambda batch: seen.append(("diagnosis", batch.micro)))
    interrupt = SimpleNamespace(lost=None)
    batches = Batches(loader(), 2, monitor, pace, diagnosis, interrupt, interchangeable=True)
    run = SimpleNamespace(batches=batches, inputs=inputs(), count=lambda batch, made: counted.append(len(made.x0)))
    for first in (0, 2):
        read.clear(), seen.clear(), counted.clear()
        step = micro_batches(run)
        assert not read
        next(step)
        assert read == [first] and [who for who, _ in seen] == ["monitor", "pace", "diagnosis"]
        assert seen[0][1] == seen[1][1] >= 0 and seen[2][1] == first
        assert len(list(step)) == 1 and read == [first, first + 1]
        assert counted == [64, 64]
