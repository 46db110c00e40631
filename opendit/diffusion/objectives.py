"""All objectives by name. One is made from flags for training, and from what a checkpoint says of itself
(``to_dict``) for sampling."""

from dataclasses import fields

from opendit.diffusion.ddpm_objective import DDPMObjective
from opendit.diffusion.edm import EDMObjective
from opendit.diffusion.flow import FlowObjective
from opendit.diffusion.objective import Objective

OBJECTIVES = {kind.name: kind for kind in (DDPMObjective, FlowObjective, EDMObjective)}


def objective_from_dict(values: dict | None) -> Objective:
    """The objective that ``to_dict`` wrote; None, of weights that don't say, is the DiT paper's.

    Raises ValueError for one, or a setting of one, that this version does not know.
    """
    values = dict(values or {"name": DDPMObjective.name})
    name = values.pop("name")
    if name not in OBJECTIVES:
        raise ValueError(f"trained by objective {name!r}: this version knows {', '.join(OBJECTIVES)}")
    known = [field.name for field in fields(OBJECTIVES[name])]
    if unknown := set(values) - set(known):
        raise ValueError(f"objective {name} has no {', '.join(sorted(unknown))}: this version knows {', '.join(known)}")
    return OBJECTIVES[name](**values)
