"""Products of tensor parallelism whose communication overlaps with computation, through symmetric memory.

Tensor parallelism has two kinds of products: column products of all ranks' tokens with a rank's output features, and
row products, whose results are summed over the ranks. A collective before or after a product leaves the multiprocessors
idle. Here copy engines move tokens during the product (Wang et al. 2023, "Overlap Communication with Dependent
Computation via Decomposition"):

    column, forward    send own tokens; multiply own tokens; multiply each other rank's tokens once they have arrived
    row, forward       multiply other ranks' tokens; multiply own tokens while ranks fetch the results; add the results

The backward pass of a column product is a row product, and vice versa. The gradient of a column product's weight needs
the tokens of all ranks. The forward pass does not keep these tokens, so the backward pass sends them again.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from opendit.common.torch_utils import not_compiled
from opendit.kernels.linear import weight_gradient
from opendit.parallel.sequence.peer_memory import Buffer, PeerMemory, sample_by_sample
from opendit.parallel.sequence.products import column_sums

# minimum number of a sample's tokens on a rank; with fewer, the separate products for each sample and rank would take
# longer than a collective and one product
LEAST_TOKENS = 1024


def overlaps(x: Tensor, weight: Any) -> bool:
    """Return True if the products of this file support x (B, n, in) and this weight."""
    plain = isinstance(weight, Tensor) and x.dtype == weight.dtype and not has_torch_function((x, weight))
    return plain and x.dim() == 3 and x.shape[1] >= LEAST_TOKENS


@not_compiled  # a compiler can't see that other ranks read and write the buffers
def overlapped_column(x: Tensor, weight: Tensor, bias: Tensor | None, memory: PeerMemory) -> Tensor:
    """Compute x W^T + bias (B, P n, out / P) for the tokens of all ranks. Each rank passes its tokens x (B, n, in) and
    its part of the weight (out / P, in); see :func:`opendit.parallel.collectives.column_product`."""
    return _Column.apply(x, weight, bias, memory)


@not_compiled
def overlapped_row(z: Tensor, weight: Tensor, memory: PeerMemory) -> Tensor:
    """Compute z W^T from this rank's input features z (B, P n, in / P) of all tokens and its part of the weight (out,
    in / P). Return the sum over all ranks for this rank's tokens, (B, n, out)."""
    return _Row.apply(z, weight, memory)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, memory: PeerMemory):
        ctx.save_for_backward(x, weight)
        ctx.memory = memory
        return _of_all_tokens(x, weight.t(), bias, memory)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x, weight), memory, rows = ctx.saved_tensors, ctx.memory, grad.flatten(0, 1)
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        dx = dweight = None

        def gradient_of_weight() -> None:
            nonlocal dweight
            if of_weight:
                dweight = weight_gradient(rows, _buffer(memory, Buffer.EVERYONE, x).flatten(0, 1))

        memory.begin(Buffer.GRADIENT)  # begin() also ensures that all ranks have finished reading EVERYONE
        if of_weight:
            _send(memory, Buffer.EVERYONE, x, own=True)
        if of_x or of_weight:
            dx = _of_own_tokens(grad, weight if of_x else None, memory, gradient_of_weight)
        return dx, dweight, column_sums(rows) if of_bias else None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, weight: Tensor, memory: PeerMemory):
        ctx.save_for_backward(z, weight)
        ctx.memory = memory
        memory.begin(Buffer.GRADIENT)
        return _of_own_tokens(z, weight.t(), memory)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (z, weight), memory = ctx.saved_tensors, ctx.memory
        of_z, of_weight, _ = ctx.needs_input_grad
        dweight = None
        dz = _of_all_tokens(grad, weight if of_z else None, None, memory, keep=of_weight)
        if of_weight:
            dweight = weight_gradient(_buffer(memory, Buffer.INPUT, grad).flatten(0, 1), z.flatten(0, 1))
        return dz, dweight, None


