"""A permutation of the numbers below ``size``, computed where it is needed, in memory that does not grow with it.

Large sizes: a Feistel network over the two digits of a number in mixed radix, with cycle walking for what falls past
the end (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, methods 2 and 3); its round function
is Philox. Such networks are poor on very small domains: up to ``SORTED`` numbers are sorted by words of Philox, which
makes all their orders equally likely.
"""

import math
from functools import lru_cache

import numpy as np
import torch

from opendit.diffusion.random import philox4x32

SORTED = 2**16
ROUNDS = 8


def permuted(positions: np.ndarray, size: int, seed: int, domain: int, epoch: int) -> np.ndarray:
    """Return the entries at ``positions`` (n,) int64 < ``size`` of the permutation of (seed, domain, epoch); int64.

    domain: below 2^32, what the permutation is of; others have independent ones. size: up to 2^61.
    """
    if size <= SORTED:
        return _sorted(size, seed % 2**64, domain, epoch)[positions].astype(np.int64)
    sizes, domains, epochs = (np.full(len(positions), of) for of in (size, domain, epoch))
    return _walk(positions, sizes, domains, epochs, seed)


def permuted_each(
    positions: np.ndarray, sizes: np.ndarray, seed: int, domains: np.ndarray, epochs: np.ndarray
) -> np.ndarray:
    """Return the entries of another permutation for every position, see :func:`permuted`; all (n,) int64. Every
    distinct short permutation costs a call of :func:`permuted`."""
    out, large = np.zeros_like(positions), sizes > SORTED
    out[large] = _walk(positions[large], sizes[large], domains[large], epochs[large], seed)
    if not large.all():
        which = np.stack([sizes, domains, epochs], axis=1)
        for size, domain, epoch in np.unique(which[~large], axis=0).tolist():
            here = (sizes == size) & (domains == domain) & (epochs == epoch)
            out[here] = permuted(positions[here], size, seed, domain, epoch)
    return out


@lru_cache(maxsize=64)
def _sorted(size: int, seed: int, domain: int, epoch: int) -> np.ndarray:
    # The values of raw Philox words are frozen by numpy's policy, unlike Generator.permutation's.
    key, counter = np.array([seed, epoch], dtype=np.uint64), np.array([0, 0, domain, 1], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.uint16)


def _walk(positions: np.ndarray, sizes: np.ndarray, domains: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """The network, again and again for what falls past the end of its permutation."""
    out, outside = positions.copy(), np.arange(len(positions))
    while len(outside):
        out[outside] = _feistel(out[outside], sizes[outside], domains[outside], epochs[outside], seed)
        outside = outside[out[outside] >= sizes[outside]]
    return out


def _feistel(numbers: np.ndarray, sizes: np.ndarray, domains: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """A permutation of the numbers below ``high * low``, which is their size or a little more."""
    different, of = np.unique(sizes, return_inverse=True)
    roots = np.array([math.isqrt(size - 1) + 1 for size in different.tolist()], dtype=np.int64)
    bases = tuple(torch.from_numpy(base[of]) for base in (roots, -(-different // roots)))
    left, right = (torch.from_numpy(digit) for digit in np.divmod(numbers, bases[1].numpy()))
    constants = torch.from_numpy(epochs % 2**32), torch.from_numpy(domains)
    for number in range(ROUNDS):
        base = bases[number % 2]
        left, right = right, (left + _word(right, number, constants, seed) * base // 2**32) % base
    return (left * bases[1] + right).numpy()


def _word(digit: torch.Tensor, number: int, constants: tuple[torch.Tensor, torch.Tensor], seed: int) -> torch.Tensor:
    return philox4x32((digit, torch.tensor(number), *constants), seed)[0]
