"""Compare attention kernels on a GPU: cuDNN's, torch's FlashAttention, the flash_attn package, FlexAttention.

    python benchmarks/bench_attention.py [--kernels cudnn flash_attn] [--lengths 8192 74240] [--seconds 170] [--record]

q, k, v are views of one tensor (B, N, 3, H, d), as in a block. The program first compares outputs and gradients of
short sequences with float64, and checks whether repeated runs give bit-identical gradients. It then measures speeds on
batches of about TOKENS tokens, counting 4 B H N^2 d FLOP forward and 2.5 times as many backward. The kernels take
turns. If a kernel fails, its error is printed and the others continue. Cases that did not start within --seconds are
listed."""

import argparse
import contextlib
import functools
import importlib
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.results import add_flags, record
from opendit.config.names import PACKAGE
from opendit.kernels.attention import BACKENDS, LocalAttention, flash_attn, package_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS = {64: 24, 72: 16, 128: 24}  # DiT-XL has 16 of 72, vDiT-7B has 24 of 128
LENGTHS = (8192, 74240, 256, 1024, 32768)  # the most interesting first
SHORT = (257, 1024)  # short enough for an N x N matrix in float64
TOKENS = 32768  # tokens in a case, over all samples; a longer sequence is a batch by itself
BASELINE = "cudnn"
AT_ONCE = 3  # calls queued together, few enough for the launch queue


@functools.cache
def flex_attention() -> Attend:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class Kernel:
    """A line of the tables. lengths: the lengths at which this kernel is timed; None means all."""

    name: str
    attend: Callable[[], Attend]
    deterministic: bool = False
    lengths: tuple[int, ...] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[Attend]:
        """Yield the attention function. Set torch's deterministic mode as the kernel needs it."""
        before = torch.are_deterministic_algorithms_enabled()
        memory: Any = torch.utils.deterministic
        memory.fill_uninitialized_memory = False  # as in training
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            yield self.attend()
        finally:
            torch.use_deterministic_algorithms(before)


def local(backend: str) -> Callable[[], Attend]:
    return lambda: LocalAttention(backend)


def package(head_size: int = 0) -> Callable[[], Attend]:
    """Return the flash_attn package's attention, with heads zero-padded to at least ``head_size``."""

    def attend() -> Attend:
        if flash_attn() is None:
            importlib.import_module("flash_attn.cute")  # raises the reason
        return lambda q, k, v: package_attention(q, k, v, max(q.shape[-1], head_size))

    return attend


KERNELS = {
    kernel.name: kernel
    for kernel in (
        *(Kernel(name, local(name)) for name in BACKENDS),
        *(Kernel(f"{name}-deterministic", local(name), deterministic=True) for name in ("cudnn", "flash")),
        Kernel(PACKAGE, package()),
        Kernel(f"{PACKAGE}-deterministic", package(), deterministic=True),
        *(Kernel(f"{PACKAGE}-pad{size}", package(size)) for size in (80, 96, 128)),
        Kernel("flex", flex_attention, lengths=LENGTHS[:1]),  # compiling for each shape takes seconds
    )
}
DEFAULT = ("cudnn", "flash", PACKAGE, "flash-deterministic", f"{PACKAGE}-deterministic", "cudnn-deterministic", "flex")


