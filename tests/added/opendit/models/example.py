"""An example of an architecture: a DiT whose MLP multiplies two branches."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from opendit.models.configuration import DiTConfig
from opendit.models.dit import DiT, DiTBlock
from opendit.models.layers import TORCH_OPS, Mlp


@dataclass(frozen=True)
class ExampleConfig(DiTConfig):
    kind: ClassVar[str] = "example"

    example_strength: float = 1.0

    def mlp_parameters(self) -> int:
        d, hidden = self.hidden_size, self.mlp_hidden
        return 3 * d * hidden + (2 * hidden + d) * self.bias


class ExampleMlp(Mlp):
    """fc2(strength a b) with a, b the halves of fc1."""

    branches: ClassVar[int] = 2
    strength = 1.0

    def hidden(self, x: Tensor, ops=TORCH_OPS) -> Tensor:
        a, b = self.fc1(x).chunk(2, dim=-1)
        return self.strength * a * b


class Example(DiT):
    def make_block(self) -> DiTBlock:
        c = self.config
        mlp = ExampleMlp(c.hidden_size, c.mlp_hidden, c.bias)
        mlp.strength = c.example_strength
        return DiTBlock(c.hidden_size, c.num_heads, c.mlp_ratio, c.cross_attention, c.options, mlp)


ARCHITECTURE = ExampleConfig, Example
