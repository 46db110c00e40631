"""What a model is made of, as data: it travels inside checkpoints, and counts weights and work without building it."""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

from opendit.models import bytes_text
from opendit.models.conditioning import TextConfig
from opendit.models.layers import TIME_FREQUENCIES, Options
from opendit.models.positions import POSITIONS, rotary_shares


@dataclass(frozen=True)
class DiTConfig:
    """Everything needed to build a DiT; other architectures add to it, and count their own blocks.

    Conditioned on ``num_classes`` labels, or on captions when ``text`` is given (then num_classes is None).
    """

    kind: ClassVar[str] = "dit"
    sequence_parallel: ClassVar[bool] = True  # whether ranks can share the tokens of a sample
    float8: ClassVar[bool] = True  # whether a block's linear layers are all BlockOps'
    recompute: ClassVar[bool] = True  # whether there is anything for --recompute
    modulations: ClassVar[int] = 6  # vectors of a block's modulation, besides those of cross-attention
    cross_modulations: ClassVar[int] = 0

    input_size: tuple[int, ...]  # height, width of the latent; of clips frames, height, width
    patch_size: int | tuple[int, int, int]  # a side, or frames, rows, columns
    in_channels: int
    hidden_size: int
    depth: int
    num_heads: int
    num_classes: int | None = None
    mlp_ratio: float = 4.0
    learn_sigma: bool = True
    text: TextConfig | None = None
    qk_norm: bool = False  # RMSNorm of queries and keys
    adaln_lora: int | None = None  # rank of the modulation's weights in the blocks; None: full
    bias: bool = True  # of the blocks' linear layers
    positions: str = "sincos"  # sincos, learned or rope

    @property
    def options(self) -> Options:
        return Options(self.bias, self.qk_norm, self.adaln_lora)

    @property
    def is_video(self) -> bool:
        return len(self.patch) == 3

    @property
    def patch(self) -> tuple[int, ...]:
        """Sides of a patch, one per dimension of the input."""
        return (self.patch_size,) * 2 if isinstance(self.patch_size, int) else self.patch_size

    @property
    def grid(self) -> tuple[int, ...]:
        return self.grid_of(self.input_size)

    def grid_of(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Patches along each side of an input of ``size``; a single frame is one patch long, because it is repeated.

        Raises ValueError if the patch does not divide it.
        """
        if self.is_video and size[0] == 1:
            size = (self.patch[0], *size[1:])
        if len(size) != len(self.patch) or any(s < 1 or s % p for s, p in zip(size, self.patch, strict=False)):
            raise ValueError(f"an input of {times(size)} does not divide by patch size {times(self.patch)}")
        return tuple(s // p for s, p in zip(size, self.patch, strict=True))

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def mlp_hidden(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def cross_attention(self) -> bool:
        return bool(self.text and self.text.cross_attention)

    @property
    def can_recompute(self) -> bool:
        """Whether --recompute knows how to make a block's activations again."""
        return self.recompute and self.bias

    @property
    def out_channels(self) -> int:
        return self.in_channels * (2 if self.learn_sigma else 1)

    def to_dict(self) -> dict:
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict) -> "DiTConfig":
        """The inverse of to_dict, also after a trip through JSON (see opendit.models.config_from_dict)."""
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k != "kind"}
        if values.get("text") is not None:
            values["text"] = TextConfig(**values["text"])
        return cls(**values)

    def check(self) -> None:
        """Raises ValueError for what can't be built; the message names the flag."""
        if (self.num_classes is None) == (self.text is None):
            raise ValueError("a model is conditioned on num_classes or on text: give one of them")
        if self.positions not in POSITIONS:
            raise ValueError(f"--positions {self.positions}: choose one of {', '.join(POSITIONS)}")
        if self.adaln_lora is not None and not 0 < self.adaln_lora < self.hidden_size:
            raise ValueError(f"--adaln_lora {self.adaln_lora}: a rank from 1 to below the width, {self.hidden_size}")
        if self.positions == "rope":
            rotary_shares(self.head_dim, len(self.patch))

    @property
    def sequence_types(self) -> tuple[str, ...]:
        """The strategies by which ranks can share this model's samples."""
        if not self.sequence_parallel:
            return ()
        by_heads = ("fastseq", "ulysses")
        return by_heads if self.qk_norm or self.positions == "rope" else (*by_heads, "ring", "usp")

    def check_sequence_parallel(self, kind: str) -> None:
        """Raises ValueError if ranks can't share this model's samples by a strategy ``kind``, or by any for "auto"; the
        message says why."""
        if not self.sequence_types:
            raise ValueError(f"--sequence_parallel_size: {self.kind} models can't share a sample between ranks yet")
        if kind not in ("auto", *self.sequence_types):
            raise ValueError(
                f"--sequence_parallel_type {kind} attends without --qk_norm and --positions rope; use ulysses"
            )

    def check_speed(self, fp8: bool, recompute: str) -> None:
        """Raises ValueError if the blocks can't run in FP8, or by parts again in the backward pass."""
        if fp8 and not (self.float8 and self.bias):
            why = "--no_bias" if self.float8 else f"{self.kind} models"
            raise ValueError(f"--fp8 does not work with {why}; leave it out")
        if recompute != "none" and not self.can_recompute:
            why = "--no_bias" if self.recompute else f"{self.kind} models"
            raise ValueError(f"--recompute {recompute} does not work with {why}; use --grad_checkpoint")

    def forward_flops(self) -> int:
        """FLOPs of one sample's forward pass in its matrix products (2 a multiply-add); training is 3x."""
        n, d, patch = self.tokens, self.hidden_size, math.prod(self.patch)
        embed = 2 * n * patch * self.in_channels * d + 2 * TIME_FREQUENCIES * d + 2 * d * d
        final = 2 * n * d * patch * self.out_channels + 2 * d * 2 * d
        block = self.block_flops() + 2 * self._modulation_weights()
        if self.text is not None:
            m, width = self.text.max_tokens, self.text.width
            embed += 2 * width * d + 2 * d * d
            if self.text.cross_attention:
                embed += 2 * m * width * d
                block += 2 * n * d * d + 2 * m * d * (2 * d) + 4 * n * m * d + 2 * n * d * d
            if self.text.inside:
                embed += bytes_text.forward_flops(self.text)
        return self.depth * block + embed + final

    def block_flops(self) -> int:
        """Of a block without its modulation and cross-attention."""
        n, d = self.tokens, self.hidden_size
        return self.attention_flops(n) + 4 * n * d * self.mlp_hidden

    def attention_flops(self, keys: int) -> int:
        """Of self-attention with its projections, every token seeing so many ``keys``."""
        n, d = self.tokens, self.hidden_size
        return 2 * n * d * (3 * d) + 4 * n * keys * d + 2 * n * d * d

    def parameters(self) -> int:
        """Number of trainable weights, without building the model."""
        d, patch = self.hidden_size, math.prod(self.patch)
        block = self.block_parameters() + self.modulation_parameters()
        embed = (patch * self.in_channels + 1) * d + (TIME_FREQUENCIES + 1 + d + 1) * d
        final = 2 * d * d + 2 * d + (d + 1) * patch * self.out_channels
        if self.positions == "learned":
            embed += sum(self.grid) * d
        if self.text is None:
            embed += (self.num_classes + 1) * d
        else:
            embed += (self.text.width + 1 + d + 1) * d
            if self.text.cross_attention:
                embed += (self.text.width + 1) * d
                block += self.attention_parameters()
            if self.text.inside:
                embed += bytes_text.parameters(self.text)
        return self.depth * block + embed + final

    def block_parameters(self) -> int:
        """Of a block without its modulation and cross-attention."""
        return self.attention_parameters() + self.mlp_parameters()

    def attention_parameters(self) -> int:
        """Of self-attention, or of cross-attention, which has as many."""
        d = self.hidden_size
        return 4 * d * d + 4 * d * self.bias + 2 * self.head_dim * self.qk_norm

    def mlp_parameters(self) -> int:
        d, hidden = self.hidden_size, self.mlp_hidden
        return 2 * d * hidden + (hidden + d) * self.bias

    def modulation_parameters(self) -> int:
        """Of a block."""
        return self._modulation_weights() + self.modulation_width * self.bias

    @property
    def modulation_width(self) -> int:
        return (self.modulations + self.cross_modulations * self.cross_attention) * self.hidden_size

    def _modulation_weights(self) -> int:
        rank = self.adaln_lora
        full = self.modulation_width * self.hidden_size
        return full if rank is None else rank * (self.hidden_size + self.modulation_width)


def times(sizes: tuple[int, ...]) -> str:
    """times((2, 4, 3)) -> "2 x 4 x 3"."""
    return " x ".join(map(str, sizes))
