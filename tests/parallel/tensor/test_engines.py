"""Training with layers that ranks divide: plugins against one plain process, whatever else the ranks do."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import find_checkpoint, load_checkpoint
from opendit.checkpoint.save import Checkpoints
from opendit.config.parallel_sizes import ParallelDims
from opendit.models import DiT, DiTConfig, build_model, empty_model
from opendit.parallel.apply import Sharding, apply_parallel
from opendit.parallel.engines import MOMENTS, build_engine
from opendit.parallel.expert import expert_group
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.tensor import tensor_group
from tests.models.test_dit import randomised
from tests.numbers import off_by
from tests.parallel.tensor.models import MODELS
from tests.ranks import run_ranks

STEPS, BATCH, CLIP, LR, DECAY = 6, 4, 0.2, 2e-3, 0.7
CONFIG = replace(MODELS["DiT"], qk_norm=True)  # without it the gradient of the keys' bias is rounding noise


def model_of(config: DiTConfig = CONFIG) -> DiT:
    torch.manual_seed(0)
    return randomised(build_model(config))


def loss_of(forward, step: int, samples: slice) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 3, 6, 10, generator=generator)[samples]
    target = torch.randn(BATCH, 6, 6, 10, generator=generator)[samples]
    t, y = torch.tensor([3, 50, 400, 999])[samples], torch.tensor([0, 5, 2, 1])[samples]
    return (forward(x, t, y).float() - target).square().mean()


def plain_run(config: DiTConfig = CONFIG) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, norms, averages, and first moments (a mean of clipped gradients: a wrong scale shows there), in fp32."""
    model, losses, norms = model_of(config), [], []
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(STEPS):
        loss = loss_of(model, step, slice(None))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        assert norms[-1] > CLIP
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
        for name, p in model.named_parameters():
            averages[name].lerp_(p.detach(), 1 - DECAY)
    return losses, norms, averages, {name: adam.state[p]["exp_avg"] for name, p in model.named_parameters()}


