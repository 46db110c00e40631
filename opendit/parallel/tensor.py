"""Tensor parallelism: the ranks of the group ``tp`` divide every layer of a model; see docs/parallelism.md.

This is Megatron-LM's division (Shoeybi et al. 2019) with sequence-sharded norms and residuals (Korthikanti et al.
2022). A rank holds n of a sequence's tokens between the layers, and 1 / P of the heads and of the MLP's width inside of
them. Tokens are gathered before a column-parallel layer; the results of a row-parallel layer are summed and scattered.

Every rank of a group computes the same loss of the same samples. The gradient that a rank finds for a divided parameter
is that of its part. For a replicated parameter it is one term of a sum over the group: of the rank's tokens if the
parameter acts on the residual stream, of the rank's heads, features or experts if it acts on what all ranks have.
:class:`ReplicatedGradients` adds these terms up.

Parameters keep their names; :attr:`Part.divided` says which slices of the canonical ones they are.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.models import DiT, DiTConfig, plan_of
from opendit.models.attention import (
    AnyProjection,
    Attention,
    CrossAttention,
    GridAttention,
    MadeProjection,
    SequenceShards,
)
from opendit.models.experts import ExpertMlp, Routing
from opendit.models.layers import Attend, Projection, RMSNorm, in_working_dtype, multiply
from opendit.models.plan import Column, Expert, Heads, Replicated, Row, Rule
from opendit.models.zoo import model_shapes
from opendit.parallel.collectives import (
    Group,
    column_product,
    join,
    join_result,
    sum_over_ranks,
    sum_shares,
    take_tokens,
)
from opendit.parallel.layout import Cut, Layout
from opendit.parallel.mesh import Mesh
from opendit.parallel.rules import check_divisible, divided_dimension, local_slices, local_tensor, rule_of
from opendit.parallel.sequence import SequenceParallel
from opendit.parallel.sequence.streams import SharedStreams

__all__ = [
    "Divided",
    "TensorParallel",
    "allocate",
    "check_tensor_parallel",
    "divide",
    "divided_parameters",
    "layout_of",
    "tensor_group",
]


@dataclass(frozen=True)
class TensorParallel:
    """The argument of ``use(sequence=...)`` for a model that :func:`divide` has divided.

    Attributes:
        group: ranks that divide the layers.
        sequence: how ranks of another group share every sample before those of ``group`` do; None if they do not.
    """

    group: Group
    sequence: SequenceParallel | None = None

    @property
    def shares_samples(self) -> bool:
        """True if ranks of another group have other tokens of a sample."""
        return self.sequence is not None

    def __call__(self, length: int, sizes: tuple[int, ...] = ()) -> SequenceShards:
        shared = None if self.sequence is None else self.sequence(length, sizes)
        found = SharedTokens(self.group, length if shared is None else shared.rows, shared)
        return cast(SequenceShards, found)  # has all attributes that models read

    def of_streams(self, lengths: tuple[int, ...]) -> SequenceShards:
        """Return the shares of a sequence of several streams of tokens. Raises ValueError if ranks of another group
        share it, too."""
        if self.sequence is not None:
            raise ValueError(
                "--sequence_parallel_size: with --tensor_parallel_size not for models whose captions are in the "
                "sequence; use one of them"
            )
        parts = tuple(SharedTokens(self.group, length, None) for length in lengths)
        return cast(SequenceShards, SharedStreams(parts, lengths, self.group.size, None))


@dataclass(frozen=True)
class SharedTokens:
    """``length`` tokens of which every rank has ``rows`` between the layers, the last ones with padding at the end.

    Padding goes through the layers as zeros or garbage, is cut off before every attention and from the result, and has
    a gradient of exactly zero.

    Attributes:
        shared: set if these tokens are themselves one rank's share of a sequence.
    """

    group: Group
    length: int
    shared: SequenceShards | None

    @property
    def rows(self) -> int:
        """Number of tokens of a rank, padding included."""
        return -(-self.length // self.group.size)

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens (B, rows, F) of all (B, N, F), with zeros for padding."""
        return take_tokens(x if self.shared is None else self.shared.take(x), self.rows, self.group)

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens (B, N, F), on every rank, from this rank's (B, rows, F)."""
        x = join_result(x, self.length, self.group)
        return x if self.shared is None else self.shared.gather(x)

    def of_projections(self, table: Tensor) -> Tensor:
        """Return the rows (P rows, F / P) of a table (N, F) for the group's tokens and this rank's heads."""
        own = table if self.shared is None else self.shared.of_projections(table)
        own = F.pad(own, (0, 0, 0, self.group.size * self.rows - len(own)))
        return own.chunk(self.group.size, dim=1)[self.group.rank].contiguous()

    @property
    def takes_projection(self) -> bool:
        """True if a shared sequence's strategy computes q, k, v itself."""
        return self.shared is not None and self.shared.takes_projection

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention) -> Tensor:
        """Return the attention output (B, P rows, H d) of q, k, v (B, H, P rows, d) of this rank's heads."""
        padding = q.shape[2] - self.length
        if padding:
            q, k, v = (part[:, :, : self.length] for part in (q, k, v))
        if self.shared is None:
            output = attend(q, k, v).transpose(1, 2).flatten(2)
        else:
            output = self.shared.attention(q, k, v, attend)
        return F.pad(output, (0, 0, 0, padding)) if padding else output

    def start_experts(self, mlp: ExpertMlp, y: Tensor) -> Routing:
        """Start ``mlp`` on this rank's tokens (B, rows, D)."""
        return _RoutedByParts(mlp, y, self)

    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, heads: int, attend: Attend, float8: bool = False
    ) -> Tensor:
        """Return the attention output of x (B, rows, D), of which ``qkv`` computes q, k, v of ``heads`` heads each."""
        assert self.shared is not None, "whose strategy it is"
        x = join(x, 1, self.group)
        output = self.shared.project_and_attend(x[:, : self.length], qkv, heads, attend, float8)
        return F.pad(output, (0, 0, 0, x.shape[1] - self.length))

    @property
    def axial(self) -> bool:
        """True if a shared grid has its own attention along an axis."""
        return self.shared is not None and self.shared.axial

    def attend_along(
        self, axis: int, x: Tensor, qkv: AnyProjection, attend: Callable[..., Any], rotary: Tensor | None
    ) -> Tensor:
        """Return the attention output (B, P rows, H d) of x (B, rows, D) along one axis of the grid, for this rank's
        heads."""
        assert self.shared is not None, "whose grid it is"
        x = join(in_working_dtype(x)[0], 1, self.group)
        own = MadeProjection(qkv.weight, qkv.bias, qkv.low_rank)  # of tokens that are joined already
        output = self.shared.attend_along(axis, x[:, : self.length], own, attend, rotary)
        return F.pad(output, (0, 0, 0, x.shape[1] - self.length))


