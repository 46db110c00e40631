"""Muon is compared with torch.optim.Muon in fp32, and training on several ranks with a plain loop."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opendit.config.parallel_sizes import ParallelDims
from opendit.kernels.adamw_ema import momentum_reference
from opendit.models.zoo import model_config
from opendit.parallel.engines import MuonSettings, build_engine
from opendit.parallel.mesh import init_mesh
from opendit.parallel.muon import flops, orthogonalise, owners
from opendit.parallel.rules import matrix_rows
from tests.parallel.engines.test_engines import BETAS, CLIP, GLOBAL_BATCH, LR, batch
from tests.parallel.engines.test_fsdp import CONFIG, FREED, backward, build_model, gathered
from tests.ranks import run_ranks

STEPS, DECAY, MOMENTUM = 4, 0.01, 0.9
MATRICES = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
FP32 = MuonSettings(matrix_rows(CONFIG), MOMENTUM, torch.float32)


def off_by(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def parts(name: str, weight: Tensor) -> list[Tensor]:
    """Return a parameter's matrices; qkv has three."""
    return list(weight.chunk(3)) if "qkv" in name else [weight]


def muon_update(gradient: Tensor, buffer: Tensor, momentum: float) -> Tensor:
    """Change ``buffer``; return torch.optim.Muon's update with Nesterov momentum, match_rms_adamw and lr 1."""
    buffer.lerp_(gradient, 1 - momentum)
    x = gradient.lerp(buffer, momentum)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x) * 0.2 * math.sqrt(max(gradient.shape))


@pytest.mark.parametrize("shape", [(24, 24), (7, 40), (40, 7), (1, 5)])
def test_updates_are_those_of_torch_in_fp32(shape, monkeypatch):
    monkeypatch.setattr(torch, "bfloat16", torch.float32)  # to which torch.optim.Muon rounds
    torch.manual_seed(0)
    theirs, ours, reference = (torch.zeros(shape, requires_grad=i == 0) for i in range(3))  # so weights don't round
    optimizer = torch.optim.Muon([theirs], lr=0.5, weight_decay=0.1, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    buffer, reference_buffer = torch.zeros(shape), torch.zeros(shape)
    for _ in range(3):
        gradient = torch.randn(shape)
        theirs.grad = gradient.clone()
        optimizer.step()
        reference.mul_(1 - 0.5 * 0.1).sub_(0.5 * muon_update(gradient, reference_buffer, MOMENTUM))
        momentum_reference(gradient, buffer, MOMENTUM, 1.0)
        orthogonalise([gradient], torch.float32)
        ours.mul_(1 - 0.5 * 0.1).sub_(0.5 * gradient)
        found = [off_by(one, theirs.detach()) for one in (ours, reference)]
        assert theirs.norm() > 0.1 and max(found) < 3e-6, found  # rounding is up to 1.6e-6


def test_matrices_of_all_shapes_at_once_and_in_several_parts(monkeypatch):
    torch.manual_seed(1)
    matrices = [torch.randn(shape) for shape in [(4, 9), (9, 4), (4, 4), (9, 4), (4, 4), (4, 9), (9, 4)]]
    alone = [matrix.clone() for matrix in matrices]
    for matrix in alone:
        orthogonalise([matrix], torch.float32)
    monkeypatch.setattr("opendit.parallel.muon.ELEMENTS", 2 * 36)
    orthogonalise(matrices, torch.float32)
    assert all(off_by(got, want) < 1e-6 for got, want in zip(matrices, alone, strict=True))


def test_a_matrix_of_zeros_stays_zero():
    zeros = torch.zeros(3, 5)
    orthogonalise([zeros], torch.float32)
    assert not zeros.any()


def test_the_matrices_of_blocks_are_muons_and_nothing_else():
    rows, width = matrix_rows(CONFIG), CONFIG.hidden_size
    assert set(rows) == {f"blocks.{i}.{name}" for i in range(CONFIG.depth) for name in MATRICES}
    assert rows["blocks.0.attn.qkv.weight"] == (width,) * 3 and rows["blocks.1.attn.proj.weight"] == (width,)
    gated = matrix_rows(replace(CONFIG, mlp="swiglu"))
    assert gated["blocks.0.mlp.fc1.weight"] == (CONFIG.mlp_hidden,) * 2


def test_ranks_share_the_work_evenly():
    config = model_config("DiT-XL/2", input_size=(32, 32), in_channels=4, num_classes=10)
    rows = matrix_rows(config)
    shapes = {name: (sum(r), 4608 if "fc2" in name else 1152) for name, r in rows.items()}
    work = {name: flops(shapes[name], rows[name]) for name in rows}
    assert sum(work.values()) == 28 * 1152**3 * 5 * (4 * 6 + 2 * 18)
    for ranks in (2, 8):
        load = [sum(work[n] for n, owner in owners(work, ranks).items() if owner == r) for r in range(ranks)]
        assert max(load) < 1.06 * sum(work.values()) / ranks


# ------------------------------------------------------------------------------------------ training


def plain_run(momentum: float = MOMENTUM) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return losses, weights and Muon buffers from one process, with torch's AdamW for the other parameters."""
    model = build_model()
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if name.endswith(MATRICES)}
    rest = [p for name, p in named.items() if name not in matrices]
    adam = torch.optim.AdamW(rest, lr=LR, weight_decay=DECAY, betas=BETAS)
    buffers, losses = {name: torch.zeros_like(p) for name, p in matrices.items()}, []
    for step in range(STEPS):
        x, t, y, target = batch(step, torch.arange(GLOBAL_BATCH))
        loss = (model(x, t, y) - target).square().mean()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        adam.step()
        with torch.no_grad():
            for name, p in matrices.items():
                p *= 1 - LR * DECAY
                for weight, grad, buffer in zip(*(parts(name, one) for one in (p, p.grad, buffers[name])), strict=True):
                    weight -= LR * muon_update(grad, buffer, momentum)
        model.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in named.items()}, buffers


