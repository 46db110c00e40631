"""A note is printed if a GPU's memory is nearly full."""

import itertools

from opendit.training.monitor import MemoryPressure, allocation_retries


def notes(*retries: int) -> list[str | None]:
    given = iter(retries)
    pressure = MemoryPressure(lambda: next(given))
    return [pressure.note(10) for _ in retries]


def test_it_is_said_once_when_retries_go_on():
    first, second, third, *rest = notes(5, 9, 12, 15, 19)
    assert first is None and second is None and rest == [None, None]
    assert "in the last 10 steps" in third and "reuse 3 times" in third and "--batch_size" in third


def test_a_beginning_or_a_single_burst_is_no_reason():
    for retries in ((40, 40, 40, 40), (0, 0, 7, 7, 7, 9, 9), (3,)):
        assert notes(*retries) == [None] * len(retries), retries


def test_without_a_gpu_there_are_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert allocation_retries() == 0
    pressure = MemoryPressure()
    assert all(pressure.note(1) is None for _ in itertools.repeat(None, 5))
