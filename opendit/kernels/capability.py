"""The features of each card: the one place that asks a GPU for its compute capability, and a table to decide by it.

Whatever needs a newer card than the oldest one supported has a line in :data:`FEATURES`; who wants to use it asks
:func:`missing`, which says why not in the words of the note or the error. docs/launching.md has the table by card.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

GENERATIONS = {(7, 0): "Volta", (8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


@dataclass(frozen=True)
class Feature:
    """The compute capabilities that a feature works with.

    needs: the beginning of the message where it doesn't. oldest, newest: the range; None: without an upper bound.
    """

    needs: str
    oldest: tuple[int, int]
    newest: tuple[int, int] | None = None


FEATURES = {
    "kernels": Feature("kernels need", (8, 0)),
    "float8": Feature("FP8 needs", (9, 0)),
    # torch runs it from Ampere on; it is measured, and taken, on Hopper.
    "cudnn": Feature("cuDNN's attention is taken with", (9, 0)),
    # Tiles that take 128 KiB of shared memory, of which Ada has 99; measured on Hopper alone.
    "short_attention": Feature("attention to few and short samples is taken with", (9, 0), (9, 0)),
    "flash_attn": Feature("flash_attn needs", (8, 0)),
    "flash_attn_3": Feature("FlashAttention 3 and 4 need", (9, 0)),
}
# Bytes of shared memory that a block of threads may have, by compute capability.
SHARED_MEMORY = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}

_pretended: list[tuple[int, int]] = []


def compute_capability(device: torch.device | str | None = None) -> tuple[int, int]:
    """(9, 0) of Hopper. device: a CUDA GPU; None: the current one."""
    return _pretended[-1] if _pretended else torch.cuda.get_device_capability(device)


def pretending() -> bool:
    """Return True inside of :func:`pretended`, where the GPU counts and not Triton's interpreter."""
    return bool(_pretended)


@contextlib.contextmanager
def pretended(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, every GPU has this compute capability (tests only)."""
    _pretended.append(capability)
    try:
        yield
    finally:
        _pretended.pop()


def missing(feature: str, device: torch.device | str | None = None) -> str | None:
    """Why the GPU can't do this of :data:`FEATURES`, or why it is not taken there; None: it can."""
    known, found = FEATURES[feature], compute_capability(device)
    if found >= known.oldest and (known.newest is None or found <= known.newest):
        return None
    generation = GENERATIONS.get(known.oldest, "")
    bound = "or newer, " if known.newest is None else "only, "
    wanted = f"compute capability {'.'.join(map(str, known.oldest))} ({generation}) {bound}"
    return f"{known.needs} {wanted}this GPU has {'.'.join(map(str, found))}"
