"""What can be asked for by name: objectives with their settings, and samplers. Needs no torch, so flags are checked by
it.

Both are known by the files in their folders. An objective's file begins with constants that are read here without
running it, see :class:`Description`; all of its flags are made of them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opendit.common.literals import literals_of, module_files

_HERE = Path(__file__).parent
ALL_SAMPLERS = tuple(module_files(_HERE / "samplers", "base"))
_TYPES = {"str": str, "int": int, "float": float}


@dataclass(frozen=True)
class Setting:
    """A field of an objective that has a flag.

    flag: its name. default: of both. help: its line in --help. type: str, int or float; by default the default's.
    bounds: what it takes, as fields of ``opendit.cli.values.Value``.
    """

    flag: str
    default: Any
    help: str
    type: str | None = None
    bounds: dict[str, Any] = field(default_factory=dict)

    @property
    def annotation(self) -> type:
        """float, or ``float | None`` where None is the default."""
        kind = type(self.default) if self.type is None else _TYPES[self.type]
        return kind | None if self.default is None else kind


@dataclass(frozen=True)
class Description:
    """What an objective's file says of it, in constants that are literals.

    predicts: PREDICTS, what the network is trained to, for --help. sampler: SAMPLER, the one that draws from its models
    where none is asked for. settings: SETTINGS, name of the dataclass's field -> a dict as :class:`Setting`.
    """

    predicts: str
    sampler: str
    settings: dict[str, Setting]

    @classmethod
    def read(cls, path: Path) -> "Description":
        found = literals_of(path, "PREDICTS", "SAMPLER", "SETTINGS")
        settings = {name: Setting(**values) for name, values in found["SETTINGS"].items()}
        return cls(found["PREDICTS"], found["SAMPLER"], settings)


DESCRIPTIONS = {name: Description.read(path) for name, path in module_files(_HERE / "objectives", "base").items()}
