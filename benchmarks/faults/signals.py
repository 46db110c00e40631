"""Faults: signals. The run must finish its step, save and exit; or end at once and lose nothing that was saved."""

import signal
import time
from collections.abc import Callable

from benchmarks.faults.endings import FROM_STEP_10, INFINITE, trained
from benchmarks.faults.lab import Lab, fault
from opendit.training.interrupt import AGAIN


def told_to_stop(number: int) -> Callable[[Lab], None]:
    def make(lab: Lab) -> None:
        programs = trained(lab)
        lab.now()
        programs[0].send(number)
        lab.ends(programs, {AGAIN}, "", anywhere=True)
        lab.loses_nothing()

    return make


for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    fault(f"{_number.name}: finish the step, save, leave", name=_number.name.lower())(told_to_stop(_number))


@fault("SIGTERM to one of two ranks")
def sigterm_to_a_rank(lab: Lab) -> None:
    programs = trained(lab, world=2)
    lab.now()
    programs[1].send(signal.SIGTERM)
    lab.ends(programs, {0})
    lab.loses_nothing(2)


@fault("SIGTERM, and SIGINT 20 ms later")
def two_signals(lab: Lab) -> None:
    programs = trained(lab)
    lab.now()
    programs[0].send(signal.SIGTERM)
    time.sleep(0.02)
    programs[0].send(signal.SIGINT)
    lab.ends(programs, {AGAIN, -signal.SIGINT})
    lab.loses_nothing()


@fault("SIGINT while the program starts")
def sigint_at_the_start(lab: Lab) -> None:
    lab.prepared()
    programs = lab.train("--load", "latest")
    time.sleep(0.3)
    lab.now()
    programs[0].send(signal.SIGINT)
    lab.ends(programs, {AGAIN, 0, 1, 2, 130, -signal.SIGINT})
    lab.loses_nothing()


@fault("SIGHUP: the terminal is closed")
def sighup(lab: Lab) -> None:
    programs = trained(lab)
    lab.now()
    programs[0].send(signal.SIGHUP)
    lab.ends(programs, {0, -signal.SIGHUP})
    lab.loses_nothing()


@fault("SIGTERM while steps are being skipped")
def sigterm_while_skipping(lab: Lab) -> None:
    programs = trained(lab, "--max_steps", 4000, prelude=FROM_STEP_10.format(rank=0, what=INFINITE))
    time.sleep(1)
    lab.now()
    programs[0].send(signal.SIGTERM)
    lab.ends(programs, {1}, "")
    lab.loses_nothing()
