"""Shared code of fused operations: availability of kernels, launch shapes, row chunks, per-sample sums, and checks.

A program processes a *chunk* of consecutive rows (tokens) in tiles of a few rows. x has one of two forms:

- (B, N, D). A chunk's rows belong to one sample.
- Packed: (rows, D) or (1, rows, D). ``sample_of_row`` (rows,) has each row's sample, in non-decreasing order. A chunk's
  rows may belong to several samples.

Gradients of shift, scale and gate are sums over a sample's rows. A program adds the rows in its chunk, and writes one
fp32 sum per sample to a slot: program p to slot p, or to slot p + sample in the packed form. ``finish_sums`` adds each
sample's slots; ``finish_total`` adds all slots. The order is fixed, so two runs give the same bits.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from opendit.kernels.language import TRITON, tl, triton

GENERATIONS = {(7, 0): "Volta", (8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


@dataclass(frozen=True)
class Feature:
    """The compute capabilities that a feature supports: ``oldest`` to ``newest``, or without an upper bound.

    needs: start of the message for other GPUs.
    """

    needs: str
    oldest: tuple[int, int]
    newest: tuple[int, int] | None = None


FEATURES = {
    "kernels": Feature("kernels need", (8, 0)),
    "float8": Feature("FP8 needs", (9, 0)),
    # torch runs cuDNN's attention from Ampere on. It was measured only on Hopper, so older GPUs don't use it.
    "cudnn": Feature("cuDNN's attention is taken with", (9, 0)),
    # The tiles need 128 KiB of shared memory, and Ada has only 99. The kernel was measured only on Hopper.
    "short_attention": Feature("attention to few and short samples is taken with", (9, 0), (9, 0)),
    # The kernel reads tiles by descriptors, and older GPUs have none. It was measured only on Hopper.
    "low_rank_product": Feature("LoRA's product in one kernel is taken with", (9, 0), (9, 0)),
    "flash_attn": Feature("flash_attn needs", (8, 0)),
    "flash_attn_3": Feature("FlashAttention 3 and 4 need", (9, 0)),
}

_pretended: list[tuple[int, int]] = []


def compute_capability(device: torch.device | str | None = None) -> tuple[int, int]:
    """Return the compute capability of a GPU, e.g. (9, 0) for Hopper; None: the current GPU."""
    return _pretended[-1] if _pretended else torch.cuda.get_device_capability(device)


def pretending() -> bool:
    """Return True inside :func:`pretended`. There, features depend on the GPU even if Triton's interpreter is on."""
    return bool(_pretended)


@contextlib.contextmanager
def pretended(capability: tuple[int, int]) -> Iterator[None]:
    """Make :func:`compute_capability` return ``capability`` for every GPU within the context (tests only)."""
    _pretended.append(capability)
    try:
        yield
    finally:
        _pretended.pop()


def missing(feature: str, device: torch.device | str | None = None) -> str | None:
    """Return the reason why a GPU does not use this feature (see :data:`FEATURES`); None if it does."""
    known, found = FEATURES[feature], compute_capability(device)
    if found >= known.oldest and (known.newest is None or found <= known.newest):
        return None
    generation = GENERATIONS.get(known.oldest, "")
    bound = "or newer, " if known.newest is None else "only, "
    wanted = f"compute capability {'.'.join(map(str, known.oldest))} ({generation}) {bound}"
    return f"{known.needs} {wanted}this GPU has {'.'.join(map(str, found))}"


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_WIDTH, MAX_WIDTH = 64, 8192


