"""Tensor parallelism: the ranks of the group ``tp`` divide every layer of a model; see docs/parallelism.md.

This is Megatron-LM's division (Shoeybi et al. 2019) with sequence-sharded norms and residuals (Korthikanti et al.
2022). Between the layers a rank holds n tokens of a sequence; inside a layer it has 1 / P of the heads and of the MLP's
width. Before a column-parallel layer, tokens are gathered. After a row-parallel layer, the results are
reduce-scattered.

All ranks of a group compute the same loss of the same samples. A rank computes the complete gradient of its slice of a
divided parameter. For a replicated parameter a rank computes only one term of the gradient, which is a sum over the
group. If the parameter acts on the residual stream, this term comes from the rank's tokens. If the parameter acts on a
tensor that all ranks have, this term comes from the rank's heads, features or experts. :class:`ReplicatedGradients`
sums these terms.

Parameters keep their names. :attr:`Part.divided` describes which slices of the canonical tensors a rank holds.
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

from opendit.kernels import cublaslt
from opendit.kernels.linear import linear as unbiased
from opendit.models.attention import (
    AnyProjection,
    Attention,
    CrossAttention,
    GridAttention,
    MadeProjection,
    SequenceShards,
)
from opendit.models.dit import DiT, DiTConfig
from opendit.models.experts import ExpertMlp, Routing
from opendit.models.layers import Attend, Projection, RMSNorm, in_working_dtype, multiply
from opendit.models.plan import Column, Expert, Heads, Replicated, Row, Rule
from opendit.models.zoo import model_shapes, plan_of
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
from opendit.parallel.overlapped_products import overlapped_column, overlapped_row, overlaps
from opendit.parallel.rules import check_divisible, divided_dimension, local_slices, local_tensor, rule_of
from opendit.parallel.sequence import SequenceParallel
from opendit.parallel.sequence.peer_memory import PeerMemory, connect
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
    """Argument of ``model.use(sequence=...)`` for a model that :func:`divide` has divided.

    Attributes:
        group: ranks that divide the layers.
        sequence: sequence parallelism over another group of ranks, which divides the tokens before ``group`` does; None
            without it.
    """

    group: Group
    sequence: SequenceParallel | None = None

    @property
    def shares_samples(self) -> bool:
        """True if ranks outside of ``group`` have other tokens of the same samples, because the run also has sequence
        parallelism."""
        return self.sequence is not None

    def __call__(self, length: int, sizes: tuple[int, ...] = ()) -> SequenceShards:
        shared = None if self.sequence is None else self.sequence(length, sizes)
        found = SharedTokens(self.group, length if shared is None else shared.rows, shared)
        return cast(SequenceShards, found)  # SharedTokens has all attributes that models use

    def of_streams(self, lengths: tuple[int, ...]) -> SequenceShards:
        """Return this rank's shard of a sequence of several token streams. Raises ValueError if the run also has
        sequence parallelism."""
        if self.sequence is not None:
            raise ValueError(
                "--sequence_parallel_size: with --tensor_parallel_size not for models whose captions are in the "
                "sequence; use one of them"
            )
        parts = tuple(SharedTokens(self.group, length, None) for length in lengths)
        return cast(SequenceShards, SharedStreams(parts, lengths, self.group.size, None))


@dataclass(frozen=True)
class SharedTokens:
    """This rank's shard of ``length`` tokens. Every rank has ``rows`` tokens between the layers; the last ranks may
    have padding at the end.

    Layers process padding tokens, with arbitrary values. Padding is removed before every attention and from the result,
    and its gradient is exactly zero.

    Attributes:
        group: ranks that divide the layers.
        length: number of tokens of the group.
        shared: with sequence parallelism, the sequence that these tokens are one shard of; otherwise None.
    """

    group: Group
    length: int
    shared: SequenceShards | None

    @property
    def rows(self) -> int:
        """Number of tokens per rank, including padding."""
        return -(-self.length // self.group.size)

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens (B, rows, F) of all tokens (B, N, F), with zeros for padding."""
        return take_tokens(x if self.shared is None else self.shared.take(x), self.rows, self.group)

    def gather(self, x: Tensor) -> Tensor:
        """Gather the tokens (B, rows, F) of all ranks, on every rank. Return all tokens (B, N, F)."""
        x = join_result(x, self.length, self.group)
        return x if self.shared is None else self.shared.gather(x)

    def of_projections(self, table: Tensor) -> Tensor:
        """Return the part (P rows, F / P) of a table (N, F) for the tokens of the group and the heads of this rank."""
        own = table if self.shared is None else self.shared.of_projections(table)
        own = F.pad(own, (0, 0, 0, self.group.size * self.rows - len(own)))
        return own.chunk(self.group.size, dim=1)[self.group.rank].contiguous()

    @property
    def takes_projection(self) -> bool:
        """True if the strategy of the sequence parallelism computes q, k, v itself."""
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
        """Start ``mlp`` on this rank's tokens y (B, rows, D). Its experts choose among the tokens of all ranks."""
        return _RoutedByParts(mlp, y, self)

    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, heads: int, attend: Attend, float8: bool = False
    ) -> Tensor:
        """Return the attention output of x (B, rows, D) for this rank's ``heads`` heads. ``qkv`` projects x to q, k,
        v."""
        assert self.shared is not None, "whose strategy it is"
        x = join(x, 1, self.group)
        output = self.shared.project_and_attend(x[:, : self.length], qkv, heads, attend, float8)
        return F.pad(output, (0, 0, 0, x.shape[1] - self.length))

    @property
    def axial(self) -> bool:
        """True if the tokens are part of a grid with attention along an axis."""
        return self.shared is not None and self.shared.axial

    def attend_along(
        self, axis: int, x: Tensor, qkv: AnyProjection, attend: Callable[..., Any], rotary: Tensor | None
    ) -> Tensor:
        """Return the attention output (B, P rows, H d) of x (B, rows, D) along one axis of the grid, for this rank's
        heads."""
        assert self.shared is not None, "whose grid it is"
        x = join(in_working_dtype(x)[0], 1, self.group)
        # A MadeProjection does not gather its input, which has already been gathered.
        own = MadeProjection(qkv.weight, qkv.bias, qkv.low_rank)
        output = self.shared.attend_along(axis, x[:, : self.length], own, attend, rotary)
        return F.pad(output, (0, 0, 0, x.shape[1] - self.length))


