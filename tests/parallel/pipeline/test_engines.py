"""Training on the stages of a pipeline: plugins against one plain process, whatever else the ranks do; what is saved
goes on anywhere."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import find_checkpoint, load_checkpoint
from opendit.checkpoint.save import Checkpoints
from opendit.models import build_model, empty_model
from opendit.parallel.apply import Sharding, apply_parallel
from opendit.parallel.engines import Engine, build_engine
from opendit.parallel.expert import expert_group
from opendit.parallel.mesh import Mesh
from opendit.parallel.pipeline.stages import mesh_stages
from opendit.parallel.sequence import sequence_parallel
from opendit.parallel.sequence.choose import Shape
from opendit.parallel.tensor import tensor_group
from opendit.training.runners import MicroBatch, build_runner
from tests.models.test_dit import randomised
from tests.numbers import off_by
from tests.objectives import SquaredError
from tests.parallel.tensor.models import MODELS
from tests.parallel.tensor.test_engines import Meshes, state_of
from tests.ranks import run_ranks

STEPS, MICRO_BATCHES, CLIP, LR, DECAY = 6, 4, 0.2, 2e-3, 0.7
SAMPLES = 4 * MICRO_BATCHES  # of a step
CONFIG = replace(MODELS["DiT"], depth=5, qk_norm=True)  # without qk_norm the keys' bias has rounding noise as gradient
EXPERTS = replace(MODELS["EC-DiT"], depth=3, qk_norm=True)
SHAPES = {name: tuple(p.shape) for name, p in build_model(CONFIG).named_parameters()}


def values_of_the_model(config) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: p.detach() for name, p in randomised(build_model(config)).named_parameters()}


def samples(step: int, some: slice) -> MicroBatch:
    generator = torch.Generator().manual_seed(step)
    x, noise = torch.randn(2, SAMPLES, 3, 6, 10, generator=generator)
    t, y = torch.randint(1000, (SAMPLES,), generator=generator), torch.randint(6, (SAMPLES,), generator=generator)
    return MicroBatch(x[some], t[some], noise[some], y[some])


def plain_run(config=CONFIG) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, norms, averages, and first moments (a mean of clipped gradients: a wrong scale shows there), in fp32."""
    model, objective, losses, norms = build_model(config), SquaredError(), [], []
    model.load_state_dict(values_of_the_model(config), strict=False)
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(STEPS):
        x0, t, noise, y, *_ = samples(step, slice(None))
        prepared = objective.prepare(x0, t, noise)
        loss = objective.loss(model(prepared.x_t, t, y), prepared).mean()
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
    mesh: Mesh, plugin: str, precision="fp32", schedule="1f1b", values=None, sharding=None, config=CONFIG, **how
) -> Engine:
    full, model, sequence = values_of_the_model(config), empty_model(config), None
    if mesh.sp_size > 1:
        shape = Shape(config.tokens, config.hidden_size, config.num_heads // mesh.tp_size)
        sequence = sequence_parallel(mesh, "ulysses", shape)
    how |= dict(tensor=tensor_group(mesh), experts=expert_group(mesh), stages=mesh_stages(mesh, config, schedule))
    apply_parallel(model, sequence=sequence, **how)
    settings = dict(plugin=plugin, precision=precision, lr=LR, weight_decay=0.01, grad_clip=CLIP)
    settings |= dict(grad_accumulation=MICRO_BATCHES, sharding=sharding or Sharding())

    def initial(name, shard) -> Tensor:
        return shard.take(full[name]) if values is None else values(shard)

    return build_engine(model, mesh, initial=initial, **settings)


def train(mesh: Mesh, engine: Engine, ema: EMA, first: int = 0, steps: int = STEPS, spoil=lambda: None):
    """The losses of these steps, the norms of their gradients, and whether they were taken."""
    runner, losses, norms, finite = build_runner(engine, SquaredError(), micro_batches=MICRO_BATCHES), [], [], []
    share = SAMPLES // MICRO_BATCHES // mesh.dp_size
    for step in range(first, first + steps):
        starts = [(number * mesh.dp_size + mesh.dp_rank) * share for number in range(MICRO_BATCHES)]
        given = (samples(step, slice(start, start + share)) for start in starts)
        result = runner.train_step(given, before_update=spoil)
        ema.update(result.finite)
        losses.append((mesh.sum(result.loss.clone()) / mesh.world_size).item())
        norms.append(result.grad_norm.item())
        finite.append(bool(result.finite))
    return losses, norms, finite


def engine_run(mesh: Mesh, plugin: str, precision: str, **how):
    engine = engine_of(mesh, plugin, precision, **how)
    ema = EMA(engine, DECAY)
    losses, norms, finite = train(mesh, engine, ema, steps=STEPS if precision == "fp32" else STEPS // 2)
    assert all(finite)
    moments = {name: engine.layout.gather(name, engine.moments(name)["exp_avg"]).clone() for name in engine.shapes}
    weights = {name: engine.layout.gather(name, engine.master(name)).clone() for name in engine.shared}
    return losses, norms, {name: full.clone() for name, full in ema.gather()}, moments, weights


FREED = Sharding(keep_gathered=False, keep_gradients=False)
# Of 4 ranks the sizes of the mesh; plugin, precision, and how the model is run.
CASES = [
    (dict(pp=2), "zero2", "fp32", dict(recompute="half")),
    (dict(pp=2), "ddp", "fp32", dict(grad_checkpoint=True)),
    (dict(pp=2), "fsdp", "fp32", {}),
    (dict(pp=2), "fsdp", "fp32", dict(schedule="interleaved", sharding=FREED, grad_checkpoint=True)),
    (dict(pp=2), "zero2", "fp32", dict(schedule="interleaved")),
    (dict(pp=4), "fsdp", "fp32", {}),
    (dict(pp=2, tp=2), "ddp", "fp32", {}),
    (dict(pp=2, sp=2), "fsdp", "fp32", dict(schedule="interleaved")),
]
HALF = [(dict(), "zero2", "bf16", {})]
HALF += [(dict(pp=2), plugin, "bf16", {}) for plugin in ("zero2", "fsdp", "ddp")]
HALF += [(dict(pp=2), plugin, "fp16", {}) for plugin in ("zero2", "fsdp", "ddp")]  # every stage scales alike
HALF += [(dict(pp=2, tp=2), "zero2", "bf16", {}), (dict(pp=4), "zero2", "bf16", {})]
# What is saved, and who goes on from it.
ELASTIC = [
    (dict(pp=2), "zero2", [(dict(), "fsdp"), (dict(pp=4), "ddp")]),
    (dict(pp=2), "fsdp", [(dict(pp=2, tp=2), "zero2")]),
    (dict(tp=2), "ddp", [(dict(pp=2), "fsdp"), (dict(pp=4), "zero2")]),
]


def resumed(meshes: Meshes, folder: Path) -> list:
    """What differs from what was saved: nothing is to."""
    different = []
    for number, (sizes, plugin, others) in enumerate(ELASTIC):
        mesh = meshes.of(sizes)
        engine = engine_of(mesh, plugin)
        ema, where = EMA(engine, DECAY), folder / str(number)
        train(mesh, engine, ema, steps=2)
        info, saved = {"model": "DiT-Ti/2", "config": CONFIG.to_dict()}, of_all_stages(mesh, state_of(engine, ema))
        assert {f"ema.{name}" for name in SHAPES} == {name for name in saved if name.startswith("ema.")}
        with Checkpoints(where / "checkpoints", engine, ema, info, sharded=True, say=lambda _: None) as checkpoints:
            checkpoints.save({"step": 2, "epoch": 0, "skipped": 0, "fingerprint": {}})
        assert not checkpoints.failures
        for other_sizes, other in others:
            mesh = meshes.of(other_sizes)
            engine = engine_of(mesh, other, values=lambda shard: torch.full(shard.shape, -1.0))
            ema = EMA(engine, DECAY)
            load_checkpoint(find_checkpoint(str(where), "", "DiT-Ti/2", mesh), engine, ema)
            found = state_of(engine, ema)
            wrong = [name for name in found if not torch.equal(found[name], saved[name])]
            missing = saved.keys() - of_all_stages(mesh, found).keys()
            different += [(number, other_sizes, other, wrong, missing)] if wrong or missing else []
            train(mesh, engine, ema, first=2, steps=1)
    return different


def of_all_stages(mesh: Mesh, state: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = [None] * mesh.world_size
    torch.distributed.all_gather_object(parts, state, group=torch.distributed.group.WORLD)
    return {name: tensor for part in parts for name, tensor in part.items()}


def after_one_bad_gradient(meshes: Meshes, plugin: str, bad_rank: int) -> tuple[list, bool, dict[str, float]]:
    """Two steps in fp16 in which a part that one rank alone has of a gradient is not finite: whether they were taken,
    whether anything has changed, and the loss scale."""
    mesh = meshes.of(dict(pp=2))
    engine = engine_of(mesh, plugin, "fp16")
    before, name = {name: master.clone() for name, master in engine.masters().items()}, "blocks.4.mlp.fc1.weight"

    def spoil() -> None:
        if mesh.rank == bad_rank:
            own = name if name in engine.shapes else "x_embedder.proj.weight"
            engine.gradient_shards()[own].view(-1)[0] = torch.inf

    _, _, finite = train(mesh, engine, EMA(engine, DECAY), steps=2, spoil=spoil)
    same = all(torch.equal(engine.master(name), master) for name, master in before.items())
    return finite, same, engine.scaler_state()


def everything(mesh: Mesh, folder: Path) -> tuple:
    meshes = Meshes()
    runs = [engine_run(meshes.of(sizes), *rest, **how) for sizes, *rest, how in CASES + HALF]
    experts = engine_run(meshes.of(dict(pp=2, ep=2)), "fsdp", "fp32", config=EXPERTS)
    bad = {(p, rank): after_one_bad_gradient(meshes, p, rank) for p in ("ddp", "zero2", "fsdp") for rank in (0, 3)}
    return runs, resumed(meshes, folder), bad, experts


def test_plugins_give_the_curve_of_one_process_and_go_on_from_each_other(tmp_path):
    losses, norms, averages, moments = plain_run()
    results = run_ranks(4, everything, tmp_path)
    for place, case in enumerate(CASES + HALF):
        of_ranks = [runs[place] for runs, *_ in results]
        assert set().union(*(ours for *_, ours, _ in of_ranks)) == SHAPES.keys(), case
        for *_, weights in of_ranks:  # what all stages have stays the same on all of them, bit for bit
            assert (len(weights) == 5) == (dict(*case[:1]).get("pp", 1) > 1), case
            assert all(torch.equal(weight, of_ranks[0][-1][name]) for name, weight in weights.items()), case
    with_experts = plain_run(EXPERTS)
    for runs, different, bad, experts in results:
        assert off_by(experts[0], with_experts[0]) < 1e-5 and off_by(experts[1], with_experts[1]) < 1e-5
        for name, ours in experts[3].items():
            wanted = with_experts[3][name]
            assert (ours - wanted).norm() / wanted.norm() < 1e-4, name
        for case, (curve, of_gradients, means, ours, _) in zip(CASES, runs, strict=False):
            assert off_by(curve, losses) < 1e-5 and off_by(of_gradients, norms) < 1e-5, case
            for name in ours:
                assert (ours[name] - moments[name]).norm() / moments[name].norm() < 1e-4, (case, name)
                assert (means[name] - averages[name]).norm() / averages[name].norm() < 1e-4, (case, name)
        (reference, _, _, first, _), *others = runs[len(CASES) :]
        for case, (curve, _, _, ours, _) in zip(HALF[1:], others, strict=True):
            assert off_by(curve, reference) < 2e-3, case  # 2^-9 relative rounding of weights and activations
            for name in ours:
                assert (ours[name] - first[name]).norm() / first[name].norm() < 0.03, (case, name)
        assert different == []
        for plugin, (finite, same, scaler) in bad.items():
            assert finite == [False, False] and same, plugin
            halved = 2 if plugin[0] == "ddp" else 1  # torch's scaler lets no bad step pass
            assert scaler["scale"] == 2.0 ** (16 - halved), (plugin, scaler)
