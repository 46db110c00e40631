"""Mistakes on the command line: which of a run's processes says them."""

import os


class OnThisMachine(ValueError):
    """A mistake that not every machine of a run need see: a folder that isn't there or can't be written."""


def speaks(error: Exception | str) -> bool:
    """Whether this process is the one to say what is wrong: of all that see it, the first."""
    rank = "LOCAL_RANK" if isinstance(error, OnThisMachine) else "RANK"
    return os.environ.get(rank, "0") == "0"
