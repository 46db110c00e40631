"""Linear layers of which a rank of the group ``tp`` holds a part, as the model's plan says. Parameters keep their
names; :attr:`Part.divided` says which slices of the canonical ones they are."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.models import DiTConfig, plan_of
from opendit.models.ecdit import ExpertMlp
from opendit.models.layers import Projection
from opendit.models.plans.terms import Column, Expert, Heads, Replicated, Row, Rule
from opendit.models.shapes import model_shapes
from opendit.parallel.layout import Cut
from opendit.parallel.rules import divided_dimension, local_slices, local_tensor, rule_of
from opendit.parallel.sequence.collectives import Group
from opendit.parallel.tensor.collectives import column_product, join, sum_shares


@dataclass(frozen=True)
class Divided:
    """A parameter of which every rank of a group has a part: its canonical shape, and the cut that makes the parts."""

    shape: tuple[int, ...]
    cut: Cut


def divided_by(rule: Rule, shape: tuple[int, ...], ranks: int, group: str = "tp") -> Divided:
    """Raises ValueError if the ranks can't share it evenly."""
    dim = cast(int, divided_dimension(rule, shape))
    slices = [[part[dim] for part in local_slices(shape, rule, rank, ranks)] for rank in range(ranks)]
    ranges = tuple(tuple((part.start, part.stop) for part in own) for own in slices)
    return Divided(tuple(shape), Cut(group, dim, ranges))


class Part(Projection):
    """A linear layer of this rank's part of the weight. Made by :func:`part_of`."""

    group: Group
    divided: Mapping[str, Divided]

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class ColumnParallel(Part):
    """This rank's output features (B, P n, out / P) of the tokens of all ranks, of which it is given its own (B, n,
    in)."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = F.linear) -> Tensor:
        """``multiply`` is not asked: the product has a backward pass of its own."""
        x, weight, bias = _as_autocast_does(x, self.weight, bias)
        return column_product(x, weight, bias, self.group)


class RowParallel(Part):
    """This rank's tokens (B, n, out) of the sum of all ranks' products, each of its own input features (B, P n, in /
    P); the bias, which every rank has, is added to the sum."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = F.linear) -> Tensor:
        summed = sum_shares(multiply(x, self.weight), 1, self.group)
        return summed if bias is None else summed + bias.to(summed.dtype)


class ColumnOfContext(Part):
    """This rank's output features of an input that all ranks have; its gradient is a part of a sum."""


class GatheredColumn(Part):
    """All output features (B, out) of an input (B, in) that all ranks have, each of which computes some of them."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = F.linear) -> Tensor:
        return join(super().product(x, bias, multiply), x.dim() - 1, self.group)


def _as_autocast_does(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Copies in autocast's dtype, if that is on: an operation with a backward pass of its own must make them before.
    None stays None."""
    tensors, device = (first, *others), first.device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(None if tensor is None else tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


DIVIDING = (Column, Row, Heads, Expert)  # rules that the ranks follow; tables of labels are small, and whole on all


@functools.cache
def held_parameters(config: DiTConfig, ranks: int) -> tuple[int, int]:
    """Count the parameters that each of ``ranks`` ranks has of a model, and of one of its blocks."""
    (shapes, _), rules, found = model_shapes(config), plan_of(config).rules(config), [0, 0]
    for name, shape in shapes.items():
        held = math.prod(shape) // (ranks if isinstance(rule_of(rules, name), DIVIDING) else 1)
        found[0] += held
        found[1] += held * name.startswith("blocks.0.")
    return found[0], found[1]


def part_of(layer: nn.Linear, rule: Rule, group: Group) -> nn.Linear:
    """Return this rank's part of a linear layer whose weight has ``rule``; the layer itself if the rule does not divide
    it. Parameters are copies of their part, or on the meta device where the layer's are there."""
    kinds = {Row: RowParallel, Heads: ColumnParallel, Column: ColumnParallel}
    kind = kinds.get(type(rule))
    if kind is None:
        return layer
    if isinstance(rule, Heads) and rule.of_context:
        kind = ColumnOfContext
    elif isinstance(rule, Column) and rule.gathered:
        kind = GatheredColumn
    with torch.device("meta"):
        part = kind(1, 1, bias=layer.bias is not None)
    rules = {"weight": rule, "bias": Replicated() if isinstance(rule, Row) else rule}
    part.group, part.divided = group, {}
    for name, parameter in list(layer.named_parameters()):
        setattr(part, name, _own(parameter, rules[name], group))
        if not isinstance(rules[name], Replicated):
            part.divided[name] = divided_by(rules[name], parameter.shape, group.size)
    part.out_features, part.in_features = part.weight.shape
    return part.train(layer.training)


def divide_experts(mlp: ExpertMlp, group: Group, name_of_group: str = "tp") -> None:
    """Leaves this rank its experts, in place; ``name_of_group``: in the mesh."""
    share = len(mlp.expert_fc1) // group.size
    divided: dict[str, Divided] = {}
    for name in ("expert_fc1", "expert_fc2"):
        parameter = getattr(mlp, name)
        divided[name] = divided_by(Expert(), parameter.shape, group.size, name_of_group)
        setattr(mlp, name, _own(parameter, Expert(), group))
    of_ranks: Any = mlp
    of_ranks.divided = divided
    mlp.held = slice(group.rank * share, (group.rank + 1) * share)


def _own(parameter: nn.Parameter, rule: Rule, group: Group) -> nn.Parameter:
    part = local_tensor(parameter.detach(), rule, group.rank, group.size)
    kept = parameter.detach() if isinstance(rule, Replicated) else part.clone()  # a view would hold on to the whole
    return nn.Parameter(kept, requires_grad=parameter.requires_grad)


def divided_parameters(model: nn.Module) -> dict[str, Divided]:
    """Those of the model's parameters that are parts, by name."""
    found = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + name: part for name, part in getattr(module, "divided", {}).items()}
    return found
