"""Layers that the architectures share. Plain single-device PyTorch; strategies and kernels are injected."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from opendit.models.given_frames import without_any
from opendit.models.positions import add_table, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, N, d) to (B, H, N, d)
TIME_FREQUENCIES = 256  # width of the sinusoidal timestep embedding


def over_rows(vector: Tensor, sample_of_row: Tensor | None) -> Tensor:
    """Vectors (B, D) so that they broadcast against x (B, N, D): (B, 1, D); or, of a pack x (1, N, D) whose token n
    belongs to the segment ``sample_of_row[n]``, (N, D). Where samples have several vectors each, ``sample_of_row`` (B,
    N) are those of the tokens."""
    return vector.unsqueeze(1) if sample_of_row is None else F.embedding(sample_of_row, vector)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    """x * (1 + scale) + shift for x (B, N, D) and shift, scale (B, D): adaLN's affine part. sample_of_row: of a pack,
    see :func:`over_rows`."""
    return x * (1 + over_rows(scale, sample_of_row)) + over_rows(shift, sample_of_row)


def layer_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm over the last dimension without weights."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    """:func:`layer_norm`, then :func:`modulate` (adaLN; Peebles & Xie 2023, sec. 3.2)."""
    return modulate(layer_norm(x), shift, scale, sample_of_row)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019), in fp32 inside, in x's dtype outside.
    weight: there is one."""

    def __init__(self, dim: int, eps: float = 1e-6, weight: bool = True):
        super().__init__()
        self.weight: Any = nn.Parameter(torch.ones(dim)) if weight else None
        self.eps: float = eps
        # Of ranks that each have some of the features: their number, and what adds up the ranks' sums (..., 1).
        self.features = dim
        self.sum_of_ranks: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.sum_of_ranks is not None:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            mean = self.sum_of_ranks(wide.square().sum(-1, keepdim=True)) / self.features
            return (wide * torch.rsqrt(mean + self.eps) * self.weight).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.weight, eps=self.eps).to(x.dtype)


def residual_rmsnorm_modulate(
    x: Tensor, norm: RMSNorm, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x as it is, and :func:`modulate` of norm(x)."""
    return x, modulate(norm(x), shift, scale, sample_of_row)


def in_working_dtype(first: Tensor, *others: "Tensor | StoredWeight | None") -> tuple[Any, ...]:
    """Cast tensors as autocast would for a linear layer, for products of our own, and before tensors are sent. None
    stays None."""
    tensors, kind = (first, *others), first.device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


class LowRank(NamedTuple):
    """LoRA's addition to a linear layer's weight (out, in): scale * b @ a, with a (rank, in) and b (out, rank)."""

    a: Tensor
    b: Tensor
    scale: float

    def add_to(self, y: Tensor, thin: Tensor) -> Tensor:
        """Return y (..., out) + scale * thin b^T, for thin = x a^T (..., rank)."""
        return torch.add(y, F.linear(thin, self.b), alpha=self.scale)


class StoredWeight(ABC):
    """A frozen weight (out, in) that is there in another form than its numbers, which products make for themselves.

    Attributes:
        shape: (out, in).
        dtype: of the dense weight.
    """

    requires_grad: ClassVar[bool] = False

    def __init__(self, shape: torch.Size, dtype: torch.dtype):
        self.shape: torch.Size = shape
        self.dtype: torch.dtype = dtype

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "StoredWeight":
        """Return the weight, to be made dense in ``dtype``."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return (out, in) in new memory, detached."""


def dense(weight: Tensor | StoredWeight) -> Tensor:
    """Return a weight's numbers."""
    return weight.dense() if isinstance(weight, StoredWeight) else weight


class _LinearOfStored(torch.autograd.Function):
    """x W^T + bias of a stored W, which is made dense again in the backward pass, and x is not kept."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: StoredWeight, bias: Tensor | None):
        ctx.weight = weight
        return F.linear(x, weight.dense(), bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        of_x, _, of_bias = ctx.needs_input_grad
        return dy @ ctx.weight.dense() if of_x else None, None, dy.flatten(0, -2).sum(0) if of_bias else None


class _LinearWithLowRank(torch.autograd.Function):
    """x W^T + bias + scale * (x a^T) b^T. Forward and backward, the wide product adds to what the thin one has written:
    it reads that while it computes, where adding the thin one afterwards would be a pass over y and dx."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | StoredWeight, bias: Tensor | None, a: Tensor, b: Tensor, scale: float):
        rows = x.flatten(0, -2)
        thin = rows @ a.t()
        first = thin.new_zeros(1) if bias is None else bias
        y = torch.addmm(first, thin, b.t(), beta=0 if bias is None else 1, alpha=scale).addmm_(rows, dense(weight).t())
        ctx.stored = weight if isinstance(weight, StoredWeight) else None
        ctx.save_for_backward(x, weight if isinstance(weight, Tensor) else None, a, b, thin)
        ctx.scale = scale
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x, weight, a, b, thin), (of_x, of_weight, of_bias, *_) = ctx.saved_tensors, ctx.needs_input_grad
        dy, rows = dy.flatten(0, -2), x.flatten(0, -2)
        dthin = (dy @ b).mul_(ctx.scale)
        weight = weight if ctx.stored is None else ctx.stored
        dx = (dthin @ a).addmm_(dy, dense(weight)).view(x.shape) if of_x else None
        dweight = dy.t() @ rows if of_weight else None  # not of a frozen layer
        return dx, dweight, dy.sum(0) if of_bias else None, dthin.t() @ rows, ctx.scale * (dy.t() @ thin), None