def interpreting() -> bool:
    """Return True if Triton runs kernels in its CPU interpreter (decided when triton was first imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def kernels_available(device: torch.device | str, dtype: torch.dtype) -> tuple[bool, str]:
    """Return (True, reason) if Triton kernels run on ``device`` with activations of ``dtype``, otherwise (False,
    reason)."""
    device = torch.device(device)
    if not TRITON:
        return False, "triton is not installed"
    if dtype not in DTYPES:
        return False, f"kernels take bf16, fp16 and fp32, not {str(dtype).removeprefix('torch.')}"
    if interpreting() and not pretending():
        return True, "Triton's interpreter (TRITON_INTERPRET=1), slow"
    if device.type != "cuda":
        return False, f"kernels need a CUDA GPU, not {device.type}"
    if not torch.cuda.is_available():
        return False, "torch sees no CUDA GPU"
    if why := missing("kernels", device):
        return False, why
    return True, f"Triton {triton.__version__}, compute capability {'.'.join(map(str, compute_capability(device)))}"


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n`` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def block_width(width: int) -> int:
    """Return the number of columns per program, for kernels without sums along a row: 128, or fewer for narrow tensors.
    128 divides the widths of every DiT."""
    return min(128, next_power_of_2(width))


def split_width(width: int) -> tuple[int, int]:
    """Return the widths of the main and the tail block that cover a row: powers of two, as Triton requires.

    The tail is 0 if one block is enough. For 1152 columns, one block of 2048 would leave 44 % of the lanes idle; 1024 +
    128 fits exactly. The tail is at least 8 wide (one 16-byte access in half precision), and masked beyond the end of
    the row.
    """
    whole = next_power_of_2(width)
    main = whole // 2
    tail = max(next_power_of_2(width - main), 8)
    return (whole, 0) if main + tail >= whole else (main, tail)


# ---------------------------------------------------------------------------------------------------- launch shapes


@dataclass(frozen=True)
class Launch:
    """The launch shape of a kernel and its compiler options. ``rows`` and ``tiles`` are powers of two."""

    rows: int  # rows per tile
    tiles: int  # tiles per program
    warps: int
    stages: int = 1  # tiles in flight; if more than 1, tiles are copied to shared memory ahead of use
    hold: bool = True  # True: hold shift, scale and gate in registers; False: every tile reads them from the L1 cache
    registers: int | None = None  # maximum number of registers per thread; None: the assembler chooses

    @property
    def chunk(self) -> int:
        return self.rows * self.tiles

    def options(self) -> dict[str, Any]:
        """Return this launch configuration as keyword arguments of a kernel call."""
        options = {
            "ROWS": self.rows,
            "CHUNK": self.chunk,
            "STAGES": self.stages,
            "HOLD": self.hold,
            "num_warps": self.warps,
        }
        return options if self.registers is None else {**options, "maxnreg": self.registers}


# Kernel arguments that change with the batch. Triton must not specialise on them: more compilations would gain nothing.
SIZES = ("rows", "length", "chunks_per_sample")

# Number of programs to aim for: about 8 per multiprocessor of an H100 or H200. Fewer would leave multiprocessors idle.
# More would cost more partial sums in the backward pass.
PROGRAMS = 1024

_forced: dict[str, Launch] = {}


def pipeline_stages(width: int, tensors: int, element_size: int) -> int:
    """Return the number of tiles in flight: up to three, if the prefetched tiles fit into 24 KiB of shared memory.
    width: a tile's number of values per tensor."""
    return 1 + min(2, 24 * 1024 // (width * tensors * element_size))


@contextlib.contextmanager
def forced_launch(**launches: Launch) -> Iterator[None]:
    """Override the launch shape of the named kernels (tests and sweeps only)."""
    before = dict(_forced)
    _forced.update(launches)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def choose_launch(kernel: str, default: Launch, rows: int, longest: int, columns: int = 1) -> Launch:
    """Return ``default``, with fewer rows per program if the rows would not fill the GPU or the samples are short. The
    result depends on shapes only, so that sums have the same order in all runs.

    Args:
        longest: rows of the longest sample.
        columns: number of programs that share a row.
    """
    if kernel in _forced:
        return _forced[kernel]
    tiles = default.tiles
    while tiles > 1 and (rows * columns < tiles * default.rows * PROGRAMS or default.rows * tiles >= 2 * longest):
        tiles //= 2
    return replace(default, tiles=tiles)


# --------------------------------------------------------------------------------------------------- per-sample sums


@triton.jit
def first_row(sample_ptr, rows, sample, WAYS: tl.constexpr):
    """Return the first row of ``sample`` or of a later sample; ``rows`` if there is none. Rows are sorted by sample.
    Comparing WAYS positions at a time takes two or three dependent reads; bisection would take 16."""
    low = 0
    width = rows
    while width > 0:
        step = (width + WAYS - 1) // WAYS
        last = low + step * (tl.arange(0, WAYS) + 1) - 1  # last row of every interval of ``step`` rows
        before = tl.load(sample_ptr + last, mask=last < low + width, other=2147483647) < sample
        found = low + step * tl.sum(before.to(tl.int32), axis=0)
        width = tl.minimum(step - 1, low + width - found)
        low = found
    return low


@triton.jit(do_not_specialize=("slots", "slots_per_sample", "rows"))
def _finish_kernel(
    partial_ptr, out0_ptr, out1_ptr, out2_ptr, sample_ptr, rows, slots, slots_per_sample,
    CHUNK: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Compute out[k][sample] = sum over the sample's slots of partial[k], in slot order, in fp32."""
    sample = tl.program_id(0)
    which = tl.program_id(2)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if PACKED:
        begin = first_row(sample_ptr, rows, sample, 256)
        end = first_row(sample_ptr, rows, sample + 1, 256)
        first = begin // CHUNK + sample
        stop = tl.where(end > begin, (end - 1) // CHUNK + sample + 1, first)
    else:
        first = sample * slots_per_sample
        stop = first + slots_per_sample
    total = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    base = partial_ptr + which.to(tl.int64) * slots * D
    for slot in range(first, stop, BLOCK_P):
        lines = slot + tl.arange(0, BLOCK_P)
        mask = (lines < stop)[:, None] & (cols < D)[None, :]
        total += tl.load(base + lines.to(tl.int64)[:, None] * D + cols[None, :], mask=mask, other=0.0)
    value = tl.sum(total, axis=0)
    offset = sample.to(tl.int64) * D + cols
    if which == 0:
        tl.store(out0_ptr + offset, value.to(out0_ptr.dtype.element_ty), mask=cols < D)
    if COUNT > 1:
        if which == 1:
            tl.store(out1_ptr + offset, value.to(out1_ptr.dtype.element_ty), mask=cols < D)
    if COUNT > 2:
        if which == 2:
            tl.store(out2_ptr + offset, value.to(out2_ptr.dtype.element_ty), mask=cols < D)


@dataclass(frozen=True)
class Rows:
    """The rows of one kernel call and their division among programs, in the (B, N, D) or the packed form."""

    x: Tensor  # (rows, D), contiguous
    samples: int
    length: int  # rows of a sample; in the packed form, rows of all samples
    sample_of_row: Tensor | None
    launch: Launch

    @property
    def packed(self) -> bool:
        return self.sample_of_row is not None

    @property
    def chunks_per_sample(self) -> int:
        return -(-self.length // self.launch.chunk)

    @property
    def programs(self) -> int:
        return self.chunks_per_sample if self.packed else self.samples * self.chunks_per_sample

    @property
    def shape_arguments(self) -> tuple[Any, ...]:
        """The values of the kernel arguments from sample_ptr to chunks_per_sample."""
        # in the (B, N, D) form, the kernel does not read sample_of_row, so any pointer will do
        pointer = self.sample_of_row if self.packed else self.x
        return pointer, self.x.shape[0], self.length, self.chunks_per_sample

    def new_sums(self, like: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """Allocate outputs (B, D) in the dtypes of ``like``, and fp32 slots for the kernel's sums. The outputs serve as
        slots if one program processes all rows of a sample, or ``like`` is empty."""
        width = self.x.shape[1]
        outputs = [torch.empty(self.samples, width, dtype=t.dtype, device=t.device) for t in like]
        if not like or (not self.packed and self.chunks_per_sample == 1):
            return outputs, outputs
        slots = self.programs + (self.samples if self.packed else 0)
        partial = torch.empty(len(like), slots, width, dtype=torch.float32, device=self.x.device)
        return outputs, list(partial.unbind(0))

    def finish_sums(self, outputs: list[Tensor], partial: list[Tensor]) -> None:
        """Add up each sample's slots, and write the sums to ``outputs``."""
        if partial is outputs:
            return
        if not self.packed:
            _finish(partial[0], outputs, self.samples, self.chunks_per_sample)
            return
        on_average = -(-self.chunks_per_sample // self.samples)  # slots per sample; affects only the tile's shape
        _finish(partial[0], outputs, self.samples, on_average, self.sample_of_row, self.launch.chunk)

    def new_total(self) -> Tensor:
        """Allocate fp32 slots for a sum over all samples. They are zero in the packed form, because some stay
        unused."""
        make = torch.zeros if self.packed else torch.empty
        slots = self.programs + (self.samples if self.packed else 0)
        return make(slots, self.x.shape[1], dtype=torch.float32, device=self.x.device)


def _finish(
    partial: Tensor, outputs: list[Tensor], samples: int, slots_per_sample: int,
    sample_of_row: Tensor | None = None, chunk: int = 1,
) -> None:  # fmt: skip
    """Add up fp32 slots and write the sums to ``outputs``. With ``sample_of_row``, slots are numbered as in the packed
    form."""
    (slots, width), count = partial.shape, len(outputs)
    # Tiles have 4,096 numbers. Many slots make narrow tiles, so that few samples still fill enough programs.
    block_p = min(next_power_of_2(slots_per_sample), 128)
    block_d = min(max(4096 // block_p, 32), 512, next_power_of_2(width))
    out = [outputs[min(i, count - 1)] for i in range(3)]
    _finish_kernel[(samples, -(-width // block_d), count)](
        partial, *out, or_unused(sample_of_row, partial), 0 if sample_of_row is None else len(sample_of_row), slots,
        slots_per_sample, CHUNK=chunk, D=width, BLOCK_P=block_p, BLOCK_D=block_d, PACKED=sample_of_row is not None,
        COUNT=count, num_warps=4,
    )  # fmt: skip


def finish_total(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum (D,) of slots (S, D) fp32, in slot order."""
    total = torch.empty(slots.shape[1], dtype=dtype, device=slots.device)
    _finish(slots, [total], 1, slots.shape[0])
    return total


def no_sums(other: Tensor, count: int) -> list[Tensor]:
    """Return ``count`` empty tensors for unneeded gradients, because an operator must return tensors."""
    return [other.new_empty(0) for _ in range(count)]


def like_bias(bias: Tensor | None, other: Tensor) -> Tensor:
    """Allocate the gradient of ``bias``; an empty tensor without a bias, because an operator must return a tensor."""
    return other.new_empty(0) if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)


def finish_bias(total: Tensor | None, bias: Tensor | None, other: Tensor) -> Tensor:
    """Return the bias's gradient: the sum of the slots ``total``, or an empty tensor without a bias."""
    return like_bias(bias, other) if bias is None else finish_total(cast(Tensor, total), bias.dtype)


def or_unused(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return ``tensor``; if it is None, return ``other`` as a placeholder that the kernel doesn't read."""
    return other if tensor is None else tensor


def cut_rows(
    kernel: str, default: Launch, x: Tensor, samples: int, sample_of_row: Tensor | None, columns: int = 1
) -> Rows:
    """Divide the rows of x, (B, N, D) or packed (rows, D), for the named kernel."""
    rows = x.contiguous().view(-1, x.shape[-1])
    length = x.shape[-2] if sample_of_row is None else len(rows)
    if sample_of_row is not None:
        sample_of_row = sample_of_row.reshape(-1)
    launch = choose_launch(kernel, default, rows.shape[0], length, columns)
    return Rows(rows, samples, length, sample_of_row, launch)


def cut_blocks(kernel: str, default: Launch, x: Tensor) -> tuple[Rows, dict[str, Any]]:
    """Divide x (..., D) into chunks of rows and blocks of columns, for an activation kernel. All rows count as one
    sample. Returns the rows and the kernel's launch arguments."""
    width = x.shape[-1]
    block = block_width(width)
    blocks = -(-width // block)
    cut = cut_rows(kernel, default, x.reshape(1, -1, width), 1, None, blocks)
    approximate = x.is_cuda and torch.version.hip is None  # the inline assembly of tiles.logistic is for NVIDIA GPUs
    return cut, {
        "D": width, "BLOCK": block, "BLOCKS": blocks, "APPROXIMATE": approximate, **cut.launch.options(),
    }  # fmt: skip


def new_statistics(x: Tensor, normalize: bool = True, center: bool = True) -> tuple[Tensor, Tensor]:
    """Allocate fp32 mean and rstd, a value for each row of x. Without ``normalize``, both are empty. Without ``center``
    (RMSNorm), the mean is empty."""
    rows = x.numel() // x.shape[-1]
    counts = rows if normalize and center else 0, rows if normalize else 0
    mean, rstd = (torch.empty(count, dtype=torch.float32, device=x.device) for count in counts)
    return mean, rstd


def unit_columns(*vectors: Tensor) -> tuple[Tensor, ...]:
    """Return vectors (B, D) with unit column stride. Copies only if needed: chunks of a (B, 6 D) tensor are not
    copied."""
    return tuple(v if v.stride(-1) == 1 else v.contiguous() for v in vectors)


def rows_of_samples(vector: Tensor, sample_of_row: Tensor | None) -> Tensor:
    """Shape modulation (B, D) to broadcast against x: (B, 1, D), or (rows, D) in the packed form."""
    return vector.unsqueeze(1) if sample_of_row is None else vector[sample_of_row]


# ------------------------------------------------------------------------------------------------- checks of arguments


def check_inputs(
    x: Tensor, sample_of_row: Tensor | None, same_shape: dict[str, Tensor], bias: Tensor | None = None,
    **vectors: Tensor,
) -> None:  # fmt: skip
    """Raise ValueError unless shapes, dtypes and devices fit.

    x must be (B, N, D), alone or with sample_of_row (B, N). In the packed form, x is (rows, D) or (1, rows, D), and
    sample_of_row (rows,). ``same_shape`` must have x's shape, vectors must be (B, D), and bias (D,).
    """
    if sample_of_row is None:
        if x.dim() != 3:
            raise ValueError(f"x must be (B, N, D), or (rows, D) with sample_of_row; it is {tuple(x.shape)}")
    elif not _fits_rows(x, sample_of_row) or sample_of_row.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"the packed form takes x (rows, D) and sample_of_row (rows,) int32 or int64, not {tuple(x.shape)} and "
            f"{tuple(sample_of_row.shape)} {sample_of_row.dtype}"
        )
    width = x.shape[-1]
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ValueError(f"the width D must be {MIN_WIDTH} to {MAX_WIDTH}, not {width}")
    for name, other in same_shape.items():
        if other.shape != x.shape:
            raise ValueError(f"{name} must have x's shape {tuple(x.shape)}, not {tuple(other.shape)}")
    first = next(iter(vectors.values()))
    for name, vector in vectors.items():
        expected = (first.shape[0] if sample_of_row is not None else x.shape[0], width)
        if vector.shape != expected:
            raise ValueError(f"{name} must be (B, D) = {expected}, not {tuple(vector.shape)}")
    if "shift" in vectors and vectors["shift"].dtype != vectors["scale"].dtype:
        raise ValueError(f"shift and scale differ in dtype: {vectors['shift'].dtype}, {vectors['scale'].dtype}")
    if bias is not None:
        if bias.shape != (width,):
            raise ValueError(f"bias must be (D,) = ({width},), not {tuple(bias.shape)}")
        vectors = {**vectors, "bias": bias}
    check_tensors(x=x, **same_shape, **vectors)


def _fits_rows(x: Tensor, sample_of_row: Tensor) -> bool:
    rows = tuple(sample_of_row.shape)
    return tuple(x.shape[:-1]) in (rows, (1, *rows))


def check_tensors(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are bf16, fp16 or fp32 and on one device."""
    first, device = next((name, tensor.device) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} must be bf16, fp16 or fp32, not {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, {first} on {device}")
