"""ZeroOptimizer's additions to Colossal-AI: buckets, averages, loss scaling, and a step count that can be loaded."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from opendit.parallel.engines import state_of_scaler
from opendit.parallel.optimizer import FusedAdamW, build_optimizer
from tests.ranks import run_ranks

DECAYS = (0.5, 0.9)
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("elements", [1, 12, 2**26])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_adamw_is_adamw_by_its_formula(dtype, elements):
    """Gemini's optimizer passes half-precision gradients and a divisor, and some parameters have no gradient."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,), (2, 2), (1,))]
    lr, betas, decay, eps, scale = 1e-2, (0.9, 0.99), 0.1, 1e-8, 8.0
    for p in params:
        p.grad_dtype = None  # allows any dtype
    adam = FusedAdamW(params, lr=lr, betas=betas, weight_decay=decay, eps=eps)
    adam.elements = elements
    expected = [p.detach().double() for p in params]
    means, squares = [[torch.zeros_like(w) for w in expected] for _ in range(2)]
    for step in (1, 2, 3):
        for i, p in enumerate(params):
            p.grad = None if i == 2 else torch.randn(p.shape).mul(scale).to(dtype)
            if p.grad is None:
                continue
            g = p.grad.double() / scale
            means[i] = betas[0] * means[i] + (1 - betas[0]) * g
            squares[i] = betas[1] * squares[i] + (1 - betas[1]) * g**2
            update = means[i] / (1 - betas[0] ** step) / ((squares[i] / (1 - betas[1] ** step)).sqrt() + eps)
            expected[i] = expected[i] * (1 - lr * decay) - lr * update
        kept = [None if p.grad is None else p.grad.clone() for p in params]
        adam.step(div_scale=scale)
        assert all(k is None or torch.equal(k, p.grad) for k, p in zip(kept, params, strict=True))
    for p, w in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=1e-5, atol=1e-6)


def build(precision: str, clip: float = 0.0, bucket: int | None = None):
    """Build a net with parameter counts not divisible by 2 and with an unused parameter."""
    from opendit.parallel.colossal import load

    colossal = load()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))
    module.register_parameter("unused", nn.Parameter(torch.ones(3)))
    adam, _ = build_optimizer(module, "zero2", lr=1e-2, weight_decay=0.1)
    _, optimizer = colossal.boost(
        "zero2", precision, module, adam, grad_clip=clip, accumulate=False, initial_scale=64.0, bucket=bucket
    )
    return module, optimizer


def loss_of(module, precision: str, step: int, rank: int):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)).to(PRECISIONS[precision])
    return module(x).float().square().mean()


def shards(optimizer):
    """Return this rank's masters without padding."""
    return [m[:n] for m, n in zip(optimizer.masters, optimizer.own_sizes(), strict=True)]


