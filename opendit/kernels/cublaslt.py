"""Compute x W^T with the fastest cuBLAS kernel that gives torch's bits.

torch uses the first kernel that cuBLASLt proposes for a product. For a few thousand rows, another proposal may be
faster: 62.6 us instead of 70.7 for 4,096 rows in bf16, 1152 to 4608 with GELU (H200). This module times all proposals
for a shape once, on random numbers. It uses the fastest proposal that gives torch's bits.

ctypes calls the cuBLASLt that torch has loaded. The entry points and constants below are public, and equal in CUDA 12
and 13.
"""

import ctypes
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CUDA_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType_t
FP32, COMPUTE_32F = 0, 68  # cudaDataType_t, cublasComputeType_t
TRANSA, EPILOGUE, BIAS_POINTER = 3, 7, 8  # cublasLtMatmulDescAttributes_t
EPILOGUES = {(False, False): 1, (True, False): 4, (True, True): 36}  # by (bias, GELU): default, BIAS, GELU_BIAS
WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
ALIGNMENT = 256  # bytes; the alignment that cuBLASLt's proposals assume
PROPOSALS = 16
# Timing cycles through copies of the weight, so that the weight is not in the cache, as in a model. COLD: total bytes
# of the copies. MOST_COPIES: their maximum number.
COLD, MOST_COPIES = 192 << 20, 16
TRIALS = 5
GAIN = 0.98  # a proposal must take less than this fraction of torch's time


