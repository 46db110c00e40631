"""The actions after each step match their conditions, which are written out here."""

import itertools
import random
from types import SimpleNamespace

import pytest

from opendit.training.run import Due, PeriodicWork

STEPS = 23


def flags_of(
    save=True,
    ckpt_every=5,
    log_every=4,
    max_bad_steps=7,
    sample_every=None,
    validate_every=0,
    validates=False,
    best=None,
    evaluate_every=0,
):
    return SimpleNamespace(
        save=save,
        ckpt_every=ckpt_every,
        log_every=log_every,
        max_bad_steps=max_bad_steps,
        sample_every=sample_every,
        validate_every=validate_every,
        validates=validates,
        ckpt_best=best,
        evaluate_every=evaluate_every,
    )


def written_out(flags, last_step: int, happens) -> list[tuple[bool, Due]]:
    """Return, for each step, whether the host looks at the loss, and which actions are due."""

    def due(done, every):
        return every > 0 and done % every == 0

    found, owed = [], False
    for done, (bad, fault, stopping) in enumerate(happens, 1):
        last = stopping or done == last_step
        owed |= flags.save and due(done, flags.ckpt_every)
        validate_every = flags.ckpt_every if flags.validate_every is None else flags.validate_every
        regularly = flags.validates and due(done, validate_every)
        looking = last or owed or due(done, flags.log_every) or due(done, flags.max_bad_steps) or regularly
        looking |= due(done, flags.evaluate_every)
        skipping = bad and looking
        failing = skipping and fault
        saving = flags.save and ((last and not failing) or (owed and not skipping))
        every = flags.ckpt_every if flags.sample_every is None else flags.sample_every
        drawing = due(done, every) or (done == last_step and flags.sample_every != 0)
        validating = flags.validates and not stopping
        at_end = done == last_step and validate_every != 0
        validating &= regularly or at_end or (saving and flags.ckpt_best == "val_loss")
        evaluating = due(done, flags.evaluate_every) or (flags.evaluate_every > 0 and done == last_step)
        evaluating = not stopping and (evaluating or (saving and flags.ckpt_best == "fid"))
        log = saving or last or due(done, flags.log_every) or validating or evaluating
        refusing, drawing = flags.save and last and failing, drawing and not stopping
        found.append((looking, Due(log, saving, refusing, drawing, validating, evaluating)))
        owed = owed and not saving
        if stopping:
            break
    return found


def decided(flags, last_step: int, happens) -> list[tuple[bool, Due]]:
    agenda, found, seen = PeriodicWork(flags, last_step), [], (False, False)
    for done, (bad, fault, stopping) in enumerate(happens, 1):
        looks = agenda.step_done(done, stopping)
        if looks:
            seen = bad, bad and fault  # the host only knows what it saw when it last looked
        found.append((looks, agenda.due(*seen)))
        if stopping:
            break
    return found


SETTINGS = list(itertools.product((True, False), (0, 1, 5), (0, 1, 4), (1, 7), (None, 0, 3)))
VALIDATING = [*itertools.product((True, False), (0, 5), (4,), (7,), (0,), (None, 0, 3), (True,), (None, "val_loss"))]
EVALUATING = [*itertools.product((True, False), (0, 5), (4,), (7,), (0,), (0,), (False,), (None, "fid"), (0, 3))]


@pytest.mark.parametrize("seed", range(5))
def test_every_decision_is_the_one_written_out(seed):
    numbers = random.Random(seed)
    for setting in SETTINGS + VALIDATING + EVALUATING:
        flags, happens, bad, fault = flags_of(*setting), [], False, False
        for _ in range(STEPS):
            bad = numbers.random() < (0.8 if bad else 0.2)  # bad steps come in a row
            fault = numbers.random() < 0.7
            happens.append((bad, fault, numbers.random() < 0.02))
        assert decided(flags, STEPS, happens) == written_out(flags, STEPS, happens), (setting, happens)


def fine(steps: int) -> list[tuple[bool, bool, bool]]:
    return [(False, False, False)] * steps


def test_a_run_without_a_fault():
    found = decided(flags_of(), 12, fine(12))
    assert [n for n, (_, due) in enumerate(found, 1) if due.save] == [5, 10, 12]
    assert [n for n, (_, due) in enumerate(found, 1) if due.log] == [4, 5, 8, 10, 12]
    assert [n for n, (_, due) in enumerate(found, 1) if due.draw] == [5, 10, 12]
    assert [n for n, (looks, _) in enumerate(found, 1) if looks] == [4, 5, 7, 8, 10, 12]
    assert not any(due.refuse for _, due in found)


def test_a_save_waits_until_a_step_is_taken_again():
    happens = fine(4) + [(True, True, False)] * 3 + fine(5)
    found = decided(flags_of(), 12, happens)
    assert [n for n, (_, due) in enumerate(found, 1) if due.save] == [8, 10, 12]
    assert [n for n, (looks, _) in enumerate(found, 1) if looks] == [4, 5, 6, 7, 8, 10, 12]


@pytest.mark.parametrize("fault", [True, False])
def test_a_run_that_ends_skipping_saves_only_where_nothing_is_wrong(fault):
    """Lowering the loss scale in fp16 is not a fault."""
    for end in (12, 8):  # the last step, or a signal
        happens = fine(end - 1) + [(True, fault, end == 8)]
        _, due = decided(flags_of(), 12, happens)[-1]
        assert due == Due(log=True, save=not fault, refuse=fault, draw=end == 12)


def test_a_run_that_saves_nothing_refuses_nothing():
    for bad in (True, False):
        found = decided(flags_of(save=False), 6, fine(5) + [(bad, True, False)])
        assert not any(due.save or due.refuse for _, due in found)


def test_a_signal_ends_without_a_drawing():
    found = decided(flags_of(sample_every=1), 12, [*fine(2), (False, False, True)])
    assert [due.draw for _, due in found] == [True, True, False] and found[-1][1].save and len(found) == 3
