"""LoRA's products: y = x W^T + scale * (x a^T) b^T, and the gradients. x a^T (M, r) is called the thin product.

Memory bandwidth limits products with r columns or rows, so the kernels read and write less:

- :func:`low_rank_gradients` reads dy once for both gradients.
- :func:`low_rank_product` adds LoRA's term before the wide product is written.
- If the wide product is in float8, :func:`thin_product` and :func:`thin_gradient` read x in float8. Then
  :func:`add_low_rank` adds LoRA's term.
"""

from typing import Any

import torch
from torch import Tensor

from opendit.kernels.common import finish_total, interpreting, kernels_available, missing, next_power_of_2
from opendit.kernels.language import tl, triton
from opendit.kernels.operators import operator
from opendit.kernels.tiles import float8_factor, float8_range
from opendit.models.layers import LowRankProducts
from opendit.models.layers import low_rank_gradients as low_rank_gradients_reference
from opendit.models.layers import low_rank_product as low_rank_product_reference

LARGEST_RANK = 64  # above this rank, memory bandwidth does not limit the thin products, so the kernels gain little

# ----------------------------------------------------------------------------------------------------------- gradients

ROWS, COLUMNS = 256, 64  # a tile of dy, 32 KiB in half precision
PROGRAMS = 264  # number of programs to aim for: two for each multiprocessor of an H100