class _RoutedByParts:
    """Routing of tokens to experts that are divided among the ranks. Each rank gathers the tokens (B, rows, D) of all
    ranks, and the outputs are reduce-scattered."""

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
    """Return this rank's tensor-parallel group; None without tensor parallelism."""
    return Group.of(mesh.group("tp")) if mesh.tp_size > 1 else None


def layout_of(model: DiT, mesh: Mesh) -> Layout:
    """Make the layout of a model that :func:`divide` has divided."""
    shapes, divided = {name: tuple(p.shape) for name, p in model.named_parameters()}, divided_parameters(model)
    shapes |= {name: part.shape for name, part in divided.items()}
    return Layout(mesh, shapes, {name: [divided[name].cut] if name in divided else [] for name in shapes})


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate memory for the parameters of ``model`` that are on the meta device. Their values are uninitialised."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def check_tensor_parallel(config: DiTConfig, size: int) -> None:
    """Raise ValueError, which names sizes that work, unless ``size`` ranks can divide the layers of a model."""
    check_divisible(config, "tp", size)
    experts = plan_of(config).divisible(config).get("ep", {})
    for what, number in experts.items():  # also check experts, because the same ranks divide them
        if number % size:
            raise ValueError(
                f"--tensor_parallel_size {size}: the model's {what}, {number}, can't be divided by it; use a size that "
                "divides it too"
            )


def divide(
    model: DiT, group: Group, sequence: SequenceParallel | None = None, *, column_modulation: bool = True
) -> TensorParallel:
    """Reduce every layer of ``model`` to this rank's part, in place, according to the model's plan. If a parameter is
    in memory, its part is a copy; if it is on the meta device, so is the part.

    Args:
        group: ranks that divide the layers.
        sequence: sequence parallelism over another group of ranks; None without it.
        column_modulation: True to divide the features of every modulation among the ranks, which then gather them.
            Otherwise every rank computes all features. Label tables are small, so every rank has them in full, even if
            the plan allows dividing them.

    Returns:
        The argument for ``model.use(sequence=...)``.

    Raises:
        ValueError: see :func:`check_tensor_parallel`.
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
    """Reduce a norm over all heads to the weights of this rank's heads, in place. The ranks sum their squares."""
    divided: Any = norm
    divided.divided = {"weight": divided_by(rule, norm.weight.shape, group.size)}
    norm.features, norm.sum_of_ranks = len(norm.weight), functools.partial(sum_over_ranks, group=group)
    norm.weight = _own(norm.weight, rule, group)


@dataclass(frozen=True)
class Divided:
    """The way in which the ranks of a group divide a parameter: the canonical shape, and the cut into parts."""

    shape: tuple[int, ...]
    cut: Cut


def divided_by(rule: Rule, shape: tuple[int, ...], ranks: int, group: str = "tp") -> Divided:
    """Describe how ``ranks`` ranks divide a parameter of this shape by ``rule``. Raises ValueError if they can't divide
    it evenly."""
    dim = cast(int, divided_dimension(rule, shape))
    slices = [[part[dim] for part in local_slices(shape, rule, rank, ranks)] for rank in range(ranks)]
    ranges = tuple(tuple((part.start, part.stop) for part in own) for own in slices)
    return Divided(tuple(shape), Cut(group, dim, ranges))


class Part(Projection):
    """Linear layer with this rank's part of the weight. Create one with :func:`part_of`."""

    group: Group
    divided: Mapping[str, Divided]
    memory: PeerMemory | None = None

    def peers(self, x: Tensor, weight: Tensor) -> PeerMemory | None:
        """Return the symmetric memory through which the product of x (B, n, in) overlaps with its communication; None
        if a collective is to be used."""
        if self.low_rank is not None or not overlaps(x, weight):
            return None
        return connect(self.group, x.device)[0] if x.is_cuda else self.memory


