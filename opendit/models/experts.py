"""Expert-choice routing: a block has one MLP and many small expert MLPs, and each expert chooses tokens. Zhou et al.,
"Mixture-of-Experts with Expert Choice Routing", 2022; in diffusion transformers: Sun et al., "EC-DiT", 2024.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.models.attention import SequenceShards
from opendit.models.layers import Mlp


@dataclass(frozen=True)
class Experts:
    """The experts of a block's MLP."""

    count: int  # number of experts
    hidden: int  # width of an expert's hidden layer
    capacity: float  # average number of experts per token


def chosen_tokens(tokens: int, experts: int, capacity: float) -> int:
    """Return how many of a sample's ``tokens`` each expert chooses: ceil(capacity * tokens / experts), at most all.
    This is computed in decimals: a capacity of 1.1 with 100 tokens and 10 experts gives 11; floats would give 12."""
    return _places(tokens, experts, *_ratio(capacity))


def _ratio(capacity: float) -> tuple[int, int]:
    """Convert a float to the fraction of its shortest decimal form; return numerator and denominator."""
    return Fraction(repr(float(capacity))).as_integer_ratio()


def _places(tokens: int, experts: int, numerator: int, denominator: int) -> int:
    return min(tokens, -(-numerator * tokens // (denominator * experts)))


class ExpertMlp(Mlp):
    """A shared MLP and experts. A token's output is the MLP's output plus the outputs of the experts that chose the
    token. Each expert's output is multiplied by the token's affinity to the expert.

    A token's affinities are a softmax over the experts. In every sample, each expert chooses k tokens with the highest
    affinities. So a sample's result does not depend on other samples.

    The experts' weights are stacks (E, in, out). With expert parallelism, a rank holds only the experts ``held``, and
    ``start`` is replaced by a method that sends tokens to other ranks.
    """

    def __init__(self, dim: int, hidden: int, bias: bool, experts: Experts):
        super().__init__(dim, hidden, bias)
        self.capacity: tuple[int, int] = _ratio(experts.capacity)
        self.held: slice = slice(None)
        self.router: nn.Linear = nn.Linear(dim, experts.count, bias=False)
        first, second = (experts.count, dim, experts.hidden), (experts.count, experts.hidden, dim)
        self.expert_fc1: nn.Parameter = nn.Parameter(torch.randn(first) / math.sqrt(dim))
        self.expert_fc2: nn.Parameter = nn.Parameter(torch.randn(second) / math.sqrt(experts.hidden))

    def affinities(self, y: Tensor) -> Tensor:
        """Compute the affinities of y's tokens (B, N, D) to all experts, (B, N, E), in fp32 or wider."""
        return self.router(y).softmax(dim=-1, dtype=torch.promote_types(y.dtype, torch.float32))

    def choose(self, affinity: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each expert's k tokens by affinities (B, N, E). Return the affinities of the chosen tokens and their
        indices in the sample, (B, E, k) each."""
        k = _places(affinity.shape[1], self.router.out_features, *self.capacity)
        return affinity.transpose(1, 2).topk(k, dim=-1)

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.expert_fc1, self.expert_fc2

    def experts(self, taken: Tensor) -> Tensor:
        fc1, fc2 = self.weights()
        return torch.bmm(F.gelu(torch.bmm(taken, fc1), approximate="tanh"), fc2)

    def routed(self, y: Tensor) -> Tensor:
        """Return the weighted sum of this rank's experts' outputs for the tokens y, (B, N, D)."""
        B, N, _ = y.shape
        weight, token = self.choose(self.affinities(y)[..., self.held])
        row = rows_by_expert(token, N)
        out = self.experts(y.flatten(0, 1)[row])
        return add_rows(out.flatten(0, 1), weight.transpose(0, 1).flatten(), row.flatten(), y)

    def start(self, y: Tensor, shards: SequenceShards | None = None) -> "Routing":
        """Begin to route y's tokens (B, n, D) to experts. shards: division of the sequence over ranks; None for the
        complete sequence."""
        return _RoutedHere(self, y) if shards is None else shards.start_experts(self, y)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.routed(x)


class Routing(Protocol):
    """The experts' computation for a rank's tokens, in three steps, so that transfers overlap with other computation.

    ``ExpertMlp.start`` creates the object and sends the tokens to the ranks of their experts. Then :meth:`compute` runs
    the experts, and :meth:`result` returns the weighted sum.

    ``travels``: True if the result is still in transit between ranks when :meth:`compute` returns.
    """

    travels: bool

    def compute(self) -> None:
        """Apply this rank's experts to the tokens that have arrived, and send the results back."""
        ...

    def result(self) -> Tensor:
        """Return the experts' weighted outputs for the tokens, (B, n, D). Call it once."""
        ...


class _RoutedHere:
    """Routing for a rank that has all experts."""

    travels = False

    def __init__(self, mlp: ExpertMlp, y: Tensor):
        self._mlp, self._y = mlp, y

    def compute(self) -> None:
        self._added = self._mlp.routed(self._y)

    def result(self) -> Tensor:
        return self._added


def rows_by_expert(token: Tensor, tokens: int) -> Tensor:
    """Convert indices of tokens within each sample, (B, E, k), to row indices (E, B k) of the flattened batch. tokens:
    number of tokens per sample."""
    sample = torch.arange(len(token), device=token.device).view(-1, 1, 1)
    return (token + tokens * sample).transpose(0, 1).flatten(1)


def add_rows(out: Tensor, weight: Tensor, row: Tensor, like: Tensor) -> Tensor:
    """Add row i of weight * out (M, D) to row ``row[i]`` of a zero tensor (B N, D). Sums are accumulated in fp32 or
    wider. Return the tensor in the shape (B, N, D) and dtype of ``like``."""
    B, N, _ = like.shape
    return _AddRows.apply(out * weight.unsqueeze(-1), row, B * N).view(like.shape).to(like.dtype)


class _AddRows(torch.autograd.Function):
    """``zeros(rows, D).index_add(0, index, x)``. Unlike torch's operation, it does not keep x for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, rows: int):
        ctx.save_for_backward(index)
        return x.new_zeros(rows, x.shape[1]).index_add_(0, index, x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad[ctx.saved_tensors[0]], None, None
