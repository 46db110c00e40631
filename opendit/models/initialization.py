"""Initial values of parameters. Any slice of a parameter can be computed separately.

An element's initial value depends only on the seed, the parameter's canonical name (in checkpoints) and the element's
index in the flattened canonical tensor. So each rank draws its slices without communication, and gets the same values
as a single process. Each architecture maps parameter names to distributions (``DiT.initial_distributions``).

The generator is Philox-4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). It can compute
any word of a key's stream separately. The key is a hash of seed and name. NumPy draws the words, because its bit
streams never change. Words are drawn on the CPU, in threads, so that all devices get equal bits.
"""

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

WRAPPERS = frozenset(("base_layer", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
Value = TypeVar("Value")


def canonical_name(name: str) -> str:
    """Remove what wrappers such as LoRA and torch.compile insert in a parameter's name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def fits(pattern: str, name: str) -> bool:
    """Return True if a dotted name matches a pattern: ``*`` matches one name between dots, and ``**`` one or more."""
    return _expression(pattern).fullmatch(name) is not None


@functools.cache
def _expression(pattern: str) -> re.Pattern:
    words = {"*": r"[^.]+", "**": r".+"}
    return re.compile(r"\.".join(words.get(word, re.escape(word)) for word in pattern.split(".")))


def value_of(name: str, by_pattern: Mapping[str, Value], of: str) -> Value:
    """Return the value for the pattern that matches a parameter's name. Raises ValueError unless exactly one pattern
    matches. of: the patterns' name in the message."""
    found = [pattern for pattern in by_pattern if fits(pattern, name)]
    if len(found) != 1:
        raise ValueError(f"parameter {name}: one pattern of {of} has to fit it, not {len(found)} {found}")
    return by_pattern[found[0]]


# ------------------------------------------------------------------------------------------------------ distributions


class Distribution:
    """The distribution of a parameter's initial values."""

    def values(self, key: int, start: int, count: int, shape: Sequence[int]) -> np.ndarray:
        """Return initial values (count,) float32 or float64: elements start to start + count - 1 of a flattened
        parameter of ``shape``. start and count are multiples of GRID."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Distribution):
    """The same value for all elements."""

    value: float = 0.0


@dataclass(frozen=True)
class Normal(Distribution):
    """Normal distribution N(0, std^2)."""

    std: float

    def values(self, key: int, start: int, count: int, shape: Sequence[int]) -> np.ndarray:
        values = _standard_normals(key, start, count)
        values *= self.std
        return values


class Uniform(Distribution):
    """Uniform distribution U(-b, b). The values are the midpoints of 2^24 equal intervals."""

    def bound(self, shape: Sequence[int]) -> float:
        raise NotImplementedError

    def values(self, key: int, start: int, count: int, shape: Sequence[int]) -> np.ndarray:
        values = _symmetric_uniforms(key, start, count)
        values *= np.float32(self.bound(shape))
        return values


@dataclass(frozen=True)
class XavierUniform(Uniform):
    """Uniform distribution with b = sqrt(6 / (fan in + fan out)) (Glorot & Bengio 2010). A convolution's weight counts
    as the matrix (out, rest). ``stacked``: True for a stack of matrices (n, in, out) with the fans of one matrix."""

    stacked: bool = False

    def bound(self, shape: Sequence[int]) -> float:
        sides = shape[1:] if self.stacked else (shape[0], math.prod(shape[1:]))
        return math.sqrt(6 / sum(sides))


@dataclass(frozen=True)
class FanInUniform(Uniform):
    """Uniform with b = 1 / sqrt(fan in), the default of ``nn.Linear`` and of LoRA's A (He et al. 2015, a = sqrt(5))."""

    def bound(self, shape: Sequence[int]) -> float:
        return 1 / math.sqrt(math.prod(shape[1:]))


# ------------------------------------------------------------------------------------------------------------- drawing

# Every drawn range begins and ends at a multiple of GRID. Otherwise an element's rounding could depend on the range.
GRID = 1 << 12
# Number of elements that a thread draws in one call of torch. A call takes 3 ms. It holds Python's global lock for only
# 30 us, so that threads draw in parallel.
CHUNK = 1 << 20
MAX_THREADS = 16
BLOCK = 4  # 64-bit words per value of the Philox counter


def draw(distribution: Distribution, seed: int, name: str, shape: Sequence[int], start: int, out: Tensor) -> Tensor:
    """Fill ``out`` with the initial values of elements [start, start + len(out)) of a flattened parameter; return
    ``out``.

    Args:
        name: the parameter's canonical name.
        shape: the parameter's shape.
        out: (n,) fp32, contiguous, in host memory.
    """
    if isinstance(distribution, Constant):
        return out.fill_(distribution.value)
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "little")
    stop, target = start + len(out), out.numpy()

    def draw_chunk(begin: int) -> None:
        low, high = max(begin, start), min(begin + CHUNK, stop)
        first, last = low // GRID * GRID, -(-high // GRID) * GRID
        values = distribution.values(key, first, last - first, shape)
        target[low - start : high - start] = values[low - first : high - first]

    chunks = range(start // CHUNK * CHUNK, stop, CHUNK)
    if len(chunks) == 1:
        draw_chunk(chunks[0])
    elif chunks:
        with ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1, MAX_THREADS)) as pool:
            for _ in pool.map(draw_chunk, chunks):
                pass
    return out


