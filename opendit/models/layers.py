"""Layers that all architectures share.

The layers are plain single-device PyTorch. Parallel strategies and kernels replace functions that the layers call."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import _disable_current_modes

from opendit.models.positions import add_table, normalise_rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, N, d) to (B, H, N, d)
TIME_FREQUENCIES = 256  # width of the sinusoidal timestep embedding


def over_rows(vector: Tensor, sample_of_row: Tensor | None) -> Tensor:
    """Reshape vectors (M, D) to broadcast against tokens (B, N, D). sample_of_row: index of each token's vector, (B,
    N), or (N,) for a pack; None if each sample has one vector (M = B)."""
    return vector.unsqueeze(1) if sample_of_row is None else F.embedding(sample_of_row, vector)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    """Return x * (1 + scale) + shift, adaLN's affine map, for x (B, N, D) and shift, scale (B, D). sample_of_row: see
    :func:`over_rows`."""
    return x * (1 + over_rows(scale, sample_of_row)) + over_rows(shift, sample_of_row)


def layer_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def layernorm_modulate(x: Tensor, shift: Tensor, scale: Tensor, sample_of_row: Tensor | None = None) -> Tensor:
    """Apply :func:`layer_norm`, then :func:`modulate` (adaLN; Peebles & Xie 2023, sec. 3.2)."""
    return modulate(layer_norm(x), shift, scale, sample_of_row)


class RMSNorm(nn.Module):
    """RMS norm x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019). The norm is computed in fp32 or
    wider, and the result has x's dtype. ``weight``: False for a norm without a weight."""

    def __init__(self, dim: int, eps: float = 1e-6, weight: bool = True):
        super().__init__()
        self.weight: Any = nn.Parameter(torch.ones(dim)) if weight else None
        self.eps: float = eps
        # If ranks divide the features, ``features`` counts all of them, and ``sum_of_ranks`` sums (..., 1) over ranks.
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
    return x, modulate(norm(x), shift, scale, sample_of_row)


def in_working_dtype(first: Tensor, *others: "Tensor | StoredWeight | None") -> tuple[Any, ...]:
    """Cast tensors to autocast's dtype if autocast is on. None stays None. Use this before matrix products that
    autocast doesn't see, and before sending tensors to other ranks."""
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
    unread: bool = False  # True if nothing reads the layer's output. It is then not computed.

    def add_to(self, y: Tensor, thin: Tensor) -> Tensor:
        return torch.add(y, F.linear(thin, self.b), alpha=self.scale)


class StoredWeight(ABC):
    """A frozen weight (out, in) in a compact form, for example quantised. Matrix products compute the dense weight on
    demand. ``shape`` and ``dtype`` describe the dense weight."""

    requires_grad: ClassVar[bool] = False

    def __init__(self, shape: torch.Size, dtype: torch.dtype):
        self.shape: torch.Size = shape
        self.dtype: torch.dtype = dtype

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "StoredWeight":
        """Return the weight with ``dtype`` for its dense form."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the dense weight (out, in) as a new, detached tensor."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias (..., out) for x (..., in), without gradients."""
        return F.linear(x, self.dense(), bias)


def dense(weight: Tensor | StoredWeight) -> Tensor:
    return weight.dense() if isinstance(weight, StoredWeight) else weight


class _LinearOfStored(torch.autograd.Function):
    """x W^T + bias for a stored weight W. The backward pass computes the dense weight again. x is not saved."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: StoredWeight, bias: Tensor | None):
        ctx.weight = weight
        return weight.product(x, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        of_x, _, of_bias = ctx.needs_input_grad
        return dy @ ctx.weight.dense() if of_x else None, None, dy.flatten(0, -2).sum(0) if of_bias else None


def low_rank_product(
    x: Tensor, weight: Tensor, thin: Tensor, factor: Tensor, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Return x @ weight + scale * thin @ factor + bias for x (M, C), weight (C, P), thin (M, r) and factor (r, P).

    The low-rank product is written first, then ``addmm`` adds the wide product. A separate addition would cost one more
    pass over the result.
    """
    first = thin.new_empty(1) if bias is None else bias  # not read if beta is 0
    return torch.addmm(first, thin, factor, beta=0 if bias is None else 1, alpha=scale).addmm_(x, weight)


