"""A simple reference of attention and related layers, which handles one sample, head and token at a time."""

import math

import torch
from torch import Tensor

from opendit.models.attention import Attention, CrossAttention


def linear(x: Tensor, layer) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def rms(x: Tensor, norm) -> Tensor:
    return x if norm is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def mlp(x: Tensor, layers) -> Tensor:
    return linear(gelu(linear(x, layers.fc1)), layers.fc2)


def turn(head: Tensor, coordinates: tuple[int, ...]) -> Tensor:
    """Rotate a head (d,) of a token at (t, h, w): multiply its pairs, as complex numbers, by exp(i angle)."""
    angles, axes, pairs = [], len(coordinates), len(head) // 2
    each = pairs // axes  # time gets the remaining pairs as well
    for position, share in zip(coordinates, [pairs - each * (axes - 1), *[each] * (axes - 1)], strict=True):
        angles += [position * 10000.0 ** (-i / share) for i in range(share)]
    numbers = torch.complex(head[0::2], head[1::2]) * torch.exp(1j * torch.tensor(angles, dtype=torch.float64))
    return torch.stack([numbers.real, numbers.imag], dim=-1).flatten()


def look(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v of one head, (N, d), one query at a time."""
    rows = []
    for query in queries:
        weights = torch.exp(keys @ query / math.sqrt(len(query)))
        rows.append((weights / weights.sum()) @ values)
    return torch.stack(rows)


def self_attention(x: Tensor, layer: Attention, places: list[tuple[int, ...]] | None = None) -> Tensor:
    """Compute ``layer`` for the tokens x (N, D) of one sample, rotated by ``places`` if given."""
    d, shared = layer.head_dim, layer.num_heads // layer.kv_heads
    parts = linear(x, layer.qkv).split(d, dim=-1)
    seen = []
    for head in range(layer.num_heads):
        query = rms(parts[head], layer.q_norm)
        key = rms(parts[layer.num_heads + head // shared], layer.k_norm)
        if places is not None:
            query, key = (
                torch.stack([turn(*pair) for pair in zip(rows, places, strict=True)]) for rows in (query, key)
            )
        seen.append(look(query, key, parts[layer.num_heads + layer.kv_heads + head // shared]))
    return linear(torch.cat(seen, dim=-1), layer.proj)


def cross_attention(x: Tensor, layer: CrossAttention, tokens: Tensor, mask: Tensor) -> Tensor:
    """Compute ``layer`` for x (N, D), tokens (M, D) and mask (M,) of one sample."""
    H, tokens = layer.num_heads, tokens[mask]
    queries, (keys, values) = linear(x, layer.q).chunk(H, dim=-1), linear(tokens, layer.kv).chunk(2, dim=-1)
    heads = zip(queries, keys.chunk(H, dim=-1), values.chunk(H, dim=-1), strict=True)
    seen = [look(rms(q, layer.q_norm), rms(k, layer.k_norm), v) for q, k, v in heads]
    return linear(torch.cat(seen, dim=-1), layer.proj)


def compare(module: torch.nn.Module, ours: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    """Assert that float64 outputs, and the gradients of every parameter of ``module``, agree."""
    parameters = dict(module.named_parameters())
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=expected.dtype)
    grads = [torch.autograd.grad((result * weights).sum(), list(parameters.values())) for result in (ours, expected)]
    assert (ours - expected).norm() / expected.norm() < rtol and expected.std() > 0.01
    for name, a, b in zip(parameters, *grads, strict=True):
        if name.endswith(("qkv.bias", "kv.bias")):  # the gradient of the keys' part is only rounding error
            assert torch.allclose(a, b, atol=rtol * b.norm().item()), name
        else:
            assert b.norm() > 0 and (a - b).norm() / b.norm() < rtol, name
