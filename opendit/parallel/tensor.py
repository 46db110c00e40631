"""Tensor parallelism: the ranks of the group ``tp`` divide every layer of a model; see docs/parallelism.md.

This is Megatron-LM's division (Shoeybi et al. 2019) with sequence-sharded norms and residuals (Korthikanti et al.
2022). P ranks divide the tokens between layers, and the heads and the MLP's width inside a layer. Tokens are gathered
before a column-parallel layer. Results of a row-parallel layer are reduce-scattered.

All ranks of a group compute the same loss of the same samples. For divided parameters, a rank computes its slice's
complete gradient. For replicated parameters, a rank computes one term of the gradient: from its tokens, or from its
heads, features or experts. :class:`ReplicatedGradients` sums these terms.

Parameters keep their names. :attr:`Part.divided` describes a rank's slices of the canonical tensors.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from opendit.common.torch_utils import not_compiled
from opendit.kernels import cublaslt
from opendit.kernels.linear import linear as unbiased
from opendit.kernels.linear import weight_gradient
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
from opendit.parallel.rules import check_divisible, divided_dimension, local_slices, local_tensor, rule_of
from opendit.parallel.sequence import SequenceParallel, SharedStreams
from opendit.parallel.sequence.peer_memory import Buffer, PeerMemory, connect, sample_by_sample
from opendit.parallel.sequence.products import column_sums


@dataclass(frozen=True)
class TensorParallel:
    """Argument of ``model.use(sequence=...)`` for a model that :func:`divide` has divided. If ``sequence`` is not None,
    sequence parallelism divides the tokens first, and ``group`` divides each shard."""

    group: Group
    sequence: SequenceParallel | None = None

    @property
    def shares_samples(self) -> bool:
        return self.sequence is not None

    def __call__(self, length: int, sizes: tuple[int, ...] = ()) -> SequenceShards:
        shared = None if self.sequence is None else self.sequence(length, sizes)
        found = SharedTokens(self.group, length if shared is None else shared.rows, shared)
        return cast(SequenceShards, found)  # SharedTokens has all attributes that models use

    def of_streams(self, lengths: tuple[int, ...]) -> SequenceShards:
        if self.sequence is not None:
            raise ValueError(
                "--sequence_parallel_size: with --tensor_parallel_size not for models whose captions are in the "
                "sequence; use one of them"
            )
        parts = tuple(SharedTokens(self.group, length, None) for length in lengths)
        return cast(SequenceShards, SharedStreams(parts, lengths, self.group.size, None))


@dataclass(frozen=True)
class SharedTokens:
    """This rank's shard of ``length`` tokens. Every rank has ``rows`` tokens between layers; the last ranks may have
    padding. With sequence parallelism, ``shared`` first divides the full sequence.

    Layers also process padding. Padding is removed before every attention and from the result, so its gradient is zero.
    """

    group: Group
    length: int
    shared: SequenceShards | None

    @property
    def rows(self) -> int:
        return -(-self.length // self.group.size)

    def take(self, x: Tensor) -> Tensor:
        return take_tokens(x if self.shared is None else self.shared.take(x), self.rows, self.group)

    def gather(self, x: Tensor) -> Tensor:
        x = join_result(x, self.length, self.group)
        return x if self.shared is None else self.shared.gather(x)

    def of_projections(self, table: Tensor) -> Tensor:
        own = table if self.shared is None else self.shared.of_projections(table)
        own = F.pad(own, (0, 0, 0, self.group.size * self.rows - len(own)))
        return own.chunk(self.group.size, dim=1)[self.group.rank].contiguous()

    @property
    def takes_projection(self) -> bool:
        return self.shared is not None and self.shared.takes_projection

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention) -> Tensor:
        padding = q.shape[2] - self.length
        if padding:
            q, k, v = (part[:, :, : self.length] for part in (q, k, v))
        if self.shared is None:
            output = attend.prepared(*attend.prepare(q, k, v, 0)).transpose(1, 2).flatten(2)
        else:
            output = self.shared.attention(q, k, v, attend)
        return F.pad(output, (0, 0, 0, padding)) if padding else output

    def start_experts(self, mlp: ExpertMlp, y: Tensor) -> Routing:
        return _RoutedByParts(mlp, y, self)

    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, heads: int, attend: Attend, float8: bool = False
    ) -> Tensor:
        assert self.shared is not None, "whose strategy it is"
        x = join(x, 1, self.group)
        output = self.shared.project_and_attend(x[:, : self.length], qkv, heads, attend, float8)
        return F.pad(output, (0, 0, 0, x.shape[1] - self.length))

    @property
    def axial(self) -> bool:
        return self.shared is not None and self.shared.axial

    def attend_along(
        self, axis: int, x: Tensor, qkv: AnyProjection, attend: Callable[..., Any], rotary: Tensor | None
    ) -> Tensor:
        assert self.shared is not None, "whose grid it is"
        x = join(in_working_dtype(x)[0], 1, self.group)
        # a MadeProjection does not gather its input again
        own = MadeProjection(qkv.weight, qkv.bias, qkv.low_rank)
        output = self.shared.attend_along(axis, x[:, : self.length], own, attend, rotary)
        return F.pad(output, (0, 0, 0, x.shape[1] - self.length))


class _RoutedByParts:
    """Routing of tokens to experts that ranks divide. Tokens are gathered, and outputs are reduce-scattered."""

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
    return Group.of(mesh.group("tp")) if mesh.tp_size > 1 else None


def layout_of(model: DiT, mesh: Mesh) -> Layout:
    shapes, divided = {name: tuple(p.shape) for name, p in model.named_parameters()}, divided_parameters(model)
    shapes |= {name: part.shape for name, part in divided.items()}
    return Layout(mesh, shapes, {name: [divided[name].cut] if name in divided else [] for name in shapes})


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate memory, without values, for the parameters of ``model`` on the meta device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def check_tensor_parallel(config: DiTConfig, size: int) -> None:
    """Raise ValueError unless ``size`` ranks can divide the layers of a model. The message names sizes that work."""
    check_divisible(config, "tp", size)
    experts = plan_of(config).divisible(config).get("ep", {})
    for what, number in experts.items():  # these ranks divide the experts, too
        if number % size:
            raise ValueError(
                f"--tensor_parallel_size {size}: the model's {what}, {number}, can't be divided by it; use a size that "
                "divides it too"
            )


def divide(
    model: DiT, group: Group, sequence: SequenceParallel | None = None, *, column_modulation: bool = True
) -> TensorParallel:
    """Reduce every layer of ``model`` to this rank's slices, in place, by the model's plan. Return the argument for
    ``model.use(sequence=...)``. Slices are copies, or on the meta device like the model. Every rank has full label
    tables, because the tables are small.

    Args:
        sequence: sequence parallelism over another group of ranks.
        column_modulation: True to divide the modulations' features, too; False to compute all of them on every rank.

    Raises ValueError as :func:`check_tensor_parallel` does.
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
    """Keep only the weights for this rank's heads in an RMSNorm over all heads, in place. Its sum of squares is then
    summed over the ranks."""
    divided: Any = norm
    divided.divided = {"weight": divided_by(rule, norm.weight.shape, group.size)}
    norm.features, norm.sum_of_ranks = len(norm.weight), functools.partial(sum_over_ranks, group=group)
    norm.weight = _own(norm.weight, rule, group)


