"""SIGTERM, SIGINT and SIGUSR1 (of schedulers, before a time limit): finish the step, save, leave with exit code 0."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from opendit.parallel.control_group import ControlGroup
from opendit.parallel.mesh import Mesh

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ECHO_SECONDS = 1.0


class Interrupt:
    """Notes the first of these signals; a second one ends the process at once, as if nothing had been installed.

    A context manager; use it in the main thread, on every rank. Ranks get their signals at different moments, so a
    step asks all of them: :meth:`ask` before the optimizer's step, :meth:`answer` after it. The message travels over
    gloo while the device works; no step waits for it and no GPU is read.
    """

    def __init__(self, mesh: Mesh):
        self._mesh, self._channel = mesh, ControlGroup(mesh)
        self._noted_at: float | None = None
        self._answer: Callable[[], bool] | None = None
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
        """Starts to ask whether any rank was told to stop."""
        self._answer = self._channel.start_any(self._noted_at is not None)

    def answer(self) -> bool:
        """The answer to the last :meth:`ask`, the same on all ranks; waits for it."""
        assert self._answer is not None, "ask first"
        return self._answer()

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
