"""All objectives by name. Training creates an objective from flags; sampling restores it from ``to_dict``'s output.

To add an objective, write ``NAME.py`` here with a ``Trajectory`` and a subclass of ``Objective``, and assign the
subclass to ``OBJECTIVE``. Then describe the objective in opendit/config/names.py; flags are generated from the
description. Samplers need no change.
"""

from dataclasses import fields
from importlib import import_module
from typing import Any

from opendit.config.names import DESCRIPTIONS
from opendit.diffusion.objectives.base import Objective
from opendit.diffusion.objectives.ddpm import DDPMObjective
from opendit.diffusion.objectives.edm import EDMObjective as EDMObjective
from opendit.diffusion.objectives.flow import FlowObjective as FlowObjective

OBJECTIVES: dict[str, type[Objective]] = {n: import_module(f"{__name__}.{n}").OBJECTIVE for n in DESCRIPTIONS}


def objective_from_flags(flags: Any) -> Objective:
    settings = DESCRIPTIONS[flags.objective].settings
    values = {name: getattr(flags, setting.flag) for name, setting in settings.items()}
    return objective_from_dict({"name": flags.objective, **values})


def objective_from_dict(values: dict[str, Any] | None) -> Objective:
    """Return the objective from the output of ``to_dict``. None means the DiT paper's objective. Raises ValueError for
    an unknown objective or setting, or a value out of range."""
    values = dict(values or {"name": DDPMObjective.name})
    name = values.pop("name")
    if name not in OBJECTIVES:
        raise ValueError(f"trained by objective {name!r}: this version knows {', '.join(OBJECTIVES)}")
    known = [field.name for field in fields(OBJECTIVES[name])]
    if unknown := set(values) - set(known):
        raise ValueError(f"objective {name} has no {', '.join(sorted(unknown))}: this version knows {', '.join(known)}")
    return OBJECTIVES[name](**values)
