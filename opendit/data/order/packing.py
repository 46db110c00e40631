"""Samples of unequal length into packs of equal length that cost alike: one window of the order at a time."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

EXCHANGES = 3  # of a pack that has room left
CLOSE = 1000  # a pack is full when less than 1 / CLOSE of it is left


class Packed(NamedTuple):
    """packs: of each the numbers of its samples. left: the numbers of those that no pack has room for, rising."""

    packs: list[list[int]]
    left: np.ndarray


def work_of(lengths: np.ndarray, attention: float) -> np.ndarray:
    """What samples of so many tokens cost, float64, in tokens of a model without attention; attention: the length at
    which attention takes as long as the linear layers (6 x the width of a DiT whose MLP is 4 times as wide)."""
    return lengths * (1 + lengths / attention)


def fill_packs(lengths: np.ndarray, first: int, packs: int, capacity: int, attention: float) -> Packed:
    """Fills ``packs`` packs of ``capacity`` tokens so that each is full and all cost alike.

    Longest first, as first-fit-decreasing has it, but of the packs with room the one with the least work so far takes a
    sample (LPT, Graham 1969, within the capacity). Then samples that found no room take the places of shorter ones
    where that fills a pack.

    lengths: (n,) int64, from 1 to ``capacity``. first: so many of the samples are placed before all others, and stay:
    they have waited since the window before. attention: see :func:`work_of`.
    """
    least, work = int(lengths.min()), work_of(lengths, attention).tolist()
    waited = np.arange(len(lengths)) >= first
    order = np.lexsort((np.arange(len(lengths)), -lengths, waited)).tolist()
    length = lengths.tolist()
    room, filled = [capacity] * packs, [[] for _ in range(packs)]
    open_packs = [(0.0, pack) for pack in range(packs)]  # by work, those that had room when they were last looked at
    shut: list[tuple[int, float, int]] = []  # by room, the largest first: they open again as samples get shorter
    left, spent = [], [0.0] * packs
    heapify(open_packs)
    for number in order:
        tokens = length[number]
        while shut and -shut[0][0] >= tokens:
            _, cost, pack = heappop(shut)
            heappush(open_packs, (cost, pack))
        while open_packs:
            cost, pack = heappop(open_packs)
            if room[pack] >= tokens:
                room[pack] -= tokens
                spent[pack] = cost + work[number]
                filled[pack].append(number)
                if room[pack] >= least:
                    heappush(open_packs, (spent[pack], pack))
                break
            heappush(shut, (-room[pack], cost, pack))
        else:
            left.append(number)
    left = _exchange(filled, room, left, length, first, capacity)
    return Packed(filled, np.sort(np.array(left, dtype=np.int64)))


def _exchange(
    filled: list[list[int]], room: list[int], left: list[int], length: Sequence[int], first: int, capacity: int
) -> list[int]:
    """Puts samples that are left into packs, beside or in place of what is there, as long as that fills a pack
    further; returns those that are left then."""
    left = sorted(left, key=lambda number: (length[number], number))
    sizes = [length[number] for number in left]
    for pack, numbers in enumerate(filled):
        for _ in range(EXCHANGES):
            if not left or room[pack] * CLOSE <= capacity:
                break
            places = [place for place, number in enumerate(numbers) if number >= first]
            gives = np.array([0, *(length[numbers[place]] for place in places)])  # nothing, or one of its samples
            takes = np.searchsorted(sizes, gives + room[pack], side="right") - 1
            gain = np.where(takes >= 0, np.array(sizes)[takes] - gives, 0)
            best = int(gain.argmax())
            if gain[best] <= 0:
                break
            taken = left.pop(int(takes[best]))
            sizes.pop(int(takes[best]))
            if best == 0:
                numbers.append(taken)
            else:
                place = places[best - 1]
                given, numbers[place] = numbers[place], taken
                at = int(np.searchsorted(sizes, length[given]))
                left.insert(at, given)
                sizes.insert(at, length[given])
            room[pack] -= int(gain[best])
    return left
