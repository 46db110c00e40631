"""Packages that import a module when one of its names is first used, so that flags can be checked without torch."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


def import_when_used(package: str, modules: dict[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """``__getattr__`` (PEP 562) and ``__all__`` of a package, or of a module, whose names come from others.

    Args:
        package: its ``__name__``.
        modules: a module's full name -> the names taken from it, with spaces between them.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    return get, sorted(homes)
