"""q, k, v (B, H, N, d) as views of one projection qkv (B, N, 3 D), D = H * d, whose gradient comes back in one pass.

torch's own backward of the view stacks dq, dk, dv and then copies the stack into qkv's order: 12 tensors of activations
read or written where 6 do. Here one kernel puts each where it belongs. It also makes the gradient of the bias that the
projection has added already:

    dqkv[b, n, (s, h, j)] = (dq, dk, dv)[s][b, h, n, j],  dbias = sum over b, n of dqkv
"""

import torch
from torch import Tensor

from opendit.kernels import common
from opendit.kernels.common import Launch, block_width, choose_launch, tl, triton
from opendit.kernels.operators import operator
from opendit.kernels.tiles import column_block, store_column_sums

# ---------------------------------------------------------------------------------------------------------- reference


def split_heads_reference(qkv: Tensor, num_heads: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, N, d) of qkv (B, N, 3 D) in torch; ``bias`` (3 D,) is in qkv and receives its gradient here."""
    if bias is not None:
        qkv = qkv + (bias - bias.detach())
    return _views(qkv, num_heads)


def _views(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, N, width = qkv.shape
    return qkv.view(B, N, 3, num_heads, width // (3 * num_heads)).permute(2, 0, 3, 1, 4).unbind(0)


# ------------------------------------------------------------------------------------------------------------- kernel

BACKWARD = Launch(rows=32, tiles=4, warps=4)


@triton.jit
def _gather_rows(
    source_ptr, dqkv_ptr, total_ptr, column, first, stop, length, batch_stride, head_stride, token_stride,
    D: tl.constexpr, HEAD: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Rows first .. stop of one of the three, to their place; ``total_ptr`` is that place in the slot of sums.

    Strides count in UNITs, so that the compiler knows the alignment and reads 16 bytes at once.
    """
    cols = column + tl.arange(0, BLOCK)
    inside = (cols // HEAD) * (head_stride * UNIT) + cols % HEAD
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        _, mask = column_block(column, start, stop, D, BLOCK, ROWS)
        rows = start + tl.arange(0, ROWS)
        source = (rows // length).to(tl.int64) * batch_stride + (rows % length).to(tl.int64) * token_stride
        value = tl.load(source_ptr + (source * UNIT)[:, None] + inside[None, :], mask=mask, other=0.0)
        tl.store(dqkv_ptr + (rows.to(tl.int64) * (3 * D))[:, None] + cols[None, :], value, mask=mask)
        if SUMS:
            total += value.to(tl.float32)
    if SUMS:
        store_column_sums(total_ptr, total, column, D, BLOCK)


@triton.jit(do_not_specialize=("rows", "length", "batch_stride", "head_stride", "token_stride"))
def _gather_kernel(
    dq_ptr, dk_ptr, dv_ptr, dqkv_ptr, total_ptr, rows, length, batch_stride, head_stride, token_stride,
    D: tl.constexpr, HEAD: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    which = (tl.program_id(0) // BLOCKS) % 3
    column = (tl.program_id(0) % BLOCKS) * BLOCK
    program = tl.program_id(0) // (3 * BLOCKS)
    first = program * CHUNK
    stop = tl.minimum(first + CHUNK, rows)
    dqkv_ptr += which * D
    total_ptr += tl.cast(program, tl.int64) * (3 * D) + which * D
    if which == 0:
        _gather_rows(
            dq_ptr, dqkv_ptr, total_ptr, column, first, stop, length, batch_stride, head_stride, token_stride,
            D, HEAD, UNIT, BLOCK, ROWS, STAGES, SUMS,
        )  # fmt: skip
    elif which == 1:
        _gather_rows(
            dk_ptr, dqkv_ptr, total_ptr, column, first, stop, length, batch_stride, head_stride, token_stride,
            D, HEAD, UNIT, BLOCK, ROWS, STAGES, SUMS,
        )  # fmt: skip
    else:
        _gather_rows(
            dv_ptr, dqkv_ptr, total_ptr, column, first, stop, length, batch_stride, head_stride, token_stride,
            D, HEAD, UNIT, BLOCK, ROWS, STAGES, SUMS,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- operator


def _gather(dq: Tensor, dk: Tensor, dv: Tensor, sums: torch.dtype | None) -> tuple[Tensor, Tensor]:
    if dq.stride(-1) != 1 or not dq.stride() == dk.stride() == dv.stride():
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    B, H, N, d = dq.shape
    width, rows = H * d, B * N
    block = block_width(width)
    blocks = -(-width // block)
    launch = choose_launch("split_heads_backward", BACKWARD, rows, rows, 3 * blocks)
    programs = -(-rows // launch.chunk)
    dqkv, _ = _gather_fake(dq, dk, dv, None)
    total = dqkv if sums is None else dq.new_empty(programs, 3 * width, dtype=torch.float32)
    unit = 16 // dq.element_size()
    if any(stride % unit for stride in (d, *dq.stride()[:3])):
        unit = 1
    _gather_kernel[(programs * 3 * blocks,)](
        dq, dk, dv, dqkv, total, rows, N, *(stride // unit for stride in dq.stride()[:3]),
        D=width, HEAD=d, UNIT=unit, BLOCK=block, BLOCKS=blocks, SUMS=sums is not None, **launch.options(),
    )  # fmt: skip
    return dqkv, dqkv.new_empty(0) if sums is None else common.finish_total(total, sums)


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
    """Not an operator of the library like the others, because its outputs are views of its input."""

    @staticmethod
    def forward(ctx, qkv: Tensor, bias: Tensor | None, num_heads: int):
        ctx.sums = bias.dtype if bias is not None and bias.requires_grad else None
        return _views(qkv, num_heads)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
        dqkv, dbias = _gather_op(dq, dk, dv, ctx.sums)
        return dqkv, None if ctx.sums is None else dbias, None


def split_heads(qkv: Tensor, num_heads: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, N, d): views of qkv (B, N, 3 D), for attention; their gradients return through one Triton kernel.

    Args:
        qkv: (B, N, 3 D) bf16, fp16 or fp32, contiguous; D divides by num_heads.
        num_heads: H.
        bias: (3 D,), any of these dtypes: what the projection has added to qkv, apart from the graph. It is not added
            here; its gradient is made here. None when the projection's own backward makes it.

    Raises:
        ValueError: shapes, dtypes or devices don't fit.
    """
    if qkv.dim() != 3 or qkv.shape[-1] % (3 * num_heads):
        raise ValueError(f"qkv must be (B, N, 3 D) with D divisible by {num_heads} heads, not {tuple(qkv.shape)}")
    if bias is not None and bias.shape != qkv.shape[-1:]:
        raise ValueError(f"bias must be (3 D,) = {tuple(qkv.shape[-1:])}, not {tuple(bias.shape)}")
    common.check_tensors(qkv=qkv, **({} if bias is None else {"bias": bias}))
    return _SplitHeads.apply(qkv, bias, num_heads)