class ColumnParallel(Part):
    """Linear layer that gathers the tokens (B, n, in) of all ranks and computes this rank's output features
    (B, P n, out / P) for them."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        """Multiply the tokens of all ranks by the weight. ``multiply`` is ignored, because the product has its own
        backward pass. LoRA's first product uses only this rank's tokens. Its result, which has a few numbers per token,
        is gathered for the second product."""
        x, weight, bias = in_working_dtype(x, self.weight, bias)
        if (memory := self.peers(x, weight)) is not None:
            return overlapped_column(x, weight, bias, memory)
        y, low_rank = column_product(x, weight, bias, self.group), self.low_rank
        return y if low_rank is None else low_rank.add_to(y, join(F.linear(x, low_rank.a), 1, self.group))


PLAIN = (multiply, unbiased, cublaslt.linear)  # functions that multiply in the dtype of the activations


class RowParallel(Part):
    """Linear layer in which each rank has some input features (B, P n, in / P) of all tokens and multiplies these by
    its part of the weight. The products are reduce-scattered, so that this rank gets the sum for its tokens (B, n,
    out). The bias is replicated and added to the sum."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        own = x[:, : x.shape[1] // self.group.size]
        if multiply in PLAIN and (memory := self.peers(own, self.weight)) is not None:
            summed = overlapped_row(x, self.weight, memory)
        else:
            summed = sum_shares(super().product(x, None, multiply), 1, self.group)
        return summed if bias is None else summed + bias.to(summed.dtype)


class ColumnOfContext(Part):
    """Linear layer that computes this rank's output features from an input that all ranks have. The gradient of the
    input is one term of a sum over the ranks."""


class GatheredColumn(Part):
    """Linear layer for an input (B, in) that all ranks have. Each rank computes some of the output features, and all
    ranks gather them (B, out)."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        return join(super().product(x, bias, multiply), x.dim() - 1, self.group)


# rules by which this module divides parameters; label tables are small, so every rank has them in full
DIVIDING = (Column, Row, Heads, Expert)


@functools.cache
def held_parameters(config: DiTConfig, ranks: int) -> tuple[int, int]:
    """Return (number of a model's parameters that each of ``ranks`` ranks has, average number of these per block)."""
    (shapes, _), rules, found = model_shapes(config), plan_of(config).rules(config), [0, 0]
    for name, shape in shapes.items():
        held = math.prod(shape) // (ranks if isinstance(rule_of(rules, name), DIVIDING) else 1)
        found[0] += held
        found[1] += held * name.startswith("blocks.")
    return found[0], found[1] // config.depth


def part_of(layer: nn.Linear, rule: Rule, group: Group) -> nn.Linear:
    """Return this rank's part of a linear layer whose weight has ``rule``, or the layer itself if the rule does not
    divide it. The result's parameters are copies, or on the meta device if the layer's are."""
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
    """Remove all experts except this rank's, in place. name_of_group: name of ``group`` in the mesh."""
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
    # Clone, because a view would keep the full tensor in memory.
    kept = parameter.detach() if isinstance(rule, Replicated) else part.clone()
    return nn.Parameter(kept, requires_grad=parameter.requires_grad)


def divided_parameters(model: nn.Module) -> dict[str, Divided]:
    """Return descriptions of the parameters that are divided among ranks, by name."""
    found = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + name: part for name, part in getattr(module, "divided", {}).items()}
    return found


class ReplicatedGradients:
    """Sums the gradients of parameters that several ranks of ``tp`` or ``pp`` have, and computes the norm of all
    gradients.

    Args:
        mesh: mesh of the run.
        names: names of the parameters, in the order of the gradients.
        divided: names of the parameters that the ranks of ``tp`` divide. All ranks of ``tp`` have the other parameters
            in full.
        on_every_stage: names of the parameters that every rank of ``pp`` has. Each other parameter is on one rank.

    Attributes:
        counted: for each gradient, True if this rank adds the gradient's squares to the norm, so that each gradient
            counts once.
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
        """Sum the gradients of replicated parameters over their groups, in place and in fp32 or wider. Call this method
        before reading the gradients. All ranks of a group must have None for the same parameters.

        mark_not_finite: if a gradient of any rank is not finite, make a gradient of every rank not finite. Ranks that
        check only their own gradients then decide in the same way.
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
        """Sum ``square_sum`` over the groups, in place. Each rank passes the sum of squares of its ``counted``
        gradients."""
        for group, _ in self._groups:
            dist.all_reduce(square_sum, group=group)
        return square_sum

    @torch.no_grad()
    def norm(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the norm of the gradients of all ranks of the groups, 0-dim fp32."""
        pairs = zip(gradients, self.counted, strict=True)
        norms = torch._foreach_norm([g for g, counted in pairs if counted and g is not None])
        return self.total(torch.stack(norms).double().square().sum()).sqrt().float()
