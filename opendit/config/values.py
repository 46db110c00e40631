"""Values of flags: text, one of several words, or a number within a range. A mistake is one line."""

import argparse
import difflib
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

Bounds = dict[str, Any]  # of a flag's values, as fields of Value
# Bounds that several flags share. They are wider than any useful value, and narrow enough that nothing breaks before a
# run can say that a value is too large.
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
    """Allowed values of a flag.

    kind: int, float or str. at_least, above, at_most, below: bounds of a number. infinite: allow inf. choices: allowed
    words. free: allow any text; otherwise the text is a name, perhaps a file's. unit: what is counted or measured
    ("steps", "seconds"), or what the text is ("folder"), as --help shows it.
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
        """Convert a word of the command line and check its range. Raises ArgumentTypeError, as argparse expects."""
        value = self.convert(text)
        if problem := self.problem(value):
            raise argparse.ArgumentTypeError(f"{show(text)}: {problem}")
        return value

    def convert(self, text: str) -> Any:
        """Convert as :meth:`read` does, without checking ranges: a configuration checks those of all values later."""
        value = text if self.kind is str else _number(self.kind, text)
        if value is None:
            raise argparse.ArgumentTypeError(f"{show(text)}: no {NUMBERS[self.kind]}; give {self.describe()}")
        if self.choices is not None and (problem := self.problem(value)):
            raise argparse.ArgumentTypeError(f"{show(text)}: {problem}")
        return value

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value, or None."""
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
        """Return "a whole number from 1 to 16,384", "a number above 0 and at most 100" and the like."""
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
        """Placeholder of the value in --help; None for plain text."""
        if self.unit is not None:
            return self.unit.upper().replace(" ", "_")
        if self.choices is not None:
            return "WORD"
        return None if self.kind is str else "NUMBER"

    def allowed(self) -> str:
        """Return the range or the words as --help shows them ("1 to 16,384", "above 0", "zero2, ddp"); "" for text."""
        if self.choices is not None:
            return ", ".join(self.choices)
        if self.kind is str:
            return ""
        bounds = replace(self, at_most=None) if self.at_most is not None and self.at_most >= 10**8 else self
        return bounds._bounds().removeprefix("from ")


def whole(at_least: int, at_most: int, unit: str | None = None) -> Value:
    """A whole number within a range."""
    return Value(int, at_least=at_least, at_most=at_most, unit=unit)


def one_of(choices: tuple[str, ...]) -> Value:
    """One of several words."""
    return Value(choices=tuple(choices))


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the valid name most like ``name``, ignoring case, for error messages."""
    spelled = {valid.lower(): valid for valid in names}
    found = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.0)
    return spelled[found[0]] if found else ""


def show(value: Any) -> str:
    """Format a value for a message: as it was written, empty text in quotes."""
    return str(value) if str(value).strip() else repr(value)


def one_line(message: str) -> str:
    """Put a message on one line: escape control characters, and cut the middle of a long message."""
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
    """Convert text, or return None if it is not a number of this kind. Python's own int() and float() also accept
    1_000, digits of other scripts and surrounding spaces."""
    if kind is int:
        return int(text) if re.fullmatch("[+-]?[0-9]{1,40}", text) else None
    try:
        return float(text) + 0.0 if text.isascii() and not re.search(r"[_\s]", text) else None  # -0.0 is 0.0
    except ValueError:
        return None


def _shown(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


_TYPES = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class Setting:
    """A flag that sets a field of an objective's or architecture's configuration.

    flag: its name. default: of both. help: its line in --help. type: str, int, float or bool; by default the default's.
    bounds: allowed values, as fields of ``Value``.
    """

    flag: str
    default: Any
    help: str
    type: str | None = None
    bounds: dict[str, Any] = field(default_factory=dict)

    @property
    def annotation(self) -> Any:
        """The field's type: float, or ``float | None`` if None is the default."""
        kind: Any = type(self.default) if self.type is None else _TYPES[self.type]
        return kind | None if self.default is None else kind