def _of_all_tokens(
    x: Tensor, matrix: Tensor | None, bias: Tensor | None, memory: PeerMemory, keep: bool = False
) -> Tensor | None:
    """Send x (B, n, F) to all ranks. Return x @ matrix + bias (B, P n, columns) for the tokens of all ranks, or None
    without a matrix. keep: True to leave the tokens of all ranks in the input buffer."""
    memory.begin(Buffer.INPUT)
    events = _send(memory, Buffer.INPUT, x, own=keep)
    out = None if matrix is None else x.new_empty(len(x), memory.group.size * x.shape[1], matrix.shape[1])
    for rank, tokens in _arriving(memory, x, events):
        if out is not None and matrix is not None:
            _multiply(out[:, _tokens_of(rank, x)], tokens, matrix, bias)
    return out


def _of_own_tokens(
    z: Tensor, matrix: Tensor | None, memory: PeerMemory, meanwhile: Callable[[], None] = lambda: None
) -> Tensor | None:
    """Compute z @ matrix from this rank's z (B, P n, columns). Return the sum over all ranks for this rank's tokens,
    (B, n, F), or None without a matrix. meanwhile: function that enqueues work to run during the transfers."""
    rank, size = memory.group.rank, memory.group.size
    own = z.unflatten(1, (size, -1)).select(1, rank)
    if matrix is None:
        memory.rows(Buffer.GRADIENT, (1,), z.dtype)
        memory.wait(memory.ready_beside(Buffer.GRADIENT))
        meanwhile()
        return None
    shape = (size, len(z), z.shape[1] // size, matrix.shape[1])
    slots = memory.rows(Buffer.GRADIENT, shape, z.dtype).of
    for peer in _others(memory):
        _multiply(slots[rank][peer], z[:, _tokens_of(peer, own)], matrix)
    memory.wait(memory.ready_beside(Buffer.GRADIENT))
    found = z.new_empty(size - 1, *shape[1:])
    sources = [slots[peer][rank] for peer in _others(memory)]
    memory.copy_beside([sample_by_sample(*pair) for pair in zip(found, sources, strict=True)])
    out = z.new_empty(shape[1:])
    _multiply(out, own, matrix)
    meanwhile()
    memory.wait()
    for part in found:
        out += part
    return out


def _others(memory: PeerMemory) -> list[int]:
    """Return all other ranks, beginning with the rank after this one."""
    rank, size = memory.group.rank, memory.group.size
    return [(rank + i) % size for i in range(1, size)]


def _tokens_of(rank: int, x: Tensor) -> slice:
    return slice(rank * x.shape[1], (rank + 1) * x.shape[1])


def _buffer(memory: PeerMemory, buffer: Buffer, x: Tensor, rank: int | None = None) -> Tensor:
    """Return a rank's buffer (by default this rank's) as a tensor (B, P n, F) for the tokens of all ranks."""
    shape = (len(x), memory.group.size * x.shape[1], x.shape[2])
    return memory.rows(buffer, shape, x.dtype).of[memory.group.rank if rank is None else rank]


def _send(memory: PeerMemory, buffer: Buffer, x: Tensor, own: bool) -> list[Any]:
    """Start to copy x (B, n, F) to the buffers of all other ranks. Return an event for each of them. own: True to copy
    x to this rank's buffer as well."""
    mine = _tokens_of(memory.group.rank, x)

    def pairs(rank: int) -> list[tuple[Tensor, Tensor]]:
        return sample_by_sample(_buffer(memory, buffer, x, rank)[:, mine], x)

    return memory.copy_beside([pairs(rank) for rank in _others(memory)], pairs(memory.group.rank) if own else ())


def _arriving(memory: PeerMemory, x: Tensor, events: list[Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, the rank's tokens (B, n, F)): first this rank, then each other rank when its tokens have arrived."""
    yield memory.group.rank, x
    received = _buffer(memory, Buffer.INPUT, x)
    for i, peer in enumerate(reversed(_others(memory))):  # the previous rank's tokens arrive first
        memory.wait(events[i])
        memory.ready(Buffer.INPUT, again=i > 0)
        yield peer, received[:, _tokens_of(peer, x)]


def _multiply(out: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> None:
    """Write x @ matrix + bias of x (B, n, F) to ``out`` (B, n, columns)."""
    for target, rows in zip(out, x, strict=True):
        if bias is None:
            torch.mm(rows, matrix, out=target)
        else:
            torch.addmm(bias, rows, matrix, out=target)
