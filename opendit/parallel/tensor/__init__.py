"""Tensor parallelism: the ranks of the group ``tp`` divide every layer of a model; see docs/parallelism.md.

Megatron-LM's division (Shoeybi et al. 2019) with sequence-sharded norms and residuals (Korthikanti et al. 2022): a rank
holds n of a sequence's tokens between the layers and 1 / P of the heads and of the MLP's width inside of them. Tokens
are gathered before a column-parallel layer, and what a row-parallel layer makes is summed and shared out again.

Every rank of a group computes the same loss of the same samples. What a rank finds as the gradient of a divided
parameter is that of its part; of a replicated one it is a part of a sum over the group, whatever the parameter: of its
own tokens where it works on the residual stream, of its own heads, features or experts where it works on what all ranks
have (opendit/parallel/tensor/gradients.py adds them up).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
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
from opendit.models.ecdit import ExpertMlp, Routing
from opendit.models.layers import Attend
from opendit.models.plans.terms import Column, Replicated
from opendit.parallel.layout import Layout
from opendit.parallel.mesh import Mesh
from opendit.parallel.rules import check_divisible, rule_of
from opendit.parallel.sequence import SequenceParallel
from opendit.parallel.sequence.collectives import Group, take_tokens
from opendit.parallel.sequence.products import in_working_dtype
from opendit.parallel.tensor.collectives import join, join_result, sum_shares
from opendit.parallel.tensor.layers import Divided, divide_experts, divided_parameters, part_of

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

    sequence: how ranks of another group share every sample before those of ``group`` do; None: they do not.
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
        return cast(SequenceShards, found)  # with what the models that are given them ask for


@dataclass(frozen=True)
class SharedTokens:
    """``length`` tokens of which every rank has ``rows`` between the layers, the last ones with padding at the end.

    Padding goes through the layers as zeros or garbage, is cut off before every attention and from the result, and has
    a gradient of exactly zero. ``shared``: these tokens are themselves a rank's of a shared sequence.
    """

    group: Group
    length: int
    shared: SequenceShards | None

    @property
    def rows(self) -> int:
        """Tokens of a rank, padding among them."""
        return -(-self.length // self.group.size)

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens (B, rows, F) of all (B, N, F), with zeros for padding."""
        return take_tokens(x if self.shared is None else self.shared.take(x), self.rows, self.group)

    def gather(self, x: Tensor) -> Tensor:
        """All tokens (B, N, F), on every rank, from this rank's (B, rows, F)."""
        x = join_result(x, self.length, self.group)
        return x if self.shared is None else self.shared.gather(x)

    @property
    def takes_projection(self) -> bool:
        """True if a shared sequence's strategy computes q, k, v itself."""
        return self.shared is not None and self.shared.takes_projection

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: GridAttention) -> Tensor:
        """The attention output (B, P rows, H d) of q, k, v (B, H, P rows, d) of this rank's heads."""
        padding = q.shape[2] - self.length
        if padding:
            q, k, v = (part[:, :, : self.length] for part in (q, k, v))
        if self.shared is None:
            output = attend(q, k, v).transpose(1, 2).flatten(2)
        else:
            output = self.shared.attention(q, k, v, attend)
        return F.pad(output, (0, 0, 0, padding)) if padding else output

    def start_experts(self, mlp: ExpertMlp, y: Tensor) -> Routing:
        """``mlp.start`` for this rank's tokens (B, rows, D)."""
        return _RoutedByParts(mlp, y, self)

    def project_and_attend(
        self, x: Tensor, qkv: AnyProjection, heads: int, attend: Attend, float8: bool = False
    ) -> Tensor:
        """The same of x (B, rows, D), of which ``qkv`` makes q, k, v of so many heads each."""
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
        """The attention output (B, P rows, H d) of x (B, rows, D) along one axis of the grid, for this rank's heads."""
        assert self.shared is not None, "whose grid it is"
        x = join(in_working_dtype(x)[0], 1, self.group)
        own = MadeProjection(qkv.weight, qkv.bias)  # of tokens that are joined already
        output = self.shared.attend_along(axis, x[:, : self.length], own, attend, rotary)
        return F.pad(output, (0, 0, 0, x.shape[1] - self.length))


class _RoutedByParts:
    """Tokens (B, rows, D) by all ranks' experts, of which each rank takes the tokens of all."""

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
    """The ranks that divide every layer with this one; None: none do."""
    return Group.of(mesh.group("tp")) if mesh.tp_size > 1 else None


def layout_of(model: DiT, mesh: Mesh) -> Layout:
    """Make the layout of a model that :func:`divide` has divided."""
    shapes, divided = {name: tuple(p.shape) for name, p in model.named_parameters()}, divided_parameters(model)
    shapes |= {name: part.shape for name, part in divided.items()}
    return Layout(mesh, shapes, {name: [divided[name].cut] if name in divided else [] for name in shapes})


def allocate(model: nn.Module, device: torch.device) -> None:
    """Memory, without values, for the parameters of ``model`` that are on the meta device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def check_tensor_parallel(config: DiTConfig, size: int) -> None:
    """Raises ValueError, with sizes that work, unless ``size`` ranks can divide the layers of a model."""
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
    """Leaves this rank its part of every layer of ``model``, in place, as the model's plan says; what is returned is
    for ``model.use(sequence=...)``. Parameters in memory are taken over; those on the meta device stay there.

    column_modulation: ranks compute a share of every modulation's features each, and gather them; else all of them
        compute all. (Tables of labels are small, and every rank has all of them, whatever the plan allows.)

    Raises ValueError as :func:`check_tensor_parallel`.
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
    for module in model.blocks.modules():
        if isinstance(module, Attention):
            module.num_heads, module.kv_heads = module.num_heads // group.size, module.kv_heads // group.size
        elif isinstance(module, CrossAttention):
            module.num_heads //= group.size
        elif isinstance(module, ExpertMlp):
            divide_experts(module, group)
    return TensorParallel(group, sequence)