def low_rank_gradients(dy: Tensor, b: Tensor, thin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of thin = x a^T (M, rank) and of b (out, rank): scale * dy @ b and scale * dy^T @ thin. dy:
    (M, out)."""
    products = dy @ b, dy.t() @ thin
    return products if scale == 1 else (products[0].mul_(scale), products[1].mul_(scale))


class LowRankProducts(NamedTuple):
    """Functions for LoRA's products. ``output`` computes the layer's output and the input's gradient."""

    output: Callable[..., Tensor] = low_rank_product
    gradients: Callable[..., tuple[Tensor, Tensor]] = low_rank_gradients


TORCH_PRODUCTS = LowRankProducts()


def hidden_from_checkpoint() -> AbstractContextManager[Any]:
    """Return a context for operations of a recomputation that the first pass did not have. The checkpoint of
    but_attention would refuse them."""
    return _disable_current_modes()


def unwritten(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised tensor on the device of ``like``, by default with its dtype."""
    with hidden_from_checkpoint():
        return like.new_empty(shape, dtype=dtype)


class _LinearWithLowRank(torch.autograd.Function):
    """x W^T + bias + scale * (x a^T) b^T."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor | StoredWeight,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        products: LowRankProducts,
        unread: bool,
    ):
        rows = x.flatten(0, -2)
        thin = rows @ a.t()
        if unread:
            y = unwritten((len(rows), weight.shape[0]), rows)
        else:
            y = products.output(rows, dense(weight).t(), thin, b.t(), scale, bias)
        ctx.stored = weight if isinstance(weight, StoredWeight) else None
        ctx.save_for_backward(x, weight if isinstance(weight, Tensor) else None, a, b, thin)
        ctx.scale, ctx.products = scale, products
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x, weight, a, b, thin), (of_x, of_weight, of_bias, *_) = ctx.saved_tensors, ctx.needs_input_grad
        dy, rows = dy.flatten(0, -2), x.flatten(0, -2)
        dthin, db = ctx.products.gradients(dy, b, thin, ctx.scale)
        weight = weight if ctx.stored is None else ctx.stored
        dx = ctx.products.output(dy, dense(weight), dthin, a, 1.0).view(x.shape) if of_x else None
        dweight = dy.t() @ rows if of_weight else None  # None if the layer is frozen
        return dx, dweight, dy.sum(0) if of_bias else None, dthin.t() @ rows, db, None, None, None


def multiply(
    x: Tensor,
    weight: Tensor | StoredWeight,
    bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    products: LowRankProducts = TORCH_PRODUCTS,
) -> Tensor:
    """Return x W^T + bias (..., out) for x (..., in). With ``low_rank``, W includes LoRA's term. ``products`` compute
    this term."""
    if low_rank is None and isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if has_torch_function((x,)):  # x is a kernel's deferred result
        return handle_torch_function(multiply, (x,), x, weight, bias, low_rank, products)
    if low_rank is None:
        return _LinearOfStored.apply(*in_working_dtype(x, weight, bias))
    tensors, unread = in_working_dtype(x, weight, bias, *low_rank[:2]), low_rank.unread
    return _LinearWithLowRank.apply(*tensors, low_rank.scale, products, unread)


class Factor(nn.Module):
    """One of LoRA's two matrices. Its parameter has the name that peft uses, ``default.weight``."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.default: Any = nn.Module()
        self.default.weight = nn.Parameter(weight)


class Projection(nn.Linear):
    """A linear layer with separate access to product and bias, for fused operations.

    Most kernels call ``product(x)`` and add ``bias``, but do not read the weight. So ``product`` may also sum over
    ranks or add LoRA's term. A kernel that reads the weight (FP8) is registered with ``takes_projection`` and must
    apply ``low_rank``.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **where: Any):
        super().__init__(in_features, out_features, bias, **where)
        self.lora_A: Factor | None = None
        self.lora_B: Factor | None = None
        self.lora_scale: float = 1.0
        self.unread: bool = False  # True while nothing reads the output, see :class:`LowRank`

    def add_low_rank(self, rank: int, scale: float) -> None:
        self.lora_A = Factor(self.weight.new_empty(rank, self.in_features))
        self.lora_B = Factor(self.weight.new_empty(self.out_features, rank))
        self.lora_scale = scale

    @contextmanager
    def output_unread(self) -> Iterator[None]:
        """Return a context for calls whose output nothing reads. With LoRA, the output's memory is not written, and
        only tensors for the backward pass are computed. Without LoRA, the context has no effect."""
        self.unread = True
        try:
            yield
        finally:
            self.unread = False

    @property
    def matrix(self) -> Tensor | StoredWeight:
        return self.weight

    @property
    def low_rank(self) -> LowRank | None:
        if self.lora_A is None or self.lora_B is None:
            return None
        return LowRank(self.lora_A.default.weight, self.lora_B.default.weight, self.lora_scale, self.unread)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None = None, multiply: Callable[..., Tensor] = multiply) -> Tensor:
        """Return x W^T + bias (..., out) for x (..., in); ``product(x, self.bias)`` equals ``self(x)``. ``multiply`` is
        called with (x, weight), (x, weight, bias), or (x, weight, bias, low_rank)."""
        return product_of(x, self.matrix, bias, self.low_rank, multiply)