@dataclass(frozen=True)
class Divided:
    """Canonical shape of a divided parameter, and its cut."""

    shape: tuple[int, ...]
    cut: Cut


def divided_by(rule: Rule, shape: tuple[int, ...], ranks: int, group: str = "tp") -> Divided:
    dim = cast(int, divided_dimension(rule))
    slices = [[part[dim] for part in local_slices(shape, rule, rank, ranks)] for rank in range(ranks)]
    ranges = tuple(tuple((part.start, part.stop) for part in own) for own in slices)
    return Divided(tuple(shape), Cut(group, dim, ranges))


class Part(Projection):
    """Linear layer with this rank's slice of the weight. Create one with :func:`part_of`."""

    group: Group
    divided: Mapping[str, Divided]
    memory: PeerMemory | None = None

    def peers(self, x: Tensor, weight: Tensor) -> PeerMemory | None:
        """Return the symmetric memory to use for a product of x (B, n, in); None to use a collective."""
        if self.low_rank is not None or not overlaps(x, weight):
            return None
        return connect(self.group, x.device)[0] if x.is_cuda else self.memory


class ColumnParallel(Part):
    """Linear layer that gathers the tokens (B, n, in) of all ranks. It computes this rank's output features (B, P n,
    out / P)."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        """Multiply the tokens of all ranks by the weight. ``multiply`` is ignored, because the product has a special
        backward pass."""
        x, weight, bias = in_working_dtype(x, self.weight, bias)
        if (memory := self.peers(x, weight)) is not None:
            return overlapped_column(x, weight, bias, memory)
        y, low_rank = column_product(x, weight, bias, self.group), self.low_rank
        return y if low_rank is None else low_rank.add_to(y, join(F.linear(x, low_rank.a), 1, self.group))


PLAIN = (multiply, unbiased, cublaslt.linear)  # functions that multiply in the dtype of the activations


class RowParallel(Part):
    """Linear layer for all tokens with this rank's input features (B, P n, in / P). The products are reduce-scattered:
    each rank receives the sum for its tokens (B, n, out). The replicated bias is added to the sum."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        own = x[:, : x.shape[1] // self.group.size]
        if multiply in PLAIN and (memory := self.peers(own, self.weight)) is not None:
            summed = overlapped_row(x, self.weight, memory)
        else:
            summed = sum_shares(super().product(x, None, multiply), 1, self.group)
        return summed if bias is None else summed + bias.to(summed.dtype)


