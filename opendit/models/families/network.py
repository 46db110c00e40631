"""The network of a public model: embeddings, refiners, blocks and final layer, built from a specification.

The family's file converts ``config.json`` to the specification.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from opendit.models.attention import (
    Attention,
    CrossAttention,
    SequenceShards,
    TokenGrid,
    local_attention,
    of_rows,
)
from opendit.models.blocks import Block, Context, FinalLayer, Modulation, make_block, run_blocks
from opendit.models.conditioning import Condition, TextCondition, beside, in_place
from opendit.models.dit import DiT
from opendit.models.families.base import NetworkSpec, Stack, TextEmbedding
from opendit.models.families.public_config import PublicConfig, family_of
from opendit.models.initialization import Constant, Distribution, FanInUniform, Normal, canonical_name, initialize
from opendit.models.layers import Attend, BlockOps, RMSNorm, TimestepEmbedder
from opendit.models.positions import grid_coordinates, media_places, sincos_positions, text_places
from opendit.models.segments import Interleaved, PlacedSegments, Segments, Varlen


class PatchLinear(nn.Module):
    """Linear embedding of latents (B, C, ...) as tokens (B, N, D), one token per patch. A patch's values have the order
    of the published weights."""

    def __init__(self, spec: NetworkSpec, width: int):
        super().__init__()
        self.patch, self.channels_last, self.zeros = spec.patch, spec.channels_last[0], spec.zeros
        channels = spec.channels + spec.given + spec.zeros
        convolution: Any = {2: nn.Conv2d, 3: nn.Conv3d}[len(spec.patch)]
        self.proj: Any = (
            convolution(channels, width, spec.patch, stride=spec.patch)
            if spec.convolution
            else nn.Linear(channels * math.prod(spec.patch), width)
        )
        # Learned token that pads the media's tokens to a multiple of ``media_multiple``.
        self.filling: nn.Parameter | None = nn.Parameter(torch.zeros(1, width)) if spec.media_multiple > 1 else None

    def patches(self, x: Tensor) -> Tensor:
        """Return the values of the patches (B, N, C * prod(patch)), in the order and dtype of the weight."""
        axes = len(self.patch)
        sides = [part for side, p in zip(x.shape[2:], self.patch, strict=True) for part in (side // p, p)]
        grid, inside = list(range(2, 2 + 2 * axes, 2)), list(range(3, 3 + 2 * axes, 2))
        x = x.to(self.proj.weight.dtype).reshape(*x.shape[:2], *sides)
        order = [*grid, *inside, 1] if self.channels_last else [*grid, 1, *inside]
        return x.permute(0, *order).flatten(1 + axes).flatten(1, axes)

    def project(self, patches: Tensor) -> Tensor:
        if self.zeros:
            patches = nn.functional.pad(patches, (0, self.zeros * math.prod(self.patch)))
        return nn.functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class TextEmbedder(nn.Module):
    """Embedding of a caption's tokens (B, L, Dt) as (B, L, D); the identity for ``layers`` "none"."""

    def __init__(self, text: TextEmbedding, width: int, eps: float):
        super().__init__()
        self.norm: RMSNorm | None = RMSNorm(text.width, eps) if text.layers == "norm" else None
        made: dict[str, Callable[[], nn.Module]] = {
            "mlp": lambda: TextMlp(text.width, width, width),
            "none": nn.Identity,
        }
        self.mlp: nn.Module = made.get(text.layers, lambda: nn.Linear(text.width, width))()
        # Learned token that pads a caption's tokens to a multiple of ``multiple``.
        self.filling: nn.Parameter | None = nn.Parameter(torch.zeros(1, width)) if text.multiple > 1 else None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mlp(tokens if self.norm is None else self.norm(tokens))


class TextMlp(nn.Module):
    """MLP: linear, GELU (tanh approximation), linear."""

    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x), approximate="tanh"))


class PictureEmbedder(nn.Module):
    """Embedding of a picture's tokens (B, I, P) as (B, I, D): LayerNorm, linear, GELU, linear, LayerNorm."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(inputs), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(inputs, inputs), nn.Linear(inputs, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm2(self.fc2(nn.functional.gelu(self.fc1(self.norm1(tokens.to(self.fc1.weight.dtype))))))


class VectorEmbedder(nn.Module):
    """Embedding of a vector (B, P) as (B, D): linear, SiLU, linear."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.mlp: nn.Sequential = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, vector: Tensor) -> Tensor:
        return self.mlp(vector.to(cast(nn.Linear, self.mlp[0]).weight.dtype))