def product_of(
    x: Tensor,
    weight: Tensor | StoredWeight,
    bias: Tensor | None,
    low_rank: LowRank | None,
    multiply: Callable[..., Tensor],
) -> Tensor:
    """Call ``multiply`` without trailing arguments that are None."""
    if low_rank is not None:
        return multiply(x, weight, bias, low_rank)
    return multiply(x, weight) if bias is None else multiply(x, weight, bias)


def linear(x: Tensor, layer: Projection) -> Tensor:
    return layer(x)


def linear_heads(x: Tensor, linear: Projection, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (B, H, N, d) for x (B, N, D), as views of one projection to 3 H d features."""
    return linear(x).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def linear_gelu(x: Tensor, linear: Projection) -> Tensor:
    return F.gelu(linear(x), approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """Return SiLU(a) * b (..., H) for x = [a | b] (..., 2 H) (Shazeer 2020)."""
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


def linear_gate_residual(
    x: Tensor, gate: Tensor, z: Tensor, linear: Projection, sample_of_row: Tensor | None = None
) -> Tensor:
    """Return x + gate * linear(z), the residual connection of adaLN-Zero, for x (B, N, D) and gate (B, D).
    sample_of_row: see :func:`over_rows`."""
    return x + over_rows(gate, sample_of_row) * linear(z)


@dataclass(frozen=True)
class Kernel:
    """A kernel that replaces the torch reference of an operation (a field of :class:`BlockOps`)."""

    operation: str
    function: Callable[..., Any]
    switches: Set[str] = field(default=frozenset(), hash=False)  # switches (kernels/operations.py) that must be on
    keeps: tuple[str, ...] = ()  # names of the activations saved for the backward pass
    float8: bool = False  # True if the matrix product is in float8
    takes_projection: bool = False  # True if the kernel reads the weight instead of calling ``product``
    # computes the operation's remaining steps from product and bias
    after_product: Callable[[Tensor, Tensor], Tensor] | None = None


# Returns Any, because type checkers compare a field's default with the field's type.
def _of_projection(reference: Callable[..., Any] | None) -> Any:
    """Define a ``BlockOps`` field for an operation with a :class:`Projection` argument."""
    return field(default=reference, metadata={"projection": True})


@dataclass(frozen=True)
class BlockOps:
    """A block's memory-bound operations. The defaults are torch functions; kernels can replace them.

    Operations after a linear layer get the layer (:class:`Projection`) instead of its output. A kernel can then add the
    bias and sum the bias's gradient without extra passes over the activations.

    Some operations:

    - ``linear_gate_residual_layernorm_modulate(x, gate, z, linear, shift, scale)`` computes h = x + gate * linear(z)
      and y = LN(h) * (1 + scale) + shift in one pass. It returns (h, y).
    - ``residual_layernorm_modulate(x, shift, scale)`` returns (x, layernorm_modulate(x, shift, scale)).
    - The two operations named ``rmsnorm`` use an RMSNorm instead of LN. The norm is the argument before ``shift``.
    - ``join_heads(streams)`` gets (q, k, v, q_norm, k_norm, table) for every stream of a joint sequence. It normalises
      and rotates q and k like ``normalise_rotate``, and returns q, k and v (B, N, H, d) of all tokens.
    - ``pack_heads(q, k, v, q_norm, k_norm, table, across, parts)`` gets q, k and v (B, N, H, d). It normalises and
      rotates q and k like ``normalise_rotate``, and returns (parts, B, N, 3, H / parts, d). A part holds consecutive
      heads.
    - ``swiglu`` gets the linear layer's output.

    Operations with a shift, scale or gate (B, D) accept ``sample_of_row`` (see :func:`over_rows`) as an optional last
    argument.
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
    pack_heads: Callable[..., Tensor] | None = None
    kernels: tuple[Kernel, ...] = ()  # the kernels that replace references

    @classmethod
    def names(cls, projection: bool = False) -> list[str]:
        """Return the operations' names. projection: True for only the operations with a :class:`Projection`
        argument."""
        operations = [item for item in fields(cls) if item.name != "kernels"]
        return [item.name for item in operations if item.metadata or not projection]

    def kernel(self, operation: str) -> Kernel | None:
        return next((kernel for kernel in self.kernels if kernel.operation == operation), None)

    @property
    def replaced(self) -> list[str]:
        return [name for name in self.names() if self.kernel(name) is not None]

    @property
    def float8(self) -> bool:
        return any(kernel.float8 for kernel in self.kernels)

    def in_float8(self, operation: str) -> bool:
        kernel = self.kernel(operation)
        return kernel is not None and kernel.float8

    def by_reference(self, operations: Collection[str]) -> "BlockOps":
        """Return a copy in which the torch references implement these operations."""
        references = {item.name: item.default for item in fields(self) if item.name in operations}
        kept = tuple(kernel for kernel in self.kernels if kernel.operation not in references)
        return replace(self, **references, kernels=kept)

    def residual_and_norm(
        self, x: Tensor, shift: Tensor, scale: Tensor, norm: RMSNorm | None = None, of_rows: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return x and norm(x) * (1 + scale) + shift. norm: None for LayerNorm."""
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
        """Return h = x + gate * linear(z) and norm(h) * (1 + scale) + shift, with a fused kernel if there is one. norm:
        None for LayerNorm."""
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
    """Options that the blocks of every architecture have.

    Attributes:
        bias: True for biases in linear layers.
        qk_norm: True to normalise queries and keys.
        adaln_lora: Rank of the modulation's weights; None for full rank.
        shared_modulation: True if a block adds its modulation to one that all blocks share.
        qk_across: True to normalise queries and keys over the channels of all heads together.
        qk_eps: Epsilon of the norms of queries and keys.
        attends_padding: True if cross-attention also attends to the caption's padding.
        operations_across: True to run cross-attention's layers on media tokens through ``BlockOps``, for example in
            FP8.
        pictures: True if cross-attention has a separate key and value projection for a picture's tokens. Picture tokens
            precede caption tokens.
        halves: True if rotary positions rotate the channel pairs (i, i + d / 2) instead of (2 i, 2 i + 1).
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
    """Layers of a modulation. In training, a single sample is padded to eight rows with zeros, because cuBLAS is slow
    for one row. Forward and backward pass take 171 us, padded 125 us (width 3072, H200)."""

    def forward(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        if len(c) != 1 or not torch.is_grad_enabled():
            own = super().forward(c)
        else:
            own = super().forward(F.pad(c, (0, 0, 0, 7)))[:1]
        return own if shared is None else shared + own


class BranchModulations(nn.ModuleList):
    """A block's modulation in Cosmos: shared + B_i A_i SiLU(c) for each branch i, concatenated over the branches.
    ``shared`` (B, n) is the same for all branches and blocks."""

    def forward(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        return torch.cat([branch(c, shared) for branch in self], dim=1)


class TableModulation(nn.Module):
    """A block's modulation: a modulation that all blocks share, plus the block's learned table (PixArt-alpha's
    adaLN-single, Chen et al. 2024, sec. 2.3)."""

    def __init__(self, dim: int, chunks: int):
        super().__init__()
        self.table: nn.Parameter = nn.Parameter(torch.zeros(1, chunks, dim))

    def forward(self, c: Tensor, shared: Tensor | None = None) -> Tensor:
        """Return the sum (B, chunks * D) of the table and ``shared`` (B, chunks * D). If ``shared`` is None, c (B, D)
        is added to every chunk of the table."""
        if shared is None:
            shared = c.unsqueeze(1).expand(-1, self.table.shape[1], -1).flatten(1)
        return shared + self.table.flatten(1)


def modulation(
    dim: int, chunks: int, options: Options = PLAIN, width: int | None = None, silu: bool = True
) -> nn.Sequential:
    """Build the module that maps a condition c (B, width) to ``chunks`` vectors, concatenated to (B, chunks * D). The
    caller must initialise the last layer to zero.

    With ``options.adaln_lora``, block i's weight is a product B_i A_i. It has rank * (1 + chunks) * D values instead of
    chunks * D * D. With ``options.shared_modulation``, block i adds this product to a modulation that all blocks share:

    m_i = M(SiLU(c)) + B_i A_i SiLU(c)

    This is adaLN-LoRA in the form of Cosmos (NVIDIA 2025). W.A.L.T (Gupta et al. 2023) has no SiLU before the low-rank
    product: m_i = MLP(c) + B_i A_i c.
    """
    width = dim if width is None else width
    first: list[nn.Module] = [nn.SiLU()] if silu else []
    if options.adaln_lora is not None:
        first.append(nn.Linear(width, options.adaln_lora, bias=False))
    bias = options.bias and not options.shared_modulation  # with a shared modulation, M already has a bias
    return _Modulation(*first, nn.Linear(options.adaln_lora or width, chunks * dim, bias=bias))


class Mlp(nn.Module):
    """MLP: linear, GELU (tanh approximation), linear. Parameter names are timm's: fc1, fc2."""

    branches: ClassVar[int] = 1  # number of matrices that fc1 concatenates

    def __init__(self, dim: int, hidden: int, bias: bool = True):
        super().__init__()
        self.fc1: Projection = Projection(dim, self.branches * hidden, bias=bias)
        self.fc2: Projection = Projection(hidden, dim, bias=bias)

    def hidden(self, x: Tensor, ops: BlockOps = TORCH_OPS) -> Tensor:
        """Return the input (B, N, hidden) of fc2. The caller applies fc2, with an operation of :class:`BlockOps`."""
        return ops.linear_gelu(x, self.fc1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x))


class ExactMlp(Mlp):
    """MLP: linear, exact GELU, linear."""

    def hidden(self, x: Tensor, ops: BlockOps = TORCH_OPS) -> Tensor:
        return F.gelu(ops.linear(x, self.fc1))


class SwiGlu(Mlp):
    """MLP fc2(SiLU(a) * b), where a and b are the halves of fc1's output (Shazeer 2020; used in Llama)."""

    branches: ClassVar[int] = 2

    def hidden(self, x: Tensor, ops: BlockOps = TORCH_OPS) -> Tensor:
        return ops.swiglu(ops.linear(x, self.fc1))


class PatchEmbed(nn.Module):
    """Embedding of patches: maps pictures (B, C, H, W) or clips (B, C, T, H, W) to tokens (B, N, D). Tokens are in the
    order of frames, rows and columns.

    Args:
        given: number of channels after the first ``in_channels``. An input without these channels is padded with zeros.
        bottleneck: width between two projections (JiT; Li & He 2025, sec. 4); None for a single projection.
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
        """Return the values of the patches (B, N, C * prod(patch)), in the order of the convolution's weight."""
        if self.given and x.shape[1] == self.in_channels:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, self.given))
        patch = self.proj.kernel_size
        sides = [part for side, p in zip(x.shape[2:], patch, strict=True) for part in (side // p, p)]
        grid, inside = range(2, 2 + len(sides), 2), range(3, 3 + len(sides), 2)
        x = x.to(self.proj.weight.dtype).reshape(*x.shape[:2], *sides)
        return x.permute(0, *grid, 1, *inside).flatten(1 + len(patch)).flatten(1, len(patch))

    def project(self, patches: Tensor) -> Tensor:
        tokens = _convolve_patches(patches, self.proj.weight, cast(Tensor, self.proj.bias))
        return tokens if self.expand is None else self.expand(tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.patches(x))


def _convolve_patches(patches: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply a convolution to patches that do not overlap, as a matrix product. Unlike a convolution, this also works
    for a subset of a picture's patches."""
    if has_torch_function((weight, bias)):
        # Gemini keeps parameters in memory only during a call, and views must not outlive it. So dispatch this function
        # as one call.
        return handle_torch_function(_convolve_patches, (weight, bias), patches, weight, bias)
    return F.linear(patches, weight.flatten(1), bias)


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    """Return the sinusoids (B, dim) float32 of times t (B,), integer or float: first the cosines, then the sines
    (Vaswani et al. 2017)."""
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angles = t.float()[:, None] * freqs
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class TimestepEmbedder(nn.Module):
    """Embedding of timesteps (B,) as (B, D): fp32 sinusoids, then a two-layer MLP. The embedded time is t / ``unit``,
    or (``reversed_from`` - t) / ``unit`` if ``reversed_from`` is set. normed: True to append the sinusoids' RMSNorm
    (B, frequencies)."""

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
    """Embedding of class labels (B,) int64 as (B, D). Row ``num_classes`` is guidance's null class;
    ``null_class=False`` omits this row, for models trained without class dropout."""

    def __init__(self, num_classes: int, dim: int, null_class: bool = True):
        super().__init__()
        self.num_classes = num_classes
        self.embedding_table: nn.Embedding = nn.Embedding(num_classes + null_class, dim)

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)
