"""Samples of unequal length into packs of equal length that cost alike."""

from heapq import heappop, heappush

import numpy as np


def work_of(lengths: np.ndarray, attention: float) -> np.ndarray:
    """Return what samples of these many tokens cost, float64, in tokens of a model without attention.

    attention: the length at which attention takes as long as the linear layers (6 x the width of a DiT whose MLP is 4
    times as wide).
    """
    return lengths * (1 + lengths / attention)


class Packer:
    """Fill ``count`` packs of ``capacity`` tokens so that each is full and all cost alike.

    Samples are placed longest first, as first-fit-decreasing does, but each goes to the pack with the least work so
    far among those with room for it (LPT, Graham 1969, within the capacity). What finds no room is longer than what any
    pack has left and any sample placed after it together, so that exchanging two samples fills no pack further.

    least: tokens of the shortest sample that may come. attention: see :func:`work_of`. ``packs`` holds the numbers of
    each pack's samples.
    """

    def __init__(self, count: int, capacity: int, least: int, attention: float):
        self.least, self.attention = least, attention
        self.packs: list[list[int]] = [[] for _ in range(count)]
        self._room = [capacity] * count
        self._open = [(0.0, pack) for pack in range(count)]  # by work: those that had room when last looked at
        self._shut: list[tuple[int, float, int]] = []  # by room, the largest first: they open for shorter samples

    def place(self, numbers: np.ndarray, lengths: np.ndarray) -> list[int]:
        """Place the samples ``numbers`` (n,) of ``lengths`` (n,) int64 tokens and return the numbers of those that no
        pack has room for.

        Those of an earlier call are in the packs already. Of equal lengths the first comes first.
        """
        order = np.argsort(-lengths, kind="stable")
        work = work_of(lengths[order], self.attention).tolist()
        left, room, open_packs, shut = [], self._room, self._open, self._shut
        for number, tokens, cost_of in zip(numbers[order].tolist(), lengths[order].tolist(), work, strict=True):
            while shut and -shut[0][0] >= tokens:
                _, cost, pack = heappop(shut)
                heappush(open_packs, (cost, pack))
            while open_packs:
                cost, pack = heappop(open_packs)
                if room[pack] >= tokens:
                    room[pack] -= tokens
                    self.packs[pack].append(number)
                    if room[pack] >= self.least:
                        heappush(open_packs, (cost + cost_of, pack))
                    break
                heappush(shut, (-room[pack], cost, pack))
            else:
                left.append(number)
        return left
