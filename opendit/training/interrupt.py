"""End a run between two steps, on all ranks after the same one.

SIGTERM, SIGINT and SIGUSR1 (of schedulers, before a time limit): finish the step, save, leave with exit code 0.
Data that can't be read any more: leave out the step that lacks them, save, leave with the error.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from opendit.common.utils import DataError
from opendit.parallel.mesh import ControlGroup, Mesh

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ECHO_SECONDS = 1.0
OTHERS_SECONDS = 0.5  # for which the others wait, so that the rank whose data are lost is named
_GO_ON, _STOP, _NO_DATA = range(3)


class NoData(DataError):
    """A step is left out on all ranks, because one of them can't read what it needs of it."""


class Interrupt:
    """Notes the first of these signals; a second one ends the process at once, as if nothing had been installed.

    A context manager; use it in the main thread, on every rank. Ranks get their signals at different moments, so a
    step asks all of them: :meth:`ask` before the optimizer's step, :meth:`answer` after it. The message travels over
    gloo while the device works on what is enqueued, and no GPU is read.

    Attributes:
        alone: whether there are no other ranks.
        lost: why this rank has no data for the step under way, which it then computes with others in their place; the
            next :meth:`ask` tells all ranks.
    """

    def __init__(self, mesh: Mesh):
        self._mesh, self._channel = mesh, ControlGroup(mesh)
        self._noted_at: float | None = None
        self.alone = mesh.world_size == 1
        self.lost: DataError | None = None
        self._answer: Callable[[], int] | None = None
        # torchrun hands a Ctrl-C that its processes got from the terminal already on to them once more.
        self._echo = ECHO_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is not None and self._mesh.world_size > 1:
            # torchrun tells the other ranks to end once one has ended. This one has to say why and to put away what it
            # holds first, for which the Supervisor gives it seconds.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def ask(self) -> None:
        """Asks whether any rank was told to stop, or lacks data. Raises NoData on all ranks if one does: its gradients
        are in everybody's, and so the optimizer's step has to wait for the answer."""
        word = _NO_DATA if self.lost else _STOP if self._noted_at is not None else _GO_ON
        self._answer = self._channel.start_largest(word)
        if self._answer() == _NO_DATA:
            raise NoData(str(self.lost or "another rank can't read its data"))

    def answer(self) -> bool:
        """Return True if any rank was told to stop before the last :meth:`ask`; the same on all ranks."""
        assert self._answer is not None, "ask first"
        return self._answer() == _STOP

    def leave(self) -> None:
        """After NoData, and what is done about it, before it is raised further. Collective."""
        self._channel.gather(None)  # all have saved
        if self.lost is None and not self.alone:
            time.sleep(OTHERS_SECONDS)

    def _note(self, number: int, frame) -> None:
        now = time.monotonic()
        if self._noted_at is None:
            self._noted_at = now
            if self._mesh.local_rank == 0:
                name = signal.Signals(number).name
                text = f"\n{name}: finishing the step and saving; a second signal quits at once\n"
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    os.write(sys.stderr.fileno(), text.encode())  # print may be in the middle of a line right now
            if not self._echo:
                self._hand_back()
        elif now - self._noted_at >= self._echo:
            self._hand_back()
            os.kill(os.getpid(), number)

    def _hand_back(self) -> None:
        """The next signal is the system's: it works even where Python waits inside a collective."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
