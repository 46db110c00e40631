"""Flags that belong to one objective or one architecture, described where that is, without torch."""

from dataclasses import dataclass, field
from typing import Any

_TYPES = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class Setting:
    """A field of a configuration that has a flag.

    flag: its name. default: of both. help: its line in --help. type: str, int, float or bool; by default the default's.
    bounds: what it takes, as fields of ``opendit.cli.values.Value``.
    """

    flag: str
    default: Any
    help: str
    type: str | None = None
    bounds: dict[str, Any] = field(default_factory=dict)

    @property
    def annotation(self) -> Any:
        """float, or ``float | None`` where None is the default."""
        kind: Any = type(self.default) if self.type is None else _TYPES[self.type]
        return kind | None if self.default is None else kind
