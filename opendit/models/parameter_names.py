"""Names of parameters: the canonical names in checkpoints, and the patterns of names in plans."""

import functools
import re
from collections.abc import Mapping
from typing import TypeVar

WRAPPERS = frozenset(("base_layer", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
Value = TypeVar("Value")


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers such as LoRA and torch.compile insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def fits(pattern: str, name: str) -> bool:
    """Return True if a dotted name matches a pattern: ``*`` matches one part between dots, and ``**`` one or more."""
    return _expression(pattern).fullmatch(name) is not None


@functools.cache
def _expression(pattern: str) -> re.Pattern:
    words = {"*": r"[^.]+", "**": r".+"}
    return re.compile(r"\.".join(words.get(word, re.escape(word)) for word in pattern.split(".")))


def value_of(name: str, by_pattern: Mapping[str, Value], of: str) -> Value:
    """Return the value of the pattern that matches a parameter's name.

    Args:
        name: Name of the parameter.
        by_pattern: Pattern -> value.
        of: Description of the patterns, for the error message.

    Raises:
        ValueError: no pattern matches, or more than one.
    """
    found = [pattern for pattern in by_pattern if fits(pattern, name)]
    if len(found) != 1:
        raise ValueError(f"parameter {name}: one pattern of {of} has to fit it, not {len(found)} {found}")
    return by_pattern[found[0]]
