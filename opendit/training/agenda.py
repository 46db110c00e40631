"""What a run does besides training after a step: look at the device, log, save, draw."""

from dataclasses import dataclass

from opendit.cli.train_flags import TrainConfig


@dataclass(frozen=True)
class Due:
    """What is due after a step. refuse: the run ends with it, but its state is not to be saved."""

    log: bool
    save: bool
    refuse: bool
    draw: bool


class Agenda:
    """Decides what is done after every step, the same on every rank: call ``step_done`` after each, then ``due``.

    Nothing is saved while steps are being skipped, since the run may be about to fail: a save that falls due then is
    made after the first step that is taken again.
    """

    def __init__(self, flags: TrainConfig, last_step: int):
        self._flags, self._last_step = flags, last_step
        self._draw_every = flags.ckpt_every if flags.sample_every is None else flags.sample_every
        self._save_owed = False

    def step_done(self, done: int, stopping: bool) -> bool:
        """Whether the host has to look now whether steps are being skipped, for which it waits for the device.

        done: steps of the run so far. stopping: whether it was told to end with this one.
        """
        flags = self._flags
        self._done, self._stopping = done, stopping
        self._last = stopping or done == self._last_step
        self._save_owed |= flags.save and _every(flags.ckpt_every, done)
        return self._last or self._save_owed or _every(flags.log_every, done) or _every(flags.max_bad_steps, done)

    def due(self, skipping: bool, failing: bool) -> Due:
        """What is due after this step.

        skipping: whether it was skipped, as far as the host has looked. failing: whether it was by a fault.
        """
        flags, last = self._flags, self._last
        save = flags.save and ((last and not failing) or (self._save_owed and not skipping))
        self._save_owed &= not save
        at_end = self._done == self._last_step and flags.sample_every != 0
        return Due(
            log=save or last or _every(flags.log_every, self._done),  # a resumed run starts a new mean at a save, too
            save=save,
            refuse=flags.save and last and failing,
            draw=not self._stopping and (at_end or _every(self._draw_every, self._done)),
        )


def _every(steps: int, done: int) -> bool:
    return steps > 0 and done % steps == 0
