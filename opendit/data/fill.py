"""Simulate how full sequences of a fixed number of tokens get with media of these sizes."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from opendit.data.medium import Medium

BUDGETS = tuple(1024 * 2**i for i in range(8))  # tokens of a sequence: 1k to 128k


@dataclass(frozen=True)
class MediumTokens:
    """Counts the tokens of a medium at its own aspect ratio and length: scaled down to the area of ``image_size``
    squared, never up, every ``frame_interval``-th frame, or ``fps`` a second, ``num_frames`` at most; ``token_pixels``
    rows and columns of pixels and ``token_frames`` frames are a token."""

    image_size: int
    num_frames: int
    frame_interval: int
    token_pixels: int
    token_frames: int
    fps: float | None = None

    def __call__(self, medium: Medium) -> int:
        scale = min(1.0, self.image_size / (medium.height * medium.width) ** 0.5)
        rows, columns = (max(1, round(side * scale / self.token_pixels)) for side in (medium.height, medium.width))
        frames = min(self.num_frames, -(-medium.frames_at(self.fps) // self.frame_interval))
        return rows * columns * -(-frames // self.token_frames)


@dataclass(frozen=True)
class BudgetFill:
    """budget: tokens of a sequence. fill: share of the sequences' tokens that are used, the emptiest sequence apart,
    which more media would fill; None where the media fill no other. too_long: share of the media that are longer than
    a sequence and left out."""

    budget: int
    fill: float | None
    too_long: float


def fill_of(lengths: Sequence[int], budget: int) -> BudgetFill:
    """Sequences of ``budget`` tokens filled with whole media, longest first, each into the fullest that takes it."""
    fitting = sorted((length for length in lengths if length <= budget), reverse=True)
    free: list[int] = []  # of each sequence, rising
    for length in fitting:
        place = bisect_left(free, length)
        left = free.pop(place) if place < len(free) else budget
        insort(free, left - length)
    full = free[:-1]
    fill = 1 - sum(full) / (budget * len(full)) if full else None
    return BudgetFill(budget, fill, 1 - len(fitting) / len(lengths) if lengths else 0.0)
