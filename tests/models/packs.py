"""Create packs of samples, to compare with the same samples computed separately."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opendit.models.conditioning import Condition, TextCondition
from opendit.models.dit import DiT, DiTConfig
from opendit.models.segments import Segments, to_patches


def from_patches(x: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Invert :func:`to_patches`: (B, n, C, *patch) to (B, C, ...). grid: tokens along each axis."""
    patch = x.shape[3:]
    axes, x = len(patch), x.unflatten(1, tuple(grid))
    order = (0, 1 + axes, *(place for axis in range(axes) for place in (1 + axis, 2 + axes + axis)))
    sides = (side * p for side, p in zip(grid, patch, strict=True))
    return x.permute(order).reshape(x.shape[0], x.shape[1 + axes], *sides)


def pack_patches(latents: Sequence[Tensor], patch: tuple[int, ...], tokens: int) -> Tensor:
    """Concatenate the patches of latents (C, ...) and pad the result with zeros to (tokens, C, *patch). Raises
    ValueError if the patch does not divide a latent, or if the latents have more than ``tokens`` tokens."""
    parts = [to_patches(x.unsqueeze(0), patch).squeeze(0) for x in latents]
    filled = sum(map(len, parts))
    if filled > tokens:
        raise ValueError(f"segments of {filled:,} tokens don't fit into a pack of {tokens:,}")
    return torch.cat([*parts, parts[0].new_zeros(tokens - filled, *parts[0].shape[1:])])


def unpack_patches(x: Tensor, segments: Segments) -> list[Tensor]:
    """Turn patches (tokens, C, *patch) into each segment's latents (C, ...). Repeated frames are reduced to one."""
    axes, found = x.dim() - 2, []
    repeated = segments.repeated or (False,) * len(segments.grids)
    for part, grid, single in zip(x[: segments.filled].split(segments.lengths), segments.grids, repeated, strict=True):
        whole = from_patches(part.unsqueeze(0), grid[3 - axes :]).squeeze(0)
        found.append(whole[:, :1] if single else whole)
    return found


@dataclass
class Samples:
    """Noised latents (C, ...) of any sizes, their times (S,) and conditions, and gradients of the model's outputs."""

    latents: list[Tensor]
    t: Tensor
    y: Condition
    weights: list[Tensor]

    def one_by_one(self, model: DiT) -> list[Tensor]:
        """Return the model's prediction (C', ...) for each sample, computed separately."""
        parts = enumerate(self.latents)
        return [model(x.unsqueeze(0), self.t[i : i + 1], self.y[i : i + 1]).squeeze(0) for i, x in parts]

    def packed(self, model: DiT, padding: int = 0, garbage: float = 0.0) -> list[Tensor]:
        """Return the predictions for all samples in one pack. It ends with ``padding`` tokens of value ``garbage``."""
        segments = self.segments(model.config, padding)
        patches = pack_patches(self.latents, model.config.patch, segments.tokens)
        patches[segments.filled :] = garbage
        return unpack_patches(model(patches, self.t, self.y, segments), segments)

    def segments(self, config: DiTConfig, padding: int = 0) -> Segments:
        sizes = [tuple(x.shape[1:]) for x in self.latents]
        return Segments.of(sizes, config.patch, Segments.of(sizes, config.patch, 1 << 30).filled + padding)

    def gradients(self, model: DiT, outputs: list[Tensor], trained: bool = False) -> dict[str, Tensor]:
        """Return the gradient of sum <output, weight> for every parameter, or only for ``trained`` parameters."""
        model.zero_grad()
        torch.autograd.backward(outputs, [w.to(o.dtype) for w, o in zip(self.weights, outputs, strict=True)])
        parameters = ((n, p) for n, p in model.named_parameters() if p.requires_grad or not trained)
        return {name: parameter.grad.clone() for name, parameter in parameters}


def samples(
    config: DiTConfig, sizes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64, seed: int = 0
) -> Samples:
    """Create samples with latents of these sizes, each with a different time and condition."""
    generator, count = torch.Generator().manual_seed(seed), len(sizes)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    latents = [random(config.in_channels, *size) for size in sizes]
    t, weights = random(count).abs() * 300, [random(config.out_channels, *size) for size in sizes]
    if config.text is None:
        return Samples(latents, t, torch.arange(count) % (config.num_classes + 1), weights)
    if config.text.inside:
        ids = torch.randint(0, 256, (count, config.text.max_tokens), generator=generator)
        return Samples(latents, t, ids, weights)
    length, width = config.text.max_tokens, config.text.width
    mask = torch.rand(count, length, generator=generator) < 0.6
    mask[:, 1] = True
    return Samples(latents, t, TextCondition(random(count, length, width), mask, random(count, width)), weights)


def with_vectors(model: DiT) -> DiT:
    """Randomise all vectors, because an ignored bias of zero, or norm weight of one, would not be detected."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(std=0.5, generator=generator)
    return model


def assert_same(found: list[Tensor] | dict, wanted: list[Tensor] | dict, rtol: float, bound: str = "") -> None:
    """Assert that the error of each tensor, relative to the tensor's norm, is at most ``rtol``."""
    named = found.items() if isinstance(found, dict) else enumerate(found)
    for name, tensor in named:
        want = wanted[name]
        assert tensor.shape == want.shape, name
        off = (tensor.double() - want.double()).norm() / want.double().norm()
        assert off <= rtol, f"{name}{bound}: off by {off:.2e}"
