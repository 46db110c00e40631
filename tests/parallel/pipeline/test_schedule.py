"""Pipeline schedules are complete and free of deadlocks, and their idle time follows the papers' formulas."""

import pytest

from opendit.parallel.pipeline import in_flight, make_schedule, received, sent

SIZES = [
    *(("1f1b", ranks, count) for ranks in (1, 2, 3, 4, 7) for count in (1, 2, 3, 5, 8, 16)),
    *(("interleaved", ranks, groups * ranks) for ranks in (1, 2, 3, 4) for groups in (1, 2, 5)),
]
CHUNKS = {"1f1b": 1, "interleaved": 2}


def schedules(schedule: str, ranks: int, count: int) -> list:
    return [make_schedule(schedule, rank, ranks, count) for rank in range(ranks)]


def run(actions: list[list], chunks: int, ahead: int, kept: int | None, backward: float = 2.0) -> list[float]:
    """Simulate the ranks and return each one's end time; a forward pass takes 1 unit, a backward pass ``backward``.

    Before it computes a pass, a rank posts the receives of its next ``ahead`` passes. After a send, it waits until at
    most ``kept`` of its messages to that rank are not yet received (None: no limit).
    """
    ranks, position, clock = len(actions), [0] * len(actions), [0.0] * len(actions)
    arrived, sends, receives = {}, {}, {}
    posted, waiting = [0] * ranks, [None] * ranks
    for _ in range(10 * sum(map(len, actions))):
        moved = False
        for rank, own in enumerate(actions):
            while posted[rank] < min(len(own), position[rank] + 1 + ahead):
                message = received(own[posted[rank]], rank, ranks, chunks)
                posted[rank] += 1
                if message is not None:
                    receives.setdefault((message.source, rank, message.forward), []).append(message)
            if waiting[rank] is not None:
                channel = waiting[rank]
                if len(sends[channel]) - len(receives.get(channel, [])) > kept:
                    continue
                waiting[rank], moved = None, True
            if position[rank] == len(own):
                continue
            action = own[position[rank]]
            needed = received(action, rank, ranks, chunks)
            if needed is not None and needed not in arrived:
                continue
            clock[rank] = max(clock[rank], arrived.get(needed, 0.0)) + (1.0 if action.forward else backward)
            position[rank] += 1
            moved = True
            if (message := sent(action, rank, ranks, chunks)) is not None:
                arrived[message] = clock[rank]
                channel = (rank, message.target, message.forward)
                sends.setdefault(channel, []).append(message)
                waiting[rank] = None if kept is None else channel
        if not moved:
            break
    assert position == [len(own) for own in actions], "deadlock"
    assert sends == receives  # every channel receives messages in the order in which they were sent
    return clock


@pytest.mark.parametrize(("schedule", "ranks", "count"), SIZES)
def test_every_pass_comes_once_and_messages_meet_without_deadlock(schedule, ranks, count):
    chunks, actions = CHUNKS[schedule], schedules(schedule, ranks, count)
    for own in actions:
        passes = {(forward, chunk, n) for forward in (True, False) for chunk in range(chunks) for n in range(count)}
        assert {(a.forward, a.chunk, a.micro_batch) for a in own} == passes and len(own) == len(passes)
        for action in own:
            if not action.forward:
                assert any(a.forward and a.chunk == action.chunk and a.micro_batch == action.micro_batch
                           for a in own[: own.index(action)])  # fmt: skip
        last = own[-1]
        assert not last.forward and last.chunk == 0  # the gradients of all chunks are complete when this pass ends
    for ahead, kept in ((0, 1), (1, 2), (1, 1), (1, None)):
        run(actions, chunks, ahead, kept)


@pytest.mark.parametrize(("ranks", "count"), [(2, 16), (4, 8), (3, 7)])
def test_idle_time_is_that_of_the_papers(ranks, count):
    """Equal stages take 1 + 2 units per micro-batch; each half takes half of that when interleaved."""
    work = 3.0 * count
    plain = max(run(schedules("1f1b", ranks, count), 1, 1, None))
    assert plain == pytest.approx(work + 3.0 * (ranks - 1))
    if count % ranks == 0:
        halves = max(run(schedules("interleaved", ranks, count), 2, 1, None)) / 2
        assert halves == pytest.approx(work + 1.5 * (ranks - 1))


def test_a_rank_holds_no_more_micro_batches_than_ranks_follow():
    for ranks, count in ((4, 16), (4, 2), (2, 5)):
        held = [in_flight(own) for own in schedules("1f1b", ranks, count)]
        assert held == [min(count, ranks - rank) for rank in range(ranks)]


def test_what_cannot_be_scheduled_is_refused_by_name():
    with pytest.raises(
        ValueError, match="--pipeline_schedule gpipe: no such schedule; choose one of 1f1b, interleaved"
    ):
        make_schedule("gpipe", 0, 2, 4)
    with pytest.raises(ValueError, match="--grad_accumulation 5: does not divide by it; use 4, or 1f1b"):
        make_schedule("interleaved", 0, 4, 5)
