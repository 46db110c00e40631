"""Samples of unequal length into packs of equal length that cost alike: one window of the order at a time."""

from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np


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
    sample (LPT, Graham 1969, within the capacity). What finds no room is longer than what any pack has left and any
    sample placed there later together, so that exchanging two samples fills no pack further.

    lengths: (n,) int64, from 1 to ``capacity``. first: so many of the samples are placed before all others: they have
    waited since the window before. attention: see :func:`work_of`.
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
    return Packed(filled, np.sort(np.array(left, dtype=np.int64)))
