"""EC-DiT: a DiT whose MLPs are many small experts that choose their tokens, next to a shared one (Sun et al., "EC-DiT:
Scaling Diffusion Transformers with Adaptive Expert-Choice Routing", 2024; expert choice: Zhou et al. 2022).

The routing is theirs; the sizes are our own (docs/models.md): neither the paper's, whose experts are whole MLPs, nor
those of NVIDIA NeMo, which builds on MovieGen-1B with experts of 1024 and a capacity factor of 8.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT, DiTBlock
from opendit.models.initialization import Distribution, XavierUniform
from opendit.models.layers import BlockOps, Mlp


@dataclass(frozen=True)
class ECDiTConfig(DiTConfig):
    """Everything needed to build an EC-DiT; ``mlp_ratio`` is the shared MLP's."""

    kind: ClassVar[str] = "ecdit"
    sequence_parallel: ClassVar[bool] = False  # experts choose among all tokens of a sample
    float8: ClassVar[bool] = False  # nor are the experts' products among BlockOps

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
            raise ValueError(f"--expert_capacity {self.expert_capacity}: above 0, up to the {self.experts} experts")

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
    The experts' weights are stacks (E, in, out). A rank may hold a slice of them, ``held``; what its experts add is
    then a part of a sum over the ranks.
    """

    def __init__(self, dim: int, hidden: int, bias: bool, experts: int, expert_hidden: int, capacity: float):
        super().__init__(dim, hidden, bias)
        self.capacity, self.held = _ratio(capacity), slice(None)
        self.router = nn.Linear(dim, experts, bias=False)
        self.expert_fc1 = nn.Parameter(torch.randn(experts, dim, expert_hidden) / math.sqrt(dim))
        self.expert_fc2 = nn.Parameter(torch.randn(experts, expert_hidden, dim) / math.sqrt(expert_hidden))

    def routed(self, y: Tensor) -> Tensor:
        """What the experts add to y's tokens, (B, N, D), without the shared MLP."""
        (B, N, D), E = y.shape, self.router.out_features
        k = _places(N, E, *self.capacity)
        affinity = self.router(y).softmax(dim=-1, dtype=torch.promote_types(y.dtype, torch.float32))
        weight, token = affinity[..., self.held].transpose(1, 2).topk(k, dim=-1)  # (B, held, k)
        row = (token + N * torch.arange(B, device=y.device).view(B, 1, 1)).transpose(0, 1).flatten(1)  # (held, B k)
        taken = y.flatten(0, 1)[row]
        hidden = F.gelu(torch.bmm(taken, self.expert_fc1), approximate="tanh")
        out = torch.bmm(hidden, self.expert_fc2) * weight.transpose(0, 1).flatten(1).unsqueeze(-1)
        total = _AddRows.apply(out.flatten(0, 1), row.flatten(), B * N)  # in fp32 or wider
        return total.view(B, N, D).to(y.dtype)

    def deferred(self, h: Tensor, gate: Tensor, y: Tensor, ops: BlockOps) -> tuple[Tensor, Tensor, Tensor]:
        return super().deferred(h + gate.unsqueeze(1) * self.routed(y), gate, y, ops)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.routed(x)


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

    def make_block(self) -> DiTBlock:
        c = self.config
        mlp = ExpertMlp(c.hidden_size, c.mlp_hidden, c.bias, c.experts, c.expert_hidden, c.expert_capacity)
        return DiTBlock(c.hidden_size, c.num_heads, c.mlp_ratio, c.cross_attention, c.options, mlp)

    def initial_distributions(self) -> dict[str, Distribution]:
        experts = {f"blocks.*.mlp.expert_{layer}": XavierUniform(stacked=True) for layer in ("fc1", "fc2")}
        return super().initial_distributions() | {"blocks.*.mlp.router.weight": XavierUniform(), **experts}


ARCHITECTURE = ECDiTConfig, ECDiT
