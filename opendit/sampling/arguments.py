"""Arguments of ``opendit.load`` and of drawing from Python: what they are called, and between what they lie."""

import contextlib
import re
import shlex
from collections.abc import Iterator
from typing import Any

# flag of sample.py: argument here, where they differ
ARGUMENTS = {
    "ckpt": "path",
    "mixed_precision": "precision",
    "cfg_scale": "guidance",
    "cfg_interval": "interval",
    "cfg_channels": "guided_channels",
    "num_sampling_steps": "steps",
    "negative_prompt": "negative",
    "image_size": "size",
    "num_frames": "frames",
}
MOST_SAMPLES, MOST_STEPS, MOST_GUIDANCE, MOST_SEED = 10**7, 1000, 1000.0, 2**63 - 1  # as sample.py's flags


@contextlib.contextmanager
def arguments_named() -> Iterator[None]:
    """Errors that name a flag of sample.py name the argument."""
    try:
        yield
    except (ValueError, OSError) as error:
        said = re.sub(r"(?<= add )--(\w+) (.+)$", _as_keyword, str(error))
        said = re.sub(r"(?<![\w./-])--(\w+)", lambda found: ARGUMENTS.get(found[1], found[1]), said)
        said = said.replace("leave the flag out", "leave it out")
        if said == str(error):
            raise
        kinds = (FileNotFoundError, OSError, ValueError)
        raise next(kind for kind in kinds if isinstance(error, kind))(said) from error


def _as_keyword(found: re.Match[str]) -> str:
    """Rewrite ``--flag value`` at the end of a message as a Python argument."""
    try:
        (value,) = shlex.split(found[2])
    except ValueError:  # more than a value
        return found[0]
    return f"{ARGUMENTS.get(found[1], found[1])}={value!r}"


def check_number(name: str, value: Any, low: float, high: float, kind: type[Any] = float) -> None:
    """Raises ValueError unless a value is a number of this kind between the two."""
    try:
        number = value.__index__() if kind is int else float(value)
        fits = not isinstance(value, bool) and low <= number <= high
    except (AttributeError, TypeError, ValueError):
        fits = False
    if not fits:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} {value!r}: must be {what} from {low:,} to {high:,}")
