"""Keyed permutations are permutations and have the statistics of random ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data import order as sequences
from opendit.data.order import permuted, permuted_each


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 2**31), st.integers(0, 2**33), st.booleans())
def test_every_number_once_however_it_is_asked_for(size, seed, domain, epoch, network):
    positions = np.arange(size)
    with pytest.MonkeyPatch.context() as patch:
        if network:
            patch.setattr(sequences, "SORTED", 0)
        whole = permuted(positions, size, seed, domain, epoch)
        assert np.array_equal(np.sort(whole), positions) and whole.dtype == np.int64
        some = positions[seed % 7 :: 3]
        assert np.array_equal(permuted(some, size, seed, domain, epoch), whole[some])


def test_a_large_one_is_a_permutation():
    size = 2**16 + 1 + 6000
    assert np.array_equal(np.sort(permuted(np.arange(size), size, 3, 5, 7)), np.arange(size))


def test_a_hundred_million_rows():
    """The numbers are distinct, in range and evenly spread."""
    size = 10**8 + 7
    found = permuted(np.arange(size - 100_000, size), size, 1, 2, 3)
    assert len(np.unique(found)) == 100_000 and found.min() >= 0 and found.max() < size
    counts = np.bincount(found * 100 // size, minlength=100)
    assert ((counts - 1000) ** 2 / 1000).sum() < 180  # chi-square of 99 degrees of freedom: 5.7 standard deviations
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.015  # 4.7 standard deviations


@pytest.mark.parametrize("network", [False, True])
def test_all_places_are_equally_likely(network, monkeypatch):
    """Over many keys, three neighbouring numbers go to every place and come in every order equally often."""
    if network:
        monkeypatch.setattr(sequences, "SORTED", 0)
    size, keys = 97, 1500
    found = np.array([permuted(np.array([40, 41, 42]), size, seed, 1, seed % 5) for seed in range(keys)])
    for column in found.T:
        counts = np.bincount(column, minlength=size)
        assert ((counts - keys / size) ** 2 / (keys / size)).sum() < 96 + 5 * (2 * 96) ** 0.5
    _, orders = np.unique(found.argsort(axis=1), axis=0, return_counts=True)
    assert len(orders) == 6 and abs(orders - keys / 6).max() < 5 * (keys / 6) ** 0.5


@pytest.mark.parametrize("size", [100, 2**17])
def test_seeds_domains_and_epochs_have_independent_ones(size):
    positions = np.arange(100)
    found = {
        permuted(positions, size, *key).tobytes() for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 0, 0)]
    }
    assert len(found) == 5


def test_the_permutations_never_change():
    """A run begun with an earlier version must resume with the same samples."""
    assert permuted(np.arange(6), 12, 42, 1, 3).tolist() == [11, 9, 0, 10, 6, 5]
    assert permuted(np.arange(6), 10**8, 42, 1, 3).tolist() == [
        31130290,
        93316300,
        4101058,
        72309255,
        93310763,
        91790501,
    ]


def test_many_permutations_at_once_are_those_one_by_one():
    of = np.random.default_rng(0).integers(0, 5, 400)
    sizes, domains, epochs = np.array(
        [[1, 9, sequences.SORTED + 1, 10**8, 10**8], [3, 2, 7, 7, 2**24], [0, 4, 4, 2**33, 1]]
    )[:, of]
    positions = np.arange(400) * 7919 % sizes
    found = permuted_each(positions, sizes, 11, domains, epochs)
    wanted = [permuted(positions[n : n + 1], int(sizes[n]), 11, int(domains[n]), int(epochs[n]))[0] for n in range(400)]
    assert found.tolist() == wanted
