"""End a run early, after an equal number of steps on all ranks, and report the reason to the script that started the
run.

After SIGTERM, SIGINT or SIGUSR1, or when --max_hours is over, the run finishes its step, saves and ends. If a rank
can't read data any more, the run drops the current step, saves and ends with an error. The reason is written to
ended.json in the run's folder. Exit code 75 means that the run should be started again.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from opendit.checkpoint.run_folders import ENDED
from opendit.common.stages import process_seconds
from opendit.data import DataError
from opendit.parallel.mesh import ControlGroup, Mesh

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ECHO_SECONDS = 1.0
OTHERS_SECONDS = 0.5  # delay on other ranks, so that the rank without data prints its error first
_GO_ON, _HOURS_UP, _STOP, _NO_DATA = range(4)


class NoData(DataError):
    """Error on all ranks if one rank can't read its data. All ranks drop the current step."""


class Interrupt:
    """Context manager that records a first signal, one of ``SIGNALS``. A second signal ends the process at once.

    Use it in the main thread of every rank. Ranks receive signals at different moments, so they must agree in every
    step: call :meth:`ask` before the optimizer's step and :meth:`answer` after it.

    The run also stops if one more step and a save (``save_seconds()``) would make the process older than ``hours``.

    Attributes:
        alone: True if there are no other ranks.
        lost: the error if this rank could not read data for the current step and used an earlier batch.
    """

    def __init__(self, mesh: Mesh, hours: float | None = None, save_seconds: Callable[[], float] = lambda: 0.0):
        self._mesh, self._channel = mesh, ControlGroup(mesh)
        self._noted_at: float | None = None
        self.alone = mesh.world_size == 1
        self.lost: DataError | None = None
        self._answer: Callable[[], int] | None = None
        self._asked_at, self._save_seconds = time.monotonic(), save_seconds
        self._deadline = None if hours is None else self._asked_at - process_seconds() + 3600 * hours
        # After a Ctrl-C, a process gets a second signal from torchrun. Ignore signals for this long.
        self._echo = ECHO_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is not None and self._mesh.world_size > 1:
            # When a rank has ended, torchrun sends SIGTERM to all remaining ranks. Ignore the signal, so that this rank
            # can report an error and close files. The Supervisor limits the time.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def ask(self) -> None:
        """Ask whether any rank got a signal, lacks data or is out of time. Call before the optimizer's step. Raises
        NoData on all ranks if any rank lacks data. That rank's gradients must not be used."""
        word = _HOURS_UP if self._out_of_time() else _GO_ON
        word = _NO_DATA if self.lost else _STOP if self._noted_at is not None else word
        self._answer = self._channel.start_largest(word)
        if self._answer() == _NO_DATA:
            raise NoData(str(self.lost or "another rank can't read its data"))

    def answer(self) -> bool:
        """Return True on all ranks if any rank had a signal or was out of time at the last :meth:`ask`."""
        assert self._answer is not None, "ask first"
        return self._answer() in (_HOURS_UP, _STOP)

    @property
    def why(self) -> str | None:
        """Reason for the run's end: "stopped" (by a signal) or "hours_up". None if the run continues."""
        return self._answer and {_STOP: "stopped", _HOURS_UP: "hours_up"}.get(self._answer())

    def _out_of_time(self) -> bool:
        now, before = time.monotonic(), self._asked_at
        self._asked_at = now
        if self._deadline is None or now + (now - before) + self._save_seconds() <= self._deadline:
            return False
        if self._mesh.is_main:
            logger.info("--max_hours: finishing the step and saving")
        return True

    def leave(self) -> None:
        """Wait until all ranks have saved. Every rank must call this after catching NoData."""
        self._channel.gather(None)  # returns when all ranks have saved
        if self.lost is None and not self.alone:
            time.sleep(OTHERS_SECONDS)

    def _note(self, number: int, frame) -> None:
        now = time.monotonic()
        if self._noted_at is None:
            self._noted_at = now
            if self._mesh.local_rank == 0:
                name = signal.Signals(number).name
                text = f"\n{name}: finishing the step and saving; a second signal quits at once\n"
                with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                    # print() can't be used: the signal may have interrupted a print
                    os.write(sys.stderr.fileno(), text.encode())
            if not self._echo:
                self._hand_back()
        elif now - self._noted_at >= self._echo:
            self._hand_back()
            os.kill(os.getpid(), number)

    def _hand_back(self) -> None:
        """Restore the default handlers. They end the process even while Python waits inside a collective."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)


AGAIN = 75  # EX_TEMPFAIL in sysexits.h; job queues can restart jobs with this code
# Environment variable with a file's name. A run writes the path of its folder there, so that the script that started
# the run finds ended.json.
RUN_FOLDER_FILE = "OPENDIT_RUN_FOLDER_FILE"


def exit_code(folder: Path) -> int:
    """Return 75 if a run without an error has steps left, else 0. Always 0 under torchrun, where other codes mean
    failure."""
    if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return 0
    try:
        return 0 if json.loads((folder / ENDED).read_bytes())["done"] else AGAIN
    except OSError:  # the run has already reported the failed write
        return 0
