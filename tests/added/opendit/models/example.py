"""An example architecture: a DiT whose MLP multiplies two branches, with its plan."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from opendit.models.blocks import Block
from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT
from opendit.models.layers import TORCH_OPS, Mlp
from opendit.models.plan import PLAN, FlopTerm, Kept, MemoryTerm, mlp_flops, mlp_rules, rules


@dataclass(frozen=True)
class ExampleConfig(DiTConfig):
    kind: ClassVar[str] = "example"

    example_strength: float = 1.0

    def mlp_parameters(self) -> int:
        d, hidden = self.hidden_size, self.mlp_hidden
        return 3 * d * hidden + (2 * hidden + d) * self.bias


class ExampleMlp(Mlp):
    """Compute fc2(strength * a * b), where a and b are the halves of fc1's output."""

    branches: ClassVar[int] = 2
    strength = 1.0

    def hidden(self, x: Tensor, ops=TORCH_OPS) -> Tensor:
        a, b = self.fc1(x).chunk(2, dim=-1)
        return self.strength * a * b


class Example(DiT):
    def make_block(self) -> Block:
        block, config = super().make_block(), self.config
        block.mlp = ExampleMlp(config.hidden_size, config.mlp_hidden, config.bias)
        block.mlp.strength = config.example_strength
        return block


MEMORY = MemoryTerm("MLP", lambda config, execution: Kept(units=3 * config.mlp_ratio + 1))
FLOPS = FlopTerm("MLP", lambda config: mlp_flops(config, matrices=3))
OWN_PLAN = replace(PLAN.with_terms(MEMORY, FLOPS), rules=lambda config: rules(config) | mlp_rules(branches=2))