WAYS = {  # plugin, fsdp replicas, micro-batches
    1: [("zero2", 1, 1), ("ddp", 1, 1), ("fsdp", 1, 2)],
    2: [("zero2", 1, 2), ("ddp", 1, 2), ("fsdp", 1, 1), ("fsdp", 2, 1)],
    4: [("zero2", 1, 1), ("ddp", 1, 1), ("fsdp", 1, 1), ("fsdp", 2, 1)],
}


def all_trained(mesh, ways) -> list[tuple]:
    found = []
    for plugin, copies, accumulation in ways:
        own = init_mesh(dims=ParallelDims.fill(mesh.world_size, dp_replicate=copies)) if copies > 1 else mesh
        settings = dict(lr=LR, weight_decay=DECAY, betas=BETAS, grad_clip=CLIP, sharding=FREED, muon=FP32)
        engine = build_engine(
            build_model(), own, plugin=plugin, precision="fp32", grad_accumulation=accumulation, **settings
        )
        losses = []
        for step in range(STEPS):
            loss = backward(engine, own, step, accumulation)
            assert engine.step().finite
            losses.append(own.sum(loss).item() / own.world_size)
        assert engine.optimizer_steps() == STEPS
        moments = {name: engine.moments(name)["exp_avg"] for name in FP32.rows}
        assert all(set(engine.moments(name)) == {"exp_avg"} for name in FP32.rows)
        found.append((losses, gathered(engine, engine.masters()), gathered(engine, moments)))
    return found


@pytest.mark.parametrize("world", sorted(WAYS))
def test_curves_are_those_of_one_plain_process(world):
    losses, weights, buffers = plain_run()
    for (one, *_), found in zip(WAYS[world], run_ranks(world, all_trained, WAYS[world])[0], strict=True):
        got, masters, moments = found
        assert got == pytest.approx(losses, rel=1e-4), one
        assert max(off_by(masters[name], weights[name]) for name in weights) < 1e-4, one
        assert max(off_by(moments[name], buffers[name]) for name in buffers) < 1e-4, one
