"""A model's forward pass on a pack of samples (see segments.py), in the place of what it does before and after its
blocks on samples of one size."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from opendit.models.attention import TokenGrid
from opendit.models.blocks import Context, Modulation
from opendit.models.configuration import times
from opendit.models.given_frames import without_any
from opendit.models.positions import rotary_table
from opendit.models.segments import PlacedSegments, Segments

if TYPE_CHECKING:
    from opendit.models.dit import DiT


def predict_pack(
    model: "DiT", x: Tensor, modulations: Iterable[Modulation], context: Context | None, segments: Segments
) -> Tensor:
    """Predict every patch of a pack, (N, out_channels, *patch) in the weights' dtype.

    x: (N, C, *patch) noised patches, also ``with_given(x, given)``. modulations, context: of the S segments. Of a frame
    that is repeated to fill a patch the prediction is the mean over the repeats, as ``DiT.forward`` says, in each.

    Raises ValueError for a model that can't take packs, or another number of patches than the pack's tokens.
    """
    config = model.config
    config.check_packs()
    if config.given_frames and x.shape[1] == config.in_channels:
        x = without_any(x, config.given_channels)
    if x.shape != (segments.tokens, config.embedded_channels, *config.patch):
        wanted = (segments.tokens, config.in_channels, *config.patch)
        raise ValueError(f"a pack of {segments.tokens:,} tokens is {times(wanted)} numbers, not {times(x.shape)}")
    packed = segments.place(x.device)
    tokens, grid = _embed(model, x, packed)
    start = [tokens]
    del tokens
    y = model.of_tokens(start, grid, modulations, context)
    y = (y if grid.shards is None else grid.shards.gather(y)).squeeze(0)
    y = y.view(len(y), *config.patch, config.out_channels).movedim(-1, 1)
    if not any(segments.repeated):
        return y
    repeated = torch.tensor(segments.repeated)
    if x.is_cuda:
        repeated = repeated.pin_memory().to(x.device, non_blocking=True)
    alone = repeated[packed.sample_of_row].view(-1, *(1,) * (y.dim() - 1))
    return torch.where(alone, y.mean(dim=2, keepdim=True), y)


def _embed(model: "DiT", x: Tensor, packed: PlacedSegments) -> tuple[Tensor, TokenGrid]:
    """Embed a pack like ``DiT.embed``: return this rank's tokens (1, n, D) and their places."""
    config, shards = model.config, None
    patches = x.flatten(1).unsqueeze(0).to(model.x_embedder.proj.weight.dtype)
    rotary = None
    if config.positions == "rope":
        rotary = rotary_table(_coordinates(model, packed), config.head_dim)
    if model.sequence is not None:
        shards = model.sequence(len(x), (len(x),))
    if shards is not None:
        if shards.rows * -(-len(x) // shards.rows) != len(x):
            raise ValueError(f"--pack_tokens: {len(x):,} tokens can't be shared evenly; take a multiple of the ranks")
        patches, packed = shards.take(patches), packed.part(shards.first, shards.rows)
    tokens, positions = model.x_embedder.project(patches), _positions(model, packed)
    learned = None
    if config.positions_in_blocks:
        learned = positions
    elif model.learned_positions is not None:
        tokens = tokens + cast(Tensor, positions)
    elif positions is not None:
        tokens = model.ops.add_table(tokens, positions)
    return tokens, TokenGrid((len(x),), rotary, learned, shards, packed)


def _coordinates(model: "DiT", packed: PlacedSegments) -> Tensor:
    """(n, axes) int64, of as many axes as the model's patches have."""
    return packed.coordinates()[:, -len(model.config.patch) :]


def _positions(model: "DiT", packed: PlacedSegments) -> Tensor | None:
    """(1, n, D): every token's position in the grid of its own segment, as ``DiT.positions`` has it."""
    config, grids = model.config, packed.segments.grids
    if config.positions == "rope":
        return None
    at, longest = _coordinates(model, packed), tuple(max(sides) for sides in zip(*grids, strict=True))
    if model.learned_positions is not None:
        if any(side > known for side, known in zip(longest[-len(config.grid) :], config.grid, strict=True)):
            raise ValueError(f"--positions learned: {times(longest)} patches, but positions for {times(config.grid)}")
        return model.learned_positions(at).unsqueeze(0)
    height, width = (_side(*pair) for pair in zip(longest[-2:], config.grid[-2:], strict=True))
    rows = model.table("pos_embed", (height, width), config.grid[-2:])[0]
    found = rows[at[:, -2] * width + at[:, -1]]
    if config.is_video:
        frames = _side(longest[0], config.grid[0])
        found += model.table("temporal_embed", (frames,), config.grid[:1])[0][at[:, 0]]
    return found.unsqueeze(0)


def _side(longest: int, configured: int) -> int:
    """Return the length of a table for sides up to ``longest``; powers of two keep the number of tables small."""
    return configured if longest <= configured else 1 << (longest - 1).bit_length()
