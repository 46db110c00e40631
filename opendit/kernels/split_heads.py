"""Split a projection qkv (B, N, 3 D), D = H * d, into views q, k, v (B, H, N, d). One kernel computes qkv's gradient.

torch's backward stacks dq, dk and dv and then copies the stack into qkv's order. It reads or writes 12 activation
tensors. This kernel writes directly to dqkv, and reads or writes 6. It also computes the gradient of the projection's
bias:

    dqkv[b, n, (s, h, j)] = (dq, dk, dv)[s][b, h, n, j],  dbias = sum over b, n of dqkv
"""

import torch
from torch import Tensor

from opendit.kernels import common, fp8
from opendit.kernels.common import Launch, block_width, check_tensors, choose_launch
from opendit.kernels.fp8 import Float8
from opendit.kernels.language import tl, triton
from opendit.kernels.operators import operator
from opendit.kernels.tiles import column_block, float8_factor, float8_range, store_column_sums

# ---------------------------------------------------------------------------------------------------------- reference


def split_heads_reference(qkv: Tensor, num_heads: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`split_heads` in torch. ``bias`` changes no value, but gets its gradient in the backward pass."""
    if bias is not None:
        qkv = qkv + (bias - bias.detach())
    return head_views(qkv, num_heads)


def head_views(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (B, H, N, d) as views of qkv (B, N, 3 D)."""
    B, N, width = qkv.shape
    q, k, v = qkv.view(B, N, 3, num_heads, width // (3 * num_heads)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


# ------------------------------------------------------------------------------------------------------------- kernel

BACKWARD = Launch(rows=32, tiles=4, warps=4)
# fewer programs than BACKWARD, because each program reads all partial maxima
BACKWARD_FLOAT8 = Launch(rows=32, tiles=16, warps=4)


@triton.jit
def _gather_rows(
    source_ptr, dqkv_ptr, total_ptr, factor, column, first, stop, length, batch_stride, head_stride, token_stride,
    D: tl.constexpr, HEAD: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, SUMS: tl.constexpr, FLOAT8: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Copy rows first .. stop of dq, dk or dv to dqkv, and write their sum to ``total_ptr``. Strides are in units of
    UNIT values, so that the compiler knows the alignment and reads 16 bytes at once."""
    cols = column + tl.arange(0, BLOCK)
    inside = (cols // HEAD) * (head_stride * UNIT) + cols % HEAD
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        _, mask = column_block(column, start, stop, D, BLOCK, ROWS)
        rows = start + tl.arange(0, ROWS)
        source = (rows // length).to(tl.int64) * batch_stride + (rows % length).to(tl.int64) * token_stride
        value = tl.load(source_ptr + (source * UNIT)[:, None] + inside[None, :], mask=mask, other=0.0)
        if SUMS:
            total += value.to(tl.float32)
        if FLOAT8:
            value = float8_range(value.to(tl.float32), factor, LIMIT).to(dqkv_ptr.dtype.element_ty)
        tl.store(dqkv_ptr + (rows.to(tl.int64) * (3 * D))[:, None] + cols[None, :], value, mask=mask)
    if SUMS:
        store_column_sums(total_ptr, total, column, D, BLOCK)


@triton.jit(do_not_specialize=("rows", "length", "batch_stride", "head_stride", "token_stride"))
def _gather_heads_kernel(
    dq_ptr, dk_ptr, dv_ptr, dqkv_ptr, partial_ptr, descale_ptr, total_ptr, rows, length, batch_stride,
    head_stride, token_stride,
    D: tl.constexpr, HEAD: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr, SUMS: tl.constexpr,
    FLOAT8: tl.constexpr, PARTIALS: tl.constexpr, TARGET: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    which = (tl.program_id(0) // BLOCKS) % 3
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    program = tl.program_id(0) // (3 * BLOCKS)
    first = program * CHUNK
    stop = tl.minimum(first + CHUNK, rows)
    factor = 1.0
    if FLOAT8:
        factor = float8_factor(partial_ptr, descale_ptr, PARTIALS, TARGET)
    dqkv_ptr += which * D
    total_ptr += tl.cast(program, tl.int64) * (3 * D) + which * D
    if which == 0:
        _gather_rows(
            dq_ptr, dqkv_ptr, total_ptr, factor, column, first, stop, length, batch_stride, head_stride, token_stride,
            D, HEAD, UNIT, BLOCK, ROWS, STAGES, SUMS, FLOAT8, LIMIT,
        )  # fmt: skip
    elif which == 1:
        _gather_rows(
            dk_ptr, dqkv_ptr, total_ptr, factor, column, first, stop, length, batch_stride, head_stride, token_stride,
            D, HEAD, UNIT, BLOCK, ROWS, STAGES, SUMS, FLOAT8, LIMIT,
        )  # fmt: skip
    else:
        _gather_rows(
            dv_ptr, dqkv_ptr, total_ptr, factor, column, first, stop, length, batch_stride, head_stride, token_stride,
            D, HEAD, UNIT, BLOCK, ROWS, STAGES, SUMS, FLOAT8, LIMIT,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- operator


def _launch(
    dq: Tensor, dk: Tensor, dv: Tensor, dqkv: Tensor | Float8, sums: torch.dtype | None, partial: Tensor | None = None
) -> Tensor | None:
    """Write dqkv, and return the bias's gradient in the dtype ``sums``; None if ``sums`` is None."""
    B, H, N, d = dq.shape
    width, rows = H * d, B * N
    block = block_width(width)
    blocks = -(-width // block)
    default = BACKWARD if isinstance(dqkv, Tensor) else BACKWARD_FLOAT8
    launch = choose_launch("split_heads_backward", default, rows, rows, 3 * blocks)
    programs = -(-rows // launch.chunk)
    total = None if sums is None else dq.new_empty(programs, 3 * width, dtype=torch.float32)
    unit = 16 // dq.element_size()
    if any(stride % unit for stride in (d, *dq.stride()[:3])):
        unit = 1
    pointers, options = fp8.kernel_arguments(dqkv, partial, fp8.SAMPLED_GRADIENT)
    _gather_heads_kernel[(programs * 3 * blocks,)](
        dq, dk, dv, *pointers, common.or_unused(total, dq), rows, N,
        *(stride // unit for stride in dq.stride()[:3]),
        D=width, HEAD=d, UNIT=unit, BLOCK=block, BLOCKS=blocks, SUMS=sums is not None, **launch.options(), **options,
    )  # fmt: skip
    return None if sums is None or total is None else common.finish_total(total, sums)


def _of_one_layout(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = dq.stride()
    if first[-1] == 1 and first == dk.stride() == dv.stride():
        return dq, dk, dv
    # Copy only tensors that don't have tokens before heads in memory. A rotation's dq and dk have them, and so need no
    # copy.
    dq, dk, dv = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dq, dk, dv))
    return dq, dk, dv


def _gather(dq: Tensor, dk: Tensor, dv: Tensor, sums: torch.dtype | None) -> tuple[Tensor, Tensor]:
    dqkv, none = _gather_fake(dq, dk, dv, None)
    dbias = _launch(*_of_one_layout(dq, dk, dv), dqkv, sums)
    return dqkv, none if dbias is None else dbias


def gather_heads_float8(dq: Tensor, dk: Tensor, dv: Tensor, sums: torch.dtype | None) -> tuple[Float8, Tensor | None]:
    """Return dqkv (B, N, 3 D) in e5m2, and dbias (3 D,) in dtype ``sums``, or None. dq, dk, dv: (B, H, N, d)."""
    grads = _of_one_layout(dq, dk, dv)
    B, H, N, d = dq.shape
    dqkv = Float8.empty((B, N, 3 * H * d), fp8.E5M2, dq.device)
    # The amax does not depend on the order of the values, so read them in the order of memory.
    rows = [(g if g.is_contiguous() else g.transpose(1, 2)).flatten(2) for g in grads]
    return dqkv, _launch(*grads, dqkv, sums, fp8.amax(*rows))


def _gather_fake(dq: Tensor, dk: Tensor, dv: Tensor, sums: torch.dtype | None) -> tuple[Tensor, Tensor]:
    B, H, N, d = dq.shape
    dqkv = torch.empty(B, N, 3 * H * d, dtype=dq.dtype, device=dq.device)
    return dqkv, dqkv.new_empty(0) if sums is None else dqkv.new_empty(3 * H * d, dtype=sums)


_gather_op = operator(
    "gather_heads(Tensor dq, Tensor dk, Tensor dv, ScalarType? sums) -> (Tensor, Tensor)",
    _gather,
    _gather_fake,
)


class _SplitHeads(torch.autograd.Function):
    """Split qkv into views. A registered operator must not return views of its inputs."""

    @staticmethod
    def forward(ctx, qkv: Tensor, bias: Tensor | None, num_heads: int):
        ctx.sums = bias.dtype if bias is not None and bias.requires_grad else None
        return head_views(qkv, num_heads)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
        dqkv, dbias = _gather_op(dq, dk, dv, ctx.sums)
        return dqkv, None if ctx.sums is None else dbias, None


def split_heads(qkv: Tensor, num_heads: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (B, H, N, d) as views of qkv (B, N, 3 D). One Triton kernel computes the gradient of qkv.

    qkv is contiguous, bf16, fp16 or fp32. bias is (3 D,) in any of these dtypes, and the caller has already added it to
    qkv without gradients. The kernel computes the bias's gradient. None: autograd computes it. Raises ValueError if
    shapes, dtypes or devices don't fit.
    """
    if qkv.dim() != 3 or qkv.shape[-1] % (3 * num_heads):
        raise ValueError(f"qkv must be (B, N, 3 D) with D divisible by {num_heads} heads, not {tuple(qkv.shape)}")
    if bias is not None and bias.shape != qkv.shape[-1:]:
        raise ValueError(f"bias must be (3 D,) = {tuple(qkv.shape[-1:])}, not {tuple(bias.shape)}")
    check_tensors(qkv=qkv, **({} if bias is None else {"bias": bias}))
    return _SplitHeads.apply(qkv, bias, num_heads)
