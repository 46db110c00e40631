"""Redistribute activations between P GPUs for sequence parallelism, from tokens to heads and back.

A kernel reads or writes the memory of all GPUs directly, in one pass over the links, without packing or collectives.
Each rank has its activations in two layouts:

    rows    (B, n, S, H, d): n of the N tokens, with all H heads. S is 3 for q, k and v, and 1 for the attention output.
            All ranks can address this memory.
    heads   S tensors (B, h, N, d): all N tokens, with h <= H / P heads

    heads[s][b, i, p n + t] = rows of rank p [b, t, s, first + i]

The caller must ensure that all ranks are ready (opendit.parallel.sequence.peer_memory).
"""

import torch
from torch import Tensor

from opendit.kernels.language import tl, triton

# ---------------------------------------------------------------------------------------------------------- reference


def exchange_heads_reference(heads: tuple[Tensor, ...], peers: list[Tensor], first: int, push: bool) -> None:
    """Compute :func:`exchange_heads` in torch. peers: each rank's rows (B, n, S, H, d)."""
    _, h, N, _ = heads[0].shape
    for p, rows in enumerate(peers):
        n = rows.shape[1]
        for s, mine in enumerate(heads):
            here = mine[:, :, p * n : (p + 1) * n].transpose(1, 2)
            there = rows[:, :, s, first : first + h]
            target, source = (there, here) if push else (here, there)
            target[:, : here.shape[1]].copy_(source[:, : here.shape[1]])


def send_rows_reference(rows: Tensor, peers: list[Tensor], rank: int) -> None:
    """Compute :func:`send_rows` in torch. peers: each rank's heads (B, N, h, d)."""
    n, (_, length, h, _) = rows.shape[1], peers[0].shape
    real = min(max(length - rank * n, 0), n)
    for p, heads in enumerate(peers):
        heads[:, rank * n : rank * n + real].copy_(rows[:, :real, p * h : (p + 1) * h])


# ------------------------------------------------------------------------------------------------------------- kernel

BLOCK, WARPS = 256, 4  # units of 16 bytes and warps per program, so that each thread has 2 loads in flight


