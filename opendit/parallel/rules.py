"""Apply the rules of a plan (opendit.models.plan): slices, shard units, pipeline stages, and divisibility. All
functions depend only on shapes, names and numbers, not on process groups."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from opendit.models.dit import DiTConfig
from opendit.models.initialization import fits, value_of
from opendit.models.plan import Column, Expert, Heads, Plan, Replicated, Row, Rule, Vocabulary
from opendit.models.zoo import model_shapes, plan_of

Slices = tuple[slice, ...]  # one slice for each dimension
FLAGS = {"tp": "--tensor_parallel_size", "ep": "--expert_parallel_size"}

# ------------------------------------------------------------------------------------------------- rules of parameters


def rule_of(rules: Mapping[str, Rule], name: str) -> Rule:
    """Return the rule of a parameter. Raises ValueError unless exactly one pattern fits its name."""
    return value_of(name, rules, "the plan")


def divided_dimension(rule: Rule) -> int | None:
    """Return the dimension of a tensor that the rule divides; None if the rule divides no dimension."""
    return None if isinstance(rule, Replicated) else 1 if isinstance(rule, Row) else 0


def local_slices(shape: Sequence[int], rule: Rule, rank: int, size: int) -> tuple[Slices, ...]:
    """Return the slices of a canonical tensor that one of ``size`` ranks has. The local tensor concatenates the slices
    along the divided dimension. For example, [q; k; v] has three slices. Raises ValueError if the dimension can't be
    divided evenly."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of a group of {size}: ranks are 0 to {size - 1}")
    dimension = divided_dimension(rule)
    if dimension is None:
        return (tuple(slice(0, side) for side in shape),)
    ranges = _ranges(shape[dimension], rule, rank, size)
    return tuple(tuple(slice(0, side) if d != dimension else part for d, side in enumerate(shape)) for part in ranges)