class ColumnOfContext(Part):
    """Linear layer that computes this rank's output features from a replicated input. The input's gradient must be
    summed over the ranks."""


class GatheredColumn(Part):
    """Linear layer for a replicated input (B, in). Each rank computes some output features, then all features (B, out)
    are gathered."""

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        return join(super().product(x, bias, multiply), x.dim() - 1, self.group)


# Rules by which this module divides parameters. Every rank has full label tables, because the tables are small.
DIVIDING = (Column, Row, Heads, Expert)


@functools.cache
def held_parameters(config: DiTConfig, ranks: int) -> tuple[int, int]:
    """Return (number of parameters on one rank, average number per block on one rank)."""
    (shapes, _), rules, found = model_shapes(config), plan_of(config).rules(config), [0, 0]
    for name, shape in shapes.items():
        held = math.prod(shape) // (ranks if isinstance(rule_of(rules, name), DIVIDING) else 1)
        found[0] += held
        found[1] += held * name.startswith("blocks.")
    return found[0], found[1] // config.depth


def part_of(layer: nn.Linear, rule: Rule, group: Group) -> nn.Linear:
    """Return this rank's slice of a linear layer. Return the layer itself if ``rule``, the weight's rule, does not
    divide it. The slice has copies of the parameters, or stays on the meta device."""
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
    # a view would keep the full tensor in memory
    kept = parameter.detach() if isinstance(rule, Replicated) else part.clone()
    return nn.Parameter(kept, requires_grad=parameter.requires_grad)


def divided_parameters(model: nn.Module) -> dict[str, Divided]:
    found = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + name: part for name, part in getattr(module, "divided", {}).items()}
    return found


