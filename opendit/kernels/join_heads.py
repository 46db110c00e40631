"""Normalise, rotate and join the queries, keys and values of several streams to one sequence, without gradients.

A stream is the tokens of a caption or of media. Each stream has q (B, n, H, d) and k and v (B, n, K, d), which are
strided views of its projection, and its own norms and rotations (rotate_heads.py). One launch per stream reads each
value once and writes it to its position in the joint sequence; torch would write q and k twice and copy v. Training
uses torch, because the backward pass of a concatenation costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opendit.kernels import common
from opendit.kernels.common import check_tensors, choose_launch, next_power_of_2
from opendit.kernels.language import tl, triton
from opendit.kernels.rotate_heads import (
    forward_launch,
    forward_rows,
    in_rows,
    pointer_of_table,
    rotate_heads_reference,
    strides_of,
)


@dataclass(frozen=True)
class StreamHeads:
    """The heads of one stream.

    q: (B, n, H, d). k, v: (B, n, K, d). q_weight, k_weight: weights (d,) of RMSNorm; None: no norms. table: cosines and
    sines, see :func:`opendit.kernels.rotate_heads.rotate_heads`; None: no rotation.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    table: Tensor | None = None


# ---------------------------------------------------------------------------------------------------------- reference


def join_heads_reference(streams: Sequence[StreamHeads], eps: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`join_heads` in torch."""
    turned = [rotate_heads_reference(s.q, s.k, s.q_weight, s.k_weight, s.table, eps) for s in streams]
    q, k = (torch.cat(parts, dim=1) for parts in zip(*turned, strict=True))
    return q, k, torch.cat([stream.v for stream in streams], dim=1)


# ------------------------------------------------------------------------------------------------------------- kernel


@triton.jit(
    do_not_specialize=(
        "tokens",
        "length",
        "out_length",
        "q_batch",
        "q_token",
        "q_head",
        "k_batch",
        "k_token",
        "k_head",
        "v_batch",
        "v_token",
        "v_head",
        "table_stride",
    )  # fmt: skip
)
def _join_heads_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, table_ptr, q_out_ptr, k_out_ptr, v_out_ptr, tokens, length,
    out_length, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, table_stride, eps,
    H: tl.constexpr, K: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, Q_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Process q in the first programs, k in the next programs, and v in the last programs."""
    q_rows = tokens * H
    k_rows = tokens * K
    q_programs = (q_rows + CHUNK - 1) // CHUNK
    k_programs = (k_rows + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    if program < q_programs:
        first = program * CHUNK
        forward_rows(
            q_ptr, q_weight_ptr, table_ptr, q_out_ptr, first, tl.minimum(first + CHUNK, q_rows), length, out_length,
            q_batch, q_token, q_head, table_stride, eps, H, HEAD, BLOCK, Q_UNIT, ROWS, STAGES, NORM, TURN, False,
        )  # fmt: skip
    elif program < q_programs + k_programs:
        first = (program - q_programs) * CHUNK
        forward_rows(
            k_ptr, k_weight_ptr, table_ptr, k_out_ptr, first, tl.minimum(first + CHUNK, k_rows), length, out_length,
            k_batch, k_token, k_head, table_stride, eps, K, HEAD, BLOCK, K_UNIT, ROWS, STAGES, NORM, TURN, False,
        )  # fmt: skip
    else:
        first = (program - q_programs - k_programs) * CHUNK
        forward_rows(
            v_ptr, v_ptr, v_ptr, v_out_ptr, first, tl.minimum(first + CHUNK, k_rows), length, out_length,
            v_batch, v_token, v_head, 0, eps, K, HEAD, BLOCK, V_UNIT, ROWS, STAGES, False, False, False,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- operation


def join_heads(streams: Sequence[StreamHeads], eps: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, N, H, d), k and v (B, N, K, d) of all streams, joined in order, computed by a Triton kernel.

    q and k of a stream are normalised if the stream has weights, and rotated if it has a table. Not differentiable.

    Raises:
        ValueError: shapes, dtypes or devices don't fit.
    """
    first = streams[0]
    (B, _, H, d), K = first.q.shape, first.k.shape[2]
    length = sum(stream.q.shape[1] for stream in streams)
    outputs = [x.new_empty(B, length, x.shape[2], d) for x in (first.q, first.k, first.v)]
    begin = 0
    for number, stream in enumerate(streams):
        n = stream.q.shape[1]
        fits = stream.q.shape == (B, n, H, d) and stream.k.shape == stream.v.shape == (B, n, K, d)
        if not fits or (stream.q_weight is None) != (stream.k_weight is None):
            shapes = [tuple(x.shape) for x in (stream.q, stream.k, stream.v)]
            raise ValueError(f"stream {number}: q, k, v of shapes {shapes} do not join those of the first stream")
        named = {"q_weight": stream.q_weight, "k_weight": stream.k_weight, "table": stream.table}
        check_tensors(q=stream.q, k=stream.k, v=stream.v, **{name: x for name, x in named.items() if x is not None})
        _launch(stream, [out[:, begin : begin + n] for out in outputs], length, eps)
        begin += n
    return outputs[0], outputs[1], outputs[2]


def _launch(stream: StreamHeads, outputs: list[Tensor], out_length: int, eps: float) -> None:
    """Write a stream's q, k and v to its views of the outputs."""
    (B, n, H, d), K = stream.q.shape, stream.k.shape[2]
    prepared = [in_rows(x) for x in (stream.q, stream.k, stream.v)]
    q, units = prepared[0][0], dict(zip(("Q_UNIT", "K_UNIT", "V_UNIT"), (unit for _, unit in prepared), strict=True))
    table, table_stride = pointer_of_table(stream.table, q)
    block = max(2, next_power_of_2(d))
    launch = choose_launch("join_heads", forward_launch(block, False), B * n * H, B * n * H, 2)
    options: dict[str, Any] = {
        "H": H, "K": K, "HEAD": d, "BLOCK": block, "ROWS": launch.rows, "CHUNK": launch.chunk,
        "STAGES": launch.stages, "NORM": stream.q_weight is not None, "TURN": stream.table is not None,
        "num_warps": launch.warps,
    }  # fmt: skip
    programs = -(-B * n * H // launch.chunk) + 2 * -(-B * n * K // launch.chunk)
    _join_heads_kernel[(programs,)](
        *(x for x, _ in prepared), common.or_unused(stream.q_weight, q), common.or_unused(stream.k_weight, q), table,
        *outputs, B * n, n, out_length, *(s for x, unit in prepared for s in strides_of(x, unit)), table_stride, eps,
        **units, **options,
    )  # fmt: skip
