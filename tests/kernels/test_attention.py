"""Test how the attention backend is chosen, the reasons and errors, and LocalAttention under torch.compile."""

import sys
import types

import pytest
import torch

from opendit.config.components import SpeedFlags
from opendit.kernels import attention
from opendit.kernels.attention import LocalAttention, resolve_attention
from opendit.kernels.select import select_kernels
from opendit.models.attention import local_attention
from tests.memory import kept_bytes

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.fixture
def card(monkeypatch):
    """Return a function that fakes a GPU with a compute capability and a list of usable backends."""

    def pretend(capability: tuple[int, int], *backends: str) -> None:
        monkeypatch.setattr(attention, "compute_capability", lambda device: capability)
        monkeypatch.setattr(attention, "usable", lambda backend, *shape: backend in (*backends, "math"))

    return pretend


@pytest.mark.parametrize(
    ("capability", "dtype", "runs", "expected"),
    [
        ((9, 0), BFLOAT16, ("cudnn", "flash", "efficient"), "cudnn"),
        ((10, 0), torch.float16, ("cudnn", "flash", "efficient"), "cudnn"),
        ((9, 0), BFLOAT16, ("flash", "efficient"), "flash"),
        ((8, 0), BFLOAT16, ("cudnn", "flash", "efficient"), "flash"),
        ((8, 0), BFLOAT16, ("efficient",), "efficient"),
        ((9, 0), FLOAT32, ("cudnn", "flash", "efficient"), "efficient"),
        ((9, 0), torch.float64, (), "math"),
    ],
)
def test_picks_the_fastest_that_runs(card, capability, dtype, runs, expected):
    card(capability, *runs)
    backend, reason = resolve_attention("auto", "cuda", dtype, 72, 256)
    assert backend == expected
    assert "head size 72, 256 tokens" in reason


def test_never_math_where_only_tiles_are_allowed(card):
    card((9, 0))
    with pytest.raises(ValueError, match="N x N"):
        resolve_attention("auto", "cuda", BFLOAT16, 72, 256, tiled=True)
    with pytest.raises(ValueError, match="N x N"):
        resolve_attention("math", "cuda", BFLOAT16, 72, 256, tiled=True)
    card((9, 0), "flash")
    assert resolve_attention("auto", "cuda", BFLOAT16, 72, 256, tiled=True)[0] == "flash"


def test_a_backend_asked_for_is_used_or_refused(card):
    card((9, 0), "flash")
    assert resolve_attention("flash", "cuda", BFLOAT16, 72, 256) == ("flash", "asked for")
    with pytest.raises(ValueError, match="'cudnn' was asked for"):
        resolve_attention("cudnn", "cuda", BFLOAT16, 72, 256)
    with pytest.raises(ValueError, match="CUDA GPU"):
        resolve_attention("flash", "cpu", BFLOAT16, 72, 256)
    with pytest.raises(ValueError, match="one of auto"):
        resolve_attention("fast", "cpu", BFLOAT16, 72, 256)


@pytest.fixture
def package(monkeypatch):
    """Return a function that installs a fake FlashAttention package.

    The package takes (B, N, H, d) and returns the output, followed by the log-sum-exp if ``with_lse``, as version 4
    does. Its dq is wrong for the head sizes in ``wrong``. The function returns a list that records the head size and
    the ``deterministic`` flag of every call.
    """

    def install(name: str, with_lse: bool = False, wrong: tuple[int, ...] = ()) -> list[tuple[int, bool]]:
        calls = []

        def flash_attn_func(q, k, v, *, softmax_scale, deterministic=False):
            calls.append((q.shape[-1], deterministic))
            scale = softmax_scale * q.shape[-1] ** 0.5
            query = WrongGradient.apply(q) if q.shape[-1] in wrong else q
            out = expected(*(x.transpose(1, 2) for x in (query * scale, k, v))).transpose(1, 2)
            return (out, None) if with_lse else out

        for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
            found = types.SimpleNamespace(flash_attn_func=flash_attn_func) if module == name else None
            monkeypatch.setitem(sys.modules, module, found)
        attention.flash_attn.cache_clear()
        return calls

    yield install
    attention.flash_attn.cache_clear()