class _RoutedByParts:
    """Routing of tokens (B, rows, D) to experts of all ranks; each rank gathers the tokens of all."""

    travels = False

    def __init__(self, mlp: ExpertMlp, y: Tensor, tokens: SharedTokens):
        whole = join(y, 1, tokens.group)
        self._group, self._padding = tokens.group, whole.shape[1] - tokens.length
        self._routing = mlp.start(whole[:, : tokens.length], tokens.shared)

    def compute(self) -> None:
        self._routing.compute()

    def result(self) -> Tensor:
        return sum_shares(F.pad(self._routing.result(), (0, 0, 0, self._padding)), 1, self._group)


def tensor_group(mesh: Mesh) -> Group | None:
    """Return the group of ranks that divide every layer with this one, or None."""
    return Group.of(mesh.group("tp")) if mesh.tp_size > 1 else None


def layout_of(model: DiT, mesh: Mesh) -> Layout:
    """Make the layout of a model that :func:`divide` has divided."""
    shapes, divided = {name: tuple(p.shape) for name, p in model.named_parameters()}, divided_parameters(model)
    shapes |= {name: part.shape for name, part in divided.items()}
    return Layout(mesh, shapes, {name: [divided[name].cut] if name in divided else [] for name in shapes})


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate memory, without values, for the parameters of ``model`` that are on the meta device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def check_tensor_parallel(config: DiTConfig, size: int) -> None:
    """Raise ValueError, with sizes that work, unless ``size`` ranks can divide the layers of a model."""
    check_divisible(config, "tp", size)
    experts = plan_of(config).divisible(config).get("ep", {})
    for what, number in experts.items():  # the ranks that divide the other layers divide the experts as well
        if number % size:
            raise ValueError(
                f"--tensor_parallel_size {size}: the model's {what}, {number}, can't be divided by it; use a size that "
                "divides it too"
            )