class ReplicatedGradients:
    """Sums gradients of parameters that are replicated over ``tp`` or ``pp``, and computes the norm of all gradients.

    Args:
        names: names of the parameters, in the order of the gradients.
        divided: names of the parameters that ``tp`` divides. All other parameters are replicated over ``tp``.
        on_every_stage: names of the parameters that are replicated over ``pp``.

    ``counted`` is True for the gradients that this rank adds to the norm. No gradient is counted twice.
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
        """Sum the gradients of replicated parameters, in place and in fp32 or wider. Call before reading the gradients.
        All ranks of a group must have None for the same parameters.

        mark_not_finite: True to put a NaN into the gradients of all ranks if a rank's gradients are not finite.
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
        """Sum ``square_sum`` over the groups, in place. square_sum: this rank's sum of squared ``counted``
        gradients."""
        for group, _ in self._groups:
            dist.all_reduce(square_sum, group=group)
        return square_sum

    @torch.no_grad()
    def norm(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the norm of the gradients of all ranks, 0-dim fp32. gradients: this rank's gradients."""
        pairs = zip(gradients, self.counted, strict=True)
        norms = torch._foreach_norm([g for g, counted in pairs if counted and g is not None])
        return self.total(torch.stack(norms).double().square().sum()).sqrt().float()


# ------------------------------------------------------------------------------------------ overlapped products
#
# A collective before a column product or after a row product would leave the multiprocessors idle. Here copy engines
# move tokens through symmetric memory during the product (Wang et al. 2023, "Overlap Communication with Dependent
# Computation via Decomposition"):
#
#     column, forward    send this rank's tokens; multiply them; multiply every other rank's tokens when they arrive
#     row, forward       multiply other ranks' tokens; multiply this rank's tokens during the transfers; add
#
# The backward pass of a column product is a row product, and vice versa. A column product's backward pass also sends
# the tokens again, for the weight's gradient.

# Minimum number of a sample's tokens on a rank. With fewer tokens, a collective and one product are faster.
LEAST_TOKENS = 1024


def overlaps(x: Tensor, weight: Any) -> bool:
    """Return True if the products in this file support x (B, n, in) and ``weight``."""
    plain = isinstance(weight, Tensor) and x.dtype == weight.dtype and not has_torch_function((x, weight))
    return plain and x.dim() == 3 and x.shape[1] >= LEAST_TOKENS


@not_compiled  # a compiler can't see that other ranks read and write the buffers
def overlapped_column(x: Tensor, weight: Tensor, bias: Tensor | None, memory: PeerMemory) -> Tensor:
    """Return x W^T + bias (B, P n, out / P) for the tokens of all ranks. x: this rank's tokens (B, n, in). weight: this
    rank's slice (out / P, in)."""
    return _Column.apply(x, weight, bias, memory)


@not_compiled
def overlapped_row(z: Tensor, weight: Tensor, memory: PeerMemory) -> Tensor:
    """Sum z W^T over all ranks, and return the sum for this rank's tokens: (B, n, out). z: this rank's input features
    (B, P n, in / P). weight: this rank's slice (out, in / P)."""
    return _Row.apply(z, weight, memory)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, memory: PeerMemory):
        ctx.save_for_backward(x, weight)
        ctx.memory = memory
        return _of_all_tokens(x, weight.t(), bias, memory)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x, weight), memory, rows = ctx.saved_tensors, ctx.memory, grad.flatten(0, 1)
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        dx = dweight = None

        def gradient_of_weight() -> None:
            nonlocal dweight
            if of_weight:
                dweight = weight_gradient(rows, _buffer(memory, Buffer.EVERYONE, x).flatten(0, 1))

        memory.begin(Buffer.GRADIENT)  # begin() also ensures that all ranks have finished reading EVERYONE
        if of_weight:
            _send(memory, Buffer.EVERYONE, x, own=True)
        if of_x or of_weight:
            dx = _of_own_tokens(grad, weight if of_x else None, memory, gradient_of_weight)
        return dx, dweight, column_sums(rows) if of_bias else None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, weight: Tensor, memory: PeerMemory):
        ctx.save_for_backward(z, weight)
        ctx.memory = memory
        memory.begin(Buffer.GRADIENT)
        return _of_own_tokens(z, weight.t(), memory)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (z, weight), memory = ctx.saved_tensors, ctx.memory
        of_z, of_weight, _ = ctx.needs_input_grad
        dweight = None
        dz = _of_all_tokens(grad, weight if of_z else None, None, memory, keep=of_weight)
        if of_weight:
            dweight = weight_gradient(_buffer(memory, Buffer.INPUT, grad).flatten(0, 1), z.flatten(0, 1))
        return dz, dweight, None