def random_words(key: int, start: int, count: int) -> np.ndarray:
    """Return words [start, start + count) of the generator, uint64. start is a multiple of BLOCK."""
    # NumPy increments the counter before each draw, so start one lower.
    return np.random.Philox(key=key, counter=(start // BLOCK - 1) % (1 << 256)).random_raw(count)


def _symmetric_uniforms(key: int, start: int, count: int) -> np.ndarray:
    """Draw float32 numbers from U(-1, 1), two from each word. The values are exact and symmetric."""
    bits = random_words(key, start // 2, count // 2).astype("<u8", copy=False).view("<i4")
    np.right_shift(bits, 8, out=bits)
    values = bits.astype(np.float32)
    values += np.float32(0.5)
    values *= np.float32(2.0**-23)
    return values


def _standard_normals(key: int, start: int, count: int) -> np.ndarray:
    """Draw float64 numbers from N(0, 1) by the Box-Muller transform, two from two words."""
    values = (random_words(key, start, count) >> np.uint64(11)).astype(np.float64)
    values += 0.5
    values *= 2.0**-53  # U(0, 1)
    pairs = values.reshape(-1, 2)
    radius, angle = np.sqrt(-2.0 * np.log(pairs[:, 0].copy())), (2 * math.pi) * pairs[:, 1]
    pairs[:, 0] = radius * np.cos(angle)
    pairs[:, 1] = radius * np.sin(angle)
    return values


# -------------------------------------------------------------------------------------------------------------- models


def distribution_of(model: nn.Module, name: str) -> Distribution:
    """Return the distribution of a parameter by its canonical name. Raises ValueError unless exactly one pattern
    matches the name."""
    distributions: Callable[[], dict[str, Distribution]] = cast(Any, model).initial_distributions
    return value_of(name, distributions(), "the initial distributions")


def initial_attention(name: str, output: Distribution | None = None) -> dict[str, Distribution]:
    """Return the initial distributions of the attention called ``name``: self-attention (qkv) or cross-attention (q,
    kv). output: distribution of the output projection's weight; None for Xavier."""
    inputs = {f"{name}.{layer}.weight": XavierUniform() for layer in ("qkv", "q", "kv")}
    norms = {f"{name}.{norm}.weight": Constant(1) for norm in ("q_norm", "k_norm")}
    return {**inputs, **norms, f"{name}.proj.weight": output or XavierUniform()}


def initialize(model: nn.Module, seed: int) -> None:
    """Fill all parameters in place with their initial values for ``seed``. For shards of parameters, see
    ``opendit.parallel.layout.InitialValues``. For a model built on the meta device, first call
    ``model.to_empty(device=...)`` and ``model.fill_tables()``. Raises ValueError unless each parameter matches one
    pattern."""
    for name, _ in model.named_parameters():
        initialize_parameter(model, seed, name)


@torch.no_grad()
def initialize_parameter(model: nn.Module, seed: int, name: str) -> None:
    """Fill one parameter of ``model.named_parameters()`` in place. A parameter on the meta device is only checked.
    Raises ValueError like :func:`initialize`."""
    parameter = model.get_parameter(name).detach()
    name = canonical_name(name)
    distribution = distribution_of(model, name)
    if parameter.is_meta:
        return
    if isinstance(distribution, Constant):
        parameter.fill_(distribution.value)
    elif parameter.device.type == "cpu" and parameter.dtype == torch.float32 and parameter.is_contiguous():
        draw(distribution, seed, name, parameter.shape, 0, parameter.view(-1))
    else:
        drawn = torch.empty(parameter.shape, device="cpu")
        draw(distribution, seed, name, parameter.shape, 0, drawn.view(-1))
        parameter.copy_(drawn)