class WrongGradient(torch.autograd.Function):
    """Return x unchanged, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(-1)


@pytest.mark.parametrize("name", ("flash_attn", "flash_attn_interface", "flash_attn.cute"))
@pytest.mark.parametrize("with_lse", (False, True))
def test_the_flash_attn_package(package, monkeypatch, name, with_lse):
    calls = package(name, with_lse)
    monkeypatch.setattr(attention, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "right_head_size", lambda device, dtype, head_dim: head_dim)  # there is no GPU
    asked = resolve_attention("flash_attn", "cuda", BFLOAT16, 72, 256, tiled=True)
    assert asked == ("flash_attn", f"asked for, {name}")
    q, k, v = torch.randn(3, 2, 3, 7, 24, dtype=torch.float64)
    torch.testing.assert_close(LocalAttention("flash_attn")(q, k, v), expected(q, k, v))
    torch.use_deterministic_algorithms(True)
    try:
        LocalAttention("flash_attn")(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == [(24, False), (24, True)]
    for dtype, head_dim in ((FLOAT32, 72), (BFLOAT16, 70), (BFLOAT16, 512)):
        with pytest.raises(ValueError, match="does not run here"):
            resolve_attention("flash_attn", "cuda", dtype, head_dim, 256)
    monkeypatch.setattr(attention, "compute_capability", lambda device: (8, 0))
    if name == "flash_attn":
        assert resolve_attention("flash_attn", "cuda", BFLOAT16, 72, 256) == asked
    else:  # only for Hopper or newer
        with pytest.raises(ValueError, match="does not run here"):
            resolve_attention("flash_attn", "cuda", BFLOAT16, 72, 256)
    monkeypatch.setattr(attention, "compute_capability", lambda device: (10, 0))
    assert attention.usable("flash_attn", "cuda", BFLOAT16, 136, 256) == (name != "flash_attn.cute")


@pytest.mark.parametrize(("wrong", "size"), (((), 24), ((24,), 32), ((24, 32), None)))
def test_a_package_is_tried_and_heads_are_filled_up_where_it_is_wrong(package, monkeypatch, wrong, size):
    package("flash_attn.cute", with_lse=True, wrong=wrong)
    found = attention.right_head_size("cpu", BFLOAT16, 24)
    assert found == size
    monkeypatch.setattr(attention, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "right_head_size", lambda device, dtype, head_dim: found)
    if size is None:
        with pytest.raises(ValueError, match="or flash_attn.cute is wrong here: bf"):
            resolve_attention("flash_attn", "cuda", BFLOAT16, 24, 256)
        return
    asked = resolve_attention("flash_attn", "cuda", BFLOAT16, 24, 256)
    assert asked == ("flash_attn", "asked for, flash_attn.cute" + (" with heads filled up to 32" if wrong else ""))
    leaves = [torch.randn(2, 3, 7, 24, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(2, 3, 7, 24, dtype=torch.float64)
    got, want = LocalAttention("flash_attn")(*leaves), expected(*leaves)
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(out, leaves, weight) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


class Saving(torch.autograd.Function):
    """Attention (B, N, H, d) that saves q, k, v and its output for the backward pass, as FlashAttention does."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        out = Saving.formula(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out)
        ctx.scale = scale
        return out

    @staticmethod
    def formula(q, k, v, scale):
        factor = scale * q.shape[-1] ** 0.5
        return expected(*(x.transpose(1, 2) for x in (q * factor, k, v))).transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        *leaves, out = ctx.saved_tensors
        assert {x.shape[-1] for x in (*leaves, out)} == {32}
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in leaves]
            again = Saving.formula(*leaves, ctx.scale)
        torch.testing.assert_close(out, again.detach(), rtol=0, atol=0)
        return *torch.autograd.grad(again, leaves, grad), None


def test_what_fills_heads_up_is_not_kept(monkeypatch):
    function = lambda q, k, v, softmax_scale, deterministic: Saving.apply(q, k, v, softmax_scale)  # noqa: E731
    monkeypatch.setattr(attention, "flash_attn", lambda: (function, "flash_attn.cute"))
    x = torch.randn(2, 7, 3, 3, 24, dtype=torch.float64, requires_grad=True)  # qkv, laid out as by a block's projection
    q, k, v = x.permute(2, 0, 3, 1, 4).unbind()
    weight = torch.randn(2, 3, 7, 24, dtype=torch.float64)
    got, want = attention.package_attention(q, k, v, 32), expected(q, k, v)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, weight)[0] for out in (got, want)))
    head = 2 * 7 * 3 * 8  # bytes of one number for every head
    kept = kept_bytes(lambda: attention.package_attention(q, k, v, 32))
    assert 0 < kept <= (32 + 24) * head  # the padded result and what is saved from it, but no second copy of q, k and v


