"""Schedules of a pipeline as data: for every rank the forward and backward passes that it runs, in their order. Pure
functions of numbers: no tensor, no process group.

Every rank has ``chunks`` runs of neighbouring blocks; chunk c of rank r is stage c * ranks + r of the model, so that a
micro-batch goes around the ranks once for every chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from opendit.config.plugins import PIPELINE_SCHEDULES


@dataclass(frozen=True)
class Action:
    """A pass of one chunk over one micro-batch: forward, or backward."""

    forward: bool
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{'F' if self.forward else 'B'}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


def chunks_of(schedule: str) -> int:
    """Return how many runs of neighbouring blocks every rank has."""
    return 2 if schedule == "interleaved" else 1


def make_schedule(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """List the passes of ``rank`` of ``ranks`` in a step, in order.

    1f1b: one forward, one backward pass in turn, after as many forward passes as there are ranks behind (PipeDream-
    flush: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021). A rank holds the activations
    of at most ``ranks - rank`` micro-batches and idles for (ranks - 1) / (micro_batches + ranks - 1) of the step.

    interleaved: the same with 2 chunks a rank, which idles for half of that, holds more activations, and sends twice as
    much (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
    sec. 2.2).

    Raises:
        ValueError: an unknown schedule, or one that can't be made of so many micro-batches.
    """
    if schedule not in PIPELINE_SCHEDULES:
        raise ValueError(
            f"--pipeline_schedule {schedule}: no such schedule; choose one of {', '.join(PIPELINE_SCHEDULES)}"
        )
    chunks = chunks_of(schedule)
    check_micro_batches(schedule, ranks, micro_batches)
    forwards = list(_passes(True, chunks, ranks, micro_batches))
    backwards = list(_passes(False, chunks, ranks, micro_batches))
    behind = ranks - 1 - rank
    ahead = behind if chunks == 1 else 2 * behind + (chunks - 1) * ranks  # of forward passes before the first backward
    ahead = min(ahead, len(forwards))
    turns = zip(forwards[ahead:], backwards, strict=False)
    return [
        *forwards[:ahead],
        *(action for turn in turns for action in turn),
        *backwards[len(forwards) - ahead :],
    ]


def check_micro_batches(schedule: str, ranks: int, micro_batches: int) -> None:
    """Raises ValueError, which names the flags, unless the schedule can be made of so many micro-batches."""
    if chunks_of(schedule) > 1 and micro_batches % ranks:
        raise ValueError(
            f"--pipeline_schedule {schedule}: takes micro-batches in groups of --pipeline_parallel_size {ranks}, and "
            f"--grad_accumulation {micro_batches}: does not divide by it; use "
            f"{max(ranks, round(micro_batches / ranks) * ranks)}, or 1f1b"
        )


def _passes(forward: bool, chunks: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """The passes of a rank in one direction, the same on every rank: ``ranks`` micro-batches by one chunk, then by the
    next; backward by the last chunk first."""
    if chunks == 1:
        yield from (Action(forward, 0, number) for number in range(micro_batches))
        return
    for first in range(0, micro_batches, ranks):
        for chunk in range(chunks) if forward else reversed(range(chunks)):
            last = min(first + ranks, micro_batches)
            yield from (Action(forward, chunk, number) for number in range(first, last))


def one_by_one(chunks: int, ranks: int, micro_batches: int, backward: bool = True) -> list[Action]:
    """All forward passes of any number of micro-batches, and all ``backward`` ones after them, on every rank."""
    directions = (True, False) if backward else (True,)
    return [action for forward in directions for action in _passes(forward, chunks, ranks, micro_batches)]


def in_flight(actions: list[Action]) -> int:
    """The most forward passes, counted in chunks, whose activations are held at once."""
    held = most = 0
    for action in actions:
        held += 1 if action.forward else -1
        most = max(most, held)
    return most


@dataclass(frozen=True)
class Message:
    """The tensors that a pass gets from another rank or sends there: ``forward`` activations, or their gradients."""

    forward: bool
    source: int
    target: int
    chunk: int  # of the target, which receives it
    micro_batch: int


def received(action: Action, rank: int, ranks: int, chunks: int) -> Message | None:
    """Return the message that a pass begins with; None: it begins with the model's input, or the loss."""
    first, last = _ends(action.chunk, rank, ranks, chunks)
    if action.forward:
        return None if first else Message(True, (rank - 1) % ranks, rank, action.chunk, action.micro_batch)
    return None if last else Message(False, (rank + 1) % ranks, rank, action.chunk, action.micro_batch)


def sent(action: Action, rank: int, ranks: int, chunks: int) -> Message | None:
    """Return the message that a pass sends to another rank; None: it sends nothing."""
    first, last = _ends(action.chunk, rank, ranks, chunks)
    if action.forward:
        chunk = action.chunk + (rank == ranks - 1)
        return None if last else Message(True, rank, (rank + 1) % ranks, chunk, action.micro_batch)
    chunk = action.chunk - (rank == 0)
    return None if first else Message(False, rank, (rank - 1) % ranks, chunk, action.micro_batch)


def _ends(chunk: int, rank: int, ranks: int, chunks: int) -> tuple[bool, bool]:
    """Return (True if a chunk is the model's first stage, True if it is the last)."""
    stage = chunk * ranks + rank
    return stage == 0, stage == chunks * ranks - 1
