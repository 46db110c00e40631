"""Model configurations. A configuration is stored in checkpoints. It counts the model's parameters and FLOPs without
building the model.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, cast

from opendit.config.architectures import MLP_KINDS, NORMS, POSITIONS, parse_given
from opendit.config.names import BUT_ATTENTION
from opendit.models.auxiliary import AlignmentConfig
from opendit.models.blocks import ATTENTION, CAPTION, MLP, MLPS, BlockSpec, Branch
from opendit.models.conditioning import TextConfig, bytes_parameters, given_channels
from opendit.models.layers import TIME_FREQUENCIES, Options
from opendit.models.positions import rotary_shares

# The newest revision of models. The same configuration describes a different model in each revision:
#   1  With adaln_lora, a block's modulation is only the low-rank product. MovieGen's learned positions are added once,
#      before the first block. Files without a revision have revision 1.
#   2  With adaln_lora, the low-rank product is added to a modulation that all blocks share. MovieGen's learned
#      positions are added before every block, and all named sizes except Ti have 8 heads of keys and values.
# New runs use the newest revision. Checkpoints keep their revision when resumed or converted.
REVISION = 2
LATER = ("alignment", "patch_bottleneck", "sprint", "uncertainty")  # fields that are stored only if set
# fields for another norm or MLP than the architecture's -> allowed values
EXCHANGEABLE = {"norm": NORMS, "mlp": MLP_KINDS}


@dataclass(frozen=True)
class DiTConfig:
    """All settings needed to build a DiT. Subclasses for other architectures add fields. The model is conditioned on
    ``num_classes`` labels, or on captions if ``text`` is set (num_classes is then None)."""

    kind: ClassVar[str] = "dit"
    axial_attention: ClassVar[bool] = False  # True if blocks attend along the grid's axes
    plain_projections: ClassVar[bool] = True  # True if q, k and v of a block are one matrix product
    why_no_packs: ClassVar[str] = ""  # why these models do not support packs; "" if they do

    input_size: tuple[int, ...]  # (height, width) or (frames, height, width) of latents
    patch_size: int | tuple[int, int, int]  # side of a square patch of a picture, or (frames, rows, columns)
    in_channels: int
    hidden_size: int
    depth: int
    num_heads: int
    num_classes: int | None = None
    mlp_ratio: float = 4.0
    learn_sigma: bool = True
    text: TextConfig | None = None
    qk_norm: bool = False  # RMSNorm of queries and keys
    adaln_lora: int | None = None  # rank of the blocks' modulations; None for full rank
    bias: bool = True  # True for biases in the blocks' linear layers
    positions: str = "sincos"  # sincos, learned or rope
    revision: int = REVISION
    null_class: bool = True  # True if the label table has a row for guidance's null class; OpenDiT trains with one
    # conditioning frames: first, prefix:K (K latent frames) or random; see opendit.models.conditioning
    given_frames: str | None = None
    norm: str = "layer"  # layer or rms: the norm before every branch of a block
    mlp: str = "gelu"  # gelu or swiglu
    alignment: AlignmentConfig | None = None  # representation alignment (--repa)
    # width between a patch's two projections; None: a single projection
    patch_bottleneck: int | None = None
    uncertainty: bool = False  # True if the weight of each time in the loss is learned; see opendit.models.auxiliary
    sprint: tuple[int, int] | None = None  # fused route: its first block, and the first block after the route

    @property
    def options(self) -> Options:
        return Options(self.bias, self.qk_norm, self.adaln_lora, self.shared_modulation)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """A block's branches. Cross-attention is between attention and MLP, as in PixArt-alpha (Chen et al. 2024)."""
        return (ATTENTION, CAPTION, MLP) if self.cross_attention else (ATTENTION, MLP)

    @property
    def block(self) -> BlockSpec:
        return BlockSpec(
            self.hidden_size,
            self.num_heads,
            self.mlp_hidden,
            self.branches,
            norm=self.norm,
            mlp=self.mlp,
            options=self.options,
        )

    @property
    def key_value_width(self) -> int:
        return (self.block.kv_heads or self.num_heads) * self.head_dim

    @property
    def float8(self) -> bool:
        """True if FP8 supports the block's branches: LayerNorm, GELU without experts, and separate keys and values for
        every query head. FP8 also needs biases, see :meth:`check_speed`."""
        spec = self.block
        plain = spec.norm == "layer" and spec.mlp == "gelu" and spec.experts is None
        return plain and spec.kv_heads in (None, spec.heads)

    @property
    def recomputable(self) -> bool:
        """True if the block supports all levels of --recompute."""
        return self.block.mlp in ("gelu", "swiglu") and self.block.kv_heads in (None, self.block.heads)

    @property
    def shared_modulation(self) -> bool:
        """True if a block adds its modulation to one that all blocks share."""
        return self.adaln_lora is not None and self.revision >= 2

    @property
    def rescaled_guidance(self) -> str:
        """The unit in which guided predictions are rescaled (see ``Guidance.rescaled``); "" for no rescaling."""
        return ""

    @property
    def positions_in_blocks(self) -> bool:
        """True if learned positions are added before every block; False if only before the first."""
        return False

    @property
    def depends_on_revision(self) -> bool:
        """True if the model differs between revisions. If False, a configuration always gets the newest revision."""
        return self.adaln_lora is not None

    @property
    def caption_tokens(self) -> int:
        return 0

    @property
    def joint_sequence(self) -> bool:
        return False

    @property
    def is_video(self) -> bool:
        return len(self.patch) == 3

    @property
    def patch(self) -> tuple[int, ...]:
        return (self.patch_size,) * 2 if isinstance(self.patch_size, int) else self.patch_size

    @property
    def grid(self) -> tuple[int, ...]:
        return self.grid_of(self.input_size)

    def grid_of(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of patches along each side of ``size``. A single frame is repeated to fill one patch.
        Raises ValueError if the patch does not divide the size."""
        if self.is_video and size[0] == 1:
            size = (self.patch[0], *size[1:])
        if len(size) != len(self.patch) or any(s < 1 or s % p for s, p in zip(size, self.patch, strict=False)):
            raise ValueError(f"an input of {times(size)} does not divide by patch size {times(self.patch)}")
        return tuple(s // p for s, p in zip(size, self.patch, strict=True))

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def tables(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Fixed position tables: buffer name -> (table width, sides of the grid). Tables are always computed; tables in
        weight files are ignored. ``pos_embed`` is Meta's name."""
        tables: dict[str, tuple[int, tuple[int, ...]]] = {}
        if self.positions == "sincos":
            tables["pos_embed"] = self.hidden_size, self.grid[-2:]
            if self.is_video:
                tables["temporal_embed"] = self.hidden_size, self.grid[:1]
        if self.text is not None and self.text.inside:
            tables["text_encoder.positions"] = self.text.width, (self.text.max_tokens,)
        return tables

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
    def out_channels(self) -> int:
        return self.in_channels * (2 if self.learn_sigma else 1)

    @property
    def given_channels(self) -> int:
        """Number of input channels for conditioning frames: the mask and the frames."""
        return given_channels(self.in_channels) if self.given_frames else 0

    @property
    def given_in_place(self) -> bool:
        """True if conditioning frames replace the noisy frames; see opendit.models.conditioning."""
        return False

    @property
    def given_beside(self) -> bool:
        """True if input channels always condition the model on the first frame; see opendit.models.conditioning."""
        return False

    @property
    def boundary(self) -> float | None:
        """The time in [0, 1] from which the first of two networks is used; None for models with a single network."""
        return None

    @property
    def embedded_channels(self) -> int:
        """Number of the patch embedding's input channels."""
        return self.in_channels + self.given_channels

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the kind as a dictionary for JSON. Default values of ``norm`` and ``mlp`` and unset
        fields in LATER are left out, so that earlier versions of OpenDiT can read the dictionary."""
        values = {"kind": self.kind, **asdict(self)}
        values = {key: value for key, value in values.items() if key not in LATER or value}
        return {key: value for key, value in values.items() if key not in EXCHANGEABLE or key in self.exchanged}

    @property
    def exchanged(self) -> dict[str, str]:
        """The fields in EXCHANGEABLE that differ from the architecture's default, such as {"norm": "rms"}."""
        own = type(self)
        return {name: getattr(self, name) for name in EXCHANGEABLE if getattr(self, name) != getattr(own, name)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DiTConfig":
        """Return the configuration from the result of :meth:`to_dict`, possibly after conversion to JSON and back.
        Raises ValueError for an unknown revision."""
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k != "kind"}
        if values.get("text") is not None:
            values["text"] = TextConfig(**values["text"])
        if values.get("alignment") is not None:
            values["alignment"] = AlignmentConfig(**values["alignment"])
        config = cls(**{"revision": 1, **values})
        config.check_revision()
        return config if config.depends_on_revision else replace(config, revision=REVISION)

    def check(self) -> None:
        """Raise ValueError for a configuration that can't be built."""
        self.check_revision()
        if (self.num_classes is None) == (self.text is None):
            raise ValueError("a model is conditioned on num_classes or on text: give one of them")
        if self.positions not in POSITIONS:
            raise ValueError(f"--positions {self.positions}: no such positions; choose one of {', '.join(POSITIONS)}")
        for name, choices in EXCHANGEABLE.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"--{name} {getattr(self, name)}: no such {name}; choose {' or '.join(choices)}")
        if self.adaln_lora is not None and not 0 < self.adaln_lora < self.hidden_size:
            raise ValueError(
                f"--adaln_lora {self.adaln_lora}: out of range; give a rank from 1 to below the width, "
                f"{self.hidden_size}"
            )
        values = math.prod(self.patch) * self.embedded_channels
        if self.patch_bottleneck is not None and not 0 < self.patch_bottleneck < min(values, self.hidden_size):
            raise ValueError(
                f"--patch_bottleneck {self.patch_bottleneck}: out of range; give fewer numbers than a patch has, "
                f"{values}, and than the width, {self.hidden_size}"
            )
        if self.sprint is not None and not 0 < self.sprint[0] < self.sprint[1] <= self.depth:
            route = f"{self.sprint[0]}:{self.sprint[1]}"
            raise ValueError(f"--route {route}: out of range; begin at 1 or later, and end at {self.depth} or before")
        if self.given_frames is not None:
            count = parse_given(self.given_frames)
            if not self.is_video:
                raise ValueError(f"--given_frames {self.given_frames}: this model takes pictures; use a vDiT")
            if self.input_size[0] <= (count or 1):
                raise ValueError(
                    f"--given_frames {self.given_frames}: a clip's latents have {self.input_size[0]} in all, and "
                    "one at least is to be drawn; give fewer, or raise --num_frames"
                )
        if self.positions == "rope":
            rotary_shares(self.head_dim, len(self.patch))

    def check_revision(self) -> None:
        if not 1 <= self.revision <= REVISION:
            raise ValueError(
                f"a {self.kind} of revision {self.revision}: this version knows 1 to {REVISION}; use a newer OpenDiT"
            )

    @property
    def sequence_types(self) -> tuple[str, ...]:
        return ("fastseq", "ulysses", "ring", "usp")

    def check_sequence_parallel(self, kind: str) -> None:
        if kind not in ("auto", *self.sequence_types):
            raise ValueError(
                f"--sequence_parallel_type {kind}: {self.kind} models have no attention to all tokens without "
                "--full_attention; leave the flag out"
            )

    def check_packs(self) -> None:
        if self.why_no_packs:
            raise ValueError(f"--pack_tokens: not {self.kind} models: {self.why_no_packs}; take DiT, vDiT or MovieGen")

    @property
    def longest_side(self) -> int | None:
        """The largest number of patches along a side of a picture; None if any number is possible."""
        return None

    def check_side(self, patches: int) -> None:
        """Raise ValueError for pictures with more patches along a side than the model has positions for."""
        if self.longest_side is not None and patches > self.longest_side:
            raise ValueError(
                f"--image_size: {patches} patches along a side; the model has positions for {self.longest_side}"
            )

    def check_speed(self, fp8: bool, recompute: str) -> None:
        exchanged = " ".join(f"--{name} {value}" for name, value in self.exchanged.items())
        if fp8 and not (self.float8 and self.bias):
            why = "--no_bias" if self.float8 else exchanged or f"{self.kind} models"
            raise ValueError(f"--fp8: does not work with {why}; leave it out")
        if recompute not in ("none", BUT_ATTENTION) and not self.recomputable:
            why = exchanged or f"{self.kind} models"
            raise ValueError(f"--recompute {recompute}: does not work with {why}; use --grad_checkpoint")

    def forward_flops(self) -> int:
        """Return the FLOPs of one sample's forward pass (2 per multiply-add). Training takes three times as many."""
        from opendit.models.zoo import plan_of  # imported here, because the zoo imports this module

        return plan_of(self).forward_flops(self)

    def with_blocks(self, numbers: Sequence[int]) -> "DiTConfig":
        """Return the configuration of a model that has only the blocks with these numbers."""
        return replace(self, depth=len(numbers))

    @functools.cache  # noqa: B019  there are few configurations, and thousands of plans ask for the number
    def parameters(self) -> int:
        d, patch = self.hidden_size, math.prod(self.patch)
        narrow = self.patch_bottleneck
        embed = (patch * self.embedded_channels + 1) * (narrow or d) + (TIME_FREQUENCIES + 1 + d + 1) * d
        embed += 0 if narrow is None else (narrow + 1) * d
        embed += 0 if self.alignment is None else self.alignment.parameters(d)
        embed += self.uncertainty * (TIME_FREQUENCIES + 1)
        embed += 0 if self.sprint is None else (2 * d + 2) * d
        final = 2 * d * d + 2 * d + (d + 1) * patch * self.out_channels
        if self.positions == "learned":
            embed += sum(self.grid) * d
        if self.shared_modulation:
            embed += self.modulation_width * (d + self.bias)
        if self.text is None:
            embed += (cast(int, self.num_classes) + self.null_class) * d
        else:
            embed += (self.text.width + 1 + d + 1) * d
            if self.text.cross_attention:
                embed += (self.text.width + 1) * d
            if self.text.inside:
                embed += bytes_parameters(self.text)
        return self.depth * self.whole_block_parameters() + embed + final

    @functools.cache  # noqa: B019
    def whole_block_parameters(self) -> int:
        branches = sum(self._branch_parameters(branch) for branch in self.branches)
        return branches + self.modulation_parameters()

    def _branch_parameters(self, branch: Branch) -> int:
        d, norm = self.hidden_size, self.hidden_size * (self.norm == "rms")
        if branch.sees is None:
            return norm + self.mlp_parameters()
        shared = d if branch.sees == "caption" else self.key_value_width
        return norm + (2 * d + 2 * shared) * (d + self.bias) + 2 * self.head_dim * self.qk_norm

    def mlp_parameters(self) -> int:
        d, wide, experts = self.hidden_size, MLPS[self.mlp].branches * self.mlp_hidden, self.block.experts
        beside = 0 if experts is None else experts.count * d * (1 + 2 * experts.hidden)
        return (wide + self.mlp_hidden) * d + (wide + d) * self.bias + beside

    def modulation_parameters(self) -> int:
        return self.modulation_weights + self.modulation_width * (self.bias and not self.shared_modulation)

    @property
    def modulation_width(self) -> int:
        return self.block.chunks * self.hidden_size

    @property
    def modulation_weights(self) -> int:
        rank = self.adaln_lora
        full = self.modulation_width * self.hidden_size
        return full if rank is None else rank * (self.hidden_size + self.modulation_width)


def times(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
