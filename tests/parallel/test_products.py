"""Engines under all combinations of tensor, pipeline, sequence and expert parallelism are compared with one process.

The tests cover loss curves, averages, moments, resumption under another combination, and non-finite gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opendit.checkpoint.ema import EMA
from opendit.checkpoint.load import find_checkpoint, load_checkpoint
from opendit.checkpoint.save import Checkpoints
from opendit.config.parallel_sizes import ParallelDims
from opendit.models.conditioning import TextCondition, give, give_beside
from opendit.models.dit import DiT, DiTConfig
from opendit.models.families.public_config import public_config
from opendit.models.finetuning import Lora, add_lora
from opendit.models.zoo import build_model, empty_model, plan_of
from opendit.parallel.apply import apply_parallel
from opendit.parallel.engines import MOMENTS, Engine, build_engine
from opendit.parallel.experts import expert_group
from opendit.parallel.fsdp import Sharding
from opendit.parallel.mesh import Mesh, init_mesh
from opendit.parallel.pipeline import mesh_stages
from opendit.parallel.tensor import tensor_group
from opendit.training.micro_batch import MicroBatch
from opendit.training.runners import build_runner
from tests.models.families.oracles import COSMOS2, FLUX, FLUX2, LTX, WAN, Z_IMAGE, randomise
from tests.models.test_dit import randomised
from tests.numbers import off_by
from tests.objectives import SquaredError
from tests.parallel import test_axial, test_sequence
from tests.parallel.tensor.models import MODELS
from tests.ranks import run_ranks
from train import EagerPasses

RANKS, SAMPLES, CLIP, LR, DECAY = 4, 16, 0.2, 2e-3, 0.7
# Without qk_norm the keys' bias has a gradient of rounding noise. 5 blocks make unequal stages.
CONFIGS: dict[str, DiTConfig] = {
    "dense": replace(MODELS["DiT"], qk_norm=True),
    "deep": replace(MODELS["DiT"], depth=5, qk_norm=True),
    "experts": replace(MODELS["EC-DiT"], depth=3, qk_norm=True),
    # Heads have 6 channels, so 4 ranks can't divide the weights of their norms evenly.
    "odd": DiTConfig((6, 10), 2, 3, 36, depth=3, num_heads=6, num_classes=5, qk_norm=True),
    "axial": replace(MODELS["ST-DiT"], text=None, num_classes=5, full_attention=False),
    # Public models; 2 ranks can't share their media and caption tokens evenly.
    "flux": public_config("flux", FLUX, (6, 10), 7),
    "flux2": public_config("flux2", FLUX2, (3, 5), 7),
    "z_image": public_config("z_image", Z_IMAGE | dict(n_heads=2, axes_dims=[4, 6, 8]), (6, 10), 40),
    "wan": public_config("wan", WAN | dict(num_layers=3), (3, 6, 10), 5, {"expand_timesteps": True}),
    "ltx": public_config("ltx", LTX | dict(num_attention_heads=4, cross_attention_dim=40), (3, 3, 5), 5),
    "cosmos2": public_config("cosmos2", COSMOS2, (6, 10), 5),
}
CONFIGS |= {f"{name}, LoRA": config for name, config in CONFIGS.items()}
PICTURES = dict(num_layers=3, in_channels=12, image_dim=6, added_kv_proj_dim=28)  # image to video
CONFIGS["wan, LoRA"] = public_config("wan", WAN | PICTURES, (3, 6, 10), 5)
PUBLIC = ("flux", "z_image", "wan")
# Layers of every rule inside and outside the blocks. Every pipeline stage has the fully trained layer.
TARGETS = "attn.*", "cross_attn.*:2", "fc1", "fc2", "adaLN_modulation.*:4"
BESIDE = "media_refiner.**", "text_refiner.**:2", "final_layer.linear:1"
LORA = Lora(3, 18.0, "", TARGETS + BESIDE)
WITH_LORA = {"t_embedder.mlp.2.weight"}


@dataclass(frozen=True)
class Case:
    """A training setup on 4 ranks.

    Attributes:
        sizes: the mesh sizes for ParallelDims.
        kind: the type of sequence parallelism.
        how: arguments of apply_parallel.
    """

    sizes: dict[str, int]
    plugin: str
    model: str = "dense"
    precision: str = "fp32"
    micro_batches: int = 1
    kind: str = "ulysses"
    schedule: str = "1f1b"
    sharding: Sharding = Sharding()
    how: dict[str, Any] = field(default_factory=dict)


CHECKPOINTED, FREED = dict(grad_checkpoint=True), Sharding(keep_gathered=False, keep_gradients=False)
PIPELINE = dict(model="deep", micro_batches=4)
INTERLEAVED = dict(PIPELINE, schedule="interleaved")
EXPERTS = dict(model="experts", sharding=FREED)
SEQUENCE = dict(model="odd")
AXIAL = dict(model="axial", sharding=FREED)
HALF = dict(precision="bf16")
LORA_CASES = [
    Case(dict(tp=2), "ddp", "dense, LoRA", micro_batches=2, how=dict(recompute="half")),
    Case(dict(tp=2), "fsdp", "dense, LoRA", sharding=FREED),
    Case(dict(tp=2, sp=2), "zero2", "dense, LoRA", kind="fastseq"),
    Case(dict(sp=4), "zero2", "dense, LoRA", kind="usp"),
    Case(dict(pp=2), "fsdp", "deep, LoRA", micro_batches=4, schedule="interleaved", how=CHECKPOINTED),
    Case(dict(pp=2, tp=2), "zero2", "deep, LoRA", micro_batches=4),
    Case(dict(ep=2, sp=2), "fsdp", "experts, LoRA", sharding=FREED),
    Case(dict(sp=2, tp=2), "zero2", "axial, LoRA"),
    Case(dict(tp=2), "fsdp", "flux, LoRA", sharding=FREED),
    Case(dict(tp=2), "zero2", "wan, LoRA"),
    Case(dict(pp=2, tp=2), "zero2", "z_image, LoRA", micro_batches=4),
    Case(dict(sp=2), "fsdp", "z_image, LoRA", sharding=FREED),
]
CASES = {
    "tensor": [
        Case(dict(tp=2), "ddp", micro_batches=2, how=dict(recompute="half")),
        Case(dict(tp=2), "zero2", micro_batches=2, how=CHECKPOINTED),
        Case(dict(tp=4), "zero2"),
        Case(dict(tp=2), "fsdp", micro_batches=2, sharding=FREED),
        Case(dict(tp=4), "fsdp", sharding=FREED, how=CHECKPOINTED),
        Case(dict(tp=2, dp_replicate=2), "fsdp", sharding=FREED),
        Case(dict(tp=2, sp=2), "zero2"),
    ],
    "pipeline": [
        Case(dict(pp=2), "zero2", **PIPELINE, how=dict(recompute="half")),
        Case(dict(pp=2), "ddp", **PIPELINE, how=CHECKPOINTED),
        Case(dict(pp=2), "fsdp", **PIPELINE),
        Case(dict(pp=2), "fsdp", **INTERLEAVED, sharding=FREED, how=CHECKPOINTED),
        Case(dict(pp=2), "zero2", **INTERLEAVED),
        Case(dict(pp=4), "fsdp", **PIPELINE),
        Case(dict(pp=2, tp=2), "ddp", **PIPELINE),
        Case(dict(pp=2, sp=2), "fsdp", **INTERLEAVED),
        Case(dict(pp=2, ep=2), "fsdp", **PIPELINE | dict(model="experts")),
    ],
    "sequence": [
        Case(dict(sp=2), "zero2", **SEQUENCE, kind="fastseq"),
        Case(dict(sp=2), "zero2", **SEQUENCE, kind="ulysses", how=CHECKPOINTED),
        Case(dict(sp=2), "zero2", **SEQUENCE, kind="ring", how=CHECKPOINTED),
        Case(dict(sp=4), "zero2", **SEQUENCE, kind="usp"),
        Case(dict(sp=2), "zero2", **SEQUENCE, kind="direct ulysses in groups", how=CHECKPOINTED),
        Case(dict(sp=2), "zero2", **SEQUENCE, kind="direct fastseq", how=CHECKPOINTED),
        Case(dict(sp=2), "ddp", **SEQUENCE, kind="direct fastseq"),
        Case(dict(sp=2), "ddp", **SEQUENCE, kind="fastseq", how=CHECKPOINTED),
        Case(dict(sp=2), "ddp", **SEQUENCE, kind="ring"),
    ],
    "experts": [
        Case(dict(ep=2), "fsdp", **EXPERTS),
        Case(dict(ep=4), "fsdp", **EXPERTS, how=CHECKPOINTED),
        Case(dict(ep=2, sp=2), "fsdp", **EXPERTS, micro_batches=2),
        Case(dict(ep=4, sp=2), "fsdp", **EXPERTS, how=CHECKPOINTED),
        Case(dict(ep=2, dp_replicate=2), "fsdp", **EXPERTS),
    ],
    "axial": [
        Case(dict(sp=4), "zero2", **AXIAL),
        Case(dict(sp=2), "fsdp", **AXIAL, how=CHECKPOINTED),
        Case(dict(sp=2, dp_replicate=2), "fsdp", **AXIAL, how=dict(recompute="half")),
        Case(dict(sp=2, tp=2), "fsdp", **AXIAL),
        Case(dict(sp=2, tp=2), "zero2", **AXIAL, how=dict(recompute="cheap")),
    ],
    "LoRA": LORA_CASES,
    **{
        name: [
            Case(dict(tp=2), "fsdp", model=other, sharding=FREED, micro_batches=2),
            Case(dict(sp=2), "zero2", model=name, how=CHECKPOINTED),
            Case(dict(pp=2), "fsdp", model=name, micro_batches=4, sharding=FREED, how=CHECKPOINTED),
            Case(dict(pp=2, tp=2), "zero2", model=other, micro_batches=4),
            # Rotations cover all heads' channels; a rank holds those for its tokens and heads.
            *([Case(dict(sp=2, tp=2), "zero2", model="ltx")] if name == "wan" else []),
            # Low-rank modulation, and captions that are narrower than the blocks.
            *([Case(dict(pp=2, tp=2), "zero2", model="cosmos2", micro_batches=4)] if name == "wan" else []),
        ]
        for name in PUBLIC
        for other in ("flux2" if name == "flux" else name,)  # FLUX.2 also has shared modulation
    },
}
# One case for each kind of parallelism and plugin; the complete lists take longer.
CASES["some"] = [
    *(CASES["tensor"][place] for place in (0, 3, 6)),
    *(CASES["pipeline"][place] for place in (0, 3, 6, 8)),
    CASES["sequence"][0],
    CASES["experts"][2],
    LORA_CASES[4],
    *(CASES["flux"][place] for place in (0, 3)),
]
# Half precision is compared with zero2 without other parallelism, the first case of each list.
HALF_CASES = {
    "tensor": [
        Case({}, "zero2", **HALF),
        *(Case(dict(tp=2), plugin, **HALF, sharding=FREED) for plugin in ("zero2", "fsdp", "ddp")),
    ],
    "pipeline": [
        Case({}, "zero2", **HALF, **PIPELINE),
        *(Case(dict(pp=2), plugin, precision="fp16", **PIPELINE) for plugin in ("zero2", "fsdp", "ddp")),
        Case(dict(pp=2, tp=2), "zero2", **HALF, **PIPELINE),
        Case(dict(pp=4), "zero2", **HALF, **PIPELINE),
    ],
    "sequence": [
        Case({}, "zero2", **HALF, **SEQUENCE),
        Case(dict(sp=2), "zero2", **HALF, **SEQUENCE, kind="fastseq"),
        Case(dict(sp=2), "gemini", **HALF, **SEQUENCE, kind="fastseq", how=CHECKPOINTED),
        Case(dict(sp=2), "gemini", **HALF, **SEQUENCE, kind="ulysses"),
        Case(dict(sp=2), "gemini", **HALF, **SEQUENCE, kind="direct ulysses in groups", how=CHECKPOINTED),
        Case(dict(sp=2), "gemini", **HALF, **SEQUENCE, kind="direct fastseq"),
        Case(dict(sp=2), "gemini", **HALF, **SEQUENCE, kind="ring", how=CHECKPOINTED),
        Case(dict(sp=4), "gemini", **HALF, **SEQUENCE, kind="usp"),
    ],
    **dict.fromkeys(("experts", "axial", "LoRA", *PUBLIC), []),
    "some": [
        Case({}, "zero2", **HALF, **PIPELINE),
        Case(dict(tp=2), "fsdp", model="deep", **HALF, sharding=FREED),
        Case(dict(pp=2), "zero2", precision="fp16", **PIPELINE),
    ],
}
# (saved case, whether the checkpoint is sharded, setups that resume it).
RESUMED = {
    "dense": [
        (Case(dict(tp=2), "zero2", model="deep"), True, [(dict(), "fsdp"), (dict(tp=4), "ddp"), (dict(pp=4), "ddp")]),
        (Case(dict(tp=4), "zero2", model="deep"), False, [(dict(tp=2), "fsdp"), (dict(), "zero2")]),
        (Case(dict(tp=2), "fsdp", model="deep"), True, [(dict(tp=4), "zero2")]),
        (Case(dict(), "ddp", model="deep"), True, [(dict(tp=2), "zero2"), (dict(tp=2, dp_replicate=2), "fsdp")]),
    ],
    "pipeline": [
        (Case(dict(pp=2), "zero2", **PIPELINE), True, [(dict(), "fsdp"), (dict(pp=4), "ddp")]),
        (Case(dict(pp=2), "fsdp", **PIPELINE), True, [(dict(pp=2, tp=2), "zero2")]),
        (Case(dict(tp=2), "ddp", model="deep"), True, [(dict(pp=2), "fsdp"), (dict(pp=4), "zero2")]),
    ],
    "experts": [
        (Case(dict(ep=2), "fsdp", **EXPERTS), True, [(dict(ep=4), "fsdp"), (dict(), "zero2")]),
        (Case(dict(ep=4), "fsdp", **EXPERTS), False, [(dict(ep=2, sp=2), "fsdp"), (dict(tp=2), "fsdp")]),
        (Case(dict(), "zero2", **EXPERTS), True, [(dict(ep=2, dp_replicate=2), "fsdp")]),
    ],
}
# fp16 cases, and the ranks with an infinite gradient. Under ddp, all replicas have it.
BAD = [
    (Case(dict(tp=2), "ddp", precision="fp16"), (1, 3)),
    (Case(dict(tp=2), "zero2", precision="fp16"), (3,)),
    (Case(dict(tp=2), "fsdp", precision="fp16"), (3,)),
    *((Case(dict(pp=2), plugin, precision="fp16", **PIPELINE), (rank,))
      for plugin in ("ddp", "zero2", "fsdp") for rank in (0, 3)),
    (Case(dict(ep=2), "fsdp", precision="fp16", **EXPERTS), (3,)),
]  # fmt: skip


def made(name: str, build: Callable[[DiTConfig], DiT] = build_model) -> DiT:
    """Build a model, with LoRA if its name says so."""
    model = build(CONFIGS[name])
    if name.endswith("LoRA"):
        add_lora(model, LORA, WITH_LORA, seed=0)
    return model


def weights_of(model: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    built = randomised(made(model))
    if is_public(model):  # the usual initialisation is too small: gradients would be rounding noise
        randomise(built, std=0.05)
    return {name: p.detach() for name, p in built.named_parameters()}


def steps_of(model: str) -> int:
    if model == "z_image, LoRA":  # rounding errors grow tenfold with each step
        return 2
    return 8 if model.endswith("LoRA") else 3


def is_public(model: str) -> bool:
    return model.startswith((*PUBLIC, "ltx", "cosmos2"))


def samples(model: str, step: int, some: slice) -> MicroBatch:
    generator = torch.Generator().manual_seed(step)
    x, noise = torch.randn(2, SAMPLES, CONFIGS[model].in_channels, *CONFIGS[model].input_size, generator=generator)
    t, y = torch.randint(1000, (SAMPLES,), generator=generator), torch.randint(6, (SAMPLES,), generator=generator)
    if is_public(model):
        y = captions_of(model, generator)
    given = None
    if in_place := CONFIGS[model].given_in_place:  # some first frames are given, with another timestep
        given = give(x, torch.randint(2, (SAMPLES,), generator=generator))[some]
    elif CONFIGS[model].given_beside:
        given = give_beside(torch.randn(x.shape, generator=generator))[some]
        y = replace(y, pooled=torch.randn(SAMPLES, 5, 6, generator=generator))
    return MicroBatch.of(x[some], t[some], noise[some], y[some], given, in_place)


def captions_of(model: str, generator: torch.Generator) -> TextCondition:
    """Make captions of random lengths, one per sample."""
    config = CONFIGS[model]
    most, pooled = config.text.max_tokens, config.spec.text.pooled
    lengths = torch.randint(most if model.startswith("flux") else 1, most + 1, (SAMPLES, 1), generator=generator)
    mask = torch.arange(most) < lengths
    tokens = torch.randn(SAMPLES, most, config.text.width, generator=generator) * mask.unsqueeze(-1)
    guidance = torch.linspace(1, 4, SAMPLES) if model.startswith("flux") else None
    return TextCondition(tokens, mask, torch.randn(SAMPLES, pooled, generator=generator), guidance)


def plain_run(name: str) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return losses, norms, averages and first moments from one process in fp32 with torch's AdamW.

    A first moment is a mean of clipped gradients, so a wrong scale shows in it.
    """
    model, objective, losses, norms = made(name), SquaredError(), [], []
    model.load_state_dict(weights_of(name), strict=False)
    trained = {each: p for each, p in model.named_parameters() if p.requires_grad}
    adam = torch.optim.AdamW(trained.values(), lr=LR, weight_decay=0.01)
    averages = {each: p.detach().clone() for each, p in trained.items()}
    for step in range(steps_of(name)):
        batch = samples(name, step, slice(None))
        prepared = objective.prepare(batch.x0, batch.t, batch.noise)
        inputs, condition = batch.network_inputs(prepared.x_t, prepared.timestep)
        loss = batch.losses(objective, model(*inputs, **condition), prepared).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        assert norms[-1] > CLIP
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
        for each, p in trained.items():
            averages[each].lerp_(p.detach(), 1 - DECAY)
    return losses, norms, averages, {each: adam.state[p]["exp_avg"] for each, p in trained.items()}