@dataclass(frozen=True)
class Case:
    length: int
    head_dim: int
    heads: int
    samples: int

    @classmethod
    def of(cls, length: int, head_dim: int, tokens: int = TOKENS) -> "Case":
        """Build a case. Above ``tokens``, it has a quarter of the heads, as if four ranks shared a sequence."""
        heads = HEADS.get(head_dim, 16)
        return cls(length, head_dim, heads // 4 if length > tokens else heads, max(1, tokens // length))

    def forward_flop(self) -> float:
        return 4 * self.samples * self.heads * self.length**2 * self.head_dim

    def __str__(self) -> str:
        return f"{self.samples} x {self.length} tokens, {self.heads} heads of {self.head_dim}"


def inputs(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Return (qkv (B, N, 3, H, d), its views q, k, v (B, H, N, d), the output's gradient)."""
    generator = torch.Generator(device).manual_seed(0)
    random = functools.partial(torch.randn, device=device, generator=generator)
    qkv = random(case.samples, case.length, 3, case.heads, case.head_dim).to(dtype).requires_grad_()
    grad = random(case.samples, case.length, case.heads, case.head_dim).to(dtype).transpose(1, 2)
    return qkv, qkv.permute(2, 0, 3, 1, 4).unbind(), grad


def reference(case: Case, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return the output (B, H, N, d) and the gradients of q, k, v in float64. Inputs are rounded to ``dtype``."""
    qkv, _, grad = inputs(case, dtype, device)
    q, k, v = exact = [x.detach().double().requires_grad_() for x in qkv.permute(2, 0, 3, 1, 4).unbind()]
    out = torch.softmax(q @ k.transpose(-1, -2) / case.head_dim**0.5, dim=-1) @ v
    return [out.detach(), *torch.autograd.grad(out, exact, grad.double())]


def errors(kernel: Kernel, case: Case, dtype: torch.dtype, device: str, exact: list[Tensor]) -> list[float]:
    """Return the relative errors (Frobenius norm) of the output, dq, dk and dv."""
    qkv, (q, k, v), grad = inputs(case, dtype, device)
    with kernel.active() as attend:
        out = attend(q, k, v)
        (dqkv,) = torch.autograd.grad(out, qkv, grad)
    made = [out, *dqkv.permute(2, 0, 3, 1, 4).unbind()]
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(made, exact, strict=True)]


def repeats(kernel: Kernel, case: Case, dtype: torch.dtype, device: str, runs: int = 5) -> bool:
    """Return True if the gradients of q, k and v have the same bits in every run."""
    qkv, (q, k, v), grad = inputs(case, dtype, device)
    with kernel.active() as attend:
        grads = [torch.autograd.grad(attend(q, k, v), qkv, grad)[0] for _ in range(runs)]
    return all(torch.equal(grads[0], other) for other in grads[1:])


def median_ms(call: Callable[[], object], milliseconds: int, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)
    from triton.testing import do_bench  # clears the L2 cache before each call

    return cast(float, do_bench(call, warmup=milliseconds // 4, rep=milliseconds, return_mode="median"))


def device_ms(call: Callable[[], object], milliseconds: int, device: str) -> float:
    """Return the median time without the host's: calls are queued while the GPU waits."""
    if device == "cpu":
        return median_ms(call, milliseconds, device)
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    wait = int(2e9 * AT_ONCE * 2 * (time.perf_counter() - start))  # in clock cycles, at about 2 GHz
    torch.cuda.synchronize()
    found: list[float] = []
    while len(found) < 3 * AT_ONCE or (sum(found) < milliseconds and len(found) < 100):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(AT_ONCE + 1)]
        torch.cuda._sleep(wait)
        for event in events[:-1]:
            event.record()
            call()
        events[-1].record()
        torch.cuda.synchronize()
        found += [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(found)


def speeds(kernel: Kernel, case: Case, dtype: torch.dtype, device: str, milliseconds: int) -> tuple[float, float]:
    """Return TFLOP/s forward and backward."""
    _, views, grad = inputs(case, dtype, device)
    q, k, v = leaves = [view.detach().requires_grad_() for view in views]  # shared memory, but separate gradients
    with kernel.active() as attend:
        with torch.no_grad():
            forward = median_ms(lambda: attend(q, k, v), milliseconds, device)
        out = attend(q, k, v)
        backward = median_ms(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), milliseconds, device)
    flop = case.forward_flop() / 1e9
    return flop / forward, 2.5 * flop / backward


class Trials:
    """Runs measurements until the time is up. Failures are printed, and skipped measurements are recorded."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds
        self._failed: set[str] = set()  # first lines of errors, each printed once
        self.skipped: list[str] = []

    def run(self, name: str, function: Callable, *args):
        """Return the result of ``function``, or None if it fails or the time is up."""
        if time.monotonic() > self._end:
            self.skipped.append(name)
            return None
        try:
            return function(*args)
        except Exception as error:  # a failing kernel is also a result
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            if (key := f"{name.split(',')[0]}: {text}") not in self._failed:
                self._failed.add(key)
                print(f"{name} failed: {text}", flush=True)
            return None
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def error_table(kernels: list[Kernel], args, trials: Trials) -> list[dict]:
    rows = []
    print(f"{'relative error, against float64':44s} {'out':>8s} {'dq':>8s} {'dk':>8s} {'dv':>8s}  same bits")
    for head_dim, length in itertools.product(args.head_dims, args.short):
        case = Case(length, head_dim, 4, 3)
        exact = reference(case, args.type, args.device)
        for kernel in kernels:
            name = f"{kernel.name}, {length} tokens, head size {head_dim}"
            found = trials.run(name, errors, kernel, case, args.type, args.device, exact)
            if found is None:
                continue
            same = trials.run(name, repeats, kernel, case, args.type, args.device)
            print(f"{name:44s}" + "".join(f" {error:8.1e}" for error in found) + f"  {same}", flush=True)
            for what, error in zip(("out", "dq", "dk", "dv"), found, strict=True):
                rows.append(_row(f"{name} {args.dtype}", f"relative error of {what}", f"{error:.2e}"))
    return rows


def speed_table(kernels: list[Kernel], args, trials: Trials) -> list[dict]:
    rows = []
    print(f"{'TFLOP/s':58s} {'forward':>8s} {'backward':>8s}")
    for length, head_dim in itertools.product(args.lengths, args.head_dims):
        case, found = Case.of(length, head_dim, args.tokens), {}
        for _ in range(args.rounds):  # in turns, so that clock drift affects all kernels equally
            for kernel in kernels:
                if kernel.lengths is None or length in kernel.lengths:
                    name = f"{kernel.name}, {case}"
                    pair = trials.run(name, speeds, kernel, case, args.type, args.device, args.milliseconds)
                    if pair is not None:
                        found.setdefault(kernel.name, []).append(pair)
        best = {name: [max(values) for values in zip(*pairs, strict=True)] for name, pairs in found.items()}
        for name, pair in best.items():
            print(f"{f'{name}, {case}':58s} {pair[0]:8.0f} {pair[1]:8.0f}", flush=True)
            for which, way in enumerate(("forward", "backward")):
                row = _row(f"{name} {case} {args.dtype}", f"TFLOP/s {way}", f"{pair[which]:.1f}")
                if name != BASELINE and BASELINE in best:
                    row |= {"baseline": BASELINE, "baseline_value": f"{best[BASELINE][which]:.1f}"}
                rows.append(row)
    return rows


def _row(case: str, metric: str, value: str) -> dict:
    return {"bench": "attention", "case": case, "metric": metric, "value": value}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=DEFAULT)
    parser.add_argument("--head_dims", nargs="+", type=int, default=[128, 72])
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS, help="tokens of the timed cases")
    parser.add_argument("--short", nargs="*", type=int, default=SHORT, help="tokens of the cases against float64")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of all samples of a timed case")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this program")
    parser.add_argument("--milliseconds", type=int, default=100, help="time for each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each kernel; the best counts")
    parser.add_argument("--seconds", type=float, default=170, help="no measurement begins after so long")
    add_flags(parser)
    args = parser.parse_args(argv)
    args.type = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    trials, kernels = Trials(args.seconds), [KERNELS[name] for name in args.kernels]
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    package = flash_attn()
    installed = package[1] if package else "not installed"
    print(f"{where}, torch {torch.__version__}, {args.dtype}; {PACKAGE}: {installed}")
    warnings.filterwarnings("ignore", category=UserWarning)  # warnings about kernels that can't be used
    rows = error_table(kernels, args, trials) + speed_table(kernels, args, trials)
    if trials.skipped:
        print(f"no time left for {len(trials.skipped)}: {'; '.join(dict.fromkeys(trials.skipped))}")
    record(rows, args)


if __name__ == "__main__":
    main()
