"""EC-DiT: a DiT whose MLPs are many small experts that choose their tokens, next to a shared one (Sun et al., "EC-DiT:
Scaling Diffusion Transformers with Adaptive Expert-Choice Routing", 2024; expert choice: Zhou et al. 2022).

The routing is theirs; the sizes are our own (docs/models.md): neither the paper's, whose experts are whole MLPs, nor
those of NVIDIA NeMo, which builds on MovieGen-1B with experts of 1024 and a capacity factor of 8.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.models.attention import SequenceShards, TokenGrid
from opendit.models.blocks import Context, Deferred
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT, DiTBlock
from opendit.models.initialization import Distribution, XavierUniform
from opendit.models.layers import BlockOps, Mlp


@dataclass(frozen=True)
class ECDiTConfig(DiTConfig):
    """Everything needed to build an EC-DiT; ``mlp_ratio`` is the shared MLP's."""

    kind: ClassVar[str] = "ecdit"
    float8: ClassVar[bool] = False  # the experts' products are not among BlockOps
    why_no_packs: ClassVar[str] = "experts choose among the tokens of whole samples"

    experts: int = 64
    expert_hidden: int = 144  # width of an expert's hidden layer
    expert_capacity: float = 2.0  # experts of a token on average

    @property
    def chosen(self) -> int:
        """Tokens of a sample that an expert takes."""
        return chosen_tokens(self.tokens, self.experts, self.expert_capacity)

    def check(self) -> None:
        super().check()
        if not 0 < self.expert_capacity <= self.experts:
            raise ValueError(
                f"--expert_capacity {self.expert_capacity}: out of range; give more than 0 and at most the "
                f"{self.experts} experts"
            )

    def block_parameters(self) -> int:
        d = self.hidden_size
        return super().block_parameters() + self.experts * d + 2 * self.experts * d * self.expert_hidden


def chosen_tokens(tokens: int, experts: int, capacity: float) -> int:
    """Tokens that each expert takes of a sample's, ceil(capacity * tokens / experts): its even share times the
    capacity, at least one, at most all.

    Exact for the capacity as it is written: 1.1 * 100 / 10 is 11, of which floats make 12.
    """
    return _places(tokens, experts, *_ratio(capacity))


def _ratio(capacity: float) -> tuple[int, int]:
    """Numerator and denominator of the shortest decimal that means this number."""
    return Fraction(repr(float(capacity))).as_integer_ratio()