class Proposal(ctypes.Structure):
    """The C struct cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Library:
    """cuBLASLt as loaded by torch. Raises OSError if torch has not loaded it, RuntimeError if a call fails."""

    def __init__(self):
        torch.cuda.current_blas_handle()  # makes torch load cuBLASLt
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libcublasLt.so" in line}
        if not paths:
            raise OSError("torch has loaded no cuBLASLt")
        self._library = ctypes.CDLL(paths.pop())
        self.handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))

    def call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise RuntimeError(f"{name} returned status {status}")

    def made(self, name: str, *args: Any) -> ctypes.c_void_p:
        """Create an object of the library with ``name(&object, ...)``."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *args)
        return made

    def set(self, kind: str, made: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self.call(f"cublasLt{kind}SetAttribute", made, ctypes.c_int(attribute), ctypes.byref(value), size)


@cache
def loaded(device: torch.device) -> Library:
    """Return cuBLASLt with a handle for ``device``."""
    with torch.cuda.device(device):
        return Library()


@dataclass(frozen=True)
class ProductShape:
    """The shape of a product on ``device``: x (rows, inner), weight (columns, inner)."""

    rows: int
    columns: int
    inner: int
    dtype: torch.dtype
    bias: bool
    gelu: bool
    device: torch.device


class Product:
    """A product of one shape. Any of cuBLASLt's proposals can compute it.

    Only proposals without a workspace are requested, because several streams can't share a workspace. Row-major y = x
    W^T is cuBLASLt's column-major y^T = W x^T.
    """

    def __init__(self, library: Library, shape: ProductShape):
        self._library, self._shape, self._lock = library, shape, threading.Lock()
        kind = CUDA_TYPES[shape.dtype]
        self._description = library.made("cublasLtMatmulDescCreate", COMPUTE_32F, FP32)
        self._set(TRANSA, ctypes.c_int(1))
        self._set(EPILOGUE, ctypes.c_int(EPILOGUES[shape.bias, shape.gelu]))
        sizes = (shape.inner, shape.columns), (shape.inner, shape.rows), (shape.columns, shape.rows)
        self._layouts = [
            library.made("cublasLtMatrixLayoutCreate", kind, ctypes.c_uint64(n), ctypes.c_uint64(m), ctypes.c_int64(n))
            for n, m in sizes
        ]
        preference = library.made("cublasLtMatmulPreferenceCreate")
        library.set("MatmulPreference", preference, WORKSPACE_BYTES, ctypes.c_uint64(0))
        found, count = (Proposal * PROPOSALS)(), ctypes.c_int()
        weight, x, y = self._layouts
        asked = (self._description, weight, x, y, y, preference, PROPOSALS, found, ctypes.byref(count))
        library.call("cublasLtMatmulAlgoGetHeuristic", library.handle, *asked)
        library.call("cublasLtMatmulPreferenceDestroy", preference)
        self.proposals = [proposal for proposal in found[: count.value] if proposal.state == 0]
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def _set(self, attribute: int, value) -> None:
        self._library.set("MatmulDesc", self._description, attribute, value)

    def __call__(self, proposal: Proposal, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product (rows, columns) by one proposal. Raises RuntimeError if cuBLASLt rejects the proposal."""
        y = torch.empty(self._shape.rows, self._shape.columns, dtype=x.dtype, device=x.device)
        (w_layout, x_layout, y_layout), one, zero = self._layouts, ctypes.byref(self._one), ctypes.byref(self._zero)
        w_place, x_place, y_place = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, y))
        stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        with self._lock:  # threads share the descriptor with the pointer to the bias
            if bias is not None:
                self._set(BIAS_POINTER, ctypes.c_uint64(bias.data_ptr()))
            self._library.call(
                "cublasLtMatmul", self._library.handle, self._description, one, w_place, w_layout, x_place, x_layout,
                zero, y_place, y_layout, y_place, y_layout, ctypes.byref(proposal.algorithm), None, ctypes.c_size_t(0),
                stream,
            )  # fmt: skip
        return y


Multiply = Callable[..., Tensor]  # function of x, weight, and bias or None


def fastest(times: list[float], equal: list[bool]) -> int | None:
    """Return the index of the fastest proposal with torch's bits and less than ``GAIN`` of torch's time; None if there
    is none. Arguments: see :class:`Measured`."""
    taken = [number for number, same in enumerate(equal) if same and times[1 + number] < GAIN * times[0]]
    return min(taken, key=lambda number: times[1 + number], default=None)


class Measured(NamedTuple):
    """Results of :func:`measured`."""

    microseconds: list[float]  # median time of torch's call, then of each proposal
    equal: list[bool]  # for each proposal, True if its bits equal torch's
    proposals: list[Proposal]  # without those that cuBLASLt rejected


def measured(product: Product, shape: ProductShape, torchs: Multiply) -> Measured:
    """Time torch's call and cuBLASLt's proposals for a product, in turn, on random numbers. Compare the results."""
    generator = torch.Generator(shape.device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=shape.dtype, device=shape.device)

    copies = max(2, min(MOST_COPIES, COLD // (shape.columns * shape.inner * 2)))
    x, weights = random(shape.rows, shape.inner), random(copies, shape.columns, shape.inner).mul_(0.02)
    bias = random(shape.columns) if shape.bias else None
    want = torchs(x, weights[0], bias)
    calls, equal, proposals = [torchs], [], []
    for proposal in product.proposals:
        try:
            got = product(proposal, x, weights[0], bias)
        except RuntimeError:  # cuBLASLt rejects some proposals only at launch
            continue
        proposals.append(proposal)
        equal.append(torch.equal(got, want))
        calls.append(partial(product, proposal))
    busy = random(4096, 4096)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(TRIALS):
        for call, found in zip(calls, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(4):
                busy @ busy  # keeps the GPU busy while the host enqueues the calls
            start.record()
            for weight in weights:
                call(x, weight, bias)
            end.record()
            end.synchronize()
            found.append(1000 * start.elapsed_time(end) / copies)
    return Measured([statistics.median(found) for found in times], equal, proposals)


class FastestProducts:
    """Computes products by the fastest algorithm for their shape, and caches the algorithm of each shape.

    Attributes:
        found: for each shape, the product and its fastest proposal; None: use torch's call.
        failed: True if the library could not be used; then torch computes all new shapes.
    """

    def __init__(self):
        self.found: dict[ProductShape, tuple[Product, Proposal] | None] = {}
        self.failed = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, torchs: Multiply, gelu: bool = False) -> Tensor:
        """Return a tensor equal to ``torchs(x, weight, bias)`` (..., out) bit for bit, without gradients.

        torchs: torch's call, with GELU if ``gelu`` is true. torch computes the product if no proposal is faster or
        allowed. Proposals need aligned operands in bf16 or fp16. They are not allowed with gradients, under
        torch.compile, or for new shapes during a CUDA graph capture.
        """
        operands = (x, weight) if bias is None else (x, weight, bias)
        if torch.compiler.is_compiling() or not _takes(operands):
            return torchs(x, weight, bias)
        rows = x.numel() // x.shape[-1]
        shape = ProductShape(rows, weight.shape[0], weight.shape[1], x.dtype, bias is not None, gelu, x.device)
        if shape not in self.found:
            if torch.cuda.is_current_stream_capturing():  # nothing can be timed during a capture
                return torchs(x, weight, bias)
            self.found[shape] = self.search(shape, torchs)
        found = self.found[shape]
        if found is None:
            return torchs(x, weight, bias)
        product, proposal = found
        return product(proposal, x.view(rows, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)

    def search(self, shape: ProductShape, torchs: Multiply) -> tuple[Product, Proposal] | None:
        """Time all of cuBLASLt's proposals for a shape and return the fastest; None if torch's call should be used."""
        if self.failed:
            return None
        try:
            product = Product(loaded(shape.device), shape)
            found = measured(product, shape, torchs)
        except (OSError, AttributeError, RuntimeError):  # an incompatible library, or no memory left
            self.failed = True
            return None
        number = fastest(found.microseconds, found.equal)
        return None if number is None else (product, found.proposals[number])


def _takes(operands: tuple[Tensor, ...]) -> bool:
    """Return True if gradients are off, and cuBLASLt supports the dtypes and layouts of x, weight and bias."""
    x = operands[0]
    if not x.is_cuda or x.dtype not in CUDA_TYPES or torch.is_grad_enabled() or not x.numel():
        return False
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype == x.dtype
        and tensor.is_contiguous()
        and tensor.data_ptr() % ALIGNMENT == 0
        for tensor in operands
    )


_products = FastestProducts()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a tensor equal to ``F.linear(x, weight, bias)`` (..., out), without gradients."""
    return _products(x, weight, bias, F.linear)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, torchs: Multiply) -> Tensor:
    """Return GELU(x W^T + bias), tanh form, by cuBLAS's epilogue, with the bits of ``torchs(x, weight, bias)``."""
    return _products(x, weight, bias, torchs, gelu=True)
