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
    """What stands at ``positions`` (n,) int64, all below ``size``, in the permutation of (seed, domain, epoch); int64.

    domain: below 2^32, what the permutation is of; others have independent ones. size: up to 2^61.
    """
    if size <= SORTED:
        return _sorted(size, seed % 2**64, domain, epoch)[positions].astype(np.int64)
    out = _feistel(positions, size, seed, domain, epoch)
    while len(outside := np.flatnonzero(out >= size)):
        out[outside] = _feistel(out[outside], size, seed, domain, epoch)
    return out


@lru_cache(maxsize=64)
def _sorted(size: int, seed: int, domain: int, epoch: int) -> np.ndarray:
    # The values of raw Philox words are frozen by numpy's policy, unlike Generator.permutation's.
    key, counter = np.array([seed, epoch], dtype=np.uint64), np.array([0, 0, domain, 1], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.uint16)


def _feistel(numbers: np.ndarray, size: int, seed: int, domain: int, epoch: int) -> np.ndarray:
    """A permutation of the numbers below ``high * low``, which is ``size`` or a little more."""
    high = math.isqrt(size - 1) + 1
    low = -(-size // high)
    left, right = (torch.from_numpy(digit) for digit in np.divmod(numbers, low))
    constants = torch.tensor(epoch % 2**32), torch.tensor(domain)
    for number in range(ROUNDS):
        left, right = right, (left + _word(right, number, constants, seed) * (low if number % 2 else high) // 2**32)
        right %= low if number % 2 else high
    return (left * low + right).numpy()


def _word(digit: torch.Tensor, number: int, constants: tuple[torch.Tensor, torch.Tensor], seed: int) -> torch.Tensor:
    return philox4x32((digit, torch.tensor(number), *constants), seed)[0]