class Meshes(dict):
    """Creates each mesh of 4 ranks once."""

    def of(self, sizes: dict[str, int]) -> Mesh:
        key = tuple(sizes.items())
        if key not in self:
            self[key] = init_mesh(dims=ParallelDims.fill(RANKS, **sizes))
        return self[key]


def engine_of(mesh: Mesh, case: Case, empty: bool = False) -> Engine:
    """Build the engine of a case with the weights of ``weights_of``, or with all weights -1."""
    config, full = CONFIGS[case.model], weights_of(case.model)
    model = made(case.model, empty_model)
    sequence = None
    if mesh.sp_size > 1 and case.model.startswith("axial"):
        sequence = test_axial.strategy(mesh, config)
    elif mesh.sp_size > 1:
        sequence = test_sequence.strategy(mesh, case.kind, config)
    stages = mesh_stages(mesh, config, case.schedule)
    groups = dict(tensor=tensor_group(mesh), experts=expert_group(mesh))
    apply_parallel(model, sequence=sequence, stages=stages, **groups, **case.how)
    settings = dict(lr=LR, weight_decay=0.01, grad_clip=CLIP, grad_accumulation=case.micro_batches)
    settings |= dict(plugin=case.plugin, precision=case.precision, sharding=case.sharding)

    def initial(name, shard) -> Tensor:
        return torch.full(shard.shape, -1.0) if empty else shard.take(full[name])

    return build_engine(model, mesh, initial=initial, **settings)


