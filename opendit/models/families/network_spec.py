"""The specification of a public model's network: blocks, embeddings, positions and final layer."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from opendit.models.blocks import BlockSpec
from opendit.models.positions import axes_table, interwoven_table


@dataclass(frozen=True)
class Rotary:
    """Rotary positions. A token's coordinates are (frame, row, column) of its patch.

    Attributes:
        channels: Number of a head's channels for each axis; () if ``steps`` is set or if there are no rotations.
        base: Base of the frequencies.
        bases: Base of the frequencies of each axis; () for ``base`` on every axis.
        text: Coordinates of a caption's tokens. "zero": 0 on all axes. "count": ``first``, ``first`` + 1, ... along the
            first axis; the media's tokens get the next number on this axis. "last": 0, 1, ... along an additional last
            axis. "diagonal": the same coordinate on all axes, starting at half the media's longer side; rows and
            columns of the media are then counted from the middle.
        first: First coordinate for ``text`` "count".
        steps: Size of a coordinate's step along each axis; () for rotations that all heads share. With steps, a token's
            position along an axis is coordinate * step / side, and the channels of the axes are interleaved over all
            heads, so that heads have different angles.
        sides: Side of each axis for ``steps``.
    """

    channels: tuple[int, ...]
    base: float = 10000.0
    text: Literal["zero", "count", "last", "diagonal"] = "zero"
    first: int = 1
    steps: tuple[float, ...] = ()
    sides: tuple[float, ...] = ()
    bases: tuple[float, ...] = ()

    def table(self, coordinates: Tensor, width: int) -> Tensor | None:
        """Return the cosines and sines of tokens at coordinates (..., axes); None without rotations.

        The result is (..., d / 2, 2) for the channels of one head, or, with ``steps``, (..., D / 2, 2) for all D =
        ``width`` channels."""
        if not self.steps and not self.channels:
            return None
        if not self.steps:
            return axes_table(coordinates, self.channels, self.bases or (self.base,) * len(self.channels))
        return interwoven_table(coordinates, width, self.base, self.steps, self.sides)


@dataclass(frozen=True)
class TextEmbedding:
    """The embedding of the text encoder's tokens in the network.

    Attributes:
        width: Width of the encoder's tokens.
        layers: "linear"; "norm" (RMSNorm and a linear layer); "mlp" (two linear layers and GELU); or "none".
        multiple: Captions are padded with learned tokens to a multiple of this number; 1 for no padding.
        pooled: Width of the pooled vector, whose embedding is added to the time's embedding; 0 for none.
        picture: Width of a picture's tokens, to which blocks attend in addition to the caption's; 0 for none. In a
            condition, the picture's tokens (B, tokens, picture) replace the pooled vector.
        masked: True if captions are in one sequence with the media, and attention excludes the captions' padding.
    """

    width: int
    layers: Literal["linear", "norm", "mlp", "none"] = "linear"
    multiple: int = 1
    pooled: int = 0
    picture: int = 0
    masked: bool = False


@dataclass(frozen=True)
class Stack:
    """Consecutive blocks with the same specification."""

    count: int
    block: BlockSpec


@dataclass(frozen=True)
class NetworkSpec:
    """The specification of a network.

    Attributes:
        channels: Number of channels of the latents.
        patch: Patch size, (frames, rows, columns) or (rows, columns).
        stacks: The blocks, as stacks of equal blocks.
        text: Embedding of captions.
        rotary: Rotary positions.
        channels_last: Order of a patch's values in the network's input and in its output: True if the channels come
            after the patch's axes, False if they come before.
        convolution: True if the weight of the patch embedding has a convolution's shape.
        order: Order of the streams in the joint sequence; () if captions are not in the sequence and blocks use
            cross-attention.
        media_refiner: Blocks that process only the media's tokens, before the streams are joined.
        text_refiner: Blocks that process only the captions' tokens, before the streams are joined.
        time_width: Width of the time's embedding and of the blocks' condition; 0 if equal to the blocks' width.
        time_hidden: Width between the two layers of the time's embedding.
        frequencies: Width of the time's sinusoids.
        reversed_time: True if the network's time is 1000 - t and the network predicts data - noise.
        time_unit: Divisor of the times before they are embedded.
        time_normed: True if the blocks' condition is the RMSNorm of the time's sinusoids, and the time's embedding
            serves as the modulation that all blocks share.
        guidance: True if the scale of guidance is embedded and added to the time's embedding.
        shared: Number of modulation vectors shared by all blocks; 0 for none.
        final: Names of the vectors of the final layer's modulation, in their order.
        final_table: True if the final layer's modulation is a learned table plus the time's embedding.
        final_rank: Rank of the final layer's modulation, which is added to the first of the ``shared`` vectors; None
            for a full-rank modulation that is not added to them.
        table: (side, unit) of a sine-cosine table of ``side`` x ``side`` patches, whose positions range from 0 to
            ``unit``. A picture uses the positions in the middle of the table. None without such a table.
        media_multiple: Media are padded with learned tokens to a multiple of this number.
        given: Number of channels after the latents, for models conditioned on the first frame: the repeated mask, and
            the latents of a clip that is grey after its first frame.
        zeros: Number of zero channels after the ``given`` channels. Their weights have no effect.
        bias: True if the layers outside of the blocks have biases. The blocks' options set the biases of blocks.
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