def engine_of(
    mesh: Mesh, plugin: str, precision: str = "fp32", accumulation: int = 1, values=None, config=CONFIG, **how
):
    full, model, sequence = {n: p.detach() for n, p in model_of(config).named_parameters()}, empty_model(config), None
    if mesh.sp_size > 1:
        shape = Shape(config.tokens, config.hidden_size, config.num_heads // mesh.tp_size)
        sequence = sequence_parallel(mesh, "ulysses", shape)
    apply_parallel(model, sequence=sequence, tensor=tensor_group(mesh), experts=expert_group(mesh), **how)
    settings = dict(plugin=plugin, precision=precision, lr=LR, weight_decay=0.01, grad_clip=CLIP)
    settings |= dict(grad_accumulation=accumulation, sharding=Sharding(keep_gathered=False, keep_gradients=False))

    def initial(name, shard) -> Tensor:
        return shard.take(full[name]) if values is None else values(shard)

    return build_engine(model, mesh, initial=initial, **settings)


def train(mesh: Mesh, engine, ema: EMA, first: int = 0, steps: int = STEPS, accumulation: int = 1):
    """The losses of these steps, and the norms of their gradients."""
    losses, norms, share = [], [], BATCH // mesh.dp_size // accumulation
    for step in range(first, first + steps):
        total = 0.0
        for micro in range(accumulation):
            start = (micro * mesh.dp_size + mesh.dp_rank) * share
            with engine.micro_batch(last=micro == accumulation - 1):
                loss = loss_of(engine.forward, step, slice(start, start + share)) / accumulation
                engine.backward(loss)
            total += loss.detach()
        result = engine.step()
        assert result.finite
        ema.update(result.finite)
        losses.append((mesh.sum(total) / mesh.world_size).item())
        norms.append(result.grad_norm.item())
    return losses, norms


def engine_run(mesh: Mesh, plugin: str, precision: str, accumulation: int, **how):
    steps = STEPS if precision == "fp32" else STEPS // 2
    engine = engine_of(mesh, plugin, precision, accumulation, **how)
    ema = EMA(engine, DECAY)
    losses, norms = train(mesh, engine, ema, steps=steps, accumulation=accumulation)
    moments = {name: engine.layout.gather(name, engine.moments(name)["exp_avg"]).clone() for name in engine.shapes}
    return losses, norms, {name: full.clone() for name, full in ema.gather()}, moments


# Of 4 ranks the sizes of the mesh; plugin, precision, micro-batches, and how the model is run.
CASES = [
    (dict(tp=2), "ddp", "fp32", 2, dict(recompute="half")),
    (dict(tp=2), "zero2", "fp32", 2, dict(grad_checkpoint=True)),
    (dict(tp=4), "zero2", "fp32", 1, {}),
    (dict(tp=2), "fsdp", "fp32", 2, {}),
    (dict(tp=4), "fsdp", "fp32", 1, dict(grad_checkpoint=True)),
    (dict(tp=2, dp_replicate=2), "fsdp", "fp32", 1, {}),
    (dict(tp=2, sp=2), "zero2", "fp32", 1, {}),
]
HALF = [(dict(), "zero2", "bf16", 1, {})]
HALF += [(dict(tp=2), plugin, "bf16", 1, {}) for plugin in ("zero2", "fsdp", "ddp")]
# What is saved, as whole tensors or in shards, and who goes on from it.
ELASTIC = [
    (dict(tp=2), "zero2", True, [(dict(), "fsdp"), (dict(tp=4), "ddp")]),
    (dict(tp=4), "zero2", False, [(dict(tp=2), "fsdp"), (dict(), "zero2")]),
    (dict(tp=2), "fsdp", True, [(dict(tp=4), "zero2")]),
    (dict(), "ddp", True, [(dict(tp=2), "zero2"), (dict(tp=2, dp_replicate=2), "fsdp")]),
]


class Meshes(dict):
    """Of the ranks that there are, by sizes; the same groups are made once."""

    def of(self, sizes: dict[str, int]) -> Mesh:
        key = tuple(sizes.items())
        if key not in self:
            self[key] = init_mesh(dims=ParallelDims.fill(4, **sizes))
        return self[key]


def state_of(engine, ema: EMA) -> dict[str, Tensor]:
    """Every number of the state, whole."""
    gather, found = engine.layout.gather, {}
    for name in engine.shapes:
        found[f"model.{name}"] = gather(name, engine.master(name)).clone()
        found |= {f"{key}.{name}": gather(name, engine.moments(name)[key]).clone() for key in MOMENTS}
    return found | {f"ema.{name}": full.clone() for name, full in ema.gather()}


def resumed(meshes: Meshes, folder: Path, elastic=ELASTIC, config=CONFIG) -> list:
    """What differs from what was saved: nothing is to."""
    different = []
    shapes = {name: tuple(p.shape) for name, p in build_model(config).named_parameters()}
    for number, (sizes, plugin, sharded, others) in enumerate(elastic):
        mesh = meshes.of(sizes)
        engine = engine_of(mesh, plugin, config=config)
        ema, where = EMA(engine, DECAY), folder / str(number)
        train(mesh, engine, ema, steps=2)
        info, saved = {"model": "DiT-Ti/2", "config": config.to_dict()}, state_of(engine, ema)
        assert {name: tuple(full.shape) for name, full in ema.gather()} == shapes
        with Checkpoints(where / "checkpoints", engine, ema, info, sharded=sharded, say=lambda _: None) as checkpoints:
            checkpoints.save({"step": 2, "epoch": 0, "skipped": 0, "fingerprint": {}})
        assert not checkpoints.failures
        for other_sizes, other in others:
            mesh = meshes.of(other_sizes)
            engine = engine_of(mesh, other, values=lambda shard: torch.full(shard.shape, -1.0), config=config)
            ema = EMA(engine, DECAY)
            load_checkpoint(find_checkpoint(str(where), "", "DiT-Ti/2", mesh), engine, ema)
            found = state_of(engine, ema)
            wrong = [name for name in saved if not torch.equal(found[name], saved[name])]
            different += [(number, other_sizes, other, wrong)] if wrong or saved.keys() != found.keys() else []
            train(mesh, engine, ema, first=2, steps=1)
    return different


def after_one_bad_gradient(meshes: Meshes, plugin: str) -> tuple[list, bool, dict[str, float]]:
    """Two steps in fp16 in which a part that one rank alone has of a gradient is not finite: whether they were taken,
    whether anything has changed, and the loss scale."""
    mesh = meshes.of(dict(tp=2))
    engine = engine_of(mesh, plugin, "fp16")
    before, finite = {name: master.clone() for name, master in engine.masters().items()}, []
    for step in range(2):
        engine.backward(loss_of(engine.forward, step, slice(mesh.dp_rank, mesh.dp_rank + 1)))
        if mesh.rank == 3 or (mesh.rank == 1 and plugin == "ddp"):  # ddp: what one of them has the others have, too
            engine.gradient_shards()["blocks.0.mlp.fc1.weight"].view(-1)[0] = torch.inf
        finite.append(bool(engine.step().finite))
    same = all(torch.equal(engine.master(name), master) for name, master in before.items())
    return finite, same, engine.scaler_state()


def everything(mesh: Mesh, folder: Path) -> tuple:
    meshes = Meshes()
    runs = [engine_run(meshes.of(sizes), *rest, **how) for sizes, *rest, how in CASES + HALF]
    bad = {plugin: after_one_bad_gradient(meshes, plugin) for plugin in ("ddp", "zero2", "fsdp")}
    return runs, resumed(meshes, folder), bad


def test_plugins_give_the_curve_of_one_process_and_go_on_from_each_other(tmp_path):
    losses, norms, averages, moments = plain_run()
    for results, different, bad in run_ranks(4, everything, tmp_path):
        for case, (curve, of_gradients, means, ours) in zip(CASES, results, strict=False):
            assert off_by(curve, losses) < 1e-5 and off_by(of_gradients, norms) < 1e-5, case
            for name, moment in moments.items():
                assert (ours[name] - moment).norm() / moment.norm() < 1e-4, (case, name)
                assert (means[name] - averages[name]).norm() / averages[name].norm() < 1e-4, (case, name)
        (reference, _, _, first), *others = results[len(CASES) :]
        for case, (curve, _, _, ours) in zip(HALF[1:], others, strict=True):
            assert off_by(curve, reference) < 2e-3, case  # 2^-9 relative rounding of weights and activations
            for name, moment in first.items():
                assert (ours[name] - moment).norm() / moment.norm() < 0.03, (case, name)
        assert different == []
        for plugin, (finite, same, scaler) in bad.items():
            assert finite == [False, False] and same, plugin
            halved = 2 if plugin == "ddp" else 1  # torch's scaler lets no bad step pass
            assert scaler["scale"] == 2.0 ** (16 - halved), (plugin, scaler)