def train(mesh: Mesh, case: Case, engine: Engine, ema: EMA, steps: range, spoil=lambda: None):
    """Return the losses and gradient norms of these steps, and which steps were finite."""
    runner, losses, norms, finite = build_runner(EagerPasses(engine, SquaredError(), case.micro_batches)), [], [], []
    share = SAMPLES // case.micro_batches // mesh.dp_size
    for step in steps:
        starts = [(number * mesh.dp_size + mesh.dp_rank) * share for number in range(case.micro_batches)]
        micro_batches = (samples(case.model, step, slice(start, start + share)) for start in starts)
        loss = runner.passes(micro_batches)
        spoil()
        result = replace(engine.step(), loss=mesh.sum(loss, "pp"))
        ema.update(result.finite)
        losses.append((mesh.sum(result.loss.clone()) / mesh.world_size).item())
        norms.append(result.grad_norm.item())
        finite.append(bool(result.finite))
    return losses, norms, finite


def gathered(engine: Engine, shards: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: engine.layout.gather(name, shard).clone() for name, shard in shards.items()}


def engine_run(mesh: Mesh, case: Case):
    engine = engine_of(mesh, case)
    ema = EMA(engine, DECAY)
    losses, norms, finite = train(
        mesh, case, engine, ema, range(steps_of(case.model) if case.precision == "fp32" else 2)
    )
    assert all(finite), case
    moments = gathered(engine, {name: engine.moments(name)["exp_avg"] for name in engine.shapes})
    shared = gathered(engine, {name: engine.master(name) for name in engine.shared if name in engine.shapes})
    return losses, norms, {name: full.clone() for name, full in ema.gather()}, moments, shared