def divide(
    model: DiT, group: Group, sequence: SequenceParallel | None = None, *, column_modulation: bool = True
) -> TensorParallel:
    """Leave this rank its part of every layer of ``model``, in place, as the model's plan says. Parameters in memory
    are copied from the model; those on the meta device stay there.

    Args:
        group: ranks that divide the layers.
        sequence: how ranks of another group share every sample; None if they do not.
        column_modulation: each rank computes a share of every modulation's features, and all gather them; otherwise
            every rank computes all of them. Tables of labels are small and stay complete on every rank, whatever the
            plan allows.

    Returns:
        The argument for ``model.use(sequence=...)``.

    Raises:
        ValueError: as :func:`check_tensor_parallel`.
    """
    check_tensor_parallel(model.config, group.size)
    rules = plan_of(model.config).rules(model.config)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            rule = rule_of(rules, f"{path}.weight")
            if isinstance(rule, Column) and rule.gathered and not column_modulation:
                rule = Replicated()
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, part_of(module, rule, group))
    for path, module in model.named_modules():
        if isinstance(module, Attention):
            if isinstance(module.qkv, Part):
                module.num_heads, module.kv_heads = module.num_heads // group.size, module.kv_heads // group.size
        elif isinstance(module, CrossAttention):
            if isinstance(module.q, Part):
                module.num_heads //= group.size
        elif isinstance(module, RMSNorm) and isinstance(rule_of(rules, f"{path}.weight"), Heads):
            _divide_norm(module, rule_of(rules, f"{path}.weight"), group)
        elif isinstance(module, ExpertMlp):
            divide_experts(module, group)
    return TensorParallel(group, sequence)


def _divide_norm(norm: RMSNorm, rule: Rule, group: Group) -> None:
    """Leave this rank its heads' weights of a norm across heads, in place; ranks add up their squares."""
    divided: Any = norm
    divided.divided = {"weight": divided_by(rule, norm.weight.shape, group.size)}
    norm.features, norm.sum_of_ranks = len(norm.weight), functools.partial(sum_over_ranks, group=group)
    norm.weight = _own(norm.weight, rule, group)


@dataclass(frozen=True)
class Divided:
    """A parameter of which every rank of a group has a part: its canonical shape, and the cut that makes the parts."""

    shape: tuple[int, ...]
    cut: Cut


def divided_by(rule: Rule, shape: tuple[int, ...], ranks: int, group: str = "tp") -> Divided:
    """Describe how ``ranks`` ranks divide a parameter of this shape. Raises ValueError if they can't share it
    evenly."""
    dim = cast(int, divided_dimension(rule, shape))
    slices = [[part[dim] for part in local_slices(shape, rule, rank, ranks)] for rank in range(ranks)]
    ranges = tuple(tuple((part.start, part.stop) for part in own) for own in slices)
    return Divided(tuple(shape), Cut(group, dim, ranges))


class Part(Projection):
    """A linear layer with this rank's part of the weight. Made by :func:`part_of`."""

    group: Group
    divided: Mapping[str, Divided]


class ColumnParallel(Part):
    """Computes this rank's output features (B, P n, out / P) for the tokens of all ranks, from its own tokens (B, n,
    in)."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        """Multiply by the weight. ``multiply`` is ignored: the product has its own backward pass. LoRA's first product
        is of this rank's own tokens, so that only a few numbers a token are gathered for its second."""
        x, weight, bias = in_working_dtype(x, self.weight, bias)
        y, low_rank = column_product(x, weight, bias, self.group), self.low_rank
        return y if low_rank is None else low_rank.add_to(y, join(F.linear(x, low_rank.a), 1, self.group))


class RowParallel(Part):
    """Computes this rank's tokens (B, n, out) of the sum of all ranks' products, each of its own input features (B, P
    n, in / P). The bias, which every rank has, is added to the sum."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        summed = sum_shares(super().product(x, None, multiply), 1, self.group)
        return summed if bias is None else summed + bias.to(summed.dtype)


class ColumnOfContext(Part):
    """Computes this rank's output features from an input that all ranks have. The input's gradient is one term of a
    sum."""


class GatheredColumn(Part):
    """Computes all output features (B, out) of an input (B, in) that all ranks have; each rank computes some of
    them."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        return join(super().product(x, bias, multiply), x.dim() - 1, self.group)


DIVIDING = (Column, Row, Heads, Expert)  # rules that the ranks follow; tables of labels are small, and whole on all