def several_steps(mesh, bucket: int):
    """Train with small buckets and gathers; compare the averages with averages computed by hand."""
    from opendit.kernels.adamw_ema import constant_decays
    from opendit.parallel.colossal import load

    load()
    from opendit.parallel.colossal import plugins as colossal_plugins

    colossal_plugins.GATHER_BYTES = bucket
    module, optimizer = build("fp32", clip=0.05, bucket=bucket)
    averages = [[m.clone() for m in shards(optimizer)] for _ in DECAYS]
    expected = [[m.clone() for m in shards(optimizer)] for _ in DECAYS]
    updates = torch.zeros(())
    optimizer.attach_averages(averages, constant_decays(DECAYS, mesh.device), updates)
    norms = []
    for step in range(3):
        for micro in range(2):
            optimizer.backward(loss_of(module, "fp32", 2 * step + micro, mesh.rank) / 2)
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
        for decay, kept in zip(DECAYS, expected, strict=True):
            for average, master in zip(kept, shards(optimizer), strict=True):
                average.lerp_(master, 1 - decay)
    assert updates.item() == 3 and all(p.grad is None for p in module.parameters())
    for got, want in zip(averages, expected, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    return norms, [p.detach().clone() for p in module.parameters()]


def plain_steps(world: int):
    """Train the same net in one process with torch alone."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(3):
        for micro in range(2):
            for rank in range(world):
                (loss_of(module, "fp32", 2 * step + micro, rank) / 2 / world).backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.05).item())
        adam.step()
        adam.zero_grad()
    return norms, list(module.parameters())


@pytest.mark.parametrize("world,bucket", [(1, 1), (2, 1), (2, 40), (2, 1 << 20)])
def test_buckets_and_averages(world, bucket):
    norms, weights = plain_steps(world)
    assert min(norms) > 0.05  # every step is clipped
    for rank_norms, rank_weights in run_ranks(world, several_steps, bucket):
        assert rank_norms == pytest.approx(norms, rel=1e-5)
        unused, *trained = rank_weights
        assert torch.equal(unused, torch.ones(3))
        for got, want in zip(trained, weights, strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)


def steps_without_collectives(mesh):
    def forbidden(*args, **kwargs):
        raise AssertionError("a collective on one rank")

    dist.reduce_scatter_tensor = dist.all_gather_into_tensor = dist.all_reduce = forbidden
    module, optimizer = build("bf16")
    before = [p.detach().clone() for p in module.parameters()]
    optimizer.backward(loss_of(module, "bf16", 0, 0))
    optimizer.step()
    return [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]


def test_one_rank_talks_to_nobody():
    ((moved),) = run_ranks(1, steps_without_collectives)
    assert sum(moved) >= 6


def overflowing_steps(mesh):
    """Run three fp16 steps; step 1 overflows on the last rank only."""
    module, optimizer = build("fp16", clip=0.05)
    history = []
    for step in range(3):
        loss = loss_of(module, "fp16", step, mesh.rank)
        bad = step == 1 and mesh.rank == mesh.world_size - 1
        optimizer.backward(loss * (1e6 if bad else 1.0))
        before = [m.clone() for m in optimizer.masters]
        optimizer.step()
        moved = any(not torch.equal(a, b) for a, b in zip(before, optimizer.masters, strict=True))
        count = optimizer.optim.state[optimizer.masters[0]]["step"].item()
        history.append((not optimizer.finite, moved, count, state_of_scaler(optimizer.scaler)["hysteresis"]))
    return history, optimizer.grad_norm.item()


@pytest.mark.parametrize("world", [1, 2])
def test_an_overflow_skips_the_step_and_tells_the_scaler(world):
    for history, norm in run_ranks(world, overflowing_steps):
        assert [skipped for skipped, *_ in history] == [False, True, False]
        assert [moved for _, moved, *_ in history] == [True, False, True]
        assert [count for _, _, count, _ in history] == [1, 1, 2]
        assert [overflows for *_, overflows in history] == [0, 1, 1]
        assert 0 < norm < 20  # the loss scale of 64 is divided out


def step_after_loading(mesh, loaded):
    """Take one step with a fresh optimizer whose state has the step count ``loaded``."""
    module, optimizer = build("fp32")
    for master in optimizer.masters:
        state = optimizer.optim.init_state(master)
        state["exp_avg"].fill_(0.1), state["exp_avg_sq"].fill_(0.01)
        state["step"] = loaded
    before = [m.clone() for m in optimizer.masters]
    optimizer.backward(loss_of(module, "fp32", 0, 0))
    optimizer.step()
    counts = {optimizer.optim.state[m]["step"].item() for m in optimizer.masters}
    return counts, [m - b for m, b in zip(optimizer.masters, before, strict=True)]


def test_the_count_of_steps_is_taken_from_the_state():
    ((counts, by_number),) = run_ranks(1, step_after_loading, 9)
    assert counts == {10}
    ((_, by_tensor),) = run_ranks(1, step_after_loading, torch.tensor(9.0))
    ((_, fresh),) = run_ranks(1, step_after_loading, 0)
    assert all(torch.equal(a, b) for a, b in zip(by_number, by_tensor, strict=True))
    assert not any(torch.allclose(a, b, rtol=0.1) for a, b in zip(by_number[1:], fresh[1:], strict=True))


def test_colossalai_is_imported_and_mended_by_a_call_alone():
    code = """
import pkgutil, sys, opendit, torch.distributed as dist
patched = hasattr(dist, "is_hccl_available")
for module in pkgutil.walk_packages(opendit.__path__, "opendit."):
    if not module.name.endswith("__main__") and not module.name.startswith("opendit.parallel.colossal."):
        __import__(module.name)
assert not [name for name in sys.modules if name.partition(".")[0] == "colossalai"]
assert hasattr(dist, "is_hccl_available") == patched
from opendit.parallel.colossal import load
assert load() is load() and "colossalai" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