@triton.jit(do_not_specialize=("offset", "start", "ranks", "samples", "tokens", "length", "first"))
def _exchange_heads_kernel(
    a_ptr, b_ptr, c_ptr, table_ptr, offset, start, ranks, samples, tokens, length, first, batch_stride, head_stride,
    token_stride,
    VISITED: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, PUSH: tl.constexpr,
):  # fmt: skip
    """Move BLOCK units per program between this rank and one peer. Neighbouring programs access different peers, so
    that all links are busy. Strides and sizes are in units of UNIT values: 16 bytes where possible."""
    program = tl.program_id(0)
    peer = (start + program % VISITED) % ranks
    part = (program // VISITED) % PARTS
    unit = (program // (VISITED * PARTS)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = unit // (HEADS * HEAD), unit % (HEADS * HEAD)
    sample, token = row // tokens, row % tokens
    at = peer * tokens + token
    real = (sample < samples) & (at < length)
    inside = tl.arange(0, UNIT)[None, :]

    there = (tl.load(table_ptr + peer) + offset).to(tl.pointer_type(a_ptr.dtype.element_ty))
    if UNIT > 1:
        there = tl.multiple_of(there, 16)
    there += ((row * PARTS + part) * ALL + first * HEAD + column)[:, None] * UNIT + inside
    here = a_ptr
    if PARTS == 3:
        address = tl.where(part == 0, a_ptr.to(tl.int64), tl.where(part == 1, b_ptr.to(tl.int64), c_ptr.to(tl.int64)))
        here = address.to(tl.pointer_type(a_ptr.dtype.element_ty))
        if UNIT > 1:
            here = tl.multiple_of(here, 16)
    place = sample * batch_stride + (column // HEAD) * head_stride + at.to(tl.int64) * token_stride + column % HEAD
    here += place[:, None] * UNIT + inside
    if PUSH:
        tl.store(there, tl.load(here, mask=real[:, None]), mask=real[:, None])
    else:
        tl.store(here, tl.load(there, mask=real[:, None]), mask=real[:, None])


def exchange_heads(
    heads: tuple[Tensor, ...],
    addresses: Tensor,
    shape: tuple[int, ...],
    rank: int,
    first: int,
    push: bool,
    own: bool = False,
    offset: int = 0,
) -> None:
    """Fill ``heads`` from all ranks' rows. With ``push``, copy ``heads`` to the rows instead, except to padding rows.

    Args:
        heads: 1 or 3 tensors (B, h, N, d) with equal strides, and unit stride in d.
        addresses: (P,) int64 on the device: addresses of all ranks' contiguous rows.
        shape: shape (B, n, S, H, d) of a rank's rows, in the dtype of heads.
        rank: this rank. The kernel visits the ranks in order, beginning with the next rank and ending with this rank.
        first: index of the first head of ``heads`` among all H heads.
        own: True to exchange only between this rank's rows and heads.
        offset: bytes from the addresses to the rows. If a head's d values take a multiple of 16 bytes, ``offset`` must
            be a multiple of 16, too.

    Raises:
        ValueError: shapes or layouts don't fit.
    """
    (B, h, N, d), (batch, n, parts, all_heads, width), ranks = heads[0].shape, shape, len(addresses)
    layout = heads[0].stride()
    if (batch, parts, width) != (B, len(heads), d) or parts not in (1, 3) or N > ranks * n:
        raise ValueError(f"{len(heads)} x heads {tuple(heads[0].shape)} don't fit rows {shape}")
    if layout[-1] != 1 or any(part.shape != heads[0].shape or part.stride() != layout for part in heads):
        raise ValueError("heads must have one shape and layout, with unit stride in the last dimension")
    unit = 16 // heads[0].element_size()
    aligned = all(part.data_ptr() % 16 == 0 for part in heads)
    if not aligned or any(stride % unit for stride in (d, *layout[:3])):
        unit = 1
    start, visited = (rank, 1) if own else (rank + 1, ranks)
    programs = visited * parts * triton.cdiv(B * n * h * d // unit, BLOCK)
    _exchange_heads_kernel[(programs,)](
        *(heads * 3)[:3], addresses, offset, start, ranks, B, n, N, first, *(stride // unit for stride in layout[:3]),
        VISITED=visited, PARTS=parts, ALL=all_heads * d // unit, HEADS=h, HEAD=d // unit, UNIT=unit, BLOCK=BLOCK,
        PUSH=push, num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rank", "ranks", "samples", "tokens", "length"))
def _send_rows_kernel(
    rows_ptr, table_ptr, rank, ranks, samples, tokens, length,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK units of UNIT values per program from this rank to a peer. A row has ``ranks`` * WIDTH units."""
    peer = (rank + 1 + tl.program_id(0) % ranks) % ranks
    unit = (tl.program_id(0) // ranks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = unit // WIDTH, unit % WIDTH
    sample, token = row // tokens, row % tokens
    at = rank * tokens + token
    real = ((sample < samples) & (at < length))[:, None]
    inside = tl.arange(0, UNIT)[None, :]
    here = rows_ptr + ((row * ranks + peer) * WIDTH + column)[:, None] * UNIT + inside
    there = tl.load(table_ptr + peer).to(tl.pointer_type(rows_ptr.dtype.element_ty))
    there = tl.multiple_of(there, 16) + ((sample * length + at) * WIDTH + column)[:, None] * UNIT + inside
    tl.store(there, tl.load(here, mask=real), mask=real)


def send_rows(rows: Tensor, addresses: Tensor, rank: int, length: int) -> None:
    """Copy this rank's rows to the heads of all ranks (S = 1).

    Args:
        rows: (B, n, H, d), contiguous.
        addresses: (P,) int64 on the device: addresses of all ranks' contiguous heads (B, N, h, d), in rows' dtype.
        length: N; later tokens are padding and are not sent.

    Raises ValueError if H is not divisible by the number of ranks, or N is larger than the ranks' tokens.
    """
    (B, n, H, d), ranks = rows.shape, len(addresses)
    if H % ranks or length > ranks * n:
        raise ValueError(f"rows {tuple(rows.shape)} can't go to {ranks} ranks with {length} tokens")
    width, unit = H // ranks * d, 16 // rows.element_size()
    if width % unit or rows.data_ptr() % 16:
        unit = 1
    programs = ranks * triton.cdiv(B * n * width // unit, BLOCK)
    _send_rows_kernel[(programs,)](
        rows, addresses, rank, ranks, B, n, length, WIDTH=width // unit, UNIT=unit, BLOCK=BLOCK, num_warps=WARPS
    )


def new_heads(parts: int, B: int, h: int, N: int, d: int, like: Tensor) -> tuple[Tensor, ...]:
    """Allocate ``parts`` tensors (B, h, N, d) with the memory layout of contiguous tensors (B, N, h, d)."""
    make = {"dtype": like.dtype, "device": like.device}
    return tuple(torch.empty_strided((B, h, N, d), (N * h * d, d, h * d, 1), **make) for _ in range(parts))