def _places(tokens: int, experts: int, numerator: int, denominator: int) -> int:
    return min(tokens, -(-numerator * tokens // (denominator * experts)))


class ExpertMlp(Mlp):
    """A shared MLP plus, for each token, those of the experts that have chosen it, weighted by its affinity to them.

    A token's affinities are a softmax over the experts; each expert takes the tokens of a sample with the highest
    affinity to it. So every expert has the same work, and a sample's result does not depend on the others of its batch.
    The experts' weights are stacks (E, in, out). A rank may hold a slice of them, ``held``, and ``start`` may be
    replaced by one that sends tokens to the ranks of their experts (opendit.parallel.experts).
    """

    def __init__(self, dim: int, hidden: int, bias: bool, experts: int, expert_hidden: int, capacity: float):
        super().__init__(dim, hidden, bias)
        self.capacity: tuple[int, int] = _ratio(capacity)
        self.held: slice = slice(None)
        self.router: nn.Linear = nn.Linear(dim, experts, bias=False)
        self.expert_fc1: nn.Parameter = nn.Parameter(torch.randn(experts, dim, expert_hidden) / math.sqrt(dim))
        self.expert_fc2: nn.Parameter = nn.Parameter(
            torch.randn(experts, expert_hidden, dim) / math.sqrt(expert_hidden)
        )

    def affinities(self, y: Tensor) -> Tensor:
        """Compute the affinities of y's tokens (B, N, D) to all experts, (B, N, E), in fp32 or wider."""
        return self.router(y).softmax(dim=-1, dtype=torch.promote_types(y.dtype, torch.float32))

    def choose(self, affinity: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each expert's tokens by affinities (B, N, E): return their affinities and their numbers in the sample,
        (B, E, k) each."""
        k = _places(affinity.shape[1], self.router.out_features, *self.capacity)
        return affinity.transpose(1, 2).topk(k, dim=-1)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of this rank's experts, (E, D, hidden) and (E, hidden, D)."""
        return self.expert_fc1, self.expert_fc2

    def experts(self, taken: Tensor) -> Tensor:
        """Apply each expert of this rank to its tokens (E, rows, D)."""
        fc1, fc2 = self.weights()
        return torch.bmm(F.gelu(torch.bmm(taken, fc1), approximate="tanh"), fc2)

    def routed(self, y: Tensor) -> Tensor:
        """Return what this rank's experts add to y's tokens, (B, N, D), without the shared MLP."""
        B, N, _ = y.shape
        weight, token = self.choose(self.affinities(y)[..., self.held])
        row = rows_by_expert(token, N)
        out = self.experts(y.flatten(0, 1)[row])
        return add_rows(out.flatten(0, 1), weight.transpose(0, 1).flatten(), row.flatten(), y)

    def start(self, y: Tensor, shards: SequenceShards | None = None) -> "Routing":
        """Begins what the experts add to y's tokens, (B, n, D). shards: how ranks share the sequence."""
        return _RoutedHere(self, y) if shards is None else shards.start_experts(self, y)

    def deferred(self, h: Tensor, gate: Tensor, y: Tensor, ops: BlockOps) -> tuple[Tensor, Tensor, Tensor]:
        return super().deferred(h + gate.unsqueeze(1) * self.routed(y), gate, y, ops)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.routed(x)


class Routing(Protocol):
    """The experts' work on tokens in three steps, so that tokens travel to their experts' ranks beside other work:
    ``ExpertMlp.start`` makes it and sends them off; then comes :meth:`compute`; then :meth:`result`.

    travels: whether the result is on its way when :meth:`compute` returns.
    """

    travels: bool

    def compute(self) -> None:
        """Takes what has arrived through this rank's experts, and sends it back."""
        ...

    def result(self) -> Tensor:
        """Return what is added to the tokens (B, n, D). Call it once."""
        ...


class _RoutedHere:
    """Routing where this rank has all experts."""

    travels = False

    def __init__(self, mlp: ExpertMlp, y: Tensor):
        self._mlp, self._y = mlp, y

    def compute(self) -> None:
        self._added = self._mlp.routed(self._y)

    def result(self) -> Tensor:
        return self._added


class ECDiTBlock(DiTBlock):
    """Tokens travel to other ranks' experts beside the shared MLP's first layer, and back beside its second, where that
    is not deferred to the next block."""

    mlp: ExpertMlp

    def deferred(self, start: list[Any], m: Tensor, context: Context | None, grid: TokenGrid | None) -> Deferred:
        h, gate, z, routing = self._computed(start, m, context, grid)
        return h + gate.unsqueeze(1) * routing.result(), gate, z

    def complete(self, start: list[Any], m: Tensor, context: Context | None, grid: TokenGrid | None) -> Tensor:
        h, gate, z, routing = self._computed(start, m, context, grid)
        if not routing.travels:
            return self.materialize(h + gate.unsqueeze(1) * routing.result(), gate, z)
        return self.materialize(h, gate, z) + gate.unsqueeze(1) * routing.result()

    def _computed(
        self, start: list[Any], m: Tensor, context: Context | None, grid: TokenGrid | None
    ) -> tuple[Any, ...]:
        """The parts of h + gate * fc2(z), and what is to be added to fc2(z)."""
        h, gate, y = self.before_mlp(start, m, context, grid)
        routing = self.mlp.start(y, grid and grid.shards)
        z = self.mlp.hidden(y, self.ops)
        routing.compute()
        return h, gate, z, routing


def rows_by_expert(token: Tensor, tokens: int) -> Tensor:
    """Rows (E, B k) of the flattened tokens of all samples, of ``tokens`` each, from numbers in a sample (B, E, k)."""
    sample = torch.arange(len(token), device=token.device).view(-1, 1, 1)
    return (token + tokens * sample).transpose(0, 1).flatten(1)


def add_rows(out: Tensor, weight: Tensor, row: Tensor, like: Tensor) -> Tensor:
    """The sums of weight * out (M, D) in the rows (M,) of the flattened tokens of ``like`` (B, N, D), in its dtype;
    added up in fp32 or wider."""
    B, N, _ = like.shape
    return _AddRows.apply(out * weight.unsqueeze(-1), row, B * N).view(like.shape).to(like.dtype)


class _AddRows(torch.autograd.Function):
    """``zeros(rows, D).index_add(0, index, x)``, which would keep x for the backward pass to know its shape."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, rows: int):
        ctx.save_for_backward(index)
        return x.new_zeros(rows, x.shape[1]).index_add_(0, index, x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad[ctx.saved_tensors[0]], None, None


class ECDiT(DiT):
    """DiT with experts, of pictures or clips."""

    config: ECDiTConfig

    @property
    def no_graph(self) -> str:
        shared = self.sequence is not None and self.sequence.shares_samples
        return "the host reads how many tokens of an expert each rank has (--sequence_parallel_size)" if shared else ""

    def make_block(self) -> ECDiTBlock:
        c = self.config
        mlp = ExpertMlp(c.hidden_size, c.mlp_hidden, c.bias, c.experts, c.expert_hidden, c.expert_capacity)
        return ECDiTBlock(c.hidden_size, c.num_heads, c.mlp_ratio, c.cross_attention, c.options, mlp)

    def initial_distributions(self) -> dict[str, Distribution]:
        experts = {f"blocks.*.mlp.expert_{layer}": XavierUniform(stacked=True) for layer in ("fc1", "fc2")}
        return super().initial_distributions() | {"blocks.*.mlp.router.weight": XavierUniform(), **experts}


ARCHITECTURE = ECDiTConfig, ECDiT