def _ranges(side: int, rule: Rule, rank: int, size: int) -> list[slice]:
    """Return a rank's ranges of a dimension with length ``side``. A head is never split."""
    if isinstance(rule, Vocabulary):  # if the rows can't be divided evenly, the first ranks have one row more
        return [slice(*(r * (side // size) + min(r, side % size) for r in (rank, rank + 1)))]
    if isinstance(rule, Heads):
        sections, what = rule.heads, "heads"
    elif isinstance(rule, Row) and rule.heads is not None:
        sections, what = (rule.heads,), "heads"
    elif isinstance(rule, Column):
        sections, what = (_quotient(side, rule.sections, "sections"),) * rule.sections, "features"
    else:
        sections, what = (side,), "experts" if isinstance(rule, Expert) else "features"
    width = _quotient(side, sum(sections), what)  # rows per head or expert; 1 for features
    starts = [sum(sections[:i]) for i in range(len(sections))]
    shares = [_quotient(count, size, "ranks", what) for count in sections]
    return [
        slice((start + rank * share) * width, (start + (rank + 1) * share) * width)
        for start, share in zip(starts, shares, strict=True)
    ]


def _quotient(number: int, divisor: int, parts: str, what: str = "features") -> int:
    if number % divisor:
        raise ValueError(f"{number} {what} can't be divided evenly into {divisor} {parts}")
    return number // divisor


def local_tensor(full: Tensor, rule: Rule, rank: int, size: int) -> Tensor:
    """Return a rank's slices of a canonical tensor, concatenated: a view for one slice, otherwise a copy. Raises
    ValueError as :func:`local_slices` does."""
    parts = [full[slices] for slices in local_slices(full.shape, rule, rank, size)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=cast(int, divided_dimension(rule)))


# -------------------------------------------------------------------------------------------------- full matrices


def matrix_rows(config: DiTConfig) -> dict[str, tuple[int, ...]]:
    """Return the block parameters that multiply tokens, and the row counts of their matrices. A parameter may stack
    several matrices, for example q, k and v. Modulations, norms, biases and the experts' router are not included."""
    plan = plan_of(config)
    rules, found = plan.rules(config), {}
    for name, shape in model_shapes(config)[0].items():
        if name.partition(".")[0] != plan.stages.stack or len(shape) < 2:
            continue
        rule = rule_of(rules, name)
        if isinstance(rule, Heads):
            sections = rule.heads
        elif isinstance(rule, Expert):
            sections = (1,) * shape[0]
        elif isinstance(rule, Row) or (isinstance(rule, Column) and not rule.gathered):
            sections = (1,) * (rule.sections if isinstance(rule, Column) else 1)
        else:
            continue
        unit = math.prod(shape[:-1]) // sum(sections)
        found[name] = tuple(count * unit for count in sections)
    return found


# --------------------------------------------------------------------------------------------- shard units and stages


def shard_units(plan: Plan, parameters: Iterable[str]) -> dict[str, list[str]]:
    """Group the parameters into units for sharding. Return {module: names of its parameters}. The module "" has all
    remaining parameters."""
    units = {}
    for name in parameters:
        parts = name.split(".")
        modules = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
        unit = next((module for module in modules if any(fits(unit, module) for unit in plan.units)), "")
        units.setdefault(unit, []).append(name)
    return units


def stage_blocks(depth: int, stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Divide ``depth`` blocks into stages of neighbouring blocks, at least one each. The most expensive stage is as
    cheap as possible. On a tie, later stages get more blocks, because they store fewer activations. first, last:
    additional costs of the first and last stage, in units of a block's cost."""
    counts, work = [1] * stages, [1.0] * stages
    work[0] += first
    work[-1] += last
    for _ in range(depth - stages):
        least = min(reversed(range(stages)), key=work.__getitem__)
        counts[least] += 1
        work[least] += 1
    edges = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(*pair) for pair in zip(edges, edges[1:], strict=False)]


def balanced_blocks(config: DiTConfig, stages: int) -> list[range]:
    """Divide a model's blocks into stages with :func:`stage_blocks`, by FLOPs. Modules on every stage are not
    counted."""
    plan = plan_of(config)
    block = plan.flops_at(config, "block")
    return stage_blocks(config.depth, stages, *(plan.flops_at(config, end) / block for end in ("first", "last")))


def stage_of(plan: Plan, name: str, blocks: Sequence[range]) -> range:
    """Return the indices of the stages that have a parameter or buffer. blocks: the blocks of every stage. Raises
    ValueError if the plan does not list the name."""
    cuts, (top, *rest), stages = plan.stages, name.split("."), len(blocks)
    if top == cuts.stack:
        stage = next(i for i, own in enumerate(blocks) if int(rest[0]) in own)
        return range(stage, stage + 1)
    places = {cuts.first: range(1), cuts.last: range(stages - 1, stages), cuts.every: range(stages)}
    for names, place in places.items():
        if top in names:
            return place
    raise ValueError(f"{name}: the plan does not say which stages of a pipeline have it")


# ----------------------------------------------------------------------------------------------------- do sizes divide


def check_divisible(config: DiTConfig, group: str, size: int) -> None:
    """Raise ValueError unless ``size`` ranks of a ``group`` (tp or ep) can divide a model's heads, widths or experts
    evenly. The message names the flag, the number that is not divisible, and sizes that work."""
    if size == 1:
        return
    flag, numbers = FLAGS[group], plan_of(config).divisible(config).get(group)
    if numbers is None:
        raise ValueError(f"{flag} {size}: {config.kind} models have nothing that it divides; leave it out")
    obstacle = next((f"{what}, {number}," for what, number in numbers.items() if number % size), None)
    if obstacle:
        common = math.gcd(*numbers.values())
        works = [str(n) for n in range(2, common + 1) if common % n == 0]
        fix = f"use {', '.join(works)}" if works else "leave it out"
        raise ValueError(f"{flag} {size}: the model's {obstacle} can't be divided by it; {fix}")


def check_stages(config: DiTConfig, ranks: int, chunks: int = 1) -> None:
    """Raise ValueError unless the model has enough blocks for ``chunks`` stages on each rank. The message names the
    flag."""
    most = config.depth // chunks
    if ranks > most:
        raise ValueError(
            f"--pipeline_parallel_size {ranks}: the model's {config.depth} blocks make at most {most} stages; "
            f"use {most} or less"
            if chunks == 1
            else f"--pipeline_parallel_size {ranks}: the model has {config.depth} blocks, and --pipeline_schedule "
            f"interleaved needs {chunks} for every process at least; use {most} or less, or 1f1b"
        )
