"""The counter-based random generator: known answers, distributions, independence, and draws in any batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import opendit.diffusion.random
from opendit.diffusion.random import Stream, integers, normal, philox4x32, random_bits, uniform

SEED = 0x0123456789ABCDEF  # more than 32 bits, so that both words of the key are used


def words(text: str) -> list[int]:
    return [int(w, 16) for w in text.split()]


# kat_vectors of Random123 (Salmon et al. 2011), lines "philox4x32 10": counter, key (low word first), result.
KNOWN_ANSWERS = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    low, high = words(key)
    got = philox4x32(tuple(torch.tensor([w]) for w in words(counter)), low | high << 32)
    assert [int(w) for w in got] == words(expected)


def philox_python(counter: list[int], seed: int) -> list[int]:
    """Compute the same function with Python's integers, from the paper."""
    c, k = list(counter), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [q >> 32 ^ c[1] ^ k[0], q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


word = st.integers(0, 2**32 - 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**64 - 1), step=word, index=word, stream=st.sampled_from(Stream), count=st.integers(1, 9))
def test_bits_are_philox_of_block_index_step_stream(seed, step, index, stream, count):
    got = random_bits(seed, step, torch.tensor([index]), stream, count)
    expected = [w for b in range(3) for w in philox_python([b, index, step, int(stream)], seed)]
    assert got.shape == (1, count) and got.dtype == torch.int64
    assert got[0].tolist() == expected[:count]


def test_uniform_distribution():
    u = uniform(SEED, 3, torch.arange(10), Stream.NOISE, (200, 101))
    assert u.shape == (10, 200, 101) and u.dtype == torch.float64
    assert 0 < u.min() and u.max() < 1
    x = u.flatten().numpy()
    assert stats.kstest(x, "uniform").pvalue > 1e-3
    assert abs(x.mean() - 0.5) < 4 / math.sqrt(12 * x.size)
    assert abs(x.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / x.size)


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_the_extreme_bits_stay_inside_the_open_interval(monkeypatch, bits):
    monkeypatch.setattr(opendit.diffusion.random, "random_bits", lambda *args: torch.full((1, 2), bits))
    u = uniform(SEED, 0, torch.arange(1), Stream.NOISE, (2,))
    assert 0 < u.min() and u.max() < 1
    assert bool(torch.isfinite(normal(SEED, 0, torch.arange(1), Stream.NOISE, (2,))).all())


def test_one_number_a_sample():
    assert uniform(SEED, 0, torch.arange(5), Stream.FLIP).shape == (5,)


def test_normal_is_box_and_muller_of_the_uniforms():
    index = torch.arange(3)
    u = uniform(SEED, 2, index, Stream.NOISE, (6,)).numpy()
    radius, angle = np.sqrt(-2 * np.log(u[:, 0::2])), 2 * np.pi * u[:, 1::2]
    expected = np.stack((radius * np.cos(angle), radius * np.sin(angle)), -1).reshape(3, 6)[:, :5]
    np.testing.assert_allclose(normal(SEED, 2, index, Stream.NOISE, (5,)), expected, rtol=1e-6)


def test_normal_distribution():
    z = normal(SEED, 5, torch.arange(10), Stream.NOISE, (4, 50, 101))
    assert z.shape == (10, 4, 50, 101) and z.dtype == torch.float32
    x = z.flatten().double().numpy()
    n = x.size
    assert stats.kstest(x, "norm").pvalue > 1e-3
    for moment, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**moment).mean() - expected) < 4 * math.sqrt(variance / n), f"moment {moment}"
    # A 24-bit uniform would stop at 5.8 sigma; P(|z| > 4) is 6.3e-5.
    tail = (np.abs(x) > 4).sum()
    assert stats.binomtest(int(tail), n, 2 * stats.norm.sf(4)).pvalue > 1e-3


def test_the_two_halves_of_a_box_muller_pair_are_independent():
    z = normal(SEED, 0, torch.arange(4), Stream.NOISE, (100_000,)).double()
    a, b = z[:, 0::2].flatten(), z[:, 1::2].flatten()
    bound = 5 / math.sqrt(len(a))
    for f, g in ((a, b), (a.abs(), b.abs()), (a[1:], b[:-1]), (a**2, b)):
        assert abs(float(torch.corrcoef(torch.stack((f, g)))[0, 1])) < bound


def test_streams_steps_samples_and_seeds_are_uncorrelated():
    index = torch.tensor([0, 1, 2, 1000, 2**31 + 5])
    rows = [
        normal(seed, step, index, stream, (10_000,))
        for seed in (0, 1, 2**32)
        for step in (0, 1, 7)
        for stream in Stream
    ]
    x = torch.cat(rows)
    correlation = torch.corrcoef(x.double()) - torch.eye(len(x))
    # 360 rows have 64,620 pairs, and the largest of 64,620 normal numbers is about 4.3 sigma.
    assert correlation.abs().max() < 6 / math.sqrt(x.shape[1])
    assert len({tuple(r[:2].tolist()) for r in x}) == len(x)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 127, 1001])
def test_a_longer_draw_begins_with_the_shorter_one(count):
    index = torch.arange(3)
    longer = normal(SEED, 9, index, Stream.VAE, (2048,))
    assert torch.equal(normal(SEED, 9, index, Stream.VAE, (count,)), longer[:, :count])
    bits = random_bits(SEED, 9, index, Stream.VAE, 2048)
    assert torch.equal(random_bits(SEED, 9, index, Stream.VAE, count), bits[:, :count])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), n=st.integers(2, 12), width=st.integers(1, 33))
def test_a_sample_draws_the_same_in_any_batch(data, n, width):
    whole = torch.arange(100, 100 + n)
    order = torch.tensor(data.draw(st.permutations(range(n))))
    cut = data.draw(st.integers(1, n - 1))
    for draw in (
        lambda i: normal(SEED, 4, i, Stream.NOISE, (3, width)),
        lambda i: uniform(SEED, 4, i, Stream.CROP, (width,)),
        lambda i: integers(SEED, 4, i, Stream.TIMESTEP, 1000),
    ):
        expected = draw(whole)
        assert torch.equal(torch.cat((draw(whole[:cut]), draw(whole[cut:]))), expected)
        assert torch.equal(draw(whole[order]), expected[order])


@pytest.mark.parametrize("high", [1, 2, 10, 1000, 2**31 - 1])
def test_integers_range_and_uniformity(high):
    k = integers(SEED, 1, torch.arange(200_000), Stream.TIMESTEP, high)
    assert k.shape == (200_000,) and k.dtype == torch.int64
    assert 0 <= k.min() and k.max() < high
    if 1 < high <= 1000:
        assert stats.chisquare(np.bincount(k.numpy(), minlength=high)).pvalue > 1e-3
    else:
        assert high == 1 or stats.kstest((k.numpy() + 0.5) / high, "uniform").pvalue > 1e-3


def test_integers_over_steps_are_uniform_too():
    """Draw one sample's timesteps over a training run."""
    k = torch.cat([integers(42, step, torch.tensor([3]), Stream.TIMESTEP, 10) for step in range(2000)])
    assert stats.chisquare(np.bincount(k.numpy(), minlength=10)).pvalue > 1e-3