@triton.jit(do_not_specialize=("rows", "blocks"))
def _low_rank_gradients_kernel(
    dy_ptr, b_ptr, thin_ptr, dthin_ptr, db_ptr, dy8_ptr, partial_ptr, descale_ptr, rows, blocks, scale,
    D: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, FLOAT8: tl.constexpr, PARTIALS: tl.constexpr, TARGET: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Process ``blocks`` tiles of ROWS rows. WIDE: RANK, rounded up to a size that tl.dot supports."""
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    row = row.to(tl.int64)
    rank = tl.arange(0, WIDE)
    narrow = rank < RANK
    mask = inside[:, None] & narrow[None, :]
    thin = tl.load(thin_ptr + row[:, None] * RANK + rank[None, :], mask=mask, other=0.0)
    dthin = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    if FLOAT8:
        factor = float8_factor(partial_ptr, descale_ptr, PARTIALS, TARGET)
    first = part * blocks * COLUMNS
    for start in tl.range(first, tl.minimum(first + blocks * COLUMNS, D), COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        of_b = (column < D)[:, None] & narrow[None, :]
        at = column[:, None] * RANK + rank[None, :]
        dy_mask = inside[:, None] & (column < D)[None, :]
        dy_at = row[:, None] * D + column[None, :]
        dy = tl.load(dy_ptr + dy_at, mask=dy_mask, other=0.0)
        if FLOAT8:
            dy8 = float8_range(dy.to(tl.float32), factor, LIMIT)
            tl.store(dy8_ptr + dy_at, dy8.to(dy8_ptr.dtype.element_ty), mask=dy_mask)
        b = tl.load(b_ptr + at, mask=of_b, other=0.0)
        dthin = tl.dot(dy, b, dthin)
        db = tl.dot(tl.trans(dy), thin) * scale
        tl.store(db_ptr + tl.program_id(0).to(tl.int64) * (D * RANK) + at, db, mask=of_b)
    dthin_ptr += part.to(tl.int64) * rows * RANK
    value = (dthin * scale).to(dthin_ptr.dtype.element_ty)
    tl.store(dthin_ptr + row[:, None] * RANK + rank[None, :], value, mask=mask)


NO_CAST: dict[str, Any] = {"FLOAT8": False, "PARTIALS": 1, "TARGET": 0, "LIMIT": 0.0}


def _gradients(
    dy: Tensor, b: Tensor, thin: Tensor, scale: float, pointers: tuple[Any, ...] = (), options: dict[str, Any] = NO_CAST
) -> tuple[Tensor, Tensor]:
    (rows, width), rank = dy.shape, b.shape[1]
    row_programs, all_blocks = -(-rows // ROWS), -(-width // COLUMNS)
    blocks = -(-all_blocks // min(all_blocks, -(-PROGRAMS // row_programs)))  # tiles per program
    parts = -(-all_blocks // blocks)
    dthin = dy.new_empty(parts, rows, rank, dtype=torch.float32 if parts > 1 else dy.dtype)
    db = dy.new_empty(row_programs, width * rank, dtype=torch.float32)
    _low_rank_gradients_kernel[(row_programs, parts)](
        dy.contiguous(), b.contiguous(), thin.contiguous(), dthin, db, *(pointers or (dy, dy, dy)), rows, blocks, scale,
        D=width, RANK=rank, WIDE=max(16, next_power_of_2(rank)), ROWS=ROWS, COLUMNS=COLUMNS, STAGES=2, num_warps=8,
        **options,
    )  # fmt: skip
    total = dthin[0] if parts == 1 else finish_total(dthin.view(parts, -1), dy.dtype).view(rows, rank)
    return total, finish_total(db, b.dtype).view(width, rank)


def _gradients_fake(dy: Tensor, b: Tensor, thin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape[0], b.shape[1]), torch.empty(b.shape, dtype=b.dtype, device=b.device)


_gradients_op = operator(
    "low_rank_gradients(Tensor dy, Tensor b, Tensor thin, float scale) -> (Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)


def _takes(x: Tensor, factor: Tensor, rank: int) -> bool:
    usable, _ = kernels_available(x.device, x.dtype)
    dtypes = (torch.float16,) if interpreting() else (torch.float16, torch.bfloat16)  # Triton on CPUs lacks bf16
    fits = x.dtype == factor.dtype and x.dtype in dtypes and rank <= LARGEST_RANK and x.numel() > 0
    return usable and fits and not torch.compiler.is_compiling()


def low_rank_gradients(dy: Tensor, b: Tensor, thin: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of thin (M, r) and b (O, r) in y = x W^T + scale * thin b^T, with thin = x a^T.

    They are scale * dy @ b and scale * dy^T @ thin, in the dtypes of dy and b. In half precision, a Triton kernel reads
    dy (M, O) only once. The sums are fp32, in a fixed order.
    """
    if _takes(dy, b, b.shape[1]):
        return _gradients_op(dy, b, thin, scale)
    return low_rank_gradients_reference(dy, b, thin, scale)


# ------------------------------------------------------------------------------------------------------------ product

TILE_ROWS, TILE_COLUMNS, DEPTH = 128, 256, 64  # a tile of the output, and a step of the sum over C
BAND = 16  # rows of tiles that are computed at about the same time and find x and W in the L2 cache
MULTIPROCESSORS = 132  # of an H100 or H200: one program each
# The kernel saves writing and reading the thin term (M, P). Its sums over C are slower than cuBLAS's.
LONGEST_SUM, SMALLEST_OUTPUT = 4096, 2**24


@triton.jit(do_not_specialize=("rows",))
def _low_rank_product_kernel(
    x_ptr, w_ptr, thin_ptr, factor_ptr, y_ptr, bias_ptr, rows, columns, depth, scale,
    RANK: tl.constexpr, WIDE: tl.constexpr, TURNED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute every PROGRAMS-th tile of y. TURNED: w is (P, C), and factor (P, r). WIDE: RANK, rounded up to a size
    that tl.dot supports."""
    x_tiles = tl.make_tensor_descriptor(x_ptr, [rows, depth], [depth, 1], [ROWS, DEPTH])
    thin_tiles = tl.make_tensor_descriptor(thin_ptr, [rows, RANK], [RANK, 1], [ROWS, WIDE])
    y_tiles = tl.make_tensor_descriptor(y_ptr, [rows, columns], [columns, 1], [ROWS, COLUMNS // 2])
    if TURNED:
        w_tiles = tl.make_tensor_descriptor(w_ptr, [columns, depth], [depth, 1], [COLUMNS, DEPTH])
        factor_tiles = tl.make_tensor_descriptor(factor_ptr, [columns, RANK], [RANK, 1], [COLUMNS, WIDE])
    else:
        w_tiles = tl.make_tensor_descriptor(w_ptr, [depth, columns], [columns, 1], [DEPTH, COLUMNS])
        factor_tiles = tl.make_tensor_descriptor(factor_ptr, [RANK, columns], [columns, 1], [WIDE, COLUMNS])
    across = tl.cdiv(columns, COLUMNS)
    down = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        first = tile // (BAND * across) * BAND
        height = min(down - first, BAND)
        row = (first + tile % (BAND * across) % height) * ROWS
        column = tile % (BAND * across) // height * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for at in range(0, depth, DEPTH):
            x = x_tiles.load([row, at])
            if TURNED:
                w = w_tiles.load([column, at]).T
            else:
                w = w_tiles.load([at, column])
            total = tl.dot(x, w, total)
        thin = thin_tiles.load([row, 0])
        thin = (thin.to(tl.float32) * scale).to(thin.dtype)
        if TURNED:
            factor = factor_tiles.load([column, 0]).T
        else:
            factor = factor_tiles.load([0, column])
        total = tl.dot(thin, factor, total)
        if BIAS:
            at = column + tl.arange(0, COLUMNS)
            total += tl.load(bias_ptr + at, mask=at < columns, other=0.0).to(tl.float32)[None, :]
        # Store half a tile at a time, to leave shared memory for the next tile's inputs.
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        y_tiles.store([row, column], left.to(thin.dtype))
        y_tiles.store([row, column + COLUMNS // 2], right.to(thin.dtype))


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _product(
    x: Tensor, weight: Tensor, thin: Tensor, factor: Tensor, scale: float, bias: Tensor | None, turned: bool
) -> Tensor:
    (rows, depth), columns, rank = x.shape, weight.shape[0 if turned else 1], thin.shape[1]
    y = x.new_empty(rows, columns)
    programs = min(MULTIPROCESSORS, -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS))
    triton.set_allocator(_scratch)  # for the descriptors; in every call, because each thread has its own allocator
    _low_rank_product_kernel[(programs,)](
        x, weight, thin, factor, y, y if bias is None else bias, rows, columns, depth, scale,
        RANK=rank, WIDE=max(16, next_power_of_2(rank)), TURNED=turned, BIAS=bias is not None, ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS, DEPTH=DEPTH, BAND=BAND, PROGRAMS=programs, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y


def _product_fake(x, weight, thin, factor, scale, bias, turned) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0 if turned else 1])


_product_op = operator(
    "low_rank_product(Tensor x, Tensor weight, Tensor thin, Tensor factor, float scale, Tensor? bias, bool turned)"
    " -> Tensor",
    _product,
    _product_fake,
)


def _product_takes(x: Tensor, weight: Tensor, factor: Tensor) -> bool:
    (rows, depth), (rank, columns) = x.shape, factor.shape
    if not _takes(x, factor, rank) or not (interpreting() or missing("low_rank_product", x.device) is None):
        return False
    worth = rows * columns >= SMALLEST_OUTPUT and depth <= LONGEST_SUM
    aligned = not (depth % 8 or columns % 8 or rank % 8)  # rows of descriptors begin at multiples of 16 bytes
    readable = aligned and all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight, factor))
    return worth and readable and x.dtype == weight.dtype


def low_rank_product(
    x: Tensor, weight: Tensor, thin: Tensor, factor: Tensor, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Return x @ weight + scale * thin @ factor + bias for x (M, C), weight (C, P), thin (M, r) and factor (r, P).

    On Hopper in half precision, one Triton kernel computes both products and writes the result once. ``scale * thin``
    is rounded to thin's dtype. Elsewhere, and for large C, torch writes the thin term and cuBLAS adds to it.
    """
    if not _product_takes(x, weight, factor):
        return low_rank_product_reference(x, weight, thin, factor, scale, bias)
    turned = weight.stride(0) == 1
    matrices = (weight.t(), factor.t()) if turned else (weight, factor)
    if not all(matrix.is_contiguous() for matrix in (x, *matrices)):
        return low_rank_product_reference(x, weight, thin, factor, scale, bias)
    return _product_op(x, matrices[0], thin.contiguous(), matrices[1], scale, bias, turned)


LORA_PRODUCTS = LowRankProducts(low_rank_product, low_rank_gradients)

# --------------------------------------------------------------------------------------------- beside float8 products


def low_rank_gradients_and_cast(
    dy: Tensor, b: Tensor, thin: Tensor, scale: float, pointers: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Compute :func:`low_rank_gradients`, and also write dy in float8. pointers, options: from
    ``fp8.kernel_arguments``. Return None, and write nothing, if the kernel does not support these tensors."""
    return _gradients(dy, b, thin, scale, pointers, options) if _takes(dy, b, b.shape[1]) else None


# Launch shapes. TILE: rows and columns of a tile of x.
PRODUCT = {"TILE": 128, "STAGES": 3, "num_warps": 8}
GRADIENT = {"TILE": 64, "STAGES": 3, "num_warps": 4}


@triton.jit(do_not_specialize=("rows", "tiles"))
def _thin_product_kernel(
    x_ptr, a_ptr, descale_ptr, out_ptr, rows, tiles,
    D: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over ``tiles`` tiles of columns, for TILE rows."""
    part = tl.program_id(1)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rank = tl.arange(0, WIDE)
    total = tl.zeros((TILE, WIDE), dtype=tl.float32)
    first = part * tiles * TILE
    for start in tl.range(first, tl.minimum(first + tiles * TILE, D), TILE, num_stages=STAGES):
        column = start + tl.arange(0, TILE)
        mask = (row < rows)[:, None] & (column < D)[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * D + column[None, :], mask=mask, other=0.0)
        mask = (column < D)[:, None] & (rank < RANK)[None, :]
        a = tl.load(a_ptr + rank[None, :] * D + column[:, None], mask=mask, other=0.0)
        total = tl.dot(x.to(a.dtype), a, total)
    total *= tl.load(descale_ptr)
    at = (part.to(tl.int64) * rows + row)[:, None] * RANK + rank[None, :]
    tl.store(out_ptr + at, total, mask=(row < rows)[:, None] & (rank < RANK)[None, :])


@triton.jit(do_not_specialize=("rows", "tiles"))
def _thin_gradient_kernel(
    x_ptr, dthin_ptr, descale_ptr, out_ptr, rows, tiles,
    D: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over ``tiles`` tiles of rows, for TILE columns."""
    part = tl.program_id(1)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rank = tl.arange(0, WIDE)
    total = tl.zeros((WIDE, TILE), dtype=tl.float32)
    first = part * tiles * TILE
    for start in tl.range(first, tl.minimum(first + tiles * TILE, rows), TILE, num_stages=STAGES):
        row = start + tl.arange(0, TILE)
        mask = (row < rows)[:, None] & (column < D)[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * D + column[None, :], mask=mask, other=0.0)
        mask = (row < rows)[:, None] & (rank < RANK)[None, :]
        dthin = tl.load(dthin_ptr + row[:, None] * RANK + rank[None, :], mask=mask, other=0.0)
        # Transposing x instead would take twice as long.
        total = tl.dot(tl.trans(dthin), x.to(dthin.dtype), total)
    total *= tl.load(descale_ptr)
    at = (part * RANK + rank)[:, None].to(tl.int64) * D + column[None, :]
    tl.store(out_ptr + at, total, mask=(rank < RANK)[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=("rows",))
def _add_low_rank_kernel(
    y_ptr, thin_ptr, factor_ptr, rows, scale,
    D: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, TURNED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """TURNED: factor is (D, r) in memory, otherwise (r, D)."""
    across: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, WIDE)
    mask = (row < rows)[:, None] & (rank < RANK)[None, :]
    thin = tl.load(thin_ptr + row[:, None] * RANK + rank[None, :], mask=mask, other=0.0)
    mask = (rank < RANK)[:, None] & (column < D)[None, :]
    if TURNED:
        at = column[None, :] * RANK + rank[:, None]
    else:
        at = rank[:, None] * D + column[None, :]
    total = tl.dot(thin, tl.load(factor_ptr + at, mask=mask, other=0.0)) * scale
    mask = (row < rows)[:, None] & (column < D)[None, :]
    y = y_ptr + row.to(tl.int64)[:, None] * D + column[None, :]
    total += tl.load(y, mask=mask, other=0.0).to(tl.float32)
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=mask)


def _divide(kernel: Any, x: Tensor, factor: Tensor, descale: Tensor, over_rows: bool) -> Tensor:
    """Divide a sum over x's rows or columns among programs, and add up the programs' sums. x: (M, C)."""
    (rows, width), rank = x.shape, factor.shape[1 if over_rows else 0]
    launch = GRADIENT if over_rows else PRODUCT
    own, summed = (-(-length // launch["TILE"]) for length in ((width, rows) if over_rows else (rows, width)))
    tiles = -(-summed // min(summed, -(-PROGRAMS // own)))
    parts = -(-summed // tiles)
    out = torch.empty(parts, (width if over_rows else rows) * rank, dtype=torch.float32, device=x.device)
    kernel[(own, parts)](
        x, factor, descale, out, rows, tiles,
        D=width, RANK=rank, WIDE=max(16, next_power_of_2(rank)), **launch,
    )  # fmt: skip
    return finish_total(out, factor.dtype)


def thin_product(x: Tensor, descale: Tensor, a: Tensor) -> Tensor:
    """Return descale * x a^T (M, r) in a's dtype for x (M, C) in float8 and a (r, C). descale: (1,), a power of two."""
    if _takes(a, a, len(a)) and x.numel():
        return _divide(_thin_product_kernel, x.contiguous(), a.contiguous(), descale, False).view(len(x), len(a))
    return (x.to(a.dtype) @ a.t()) * descale.to(a.dtype)


def thin_gradient(dthin: Tensor, x: Tensor, descale: Tensor) -> Tensor:
    """Return descale * dthin^T x (r, C) in dthin's dtype for dthin (M, r) and x (M, C) in float8."""
    if _takes(dthin, dthin, dthin.shape[1]):
        total = _divide(_thin_gradient_kernel, x.contiguous(), dthin.contiguous(), descale, True)
        return total.view(dthin.shape[1], x.shape[1])
    return (dthin * descale.to(dthin.dtype)).t() @ x.to(dthin.dtype)


def add_low_rank(y: Tensor, thin: Tensor, factor: Tensor, scale: float) -> None:
    """Add scale * thin factor to y (M, P) in place, for thin (M, r) and factor (r, P)."""
    turned = factor.stride(0) == 1
    matrix = factor.t() if turned else factor
    if not (_takes(y, thin, len(factor)) and y.is_contiguous() and thin.is_contiguous() and matrix.is_contiguous()):
        y.addmm_(thin, factor, alpha=scale)
        return
    (rows, width), rank, (tall, wide) = y.shape, len(factor), (64, 128)
    _add_low_rank_kernel[(-(-rows // tall) * -(-width // wide),)](
        y, thin, matrix, rows, scale, D=width, RANK=rank, WIDE=max(16, next_power_of_2(rank)), TURNED=turned,
        ROWS=tall, COLUMNS=wide, num_warps=4,
    )  # fmt: skip