def all_runs(mesh: Mesh, cases: list[Case]) -> list[tuple]:
    meshes = Meshes()
    return [engine_run(meshes.of(case.sizes), case) for case in cases]


def off(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("kind", CASES)
def test_curves_averages_and_moments_are_those_of_one_process(kind):
    exact, half = CASES[kind], HALF_CASES[kind]
    plain = {name: plain_run(name) for name in {case.model for case in exact}}
    results = run_ranks(RANKS, all_runs, exact + half)
    for number, case in enumerate(exact + half):
        of_ranks = [runs[number] for runs in results]
        names = {name for name, p in made(case.model).named_parameters() if p.requires_grad}
        assert set().union(*(moments for *_, moments, _ in of_ranks)) == names, case
        every = plan_of(CONFIGS[case.model]).stages.every if case.sizes.get("pp", 1) > 1 else ()
        for *_, shared in of_ranks:  # parameters on every stage stay bitwise equal on all of them
            assert shared.keys() == {name for name in names if name.partition(".")[0] in every}, case
            assert all(torch.equal(weight, of_ranks[0][-1][name]) for name, weight in shared.items()), case
    for runs in results:
        for case, (curve, of_gradients, means, ours, _) in zip(exact, runs, strict=False):
            losses, norms, averages, moments = plain[case.model]
            bound = 2e-5 if case.model.endswith("LoRA") else 1e-5
            assert off_by(curve, losses) < bound and off_by(of_gradients, norms) < bound, case
            bound = 3e-4 if is_public(case.model) else 1e-4  # small gradients are sums of larger terms
            for name in ours:
                assert off(ours[name], moments[name]) < bound, (case, name)
                assert off(means[name], averages[name]) < bound, (case, name)
        (reference, _, _, first, _), *others = runs[len(exact) :] or [[None] * 5]
        for case, (curve, _, _, ours, _) in zip(half[1:], others, strict=True):
            assert off_by(curve, reference) < 2e-3, case  # bf16 rounds weights and activations by up to 2^-9
            for name in ours:
                assert off(ours[name], first[name]) < 0.03, (case, name)  # 0.013 measured


def state_of(mesh: Mesh, engine: Engine, ema: EMA) -> dict[str, Tensor]:
    """Gather the complete state from all stages."""
    state = {f"model.{name}": full for name, full in gathered(engine, engine.masters()).items()}
    for key in MOMENTS:
        full = gathered(engine, {name: engine.moments(name)[key] for name in engine.shapes})
        state |= {f"{key}.{name}": moment for name, moment in full.items()}
    state |= {f"ema.{name}": full.clone() for name, full in ema.gather()}
    parts = [None] * mesh.world_size
    torch.distributed.all_gather_object(parts, state, group=torch.distributed.group.WORLD)
    return {name: tensor for part in parts for name, tensor in part.items()}


def resumed(mesh: Mesh, folder: Path, saves: list[tuple]) -> list:
    """Return differences between saved and resumed states; the list should be empty."""
    different, meshes = [], Meshes()
    for number, (case, sharded, others) in enumerate(saves):
        mesh, config = meshes.of(case.sizes), CONFIGS[case.model]
        engine = engine_of(mesh, case)
        ema, where = EMA(engine, DECAY), folder / str(number)
        train(mesh, case, engine, ema, range(2))
        info, saved = {"model": "DiT-Ti/2", "config": config.to_dict()}, state_of(mesh, engine, ema)
        shapes = {f"ema.{name}": p.shape for name, p in build_model(config).named_parameters()}
        assert {name: full.shape for name, full in saved.items() if name.startswith("ema.")} == shapes
        with Checkpoints(where / "checkpoints", engine, ema, info, sharded=sharded) as checkpoints:
            checkpoints.save({"step": 2, "epoch": 0, "skipped": 0, "fingerprint": {}})
        assert not checkpoints.failures
        for sizes, plugin in others:
            other, mesh = replace(case, sizes=sizes, plugin=plugin, micro_batches=4), meshes.of(sizes)
            engine = engine_of(mesh, other, empty=True)
            ema = EMA(engine, DECAY)
            load_checkpoint(find_checkpoint(str(where), "", "DiT-Ti/2", mesh), engine, ema)
            found = state_of(mesh, engine, ema)
            wrong = [name for name in found if not torch.equal(found[name], saved[name])]
            missing = saved.keys() - found.keys()
            different += [(case, other, wrong, missing)] if wrong or missing else []
            train(mesh, other, engine, ema, range(2, 3))
    return different


@pytest.mark.parametrize("kind", RESUMED)
def test_a_checkpoint_is_resumed_under_any_other_product(kind, tmp_path):
    assert run_ranks(RANKS, resumed, tmp_path, RESUMED[kind]) == [[]] * RANKS


def after_bad_gradients(mesh: Mesh, cases: list) -> list[tuple[list, bool, dict[str, float]]]:
    """Take two steps per case; return which were finite, whether the weights are unchanged, and the scaler's state."""
    found, meshes = [], Meshes()
    for case, ranks in cases:
        mesh = meshes.of(case.sizes)
        engine = engine_of(mesh, case)
        before = {name: master.clone() for name, master in engine.masters().items()}
        last = f"blocks.{CONFIGS[case.model].depth - 1}.mlp."
        last += "expert_fc2" if case.model == "experts" else "fc1.weight"
        bad = last if last in engine.shapes else "x_embedder.proj.weight"

        def spoil(engine=engine, bad=bad, here=mesh.rank in ranks) -> None:
            if here:
                engine.gradient_shards()[bad].view(-1)[0] = torch.inf

        _, _, finite = train(mesh, case, engine, EMA(engine, DECAY), range(2), spoil)
        same = all(torch.equal(engine.master(name), master) for name, master in before.items())
        found.append((finite, same, engine.scaler_state()))
    return found


@pytest.mark.parametrize("cases", [BAD[::3], BAD[1::3] + BAD[2::3]], ids=["some", "others"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(cases):
    for rank in run_ranks(RANKS, after_bad_gradients, cases):
        for (case, _), (finite, same, scaler) in zip(cases, rank, strict=True):
            assert finite == [False, False] and same, case
            halved = 2 if case.plugin == "ddp" else 1  # torch's scaler halves at every bad step
            assert scaler["scale"] == 2.0 ** (16 - halved), (case, scaler)
