"""What can be asked for by name: objectives with their settings, and samplers. Needs no torch, so flags are checked by
it.

Both are known by the files in their folders. An objective's file begins with constants that are read here without
running it, see :class:`ObjectiveDescription`; all of its flags are made of them.
"""

from dataclasses import dataclass
from pathlib import Path

from opendit.common.literals import literals_of, module_files
from opendit.common.settings import Setting

_HERE = Path(__file__).parent
ALL_SAMPLERS = tuple(module_files(_HERE / "samplers", "base"))


@dataclass(frozen=True)
class ObjectiveDescription:
    """What an objective's file says of it, in constants that are literals.

    predicts: PREDICTS, what the network is trained to, for --help. sampler: SAMPLER, the one that draws from its models
    where none is asked for. settings: SETTINGS, name of the dataclass's field -> a dict as :class:`Setting`.
    """

    predicts: str
    sampler: str
    settings: dict[str, Setting]

    @classmethod
    def read(cls, path: Path) -> "ObjectiveDescription":
        found = literals_of(path, "PREDICTS", "SAMPLER", "SETTINGS")
        settings = {name: Setting(**values) for name, values in found["SETTINGS"].items()}
        return cls(found["PREDICTS"], found["SAMPLER"], settings)


DESCRIPTIONS = {
    name: ObjectiveDescription.read(path) for name, path in module_files(_HERE / "objectives", "base").items()
}
