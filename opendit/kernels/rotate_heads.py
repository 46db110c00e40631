"""RMSNorm and rotary position embedding of queries and keys. The rotation turns neighbouring pairs of channels.

The RMSNorm is over the channels of each head, or "across heads": over all channels of a token. q (B, N, H, d) and k (B,
N, K, d) may be strided views of one projection. The norm or the rotation may be missing. One launch processes q and k.
With x = q or k, in fp32:

    xhat = x / rms(x),  z = xhat * weight,  y_2i = z_2i cos_i - z_2i+1 sin_i,  y_2i+1 = z_2i sin_i + z_2i+1 cos_i

The forward pass reads x once and writes y once. With a norm, it saves x. The backward pass reads x and dy once and
writes dx once. With g = dy rotated by the opposite angles:

    dx = rstd * (g * weight - xhat * mean(g * weight * xhat)),  dweight = sum over rows of g * xhat

A row is one head of one token. For a norm of each head, a tile has rows of several tokens. Across heads, a tile has all
rows of one token, and they share one norm.

:func:`join_heads` also writes queries, keys and values of several streams into one sequence. :func:`pack_heads`, for
sampling, writes them into the layout that ranks send.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from opendit.kernels import common
from opendit.kernels.common import Launch, check_tensors, choose_launch, next_power_of_2
from opendit.kernels.language import tl, triton
from opendit.kernels.operators import operator

# ------------------------------------------------------------------------------------------------------------ reference


def rotate_heads_reference(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    table: Tensor | None = None,
    eps: float = 1e-6,
    across: bool = False,
) -> tuple[Tensor, Tensor]:
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            rows = x.flatten(2) if across else x
            x = F.rms_norm(rows, rows.shape[-1:], weight.to(x.dtype), eps).view(x.shape)
        if table is not None:
            (even, odd), (cos, sin) = x.unflatten(-1, (-1, 2)).unbind(-1), table.unsqueeze(-3).unbind(-1)
            x = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)
        found.append(x)
    return found[0], found[1]


# -------------------------------------------------------------------------------------------------------------- kernels

VALUES = 2048  # values in a tile of several tokens
LARGEST = 8192  # maximum number of values in a tile across heads


def forward_launch(size: int, across: bool) -> Launch:
    """Return the forward kernel's launch shape, with 16 values per thread, or up to 32 for large tiles across heads.

    size: number of values in a row; across heads, in a tile.
    """
    if across:
        return Launch(rows=1, tiles=1, warps=min(8, max(1, size // 512)))
    return Launch(rows=max(1, VALUES // size), tiles=1, warps=4)


def backward_launch(size: int, across: bool) -> Launch:
    """Return the backward kernel's launch shape: the forward shape with 32 tiles per program, because a program sums
    the weight's gradient over its tiles."""
    return replace(forward_launch(size, across), tiles=32)


@triton.jit
def _rows_of_tile(start, stop, H: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr):
    """Return the token and the head of each row of a tile, and a mask of the rows that exist."""
    lane = tl.arange(0, ROWS)
    if ACROSS:
        token = lane * 0 + start
        head = lane
        live = lane < H
    else:
        token = (start + lane) // H
        head = (start + lane) % H
        live = start + lane < stop
    return token, head, live


