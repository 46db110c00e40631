"""Print mistakes as one line, ``error: --flag value: what is wrong; what to do``, from one process."""

import os
import sys

from opendit.config.values import one_line


class OnThisMachine(ValueError):
    """A mistake that perhaps only this machine sees: a folder that is missing or can't be written."""


def speaks(error: Exception | str) -> bool:
    """True on the rank that should print the error: the first of those that see it."""
    rank = "LOCAL_RANK" if isinstance(error, OnThisMachine) else "RANK"
    return os.environ.get(rank, "0") == "0"


def say(error: Exception | str) -> None:
    """Print the line on standard error."""
    print(one_line(f"error: {error}"), file=sys.stderr, flush=True)