@functools.cache
def held_parameters(config: DiTConfig, ranks: int) -> tuple[int, int]:
    """Count the parameters that each of ``ranks`` ranks has of a model, and of one of its blocks on the average."""
    (shapes, _), rules, found = model_shapes(config), plan_of(config).rules(config), [0, 0]
    for name, shape in shapes.items():
        held = math.prod(shape) // (ranks if isinstance(rule_of(rules, name), DIVIDING) else 1)
        found[0] += held
        found[1] += held * name.startswith("blocks.")
    return found[0], found[1] // config.depth


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
    low_rank = layer.low_rank if isinstance(layer, Projection) else None
    with torch.device("meta"):
        part = kind(1, 1, bias=layer.bias is not None)
        if low_rank is not None:
            part.add_low_rank(1, low_rank.scale)
    inputs, outputs = (rule, Replicated()) if isinstance(rule, Row) else (Replicated(), rule)
    rules = {"weight": rule, "bias": outputs, "lora_A.default.weight": inputs, "lora_B.default.weight": outputs}
    part.group, part.divided = group, {}
    for name, parameter in list(layer.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        setattr(part.get_submodule(owner), attribute, _own(parameter, rules[name], group))
        if not isinstance(rules[name], Replicated):
            part.divided[name] = divided_by(rules[name], parameter.shape, group.size)
    part.out_features, part.in_features = part.weight.shape
    return part.train(layer.training)


def divide_experts(mlp: ExpertMlp, group: Group, name_of_group: str = "tp") -> None:
    """Leave this rank only its experts, in place. name_of_group: of ``group`` in the mesh."""
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
    """Return the parameters that are divided among ranks, by name."""
    found = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + name: part for name, part in getattr(module, "divided", {}).items()}
    return found


class ReplicatedGradients:
    """Sums the gradients of parameters that several ranks of ``tp`` or ``pp`` have, and computes the norm of all
    gradients.

    Args:
        mesh: of the run.
        names: of the parameters, in the order of the gradients.
        divided: those of which each rank of ``tp`` has a part; all ranks have the others in full.
        on_every_stage: those that every rank of ``pp`` has; each of the others is on one rank.

    Attributes:
        counted: for each gradient, True if this rank adds its squares to the sum over all ranks, so that each counts
            once.
    """

    def __init__(
        self, mesh: Mesh, names: Sequence[str], divided: Collection[str], on_every_stage: Collection[str] = ()
    ):
        replicated = {"tp": [name not in divided for name in names], "pp": [name in on_every_stage for name in names]}
        self._groups = [(mesh.group(axis), shared) for axis, shared in replicated.items() if mesh.dims.size(axis) > 1]
        counted_elsewhere = [shared for axis, shared in replicated.items() if mesh.coordinate(axis) > 0]
        self.counted = [True] * len(names)
        if counted_elsewhere:
            self.counted = [not any(shared) for shared in zip(*counted_elsewhere, strict=True)]

    @torch.no_grad()
    def sum(self, gradients: Sequence[Tensor | None], mark_not_finite: bool = False) -> None:
        """Sum the gradients that are terms of a sum over their groups, in place and in fp32 or wider, before they are
        read. All ranks of a group must have None in the same places.

        mark_not_finite: if a gradient of any rank is not finite, make one of every rank not finite, so that ranks which
        look at their own gradients decide alike.
        """
        for group, replicated in self._groups:
            parts = [g for g, shared in zip(gradients, replicated, strict=True) if shared and g is not None]
            if not parts:
                continue
            dtype = torch.promote_types(parts[0].dtype, torch.float32)
            total = torch.cat([part.reshape(-1).to(dtype) for part in parts])
            if mark_not_finite:
                finite = torch.stack([g.isfinite().all() for g in gradients if g is not None]).all()
                total[0] += torch.where(finite, 0.0, torch.nan)
            dist.all_reduce(total, group=group)
            for part, whole in zip(parts, total.split([part.numel() for part in parts]), strict=True):
                part.copy_(whole.view(part.shape))

    def total(self, square_sum: Tensor) -> Tensor:
        """Sum the squares that are ``counted`` over the groups, in place."""
        for group, _ in self._groups:
            dist.all_reduce(square_sum, group=group)
        return square_sum

    @torch.no_grad()
    def norm(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the norm of all gradients of the groups, 0-dim fp32."""
        pairs = zip(gradients, self.counted, strict=True)
        norms = torch._foreach_norm([g for g, counted in pairs if counted and g is not None])
        return self.total(torch.stack(norms).double().square().sum()).sqrt().float()
