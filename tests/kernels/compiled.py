"""Compile the kernels without a GPU, by ``python -m tests.kernels.compiled [80]``, and print one JSON list.

The interpreter runs a kernel's Python code, so it can't detect that Triton's compiler refuses a kernel, or that a
kernel spills registers. Here every launch is only compiled and never run. The target is compute capability 9.0. With
the argument 80, the target is 8.0, for the bf16 kernels of cards before Hopper. This program needs a separate process,
because the replacement of Triton's driver can't be undone.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from opendit.kernels import base_precision, fp8, lora
from opendit.kernels.adamw_ema import FusedStep, constant_decays
from opendit.kernels.add_table import add_table
from opendit.kernels.averages import SeparateAverages
from opendit.kernels.bias_gelu import bias_gelu_backward_float8, bias_gelu_float8
from opendit.kernels.eight_bit_moments import DecodedMoments, new_moment
from opendit.kernels.exchange_heads import exchange_heads, new_heads, send_rows
from opendit.kernels.flash_attention_4 import resize_heads
from opendit.kernels.fp8 import rows_in_float8
from opendit.kernels.fp8_shards import ShardQuantizer
from opendit.kernels.gate_residual_layernorm_modulate import gate_residual_layernorm_modulate_float8
from opendit.kernels.layernorm_modulate import layernorm_modulate_float8
from opendit.kernels.linear import sum_parts, transpose
from opendit.kernels.philox import philox_bits
from opendit.kernels.rotate_heads import StreamHeads, join_heads, pack_heads, rotate_heads
from opendit.kernels.sampling_step import embed_patches, gather_rows, guided_update, take_step
from opendit.kernels.short_attention import short_attention
from opendit.kernels.split_heads import gather_heads_float8, split_heads
from tests.kernels.cases import ACTIVATIONS, OPERATORS, arguments_of, make_inputs, output_gradients

BFLOAT16 = torch.bfloat16


class Driver:
    """Replacement for the GPU driver that Triton queries before it compiles."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def usage(binary: bytes) -> dict[str, int]:
    """Return the registers of a thread, and the bytes of its stack, which holds spilled registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", told).groups()
    return {"registers": int(registers), "stack": int(stack)}


def forward_and_backward(
    name: str, width: int, dtype: torch.dtype, lengths: tuple | None = None, frozen: bool = False
) -> None:
    """Run a fused operation and its backward pass. frozen: True if only activations need gradients, as with LoRA."""
    op = OPERATORS[name]
    leaves, sample_of_row = make_inputs(op, 2, 256, width, dtype, lengths=lengths)
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in ACTIVATIONS or not frozen)
    arguments = arguments_of(op, leaves)
    options = {} if sample_of_row is None else {"sample_of_row": sample_of_row}
    outputs = op.function(*arguments, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
    torch.autograd.grad(outputs, trained, output_gradients(op, leaves))


def optimizer_step() -> None:
    masters, moments, average = ([torch.zeros(4096), torch.zeros(4096)] for _ in range(3))
    gradients, working = ([torch.zeros(4096, dtype=BFLOAT16) for _ in masters] for _ in range(2))
    step = FusedStep(masters, moments, [torch.zeros(4096), None], working, count=torch.zeros(()))
    step.attach([average], constant_decays((0.9,), torch.device("cpu")), torch.zeros(()))
    step.kernels = True  # False on a CPU by default
    step.decide(step.square_sum(gradients), clip=1.0)
    step.momentum(0.95)
    step.update(lr=1e-3)


def eight_bit_moments() -> None:
    moments = [[new_moment(torch.zeros(8192), True), new_moment(torch.zeros(8192), False)]]
    decoded = DecodedMoments(moments, block=2048, kernels=True)
    for encode in (decoded.decode, decoded.encode):
        encode(0, 1, torch.ones(4))


def separate_averages() -> None:
    averages = SeparateAverages([torch.zeros(4096)], [[torch.zeros(4096)], [torch.zeros(4096)]])
    averages.kernels = True
    averages.move(torch.zeros(6))


def float8(width: int) -> None:
    x, modulation = torch.randn(2, 256, width, dtype=BFLOAT16), torch.randn(2, 6 * width, dtype=BFLOAT16)
    (shift, scale, gate), bias = modulation.chunk(6, dim=1)[:3], torch.randn(width, dtype=BFLOAT16)
    layernorm_modulate_float8(x, shift, scale)
    gate_residual_layernorm_modulate_float8(x, gate, x, shift, scale, bias)
    layernorm_modulate_float8(x, shift, scale, by_row=True)
    gate_residual_layernorm_modulate_float8(x, gate, x, shift, scale, bias, by_row=True)
    for by_row in (False, True):  # RMSNorm has fp32 vectors
        layernorm_modulate_float8(x, shift.float(), scale.float(), by_row=by_row, center=False)
        vectors = shift.float(), scale.float()
        gate_residual_layernorm_modulate_float8(x, gate, x, *vectors, None, by_row=by_row, center=False)
    rows_in_float8(x)
    bias_gelu_float8(x, bias)
    bias_gelu_backward_float8(x, x, bias, sums=True)
    gather_heads_float8(*x.view(2, 256, 8, width // 8).transpose(1, 2).expand(3, -1, -1, -1, -1), BFLOAT16)
    fp8.transposed(fp8.cast(x, fp8.E4M3).data)


def gradients_of_lora(rank: int, dtype: torch.dtype) -> None:
    lora.kernels_available = lambda *_: (True, "")  # unavailable on a CPU by default
    dy, b, thin = (torch.zeros(shape, dtype=dtype) for shape in ((8192, 1152), (1152, rank), (8192, rank)))
    lora.low_rank_gradients(dy, b, thin, 1.0)


def products_of_lora(rank: int, turned: bool) -> None:
    lora.kernels_available = lambda *_: (True, "")  # unavailable on a CPU by default
    lora.missing, lora.SMALLEST_OUTPUT = lambda *_: None, 0
    x, thin, bias = (torch.zeros(shape, dtype=BFLOAT16) for shape in ((512, 1152), (512, rank), (4608,)))
    matrices = [torch.zeros(4608, width, dtype=BFLOAT16).t() for width in (1152, rank)]
    weight, factor = matrices if turned else [matrix.contiguous() for matrix in matrices]
    lora.low_rank_product(x, weight, thin, factor, 1.0, bias if turned else None)


def lora_beside_float8(rank: int) -> None:
    lora.kernels_available = lambda *_: (True, "")  # unavailable on a CPU by default
    x, dy = torch.zeros(256, 1152).to(fp8.E4M3), torch.zeros(256, 1152, dtype=BFLOAT16)
    b, thin = torch.zeros(1152, rank, dtype=BFLOAT16), torch.zeros(256, rank, dtype=BFLOAT16)
    lora.thin_product(x, torch.ones(1), b.t())
    lora.thin_gradient(thin, x, torch.ones(1))
    dy8 = fp8.Float8.empty(dy.shape, fp8.E5M2, dy.device)
    lora.low_rank_gradients_and_cast(dy, b, thin, 1.0, *fp8.kernel_arguments(dy8, fp8.amax(dy), fp8.SAMPLED_GRADIENT))
    for factor in (b.t(), b.t().contiguous()):
        lora.add_low_rank(dy, thin, factor, 1.0)


def gelu_rows_in_float8(width: int) -> None:
    rows_in_float8(torch.zeros(512, width, dtype=BFLOAT16), torch.zeros(width, dtype=BFLOAT16))


def heads_of_other_ranks() -> None:
    addresses = torch.zeros(2, dtype=torch.int64)
    for parts, push in ((3, False), (1, True)):
        heads = new_heads(parts, 2, 4, 64, 72, torch.empty(0, dtype=BFLOAT16))
        exchange_heads(heads, addresses, (2, 32, parts, 8, 72), 0, 0, push)
    send_rows(torch.empty(2, 32, 8, 72, dtype=BFLOAT16), addresses, 0, 64)


def heads(width: int) -> None:
    qkv, bias = torch.randn(2, 256, 3 * width, dtype=BFLOAT16), torch.randn(3 * width, dtype=BFLOAT16)
    leaves = [qkv.requires_grad_(), bias.requires_grad_()]
    outputs = split_heads(qkv, 16, bias)
    torch.autograd.grad(outputs, leaves, [torch.randn_like(part) for part in outputs])


def rotated(heads: int, size: int, dtype: torch.dtype, norm: bool, turn: bool, across: bool) -> None:
    qkv = torch.randn(2, 256, 3 * heads * size, dtype=dtype).requires_grad_()
    q, k, _ = qkv.unflatten(-1, (3, heads, size)).unbind(2)
    width = heads * size if across else size
    weights = [torch.randn(width, dtype=dtype).requires_grad_() for _ in range(2)] if norm else [None, None]
    outputs = rotate_heads(q, k, *weights, torch.zeros(256, size // 2, 2) if turn else None, 1e-6, across)
    torch.autograd.grad(outputs, [qkv, *weights] if norm else qkv, [torch.randn_like(part) for part in outputs])


def joined(heads: int, size: int, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(2, 256, 3, heads, size, dtype=dtype).unbind(2)
    weight, table = torch.randn(size, dtype=dtype), torch.zeros(256, size // 2, 2)
    join_heads([StreamHeads(q, k, v, weight, weight, table)] * 2)


def packed(heads: int, size: int, dtype: torch.dtype, across: bool) -> None:
    q, k, v = torch.randn(2, 256, 3, heads, size, dtype=dtype).unbind(2)
    weight, table = torch.randn(heads * size if across else size, dtype=dtype), torch.zeros(256, size // 2, 2)
    pack_heads(StreamHeads(q, k, v, weight, weight, table), 2, across=across)


def short(batch: int, tokens: int, heads: int, size: int) -> None:
    qkv = torch.empty(batch, tokens, 3, heads, size, dtype=BFLOAT16)
    short_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))


def sampling_step(C: int, sides: tuple[int, ...], patch: tuple[int, ...], dtype: torch.dtype) -> None:
    """Launch the first and last kernels of a sampling step, also for a sampler with a two-part state and noise."""
    values, x = C * torch.Size(patch).numel(), torch.zeros(2, C, *sides)
    weight, numbers = torch.zeros(1152, C, *patch, dtype=dtype), torch.zeros(2, 40)
    step = torch.zeros(2, dtype=torch.int64)
    take_step(step, torch.zeros(2, 2, dtype=torch.int64), 6, numbers)
    gather_rows(torch.zeros(4, 3 * 1152, dtype=dtype), step)
    tokens = embed_patches(x, weight, weight[:, 0].flatten(1)[:, 0].contiguous(), None, numbers[:, 0], 2)
    table = torch.zeros(1, *tokens.shape[1:])
    embed_patches(x, weight, weight[:, 0].flatten(1)[:, 0].contiguous(), table, None, 2)
    output = torch.zeros(4, tokens.shape[1], 2 * values, dtype=dtype)
    for count, noise in ((1, None), (2, x)):
        weights = numbers[:, : count * (count + 1 + (count > 1))].unflatten(1, (count, -1))
        variance = None if noise is None else numbers[:, -2:]
        state = [x, x][:count]
        guided_update(output, state, state, weights, patch, numbers[:, 0], 3, noise, step, variance)


def shards_in_float8(dtype: torch.dtype) -> None:
    shards = [torch.randn(64, 1152), torch.randn(7, 5)]
    quantizer = ShardQuantizer(shards, [torch.zeros(s.shape, dtype=torch.uint8) for s in shards], dtype)
    quantizer.quantize(quantizer.amax())


def stored_weights(kind: str) -> None:
    base_precision.kernels_available = lambda *_: (True, "")  # unavailable on a CPU by default
    rows = torch.zeros(64, base_precision.row_bytes(kind, 1152), dtype=torch.uint8)
    base_precision.dense(rows, kind, 1152, BFLOAT16, torch.ones(1))


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (name, function) for everything that launches kernels.

    The cases include DiT-XL's width in bf16, packed samples, fp32, and a width that is not a multiple of 16.
    """
    for name, op in OPERATORS.items():
        for width, dtype in ((1152, BFLOAT16), (1152, torch.float32), (200, torch.float16)):
            yield f"{name} {width} {dtype}", lambda n=name, w=width, t=dtype: forward_and_backward(n, w, t)
        yield f"{name} frozen", lambda n=name: forward_and_backward(n, 1152, BFLOAT16, frozen=True)
        if op.modulated:
            yield f"{name} packed", lambda n=name: forward_and_backward(n, 1152, BFLOAT16, (100, 156))
    yield "split_heads", lambda: heads(1152)
    for heads_of in ((24, 128, BFLOAT16), (16, 72, BFLOAT16), (24, 128, torch.float32)):
        for what in ((True, True, False), (True, False, False), (False, True, False)):
            yield f"rotate_heads {heads_of} {what}", lambda h=heads_of, w=what: rotated(*h, *w)
        yield f"join_heads {heads_of}", lambda h=heads_of: joined(*h)
        yield f"pack_heads {heads_of}", lambda h=heads_of: packed(*h, False)
    for heads_of in ((12, 128), (40, 128)):
        yield f"rotate_heads across {heads_of}", lambda h=heads_of: rotated(*h, BFLOAT16, True, True, True)
        yield f"pack_heads across {heads_of}", lambda h=heads_of: packed(*h, BFLOAT16, True)
    for shape in ((2, 256, 16, 72), (64, 256, 16, 72), (64, 130, 6, 64), (64, 256, 8, 96)):
        yield f"short_attention {shape}", lambda s=shape: short(*s)
    for size in (72, 96):
        yield f"heads of {size}", lambda s=size: resize_heads(torch.zeros(2, 256, 16, 168 - s, dtype=BFLOAT16), s)
    yield "add_table", lambda: add_table(torch.zeros(16, 256, 1152, dtype=BFLOAT16), torch.zeros(256, 1152))
    for seed in (42, 2**64 - 1):
        yield f"philox {seed}", lambda s=seed: philox_bits(s, 2**32 - 1, torch.zeros(3, dtype=torch.int64), 1, 4096)
    yield "exchange_heads", heads_of_other_ranks
    yield "sum_parts", lambda: sum_parts(torch.zeros(3, 64, 1152, dtype=BFLOAT16))
    yield "transpose", lambda: transpose(torch.zeros(64, 1152, dtype=BFLOAT16))
    for rank in (4, 16, 64):
        yield f"low_rank {rank}", lambda r=rank: gradients_of_lora(r, BFLOAT16)
        yield f"LoRA beside float8 {rank}", lambda r=rank: lora_beside_float8(r)
    for rank, turned in ((8, True), (16, True), (16, False), (64, True), (64, False)):
        yield f"low_rank_product {rank} {turned}", lambda r=rank, t=turned: products_of_lora(r, t)
    yield "float8", lambda: float8(1152)
    for width in (4608, 12288, 24576):
        yield f"GELU's rows in float8 {width}", lambda w=width: gelu_rows_in_float8(w)
    for shape in ((4, (32, 32), (2, 2), BFLOAT16), (16, (4, 32, 32), (2, 2, 2), torch.float32)):
        yield f"sampling step {shape}", lambda s=shape: sampling_step(*s)
    yield "adamw_ema", optimizer_step
    yield "averages", separate_averages
    yield "eight_bit_moments", eight_bit_moments
    for kind in ("fp8", "int8", "nf4"):
        yield f"stored weights {kind}", lambda k=kind: stored_weights(k)
    for dtype in (BFLOAT16, torch.float16):
        yield f"shards in float8, {dtype}", lambda t=dtype: shards_in_float8(t)


# Calls that are skipped for cards before Hopper: unsupported ones (opendit/kernels/common.py), and variants.
OF_HOPPER = "float8", "short_attention", "packed", "low_rank_product"


def main(capability: int) -> None:
    driver.set_active(Driver(capability))
    launch, found, seen = JITFunction.run, [], set()

    def compile_only(self, *args, grid, warmup, **options):
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            shared = kernel.metadata.shared
            found.append({"kernel": self.__name__, "call": current, "shared": shared, **usage(kernel.asm["cubin"])})
        return kernel

    JITFunction.run = compile_only
    for current, call in calls():
        if capability < 90 and (any(what in current for what in OF_HOPPER) or "float" in current.replace("bfloat", "")):
            continue
        try:
            call()
        except Exception as error:
            found.append({"call": current, "error": f"{type(error).__name__}: {error}"[:2000]})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 90)
