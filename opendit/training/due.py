"""Decide which periodic work is due after a step: validate, evaluate, log, save, draw."""

from dataclasses import dataclass

from opendit.config.train import TrainConfig


@dataclass(frozen=True)
class Due:
    """The work that is due after a step.

    Attributes:
        refuse: True if the run ends with this step but must not save its state, because a fault caused skipped steps.
    """

    log: bool
    save: bool
    refuse: bool
    draw: bool
    validate: bool = False
    evaluate: bool = False


class PeriodicWork:
    """Decides which work is due after a step. The decisions are the same on every rank.

    Call ``step_done``, then ``due``, after every step. While steps are being skipped, nothing is saved, because the run
    may be about to fail. A save that falls due in this time is made after the next step that is not skipped.
    """

    def __init__(self, flags: TrainConfig, last_step: int):
        self._flags, self._last_step = flags, last_step
        self._draw_every = flags.ckpt_every if flags.sample_every is None else flags.sample_every
        self._validate_every = flags.ckpt_every if flags.validate_every is None else flags.validate_every
        self._save_owed = False

    def step_done(self, done: int, stopping: bool) -> bool:
        """Return True if the host must now wait for the device, to check for skipped steps.

        Args:
            done: number of steps done.
            stopping: True if a signal ends the run with this step.
        """
        flags = self._flags
        self._done, self._stopping = done, stopping
        self._last = stopping or done == self._last_step
        self._save_owed |= flags.save and _every(flags.ckpt_every, done)
        validate_every = self._validate_every if flags.validates else 0
        looks = (flags.log_every, flags.max_bad_steps, validate_every, flags.evaluate_every)
        return self._last or self._save_owed or any(_every(steps, done) for steps in looks)

    def due(self, skipping: bool, failing: bool) -> Due:
        """Return the work that is due after this step.

        Args:
            skipping: True if the last step examined was skipped.
            failing: True if that step was skipped because of a fault.
        """
        flags, last = self._flags, self._last
        save = flags.save and ((last and not failing) or (self._save_owed and not skipping))
        self._save_owed &= not save
        ended = self._done == self._last_step
        at_end = ended and flags.sample_every != 0
        # After a signal, there is no time for a periodic validation. But with --ckpt_best val_loss, every save needs a
        # validation, because checkpoints are compared by its loss.
        by_loss = flags.ckpt_best == "val_loss"
        validate = _every(self._validate_every, self._done) or (ended and self._validate_every != 0)
        validate = flags.validates and not self._stopping and (validate or (save and by_loss))
        evaluate = _every(flags.evaluate_every, self._done) or (ended and flags.evaluate_every > 0)
        evaluate = not self._stopping and (evaluate or (save and flags.ckpt_best is not None and not by_loss))
        return Due(
            # Log at every save, because a run that resumes from this checkpoint starts a new mean of the loss at this
            # step.
            log=save or last or validate or evaluate or _every(flags.log_every, self._done),
            save=save,
            refuse=flags.save and last and failing,
            draw=not self._stopping and (at_end or _every(self._draw_every, self._done)),
            validate=validate,
            evaluate=evaluate,
        )


def _every(steps: int, done: int) -> bool:
    return steps > 0 and done % steps == 0
