"""The specification of a public model's network: its blocks, and what is around them."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from opendit.models.blocks import BlockSpec
from opendit.models.positions import axes_table, interwoven_table


@dataclass(frozen=True)
class Rotary:
    """Rotary positions. A token's coordinates are (frame, row, column) of its patch.

    Attributes:
        channels: of a head, for each axis; () where ``steps`` are given, or where there are no rotations.
        base: of the frequencies. bases: of each axis' own, instead.
        text: coordinates of a caption's tokens: all 0 ("zero"); ``first``, ``first`` + 1, ... along the first axis
            ("count"), on which the media follow, at the place after the caption's last; 0, 1, ... along one more axis,
            the last ("last"); or equal on all axes ("diagonal"), from half the longer side of the media on, whose rows
            and columns are then counted from their middle.
        steps, sides: the axes' channels are interwoven over all heads, which thus have angles of their own; a token's
            position along an axis is its coordinate times the step, as a share of the side.
    """

    channels: tuple[int, ...]
    base: float = 10000.0
    text: Literal["zero", "count", "last", "diagonal"] = "zero"
    first: int = 1
    steps: tuple[float, ...] = ()
    sides: tuple[float, ...] = ()
    bases: tuple[float, ...] = ()

    def table(self, coordinates: Tensor, width: int) -> Tensor | None:
        """Return the cosines and sines of tokens at coordinates (..., axes), of a head's channels (..., d / 2, 2), or
        of all ``width`` channels (..., D / 2, 2)."""
        if not self.steps and not self.channels:
            return None
        if not self.steps:
            return axes_table(coordinates, self.channels, self.bases or (self.base,) * len(self.channels))
        return interwoven_table(coordinates, width, self.base, self.steps, self.sides)


@dataclass(frozen=True)
class TextEmbedding:
    """The layers that make a caption's tokens those of the network.

    Attributes:
        width: of the encoder's tokens.
        layers: "linear"; "norm", RMSNorm and a linear layer; "mlp", two linear layers and GELU; "none".
        multiple: captions are filled with learned tokens up to a multiple of this; 1 for none.
        pooled: width of a vector that is embedded beside the time; 0 for none.
        picture: width of a picture's tokens, which blocks attend to beside the caption's; 0 for none. They take the
            place of the pooled vector in conditions, (B, tokens, picture).
        masked: in one sequence with the media, a caption's padding is not attended to.
    """

    width: int
    layers: Literal["linear", "norm", "mlp", "none"] = "linear"
    multiple: int = 1
    pooled: int = 0
    picture: int = 0
    masked: bool = False


@dataclass(frozen=True)
class Stack:
    """Blocks of one specification that follow each other."""

    count: int
    block: BlockSpec


@dataclass(frozen=True)
class NetworkSpec:
    """The specification of a network.

    Attributes:
        channels: of the latents.
        given: channels that come behind these, of models that are given the first frame: a mask, repeated, and the
            latents of the clip that has nothing after that frame.
        zeros: channels of zeros that come behind them, whose weights nothing depends on.
        patch: (frames, rows, columns), or (rows, columns).
        channels_last: order of a patch's numbers, what comes in and what goes out: channels after the places, or
            before them.
        convolution: the weight of the patches' embedding has a convolution's shape.
        stacks: the blocks.
        order: of the streams of one sequence; () where captions are attended to across, and are not in it.
        media_refiner, text_refiner: blocks before they are joined.
        time_width: width of the time's embedding, and of its condition.
        time_hidden, frequencies: of the time's embedding.
        reversed_time: the network is told 1000 - t, and predicts data - noise.
        time_unit: times are divided by this before they are embedded.
        time_normed: the condition is RMSNorm of the time's sinusoids, and the time's embedding is what blocks share.
        guidance: the scale of guidance is embedded beside the time.
        shared: number of modulation vectors that all blocks share; 0 for none.
        final: values of the final layer's modulation, in their order.
        final_table: that modulation is a table plus the time's embedding.
        final_rank: that modulation is of this rank, and corrects the first vectors that blocks share.
        table: (side, unit) of a table of sines and cosines in patches, from whose middle a picture's positions are cut;
            positions count from 0 to ``unit`` along a side. None: there is none.
        media_multiple: media are filled with learned tokens up to a multiple of this.
        bias: linear layers have biases, those of the blocks as their options say.
    """

    channels: int
    patch: tuple[int, ...]
    stacks: tuple[Stack, ...]
    text: TextEmbedding
    rotary: Rotary
    channels_last: tuple[bool, bool] = (False, False)
    convolution: bool = False
    order: tuple[str, ...] = ()
    media_refiner: Stack | None = None
    text_refiner: Stack | None = None
    time_width: int = 0
    time_hidden: int | None = None
    frequencies: int = 256
    reversed_time: bool = False
    time_unit: float = 1.0
    time_normed: bool = False
    guidance: bool = False
    shared: int = 0
    final: tuple[str, ...] = ("shift", "scale")
    final_table: bool = False
    final_rank: int | None = None
    table: tuple[int, int] | None = None
    media_multiple: int = 1
    given: int = 0
    zeros: int = 0
    bias: bool = True

    @property
    def block(self) -> BlockSpec:
        """The specification of the first block."""
        return self.stacks[0].block

    @property
    def blocks(self) -> list[BlockSpec]:
        """The specifications of all blocks, in order."""
        return [stack.block for stack in self.stacks for _ in range(stack.count)]
