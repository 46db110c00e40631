"""Every plugin on 1, 2 and 4 processes is compared with a plain single-process PyTorch loop."""

import math

import pytest
import torch
from torch import Tensor

from opendit.diffusion.random import Stream, integers, normal
from opendit.models.dit import DiT, DiTConfig
from tests.numbers import off_by
from tests.ranks import run_ranks

SEED, GLOBAL_BATCH, STEPS = 3, 8, 3
LR, CLIP, BETAS = 2e-3, 0.2, (0.8, 0.95)
# The label table has 6 rows, which 4 ranks can't divide evenly.
CONFIG = DiTConfig(input_size=(4, 6), patch_size=2, in_channels=3, hidden_size=36, depth=3, num_heads=3, num_classes=5)


def build_model(checkpointed: bool = False) -> DiT:
    torch.manual_seed(0)
    model = DiT(CONFIG)
    for parameter in model.parameters():  # zero-initialised layers would hide errors
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    model.grad_checkpoint = checkpointed
    return model


def batch(step: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (CONFIG.in_channels, *CONFIG.input_size)
    x = normal(SEED, step, index, Stream.NOISE, shape)
    target = normal(SEED, step, index, Stream.VAE, (CONFIG.out_channels, *CONFIG.input_size))
    t = integers(SEED, step, index, Stream.TIMESTEP, 1000)
    return x, t, index % (CONFIG.num_classes + 1), target


def loss_of(forward, step: int, index: Tensor) -> Tensor:
    x, t, y, target = batch(step, index)
    return (forward(x, t, y).float() - target).square().mean()


def plain_run() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return losses, weights and first moments from one process in fp32, with torch's AdamW and clip_grad_norm_.

    A first moment is a mean of clipped gradients, so it shows a wrong scale, which Adam's updates would hide.
    """
    model = build_model()
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, betas=BETAS)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, step, torch.arange(GLOBAL_BATCH))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    assert min(norms) > CLIP  # every step is clipped
    return (
        losses,
        {n: p.detach() for n, p in model.named_parameters()},
        {n: adam.state[p]["exp_avg"] for n, p in model.named_parameters()},
    )


def engine_run(mesh, plugin: str, precision: str, accumulation: int, checkpointed: bool = False, steps=STEPS):
    from opendit.parallel.engines import build_engine

    engine = build_engine(
        build_model(checkpointed),
        mesh,
        plugin=plugin,
        precision=precision,
        lr=LR,
        weight_decay=0.01,
        betas=BETAS,
        grad_clip=CLIP,
        grad_accumulation=accumulation,
    )
    micro = GLOBAL_BATCH // mesh.world_size // accumulation
    losses = []
    for step in range(steps):
        total = torch.zeros((), device=mesh.device)
        for m in range(accumulation):
            index = (m * mesh.world_size + mesh.rank) * micro + torch.arange(micro, device=mesh.device)
            with engine.micro_batch(last=m == accumulation - 1):
                loss = loss_of(engine.forward, step, index)
                engine.backward(loss / accumulation)
            total += loss.detach()
        result = engine.step()
        assert result.finite and result.grad_norm > CLIP
        losses.append((mesh.sum(total) / accumulation / mesh.world_size).item())
    masters = {name: engine.layout.gather(name, engine.master(name)).clone() for name in engine.shapes}
    moments = {name: engine.layout.gather(name, engine.moments(name)["exp_avg"]).clone() for name in engine.shapes}
    return losses, masters, moments


def used_rows(name: str) -> slice:
    """Leave out the keys' bias: softmax ignores it, so its gradient is noise, which Adam turns into full steps."""
    return slice(0, CONFIG.hidden_size) if name.endswith("qkv.bias") else slice(None)


def many_runs(mesh, runs: list[tuple]) -> list:
    return [engine_run(mesh, *run) for run in runs]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_plugin_gives_the_single_process_curve(world):
    losses, weights, moments = plain_run()
    accumulation = 8 // world // 2 if world < 4 else 2
    results = run_ranks(
        world,
        many_runs,
        [
            ("zero2", "fp32", 1, True),
            ("ddp", "fp32", 1, True),
            ("zero2", "fp32", accumulation),
            ("ddp", "fp32", accumulation),
            ("zero2", "bf16", 1),
            ("gemini", "bf16", 1, True),
            ("gemini", "bf16", accumulation),
            ("zero2", "bf16", accumulation),
            ("ddp", "bf16", 1),
        ],
    )
    for rank in results:
        for curve, masters, first_moments in rank[:4]:
            assert off_by(curve, losses) < 1e-5
            for name, weight in weights.items():
                used = used_rows(name)
                assert torch.allclose(masters[name][used], weight[used], rtol=1e-4, atol=2e-5), name
                error = (first_moments[name] - moments[name])[used].norm() / moments[name][used].norm()
                assert error < 1e-4, name
        zero2, gemini, gemini_accumulated, zero2_accumulated, ddp = (curve for curve, *_ in rank[4:])
        # bf16 rounds weights and activations by up to 2^-9; the curves differ by less than that.
        assert off_by(gemini, zero2) < 1e-3
        assert off_by(gemini_accumulated, zero2_accumulated) < 1e-3
        for curve in (zero2, gemini, ddp):
            assert off_by(curve, losses) < 2e-3
    # all ranks agree
    assert all(torch.equal(results[0][0][1][n], other[0][1][n]) for other in results for n in weights)


def nan_model() -> DiT:
    model = build_model()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    return model


def state_before_training(mesh, cases: list[tuple[str, str, bool | None]]) -> list:
    """Return each case's full masters and second moments, buffers, local shards, step count and working weights.

    With ``initial``, the engine gets its values shard by shard and the module holds only NaN.
    """
    from opendit.parallel.engines import build_engine

    def given(name: str, shard) -> Tensor:
        return shard.take(dict(build_model().named_parameters())[name].detach())

    results = []
    for plugin, precision, initial in cases:
        module = build_model() if initial is None else nan_model()
        engine = build_engine(module, mesh, plugin=plugin, precision=precision, initial=initial and given)
        working = {n: p.detach().float().clone() for n, p in engine.module.named_parameters() if engine.whole}
        for name, weight in build_model().named_parameters():
            full = weight.detach()
            engine.load_moments(name, {"exp_avg": full + 1, "exp_avg_sq": full + 2}, step=3)
        masters = {n: engine.layout.gather(n, engine.master(n)) for n in engine.shapes}
        moments = {n: engine.layout.gather(n, engine.moments(n)["exp_avg_sq"]) for n in engine.shapes}
        held = {n: (engine.layout.local(n).slices, engine.master(n), engine.moments(n)) for n in engine.shapes}
        buffers = {n: b.clone() for n, b in engine.module.named_buffers()}
        results.append((masters, moments, buffers, held, engine.optimizer_steps(), working))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_masters_are_the_fp32_initialisation_and_shards_its_slices(world):
    plugins = [("zero2", "bf16"), ("gemini", "bf16"), ("ddp", "bf16")]
    model, cases = build_model(), [(*case, given) for case in plugins for given in (None, True)]
    ranks = run_ranks(world, state_before_training, cases)
    for which, case in enumerate(cases):
        covered = {name: torch.zeros(weight.numel(), dtype=torch.int) for name, weight in model.named_parameters()}
        for masters, moments, buffers, held, steps, working in (rank[which] for rank in ranks):
            assert torch.equal(buffers["pos_embed"], model.pos_embed)  # fp32, not rounded
            for name, weight in model.named_parameters():
                assert torch.equal(masters[name], weight) and torch.equal(moments[name], weight + 2), (case, name)
                slices, master, own = held[name]
                ((dim, ((start, stop),)),) = slices
                expected = weight.detach().numpy().ravel()[start:stop]
                assert dim is None and (master.numpy() == expected).all(), (case, name)
                assert (own["exp_avg"].numpy() == expected + 1).all(), (case, name)
                covered[name][start:stop] += 1
            assert steps == 3
            for name, weight in working.items():
                expected = model.get_parameter(name)
                expected = expected if case[0] == "ddp" else expected.bfloat16().float()
                assert torch.equal(weight, expected), (case, name)
        assert all((count == 1).all() for count in covered.values()), case


def poisoned_steps(mesh, plugin: str, precision: str, accumulation: int):
    """Run three steps with a NaN loss in step 1 on the last rank only."""
    from opendit.parallel.engines import build_engine

    engine = build_engine(
        build_model(), mesh, plugin=plugin, precision=precision, lr=LR, grad_accumulation=accumulation
    )
    history = []
    for step in range(3):
        for m in range(accumulation):
            with engine.micro_batch(last=m == accumulation - 1):
                loss = loss_of(engine.forward, step, torch.arange(2) + 2 * mesh.rank)
                if step == 1 and mesh.rank == mesh.world_size - 1 and m == 0:
                    loss = loss * float("nan")
                engine.backward(loss / accumulation)
        before = {n: engine.master(n).clone() for n in engine.shapes}
        skipped = not engine.step().finite
        moved = any(not torch.equal(before[n], engine.master(n)) for n in engine.shapes)
        finite = all(engine.master(n).isfinite().all() for n in engine.shapes)
        history.append((skipped, moved, finite, engine.optimizer_steps()))
    return history


KINDS = (("zero2", "fp32"), ("zero2", "bf16"), ("ddp", "fp32"), ("gemini", "bf16"))
POISONED = [(*kind, accumulation) for kind in KINDS for accumulation in (1, 2)]


def all_poisoned(mesh) -> list:
    return [poisoned_steps(mesh, *case) for case in POISONED]


def test_non_finite_gradients_never_enter_the_weights():
    for case, first, second in zip(POISONED, *run_ranks(2, all_poisoned), strict=True):
        for rank in (first, second):
            assert [skipped for skipped, *_ in rank] == [False, True, False], case
            assert all(finite for _, _, finite, _ in rank), case
            assert not rank[1][1] and [steps for *_, steps in rank] == [1, 1, 2], case
        assert any(moved for _, moved, _, _ in (first[2], second[2])), case


def test_gemini_refuses_fp32():
    from opendit.parallel.engines import build_engine
    from opendit.parallel.mesh import Mesh

    mesh = Mesh(0, 1, 0, torch.device("cpu"))
    with pytest.raises(ValueError, match="--mixed_precision bf16"):
        build_engine(build_model(), mesh, plugin="gemini", precision="fp32")


def test_flops_and_parameters_match_the_counters():
    from torch.utils.flop_counter import FlopCounterMode

    model = DiT(CONFIG)
    x, t, y, _ = batch(0, torch.arange(3))
    with FlopCounterMode(display=False) as counter:
        model(x, t, y)
    assert counter.get_total_flops() == 3 * CONFIG.forward_flops()
    assert sum(p.numel() for p in model.parameters()) == CONFIG.parameters()
    assert math.prod(CONFIG.grid) == CONFIG.tokens
