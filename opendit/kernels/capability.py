"""The compute capabilities that features need. Only this module asks a GPU for its compute capability.

:data:`FEATURES` has a row for each feature that needs a particular generation of GPUs. :func:`missing` returns the
reason why a feature can't be used, for a log or error message. docs/launching.md lists the features of each GPU.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

GENERATIONS = {(7, 0): "Volta", (8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


@dataclass(frozen=True)
class Feature:
    """The compute capabilities that a feature supports.

    needs: beginning of the message for other GPUs. oldest, newest: the range; newest None: no upper bound.
    """

    needs: str
    oldest: tuple[int, int]
    newest: tuple[int, int] | None = None


FEATURES = {
    "kernels": Feature("kernels need", (8, 0)),
    "float8": Feature("FP8 needs", (9, 0)),
    # torch runs cuDNN's attention from Ampere on, but it was measured only on Hopper. So older GPUs don't use it.
    "cudnn": Feature("cuDNN's attention is taken with", (9, 0)),
    # The tiles need 128 KiB of shared memory, and Ada has only 99. The kernel was measured only on Hopper.
    "short_attention": Feature("attention to few and short samples is taken with", (9, 0), (9, 0)),
    "flash_attn": Feature("flash_attn needs", (8, 0)),
    "flash_attn_3": Feature("FlashAttention 3 and 4 need", (9, 0)),
}
# Compute capability -> maximum bytes of shared memory per block of threads.
SHARED_MEMORY = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}

_pretended: list[tuple[int, int]] = []


def compute_capability(device: torch.device | str | None = None) -> tuple[int, int]:
    """Return the compute capability of a GPU, e.g. (9, 0) for Hopper. device: a CUDA GPU; None: the current GPU."""
    return _pretended[-1] if _pretended else torch.cuda.get_device_capability(device)


def pretending() -> bool:
    """Return True inside :func:`pretended`. There, features depend on the GPU even if Triton's interpreter is on."""
    return bool(_pretended)


@contextlib.contextmanager
def pretended(capability: tuple[int, int]) -> Iterator[None]:
    """Make :func:`compute_capability` return ``capability`` for every GPU within the context (tests only)."""
    _pretended.append(capability)
    try:
        yield
    finally:
        _pretended.pop()


def missing(feature: str, device: torch.device | str | None = None) -> str | None:
    """Return why the GPU can't, or should not, use this feature of :data:`FEATURES`; None if the GPU can use it."""
    known, found = FEATURES[feature], compute_capability(device)
    if found >= known.oldest and (known.newest is None or found <= known.newest):
        return None
    generation = GENERATIONS.get(known.oldest, "")
    bound = "or newer, " if known.newest is None else "only, "
    wanted = f"compute capability {'.'.join(map(str, known.oldest))} ({generation}) {bound}"
    return f"{known.needs} {wanted}this GPU has {'.'.join(map(str, found))}"