@triton.jit
def _place(token, head, length, batch_stride, token_stride, head_stride, UNIT: tl.constexpr):
    """Return the offsets of rows in a strided tensor. Strides are in units of UNIT values, so that the compiler knows
    the alignment and reads 16 bytes at once."""
    batch = (token // length).to(tl.int64)
    return (batch * batch_stride + (token % length).to(tl.int64) * token_stride + head * head_stride) * UNIT


@triton.jit
def _columns(place, live, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = live[:, None]
    if HEAD < BLOCK:
        mask = mask & (cols < HEAD)[None, :]
    return place[:, None] + cols[None, :], mask


@triton.jit
def _load_pairs(ptr, place, live, HEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Load rows of HEAD values as fp32: the even columns and the odd columns, (ROWS, BLOCK / 2) each."""
    offsets, mask = _columns(place, live, HEAD, BLOCK)
    values = tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (ROWS, BLOCK // 2, 2)))
    return even, odd


@triton.jit
def _store_pairs(ptr, even, odd, place, live, HEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Store even and odd columns from _load_pairs, rounded to the pointer's dtype."""
    offsets, mask = _columns(place, live, HEAD, BLOCK)
    values = tl.reshape(tl.join(even, odd), (ROWS, BLOCK))
    tl.store(ptr + offsets, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_weight(ptr, head, live, HEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr):
    """Load the norm's weight, even and odd columns: one row for each head if ACROSS, else one row for all heads."""
    if ACROSS:
        even, odd = _load_pairs(ptr, head * HEAD, live, HEAD, BLOCK, ROWS)
    else:
        cols = 2 * tl.arange(0, BLOCK // 2)
        even = tl.load(ptr + cols, mask=cols < HEAD, other=0.0).to(tl.float32)[None, :]
        odd = tl.load(ptr + cols + 1, mask=cols + 1 < HEAD, other=0.0).to(tl.float32)[None, :]
    return even, odd


@triton.jit
def _sums(x, ACROSS: tl.constexpr):
    """Return sums over the channels of one norm: the complete tile if ACROSS, otherwise each row."""
    if ACROSS:
        total = tl.sum(tl.sum(x, axis=1), axis=0)
    else:
        total = tl.sum(x, axis=1)[:, None]
    return total


@triton.jit
def forward_rows(
    x_ptr, weight_ptr, table_ptr, y_ptr, first, stop, length, batch_stride, token_stride, head_stride, out_batch,
    out_token, out_part, table_stride, eps,
    H: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, ACROSS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write y for rows ``first`` to ``stop`` - 1 (tokens if ACROSS). A sample has ``length`` tokens in x. Strides in y
    (out_batch, out_token, out_part) are in units of HEAD values."""
    STEP: tl.constexpr = 1 if ACROSS else ROWS
    if NORM:
        _, head, live = _rows_of_tile(first, stop, H, ROWS, ACROSS)
        weight, weight_odd = _load_weight(weight_ptr, head, live, HEAD, BLOCK, ROWS, ACROSS)
    for start in tl.range(first, stop, STEP, num_stages=STAGES):
        token, head, live = _rows_of_tile(start, stop, H, ROWS, ACROSS)
        place = _place(token, head, length, batch_stride, token_stride, head_stride, UNIT)
        even, odd = _load_pairs(x_ptr, place, live, HEAD, BLOCK, ROWS)
        if NORM:
            COUNT: tl.constexpr = H * HEAD if ACROSS else HEAD
            rstd = 1.0 / tl.sqrt(_sums(even * even + odd * odd, ACROSS) / COUNT + eps)
            even = even * rstd * weight
            odd = odd * rstd * weight_odd
        if TURN:
            at = ((token // length).to(tl.int64) * table_stride + token % length) * HEAD
            cos, sin = _load_pairs(table_ptr, at, live, HEAD, BLOCK, ROWS)
            turned = even * cos - odd * sin
            odd = even * sin + odd * cos
            even = turned
        to = _place(token, head, length, out_batch, out_token, 1, HEAD)
        if PARTS > 1:
            SIZE: tl.constexpr = H // PARTS
            to += (head // SIZE).to(tl.int64) * (out_part - SIZE) * HEAD
        _store_pairs(y_ptr, even, odd, to, live, HEAD, BLOCK, ROWS)


@triton.jit(
    do_not_specialize=(
        "tokens", "length", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "table_stride",
    )
)  # fmt: skip
def _rotate_heads_forward_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, table_ptr, q_out_ptr, k_out_ptr, tokens, length, q_batch, q_token, q_head,
    k_batch, k_token, k_head, table_stride, eps,
    H: tl.constexpr, K: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, Q_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr, Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Process q in the first programs, and k in the remaining programs."""
    q_rows = tokens if ACROSS else tokens * H
    k_rows = tokens if ACROSS else tokens * K
    q_programs = (q_rows + CHUNK - 1) // CHUNK
    if tl.program_id(0) < q_programs:
        first = tl.program_id(0) * CHUNK
        forward_rows(
            q_ptr, q_weight_ptr, table_ptr, q_out_ptr, first, tl.minimum(first + CHUNK, q_rows), length, q_batch,
            q_token, q_head, length * H, H, 0, table_stride, eps,
            H, HEAD, BLOCK, Q_UNIT, Q_ROWS, STAGES, NORM, TURN, ACROSS, 1,
        )  # fmt: skip
    else:
        first = (tl.program_id(0) - q_programs) * CHUNK
        forward_rows(
            k_ptr, k_weight_ptr, table_ptr, k_out_ptr, first, tl.minimum(first + CHUNK, k_rows), length, k_batch,
            k_token, k_head, length * K, K, 0, table_stride, eps,
            K, HEAD, BLOCK, K_UNIT, K_ROWS, STAGES, NORM, TURN, ACROSS, 1,
        )  # fmt: skip


@triton.jit
def _backward_rows(
    dy_ptr, x_ptr, weight_ptr, table_ptr, dx_ptr, total_ptr, first, stop, length, dy_batch, dy_token, dy_head,
    x_batch, x_token, x_head, table_stride, eps,
    H: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, DY_UNIT: tl.constexpr, X_UNIT: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, ACROSS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Write dx for rows ``first`` to ``stop`` - 1 (tokens if ACROSS). If SUMS, also sum dweight."""
    STEP: tl.constexpr = 1 if ACROSS else ROWS
    if NORM:
        _, head, live = _rows_of_tile(first, stop, H, ROWS, ACROSS)
        weight, weight_odd = _load_weight(weight_ptr, head, live, HEAD, BLOCK, ROWS, ACROSS)
    if SUMS:
        total = tl.zeros((ROWS, BLOCK // 2), dtype=tl.float32)
        total_odd = tl.zeros((ROWS, BLOCK // 2), dtype=tl.float32)
    for start in tl.range(first, stop, STEP, num_stages=STAGES):
        token, head, live = _rows_of_tile(start, stop, H, ROWS, ACROSS)
        place = _place(token, head, length, dy_batch, dy_token, dy_head, DY_UNIT)
        even, odd = _load_pairs(dy_ptr, place, live, HEAD, BLOCK, ROWS)
        if TURN:
            at = ((token // length).to(tl.int64) * table_stride + token % length) * HEAD
            cos, sin = _load_pairs(table_ptr, at, live, HEAD, BLOCK, ROWS)
            turned = even * cos + odd * sin
            odd = odd * cos - even * sin
            even = turned
        if NORM:
            COUNT: tl.constexpr = H * HEAD if ACROSS else HEAD
            place = _place(token, head, length, x_batch, x_token, x_head, X_UNIT)
            x, x_odd = _load_pairs(x_ptr, place, live, HEAD, BLOCK, ROWS)
            rstd = 1.0 / tl.sqrt(_sums(x * x + x_odd * x_odd, ACROSS) / COUNT + eps)
            x = x * rstd
            x_odd = x_odd * rstd
            if SUMS:
                total += even * x
                total_odd += odd * x_odd
            even = even * weight
            odd = odd * weight_odd
            mean = _sums(even * x + odd * x_odd, ACROSS) / COUNT
            even = rstd * (even - x * mean)
            odd = rstd * (odd - x_odd * mean)
        _store_pairs(dx_ptr, even, odd, (token.to(tl.int64) * H + head) * HEAD, live, HEAD, BLOCK, ROWS)
    if SUMS:
        if ACROSS:
            lane = tl.arange(0, ROWS)
            _store_pairs(total_ptr, total, total_odd, lane * HEAD, lane < H, HEAD, BLOCK, ROWS)
        else:
            cols = 2 * tl.arange(0, BLOCK // 2)
            tl.store(total_ptr + cols, tl.sum(total, axis=0), mask=cols < HEAD)
            tl.store(total_ptr + cols + 1, tl.sum(total_odd, axis=0), mask=cols + 1 < HEAD)


@triton.jit(
    do_not_specialize=(
        "tokens", "length", "dq_batch", "dq_token", "dq_head", "dk_batch", "dk_token", "dk_head", "q_batch",
        "q_token", "q_head", "k_batch", "k_token", "k_head", "table_stride",
    )
)  # fmt: skip
def _rotate_heads_backward_kernel(
    dq_ptr, dk_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, table_ptr, q_out_ptr, k_out_ptr, q_total_ptr, k_total_ptr,
    tokens, length, dq_batch, dq_token, dq_head, dk_batch, dk_token, dk_head, q_batch, q_token, q_head, k_batch,
    k_token, k_head, table_stride, eps,
    H: tl.constexpr, K: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, DQ_UNIT: tl.constexpr,
    DK_UNIT: tl.constexpr, Q_UNIT: tl.constexpr, K_UNIT: tl.constexpr, Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, ACROSS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Process q in the first programs, and k in the remaining programs."""
    q_rows = tokens if ACROSS else tokens * H
    k_rows = tokens if ACROSS else tokens * K
    q_programs = (q_rows + CHUNK - 1) // CHUNK
    if tl.program_id(0) < q_programs:
        program = tl.program_id(0)
        first = program * CHUNK
        q_total_ptr += tl.cast(program, tl.int64) * (H * HEAD if ACROSS else HEAD)
        _backward_rows(
            dq_ptr, q_ptr, q_weight_ptr, table_ptr, q_out_ptr, q_total_ptr, first, tl.minimum(first + CHUNK, q_rows),
            length, dq_batch, dq_token, dq_head, q_batch, q_token, q_head, table_stride, eps,
            H, HEAD, BLOCK, DQ_UNIT, Q_UNIT, Q_ROWS, STAGES, NORM, TURN, ACROSS, SUMS,
        )  # fmt: skip
    else:
        program = tl.program_id(0) - q_programs
        first = program * CHUNK
        k_total_ptr += tl.cast(program, tl.int64) * (K * HEAD if ACROSS else HEAD)
        _backward_rows(
            dk_ptr, k_ptr, k_weight_ptr, table_ptr, k_out_ptr, k_total_ptr, first, tl.minimum(first + CHUNK, k_rows),
            length, dk_batch, dk_token, dk_head, k_batch, k_token, k_head, table_stride, eps,
            K, HEAD, BLOCK, DK_UNIT, K_UNIT, K_ROWS, STAGES, NORM, TURN, ACROSS, SUMS,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- operator


def fits_across(num_heads: int, head_dim: int) -> bool:
    """Return True if a tile can hold all heads of a token, for a norm across heads."""
    return next_power_of_2(num_heads) * next_power_of_2(head_dim) <= LARGEST


def in_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x with unit stride in the last dimension, and UNIT. UNIT is the number of values in 16 bytes if this
    number divides the head size and all strides, otherwise 1."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    unit = 16 // x.element_size()
    return x, 1 if any(size % unit for size in (x.shape[-1], *x.stride()[:3])) else unit


def strides_of(x: Tensor, unit: int) -> list[int]:
    """Return the strides of samples, tokens and heads, in multiples of ``unit`` values."""
    return [stride // unit for stride in x.stride()[:3]]


def pointer_of_table(table: Tensor | None, other: Tensor) -> tuple[Tensor, int]:
    """Return the table as a pointer argument, and the distance in rows between two samples' tables. The distance is 0
    without a table, or if all samples share one."""
    if table is None:
        return other, 0
    if table.stride()[-3:] != (2 * table.shape[-2], 2, 1):
        table = table.contiguous()
    return table, table.stride(0) // (2 * table.shape[-2]) if table.dim() == 4 else 0


def _shape(
    kernel: str, q: Tensor, k: Tensor, weight: Tensor | None, table: Tensor | None, across: bool
) -> tuple[int, int, dict[str, Any]]:
    """Return the numbers of programs for q and for k, and the kernel's options."""
    (B, N, H, d), K = q.shape, k.shape[2]
    across = across and weight is not None
    block = max(2, next_power_of_2(d))
    heads = [next_power_of_2(count) for count in (H, K)]
    default = (backward_launch if kernel.endswith("backward") else forward_launch)(
        block * max(heads) if across else block, across
    )
    rows = [B * N * (1 if across else count) for count in (H, K)]
    launch = choose_launch(kernel, default, max(rows), max(rows), 2)
    chunk = launch.tiles if across else launch.chunk
    tile = heads if across else [launch.rows] * 2
    return -(-rows[0] // chunk), -(-rows[1] // chunk), {
        "H": H, "K": K, "HEAD": d, "BLOCK": block, "Q_ROWS": tile[0], "K_ROWS": tile[1], "CHUNK": chunk,
        "STAGES": launch.stages, "NORM": weight is not None, "TURN": table is not None, "ACROSS": across,
        "num_warps": launch.warps,
    }  # fmt: skip


def _forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, table: Tensor | None, eps: float,
    across: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    outputs = _forward_fake(q, k, q_weight, k_weight, table, eps, across)
    (q, q_unit), (k, k_unit) = in_rows(q), in_rows(k)
    table_pointer, table_stride = pointer_of_table(table, q)
    q_programs, k_programs, options = _shape("rotate_heads_forward", q, k, q_weight, table, across)
    _rotate_heads_forward_kernel[(q_programs + k_programs,)](
        q, k, common.or_unused(q_weight, q), common.or_unused(k_weight, k), table_pointer, *outputs,
        q.shape[0] * q.shape[1], q.shape[1], *strides_of(q, q_unit), *strides_of(k, k_unit), table_stride, eps,
        Q_UNIT=q_unit, K_UNIT=k_unit, **options,
    )  # fmt: skip
    return outputs


def _forward_fake(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, table: Tensor | None, eps: float,
    across: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _backward(
    dq: Tensor, dk: Tensor, q: Tensor | None, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
    table: Tensor | None, eps: float, across: bool, sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q_out, k_out, q_sum, k_sum = _backward_fake(dq, dk, q, k, q_weight, k_weight, table, eps, across, sums)
    given = [in_rows(x) for x in (dq, dk, common.or_unused(q, dq), common.or_unused(k, dk))]
    table_pointer, table_stride = pointer_of_table(table, dq)
    q_programs, k_programs, options = _shape("rotate_heads_backward", dq, dk, q_weight, table, across)
    totals = [dq, dk]
    if sums:
        programs = (q_programs, q_sum), (k_programs, k_sum)
        totals = [torch.empty(count, len(out), dtype=torch.float32, device=dq.device) for count, out in programs]
    units = dict(zip(("DQ_UNIT", "DK_UNIT", "Q_UNIT", "K_UNIT"), (unit for _, unit in given), strict=True))
    _rotate_heads_backward_kernel[(q_programs + k_programs,)](
        *(x for x, _ in given), common.or_unused(q_weight, dq), common.or_unused(k_weight, dk), table_pointer, q_out,
        k_out, *totals, dq.shape[0] * dq.shape[1], dq.shape[1],
        *(stride for x, unit in given for stride in strides_of(x, unit)), table_stride, eps,
        SUMS=sums, **units, **options,
    )  # fmt: skip
    if sums:
        q_sum, k_sum = (common.finish_total(t, out.dtype) for t, out in zip(totals, (q_sum, k_sum), strict=True))
    return q_out, k_out, q_sum, k_sum


def _backward_fake(
    dq: Tensor, dk: Tensor, q: Tensor | None, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
    table: Tensor | None, eps: float, across: bool, sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q_sum, k_sum = (common.like_bias(weight if sums else None, dq) for weight in (q_weight, k_weight))
    return dq.new_empty(dq.shape), dk.new_empty(dk.shape), q_sum, k_sum


def _setup_context(ctx, inputs, output) -> None:
    q, k, q_weight, k_weight, table, ctx.eps, ctx.across = inputs
    kept = (q, k) if q_weight is not None else (None, None)
    ctx.save_for_backward(*kept, q_weight, k_weight, table)


def _autograd_backward(ctx, dq, dk):
    saved = ctx.saved_tensors
    sums = saved[2] is not None and (ctx.needs_input_grad[2] or ctx.needs_input_grad[3])
    dq, dk, *of_weights = _backward_op(dq, dk, *saved, ctx.eps, ctx.across, sums)
    return dq, dk, *(of_weights if sums else (None, None)), None, None, None


_backward_op = operator(
    "rotate_heads_backward(Tensor dq, Tensor dk, Tensor? q, Tensor? k, Tensor? q_weight, Tensor? k_weight, "
    "Tensor? table, float eps, bool across, bool sums) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_forward_op = operator(
    "rotate_heads(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? table, float eps, bool across) "
    "-> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _autograd_backward,
    _setup_context,
)


def rotate_heads(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    table: Tensor | None = None,
    eps: float = 1e-6,
    across: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate queries and keys by Triton kernels, differentiable in q, k and weights. Return contiguous
    tensors.

    Args:
        q, k: (B, N, H, d) and (B, N, K, d) of one dtype, bf16, fp16 or fp32, of any strides.
        q_weight, k_weight: RMSNorm's weights (d,), any of these dtypes; across heads (H d,) and (K d,). None for both:
            no norms.
        table: (N, d / 2, 2) or (B, N, d / 2, 2) fp32, cosines and sines of each token's pairs. None: no rotation.
        across: compute each norm over all channels of a token instead of each head's.

    Raises:
        ValueError: shapes, dtypes or devices don't fit, or there are too many channels for a norm across heads.
    """
    if q.dim() != 4 or k.dim() != 4 or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]) or q.dtype != k.dtype:
        raise ValueError(
            f"q must be (B, N, H, d) and k (B, N, K, d) of one dtype, not {tuple(q.shape)} {q.dtype} and "
            f"{tuple(k.shape)} {k.dtype}"
        )
    head_dim, weights = q.shape[-1], {}
    for name, x, weight in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
        if (weight is None) != (q_weight is None):
            raise ValueError("q_weight and k_weight must both be given, or neither")
        if weight is not None:
            width = head_dim * (x.shape[2] if across else 1)
            if weight.shape != (width,):
                raise ValueError(f"{name} must be ({width},), not {tuple(weight.shape)}")
            weights[name] = weight
            if across and not fits_across(x.shape[2], head_dim):
                raise ValueError(f"a norm across {x.shape[2]} heads of {head_dim} has more than {LARGEST} channels")
    if table is not None:
        shape = (q.shape[1], head_dim // 2, 2)
        if head_dim % 2 or tuple(table.shape) not in (shape, (q.shape[0], *shape)) or table.dtype != torch.float32:
            raise ValueError(
                f"table must be fp32 {shape} or {(q.shape[0], *shape)} for heads of an even size, not {table.dtype} "
                f"{tuple(table.shape)} for {head_dim}"
            )
        weights["table"] = table
    check_tensors(q=q, k=k, **weights)
    return _forward_op(q, k, q_weight, k_weight, table, eps, across)


# ------------------------------------------------------------------------------------------------------ several streams


@dataclass(frozen=True)
class StreamHeads:
    """Queries, keys and values of one stream: the tokens of a caption or of media."""

    q: Tensor  # (B, n, H, d)
    k: Tensor  # (B, n, K, d)
    v: Tensor  # (B, n, K, d)
    # RMSNorm's weights: (d,), or across heads (H d,) and (K d,); None: no norms
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    table: Tensor | None = None  # cosines and sines, see rotate_heads(); None: no rotation


def pack_heads_reference(stream: StreamHeads, parts: int, eps: float = 1e-6, across: bool = False) -> Tensor:
    q, k = rotate_heads_reference(stream.q, stream.k, stream.q_weight, stream.k_weight, stream.table, eps, across)
    return torch.stack([x.unflatten(2, (parts, -1)).movedim(2, 0) for x in (q, k, stream.v)], dim=3)


@triton.jit(
    do_not_specialize=(
        "tokens", "length", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token",
        "v_head", "q_out_batch", "q_out_token", "k_out_batch", "k_out_token", "out_part", "table_stride",
    )
)  # fmt: skip
def _join_heads_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, table_ptr, q_out_ptr, k_out_ptr, v_out_ptr, tokens, length,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, q_out_batch, q_out_token,
    k_out_batch, k_out_token, out_part, table_stride, eps,
    H: tl.constexpr, K: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, Q_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, ACROSS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Process q in the first programs, k in the next programs, and v in the last programs."""
    q_rows = tokens if ACROSS else tokens * H
    k_rows = tokens if ACROSS else tokens * K
    q_programs = (q_rows + CHUNK - 1) // CHUNK
    k_programs = (k_rows + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    if program < q_programs:
        first = program * CHUNK
        forward_rows(
            q_ptr, q_weight_ptr, table_ptr, q_out_ptr, first, tl.minimum(first + CHUNK, q_rows), length, q_batch,
            q_token, q_head, q_out_batch, q_out_token, out_part, table_stride, eps,
            H, HEAD, BLOCK, Q_UNIT, Q_ROWS, STAGES, NORM, TURN, ACROSS, PARTS,
        )  # fmt: skip
    elif program < q_programs + k_programs:
        first = (program - q_programs) * CHUNK
        forward_rows(
            k_ptr, k_weight_ptr, table_ptr, k_out_ptr, first, tl.minimum(first + CHUNK, k_rows), length, k_batch,
            k_token, k_head, k_out_batch, k_out_token, out_part, table_stride, eps,
            K, HEAD, BLOCK, K_UNIT, K_ROWS, STAGES, NORM, TURN, ACROSS, PARTS,
        )  # fmt: skip
    else:
        first = (program - q_programs - k_programs) * CHUNK
        forward_rows(
            v_ptr, v_ptr, v_ptr, v_out_ptr, first, tl.minimum(first + CHUNK, k_rows), length, v_batch,
            v_token, v_head, k_out_batch, k_out_token, out_part, 0, eps,
            K, HEAD, BLOCK, V_UNIT, K_ROWS, STAGES, False, False, ACROSS, PARTS,
        )  # fmt: skip


class _JoinHeads(torch.autograd.Function):
    """Join the heads of all streams. tensors: six for each stream, the fields of :class:`StreamHeads`."""

    @staticmethod
    def forward(ctx, eps: float, *tensors: Tensor | None):
        streams = [StreamHeads(*cast(Any, tensors[at : at + 6])) for at in range(0, len(tensors), 6)]
        lengths = [stream.q.shape[1] for stream in streams]
        outputs = [x.new_empty(len(x), sum(lengths), *x.shape[2:]) for x in (streams[0].q, streams[0].k, streams[0].v)]
        saved, begin = [], 0
        for stream, length in zip(streams, lengths, strict=True):
            _launch(stream, [out[:, begin : begin + length].unsqueeze(0) for out in outputs], eps)
            begin += length
            q, k = (None, None) if stream.q_weight is None else (stream.q, stream.k)
            saved += [q, k, stream.q_weight, stream.k_weight, stream.table]
        ctx.save_for_backward(*saved)
        ctx.lengths, ctx.eps = lengths, eps
        return tuple(outputs)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
        every: Sequence[Tensor | None] = ctx.saved_tensors  # recomputed blocks allow one access
        gradients: list[Tensor | None] = [None]
        of_streams = zip(*(g.split(ctx.lengths, dim=1) for g in (dq, dk, dv)), strict=True)
        for number, (dq, dk, dv) in enumerate(of_streams):
            saved, needed = every[5 * number :][:5], ctx.needs_input_grad[1 + 6 * number :]
            sums = saved[2] is not None and (needed[3] or needed[4])
            dq, dk, *of_weights = _backward_op(dq, dk, *saved, ctx.eps, False, sums)
            gradients += [dq, dk, dv, *(of_weights if sums else (None, None)), None]
        return tuple(gradients)


def join_heads(streams: Sequence[StreamHeads], eps: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, N, H, d), k and v (B, N, K, d) of all streams, joined in order, computed by a Triton kernel.

    q and k are normalised if the stream has weights, and rotated if it has a table. One launch per stream reads and
    writes each value once. Differentiable in q, k, v and the weights. Raises ValueError if shapes, dtypes or devices
    don't fit.
    """
    first = streams[0]
    (B, _, H, d), K = first.q.shape, first.k.shape[2]
    for number, stream in enumerate(streams):
        n = stream.q.shape[1]
        fits = stream.q.shape == (B, n, H, d) and stream.k.shape == stream.v.shape == (B, n, K, d)
        if not fits or (stream.q_weight is None) != (stream.k_weight is None):
            shapes = [tuple(x.shape) for x in (stream.q, stream.k, stream.v)]
            raise ValueError(f"stream {number}: q, k, v of shapes {shapes} do not join those of the first stream")
    tensors = [x for s in streams for x in (s.q, s.k, s.v, s.q_weight, s.k_weight, s.table)]
    return _JoinHeads.apply(eps, *tensors)


def pack_heads(stream: StreamHeads, parts: int, eps: float = 1e-6, across: bool = False) -> Tensor:
    """Normalise and rotate q and k like :func:`join_heads`. Return q, k and v (B, n, H, d) as (parts, B, n, 3, H /
    parts, d), with consecutive heads in each part.

    One Triton kernel computes this, without gradients. across: see :func:`rotate_heads`. Raises ValueError if shapes,
    dtypes or devices don't fit.
    """
    B, n, H, d = stream.q.shape
    width = H * d if across else d
    fits = stream.k.shape == stream.v.shape == stream.q.shape and H % parts == 0
    for weight in (stream.q_weight, stream.k_weight):
        fits = fits and (weight is None) == (stream.q_weight is None) and (weight is None or weight.shape == (width,))
    if not fits or (across and not fits_across(H, d)):
        shapes = [tuple(x.shape) for x in (stream.q, stream.k, stream.v)]
        raise ValueError(f"q, k, v of shapes {shapes} and weights of {width} values can't be packed in {parts} parts")
    packed = stream.q.new_empty(parts, B, n, 3, H // parts, d)
    _launch(stream, list(packed.unbind(3)), eps, across)
    return packed


def _launch(stream: StreamHeads, outputs: list[Tensor], eps: float, across: bool = False) -> None:
    """Write a stream's q, k and v to ``outputs``, three views (parts, B, n, heads per part, d)."""
    named = {"q_weight": stream.q_weight, "k_weight": stream.k_weight, "table": stream.table}
    check_tensors(q=stream.q, k=stream.k, v=stream.v, **{name: x for name, x in named.items() if x is not None})
    (B, n, _, d), prepared = stream.q.shape, [in_rows(x) for x in (stream.q, stream.k, stream.v)]
    q, units = prepared[0][0], dict(zip(("Q_UNIT", "K_UNIT", "V_UNIT"), (unit for _, unit in prepared), strict=True))
    table, table_stride = pointer_of_table(stream.table, q)
    q_programs, k_programs, options = _shape("join_heads", q, stream.k, stream.q_weight, stream.table, across)
    out_strides = [stride // d for out in outputs[:2] for stride in out.stride()[1:3]]
    _join_heads_kernel[(q_programs + 2 * k_programs,)](
        *(x for x, _ in prepared), common.or_unused(stream.q_weight, q), common.or_unused(stream.k_weight, q), table,
        *outputs, B * n, n, *(s for x, unit in prepared for s in strides_of(x, unit)), *out_strides,
        outputs[0].stride(0) // d, table_stride, eps, PARTS=len(outputs[0]), **units, **options,
    )  # fmt: skip