def multiply(
    x: Tensor, weight: Tensor | StoredWeight, bias: Tensor | None = None, low_rank: LowRank | None = None
) -> Tensor:
    """Return x W^T + bias (..., out) for x (..., in), with what LoRA adds to the weight."""
    if low_rank is None and isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if low_rank is None:
        return _LinearOfStored.apply(*in_working_dtype(x, weight, bias))
    return _LinearWithLowRank.apply(*in_working_dtype(x, weight, bias, *low_rank[:2]), low_rank.scale)


class Factor(nn.Module):
    """One of the two matrices of LoRA, under the parameter's name that peft gives it."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.default: Any = nn.Module()
        self.default.weight = nn.Parameter(weight)


class Projection(nn.Linear):
    """A linear layer next to a fused operation, which may take its product and its bias apart.

    Kernels get tensors, ``product(x)`` and ``bias``, and never look at the weight: so a layer whose product takes more
    than one multiplication (its ranks' parts to be summed, LoRA's to be added) says so in ``product``, and works with
    all of them. What has to have the weight itself (FP8) is registered as taking the projection over
    (opendit/kernels/operations.py), and looks at ``low_rank`` as well.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **where: Any):
        super().__init__(in_features, out_features, bias, **where)
        self.lora_A: Factor | None = None
        self.lora_B: Factor | None = None
        self.lora_scale: float = 1.0

    def add_low_rank(self, rank: int, scale: float) -> None:
        """Allocate LoRA's matrices, without values, beside the weight."""
        self.lora_A = Factor(self.weight.new_empty(rank, self.in_features))
        self.lora_B = Factor(self.weight.new_empty(self.out_features, rank))
        self.lora_scale = scale

    @property
    def matrix(self) -> Tensor | StoredWeight:
        """The weight (out, in), as products take it."""
        return self.weight

    @property
    def low_rank(self) -> LowRank | None:
        """LoRA's addition to the weight; None without LoRA."""
        if self.lora_A is None or self.lora_B is None:
            return None
        return LowRank(self.lora_A.default.weight, self.lora_B.default.weight, self.lora_scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        """x W^T (..., out) for x (..., in), without the layer's bias.

        bias: (out,), added to it, by the product where it can: ``product(x, self.bias)`` is ``self(x)``.
        multiply: makes x W^T + bias of (x, weight), (x, weight, bias), or (x, weight, bias, low_rank).
        """
        return product_of(x, self.matrix, bias, self.low_rank, multiply)


def product_of(
    x: Tensor,
    weight: Tensor | StoredWeight,
    bias: Tensor | None,
    low_rank: LowRank | None,
    multiply: Callable[..., Tensor],
) -> Tensor:
    """Call ``multiply`` with what there is."""
    if low_rank is not None:
        return multiply(x, weight, bias, low_rank)
    return multiply(x, weight) if bias is None else multiply(x, weight, bias)


def linear(x: Tensor, layer: Projection) -> Tensor:
    """layer(x), where no other operation has it: SwiGLU's first layer, cross-attention's."""
    return layer(x)


def linear_heads(x: Tensor, linear: Projection, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, N, d) of x (B, N, D): views of one projection to 3 H d features."""
    return linear(x).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def normalise_rotate(
    q: Tensor,
    k: Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    table: Tensor | None,
    across: bool = False,
) -> tuple[Tensor, Tensor]:
    """q (B, N, H, d) and k (B, N, K, d), normalised and then rotated by the table (N, d / 2, 2) or (B, N, d / 2, 2),
    see :func:`rotate`. Either may be missing. across: the norms are over all channels of a token (H d,), as in Wan and
    LTX-Video."""
    if q_norm is not None and k_norm is not None:
        q, k = _normalise_heads(q_norm, q, across), _normalise_heads(k_norm, k, across)
    return (q, k) if table is None else (rotate(q, table), rotate(k, table))


def _normalise_heads(norm: RMSNorm, x: Tensor, across: bool) -> Tensor:
    return norm(x.flatten(2)).unflatten(2, (x.shape[2], -1)) if across else norm(x)


def linear_gelu(x: Tensor, linear: Projection) -> Tensor:
    """GELU(linear(x)), tanh form."""
    return F.gelu(linear(x), approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """SiLU(a) * b (..., H) of x = [a | b] (..., 2 H) (Shazeer 2020)."""
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


def linear_gate_residual(
    x: Tensor, gate: Tensor, z: Tensor, linear: Projection, sample_of_row: Tensor | None = None
) -> Tensor:
    """x + gate * linear(z) for x (B, N, D) and gate (B, D): adaLN-Zero's residual connection. sample_of_row: of a
    pack, see :func:`over_rows`."""
    return x + over_rows(gate, sample_of_row) * linear(z)


@dataclass(frozen=True)
class Kernel:
    """A replacement for an operation's torch reference, and what callers have to know about it.

    operation: the field of :class:`BlockOps`. switches: what must be on for it. keeps: the activations that it keeps
    for the backward pass, by their names in its operation. takes_projection: it reads the projection's weight itself
    instead of calling ``product``. after_product: for an operation that follows a product, that part alone, as a
    function of product and bias.
    """

    operation: str
    function: Callable[..., Any]
    switches: Set[str] = field(default=frozenset(), hash=False)
    keeps: tuple[str, ...] = ()
    float8: bool = False
    takes_projection: bool = False
    after_product: Callable[[Tensor, Tensor], Tensor] | None = None


def _of_projection(reference: Callable[..., Any] | None) -> Any:  # to checkers a field's default
    """An operation that is given a :class:`Projection`."""
    return field(default=reference, metadata={"projection": True})


@dataclass(frozen=True)
class BlockOps:
    """The memory-bound operations of a block, and of the positions before the first; kernels take the place of these
    torch expressions.

    They are given the linear layer next to them (:class:`Projection`), not its output, because kernels take its bias
    over: adding a bias and summing its gradient cost a pass over the activations each, and nothing where a kernel
    passes anyway.

    ``linear_gate_residual_layernorm_modulate(x, gate, z, linear, shift, scale)``, when given, is the two others in one
    pass: it returns (h, y) with h = x + gate * linear(z) and y = LN(h) * (1 + scale) + shift.
    ``residual_layernorm_modulate(x, shift, scale)``, when given, returns (x, layernorm_modulate(x, shift, scale)).
    The same two with ``rmsnorm`` in their names take an RMSNorm before shift and scale, and normalise by it.
    ``join_heads(streams)``, when given, takes (q, k, v, q_norm, k_norm, table) of every stream of a joint sequence, as
    ``normalise_rotate`` does without the values, and returns q, k and v (B, N, H, d) of all its tokens.
    ``swiglu`` is given the linear layer's output: the blocks that have it have no biases, unless asked for.
    All that take a shift, a scale or a gate (B, D) take one more tensor for packs, last: ``sample_of_row`` (N,), see
    :func:`over_rows`. Blocks of packs give it, as ``*of_rows``; the others nothing.
    """

    layernorm_modulate: Callable[..., Tensor] = layernorm_modulate
    linear: Callable[[Tensor, Projection], Tensor] = _of_projection(linear)
    linear_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = _of_projection(linear_heads)
    linear_gelu: Callable[[Tensor, Projection], Tensor] = _of_projection(linear_gelu)
    linear_gate_residual: Callable[..., Tensor] = _of_projection(linear_gate_residual)
    linear_gate_residual_layernorm_modulate: Callable[..., tuple[Tensor, Tensor]] | None = _of_projection(None)
    residual_layernorm_modulate: Callable[..., tuple[Tensor, Tensor]] | None = None
    residual_rmsnorm_modulate: Callable[..., tuple[Tensor, Tensor]] = residual_rmsnorm_modulate
    linear_gate_residual_rmsnorm_modulate: Callable[..., tuple[Tensor, Tensor]] | None = _of_projection(None)
    swiglu: Callable[[Tensor], Tensor] = swiglu
    add_table: Callable[[Tensor, Tensor], Tensor] = add_table
    normalise_rotate: Callable[..., tuple[Tensor, Tensor]] = normalise_rotate
    join_heads: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    kernels: tuple[Kernel, ...] = ()  # the kernels that replace references

    @classmethod
    def names(cls, projection: bool = False) -> list[str]:
        """Return the names of all operations; projection: only of those that get one."""
        operations = [item for item in fields(cls) if item.name != "kernels"]
        return [item.name for item in operations if item.metadata or not projection]

    def kernel(self, operation: str) -> Kernel | None:
        """Return the kernel that replaces this operation's reference; None: no kernel does."""
        return next((kernel for kernel in self.kernels if kernel.operation == operation), None)

    @property
    def replaced(self) -> list[str]:
        """The operations that are kernels."""
        return [name for name in self.names() if self.kernel(name) is not None]

    @property
    def float8(self) -> bool:
        """True if the linear layers of a block compute in float8."""
        return any(kernel.float8 for kernel in self.kernels)

    def in_float8(self, operation: str) -> bool:
        """Return True if this operation's product is in float8."""
        kernel = self.kernel(operation)
        return kernel is not None and kernel.float8

    def by_reference(self, operations: Collection[str]) -> "BlockOps":
        """The same with the torch references of these operations."""
        references = {item.name: item.default for item in fields(self) if item.name in operations}
        kept = tuple(kernel for kernel in self.kernels if kernel.operation not in references)
        return replace(self, **references, kernels=kept)

    def residual_and_norm(
        self, x: Tensor, shift: Tensor, scale: Tensor, norm: RMSNorm | None = None, of_rows: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """x, and LN(x), or norm(x), * (1 + scale) + shift."""
        if norm is not None:
            return self.residual_rmsnorm_modulate(x, norm, shift, scale, *of_rows)
        if self.residual_layernorm_modulate is not None:
            return self.residual_layernorm_modulate(x, shift, scale, *of_rows)
        return x, self.layernorm_modulate(x, shift, scale, *of_rows)

    def residual_then_norm(
        self,
        x: Tensor,
        gate: Tensor,
        z: Tensor,
        linear: Projection,
        shift: Tensor,
        scale: Tensor,
        norm: RMSNorm | None = None,
        of_rows: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """h = x + gate * linear(z), and LN(h), or norm(h), * (1 + scale) + shift: joined where there is a kernel."""
        if norm is None and self.linear_gate_residual_layernorm_modulate is not None:
            return self.linear_gate_residual_layernorm_modulate(x, gate, z, linear, shift, scale, *of_rows)
        if norm is not None and self.linear_gate_residual_rmsnorm_modulate is not None:
            return self.linear_gate_residual_rmsnorm_modulate(x, gate, z, linear, norm, shift, scale, *of_rows)
        h = self.linear_gate_residual(x, gate, z, linear, *of_rows)
        if norm is not None:
            return self.residual_rmsnorm_modulate(h, norm, shift, scale, *of_rows)
        return h, self.layernorm_modulate(h, shift, scale, *of_rows)


TORCH_OPS = BlockOps()


@dataclass(frozen=True)
class Options:
    """The options that the blocks of every architecture have.

    bias: biases in linear layers. qk_norm: normalised queries and keys. adaln_lora: the rank of the modulation's
    weights; None: full. shared_modulation: these weights only correct a modulation that all blocks share.
    operations_across: the layers of cross-attention that see all tokens are given to ``BlockOps``, so that FP8 has
    them; otherwise they are torch's. pictures: cross-attention has keys and values of its own for a picture's tokens,
    which come before the caption's. halves: rotary positions turn the channels i and i + d / 2, and
    not neighbours.
    """

    bias: bool = True
    qk_norm: bool = False
    adaln_lora: int | None = None
    shared_modulation: bool = False
    qk_across: bool = False
    qk_eps: float = 1e-6
    attends_padding: bool = False
    operations_across: bool = False
    pictures: bool = False
    halves: bool = False


PLAIN = Options()


class _Modulation(nn.Sequential):
    """With one sample, the gradient of the last weight is a column times a row, for which cuBLAS takes twice as long as
    with seven rows of zeros under it (H200, width 3072, forward and backward: 171 us, with them 125)."""

    def forward(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        if len(c) != 1 or not torch.is_grad_enabled():
            own = super().forward(c)
        else:
            own = super().forward(F.pad(c, (0, 0, 0, 7)))[:1]
        return own if shared is None else shared + own


class BranchModulations(nn.ModuleList):
    """A block's modulation of a low-rank correction for each of its branches: shared + B_i A_i SiLU(c), side by side
    (Cosmos). shared: (B, n) of one branch, which all branches of all blocks share."""

    def forward(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        return torch.cat([branch(c, shared) for branch in self], dim=1)


class TableModulation(nn.Module):
    """A block's modulation as a correction of the one that all blocks share: shared + table (PixArt-alpha's
    adaLN-single, Chen et al. 2024, sec. 2.3)."""

    def __init__(self, dim: int, chunks: int):
        super().__init__()
        self.table: nn.Parameter = nn.Parameter(torch.zeros(1, chunks, dim))

    def forward(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        """Return (B, chunks * D) of what the blocks share (B, chunks * D), or of c (B, D) for each chunk."""
        if shared is None:
            shared = c.unsqueeze(1).expand(-1, self.table.shape[1], -1).flatten(1)
        return shared + self.table.flatten(1)


def modulation(
    dim: int, chunks: int, options: Options = PLAIN, width: int | None = None, silu: bool = True
) -> nn.Sequential:
    """Condition (B, D) to ``chunks`` vectors side by side (B, chunks * D); its last layer is to be initialised to zero.

    With a rank it is a product of two matrices, which has rank * (1 + chunks) * D weights in place of chunks * D * D,
    and with ``options.shared_modulation`` the modulation is that much more than the one that all blocks ``share``:

        m_i = M(SiLU(c)) + B_i A_i SiLU(c)

    adaLN-LoRA as of W.A.L.T (Gupta et al. 2023, "AdaLN-LoRA": A^i = A^1 + W_b^i W_a^i (c + t) with A^1 = MLP(c + t))
    and as in Cosmos (NVIDIA 2025), whose blocks all have a correction, of SiLU's output. c is the timestep's embedding
    plus the label's or the caption's.

    width: of the condition, if it is not ``dim``. silu: whether SiLU comes first, as in the formula.
    """
    width = dim if width is None else width
    first: list[nn.Module] = [nn.SiLU()] if silu else []
    if options.adaln_lora is not None:
        first.append(nn.Linear(width, options.adaln_lora, bias=False))
    bias = options.bias and not options.shared_modulation  # M has one, where it is wanted
    return _Modulation(*first, nn.Linear(options.adaln_lora or width, chunks * dim, bias=bias))


class Mlp(nn.Module):
    """Linear, GELU (tanh form), Linear (parameter names of timm: fc1, fc2)."""

    branches: ClassVar[int] = 1  # of fc1

    def __init__(self, dim: int, hidden: int, bias: bool = True):
        super().__init__()
        self.fc1: Projection = Projection(dim, self.branches * hidden, bias=bias)
        self.fc2: Projection = Projection(hidden, dim, bias=bias)

    def hidden(self, x: Tensor, ops: BlockOps = TORCH_OPS) -> Tensor:
        """The hidden layer (B, N, hidden): all but fc2, for which see BlockOps."""
        return ops.linear_gelu(x, self.fc1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x))


class ExactMlp(Mlp):
    """Linear, GELU without approximation, Linear."""

    def hidden(self, x: Tensor, ops: BlockOps = TORCH_OPS) -> Tensor:
        return F.gelu(ops.linear(x, self.fc1))


class SwiGlu(Mlp):
    """fc2(SiLU(a) * b) with a, b the halves of fc1 (Shazeer 2020; Llama's MLP)."""

    branches: ClassVar[int] = 2

    def hidden(self, x: Tensor, ops: BlockOps = TORCH_OPS) -> Tensor:
        return ops.swiglu(ops.linear(x, self.fc1))


class PatchEmbed(nn.Module):
    """Turns pictures (B, C, H, W) into tokens (B, H/p * W/p, D), row by row; with patches (t, h, w), clips (B, C, T, H,
    W), frame by frame.

    The input may have ``given`` more channels after the ``in_channels``; zeros stand in for them if they are left out.
    bottleneck: patches are projected to this many channels first, then to D (JiT; Li & He 2025, sec. 4); None: at once.
    """

    def __init__(
        self, patch: tuple[int, ...], in_channels: int, dim: int, given: int = 0, bottleneck: int | None = None
    ):
        super().__init__()
        self.in_channels: int = in_channels
        self.given: int = given
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[len(patch)]
        self.proj: nn.Conv2d | nn.Conv3d = convolution(in_channels + given, bottleneck or dim, patch, stride=patch)
        self.expand: nn.Linear | None = None if bottleneck is None else nn.Linear(bottleneck, dim)

    def patches(self, x: Tensor) -> Tensor:
        """The patches' values (B, N, C * prod(patch)), in the order of the convolution's weight."""
        if self.given and x.shape[1] == self.in_channels:
            x = without_any(x, self.given)
        patch = self.proj.kernel_size
        sides = [part for side, p in zip(x.shape[2:], patch, strict=True) for part in (side // p, p)]
        grid, inside = range(2, 2 + len(sides), 2), range(3, 3 + len(sides), 2)
        x = x.to(self.proj.weight.dtype).reshape(*x.shape[:2], *sides)
        return x.permute(0, *grid, 1, *inside).flatten(1 + len(patch)).flatten(1, len(patch))

    def project(self, patches: Tensor) -> Tensor:
        """(B, N, C * prod(patch)) to (B, N, D)."""
        tokens = _convolve_patches(patches, self.proj.weight, cast(Tensor, self.proj.bias))
        return tokens if self.expand is None else self.expand(tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.patches(x))


def _convolve_patches(patches: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The convolution of patches that don't overlap is a matrix product: some of them can go through it alone."""
    if has_torch_function((weight, bias)):
        # Gemini's parameters: they are in memory for the length of one call; a view alone would outlive that.
        return handle_torch_function(_convolve_patches, (weight, bias), patches, weight, bias)
    return F.linear(patches, weight.flatten(1), bias)


def timestep_embedding(t: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
    """Sinusoids of t (B,), integer or float, as (B, dim) float32: cosines, then sines (Vaswani et al. 2017)."""
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angles = t.float()[:, None] * freqs
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class TimestepEmbedder(nn.Module):
    """Timestep (B,) to (B, D): sinusoids in fp32, whatever the weights' precision, then a two-layer MLP.

    hidden: width between the two layers (None: D). reversed_from: the network is told this number minus t. unit: it is
    divided by this before. normed: the sinusoids' RMSNorm, (B, frequencies), stands beside the result.
    """

    def __init__(
        self,
        dim: int,
        frequencies: int = TIME_FREQUENCIES,
        hidden: int | None = None,
        reversed_from: float | None = None,
        unit: float = 1.0,
        normed: bool = False,
    ):
        super().__init__()
        self.frequencies: int = frequencies
        self.unit: float = unit
        self.reversed_from: float | None = reversed_from
        hidden = dim if hidden is None else hidden
        self.mlp: nn.Sequential = nn.Sequential(nn.Linear(frequencies, hidden), nn.SiLU(), nn.Linear(hidden, dim))
        self.norm: RMSNorm | None = RMSNorm(frequencies) if normed else None

    def forward(self, t: Tensor) -> Tensor:
        if self.reversed_from is not None:
            t = self.reversed_from - t
        if self.unit != 1:
            t = t / self.unit
        sinusoids = timestep_embedding(t, self.frequencies).to(cast(nn.Linear, self.mlp[0]).weight.dtype)
        embedded = self.mlp(sinusoids)
        return embedded if self.norm is None else torch.cat([embedded, self.norm(sinusoids)], dim=-1)


class LabelEmbedder(nn.Module):
    """Class label (B,) int64 to (B, D). Row ``num_classes`` is the null class of classifier-free guidance; without
    ``null_class``, of a model that was trained without class dropout, there is no such row."""

    def __init__(self, num_classes: int, dim: int, null_class: bool = True):
        super().__init__()
        self.num_classes = num_classes
        self.embedding_table: nn.Embedding = nn.Embedding(num_classes + null_class, dim)

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)
