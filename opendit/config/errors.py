"""How mistakes are told: ``error: --flag value: what is wrong; what to do``, in one line, by one of all processes."""

import os
import sys

from opendit.config.values import one_line


class OnThisMachine(ValueError):
    """A mistake that not every machine of a run need see: a folder that isn't there or can't be written."""


def speaks(error: Exception | str) -> bool:
    """Whether this process is the one to say what is wrong: of all that see it, the first."""
    rank = "LOCAL_RANK" if isinstance(error, OnThisMachine) else "RANK"
    return os.environ.get(rank, "0") == "0"


def say(error: Exception | str) -> None:
    """Prints the line on standard error."""
    print(one_line(f"error: {error}"), file=sys.stderr, flush=True)
