"""What a flag takes: text, one of several words, or a number of a range. Read strictly, with one line for a mistake."""

import argparse
import math
import os
import re
from dataclasses import dataclass, replace
from typing import Any

from opendit.models.names import nearest

Bounds = dict[str, Any]  # of a flag's values, as fields of Value
# Bounds that several flags have: wider than anything of use, narrow enough for what is made of them before a
# run can say that it is too much.
COUNT: Bounds = {"at_least": 1, "at_most": 10**9}
FROM_0: Bounds = {"at_least": 0, "at_most": 10**9}
ABOVE_0: Bounds = {"above": 0, "at_most": 1e38}  # what fp32 holds
SHARE: Bounds = {"at_least": 0, "below": 1, "unit": "share"}
BATCH: Bounds = {"at_least": 1, "at_most": 65_536, "unit": "samples"}
SCALE: Bounds = {"at_least": 1, "at_most": 1000, "unit": "factor"}  # by which a picture is enlarged
SIDE: Bounds = {"at_least": 1, "at_most": 16_384, "unit": "pixels"}
FRAMES: Bounds = {"at_least": 1, "at_most": 16_384, "unit": "frames"}
FPS: Bounds = {"above": 0, "at_most": 1000, "unit": "rate"}  # frames a second
WORKERS: Bounds = {"at_least": 0, "at_most": 256, "unit": "processes"}
# What torch's generators and the kernels' 64-bit keys take.
SEED: Bounds = {"at_least": 0, "at_most": 2**63 - 1, "unit": "seed"}
SAMPLING_STEPS: Bounds = {"at_least": 1, "at_most": 1000, "unit": "steps"}  # ddpm's models know 1,000 noise levels
GUIDANCE: Bounds = {"at_least": 0, "at_most": 1000, "unit": "scale"}
LONGEST = 400  # characters of a message that are shown: a value may be a file's whole contents


NUMBERS = {int: "whole number", float: "number"}


@dataclass(frozen=True)
class Value:
    """The values of a flag.

    kind: int, float or str. at_least, above, at_most, below: bounds of a number. infinite: inf is a value too. choices:
    the words it takes. free: any text; otherwise it is a name, and may be a file's. unit: what is counted or measured
    ("steps", "seconds"), or what the text is ("folder"), as --help shows it in the value's place.
    """

    kind: type[Any] = str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    infinite: bool = False
    choices: tuple[str, ...] | None = None
    free: bool = False
    unit: str | None = None

    def read(self, text: str) -> Any:
        """The value of a word of the command line. Raises ArgumentTypeError, as argparse expects of a ``type``."""
        value = self.convert(text)
        if problem := self.problem(value):
            raise argparse.ArgumentTypeError(f"{show(text)}: {problem}")
        return value

    def convert(self, text: str) -> Any:
        """As :meth:`read`, for numbers of any size: a configuration checks all of its own, however they came there."""
        value = text if self.kind is str else _number(self.kind, text)
        if value is None:
            raise argparse.ArgumentTypeError(f"{show(text)}: no {NUMBERS[self.kind]}; give {self.describe()}")
        if self.choices is not None and (problem := self.problem(value)):
            raise argparse.ArgumentTypeError(f"{show(text)}: {problem}")
        return value

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, None if nothing is."""
        if self.choices is not None and value not in self.choices:
            words, meant = ", ".join(self.choices), nearest(str(value), self.choices)
            return f"not known; give one of {words}; did you mean {meant}?"
        if self.kind is str:
            return None if self.free else _problem_of_name(value)
        fits = isinstance(value, int | float) and not math.isnan(value) and (self.infinite or abs(value) != math.inf)
        fits = fits and (self.at_least is None or value >= self.at_least) and (self.above is None or value > self.above)
        fits = fits and (self.at_most is None or value <= self.at_most) and (self.below is None or value < self.below)
        return None if fits else f"out of range; give {self.describe()}"

    def describe(self) -> str:
        """ "a whole number from 1 to 16,384", "a number above 0 and at most 100", ..."""
        if self.kind is str:
            return "one of " + ", ".join(self.choices) if self.choices else "text"
        return f"a {NUMBERS[self.kind]} {self._bounds()}".strip()

    def _bounds(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"from {_shown(self.at_least)} to {_shown(self.at_most)}"
        words = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {_shown(bound)}" for word, bound in words.items() if bound is not None)

    @property
    def metavar(self) -> str | None:
        """What stands for the value in --help; None where nothing is known of it but that it is text."""
        if self.unit is not None:
            return self.unit.upper().replace(" ", "_")
        if self.choices is not None:
            return "WORD"
        return None if self.kind is str else "NUMBER"

    def allowed(self) -> str:
        """The range or the words as --help shows them, "1 to 16,384", "above 0", "zero2, ddp"; empty for text."""
        if self.choices is not None:
            return ", ".join(self.choices)
        if self.kind is str:
            return ""
        bounds = replace(self, at_most=None) if self.at_most is not None and self.at_most >= 10**8 else self
        return bounds._bounds().removeprefix("from ")


def whole(at_least: int, at_most: int, unit: str | None = None) -> Value:
    """A whole number of a range, of something."""
    return Value(int, at_least=at_least, at_most=at_most, unit=unit)


def one_of(choices: tuple[str, ...]) -> Value:
    """One of several words."""
    return Value(choices=tuple(choices))


def show(value: Any) -> str:
    """A value in a message: as it was written, empty text in quotes."""
    return str(value) if str(value).strip() else repr(value)


def one_line(message: str) -> str:
    """A message as one line that a terminal takes: control characters are escaped, a long one loses its middle."""
    message = "".join(c if c.isprintable() or "\ud800" <= c <= "\udfff" else ascii(c)[1:-1] for c in message)
    if len(message) > LONGEST:
        half = LONGEST // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return message


def _problem_of_name(name: str) -> str | None:
    if not name.strip():
        return "empty; give a name"
    longest = max(map(len, os.fsencode(name).split(b"/")))
    return "too long for the name of a file; give a shorter one" if longest > 255 or len(name) > 4000 else None


def _number(kind: type[Any], text: str) -> int | float | None:
    """None for text that is no number of this kind. Python's own int() and float() take more: 1_000, digits of other
    scripts, spaces around."""
    if kind is int:
        return int(text) if re.fullmatch("[+-]?[0-9]{1,40}", text) else None
    try:
        return float(text) + 0.0 if text.isascii() and not re.search(r"[_\s]", text) else None  # -0.0 is 0.0
    except ValueError:
        return None


def _shown(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
