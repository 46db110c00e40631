"""Compute two of LoRA's gradients, those of thin = x A^T and of B, with one read of the output's gradient.

With y = x W^T + scale * thin B^T, thin (M, r) and dy (M, O), the backward pass needs

    dthin = scale * dy B  (M, r),  dB = scale * dy^T thin  (O, r)

Two separate matrix products would each read dy, which is much larger than the other tensors. Here a program reads its
rows and columns of dy once for both gradients. It sums dthin over its columns, and dB over its rows. The programs' sums
are fp32, and are added in a fixed order. Inputs and outputs are bf16 or fp16.
"""

import torch
from torch import Tensor

from opendit.kernels.common import finish_total, interpreting, kernels_available, next_power_of_2
from opendit.kernels.language import tl, triton
from opendit.kernels.operators import operator
from opendit.models.layers import low_rank_gradients as low_rank_gradients_reference

ROWS, COLUMNS = 256, 64  # size of a tile of dy, 32 KiB in half precision
PROGRAMS = 264  # number of programs to aim for: two for each of an H100's 132 multiprocessors
LARGEST_RANK = 64  # above this rank, the products are not limited by memory bandwidth, so one read of dy gains little

# ------------------------------------------------------------------------------------------------------------- kernel


@triton.jit(do_not_specialize=("rows", "blocks"))
def _low_rank_gradients_kernel(
    dy_ptr, b_ptr, thin_ptr, dthin_ptr, db_ptr, rows, blocks, scale,
    D: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Process ``blocks`` tiles, side by side in the same rows. WIDE: RANK, rounded up to a size that tl.dot
    supports."""
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    row = row.to(tl.int64)
    rank = tl.arange(0, WIDE)
    narrow = rank < RANK
    mask = inside[:, None] & narrow[None, :]
    thin = tl.load(thin_ptr + row[:, None] * RANK + rank[None, :], mask=mask, other=0.0)
    dthin = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    first = part * blocks * COLUMNS
    for start in tl.range(first, tl.minimum(first + blocks * COLUMNS, D), COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        of_b = (column < D)[:, None] & narrow[None, :]
        at = column[:, None] * RANK + rank[None, :]
        dy_mask = inside[:, None] & (column < D)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * D + column[None, :], mask=dy_mask, other=0.0)
        b = tl.load(b_ptr + at, mask=of_b, other=0.0)
        dthin = tl.dot(dy, b, dthin)
        db = tl.dot(tl.trans(dy), thin) * scale
        tl.store(db_ptr + tl.program_id(0).to(tl.int64) * (D * RANK) + at, db, mask=of_b)
    dthin_ptr += part.to(tl.int64) * rows * RANK
    value = (dthin * scale).to(dthin_ptr.dtype.element_ty)
    tl.store(dthin_ptr + row[:, None] * RANK + rank[None, :], value, mask=mask)


# ----------------------------------------------------------------------------------------------------------- operator


def _gradients(dy: Tensor, b: Tensor, thin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    (rows, width), rank = dy.shape, b.shape[1]
    row_programs, all_blocks = -(-rows // ROWS), -(-width // COLUMNS)
    blocks = -(-all_blocks // min(all_blocks, -(-PROGRAMS // row_programs)))  # tiles per program
    parts = -(-all_blocks // blocks)
    dthin = dy.new_empty(parts, rows, rank, dtype=torch.float32 if parts > 1 else dy.dtype)
    db = dy.new_empty(row_programs, width * rank, dtype=torch.float32)
    _low_rank_gradients_kernel[(row_programs, parts)](
        dy.contiguous(), b.contiguous(), thin.contiguous(), dthin, db, rows, blocks, scale,
        D=width, RANK=rank, WIDE=max(16, next_power_of_2(rank)), ROWS=ROWS, COLUMNS=COLUMNS, STAGES=2, num_warps=8,
    )  # fmt: skip
    total = dthin[0] if parts == 1 else dthin.sum(0).to(dy.dtype)
    return total, finish_total(db, b.dtype).view(width, rank)


def _gradients_fake(dy: Tensor, b: Tensor, thin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape[0], b.shape[1]), torch.empty(b.shape, dtype=b.dtype, device=b.device)


_gradients_op = operator(
    "low_rank_gradients(Tensor dy, Tensor b, Tensor thin, float scale) -> (Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)


def _takes(dy: Tensor, b: Tensor) -> bool:
    usable, _ = kernels_available(dy.device, dy.dtype)
    dtypes = (torch.float16,) if interpreting() else (torch.float16, torch.bfloat16)  # Triton on CPUs lacks bf16
    fits = dy.dtype == b.dtype and dy.dtype in dtypes and b.shape[1] <= LARGEST_RANK and dy.numel() > 0
    return usable and fits and not torch.compiler.is_compiling()


def low_rank_gradients(dy: Tensor, b: Tensor, thin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return scale * dy b and scale * dy^T thin. In half precision on a GPU, one Triton kernel computes both.

    Args:
        dy: (M, O).
        b: (O, r), LoRA's B.
        thin: (M, r), x A^T.
        scale: LoRA's scale.

    Returns:
        (M, r) and (O, r), in the dtypes of dy and b.
    """
    if _takes(dy, b):
        return _gradients_op(dy, b, thin, scale)
    return low_rank_gradients_reference(dy, b, thin, scale)