class PublicDiT(DiT):
    """The network of a public model, with the interface of :class:`DiT`: t is in [0, 1000], and y is a TextCondition.
    For every family it predicts the velocity, noise - data."""

    config: PublicConfig

    def __init__(self, config: PublicConfig):
        nn.Module.__init__(self)
        config.check()
        self.config, spec = config, config.spec
        width, eps = spec.block.width, spec.block.eps
        condition = spec.time_width or width
        self.x_embedder = cast(Any, PatchLinear(spec, width))
        start = 1000.0 if spec.reversed_time else None
        embedded, how = (spec.shared * width if spec.time_normed else condition), (start, spec.time_unit)
        self.t_embedder = TimestepEmbedder(embedded, spec.frequencies, spec.time_hidden, *how, spec.time_normed)
        if spec.guidance:
            self.guidance_embedder = TimestepEmbedder(condition, spec.frequencies, spec.time_hidden)
        if spec.text.pooled:
            self.pooled_embedder = VectorEmbedder(spec.text.pooled, condition)
        self.text_embedder = TextEmbedder(spec.text, width, eps)
        if spec.text.picture:
            self.picture_embedder = PictureEmbedder(spec.text.picture, width)
        if spec.media_refiner is not None:
            self.media_refiner = nn.ModuleList(self._blocks(spec.media_refiner))
        if spec.text_refiner is not None:
            self.text_refiner = nn.ModuleList(self._blocks(spec.text_refiner))
        self.shared_modulation: nn.Sequential | None = (
            nn.Sequential(nn.SiLU(), nn.Linear(condition, spec.shared * width))
            if spec.shared and not spec.time_normed
            else None
        )
        self.blocks: Any = nn.ModuleList(make_block(block) for block in spec.blocks)
        out = math.prod(spec.patch) * spec.channels
        self.final_layer = FinalLayer(width, out, spec.final, spec.final_table, condition, spec.final_rank)
        if not spec.bias:
            for layer in self.modules():
                if isinstance(layer, nn.Linear):
                    layer.register_parameter("bias", None)
        self.learned_positions = self.text_encoder = None
        self.ops = BlockOps()
        self.grad_checkpoint = self.modulate_in_blocks = False
        self.sequence: Any = None
        self.fusion = None
        self.second: PublicDiT | None = None  # in sampling, the network for times below ``config.boundary``
        if self.device.type != "meta":
            initialize(self, seed=int(torch.randint(2**62, (), device="cpu")))

    def _blocks(self, stack: Stack) -> list[nn.Module]:
        return [make_block(stack.block) for _ in range(stack.count)]

    def initial_distributions(self) -> dict[str, Distribution]:
        """Return a distribution for every parameter: N(0, 0.02^2) for matrices, 1 for norms and 0 for biases. LoRA's
        matrices: see :meth:`DiT.initial_distributions`."""
        found: dict[str, Distribution] = {"**.lora_A.*.weight": FanInUniform()}
        found["**.lora_B.*.weight"] = Constant(0)
        for wrapped, parameter in self.named_parameters():
            name = canonical_name(wrapped)
            if ".lora_" in name:
                continue
            norm = "norm" in name.rpartition(".")[0].rpartition(".")[2]
            matrix = parameter.dim() > 1 and not name.endswith(("filling", "table"))
            found[name] = Constant(1) if norm and name.endswith("weight") else Normal(0.02) if matrix else Constant(0)
        return found

    def use(
        self,
        *,
        ops: BlockOps | None = None,
        attend: Attend | None = None,
        varlen: Varlen | None = None,
        sequence: Callable[[int, tuple[int, ...]], SequenceShards] | None = None,
    ) -> "PublicDiT":
        self.sequence = sequence
        refiners = (getattr(self, name, ()) for name in ("media_refiner", "text_refiner"))
        for part in (*self.blocks, self.final_layer, *chain.from_iterable(map(_parts_of, refiners))):
            part.ops = ops or BlockOps()
        for module in self.modules():
            if isinstance(module, Attention | CrossAttention):
                module.attend = attend or local_attention
            if isinstance(module, Attention):
                module.varlen = varlen
        self.ops = ops or BlockOps()
        if self.second is not None:
            self.second.use(ops=ops, attend=attend, varlen=varlen, sequence=sequence)
        return self

    def fill_tables(self, device: torch.device | None = None) -> None:
        """Do nothing, because these models have no position tables as buffers."""

    def positions(self, grid: tuple[int, ...]) -> Tensor | None:
        """Return the positions (1, N, D) fp32 to add to a picture's tokens; None for models without a position table.
        :meth:`places` computes rotations."""
        if self.config.spec.table is None:
            return None

        def made() -> Tensor:
            return self._positions_in_middle(grid_coordinates(*grid, device=self.device), grid)

        return self._made_once(("table", grid), made)

    def _positions_in_middle(self, coordinates: Tensor, grid: tuple[int, ...] | Tensor) -> Tensor:
        """Return the positions (1, N, D) of patches at coordinates (N, 2). grid: size (2,) of the grid, or (N, 2) for
        each patch's grid. Raises ValueError for pictures that are larger than the table."""
        side, unit = cast(tuple[int, int], self.config.spec.table)
        sides = torch.as_tensor(grid, device=coordinates.device)
        self.config.check_side(int(sides.max()))
        at = (coordinates + (side - sides) // 2).to(torch.float32) / (side / unit)
        return sincos_positions(at, self.config.hidden_size).unsqueeze(0)

    def rotations(self, grid: tuple[int, ...]) -> Tensor | None:
        """Return the rotations of the media's tokens (see :class:`Rotary`), for sequences without captions."""
        rotary = self.config.spec.rotary

        def made() -> Tensor:
            at = grid_coordinates(*grid, device=self.device)
            # A picture's coordinates lack the frame, so prepend 0.
            at = nn.functional.pad(at, (max(0, len(rotary.channels) - at.shape[-1]), 0))
            return cast(Tensor, rotary.table(at, self.config.hidden_size))

        return self._made_once(("rope", grid), made)

    def _of_projections(self, table: Tensor | None, shards: SequenceShards | None) -> Tensor | None:
        """Select the rotations for the tokens and heads that this rank projects. A table that all heads share is
        returned unchanged."""
        if table is None or shards is None or not self.config.spec.rotary.steps:
            return table
        return shards.of_projections(table.flatten(1)).unflatten(1, (-1, 2))

    # ------------------------------------------------------------------------------------------------------ conditions

    def embed_condition(self, y: Condition) -> tuple[Tensor, Context | None]:
        """Embed captions. Return the vector to add to the time's embedding, and the tokens (B, L, D) with the captions'
        mask. A picture's tokens precede the captions' tokens and have no mask."""
        assert isinstance(y, TextCondition), "a public model is conditioned on captions"
        spec, dtype = self.config.spec, cast(nn.Linear, self.t_embedder.mlp[0]).weight.dtype
        width = 1 if spec.time_normed else spec.time_width or spec.block.width
        vector = torch.zeros(len(y.pooled), width, dtype=dtype, device=y.tokens.device)
        if spec.text.pooled:
            vector = vector + self.pooled_embedder(y.pooled)
        if spec.guidance:
            scale = y.guidance if y.guidance is not None else self._usual_guidance(len(y.pooled), y.tokens.device)
            vector = vector + self.guidance_embedder(scale * 1000)
        tokens, mask = self._text(y.tokens.to(dtype), y.mask, y.shortest)
        if spec.text.picture:
            tokens = torch.cat([self.picture_embedder(y.pooled), tokens], dim=1)
        return vector, (tokens, mask)

    def _usual_guidance(self, count: int, device: torch.device) -> Tensor:
        return torch.full((count,), family_of(self.config.family).guidance.scale, device=device)

    def _text(self, tokens: Tensor, mask: Tensor, shortest: int) -> tuple[Tensor, Tensor]:
        """Embed and refine the captions' tokens. Return the tokens and a mask (B, L) bool, True for tokens to attend
        to; (B, 0) if all are True."""
        spec, embed = self.config.spec, self.text_embedder
        # True if this pipeline stage is not the first and has no caption embedder.
        elsewhere = not hasattr(embed, "mlp")
        if spec.text.multiple == 1 and not spec.text.masked:
            return tokens if elsewhere else embed(tokens), mask[:, :0] if spec.order else mask
        tokens = nn.functional.pad(tokens, (0, 0, 0, -tokens.shape[1] % spec.text.multiple))
        length = tokens.shape[1]
        lengths = mask.sum(1)
        place = torch.arange(length, device=tokens.device)
        keys = place < _round_up(lengths, spec.text.multiple)[:, None]
        if length <= spec.text.multiple or _round_up(shortest, spec.text.multiple) >= length:
            keys = keys[:, :0]
        if elsewhere:
            return tokens, keys
        x = embed(tokens)
        if embed.filling is not None:
            x = torch.where((place < lengths[:, None]).unsqueeze(-1), x, embed.filling)
        if spec.text_refiner is not None:
            ids = torch.zeros(len(x), length, len(spec.rotary.channels), device=x.device)
            ids[..., 0] = place + spec.rotary.first
            alone = keys if keys.shape[1] else None
            grid = TokenGrid((length,), spec.rotary.table(ids, self.config.hidden_size), keys=alone)
            nothing = [x.new_zeros(len(x), 0)] * spec.text_refiner.count
            x = run_blocks(cast(Any, self.text_refiner), x, nothing, None, grid, checkpointed=self.checkpointed)
        return x, keys

    def contexts(self, context: Context | None) -> list[Context] | None:
        if self.config.spec.order:
            return None if context is None else [context]
        return super().contexts(context)

    def modulations(self, c: Tensor, blocks: Iterable[Block] | None = None, first: bool = True) -> Iterator[Modulation]:
        """Yield modulations for the media refiner's blocks (if ``first``), for the blocks, and for the final layer."""
        shared = None if self.shared_modulation is None else self.shared_modulation(c)
        spec, of_final = self.config.spec, None
        if spec.time_normed:
            shared, c = c.split((spec.shared * spec.block.width, spec.frequencies), dim=1)
            of_final = shared[:, : len(spec.final) * spec.block.width]
        refiner = self.media_refiner if first and spec.media_refiner is not None else ()
        for block in [*cast(Any, refiner), *(self.blocks if blocks is None else blocks)]:
            yield (c, shared) if self.modulate_in_blocks else block.modulate(c, shared)
        yield self.final_layer.modulate(c, of_final)

    # ----------------------------------------------------------------------------------------------------- one forward

    def forward(self, x: Tensor, t: Tensor, y: Condition, segments: Segments | None = None) -> Tensor:
        """Predict the velocity, noise - data, of noised latents; see :meth:`DiT.forward`.

        Args:
            t: (B,) times from 0 to 1000 (pure noise), or (B, T) if some frames are conditioning frames (see
                ``times_of_frames``).
            y: a TextCondition.
        """
        c, context = self.condition(t, y)
        if segments is not None:
            return self._predict_pack(x, self.modulations(c), context, segments)
        return self.predict(x, self.modulations(c), context)

    def condition(self, t: Tensor, y: Condition) -> tuple[Tensor, Context | None]:
        vector, context = self.embed_condition(y)
        if t.dim() > 1:  # (B, T) becomes (B T,), sample after sample
            vector, t = vector.repeat_interleave(t.shape[1], dim=0), t.flatten()
        return self.t_embedder(t) + vector, context

    def predict(
        self,
        x: Tensor,
        modulations: Iterable[Modulation],
        context: Any = None,
        positions: Tensor | None = None,
        run: Callable[..., Tensor] = run_blocks,
    ) -> Tensor:
        modulations = iter(modulations)
        tokens, grid = self.enter(x, modulations, context)
        across = None if self.config.spec.order else context
        tokens = run(self.blocks, tokens, modulations, across, grid, checkpointed=self.checkpointed)
        return self.leave(tokens, next(modulations), grid)

    def enter(self, x: Tensor, modulations: Iterator[Modulation], context: Any) -> tuple[Tensor, TokenGrid]:
        """Embed latents x (B, C, ...) as tokens (B, N, D) for the first block. If captions are in the sequence, their
        tokens are included. Return the tokens and their grid. The media refiner's modulations are consumed."""
        spec = self.config.spec
        by_frame = x.shape[1] > spec.channels and not spec.given
        if by_frame:
            x = in_place(x, spec.channels)
        elif spec.given:
            x = beside(x, spec.channels, spec.given)
        grid, alone = self.places(tuple(x.shape[2:]), context, len(x), by_frame)
        embed = cast(PatchLinear, self.x_embedder)
        media = embed.project(embed.patches(x))
        if (positions := self.positions(grid.sizes)) is not None:
            media = self.ops.add_table(media, positions)
        filling, count = embed.filling, -media.shape[1] % spec.media_multiple
        if filling is not None and count:
            media = torch.cat([media, filling.to(media.dtype).expand(len(media), count, -1)], dim=1)
        if alone.shards is not None:
            media = alone.shards.take(media)
        media = self._refined(media, modulations, alone)
        if not spec.order:
            return media, grid
        text, _ = _of_context(context)
        if grid.shards is not None:
            text = grid.shards.take_stream(spec.order.index("text"), text)
        parts = {"text": text, "media": media}
        return torch.cat([parts[name] for name in spec.order], dim=1), grid

    def _refined(self, media: Tensor, modulations: Iterator[Modulation], alone: TokenGrid) -> Tensor:
        """Run the media refiner, if the model has one, on tokens (B, n, D). The refiner's modulations are consumed."""
        refiner = self.config.spec.media_refiner
        if refiner is None:
            return media
        m = [next(modulations) for _ in range(refiner.count)]
        return run_blocks(cast(Any, self.media_refiner), media, m, None, alone, checkpointed=self.checkpointed)

    def places(
        self, size: tuple[int, ...], context: Any, batch: int, by_frame: bool = False
    ) -> tuple[TokenGrid, TokenGrid]:
        """Return two grids for latents of this size: for all tokens, and for only the media's tokens. by_frame: True if
        each frame has separate modulation vectors."""
        spec, device, sizes = self.config.spec, self.device, self.config.grid_of(size)
        media = -(-math.prod(sizes) // spec.media_multiple) * spec.media_multiple
        text, keys = _of_context(context) if spec.order else (None, None)
        rotary, order = spec.rotary, spec.order
        if text is None or keys is None:
            shards = None if self.sequence is None else self.sequence(media, sizes)
            vectors = self._vectors_of_frames(sizes, batch, shards) if by_frame else None
            turns = self._of_projections(self.rotations(sizes), shards)
            grid = TokenGrid(sizes, turns, shards=shards, vectors=vectors)
            return grid, grid
        length, lengths = text.shape[1], keys.sum(1, keepdim=True) if keys.shape[1] else text.shape[1]
        coordinates = grid_coordinates(*sizes, device=device)
        # computed on the device, because a CUDA graph can't record a copy from the host
        sides = coordinates[-1, -2:] + 1
        places = media_places(rotary, coordinates, sides)
        at = nn.functional.pad(places, (0, 0, 0, media - len(places)))
        text_at = text_places(rotary, length, sides)
        mask = None
        if keys.shape[1]:
            mask = torch.cat([{"text": keys, "media": keys.new_ones(batch, media)}[name] for name in order], dim=1)
        if rotary.text == "count":
            at = at.expand(batch, -1, -1).clone()
            at[:, : len(places), 0] += lengths + rotary.first
            text_at = text_at.expand(batch, -1, -1)
        parts = {"text": text_at, "media": at}
        table = rotary.table(torch.cat([parts[name] for name in order], dim=-2), self.config.hidden_size)
        counts = {"text": length, "media": media}
        streams = tuple(counts[name] for name in order)
        shards = alone = None
        if self.sequence is not None:
            shards = self.sequence.of_streams(streams)
            alone = self.sequence(media, sizes)
            streams = shards.rows_of_streams
        media_table = rotary.table(at, self.config.hidden_size)
        return (
            TokenGrid(sizes, table, shards=shards, streams=streams, keys=mask),
            TokenGrid(sizes, media_table, shards=alone),
        )

    def _vectors_of_frames(self, sizes: tuple[int, ...], batch: int, shards: SequenceShards | None) -> Tensor:
        """Return the index of each token's modulation vector, (B, n) int64, for this rank's tokens. The vectors are
        numbered by frame, sample after sample."""
        frames = torch.arange(sizes[0], device=self.device).repeat_interleave(math.prod(sizes[1:]))
        # In a shard's padding the index is 0; cummax replaces it by the preceding token's index.
        if shards is not None:
            frames = shards.take(frames.view(1, -1, 1)).flatten().cummax(0).values
        return torch.arange(batch, device=self.device)[:, None] * sizes[0] + frames

    def leave(self, x: Tensor, m: Modulation, grid: TokenGrid) -> Tensor:
        spec = self.config.spec
        if spec.order:
            x = x.split(grid.streams, dim=1)[spec.order.index("media")]
        y = self.final_layer(x, cast(Tensor, m), of_rows(grid))
        if grid.shards is not None:
            joint = grid.shards
            y = joint.gather_stream(spec.order.index("media"), y) if spec.order else joint.gather(y)
        y = self.unpatchify(y[:, : math.prod(grid.sizes)], grid.sizes)
        return -y if spec.reversed_time else y

    def unpatchify(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Rearrange tokens (B, N, C * prod(patch)) to (B, C, ...). A patch's values have the published order."""
        patch, axes, spec = self.config.patch, len(grid), self.config.spec
        if spec.channels_last[1]:
            return super().unpatchify(x, grid)
        x = x.view(x.shape[0], *grid, spec.channels, *patch)
        order = [axis for i in range(axes) for axis in (1 + i, 2 + axes + i)]
        sides = (g * p for g, p in zip(grid, patch, strict=True))
        return x.permute(0, 1 + axes, *order).reshape(x.shape[0], spec.channels, *sides)

    # --------------------------------------------------------------------------------------------------------- packs

    def _predict_pack(
        self,
        x: Tensor,
        modulations: Iterable[Modulation],
        context: Context | None,
        segments: Segments,
        run: Callable[..., Tensor] = run_blocks,
    ) -> Tensor:
        spec, embed = self.config.spec, cast(PatchLinear, self.x_embedder)
        if not spec.order:
            return super()._predict_pack(x, modulations, context, segments, run)
        self._check_pack(x, segments)
        modulations, (text, keys) = iter(modulations), _of_context(context)
        pack = self._joint_pack(segments, text, keys)
        # Omit the pack's padding, because no token attends to it.
        patches = self._input_patches(x[: segments.filled]).unsqueeze(0)
        media = embed.project(patches.to(embed.proj.weight.dtype))
        if spec.table is not None:
            placed, sizes = segments.place(media.device), torch.tensor(segments.grids, device=media.device)[:, -2:]
            at = placed.coordinates()[: segments.filled, -2:]
            media = self.ops.add_table(media, self._positions_in_middle(at, sizes[pack.sample_of_row]))
        if pack.filled is not None:
            filling = cast(Tensor, embed.filling).to(media.dtype).expand(1, pack.filled.totals[1], -1)
            media = pack.filled.join([media, filling])
        parts = {"media": self._refined(media, modulations, pack.alone), "text": pack.without_padding(text)}
        tokens, grid = pack.grid.join([parts[name] for name in spec.order]), pack.grid
        tokens = run(self.blocks, tokens, modulations, None, grid, checkpointed=self.checkpointed)
        media = grid.split(tokens)[spec.order.index("media")]
        if pack.filled is not None:
            media = pack.filled.split(media)[0]
        y = self.final_layer(media, cast(Tensor, next(modulations)), (pack.sample_of_row,)).squeeze(0)
        y = self._output_patches(nn.functional.pad(y, (0, 0, 0, segments.tokens - segments.filled)))
        return -y if spec.reversed_time else y

    def _joint_pack(self, segments: Segments, text: Tensor, keys: Tensor) -> "JointPack":
        """Return the layout of a pack with captions in the sequence. If ``keys`` is not empty, this method waits for
        the device.

        Args:
            text: (S, L, D), the captions' tokens.
            keys: (S, L) bool, True for tokens that are in the sequence; (S, 0) for all.
        """
        spec, rotary, device = self.config.spec, self.config.spec.rotary, text.device
        count, length, axes = len(text), text.shape[1], len(spec.rotary.channels)
        own = keys.sum(1) if keys.shape[1] else None
        captions = [length] * count if own is None else own.tolist()
        filling = [-tokens % spec.media_multiple for tokens in segments.lengths]
        media = [tokens + more for tokens, more in zip(segments.lengths, filling, strict=True)]
        lengths = {"text": captions, "media": media}
        padding = [length - tokens for tokens in captions]
        padded = Interleaved.of([captions, padding], device) if any(padding) else None
        filled = Interleaved.of([segments.lengths, filling], device) if any(filling) else None
        joint = Interleaved.of([lengths[name] for name in spec.order], device)

        placed = segments.place(device)
        sample_of_row = placed.sample_of_row[: segments.filled]
        sides = torch.tensor([grid[1:] for grid in segments.grids], device=device)
        at = media_places(rotary, placed.coordinates()[: segments.filled], sides[sample_of_row]).unsqueeze(0)
        text_at = text_places(rotary, length, sides).expand(count, -1, -1).reshape(1, count * length, axes)
        if rotary.text == "count":
            at[..., 0] += (length if own is None else own[sample_of_row]) + rotary.first
        if filled is not None:
            at = filled.join([at, at.new_zeros(1, sum(filling), axes)])
        places = {"text": text_at if padded is None else padded.split(text_at)[0], "media": at}

        def grid_of(at: Tensor, lengths: list[int], **how: Any) -> TokenGrid:
            own = Segments(tuple((1, 1, tokens) for tokens in lengths), sum(lengths)).place(device)
            return TokenGrid((sum(lengths),), rotary.table(at[0], self.config.hidden_size), packed=own, **how)

        whole = [text + media for text, media in zip(captions, media, strict=True)]
        at_joint = joint.join([places[name] for name in spec.order])
        grid = grid_of(at_joint, whole, streams=joint.totals, interleaved=joint)
        return JointPack(grid, grid_of(at, media), filled, padded, sample_of_row)

    def _output_patches(self, y: Tensor) -> Tensor:
        if self.config.spec.channels_last[1]:
            return super()._output_patches(y)
        return y.view(len(y), self.config.out_channels, *self.config.patch)

    def _input_patches(self, x: Tensor) -> Tensor:
        return (x.movedim(1, -1) if self.config.spec.channels_last[0] else x).flatten(1)

    def _embed_pack(self, x: Tensor, packed: PlacedSegments) -> tuple[Tensor, TokenGrid]:
        tokens, grid = super()._embed_pack(x, packed)
        return tokens, replace(grid, rotary=self._of_projections(grid.rotary, grid.shards))

    def _segment_rotations(self, packed: PlacedSegments) -> Tensor | None:
        rotary = self.config.spec.rotary
        axes = len(rotary.channels or rotary.steps)
        return rotary.table(packed.coordinates()[:, -axes:], self.config.hidden_size)


@dataclass(frozen=True, eq=False)
class JointPack:
    """The layout of a pack with each sample's caption in the sequence."""

    grid: TokenGrid  # all tokens
    alone: TokenGrid  # only the media tokens
    filled: Interleaved | None  # order of media tokens and their learned padding; None without padding
    padded: Interleaved | None  # order of captions and their padding; None without padding
    sample_of_row: Tensor  # (n,) the sample of each media token

    def without_padding(self, text: Tensor) -> Tensor:
        tokens = text.flatten(0, 1).unsqueeze(0)
        return tokens if self.padded is None else self.padded.split(tokens)[0]


def _of_context(context: Any) -> tuple[Tensor, Tensor]:
    """Return a caption's tokens and mask. context: this pair, a list of pairs for all blocks, or an object whose method
    ``of`` returns the pair for some blocks."""
    if isinstance(context, list):
        context = context[0]
    return context if isinstance(context, tuple) else context.of(slice(0, 1))


def _parts_of(modules: Any) -> Iterable[Any]:
    """Return the modules of a ``ModuleList``, or () if another pipeline stage has the list."""
    return modules if isinstance(modules, nn.ModuleList) else ()


def _round_up(numbers: Any, multiple: int) -> Any:
    return (numbers + multiple - 1) // multiple * multiple
