"""The memory of the ranks of a pipeline: each one's stages as a run of its own, of a model of fewer blocks."""

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from opendit.models import DiTConfig, plan_of
from opendit.models.shapes import model_shapes
from opendit.parallel.pipeline import PipelineStages, in_flight, make_schedule, stages_of
from opendit.parallel.rules import rule_of
from opendit.parallel.tensor import DIVIDING

if TYPE_CHECKING:
    from opendit.training.memory import Setup


def stage_setups(config: DiTConfig, setup: "Setup") -> list[tuple[DiTConfig, "Setup"]]:
    """Return, for every rank of a pipeline, a model with the blocks of its stages and its training setup: without the
    layers of other stages, and with the activations of all micro-batches that are under way at once."""
    ranks, found = setup.pipeline_parallel, []
    for rank in range(ranks):
        stages = stages_of(config, setup.schedule, rank, ranks)
        actions = make_schedule(setup.schedule, rank, ranks, setup.micro_batches)
        own = sum(len(stages.own(chunk)) for chunk in range(stages.chunks))
        changes = dict(
            pipeline_parallel=1,
            world=setup.world // ranks,
            absent=absent_parameters(config, stages, setup.tensor_parallel),
            held_micro_batches=in_flight(actions) / stages.chunks,
        )
        found.append((replace(config, depth=own), replace(setup, **changes)))
    return found


@functools.cache
def absent_parameters(config: DiTConfig, stages: PipelineStages, tensor_parallel: int) -> int:
    """Parameters outside of the blocks that a rank does not have, of which others of so many have parts."""
    (shapes, _), plan = model_shapes(config), plan_of(config)
    rules, absent = plan.rules(config), 0
    for name, shape in shapes.items():
        if name.partition(".")[0] != plan.stages.stack and not stages.has(config, name):
            divided = isinstance(rule_of(rules, name), DIVIDING)
            absent += math.prod(shape) // (tensor_parallel if divided else 1)
    return absent
