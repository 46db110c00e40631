"""Layers that the architectures share. Plain single-device PyTorch; strategies and kernels are injected."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import handle_torch_function, has_torch_function

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, N, d) to (B, H, N, d)
TIME_FREQUENCIES = 256  # width of the sinusoidal timestep embedding


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x * (1 + scale) + shift for x (B, N, D) and shift, scale (B, D): adaLN's affine part."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def layer_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm over the last dimension without weights."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """:func:`layer_norm`, then :func:`modulate` (adaLN; Peebles & Xie 2023, sec. 3.2)."""
    return modulate(layer_norm(x), shift, scale)


def linear_heads(x: Tensor, linear: nn.Linear, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, N, d) of x (B, N, D): views of one projection to 3 D."""
    B, N, D = x.shape
    return linear(x).view(B, N, 3, num_heads, D // num_heads).permute(2, 0, 3, 1, 4).unbind(0)


def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
    """GELU(linear(x)), tanh form."""
    return F.gelu(linear(x), approximate="tanh")


def linear_gate_residual(x: Tensor, gate: Tensor, z: Tensor, linear: nn.Linear) -> Tensor:
    """x + gate * linear(z) for x (B, N, D) and gate (B, D): adaLN-Zero's residual connection."""
    return x + gate.unsqueeze(1) * linear(z)


@dataclass(frozen=True)
class BlockOps:
    """The memory-bound operations of a block; kernels take the place of these torch expressions.

    They are given the linear layer next to them, not its output, because kernels take its bias over: adding a bias and
    summing its gradient cost a pass over the activations each, and nothing where a kernel passes anyway.

    ``linear_gate_residual_layernorm_modulate(x, gate, z, linear, shift, scale)``, when given, is the two others in one
    pass: it returns (h, y) with h = x + gate * linear(z) and y = LN(h) * (1 + scale) + shift.
    ``residual_layernorm_modulate(x, shift, scale)``, when given, returns (x, layernorm_modulate(x, shift, scale)).
    """

    layernorm_modulate: Callable[[Tensor, Tensor, Tensor], Tensor] = layernorm_modulate
    linear_heads: Callable[[Tensor, nn.Linear, int], tuple[Tensor, Tensor, Tensor]] = linear_heads
    linear_gelu: Callable[[Tensor, nn.Linear], Tensor] = linear_gelu
    linear_gate_residual: Callable[[Tensor, Tensor, Tensor, nn.Linear], Tensor] = linear_gate_residual
    linear_gate_residual_layernorm_modulate: Callable[..., tuple[Tensor, Tensor]] | None = None
    residual_layernorm_modulate: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def residual_and_norm(self, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        if self.residual_layernorm_modulate is not None:
            return self.residual_layernorm_modulate(x, shift, scale)
        return x, self.layernorm_modulate(x, shift, scale)

    def residual_then_norm(
        self, x: Tensor, gate: Tensor, z: Tensor, linear: nn.Linear, shift: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.linear_gate_residual_layernorm_modulate is not None:
            return self.linear_gate_residual_layernorm_modulate(x, gate, z, linear, shift, scale)
        h = self.linear_gate_residual(x, gate, z, linear)
        return h, self.layernorm_modulate(h, shift, scale)


TORCH_OPS = BlockOps()


def local_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for q, k, v (B, H, N, d), by torch's own choice of kernel."""
    return F.scaled_dot_product_attention(q, k, v)


class Shards(Protocol):
    """The tokens of a sequence that several ranks share, as a model sees them (opendit.parallel.sequence)."""

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens (B, n, F) of all (B, N, F)."""

    def heads(self, x: Tensor, qkv: nn.Linear, num_heads: int, attend: Attend, ops: BlockOps) -> Tensor:
        """As :meth:`Attention.heads` over the tokens of all ranks, for this rank's: (B, n, D) to (B, n, D)."""

    def gather(self, x: Tensor) -> Tensor:
        """All tokens (B, N, F), on every rank, from this rank's (B, n, F)."""


class Attention(nn.Module):
    """Multi-head self-attention with one qkv projection (parameter names of timm: qkv, proj).

    ``attend`` maps q, k, v (B, H, N, d) to (B, H, N, d); a parallel strategy or a kernel replaces it.
    """

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.attend: Attend = local_attention

    def heads(self, x: Tensor, ops: BlockOps = TORCH_OPS, shards: Shards | None = None) -> Tensor:
        """What the heads see, side by side, (B, N, D): all but the output projection, for which see BlockOps.

        ``shards``: x holds this rank's tokens only, and this knows how to attend to those of the other ranks.
        """
        if shards is not None:
            return shards.heads(x, self.qkv, self.num_heads, self.attend, ops)
        q, k, v = ops.linear_heads(x, self.qkv, self.num_heads)
        return self.attend(q, k, v).transpose(1, 2).reshape(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.heads(x))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v over the keys that ``mask`` keeps.

    q: (B, H, N, d); k, v: (B, H, M, d); mask: (B, M) bool, True where there is a token, at least one in each row.
    The mask stays (B, 1, 1, M) and is broadcast inside the kernel. On a GPU that is the memory-efficient one: flash
    attention takes no mask, and the one in plain operations would keep the N x M scores for the backward pass.
    """
    mask = mask[:, None, None, :]
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class CrossAttention(nn.Module):
    """Multi-head attention from x (B, N, D) to tokens (B, M, D) under a padding mask (B, M) bool."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        (B, N, D), M, H = x.shape, tokens.shape[1], self.num_heads
        q = self.q(x).view(B, N, H, D // H).transpose(1, 2)
        k, v = self.kv(tokens).view(B, M, 2, H, D // H).permute(2, 0, 3, 1, 4)
        return self.proj(masked_attention(q, k, v, mask).transpose(1, 2).reshape(B, N, D))


class Mlp(nn.Module):
    """Linear, GELU (tanh form), Linear (parameter names of timm: fc1, fc2)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def hidden(self, x: Tensor, ops: BlockOps = TORCH_OPS) -> Tensor:
        """The hidden layer (B, N, hidden): all but fc2, for which see BlockOps."""
        return ops.linear_gelu(x, self.fc1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x))


class PatchEmbed(nn.Module):
    """(B, C, H, W) to tokens (B, H/p * W/p, D), rows first; with patches (t, h, w), (B, C, T, H, W), frames first."""

    def __init__(self, patch: tuple[int, ...], in_channels: int, dim: int):
        super().__init__()
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[len(patch)]
        self.proj = convolution(in_channels, dim, patch, stride=patch)

    def patches(self, x: Tensor) -> Tensor:
        """The patches' values (B, N, C * prod(patch)), in the order of the convolution's weight."""
        patch = self.proj.kernel_size
        sides = [part for side, p in zip(x.shape[2:], patch, strict=True) for part in (side // p, p)]
        grid, inside = range(2, 2 + len(sides), 2), range(3, 3 + len(sides), 2)
        x = x.to(self.proj.weight.dtype).reshape(*x.shape[:2], *sides)
        return x.permute(0, *grid, 1, *inside).flatten(1 + len(patch)).flatten(1, len(patch))

    def project(self, patches: Tensor) -> Tensor:
        """(B, N, C * prod(patch)) to (B, N, D)."""
        return _convolve_patches(patches, self.proj.weight, self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.patches(x))


def _convolve_patches(patches: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The convolution of patches that don't overlap is a matrix product: some of them can go through it alone."""
    if has_torch_function((weight, bias)):
        # Gemini's parameters: they are in memory for the length of one call; a view alone would outlive that.
        return handle_torch_function(_convolve_patches, (weight, bias), patches, weight, bias)
    return F.linear(patches, weight.flatten(1), bias)


class _AddTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor) -> Tensor:
        return torch.add(x, table, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def add_table(x: Tensor, table: Tensor) -> Tensor:
    """x (B, N, D) plus a constant table (1, N, D) or (N, D) fp32, added in fp32 and rounded to x's dtype once.

    ``(x + table).to(x.dtype)`` without the tensor of x's size in fp32, forward and backward.
    """
    return _AddTable.apply(x, table)


def timestep_embedding(t: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
    """Sinusoids of t (B,), integer or float, as (B, dim) float32: cosines, then sines (Vaswani et al. 2017)."""
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angles = t.float()[:, None] * freqs
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class TimestepEmbedder(nn.Module):
    """Timestep (B,) to (B, D): sinusoids in fp32, whatever the weights' precision, then a two-layer MLP."""

    def __init__(self, dim: int, frequencies: int = TIME_FREQUENCIES):
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(timestep_embedding(t, self.frequencies).to(self.mlp[0].weight.dtype))


class LabelEmbedder(nn.Module):
    """Class label (B,) int64 to (B, D). Row ``num_classes`` is the null class of classifier-free guidance."""

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.num_classes = num_classes
        self.embedding_table = nn.Embedding(num_classes + 1, dim)

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)


def sincos_position_table(dim: int, *sizes: int, device: torch.device | None = None) -> Tensor:
    """Sine-cosine positions of a line (length,) or a grid (height, width), (prod(sizes), dim) float32, rows first.

    Meta's layout: the channels are split evenly over the axes, the last axis (the column) first; each part is
    sines, then cosines, of frequencies 10000^(-i / n), i < n = dim / (2 * axes). Positions are computed in float64.
    Raises ValueError unless dim divides by 2 * axes.
    """
    if dim % (2 * len(sizes)):
        raise ValueError(f"a {len(sizes)}D sine-cosine table needs a width divisible by {2 * len(sizes)}, not {dim}")
    frequencies = dim // (2 * len(sizes))
    steps = {"dtype": torch.float64, "device": device}
    omega = 10000.0 ** -(torch.arange(frequencies, **steps) / frequencies)
    parts = []
    for position in reversed(torch.meshgrid(*(torch.arange(size, **steps) for size in sizes), indexing="ij")):
        angles = position.reshape(-1, 1) * omega
        parts += [torch.sin(angles), torch.cos(angles)]
    return torch.cat(parts, dim=1).float()