def test_a_package_that_raises_is_not_right(package, monkeypatch):
    package("flash_attn.cute")
    monkeypatch.setattr(attention, "package_attention", lambda *args: 1 / 0)
    assert attention.right_head_size("cpu", BFLOAT16, 24) is None


def test_auto_takes_the_package_where_it_was_measured_to_be_faster(package, card, monkeypatch):
    package("flash_attn.cute")
    card((9, 0), "flash_attn", "cudnn")
    monkeypatch.setattr(attention, "right_head_size", lambda device, dtype, head_dim: head_dim)
    backend, reason = resolve_attention("auto", "cuda", BFLOAT16, 128, 8192)
    assert backend == "flash_attn" and "flash_attn.cute" in reason and "cuDNN" in reason
    assert resolve_attention("auto", "cuda", BFLOAT16, 72, 8192)[0] == "flash_attn"
    for capability, head_dim, length in (
        ((9, 0), 72, 1024),
        ((9, 0), 128, 1024),
        ((9, 0), 64, 8192),
        ((10, 0), 128, 8192),
    ):
        card(capability, "flash_attn", "cudnn")
        assert resolve_attention("auto", "cuda", BFLOAT16, head_dim, length)[0] == "cudnn"
    card((9, 0), "cudnn")  # the package gives wrong results
    backend, reason = resolve_attention("auto", "cuda", BFLOAT16, 128, 8192)
    assert backend == "cudnn" and reason.endswith("not flash_attn.cute, which is installed: its results or gradients "
                                                  "are wrong here")  # fmt: skip
    for other in ("flash_attn", "none"):  # version 2 was not measured
        package(other)
        card((9, 0), "flash_attn", "cudnn")
        assert resolve_attention("auto", "cuda", BFLOAT16, 128, 8192)[0] == "cudnn"


def test_a_kernel_that_is_asked_for_by_flag(package):
    package("none of them")
    with pytest.raises(ValueError, match="--attention .*: .*pip install flash-attn-4"):
        choose(SpeedFlags(attention="flash_attn"), "cuda")
    with pytest.raises(ValueError, match="--attention .*: .*needs a CUDA GPU"):
        choose(SpeedFlags(attention="cudnn"), "cpu")
    choice = choose(SpeedFlags(attention="math"), "cpu")
    assert choice.attend.backend == "math" and choice.attention_note == "math: asked for"


def choose(flags: SpeedFlags, device: str):
    return select_kernels(flags, torch.device(device), FLOAT32, 32, 16)


@pytest.mark.parametrize("attend", (local_attention, LocalAttention("auto"), LocalAttention("cudnn")))
def test_never_cudnn_when_compiled(attend):
    graphs = []

    def keep(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    q, k, v = torch.randn(3, 2, 3, 7, 24)
    torch.compile(attend, backend=keep, fullgraph=True)(q, k, v)
    before = graphs[0].split("scaled_dot_product_attention(")[0]  # the allowed backends are restored after the call
    assert "FLASH_ATTENTION" in before and "CUDNN" not in before


def test_one_key_never_goes_to_cudnn_which_refuses_it():
    q, v = torch.randn(2, 3, 2, 1, 16)
    assert torch.equal(LocalAttention("cudnn")(q, q, v), v)  # the softmax over one key is 1


def test_cpu_leaves_it_to_torch():
    assert resolve_attention("auto", "cpu", FLOAT32, 72, 256, tiled=True) == ("auto", "torch's own choice on cpu")
    assert resolve_attention("math", "cpu", FLOAT32, 72, 256)[0] == "math"


def expected(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1) @ v


@pytest.mark.parametrize("compiler", (None, "eager", "aot_eager"))
@pytest.mark.parametrize("backend", ("auto", "flash", "math"))
def test_result_and_gradients(backend, compiler):
    torch.manual_seed(0)
    qkv = torch.randn(2, 9, 3, 4, 24, requires_grad=True)  # laid out as by a block's projection: (B, N, 3, H, d)
    attend = LocalAttention(backend)

    def block(qkv, attend):
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return attend(q * 1.5, k, v) * 0.5

    run = block if compiler is None else torch.compile(block, backend=compiler, fullgraph=True)
    got, want = run(qkv, attend), block(qkv, expected)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, qkv, weight), torch.autograd.grad(want, qkv, weight), strict=True):
        torch.testing.assert_close(a, b)