def _of_all_tokens(
    x: Tensor, matrix: Tensor | None, bias: Tensor | None, memory: PeerMemory, keep: bool = False
) -> Tensor | None:
    """Send x (B, n, F) to all ranks. Return x @ matrix + bias (B, P n, columns) for the tokens of all ranks, or None
    without a matrix. keep: True to leave all ranks' tokens in the input buffer."""
    memory.begin(Buffer.INPUT)
    events = _send(memory, Buffer.INPUT, x, own=keep)
    out = None if matrix is None else x.new_empty(len(x), memory.group.size * x.shape[1], matrix.shape[1])
    for rank, tokens in _arriving(memory, x, events):
        if out is not None and matrix is not None:
            _multiply(out[:, _tokens_of(rank, x)], tokens, matrix, bias)
    return out


def _of_own_tokens(
    z: Tensor, matrix: Tensor | None, memory: PeerMemory, meanwhile: Callable[[], None] = lambda: None
) -> Tensor | None:
    """Sum z @ matrix over all ranks, and return the sum for this rank's tokens: (B, n, F). z: (B, P n, columns). Return
    None without a matrix. meanwhile: enqueues kernels to run during the transfers."""
    rank, size = memory.group.rank, memory.group.size
    own = z.unflatten(1, (size, -1)).select(1, rank)
    if matrix is None:
        memory.rows(Buffer.GRADIENT, (1,), z.dtype)
        memory.wait(memory.ready_beside(Buffer.GRADIENT))
        meanwhile()
        return None
    shape = (size, len(z), z.shape[1] // size, matrix.shape[1])
    slots = memory.rows(Buffer.GRADIENT, shape, z.dtype).of
    for peer in _others(memory):
        _multiply(slots[rank][peer], z[:, _tokens_of(peer, own)], matrix)
    memory.wait(memory.ready_beside(Buffer.GRADIENT))
    found = z.new_empty(size - 1, *shape[1:])
    sources = [slots[peer][rank] for peer in _others(memory)]
    memory.copy_beside([sample_by_sample(*pair) for pair in zip(found, sources, strict=True)])
    out = z.new_empty(shape[1:])
    _multiply(out, own, matrix)
    meanwhile()
    memory.wait()
    for part in found:
        out += part
    return out


def _others(memory: PeerMemory) -> list[int]:
    rank, size = memory.group.rank, memory.group.size
    return [(rank + i) % size for i in range(1, size)]


def _tokens_of(rank: int, x: Tensor) -> slice:
    return slice(rank * x.shape[1], (rank + 1) * x.shape[1])


def _buffer(memory: PeerMemory, buffer: Buffer, x: Tensor, rank: int | None = None) -> Tensor:
    """Return a rank's buffer (by default this rank's) as a tensor (B, P n, F) for the tokens of all ranks."""
    shape = (len(x), memory.group.size * x.shape[1], x.shape[2])
    return memory.rows(buffer, shape, x.dtype).of[memory.group.rank if rank is None else rank]


def _send(memory: PeerMemory, buffer: Buffer, x: Tensor, own: bool) -> list[Any]:
    """Start to copy x (B, n, F) to the buffers of all other ranks. Return one event for each rank. own: True to copy x
    to this rank's buffer, too."""
    mine = _tokens_of(memory.group.rank, x)

    def pairs(rank: int) -> list[tuple[Tensor, Tensor]]:
        return sample_by_sample(_buffer(memory, buffer, x, rank)[:, mine], x)

    return memory.copy_beside([pairs(rank) for rank in _others(memory)], pairs(memory.group.rank) if own else ())


def _arriving(memory: PeerMemory, x: Tensor, events: list[Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, tokens (B, n, F) of the rank): first this rank, then all others as tokens arrive."""
    yield memory.group.rank, x
    received = _buffer(memory, Buffer.INPUT, x)
    for i, peer in enumerate(reversed(_others(memory))):  # the previous rank's tokens arrive first
        memory.wait(events[i])
        memory.ready(Buffer.INPUT, again=i > 0)
        yield peer, received[:, _tokens_of(peer, x)]


def _multiply(out: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> None:
    for target, rows in zip(out, x, strict=True):
        if bias is None:
            torch.mm(rows, matrix, out=target)
        else:
            torch.addmm(bias, rows, matrix, out=target)
