"""DiT: a Transformer that denoises latent patches (Peebles & Xie, "Scalable Diffusion Models with Transformers", ICCV
2023). adaLN-Zero conditions the blocks on the timestep and on a class or caption.

Parameters have the names in Meta's release, so that Meta's checkpoints load strictly.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from opendit.models.attention import Attention, SequenceShards, TokenGrid, local_attention, of_rows
from opendit.models.auxiliary import Fusion, Projector, Uncertainty, run_routed, run_tapped
from opendit.models.blocks import Block, Context, FinalLayer, Modulation, ResidualStream, run_blocks
from opendit.models.conditioning import BytesEncoder, CaptionEmbedder, Condition
from opendit.models.configuration import DiTConfig, times
from opendit.models.initialization import (
    Constant,
    Distribution,
    FanInUniform,
    Normal,
    XavierUniform,
    initial_attention,
    initialize,
)
from opendit.models.layers import BlockOps, LabelEmbedder, Options, PatchEmbed, TimestepEmbedder, modulation
from opendit.models.positions import LearnedPositions, grid_coordinates, rotary_table, sincos_position_table
from opendit.models.segments import PlacedSegments, Segments, Varlen

if TYPE_CHECKING:
    from opendit.models.blocks import Blocks


class DiT(nn.Module):
    """Diffusion Transformer on latents of pictures (B, C, H, W) or clips (B, C, T, H, W). Latents may have the
    configured size or any size that the patch divides. Subclasses for other architectures use other blocks. Weights and
    activations may be fp32, bf16 or fp16; timesteps and fixed positions are always fp32."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        config.check()
        self.config = config
        dim, text = config.hidden_size, config.text
        self.x_embedder: PatchEmbed = PatchEmbed(
            config.patch, config.in_channels, dim, config.given_channels, config.patch_bottleneck
        )
        self.t_embedder: TimestepEmbedder = TimestepEmbedder(dim)
        self.text_encoder: BytesEncoder | None = BytesEncoder(text) if text and text.inside else None
        # only used without ``text``; num_classes is then not None
        classes = cast(int, config.num_classes), dim, config.null_class
        self.y_embedder: CaptionEmbedder | LabelEmbedder = (
            CaptionEmbedder(text, dim) if text else LabelEmbedder(*classes)
        )
        # Learned positions or fixed tables for the configured size. Rotary positions need neither.
        self.learned_positions: LearnedPositions | None = (
            LearnedPositions(config.grid, dim) if config.positions == "learned" else None
        )
        self.fill_tables()
        self.register_load_state_dict_post_hook(_compute_tables)
        self.shared_modulation: nn.Sequential | None = (
            modulation(dim, config.block.chunks, Options(config.bias)) if config.shared_modulation else None
        )
        self.blocks: Blocks = cast("Blocks", nn.ModuleList(self.make_block() for _ in range(config.depth)))
        self.final_layer: FinalLayer = FinalLayer(dim, math.prod(config.patch) * config.out_channels)
        # Projector of intermediate tokens for representation alignment (--repa).
        self.projector: Projector | None = None if config.alignment is None else Projector(dim, config.alignment)
        # After a SPRINT route (--route ...:sprint), joins the route's output to its input.
        self.fusion: Fusion | None = None if config.sprint is None else Fusion(dim)
        self.uncertainty: Uncertainty | None = Uncertainty() if config.uncertainty else None
        self.ops: BlockOps = BlockOps()
        self.grad_checkpoint: bool | str = False  # True, or "but_attention": see :attr:`checkpointed`
        # True to compute modulations inside the blocks. Sharding needs this: a block's weights are present only during
        # its call.
        self.modulate_in_blocks = False
        # (token count, grid) -> division of the sequence over ranks; None for one rank
        self.sequence: Callable[[int, tuple[int, ...]], SequenceShards] | None = None
        # First block of the route, and first block after the route. The route's blocks process only ``kept`` tokens.
        self.route: tuple[int, int] | None = config.sprint
        if self.device.type != "meta":
            initialize(self, seed=int(torch.randint(2**62, (), device="cpu")))

    @property
    def no_graph(self) -> str:
        """Reason why a CUDA graph can't record the forward pass; "" if it can."""
        if self.config.block.experts is None or self.sequence is None or not self.sequence.shares_samples:
            return ""
        return "the host reads how many tokens of an expert each rank has (--sequence_parallel_size)"

    @property
    def checkpointed(self) -> bool | str:
        """The argument ``checkpointed`` of ``run_blocks``: ``grad_checkpoint``, or False if no gradients are needed."""
        return torch.is_grad_enabled() and self.grad_checkpoint

    def make_block(self) -> Block:
        return Block(self.config.block)

    def initial_distributions(self) -> dict[str, Distribution]:
        """Map patterns of parameter names to the distributions of initial values. Each name matches one pattern.

        This is Meta's initialisation: N(0, 0.02^2) for embedders, zero for modulation and output, and Xavier for the
        rest. Cross-attention without a gate begins with a zero output projection. If the gate and the projection were
        both zero, neither would get a gradient.
        """
        xavier, embedder, zero, one = XavierUniform(), Normal(0.02), Constant(0), Constant(1)
        full = self.config.adaln_lora is None
        blocks: dict[str, Distribution] = {}
        for branch in self.config.branches:
            blocks[f"blocks.*.{branch.norm}.weight"] = one
            if branch.sees is not None:
                blocks |= initial_attention(f"blocks.*.{branch.name}", xavier if branch.modulated else zero)
        return {
            "**.bias": zero,
            "x_embedder.*.weight": xavier,
            "projector.layers.*.weight": xavier,
            "uncertainty.linear.weight": zero,
            "fusion.mask_token": embedder,
            "fusion.linear.weight": xavier,
            "t_embedder.mlp.*.weight": embedder,
            "y_embedder.embedding_table.weight": embedder,
            "y_embedder.mlp.*.weight": xavier,
            "y_embedder.tokens.weight": xavier,
            "text_encoder.embedding.weight": Normal(1),
            "text_encoder.blocks.*.*.*.weight": xavier,
            "learned_positions.axes.*.weight": embedder,
            "shared_modulation.1.weight": zero,
            **blocks,
            "blocks.*.adaLN_modulation.1.weight": zero if full else xavier,
            "blocks.*.adaLN_modulation.2.weight": zero,
            "blocks.*.mlp.fc1.weight": xavier,
            "blocks.*.mlp.fc2.weight": xavier,
            "blocks.*.mlp.router.weight": xavier,
            "blocks.*.mlp.expert_fc1": XavierUniform(stacked=True),
            "blocks.*.mlp.expert_fc2": XavierUniform(stacked=True),
            "final_layer.adaLN_modulation.1.weight": zero,
            "final_layer.linear.weight": zero,
            "**.lora_A.default.weight": FanInUniform(),  # peft's initialisation of LoRA (--lora)
            "**.lora_B.default.weight": zero,
        }

    def use(
        self,
        *,
        ops: BlockOps | None = None,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        varlen: Varlen | None = None,
        sequence: Callable[[int, tuple[int, ...]], SequenceShards] | None = None,
    ) -> "DiT":
        """Replace torch expressions by kernels or by a parallel strategy; return self. With ``sequence``, ranks divide
        each sample's tokens. All ranks pass equal inputs and get the complete output. A rank's gradients come from the
        rank's tokens only, and are multiplied by the number of ranks."""
        self.sequence = sequence
        for part in (self, *self.blocks, self.final_layer):
            part.ops = ops or BlockOps()
        for module in self.blocks.modules():
            if isinstance(module, Attention):
                module.attend, module.varlen = attend or local_attention, varlen
        return self

    def compile_blocks(self, **options: Any) -> None:
        """Apply torch.compile to the blocks and the final layer, in place. All blocks share one compiled graph for each
        input shape."""
        for part in (*self.blocks, self.final_layer):
            part.compile(dynamic=False, **options)

    def place(self, device: torch.device | str, dtype: torch.dtype) -> "DiT":
        """Move the model to ``device`` and its weights to ``dtype``; position tables stay fp32. Return self."""
        tables = {name: table.to(device) for name, table in self.named_buffers()}
        self.to(device, dtype)
        for name, table in tables.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, table)
        return self

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Condition,
        segments: Segments | None = None,
        kept: Tensor | None = None,
        dropped: Tensor | None = None,
        aligned: bool = False,
        uncertain: bool = False,
    ) -> Any:
        """Compute the network's output for noised latents: (B, out_channels, H, W) or (B, out_channels, T, H, W) in the
        weights' dtype.

        A picture is a clip with T = 1. If the patch has several frames, the noised frame is repeated to fill the patch,
        and the prediction is the mean over the repeats.

        Args:
            x: (B, C, H, W) or (B, C, T, H, W) noised latents in any float dtype, or the result of ``with_given``.
            t: (B,) timesteps, or (B, K) to add the embeddings of K timesteps per sample.
            y: (B,) int64 labels; label ``num_classes`` is the null class, if there is one. For a text model a
                TextCondition, or token ids (B, L) int64 if the model contains the bytes encoder.
            segments: Segments of a pack. x and the result are then patches (N, C, *patch), and t and y have one row per
                segment.
            kept: (B, n) int64, indices of the tokens that the blocks of ``route`` process; None for all tokens. For a
                pack (1, n), with each segment's count in ``segments.kept``.
            dropped: (B,) bool for samples or a pack's segments: True to replace the tokens after the route by mask
                tokens (only with ``sprint``). None to replace none.
            aligned: True to also return the projected tokens (B, N, width) for representation alignment.
            uncertain: True to also return u(t) from :class:`~opendit.models.auxiliary.Uncertainty`, (B,) fp32.

        Raises ValueError if the patch does not divide a side.
        """
        c, context = self.condition(t, y)
        more: list[Tensor] = []
        run = self._runs(kept, dropped, aligned, x, more.append)
        if segments is not None:
            output = self._predict_pack(x, self.modulations(c), context, segments, run)
        else:
            output = self.predict(x, self.modulations(c), context, run=run)
        if uncertain:
            assert self.uncertainty is not None, "a model of --uncertainty_weighting"
            more.append(self.uncertainty(t))
        return (output, *more) if more else output

    def _runs(
        self,
        kept: Tensor | None,
        dropped: Tensor | None,
        aligned: bool,
        x: Tensor,
        take: Callable[[Tensor], None],
    ) -> Callable[..., Tensor]:
        """Return a function that runs the blocks like ``run_blocks``, for these arguments of :meth:`forward`. take:
        called with the projected tokens if ``aligned``."""
        route = self.route if kept is not None or self.fusion is not None else None
        routed = partial(run_routed, kept=kept, fusion=self.fusion, dropped=dropped)
        if not aligned:
            return run_blocks if route is None else partial(routed, route=route)
        assert self.projector is not None and self.config.alignment is not None, "a model of --repa"
        at, project, grid = self.config.alignment.block, self.projector, self.config.grid_of(tuple(x.shape[2:]))
        below = above = run_blocks
        if route is not None and route[1] <= at:
            below = partial(routed, route=route)
        elif route is not None:
            above = partial(routed, route=(route[0] - at, route[1] - at))
        tap = lambda tokens: take(project(tokens, grid))  # noqa: E731
        return partial(run_tapped, at=at, take=tap, below=below, above=above)

    def embed_condition(self, y: Condition) -> tuple[Tensor, Context | None]:
        """Embed a condition. Return the vector (B, D) to add to the time's embedding, and the context for blocks with
        cross-attention."""
        if self.config.text is None:
            return self.y_embedder(y), None
        return self.y_embedder(y if self.text_encoder is None else self.text_encoder(y))

    def condition(self, t: Tensor, y: Condition) -> tuple[Tensor, Context | None]:
        vector, context = self.embed_condition(y)
        return self.embed_time(t) + vector, context

    def embed_time(self, t: Tensor) -> Tensor:
        """Embed times (B,) as (B, D). For times (B, K), add each sample's K embeddings."""
        return self.t_embedder(t) if t.dim() == 1 else self.t_embedder(t.flatten()).unflatten(0, t.shape).sum(1)

    def contexts(self, context: Context | None) -> list[Context] | None:
        """Compute every block's keys and values for a context, to reuse them in several calls of :meth:`predict`."""
        return None if context is None else [cast(Context, block.keys_values(context)) for block in self.blocks]

    def modulations(self, c: Tensor, blocks: Iterable[Block] | None = None, first: bool = True) -> Iterator[Modulation]:
        """Yield each block's modulation, then the final layer's, for the condition c (B, D). They are computed on
        demand. With ``modulate_in_blocks``, a block gets the pair (c, shared).

        Args:
            blocks: None for all.
            first: True if the blocks begin with the model's first block. Subclasses then also yield their refiners'
                modulations.
        """
        shared = None if self.shared_modulation is None else self.shared_modulation(c)
        for block in self.blocks if blocks is None else blocks:
            yield (c, shared) if self.modulate_in_blocks else block.modulate(c, shared)
        yield self.final_layer.modulate(c)

    def predict(
        self,
        x: Tensor,
        modulations: Iterable[Modulation],
        context: Context | list[Context] | None = None,
        positions: Tensor | None = None,
        run: Callable[..., Tensor] = run_blocks,
    ) -> Tensor:
        """Compute the result of :meth:`forward` for x.

        Args:
            modulations: result of :meth:`modulations`.
            context: result of :meth:`condition` or :meth:`contexts`.
            positions: result of :meth:`positions`; None to compute it here.
            run: function with the signature of ``run_blocks``.
        """
        repeats = self.config.patch[0] if x.shape[2:-2] == (1,) else 1
        if repeats == 1:
            return self._predict(x, modulations, context, positions, run)
        x = x.expand(-1, -1, repeats, -1, -1)
        return self._predict(x, modulations, context, positions, run).mean(dim=2, keepdim=True)

    def enter(self, x: Tensor, modulations: Iterator[Modulation], context: Any) -> tuple[Tensor, TokenGrid]:
        """Embed x (B, C, ...) as this rank's tokens (B, n, D) for the first block. Return the tokens and their grid."""
        return self.embed(x)

    def places(self, size: tuple[int, ...], context: Any, batch: int, by_frame: bool = False) -> tuple[TokenGrid, ...]:
        """Return the token grid for latents of this size, for a pipeline stage that receives embedded tokens. by_frame:
        True if each frame has a separate time, in subclasses that support this."""
        sizes = self.config.grid_of(size)
        shards = None if self.sequence is None else self.sequence(math.prod(sizes), sizes)
        positions = self.positions(sizes) if self.config.positions_in_blocks else None
        if positions is not None and shards is not None:
            positions = shards.take(positions)
        return (self.token_grid(sizes, positions, shards),)

    def leave(self, x: Tensor, m: Tensor, grid: TokenGrid) -> Tensor:
        """Compute the prediction (B, C, ...) from the tokens (B, n, D) after the last block. m: modulation of the final
        layer."""
        x = self.final_layer(x, m)
        return self.unpatchify(x if grid.shards is None else grid.shards.gather(x), grid.sizes)

    def _predict(self, x, modulations, context, positions, run) -> Tensor:
        tokens, grid = self.embed(x, positions)
        residual = ResidualStream(tokens)
        del tokens
        x = self.of_tokens(residual, grid, modulations, context, run)
        return self.unpatchify(x if grid.shards is None else grid.shards.gather(x), grid.sizes)

    def of_tokens(
        self,
        residual: ResidualStream,
        grid: TokenGrid,
        modulations: Iterable[Modulation],
        context: Context | list[Context] | None = None,
        run: Callable[..., Tensor] = run_blocks,
    ) -> Tensor:
        """Run the blocks and the final layer: (B, n, D) to (B, n, prod(patch) * out_channels). This empties
        ``residual``, so that the tokens' memory can be freed while the blocks run."""
        modulations = iter(modulations)
        x = run(self.blocks, residual.take(self.ops), modulations, context, grid, checkpointed=self.checkpointed)
        return self.final_layer(x, next(modulations), of_rows(grid))

    def embed(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, TokenGrid]:
        """Embed x (B, C, ...). Return this rank's tokens (B, n, D) and the grid. positions: the grid's positions; None
        to compute them here."""
        sizes = self.config.grid_of(tuple(x.shape[2:]))
        patches, positions = self.x_embedder.patches(x), self.positions(sizes) if positions is None else positions
        shards = None if self.sequence is None else self.sequence(patches.shape[1], sizes)
        if shards is not None:
            patches, positions = shards.take(patches), positions if positions is None else shards.take(positions)
        tokens = self.x_embedder.project(patches)
        if self.learned_positions is not None:
            tokens = tokens if self.config.positions_in_blocks else tokens + cast(Tensor, positions)
        elif positions is not None:
            # Add in fp32, because neighbouring tokens can have equal positions in bf16.
            tokens = self.ops.add_table(tokens, positions)
        return tokens, self.token_grid(sizes, positions, shards)

    def token_grid(
        self, sizes: tuple[int, ...], positions: Tensor | None, shards: SequenceShards | None = None
    ) -> TokenGrid:
        in_blocks = positions if self.config.positions_in_blocks else None
        return TokenGrid(sizes, self.rotations(sizes), in_blocks, shards)

    def fill_tables(self, device: torch.device | None = None) -> None:
        """Compute the fixed position tables (1, N, D) on ``device``, or on their present device for None. Call this
        after building a model on the meta device, and after loading a state dict, because loaded tables may differ."""
        for name, (dim, sizes) in self.config.tables.items():
            module, _, attribute = name.rpartition(".")
            owner = self.get_submodule(module)
            old: Tensor | None = getattr(owner, attribute, None)
            where, dtype = (device, None) if old is None else (device or old.device, old.dtype)
            made = sincos_position_table(dim, *sizes, device=where or torch.get_default_device())
            # Register a new tensor instead of overwriting the old one, because a caller may still use the old one.
            owner.register_buffer(attribute, made.to(dtype or made.dtype).unsqueeze(0))

    def positions(self, grid: tuple[int, ...]) -> Tensor | None:
        """Return the positions (1, N, D) of a grid of patches: fixed fp32 tables or learned positions; None for rotary
        positions. A clip's fixed positions are a temporal plus a spatial table. Raises ValueError if there are fewer
        learned positions than patches."""
        configured = self.config.grid
        if self.learned_positions is not None:
            if any(size > known for size, known in zip(grid, configured, strict=True)):
                raise ValueError(f"--positions learned: {times(grid)} patches, but positions for {times(configured)}")
            return self.learned_positions(self._coordinates(grid)).unsqueeze(0)
        if self.config.positions == "rope":
            return None
        spatial = self.table("pos_embed", grid[-2:], configured[-2:])
        if not self.config.is_video:
            return spatial
        temporal = self.table("temporal_embed", grid[:1], configured[:1])
        return torch.flatten(temporal.unsqueeze(2) + spatial.unsqueeze(1), 1, 2)

    def rotations(self, grid: tuple[int, ...]) -> Tensor | None:
        """Return the rotations (N, d / 2, 2) fp32 of a grid (see :func:`rotary_table`); None without rotary
        positions."""
        if self.config.positions != "rope":
            return None
        return self._made_once(("rope", grid), lambda: rotary_table(self._coordinates(grid), self.config.head_dim))

    def table(self, name: str, sizes: tuple[int, ...], configured: tuple[int, ...]) -> Tensor:
        """Return the buffer ``name`` (1, N, D), or a new table if ``sizes`` differ from the configured ones."""
        buffer = self.get_buffer(name)
        if sizes == configured:
            return buffer
        dim = self.config.hidden_size
        made = self._made_once((name, sizes), lambda: sincos_position_table(dim, *sizes, device=self.device))
        return made.to(buffer.dtype).unsqueeze(0)

    def _coordinates(self, grid: tuple[int, ...]) -> Tensor:
        return self._made_once(("coordinates", grid), lambda: grid_coordinates(*grid, device=self.device))

    def _made_once(self, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        cache, key = self.__dict__.setdefault("_made", {}), (*key, self.device)
        if key not in cache:
            # Training may use the cached tensor later, so it must not be an inference tensor.
            with torch.inference_mode(False):
                cache[key] = make()
        return cache[key]

    @property
    def device(self) -> torch.device:
        return cast(nn.Linear, self.t_embedder.mlp[0]).weight.device

    def unpatchify(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Rearrange tokens (B, N, p * p * C) to (B, C, H, W). Clips have one more axis."""
        patch, axes = self.config.patch, len(grid)
        x = x.view(x.shape[0], *grid, *patch, self.config.out_channels)
        order = [axis for i in range(axes) for axis in (1 + i, 1 + axes + i)]  # row, row in patch, column, ...
        sides = (g * p for g, p in zip(grid, patch, strict=True))
        return x.permute(0, 1 + 2 * axes, *order).reshape(x.shape[0], self.config.out_channels, *sides)

    # ----------------------------------------------------------------------------------------------------------- packs

    def _predict_pack(
        self,
        x: Tensor,
        modulations: Iterable[Modulation],
        context: Context | None,
        segments: Segments,
        run: Callable[..., Tensor] = run_blocks,
    ) -> Tensor:
        """Compute the prediction (N, out_channels, *patch) for a pack's noised patches x (N, C, *patch). modulations
        and context have one row per segment. A frame that is repeated to fill a patch gets the mean over the repeats.
        Raises ValueError if the model does not support packs, or x does not fit the pack."""
        config = self.config
        if config.given_channels and x.shape[1] == config.in_channels:
            x = nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, config.given_channels))
        self._check_pack(x, segments)
        packed = segments.place(x.device)
        tokens, grid = self._embed_pack(x, packed)
        residual = ResidualStream(tokens)
        del tokens
        y = self.of_tokens(residual, grid, modulations, context, run)
        y = (y if grid.shards is None else grid.shards.gather(y)).squeeze(0)
        y = self._output_patches(y)
        if not any(segments.repeated):
            return y
        repeated = torch.tensor(segments.repeated)
        if x.is_cuda:
            repeated = repeated.pin_memory().to(x.device, non_blocking=True)
        alone = repeated[packed.sample_of_row].view(-1, *(1,) * (y.dim() - 1))
        return torch.where(alone, y.mean(dim=2, keepdim=True), y)

    def _check_pack(self, x: Tensor, segments: Segments) -> None:
        config = self.config
        config.check_packs()
        if x.shape != (segments.tokens, config.embedded_channels, *config.patch):
            wanted = (segments.tokens, config.in_channels, *config.patch)
            raise ValueError(f"a pack of {segments.tokens:,} tokens is {times(wanted)} numbers, not {times(x.shape)}")

    def _output_patches(self, y: Tensor) -> Tensor:
        """Rearrange the final layer's output (N, prod(patch) * C) to patches (N, C, *patch)."""
        return y.view(len(y), *self.config.patch, self.config.out_channels).movedim(-1, 1)

    def _input_patches(self, x: Tensor) -> Tensor:
        """Rearrange patches (N, C, *patch) to the first layer's input (N, C * prod(patch))."""
        return x.flatten(1)

    def _segment_rotations(self, packed: PlacedSegments) -> Tensor | None:
        if self.config.positions != "rope":
            return None
        return rotary_table(self._segment_coordinates(packed), self.config.head_dim)

    def _embed_pack(self, x: Tensor, packed: PlacedSegments) -> tuple[Tensor, TokenGrid]:
        config, shards, learned = self.config, None, None
        patches = self._input_patches(x).unsqueeze(0).to(self.x_embedder.proj.weight.dtype)
        rotary = self._segment_rotations(packed)
        if self.sequence is not None:
            shards = self.sequence(len(x), (len(x),))
        if shards is not None:
            if shards.rows * -(-len(x) // shards.rows) != len(x):
                raise ValueError(
                    f"--pack_tokens: {len(x):,} tokens can't be shared evenly; take a multiple of the ranks"
                )
            patches, packed = shards.take(patches), packed.part(shards.first, shards.rows)
        tokens, positions = self.x_embedder.project(patches), self._segment_positions(packed)
        if config.positions_in_blocks:
            learned = positions
        elif self.learned_positions is not None:
            tokens = tokens + cast(Tensor, positions)
        elif positions is not None:
            tokens = self.ops.add_table(tokens, positions)
        return tokens, TokenGrid((len(x),), rotary, learned, shards, packed)

    def _segment_coordinates(self, packed: PlacedSegments) -> Tensor:
        return packed.coordinates()[:, -len(self.config.patch) :]

    def _segment_positions(self, packed: PlacedSegments) -> Tensor | None:
        config, grids = self.config, packed.segments.grids
        if config.positions == "rope":
            return None
        at, longest = self._segment_coordinates(packed), tuple(max(sides) for sides in zip(*grids, strict=True))
        if self.learned_positions is not None:
            if any(side > known for side, known in zip(longest[-len(config.grid) :], config.grid, strict=True)):
                raise ValueError(
                    f"--positions learned: {times(longest)} patches, but positions for {times(config.grid)}"
                )
            return self.learned_positions(at).unsqueeze(0)
        height, width = (_table_side(*pair) for pair in zip(longest[-2:], config.grid[-2:], strict=True))
        rows = self.table("pos_embed", (height, width), config.grid[-2:])[0]
        found = rows[at[:, -2] * width + at[:, -1]]
        if config.is_video:
            frames = _table_side(longest[0], config.grid[0])
            found += self.table("temporal_embed", (frames,), config.grid[:1])[0][at[:, 0]]
        return found.unsqueeze(0)


def _table_side(longest: int, configured: int) -> int:
    """Return the length of a table for sides up to ``longest``: ``configured`` if enough, else a power of two, so that
    few different tables are cached."""
    return configured if longest <= configured else 1 << (longest - 1).bit_length()


def _compute_tables(model: nn.Module, _: object) -> None:
    cast(DiT, model).fill_tables()
